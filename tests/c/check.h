/*
 * What every C test is made of: checks, cases, random numbers and a scratch
 * directory. A failed check prints where and what, and ends the program with
 * 1; the scratch directory is removed in any case.
 *
 *   test_x [-d DIRECTORY] [CASE]...
 *
 * The scratch directory is made in DIRECTORY, else in TMPDIR, else in
 * /var/tmp. It should not be on tmpfs: direct I/O is part of what is tested.
 */
#ifndef DCPRING_CHECK_H
#define DCPRING_CHECK_H

#include "base/error.h"
#include "io/thread_pool.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* CHECK_TRIES: a time limit must be kept in one of them, for a busy machine may stop a process at any moment. */
enum { CHECK_SKIPPED = 77, CHECK_SECONDS = 300, CHECK_TRIES = 10 };

/* ---- checks ---- */

#define CHECK_FAIL(...) \
    do { \
        fflush(stdout); \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr); \
        exit(1); \
    } while (0)

#define CHECK(condition) \
    do { \
        if (!(condition)) \
            CHECK_FAIL("failed: %s", #condition); \
    } while (0)

#define CHECK_INT(left, op, right) \
    do { \
        intmax_t check_left = (intmax_t)(left), check_right = (intmax_t)(right); \
        if (!(check_left op check_right)) \
            CHECK_FAIL("failed: %s %s %s, with %" PRIdMAX " and %" PRIdMAX, #left, #op, #right, check_left, \
                       check_right); \
    } while (0)

#define CHECK_EQ(left, right) CHECK_INT(left, ==, right)

#define CHECK_BYTES(left, right, size) check_bytes(left, right, size, #left " is " #right, __FILE__, __LINE__)

/* The call succeeded; else prints what it says about it. */
#define CHECK_OK(call, error) \
    do { \
        int check_rc = (call); \
        if (check_rc < 0 || (error)->kind != DR_ERROR_NONE) \
            CHECK_FAIL("failed: %s: %d, kind %d, %s of '%s' at %" PRId64 ": %s %s", #call, check_rc, (error)->kind, \
                       dr_error_call(error), (error)->path, (error)->offset, strerror((error)->err), (error)->detail); \
    } while (0)

/* The call failed, and said so in the same way in its result and in the error record. */
#define CHECK_FAILS(call, error, expected) \
    do { \
        int check_rc = (call); \
        CHECK_EQ(check_rc, -(expected)); \
        CHECK_EQ((error)->err, expected); \
        CHECK((error)->kind != DR_ERROR_NONE); \
    } while (0)

static inline void check_bytes(const void *left, const void *right, size_t size, const char *what, const char *file,
                               int line) {
    const uint8_t *a = left, *b = right;
    if (size == 0 || memcmp(a, b, size) == 0)
        return;
    size_t i = 0;
    while (a[i] == b[i])
        i++;
    fflush(stdout);
    fprintf(stderr, "%s:%d: failed: %s: byte %zu of %zu is %02x, not %02x\n", file, line, what, i, size, a[i], b[i]);
    exit(1);
}

/* ---- random numbers, the same in every run ---- */

struct rng {
    uint64_t state;
};

static inline uint64_t rng_next(struct rng *rng) {
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0 to limit - 1. */
static inline uint64_t rng_below(struct rng *rng, uint64_t limit) { return rng_next(rng) % limit; }

static inline void rng_fill(struct rng *rng, void *data, size_t size) {
    uint8_t *out = data;
    for (; size >= 8; size -= 8, out += 8) {
        uint64_t word = rng_next(rng);
        memcpy(out, &word, 8);
    }
    for (; size > 0; size--)
        *out++ = (uint8_t)rng_next(rng);
}

/* ---- time, memory, descriptors ---- */

static inline double check_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static inline void *check_alloc(size_t size) {
    void *data = calloc(1, size ? size : 1);
    if (!data)
        CHECK_FAIL("no memory for %zu bytes", size);
    return data;
}

/* But for those of engines that are kept, which go first. */
static inline int check_open_descriptors(void) {
    dr_thread_pool_release();
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir);
    int count = -1; /* opendir's own */
    for (const struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

/* Without it (before Linux 5.6, and under valgrind) symlinks are refused by other errors. */
static inline bool check_has_openat2(void) { return syscall(437, -1, "", NULL, 0) < 0 && errno != ENOSYS; }

/* ---- the scratch directory ---- */

extern char check_dir[256];

/* DIRECTORY/name, in one of a few buffers used in turn. */
static inline const char *check_path(const char *name) {
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", check_dir, name);
    return path;
}

static inline void check_write_file(const char *name, const void *data, size_t size) {
    FILE *file = fopen(check_path(name), "wb");
    CHECK(file);
    CHECK_EQ(fwrite(data, 1, size, file), size);
    CHECK_EQ(fclose(file), 0);
}

/* The file's bytes, to be freed; NULL when there is no such file. */
static inline uint8_t *check_read_file(const char *name, size_t *size) {
    FILE *file = fopen(check_path(name), "rb");
    if (!file)
        return NULL;
    struct stat st;
    CHECK_EQ(fstat(fileno(file), &st), 0);
    *size = (size_t)st.st_size;
    uint8_t *data = check_alloc(*size);
    CHECK_EQ(fread(data, 1, *size, file), *size);
    fclose(file);
    return data;
}

static inline bool check_exists(const char *name) {
    struct stat st;
    return lstat(check_path(name), &st) == 0;
}

/* ---- the program ---- */

struct check_case {
    const char *name;
    void (*run)(void);
};

/* Leaves the current case out. */
void check_skip(const char *why);

int check_main(int argc, char **argv, const struct check_case *cases, size_t count);

#define CHECK_MAIN(...) \
    int main(int argc, char **argv) { \
        static const struct check_case cases[] = {__VA_ARGS__}; \
        return check_main(argc, argv, cases, sizeof cases / sizeof *cases); \
    }

#endif
