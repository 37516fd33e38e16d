/*
 * Engines, with their rings and buffers, that wait for the next file, save or load.
 *
 * Clearing and pinning the buffers of a small save takes longer than writing it. So an engine that is given back is
 * kept for whoever asks next for one like it. All callers of a process share them; nobody else uses an engine while it
 * is in the cache, which the lock of thread_pool.h guards.
 *
 * What nobody has asked for within DR_IDLE_MS is closed by a thread that waits for work. More than DR_CACHED_BYTES of
 * buffers, or DR_CACHED_ENGINES, are not kept: the oldest go first. dr_thread_pool_release closes all of them.
 *
 * What is handed on is as new: an engine with a failure, or with a request that was not given back, is closed instead.
 * A forked child must not use its parent's rings: it closes its copies of their descriptors.
 */
#ifndef DCPRING_ENGINE_CACHE_H
#define DCPRING_ENGINE_CACHE_H

#include "io/engine.h"

enum { DR_CACHED_ENGINES = 16, DR_CACHED_BYTES = 64 << 20 };

/* An engine with `depth` buffers or more, at most `most`: one of the cache, else a new one. */
int dr_engine_cache_take(struct dr_engine **out, const char *method, unsigned depth, unsigned most, size_t buffer_size,
                         struct dr_error *error);

/* Gives it back in place of dr_engine_close: drained, and kept if it is as new. NULL is allowed. */
void dr_engine_cache_give(struct dr_engine *engine);

struct dr_engine_cache_amount {
    unsigned engines;
    size_t bytes; /* of buffers */
};
struct dr_engine_cache_amount dr_engine_cache_amount(void);

#endif
