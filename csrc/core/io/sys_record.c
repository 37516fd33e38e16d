/* Noting what the core does to the file system. See sys_record.h. */
#include "io/sys_record.h"

#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct dr_sys inner;
static int log_fd = -1;
static atomic_int failure;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000U + (uint64_t)time.tv_nsec;
}

/* An inode's number, with that of its device. */
static uint64_t number_of(const struct stat *about) { return (uint64_t)about->st_dev << 44 ^ about->st_ino; }

static uint64_t inode_of(int fd) {
    struct stat about;
    return fstat(fd, &about) == 0 ? number_of(&about) : 0;
}

static void append(struct dr_record_note *note, const char *name, const char *other, const void *data) {
    note->process = (uint32_t)getpid();
    note->name_size = name ? (uint32_t)strlen(name) : 0;
    note->other_size = other ? (uint32_t)strlen(other) : 0;
    struct iovec parts[] = {{note, sizeof *note},
                            {(void *)(uintptr_t)name, note->name_size},
                            {(void *)(uintptr_t)other, note->other_size},
                            {(void *)(uintptr_t)data, note->data_size}};
    size_t size = sizeof *note + note->name_size + note->other_size + note->data_size;
    ssize_t written = writev(log_fd, parts, 4);
    if (written < 0 || (size_t)written != size)
        atomic_store(&failure, written < 0 ? errno : EIO);
}

/* The directory in which a name below dirfd lies, and what it is called there. */
static uint64_t directory_of(int dirfd, const char **name) {
    const char *slash = strrchr(*name, '/');
    if (!slash)
        return inode_of(dirfd);
    char folder[PATH_MAX];
    struct stat about;
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - *name), *name);
    *name = slash + 1;
    return fstatat(dirfd, folder, &about, 0) == 0 ? number_of(&about) : 0;
}

/* Notes a call that is over; those that failed have changed nothing. */
static void note_names(uint32_t call, uint64_t begin, int dirfd, const char *name, const char *other, int rc) {
    struct dr_record_note note = {.call = call, .begin_ns = begin, .end_ns = now()};
    note.directory = directory_of(dirfd, &name);
    if (rc >= 0)
        append(&note, name, other, NULL);
}

static void note_file(uint32_t call, uint64_t begin, int fd, uint64_t size, int rc) {
    struct dr_record_note note = {
        .call = call, .begin_ns = begin, .end_ns = now(), .inode = inode_of(fd), .size = size};
    if (rc >= 0)
        append(&note, NULL, NULL, NULL);
}

static int record_open_below(int dirfd, const char *name, int flags, mode_t mode) {
    uint64_t begin = now();
    int fd = inner.open_below(dirfd, name, flags, mode);
    if (fd < 0 || !(flags & O_CREAT))
        return fd;
    struct dr_record_note note = {.call = DR_RECORD_CREATE,
                                  .begin_ns = begin,
                                  .end_ns = now(),
                                  .directory = directory_of(dirfd, &name),
                                  .inode = inode_of(fd)};
    append(&note, name, NULL, NULL);
    return fd;
}

static int record_mkdir(const char *path, mode_t mode) {
    uint64_t begin = now();
    int rc = inner.mkdir(path, mode);
    if (rc < 0)
        return rc;
    const char *slash = strrchr(path, '/');
    char parent[PATH_MAX] = ".";
    if (slash)
        snprintf(parent, sizeof parent, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    struct stat made = {0}, above = {0};
    if (stat(path, &made) < 0 || stat(parent, &above) < 0)
        atomic_store(&failure, errno);
    struct dr_record_note note = {.call = DR_RECORD_MKDIR,
                                  .begin_ns = begin,
                                  .end_ns = now(),
                                  .directory = number_of(&above),
                                  .inode = number_of(&made)};
    append(&note, slash ? slash + 1 : path, NULL, NULL);
    return rc;
}

static ssize_t record_pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct dr_record_note note = {
        .call = DR_RECORD_WRITE, .begin_ns = now(), .inode = inode_of(fd), .offset = (uint64_t)offset};
    ssize_t written = inner.pwrite(fd, data, size, offset);
    if (written <= 0)
        return written;
    note.end_ns = now();
    note.size = (uint64_t)written;
    note.data_size = (uint32_t)written;
    append(&note, NULL, NULL, data);
    return written;
}

static int record_fallocate(int fd, off_t size) {
    uint64_t begin = now();
    int rc = inner.fallocate(fd, size);
    note_file(DR_RECORD_ALLOCATE, begin, fd, (uint64_t)size, rc);
    return rc;
}

static int record_ftruncate(int fd, off_t size) {
    uint64_t begin = now();
    int rc = inner.ftruncate(fd, size);
    note_file(DR_RECORD_RESIZE, begin, fd, (uint64_t)size, rc);
    return rc;
}

static int record_fdatasync(int fd) {
    uint64_t begin = now();
    int rc = inner.fdatasync(fd);
    note_file(DR_RECORD_FDATASYNC, begin, fd, 0, rc);
    return rc;
}

static int record_fsync(int fd) {
    uint64_t begin = now();
    int rc = inner.fsync(fd);
    note_file(DR_RECORD_FSYNC, begin, fd, 0, rc);
    return rc;
}

static int record_rename(int dirfd, const char *from, const char *to) {
    uint64_t begin = now();
    int rc = inner.rename(dirfd, from, to);
    note_names(DR_RECORD_RENAME, begin, dirfd, from, to, rc);
    return rc;
}

static int record_exchange(int dirfd, const char *a, const char *b) {
    uint64_t begin = now();
    int rc = inner.exchange(dirfd, a, b);
    note_names(DR_RECORD_EXCHANGE, begin, dirfd, a, b, rc);
    return rc;
}

static int record_unlink(int dirfd, const char *name) {
    uint64_t begin = now();
    int rc = inner.unlink(dirfd, name);
    note_names(DR_RECORD_UNLINK, begin, dirfd, name, NULL, rc);
    return rc;
}

static int record_link(int from_dirfd, const char *from, int dirfd, const char *name) {
    struct stat about = {0};
    struct dr_record_note note = {.call = DR_RECORD_LINK, .begin_ns = now(), .directory = inode_of(dirfd)};
    int rc = inner.link(from_dirfd, from, dirfd, name);
    if (rc < 0)
        return rc;
    if (fstatat(dirfd, name, &about, AT_SYMLINK_NOFOLLOW) < 0)
        atomic_store(&failure, errno);
    note.inode = number_of(&about);
    note.end_ns = now();
    append(&note, name, NULL, NULL);
    return rc;
}

/* Shared blocks are as good as written ones: a crash may lose that they are. */
static int record_clone(int from, int fd) {
    struct dr_record_note note = {.call = DR_RECORD_WRITE, .begin_ns = now(), .inode = inode_of(fd)};
    int rc = inner.clone(from, fd);
    if (rc < 0)
        return rc;
    note.end_ns = now();
    struct stat about = {0};
    char *data = fstat(from, &about) == 0 ? malloc((size_t)about.st_size + 1) : NULL;
    ssize_t size = data ? pread(from, data, (size_t)about.st_size, 0) : -1;
    if (size != about.st_size)
        atomic_store(&failure, EIO);
    note.size = note.data_size = size > 0 ? (uint32_t)size : 0;
    append(&note, NULL, NULL, data);
    free(data);
    return rc;
}

/* Entries that the next submission gives to the kernel are writes that may be on the disk from now on. */
static int record_uring_submit(struct io_uring *ring) {
    const struct io_uring_sq *sq = &ring->sq;
    for (unsigned at = sq->sqe_head; at != sq->sqe_tail; at++) {
        const struct io_uring_sqe *entry = &sq->sqes[at & sq->ring_mask];
        if (entry->opcode != IORING_OP_WRITE && entry->opcode != IORING_OP_WRITE_FIXED)
            continue;
        uint64_t begin = now();
        struct dr_record_note note = {.call = DR_RECORD_SUBMIT,
                                      .begin_ns = begin,
                                      .end_ns = begin,
                                      .inode = inode_of(entry->fd),
                                      .id = entry->user_data,
                                      .offset = entry->off,
                                      .size = entry->len,
                                      .data_size = entry->len};
        append(&note, NULL, NULL, (const void *)(uintptr_t)entry->addr);
    }
    return inner.uring_submit(ring);
}

static int record_uring_result(const struct io_uring_cqe *cqe) {
    int written = inner.uring_result(cqe);
    uint64_t end = now();
    struct dr_record_note note = {.call = DR_RECORD_COMPLETE,
                                  .begin_ns = end,
                                  .end_ns = end,
                                  .id = cqe->user_data,
                                  .size = written > 0 ? (uint64_t)written : 0};
    append(&note, NULL, NULL, NULL);
    return written;
}

void dr_record_start(int fd) {
    log_fd = fd;
    atomic_store(&failure, 0);
    inner = dr_sys;
    dr_sys.open_below = record_open_below;
    dr_sys.mkdir = record_mkdir;
    dr_sys.pwrite = record_pwrite;
    dr_sys.fallocate = record_fallocate;
    dr_sys.ftruncate = record_ftruncate;
    dr_sys.fdatasync = record_fdatasync;
    dr_sys.fsync = record_fsync;
    dr_sys.rename = record_rename;
    dr_sys.exchange = record_exchange;
    dr_sys.unlink = record_unlink;
    dr_sys.link = record_link;
    dr_sys.clone = record_clone;
    dr_sys.uring_submit = record_uring_submit;
    dr_sys.uring_result = record_uring_result;
}

int dr_record_stop(void) {
    dr_sys = inner;
    log_fd = -1;
    return -atomic_load(&failure);
}
