/* What both methods share: choosing one, request states, short and repeated transfers. See engine.h. */
#include "io/engine.h"

#include "base/align.h"
#include "base/memory.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

enum {
    MAX_RETRIES = 1000,      /* of one request; with the pauses in between about a second */
    MAX_DRAIN_ERRORS = 1000, /* in a row, with the same pauses */
    PAUSE_US = 1000,
};

static int open_method(struct dr_engine *engine, const struct dr_engine_ops *ops, struct dr_error *error) {
    engine->ops = ops;
    return ops->open(engine, error);
}

static int choose_method(struct dr_engine *engine, const char *method, struct dr_error *error) {
    const struct dr_engine_ops *const methods[] = {&dr_engine_threads, &dr_engine_uring};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (strcmp(method, methods[i]->name) == 0) {
            engine->asked = methods[i]->name;
            return open_method(engine, methods[i], error);
        }
    engine->asked = "auto";
    DR_NEW_ERROR(ignored);
    if (open_method(engine, &dr_engine_uring, &ignored) == 0)
        return 0;
    return open_method(engine, &dr_engine_threads, error);
}

static void free_engine(struct dr_engine *engine) {
    free(engine->queue);
    free(engine->requests);
    free(engine);
}

int dr_engine_open(struct dr_engine **out, const char *method, unsigned depth, size_t buffer_size,
                   struct dr_error *error) {
    struct dr_engine *engine = dr_calloc(1, sizeof *engine);
    if (!engine)
        return dr_error_memory(error);
    engine->requests = dr_calloc(depth, sizeof *engine->requests);
    engine->queue = dr_calloc(depth, sizeof *engine->queue);
    int rc = engine->requests && engine->queue ? 0 : dr_error_memory(error);
    if (rc == 0)
        rc = dr_pool_init(&engine->pool, depth, buffer_size, error);
    if (rc == 0)
        rc = choose_method(engine, method, error);
    if (rc < 0) {
        dr_pool_destroy(&engine->pool);
        free_engine(engine);
        return rc;
    }
    *out = engine;
    return 0;
}

/* Whether a request may go from one state to another: engine.h tells who does that, and when. */
static inline bool may_move(enum dr_request_state from, enum dr_request_state to) {
    switch (from) {
    case DR_FREE:
        return to == DR_TAKEN;
    case DR_TAKEN:
        return to == DR_QUEUED || to == DR_FREE;
    case DR_QUEUED:
        return to == DR_IN_FLIGHT || to == DR_TAKEN;
    case DR_IN_FLIGHT:
        return to == DR_DONE;
    case DR_DONE:
        return to == DR_QUEUED || to == DR_FREE;
    }
    return false;
}

/* The one place where a request's state changes, and what is in flight is counted. */
static void move_to(struct dr_engine *engine, struct dr_request *request, enum dr_request_state state) {
    assert(request == &engine->requests[request->buffer] && may_move(request->state, state));
    engine->in_flight += state == DR_IN_FLIGHT;
    engine->in_flight -= state == DR_DONE;
    assert(engine->in_flight <= engine->pool.count);
    request->state = state;
}

struct dr_request *dr_engine_take(struct dr_engine *engine) {
    unsigned index;
    if (!dr_pool_take(&engine->pool, &index))
        return NULL;
    struct dr_request *request = &engine->requests[index];
    assert(request->state == DR_FREE);
    *request = (struct dr_request){.buffer = index, .data = dr_pool_buffer(&engine->pool, index)};
    move_to(engine, request, DR_TAKEN);
    return request;
}

/* A transfer lies in its buffer, and a direct one on the grid that it needs. */
static inline bool is_sound(const struct dr_engine *engine, const struct dr_request *request) {
    uint64_t at = (uint64_t)request->offset + request->done;
    bool aligned = !request->direct || (at % DR_ALIGNMENT == 0 && request->size % DR_ALIGNMENT == 0);
    return request->fd >= 0 && request->path && request->offset >= 0 && aligned &&
           request->size <= engine->pool.buffer_size && request->needed <= request->size &&
           request->done < request->size && request->needed > 0;
}

void dr_engine_queue(struct dr_engine *engine, struct dr_request *request) {
    assert(is_sound(engine, request));
    if (request->begin == 0)
        request->begin = dr_watch_now(engine->watch);
    move_to(engine, request, DR_QUEUED);
    engine->queue[engine->queued++] = request;
}

/* Those from queue[first] on are the caller's again. */
static void give_up_queued(struct dr_engine *engine, unsigned first) {
    for (unsigned i = first; i < engine->queued; i++)
        move_to(engine, engine->queue[i], DR_TAKEN);
    engine->queued = 0;
}

int dr_engine_flush(struct dr_engine *engine, struct dr_error *error) {
    if (engine->queued == 0)
        return 0;
    unsigned started = engine->ops->submit(engine, engine->queue, engine->queued, error);
    for (unsigned i = 0; i < started; i++)
        move_to(engine, engine->queue[i], DR_IN_FLIGHT);
    bool is_all = started == engine->queued;
    engine->failed |= !is_all;
    give_up_queued(engine, started);
    return is_all ? 0 : -error->err;
}

int dr_engine_submit(struct dr_engine *engine, struct dr_request *request, struct dr_error *error) {
    dr_engine_queue(engine, request);
    return dr_engine_flush(engine, error);
}

/* Tells the watch of a request that is complete. */
static void note_transfer(const struct dr_engine *engine, const struct dr_request *request) {
    dr_watch_count(engine->watch, request->needed);
    dr_watch_note(engine->watch, (struct dr_span){
                                     .begin = request->begin,
                                     .offset = (uint64_t)request->offset,
                                     .size = request->needed,
                                     .step = request->op == DR_READ ? DR_STEP_READ : DR_STEP_WRITE,
                                     .file = request->file,
                                     .worker = engine->worker,
                                     .slot = request->buffer,
                                 });
}

static int fail(const struct dr_request *request, int err, struct dr_error *error) {
    return dr_error_io(error, err, request->op == DR_READ ? DR_CALL_READ : DR_CALL_WRITE, request->path,
                       request->offset + request->done, request->size - request->done);
}

/* What is left of the request goes through the page cache. */
static int leave_direct(struct dr_request *request, struct dr_error *error) {
    request->direct = false;
    int rc = dr_sys.set_direct(request->fd, 0);
    return rc < 0 ? fail(request, -rc, error) : 0;
}

/* Takes one transfer's result into the request: 1 when it is complete, 0 when more must be submitted. */
static int advance(struct dr_request *request, int result, struct dr_error *error) {
    if (result == -EINVAL && request->direct)
        return leave_direct(request, error);
    /* ECANCELED: the thread has ended that began it. */
    if (result == -EINTR || result == -EAGAIN || result == -ECANCELED) {
        if (++request->retries > MAX_RETRIES)
            return fail(request, -result, error);
        if (result == -EAGAIN)
            usleep(PAUSE_US);
        return 0;
    }
    if (result < 0)
        return fail(request, -result, error);

    uint32_t done = request->done + (uint32_t)result;
    if (done >= request->needed) {
        request->done = done;
        return 1;
    }
    if (result == 0 && request->op == DR_READ)
        return dr_error_corrupt(error, request->path, request->offset + done, DR_NO_ITEM,
                                "the file ends here, %u bytes early", (unsigned)(request->needed - done));
    /* A short direct transfer goes on from an aligned offset, though that repeats some bytes. */
    uint32_t kept = request->direct ? (uint32_t)dr_align_down(done, DR_ALIGNMENT) : done;
    if (kept > request->done) {
        request->done = kept;
        return 0;
    }
    if (++request->retries > MAX_RETRIES)
        return fail(request, EIO, error);
    request->done = done;
    return request->direct ? leave_direct(request, error) : 0;
}

int dr_engine_wait(struct dr_engine *engine, unsigned timeout_ms, struct dr_request **done, struct dr_error *error) {
    assert(engine->queued == 0);
    *done = NULL;
    struct dr_request *request;
    int result;
    int rc = engine->ops->wait(engine, timeout_ms, &request, &result, error);
    engine->failed |= rc < 0;
    if (rc < 0 || !request)
        return rc;
    move_to(engine, request, DR_DONE);
    rc = advance(request, result, error);
    if (rc == 0)
        return dr_engine_submit(engine, request, error);
    *done = request;
    engine->failed |= rc < 0;
    if (rc < 0)
        return rc;
    note_transfer(engine, request);
    return 0;
}

void dr_engine_release(struct dr_engine *engine, struct dr_request *request) {
    move_to(engine, request, DR_FREE);
    dr_pool_give(&engine->pool, request->buffer);
}

/*
 * The kernel may still write into the buffers of what is in flight, so they must come back before anything is freed.
 * Where waiting itself goes on failing, the engine is given up instead: false, and its memory stays allocated.
 */
bool dr_engine_drain(struct dr_engine *engine) {
    give_up_queued(engine, 0);
    for (unsigned errors = 0; engine->in_flight > 0 && errors < MAX_DRAIN_ERRORS;) {
        DR_NEW_ERROR(ignored);
        struct dr_request *request = NULL;
        int result;
        if (engine->ops->wait(engine, 100, &request, &result, &ignored) < 0) {
            engine->failed = true;
            errors++;
            usleep(PAUSE_US);
            continue;
        }
        errors = 0;
        if (request) {
            move_to(engine, request, DR_DONE);
            dr_engine_release(engine, request);
        }
    }
    return engine->in_flight == 0;
}

void dr_engine_close(struct dr_engine *engine) {
    if (!engine || !dr_engine_drain(engine))
        return;
    engine->ops->close(engine);
    dr_pool_destroy(&engine->pool);
    free_engine(engine);
}

void dr_engine_forget(struct dr_engine *engine) {
    engine->ops->forget(engine);
    dr_pool_forget(&engine->pool);
    free_engine(engine);
}
