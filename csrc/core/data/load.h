/*
 * Reading: from slices of stored payloads to strided memory.
 *
 * Every wanted slice becomes byte extents of a file; extents that touch or lie
 * near each other are merged, over all slices, so that each byte is read once;
 * the result is cut into blocks on the CRC grid. Workers read blocks, many in
 * flight, check the CRC of every CRC block that is wholly there, and scatter.
 *
 * All that can be checked without reading payloads is checked first: that the
 * files that reads refer to are there and long enough, and that slices, shapes
 * and sizes fit.
 * Quantised tensors are made of the bytes instead of a copy.
 * Blocks that the page cache holds are read through it, others directly; those of
 * which little is wanted are used where it has them, without a copy
 * (load_mapped.h).
 */
#ifndef DCPRING_LOAD_H
#define DCPRING_LOAD_H

#include "io/stream.h"
#include "record/record.h"

/* A gap up to this inside one slice is read over rather than skipped: one large read is cheaper than two. */
#define DR_SLICE_GAP ((uint64_t)128 * 1024)

struct dr_read {
    size_t file; /* of the input */
    uint64_t payload_offset, payload_size;
    struct dr_shape chunk;            /* what is stored */
    const int64_t *offsets, *lengths; /* the slice wanted, chunk.ndim of each */
    void *memory;                     /* where it goes */
    const int64_t *strides;           /* of memory, in elements */
    const uint8_t *crcs;              /* dr_crc_count() little-endian CRCs, or NULL */
    bool has_whole_crc;               /* of a payload without block CRCs: checked when all of it is read */
    uint32_t whole_crc;
    const struct dr_quantised *quantised; /* what is made of the bytes (dequantise.h); NULL: they are copied */
    bool touched;                         /* out: memory was written to */
};

int dr_load(struct dr_input *input, struct dr_read *reads, size_t read_count, const struct dr_options *options,
            const struct dr_control *control, struct dr_stream_stats *stats, struct dr_error *error);

#endif
