/* What the processor at hand can do, for the loops that are written for it beside the plain ones. */
#ifndef DCPRING_PROCESSOR_H
#define DCPRING_PROCESSOR_H

#include <stdbool.h>

/* Which loops are taken: NONE is for tests. */
enum dr_simd { DR_SIMD_BEST, DR_SIMD_NONE };

/* AVX2 and F16C. */
bool dr_has_avx2(void);

#endif
