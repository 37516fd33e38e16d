/* What a process keeps between files, saves and loads. See kept.h. */
#include "io/kept.h"

#include "base/clock.h"
#include "base/memory.h"
#include "base/thread.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

struct member {
    pthread_t id;
    pthread_cond_t wake;
    void (*job)(void *); /* to do next; NULL while it waits */
    void *argument;
    bool dismissed;         /* it was taken from those that wait, to end; who did that joins it */
    atomic_uint holders;    /* the thread itself, or who joins it, and whoever is about to wake it */
    struct member *waiting; /* the next of those that wait */
};

struct kept_engine {
    struct dr_engine *engine;
    uint64_t since_ms;
};

static struct {
    pthread_mutex_t lock;
    pid_t owner;                                 /* whose the rest is; 0: nobody's yet */
    struct member *waiting;                      /* the last to wait comes first */
    unsigned threads;                            /* that wait */
    unsigned alive;                              /* and those that work, which will wait */
    struct kept_engine engines[DR_KEPT_ENGINES]; /* the oldest first */
    unsigned count;
    unsigned ms;
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER, .ms = DR_KEPT_MS};

/* Frees it once nobody holds it. */
static void drop(struct member *member) {
    if (atomic_fetch_sub(&member->holders, 1) > 1)
        return;
    pthread_cond_destroy(&member->wake);
    free(member);
}

/* ---- forks ---- */

static void forget_all(void) {
    for (unsigned i = 0; i < kept.count; i++)
        dr_engine_forget(kept.engines[i].engine);
    while (kept.waiting) {
        struct member *gone = kept.waiting;
        kept.waiting = gone->waiting;
        free(gone);
    }
    kept.threads = kept.alive = kept.count = 0;
    kept.owner = 0;
}

static void before_fork(void) { pthread_mutex_lock(&kept.lock); }

static void after_fork(void) { pthread_mutex_unlock(&kept.lock); }

static void after_fork_in_child(void) {
    pthread_mutex_init(&kept.lock, NULL);
    forget_all();
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork, after_fork_in_child); }

/* A child that was made past pthread_atfork (by clone) forgets here. */
static void lock(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&kept.lock);
    if (kept.owner != dr_process()) {
        forget_all();
        kept.owner = dr_process();
    }
}

static void unlock(void) { pthread_mutex_unlock(&kept.lock); }

/* ---- engines; the lock is held ---- */

static struct dr_engine *remove_engine(unsigned index) {
    struct dr_engine *engine = kept.engines[index].engine;
    kept.count--;
    memmove(&kept.engines[index], &kept.engines[index + 1], (kept.count - index) * sizeof *kept.engines);
    return engine;
}

static size_t kept_bytes(void) {
    size_t bytes = 0;
    for (unsigned i = 0; i < kept.count; i++)
        bytes += dr_pool_bytes(&kept.engines[i].engine->pool);
    return bytes;
}

/* Without the lock in between, as it may take a while. */
static void close_oldest(void) {
    struct dr_engine *engine = remove_engine(0);
    unlock();
    dr_engine_close(engine);
    lock();
}

/* Closes what was given back so long ago. */
static void close_older(unsigned ms) {
    while (kept.count > 0 && dr_clock_ms() - kept.engines[0].since_ms >= ms)
        close_oldest();
}

/* Whether something has to go for so many bytes more. */
static bool is_full(size_t bytes) {
    return kept.count > 0 && (kept.count == DR_KEPT_ENGINES || kept_bytes() + bytes > DR_KEPT_BYTES);
}

/* The one that fits best of those that fit, or NULL. */
static struct dr_engine *find(const char *method, unsigned depth, unsigned most, size_t buffer_size) {
    unsigned best = kept.count;
    for (unsigned i = 0; i < kept.count; i++) {
        const struct dr_engine *engine = kept.engines[i].engine;
        const struct dr_pool *pool = &engine->pool;
        bool is_alike = strcmp(engine->asked, method) == 0 || strcmp(engine->ops->name, method) == 0;
        if (is_alike && pool->buffer_size == buffer_size && pool->count >= depth && pool->count <= most &&
            (best == kept.count || pool->count <= kept.engines[best].engine->pool.count))
            best = i;
    }
    return best == kept.count ? NULL : remove_engine(best);
}

int dr_kept_take(struct dr_engine **out, const char *method, unsigned depth, unsigned most, size_t buffer_size,
                 struct dr_error *error) {
    assert(depth > 0 && depth <= most);
    lock();
    *out = find(method, depth, most, buffer_size);
    unlock();
    return *out ? 0 : dr_engine_open(out, method, depth, buffer_size, error);
}

/* Whether an engine may be handed to another caller. */
static bool is_as_new(const struct dr_engine *engine) {
    return !engine->failed && engine->in_flight == 0 && engine->pool.free_count == engine->pool.count;
}

/* ---- threads ---- */

static void take_out(const struct member *member) {
    struct member **at = &kept.waiting;
    while (*at != member)
        at = &(*at)->waiting;
    *at = member->waiting;
    kept.threads--;
}

/* Milliseconds until the oldest engine is let go of, or a thread ends that has waited for work since since_ms. */
static unsigned until_due(uint64_t since_ms) {
    uint64_t now = dr_clock_ms(), due = since_ms + kept.ms;
    uint64_t engine_due = kept.count > 0 ? kept.engines[0].since_ms + kept.ms : due;
    if (engine_due < due || due <= now)
        due = engine_due;
    return due > now ? (unsigned)(due - now) : 1;
}

/* The calling thread ends: there is no job for it. */
static bool leave(void) {
    kept.alive--;
    return false;
}

/* Waits for a job; false when there is none for so long that the thread shall end, or it was dismissed. */
static bool await_job(struct member *self) {
    if (kept.threads >= DR_KEPT_THREADS)
        return leave();
    self->waiting = kept.waiting;
    kept.waiting = self;
    kept.threads++;
    for (uint64_t since = dr_clock_ms(); !self->job && !self->dismissed;) {
        struct timespec until = dr_clock_after(until_due(since));
        pthread_cond_timedwait(&self->wake, &kept.lock, &until);
        if (self->job || self->dismissed)
            break;
        close_older(kept.ms);
        bool is_needed = kept.alive == 1 && kept.count > 0;
        if (self->job || self->dismissed || is_needed || dr_clock_ms() - since < kept.ms)
            continue;
        take_out(self);
        return leave();
    }
    return !self->dismissed;
}

static void *serve(void *argument) {
    struct member *self = argument;
    lock();
    do {
        void (*job)(void *) = self->job;
        unlock();
        if (job)
            job(self->argument);
        lock();
        self->job = NULL;
    } while (await_job(self));
    bool dismissed = self->dismissed;
    unlock();
    if (!dismissed) {
        pthread_detach(pthread_self());
        drop(self);
    }
    return NULL;
}

/* With no job it only waits for one. */
static int start_member(void (*job)(void *), void *argument) {
    struct member *member = dr_calloc(1, sizeof *member);
    if (!member)
        return -ENOMEM;
    member->job = job;
    member->argument = argument;
    atomic_init(&member->holders, 1);
    dr_clock_cond_init(&member->wake);
    lock();
    kept.alive++;
    /* With the lock: the thread's id is written before the thread can be found. */
    int rc = dr_sys.thread(&member->id, serve, member);
    if (rc < 0)
        kept.alive--;
    unlock();
    if (rc < 0)
        drop(member);
    return rc;
}

/* Sees to it that there is a thread, which lets go of an engine that is not asked for. */
static bool is_looked_after(void) {
    lock();
    bool is_alone = kept.alive == 0;
    unlock();
    return !is_alone || start_member(NULL, NULL) == 0;
}

void dr_kept_give(struct dr_engine *engine) {
    if (!engine || !dr_engine_drain(engine))
        return;
    engine->watch = NULL;
    size_t bytes = dr_pool_bytes(&engine->pool);
    if (!is_as_new(engine) || bytes > DR_KEPT_BYTES || !is_looked_after()) {
        dr_engine_close(engine);
        return;
    }
    lock();
    while (is_full(bytes))
        close_oldest();
    bool is_kept = kept.alive > 0; /* else it has ended meanwhile */
    if (is_kept)
        kept.engines[kept.count++] = (struct kept_engine){engine, dr_clock_ms()};
    unlock();
    if (!is_kept)
        dr_engine_close(engine);
}

int dr_kept_run(void (*job)(void *), void *argument) {
    lock();
    struct member *member = kept.waiting;
    if (member) {
        take_out(member);
        member->argument = argument;
        member->job = job;
        atomic_fetch_add(&member->holders, 1);
    }
    unlock();
    if (!member)
        return start_member(job, argument);
    pthread_cond_signal(&member->wake); /* with the lock, it would wake to wait for that */
    drop(member);
    return 0;
}

void dr_kept_release(void) {
    lock();
    close_older(0);
    struct member *dismissed = NULL;
    while (kept.waiting) {
        struct member *member = kept.waiting;
        take_out(member);
        kept.alive--;
        member->dismissed = true;
        member->waiting = dismissed;
        dismissed = member;
        pthread_cond_signal(&member->wake);
    }
    unlock();
    while (dismissed) {
        struct member *member = dismissed;
        dismissed = member->waiting;
        pthread_join(member->id, NULL);
        drop(member);
    }
}

struct dr_kept_amount dr_kept_amount(void) {
    lock();
    struct dr_kept_amount amount = {.engines = kept.count, .threads = kept.threads, .bytes = kept_bytes()};
    unlock();
    return amount;
}

void dr_kept_set_ms(unsigned ms) {
    lock();
    kept.ms = ms;
    unlock();
}
