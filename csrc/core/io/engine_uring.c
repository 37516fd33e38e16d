/*
 * The `uring` method: one io_uring per engine, as deep as the pool.
 *
 * Buffers are registered with the ring as far as the memlock limit allows;
 * those beyond it use plain reads and writes. Queue entries cannot run out:
 * the ring is as deep as the pool, and each buffer has one request.
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

static int uring_open(struct dr_engine *engine, struct dr_error *error) {
    struct uring *uring = dr_calloc(1, sizeof *uring);
    if (!uring)
        return dr_error_memory(error);
    int rc = dr_sys.uring_init(engine->pool.count, &uring->ring);
    if (rc < 0) {
        free(uring);
        return dr_error_system(error, -rc, DR_CALL_URING_SETUP, NULL);
    }
    /* Rings are older than these operations (Linux 5.1 and 5.6). */
    if (!dr_sys.uring_supports(&uring->ring, IORING_OP_READ) || !dr_sys.uring_supports(&uring->ring, IORING_OP_WRITE)) {
        io_uring_queue_exit(&uring->ring);
        free(uring);
        return dr_error_system(error, ENOSYS, DR_CALL_URING_SETUP, NULL);
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

static int uring_submit(struct dr_engine *engine, struct dr_request *request, struct dr_error *error) {
    struct uring *uring = engine->method;
    if (!uring->made && request->op == DR_WRITE && !request->direct && request->size <= SMALL_WRITE) {
        uring->made = request;
        uring->made_result = (int)dr_sys.pwrite(request->fd, request->data + request->done,
                                                request->size - request->done, request->offset + request->done);
        return 0;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    if (!sqe)
        return dr_error_system(error, EBUSY, DR_CALL_URING_GET_SQE, request->path);
    bool own = request->data == dr_pool_buffer(&engine->pool, request->buffer);
    prepare(sqe, request, own && request->buffer < engine->registered);
    io_uring_sqe_set_data(sqe, request);
    int rc = dr_sys.uring_submit(&uring->ring);
    for (unsigned tries = 0; (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY) && tries < MAX_SUBMITS; tries++) {
        usleep(PAUSE_US);
        rc = dr_sys.uring_submit(&uring->ring);
    }
    if (rc < 0) {
        /* The entry stays queued; as a no-op it can do no harm if a later submit flushes it. */
        io_uring_prep_nop(sqe);
        io_uring_sqe_set_data(sqe, NULL);
        return dr_error_io(error, -rc, DR_CALL_URING_ENTER, request->path, request->offset, request->size);
    }
    return 0;
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
