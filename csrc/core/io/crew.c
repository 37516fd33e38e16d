/* Worker threads for the length of one call. See crew.h. */
#include "io/crew.h"

#include <assert.h>
#include <errno.h>

enum { STACK_BYTES = 1024 * 1024 };

struct member {
    struct dr_crew *crew;
    unsigned index;
    int (*work)(void *, unsigned, struct dr_error *);
    void *context;
};

static void record_failure(struct dr_crew *crew, const struct dr_error *error) {
    pthread_mutex_lock(&crew->lock);
    if (crew->error.kind == DR_ERROR_NONE)
        crew->error = *error;
    atomic_store(&crew->stop, true);
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->lock);
}

static void *run_member(void *argument) {
    struct member *member = argument;
    struct dr_crew *crew = member->crew;
    struct dr_error error;
    dr_error_clear(&error);
    if (member->work(member->context, member->index, &error) < 0)
        record_failure(crew, &error);
    pthread_mutex_lock(&crew->lock);
    crew->running--;
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* Waits for the workers, in slices, asking in between whether to go on. */
static void watch(struct dr_crew *crew, const struct dr_control *control) {
    bool cancelled = false;
    pthread_mutex_lock(&crew->lock);
    while (crew->running > 0) {
        struct timespec until = dr_clock_after(DR_POLL_MS);
        int rc = 0;
        while (crew->running > 0 && rc == 0)
            rc = pthread_cond_timedwait(&crew->changed, &crew->lock, &until);
        if (crew->running == 0 || cancelled || !control->poll)
            continue;
        pthread_mutex_unlock(&crew->lock);
        cancelled = control->poll(control->context) != 0;
        if (cancelled) {
            struct dr_error error;
            dr_error_clear(&error);
            dr_error_cancelled(&error);
            record_failure(crew, &error);
        }
        pthread_mutex_lock(&crew->lock);
    }
    pthread_mutex_unlock(&crew->lock);
}

static void init(struct dr_crew *crew) {
    dr_clock_cond_init(&crew->changed);
    pthread_mutex_init(&crew->lock, NULL);
    atomic_init(&crew->stop, false);
    crew->running = 0;
    dr_error_clear(&crew->error);
}

/* The workers of one call, on its caller's stack. */
struct team {
    struct dr_crew *crew;
    struct member members[DR_MAX_WORKERS];
    pthread_t ids[DR_MAX_WORKERS];
    unsigned started;
};

static void start(struct team *team, unsigned workers, int (*work)(void *, unsigned, struct dr_error *),
                  void *context) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (bool good = true; good && team->started < workers;) {
        struct member *member = &team->members[team->started];
        *member = (struct member){team->crew, team->started, work, context};
        pthread_mutex_lock(&team->crew->lock);
        good = pthread_create(&team->ids[team->started], &attributes, run_member, member) == 0;
        team->crew->running += good;
        pthread_mutex_unlock(&team->crew->lock);
        team->started += good;
    }
    pthread_attr_destroy(&attributes);
}

static void join(struct team *team) {
    for (unsigned i = 0; i < team->started; i++)
        pthread_join(team->ids[i], NULL);
}

/*
 * The caller's thread ends inside of poll: Python before 3.14 so ends daemon threads that come back while it exits. The
 * workers use what lies on this stack, and what its owners hold, and must be done before it goes.
 */
static void stop_and_join(void *argument) {
    struct team *team = argument;
    pthread_mutex_lock(&team->crew->lock);
    atomic_store(&team->crew->stop, true);
    pthread_cond_broadcast(&team->crew->changed);
    pthread_mutex_unlock(&team->crew->lock);
    join(team);
}

int dr_crew_run(struct dr_crew *crew, unsigned workers, int (*work)(void *, unsigned, struct dr_error *),
                void *context, const struct dr_control *control, struct dr_error *error) {
    assert(workers > 0 && workers <= DR_MAX_WORKERS);
    struct team team = {.crew = crew};
    init(crew);
    start(&team, workers, work, context);
    /* Work is shared out as it is taken, so fewer workers than asked for still do all of it. */
    if (team.started == 0)
        dr_error_system(error, EAGAIN, DR_CALL_PTHREAD_CREATE, NULL);
    pthread_cleanup_push(stop_and_join, &team);
    watch(crew, control);
    pthread_cleanup_pop(0);
    join(&team);
    if (crew->error.kind != DR_ERROR_NONE && error->kind == DR_ERROR_NONE)
        *error = crew->error;
    pthread_cond_destroy(&crew->changed);
    pthread_mutex_destroy(&crew->lock);
    return error->kind == DR_ERROR_NONE ? 0 : -error->err;
}

bool dr_crew_wait(struct dr_crew *crew, bool (*ready)(const void *), const void *context) {
    pthread_mutex_lock(&crew->lock);
    while (!ready(context) && !dr_crew_stopped(crew))
        pthread_cond_wait(&crew->changed, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    return !dr_crew_stopped(crew);
}

void dr_crew_notify(struct dr_crew *crew) {
    pthread_mutex_lock(&crew->lock);
    pthread_cond_broadcast(&crew->changed);
    pthread_mutex_unlock(&crew->lock);
}
