/* Reading blocks. See stream.h. */
#include "io/stream.h"

#include "base/align.h"
#include "base/crc.h"
#include "io/engine_cache.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>

enum {
    WAIT_MS = 100,
    HERE_BYTES = 1 << 20,
    HERE_BLOCKS = 8,
    SMALL_BLOCK = 128 << 10, /* blocks up to this size are read together with their neighbours */
    RUN_BYTES = 16 << 20,    /* so far apart at most */
};

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

/* A worker, and what it has taken to read: blocks that lie near each other in a file. */
struct reader {
    struct stream_run *run;
    struct dr_engine *engine;
    size_t next, end; /* of the stream's blocks; those before `next` are begun */
};

/* The two descriptors of the file that a run is of; it is held. */
struct opened {
    int fd, direct;
    bool direct_asked;
};

/* Of some blocks of a file, and of what lies between them. */
enum cached { CACHED_NONE, CACHED_SOME, CACHED_ALL };

static enum cached look_for_cached(int fd, const struct dr_block *blocks, size_t count) {
    uint64_t lo = blocks[0].lo, size = blocks[count - 1].hi - lo;
    int64_t bytes = dr_sys.cached(fd, (off_t)lo, size);
    if (bytes >= (int64_t)size)
        return CACHED_ALL;
    return bytes > 0 && count > 1 ? CACHED_SOME : CACHED_NONE;
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

static void queue_block(struct stream_run *run, struct dr_engine *engine, struct dr_request *request,
                        const struct dr_block *block, const struct opened *opened) {
    bool direct = opened->direct >= 0;
    uint64_t size = block->hi - block->lo;
    assert(block->lo % DR_ALIGNMENT == 0 && block->lo < block->hi && size <= run->options->block_size);
    request->op = DR_READ;
    request->fd = direct ? opened->direct : opened->fd;
    request->direct = direct;
    request->offset = (int64_t)block->lo;
    request->size = (uint32_t)(direct ? dr_align_up(size, DR_ALIGNMENT) : size);
    request->needed = (uint32_t)size;
    request->path = run->stream->input->files[block->file].path;
    request->file = (uint32_t)block->file;
    atomic_fetch_add(&run->bytes, size);
    if (direct)
        atomic_store(&run->direct, true);
    dr_engine_queue(engine, request);
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

/* Takes the next blocks, as many as there are requests for: one, or several that are small and near each other. */
static bool take_run(struct reader *reader) {
    const struct dr_stream *stream = reader->run->stream;
    size_t first = atomic_load(&reader->run->next), end;
    do {
        if (first >= stream->count)
            return false;
        const struct dr_block *block = &stream->blocks[first];
        for (end = first + 1; end < stream->count && end - first < reader->engine->pool.free_count; end++) {
            const struct dr_block *next = &stream->blocks[end];
            if (next->file != block->file || next->hi - block->lo > RUN_BYTES || block->hi - block->lo > SMALL_BLOCK ||
                next->hi - next->lo > SMALL_BLOCK)
                break;
        }
    } while (!atomic_compare_exchange_weak(&reader->run->next, &first, end));
    reader->next = first;
    reader->end = end;
    return true;
}

static int ask_for_direct(struct stream_run *run, size_t file, struct opened *opened, struct dr_error *error) {
    if (opened->direct_asked)
        return 0;
    opened->direct_asked = true;
    return dr_input_direct(run->stream->input, file, run->options->direct, &opened->direct, error);
}

/* Reads a block at once through the page cache: 1 when it was used up; or puts it in the queue, and gives 0. */
static int start_held(struct stream_run *run, struct dr_engine *engine, struct dr_request *request,
                      const struct dr_block *block, enum cached cached, struct opened *opened, struct dr_error *error) {
    int rc = 0;
    if (cached == CACHED_SOME)
        cached = look_for_cached(opened->fd, block, 1);
    if (cached == CACHED_ALL && (rc = dr_engine_flush(engine, error)) == 0)
        rc = read_cached(run, engine->worker, block, opened->fd, request->data, error);
    if (rc == 0)
        rc = ask_for_direct(run, block->file, opened, error);
    if (rc == 0)
        queue_block(run, engine, request, block, opened);
    return rc;
}

static int start_block(struct reader *reader, const struct dr_block *block, enum cached cached, struct opened *opened,
                       struct dr_error *error) {
    struct dr_request *request = dr_engine_take(reader->engine);
    take_block(request, block);
    int rc = start_held(reader->run, reader->engine, request, block, cached, opened, error);
    if (rc == 0)
        return 0;
    release_block(reader->run, request);
    dr_engine_release(reader->engine, request);
    return rc < 0 ? rc : 0;
}

/* Holds the run's file for each of its blocks. */
static int hold_run(struct reader *reader, struct opened *opened, struct dr_error *error) {
    enum dr_input_lack lack = reader->engine->in_flight > 0 ? DR_INPUT_TRY : DR_INPUT_WAIT;
    unsigned count = (unsigned)(reader->end - reader->next);
    const struct dr_stream *stream = reader->run->stream;
    return dr_input_hold(stream->input, stream->blocks[reader->next].file, count, lack, &opened->fd, error);
}

static void release_run(struct reader *reader) {
    const struct dr_stream *stream = reader->run->stream;
    for (size_t i = reader->next; i < reader->end; i++)
        dr_input_release(stream->input, stream->blocks[i].file);
}

/* Of a file that is held once for each block of the run. */
static int start_blocks(struct reader *reader, struct opened *opened, struct dr_error *error) {
    struct stream_run *run = reader->run;
    const struct dr_block *blocks = run->stream->blocks;
    const struct dr_block *first = &blocks[reader->next];
    enum cached cached = run->at_hand ? CACHED_ALL : look_for_cached(opened->fd, first, reader->end - reader->next);
    int rc = 0;
    for (; reader->next < reader->end && rc == 0; reader->next++)
        rc = start_block(reader, &blocks[reader->next], cached, opened, error);
    release_run(reader);
    return rc;
}

/* The file of a run cannot be opened. */
static int skip_run(struct reader *reader, const struct dr_error *why, struct dr_error *error) {
    struct dr_request *request = dr_engine_take(reader->engine);
    int rc = 0;
    for (; reader->next < reader->end && rc == 0; reader->next++)
        rc = report_unreadable(reader->run, &reader->run->stream->blocks[reader->next], -1, request->data, why, error);
    dr_engine_release(reader->engine, request);
    return rc;
}

/* Begins nothing where the file's descriptors must wait for those of blocks in flight. */
static int start_run(struct reader *reader, struct dr_error *error) {
    struct stream_run *run = reader->run;
    struct opened opened = {.fd = -1, .direct = -1};
    DR_NEW_ERROR(why);
    int rc = dr_engine_flush(reader->engine, error); /* before a file is opened, which may take long */
    if (rc < 0)
        return rc;
    rc = hold_run(reader, &opened, &why);
    bool is_held = rc == 0;
    /* Where direct I/O must be had, its lack is an error even of a file that is in the page cache. */
    if (is_held && run->options->direct == DR_DIRECT_ON) {
        rc = ask_for_direct(run, run->stream->blocks[reader->next].file, &opened, &why);
        if (rc < 0)
            release_run(reader);
    }
    if (rc == 0)
        return start_blocks(reader, &opened, error);
    if (dr_input_is_lack(&why) && reader->engine->in_flight > 0)
        return 0;
    if (!is_held)
        return skip_run(reader, &why, error);
    *error = why;
    return rc;
}

static int fill_queue(struct reader *reader, struct dr_error *error) {
    struct dr_engine *engine = reader->engine;
    while (!dr_workers_stopped(&reader->run->workers) && engine->pool.free_count > 0) {
        if (reader->next == reader->end && !take_run(reader))
            break;
        size_t before = reader->next;
        int rc = start_run(reader, error);
        if (rc < 0)
            return rc;
        if (reader->next == before)
            break;
    }
    return dr_engine_flush(engine, error);
}

/* The same for a block that was in flight. */
static int report_failed_read(struct stream_run *run, const struct dr_request *request, const struct dr_error *why,
                              struct dr_error *error) {
    const struct dr_block *block = request->user;
    DR_NEW_ERROR(ignored);
    int fd;
    if (dr_input_hold(run->stream->input, block->file, 1, DR_INPUT_TRY, &fd, &ignored) < 0)
        return report_unreadable(run, block, -1, request->data, why, error);
    int rc = report_unreadable(run, block, fd, request->data, why, error);
    dr_input_release(run->stream->input, block->file);
    return rc;
}

/*
 * Uses a block that was in flight, or none within the time; what failed is the user's to go on without, or not. 1: it
 * was a small one.
 */
static int finish_block(struct stream_run *run, struct dr_engine *engine, unsigned timeout_ms, struct dr_error *error) {
    struct dr_request *done;
    DR_NEW_ERROR(why);
    int rc = dr_engine_wait(engine, timeout_ms, &done, &why);
    if (!done) {
        if (rc < 0)
            *error = why;
        return rc;
    }
    rc = rc < 0 ? report_failed_read(run, done, &why, error)
                : use_piece(run, engine->worker, done->user, done->data, error);
    bool is_small = done->needed <= SMALL_BLOCK;
    release_block(run, done);
    dr_engine_release(engine, done);
    return rc < 0 ? rc : is_small;
}

/* One block; of small ones all that are there, so that as many new ones are submitted together. */
static int finish_blocks(struct stream_run *run, struct dr_engine *engine, struct dr_error *error) {
    int rc = finish_block(run, engine, WAIT_MS, error);
    while (rc > 0 && engine->in_flight > 0)
        rc = finish_block(run, engine, 0, error);
    return rc < 0 ? rc : 0;
}

static int read_blocks(struct stream_run *run, struct dr_engine *engine, struct dr_error *error) {
    struct reader reader = {.run = run, .engine = engine};
    while (!dr_workers_stopped(&run->workers)) {
        int rc = fill_queue(&reader, error);
        if (rc < 0)
            return rc;
        if (engine->in_flight == 0)
            return 0;
        rc = finish_blocks(run, engine, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* None where there is no descriptor for its ring, and another worker has an engine. */
static int take_engine(struct stream_run *run, struct dr_engine **engine, struct dr_error *error) {
    const struct dr_options *options = run->options;
    DR_NEW_ERROR(why);
    int rc = dr_engine_cache_take(engine, options->engine, run->depth, run->most, options->block_size, &why);
    if (rc < 0 && dr_input_is_lack(&why) && dr_input_make_room(run->stream->input)) {
        dr_error_clear(&why);
        rc = dr_engine_cache_take(engine, options->engine, run->depth, run->most, options->block_size, &why);
    }
    if (rc >= 0 || (dr_input_is_lack(&why) && atomic_load(&run->engine)))
        return 0;
    *error = why;
    return rc;
}

static int work(void *context, unsigned index, struct dr_error *error) {
    struct stream_run *run = context;
    struct dr_engine *engine = NULL;
    int rc = take_engine(run, &engine, error);
    if (!engine)
        return rc;
    dr_pool_drop_spares(&engine->pool); /* of a save before: a load has other memory beside its buffers */
    engine->watch = run->options->watch;
    engine->worker = index;
    atomic_store(&run->engine, engine->ops->name);
    rc = read_blocks(run, engine, error);
    dr_engine_drain(engine);
    for (unsigned i = 0; i < engine->pool.count; i++) /* what was in flight when it was stopped */
        release_block(run, &engine->requests[i]);
    dr_engine_cache_give(engine);
    return rc;
}

static bool is_cached_block(struct dr_input *input, const struct dr_block *block) {
    DR_NEW_ERROR(ignored);
    int fd;
    if (dr_input_hold(input, block->file, 1, DR_INPUT_TRY, &fd, &ignored) < 0)
        return false;
    bool cached = look_for_cached(fd, block, 1) == CACHED_ALL;
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
    return run->at_hand ? dr_workers_share_here(&run->workers, blocks, work, run, error)
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
