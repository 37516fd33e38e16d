/*
 * What is kept between files, saves and loads: what is handed on is as new, is bounded, goes after a while and when it
 * is asked to, and is left alone by a forked child.
 */
#include "io/engine_cache.h"
#include "io/thread_pool.h"

#include "check.h"
#include "io/sys.h"
#include "io/sys_fault.h"
#include "sample.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

enum { SIZE = 1 << 20 };

static const char *const methods[] = {"threads", "uring"};

/* How many of the methods there are here. */
static size_t method_count(void) { return sample_has_uring() ? 2 : 1; }

static void do_nothing(void *argument) { atomic_fetch_add((atomic_uint *)argument, 1); }

/* Begins with one thread, and nothing else: one that has just done its job may still be on its way to wait. */
static void start_afresh(void) {
    static atomic_uint done;
    for (unsigned quiet = 0; quiet < 20; quiet = dr_thread_pool_idle() > 0 ? 0 : quiet + 1) {
        dr_thread_pool_release();
        usleep(1000);
    }
    atomic_store(&done, 0);
    CHECK_EQ(dr_thread_pool_run(do_nothing, &done), 0);
    while (dr_thread_pool_idle() == 0)
        usleep(100);
    CHECK_EQ(atomic_load(&done), 1);
}

static struct dr_engine *take(const char *method, unsigned depth, unsigned most, size_t size) {
    DR_NEW_ERROR(error);
    struct dr_engine *engine;
    CHECK_OK(dr_engine_cache_take(&engine, method, depth, most, size, &error), &error);
    CHECK_EQ(engine->pool.free_count, engine->pool.count);
    CHECK_EQ(engine->in_flight, 0);
    CHECK(!engine->watch && !engine->failed);
    return engine;
}

/* Writes a block of zeros to a descriptor, which may fail. */
static int use(struct dr_engine *engine, int fd) {
    DR_NEW_ERROR(error);
    struct dr_request *request = dr_engine_take(engine), *done = NULL;
    request->op = DR_WRITE;
    request->fd = fd;
    request->size = request->needed = SIZE;
    request->path = "block";
    int rc = dr_engine_submit(engine, request, &error);
    while (rc == 0 && !done)
        rc = dr_engine_wait(engine, 100, &done, &error);
    if (done)
        dr_engine_release(engine, done);
    return rc;
}

static int open_file(void) {
    int fd = open(check_path("block"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    return fd;
}

static void the_same_again(void) {
    int fd = open_file();
    for (size_t m = 0; m < method_count(); m++) {
        start_afresh();
        struct dr_engine *first = take(methods[m], 2, 4, SIZE), *second = take(methods[m], 2, 4, SIZE);
        CHECK(first != second);
        CHECK_EQ(use(first, fd), 0);
        dr_engine_cache_give(first);
        CHECK_EQ(dr_engine_cache_amount().engines, 1);
        CHECK_EQ(dr_engine_cache_amount().bytes, 2 * SIZE);
        CHECK(take(methods[m], 1, 2, SIZE) == first);
        CHECK_EQ(use(first, fd), 0);
        dr_engine_cache_give(second);
        dr_engine_cache_give(first);
        struct dr_engine *third = take(methods[m], 1, 1, SIZE), *fourth = take(methods[m], 3, 4, SIZE);
        struct dr_engine *fifth = take(methods[m], 1, 8, 2 * SIZE);
        CHECK_EQ(dr_engine_cache_amount().engines, 2); /* too deep, not deep enough, other blocks: new ones were made */
        dr_engine_cache_give(third);
        dr_engine_cache_give(fourth);
        dr_engine_cache_give(fifth);
        CHECK_EQ(dr_engine_cache_amount().engines, 5);
        CHECK(take(methods[m], 1, 8, SIZE) == third); /* the smallest that does */
        dr_engine_close(third);
    }
    close(fd);
    dr_thread_pool_release();
    CHECK_EQ(dr_engine_cache_amount().engines + dr_thread_pool_idle(), 0);
}

static void auto_takes_its_own(void) {
    start_afresh();
    struct dr_engine *engine = take("auto", 1, 1, SIZE);
    dr_engine_cache_give(engine);
    CHECK(take(engine->ops->name, 1, 1, SIZE) == engine);
    dr_engine_cache_give(engine);
    struct dr_engine *other = take(strcmp(engine->ops->name, "uring") == 0 ? "threads" : "auto", 1, 1, SIZE);
    CHECK((other == engine) == (strcmp(engine->ops->name, "threads") == 0));
    dr_engine_cache_give(other);
    dr_thread_pool_release();
}

/* What has failed is not handed on, and what somebody has not given back neither. */
static void only_what_is_as_new(void) {
    static const struct dr_fault faults[] = {
        {.call = "uring_submit", .nth = 1, .err = EBADR, .warm = true},
        {.call = "uring_wait", .nth = 1, .err = EBADF, .warm = true},
        {.call = "uring_result", .nth = 1, .err = EIO, .warm = true},
        {.call = "pwrite", .nth = 1, .err = EIO, .warm = true},
    };
    int fd = open_file();
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        bool is_uring = strncmp(faults[i].call, "uring", 5) == 0;
        if (is_uring && !sample_has_uring())
            continue;
        start_afresh();
        struct dr_engine *engine = take(methods[is_uring], 2, 2, SIZE);
        dr_fault_arm(&faults[i]);
        CHECK_INT(use(engine, fd), <, 0);
        CHECK_INT(dr_fault_disarm(), >, 0);
        dr_engine_cache_give(engine);
        CHECK_EQ(dr_engine_cache_amount().engines, 0);
    }
    start_afresh();
    struct dr_engine *engine = take("threads", 2, 2, SIZE);
    CHECK(dr_engine_take(engine));
    dr_engine_cache_give(engine);
    CHECK_EQ(dr_engine_cache_amount().engines, 0);
    close(fd);
}

/* What is in flight is waited for, and is none of the next one's. */
static void nothing_in_flight_is_handed_on(void) {
    int fds[2];
    CHECK_EQ(pipe(fds), 0);
    int fd = open_file();
    for (size_t m = 0; m < method_count(); m++) {
        start_afresh();
        struct dr_engine *engine = take(methods[m], 2, 2, SIZE);
        for (int i = 0; i < 2; i++) {
            DR_NEW_ERROR(error);
            struct dr_request *request = dr_engine_take(engine);
            *request = (struct dr_request){.op = DR_WRITE,
                                           .state = request->state,
                                           .fd = fd,
                                           .buffer = request->buffer,
                                           .data = request->data,
                                           .size = SIZE,
                                           .needed = SIZE,
                                           .path = "block",
                                           .user = fds};
            CHECK_OK(dr_engine_submit(engine, request, &error), &error);
        }
        dr_engine_cache_give(engine);
        CHECK(take(methods[m], 2, 2, SIZE) == engine);
        for (int i = 0; i < 2; i++)
            CHECK(!dr_engine_take(engine)->user);
        dr_engine_close(engine);
    }
    close(fd);
    close(fds[0]);
    close(fds[1]);
}

static void bounded(void) {
    enum { MORE = DR_CACHED_ENGINES + 3 };
    struct dr_engine *engines[MORE];
    start_afresh();
    for (int i = 0; i < MORE; i++)
        engines[i] = take("threads", 1, 1, SIZE);
    for (int i = 0; i < MORE; i++)
        dr_engine_cache_give(engines[i]);
    CHECK_EQ(dr_engine_cache_amount().engines, DR_CACHED_ENGINES);
    for (int i = 0; i < 5; i++)
        engines[i] = take("threads", 4, 4, 4 * SIZE);
    for (int i = 0; i < 5; i++) {
        dr_engine_cache_give(engines[i]);
        CHECK_INT(dr_engine_cache_amount().bytes, <=, DR_CACHED_BYTES);
    }
    CHECK_EQ(dr_engine_cache_amount().engines, 4); /* the oldest have gone for them */
    dr_engine_cache_give(take("threads", 17, 17, 4 * SIZE));
    CHECK_EQ(dr_engine_cache_amount().engines, 4); /* too large to be kept at all */
    dr_thread_pool_release();
}

/* Jobs that all run at once, so that each has a thread. */
struct together {
    pthread_barrier_t barrier;
    atomic_uint left;
};

static void meet(void *argument) {
    struct together *together = argument;
    pthread_barrier_wait(&together->barrier);
    atomic_fetch_sub(&together->left, 1);
}

static void run_together(unsigned count) {
    struct together together;
    pthread_barrier_init(&together.barrier, NULL, count);
    atomic_init(&together.left, count);
    for (unsigned i = 0; i < count; i++)
        CHECK_EQ(dr_thread_pool_run(meet, &together), 0);
    while (atomic_load(&together.left) > 0)
        usleep(100);
    pthread_barrier_destroy(&together.barrier);
}

static unsigned threads_of_process(void) {
    unsigned count = 0;
    DIR *dir = opendir("/proc/self/task");
    CHECK(dir);
    for (const struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

static void threads_are_kept(void) {
    dr_thread_pool_release();
    unsigned before = threads_of_process();
    for (int round = 0; round < 20; round++) {
        run_together(4);
        while (dr_thread_pool_idle() < 4)
            usleep(100);
    }
    CHECK_EQ(dr_thread_pool_idle(), 4);
    CHECK_INT(threads_of_process(), <=, before + 4);
    run_together(DR_IDLE_THREADS + 10);
    while (threads_of_process() > before + DR_IDLE_THREADS)
        usleep(100);
    CHECK_EQ(dr_thread_pool_idle(), DR_IDLE_THREADS);
    dr_thread_pool_release();
    while (threads_of_process() > before) /* one that was joined may be seen for a moment */
        usleep(100);
}

/* A signal to the process is the program's: no kept thread takes it from one that waits for it. */
static void signals_are_not_taken(void) {
    sigset_t blocked, before;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    start_afresh();
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    kill(getpid(), SIGUSR1); /* it would end the process */
    int got = 0;
    CHECK_EQ(sigwait(&blocked, &got), 0);
    CHECK_EQ(got, SIGUSR1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void gone_after_a_while(void) {
    dr_thread_pool_release();
    unsigned before = threads_of_process();
    int descriptors = check_open_descriptors();
    dr_thread_pool_set_idle_ms(50);
    for (size_t m = 0; m < method_count(); m++) {
        run_together(3);
        for (int i = 0; i < 3; i++)
            dr_engine_cache_give(take(methods[m], 1, 1, SIZE));
        while (dr_engine_cache_amount().engines + dr_thread_pool_idle() > 0)
            usleep(1000);
        while (threads_of_process() > before)
            usleep(100);
    }
    dr_engine_cache_give(take("threads", 1, 1, SIZE)); /* with no thread yet: one is begun, which lets go of it */
    while (dr_engine_cache_amount().engines + dr_thread_pool_idle() > 0)
        usleep(1000);
    while (threads_of_process() > before)
        usleep(100);
    dr_thread_pool_set_idle_ms(DR_IDLE_MS);
    CHECK_EQ(check_open_descriptors(), descriptors);
}

/* An engine that was given back later than the last thread had work. */
static void the_last_thread_waits(void) {
    dr_thread_pool_release();
    dr_thread_pool_set_idle_ms(300);
    struct dr_engine *engine = take("threads", 1, 1, SIZE);
    run_together(1);
    usleep(200000);
    dr_engine_cache_give(engine);
    usleep(200000);
    if (dr_engine_cache_amount().engines > 0) /* else it was a busy machine's */
        CHECK_EQ(dr_thread_pool_idle(), 1);
    while (dr_engine_cache_amount().engines + dr_thread_pool_idle() > 0)
        usleep(1000);
    dr_thread_pool_set_idle_ms(DR_IDLE_MS);
}

static int descriptors_of_child(void) {
    int count = -1;
    DIR *dir = opendir("/proc/self/fd");
    for (const struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

static void child_leaves_it_alone(void) {
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded && strstr(preloaded, "vgpreload")) {
        check_skip("valgrind takes the threads that a child has not got for lost memory");
        return;
    }
    for (size_t m = 0; m < method_count(); m++) {
        int fd = open_file(), before = check_open_descriptors();
        start_afresh();
        struct dr_engine *first = take(methods[m], 2, 2, SIZE), *second = take(methods[m], 2, 2, SIZE);
        CHECK_EQ(use(first, fd), 0);
        dr_engine_cache_give(first);
        dr_engine_cache_give(second);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            bool good = dr_engine_cache_amount().engines == 0 && dr_thread_pool_idle() == 0;
            good = good && descriptors_of_child() == before;
#ifndef __SANITIZE_THREAD__ /* which cannot start threads in such a child */
            start_afresh();
            struct dr_engine *own = take(methods[m], 2, 2, SIZE);
            good = good && use(own, fd) == 0;
            dr_engine_cache_give(own);
            dr_thread_pool_release();
#endif
            _exit(good ? 0 : 1);
        }
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
        CHECK(take(methods[m], 2, 2, SIZE) == second);
        CHECK_EQ(use(second, fd), 0); /* its buffers are still registered */
        CHECK(take(methods[m], 2, 2, SIZE) == first);
        CHECK_EQ(use(first, fd), 0);
        dr_engine_cache_give(first);
        dr_engine_cache_give(second);
        close(fd);
    }
    dr_thread_pool_release();
}

/* Many threads take, use, and give at once, while things go for their age. */
static void *take_and_give(void *argument) {
    const char *method = argument;
    int fd = open("/dev/null", O_WRONLY);
    for (int i = 0; i < 200; i++) {
        struct dr_engine *engine = take(method, 1 + (unsigned)i % 2, 2, SIZE);
        CHECK_EQ(use(engine, fd), 0);
        dr_engine_cache_give(engine);
        if (i % 50 == 49)
            run_together(2);
        if (i % 100 == 99)
            dr_thread_pool_release();
    }
    close(fd);
    return NULL;
}

static void many_at_once(void) {
    dr_thread_pool_set_idle_ms(1);
    for (size_t m = 0; m < method_count(); m++) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, take_and_give, (void *)(uintptr_t)methods[m]), 0);
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
    }
    dr_thread_pool_set_idle_ms(DR_IDLE_MS);
    dr_thread_pool_release();
}

/* Calls that set up are made for the first file, and for none after it. */
static void of_two_files_one_is_set_up(void) {
    static const struct dr_control never;
    const char *const calls[] = {"map", "uring_init", "uring_register"};
    struct dr_options options = {.engine = "auto",
                                 .direct = DR_DIRECT_AUTO,
                                 .queue_depth = 2,
                                 .block_size = SIZE,
                                 .workers = 2,
                                 .checksum = true};
    uint8_t *ones = check_alloc(5000000);
    memset(ones, 0xff, 5000000);
    dr_thread_pool_release();
    for (int round = 0; round < 6; round++) {
        DR_NEW_ERROR(error);
        struct dr_writer *writer;
        struct dr_placed placed;
        const struct dr_source source = {.data = ones, .size = round ? 10 : 5000000, .total = round ? 10 : 5000000};
        unlink(check_path("f"));
        if (round > 0)
            dr_fault_arm(&(struct dr_fault){.call = calls[round % 3], .warm = true});
        CHECK_OK(dr_writer_open(&writer, check_dir, "f", 5000000, &options, &error), &error);
        CHECK_OK(dr_writer_write(writer, &source, 1, &placed, &never, &error), &error);
        CHECK_OK(dr_writer_finish(writer, NULL, &never, &error), &error);
        dr_writer_close(writer);
        if (round > 0)
            CHECK_EQ(dr_fault_disarm(), 0);
        struct stat st;
        CHECK_EQ(stat(check_path("f"), &st), 0);
        CHECK_EQ(st.st_size, source.size);
    }
    free(ones);
    dr_thread_pool_release();
}

CHECK_MAIN({"the_same_again", the_same_again}, {"auto_takes_its_own", auto_takes_its_own},
           {"only_what_is_as_new", only_what_is_as_new},
           {"nothing_in_flight_is_handed_on", nothing_in_flight_is_handed_on}, {"bounded", bounded},
           {"threads_are_kept", threads_are_kept}, {"signals_are_not_taken", signals_are_not_taken},
           {"gone_after_a_while", gone_after_a_while}, {"the_last_thread_waits", the_last_thread_waits},
           {"child_leaves_it_alone", child_leaves_it_alone}, {"many_at_once", many_at_once},
           {"of_two_files_one_is_set_up", of_two_files_one_is_set_up})
