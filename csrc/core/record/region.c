/* Strided copies. See region.h. */
#include "record/region.h"

#include <assert.h>
#include <string.h>

/* Appends an axis, merged into the one before where both sides run on without a gap. */
static void add_axis(struct dr_region *region, struct dr_axis axis) {
    if (region->ndim > 0) {
        struct dr_axis *outer = &region->axes[region->ndim - 1];
        if (outer->payload_stride == axis.payload_stride * axis.count &&
            outer->memory_stride == axis.memory_stride * (int64_t)axis.count) {
            axis.count *= outer->count;
            *outer = axis;
            return;
        }
    }
    region->axes[region->ndim++] = axis;
}

void dr_region_init(struct dr_region *region, const struct dr_shape *chunk, const int64_t *offsets,
                    const int64_t *lengths, void *memory, const int64_t *strides) {
    assert(chunk->dtype && chunk->ndim >= 0 && chunk->ndim <= DR_MAX_DIMS);
    uint64_t item = chunk->dtype->item_size;
    uint64_t payload_strides[DR_MAX_DIMS];
    uint64_t stride = item;
    for (int d = chunk->ndim - 1; d >= 0; d--) {
        payload_strides[d] = stride;
        stride *= chunk->sizes[d] > 1 ? (uint64_t)chunk->sizes[d] : 1;
    }
    *region = (struct dr_region){.memory = memory, .run = item};
    for (int d = 0; d < chunk->ndim; d++) {
        assert(lengths[d] >= 0 && (offsets ? offsets[d] : 0) >= 0);
        assert((offsets ? offsets[d] : 0) <= chunk->sizes[d] - lengths[d]);
        region->first += (offsets ? (uint64_t)offsets[d] : 0) * payload_strides[d];
        if (lengths[d] != 1)
            add_axis(region, (struct dr_axis){(uint64_t)lengths[d], payload_strides[d], strides[d] * (int64_t)item});
    }
    struct dr_axis *inner = region->ndim > 0 ? &region->axes[region->ndim - 1] : NULL;
    if (inner && inner->payload_stride == item && inner->memory_stride == (int64_t)item) {
        region->run = inner->count * item;
        region->ndim--;
    }
}

/* Bytes that axes [axis, ndim) span in the payload. */
static uint64_t span(const struct dr_region *region, int axis) {
    uint64_t bytes = region->run;
    for (int d = axis; d < region->ndim; d++) {
        if (region->axes[d].count == 0)
            return 0;
        bytes += (region->axes[d].count - 1) * region->axes[d].payload_stride;
    }
    return bytes;
}

uint64_t dr_region_bytes(const struct dr_region *region) {
    uint64_t bytes = region->run;
    for (int d = 0; d < region->ndim; d++)
        bytes *= region->axes[d].count;
    return bytes;
}

struct walk {
    const struct dr_region *region;
    uint64_t lo, hi;
    uint8_t *buffer;
    bool to_memory;
};

static inline void move(const struct walk *w, uint8_t *buffer, uint8_t *memory, size_t size) {
    if (w->to_memory)
        memcpy(memory, buffer, size);
    else
        memcpy(buffer, memory, size);
}

/* One run, of which only a part may be in the buffer. */
static void copy_run(const struct walk *w, uint64_t at, uint8_t *memory) {
    uint64_t lo = at > w->lo ? at : w->lo;
    uint64_t hi = at + w->region->run < w->hi ? at + w->region->run : w->hi;
    if (lo < hi)
        move(w, w->buffer + (lo - w->lo), memory + (lo - at), (size_t)(hi - lo));
}

/* `count` whole runs; the sizes of single elements are spelled out so that memcpy becomes a load and a store. */
static void copy_runs(const struct walk *w, uint64_t at, uint8_t *memory, uint64_t count, const struct dr_axis *axis) {
    uint8_t *buffer = w->buffer + (at - w->lo);
    uint64_t run = w->region->run;
#define COPY_RUNS(size) \
    for (uint64_t i = 0; i < count; i++, buffer += axis->payload_stride, memory += axis->memory_stride) \
    move(w, buffer, memory, size)
    switch (run) {
    case 1:
        COPY_RUNS(1);
        break;
    case 2:
        COPY_RUNS(2);
        break;
    case 4:
        COPY_RUNS(4);
        break;
    case 8:
        COPY_RUNS(8);
        break;
    default:
        COPY_RUNS(run);
    }
#undef COPY_RUNS
}

/* The indices [*first, *last) of an axis whose sub-boxes touch [lo, hi). */
static void clip(const struct walk *w, const struct dr_axis *axis, uint64_t at, uint64_t extent, uint64_t *first,
                 uint64_t *last) {
    *first = w->lo >= at + extent ? (w->lo - at - extent) / axis->payload_stride + 1 : 0;
    *last = w->hi > at ? (w->hi - at - 1) / axis->payload_stride + 1 : 0;
    if (*last > axis->count)
        *last = axis->count;
}

static void copy_innermost(const struct walk *w, const struct dr_axis *axis, uint64_t at, uint8_t *memory) {
    uint64_t first, last;
    clip(w, axis, at, w->region->run, &first, &last);
    for (; first < last && at + first * axis->payload_stride < w->lo; first++)
        copy_run(w, at + first * axis->payload_stride, memory + (int64_t)first * axis->memory_stride);
    uint64_t whole = last;
    while (whole > first && at + (whole - 1) * axis->payload_stride + w->region->run > w->hi)
        whole--;
    if (whole > first)
        copy_runs(w, at + first * axis->payload_stride, memory + (int64_t)first * axis->memory_stride, whole - first,
                  axis);
    for (uint64_t i = whole > first ? whole : first; i < last; i++)
        copy_run(w, at + i * axis->payload_stride, memory + (int64_t)i * axis->memory_stride);
}

enum { TILE_ROWS = 64, TILE_COLUMNS = 16, TILE_RUN_MAX = 16 };

/* A tile of a transposed matrix, by way of a small one that stays in the nearest cache. */
static inline void copy_tile(const struct walk *w, uint8_t *buffer, uint8_t *memory, uint64_t row_stride,
                             int64_t column_stride, unsigned rows, unsigned columns, size_t run) {
    uint8_t square[TILE_ROWS * TILE_COLUMNS * TILE_RUN_MAX];
    if (w->to_memory)
        for (unsigned r = 0; r < rows; r++)
            memcpy(square + r * TILE_COLUMNS * run, buffer + r * row_stride, columns * run);
    for (unsigned c = 0; c < columns; c++, memory += column_stride)
        for (unsigned r = 0; r < rows; r++)
            move(w, square + (r * TILE_COLUMNS + c) * run, memory + r * run, run);
    if (!w->to_memory)
        for (unsigned r = 0; r < rows; r++)
            memcpy(buffer + r * row_stride, square + r * TILE_COLUMNS * run, columns * run);
}

/*
 * A transposed matrix: neighbours in memory are a row apart in the payload. Done row by row, each element would
 * cost a cache line; done in tiles, each line is used up at once. Rows [first, last) lie wholly in the buffer.
 */
static bool copy_tiles(const struct walk *w, const struct dr_axis *rows, const struct dr_axis *columns, uint64_t at,
                       uint8_t *memory, uint64_t first, uint64_t last) {
    size_t run = w->region->run;
    if (rows->memory_stride != (int64_t)run || columns->payload_stride != run || run > TILE_RUN_MAX)
        return false;
    for (uint64_t r = first; r < last; r += TILE_ROWS) {
        unsigned row_count = last - r < TILE_ROWS ? (unsigned)(last - r) : TILE_ROWS;
        uint8_t *from = memory + r * run;
        uint8_t *to = w->buffer + (at + r * rows->payload_stride - w->lo);
        for (uint64_t c = 0; c < columns->count; c += TILE_COLUMNS) {
            unsigned column_count = columns->count - c < TILE_COLUMNS ? (unsigned)(columns->count - c) : TILE_COLUMNS;
#define COPY_TILE(size) \
    copy_tile(w, to + c * run, from + (int64_t)c * columns->memory_stride, rows->payload_stride, \
              columns->memory_stride, row_count, column_count, size)
            switch (run) {
            case 1:
                COPY_TILE(1);
                break;
            case 2:
                COPY_TILE(2);
                break;
            case 4:
                COPY_TILE(4);
                break;
            case 8:
                COPY_TILE(8);
                break;
            default:
                COPY_TILE(run);
            }
#undef COPY_TILE
        }
    }
    return true;
}

static void copy_axis(const struct walk *w, int d, uint64_t at, uint8_t *memory) {
    const struct dr_region *region = w->region;
    if (d == region->ndim) {
        copy_run(w, at, memory);
        return;
    }
    const struct dr_axis *axis = &region->axes[d];
    if (d == region->ndim - 1) {
        copy_innermost(w, axis, at, memory);
        return;
    }
    uint64_t extent = span(region, d + 1), first, last;
    clip(w, axis, at, extent, &first, &last);
    uint64_t i = first;
    if (d == region->ndim - 2) {
        uint64_t whole_first = first, whole_last = last;
        while (whole_first < last && at + whole_first * axis->payload_stride < w->lo)
            whole_first++;
        while (whole_last > whole_first && at + (whole_last - 1) * axis->payload_stride + extent > w->hi)
            whole_last--;
        for (; i < whole_first; i++)
            copy_axis(w, d + 1, at + i * axis->payload_stride, memory + (int64_t)i * axis->memory_stride);
        if (copy_tiles(w, axis, &region->axes[d + 1], at, memory, whole_first, whole_last))
            i = whole_last;
    }
    for (; i < last; i++)
        copy_axis(w, d + 1, at + i * axis->payload_stride, memory + (int64_t)i * axis->memory_stride);
}

static void copy(const struct dr_region *region, uint64_t lo, uint64_t hi, uint8_t *buffer, bool to_memory) {
    if (lo >= hi || span(region, 0) == 0)
        return;
    struct walk walk = {region, lo, hi, buffer, to_memory};
    copy_axis(&walk, 0, region->first, region->memory);
}

void dr_region_gather(const struct dr_region *region, uint64_t lo, uint64_t hi, uint8_t *buffer) {
    copy(region, lo, hi, buffer, false);
}

void dr_region_scatter(const struct dr_region *region, uint64_t lo, uint64_t hi, const uint8_t *buffer) {
    copy(region, lo, hi, (uint8_t *)(uintptr_t)buffer, true);
}

static bool joined(const struct dr_region *region, int axis, uint64_t max_gap) {
    for (int d = axis; d < region->ndim; d++)
        if (region->axes[d].count > 1 && region->axes[d].payload_stride - span(region, d + 1) > max_gap)
            return false;
    return true;
}

static int stretches(const struct dr_region *region, int d, uint64_t at, uint64_t max_gap,
                     int (*emit)(void *, uint64_t, uint64_t), void *context) {
    if (joined(region, d, max_gap))
        return emit(context, at, at + span(region, d));
    for (uint64_t i = 0; i < region->axes[d].count; i++) {
        int rc = stretches(region, d + 1, at + i * region->axes[d].payload_stride, max_gap, emit, context);
        if (rc)
            return rc;
    }
    return 0;
}

int dr_region_stretches(const struct dr_region *region, uint64_t max_gap, int (*emit)(void *, uint64_t, uint64_t),
                        void *context) {
    if (dr_region_bytes(region) == 0)
        return 0;
    return stretches(region, 0, region->first, max_gap, emit, context);
}

bool dr_region_has_gaps(const struct dr_region *region, uint64_t max_gap) {
    if (region->ndim == 0 || dr_region_bytes(region) == 0)
        return false;
    const struct dr_axis *inner = &region->axes[region->ndim - 1];
    return inner->payload_stride >= 2 * region->run && inner->payload_stride - region->run <= max_gap;
}
