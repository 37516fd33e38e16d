/*
 * Worker threads for the length of one call.
 *
 * dr_crew_run starts the workers and, in the calling thread, asks the
 * caller's poll function every few milliseconds whether to go on; that is how
 * Ctrl-C gets through while the workers wait for the disk.
 */
#ifndef DCPRING_CREW_H
#define DCPRING_CREW_H

#include "base/control.h"

#include <stdatomic.h>

enum { DR_MAX_WORKERS = 64 };

struct dr_crew {
    atomic_bool stop; /* set on the first failure: everyone winds up */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* something that dr_crew_wait waits for may have happened */
    unsigned running;
    struct dr_error error; /* the first failure; guarded by lock */
};

/* Runs work(context, i) for each i < workers; returns 0, or the first failure. */
int dr_crew_run(struct dr_crew *crew, unsigned workers, int (*work)(void *context, unsigned index, struct dr_error *),
                void *context, const struct dr_control *control, struct dr_error *error);

static inline bool dr_crew_stopped(struct dr_crew *crew) {
    return atomic_load_explicit(&crew->stop, memory_order_relaxed);
}

/* Waits until ready(context), another worker having called dr_crew_notify; false when the crew was stopped. */
bool dr_crew_wait(struct dr_crew *crew, bool (*ready)(const void *context), const void *context);
void dr_crew_notify(struct dr_crew *crew);

#endif
