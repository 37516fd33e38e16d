/* Sparse blocks. See load_mapped.h. */
#include "data/load_mapped.h"

#include "base/align.h"
#include "base/crc.h"
#include "io/mapped.h"
#include "io/sys.h"

#include <string.h>

struct mapped_run {
    struct dr_load_plan *plan;
    const struct dr_options *options;
    dr_use_block *use;
    void *context;
    struct dr_workers workers;
    atomic_uint_fast64_t bytes;
};

/* A piece of a block that is being used. */
struct piece {
    const struct mapped_run *run;
    struct dr_block block;
    const uint8_t *data;
    uint64_t crc_ns;
    struct dr_error *error;
    int rc;
};

static void use_piece(void *context) {
    struct piece *piece = context;
    piece->rc = piece->run->use(piece->run->context, &piece->block, piece->data, &piece->crc_ns, piece->error);
}

/* One CRC block at a time, which stays in the processor's cache between its CRC and the copy: 1 when all was used. */
static int use_mapped(struct mapped_run *run, unsigned worker, const struct dr_mapped *window,
                      const struct dr_block *block, struct dr_error *error) {
    struct dr_watch *watch = run->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch),
                           .offset = block->lo,
                           .size = block->hi - block->lo,
                           .step = DR_STEP_USE,
                           .file = (uint32_t)block->file,
                           .worker = worker};
    struct piece piece = {.run = run, .block = *block, .error = error};
    for (piece.block.lo = block->lo; piece.block.lo < block->hi; piece.block.lo = piece.block.hi) {
        piece.block.hi = dr_align_down(piece.block.lo, DR_CRC_BLOCK) + DR_CRC_BLOCK;
        if (piece.block.hi > block->hi)
            piece.block.hi = block->hi;
        piece.data = window->memory + (piece.block.lo - window->lo);
        if (!dr_mapped_use(window, use_piece, &piece))
            return 0;
        if (piece.rc < 0)
            return piece.rc;
    }
    span.crc = piece.crc_ns;
    dr_watch_count(watch, span.size);
    dr_watch_note(watch, span);
    return 1;
}

static bool is_cached(int fd, const struct dr_block *block) {
    uint64_t size = block->hi - block->lo;
    return dr_sys.cached(fd, (off_t)block->lo, size) >= (int64_t)size;
}

/* Of a file that is held. */
static int use_held(struct mapped_run *run, unsigned worker, struct dr_mapped *window, const struct dr_block *block,
                    int fd, struct dr_error *error) {
    if (run->options->direct == DR_DIRECT_AUTO && !is_cached(fd, block))
        return 0;
    uint64_t size = run->plan->input->files[block->file].size;
    if (dr_mapped_move(window, block->file, fd, size, block->lo, block->hi) < 0)
        return 0;
    return use_mapped(run, worker, window, block, error);
}

static int take_blocks(void *context, unsigned worker, struct dr_error *error) {
    struct mapped_run *run = context;
    struct dr_load_plan *plan = run->plan;
    struct dr_mapped window = {0};
    int rc = 0;
    for (size_t index; rc >= 0 && dr_workers_take(&run->workers, &index);) {
        struct dr_block *block = &plan->blocks[index];
        DR_NEW_ERROR(ignored);
        int fd;
        if (!block->sparse || dr_input_hold(plan->input, block->file, 1, DR_INPUT_TRY, &fd, &ignored) < 0)
            continue;
        rc = use_held(run, worker, &window, block, fd, error);
        dr_input_release(plan->input, block->file);
        if (rc <= 0)
            continue;
        atomic_fetch_add(&run->bytes, block->hi - block->lo);
        block->hi = block->lo; /* used up */
    }
    dr_mapped_close(&window);
    return rc < 0 ? rc : 0;
}

/* Whether blocks are to be mapped at all: not where the caller says how they are read. */
static bool is_wanted(const struct dr_load_plan *plan, const struct dr_options *options) {
    if (options->direct == DR_DIRECT_ON || strcmp(options->engine, "auto") != 0)
        return false;
    for (size_t i = 0; i < plan->block_count; i++)
        if (plan->blocks[i].sparse)
            return true;
    return false;
}

int dr_load_mapped(struct dr_load_plan *plan, const struct dr_options *options, dr_use_block *use, void *context,
                   const struct dr_control *control, struct dr_stream_stats *stats, struct dr_error *error) {
    if (!is_wanted(plan, options))
        return 0;
    struct mapped_run run = {.plan = plan, .options = options, .use = use, .context = context};
    dr_mapped_begin();
    int rc = dr_workers_share(&run.workers, plan->block_count, options->workers, take_blocks, &run, control, error);
    dr_mapped_end();
    size_t left = 0;
    for (size_t i = 0; i < plan->block_count; i++)
        if (plan->blocks[i].lo < plan->blocks[i].hi)
            plan->blocks[left++] = plan->blocks[i];
    plan->block_count = left;
    *stats =
        (struct dr_stream_stats){.bytes = run.bytes, .cached_bytes = run.bytes, .engine = run.bytes ? "mmap" : NULL};
    return rc;
}
