/* Engines that wait for the next file, save or load. See engine_cache.h. */
#include "io/engine_cache.h"

#include "base/clock.h"
#include "io/thread_pool.h"

#include <assert.h>
#include <string.h>

struct cached_engine {
    struct dr_engine *engine;
    uint64_t since_ms;
};

static struct {
    struct cached_engine engines[DR_CACHED_ENGINES]; /* the oldest first */
    unsigned count;
} cache;

static void lock(void);

/* ---- with the lock ---- */

static struct dr_engine *remove_engine(unsigned index) {
    struct dr_engine *engine = cache.engines[index].engine;
    cache.count--;
    memmove(&cache.engines[index], &cache.engines[index + 1], (cache.count - index) * sizeof *cache.engines);
    return engine;
}

static size_t cached_bytes(void) {
    size_t bytes = 0;
    for (unsigned i = 0; i < cache.count; i++)
        bytes += dr_pool_bytes(&cache.engines[i].engine->pool);
    return bytes;
}

/* Without the lock in between, as it may take a while. */
static void close_oldest(void) {
    struct dr_engine *engine = remove_engine(0);
    dr_thread_pool_unlock();
    dr_engine_close(engine);
    lock();
}

/* Closes what was given back so long ago. */
static void close_older(unsigned ms) {
    while (cache.count > 0 && dr_clock_ms() - cache.engines[0].since_ms >= ms)
        close_oldest();
}

/* Whether something has to go for so many bytes more. */
static bool is_full(size_t bytes) {
    return cache.count > 0 && (cache.count == DR_CACHED_ENGINES || cached_bytes() + bytes > DR_CACHED_BYTES);
}

/* The one that fits best of those that fit, or NULL. */
static struct dr_engine *find(const char *method, unsigned depth, unsigned most, size_t buffer_size) {
    unsigned best = cache.count;
    for (unsigned i = 0; i < cache.count; i++) {
        const struct dr_engine *engine = cache.engines[i].engine;
        const struct dr_pool *pool = &engine->pool;
        bool is_alike = strcmp(engine->asked, method) == 0 || strcmp(engine->ops->name, method) == 0;
        if (is_alike && pool->buffer_size == buffer_size && pool->count >= depth && pool->count <= most &&
            (best == cache.count || pool->count <= cache.engines[best].engine->pool.count))
            best = i;
    }
    return best == cache.count ? NULL : remove_engine(best);
}

static bool oldest(uint64_t *since_ms) {
    *since_ms = cache.engines[0].since_ms;
    return cache.count > 0;
}

static void forget(void) {
    for (unsigned i = 0; i < cache.count; i++)
        dr_engine_forget(cache.engines[i].engine);
    cache.count = 0;
}

static void lock(void) {
    static const struct dr_idle_cache idle = {oldest, close_older, forget};
    dr_thread_pool_lock(&idle);
}

/* ---- without it ---- */

int dr_engine_cache_take(struct dr_engine **out, const char *method, unsigned depth, unsigned most, size_t buffer_size,
                         struct dr_error *error) {
    assert(depth > 0 && depth <= most);
    lock();
    *out = find(method, depth, most, buffer_size);
    dr_thread_pool_unlock();
    return *out ? 0 : dr_engine_open(out, method, depth, buffer_size, error);
}

/* Whether an engine may be handed to another caller. */
static bool is_as_new(const struct dr_engine *engine) {
    return !engine->failed && engine->in_flight == 0 && engine->pool.free_count == engine->pool.count;
}

void dr_engine_cache_give(struct dr_engine *engine) {
    if (!engine || !dr_engine_drain(engine))
        return;
    engine->watch = NULL;
    size_t bytes = dr_pool_bytes(&engine->pool);
    if (!is_as_new(engine) || bytes > DR_CACHED_BYTES || !dr_thread_pool_is_there()) {
        dr_engine_close(engine);
        return;
    }
    lock();
    while (is_full(bytes))
        close_oldest();
    bool is_kept = dr_thread_pool_is_alive(); /* else it has ended meanwhile */
    if (is_kept)
        cache.engines[cache.count++] = (struct cached_engine){engine, dr_clock_ms()};
    dr_thread_pool_unlock();
    if (!is_kept)
        dr_engine_close(engine);
}

struct dr_engine_cache_amount dr_engine_cache_amount(void) {
    lock();
    struct dr_engine_cache_amount amount = {cache.count, cached_bytes()};
    dr_thread_pool_unlock();
    return amount;
}
