/* Reading slices. See load.h; load_plan.c decides what to read, this does it. */
#include "data/load.h"

#include "base/align.h"
#include "base/crc.h"
#include "data/dequantise.h"
#include "data/load_mapped.h"
#include "data/load_plan.h"
#include "record/region.h"

#include <assert.h>
#include <string.h>

struct load {
    const struct dr_options *options;
    struct dr_load_plan plan;
};

/* The last CRC block that was checked: slices of one payload often share it. */
struct checked {
    uint64_t payload_offset, payload_size;
    const uint8_t *crcs;
    size_t count; /* blocks of that payload before this index are done */
};

static bool is_same_payload(const struct checked *checked, const struct dr_read *read) {
    return checked->payload_offset == read->payload_offset && checked->payload_size == read->payload_size &&
           checked->crcs == read->crcs;
}

/* Checks, or notes for dr_load_plan's final check, every CRC block of the payload that touches [lo, hi) and is here. */
static int check_crcs(const struct load *load, const struct dr_block *block, const uint8_t *data, uint64_t lo,
                      uint64_t hi, size_t index, struct checked *checked, uint64_t *crc_ns, struct dr_error *error) {
    const struct dr_read *read = &load->plan.reads[index];
    uint32_t *sums = load->plan.sums ? load->plan.sums[index] : NULL;
    if (!load->options->checksum || (!read->crcs && !sums))
        return 0;
    size_t first = (size_t)(lo / DR_CRC_BLOCK - read->payload_offset / DR_CRC_BLOCK);
    size_t count = dr_crc_count(lo, hi - lo);
    if (!is_same_payload(checked, read) || sums)
        *checked = (struct checked){read->payload_offset, read->payload_size, read->crcs, 0};
    for (size_t i = first > checked->count ? first : checked->count; i < first + count; i++) {
        uint64_t from, to;
        dr_crc_range(read->payload_offset, read->payload_size, i, &from, &to);
        if (from < block->lo || to > block->hi)
            continue;
        checked->count = i + 1;
        uint32_t crc = dr_watch_crc32(load->options->watch, crc_ns, 0, data + (from - block->lo), to - from);
        if (sums)
            sums[i] = crc;
        else if (crc != dr_crc_stored(read->crcs, i))
            return dr_error_corrupt(
                error, load->plan.input->files[read->file].path, (int64_t)from, (int64_t)index,
                "bytes %llu to %llu of the file, %llu to %llu of this value, are damaged (CRC-32 is %08x, "
                "was %08x when they were written); load another checkpoint",
                (unsigned long long)from, (unsigned long long)to, (unsigned long long)(from - read->payload_offset),
                (unsigned long long)(to - read->payload_offset), crc, dr_crc_stored(read->crcs, i));
    }
    return 0;
}

static void scatter(struct dr_read *read, const struct dr_block *block, const uint8_t *data, uint64_t lo, uint64_t hi) {
    assert(lo >= block->lo && lo < hi && hi <= block->hi);
    assert(lo >= read->payload_offset && hi <= read->payload_offset + read->payload_size);
    const uint64_t first = lo - read->payload_offset, end = hi - read->payload_offset;
    if (read->quantised) {
        dr_dequantise(read, first, end, data + (lo - block->lo));
    } else {
        struct dr_region region;
        dr_region_init(&region, &read->chunk, read->offsets, read->lengths, read->memory, read->strides);
        dr_region_scatter(&region, first, end, data + (lo - block->lo));
    }
    __atomic_store_n(&read->touched, true, __ATOMIC_RELAXED);
}

static int use_block(void *context, const struct dr_block *block, const uint8_t *data, uint64_t *crc_ns,
                     struct dr_error *error) {
    const struct load *load = context;
    const struct dr_load_plan *plan = &load->plan;
    struct checked checked = {.payload_offset = UINT64_MAX};
    for (size_t i = block->first; i < plan->extent_count; i++) {
        const struct dr_load_extent *extent = &plan->extents[i];
        if (extent->file != block->file || extent->lo >= block->hi)
            break;
        uint64_t lo = block->lo, hi = block->hi;
        if (!dr_clip(extent->lo, extent->hi, &lo, &hi))
            continue;
        int rc = check_crcs(load, block, data, lo, hi, extent->read, &checked, crc_ns, error);
        if (rc < 0)
            return rc;
        scatter(&plan->reads[extent->read], block, data, lo, hi);
    }
    return 0;
}

static bool is_about(const struct dr_load_plan *plan, const struct dr_read *read, const struct dr_error *error) {
    const char *path = plan->input->files[read->file].path;
    if (!path || strcmp(path, error->path) != 0)
        return false;
    int64_t length = error->length > 0 ? error->length : 1;
    return error->offset < 0 || (error->offset < (int64_t)(read->payload_offset + read->payload_size) &&
                                 error->offset + length > (int64_t)read->payload_offset);
}

/* A failed call knows its file and offset: says which of the reads that concerns. */
static void find_item(const struct dr_load_plan *plan, const struct dr_read *reads, size_t count,
                      struct dr_error *error) {
    for (size_t i = 0; i < count && error->item == DR_NO_ITEM; i++)
        if (is_about(plan, &reads[i], error))
            error->item = (int64_t)i;
}

int dr_load(struct dr_input *input, struct dr_read *reads, size_t read_count, const struct dr_options *options,
            const struct dr_control *control, struct dr_stream_stats *stats, struct dr_error *error) {
    struct load load = {.options = options};
    *stats = (struct dr_stream_stats){0};
    int rc = dr_load_plan_init(&load.plan, input, reads, read_count, options, control, error);
    struct dr_stream_stats mapped = {0};
    if (rc == 0)
        rc = dr_load_mapped(&load.plan, options, use_block, &load, control, &mapped, error);
    const struct dr_stream stream = {input, load.plan.blocks, load.plan.block_count, options, use_block, NULL, &load};
    if (rc == 0)
        rc = dr_stream_run(&stream, control, stats, error);
    stats->bytes += mapped.bytes;
    stats->cached_bytes += mapped.cached_bytes;
    if (!stats->engine)
        stats->engine = mapped.engine;
    if (rc == 0)
        rc = dr_load_plan_check_sums(&load.plan, error);
    if (rc < 0) {
        find_item(&load.plan, reads, read_count, error);
        dr_error_at(error, input->dir);
    }
    dr_load_plan_destroy(&load.plan);
    return rc;
}
