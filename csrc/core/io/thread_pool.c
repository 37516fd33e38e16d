/* Threads that wait for work. See thread_pool.h. */
#include "io/thread_pool.h"

#include "base/clock.h"
#include "base/memory.h"
#include "base/thread.h"
#include "io/sys.h"

#include <errno.h>
#include <stdatomic.h>
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

static struct {
    pthread_mutex_t lock;
    pid_t owner;            /* whose the rest is; 0: nobody's yet */
    struct member *waiting; /* the last to wait comes first */
    unsigned idle;          /* that wait */
    unsigned alive;         /* and those that work, which will wait */
    unsigned ms;
    const struct dr_idle_cache *cache; /* NULL until there is one */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .ms = DR_IDLE_MS};

/* Frees it once nobody holds it. */
static void drop(struct member *member) {
    if (atomic_fetch_sub(&member->holders, 1) > 1)
        return;
    pthread_cond_destroy(&member->wake);
    free(member);
}

/* ---- forks ---- */

static void forget_all(void) {
    if (pool.cache)
        pool.cache->forget();
    while (pool.waiting) {
        struct member *gone = pool.waiting;
        pool.waiting = gone->waiting;
        free(gone);
    }
    pool.idle = pool.alive = 0;
    pool.owner = 0;
}

static void before_fork(void) { pthread_mutex_lock(&pool.lock); }

static void after_fork(void) { pthread_mutex_unlock(&pool.lock); }

static void after_fork_in_child(void) {
    pthread_mutex_init(&pool.lock, NULL);
    forget_all();
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork, after_fork_in_child); }

/* A child that was made past pthread_atfork (by clone) forgets here. */
static void lock(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&pool.lock);
    if (pool.owner != dr_process()) {
        forget_all();
        pool.owner = dr_process();
    }
}

static void unlock(void) { pthread_mutex_unlock(&pool.lock); }

void dr_thread_pool_lock(const struct dr_idle_cache *cache) {
    lock();
    pool.cache = cache;
}

void dr_thread_pool_unlock(void) { unlock(); }

/* ---- waiting ---- */

static void take_out(const struct member *member) {
    struct member **at = &pool.waiting;
    while (*at != member)
        at = &(*at)->waiting;
    *at = member->waiting;
    pool.idle--;
}

/* Milliseconds until the oldest entry of the cache goes, or a thread ends that has waited for work since since_ms. */
static unsigned until_due(uint64_t since_ms) {
    uint64_t now = dr_clock_ms(), due = since_ms + pool.ms, oldest;
    uint64_t entry_due = pool.cache && pool.cache->oldest(&oldest) ? oldest + pool.ms : due;
    if (entry_due < due || due <= now)
        due = entry_due;
    return due > now ? (unsigned)(due - now) : 1;
}

/* Lets go of what has been in the cache for so long; false where there is more in it. */
static bool is_emptied(unsigned ms) {
    uint64_t oldest;
    if (pool.cache)
        pool.cache->close_older(ms);
    return !pool.cache || !pool.cache->oldest(&oldest);
}

/* The calling thread ends: there is no job for it. */
static bool leave(void) {
    pool.alive--;
    return false;
}

/* Waits for a job; false when there is none for so long that the thread shall end, or it was dismissed. */
static bool await_job(struct member *self) {
    if (pool.idle >= DR_IDLE_THREADS)
        return leave();
    self->waiting = pool.waiting;
    pool.waiting = self;
    pool.idle++;
    for (uint64_t since = dr_clock_ms(); !self->job && !self->dismissed;) {
        struct timespec until = dr_clock_after(until_due(since));
        pthread_cond_timedwait(&self->wake, &pool.lock, &until);
        if (self->job || self->dismissed)
            break;
        bool is_needed = !is_emptied(pool.ms) && pool.alive == 1;
        if (self->job || self->dismissed || is_needed || dr_clock_ms() - since < pool.ms)
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
    pool.alive++;
    /* With the lock: the thread's id is written before the thread can be found. */
    int rc = dr_sys.thread(&member->id, serve, member);
    if (rc < 0)
        pool.alive--;
    unlock();
    if (rc < 0)
        drop(member);
    return rc;
}

bool dr_thread_pool_is_alive(void) { return pool.alive > 0; }

bool dr_thread_pool_is_there(void) {
    lock();
    bool is_alive = pool.alive > 0;
    unlock();
    return is_alive || start_member(NULL, NULL) == 0;
}

/* ---- jobs ---- */

int dr_thread_pool_run(void (*job)(void *), void *argument) {
    lock();
    struct member *member = pool.waiting;
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

void dr_thread_pool_release(void) {
    lock();
    is_emptied(0);
    struct member *dismissed = NULL;
    while (pool.waiting) {
        struct member *member = pool.waiting;
        take_out(member);
        pool.alive--;
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

unsigned dr_thread_pool_idle(void) {
    lock();
    unsigned idle = pool.idle;
    unlock();
    return idle;
}

void dr_thread_pool_set_idle_ms(unsigned ms) {
    lock();
    pool.ms = ms;
    unlock();
}
