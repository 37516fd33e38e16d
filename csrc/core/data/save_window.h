/*
 * One call's worth of a data file: laid out, then filled block by block. save.c makes it, and its workers fill it;
 * see save.h. It sees of the writer only what is in it.
 */
#ifndef DCPRING_SAVE_WINDOW_H
#define DCPRING_SAVE_WINDOW_H

#include "data/save.h"

/* A tensor in parts, of which the last one has not come. */
struct open_record {
    uint64_t offset; /* of the record in the file */
    size_t head_size;
    uint32_t *crcs; /* of the payload's CRC blocks, as far as they are summed */
    uint64_t done;  /* payload bytes that are written; 0: no record is open */
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
    uint8_t *digests;              /* of the same blocks; NULL without a key */
    atomic_uint_fast64_t unsummed; /* bytes of this piece whose CRC is not in crcs yet */
};

struct save_window {
    /* the writer's */
    const struct dr_options *options;
    const char *path;                /* for errors */
    const uint8_t *carry;            /* the bytes from the last block boundary to `begin` */
    struct open_record *open;        /* what a first part opens; `done` is the writer's to change */
    const struct dr_digest_key *key; /* NULL: no digests */
    /* its own */
    struct dr_workers workers;
    struct piece *pieces;
    size_t count;
    uint64_t begin, end; /* stream positions */
    uint32_t *crcs;      /* of the records that are whole in it */
    uint8_t *digests;    /* of their blocks */
};

/*
 * Gives each source its place, from window->begin on, which the caller has set with what is the writer's. Pieces,
 * crcs and digests are allocated; they are the caller's to free, after a failure too.
 */
int dr_save_window_init(struct save_window *window, const struct dr_source *sources, size_t count,
                        struct dr_error *error);

/*
 * Fills the stream's bytes [start, end) of a block, which starts at `start`; false when the workers were stopped.
 * `worker` is who does it, for the watch.
 */
bool dr_save_window_fill(struct save_window *window, unsigned worker, uint64_t start, uint64_t end, uint8_t *block);

#endif
