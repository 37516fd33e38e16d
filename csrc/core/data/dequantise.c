/* Rows of codes, decoded a stretch at a time and scaled block by block. See dequantise.h. */
#include "data/dequantise.h"

#include "base/align.h"
#include "base/elements.h"

#include <assert.h>
#include <string.h>

static int64_t blocks_along(int64_t skip, int64_t count, int64_t block) {
    return count == 0 ? 0 : (skip + count - 1) / block + 1;
}

int64_t dr_quantised_blocks(const struct dr_quantised *form, int64_t rows) {
    return blocks_along(form->skip_rows, rows, form->block_rows) *
           blocks_along(form->skip_columns, form->columns, form->block_columns);
}

bool dr_quantised_good(const struct dr_quantised *form, int64_t bytes) {
    const struct dr_codec *codes = dr_codec_of(form->codes, DR_SIMD_BEST);
    const struct dr_codec *target = dr_codec_of(form->target, DR_SIMD_BEST);
    if (!codes || !target || !target->encode || form->codes->item_size != 1 || form->columns < 0)
        return false;
    const bool packed = dr_is_packed(form->codes), good_first = form->first == 0 || (form->first == 1 && packed);
    return good_first && bytes == (packed ? (form->first + form->columns + 1) / 2 : form->columns) &&
           form->block_rows > 0 && form->skip_rows >= 0 && form->skip_rows < form->block_rows &&
           form->block_columns > 0 && form->skip_columns >= 0 && form->skip_columns < form->block_columns;
}

/* ---- a row ---- */

/* Bytes [lo, hi) of a payload, and what is made of them. */
struct making {
    const struct dr_read *read;
    const struct dr_quantised *form;
    const struct dr_codec *codes, *target;
    int64_t per_byte, across; /* codes in a byte, blocks along a row */
    uint64_t lo, hi;
    const uint8_t *data;
};

/* The factor of a block. The highest exponent is too large for one: `values` are doubled for it. */
static float factor_of(const struct dr_quantised *form, int64_t block, float *values, int64_t count) {
    if (form->scales)
        return form->scales[block];
    uint32_t exponent = form->exponents[block];
    for (int64_t i = 0; exponent == 255 && i < count; i++)
        values[i] *= 2;
    uint32_t bits = exponent == 0 ? 1u << 22 : (exponent == 255 ? 254 : exponent) << 23;
    float factor;
    memcpy(&factor, &bits, sizeof factor);
    return factor;
}

/* Elements from `begin` of a row, of which `values` holds `count`. */
static void scale_stretch(const struct making *m, int64_t first_block, int64_t begin, float *values, int64_t count,
                          char *out) {
    const struct dr_quantised *form = m->form;
    const int64_t at = form->skip_columns + begin;
    int64_t block = first_block + at / form->block_columns, size = form->block_columns - at % form->block_columns;
    for (; count > 0; block++, size = form->block_columns) {
        size = size < count ? size : count;
        m->target->encode(values, (size_t)size, factor_of(form, block, values, size), out);
        values += size;
        out += size * form->target->item_size;
        count -= size;
    }
}

/*
 * Decodes a stretch of one row of codes: `bytes` of them, from the row's byte `byte` on, which lie at `codes`. `out` is
 * where the row's first element goes. A byte may hold two codes, of which the first may lie before the box.
 */
static void decode_row(const struct making *m, int64_t row, int64_t byte, int64_t bytes, const uint8_t *codes,
                       char *out) {
    const struct dr_quantised *form = m->form;
    const int64_t first_block = (form->skip_rows + row) / form->block_rows * m->across;
    int64_t end = (byte + bytes) * m->per_byte - form->first;
    end = end < form->columns ? end : form->columns;
    float values[DR_ELEMENTS_BLOCK];
    for (int64_t begin = byte * m->per_byte - form->first, size; begin < end; begin += size) {
        size = end - begin < DR_ELEMENTS_BLOCK ? end - begin : DR_ELEMENTS_BLOCK;
        m->codes->decode(codes, (size_t)size, values);
        codes += size / m->per_byte;
        int64_t skip = begin < 0 ? -begin : 0;
        scale_stretch(m, first_block, begin + skip, values + skip, size - skip,
                      out + (begin + skip) * form->target->item_size);
    }
}

/* ---- the rows of a box ---- */

/* How many bytes of the payload it is from the first to the last byte of a box, if only axes from `axis` on count. */
static uint64_t span(const struct dr_read *read, int axis, const uint64_t *strides) {
    uint64_t bytes = 1;
    for (int d = axis; d < read->chunk.ndim; d++)
        bytes += (uint64_t)(read->lengths[d] - 1) * strides[d];
    return bytes;
}

/*
 * Goes through an axis of the box, and through the axes after it, to the rows of which something lies in the block
 * [m->lo, m->hi). `at` is where in the payload the axis begins, `row` how many rows of the box come before it.
 */
static void visit(const struct making *m, int axis, const uint64_t *strides, uint64_t at, int64_t row, char *out) {
    const struct dr_read *read = m->read;
    if (axis == read->chunk.ndim - 1) {
        uint64_t lo = m->lo, hi = m->hi;
        if (dr_clip(at, at + (uint64_t)read->lengths[axis], &lo, &hi))
            decode_row(m, row, (int64_t)(lo - at), (int64_t)(hi - lo), m->data + (lo - m->lo), out);
        return;
    }
    const uint64_t extent = span(read, axis + 1, strides), stride = strides[axis];
    const int64_t count = read->lengths[axis];
    int64_t i = m->lo >= at + extent ? (int64_t)((m->lo - at - extent) / stride) + 1 : 0;
    for (; i < count && at + (uint64_t)i * stride < m->hi; i++)
        visit(m, axis + 1, strides, at + (uint64_t)i * stride, row * count + i,
              out + i * read->strides[axis] * m->form->target->item_size);
}

void dr_dequantise(const struct dr_read *read, uint64_t lo, uint64_t hi, const uint8_t *data) {
    const struct dr_quantised *form = read->quantised;
    const int ndim = read->chunk.ndim;
    assert(ndim > 0 && ndim <= DR_MAX_DIMS && dr_quantised_good(form, read->lengths[ndim - 1]));
    uint64_t strides[DR_MAX_DIMS], stride = 1, first = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        if (read->lengths[d] == 0)
            return;
        strides[d] = stride;
        first += (uint64_t)read->offsets[d] * stride;
        stride *= (uint64_t)read->chunk.sizes[d];
    }
    const struct making making = {
        .read = read,
        .form = form,
        .codes = dr_codec_of(form->codes, DR_SIMD_BEST),
        .target = dr_codec_of(form->target, DR_SIMD_BEST),
        .per_byte = dr_is_packed(form->codes) ? 2 : 1,
        .across = blocks_along(form->skip_columns, form->columns, form->block_columns),
        .lo = lo,
        .hi = hi,
        .data = data,
    };
    visit(&making, 0, strides, first, 0, read->memory);
}
