/* Trying things out. See probe.h. */
#include "tools/probe.h"

#include "base/align.h"
#include "base/clock.h"
#include "base/crc.h"
#include "io/engine.h"
#include "io/file.h"
#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

enum { TRIES = 5, SYNCED_BYTES = 4096, ALLOCATED_BYTES = 4 << 20, CRC_STEP = 128 << 10 };

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static uint64_t median(uint64_t times[TRIES]) {
    qsort(times, TRIES, sizeof *times, by_value);
    return times[TRIES / 2];
}

/* The answer to something that ended with rc and, where that is below 0, with error. */
static struct dr_answer answer(int rc, const struct dr_error *error) {
    return (struct dr_answer){.asked = true, .err = rc < 0 ? -rc : 0, .cure = rc < 0 ? dr_error_cure(error) : ""};
}

/* The answer of a system call. */
static struct dr_answer answer_of(int rc, enum dr_call call) {
    DR_NEW_ERROR(error);
    if (rc < 0)
        dr_error_system(&error, -rc, call, NULL);
    return answer(rc, &error);
}

void dr_probe_ring(unsigned depth, size_t buffer_size, struct dr_ring_answers *out) {
    DR_NEW_ERROR(error);
    struct dr_engine *engine = NULL;
    int rc = dr_engine_open(&engine, "uring", depth, buffer_size, &error);
    *out = (struct dr_ring_answers){.open = answer(rc, &error), .registered = engine ? engine->registered : 0};
    dr_engine_close(engine);
}

/* ---- a directory ---- */

struct dr_answer dr_probe_space(const char *dir, struct dr_space *out) {
    struct statfs about = {0};
    int rc = DR_RETRY(dr_sys.statfs(dir, &about));
    uint64_t block = (uint64_t)about.f_bsize;
    *out = (struct dr_space){
        .file_system = (uint64_t)about.f_type & UINT32_MAX,
        .bytes = about.f_blocks * block,
        .free_bytes = about.f_bavail * block,
        .files = about.f_files,
        .free_files = about.f_ffree,
    };
    return answer_of(rc, DR_CALL_STATFS);
}

static void ask_direct(int fd, struct dr_directory_answers *out) {
    int alignment = dr_sys.direct_alignment(fd);
    out->alignment = alignment > 0 ? alignment : 0;
    int rc = alignment > (int)DR_ALIGNMENT ? -EINVAL : dr_sys.set_direct(fd, 1);
    out->direct = answer_of(rc, DR_CALL_O_DIRECT);
    if (rc >= 0)
        dr_sys.set_direct(fd, 0);
}

static int sync_once(int fd, const char *path, int number, const struct dr_control *control, uint64_t *ns,
                     struct dr_error *error) {
    uint8_t data[SYNCED_BYTES];
    memset(data, number, sizeof data);
    uint64_t begin = dr_clock_ns();
    ssize_t n = DR_RETRY(dr_sys.pwrite(fd, data, sizeof data, (off_t)number * SYNCED_BYTES));
    if (n < 0)
        return dr_error_io(error, (int)-n, DR_CALL_WRITE, path, (int64_t)number * SYNCED_BYTES, SYNCED_BYTES);
    int rc = dr_file_sync(fd, path, DR_SYNC_DATA, control, error);
    *ns = dr_clock_ns() - begin;
    return rc;
}

static int ask_sync(int fd, const char *path, const struct dr_control *control, struct dr_directory_answers *out,
                    struct dr_error *error) {
    uint64_t times[TRIES] = {0};
    int rc = 0;
    for (int i = 0; i < TRIES && rc == 0; i++)
        rc = sync_once(fd, path, i, control, &times[i], error);
    out->sync = answer(rc, error);
    out->sync.ns = median(times);
    return rc;
}

/* As every save ends: written beside, made durable, renamed, and that made durable. */
static void ask_commit(const char *dir, struct dr_directory_answers *out) {
    DR_NEW_ERROR(error);
    uint64_t begin = dr_clock_ns();
    int rc = dr_directory_commit(dir, DR_PROBE_COMMIT, DR_PROBE_FILE, "new", 3, true, &error);
    out->commit = answer(rc, &error);
    out->commit.ns = dr_clock_ns() - begin;
}

static int ask_file(const char *path, const char *dir, int fd, const struct dr_control *control,
                    struct dr_directory_answers *out, struct dr_error *error) {
    DR_NEW_ERROR(sync_error);
    out->allocate = answer_of(DR_RETRY(dr_sys.fallocate(fd, ALLOCATED_BYTES)), DR_CALL_FALLOCATE);
    ask_direct(fd, out);
    int rc = ask_sync(fd, path, control, out, &sync_error);
    if (sync_error.kind == DR_ERROR_CANCELLED)
        return dr_error_cancelled(error);
    if (rc == 0)
        ask_commit(dir, out);
    return 0;
}

int dr_probe_directory(const char *dir, struct dr_directory_answers *out, const struct dr_control *control,
                       struct dr_error *error) {
    *out = (struct dr_directory_answers){0};
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    int fd = dirfd < 0 ? dirfd : DR_RETRY(dr_sys.open_below(dirfd, DR_PROBE_FILE, O_RDWR | O_CREAT | O_EXCL, 0666));
    out->create = answer_of(fd, DR_CALL_OPEN);
    int rc = 0;
    if (fd >= 0) {
        char *path = dr_path_join(dir, DR_PROBE_FILE);
        rc = path ? ask_file(path, dir, fd, control, out, error) : dr_error_memory(error);
        free(path);
        dr_sys.close(fd);
        static const char *const names[] = {DR_PROBE_FILE, DR_PROBE_COMMIT};
        DR_NEW_ERROR(ignored);
        out->remove = answer(dr_directory_remove(dir, names, 2, &ignored), &ignored);
    }
    if (dirfd >= 0)
        dr_sys.close(dirfd);
    return rc;
}

int dr_probe_cached(const char *dir, const char *name, uint64_t *out, struct dr_error *error) {
    *out = 0;
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0)
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    int fd = DR_RETRY(dr_sys.open_below(dirfd, name, O_RDONLY | O_NONBLOCK, 0));
    struct stat about;
    int rc = fd < 0 ? fd : DR_RETRY(dr_sys.fstat(fd, &about));
    if (rc >= 0) {
        int64_t cached = dr_sys.cached(fd, 0, (size_t)about.st_size);
        *out = cached > 0 ? (uint64_t)cached : 0;
    }
    if (fd >= 0)
        dr_sys.close(fd);
    dr_sys.close(dirfd);
    return rc < 0 ? dr_error_system(error, -rc, DR_CALL_OPEN, name) : 0;
}

uint64_t dr_probe_crc(uint64_t bytes) {
    static uint8_t data[CRC_STEP];
    volatile uint32_t kept;
    uint32_t crc = 0;
    uint64_t begin = dr_clock_ns();
    for (uint64_t done = 0; done < bytes; done += CRC_STEP)
        crc = dr_crc32(crc, data, CRC_STEP);
    kept = crc;
    (void)kept;
    return dr_clock_ns() - begin;
}
