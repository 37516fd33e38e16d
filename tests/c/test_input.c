/*
 * Which files a load opens: those that reads refer to, once, and never more at
 * a time than it says; and what happens to files that change their place.
 */
#include "sample.h"

#include "data/load_plan.h"
#include "io/input.h"
#include "io/sys.h"
#include "io/sys_fault.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/resource.h>

enum { FILES = 600, EACH = 4096 };

static const struct dr_control never;
static char texts[FILES][16];
static const char *names[FILES];

static struct dr_options way(unsigned n) {
    return (struct dr_options){.engine = n % 2 && sample_has_uring() ? "uring" : "threads",
                               .direct = n / 2 % 2 ? DR_DIRECT_AUTO : DR_DIRECT_OFF,
                               .queue_depth = 16,
                               .block_size = 1 << 20,
                               .workers = 1 + n / 2 % 2,
                               .checksum = true};
}

/* Files of 4 KiB, each of a byte of its own; durable, so that they can leave the page cache. */
static void make_files(void) {
    uint8_t data[EACH];
    if (names[0])
        return;
    for (int i = 0; i < FILES; i++) {
        snprintf(texts[i], sizeof texts[i], "file%d", i);
        names[i] = texts[i];
        memset(data, i % 251, EACH);
        check_write_file(names[i], data, EACH);
    }
    sync();
}

static void forget_cached(void) {
    for (int i = 0; i < FILES; i++) {
        int fd = open(check_path(names[i]), O_RDONLY);
        if (fd >= 0) {
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            close(fd);
        }
    }
}

static struct dr_read read_of(size_t file, const int64_t *size, uint8_t *memory) {
    static const int64_t zero = 0, one = 1;
    return (struct dr_read){.file = file,
                            .payload_size = EACH,
                            .chunk = {dr_dtype_by_name("uint8"), 1, size},
                            .offsets = &zero,
                            .lengths = size,
                            .memory = memory,
                            .strides = &one};
}

/* Loads all of files [from, to) and checks what came. */
static int load(struct dr_input *input, size_t from, size_t to, const struct dr_options *options,
                struct dr_error *error) {
    static uint8_t memory[FILES][EACH];
    static struct dr_read reads[FILES];
    const int64_t size = EACH;
    struct dr_stream_stats stats;
    for (size_t i = from; i < to; i++)
        reads[i] = read_of(i, &size, memory[i]);
    memset(memory, 0xff, sizeof memory);
    dr_error_clear(error);
    int rc = dr_load(input, reads + from, to - from, options, &never, &stats, error);
    for (size_t i = from; i < to && rc == 0; i++)
        CHECK(memory[i][0] == i % 251 && memory[i][EACH - 1] == i % 251);
    return rc;
}

static uint64_t opens_of(struct dr_input *input, size_t from, size_t to, const struct dr_options *options) {
    struct dr_error error;
    dr_fault_arm(&(struct dr_fault){.call = "open_below"});
    int rc = load(input, from, to, options, &error);
    uint64_t opens = dr_fault_disarm();
    CHECK_OK(rc, &error);
    return opens;
}

static void begin(struct dr_input *input) {
    DR_NEW_ERROR(error);
    CHECK_OK(dr_input_init(input, check_dir, names, FILES, &error), &error);
}

static void only_what_is_needed(void) {
    make_files();
    for (unsigned n = 0; n < 4; n++) {
        const struct dr_options options = way(n);
        const uint64_t each = options.direct == DR_DIRECT_OFF ? 1 : 2;
        struct dr_input input;
        int before = check_open_descriptors();
        begin(&input);
        forget_cached();
        CHECK_INT(opens_of(&input, 5, 6, &options), <=, each);
        CHECK_INT(opens_of(&input, 100, 120, &options), <=, 20 * each);
        CHECK_EQ(opens_of(&input, 5, 6, &options), 0);
        CHECK_EQ(opens_of(&input, 100, 120, &options), 0);
        dr_input_destroy(&input);
        begin(&input); /* now they are in the page cache */
        CHECK_INT(opens_of(&input, 100, 120, &options), <=, 20 * each);
        dr_input_destroy(&input);
        CHECK_EQ(check_open_descriptors(), before);
    }
}

static atomic_int by_caller, by_others;
static pthread_t caller;

static ssize_t noted_pread(int fd, void *data, size_t size, off_t offset) {
    atomic_fetch_add(pthread_equal(pthread_self(), caller) ? &by_caller : &by_others, 1);
    return dr_sys_real.pread(fd, data, size, offset);
}

static atomic_int asked;

static int64_t cached_and_asked(int fd, off_t offset, size_t size) {
    atomic_fetch_add(&asked, 1);
    return dr_sys_real.cached(fd, offset, size);
}

static void a_little_that_is_cached_needs_no_thread(void) {
    make_files();
    caller = pthread_self();
    for (unsigned n = 0; n < 4; n++)
        for (int count = 3; count < 100; count += 90) {
            const struct dr_options options = way(n);
            struct dr_input input;
            struct dr_error error;
            begin(&input);
            CHECK_OK(load(&input, 0, (size_t)count, &options, &error), &error); /* now they are in the page cache */
            dr_sys.pread = noted_pread;
            dr_sys.cached = cached_and_asked;
            by_caller = by_others = asked = 0;
            CHECK_OK(load(&input, 0, (size_t)count, &options, &error), &error);
            dr_sys = dr_sys_real;
            CHECK_EQ(by_caller, count == 3 ? count : 0);
            CHECK_EQ(by_others, count == 3 ? 0 : count);
            CHECK_EQ(asked, count); /* each once */
            dr_input_destroy(&input);
        }
}

static void one_that_is_gone(void) {
    make_files();
    const struct dr_options options = way(0);
    struct dr_input input;
    struct dr_error error;
    CHECK_EQ(rename(check_path("file7"), check_path("away")), 0);
    begin(&input);
    CHECK_OK(load(&input, 10, 20, &options, &error), &error);
    CHECK_FAILS(load(&input, 0, 20, &options, &error), &error, ENOENT);
    CHECK_EQ(error.item, 7);
    CHECK(strcmp(error.path, check_path("file7")) == 0);
    CHECK_EQ(rename(check_path("away"), check_path("file7")), 0);
    CHECK_OK(load(&input, 0, 20, &options, &error), &error); /* it was not looked at before */
    dr_input_destroy(&input);
}

/* Descriptors that are open while blocks are read, at most. */
static atomic_int most_open;

static int64_t cached_and_counted(int fd, off_t offset, size_t size) {
    (void)fd;
    (void)offset;
    (void)size;
    int open = check_open_descriptors(), most = atomic_load(&most_open);
    while (open > most && !atomic_compare_exchange_weak(&most_open, &most, open))
        ;
    return 0;
}

static struct rlimit limit_descriptors(rlim_t most) {
    struct rlimit before, limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    limit = (struct rlimit){most, before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    return before;
}

/* Six hundred files under a limit of three hundred descriptors, of which half may be kept. */
static void many_files(void) {
    enum { LIMIT = 300, KEPT = LIMIT / 2 };
    make_files();
    struct rlimit before = limit_descriptors(LIMIT);
    for (unsigned n = 0; n < 4; n++) {
        const struct dr_options options = way(n);
        const int each = options.direct == DR_DIRECT_OFF ? 1 : 2;
        struct dr_input input;
        struct dr_error error;
        begin(&input);
        int open = check_open_descriptors();
        most_open = 0;
        dr_sys.cached = cached_and_counted;
        CHECK_OK(load(&input, 0, FILES, &options, &error), &error);
        CHECK_OK(load(&input, 0, FILES, &options, &error), &error);
        dr_sys = dr_sys_real;
        CHECK_INT(most_open, >, open + KEPT / 2);
        CHECK_INT(most_open, <=, open + KEPT + each * (int)options.queue_depth + 4); /* and two rings */
        CHECK_INT(check_open_descriptors(), <=, open + KEPT);
        dr_input_destroy(&input);
    }
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

/* Where there is room for the descriptors of all of them, each is opened once, and once more to be read directly. */
static void each_once(void) {
    make_files();
    struct rlimit before = limit_descriptors(2 * FILES + 100);
    for (unsigned n = 0; n < 4; n++) {
        const struct dr_options options = way(n);
        struct dr_input input;
        begin(&input);
        forget_cached();
        uint64_t opens = opens_of(&input, 0, FILES, &options);
        CHECK_INT(opens, >=, FILES);
        CHECK_INT(opens, <=, options.direct == DR_DIRECT_OFF ? FILES : 2 * FILES);
        dr_input_destroy(&input);
        begin(&input); /* now they are in the page cache, most of them */
        if (options.direct == DR_DIRECT_OFF)
            CHECK_EQ(opens_of(&input, 0, FILES, &options), FILES);
        dr_input_destroy(&input);
    }
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

/* A handful of descriptors, fewer than blocks may be in flight: what is kept goes, and blocks wait for each other. */
static void hardly_any_descriptors(void) {
    make_files();
    for (int spare = 5; spare <= 14; spare += 3)
        for (unsigned n = 0; n < 4; n++) {
            const struct dr_options options = way(n);
            struct dr_input input;
            struct dr_error error;
            begin(&input);
            forget_cached();
            dr_thread_pool_release();
            int lowest = open(check_dir, O_RDONLY);
            close(lowest);
            struct rlimit before = limit_descriptors((rlim_t)(lowest + spare));
            alarm(60);
            CHECK_OK(load(&input, 0, FILES, &options, &error), &error);
            CHECK_OK(load(&input, 0, FILES, &options, &error), &error);
            CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
            dr_input_destroy(&input);
        }
}

static atomic_bool scarce;
static atomic_int attempts;

static int scarce_open(int dirfd, const char *name, int flags, mode_t mode) {
    atomic_fetch_add(&attempts, 1);
    return atomic_load(&scarce) ? -EMFILE : dr_sys_real.open_below(dirfd, name, flags, mode);
}

static void *hold_patiently(void *context) {
    struct dr_input *input = context;
    DR_NEW_ERROR(error);
    int fd;
    CHECK_OK(dr_input_hold(input, 1, 1, DR_INPUT_WAIT, &fd, &error), &error);
    dr_input_release(input, 1);
    return NULL;
}

/* Who waits for a descriptor does not stop another, who has some in use, from finding out that there is none. */
static void who_waits_stops_nobody(void) {
    make_files();
    struct dr_input input;
    struct dr_error error;
    pthread_t thread;
    int fd;
    begin(&input);
    input.most = 0; /* nothing is kept */
    dr_error_clear(&error);
    for (size_t i = 0; i < 2; i++)
        CHECK_OK(dr_input_look(&input, i, &error), &error);
    CHECK_OK(dr_input_hold(&input, 0, 1, DR_INPUT_TRY, &fd, &error), &error);
    alarm(30);
    scarce = true;
    attempts = 0;
    dr_sys.open_below = scarce_open;
    CHECK_EQ(pthread_create(&thread, NULL, hold_patiently, &input), 0);
    while (atomic_load(&attempts) == 0)
        usleep(100);
    for (int i = 0; i < 3; i++) {
        dr_error_clear(&error);
        CHECK_FAILS(dr_input_hold(&input, 1, 1, DR_INPUT_TRY, &fd, &error), &error, EMFILE);
    }
    scarce = false;
    dr_input_release(&input, 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    dr_sys = dr_sys_real;
    CHECK_EQ(input.busy, 0);
    dr_input_destroy(&input);
}

/* None at all: that is an error, which nobody waits for. */
static void no_descriptor(void) {
    make_files();
    for (unsigned n = 0; n < 4; n++) {
        const struct dr_options options = way(n);
        struct dr_input input;
        struct dr_error error;
        begin(&input);
        alarm(30);
        dr_fault_arm(&(struct dr_fault){.call = "open_below", .nth = 2, .err = EMFILE, .sticky = true});
        CHECK_FAILS(load(&input, 0, 20, &options, &error), &error, EMFILE);
        dr_fault_disarm();
        CHECK(strstr(dr_error_cure(&error), "ulimit -n"));
        CHECK_OK(load(&input, 0, 20, &options, &error), &error);
        dr_input_destroy(&input);
    }
}

/* ---- several at once ---- */

static atomic_int opening, most_opening;

/* Slow in the calling thread, so that others begin; these wait until there are two. */
static int slow_open(int dirfd, const char *name, int flags, mode_t mode) {
    if (pthread_equal(pthread_self(), caller)) {
        usleep(5000);
    } else {
        int now = atomic_fetch_add(&opening, 1) + 1, most = atomic_load(&most_opening);
        while (now > most && !atomic_compare_exchange_weak(&most_opening, &most, now))
            ;
        while (atomic_load(&most_opening) < 2)
            usleep(100);
        atomic_fetch_sub(&opening, 1);
    }
    return dr_sys_real.open_below(dirfd, name, flags, mode);
}

static void slow_opens_are_made_at_once(void) {
    make_files();
    caller = pthread_self();
    for (unsigned n = 0; n < 4; n++) {
        const struct dr_options options = way(n);
        struct dr_input input;
        struct dr_error error;
        begin(&input);
        alarm(60);
        opening = most_opening = 0;
        dr_sys.open_below = slow_open;
        CHECK_OK(load(&input, 0, 50, &options, &error), &error);
        dr_sys = dr_sys_real;
        CHECK_INT(most_opening, >=, 2);
        dr_input_destroy(&input);
    }
}

/* Threads that want the same file open it once, and wait for who does. */
static void *hold_all(void *context) {
    struct dr_input *input = context;
    DR_NEW_ERROR(error);
    for (size_t i = 0; i < 100; i++) {
        int fd;
        CHECK_OK(dr_input_look(input, i, &error), &error);
        CHECK_OK(dr_input_hold(input, i, 2, DR_INPUT_WAIT, &fd, &error), &error);
        uint8_t byte = 0;
        CHECK_EQ(pread(fd, &byte, 1, 0), 1);
        CHECK_EQ(byte, i % 251);
        dr_input_release(input, i);
        dr_input_release(input, i);
    }
    return NULL;
}

static void one_opens_for_all(void) {
    enum { THREADS = 8 };
    make_files();
    struct dr_input input;
    pthread_t threads[THREADS];
    begin(&input);
    dr_fault_arm(&(struct dr_fault){.call = "open_below"});
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, hold_all, &input), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(dr_fault_disarm(), 100);
    CHECK_EQ(input.busy, 0);
    dr_input_destroy(&input);
}

/* ---- files that change their place after they were looked at ---- */

static void fails_to_hold(struct dr_input *input, size_t file, const char *message) {
    DR_NEW_ERROR(error);
    int fd;
    CHECK_FAILS(dr_input_hold(input, file, 1, DR_INPUT_TRY, &fd, &error), &error, EBADMSG);
    CHECK(strstr(error.detail, message));
}

static void look_at_all(struct dr_input *input) {
    DR_NEW_ERROR(error);
    for (size_t i = 0; i < FILES; i++)
        CHECK_OK(dr_input_look(input, i, &error), &error);
}

static void put_back(const char *name) { CHECK_EQ(rename(check_path("away"), check_path(name)), 0); }

static void others_in_its_place(void) {
    make_files();
    struct rlimit before = limit_descriptors(100); /* so that the last is not kept */
    struct dr_input input;
    struct dr_error error;
    int fd;
    begin(&input);
    look_at_all(&input);
    alarm(10);
    CHECK_EQ(rename(check_path("file599"), check_path("away")), 0);
    CHECK_EQ(mkfifo(check_path("file599"), 0666), 0);
    fails_to_hold(&input, 599, "not a regular file");
    CHECK_EQ(unlink(check_path("file599")), 0);
    check_write_file("file599", "another", 7);
    fails_to_hold(&input, 599, "another file has taken its place");
    put_back("file599");
    dr_error_clear(&error);
    CHECK_OK(dr_input_hold(&input, 599, 1, DR_INPUT_TRY, &fd, &error), &error);
    dr_input_release(&input, 599);
    dr_input_destroy(&input);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

/*
 * One that is kept stays readable when its name is gone, as after an overwriting save; not when O_DIRECT must be had.
 */
static void removed_meanwhile(void) {
    make_files();
    for (unsigned n = 0; n < 4; n++) {
        struct dr_options options = way(n);
        struct dr_input input;
        struct dr_error error;
        begin(&input);
        look_at_all(&input);
        forget_cached();
        CHECK_EQ(rename(check_path("file3"), check_path("away")), 0);
        CHECK_OK(load(&input, 3, 4, &options, &error), &error);
        put_back("file3");
        dr_input_destroy(&input);
    }
    struct dr_options options = way(0);
    struct dr_input input;
    struct dr_error error;
    options.direct = DR_DIRECT_ON;
    begin(&input);
    look_at_all(&input);
    CHECK_EQ(rename(check_path("file3"), check_path("away")), 0);
    CHECK_FAILS(load(&input, 3, 4, &options, &error), &error, ENOENT);
    put_back("file3");
    dr_input_destroy(&input);
}

/* ---- many small reads ---- */

enum { SLICES = 512, STRIDE = 64 << 10 };

static atomic_uint submits, in_flight;

static int counted_submit(struct io_uring *ring) {
    int rc = dr_sys_real.uring_submit(ring);
    atomic_fetch_add(&submits, 1);
    if (rc > 0)
        atomic_fetch_add(&in_flight, (unsigned)rc);
    return rc;
}

/* When the worker waits, all that it has submitted is there: so it has to submit as much together. */
static int wait_for_all(struct io_uring *ring, struct io_uring_cqe **cqe, unsigned timeout_ms) {
    while (io_uring_cq_ready(ring) < atomic_load(&in_flight))
        usleep(100);
    int rc = dr_sys_real.uring_wait(ring, cqe, timeout_ms);
    if (rc == 0)
        atomic_fetch_sub(&in_flight, 1);
    return rc;
}

/* Loads 4 KiB out of each 64 KiB: how often it asks for the page cache, and submits. */
static void load_slices(enum dr_direct direct, bool cached) {
    static uint8_t memory[SLICES][EACH];
    static struct dr_read reads[SLICES];
    const int64_t size = EACH;
    const char *const name = "slices";
    struct dr_options options = way(1);
    struct dr_stream_stats stats;
    struct dr_input input;
    DR_NEW_ERROR(error);
    options.direct = direct;
    options.workers = 1;
    CHECK_OK(dr_input_init(&input, check_dir, &name, 1, &error), &error);
    for (size_t i = 0; i < SLICES; i++) {
        reads[i] = read_of(0, &size, memory[i]);
        reads[i].payload_offset = i * STRIDE;
    }
    memset(memory, 0xff, sizeof memory);
    asked = 0;
    submits = in_flight = 0;
    dr_thread_pool_release();
    dr_sys.cached = cached_and_asked;
    dr_sys.uring_submit = counted_submit;
    dr_sys.uring_wait = wait_for_all;
    CHECK_OK(dr_load(&input, reads, SLICES, &options, &never, &stats, &error), &error);
    dr_sys = dr_sys_real;
    for (size_t i = 0; i < SLICES; i++)
        CHECK(memory[i][0] == i % 251 && memory[i][EACH - 1] == i % 251);
    CHECK_INT(asked, <=, SLICES / (int)options.queue_depth);
    if (cached)
        CHECK_EQ(stats.cached_bytes, SLICES * EACH);
    else if (strcmp(stats.engine, "uring") == 0 && stats.cached_bytes == 0)
        CHECK_INT(submits, <=, SLICES / options.queue_depth);
    dr_input_destroy(&input);
}

static void small_blocks_go_together(void) {
    uint8_t *data = check_alloc(SLICES * STRIDE);
    for (size_t i = 0; i < SLICES; i++)
        memset(data + i * STRIDE, (int)(i % 251), EACH);
    check_write_file("slices", data, SLICES * STRIDE);
    free(data);
    load_slices(DR_DIRECT_OFF, true);
    int fd = open(check_path("slices"), O_RDONLY);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    load_slices(DR_DIRECT_AUTO, false);
}

/* ---- many reads of the same bytes ---- */

/*
 * Of a read of a whole file and many small ones at its beginning, each block sees those that lie in it, and no others.
 */
static void many_in_one_block(void) {
    enum { SMALL = 1000, BLOCKS = 64, BLOCK = 1 << 20 };
    static const int64_t whole = BLOCKS * BLOCK, four = 4;
    static uint8_t memory[1];
    static struct dr_read reads[SMALL + 1];
    const char *const name = "large";
    struct dr_options options = way(0);
    struct dr_load_plan plan = {0};
    struct dr_input input;
    struct dr_error error;
    int fd = open(check_path(name), O_RDWR | O_CREAT, 0666);
    CHECK_EQ(ftruncate(fd, whole), 0);
    close(fd);
    for (size_t i = 0; i <= SMALL; i++) {
        reads[i] = read_of(0, i ? &four : &whole, memory);
        reads[i].payload_size = i ? 4 : BLOCKS * BLOCK;
    }
    dr_error_clear(&error);
    CHECK_OK(dr_input_init(&input, check_dir, &name, 1, &error), &error);
    CHECK_OK(dr_load_plan_init(&plan, &input, reads, SMALL + 1, &options, &never, &error), &error);
    CHECK_EQ(plan.block_count, BLOCKS);
    CHECK_EQ(plan.extent_count, SMALL + BLOCKS);
    for (size_t i = 0, next = 0; i < BLOCKS; i++) {
        const struct dr_block *block = &plan.blocks[i];
        CHECK_EQ(block->first, next);
        for (; next < plan.extent_count && plan.extents[next].lo < block->hi; next++)
            CHECK(plan.extents[next].lo >= block->lo && plan.extents[next].hi <= block->hi);
        CHECK_EQ(next - block->first, i ? 1 : SMALL + 1);
    }
    dr_load_plan_destroy(&plan);
    dr_input_destroy(&input);
}

CHECK_MAIN({"only_what_is_needed", only_what_is_needed},
           {"a_little_that_is_cached_needs_no_thread", a_little_that_is_cached_needs_no_thread},
           {"one_that_is_gone", one_that_is_gone}, {"many_files", many_files}, {"each_once", each_once},
           {"hardly_any_descriptors", hardly_any_descriptors}, {"who_waits_stops_nobody", who_waits_stops_nobody},
           {"no_descriptor", no_descriptor}, {"slow_opens_are_made_at_once", slow_opens_are_made_at_once},
           {"one_opens_for_all", one_opens_for_all}, {"small_blocks_go_together", small_blocks_go_together},
           {"others_in_its_place", others_in_its_place}, {"removed_meanwhile", removed_meanwhile},
           {"many_in_one_block", many_in_one_block})
