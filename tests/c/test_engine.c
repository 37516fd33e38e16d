/*
 * The engine, with both methods: plain transfers, everything that can go wrong
 * with one, and leaving while requests are in flight.
 */
#include "base/align.h"
#include "check.h"
#include "io/engine.h"
#include "io/sys.h"
#include "io/sys_fault.h"

#include <fcntl.h>
#include <liburing.h>

enum { DEPTH = 8, BUFFER = 64 * 1024, BLOCKS = 20, FILE_BYTES = BLOCKS * BUFFER - 777 };

static uint8_t content[BLOCKS * BUFFER];
static const char *method; /* that the current case runs with */

static bool has_uring(void) {
    struct dr_engine *engine;
    DR_NEW_ERROR(error);
    if (dr_engine_open(&engine, "uring", 1, DR_ALIGNMENT, &error) < 0)
        return false;
    dr_engine_close(engine);
    return true;
}

static bool is_uring(void) { return strcmp(method, "uring") == 0; }

static const char *transfer_call(enum dr_op op) {
    return is_uring() ? "uring_result" : op == DR_READ ? "pread" : "pwrite";
}

static void for_each_method(void (*run)(void)) {
    static const char *const methods[] = {"threads", "uring"};
    for (int i = 0; i < (has_uring() ? 2 : 1); i++) {
        method = methods[i];
        int before = check_open_descriptors();
        run();
        dr_fault_disarm();
        CHECK_EQ(check_open_descriptors(), before);
    }
}

static struct dr_engine *open_engine(unsigned depth) {
    struct dr_engine *engine;
    DR_NEW_ERROR(error);
    CHECK_OK(dr_engine_open(&engine, method, depth, BUFFER, &error), &error);
    CHECK(strcmp(engine->ops->name, method) == 0);
    return engine;
}

static int open_content(int flags) {
    if (!check_exists("content")) {
        struct rng rng = {20};
        rng_fill(&rng, content, FILE_BYTES);
        check_write_file("content", content, FILE_BYTES);
    }
    int fd = open(check_path("content"), O_RDONLY | flags);
    if (fd < 0 && flags)
        fd = open(check_path("content"), O_RDONLY);
    CHECK_INT(fd, >=, 0);
    return fd;
}

static bool is_direct(int fd) { return fcntl(fd, F_GETFL) & O_DIRECT; }

/* Takes a request for one block of the file. */
static struct dr_request *take(struct dr_engine *engine, enum dr_op op, int fd, unsigned block) {
    struct dr_request *request = dr_engine_take(engine);
    CHECK(request);
    CHECK_EQ(request->state, DR_TAKEN);
    uint32_t left = FILE_BYTES - block * BUFFER;
    request->op = op;
    request->fd = fd;
    request->direct = is_direct(fd);
    request->offset = (int64_t)block * BUFFER;
    request->size = BUFFER;
    request->needed = op == DR_READ && left < BUFFER ? left : BUFFER;
    request->path = "content";
    return request;
}

static int wait_one(struct dr_engine *engine, struct dr_request **done, struct dr_error *error) {
    *done = NULL;
    int rc = 0;
    while (rc == 0 && !*done && engine->in_flight > 0)
        rc = dr_engine_wait(engine, 100, done, error);
    return rc;
}

/* Reads every block with as many in flight as there are buffers; 0, or the first failure. */
static int read_all(struct dr_engine *engine, int fd, struct dr_error *error) {
    unsigned next = 0, finished = 0;
    while (finished < BLOCKS) {
        while (next < BLOCKS && engine->in_flight < engine->pool.count) {
            struct dr_request *request = take(engine, DR_READ, fd, next++);
            memset(request->data, 0xee, BUFFER);
            int rc = dr_engine_submit(engine, request, error);
            if (rc < 0)
                return rc;
            CHECK_EQ(request->state, DR_IN_FLIGHT);
        }
        struct dr_request *done;
        int rc = wait_one(engine, &done, error);
        if (rc < 0)
            return rc;
        CHECK(done);
        CHECK_EQ(done->state, DR_DONE);
        CHECK_INT(done->done, >=, done->needed);
        CHECK_BYTES(done->data, content + done->offset, done->needed);
        dr_engine_release(engine, done);
        CHECK_EQ(done->state, DR_FREE);
        finished++;
    }
    CHECK_EQ(engine->in_flight, 0);
    return 0;
}

/* Writes every block of content, in an order of its own; 0, or the first failure. */
static int write_all(struct dr_engine *engine, int fd, struct dr_error *error) {
    for (unsigned i = 0; i < BLOCKS || engine->in_flight > 0;) {
        struct dr_request *done;
        if (i < BLOCKS && engine->in_flight < engine->pool.count) {
            unsigned block = i++ * 7 % BLOCKS;
            struct dr_request *request = take(engine, DR_WRITE, fd, block);
            memcpy(request->data, content + block * BUFFER, BUFFER);
            int rc = dr_engine_submit(engine, request, error);
            if (rc < 0)
                return rc;
            continue;
        }
        int rc = wait_one(engine, &done, error);
        if (rc < 0)
            return rc;
        CHECK(done);
        dr_engine_release(engine, done);
    }
    return 0;
}

static int create(int flags) {
    unlink(check_path("written"));
    int fd = open(check_path("written"), O_WRONLY | O_CREAT | O_EXCL | flags, 0666);
    if (fd < 0 && flags)
        fd = open(check_path("written"), O_WRONLY | O_CREAT, 0666);
    CHECK_INT(fd, >=, 0);
    return fd;
}

static void check_written(void) {
    size_t size;
    uint8_t *data = check_read_file("written", &size);
    CHECK(data);
    CHECK_EQ(size, BLOCKS * BUFFER);
    CHECK_BYTES(data, content, size);
    free(data);
}

/* ---- cases without faults ---- */

static void reads_and_writes(void) {
    for (unsigned depth = 1; depth <= 16; depth = depth * 2 + (depth == 2))
        for (int flags = 0; flags <= O_DIRECT; flags += O_DIRECT) {
            DR_NEW_ERROR(error);
            struct dr_engine *engine = open_engine(depth);
            int fd = open_content(flags);
            CHECK_OK(read_all(engine, fd, &error), &error);
            CHECK_EQ(close(fd), 0);
            fd = create(flags);
            CHECK_OK(write_all(engine, fd, &error), &error);
            CHECK_EQ(close(fd), 0);
            check_written();
            dr_engine_close(engine);
        }
}

static void all_buffers_can_be_taken(void) {
    struct dr_engine *engine = open_engine(DEPTH);
    struct dr_request *requests[DEPTH];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < DEPTH; i++) {
            CHECK(requests[i] = dr_engine_take(engine));
            CHECK_EQ((uintptr_t)requests[i]->data % DR_ALIGNMENT, 0);
            memset(requests[i]->data, i, BUFFER);
        }
        CHECK(!dr_engine_take(engine));
        for (int i = 0; i < DEPTH; i++)
            dr_engine_release(engine, requests[i]);
    }
    dr_engine_close(engine);
}

static void waiting_for_nothing_times_out(void) {
    struct dr_engine *engine = open_engine(2);
    struct dr_error error;
    struct dr_request *done = (struct dr_request *)&error;
    dr_error_clear(&error);
    double start = check_seconds();
    CHECK_OK(dr_engine_wait(engine, 30, &done, &error), &error);
    CHECK(!done);
    CHECK(check_seconds() - start > 0.025 && check_seconds() - start < 5);
    dr_engine_close(engine);
}

static void end_of_file(void) {
    for (int flags = 0; flags <= O_DIRECT; flags += O_DIRECT)
        for (int beyond = 0; beyond < 2; beyond++) {
            DR_NEW_ERROR(error);
            struct dr_request *done;
            struct dr_engine *engine = open_engine(2);
            int fd = open_content(flags);
            struct dr_request *request = take(engine, DR_READ, fd, beyond ? BLOCKS : BLOCKS - 1);
            request->needed = BUFFER;
            CHECK_OK(dr_engine_submit(engine, request, &error), &error);
            CHECK_FAILS(wait_one(engine, &done, &error), &error, EBADMSG);
            CHECK_EQ(error.kind, DR_ERROR_CORRUPT);
            CHECK_EQ(error.offset, beyond ? BLOCKS * BUFFER : FILE_BYTES);
            CHECK(strcmp(error.path, "content") == 0);
            dr_engine_close(engine);
            close(fd);
        }
}

static void bad_descriptor(void) {
    struct dr_engine *engine = open_engine(2);
    DR_NEW_ERROR(error);
    struct dr_request *done;
    CHECK_OK(dr_engine_submit(engine, take(engine, DR_READ, 999, 0), &error), &error);
    CHECK_FAILS(wait_one(engine, &done, &error), &error, EBADF);
    CHECK_EQ(error.length, BUFFER);
    dr_engine_close(engine);
}

static void leaves_with_requests_in_flight(void) {
    DR_NEW_ERROR(error);
    for (int i = 0; i < 20; i++) {
        struct dr_engine *engine = open_engine(DEPTH);
        int fd = open_content(i % 2 ? O_DIRECT : 0);
        for (unsigned b = 0; b < DEPTH; b++)
            CHECK_OK(dr_engine_submit(engine, take(engine, DR_READ, fd, b), &error), &error);
        CHECK_EQ(engine->in_flight, DEPTH);
        if (i % 4 < 2) {
            dr_engine_drain(engine);
            CHECK_EQ(engine->in_flight, 0);
            CHECK_EQ(engine->pool.free_count, DEPTH);
            CHECK_OK(read_all(engine, fd, &error), &error);
        }
        dr_engine_close(engine);
        close(fd);
    }
    dr_engine_close(NULL);
}

/* ---- several requests together ---- */

static void queued_and_started_together(void) {
    DR_NEW_ERROR(error);
    struct dr_engine *engine = open_engine(DEPTH);
    int fd = open_content(O_DIRECT);
    dr_fault_arm(&(struct dr_fault){.call = "uring_submit", .warm = true});
    for (int round = 0; round < 3; round++) {
        struct dr_request *done;
        for (unsigned b = 0; b < DEPTH; b++) {
            struct dr_request *request = take(engine, DR_READ, fd, b);
            dr_engine_queue(engine, request);
            CHECK_EQ(request->state, DR_QUEUED);
        }
        CHECK_EQ(engine->in_flight, 0);
        CHECK_OK(dr_engine_flush(engine, &error), &error);
        CHECK_EQ(engine->in_flight, DEPTH);
        for (unsigned b = 0; b < DEPTH; b++) {
            CHECK_OK(wait_one(engine, &done, &error), &error);
            CHECK_BYTES(done->data, content + done->offset, BUFFER);
            dr_engine_release(engine, done);
        }
        CHECK_OK(dr_engine_wait(engine, 0, &done, &error), &error);
        CHECK(!done);
    }
    CHECK_INT(dr_fault_disarm(), <=, is_uring() ? 3 : 0);
    CHECK_OK(dr_engine_flush(engine, &error), &error); /* of nothing */
    dr_engine_close(engine);
    close(fd);
}

/* Of what is not started by then nothing happens. */
static void queued_and_left(void) {
    struct dr_engine *engine = open_engine(DEPTH);
    int fd = open_content(0);
    struct dr_request *requests[3];
    for (unsigned b = 0; b < 3; b++)
        dr_engine_queue(engine, requests[b] = take(engine, DR_READ, fd, b));
    CHECK(dr_engine_drain(engine));
    for (unsigned b = 0; b < 3; b++) {
        CHECK_EQ(requests[b]->state, DR_TAKEN);
        dr_engine_release(engine, requests[b]);
    }
    DR_NEW_ERROR(error);
    CHECK_OK(read_all(engine, fd, &error), &error);
    dr_engine_close(engine);
    close(fd);
}

/* Where no thread can be started, the method with threads transfers in its owner's. */
static void no_thread_to_transfer(void) {
    DR_NEW_ERROR(error);
    dr_fault_arm(&(struct dr_fault){.call = "thread", .nth = 1, .err = EAGAIN, .sticky = true});
    struct dr_engine *engine = open_engine(DEPTH);
    int fd = open_content(O_DIRECT);
    CHECK_OK(read_all(engine, fd, &error), &error);
    close(fd);
    fd = create(0);
    CHECK_OK(write_all(engine, fd, &error), &error);
    close(fd);
    check_written();
    dr_engine_close(engine);
}

/* ---- cases with faults ---- */

static void short_transfers(void) {
    for (int flags = 0; flags <= O_DIRECT; flags += O_DIRECT)
        for (uint64_t n = 1; n <= BLOCKS + 5; n += 4) {
            DR_NEW_ERROR(error);
            struct dr_engine *engine = open_engine(4);
            int fd = open_content(flags);
            dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_READ), .nth = n});
            CHECK_OK(read_all(engine, fd, &error), &error);
            dr_fault_disarm();
            close(fd);
            fd = create(flags);
            dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_WRITE), .nth = n});
            CHECK_OK(write_all(engine, fd, &error), &error);
            dr_fault_disarm();
            close(fd);
            check_written();
            dr_engine_close(engine);
        }
}

/* Each transfer gives half of what is left, down to single bytes. */
static void every_transfer_short(void) {
    DR_NEW_ERROR(error);
    struct dr_engine *engine = open_engine(4);
    int fd = open_content(0);
    dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_READ), .nth = 1, .sticky = true});
    CHECK_OK(read_all(engine, fd, &error), &error);
    close(fd);
    dr_fault_disarm();
    fd = create(0);
    dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_WRITE), .nth = 1, .sticky = true});
    CHECK_OK(write_all(engine, fd, &error), &error);
    dr_fault_disarm();
    close(fd);
    check_written();
    dr_engine_close(engine);
}

static void interrupted_transfers(void) {
    const int errors[] = {EINTR, EAGAIN};
    for (int i = 0; i < 2; i++)
        for (uint64_t n = 1; n <= BLOCKS + 1; n += 5) {
            DR_NEW_ERROR(error);
            struct dr_engine *engine = open_engine(4);
            int fd = open_content(n % 2 ? O_DIRECT : 0);
            dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_READ), .nth = n, .err = errors[i]});
            CHECK_OK(read_all(engine, fd, &error), &error);
            dr_fault_disarm();
            close(fd);
            dr_engine_close(engine);
        }
}

static void interrupted_for_good(void) {
    DR_NEW_ERROR(error);
    struct dr_engine *engine = open_engine(2);
    int fd = open_content(0);
    dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_READ), .nth = 3, .sticky = true, .err = EAGAIN});
    CHECK_FAILS(read_all(engine, fd, &error), &error, EAGAIN);
    dr_engine_close(engine);
    dr_fault_disarm();
    close(fd);
}

/* EINVAL for a direct transfer turns O_DIRECT off; for any other it is an error. */
static void direct_refused(void) {
    for (int flags = 0; flags <= O_DIRECT; flags += O_DIRECT) {
        DR_NEW_ERROR(error);
        struct dr_engine *engine = open_engine(4);
        int fd = open_content(flags);
        if (flags && !is_direct(fd)) {
            check_skip("no O_DIRECT here");
        } else {
            dr_fault_arm(&(struct dr_fault){.call = transfer_call(DR_READ), .nth = 5, .err = EINVAL});
            int rc = read_all(engine, fd, &error);
            CHECK_EQ(rc, flags ? 0 : -EINVAL);
            CHECK(!is_direct(fd));
        }
        dr_engine_close(engine);
        dr_fault_disarm();
        close(fd);
    }
}

static void error_with_others_in_flight(void) {
    for (uint64_t n = 1; n <= BLOCKS; n += 3)
        for (int op = DR_READ; op <= DR_WRITE; op++) {
            DR_NEW_ERROR(error);
            struct dr_engine *engine = open_engine(DEPTH);
            int fd = op == DR_READ ? open_content(O_DIRECT) : create(O_DIRECT);
            dr_fault_arm(&(struct dr_fault){.call = transfer_call((enum dr_op)op), .nth = n, .err = ENOSPC});
            int rc = op == DR_READ ? read_all(engine, fd, &error) : write_all(engine, fd, &error);
            CHECK_EQ(rc, -ENOSPC);
            CHECK_EQ(error.kind, DR_ERROR_SYSTEM);
            CHECK(error.call == (op == DR_READ ? DR_CALL_READ : DR_CALL_WRITE));
            CHECK(strcmp(error.path, "content") == 0);
            CHECK_EQ(error.offset % BUFFER, 0);
            CHECK(dr_error_cure(&error)[0]);
            dr_engine_close(engine);
            dr_fault_disarm();
            close(fd);
        }
}

static void out_of_memory(void) {
    struct dr_engine *engine;
    DR_NEW_ERROR(error);
    dr_fault_arm(&(struct dr_fault){.call = "map", .nth = 1, .err = ENOMEM});
    CHECK_FAILS(dr_engine_open(&engine, method, DEPTH, BUFFER, &error), &error, ENOMEM);
}

/* ---- what only io_uring can do ---- */

static void refused(const char *call, enum dr_call named) {
    const int errors[] = {EPERM, ENOSYS, ENOMEM};
    for (int i = 0; i < 3; i++) {
        struct dr_engine *engine;
        DR_NEW_ERROR(error);
        int before = check_open_descriptors();
        dr_fault_arm(&(struct dr_fault){.call = call, .nth = 1, .sticky = true, .err = errors[i]});
        CHECK_OK(dr_engine_open(&engine, "auto", 2, BUFFER, &error), &error);
        CHECK(strcmp(engine->ops->name, "threads") == 0);
        dr_engine_close(engine);
        CHECK_FAILS(dr_engine_open(&engine, "uring", 2, BUFFER, &error), &error, errors[i]);
        CHECK(error.call == named);
        CHECK(dr_error_cure(&error)[0]);
        dr_fault_disarm();
        CHECK_EQ(check_open_descriptors(), before);
    }
}

static void refused_at_set_up(void) { refused("uring_init", DR_CALL_URING_SETUP); }

/* As a sandbox may that lets rings be made, and refuses io_uring_enter. */
static void refused_at_the_first_request(void) {
    if (has_uring())
        refused("uring_try", DR_CALL_URING_ENTER);
    else
        check_skip("no io_uring here");
}

static void auto_prefers_uring(void) {
    struct dr_engine *engine;
    DR_NEW_ERROR(error);
    if (!has_uring()) {
        check_skip("no io_uring here");
        return;
    }
    CHECK_OK(dr_engine_open(&engine, "auto", 2, BUFFER, &error), &error);
    CHECK(strcmp(engine->ops->name, "uring") == 0);
    dr_engine_close(engine);
}

/* Refused for all buffers, then for half of them, and so on: the rest uses plain reads and writes. */
static void registration_degrades(void) {
    if (!has_uring()) {
        check_skip("no io_uring here");
        return;
    }
    method = "uring";
    for (uint64_t n = 0; n <= 2; n++) {
        DR_NEW_ERROR(error);
        dr_fault_arm(&(struct dr_fault){.call = "uring_register", .nth = n ? 1 : 0, .sticky = n == 2, .err = ENOMEM});
        struct dr_engine *engine = open_engine(DEPTH);
        uint64_t calls = dr_fault_disarm();
        CHECK_INT(calls, >=, n == 2 ? 4 : n + 1);
        int fd = open_content(O_DIRECT);
        CHECK_OK(read_all(engine, fd, &error), &error);
        close(fd);
        fd = create(O_DIRECT);
        CHECK_OK(write_all(engine, fd, &error), &error);
        close(fd);
        check_written();
        dr_engine_close(engine);
    }
}

/* The kernel takes only some of what is submitted together: the rest is the caller's again, and never read. */
static int submit_two(struct io_uring *ring) {
    static unsigned calls;
    unsigned tail = ring->sq.sqe_tail;
    if (calls++ % 2)
        return -EBADR;
    ring->sq.sqe_tail = ring->sq.sqe_head + 2;
    int rc = dr_sys_real.uring_submit(ring);
    ring->sq.sqe_tail = tail;
    return rc;
}

static void submission_stops_halfway(void) {
    if (!has_uring()) {
        check_skip("no io_uring here");
        return;
    }
    method = "uring";
    DR_NEW_ERROR(error);
    struct dr_engine *engine = open_engine(DEPTH);
    int fd = open_content(O_DIRECT);
    struct dr_request *requests[DEPTH], *done;
    for (unsigned b = 0; b < DEPTH; b++) {
        dr_engine_queue(engine, requests[b] = take(engine, DR_READ, fd, b));
        memset(requests[b]->data, 0xee, BUFFER);
    }
    dr_sys.uring_submit = submit_two;
    CHECK_FAILS(dr_engine_flush(engine, &error), &error, EBADR);
    dr_sys = dr_sys_real;
    CHECK_EQ(error.offset, 2 * BUFFER);
    CHECK_EQ(engine->in_flight, 2);
    CHECK(engine->failed);
    dr_error_clear(&error);
    for (unsigned b = 2; b < DEPTH; b++) {
        CHECK_EQ(requests[b]->state, DR_TAKEN);
        CHECK_EQ(requests[b]->data[0], 0xee);
        dr_engine_release(engine, requests[b]);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_OK(wait_one(engine, &done, &error), &error);
        CHECK_BYTES(done->data, content + done->offset, BUFFER);
        dr_engine_release(engine, done);
    }
    CHECK_OK(read_all(engine, fd, &error), &error); /* over the entries that have become no-ops */
    dr_engine_close(engine);
    close(fd);
}

/* A submission that failed leaves an engine that still works. */
static void submission_fails(void) {
    if (!has_uring()) {
        check_skip("no io_uring here");
        return;
    }
    method = "uring";
    for (int err = 0; err < 2; err++)
        for (uint64_t n = 1; n <= DEPTH; n++) {
            DR_NEW_ERROR(error);
            struct dr_engine *engine = open_engine(DEPTH);
            int fd = open_content(O_DIRECT);
            dr_fault_arm(&(struct dr_fault){.call = "uring_submit", .nth = n, .err = err ? EINTR : EBADR});
            int rc = read_all(engine, fd, &error);
            CHECK_EQ(rc, err ? 0 : -EBADR);
            if (!err)
                CHECK(error.call == DR_CALL_URING_ENTER);
            dr_fault_disarm();
            dr_engine_drain(engine);
            if (!err && n > 1) { /* one buffer is lost with the request that failed */
                dr_error_clear(&error);
                for (unsigned b = 0; b < DEPTH - 1; b++)
                    CHECK_OK(dr_engine_submit(engine, take(engine, DR_READ, fd, b), &error), &error);
                for (unsigned b = 0; b < DEPTH - 1; b++) {
                    struct dr_request *done;
                    CHECK_OK(wait_one(engine, &done, &error), &error);
                    CHECK(done);
                    CHECK_BYTES(done->data, content + done->offset, BUFFER);
                }
            }
            dr_engine_close(engine);
            close(fd);
        }
}

static void waiting_fails(void) {
    if (!has_uring()) {
        check_skip("no io_uring here");
        return;
    }
    method = "uring";
    const int errors[] = {EINTR, EAGAIN, ETIME, EBADR};
    for (int i = 0; i < 4; i++) {
        DR_NEW_ERROR(error);
        struct dr_engine *engine = open_engine(DEPTH);
        int fd = open_content(O_DIRECT);
        dr_fault_arm(&(struct dr_fault){.call = "uring_wait", .nth = 4, .err = errors[i]});
        CHECK_EQ(read_all(engine, fd, &error), i < 3 ? 0 : -EBADR);
        dr_engine_close(engine);
        dr_fault_disarm();
        close(fd);
    }
}

static int no_submit(struct io_uring *ring) {
    (void)ring;
    return -EBADR;
}

/* They need no ring, and what is short or interrupted is repeated as it is there. */
static void small_writes_go_at_once(void) {
    if (!has_uring()) {
        check_skip("no io_uring here");
        return;
    }
    enum { SMALL = 3000 };
    method = "uring";
    close(open_content(0));
    for (uint64_t n = 0; n < 3; n++) {
        DR_NEW_ERROR(error);
        struct dr_engine *engine = open_engine(DEPTH);
        int fd = open(check_path("small"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
        if (n)
            dr_fault_arm(&(struct dr_fault){.call = "pwrite", .nth = 1, .err = n == 1 ? EINTR : 0});
        else
            dr_sys.uring_submit = no_submit;
        struct dr_request *request = take(engine, DR_WRITE, fd, 0), *done;
        request->size = request->needed = SMALL;
        memcpy(request->data, content, SMALL);
        CHECK_OK(dr_engine_submit(engine, request, &error), &error);
        CHECK_EQ(engine->in_flight, 1);
        CHECK_OK(wait_one(engine, &done, &error), &error);
        CHECK(done == request && done->done == SMALL);
        dr_fault_disarm();
        dr_sys = dr_sys_real;
        dr_engine_close(engine);
        close(fd);
        size_t size;
        uint8_t *written = check_read_file("small", &size);
        CHECK_EQ(size, SMALL);
        CHECK_BYTES(written, content, SMALL);
        free(written);
    }
}

#define BOTH(name) \
    static void name##_both(void) { for_each_method(name); }
BOTH(reads_and_writes)
BOTH(all_buffers_can_be_taken)
BOTH(waiting_for_nothing_times_out)
BOTH(end_of_file)
BOTH(bad_descriptor)
BOTH(leaves_with_requests_in_flight)
BOTH(queued_and_started_together)
BOTH(queued_and_left)
BOTH(no_thread_to_transfer)
BOTH(short_transfers)
BOTH(every_transfer_short)
BOTH(interrupted_transfers)
BOTH(interrupted_for_good)
BOTH(direct_refused)
BOTH(error_with_others_in_flight)
BOTH(out_of_memory)

CHECK_MAIN({"reads_and_writes", reads_and_writes_both}, {"all_buffers_can_be_taken", all_buffers_can_be_taken_both},
           {"waiting_for_nothing_times_out", waiting_for_nothing_times_out_both}, {"end_of_file", end_of_file_both},
           {"bad_descriptor", bad_descriptor_both},
           {"leaves_with_requests_in_flight", leaves_with_requests_in_flight_both},
           {"queued_and_started_together", queued_and_started_together_both}, {"queued_and_left", queued_and_left_both},
           {"no_thread_to_transfer", no_thread_to_transfer_both}, {"short_transfers", short_transfers_both},
           {"every_transfer_short", every_transfer_short_both}, {"interrupted_transfers", interrupted_transfers_both},
           {"interrupted_for_good", interrupted_for_good_both}, {"direct_refused", direct_refused_both},
           {"error_with_others_in_flight", error_with_others_in_flight_both}, {"out_of_memory", out_of_memory_both},
           {"refused_at_set_up", refused_at_set_up}, {"refused_at_the_first_request", refused_at_the_first_request},
           {"submission_stops_halfway", submission_stops_halfway}, {"auto_prefers_uring", auto_prefers_uring},
           {"registration_degrades", registration_degrades}, {"submission_fails", submission_fails},
           {"waiting_fails", waiting_fails}, {"small_writes_go_at_once", small_writes_go_at_once})
