/* Making files and names durable. See sync.h. */
#include "io/sync.h"

#include "base/memory.h"
#include "io/file_system.h"
#include "io/sys.h"
#include "io/thread_pool.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

/* Shared by the set and the thread that syncs; whoever leaves last frees it. */
struct dr_syncing {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    atomic_uint holders;
    int fd, result;
    enum dr_call call; /* that the result is of */
    enum dr_sync kind;
    bool is_directory;
    bool done;
    uint64_t begin, end, size; /* for the watch */
    uint32_t file;
    char *path;
    struct dr_syncing *next;
};

static int sync_now(int fd, bool is_directory, enum dr_sync kind) {
    if (!is_directory && kind != DR_SYNC_LENGTH)
        return DR_RETRY(dr_sys.fdatasync(fd));
    int rc = DR_RETRY(dr_sys.fsync(fd));
    /* Some network file systems have no fsync for directories: their entries are durable by themselves. */
    return is_directory && (rc == -EINVAL || rc == -EROFS) ? 0 : rc;
}

static void drop(struct dr_syncing *sync) {
    if (atomic_fetch_sub(&sync->holders, 1) > 1)
        return;
    pthread_mutex_destroy(&sync->lock);
    pthread_cond_destroy(&sync->changed);
    free(sync->path);
    free(sync);
}

static void do_sync(struct dr_syncing *sync) {
    bool is_full = sync->is_directory || sync->kind == DR_SYNC_LENGTH;
    sync->call = is_full ? DR_CALL_FSYNC : DR_CALL_FDATASYNC;
    sync->begin = dr_clock_ns();
    sync->result = sync_now(sync->fd, sync->is_directory, sync->kind);
    sync->end = dr_clock_ns();
    int closed = dr_sys.close(sync->fd);
    if (sync->result >= 0 && closed < 0 && !sync->is_directory) {
        sync->result = closed;
        sync->call = DR_CALL_CLOSE;
    }
}

static void run_sync(void *argument) {
    struct dr_syncing *sync = argument;
    do_sync(sync);
    pthread_mutex_lock(&sync->lock);
    sync->done = true;
    pthread_mutex_unlock(&sync->lock);
    pthread_cond_signal(&sync->changed);
    drop(sync);
}

/* Waits for the sync to end; false when the caller cancelled before. */
static bool await(struct dr_syncing *sync, const struct dr_control *control) {
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
    pthread_mutex_unlock(&sync->lock);
    return !cancelled;
}

/* ---- a set ---- */

void dr_syncs_init(struct dr_syncs *syncs) { *syncs = (struct dr_syncs){.owner = dr_process()}; }

/* Syncs of memory do nothing: to hand one to a thread would take longer, much longer on busy processors. */
static bool is_in_memory(struct dr_syncs *syncs, const char *path) {
    if (!syncs->on_disk)
        syncs->on_disk = !dr_file_system_is(path, DR_TMPFS);
    return !syncs->on_disk;
}

/* Takes the descriptor, and syncs it in a thread, or at once where that takes no time or there is none to be had. */
static int begin(struct dr_syncs *syncs, const struct dr_syncing *what, const char *path, struct dr_error *error) {
    assert(syncs->owner == dr_process());
    struct dr_syncing *sync = dr_malloc(sizeof *sync);
    if (sync) {
        *sync = *what;
        sync->path = dr_strdup(path);
    }
    if (!sync || !sync->path) {
        free(sync);
        dr_sys.close(what->fd);
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
    }
    pthread_mutex_init(&sync->lock, NULL);
    dr_clock_cond_init(&sync->changed);
    atomic_init(&sync->holders, 2);
    if (syncs->last)
        syncs->last->next = sync;
    else
        syncs->first = sync;
    syncs->last = sync;
    syncs->pending_count++;
    if (!syncs->pending)
        syncs->pending = sync;
    if (is_in_memory(syncs, path) || dr_thread_pool_run(run_sync, sync) < 0)
        run_sync(sync);
    return 0;
}

int dr_syncs_add_file(struct dr_syncs *syncs, int fd, const char *path, enum dr_sync kind, uint64_t size,
                      const struct dr_control *control, struct dr_error *error) {
    for (; syncs->pending_count >= DR_SYNCS_AT_ONCE; syncs->pending_count--) {
        if (!await(syncs->pending, control)) {
            dr_sys.close(fd);
            return dr_error_cancelled(error);
        }
        syncs->pending = syncs->pending->next;
    }
    return begin(syncs, &(struct dr_syncing){.fd = fd, .kind = kind, .size = size, .file = syncs->files++}, path,
                 error);
}

int dr_syncs_add_directory(struct dr_syncs *syncs, const char *path, struct dr_error *error) {
    int fd = DR_RETRY(dr_sys.open_dir(path));
    if (fd < 0)
        return dr_error_system(error, -fd, DR_CALL_OPEN, path);
    return begin(syncs, &(struct dr_syncing){.fd = fd, .is_directory = true}, path, error);
}

int dr_syncs_add_above(struct dr_syncs *syncs, const char *path, struct dr_error *error) {
    const char *slash = strrchr(path, '/');
    char *above = slash == path ? dr_strdup("/") : slash ? dr_strndup(path, (size_t)(slash - path)) : dr_strdup(".");
    if (!above)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
    int rc = dr_syncs_add_directory(syncs, above, error);
    if (rc == -EACCES) {
        dr_error_clear(error);
        rc = 0;
    }
    free(above);
    return rc;
}

/* Takes the first one out; NULL when there is none. */
static struct dr_syncing *shift(struct dr_syncs *syncs) {
    struct dr_syncing *sync = syncs->first;
    if (sync)
        syncs->first = sync->next;
    else
        *syncs = (struct dr_syncs){.owner = syncs->owner};
    return sync;
}

static void note(const struct dr_syncing *sync, struct dr_watch *watch) {
    if (!sync->is_directory)
        dr_watch_note_until(watch, sync->end,
                            (struct dr_span){.begin = sync->begin,
                                             .size = sync->size,
                                             .step = DR_STEP_SYNC,
                                             .file = sync->file,
                                             .slot = sync->file % DR_SYNCS_AT_ONCE});
}

static int result_of(const struct dr_syncing *sync, struct dr_error *error) {
    if (sync->result < 0 && error->kind == DR_ERROR_NONE)
        dr_error_system(error, -sync->result, sync->call, sync->path);
    return sync->result;
}

int dr_syncs_wait(struct dr_syncs *syncs, const struct dr_control *control, struct dr_watch *watch,
                  struct dr_error *error) {
    int rc = 0;
    for (struct dr_syncing *sync; (sync = shift(syncs));) {
        if (!await(sync, control)) {
            drop(sync);
            dr_syncs_abandon(syncs);
            dr_error_clear(error);
            return dr_error_cancelled(error);
        }
        note(sync, watch);
        int result = result_of(sync, error);
        rc = rc < 0 ? rc : result;
        drop(sync);
    }
    return rc < 0 ? rc : 0;
}

void dr_syncs_abandon(struct dr_syncs *syncs) {
    if (syncs->owner != dr_process())
        return;
    for (struct dr_syncing *sync; (sync = shift(syncs));)
        drop(sync);
}

/* ---- one ---- */

int dr_file_sync(int fd, const char *path, enum dr_sync kind, const struct dr_control *control,
                 struct dr_error *error) {
    struct dr_syncs syncs;
    dr_syncs_init(&syncs);
    int copy = DR_RETRY(dr_sys.dup(fd));
    if (copy < 0)
        return dr_error_system(error, -copy, DR_CALL_FCNTL, path);
    int rc = dr_syncs_add_file(&syncs, copy, path, kind, 0, control, error);
    return rc < 0 ? rc : dr_syncs_wait(&syncs, control, NULL, error);
}

int dr_directory_sync_open(int fd, const char *path, enum dr_call call, struct dr_error *error) {
    int rc = sync_now(fd, true, DR_SYNC_LENGTH);
    return rc < 0 ? dr_error_system(error, -rc, call, path) : 0;
}

int dr_directory_sync(const char *dir, struct dr_error *error) {
    int fd = DR_RETRY(dr_sys.open_dir(dir));
    if (fd < 0)
        return dr_error_system(error, -fd, DR_CALL_OPEN, dir);
    int rc = dr_directory_sync_open(fd, dir, DR_CALL_FSYNC, error);
    dr_sys.close(fd);
    return rc;
}
