/*
 * Threads that wait for work. One that has done its job waits for the next, whoever in the process asks for it.
 *
 * A thread that has waited for DR_IDLE_MS ends, and no more than DR_IDLE_THREADS wait. Meanwhile they look after a
 * cache (engine_cache.h): what nobody has asked for within the same time is let go of by a thread that waits, and the
 * last of them does not end before the cache is empty. One lock guards both. A forked child begins with nothing.
 */
#ifndef DCPRING_THREAD_POOL_H
#define DCPRING_THREAD_POOL_H

#include <stdbool.h>
#include <stdint.h>

enum { DR_IDLE_MS = 30000, DR_IDLE_THREADS = 64 };

/* Lets a thread that waits, else a new one, do a job: 0, or -errno where there is none to be had. */
int dr_thread_pool_run(void (*job)(void *argument), void *argument);

/* How many wait. */
unsigned dr_thread_pool_idle(void);

/* Empties the cache, and ends all threads that wait. */
void dr_thread_pool_release(void);

/* How long threads wait, and the cache keeps things; for tests, while there are none. */
void dr_thread_pool_set_idle_ms(unsigned ms);

/* ---- the cache that they look after ---- */

/* All of it is called with the lock. */
struct dr_idle_cache {
    /* When its oldest entry was put into it, by dr_clock_ms(); false where it is empty. */
    bool (*oldest)(uint64_t *since_ms);
    /* Lets go of entries that are so old; without the lock in between, where that takes a while. */
    void (*close_older)(unsigned ms);
    /* The same of all, in a forked child, whose parent goes on with them. */
    void (*forget)(void);
};

/* Takes the lock, of the pool and of the cache, which is the only one that there ever is. */
void dr_thread_pool_lock(const struct dr_idle_cache *cache);
void dr_thread_pool_unlock(void);
/* Whether there is a thread, or one could be started. Without the lock. */
bool dr_thread_pool_is_there(void);
/* Whether there is one still. With the lock. */
bool dr_thread_pool_is_alive(void);

#endif
