/*
 * dr_sys over one file in memory, called "file" in any directory, for targets
 * that read. A target puts calls of its own over those that shall do more.
 */
#ifndef DCPRING_MEMORY_FILE_H
#define DCPRING_MEMORY_FILE_H

#include "fuzz.h"
#include "io/sys.h"

#include <errno.h>
#include <string.h>

static struct {
    const uint8_t *data;
    size_t size;
} file;

static int memory_open_dir(const char *path) { return path[0] ? 100 : -ENOENT; }

static int memory_open_below(int dirfd, const char *name, int flags, mode_t mode) {
    (void)flags;
    (void)mode;
    FUZZ_CHECK(dirfd == 100);
    return strcmp(name, "file") == 0 ? 101 : -ENOENT;
}

static int memory_close(int fd) {
    FUZZ_CHECK(fd >= 100);
    return 0;
}

static int memory_fstat(int fd, struct stat *out) {
    (void)fd;
    *out = (struct stat){.st_mode = S_IFREG, .st_size = (off_t)file.size};
    return 0;
}

/* How many of so many bytes are there. */
static size_t memory_left(size_t size, off_t offset) {
    FUZZ_CHECK(offset >= 0);
    size_t left = (uint64_t)offset < file.size ? file.size - (size_t)offset : 0;
    return size < left ? size : left;
}

static ssize_t memory_pread(int fd, void *data, size_t size, off_t offset) {
    (void)fd;
    size = memory_left(size, offset);
    if (size > 0)
        memcpy(data, file.data + offset, size);
    return (ssize_t)size;
}

static int memory_set_blocking(int fd) {
    (void)fd;
    return 0;
}

static int memory_set_direct(int fd, int on) {
    (void)fd;
    (void)on;
    return 0;
}

static int memory_direct_alignment(int fd) {
    (void)fd;
    return 512;
}

/* How reading may go wrong, and what counts as cached; NULL: all is well, and nothing is. */
struct memory_ways {
    ssize_t (*pread)(int fd, void *data, size_t size, off_t offset);
    int64_t (*cached)(int fd, off_t offset, size_t size);
};

/* The table is written once: threads that are kept between inputs may look at it. */
static void memory_set_up(const uint8_t *data, size_t size, const struct memory_ways *ways) {
    file.data = data;
    file.size = size;
    if (dr_sys.open_dir == memory_open_dir)
        return;
    dr_sys.open_dir = memory_open_dir;
    dr_sys.open_below = memory_open_below;
    dr_sys.close = memory_close;
    dr_sys.fstat = memory_fstat;
    dr_sys.pread = ways ? ways->pread : memory_pread;
    if (ways)
        dr_sys.cached = ways->cached;
    dr_sys.set_direct = memory_set_direct;
    dr_sys.set_blocking = memory_set_blocking;
    dr_sys.direct_alignment = memory_direct_alignment;
}

#endif
