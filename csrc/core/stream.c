/* Reading blocks. See stream.h. */
#include "stream.h"

#include "crc.h"
#include "engine.h"
#include "file.h"
#include "sys.h"

#include <errno.h>

enum { WAIT_MS = 100 };

struct run {
    const struct dr_stream *stream;
    const struct dr_options *options;
    struct dr_crew crew;
    atomic_size_t next; /* block to take */
    unsigned depth;     /* buffers per worker */
    pthread_mutex_t files_lock;
    atomic_uint_fast64_t bytes, cached_bytes;
    atomic_bool direct;
    const char *_Atomic engine;
};

static struct dr_input_file *file_of(const struct run *run, const struct dr_block *block) {
    return &run->stream->input->files[block->file];
}

/* ---- which descriptor a block is read through ---- */

/* A file that cannot be opened is why a block is lost; that direct I/O was asked for in vain is an error. */
static int open_direct(struct run *run, struct dr_input_file *file, struct dr_error *why, struct dr_error *error) {
    file->direct_tried = true;
    int rc = dr_input_open(run->stream->input, file, &file->direct_fd, why);
    if (rc < 0)
        return rc;
    rc = dr_file_use_direct(file->direct_fd, file->path, run->options->direct, error);
    if (rc <= 0) {
        dr_sys.close(file->direct_fd);
        file->direct_fd = -1;
    }
    return rc;
}

static int open_file(struct run *run, struct dr_input_file *file, struct dr_error *why, struct dr_error *error) {
    int rc = 0;
    pthread_mutex_lock(&run->files_lock);
    if (file->buffered_fd < 0)
        rc = dr_input_open(run->stream->input, file, &file->buffered_fd, why);
    if (rc == 0 && !file->direct_tried && run->options->direct != DR_DIRECT_OFF)
        rc = open_direct(run, file, why, error);
    pthread_mutex_unlock(&run->files_lock);
    return rc < 0 ? rc : 0;
}

static void close_block(struct run *run, const struct dr_block *block) {
    struct dr_input_file *file = file_of(run, block);
    pthread_mutex_lock(&run->files_lock);
    if (--file->blocks_left == 0)
        dr_input_close(file);
    pthread_mutex_unlock(&run->files_lock);
}

static bool is_cached(const struct dr_input_file *file, const struct dr_block *block) {
    uint64_t size = block->hi - block->lo;
    return dr_sys.cached(file->buffered_fd, (off_t)block->lo, size) >= (int64_t)size;
}

static int use_piece(struct run *run, unsigned worker, const struct dr_block *piece, const uint8_t *data,
                     struct dr_error *error) {
    struct dr_watch *watch = run->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch), .offset = piece->lo, .size = piece->hi - piece->lo,
                           .step = DR_STEP_USE, .file = (uint32_t)piece->file, .worker = worker};
    int rc = run->stream->use(run->stream->context, piece, data, &span.crc, error);
    dr_watch_note(watch, span);
    return rc;
}

/* A block that could not be read, for the reason in *why: 0 when the user goes on without it. */
static int lose(struct run *run, const struct dr_block *block, uint8_t *buffer, const struct dr_error *why,
                struct dr_error *error) {
    if (run->stream->lost)
        return run->stream->lost(run->stream->context, &run->crew, block, buffer, why, error);
    *error = *why;
    return -why->err;
}

/* ---- the two ways to read a block ---- */

static bool read_all(int fd, uint8_t *data, uint64_t lo, uint64_t hi) {
    while (lo < hi) {
        ssize_t n = DR_RETRY(dr_sys.pread(fd, data, hi - lo, (off_t)lo));
        if (n <= 0)
            return false;
        lo += (uint64_t)n;
        data += n;
    }
    return true;
}

/*
 * A block that the page cache holds, one CRC block at a time: the buffer then stays in the processor's cache between
 * the three passes over it. 1 when it was used up, 0 when it must be read the other way (which also reports errors).
 */
static int read_cached(struct run *run, unsigned worker, const struct dr_block *block, uint8_t *buffer,
                       struct dr_error *error) {
    const struct dr_input_file *file = file_of(run, block);
    if (!is_cached(file, block))
        return 0;
    struct dr_watch *watch = run->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch), .offset = block->lo, .size = block->hi - block->lo,
                           .step = DR_STEP_READ, .file = (uint32_t)block->file, .worker = worker,
                           .slot = DR_NO_SLOT};
    struct dr_block piece = *block;
    for (piece.lo = block->lo; piece.lo < block->hi; piece.lo = piece.hi) {
        piece.hi = block->in_one ? block->hi : dr_align_down(piece.lo, DR_CRC_BLOCK) + DR_CRC_BLOCK;
        if (piece.hi > block->hi)
            piece.hi = block->hi;
        if (!read_all(file->buffered_fd, buffer, piece.lo, piece.hi))
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

static int submit_block(struct run *run, struct dr_engine *engine, struct dr_request *request,
                        const struct dr_block *block, struct dr_error *error) {
    const struct dr_input_file *file = file_of(run, block);
    bool direct = file->direct_fd >= 0;
    uint64_t size = block->hi - block->lo;
    request->op = DR_READ;
    request->fd = direct ? file->direct_fd : file->buffered_fd;
    request->direct = direct;
    request->offset = (int64_t)block->lo;
    request->size = (uint32_t)(direct ? dr_align_up(size, DR_ALIGNMENT) : size);
    request->needed = (uint32_t)size;
    request->path = file->path;
    request->user = (void *)(uintptr_t)block;
    request->file = (uint32_t)block->file;
    atomic_fetch_add(&run->bytes, size);
    if (direct)
        atomic_store(&run->direct, true);
    return dr_engine_submit(engine, request, error);
}

/* ---- the workers ---- */

/* Puts a block in flight, or reads it at once through the page cache. */
static int start_block(struct run *run, struct dr_engine *engine, struct dr_request *request,
                       const struct dr_block *block, struct dr_error *error) {
    struct dr_error why;
    dr_error_clear(&why);
    int rc = open_file(run, file_of(run, block), &why, error);
    if (why.kind != DR_ERROR_NONE)
        rc = lose(run, block, request->data, &why, error);
    else if (rc == 0 && (rc = read_cached(run, engine->worker, block, request->data, error)) == 0)
        return submit_block(run, engine, request, block, error);
    dr_engine_release(engine, request);
    close_block(run, block);
    return rc < 0 ? rc : 0;
}

static int fill_queue(struct run *run, struct dr_engine *engine, struct dr_error *error) {
    while (!dr_crew_stopped(&run->crew) && atomic_load(&run->next) < run->stream->count) {
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

/* What is in flight, or nothing within a while; what failed is the user's to lose. */
static int finish_block(struct run *run, struct dr_engine *engine, struct dr_error *error) {
    struct dr_request *done;
    struct dr_error why;
    dr_error_clear(&why);
    int rc = dr_engine_wait(engine, WAIT_MS, &done, &why);
    if (!done) {
        if (rc < 0)
            *error = why;
        return rc;
    }
    const struct dr_block *block = done->user;
    rc = rc < 0 ? lose(run, block, done->data, &why, error)
                : use_piece(run, engine->worker, block, done->data, error);
    dr_engine_release(engine, done);
    close_block(run, block);
    return rc;
}

static int read_blocks(struct run *run, struct dr_engine *engine, struct dr_error *error) {
    while (!dr_crew_stopped(&run->crew)) {
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
    struct run *run = context;
    struct dr_engine *engine = NULL;
    int rc = dr_engine_open(&engine, run->options->engine, run->depth, run->options->block_size, error);
    if (rc < 0)
        return rc;
    engine->watch = run->options->watch;
    engine->worker = index;
    atomic_store(&run->engine, engine->ops->name);
    rc = read_blocks(run, engine, error);
    dr_engine_close(engine);
    return rc;
}

static int run_crew(struct run *run, const struct dr_control *control, struct dr_error *error) {
    const struct dr_options *options = run->options;
    size_t blocks = run->stream->count;
    unsigned workers = blocks < options->workers ? (unsigned)blocks : options->workers;
    size_t share = (blocks + workers - 1) / workers;
    run->depth = options->queue_depth / options->workers;
    if (run->depth > share)
        run->depth = (unsigned)share;
    if (run->depth == 0)
        run->depth = 1;
    return dr_crew_run(&run->crew, workers, work, run, control, error);
}

int dr_stream_run(const struct dr_stream *stream, const struct dr_control *control, struct dr_stream_stats *stats,
                  struct dr_error *error) {
    struct run run = {.stream = stream, .options = stream->options};
    int rc = 0;
    for (size_t i = 0; i < stream->count; i++)
        stream->input->files[stream->blocks[i].file].blocks_left++;
    pthread_mutex_init(&run.files_lock, NULL);
    if (stream->count > 0)
        rc = run_crew(&run, control, error);
    pthread_mutex_destroy(&run.files_lock);
    *stats = (struct dr_stream_stats){
        .bytes = run.bytes, .cached_bytes = run.cached_bytes, .direct = run.direct, .engine = run.engine};
    return rc;
}
