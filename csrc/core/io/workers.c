/* Worker threads for the length of one call. See workers.h. */
#include "io/workers.h"

#include <assert.h>
#include <errno.h>

enum { STACK_BYTES = 1024 * 1024 };

struct worker {
    struct dr_workers *workers;
    unsigned index;
    int (*work)(void *, unsigned, struct dr_error *);
    void *context;
};

static void record_failure(struct dr_workers *workers, const struct dr_error *error) {
    pthread_mutex_lock(&workers->lock);
    if (workers->error.kind == DR_ERROR_NONE)
        workers->error = *error;
    atomic_store(&workers->stop, true);
    pthread_cond_broadcast(&workers->changed);
    pthread_mutex_unlock(&workers->lock);
}

static void *run_worker(void *argument) {
    struct worker *worker = argument;
    struct dr_workers *workers = worker->workers;
    struct dr_error error;
    dr_error_clear(&error);
    if (worker->work(worker->context, worker->index, &error) < 0)
        record_failure(workers, &error);
    pthread_mutex_lock(&workers->lock);
    workers->running--;
    pthread_cond_broadcast(&workers->changed);
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

/* Waits for the workers, in slices, asking in between whether to go on. */
static void watch(struct dr_workers *workers, const struct dr_control *control) {
    bool cancelled = false;
    pthread_mutex_lock(&workers->lock);
    while (workers->running > 0) {
        struct timespec until = dr_clock_after(DR_POLL_MS);
        int rc = 0;
        while (workers->running > 0 && rc == 0)
            rc = pthread_cond_timedwait(&workers->changed, &workers->lock, &until);
        if (workers->running == 0 || cancelled || !control->poll)
            continue;
        pthread_mutex_unlock(&workers->lock);
        cancelled = control->poll(control->context) != 0;
        if (cancelled) {
            struct dr_error error;
            dr_error_clear(&error);
            dr_error_cancelled(&error);
            record_failure(workers, &error);
        }
        pthread_mutex_lock(&workers->lock);
    }
    pthread_mutex_unlock(&workers->lock);
}

static void init(struct dr_workers *workers) {
    dr_clock_cond_init(&workers->changed);
    pthread_mutex_init(&workers->lock, NULL);
    atomic_init(&workers->stop, false);
    workers->running = 0;
    dr_error_clear(&workers->error);
}

/* The threads of one call, on its caller's stack. */
struct threads {
    struct dr_workers *workers;
    struct worker each[DR_MAX_WORKERS];
    pthread_t ids[DR_MAX_WORKERS];
    unsigned started;
};

static void start(struct threads *threads, unsigned count, int (*work)(void *, unsigned, struct dr_error *),
                  void *context) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (bool good = true; good && threads->started < count;) {
        struct worker *worker = &threads->each[threads->started];
        *worker = (struct worker){threads->workers, threads->started, work, context};
        pthread_mutex_lock(&threads->workers->lock);
        good = pthread_create(&threads->ids[threads->started], &attributes, run_worker, worker) == 0;
        threads->workers->running += good;
        pthread_mutex_unlock(&threads->workers->lock);
        threads->started += good;
    }
    pthread_attr_destroy(&attributes);
}

static void join(struct threads *threads) {
    for (unsigned i = 0; i < threads->started; i++)
        pthread_join(threads->ids[i], NULL);
}

/*
 * The caller's thread ends inside of poll: Python before 3.14 so ends daemon threads that come back while it exits. The
 * workers use what lies on this stack, and what its owners hold, and must be done before it goes.
 */
static void stop_and_join(void *argument) {
    struct threads *threads = argument;
    pthread_mutex_lock(&threads->workers->lock);
    atomic_store(&threads->workers->stop, true);
    pthread_cond_broadcast(&threads->workers->changed);
    pthread_mutex_unlock(&threads->workers->lock);
    join(threads);
}

int dr_workers_run(struct dr_workers *workers, unsigned count, int (*work)(void *, unsigned, struct dr_error *),
                   void *context, const struct dr_control *control, struct dr_error *error) {
    assert(count > 0 && count <= DR_MAX_WORKERS);
    struct threads threads = {.workers = workers};
    init(workers);
    start(&threads, count, work, context);
    /* Work is shared out as it is taken, so fewer workers than asked for still do all of it. */
    if (threads.started == 0)
        dr_error_system(error, EAGAIN, DR_CALL_PTHREAD_CREATE, NULL);
    pthread_cleanup_push(stop_and_join, &threads);
    watch(workers, control);
    pthread_cleanup_pop(0);
    join(&threads);
    if (workers->error.kind != DR_ERROR_NONE && error->kind == DR_ERROR_NONE)
        *error = workers->error;
    pthread_cond_destroy(&workers->changed);
    pthread_mutex_destroy(&workers->lock);
    return error->kind == DR_ERROR_NONE ? 0 : -error->err;
}

bool dr_workers_wait(struct dr_workers *workers, bool (*ready)(const void *), const void *context) {
    pthread_mutex_lock(&workers->lock);
    while (!ready(context) && !dr_workers_stopped(workers))
        pthread_cond_wait(&workers->changed, &workers->lock);
    pthread_mutex_unlock(&workers->lock);
    return !dr_workers_stopped(workers);
}

void dr_workers_notify(struct dr_workers *workers) {
    pthread_mutex_lock(&workers->lock);
    pthread_cond_broadcast(&workers->changed);
    pthread_mutex_unlock(&workers->lock);
}
