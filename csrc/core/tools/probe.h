/*
 * What this machine and a directory can do, found by trying.
 *
 * That something does not work is an answer, not a failure: each answer holds
 * the errno. All is done in the caller's thread and takes a few syncs. Files
 * are made under the two names below, which must not exist, and are removed
 * whatever happens; the directory should be the caller's own.
 */
#ifndef DCPRING_PROBE_H
#define DCPRING_PROBE_H

#include "base/control.h"

#include <stddef.h>
#include <stdint.h>

/* Whether something works, and how long it takes. */
struct dr_answer {
    bool asked;       /* what it needs worked */
    int err;          /* 0: it works */
    const char *cure; /* static; "" where there is none to name */
    uint64_t ns;      /* the median of some tries */
};

struct dr_ring_answers {
    struct dr_answer open;
    unsigned registered; /* of the buffers, those that could be registered */
};

/* An io_uring as the engine uses it, with `depth` buffers of `buffer_size` bytes. */
void dr_probe_ring(unsigned depth, size_t buffer_size, struct dr_ring_answers *out);

struct dr_space {
    uint64_t file_system; /* magic number */
    uint64_t bytes, free_bytes;
    uint64_t files, free_files; /* both 0 where files are not counted */
};

/* Of the file system that the directory lies on. */
struct dr_answer dr_probe_space(const char *dir, struct dr_space *out);

#define DR_PROBE_FILE "probe"
#define DR_PROBE_COMMIT "probe.tmp"

struct dr_directory_answers {
    struct dr_answer create, allocate, direct, sync, commit, remove;
    int alignment; /* that direct I/O needs; 0 where the kernel does not tell */
};

/* Fails only when it is cancelled. */
int dr_probe_directory(const char *dir, struct dr_directory_answers *out, const struct dr_control *control,
                       struct dr_error *error);

/* Bytes of dir/name that the page cache holds. */
int dr_probe_cached(const char *dir, const char *name, uint64_t *out, struct dr_error *error);

/* ns that CRC-32 takes for so many bytes that are in the processor's cache. */
uint64_t dr_probe_crc(uint64_t bytes);

#endif
