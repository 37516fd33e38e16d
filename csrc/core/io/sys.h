/*
 * Every system call of the core, in one table.
 *
 * `dr_sys` holds the real calls. Tests replace the whole table to fail or
 * shorten the Nth call (sys_fault.c); nothing else writes to it, and it is
 * only replaced while no writer or load is alive, and no thread is about to
 * let go of what is kept (engine_cache.h).
 *
 * Each entry returns a result >= 0, or -errno.
 */
#ifndef DCPRING_SYS_H
#define DCPRING_SYS_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/types.h>

/* Of liburing: who uses a ring includes its header. */
struct io_uring;
struct io_uring_cqe;
struct iovec;

/* About memory that was mapped elsewhere, and may be shared. GIVE_BACK: nobody needs what is in it any more. */
enum dr_advice { DR_ADVICE_HUGE_PAGES, DR_ADVICE_GIVE_BACK };

/*
 * CALL(failure, result, name, parameters, arguments) for every one. `failure` is what a fault does to it (sys_fault.c):
 *   ERRNO     it returns -errno
 *   TRANSFER  the same, or fewer than `size` bytes are transferred
 *   NONE      it finds nothing, and returns 0
 *   MEMORY    it returns NULL
 *   NEVER     nothing
 *   OWN       sys_fault.c says
 */
#define DR_SYS_CALLS(CALL) \
    CALL(ERRNO, int, open_dir, (const char *path), (path)) \
    /* Opens name below dirfd; never leaves dirfd, by "..", by absolute path or by symlink. */ \
    CALL(ERRNO, int, open_below, (int dirfd, const char *name, int flags, mode_t mode), (dirfd, name, flags, mode)) \
    CALL(OWN, int, close, (int fd), (fd)) \
    CALL(ERRNO, int, dup, (int fd), (fd)) \
    CALL(ERRNO, int, fstat, (int fd, struct stat *out), (fd, out)) \
    CALL(TRANSFER, ssize_t, pread, (int fd, void *data, size_t size, off_t offset), (fd, data, size, offset)) \
    CALL(TRANSFER, ssize_t, pwrite, (int fd, const void *data, size_t size, off_t offset), (fd, data, size, offset)) \
    CALL(ERRNO, int, set_direct, (int fd, int on), (fd, on)) \
    /* Of a descriptor that was opened with O_RDONLY | O_NONBLOCK: reads wait from now on. */ \
    CALL(ERRNO, int, set_blocking, (int fd), (fd)) \
    CALL(ERRNO, int, fallocate, (int fd, off_t size), (fd, size)) \
    CALL(ERRNO, int, ftruncate, (int fd, off_t size), (fd, size)) \
    CALL(ERRNO, int, fdatasync, (int fd), (fd)) \
    CALL(ERRNO, int, fsync, (int fd), (fd)) \
    CALL(ERRNO, int, mkdir, (const char *path, mode_t mode), (path, mode)) \
    CALL(ERRNO, int, stat, (const char *path, struct stat *out), (path, out)) \
    CALL(ERRNO, int, rename, (int dirfd, const char *from, const char *to), (dirfd, from, to)) \
    /* Lets two names, which both exist, change places at once. */ \
    CALL(ERRNO, int, exchange, (int dirfd, const char *a, const char *b), (dirfd, a, b)) \
    CALL(ERRNO, int, unlink, (int dirfd, const char *name), (dirfd, name)) \
    /* Gives a file a second name, in the other directory. */ \
    CALL(ERRNO, int, link, (int from_dirfd, const char *from, int dirfd, const char *name), \
         (from_dirfd, from, dirfd, name)) \
    /* Lets an empty file share all blocks of another, until one of them is written to. */ \
    CALL(ERRNO, int, clone, (int from, int fd), (from, fd)) \
    /* Bytes of [offset, offset + size) that the page cache holds. */ \
    CALL(NONE, int64_t, cached, (int fd, off_t offset, size_t size), (fd, offset, size)) \
    /* Alignment of offsets for direct I/O, 0 where the kernel does not tell. */ \
    CALL(ERRNO, int, direct_alignment, (int fd), (fd)) \
    CALL(ERRNO, int, statfs, (const char *path, struct statfs *out), (path, out)) \
    CALL(MEMORY, void *, map, (size_t size), (size)) \
    CALL(NEVER, int, unmap, (void *data, size_t size), (data, size)) \
    CALL(ERRNO, int, advise, (void *data, size_t size, enum dr_advice advice), (data, size, advice)) \
    /* On a word that processes may share: as long as it has this value, and nobody wakes who waits. */ \
    CALL(NEVER, int, futex_wait, (atomic_uint * word, unsigned value, unsigned timeout_ms), (word, value, timeout_ms)) \
    CALL(NEVER, int, futex_wake, (atomic_uint * word), (word)) \
    /* Starts a thread as dr_thread_start does. */ \
    CALL(ERRNO, int, thread, (pthread_t * id, void *(*run)(void *), void *argument), (id, run, argument)) \
    CALL(ERRNO, int, uring_init, (unsigned entries, struct io_uring *ring), (entries, ring)) \
    /* Sends a request that does nothing through a new ring, and waits for it. */ \
    CALL(ERRNO, int, uring_try, (struct io_uring * ring), (ring)) \
    /* Whether the ring's kernel can do an operation (IORING_OP_*). */ \
    CALL(NONE, int, uring_supports, (struct io_uring * ring, int operation), (ring, operation)) \
    CALL(ERRNO, int, uring_register, (struct io_uring * ring, const struct iovec *buffers, unsigned count), \
         (ring, buffers, count)) \
    CALL(ERRNO, int, uring_submit, (struct io_uring * ring), (ring)) \
    /* With no time to wait it makes no call. */ \
    CALL(ERRNO, int, uring_wait, (struct io_uring * ring, struct io_uring_cqe * *cqe, unsigned timeout_ms), \
         (ring, cqe, timeout_ms)) \
    /* The result of a completion, as the engine shall see it. */ \
    CALL(OWN, int, uring_result, (const struct io_uring_cqe *cqe), (cqe))

#define DR_SYS_ENTRY(failure, result, name, parameters, arguments) result(*name) parameters;

struct dr_sys {
    DR_SYS_CALLS(DR_SYS_ENTRY)
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

/* getpid without a system call: the number is kept in memory that the kernel clears in whatever is forked. */
pid_t dr_process(void);

/* Reads [lo, hi) of a file: 0, or why it cannot be read, an errno, or -1 where the file ends before. */
int dr_read_range(int fd, uint8_t *data, uint64_t lo, uint64_t hi);

#endif
