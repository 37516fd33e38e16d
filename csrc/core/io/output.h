/*
 * A data file that is written in blocks, by workers of which each has an
 * engine: what input.h and stream.h are for reading. Who writes what where is
 * the caller's business (data/save.h, data/stripes.h).
 *
 * An output is used by one caller at a time, and only in the process that has
 * opened it: a forked child inherits the memory, but neither rings nor file.
 */
#ifndef DCPRING_OUTPUT_H
#define DCPRING_OUTPUT_H

#include "io/engine.h"
#include "io/options.h"
#include "io/sync.h"
#include "io/workers.h"

#include <sys/types.h>

struct dr_output {
    struct dr_options options;
    char *dir, *name, *path;
    int dirfd, fd;
    pid_t owner;
    bool direct;
    bool created;  /* by this output: dr_output_close removes it if told to */
    bool prepared; /* for blocks */
    bool in_order; /* blocks go one after the other, and the last one as it is: see dr_output_prepare */
    struct dr_engine *engines[DR_MAX_WORKERS];
    unsigned engine_count;
};

/*
 * Opens dir/name, which must not exist with `create`, and must without. dr_output_close is due whatever is returned.
 */
int dr_output_open(struct dr_output *out, const char *dir, const char *name, bool create,
                   const struct dr_options *options, struct dr_error *error);

/*
 * Before it is written in blocks, once: turns direct I/O on, as the options want it, and preallocates, so that a full
 * disk is known at once. Where the file system cannot, the file just grows. If that is FUSE's, it may be one of those,
 * mostly before an object storage, that take a file only from its beginning to its end, and none that is cut: then one
 * block is in flight at a time, in the order that the caller submits them in. A small file is not worth the calls: as
 * long as it is not prepared, it is written at once, through the page cache, and has its length by that.
 */
int dr_output_prepare(struct dr_output *out, uint64_t size, struct dr_error *error);

/* Sees to it that there are `count` engines. Buffers beyond what `expected` bytes need are never allocated. */
int dr_output_engines(struct dr_output *out, unsigned count, uint64_t expected, struct dr_error *error);

/* What is written from now on goes through the page cache, unless the options want direct I/O. */
void dr_output_leave_direct(struct dr_output *out);

/* How many workers so many bytes are worth. */
unsigned dr_output_workers(const struct dr_output *out, uint64_t bytes);

/* Takes a request with a buffer, and waits for one if it must; NULL when the workers (NULL: none) were stopped. */
int dr_output_take(struct dr_workers *workers, struct dr_engine *engine, struct dr_request **request,
                   struct dr_error *error);

/* Writes `size` bytes of the request's buffer at an offset of the file; with direct I/O both are aligned. */
int dr_output_submit(struct dr_output *out, struct dr_engine *engine, struct dr_request *request, uint64_t offset,
                     size_t size, struct dr_error *error);

/* Waits until nothing of an engine is in flight, or the workers were stopped. */
int dr_output_wait(struct dr_workers *workers, struct dr_engine *engine, struct dr_error *error);

/* Waits until nothing of any engine is in flight. */
int dr_output_wait_all(struct dr_output *out, const struct dr_control *control, struct dr_error *error);

/* Writes at once, in the calling thread; not with direct I/O. */
int dr_output_write_at(struct dr_output *out, uint64_t offset, const void *data, size_t size, struct dr_error *error);

/*
 * Waits for all that is in flight, and cuts the file to its length, or leaves that as it is (DR_ANY_LENGTH); see
 * options.sync for what is durable then, or, where it is given a set of syncs, when these are over. Where something is
 * made durable, that closes the file, too.
 */
#define DR_ANY_LENGTH UINT64_MAX
int dr_output_sync(struct dr_output *out, uint64_t length, struct dr_syncs *later, const struct dr_control *control,
                   struct dr_error *error);

/* Closes the file, of which the kernel may only now say that it could not be written. */
int dr_output_close_file(struct dr_output *out, struct dr_error *error);

/* Frees everything; with `removed` the file goes, if it is this output's own. A forked child's call does nothing. */
void dr_output_close(struct dr_output *out, bool removed);

#endif
