/* Writing one data file. See save.h. */
#include "data/save.h"

#include "base/align.h"
#include "base/memory.h"
#include "data/save_window.h"
#include "io/engine.h"
#include "io/file.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { WAIT_MS = 100 };

struct dr_writer {
    struct dr_options options;
    char *name, *path, *dir;
    int dirfd, fd;
    pid_t owner; /* a forked child inherits the memory, but neither the rings nor the file are its own */
    bool direct, finished, failed;
    uint64_t expected; /* bytes, from the size hint */
    uint64_t position; /* the stream's length so far */
    uint8_t *carry;    /* the bytes from the last block boundary to position */
    struct dr_engine *engines[DR_MAX_WORKERS];
    unsigned engine_count;
    uint32_t *crcs; /* of the last call's records, for the caller */
    struct open_record open;
};

/* One call of dr_writer_write, for its workers. */
struct writing {
    struct dr_writer *writer;
    struct save_window window;
    uint8_t *carry_out;        /* the writer's next carry */
    atomic_uint_fast64_t next; /* block to take */
};

/* ---- writing blocks ---- */

/* Waits for one block for a while, and gives its buffer back. */
static int release_one(struct dr_engine *engine, struct dr_error *error) {
    struct dr_request *done;
    int rc = dr_engine_wait(engine, WAIT_MS, &done, error);
    if (rc >= 0 && done)
        dr_engine_release(engine, done);
    return rc;
}

static int take(struct dr_workers *workers, struct dr_engine *engine, struct dr_request **request,
                struct dr_error *error) {
    while (!(*request = dr_engine_take(engine)) && !(workers && dr_workers_stopped(workers))) {
        int rc = release_one(engine, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int submit(struct dr_writer *w, struct dr_engine *engine, struct dr_request *request, uint64_t offset,
                  size_t size, struct dr_error *error) {
    request->op = DR_WRITE;
    request->fd = w->fd;
    request->direct = w->direct;
    request->size = request->needed = (uint32_t)size;
    request->offset = (int64_t)offset;
    request->path = w->path;
    return dr_engine_submit(engine, request, error);
}

static int finish_requests(struct dr_workers *workers, struct dr_engine *engine, struct dr_error *error) {
    while (engine->in_flight > 0 && !(workers && dr_workers_stopped(workers))) {
        int rc = release_one(engine, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Takes blocks, fills and submits them. The last one, which is not full, goes to carry_out. */
static int write_blocks(struct writing *writing, struct dr_engine *engine, struct dr_error *error) {
    struct save_window *window = &writing->window;
    size_t block_size = window->options->block_size;
    while (!dr_workers_stopped(&window->workers)) {
        uint64_t start = atomic_fetch_add(&writing->next, 1) * block_size;
        uint64_t end = start + block_size;
        if (start >= window->end)
            break;
        if (end > window->end) {
            dr_save_window_fill(window, engine->worker, start, window->end, writing->carry_out);
            break;
        }
        struct dr_request *request;
        int rc = take(&window->workers, engine, &request, error);
        if (rc < 0)
            return rc;
        if (!request || !dr_save_window_fill(window, engine->worker, start, end, request->data))
            return 0;
        rc = submit(writing->writer, engine, request, start, block_size, error);
        if (rc < 0)
            return rc;
    }
    return finish_requests(&window->workers, engine, error);
}

/* A thread's requests are cancelled when it ends, so none is left in flight by then. */
static int work(void *context, unsigned index, struct dr_error *error) {
    struct writing *writing = context;
    struct dr_engine *engine = writing->writer->engines[index];
    int rc = write_blocks(writing, engine, error);
    dr_engine_drain(engine);
    return rc;
}

static unsigned workers_for(const struct dr_writer *w, uint64_t bytes) {
    uint64_t blocks = bytes / w->options.block_size + 1;
    return blocks < w->options.workers ? (unsigned)blocks : w->options.workers;
}

/* Buffers beyond what the file needs are never allocated. */
static int open_engines(struct dr_writer *w, unsigned count, struct dr_error *error) {
    unsigned depth = w->options.queue_depth / w->options.workers;
    uint64_t blocks = (w->expected > w->position ? w->expected : w->position) / w->options.block_size + 1;
    if (blocks < depth)
        depth = (unsigned)blocks;
    while (w->engine_count < count) {
        struct dr_span span = {.begin = dr_watch_now(w->options.watch),
                               .size = (uint64_t)depth * w->options.block_size,
                               .step = DR_STEP_SET_UP,
                               .worker = w->engine_count,
                               .slot = DR_NO_SLOT};
        int rc = dr_engine_open(&w->engines[w->engine_count], w->options.engine, depth ? depth : 1,
                                w->options.block_size, error);
        if (rc < 0)
            return rc;
        dr_watch_note(w->options.watch, span);
        w->engines[w->engine_count]->watch = w->options.watch;
        w->engines[w->engine_count]->worker = w->engine_count;
        w->engine_count++;
    }
    return 0;
}

static void report(const struct save_window *window, struct dr_placed *placed) {
    for (size_t i = 0; i < window->count; i++) {
        const struct piece *p = &window->pieces[i];
        placed[i] = (struct dr_placed){
            .offset = p->record,
            .length = p->end - p->record,
            .payload_offset = p->payload,
            .payload_size = p->source->total,
            .crcs = p->crcs,
        };
    }
}

static int run(struct writing *writing, const struct dr_control *control, struct dr_error *error) {
    struct dr_writer *w = writing->writer;
    struct save_window *window = &writing->window;
    unsigned workers = workers_for(w, window->end - window->begin);
    if (window->end > w->expected)
        w->expected = window->end;
    int rc = open_engines(w, workers, error);
    if (rc < 0)
        return rc;
    atomic_init(&writing->next, window->begin / w->options.block_size);
    rc = dr_workers_run(&window->workers, workers, work, writing, control, error);
    if (rc < 0)
        return rc;
    assert(window->begin == w->position && window->end >= window->begin);
    uint8_t *old = w->carry;
    w->carry = writing->carry_out;
    writing->carry_out = old;
    w->position = window->end;
    if (window->count == 1) {
        const struct dr_source *s = window->pieces[0].source;
        w->open.done = s->part_offset + s->size == s->total ? 0 : s->part_offset + s->size;
    }
    return 0;
}

static int check_usable(const struct dr_writer *w, struct dr_error *error) {
    if (w->owner != getpid())
        return dr_error_invalid(error, DR_NO_ITEM, "the writer of %s belongs to the parent process", w->path);
    if (w->failed || w->finished)
        return dr_error_invalid(error, DR_NO_ITEM, "the writer of %s was closed, or failed before", w->path);
    return 0;
}

static void fail(struct dr_writer *w, struct dr_error *error) {
    w->failed = true;
    dr_error_at(error, w->path);
}

int dr_writer_write(struct dr_writer *w, const struct dr_source *sources, size_t count, struct dr_placed *placed,
                    const struct dr_control *control, struct dr_error *error) {
    int rc = check_usable(w, error);
    if (rc < 0)
        return rc;
    struct writing writing = {
        .writer = w,
        .window = {.options = &w->options, .path = w->path, .carry = w->carry, .open = &w->open, .begin = w->position},
    };
    struct save_window *window = &writing.window;
    free(w->crcs);
    rc = dr_save_window_init(window, sources, count, error);
    w->crcs = window->crcs;
    if (rc == 0 && !(writing.carry_out = dr_sys.map(w->options.block_size)))
        rc = dr_error_system(error, ENOMEM, DR_CALL_MMAP, w->path);
    if (rc == 0)
        rc = run(&writing, control, error);
    if (rc == 0)
        report(window, placed);
    else
        fail(w, error);
    if (writing.carry_out)
        dr_sys.unmap(writing.carry_out, w->options.block_size);
    free(window->pieces);
    return rc;
}

/* ---- opening, finishing, closing ---- */

static int create_file(struct dr_writer *w, uint64_t size_hint, struct dr_error *error) {
    w->dirfd = DR_RETRY(dr_sys.open_dir(w->dir));
    if (w->dirfd < 0)
        return dr_error_system(error, -w->dirfd, DR_CALL_OPEN, w->dir);
    w->fd = DR_RETRY(dr_sys.open_below(w->dirfd, w->name, O_WRONLY | O_CREAT | O_EXCL, 0666));
    if (w->fd < 0)
        return dr_error_system(error, -w->fd, DR_CALL_OPEN, w->path);
    int rc = dr_file_use_direct(w->fd, w->path, w->options.direct, error);
    if (rc < 0)
        return rc;
    w->direct = rc;
    /* Where the file system cannot preallocate the file just grows; a full disk is known at once where it can. */
    struct dr_span span = {.begin = dr_watch_now(w->options.watch), .size = size_hint, .step = DR_STEP_ALLOCATE};
    rc = size_hint ? DR_RETRY(dr_sys.fallocate(w->fd, (off_t)dr_align_up(size_hint, DR_ALIGNMENT))) : 0;
    dr_watch_note(w->options.watch, span);
    if (rc == -ENOSPC || rc == -EDQUOT || rc == -EFBIG || rc == -EIO)
        return dr_error_io(error, -rc, DR_CALL_FALLOCATE, w->path, 0, (int64_t)size_hint);
    return 0;
}

int dr_writer_open(struct dr_writer **out, const char *dir, const char *name, uint64_t size_hint,
                   const struct dr_options *options, struct dr_error *error) {
    struct dr_writer *w = dr_calloc(1, sizeof *w);
    if (!w)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    w->options = *options;
    w->dirfd = w->fd = -1;
    w->owner = getpid();
    w->expected = size_hint;
    w->dir = dr_strdup(dir);
    w->name = dr_strdup(name);
    w->path = dr_path_join(dir, name);
    int rc = w->dir && w->name && w->path ? create_file(w, size_hint, error)
                                          : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    if (rc < 0) {
        dr_writer_close(w);
        return rc;
    }
    *out = w;
    return 0;
}

/* The last, partial block; for direct I/O it is padded with zeros, which the file's final length cuts off. */
static int write_rest(struct dr_writer *w, struct dr_error *error) {
    uint64_t start = dr_align_down(w->position, w->options.block_size);
    size_t size = (size_t)(w->position - start);
    if (size == 0)
        return 0;
    assert(w->engine_count > 0 && w->carry); /* whoever moved the position has made them */
    struct dr_engine *engine = w->engines[0];
    struct dr_request *request;
    int rc = take(NULL, engine, &request, error);
    if (rc < 0)
        return rc;
    size_t padded = w->direct ? (size_t)dr_align_up(size, DR_ALIGNMENT) : size;
    memcpy(request->data, w->carry, size);
    memset(request->data + size, 0, padded - size);
    rc = submit(w, engine, request, start, padded, error);
    return rc < 0 ? rc : finish_requests(NULL, engine, error);
}

static int make_durable(struct dr_writer *w, const struct dr_control *control, struct dr_error *error) {
    struct dr_span span = {.begin = dr_watch_now(w->options.watch), .size = w->position, .step = DR_STEP_SYNC};
    int rc = DR_RETRY(dr_sys.ftruncate(w->fd, (off_t)w->position));
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_FTRUNCATE, w->path);
    if (!w->options.sync)
        return 0;
    rc = dr_file_sync(w->fd, w->path, control, error);
    dr_watch_note(w->options.watch, span);
    return rc;
}

int dr_writer_finish(struct dr_writer *w, const struct dr_control *control, struct dr_error *error) {
    int rc = check_usable(w, error);
    if (rc < 0)
        return rc;
    w->failed = true;
    if (w->open.done)
        return dr_error_invalid(error, DR_NO_ITEM, "the last part of a tensor in %s is missing", w->path);
    rc = write_rest(w, error);
    if (rc == 0)
        rc = make_durable(w, control, error);
    if (rc < 0) {
        fail(w, error);
        return rc;
    }
    int fd = w->fd;
    w->fd = -1;
    rc = dr_sys.close(fd);
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_CLOSE, w->path);
    w->failed = false;
    w->finished = true;
    return 0;
}

void dr_writer_stats(const struct dr_writer *w, struct dr_writer_stats *out) {
    *out = (struct dr_writer_stats){
        .bytes = w->position,
        .engine = w->engine_count ? w->engines[0]->ops->name : NULL,
        .direct = w->direct,
        .checksum = w->options.checksum,
    };
}

void dr_writer_close(struct dr_writer *w) {
    if (!w)
        return;
    if (w->owner != getpid())
        return;
    bool created = w->fd >= 0 || w->failed;
    for (unsigned i = 0; i < w->engine_count; i++)
        dr_engine_close(w->engines[i]);
    if (w->fd >= 0)
        dr_sys.close(w->fd);
    if (created && !w->finished)
        DR_RETRY(dr_sys.unlink(w->dirfd, w->name));
    if (w->dirfd >= 0)
        dr_sys.close(w->dirfd);
    if (w->carry)
        dr_sys.unmap(w->carry, w->options.block_size);
    free(w->crcs);
    free(w->open.crcs);
    free(w->name);
    free(w->path);
    free(w->dir);
    free(w);
}
