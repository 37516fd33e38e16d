/*
 * The `uring` method: one io_uring per engine, as deep as the pool.
 *
 * Buffers are registered with the ring as far as the memlock limit allows;
 * those beyond it use plain reads and writes. Queue entries cannot run out:
 * the ring is as deep as the pool, and each buffer has one request.
 *
 * A ring is tried before it is used: a sandbox may let it be made and refuse
 * all else. What is submitted together goes to the kernel by one call.
 *
 * A small write into the page cache is made at once, by the caller's thread:
 * many kernels have a thread of theirs make it, which is waited for as long as
 * other programs have the processors. That is what small saves consist of.
 */
#include "base/memory.h"
#include "io/engine.h"
#include "io/sys.h"

#include <errno.h>
#include <liburing.h>
#include <unistd.h>

enum { MAX_SUBMITS = 1000, PAUSE_US = 1000, SMALL_WRITE = 256 << 10 };

struct uring {
    struct io_uring ring;
    struct dr_request *made; /* at once, and not waited for yet; NULL: none */
    int made_result;
    struct io_uring_sqe *entries[]; /* of the requests that are being submitted; room for one per buffer */
};

static unsigned register_buffers(struct io_uring *ring, const struct dr_pool *pool) {
    struct iovec *buffers = dr_calloc(pool->count, sizeof *buffers);
    if (!buffers)
        return 0;
    for (unsigned i = 0; i < pool->count; i++)
        buffers[i] = (struct iovec){dr_pool_buffer(pool, i), pool->buffer_size};
    unsigned count = pool->count;
    while (count > 0 && dr_sys.uring_register(ring, buffers, count) < 0)
        count /= 2;
    free(buffers);
    return count;
}

/* Rings are older than these operations (Linux 5.1 and 5.6). */
static bool has_operations(struct io_uring *ring) {
    return dr_sys.uring_supports(ring, IORING_OP_READ) && dr_sys.uring_supports(ring, IORING_OP_WRITE);
}

static int make_ring(struct io_uring *ring, unsigned depth, struct dr_error *error) {
    int rc = dr_sys.uring_init(depth, ring);
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_URING_SETUP, NULL);
    if (!has_operations(ring))
        rc = dr_error_system(error, ENOSYS, DR_CALL_URING_SETUP, NULL);
    else if ((rc = DR_RETRY(dr_sys.uring_try(ring))) < 0)
        dr_error_system(error, -rc, DR_CALL_URING_ENTER, NULL);
    if (rc < 0)
        io_uring_queue_exit(ring);
    return rc;
}

static int uring_open(struct dr_engine *engine, struct dr_error *error) {
    struct uring *uring = dr_calloc(1, sizeof *uring + engine->pool.count * sizeof *uring->entries);
    if (!uring)
        return dr_error_memory(error);
    int rc = make_ring(&uring->ring, engine->pool.count, error);
    if (rc < 0) {
        free(uring);
        return rc;
    }
    engine->registered = register_buffers(&uring->ring, &engine->pool);
    engine->method = uring;
    return 0;
}

static void prepare(struct io_uring_sqe *sqe, const struct dr_request *request, bool registered) {
    uint8_t *data = request->data + request->done;
    uint32_t size = request->size - request->done;
    uint64_t offset = (uint64_t)request->offset + request->done;
    if (request->op == DR_READ && registered)
        io_uring_prep_read_fixed(sqe, request->fd, data, size, offset, (int)request->buffer);
    else if (request->op == DR_READ)
        io_uring_prep_read(sqe, request->fd, data, size, offset);
    else if (registered)
        io_uring_prep_write_fixed(sqe, request->fd, data, size, offset, (int)request->buffer);
    else
        io_uring_prep_write(sqe, request->fd, data, size, offset);
}

/* Whether it was one that goes without the ring, of which there may be one at a time. */
static bool made_at_once(struct uring *uring, struct dr_request *request) {
    if (uring->made || request->op != DR_WRITE || request->direct || request->size > SMALL_WRITE)
        return false;
    uring->made = request;
    uring->made_result = (int)dr_sys.pwrite(request->fd, request->data + request->done, request->size - request->done,
                                            request->offset + request->done);
    return true;
}

/* How many of the requests have got an entry of the queue, which is as long as the pool. */
static unsigned prepare_all(struct dr_engine *engine, struct dr_request *const *requests, unsigned count) {
    struct uring *uring = engine->method;
    for (unsigned i = 0; i < count; i++) {
        struct io_uring_sqe *entry = uring->entries[i] = io_uring_get_sqe(&uring->ring);
        if (!entry)
            return i;
        bool own = requests[i]->data == dr_pool_buffer(&engine->pool, requests[i]->buffer);
        prepare(entry, requests[i], own && requests[i]->buffer < engine->registered);
        io_uring_sqe_set_data(entry, requests[i]);
    }
    return count;
}

/* Gives the kernel all entries of the queue; why it took no more of them. */
static int give_entries(struct io_uring *ring) {
    int rc = 0;
    for (unsigned tries = 0; io_uring_sq_ready(ring) > 0 && tries < MAX_SUBMITS; tries++) {
        rc = dr_sys.uring_submit(ring);
        if (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY)
            usleep(PAUSE_US);
        else if (rc < 0)
            break;
    }
    return rc;
}

static unsigned uring_submit(struct dr_engine *engine, struct dr_request *const *requests, unsigned count,
                             struct dr_error *error) {
    struct uring *uring = engine->method;
    if (count == 1 && made_at_once(uring, requests[0]))
        return 1;
    unsigned prepared = prepare_all(engine, requests, count);
    int rc = give_entries(&uring->ring);
    unsigned left = io_uring_sq_ready(&uring->ring);
    unsigned started = left < prepared ? prepared - left : 0;
    /* Entries that were not taken stay queued; as no-ops they can do no harm if a later submit flushes them. */
    for (unsigned i = started; i < prepared; i++) {
        io_uring_prep_nop(uring->entries[i]);
        io_uring_sqe_set_data(uring->entries[i], NULL);
    }
    if (started < prepared)
        dr_error_io(error, rc < 0 ? -rc : EIO, DR_CALL_URING_ENTER, requests[started]->path, requests[started]->offset,
                    requests[started]->size);
    else if (started < count)
        dr_error_system(error, EBUSY, DR_CALL_URING_GET_SQE, requests[started]->path);
    return started;
}

static int uring_wait(struct dr_engine *engine, unsigned timeout_ms, struct dr_request **request, int *result,
                      struct dr_error *error) {
    struct uring *uring = engine->method;
    struct io_uring_cqe *cqe;
    *request = uring->made;
    uring->made = NULL;
    if (*request) {
        *result = uring->made_result;
        return 0;
    }
    int rc = dr_sys.uring_wait(&uring->ring, &cqe, timeout_ms);
    if (rc == -ETIME || rc == -EINTR || rc == -EAGAIN)
        return 0;
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_URING_ENTER, NULL);
    *request = io_uring_cqe_get_data(cqe);
    *result = dr_sys.uring_result(cqe);
    io_uring_cqe_seen(&uring->ring, cqe);
    return 0;
}

static void uring_close(struct dr_engine *engine) {
    struct uring *uring = engine->method;
    /* The ring's own end comes later, in the kernel's time; pinned memory would count against the limit until then. */
    if (engine->registered > 0)
        io_uring_unregister_buffers(&uring->ring);
    io_uring_queue_exit(&uring->ring);
    free(uring);
}

/* Unmaps and closes the child's copies; buffers that were unregistered here would be so in the parent. */
static void uring_forget(struct dr_engine *engine) {
    struct uring *uring = engine->method;
    io_uring_queue_exit(&uring->ring);
    free(uring);
}

const struct dr_engine_ops dr_engine_uring = {
    .name = "uring",
    .open = uring_open,
    .submit = uring_submit,
    .wait = uring_wait,
    .close = uring_close,
    .forget = uring_forget,
};
