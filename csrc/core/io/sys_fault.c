/* Faults on purpose. See sys_fault.h. */
#include "io/sys_fault.h"

#include "base/memory.h"
#include "io/sys.h"
#include "io/thread_pool.h"

#include <liburing.h>
#include <stdatomic.h>
#include <time.h>

static struct dr_fault armed;
static char armed_call[32];
static atomic_uint_fast64_t calls;
static void (*watch)(const char *call);

static void look(const char *call) {
    if (watch)
        watch(call);
}

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

static bool fails(const char *call) {
    look(call);
    return hit(call) && armed.err != 0;
}

/* A transfer of size bytes: its length after the fault, or -errno. */
static ssize_t shorten(const char *call, size_t size) {
    look(call);
    if (!hit(call))
        return (ssize_t)size;
    if (armed.err)
        return -armed.err;
    return (ssize_t)(size > 1 && !armed.delay_ms ? size / 2 : size);
}

/* ---- the calls, each as its failure is ---- */

#define FAIL_ERRNO(result, name, parameters, arguments) \
    static result fault_##name parameters { return fails(#name) ? -armed.err : dr_sys_real.name arguments; }

#define FAIL_TRANSFER(result, name, parameters, arguments) \
    static result fault_##name parameters { \
        ssize_t room = shorten(#name, size); \
        size = (size_t)room; \
        return room < 0 ? room : dr_sys_real.name arguments; \
    }

#define FAIL_NONE(result, name, parameters, arguments) \
    static result fault_##name parameters { return fails(#name) ? 0 : dr_sys_real.name arguments; }

#define FAIL_MEMORY(result, name, parameters, arguments) \
    static result fault_##name parameters { return fails(#name) ? NULL : dr_sys_real.name arguments; }

#define FAIL_NEVER(result, name, parameters, arguments) \
    static result fault_##name parameters { \
        look(#name); \
        return dr_sys_real.name arguments; \
    }

#define FAIL_OWN(result, name, parameters, arguments) static result fault_##name parameters;

#define FAULT(failure, result, name, parameters, arguments) FAIL_##failure(result, name, parameters, arguments)

DR_SYS_CALLS(FAULT)

/* As on Linux: the descriptor is gone even when close reports an error. */
static int fault_close(int fd) {
    bool has_failed = fails("close");
    int rc = dr_sys_real.close(fd);
    return has_failed ? -armed.err : rc;
}

/* Transfers are shortened; an error that came by itself stays. */
static int fault_uring_result(const struct io_uring_cqe *cqe) {
    if (cqe->res <= 0)
        return cqe->res;
    return (int)shorten("uring_result", (size_t)cqe->res);
}

#define FAULT_ENTRY(failure, result, name, parameters, arguments) .name = fault_##name,

static const struct dr_sys fault_calls = {DR_SYS_CALLS(FAULT_ENTRY)};

static bool memory_fails(void) { return hit("malloc") && armed.err != 0; }

void dr_fault_arm(const struct dr_fault *fault) {
    if (!fault->warm)
        dr_thread_pool_release();
    armed = *fault;
    if (fault->call) {
        strncpy(armed_call, fault->call, sizeof armed_call - 1);
        armed.call = armed_call;
    }
    atomic_store(&calls, 0);
    dr_memory_fails = fault->call && strcmp(fault->call, "malloc") == 0 ? memory_fails : NULL;
    dr_sys = fault_calls;
}

uint64_t dr_fault_disarm(void) {
    uint64_t counted = atomic_load(&calls);
    armed = (struct dr_fault){.nth = 0};
    dr_sys = watch ? fault_calls : dr_sys_real;
    dr_memory_fails = NULL;
    return counted;
}

void dr_fault_watch(void (*watcher)(const char *call)) {
    watch = watcher;
    dr_fault_disarm();
}
