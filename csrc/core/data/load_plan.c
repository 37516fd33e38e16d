/* Deciding what to read. See load_plan.h. */
#include "data/load_plan.h"

#include "base/align.h"
#include "base/array.h"
#include "base/crc.h"
#include "record/region.h"

#include <assert.h>
#include <errno.h>

/*
 * The same as DR_SLICE_GAP, between extents of different slices (small records are separated by their heads and tails).
 */
#define EXTENT_GAP ((uint64_t)16 * 1024)
/* An extent grows to whole CRC blocks, so that all of it is checked, where that adds at most 1/20 at each end. */
#define CRC_GROWTH 20

/* ---- reads ---- */

static int check_read(const struct dr_load_plan *plan, size_t index, struct dr_error *error) {
    const struct dr_read *r = &plan->reads[index];
    assert(r->file < plan->input->count && r->chunk.ndim >= 0 && r->chunk.ndim <= DR_MAX_DIMS);
    const struct dr_input_file *file = &plan->input->files[r->file];
    uint64_t bytes;
    int64_t item = (int64_t)index;
    int rc = dr_input_look(plan->input, r->file, error);
    if (rc < 0) {
        error->item = item;
        return rc;
    }
    if (r->payload_offset > file->size || r->payload_size > file->size - r->payload_offset)
        return dr_error_corrupt(error, file->path, (int64_t)r->payload_offset, item,
                                "the file has %llu bytes, and needs at least %llu", (unsigned long long)file->size,
                                (unsigned long long)(r->payload_offset + r->payload_size));
    if (!dr_shape_bytes(&r->chunk, &bytes) || bytes != r->payload_size)
        return dr_error_corrupt(error, file->path, (int64_t)r->payload_offset, item,
                                "the record has %llu bytes, its shape and dtype need another number",
                                (unsigned long long)r->payload_size);
    for (int d = 0; d < r->chunk.ndim; d++)
        if (r->offsets[d] < 0 || r->lengths[d] < 0 || r->offsets[d] > r->chunk.sizes[d] - r->lengths[d])
            return dr_error_invalid(error, item, "the slice leaves the stored tensor in dimension %d", d);
    return 0;
}

struct adding {
    struct dr_load_plan *plan;
    const struct dr_read *read;
    size_t index;
    bool sparse;
    const struct dr_options *options;
    struct dr_error *error;
};

static void grow_to_crc_blocks(const struct dr_read *r, uint64_t *lo, uint64_t *hi) {
    uint64_t end = r->payload_offset + r->payload_size;
    uint64_t down = dr_align_down(*lo, DR_CRC_BLOCK), up = dr_align_up(*hi, DR_CRC_BLOCK);
    uint64_t room = (*hi - *lo) / CRC_GROWTH;
    if (down < r->payload_offset)
        down = r->payload_offset;
    if (up > end)
        up = end;
    if (*lo - down <= room)
        *lo = down;
    if (up - *hi <= room)
        *hi = up;
}

/* Whether at most half of what is read for a slice is wanted: it has gaps, over which is read. */
static bool is_sparse(const struct dr_read *read, const struct dr_region *region) {
    return !read->quantised && dr_region_has_gaps(region, DR_SLICE_GAP);
}

/* Cut at the grid of blocks, so that each block has its own extents: however many of them share its bytes. */
static int add_extent(void *context, uint64_t lo, uint64_t hi) {
    struct adding *adding = context;
    struct dr_load_plan *plan = adding->plan;
    const struct dr_read *r = adding->read;
    uint64_t block_size = adding->options->block_size;
    lo += r->payload_offset;
    hi += r->payload_offset;
    if (r->crcs && adding->options->checksum)
        grow_to_crc_blocks(r, &lo, &hi);
    for (uint64_t at = lo, next; at < hi; at = next) {
        next = dr_align_down(at, block_size) + block_size;
        next = next < hi ? next : hi;
        int rc = DR_ARRAY_RESERVE(plan->extents, plan->extent_count, plan->extent_room, 1, adding->error);
        if (rc)
            return rc;
        plan->extents[plan->extent_count++] = (struct dr_load_extent){r->file, at, next, adding->index, adding->sparse};
    }
    return 0;
}

static int add_read(struct dr_load_plan *plan, size_t index, const struct dr_options *options, struct dr_error *error) {
    const struct dr_read *r = &plan->reads[index];
    int rc = check_read(plan, index, error);
    if (rc < 0)
        return rc;
    struct dr_region region;
    dr_region_init(&region, &r->chunk, r->offsets, r->lengths, r->memory, r->strides);
    struct adding adding = {plan, r, index, is_sparse(r, &region), options, error};
    rc = dr_region_stretches(&region, DR_SLICE_GAP, add_extent, &adding);
    if (rc < 0 || !options->checksum || !r->has_whole_crc || dr_region_bytes(&region) != r->payload_size)
        return rc;
    if (!plan->sums && !(plan->sums = dr_calloc(plan->read_count, sizeof *plan->sums)))
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, plan->input->files[r->file].path);
    size_t count = dr_crc_count(r->payload_offset, r->payload_size);
    plan->sums[index] = dr_calloc(count ? count : 1, sizeof **plan->sums);
    return plan->sums[index] ? 0 : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, plan->input->files[r->file].path);
}

static int by_position(const void *a, const void *b) {
    const struct dr_load_extent *x = a, *y = b;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (x->lo != y->lo)
        return x->lo < y->lo ? -1 : 1;
    return (x->read > y->read) - (x->read < y->read);
}

/* ---- blocks ---- */

/* Cuts the range [lo, hi), which extents from `first` on make up, at the block grid. */
static int add_blocks(struct dr_load_plan *plan, uint64_t lo, uint64_t hi, size_t first, uint64_t block_size,
                      struct dr_error *error) {
    size_t file = plan->extents[first].file;
    for (uint64_t at = dr_align_down(lo, DR_ALIGNMENT), next; at < hi; at = next) {
        next = dr_align_down(at, block_size) + block_size;
        next = next < hi ? next : hi;
        int rc = DR_ARRAY_RESERVE(plan->blocks, plan->block_count, plan->block_room, 1, error);
        if (rc)
            return rc;
        plan->blocks[plan->block_count++] =
            (struct dr_block){.file = file, .lo = at, .hi = next, .first = first, .sparse = true};
        struct dr_block *block = &plan->blocks[plan->block_count - 1];
        for (size_t i = first; i < plan->extent_count && plan->extents[i].file == file && plan->extents[i].lo < next;
             i++)
            block->sparse = block->sparse && plan->extents[i].sparse;
        while (first < plan->extent_count && plan->extents[first].file == file && plan->extents[first].lo < next)
            first++;
    }
    return 0;
}

static int make_blocks(struct dr_load_plan *plan, uint64_t block_size, struct dr_error *error) {
    for (size_t i = 0; i < plan->extent_count;) {
        const struct dr_load_extent *first = &plan->extents[i];
        uint64_t hi = first->hi;
        size_t end = i + 1;
        while (end < plan->extent_count && plan->extents[end].file == first->file &&
               plan->extents[end].lo <= hi + EXTENT_GAP) {
            if (plan->extents[end].hi > hi)
                hi = plan->extents[end].hi;
            end++;
        }
        int rc = add_blocks(plan, first->lo, hi, i, block_size, error);
        if (rc < 0)
            return rc;
        i = end;
    }
    return 0;
}

int dr_load_plan_init(struct dr_load_plan *plan, struct dr_input *input, struct dr_read *reads, size_t read_count,
                      const struct dr_options *options, const struct dr_control *control, struct dr_error *error) {
    struct dr_ticker ticker = {.control = control};
    int rc = read_count > 0 ? dr_input_look_many(input, &reads->file, sizeof *reads, read_count, control, error) : 0;
    plan->input = input;
    plan->reads = reads;
    plan->read_count = read_count;
    for (size_t i = 0; i < read_count && rc == 0; i++) {
        rc = add_read(plan, i, options, error);
        if (rc == 0)
            rc = dr_ticker_turn(&ticker, i, error);
    }
    if (rc < 0)
        return rc;
    if (plan->extent_count > 0)
        qsort(plan->extents, plan->extent_count, sizeof *plan->extents, by_position);
    return make_blocks(plan, options->block_size, error);
}

int dr_load_plan_check_sums(const struct dr_load_plan *plan, struct dr_error *error) {
    for (size_t i = 0; plan->sums && i < plan->read_count; i++) {
        const struct dr_read *r = &plan->reads[i];
        if (!plan->sums[i])
            continue;
        uint32_t crc = dr_crc_whole(r->payload_offset, r->payload_size, plan->sums[i]);
        if (crc != r->whole_crc)
            return dr_error_corrupt(
                error, plan->input->files[r->file].path, (int64_t)r->payload_offset, (int64_t)i,
                "bytes %llu to %llu of the file, all of this value, are damaged (CRC-32 is %08x, was "
                "%08x when they were written); load another checkpoint",
                (unsigned long long)r->payload_offset, (unsigned long long)(r->payload_offset + r->payload_size), crc,
                r->whole_crc);
    }
    return 0;
}

void dr_load_plan_destroy(struct dr_load_plan *plan) {
    for (size_t i = 0; plan->sums && i < plan->read_count; i++)
        free(plan->sums[i]);
    free(plan->sums);
    free(plan->extents);
    free(plan->blocks);
}
