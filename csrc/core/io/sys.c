/* The real system calls behind dr_sys. See sys.h. */
#include "io/sys.h"

#include "base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <limits.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <linux/stat.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __has_include(<linux/openat2.h>)
#include <linux/openat2.h>
#else
struct open_how {
    uint64_t flags, mode, resolve;
};
#define RESOLVE_NO_MAGICLINKS 0x02
#define RESOLVE_BENEATH 0x08
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

/* struct statx grew the two alignment fields in Linux 6.1, after some headers in use. */
struct statx_with_alignment {
    unsigned char before[0x98];
    uint32_t dio_mem_align;
    uint32_t dio_offset_align;
    unsigned char after[0x60];
};

static int result(int value) { return value < 0 ? -errno : value; }

static int real_open_dir(const char *path) { return result(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)); }

/* Kernels before 5.6: no openat2. Names with a ".." or a leading "/" never get here; refuse symlinks outright. */
static int open_without_openat2(int dirfd, const char *name, int flags, mode_t mode) {
    char part[256];
    int at = dirfd;
    for (;;) {
        const char *slash = strchr(name, '/');
        size_t length = slash ? (size_t)(slash - name) : strlen(name);
        if (length >= sizeof part)
            return -ENAMETOOLONG;
        memcpy(part, name, length);
        part[length] = '\0';
        if (strcmp(part, "..") == 0) {
            if (at != dirfd)
                close(at);
            return -EXDEV;
        }
        int fd = slash ? openat(at, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                       : openat(at, part, flags | O_NOFOLLOW | O_CLOEXEC, mode);
        int err = errno;
        if (at != dirfd)
            close(at);
        if (fd < 0)
            return -err;
        if (!slash)
            return fd;
        at = fd;
        name = slash + 1;
    }
}

static int real_open_below(int dirfd, const char *name, int flags, mode_t mode) {
    struct open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC),
        .mode = flags & O_CREAT ? mode : 0,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
    long fd = syscall(SYS_openat2, dirfd, name, &how, sizeof how);
    if (fd >= 0)
        return (int)fd;
    if (errno != ENOSYS && errno != EPERM)
        return -errno;
    return open_without_openat2(dirfd, name, flags, mode);
}

static int real_close(int fd) { return result(close(fd)); }

static int real_fstat(int fd, struct stat *out) { return result(fstat(fd, out)); }

static ssize_t real_pread(int fd, void *data, size_t size, off_t offset) {
    ssize_t n = pread(fd, data, size, offset);
    return n < 0 ? -errno : n;
}

static ssize_t real_pwrite(int fd, const void *data, size_t size, off_t offset) {
    ssize_t n = pwrite(fd, data, size, offset);
    return n < 0 ? -errno : n;
}

static int real_set_direct(int fd, int on) {
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        return -errno;
    return result(fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT));
}

static int real_dup(int fd) { return result(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

static int real_set_blocking(int fd) { return result(fcntl(fd, F_SETFL, 0)); }

static int real_fallocate(int fd, off_t size) { return result(fallocate(fd, 0, 0, size)); }

static int real_ftruncate(int fd, off_t size) { return result(ftruncate(fd, size)); }

static int real_fdatasync(int fd) { return result(fdatasync(fd)); }

static int real_fsync(int fd) { return result(fsync(fd)); }

static int real_mkdir(const char *path, mode_t mode) { return result(mkdir(path, mode)); }

static int real_stat(const char *path, struct stat *out) { return result(stat(path, out)); }

static int real_rename(int dirfd, const char *from, const char *to) { return result(renameat(dirfd, from, dirfd, to)); }

static int real_exchange(int dirfd, const char *a, const char *b) {
    return result(renameat2(dirfd, a, dirfd, b, RENAME_EXCHANGE));
}

static int real_unlink(int dirfd, const char *name) { return result(unlinkat(dirfd, name, 0)); }

static int real_link(int from_dirfd, const char *from, int dirfd, const char *name) {
    return result(linkat(from_dirfd, from, dirfd, name, 0));
}

static int real_clone(int from, int fd) { return result(ioctl(fd, FICLONE, from)); }

/* Where cachestat is missing, a page that can be read without waiting is a cached page: ask the first and the last. */
static int64_t cached_by_nowait(int fd, off_t offset, size_t size) {
    char byte;
    struct iovec vec = {&byte, 1};
    off_t ends[2] = {offset, offset + (off_t)size - 1};
    for (int i = 0; i < 2; i++)
        if (preadv2(fd, &vec, 1, ends[i], RWF_NOWAIT) != 1)
            return 0;
    return (int64_t)size;
}

static int64_t real_cached(int fd, off_t offset, size_t size) {
    struct {
        uint64_t offset, length;
    } range = {(uint64_t)offset, size};
    struct {
        uint64_t cached, dirty, writeback, evicted, recently_evicted;
    } state;
    if (size == 0)
        return 0;
    if (syscall(SYS_cachestat, fd, &range, &state, 0) == 0)
        return (int64_t)(state.cached * (uint64_t)sysconf(_SC_PAGESIZE));
    return cached_by_nowait(fd, offset, size);
}

static int real_statfs(const char *path, struct statfs *out) { return result(statfs(path, out)); }

static int real_direct_alignment(int fd) {
    union {
        struct statx_with_alignment known;
        unsigned char room[512];
    } out;
    memset(&out, 0, sizeof out);
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &out) < 0)
        return -errno;
    return (int)out.known.dio_offset_align;
}

#define HUGE_PAGE ((size_t)2 << 20)

/* On a huge page boundary: a block in few, large pieces of physical memory makes few, large requests to the device. */
static void *real_map(size_t size) {
    size_t room = size + HUGE_PAGE;
    uint8_t *data = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return NULL;
    uint8_t *start = (uint8_t *)(((uintptr_t)data + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (start > data)
        munmap(data, (size_t)(start - data));
    if (start + size < data + room)
        munmap(start + size, (size_t)(data + room - (start + size)));
    madvise(start, size, MADV_DONTFORK);
    madvise(start, size, MADV_HUGEPAGE);
    return start;
}

static int real_unmap(void *data, size_t size) { return result(munmap(data, size)); }

static int real_advise(void *data, size_t size, enum dr_advice advice) {
    return result(madvise(data, size, advice == DR_ADVICE_HUGE_PAGES ? MADV_HUGEPAGE : MADV_REMOVE));
}

static int real_futex_wait(atomic_uint *word, unsigned value, unsigned timeout_ms) {
    struct timespec timeout = {.tv_sec = timeout_ms / 1000, .tv_nsec = (timeout_ms % 1000) * 1000000L};
    return result((int)syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, NULL, 0));
}

static int real_futex_wake(atomic_uint *word) {
    return result((int)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0));
}

static int real_thread(pthread_t *id, void *(*run)(void *), void *argument) {
    return dr_thread_start(id, run, argument);
}

static int real_uring_init(unsigned entries, struct io_uring *ring) { return io_uring_queue_init(entries, ring, 0); }

static int real_uring_try(struct io_uring *ring) {
    struct io_uring_cqe *cqe;
    io_uring_prep_nop(io_uring_get_sqe(ring));
    int rc = io_uring_submit_and_wait(ring, 1);
    if (rc >= 0)
        rc = io_uring_peek_cqe(ring, &cqe);
    if (rc == 0)
        io_uring_cqe_seen(ring, cqe);
    return rc;
}

static int real_uring_supports(struct io_uring *ring, int operation) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    int supported = probe && io_uring_opcode_supported(probe, operation);
    if (probe)
        io_uring_free_probe(probe);
    return supported;
}

static int real_uring_register(struct io_uring *ring, const struct iovec *buffers, unsigned count) {
    return io_uring_register_buffers(ring, buffers, count);
}

static int real_uring_submit(struct io_uring *ring) { return io_uring_submit(ring); }

static int real_uring_wait(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned timeout_ms) {
    struct __kernel_timespec timeout = {.tv_sec = timeout_ms / 1000, .tv_nsec = (timeout_ms % 1000) * 1000000LL};
    if (timeout_ms == 0)
        return io_uring_peek_cqe(ring, cqe);
    return io_uring_wait_cqe_timeout(ring, cqe, &timeout);
}

static int real_uring_result(const struct io_uring_cqe *cqe) { return cqe->res; }

#define REAL_CALL(failure, result, name, parameters, arguments) .name = real_##name,
#define REAL_CALLS {DR_SYS_CALLS(REAL_CALL)}

const struct dr_sys dr_sys_real = REAL_CALLS;

struct dr_sys dr_sys = REAL_CALLS;

/* ---- which process ---- */

static _Atomic(pid_t) *kept_process; /* NULL: the kernel clears nothing */

static void keep_process(void) {
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, size, MADV_WIPEONFORK) == 0)
        kept_process = page;
    else if (page != MAP_FAILED)
        munmap(page, size);
}

pid_t dr_process(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, keep_process);
    if (!kept_process)
        return getpid();
    pid_t process = atomic_load(kept_process);
    if (process == 0)
        atomic_store(kept_process, process = getpid());
    return process;
}

/* ---- reading ---- */

int dr_read_range(int fd, uint8_t *data, uint64_t lo, uint64_t hi) {
    while (lo < hi) {
        ssize_t n = DR_RETRY(dr_sys.pread(fd, data, hi - lo, (off_t)lo));
        if (n <= 0)
            return n < 0 ? (int)-n : -1;
        lo += (uint64_t)n;
        data += n;
    }
    return 0;
}
