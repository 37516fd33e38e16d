/*
 * Seeing what a save or a load does while it works: bytes counted, and spans of time.
 *
 * A watch belongs to the caller, who keeps it until the calls that were given
 * it (in dr_options) have returned; any number of workers, and of calls, write
 * to it at the same time. Counting costs one atomic addition for each
 * transfer, a span two readings of the clock. Without a watch neither is done.
 */
#ifndef DCPRING_WATCH_H
#define DCPRING_WATCH_H

#include "base/clock.h"
#include "base/crc.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum dr_step {
    DR_STEP_ALLOCATE, /* fallocate */
    DR_STEP_FILL,     /* gathering a block's bytes, and summing them */
    DR_STEP_WRITE,    /* a block, from its submission until it is there */
    DR_STEP_SYNC,     /* fdatasync or fsync, which may go on beside other steps */
    DR_STEP_READ,     /* a block, likewise; or through the page cache, with its use */
    DR_STEP_USE,      /* checking a block, and scattering it */
    DR_STEP_SET_UP,   /* of a save: a worker's buffers, which are cleared and pinned, and its ring */
};

struct dr_span {
    uint64_t begin, end;   /* ns of CLOCK_MONOTONIC */
    uint64_t offset, size; /* bytes of the file */
    uint64_t crc;          /* ns of it in which CRC-32 was computed */
    uint32_t step;
    uint32_t file; /* of a load: its number; 0 of a save */
    uint32_t worker;
    uint32_t slot; /* transfers: which of the worker's buffers, or DR_NO_SLOT; syncs: no two at a time have the same */
};

#define DR_NO_SLOT UINT32_MAX /* the worker itself reads, through the page cache */

struct dr_watch {
    _Atomic uint64_t *done; /* bytes read or written; may lie in memory that processes share. NULL: not counted */
    struct dr_span *spans;  /* NULL: none are taken */
    size_t room;
    atomic_size_t count; /* spans seen; those that were more than the room are lost */
};

/* The clock, or 0 for a watch that takes no spans. */
static inline uint64_t dr_watch_now(const struct dr_watch *watch) {
    if (!watch || !watch->spans)
        return 0;
    return dr_clock_ns();
}

static inline void dr_watch_count(const struct dr_watch *watch, uint64_t bytes) {
    if (watch && watch->done)
        atomic_fetch_add_explicit(watch->done, bytes, memory_order_relaxed);
}

/* Notes a span that has ended then; for those of whom the watch knows nothing while they work. */
static inline void dr_watch_note_until(struct dr_watch *watch, uint64_t end, struct dr_span span) {
    if (!watch || !watch->spans)
        return;
    span.end = end;
    size_t index = atomic_fetch_add_explicit(&watch->count, 1, memory_order_relaxed);
    if (index < watch->room)
        watch->spans[index] = span;
}

/* Notes a span that ends now; `begin` is what dr_watch_now gave. */
static inline void dr_watch_note(struct dr_watch *watch, struct dr_span span) {
    if (watch && watch->spans)
        dr_watch_note_until(watch, dr_clock_ns(), span);
}

/* dr_crc32, its time added to *ns. */
static inline uint32_t dr_watch_crc32(const struct dr_watch *watch, uint64_t *ns, uint32_t crc, const void *data,
                                      size_t size) {
    uint64_t begin = dr_watch_now(watch);
    crc = dr_crc32(crc, data, size);
    *ns += dr_watch_now(watch) - begin;
    return crc;
}

#endif
