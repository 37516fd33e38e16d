/*
 * A fixed set of equal, page-aligned I/O buffers.
 *
 * One pool belongs to one engine, and so to one thread at a time: no locks.
 * Freed memory never reaches a file: whoever fills a buffer also zeroes the
 * padding it adds.
 *
 * Besides them a pool has two spare buffers, which are made when somebody asks
 * for one: room for what is carried from one piece of work to the next.
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
    uint8_t *spare; /* DR_SPARE_BUFFERS of them; NULL until somebody asks */
};

enum { DR_SPARE_BUFFERS = 2 };

int dr_pool_init(struct dr_pool *pool, unsigned count, size_t buffer_size, struct dr_error *error);
void dr_pool_destroy(struct dr_pool *pool);

/* In a forked child, which has not got the buffers. */
void dr_pool_forget(struct dr_pool *pool);

/* Of all its buffers. */
size_t dr_pool_bytes(const struct dr_pool *pool);

uint8_t *dr_pool_buffer(const struct dr_pool *pool, unsigned index);

/* A spare buffer, 0 or 1, page-aligned as the others; NULL when memory is gone. */
uint8_t *dr_pool_spare(struct dr_pool *pool, unsigned index);
void dr_pool_drop_spares(struct dr_pool *pool);

/* Takes a free buffer; false when all are in use. */
bool dr_pool_take(struct dr_pool *pool, unsigned *index);
void dr_pool_give(struct dr_pool *pool, unsigned index);

#endif
