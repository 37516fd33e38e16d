/* One call's worth of a data file: laid out, then filled block by block. Made and used by save.c; see save.h. */
#ifndef DCPRING_SAVE_WINDOW_H
#define DCPRING_SAVE_WINDOW_H

#include "data/save.h"
#include "io/engine.h"

#include <sys/types.h>

struct dr_writer {
    struct dr_options options;
    char *name, *path, *dir;
    int dirfd, fd;
    pid_t owner; /* a forked child inherits the memory, but neither the rings nor the file are its own */
    bool direct, finished, failed;
    uint64_t expected; /* bytes, from the size hint */
    uint64_t position; /* the stream's length so far */
    uint8_t *carry;    /* the bytes from the last block boundary to position */
    struct dr_engine *engines[DR_MAX_WORKERS];
    unsigned engine_count;
    uint32_t *crcs;      /* of the last window's records, for the caller */
    uint32_t *open_crcs; /* of a record whose parts have not all come */
    uint64_t open_offset;
    size_t open_head;
    uint64_t open_done; /* payload bytes of it that are written; 0 when no record is open */
};

/* One source laid out in the file. */
struct piece {
    const struct dr_source *source;
    uint64_t record; /* file offset of the record */
    uint64_t begin;  /* of what this piece adds: the head, or more payload */
    uint64_t data;   /* of its payload bytes */
    uint64_t end;    /* behind its payload bytes, and behind the tail if it is the last part */
    uint64_t payload;
    size_t head_size;
    uint32_t *crcs;
    atomic_uint_fast64_t unsummed; /* bytes of this piece whose CRC is not in crcs yet */
};

struct window {
    struct dr_writer *writer;
    struct dr_crew crew;
    struct piece *pieces;
    size_t count;
    uint64_t begin, end; /* stream positions */
    uint8_t *carry_out;
    atomic_uint_fast64_t next; /* block to take */
};

/* Gives each source its place behind the writer's position. What it has allocated by a failure is freed with the rest. */
int dr_save_window_init(struct window *window, const struct dr_source *sources, size_t count, struct dr_error *error);

/*
 * Fills the stream's bytes [start, end) of a block, which starts at `start`; false when the crew was stopped. `worker`
 * is who does it, for the watch.
 */
bool dr_save_window_fill(struct window *window, unsigned worker, uint64_t start, uint64_t end, uint8_t *block);

#endif
