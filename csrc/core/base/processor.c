/* Asking the processor. See processor.h. */
#include "base/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdatomic.h>

static bool ask_for_avx2(void) {
    unsigned a, b, c, d, system = 0;
    const unsigned needed = bit_OSXSAVE | bit_AVX | bit_F16C;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed)
        return false;
    __asm__("xgetbv" : "=a"(system), "=d"(d) : "c"(0)); /* which registers the system keeps */
    return (system & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

/* Asked once: under a hypervisor the answer takes microseconds. */
bool dr_has_avx2(void) {
    static atomic_int known; /* 1: no, 2: yes */
    int found = atomic_load_explicit(&known, memory_order_relaxed);
    if (found == 0) {
        found = ask_for_avx2() ? 2 : 1;
        atomic_store_explicit(&known, found, memory_order_relaxed);
    }
    return found == 2;
}
#else
bool dr_has_avx2(void) { return false; }
#endif
