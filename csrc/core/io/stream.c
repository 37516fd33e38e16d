/* Reading blocks. See stream.h. */
#include "io/stream.h"

#include "base/align.h"
#include "base/crc.h"
#include "io/kept.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>

enum { WAIT_MS = 100, HERE_BYTES = 1 << 20, HERE_BLOCKS = 8 };

struct stream_run {
    const struct dr_stream *stream;
    const struct dr_options *options;
    struct dr_workers workers;
    atomic_size_t next; /* block to take */
    unsigned depth;     /* buffers per worker that are useful */
    unsigned most;      /* and that the options allow */
    bool at_hand;       /* all blocks are known to be in the page cache */
    atomic_uint_fast64_t bytes, cached_bytes;
    atomic_bool direct;
    const char *_Atomic engine;
};

static bool is_cached(int fd, const struct dr_block *block) {
    uint64_t size = block->hi - block->lo;
    return dr_sys.cached(fd, (off_t)block->lo, size) >= (int64_t)size;
}

static int use_piece(struct stream_run *run, unsigned worker, const struct dr_block *piece, const uint8_t *data,
                     struct dr_error *error) {
    struct dr_watch *watch = run->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch),
                           .offset = piece->lo,
                           .size = piece->hi - piece->lo,
                           .step = DR_STEP_USE,
                           .file = (uint32_t)piece->file,
                           .worker = worker};
    int rc = run->stream->use(run->stream->context, piece, data, &span.crc, error);
    dr_watch_note(watch, span);
    return rc;
}

/* A block that could not be read, for the reason in *why: 0 when the user goes on without it. */
static int report_unreadable(struct stream_run *run, const struct dr_block *block, int fd, uint8_t *buffer,
                             const struct dr_error *why, struct dr_error *error) {
    if (run->stream->on_read_error)
        return run->stream->on_read_error(run->stream->context, &run->workers, block, fd, buffer, why, error);
    *error = *why;
    return -why->err;
}

/* ---- the two ways to read a block ---- */

/*
 * A block that the page cache holds, one CRC block at a time: the buffer then stays in the processor's cache between
 * the three passes over it. 1 when it was used up, 0 when it must be read the other way (which also reports errors).
 */
static int read_cached(struct stream_run *run, unsigned worker, const struct dr_block *block, int fd, uint8_t *buffer,
                       struct dr_error *error) {
    if (!run->at_hand && !is_cached(fd, block))
        return 0;
    struct dr_watch *watch = run->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch),
                           .offset = block->lo,
                           .size = block->hi - block->lo,
                           .step = DR_STEP_READ,
                           .file = (uint32_t)block->file,
                           .worker = worker,
                           .slot = DR_NO_SLOT};
    struct dr_block piece = *block;
    for (piece.lo = block->lo; piece.lo < block->hi; piece.lo = piece.hi) {
        piece.hi = block->in_one ? block->hi : dr_align_down(piece.lo, DR_CRC_BLOCK) + DR_CRC_BLOCK;
        if (piece.hi > block->hi)
            piece.hi = block->hi;
        if (dr_read_range(fd, buffer, piece.lo, piece.hi) != 0)
            return 0;
        int rc = use_piece(run, worker, &piece, buffer, error);
        if (rc < 0)
            return rc;
    }
    atomic_fetch_add(&run->bytes, block->hi - block->lo);
    atomic_fetch_add(&run->cached_bytes, block->hi - block->lo);
    dr_watch_count(watch, block->hi - block->lo);
    dr_watch_note(watch, span);
    return 1;
}

static int submit_block(struct stream_run *run, struct dr_engine *engine, struct dr_request *request,
                        const struct dr_block *block, int fd, bool direct, struct dr_error *error) {
    uint64_t size = block->hi - block->lo;
    assert(block->lo % DR_ALIGNMENT == 0 && block->lo < block->hi && size <= run->options->block_size);
    request->op = DR_READ;
    request->fd = fd;
    request->direct = direct;
    request->offset = (int64_t)block->lo;
    request->size = (uint32_t)(direct ? dr_align_up(size, DR_ALIGNMENT) : size);
    request->needed = (uint32_t)size;
    request->path = run->stream->input->files[block->file].path;
    request->file = (uint32_t)block->file;
    atomic_fetch_add(&run->bytes, size);
    if (direct)
        atomic_store(&run->direct, true);
    return dr_engine_submit(engine, request, error);
}

/* ---- the workers ---- */

/* A request holds its block's file for as long as it has that block as its user. */
static void take_block(struct dr_request *request, const struct dr_block *block) {
    assert(request->state == DR_TAKEN && !request->user);
    request->user = (void *)(uintptr_t)block;
}

static void release_block(struct stream_run *run, struct dr_request *request) {
    const struct dr_block *block = request->user;
    request->user = NULL;
    if (block)
        dr_input_release(run->stream->input, block->file);
}

/* Reads a block at once through the page cache: 1 when it was used up; or puts it in flight, and gives 0. */
static int start_held(struct stream_run *run, struct dr_engine *engine, struct dr_request *request,
                      const struct dr_block *block, int fd, struct dr_error *error) {
    struct dr_input *input = run->stream->input;
    enum dr_direct wanted = run->options->direct;
    int direct = -1;
    /* Where direct I/O must be had, its lack is an error even of a file that is in the page cache. */
    int rc = wanted == DR_DIRECT_ON ? dr_input_direct(input, block->file, wanted, &direct, error) : 0;
    if (rc == 0)
        rc = read_cached(run, engine->worker, block, fd, request->data, error);
    if (rc == 0 && wanted == DR_DIRECT_AUTO)
        rc = dr_input_direct(input, block->file, wanted, &direct, error);
    if (rc != 0)
        return rc;
    return submit_block(run, engine, request, block, direct >= 0 ? direct : fd, direct >= 0, error);
}

static int start_block(struct stream_run *run, struct dr_engine *engine, struct dr_request *request,
                       const struct dr_block *block, struct dr_error *error) {
    DR_NEW_ERROR(why);
    int fd = -1, rc = dr_input_hold(run->stream->input, block->file, &fd, &why);
    if (rc == 0) {
        take_block(request, block);
        rc = start_held(run, engine, request, block, fd, error);
        if (rc == 0)
            return 0;
    } else {
        rc = report_unreadable(run, block, -1, request->data, &why, error);
    }
    release_block(run, request);
    dr_engine_release(engine, request);
    return rc < 0 ? rc : 0;
}

static int fill_queue(struct stream_run *run, struct dr_engine *engine, struct dr_error *error) {
    while (!dr_workers_stopped(&run->workers) && atomic_load(&run->next) < run->stream->count) {
        struct dr_request *request = dr_engine_take(engine);
        if (!request)
            return 0;
        size_t index = atomic_fetch_add(&run->next, 1);
        if (index >= run->stream->count) {
            dr_engine_release(engine, request);
            return 0;
        }
        int rc = start_block(run, engine, request, &run->stream->blocks[index], error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* The same for a block that was in flight. */
static int report_failed_read(struct stream_run *run, const struct dr_request *request, const struct dr_error *why,
                              struct dr_error *error) {
    const struct dr_block *block = request->user;
    DR_NEW_ERROR(ignored);
    int fd;
    if (dr_input_hold(run->stream->input, block->file, &fd, &ignored) < 0)
        return report_unreadable(run, block, -1, request->data, why, error);
    int rc = report_unreadable(run, block, fd, request->data, why, error);
    dr_input_release(run->stream->input, block->file);
    return rc;
}

/* What is in flight, or nothing within a while; what failed is the user's to go on without, or not. */
static int finish_block(struct stream_run *run, struct dr_engine *engine, struct dr_error *error) {
    struct dr_request *done;
    DR_NEW_ERROR(why);
    int rc = dr_engine_wait(engine, WAIT_MS, &done, &why);
    if (!done) {
        if (rc < 0)
            *error = why;
        return rc;
    }
    rc = rc < 0 ? report_failed_read(run, done, &why, error)
                : use_piece(run, engine->worker, done->user, done->data, error);
    release_block(run, done);
    dr_engine_release(engine, done);
    return rc;
}

static int read_blocks(struct stream_run *run, struct dr_engine *engine, struct dr_error *error) {
    while (!dr_workers_stopped(&run->workers)) {
        int rc = fill_queue(run, engine, error);
        if (rc < 0)
            return rc;
        if (engine->in_flight == 0)
            return 0;
        rc = finish_block(run, engine, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int work(void *context, unsigned index, struct dr_error *error) {
    struct stream_run *run = context;
    struct dr_engine *engine = NULL;
    int rc = dr_kept_take(&engine, run->options->engine, run->depth, run->most, run->options->block_size, error);
    if (rc < 0)
        return rc;
    dr_pool_drop_spares(&engine->pool); /* of a save before: a load has other memory beside its buffers */
    engine->watch = run->options->watch;
    engine->worker = index;
    atomic_store(&run->engine, engine->ops->name);
    rc = read_blocks(run, engine, error);
    dr_engine_drain(engine);
    for (unsigned i = 0; i < engine->pool.count; i++) /* what was in flight when it was stopped */
        release_block(run, &engine->requests[i]);
    dr_kept_give(engine);
    return rc;
}

static bool is_cached_block(struct dr_input *input, const struct dr_block *block) {
    DR_NEW_ERROR(ignored);
    int fd;
    if (dr_input_hold(input, block->file, &fd, &ignored) < 0)
        return false;
    bool cached = is_cached(fd, block);
    dr_input_release(input, block->file);
    return cached;
}

/* Whether there is little to read, from the page cache: a thread would be waited for longer than that takes. */
static bool is_at_hand(const struct stream_run *run) {
    const struct dr_stream *stream = run->stream;
    if (stream->count > HERE_BLOCKS || run->options->direct == DR_DIRECT_ON)
        return false;
    uint64_t bytes = 0;
    for (size_t i = 0; i < stream->count; i++)
        bytes += stream->blocks[i].hi - stream->blocks[i].lo;
    for (size_t i = 0; bytes <= HERE_BYTES && i < stream->count; i++)
        if (!is_cached_block(stream->input, &stream->blocks[i]))
            return false;
    return bytes <= HERE_BYTES;
}

static int run_workers(struct stream_run *run, const struct dr_control *control, struct dr_error *error) {
    const struct dr_options *options = run->options;
    size_t blocks = run->stream->count;
    unsigned workers = blocks < options->workers ? (unsigned)blocks : options->workers;
    size_t share = (blocks + workers - 1) / workers;
    run->most = options->queue_depth / options->workers;
    if (run->most == 0)
        run->most = 1;
    run->depth = share < run->most ? (unsigned)share : run->most;
    run->at_hand = is_at_hand(run);
    return run->at_hand ? dr_workers_run_here(&run->workers, work, run, error)
                        : dr_workers_run(&run->workers, workers, work, run, control, error);
}

int dr_stream_run(const struct dr_stream *stream, const struct dr_control *control, struct dr_stream_stats *stats,
                  struct dr_error *error) {
    struct stream_run run = {.stream = stream, .options = stream->options};
    int rc = stream->count > 0 ? run_workers(&run, control, error) : 0;
    *stats = (struct dr_stream_stats){
        .bytes = run.bytes, .cached_bytes = run.cached_bytes, .direct = run.direct, .engine = run.engine};
    return rc;
}
