/*
 * Reading blocks of files as fast as the disk gives them: the reading half of
 * loading and of checking.
 *
 * Workers take the blocks in their order, keep many in flight, and
 * call `use` for each that is there. Blocks that the page cache holds are read
 * through it, others directly. A file is held while a block of it is in flight.
 */
#ifndef DCPRING_STREAM_H
#define DCPRING_STREAM_H

#include "io/input.h"
#include "io/options.h"
#include "io/workers.h"

/* One I/O: the bytes [lo, hi) of a file, at most options->block_size of them. */
struct dr_block {
    size_t file;
    uint64_t lo, hi; /* lo is a multiple of DR_ALIGNMENT */
    size_t first;    /* the user's */
    bool sparse;     /* a load's: little of it is wanted */
    bool in_one;     /* used as one piece; else in several where that is faster, cut on the CRC grid */
};

struct dr_stream {
    struct dr_input *input;
    const struct dr_block *blocks;
    size_t count;
    const struct dr_options *options;
    /* Called by any worker, with a block or a piece of one; adds the time spent on CRC-32 to *crc_ns. */
    int (*use)(void *context, const struct dr_block *piece, const uint8_t *data, uint64_t *crc_ns,
               struct dr_error *error);
    /*
     * Called by any worker for a block that could not be read, for `why`; `buffer` has room for it. fd reads its file
     * through the page cache, -1 where that cannot be opened. 0: go on with the others. It may take long, and looks
     * whether the workers were stopped. NULL: the first such block ends it all.
     */
    int (*on_read_error)(void *context, struct dr_workers *workers, const struct dr_block *block, int fd,
                         uint8_t *buffer, const struct dr_error *why, struct dr_error *error);
    void *context;
};

struct dr_stream_stats {
    uint64_t bytes;        /* read from files, page cache included */
    uint64_t cached_bytes; /* of these, through the page cache */
    bool direct;
    const char *engine; /* NULL when nothing was read */
};

int dr_stream_run(const struct dr_stream *stream, const struct dr_control *control, struct dr_stream_stats *stats,
                  struct dr_error *error);

#endif
