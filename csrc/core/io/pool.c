/* The I/O buffer pool. See pool.h. */
#include "io/pool.h"

#include "base/memory.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>

int dr_pool_init(struct dr_pool *pool, unsigned count, size_t buffer_size, struct dr_error *error) {
    *pool = (struct dr_pool){.buffer_size = buffer_size, .count = count};
    pool->free = dr_malloc(count * sizeof *pool->free);
    pool->memory = dr_sys.map(count * buffer_size);
    if (!pool->free || !pool->memory) {
        dr_pool_destroy(pool);
        return dr_error_system(error, ENOMEM, DR_CALL_MMAP, NULL);
    }
    for (unsigned i = 0; i < count; i++)
        dr_pool_give(pool, count - 1 - i);
    return 0;
}

void dr_pool_destroy(struct dr_pool *pool) {
    if (pool->memory)
        dr_sys.unmap(pool->memory, pool->count * pool->buffer_size);
    dr_pool_drop_spares(pool);
    dr_pool_forget(pool);
}

void dr_pool_forget(struct dr_pool *pool) {
    free(pool->free);
    *pool = (struct dr_pool){0};
}

size_t dr_pool_bytes(const struct dr_pool *pool) {
    return (pool->count + (pool->spare ? DR_SPARE_BUFFERS : 0)) * pool->buffer_size;
}

uint8_t *dr_pool_buffer(const struct dr_pool *pool, unsigned index) {
    assert(index < pool->count);
    return pool->memory + (size_t)index * pool->buffer_size;
}

uint8_t *dr_pool_spare(struct dr_pool *pool, unsigned index) {
    assert(index < DR_SPARE_BUFFERS);
    if (!pool->spare)
        pool->spare = dr_sys.map(DR_SPARE_BUFFERS * pool->buffer_size);
    return pool->spare ? pool->spare + index * pool->buffer_size : NULL;
}

void dr_pool_drop_spares(struct dr_pool *pool) {
    if (pool->spare)
        dr_sys.unmap(pool->spare, DR_SPARE_BUFFERS * pool->buffer_size);
    pool->spare = NULL;
}

bool dr_pool_take(struct dr_pool *pool, unsigned *index) {
    if (pool->free_count == 0)
        return false;
    *index = pool->free[--pool->free_count];
    return true;
}

void dr_pool_give(struct dr_pool *pool, unsigned index) {
    assert(index < pool->count && pool->free_count < pool->count);
    pool->free[pool->free_count++] = index;
}
