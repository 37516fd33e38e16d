/*
 * A box of a row-major payload, and where its elements lie in memory.
 *
 * Saving gathers a strided tensor into the payload; loading scatters (a slice
 * of) the payload into a strided tensor. Both are the same walk over the box,
 * clipped to the bytes that are in the buffer at hand.
 */
#ifndef DCPRING_REGION_H
#define DCPRING_REGION_H

#include "record/record.h"

/* Dimensions are merged where both sides allow it, so `ndim` is as small as can be. */
struct dr_region {
    uint8_t *memory;
    uint64_t first; /* payload offset of the box's first byte */
    uint64_t run;   /* bytes that are contiguous on both sides */
    int ndim;
    struct dr_axis {
        uint64_t count;
        uint64_t payload_stride; /* bytes; always positive, outermost axis first */
        int64_t memory_stride;   /* bytes */
    } axes[DR_MAX_DIMS];
};

/*
 * The box at `offsets` with `lengths` of a payload of shape `chunk`; memory
 * has `strides` in elements for the box's axes. offsets NULL means zeros.
 */
void dr_region_init(struct dr_region *region, const struct dr_shape *chunk, const int64_t *offsets,
                    const int64_t *lengths, void *memory, const int64_t *strides);

/* Bytes of the box itself. */
uint64_t dr_region_bytes(const struct dr_region *region);

/* Copies between `buffer`, which holds the payload bytes [lo, hi), and memory, whatever of the box lies in there. */
void dr_region_gather(const struct dr_region *region, uint64_t lo, uint64_t hi, uint8_t *buffer);
void dr_region_scatter(const struct dr_region *region, uint64_t lo, uint64_t hi, const uint8_t *buffer);

/*
 * Splits the box into its stretches of payload, joined where the gap is at
 * most max_gap; calls emit(context, lo, hi) for each in order. A nonzero
 * return stops it and is returned.
 */
int dr_region_stretches(const struct dr_region *region, uint64_t max_gap,
                        int (*emit)(void *context, uint64_t lo, uint64_t hi), void *context);

/* Whether at most half of the bytes from the box's first to its last are its own, by gaps of at most max_gap. */
bool dr_region_has_gaps(const struct dr_region *region, uint64_t max_gap);

#endif
