/*
 * The data files of one directory that are read: by a load, a look-up or a
 * check, or by several of them one after the other.
 *
 * Their names come from metadata, which is not believed: a name that leads out
 * of the directory, or to something else than a file, is refused. A file is
 * looked at when something of it is wanted, and not before; its descriptor is
 * kept, so that it is looked at once and stays the same file.
 *
 * Of thousands of files only DR_INPUT_KEPT are kept open, and besides them those
 * that somebody holds at the moment: in dr_stream_run the files of the blocks in
 * flight, at most as many as the queue is deep. One that was closed in between is
 * opened again, and must still be the one that was looked at.
 *
 * Any number of threads may use an input at the same time.
 */
#ifndef DCPRING_INPUT_H
#define DCPRING_INPUT_H

#include "base/error.h"
#include "io/options.h"

#include <pthread.h>
#include <sys/types.h>

enum { DR_INPUT_KEPT = 128 };

struct dr_input_file {
    const char *name;
    char *path; /* NULL until it is looked at */
    uint64_t size;
    /* guarded by the input's lock: */
    dev_t device;
    ino_t inode;
    bool looked, kept, direct_tried;
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
    size_t kept[DR_INPUT_KEPT]; /* files that stay open without a holder */
    unsigned kept_count, next;  /* the next of them to be closed for another one */
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
 * Gives a descriptor that reads through the page cache; it stays open until dr_input_release. The file was looked at.
 */
int dr_input_hold(struct dr_input *input, size_t file, int *fd, struct dr_error *error);

/*
 * Of a file that is held: gives a descriptor with O_DIRECT, or -1 where there is none to be had: by the options,
 * because the file system has no direct I/O, or because the file cannot be opened once more. With DR_DIRECT_ON that is
 * an error.
 */
int dr_input_direct(struct dr_input *input, size_t file, enum dr_direct direct, int *fd, struct dr_error *error);

void dr_input_release(struct dr_input *input, size_t file);

#endif
