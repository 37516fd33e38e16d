/* How a save or a load does its I/O; the same for both. */
#ifndef DCPRING_OPTIONS_H
#define DCPRING_OPTIONS_H

#include "io/watch.h"

#include <stdbool.h>
#include <stddef.h>

/*
 * What is durable when a file is finished: nothing yet; its data, by fdatasync, which need not keep that the file was
 * cut shorter than it had been allocated; or its length, too.
 */
enum dr_sync { DR_SYNC_OFF, DR_SYNC_DATA, DR_SYNC_LENGTH };

enum dr_direct { DR_DIRECT_OFF, DR_DIRECT_ON, DR_DIRECT_AUTO };

struct dr_options {
    const char *engine; /* "auto", "uring" or "threads" */
    enum dr_direct direct;
    unsigned queue_depth; /* blocks in flight, over all workers */
    size_t block_size;    /* bytes; a multiple of DR_CRC_BLOCK */
    unsigned workers;
    bool checksum;
    enum dr_sync sync;
    struct dr_watch *watch; /* NULL: nobody looks */
};

#endif
