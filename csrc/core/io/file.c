/* Opening data files, directories and the commit. See file.h. */
#include "io/file.h"

#include "base/align.h"
#include "base/memory.h"
#include "io/sync.h"
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

/* ---- directories ---- */

/* A directory that cannot be opened for reading, as one with mode 0711, is left to the kernel's own time. */
static int sync_parent(const char *path, struct dr_error *error) {
    const char *slash = strrchr(path, '/');
    char *parent = slash == path ? dr_strdup("/") : slash ? dr_strndup(path, (size_t)(slash - path)) : dr_strdup(".");
    if (!parent)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
    int fd = DR_RETRY(dr_sys.open_dir(parent)), rc = 0;
    if (fd >= 0) {
        rc = dr_directory_sync_open(fd, parent, DR_CALL_FSYNC, error);
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

/*
 * One directory of the path: 1 where it is new, 0 where it was there. Some file systems refuse to make one that is
 * there with other errors than EEXIST.
 */
static int make_one(const char *path, struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.mkdir(path, 0777));
    if (rc == 0)
        return 1;
    int there = rc == -ENOENT ? rc : look_at_directory(path);
    if (there == 0)
        return 0;
    return dr_error_system(error, rc == -EEXIST ? -there : -rc, DR_CALL_MKDIR, path);
}

static int make_above(const char *path, bool sync, struct dr_error *error) {
    char *partial = dr_strdup(path);
    if (!partial)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
    int rc = 0;
    for (char *at = partial + 1; *at && rc >= 0; at++) {
        if (*at != '/')
            continue;
        *at = '\0';
        rc = make_one(partial, error);
        if (rc == 1 && sync)
            rc = sync_parent(partial, error);
        *at = '/';
    }
    free(partial);
    return rc < 0 ? rc : 0;
}

int dr_directory_make(const char *path, enum dr_names names, struct dr_error *error) {
    int made = make_one(path, error);
    if (made == -ENOENT && *path) {
        dr_error_clear(error);
        int rc = make_above(path, names != DR_NAMES_LATER, error);
        made = rc < 0 ? rc : make_one(path, error);
    }
    int rc = made >= 0 && names == DR_NAMES_ALL ? sync_parent(path, error) : 0;
    return rc < 0 ? rc : made;
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

static int write_file(int dirfd, const char *name, const char *path, int flags, const void *data, size_t size,
                      struct dr_syncs *syncs, const struct dr_control *control, struct dr_error *error) {
    int fd = DR_RETRY(dr_sys.open_below(dirfd, name, O_WRONLY | flags, flags & O_CREAT ? 0666 : 0));
    if (fd < 0)
        return dr_error_system(error, -fd, DR_CALL_OPEN, path);
    int rc = write_all(fd, path, data, size, error);
    if (rc == 0 && syncs) {
        rc = dr_syncs_add_file(syncs, fd, path, DR_SYNC_LENGTH, size, control, error);
    } else {
        int closed = dr_sys.close(fd);
        if (rc == 0 && closed < 0)
            rc = dr_error_system(error, -closed, DR_CALL_CLOSE, path);
    }
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
    return sync ? dr_directory_sync_open(dirfd, dir, DR_CALL_FSYNC_OF_COMMIT, error) : 0;
}

int dr_directory_write(const char *dir, const char *name, bool is_there, const void *data, size_t size,
                       struct dr_syncs *syncs, const struct dr_control *control, struct dr_error *error) {
    int flags = is_there ? O_NOFOLLOW | O_NONBLOCK : O_CREAT | O_EXCL;
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0)
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    char *path = dr_path_join(dir, name);
    int rc = path ? write_file(dirfd, name, path, flags, data, size, syncs, control, error)
                  : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    free(path);
    dr_sys.close(dirfd);
    return rc;
}

/* Whatever an error is about, tmp is of no use. */
static void remove_unfinished(const char *dir, const char *tmp) {
    DR_NEW_ERROR(ignored);
    dr_directory_remove(dir, &tmp, 1, &ignored);
}

int dr_directory_rename(const char *dir, const char *tmp, const char *name, bool sync, struct dr_error *error) {
    int dirfd = DR_RETRY(dr_sys.open_dir(dir));
    if (dirfd < 0) {
        remove_unfinished(dir, tmp);
        return dr_error_system(error, -dirfd, DR_CALL_OPEN, dir);
    }
    int rc = rename_durably(dirfd, dir, tmp, name, sync, error);
    dr_sys.close(dirfd);
    return rc;
}

int dr_directory_commit(const char *dir, const char *tmp, const char *name, const void *data, size_t size, bool sync,
                        struct dr_error *error) {
    static const struct dr_control never;
    struct dr_syncs syncs;
    dr_syncs_init(&syncs);
    int rc = dr_directory_write(dir, tmp, false, data, size, sync ? &syncs : NULL, &never, error);
    int waited = dr_syncs_wait(&syncs, &never, NULL, error);
    if (rc < 0)
        return rc;
    rc = waited;
    if (rc == 0)
        return dr_directory_rename(dir, tmp, name, sync, error);
    remove_unfinished(dir, tmp);
    return rc;
}

/* What exchange does, in three steps. It is done with the second: what was called name may keep its third name. */
static int exchange_slowly(int dirfd, const char *tmp, const char *name) {
    char *aside = dr_malloc(strlen(tmp) + sizeof ".old");
    if (!aside)
        return -ENOMEM;
    strcat(strcpy(aside, tmp), ".old");
    int rc = DR_RETRY(dr_sys.rename(dirfd, name, aside));
    if (rc >= 0) {
        rc = DR_RETRY(dr_sys.rename(dirfd, tmp, name));
        DR_RETRY(dr_sys.rename(dirfd, aside, rc < 0 ? name : tmp));
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
        if (rc == -EINVAL || rc == -ENOSYS || rc == -EPERM) /* the last one from seccomp */
            rc = exchange_slowly(dirfd, tmp, name);
    }
    char *path = rc < 0 ? dr_path_join(dir, name) : NULL;
    if (rc < 0)
        dr_error_system(error, -rc, DR_CALL_RENAME, path ? path : name);
    else if (sync)
        rc = dr_directory_sync_open(dirfd, dir, DR_CALL_FSYNC, error);
    free(path);
    dr_sys.close(dirfd);
    return rc < 0 ? rc : 0;
}

/* ---- links ---- */

/* What dr_directory_link is at, and what it has opened. */
struct linking {
    const char *path; /* of the file, for errors */
    const char *from, *name;
    uint64_t size; /* that it has at least */
    int from_dirfd, from_fd, dirfd;
};

static int open_linked(struct linking *linking, const char *from_dir, const char *dir, struct dr_error *error) {
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
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size < linking->size)
        return dr_error_invalid(error, DR_NO_ITEM, "%s is shorter than it was, or no file", linking->path);
    return 0;
}

/* A new file that shares the blocks of the old one: its descriptor, or -errno, which says why there can be none. */
static int clone_file(const struct linking *linking) {
    int fd = DR_RETRY(dr_sys.open_below(linking->dirfd, linking->name, O_WRONLY | O_CREAT | O_EXCL, 0666));
    int rc = fd < 0 ? fd : DR_RETRY(dr_sys.clone(linking->from_fd, fd));
    if (fd < 0 || rc >= 0)
        return fd;
    dr_sys.close(fd);
    DR_RETRY(dr_sys.unlink(linking->dirfd, linking->name));
    return rc;
}

/* The new file's bytes are durable when the syncs are over, which take the descriptor. */
static int sync_linked(const struct linking *linking, int *fd, const char *dir, struct dr_syncs *syncs,
                       const struct dr_control *control, struct dr_error *error) {
    char *path = dr_path_join(dir, linking->name);
    if (!path)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    int rc = dr_syncs_add_file(syncs, *fd, path, DR_SYNC_LENGTH, linking->size, control, error);
    *fd = -1;
    free(path);
    return rc;
}

static int link_or_clone(struct linking *linking, const char *dir, bool is_durable, struct dr_syncs *syncs,
                         const struct dr_control *control, enum dr_link *how, struct dr_error *error) {
    int rc = DR_RETRY(dr_sys.link(linking->from_dirfd, linking->from, linking->dirfd, linking->name));
    int clone = rc < 0 ? clone_file(linking) : -1;
    *how = rc < 0 ? DR_LINK_CLONE : DR_LINK_HARD;
    if (rc < 0 && clone < 0)
        return dr_error_system(error, -rc, DR_CALL_LINK, linking->path);
    bool is_synced = syncs && (clone >= 0 || !is_durable);
    rc = is_synced ? sync_linked(linking, clone >= 0 ? &clone : &linking->from_fd, dir, syncs, control, error) : 0;
    int closed = clone >= 0 ? dr_sys.close(clone) : 0;
    if (rc == 0 && closed < 0)
        rc = dr_error_system(error, -closed, DR_CALL_CLOSE, linking->path);
    if (rc < 0)
        DR_RETRY(dr_sys.unlink(linking->dirfd, linking->name));
    return rc;
}

int dr_directory_link(const char *from_dir, const char *from, const char *dir, const char *name, uint64_t size,
                      bool is_durable, struct dr_syncs *syncs, const struct dr_control *control, enum dr_link *how,
                      struct dr_error *error) {
    char *path = dr_path_join(from_dir, from);
    struct linking linking = {
        .path = path, .from = from, .name = name, .size = size, .from_dirfd = -1, .from_fd = -1, .dirfd = -1};
    int rc =
        path ? open_linked(&linking, from_dir, dir, error) : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, from_dir);
    if (rc == 0)
        rc = link_or_clone(&linking, dir, is_durable, syncs, control, how, error);
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
