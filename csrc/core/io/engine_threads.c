/*
 * The `threads` method: pread and pwrite in a few threads.
 *
 * The fallback where io_uring is forbidden, and the oracle in tests. The
 * engine's owner queues requests and collects results. Each queued request has
 * a thread of the pool (thread_pool.h), up to a limit; a thread that is done
 * with one takes the next. One mutex guards both queues. Where no thread can
 * be had, the owner transfers itself, as it submits.
 */
#include "base/clock.h"
#include "base/memory.h"
#include "io/engine.h"
#include "io/sys.h"
#include "io/thread_pool.h"

#include <pthread.h>

enum { MAX_THREADS = 8 };

struct queue {
    struct dr_request **slots; /* a ring as long as the pool: it cannot overflow */
    unsigned head, count, size;
};

struct threads {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a transfer is done, or a thread */
    struct queue todo, done;
    int *results;     /* by request index */
    unsigned serving; /* threads of the pool that transfer */
};

static void push(struct queue *queue, struct dr_request *request) {
    queue->slots[(queue->head + queue->count++) % queue->size] = request;
}

static struct dr_request *pop(struct queue *queue) {
    struct dr_request *request = queue->slots[queue->head];
    queue->head = (queue->head + 1) % queue->size;
    queue->count--;
    return request;
}

static int transfer(const struct dr_request *request) {
    uint8_t *data = request->data + request->done;
    size_t size = request->size - request->done;
    off_t offset = (off_t)(request->offset + request->done);
    return (int)(request->op == DR_READ ? dr_sys.pread(request->fd, data, size, offset)
                                        : dr_sys.pwrite(request->fd, data, size, offset));
}

/* A job of the thread pool: transfers until there is nothing to do. Once it has let go of the lock the engine may go.
 */
static void serve(void *argument) {
    struct threads *threads = argument;
    pthread_mutex_lock(&threads->lock);
    while (threads->todo.count > 0) {
        struct dr_request *request = pop(&threads->todo);
        pthread_mutex_unlock(&threads->lock);
        int result = transfer(request);
        pthread_mutex_lock(&threads->lock);
        threads->results[request->buffer] = result;
        push(&threads->done, request);
        pthread_cond_signal(&threads->changed);
    }
    threads->serving--;
    pthread_cond_signal(&threads->changed);
    pthread_mutex_unlock(&threads->lock);
}

static void free_threads(struct threads *threads) {
    free(threads->todo.slots);
    free(threads->done.slots);
    free(threads->results);
    free(threads);
}

static void threads_close(struct dr_engine *engine) {
    struct threads *threads = engine->method;
    pthread_mutex_lock(&threads->lock);
    while (threads->serving > 0)
        pthread_cond_wait(&threads->changed, &threads->lock);
    pthread_mutex_unlock(&threads->lock);
    pthread_cond_destroy(&threads->changed);
    pthread_mutex_destroy(&threads->lock);
    free_threads(threads);
}

/* A forked child has none of the threads. */
static void threads_forget(struct dr_engine *engine) { free_threads(engine->method); }

static int threads_open(struct dr_engine *engine, struct dr_error *error) {
    unsigned depth = engine->pool.count;
    struct threads *threads = dr_calloc(1, sizeof *threads);
    if (!threads)
        return dr_error_memory(error);
    pthread_mutex_init(&threads->lock, NULL);
    dr_clock_cond_init(&threads->changed);
    threads->todo = (struct queue){.slots = dr_calloc(depth, sizeof(void *)), .size = depth};
    threads->done = (struct queue){.slots = dr_calloc(depth, sizeof(void *)), .size = depth};
    threads->results = dr_calloc(depth, sizeof *threads->results);
    engine->method = threads;
    bool memory = threads->todo.slots && threads->done.slots && threads->results;
    if (!memory) {
        threads_close(engine);
        return dr_error_memory(error);
    }
    return 0;
}

/* With the lock: has one more thread, for the request that was queued last. Gives whether any thread works. */
static bool is_served(struct threads *threads) {
    if (threads->serving < MAX_THREADS)
        threads->serving += dr_thread_pool_run(serve, threads) == 0;
    return threads->serving > 0;
}

static unsigned threads_submit(struct dr_engine *engine, struct dr_request *const *requests, unsigned count,
                               struct dr_error *error) {
    (void)error;
    struct threads *threads = engine->method;
    pthread_mutex_lock(&threads->lock);
    for (unsigned i = 0; i < count; i++) {
        push(&threads->todo, requests[i]);
        if (is_served(threads))
            continue;
        struct dr_request *request = pop(&threads->todo);
        threads->results[request->buffer] = transfer(request);
        push(&threads->done, request);
    }
    pthread_mutex_unlock(&threads->lock);
    return count;
}

static int threads_wait(struct dr_engine *engine, unsigned timeout_ms, struct dr_request **request, int *result,
                        struct dr_error *error) {
    (void)error;
    struct threads *threads = engine->method;
    struct timespec until = dr_clock_after(timeout_ms);
    *request = NULL;
    pthread_mutex_lock(&threads->lock);
    while (threads->done.count == 0 && timeout_ms > 0)
        if (pthread_cond_timedwait(&threads->changed, &threads->lock, &until) != 0)
            break;
    if (threads->done.count > 0) {
        *request = pop(&threads->done);
        *result = threads->results[(*request)->buffer];
    }
    pthread_mutex_unlock(&threads->lock);
    return 0;
}

const struct dr_engine_ops dr_engine_threads = {
    .name = "threads",
    .open = threads_open,
    .submit = threads_submit,
    .wait = threads_wait,
    .close = threads_close,
    .forget = threads_forget,
};
