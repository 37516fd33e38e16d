/*
 * Every system call of the core, in one table.
 *
 * `dr_sys` holds the real calls. Tests replace the whole table to fail or
 * shorten the Nth call (sys_fault.c); nothing else writes to it, and it is
 * only replaced while no engine, writer or load is alive.
 *
 * Each entry returns a result >= 0, or -errno.
 */
#ifndef DCPRING_SYS_H
#define DCPRING_SYS_H

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/types.h>

/* Of liburing: who uses a ring includes it. */
struct io_uring;
struct io_uring_cqe;
struct iovec;

struct dr_sys {
    int (*open_dir)(const char *path);
    /* Opens name below dirfd; never leaves dirfd, by "..", by absolute path or by symlink. */
    int (*open_below)(int dirfd, const char *name, int flags, mode_t mode);
    int (*close)(int fd);
    int (*fstat)(int fd, struct stat *out);
    ssize_t (*pread)(int fd, void *data, size_t size, off_t offset);
    ssize_t (*pwrite)(int fd, const void *data, size_t size, off_t offset);
    int (*set_direct)(int fd, int on);
    /* Of a descriptor that was opened with O_RDONLY | O_NONBLOCK: reads wait from now on. */
    int (*set_blocking)(int fd);
    int (*fallocate)(int fd, off_t size);
    int (*ftruncate)(int fd, off_t size);
    int (*fdatasync)(int fd);
    int (*fsync)(int fd);
    int (*mkdir)(const char *path, mode_t mode);
    int (*stat)(const char *path, struct stat *out);
    int (*rename)(int dirfd, const char *from, const char *to);
    /* Lets two names, which both exist, change places at once. */
    int (*exchange)(int dirfd, const char *a, const char *b);
    int (*unlink)(int dirfd, const char *name);
    /* Bytes of [offset, offset + size) that the page cache holds. */
    int64_t (*cached)(int fd, off_t offset, size_t size);
    /* Alignment of offsets for direct I/O, 0 where the kernel does not tell. */
    int (*direct_alignment)(int fd);
    int (*statfs)(const char *path, struct statfs *out);
    /* Writes what a terminal (or pipe) is ready to take within the time: -EAGAIN when that is nothing. */
    ssize_t (*print)(int fd, const void *data, size_t size, int timeout_ms);
    /* Opens a terminal once more, so that writes never wait; those of others through `fd` stay as they are. */
    int (*open_terminal)(int fd);
    /* Width of a terminal. */
    int (*columns)(int fd);
    /* A futex that processes may share: returns when it is woken, has not this value, or the time is over. */
    int (*wait_for)(_Atomic uint32_t *word, uint32_t value, int timeout_ms);
    int (*wake_all)(_Atomic uint32_t *word);
    /* 1 or 0. */
    int (*process_exists)(pid_t process);
    void *(*map)(size_t size);
    int (*unmap)(void *data, size_t size);
    int (*uring_init)(unsigned entries, struct io_uring *ring);
    /* Whether the ring's kernel can do an operation (IORING_OP_*). */
    int (*uring_supports)(struct io_uring *ring, int operation);
    int (*uring_register)(struct io_uring *ring, const struct iovec *buffers, unsigned count);
    int (*uring_submit)(struct io_uring *ring);
    int (*uring_wait)(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned timeout_ms);
    /* The result of a completion, as the engine shall see it. */
    int (*uring_result)(const struct io_uring_cqe *cqe);
};

extern struct dr_sys dr_sys;

/* The real calls, for wrapping and restoring. */
extern const struct dr_sys dr_sys_real;

/* So often at most: a call that goes on being interrupted is an error. */
enum { DR_MOST_INTERRUPTIONS = 1000 };

/*
 * A call of dr_sys, again for as long as signals interrupt it: workers run with the caller's handlers, and those of
 * Python are without SA_RESTART. Not for close, which is not to be repeated, nor for exchange, which done twice is
 * undone.
 */
#define DR_RETRY(call) \
    __extension__({ \
        __typeof__(call) dr_result = (call); \
        for (unsigned dr_tries = 1; dr_result == -EINTR && dr_tries < DR_MOST_INTERRUPTIONS; dr_tries++) \
            dr_result = (call); \
        dr_result; \
    })

#endif
