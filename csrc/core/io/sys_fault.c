/* Faults on purpose. See sys_fault.h. */
#include "io/sys_fault.h"

#include "base/memory.h"
#include "io/sys.h"

#include <liburing.h>
#include <stdatomic.h>
#include <time.h>

static struct dr_fault armed;
static char armed_call[32];
static atomic_uint_fast64_t calls;

/* Counts a call; true when it is the one to hit. */
static bool hit(const char *call) {
    if (armed.call && strcmp(call, armed.call) != 0)
        return false;
    uint64_t n = atomic_fetch_add(&calls, 1) + 1;
    bool is_hit = armed.nth != 0 && (n == armed.nth || (armed.sticky && n > armed.nth));
    if (is_hit && armed.delay_ms) {
        struct timespec delay = {armed.delay_ms / 1000, armed.delay_ms % 1000 * 1000000L};
        nanosleep(&delay, NULL);
    }
    return is_hit;
}

static bool fails(const char *call) { return hit(call) && armed.err != 0; }

/* A transfer of size bytes: its length after the fault, or -errno. */
static ssize_t shorten(const char *call, size_t size) {
    if (!hit(call))
        return (ssize_t)size;
    if (armed.err)
        return -armed.err;
    return (ssize_t)(size > 1 && !armed.delay_ms ? size / 2 : size);
}

static int fault_open_dir(const char *path) { return fails("open_dir") ? -armed.err : dr_sys_real.open_dir(path); }

static int fault_open_below(int dirfd, const char *name, int flags, mode_t mode) {
    return fails("open_below") ? -armed.err : dr_sys_real.open_below(dirfd, name, flags, mode);
}

/* As on Linux: the descriptor is gone even when close reports an error. */
static int fault_close(int fd) {
    int rc = dr_sys_real.close(fd);
    return fails("close") ? -armed.err : rc;
}

static int fault_fstat(int fd, struct stat *out) { return fails("fstat") ? -armed.err : dr_sys_real.fstat(fd, out); }

static ssize_t fault_pread(int fd, void *data, size_t size, off_t offset) {
    ssize_t room = shorten("pread", size);
    return room < 0 ? room : dr_sys_real.pread(fd, data, (size_t)room, offset);
}

static ssize_t fault_pwrite(int fd, const void *data, size_t size, off_t offset) {
    ssize_t room = shorten("pwrite", size);
    return room < 0 ? room : dr_sys_real.pwrite(fd, data, (size_t)room, offset);
}

static int fault_set_direct(int fd, int on) {
    return fails("set_direct") ? -armed.err : dr_sys_real.set_direct(fd, on);
}

static int fault_set_blocking(int fd) {
    return fails("set_blocking") ? -armed.err : dr_sys_real.set_blocking(fd);
}

static int fault_fallocate(int fd, off_t size) {
    return fails("fallocate") ? -armed.err : dr_sys_real.fallocate(fd, size);
}

static int fault_ftruncate(int fd, off_t size) {
    return fails("ftruncate") ? -armed.err : dr_sys_real.ftruncate(fd, size);
}

static int fault_statfs(const char *path, struct statfs *out) {
    return fails("statfs") ? -armed.err : dr_sys_real.statfs(path, out);
}

static int fault_fdatasync(int fd) { return fails("fdatasync") ? -armed.err : dr_sys_real.fdatasync(fd); }

static int fault_fsync(int fd) { return fails("fsync") ? -armed.err : dr_sys_real.fsync(fd); }

static int fault_mkdir(const char *path, mode_t mode) {
    return fails("mkdir") ? -armed.err : dr_sys_real.mkdir(path, mode);
}

static int fault_stat(const char *path, struct stat *out) {
    return fails("stat") ? -armed.err : dr_sys_real.stat(path, out);
}

static int fault_rename(int dirfd, const char *from, const char *to) {
    return fails("rename") ? -armed.err : dr_sys_real.rename(dirfd, from, to);
}

static int fault_exchange(int dirfd, const char *a, const char *b) {
    return fails("exchange") ? -armed.err : dr_sys_real.exchange(dirfd, a, b);
}

static int fault_unlink(int dirfd, const char *name) {
    return fails("unlink") ? -armed.err : dr_sys_real.unlink(dirfd, name);
}

static int64_t fault_cached(int fd, off_t offset, size_t size) {
    return fails("cached") ? 0 : dr_sys_real.cached(fd, offset, size);
}

static int fault_direct_alignment(int fd) {
    return fails("direct_alignment") ? -armed.err : dr_sys_real.direct_alignment(fd);
}

static ssize_t fault_print(int fd, const void *data, size_t size, int timeout_ms) {
    ssize_t room = shorten("print", size);
    return room < 0 ? room : dr_sys_real.print(fd, data, (size_t)room, timeout_ms);
}

static int fault_open_terminal(int fd) {
    return fails("open_terminal") ? -armed.err : dr_sys_real.open_terminal(fd);
}

static int fault_columns(int fd) { return fails("columns") ? -armed.err : dr_sys_real.columns(fd); }

static int fault_process_exists(pid_t process) {
    return fails("process_exists") ? 0 : dr_sys_real.process_exists(process);
}

static void *fault_map(size_t size) { return fails("map") ? NULL : dr_sys_real.map(size); }

static int fault_uring_init(unsigned entries, struct io_uring *ring) {
    return fails("uring_init") ? -armed.err : dr_sys_real.uring_init(entries, ring);
}

static int fault_uring_supports(struct io_uring *ring, int operation) {
    return fails("uring_supports") ? 0 : dr_sys_real.uring_supports(ring, operation);
}

static int fault_uring_register(struct io_uring *ring, const struct iovec *buffers, unsigned count) {
    return fails("uring_register") ? -armed.err : dr_sys_real.uring_register(ring, buffers, count);
}

static int fault_uring_submit(struct io_uring *ring) {
    return fails("uring_submit") ? -armed.err : dr_sys_real.uring_submit(ring);
}

static int fault_uring_wait(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned timeout_ms) {
    return fails("uring_wait") ? -armed.err : dr_sys_real.uring_wait(ring, cqe, timeout_ms);
}

static int fault_uring_result(const struct io_uring_cqe *cqe) {
    if (cqe->res <= 0)
        return cqe->res;
    return (int)shorten("uring_result", (size_t)cqe->res);
}

static bool memory_fails(void) { return fails("malloc"); }

void dr_fault_arm(const struct dr_fault *fault) {
    armed = *fault;
    if (fault->call) {
        strncpy(armed_call, fault->call, sizeof armed_call - 1);
        armed.call = armed_call;
    }
    atomic_store(&calls, 0);
    dr_memory_fails = fault->call && strcmp(fault->call, "malloc") == 0 ? memory_fails : NULL;
    dr_sys = (struct dr_sys){
        .open_dir = fault_open_dir,
        .open_below = fault_open_below,
        .close = fault_close,
        .fstat = fault_fstat,
        .pread = fault_pread,
        .pwrite = fault_pwrite,
        .set_direct = fault_set_direct,
        .set_blocking = fault_set_blocking,
        .fallocate = fault_fallocate,
        .ftruncate = fault_ftruncate,
        .fdatasync = fault_fdatasync,
        .fsync = fault_fsync,
        .mkdir = fault_mkdir,
        .stat = fault_stat,
        .rename = fault_rename,
        .exchange = fault_exchange,
        .unlink = fault_unlink,
        .cached = fault_cached,
        .direct_alignment = fault_direct_alignment,
        .statfs = fault_statfs,
        .print = fault_print,
        .open_terminal = fault_open_terminal,
        .columns = fault_columns,
        .wait_for = dr_sys_real.wait_for,
        .wake_all = dr_sys_real.wake_all,
        .process_exists = fault_process_exists,
        .map = fault_map,
        .unmap = dr_sys_real.unmap,
        .uring_init = fault_uring_init,
        .uring_supports = fault_uring_supports,
        .uring_register = fault_uring_register,
        .uring_submit = fault_uring_submit,
        .uring_wait = fault_uring_wait,
        .uring_result = fault_uring_result,
    };
}

uint64_t dr_fault_disarm(void) {
    dr_sys = dr_sys_real;
    dr_memory_fails = NULL;
    return atomic_load(&calls);
}
