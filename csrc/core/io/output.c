/* Files that are written in blocks. See output.h. */
#include "io/output.h"

#include "base/align.h"
#include "base/memory.h"
#include "io/engine_cache.h"
#include "io/file.h"
#include "io/file_system.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { WAIT_MS = 100 };

/* ---- opening ---- */

static int open_file(struct dr_output *out, bool create, struct dr_error *error) {
    out->dirfd = DR_RETRY(dr_sys.open_dir(out->dir));
    if (out->dirfd < 0)
        return dr_error_system(error, -out->dirfd, DR_CALL_OPEN, out->dir);
    int flags = O_WRONLY | (create ? O_CREAT | O_EXCL : 0);
    out->fd = DR_RETRY(dr_sys.open_below(out->dirfd, out->name, flags, 0666));
    if (out->fd < 0)
        return dr_error_system(error, -out->fd, DR_CALL_OPEN, out->path);
    out->created = create;
    return 0;
}

int dr_output_open(struct dr_output *out, const char *dir, const char *name, bool create,
                   const struct dr_options *options, struct dr_error *error) {
    *out = (struct dr_output){.options = *options, .dirfd = -1, .fd = -1, .owner = dr_process()};
    out->dir = dr_strdup(dir);
    out->name = dr_strdup(name);
    out->path = dr_path_join(dir, name);
    if (!out->dir || !out->name || !out->path)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    return open_file(out, create, error);
}

static int allocate(struct dr_output *out, uint64_t size, struct dr_error *error) {
    struct dr_span span = {.begin = dr_watch_now(out->options.watch), .size = size, .step = DR_STEP_ALLOCATE};
    int rc = size ? DR_RETRY(dr_sys.fallocate(out->fd, (off_t)dr_align_up(size, DR_ALIGNMENT))) : 0;
    dr_watch_note(out->options.watch, span);
    if (rc == -ENOSPC || rc == -EDQUOT || rc == -EFBIG || rc == -EIO)
        return dr_error_io(error, -rc, DR_CALL_FALLOCATE, out->path, 0, (int64_t)size);
    if (rc < 0 && dr_file_system_is(out->dir, DR_FUSE)) {
        out->in_order = true;
        out->options.queue_depth = out->options.workers = 1;
    }
    return 0;
}

int dr_output_prepare(struct dr_output *out, uint64_t size, struct dr_error *error) {
    if (out->prepared)
        return 0;
    out->prepared = true;
    int rc = dr_file_use_direct(out->fd, out->path, out->options.direct, error);
    out->direct = rc > 0;
    return rc < 0 ? rc : allocate(out, size, error);
}

void dr_output_leave_direct(struct dr_output *out) {
    if (out->direct && out->options.direct == DR_DIRECT_AUTO)
        out->direct = dr_sys.set_direct(out->fd, 0) < 0;
}

unsigned dr_output_workers(const struct dr_output *out, uint64_t bytes) {
    uint64_t blocks = bytes / out->options.block_size + 1;
    return blocks < out->options.workers ? (unsigned)blocks : out->options.workers;
}

int dr_output_engines(struct dr_output *out, unsigned count, uint64_t expected, struct dr_error *error) {
    unsigned share = out->options.queue_depth / out->options.workers, most = share ? share : 1;
    uint64_t blocks = expected / out->options.block_size + 1;
    unsigned depth = blocks < most ? (unsigned)blocks : most;
    while (out->engine_count < count) {
        struct dr_engine **engine = &out->engines[out->engine_count];
        struct dr_span span = {.begin = dr_watch_now(out->options.watch),
                               .size = (uint64_t)depth * out->options.block_size,
                               .step = DR_STEP_SET_UP,
                               .worker = out->engine_count,
                               .slot = DR_NO_SLOT};
        int rc = dr_engine_cache_take(engine, out->options.engine, depth, most, out->options.block_size, error);
        if (rc < 0)
            return rc;
        dr_watch_note(out->options.watch, span);
        (*engine)->watch = out->options.watch;
        (*engine)->worker = out->engine_count;
        out->engine_count++;
    }
    return 0;
}

/* ---- blocks ---- */

/* Waits for one block for a while, and gives its buffer back. */
static int release_one(struct dr_engine *engine, struct dr_error *error) {
    struct dr_request *done;
    int rc = dr_engine_wait(engine, WAIT_MS, &done, error);
    if (rc >= 0 && done)
        dr_engine_release(engine, done);
    return rc;
}

int dr_output_take(struct dr_workers *workers, struct dr_engine *engine, struct dr_request **request,
                   struct dr_error *error) {
    while (!(*request = dr_engine_take(engine)) && !(workers && dr_workers_stopped(workers))) {
        int rc = release_one(engine, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int dr_output_submit(struct dr_output *out, struct dr_engine *engine, struct dr_request *request, uint64_t offset,
                     size_t size, struct dr_error *error) {
    assert(!out->direct || (offset % DR_ALIGNMENT == 0 && size % DR_ALIGNMENT == 0));
    request->op = DR_WRITE;
    request->fd = out->fd;
    request->direct = out->direct;
    request->size = request->needed = (uint32_t)size;
    request->offset = (int64_t)offset;
    request->path = out->path;
    return dr_engine_submit(engine, request, error);
}

int dr_output_wait(struct dr_workers *workers, struct dr_engine *engine, struct dr_error *error) {
    while (engine->in_flight > 0 && !(workers && dr_workers_stopped(workers))) {
        int rc = release_one(engine, error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

struct waiting {
    struct dr_output *output;
    struct dr_workers workers;
    atomic_uint next; /* engine to wait for */
};

static int wait_for_some(void *context, unsigned worker, struct dr_error *error) {
    struct waiting *waiting = context;
    int rc = 0;
    (void)worker;
    for (unsigned i; (i = atomic_fetch_add(&waiting->next, 1)) < waiting->output->engine_count;) {
        struct dr_engine *engine = waiting->output->engines[i];
        if (rc == 0)
            rc = dr_output_wait(&waiting->workers, engine, error);
        dr_engine_drain(engine);
    }
    return rc;
}

int dr_output_wait_all(struct dr_output *out, const struct dr_control *control, struct dr_error *error) {
    struct waiting waiting = {.output = out};
    unsigned busy = 0;
    for (unsigned i = 0; i < out->engine_count; i++)
        busy += out->engines[i]->in_flight > 0;
    if (busy == 0)
        return 0;
    return dr_workers_run(&waiting.workers, out->engine_count, wait_for_some, &waiting, control, error);
}

int dr_output_write_at(struct dr_output *out, uint64_t offset, const void *data, size_t size, struct dr_error *error) {
    const uint8_t *at = data;
    if (out->direct)
        return dr_error_invalid(error, DR_NO_ITEM, "%s was opened for direct I/O", out->path);
    while (size > 0) {
        ssize_t n = DR_RETRY(dr_sys.pwrite(out->fd, at, size, (off_t)offset));
        if (n <= 0)
            return dr_error_io(error, n < 0 ? (int)-n : EIO, DR_CALL_WRITE, out->path, (int64_t)offset, (int64_t)size);
        at += n;
        offset += (uint64_t)n;
        size -= (size_t)n;
    }
    return 0;
}

/* ---- the end ---- */

/* Whether the file need not be cut, or cannot be but has its length. */
static bool has_length(const struct dr_output *out, uint64_t length) {
    struct stat st;
    return length == DR_ANY_LENGTH || !out->prepared ||
           (out->in_order && DR_RETRY(dr_sys.fstat(out->fd, &st)) == 0 && (uint64_t)st.st_size == length);
}

int dr_output_sync(struct dr_output *out, uint64_t length, struct dr_syncs *later, const struct dr_control *control,
                   struct dr_error *error) {
    int rc = dr_output_wait_all(out, control, error);
    if (rc < 0)
        return rc;
    rc = has_length(out, length) ? 0 : DR_RETRY(dr_sys.ftruncate(out->fd, (off_t)length));
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_FTRUNCATE, out->path);
    if (out->options.sync == DR_SYNC_OFF)
        return 0;
    struct dr_syncs now, *syncs = later ? later : &now;
    dr_syncs_init(&now);
    int fd = out->fd;
    out->fd = -1;
    rc = dr_syncs_add_file(syncs, fd, out->path, out->options.sync, length, control, error);
    return rc < 0 || later ? rc : dr_syncs_wait(&now, control, out->options.watch, error);
}

int dr_output_close_file(struct dr_output *out, struct dr_error *error) {
    int fd = out->fd;
    out->fd = -1;
    int rc = fd < 0 ? 0 : dr_sys.close(fd);
    return rc < 0 ? dr_error_system(error, -rc, DR_CALL_CLOSE, out->path) : 0;
}

void dr_output_close(struct dr_output *out, bool removed) {
    if (out->owner != dr_process())
        return;
    while (out->engine_count > 0) /* the first, which has spare buffers, is the next to be taken again */
        dr_engine_cache_give(out->engines[--out->engine_count]);
    if (out->fd >= 0)
        dr_sys.close(out->fd);
    if (out->created && removed)
        DR_RETRY(dr_sys.unlink(out->dirfd, out->name));
    if (out->dirfd >= 0)
        dr_sys.close(out->dirfd);
    free(out->name);
    free(out->path);
    free(out->dir);
}
