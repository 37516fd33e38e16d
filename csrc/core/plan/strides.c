/* Strides in the encoding of a tensor's properties. See strides.h. */
#include "plan/strides.h"

#include <string.h>

enum { FLAGS = 3 }; /* bytes between the layout's name and the strides */

/* Whether these are the strides that torch gives a contiguous tensor; a dimension of 0 counts as 1. */
static bool is_contiguous(const int64_t *lengths, const int64_t *strides, int ndim) {
    int64_t step = 1;
    for (int d = ndim; d-- > 0;) {
        if (strides[d] != step)
            return false;
        if (lengths[d] > 1 && __builtin_mul_overflow(step, lengths[d], &step))
            return false;
    }
    return true;
}

size_t dr_strides_encode(const int64_t *lengths, const int64_t *strides, int ndim, char *out) {
    size_t size = 0;
    if (is_contiguous(lengths, strides, ndim)) {
        out[size++] = DR_CONTIGUOUS;
        return size;
    }
    out[size++] = DR_STRIDED;
    for (int d = 0; d < ndim; d++)
        size += dr_put_varint((uint8_t *)out + size, (uint64_t)strides[d]);
    return size;
}

/* The encoded strides; empty where there are none. */
static struct dr_bytes encoded(const struct dr_properties *properties) {
    const char *end = properties->encoding + properties->size;
    const char *layout = properties->encoding + properties->dtype_size + 1;
    const char *zero = layout < end ? memchr(layout, 0, (size_t)(end - layout)) : NULL;
    const char *at = zero && end - zero > FLAGS ? zero + 1 + FLAGS : end;
    return (struct dr_bytes){(const uint8_t *)at, (const uint8_t *)end, false};
}

enum dr_stride_kind dr_row_strides(const struct dr_table *table, const struct dr_row *row,
                                   int64_t strides[DR_TABLE_MAX_DIMS]) {
    struct dr_bytes bytes = encoded(&table->properties[row->properties]);
    const uint8_t *kind = dr_bytes_take(&bytes, 1);
    if (!kind || *kind != DR_STRIDED)
        return kind && *kind == DR_CONTIGUOUS && bytes.at == bytes.end ? DR_CONTIGUOUS : DR_NO_STRIDES;
    for (int d = 0; d < row->ndim; d++)
        strides[d] = (int64_t)dr_bytes_limited(&bytes, INT64_MAX);
    return bytes.bad || bytes.at != bytes.end ? DR_NO_STRIDES : DR_STRIDED;
}
