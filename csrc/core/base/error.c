/* Filling struct dr_error. See error.h. */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Called for every block and record: the texts, which are long, are only ended. */
void dr_error_clear(struct dr_error *error) {
    error->kind = DR_ERROR_NONE;
    error->err = 0;
    error->call = DR_CALL_NONE;
    error->path[0] = '\0';
    error->offset = -1;
    error->length = -1;
    error->item = DR_NO_ITEM;
    error->detail[0] = '\0';
}

static int begin(struct dr_error *error, enum dr_error_kind kind, int err, enum dr_call call, const char *path) {
    if (error->kind != DR_ERROR_NONE)
        return 0;
    dr_error_clear(error);
    error->kind = kind;
    error->err = err;
    error->call = call;
    snprintf(error->path, sizeof error->path, "%s", path ? path : "");
    return 1;
}

int dr_error_system(struct dr_error *error, int err, enum dr_call call, const char *path) {
    begin(error, DR_ERROR_SYSTEM, err, call, path);
    return -err;
}

int dr_error_memory(struct dr_error *error) { return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, NULL); }

int dr_error_io(struct dr_error *error, int err, enum dr_call call, const char *path, int64_t offset, int64_t length) {
    if (begin(error, DR_ERROR_SYSTEM, err, call, path)) {
        error->offset = offset;
        error->length = length;
    }
    return -err;
}

int dr_error_corrupt(struct dr_error *error, const char *path, int64_t offset, int64_t item, const char *format, ...) {
    if (begin(error, DR_ERROR_CORRUPT, EBADMSG, DR_CALL_NONE, path)) {
        va_list args;
        va_start(args, format);
        vsnprintf(error->detail, sizeof error->detail, format, args);
        va_end(args);
        error->offset = offset;
        error->item = item;
    }
    return -EBADMSG;
}

int dr_error_invalid(struct dr_error *error, int64_t item, const char *format, ...) {
    if (begin(error, DR_ERROR_INVALID, EINVAL, DR_CALL_NONE, NULL)) {
        va_list args;
        va_start(args, format);
        vsnprintf(error->detail, sizeof error->detail, format, args);
        va_end(args);
        error->item = item;
    }
    return -EINVAL;
}

int dr_error_cancelled(struct dr_error *error) {
    begin(error, DR_ERROR_CANCELLED, ECANCELED, DR_CALL_NONE, NULL);
    return -ECANCELED;
}

void dr_error_at(struct dr_error *error, const char *path) {
    if (!*error->path)
        snprintf(error->path, sizeof error->path, "%s", path);
}

#define CALL_TEXT(name, text) [DR_CALL_##name] = text,
static const char *const calls[] = {[DR_CALL_NONE] = "nothing", DR_CALLS(CALL_TEXT)};

/* Of a path that openat2 must not follow, or without it open. */
const char *dr_error_said(const struct dr_error *error) {
    if (error->call == DR_CALL_OPEN && error->err == EXDEV)
        return "a symbolic link that leads out of the checkpoint directory, which is refused";
    if (error->call == DR_CALL_OPEN && error->err == ELOOP)
        return "symbolic links that lead in a circle, or out of the checkpoint directory, which is refused";
    return strerror(error->err);
}

const char *dr_error_call(const struct dr_error *error) { return calls[error->call]; }

#define NO_URING \
    "io_uring is not available here (sysctl kernel.io_uring_disabled, or a container's seccomp profile); " \
    "pass engine=\"threads\" or \"auto\""

static const char *cure_for(int err) {
    switch (err) {
    case ENOSPC:
        return "free space on this file system, or save elsewhere";
    case EDQUOT:
        return "raise the disk quota, or save elsewhere";
    case EFBIG:
        return "the file would be larger than the limit (ulimit -f) or the file system allows; raise the limit, or "
               "write smaller files (single_file_per_rank=False, max_shard_bytes)";
    case EMFILE:
        return "raise the limit of open files (ulimit -n)";
    case ENFILE:
        return "the machine's limit of open files is reached (sysctl fs.file-max)";
    case EROFS:
        return "the file system is mounted read-only";
    case EACCES:
        return "check the permissions of the file and of the directories above it";
    case EPERM:
        return "the owner of the file, an attribute of it (lsattr) or a sandbox forbids this";
    case ENOMEM:
        return "memory, or the limit on it, is used up; lower queue_depth, block_size_bytes or workers";
    case ENAMETOOLONG:
        return "the path, or a name in it, is longer than the file system allows; choose a shorter one";
    case EXDEV:
    case ELOOP:
        return "put the file itself there";
    case ENOTDIR:
        return "a checkpoint is a directory; the path, or a part of it, is a file";
    case ESPIPE:
        return "this file system takes a file only from its beginning to its end, as some before an object storage do; "
               "mount it with a cache for writes, or save elsewhere and copy";
    case ESTALE:
        return "the file server has removed or replaced it; see that nobody else writes there, and try again";
    case ETIMEDOUT:
    case EHOSTDOWN:
    case ENOTCONN:
        return "the file server does not answer; see that it is up, and the kernel log (dmesg)";
    case EIO:
    case ENXIO:
    case ENODEV:
        return "the device reported an error; see the kernel log (dmesg)";
    default:
        return "";
    }
}

const char *dr_error_cure(const struct dr_error *error) {
    if (error->kind != DR_ERROR_SYSTEM)
        return "";
    if (error->call == DR_CALL_URING_SETUP && error->err == ENOMEM)
        return "raise the limit of locked memory (ulimit -l), or pass engine=\"threads\" or \"auto\"";
    bool is_ring = error->call == DR_CALL_URING_SETUP || error->call == DR_CALL_URING_ENTER;
    if (is_ring && (error->err == EPERM || error->err == ENOSYS))
        return NO_URING;
    const char *cure = cure_for(error->err);
    if (*cure)
        return cure;
    if (error->call == DR_CALL_URING_SETUP)
        return NO_URING;
    if (error->call == DR_CALL_O_DIRECT)
        return "this file system has no direct I/O; pass direct=\"auto\" or False";
    return "";
}
