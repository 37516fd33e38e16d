/*
 * The error record that every core function fills.
 *
 * Core functions return 0 or -errno. On failure they describe what was being
 * done in a caller-owned struct dr_error; the first failure wins. Nothing here
 * allocates, so an error can be reported when memory is gone.
 */
#ifndef DCPRING_ERROR_H
#define DCPRING_ERROR_H

#include <stddef.h>
#include <stdint.h>

enum dr_error_kind {
    DR_ERROR_NONE = 0,
    DR_ERROR_SYSTEM,    /* a system call failed: err holds its errno */
    DR_ERROR_CORRUPT,   /* the bytes on disk are not what they should be */
    DR_ERROR_INVALID,   /* the caller asked for something impossible */
    DR_ERROR_CANCELLED, /* the poll callback asked to stop */
};

/* CALL(name, the words of a message) for each call whose failure is reported. A cure may be for one of them only. */
#define DR_CALLS(CALL) \
    CALL(OPEN, "open") \
    CALL(CLOSE, "close") \
    CALL(FSTAT, "fstat") \
    CALL(STAT, "stat") \
    CALL(STATFS, "statfs") \
    CALL(READ, "read") \
    CALL(WRITE, "write") \
    CALL(FCNTL, "fcntl") \
    CALL(O_DIRECT, "O_DIRECT") \
    CALL(FALLOCATE, "fallocate") \
    CALL(FTRUNCATE, "ftruncate") \
    CALL(FDATASYNC, "fdatasync") \
    CALL(FSYNC, "fsync") \
    CALL(FSYNC_OF_COMMIT, "fsync after the rename that committed the new checkpoint") \
    CALL(MKDIR, "mkdir") \
    CALL(RENAME, "rename") \
    CALL(UNLINK, "unlink") \
    CALL(LINK, "link") \
    CALL(MALLOC, "malloc") \
    CALL(MMAP, "mmap") \
    CALL(URING_SETUP, "io_uring_setup") \
    CALL(URING_ENTER, "io_uring_enter") \
    CALL(URING_GET_SQE, "io_uring_get_sqe")

#define DR_CALL_ENTRY(name, text) DR_CALL_##name,
enum dr_call { DR_CALL_NONE, DR_CALLS(DR_CALL_ENTRY) };

#define DR_NO_ITEM ((int64_t)-1)

/* Room for the longest path of a directory, a slash, and the longest name below it: paths are never cut. */
enum { DR_ERROR_PATH = 2 * 4096 };

struct dr_error {
    enum dr_error_kind kind;
    int err;
    enum dr_call call; /* that failed; only of DR_ERROR_SYSTEM */
    char path[DR_ERROR_PATH];
    int64_t offset;
    int64_t length;
    int64_t item; /* index of the caller's item concerned, or DR_NO_ITEM */
    char detail[320];
};

void dr_error_clear(struct dr_error *error);

/* Declares an error that has not happened yet. No initialiser does: it would write all of the path's kilobytes. */
#define DR_NEW_ERROR(name) \
    struct dr_error name; \
    dr_error_clear(&name)

/* Each records the failure unless one is recorded already, and returns -errno. */
int dr_error_system(struct dr_error *error, int err, enum dr_call call, const char *path);
int dr_error_io(struct dr_error *error, int err, enum dr_call call, const char *path, int64_t offset, int64_t length);
int dr_error_corrupt(struct dr_error *error, const char *path, int64_t offset, int64_t item, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
int dr_error_invalid(struct dr_error *error, int64_t item, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int dr_error_cancelled(struct dr_error *error);
int dr_error_memory(struct dr_error *error); /* malloc returned NULL */

/* Names the file concerned, unless one is named already. */
void dr_error_at(struct dr_error *error, const char *path);

/* The errno of a failed system call, in words. */
const char *dr_error_said(const struct dr_error *error);

/* What failed, in a message's words. */
const char *dr_error_call(const struct dr_error *error);

/* The cure for a failed system call, or "" where there is none to name. */
const char *dr_error_cure(const struct dr_error *error);

#endif
