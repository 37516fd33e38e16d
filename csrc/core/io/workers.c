/* Workers for the length of one call. See workers.h. */
#include "io/workers.h"

#include "io/thread_pool.h"

#include <assert.h>
#include <errno.h>

enum { HERE_MS = 2 }; /* a thread is worth its beginning where there is more to do */

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

/* Once it has let go of the lock it touches nothing more: the caller may be gone. */
static void run_worker(void *argument) {
    struct worker *worker = argument;
    struct dr_workers *workers = worker->workers;
    DR_NEW_ERROR(error);
    if (worker->work(worker->context, worker->index, &error) < 0)
        record_failure(workers, &error);
    pthread_mutex_lock(&workers->lock);
    workers->running--;
    pthread_cond_broadcast(&workers->changed);
    pthread_mutex_unlock(&workers->lock);
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
            DR_NEW_ERROR(error);
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
    workers->pieces = 0;
    atomic_init(&workers->next, 0);
    workers->ticker = (struct dr_ticker){0};
    dr_error_clear(&workers->error);
}

static void destroy(struct dr_workers *workers) {
    pthread_cond_destroy(&workers->changed);
    pthread_mutex_destroy(&workers->lock);
}

/* What one call gives to its workers, on its caller's stack. */
struct team {
    struct dr_workers *workers;
    struct worker each[DR_MAX_WORKERS];
};

/* How many could be started. */
static unsigned start(struct team *team, unsigned count, int (*work)(void *, unsigned, struct dr_error *),
                      void *context) {
    struct dr_workers *workers = team->workers;
    unsigned started = 0;
    for (int rc = 0; rc == 0 && started < count; started += rc == 0) {
        struct worker *worker = &team->each[started];
        *worker = (struct worker){workers, started, work, context};
        pthread_mutex_lock(&workers->lock);
        rc = dr_thread_pool_run(run_worker, worker);
        workers->running += rc == 0;
        pthread_mutex_unlock(&workers->lock);
    }
    return started;
}

bool dr_workers_ask(struct dr_workers *workers) {
    DR_NEW_ERROR(error);
    if (dr_ticker_ask(&workers->ticker, &error) == 0)
        return false;
    record_failure(workers, &error);
    return true;
}

/* Where no thread can be started (a limit of the user's or of a container's), the caller works. */
static void work_here(struct dr_workers *workers, int (*work)(void *, unsigned, struct dr_error *), void *context,
                      const struct dr_control *control) {
    DR_NEW_ERROR(error);
    workers->ticker.control = control;
    if (work(context, 0, &error) < 0)
        record_failure(workers, &error);
}

/*
 * The caller's thread ends inside of poll: Python before 3.14 so ends daemon threads that come back while it exits. The
 * workers use what lies on this stack, and what its owners hold, and must be done before it goes.
 */
static void stop_and_wait(void *argument) {
    static const struct dr_control never;
    struct dr_workers *workers = argument;
    pthread_mutex_lock(&workers->lock);
    atomic_store(&workers->stop, true);
    pthread_cond_broadcast(&workers->changed);
    pthread_mutex_unlock(&workers->lock);
    watch(workers, &never);
}

/* Of workers that have been made ready. */
static int run(struct dr_workers *workers, unsigned count, int (*work)(void *, unsigned, struct dr_error *),
               void *context, const struct dr_control *control, struct dr_error *error) {
    assert(count > 0 && count <= DR_MAX_WORKERS);
    struct team team = {.workers = workers};
    if (start(&team, count, work, context) == 0)
        work_here(workers, work, context, control);
    pthread_cleanup_push(stop_and_wait, workers);
    watch(workers, control);
    pthread_cleanup_pop(0);
    if (workers->error.kind != DR_ERROR_NONE && error->kind == DR_ERROR_NONE)
        *error = workers->error;
    destroy(workers);
    return error->kind == DR_ERROR_NONE ? 0 : -error->err;
}

int dr_workers_run(struct dr_workers *workers, unsigned count, int (*work)(void *, unsigned, struct dr_error *),
                   void *context, const struct dr_control *control, struct dr_error *error) {
    init(workers);
    return run(workers, count, work, context, control, error);
}

int dr_workers_share(struct dr_workers *workers, size_t pieces, unsigned most,
                     int (*work)(void *, unsigned, struct dr_error *), void *context, const struct dr_control *control,
                     struct dr_error *error) {
    if (pieces == 0)
        return 0;
    init(workers);
    workers->pieces = pieces;
    return run(workers, pieces < most ? (unsigned)pieces : most, work, context, control, error);
}

int dr_workers_share_here(struct dr_workers *workers, size_t pieces, int (*work)(void *, unsigned, struct dr_error *),
                          void *context, struct dr_error *error) {
    init(workers);
    workers->pieces = pieces;
    int rc = work(context, 0, error);
    destroy(workers);
    return rc;
}

/* ---- the same for each of many ---- */

struct each {
    struct dr_workers workers;
    size_t first; /* those before it are done */
    int (*one)(void *context, size_t index, struct dr_error *error);
    void *context;
};

static int take_each(void *context, unsigned worker, struct dr_error *error) {
    struct each *each = context;
    size_t piece;
    int rc = 0;
    (void)worker;
    while (rc == 0 && dr_workers_take(&each->workers, &piece))
        rc = each->one(each->context, each->first + piece, error);
    return rc;
}

int dr_workers_each(size_t count, unsigned most, int (*one)(void *, size_t, struct dr_error *), void *context,
                    const struct dr_control *control, struct dr_error *error) {
    struct each each = {.one = one, .context = context};
    for (uint64_t begin = dr_clock_ms(); each.first < count && dr_clock_ms() - begin < HERE_MS; each.first++) {
        int rc = one(context, each.first, error);
        if (rc < 0)
            return rc;
    }
    return dr_workers_share(&each.workers, count - each.first, most, take_each, &each, control, error);
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
