/*
 * What a process keeps between files, saves and loads: engines, with their rings and buffers, and threads.
 *
 * Clearing and pinning the buffers of a small save takes longer than writing it. So an engine that is given back is
 * kept for whoever asks next for one like it, and a thread that has done its job waits for the next. All callers of a
 * process share what is kept; a lock guards it, and nobody else uses an engine while it is kept.
 *
 * How it goes: what nobody asked for within DR_KEPT_MS is let go of by a kept thread, which waits for that as it waits
 * for work, and then ends, the last of them when no engine is left. More than DR_KEPT_BYTES of buffers, DR_KEPT_ENGINES
 * or DR_KEPT_THREADS are not kept: the oldest go first. dr_kept_release lets go of everything at once.
 *
 * What is handed on is as new: an engine with a failure, or with a request that was not given back, is closed instead.
 * A forked child has no threads and must not use the parent's rings: it closes its copies of their descriptors, and
 * begins with nothing.
 */
#ifndef DCPRING_KEPT_H
#define DCPRING_KEPT_H

#include "io/engine.h"

enum {
    DR_KEPT_MS = 30000,
    DR_KEPT_ENGINES = 16,
    DR_KEPT_THREADS = 16,
    DR_KEPT_BYTES = 64 << 20,
};

/* An engine with `depth` buffers or more, at most `most`: a kept one, else a new one. */
int dr_kept_take(struct dr_engine **out, const char *method, unsigned depth, unsigned most, size_t buffer_size,
                 struct dr_error *error);

/* Gives it back in place of dr_engine_close: drained, and kept if it is as new. NULL is allowed. */
void dr_kept_give(struct dr_engine *engine);

/* Lets a kept thread, else a new one, do a job: 0, or -errno where there is none to be had. */
int dr_kept_run(void (*job)(void *argument), void *argument);

/* Closes all engines that are kept, and ends all threads that wait. */
void dr_kept_release(void);

struct dr_kept_amount {
    unsigned engines, threads; /* threads: that wait */
    size_t bytes;              /* of buffers */
};
struct dr_kept_amount dr_kept_amount(void);

/* How long things are kept; for tests, while nothing is. */
void dr_kept_set_ms(unsigned ms);

#endif
