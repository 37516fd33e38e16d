/*
 * Making files and names durable, several at once, each in a kept thread.
 *
 * Syncs that need not follow each other cost one flush of the disk when they are under way together, and one each when
 * they are not. A set of them is begun one by one and waited for as a whole; a cancel does not wait: what is under way
 * then ends by itself. A set is used by one thread at a time, and only in the process that has made it.
 */
#ifndef DCPRING_SYNC_H
#define DCPRING_SYNC_H

#include "base/control.h"
#include "io/options.h"

#include <sys/types.h>

enum { DR_SYNCS_AT_ONCE = 8 }; /* under way; beyond them dr_syncs_add_file waits for the first */

struct dr_syncing;

struct dr_syncs {
    pid_t owner;
    struct dr_syncing *first, *last,
        *pending; /* in the order in which they were added; pending: not known to be over */
    unsigned pending_count;
    uint32_t files;
    bool on_disk; /* something of it is: then all of it is taken to be */
};

void dr_syncs_init(struct dr_syncs *syncs);

/*
 * Begins fdatasync, or fsync, of a file. Its descriptor is the set's from now on, after a failure too: it is closed
 * when that is over, of which a failure is one of the sync's. `size` is for the watch.
 */
int dr_syncs_add_file(struct dr_syncs *syncs, int fd, const char *path, enum dr_sync kind, uint64_t size,
                      const struct dr_control *control, struct dr_error *error);

/* Begins to make the names in a directory durable. */
int dr_syncs_add_directory(struct dr_syncs *syncs, const char *path, struct dr_error *error);

/* The same for the directory above, and so for the name of this one. One that cannot be read, as with mode 0711, is
 * left to the kernel's own time. */
int dr_syncs_add_above(struct dr_syncs *syncs, const char *path, struct dr_error *error);

/* Waits for all, and empties the set: the first failure, in the order in which they were added. */
int dr_syncs_wait(struct dr_syncs *syncs, const struct dr_control *control, struct dr_watch *watch,
                  struct dr_error *error);

/* Empties the set without waiting. */
void dr_syncs_abandon(struct dr_syncs *syncs);

/* One file, waited for; the descriptor stays the caller's. */
int dr_file_sync(int fd, const char *path, enum dr_sync kind, const struct dr_control *control, struct dr_error *error);

/* Makes the names in dir durable, in the calling thread. */
int dr_directory_sync(const char *dir, struct dr_error *error);

/* The same for one that is open. `call` is how an error names it. */
int dr_directory_sync_open(int fd, const char *path, enum dr_call call, struct dr_error *error);

#endif
