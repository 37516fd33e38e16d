/* Ranges of bytes: what direct I/O wants of them, rounding to it, and what two have in common. */
#ifndef DCPRING_ALIGN_H
#define DCPRING_ALIGN_H

#include <stdbool.h>
#include <stdint.h>

/* The alignment of file offsets, lengths and buffers for direct I/O. */
#define DR_ALIGNMENT 4096u

static inline uint64_t dr_align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

static inline uint64_t dr_align_down(uint64_t value, uint64_t alignment) { return value / alignment * alignment; }

/* Narrows [*lo, *hi) to its part of [begin, end); false where there is none. */
static inline bool dr_clip(uint64_t begin, uint64_t end, uint64_t *lo, uint64_t *hi) {
    *lo = begin > *lo ? begin : *lo;
    *hi = end < *hi ? end : *hi;
    return *lo < *hi;
}

#endif
