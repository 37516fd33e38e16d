/* The files that are read. See input.h. */
#include "io/input.h"

#include "base/memory.h"
#include "io/file.h"
#include "io/sys.h"
#include "io/workers.h"

#include <assert.h>
#include <fcntl.h>
#include <sys/resource.h>

enum { LOOKERS = 16 }; /* threads that wait for files to be opened */

/* Descriptors that may stay open: others in this process need some, too. */
static unsigned most_open(void) {
    struct rlimit limit;
    bool known = getrlimit(RLIMIT_NOFILE, &limit) == 0;
    return known && limit.rlim_cur / 2 < DR_INPUT_MOST ? (unsigned)(limit.rlim_cur / 2) : DR_INPUT_MOST;
}

int dr_input_init(struct dr_input *input, const char *dir, const char *const *names, size_t count,
                  struct dr_error *error) {
    *input = (struct dr_input){.dir = dir, .dirfd = DR_RETRY(dr_sys.open_dir(dir)), .most = most_open()};
    pthread_mutex_init(&input->lock, NULL);
    pthread_cond_init(&input->changed, NULL);
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

/* ---- closing; the lock is held, but not while the kernel closes ---- */

static void close_file(struct dr_input *input, struct dr_input_file *file) {
    assert(file->holders == 0 && !file->opening);
    const int fds[] = {file->buffered_fd, file->direct_fd};
    file->buffered_fd = file->direct_fd = -1;
    file->direct_tried = false;
    input->busy++;
    pthread_mutex_unlock(&input->lock);
    unsigned closed = 0;
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0) {
            dr_sys.close(fds[i]);
            closed++;
        }
    pthread_mutex_lock(&input->lock);
    input->open -= closed;
    input->closed++;
    input->busy--;
    pthread_cond_broadcast(&input->changed);
}

/* Closes a file that nobody holds, those that came first before others: they have been read, most likely. */
static bool close_one(struct dr_input *input) {
    for (size_t tries = 0; tries < input->count; tries++) {
        struct dr_input_file *file = &input->files[input->next];
        input->next = (input->next + 1) % input->count;
        if (file->buffered_fd < 0 || file->holders > 0 || file->opening)
            continue;
        close_file(input, file);
        return true;
    }
    return false;
}

/* Until `more` descriptors can be opened without there being too many. */
static void close_for(struct dr_input *input, unsigned more) {
    while (input->open + more > input->most && close_one(input))
        ;
}

/*
 * A descriptor could not be had; `closed` is from before it was asked for. Lets go of half of what is kept, for others
 * in the process need some, too; where all of it is in use, waits if it may. Whether it is worth asking again.
 */
static bool make_room(struct dr_input *input, uint64_t closed, enum dr_input_lack lack) {
    if (input->closed == closed) {
        input->most = input->open / 2;
        close_for(input, 0);
    }
    while (input->closed == closed && !close_one(input) && lack == DR_INPUT_WAIT && input->busy > 0)
        pthread_cond_wait(&input->changed, &input->lock);
    return input->closed != closed;
}

/* ---- opening; without the lock ---- */

static void close_again(struct dr_input *input, int fd) {
    dr_sys.close(fd);
    pthread_mutex_lock(&input->lock);
    input->closed++;
    pthread_mutex_unlock(&input->lock);
}

static const char *special_kind(mode_t mode) {
    return S_ISFIFO(mode) ? "a FIFO" : S_ISSOCK(mode) ? "a socket" : S_ISDIR(mode) ? "a directory" : "a device";
}

/* What is behind a descriptor: a regular file, and the same one as before. */
static int look_at(struct dr_input_file *file, int fd, struct dr_error *error) {
    struct stat st;
    int rc = DR_RETRY(dr_sys.fstat(fd, &st));
    if (rc < 0)
        return dr_error_system(error, -rc, DR_CALL_FSTAT, file->path);
    if (!S_ISREG(st.st_mode))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM, "%s, not a regular file", special_kind(st.st_mode));
    if (file->looked && (st.st_dev != file->device || st.st_ino != file->inode))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM, "another file has taken its place meanwhile");
    if (!file->looked) {
        file->size = (uint64_t)st.st_size;
        file->device = st.st_dev;
        file->inode = st.st_ino;
    }
    return 0;
}

/* O_NONBLOCK: a FIFO in the file's place is refused, not waited for. io_uring would not wait for a disk either, so the
 * flag goes. */
static int open_checked(struct dr_input *input, struct dr_input_file *file, struct dr_error *error) {
    if (!file->path && !(file->path = dr_path_join(input->dir, file->name)))
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, input->dir);
    if (dr_input_is_outside(file->name))
        return dr_error_corrupt(error, file->path, -1, DR_NO_ITEM,
                                "the metadata names a file outside of the checkpoint directory");
    int fd = DR_RETRY(dr_sys.open_below(input->dirfd, file->name, O_RDONLY | O_NONBLOCK, 0));
    if (fd < 0)
        return dr_error_system(error, -fd, DR_CALL_OPEN, file->path);
    int rc = look_at(file, fd, error);
    if (rc == 0 && (rc = DR_RETRY(dr_sys.set_blocking(fd))) < 0)
        dr_error_system(error, -rc, DR_CALL_FCNTL, file->path);
    if (rc < 0)
        close_again(input, fd);
    return rc < 0 ? rc : fd;
}

/* A descriptor, or -1: why in *error, but where the file system has no direct I/O and need not have it. */
static int open_descriptor(struct dr_input *input, struct dr_input_file *file, enum dr_direct direct,
                           struct dr_error *error) {
    int fd = open_checked(input, file, error);
    if (fd < 0)
        return -1;
    if (direct == DR_DIRECT_OFF || dr_file_use_direct(fd, file->path, direct, error) > 0)
        return fd;
    close_again(input, fd);
    return -1;
}

/* ---- one file, which one thread opens at a time; the lock is held, but not while the kernel opens ---- */

static void await_opened(struct dr_input *input, const struct dr_input_file *file) {
    while (file->opening)
        pthread_cond_wait(&input->changed, &input->lock);
}

static struct dr_input_file *lock_file(struct dr_input *input, size_t index) {
    assert(index < input->count);
    pthread_mutex_lock(&input->lock);
    await_opened(input, &input->files[index]);
    return &input->files[index];
}

/* Of a file that was looked at others make room for it: it is about to be read. */
static void open_once(struct dr_input *input, struct dr_input_file *file, int *out, enum dr_direct direct,
                      struct dr_error *error) {
    file->opening = true;
    input->busy++;
    if (file->looked)
        close_for(input, 1);
    pthread_mutex_unlock(&input->lock);
    int fd = open_descriptor(input, file, direct, error);
    pthread_mutex_lock(&input->lock);
    file->opening = false;
    input->busy--;
    if (fd >= 0) {
        *out = fd;
        file->looked = true;
        input->open++;
    }
    pthread_cond_broadcast(&input->changed);
}

/* One of the file's two descriptors. Who waits for another file's does not stop others from opening this one. */
static int open_file(struct dr_input *input, struct dr_input_file *file, int *out, enum dr_direct direct,
                     enum dr_input_lack lack, struct dr_error *error) {
    DR_NEW_ERROR(why);
    while (*out < 0) {
        uint64_t closed = input->closed;
        dr_error_clear(&why);
        open_once(input, file, out, direct, &why);
        if (!dr_input_is_lack(&why) || !make_room(input, closed, lack))
            break;
        await_opened(input, file);
    }
    if (*out < 0 && why.kind != DR_ERROR_NONE)
        *error = why;
    return *out < 0 ? -why.err : 0;
}

/* ---- what others call ---- */

bool dr_input_make_room(struct dr_input *input) {
    pthread_mutex_lock(&input->lock);
    bool made = make_room(input, input->closed, DR_INPUT_TRY);
    pthread_mutex_unlock(&input->lock);
    return made;
}

int dr_input_look(struct dr_input *input, size_t index, struct dr_error *error) {
    struct dr_input_file *file = lock_file(input, index);
    int rc = 0;
    if (!file->looked) {
        rc = open_file(input, file, &file->buffered_fd, DR_DIRECT_OFF, DR_INPUT_WAIT, error);
        /* Files are looked at in the order in which they are read: those that were first stay open. */
        if (rc == 0 && input->open > input->most && file->holders == 0)
            close_file(input, file);
    }
    pthread_mutex_unlock(&input->lock);
    return rc;
}

struct looking {
    struct dr_input *input;
    size_t *files;
};

static int look_at_one(void *context, size_t index, struct dr_error *error) {
    const struct looking *looking = context;
    (void)error;
    DR_NEW_ERROR(later);
    dr_input_look(looking->input, looking->files[index], &later);
    return 0;
}

int dr_input_look_many(struct dr_input *input, const size_t *files, size_t stride, size_t count,
                       const struct dr_control *control, struct dr_error *error) {
    struct looking looking = {input, dr_malloc((input->count + 1) * sizeof *looking.files)};
    size_t wanted = 0;
    if (!looking.files)
        return dr_error_memory(error);
    pthread_mutex_lock(&input->lock);
    for (size_t i = 0; i < count; i++) {
        size_t index = *(const size_t *)((const char *)files + i * stride);
        struct dr_input_file *file = &input->files[index];
        if (!file->looked && !file->awaited)
            looking.files[wanted++] = index;
        file->awaited = true;
    }
    pthread_mutex_unlock(&input->lock);
    int rc = dr_workers_each(wanted, LOOKERS, look_at_one, &looking, control, error);
    free(looking.files);
    return rc;
}

int dr_input_hold(struct dr_input *input, size_t index, unsigned times, enum dr_input_lack lack, int *fd,
                  struct dr_error *error) {
    struct dr_input_file *file = lock_file(input, index);
    assert(file->looked && times > 0);
    int rc = open_file(input, file, &file->buffered_fd, DR_DIRECT_OFF, lack, error);
    if (rc == 0) {
        input->busy += file->holders == 0;
        file->holders += times;
        *fd = file->buffered_fd;
    }
    pthread_mutex_unlock(&input->lock);
    return rc;
}

int dr_input_direct(struct dr_input *input, size_t index, enum dr_direct direct, int *fd, struct dr_error *error) {
    *fd = -1;
    if (direct == DR_DIRECT_OFF)
        return 0;
    struct dr_input_file *file = lock_file(input, index);
    assert(file->holders > 0);
    DR_NEW_ERROR(why);
    int rc = 0;
    if (direct == DR_DIRECT_ON || !file->direct_tried)
        rc = open_file(input, file, &file->direct_fd, direct, DR_INPUT_TRY, &why);
    file->direct_tried = true;
    *fd = file->direct_fd;
    pthread_mutex_unlock(&input->lock);
    if (rc == 0 || direct == DR_DIRECT_AUTO)
        return 0;
    *error = why;
    return rc;
}

void dr_input_release(struct dr_input *input, size_t index) {
    struct dr_input_file *file = &input->files[index];
    pthread_mutex_lock(&input->lock);
    assert(file->holders > 0);
    if (--file->holders == 0) {
        input->busy--;
        if (input->open > input->most)
            close_file(input, file);
        pthread_cond_broadcast(&input->changed);
    }
    pthread_mutex_unlock(&input->lock);
}

void dr_input_destroy(struct dr_input *input) {
    pthread_mutex_lock(&input->lock);
    for (size_t i = 0; i < input->count; i++) {
        close_file(input, &input->files[i]);
        free(input->files[i].path);
    }
    pthread_mutex_unlock(&input->lock);
    free(input->files);
    if (input->opened)
        dr_sys.close(input->dirfd);
    pthread_cond_destroy(&input->changed);
    pthread_mutex_destroy(&input->lock);
    *input = (struct dr_input){.dirfd = -1};
}
