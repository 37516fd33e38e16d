/*
 * One tensor as a complete `torch.save` archive: a zip of stored entries
 *
 *     archive/data.pkl  archive/byteorder  archive/version  archive/data/0
 *
 * followed by the payload's data descriptor and the central directory. The
 * payload is the tensor's elements in row-major order. docs/format.md has it
 * byte by byte. An object without tensors is the same without a payload, and
 * with its own pickle.
 *
 * The encoder needs only shape and offsets, so heads and tails are made again
 * wherever a part of one is needed, and never stored.
 */
#ifndef DCPRING_RECORD_H
#define DCPRING_RECORD_H

#include "base/dtype.h"
#include "record/archive.h"

#include <stdbool.h>

enum { DR_MAX_DIMS = 64, DR_RECORD_HEAD_MAX = 12288, DR_RECORD_TAIL_MAX = 1024 };

/* Payloads of at least this size start on a DR_ALIGNMENT boundary, smaller ones on DR_SMALL_ALIGNMENT. */
#define DR_LARGE_PAYLOAD ((uint64_t)1 << 20)
#define DR_SMALL_ALIGNMENT 64u

struct dr_shape {
    const struct dr_dtype *dtype;
    int ndim;
    const int64_t *sizes; /* elements */
};

/* Bytes of the shape's elements; false on overflow or a negative size. */
bool dr_shape_bytes(const struct dr_shape *shape, uint64_t *bytes);

/*
 * Everything before the payload, for a record at file offset `offset`.
 * Returns its length; the payload starts right behind it.
 */
size_t dr_record_head(const struct dr_shape *shape, uint64_t offset, uint8_t out[DR_RECORD_HEAD_MAX]);

/* Everything after the payload. head_size is what dr_record_head returned. */
size_t dr_record_tail(const struct dr_shape *shape, uint64_t offset, size_t head_size, uint32_t payload_crc,
                      uint8_t out[DR_RECORD_TAIL_MAX]);

/* The length of that tail; it does not depend on the CRC. */
size_t dr_record_tail_size(const struct dr_shape *shape, size_t head_size);

enum { DR_OBJECT_AROUND_MAX = 512 };

/* What comes before a pickle of `size` bytes, and behind it. Both return their lengths. */
size_t dr_object_head(uint64_t size, uint32_t crc, uint8_t out[DR_OBJECT_AROUND_MAX]);
size_t dr_object_tail(uint64_t size, uint32_t crc, uint8_t out[DR_OBJECT_AROUND_MAX]);

struct dr_located {
    bool plain; /* one contiguous little-endian tensor, stored as above; the rest is only set then */
    uint64_t payload_offset, payload_size; /* in the file */
    uint32_t crc;
    const struct dr_dtype *dtype;
    int ndim;
    int64_t sizes[DR_MAX_DIMS];
};

/*
 * Finds the payload of the record at [offset, offset + length), whoever wrote
 * it. A record of another kind is not an error: out->plain is false then.
 */
int dr_record_locate(struct dr_view *view, uint64_t offset, uint64_t length, struct dr_located *out,
                     struct dr_error *error);

#endif
