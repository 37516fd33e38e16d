/* Opening data files, directories and the commit. See file.h. */
#include "io/file.h"

#include "base/align.h"
#include "base/clock.h"
#include "base/memory.h"
#include "io/kept.h"
#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

char *dr_path_join(const char *dir, const char *name) {
    size_t length = strlen(dir);
    char *path = dr_malloc(length + strlen(name) + 2);
    if (!path)
        return NULL;
    memcpy(path, dir, length);
    path[length] = '/';
    strcpy(path + length + 1, name);
    return path;
}

int dr_file_use_direct(int fd, const char *path, enum dr_direct direct, struct dr_error *error) {
    if (direct == DR_DIRECT_OFF)
        return 0;
    int alignment = dr_sys.direct_alignment(fd);
    int rc = alignment > (int)DR_ALIGNMENT ? -EINVAL : dr_sys.set_direct(fd, 1);
    if (rc >= 0)
        return 1;
    return direct == DR_DIRECT_ON ? dr_error_system(error, -rc, DR_CALL_O_DIRECT, path) : 0;
}

/* ---- fdatasync and fsync, apart ---- */

/* Shared by the caller and the syncing thread, which is a kept one; whoever leaves last frees it. */
struct sync {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int fd, result;
    enum dr_sync kind;
    bool done, abandoned;
};

static void free_sync(struct sync *sync) {
    pthread_mutex_destroy(&sync->lock);
    pthread_cond_destroy(&sync->changed);
    dr_sys.close(sync->fd);
    free(sync);
}

static int sync_now(int fd, enum dr_sync kind) {
    return kind == DR_SYNC_LENGTH ? DR_RETRY(dr_sys.fsync(fd)) : DR_RETRY(dr_sys.fdatasync(fd));
}

static void run_sync(void *argument) {
    struct sync *sync = argument;
    int result = sync_now(sync->fd, sync->kind);
    pthread_mutex_lock(&sync->lock);
    sync->result = result;
    sync->done = true;
    bool mine = sync->abandoned;
    pthread_cond_signal(&sync->changed);
    pthread_mutex_unlock(&sync->lock);
    if (mine)
        free_sync(sync);
}

static struct sync *start_sync(int fd, enum dr_sync kind) {
    struct sync *sync = dr_calloc(1, sizeof *sync);
    if (!sync)
        return NULL;
    pthread_mutex_init(&sync->lock, NULL);
    dr_clock_cond_init(&sync->changed);
    sync->kind = kind;
    sync->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (sync->fd < 0 || dr_kept_run(run_sync, sync) < 0) {
        free_sync(sync);
        return NULL;
    }
    return sync;
}

/*
 * Waits for the sync to end or the caller to cancel. Returns whether it was cancelled; *ended says whether it is over.
 */
static bool await_sync(struct sync *sync, const struct dr_control *control, bool *ended) {
    bool cancelled = false;
    pthread_mutex_lock(&sync->lock);
    while (!sync->done && !cancelled) {
        struct timespec until = dr_clock_after(DR_POLL_MS);
        pthread_cond_timedwait(&sync->changed, &sync->lock, &until);
        if (sync->done || !control->poll)
            continue;
        pthread_mutex_unlock(&sync->lock);
        cancelled = control->poll(control->context) != 0;
        pthread_mutex_lock(&sync->lock);
    }
    *ended = sync->done;
    sync->abandoned = !sync->done;
    pthread_mutex_unlock(&sync->lock);
    return cancelled;
}

int dr_file_sync(int fd, const char *path, enum dr_sync kind, const struct dr_control *control,
                 struct dr_error *error) {
    enum dr_call call = kind == DR_SYNC_LENGTH ? DR_CALL_FSYNC : DR_CALL_FDATASYNC;
    struct sync *sync = start_sync(fd, kind);
    if (!sync) {
        int rc = sync_now(fd, kind);
        return rc < 0 ? dr_error_system(error, -rc, call, path) : 0;
    }
    bool ended;
    bool cancelled = await_sync(sync, control, &ended);
    int rc = ended ? sync->result : 0;
    if (ended)
        free_sync(sync);
    if (cancelled)
        return dr_error_cancelled(error);
    return rc < 0 ? dr_error_system(error, -rc, call, path) : 0;
}

/* ---- directories ---- */

/* `call` is how an error names it. */
static int sync_directory(int fd, const char *path, enum dr_call call, struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.fsync(fd));
    /* Some network file systems have no fsync for directories: their entries are durable by themselves. */
    if (rc < 0 && rc != -EINVAL && rc != -EROFS)
        return dr_error_system(error, -rc, call, path);
    return 0;
}

/* A directory that cannot be opened for reading, as one with mode 0711, is left to the kernel's own time. */
static int sync_parent(const char *path, struct dr_error *error) {
    const char *slash = strrchr(path, '/');
    char *parent = slash == path ? dr_strdup("/") : slash ? dr_strndup(path, (size_t)(slash - path)) : dr_strdup(".");
    if (!parent)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
    int fd = DR_RETRY(dr_sys.open_dir(parent)), rc = 0;
    if (fd >= 0) {
        rc = sync_directory(fd, parent, DR_CALL_FSYNC, error);
        dr_sys.close(fd);
    } else if (fd != -EACCES) {
        rc = dr_error_system(error, -fd, DR_CALL_OPEN, parent);
    }
    free(parent);
    return rc;
}

/* 0: it is a directory, whatever may be done in it. */
static int look_at_directory(const char *path) {
    struct stat st;
    int rc = DR_RETRY(dr_sys.stat(path, &st));
    return rc == 0 && !S_ISDIR(st.st_mode) ? -ENOTDIR : rc;
}

/* One directory of the path. Some file systems refuse to make one that is there with other errors than EEXIST. */
static int make_one(const char *path, bool sync, struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.mkdir(path, 0777));
    if (rc == 0)
        return sync ? sync_parent(path, error) : 0;
    int there = look_at_directory(path);
    if (there == 0)
        return 0;
    return dr_error_system(error, rc == -EEXIST ? -there : -rc, DR_CALL_MKDIR, path);
}

int dr_directory_make(const char *path, bool sync, struct dr_error *error) {
    int rc = look_at_directory(path);
    if (rc == 0)
        return sync ? sync_parent(path, error) : 0;
    if (rc != -ENOENT || *path == '\0')
        return dr_error_system(error, -rc, DR_CALL_STAT, path);
    char *partial = dr_strdup(path);
    if (!partial)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
    rc = 0;
    for (char *at = partial + 1; *at && rc == 0; at++) {
        if (*at != '/')
            continue;
        *at = '\0';
        rc = make_one(partial, sync, error);
        *at = '/';
    }
    if (rc == 0)
        rc = make_one(partial, sync, error);
    free(partial);
    return rc;
}

static int write_all(int fd, const char *path, const uint8_t *data, size_t size, struct dr_error *error) {
    for (size_t done = 0; done < size;) {
        ssize_t n = DR_RETRY(dr_sys.pwrite(fd, data + done, size - done, (off_t)done));
        if (n <= 0)
            return dr_error_io(error, n < 0 ? (int)-n : EIO, DR_CALL_WRITE, path, (int64_t)done,
                               (int64_t)(size - done));
        done += (size_t)n;
    }
    return 0;
}

static int write_file(int dirfd, const char *name, const char *path, const void *data, size_t size, bool sync,
                      struct dr_error *error) {
    int fd = DR_RETRY(dr_sys.open_below(dirfd, name, O_WRONLY | O_CREAT | O_EXCL, 0666));
    if (fd < 0)
        return dr_error_system(error, -fd, DR_CALL_OPEN, path);
    int rc = write_all(fd, path, data, size, error);
    if (rc == 0 && sync && (rc = DR_RETRY(dr_sys.fsync(fd))) < 0)
        rc = dr_error_system(error, -rc, DR_CALL_FSYNC, path);
    int closed = dr_sys.close(fd);
    if (rc == 0 && closed < 0)
        rc = dr_error_system(error, -closed, DR_CALL_CLOSE, path);
    if (rc < 0)
        DR_RETRY(dr_sys.unlink(dirfd, name));
    return rc;
}

static int rename_durably(int dirfd, const char *dir, const char *tmp, const char *name, bool sync,
                          struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.rename(dirfd, tmp, name));
    if (rc < 0) {
        DR_RETRY(dr_sys.unlink(dirfd, tmp));
        return dr_error_system(error, -rc, DR_CALL_RENAME, dir);
    }
    return sync ? sync_directory(dirfd, dir, DR_CALL_FSYNC_OF_COMMIT, error) : 0;
}

int dr_directory_commit(const char *dir, const char *tmp, const char *name, const void *data, size_t size, bool sync,
                        struct dr_error *error) {
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0)
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    char *path = dr_path_join(dir, tmp);
    int rc = path ? write_file(dirfd, tmp, path, data, size, sync, error)
                  : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    if (rc == 0)
        rc = rename_durably(dirfd, dir, tmp, name, sync, error);
    free(path);
    dr_sys.close(dirfd);
    return rc;
}

/* What exchange does, in three steps. */
static int exchange_slowly(int dirfd, const char *tmp, const char *name) {
    char *aside = dr_malloc(strlen(tmp) + sizeof ".old");
    if (!aside)
        return -ENOMEM;
    strcat(strcpy(aside, tmp), ".old");
    int rc = DR_RETRY(dr_sys.rename(dirfd, name, aside));
    if (rc >= 0) {
        rc = DR_RETRY(dr_sys.rename(dirfd, tmp, name));
        int put_back = DR_RETRY(dr_sys.rename(dirfd, aside, rc < 0 ? name : tmp));
        rc = rc < 0 ? rc : put_back;
    }
    free(aside);
    return rc;
}

int dr_directory_replace(const char *dir, const char *tmp, const char *name, bool sync, struct dr_error *error) {
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0)
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    int rc = DR_RETRY(dr_sys.rename(dirfd, tmp, name));
    if (rc == -ENOTEMPTY || rc == -EEXIST) {
        rc = dr_sys.exchange(dirfd, tmp, name);
        if (rc == -EINVAL || rc == -ENOSYS)
            rc = exchange_slowly(dirfd, tmp, name);
    }
    char *path = rc < 0 ? dr_path_join(dir, name) : NULL;
    if (rc < 0)
        dr_error_system(error, -rc, DR_CALL_RENAME, path ? path : name);
    else if (sync)
        rc = sync_directory(dirfd, dir, DR_CALL_FSYNC, error);
    free(path);
    dr_sys.close(dirfd);
    return rc < 0 ? rc : 0;
}

int dr_file_system(const char *path, uint64_t *out, struct dr_error *error) {
    char *at = dr_strdup(path);
    if (!at)
        return dr_error_memory(error);
    struct statfs about = {0};
    int rc = DR_RETRY(dr_sys.statfs(at, &about));
    while (rc == -ENOENT) {
        char *slash = strrchr(at, '/');
        if (!slash || slash == at) {
            rc = DR_RETRY(dr_sys.statfs(slash ? "/" : ".", &about));
            break;
        }
        *slash = 0;
        rc = DR_RETRY(dr_sys.statfs(at, &about));
    }
    free(at);
    *out = (uint64_t)about.f_type & UINT32_MAX;
    return rc < 0 ? dr_error_system(error, -rc, DR_CALL_STATFS, path) : 0;
}

int dr_directory_sync(const char *dir, struct dr_error *error) {
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0)
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    int rc = sync_directory(dirfd, dir, DR_CALL_FSYNC, error);
    dr_sys.close(dirfd);
    return rc;
}

/* ---- links ---- */

/* What dr_directory_link is at, and what it has opened. */
struct linking {
    const char *path; /* of the file, for errors */
    const char *from, *name;
    int from_dirfd, from_fd, dirfd;
};

static int open_linked(struct linking *linking, const char *from_dir, const char *dir, uint64_t size,
                       struct dr_error *error) {
    struct stat st;
    linking->from_dirfd = DR_RETRY(dr_sys.open_dir(from_dir));
    if (linking->from_dirfd < 0)
        return dr_error_system(error, -linking->from_dirfd, DR_CALL_OPEN, from_dir);
    linking->dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (linking->dirfd < 0)
        return dr_error_system(error, -linking->dirfd, DR_CALL_OPEN, dir);
    int flags = O_RDONLY | O_NONBLOCK | O_NOFOLLOW;
    linking->from_fd = DR_RETRY(dr_sys.open_below(linking->from_dirfd, linking->from, flags, 0));
    if (linking->from_fd < 0)
        return dr_error_system(error, -linking->from_fd, DR_CALL_OPEN, linking->path);
    int rc = DR_RETRY(dr_sys.fstat(linking->from_fd, &st));
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_FSTAT, linking->path);
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size < size)
        return dr_error_invalid(error, DR_NO_ITEM, "%s is shorter than it was, or no file", linking->path);
    return 0;
}

/* A new file that shares the blocks of the old one; -errno says why there can be none. */
static int clone_file(const struct linking *linking, bool sync) {
    int fd = DR_RETRY(dr_sys.open_below(linking->dirfd, linking->name, O_WRONLY | O_CREAT | O_EXCL, 0666));
    if (fd < 0)
        return fd;
    int rc = DR_RETRY(dr_sys.clone(linking->from_fd, fd));
    if (rc >= 0 && sync)
        rc = DR_RETRY(dr_sys.fsync(fd));
    int closed = dr_sys.close(fd);
    rc = rc < 0 ? rc : closed;
    if (rc < 0)
        DR_RETRY(dr_sys.unlink(linking->dirfd, linking->name));
    return rc;
}

static int link_or_clone(const struct linking *linking, bool sync, bool is_durable, enum dr_link *how,
                         struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.link(linking->from_dirfd, linking->from, linking->dirfd, linking->name));
    *how = rc < 0 ? DR_LINK_CLONE : DR_LINK_HARD;
    if (rc < 0 && clone_file(linking, sync) < 0)
        return dr_error_system(error, -rc, DR_CALL_LINK, linking->path);
    if (*how == DR_LINK_CLONE || !sync || is_durable)
        return 0;
    rc = DR_RETRY(dr_sys.fsync(linking->from_fd));
    if (rc >= 0)
        return 0;
    DR_RETRY(dr_sys.unlink(linking->dirfd, linking->name));
    return dr_error_system(error, -rc, DR_CALL_FSYNC, linking->path);
}

int dr_directory_link(const char *from_dir, const char *from, const char *dir, const char *name, uint64_t size,
                      bool sync, bool is_durable, enum dr_link *how, struct dr_error *error) {
    char *path = dr_path_join(from_dir, from);
    struct linking linking = {.path = path, .from = from, .name = name, .from_dirfd = -1, .from_fd = -1, .dirfd = -1};
    int rc = path ? open_linked(&linking, from_dir, dir, size, error)
                  : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, from_dir);
    if (rc == 0)
        rc = link_or_clone(&linking, sync, is_durable, how, error);
    const int opened[] = {linking.from_fd, linking.dirfd, linking.from_dirfd};
    for (size_t i = 0; i < sizeof opened / sizeof *opened; i++)
        if (opened[i] >= 0)
            dr_sys.close(opened[i]);
    free(path);
    return rc;
}

/* ---- removing ---- */

static int remove_one(int dirfd, const char *dir, const char *name, int64_t item, struct dr_error *error) {
    if (strchr(name, '/'))
        return dr_error_invalid(error, item, "'%s' is not a file of the checkpoint directory", name);
    int rc = DR_RETRY(dr_sys.unlink(dirfd, name));
    if (rc >= 0 || rc == -ENOENT)
        return 0;
    char *path = dr_path_join(dir, name);
    dr_error_system(error, -rc, DR_CALL_UNLINK, path ? path : name);
    free(path);
    return rc;
}

int dr_directory_remove(const char *dir, const char *const *names, size_t count, struct dr_error *error) {
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0)
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    int rc = 0;
    for (size_t i = 0; i < count; i++) {
        int removed = remove_one(dirfd, dir, names[i], (int64_t)i, error);
        if (rc == 0)
            rc = removed;
    }
    dr_sys.close(dirfd);
    return rc;
}
