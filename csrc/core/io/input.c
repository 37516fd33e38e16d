/* The files that are read. See input.h. */
#include "io/input.h"

#include "base/memory.h"
#include "io/file.h"
#include "io/sys.h"

#include <assert.h>
#include <fcntl.h>

int dr_input_init(struct dr_input *input, const char *dir, const char *const *names, size_t count,
                  struct dr_error *error) {
    *input = (struct dr_input){.dir = dir, .dirfd = DR_RETRY(dr_sys.open_dir(dir))};
    pthread_mutex_init(&input->lock, NULL);
    input->opened = input->dirfd >= 0;
    if (!input->opened)
        return dr_error_system(error, -input->dirfd, DR_CALL_OPEN, dir);
    input->files = dr_calloc(count ? count : 1, sizeof *input->files);
    if (!input->files)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    input->count = count;
    for (size_t i = 0; i < count; i++)
        input->files[i] = (struct dr_input_file){.name = names[i], .buffered_fd = -1, .direct_fd = -1};
    return 0;
}

bool dr_input_is_outside(const char *name) {
    if (name[0] == '/' || name[0] == '\0')
        return true;
    for (const char *part = name;; part++) {
        const char *end = strchr(part, '/');
        if (end ? end - part == 2 && memcmp(part, "..", 2) == 0 : strcmp(part, "..") == 0)
            return true;
        if (!end)
            return false;
        part = end;
    }
}

/* ---- one file; the lock is held ---- */

static void close_file(struct dr_input_file *file) {
    assert(file->holders == 0 && !file->kept);
    if (file->buffered_fd >= 0)
        dr_sys.close(file->buffered_fd);
    if (file->direct_fd >= 0)
        dr_sys.close(file->direct_fd);
    file->buffered_fd = file->direct_fd = -1;
    file->direct_tried = false;
}

/* What is behind a descriptor: a regular file, and the same one as before. */
static int look_at(struct dr_input_file *file, int fd, struct dr_error *error) {
    struct stat st;
    int rc = DR_RETRY(dr_sys.fstat(fd, &st));
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_FSTAT, file->path);
    if (!S_ISREG(st.st_mode))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM, "not a regular file");
    if (file->looked && (st.st_dev != file->device || st.st_ino != file->inode))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM, "another file has taken its place meanwhile");
    if (!file->looked) {
        file->size = (uint64_t)st.st_size;
        file->device = st.st_dev;
        file->inode = st.st_ino;
        file->looked = true;
    }
    return 0;
}

/* O_NONBLOCK: a FIFO in the file's place is refused, not waited for. io_uring would not wait for a disk either, so the
 * flag goes. */
static int open_checked(const struct dr_input *input, struct dr_input_file *file, int *out, struct dr_error *error) {
    int fd = DR_RETRY(dr_sys.open_below(input->dirfd, file->name, O_RDONLY | O_NONBLOCK, 0));
    if (fd < 0)
        return dr_error_system(error, -fd, DR_CALL_OPEN, file->path);
    int rc = look_at(file, fd, error);
    if (rc == 0 && (rc = DR_RETRY(dr_sys.set_blocking(fd))) < 0)
        dr_error_system(error, -rc, DR_CALL_FCNTL, file->path);
    if (rc < 0)
        dr_sys.close(fd);
    else
        *out = fd;
    return rc;
}

/* Lets a file that is open stay open, in the place of one that nobody holds if need be; false when there is none. */
static bool keep_open(struct dr_input *input, size_t index, bool instead) {
    struct dr_input_file *file = &input->files[index];
    if (input->kept_count < DR_INPUT_KEPT) {
        input->kept[input->kept_count++] = index;
        return file->kept = true;
    }
    for (unsigned tries = 0; instead && tries < DR_INPUT_KEPT; tries++) {
        size_t *place = &input->kept[input->next];
        struct dr_input_file *other = &input->files[*place];
        input->next = (input->next + 1) % DR_INPUT_KEPT;
        if (other->holders > 0)
            continue;
        other->kept = false;
        close_file(other);
        *place = index;
        return file->kept = true;
    }
    return false;
}

static int look(struct dr_input *input, size_t index, struct dr_error *error) {
    struct dr_input_file *file = &input->files[index];
    if (file->looked)
        return 0;
    if (!file->path && !(file->path = dr_path_join(input->dir, file->name)))
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, input->dir);
    if (dr_input_is_outside(file->name))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM,
                                "the metadata names a file outside of the checkpoint directory");
    int rc = open_checked(input, file, &file->buffered_fd, error);
    /* Files are looked at in the order in which they are read: those that were first stay open. */
    if (rc == 0 && !keep_open(input, index, false))
        close_file(file);
    return rc;
}

/* ---- with the lock ---- */

int dr_input_look(struct dr_input *input, size_t index, struct dr_error *error) {
    assert(index < input->count);
    pthread_mutex_lock(&input->lock);
    int rc = look(input, index, error);
    pthread_mutex_unlock(&input->lock);
    return rc;
}

int dr_input_hold(struct dr_input *input, size_t index, int *fd, struct dr_error *error) {
    assert(index < input->count);
    struct dr_input_file *file = &input->files[index];
    int rc = 0;
    pthread_mutex_lock(&input->lock);
    assert(file->looked);
    if (file->buffered_fd < 0)
        rc = open_checked(input, file, &file->buffered_fd, error);
    if (rc == 0) {
        if (!file->kept)
            keep_open(input, index, true);
        file->holders++;
        *fd = file->buffered_fd;
    }
    pthread_mutex_unlock(&input->lock);
    return rc;
}

static int open_direct(struct dr_input *input, struct dr_input_file *file, enum dr_direct direct,
                       struct dr_error *error) {
    file->direct_tried = true;
    int rc = open_checked(input, file, &file->direct_fd, error);
    if (rc < 0)
        return rc;
    rc = dr_file_use_direct(file->direct_fd, file->path, direct, error);
    if (rc <= 0) {
        dr_sys.close(file->direct_fd);
        file->direct_fd = -1;
    }
    return rc;
}

int dr_input_direct(struct dr_input *input, size_t index, enum dr_direct direct, int *fd, struct dr_error *error) {
    struct dr_input_file *file = &input->files[index];
    DR_NEW_ERROR(ignored);
    int rc = 0;
    pthread_mutex_lock(&input->lock);
    assert(file->holders > 0);
    if (direct == DR_DIRECT_ON && file->direct_fd < 0)
        rc = open_direct(input, file, direct, error);
    else if (direct == DR_DIRECT_AUTO && !file->direct_tried)
        open_direct(input, file, direct, &ignored);
    *fd = direct == DR_DIRECT_OFF ? -1 : file->direct_fd;
    pthread_mutex_unlock(&input->lock);
    return rc < 0 ? rc : 0;
}

void dr_input_release(struct dr_input *input, size_t index) {
    struct dr_input_file *file = &input->files[index];
    pthread_mutex_lock(&input->lock);
    assert(file->holders > 0);
    if (--file->holders == 0 && !file->kept)
        close_file(file);
    pthread_mutex_unlock(&input->lock);
}

void dr_input_destroy(struct dr_input *input) {
    for (size_t i = 0; i < input->count; i++) {
        input->files[i].kept = false;
        close_file(&input->files[i]);
        free(input->files[i].path);
    }
    free(input->files);
    if (input->opened)
        dr_sys.close(input->dirfd);
    pthread_mutex_destroy(&input->lock);
    *input = (struct dr_input){.dirfd = -1};
}
