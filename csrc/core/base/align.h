/* What direct I/O wants, and rounding to it. */
#ifndef DCPRING_ALIGN_H
#define DCPRING_ALIGN_H

#include <stdint.h>

/* The alignment of file offsets, lengths and buffers for direct I/O. */
#define DR_ALIGNMENT 4096u

static inline uint64_t dr_align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

static inline uint64_t dr_align_down(uint64_t value, uint64_t alignment) { return value / alignment * alignment; }

#endif
