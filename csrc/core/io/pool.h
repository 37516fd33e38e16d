/*
 * A fixed set of equal, page-aligned I/O buffers.
 *
 * One pool belongs to one engine, and so to one thread at a time: no locks.
 * Freed memory never reaches a file: whoever fills a buffer also zeroes the
 * padding it adds.
 */
#ifndef DCPRING_POOL_H
#define DCPRING_POOL_H

#include "base/error.h"

#include <stdbool.h>

struct dr_pool {
    uint8_t *memory;
    size_t buffer_size;
    unsigned count;
    unsigned *free; /* stack of free buffer indices */
    unsigned free_count;
};

int dr_pool_init(struct dr_pool *pool, unsigned count, size_t buffer_size, struct dr_error *error);
void dr_pool_destroy(struct dr_pool *pool);

uint8_t *dr_pool_buffer(const struct dr_pool *pool, unsigned index);

/* Takes a free buffer; false when all are in use. */
bool dr_pool_take(struct dr_pool *pool, unsigned *index);
void dr_pool_give(struct dr_pool *pool, unsigned index);

#endif
