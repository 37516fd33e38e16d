/*
 * Workers for the length of one call, in threads that are kept (thread_pool.h).
 *
 * dr_workers_run lets the workers begin and, in the calling thread, asks the
 * caller's poll function every few milliseconds whether to go on; that is how
 * Ctrl-C gets through while the workers wait for the disk.
 */
#ifndef DCPRING_WORKERS_H
#define DCPRING_WORKERS_H

#include "base/control.h"

#include <stdatomic.h>

enum { DR_MAX_WORKERS = 64 };

struct dr_workers {
    atomic_bool stop; /* set on the first failure: everyone winds up */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* something that dr_workers_wait waits for may have happened */
    unsigned running;
    size_t pieces;           /* what there is to do, where it is shared out (dr_workers_share) */
    atomic_size_t next;      /* the piece to be taken */
    struct dr_error error;   /* the first failure; guarded by lock */
    struct dr_ticker ticker; /* of the calling thread where it works itself, and asks between two pieces of work */
};

/*
 * Runs work(context, i) for each i < count; returns 0, or the first failure. Where a thread cannot be started there are
 * fewer workers, and where none can be, only work(context, 0) in the calling thread: so what there is to do is shared
 * out as it is taken, not by i.
 */
int dr_workers_run(struct dr_workers *workers, unsigned count,
                   int (*work)(void *context, unsigned index, struct dr_error *), void *context,
                   const struct dr_control *control, struct dr_error *error);

/*
 * The same for work that is in pieces, which the workers take one by one (dr_workers_take): with no more workers than
 * pieces, and nothing is run where there are none.
 */
int dr_workers_share(struct dr_workers *workers, size_t pieces, unsigned most,
                     int (*work)(void *context, unsigned index, struct dr_error *), void *context,
                     const struct dr_control *control, struct dr_error *error);

/* The same with one worker, in the calling thread: for work that is over at once, and so need not be stopped. */
int dr_workers_share_here(struct dr_workers *workers, size_t pieces,
                          int (*work)(void *context, unsigned index, struct dr_error *), void *context,
                          struct dr_error *error);

/*
 * Runs one(context, i) for each i < count: in the calling thread for as long as that takes but a moment, then by at
 * most so many workers, which take them in order. Returns 0, or the first failure.
 */
int dr_workers_each(size_t count, unsigned most, int (*one)(void *context, size_t index, struct dr_error *),
                    void *context, const struct dr_control *control, struct dr_error *error);

/* Asks, in the calling thread: whether a cancel has stopped it. */
bool dr_workers_ask(struct dr_workers *workers);

static inline bool dr_workers_stopped(struct dr_workers *workers) {
    return atomic_load_explicit(&workers->stop, memory_order_relaxed) ||
           (workers->ticker.control && dr_workers_ask(workers));
}

/* The number of the next piece; false when all were taken, or the workers were stopped. */
static inline bool dr_workers_take(struct dr_workers *workers, size_t *piece) {
    if (dr_workers_stopped(workers))
        return false;
    *piece = atomic_fetch_add(&workers->next, 1);
    return *piece < workers->pieces;
}

/* Waits until ready(context), another worker having called dr_workers_notify; false when they were stopped. */
bool dr_workers_wait(struct dr_workers *workers, bool (*ready)(const void *context), const void *context);
void dr_workers_notify(struct dr_workers *workers);

#endif
