/*
 * The I/O engine: many block reads and writes in flight from one thread.
 *
 * An engine and its buffer pool belong to one worker thread at a time. Two
 * methods stand behind one table of operations: `uring` (io_uring) and
 * `threads` (pread and pwrite in a few threads). Which one is used is found
 * by trying, never by the kernel's version.
 *
 * A request's life; one function, move_to in engine.c, changes its state:
 *   FREE -> TAKEN       dr_engine_take: the caller owns the buffer
 *   TAKEN -> QUEUED     dr_engine_queue: the engine owns the buffer
 *   QUEUED -> IN_FLIGHT dr_engine_flush, which starts all that are queued; dr_engine_submit is both
 *   QUEUED -> TAKEN     dr_engine_flush, of those that could not be started; dr_engine_drain
 *   TAKEN -> FREE       dr_engine_release of one that is not needed, or could not be started
 *   IN_FLIGHT -> DONE   dr_engine_wait returns it: the caller owns the buffer again
 *   DONE -> QUEUED      within dr_engine_wait, for what a short or interrupted transfer has left
 *   DONE -> FREE        dr_engine_release; dr_engine_drain
 * A direct transfer refused with EINVAL is repeated without O_DIRECT.
 */
#ifndef DCPRING_ENGINE_H
#define DCPRING_ENGINE_H

#include "base/error.h"
#include "io/pool.h"
#include "io/watch.h"

enum dr_op { DR_READ, DR_WRITE };

enum dr_request_state { DR_FREE, DR_TAKEN, DR_QUEUED, DR_IN_FLIGHT, DR_DONE };

struct dr_request {
    enum dr_op op;
    enum dr_request_state state; /* see above */
    int fd;
    bool direct;
    unsigned buffer; /* index in the engine's pool; also the request's own index */
    uint8_t *data; /* the buffer; or, if the caller says so, memory of its own, aligned where the transfer is direct */
    uint32_t size; /* bytes to transfer */
    uint32_t needed; /* bytes that must arrive; less than size where a direct read passes the end of the file */
    uint32_t done;
    int64_t offset;
    const char *path; /* for errors; the caller's, must outlive the request */
    unsigned retries;
    uint32_t file;  /* for the watch */
    uint64_t begin; /* when it was first submitted, for the watch */
    void *user;
};

struct dr_engine;

struct dr_engine_ops {
    const char *name;
    int (*open)(struct dr_engine *engine, struct dr_error *error);
    /* Starts the transfers of what is left of the requests, in order; gives how many, the rest failed for *error. */
    unsigned (*submit)(struct dr_engine *engine, struct dr_request *const *requests, unsigned count,
                       struct dr_error *error);
    /* Waits for one transfer to end. Gives NULL when none did within timeout_ms. */
    int (*wait)(struct dr_engine *engine, unsigned timeout_ms, struct dr_request **request, int *result,
                struct dr_error *error);
    /* Every transfer has ended by now. */
    void (*close)(struct dr_engine *engine);
    /* The same in a forked child, whose parent goes on with the engine: what the two share stays as it is. */
    void (*forget)(struct dr_engine *engine);
};

struct dr_engine {
    const struct dr_engine_ops *ops;
    const char *asked; /* the method that was asked for */
    bool failed;       /* once: it is not handed on (engine_cache.h) */
    struct dr_pool pool;
    struct dr_request *requests; /* one per buffer */
    struct dr_request **queue;   /* those that are queued, in order; room for one per buffer */
    unsigned queued, in_flight;
    struct dr_watch *watch; /* the caller's; NULL: none */
    unsigned worker;        /* whose engine this is, for the watch */
    unsigned registered;    /* buffers [0, registered) are registered with the kernel */
    void *method;           /* the method's own state */
};

extern const struct dr_engine_ops dr_engine_uring;
extern const struct dr_engine_ops dr_engine_threads;

/* method: "auto", "uring" or "threads". depth buffers of buffer_size bytes are allocated with it. */
int dr_engine_open(struct dr_engine **out, const char *method, unsigned depth, size_t buffer_size,
                   struct dr_error *error);

/* Takes a request with a buffer; NULL when all are in use. */
struct dr_request *dr_engine_take(struct dr_engine *engine);

/* For many small transfers, which the method then starts by one call. dr_engine_flush is due before the next wait. */
void dr_engine_queue(struct dr_engine *engine, struct dr_request *request);
int dr_engine_flush(struct dr_engine *engine, struct dr_error *error);

int dr_engine_submit(struct dr_engine *engine, struct dr_request *request, struct dr_error *error);

/*
 * Waits up to timeout_ms, 0: not at all, for one request to be wholly done; gives NULL on a timeout. A failure that
 * comes with a request is that request's own: it is done, and the others go on.
 */
int dr_engine_wait(struct dr_engine *engine, unsigned timeout_ms, struct dr_request **done, struct dr_error *error);

void dr_engine_release(struct dr_engine *engine, struct dr_request *request);

/* Waits until nothing is in flight, and starts nothing that is queued; results are dropped. False when that cannot be
 * had: the engine is lost then. */
bool dr_engine_drain(struct dr_engine *engine);

/* Drains and frees; what cannot be drained is leaked rather than freed under the kernel. NULL is allowed. */
void dr_engine_close(struct dr_engine *engine);

/* In a forked child: gives up its copy of an engine that nobody was using. */
void dr_engine_forget(struct dr_engine *engine);

#endif
