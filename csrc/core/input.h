/*
 * The data files that a load, a look-up or a check reads.
 *
 * Their names come from metadata, which is not believed: a name that leads out
 * of the directory, or to something else than a file, is refused. Descriptors
 * are opened when they are needed; dr_input_destroy closes what is open.
 */
#ifndef DCPRING_INPUT_H
#define DCPRING_INPUT_H

#include "error.h"

#include <stdbool.h>

struct dr_input_file {
    const char *name;
    char *path;
    uint64_t size;
    size_t blocks_left;         /* dr_stream's */
    int buffered_fd, direct_fd; /* -1 while closed */
    bool direct_tried;
};

struct dr_input {
    int dirfd;
    bool opened;
    struct dr_input_file *files;
    size_t count;
};

/* Opens the directory. The names are the caller's, and outlive the input. dr_input_destroy is due whatever is returned. */
int dr_input_init(struct dr_input *input, const char *dir, const char *const *names, size_t count,
                  struct dr_error *error);
/* Whether a name leads out of the directory. */
bool dr_input_is_outside(const char *name);
/* Checks a file's name, that it is there, and notes its size. */
int dr_input_look(struct dr_input *input, size_t file, struct dr_error *error);
/* A descriptor of the file, through the page cache. */
int dr_input_open(const struct dr_input *input, const struct dr_input_file *file, int *fd, struct dr_error *error);
void dr_input_close(struct dr_input_file *file);
void dr_input_destroy(struct dr_input *input);

#endif
