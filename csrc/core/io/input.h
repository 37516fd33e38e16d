/*
 * The data files of one directory that are read: by a load, a look-up or a
 * check, or by several of them one after the other.
 *
 * Their names come from metadata, which is not believed: a name that leads out
 * of the directory, or to something else than a file, is refused. A file is
 * looked at when something of it is wanted, and not before; its descriptor is
 * kept, so that it is opened once and stays the same file.
 *
 * Descriptors stay open up to half of those that the process may have, at most
 * DR_INPUT_MOST, and besides them those that somebody holds at the moment: in
 * dr_stream_run of the blocks in flight, at most as many as the queue is deep.
 * Where the process, or the machine, has no descriptor left, those go that
 * nobody holds. A file that was closed in between is opened again, and must
 * still be the one that was looked at.
 *
 * Any number of threads may use an input at the same time. Files are opened and
 * closed without its lock: several at once, each by one thread, for which others
 * that want the same file wait.
 */
#ifndef DCPRING_INPUT_H
#define DCPRING_INPUT_H

#include "base/control.h"
#include "io/options.h"

#include <errno.h>
#include <pthread.h>
#include <sys/types.h>

enum { DR_INPUT_MOST = 1024 };

struct dr_input_file {
    const char *name;
    char *path; /* NULL until it is looked at */
    uint64_t size;
    /* guarded by the input's lock: */
    dev_t device;
    ino_t inode;
    bool looked, direct_tried;
    bool awaited;               /* somebody is about to look at it */
    bool opening;               /* by a thread, without the lock; it alone changes the rest meanwhile */
    int buffered_fd, direct_fd; /* -1 while closed */
    unsigned holders;
};

struct dr_input {
    const char *dir;
    int dirfd;
    bool opened;
    struct dr_input_file *files;
    size_t count;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a file was opened, or somebody let go of one */
    unsigned open, most;    /* descriptors: now, and as many may stay without a holder */
    unsigned busy;          /* files with a holder, being opened, or being closed: their descriptors will come back */
    uint64_t closed;        /* how often descriptors have come back */
    size_t next;            /* file to be closed in favour of another, where nobody holds it */
};

/*
 * Opens the directory. Its name and those of the files are the caller's, and outlive the input. dr_input_destroy is due
 * whatever is returned.
 */
int dr_input_init(struct dr_input *input, const char *dir, const char *const *names, size_t count,
                  struct dr_error *error);
void dr_input_destroy(struct dr_input *input);

/* Whether a name leads out of the directory. */
bool dr_input_is_outside(const char *name);

/* Looks at a file, unless that was done: its name, that it is there, and its size. */
int dr_input_look(struct dr_input *input, size_t file, struct dr_error *error);

/*
 * Looks at many files, several at once where that takes long: the indices lie `stride` bytes apart, from *files on. It
 * fails only by a cancel: what a look finds wrong is for dr_input_look to say, of the file that its caller asks for.
 */
int dr_input_look_many(struct dr_input *input, const size_t *files, size_t stride, size_t count,
                       const struct dr_control *control, struct dr_error *error);

/*
 * What to do where there is no descriptor, and all that are open are in use: DR_INPUT_WAIT waits for one of these, and
 * is for who holds no file himself; DR_INPUT_TRY fails with EMFILE or ENFILE.
 */
enum dr_input_lack { DR_INPUT_TRY, DR_INPUT_WAIT };

/* Whether it failed for that. */
static inline bool dr_input_is_lack(const struct dr_error *error) {
    return error->kind == DR_ERROR_SYSTEM && (error->err == EMFILE || error->err == ENFILE);
}

/* Lets go of half of the descriptors that nobody holds, or more, for somebody who lacks one. False: there are none. */
bool dr_input_make_room(struct dr_input *input);

/*
 * Gives a descriptor that reads through the page cache; it stays open until dr_input_release was called `times` times.
 * The file was looked at.
 */
int dr_input_hold(struct dr_input *input, size_t file, unsigned times, enum dr_input_lack lack, int *fd,
                  struct dr_error *error);

/*
 * Of a file that is held: gives a descriptor with O_DIRECT, or -1 where there is none to be had: by the options,
 * because the file system has no direct I/O, or because the file cannot be opened once more. With DR_DIRECT_ON that is
 * an error.
 */
int dr_input_direct(struct dr_input *input, size_t file, enum dr_direct direct, int *fd, struct dr_error *error);

void dr_input_release(struct dr_input *input, size_t file);

#endif
