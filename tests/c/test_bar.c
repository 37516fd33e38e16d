/* The progress bar: its lines for all widths and numbers, its thread, and the slots that it reads. */
#include "check.h"
#include "io/sys.h"
#include "io/sys_fault.h"
#include "tools/bar.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* ---- lines ---- */

static struct dr_bar_view view(uint64_t done, uint64_t total, int columns) {
    return (struct dr_bar_view){
        .label = "saving", .done = done, .total = total, .rate = 1250000000, .ms = 3210, .columns = columns};
}

static const char *line_of(struct dr_bar_view of) {
    static char out[DR_BAR_LINE];
    memset(out, 'x', sizeof out);
    dr_bar_line(&of, out);
    return out;
}

static const char *last_of(struct dr_bar_view of) {
    static char out[DR_BAR_LINE];
    memset(out, 'x', sizeof out);
    dr_bar_last(&of, out);
    return out;
}

#define CHECK_LINE(line, expected) \
    do { \
        const char *check_line = (line); \
        if (strcmp(check_line, expected) != 0) \
            CHECK_FAIL("'%s' is not '%s'", check_line, expected); \
    } while (0)

/* Columns that a line takes: characters, without escapes. */
static int columns_of(const char *line) {
    int columns = 0;
    for (; *line; line++) {
        if (*line == '\x1b') {
            line = strchr(line, 'm');
            CHECK(line);
        } else {
            columns += ((unsigned char)*line & 0xc0) != 0x80;
        }
    }
    return columns;
}

static void lines_look_so(void) {
    const uint64_t gib = (uint64_t)1 << 30;
    CHECK_LINE(line_of(view(gib, 4 * gib, 80)),
               "saving  [#######----------------------]  25%  1.0/4.0 GiB  1.25 GB/s  0:03 left");
    CHECK_LINE(line_of(view(0, 4 * gib, 60)), "saving  [---------]   0%  0.0/4.0 GiB  1.25 GB/s  0:04 left");
    CHECK_LINE(line_of(view(4 * gib, 4 * gib, 50)), "saving  [##########] 100%  4.0/4.0 GiB  1.25 GB/s");
    CHECK_LINE(line_of(view(gib, 4 * gib, 12)), "saving  25%");
    CHECK_LINE(line_of(view(gib, 4 * gib, 10)), "savi  25%");
    CHECK_LINE(line_of(view(gib, 4 * gib, 6)), "  25%");
    CHECK_LINE(line_of(view(gib, 4 * gib, 5)), "");
    struct dr_bar_view blocks = view(5, 16, 40);
    blocks.flags = DR_BAR_UNICODE;
    CHECK_LINE(line_of(blocks), "saving  ▕████▋          ▏  31%   5/16 B");
    struct dr_bar_view lines = view(gib, 2 * gib, 36);
    lines.flags = DR_BAR_UNICODE | DR_BAR_COLOUR;
    CHECK_LINE(line_of(lines), "saving  \x1b[36m━━━━╸\x1b[0m\x1b[2m━━━━\x1b[0m  50%  1.0/2.0 GiB");
}

static void last_lines_look_so(void) {
    const uint64_t gib = (uint64_t)1 << 30;
    CHECK_LINE(last_of(view(4 * gib, 4 * gib, 80)), "saving: 4.0 GiB in 3.2 s, 1.33 GB/s");
    CHECK_LINE(last_of(view(gib, 4 * gib, 80)), "saving: 1.0/4.0 GiB in 3.2 s, 334 MB/s");
    CHECK_LINE(last_of(view(4 * gib, 4 * gib, 20)), "saving: 4.0 GiB in ");
    struct dr_bar_view failed = view(gib, 4 * gib, 80);
    failed.failed = true;
    CHECK_LINE(last_of(failed), "saving: stopped at 1.0/4.0 GiB after 3.2 s");
    struct dr_bar_view at_once = view(100, 100, 80);
    at_once.ms = 0;
    CHECK_LINE(last_of(at_once), "saving: 100 B in 0.0 s");
    struct dr_bar_view slow = view(100, 100, 80);
    slow.ms = 3725 * 1000;
    CHECK_LINE(last_of(slow), "saving: 100 B in 1:02:05, 0 B/s");
    struct dr_bar_view fast = view(UINT64_MAX, UINT64_MAX, 80);
    fast.ms = 1;
    CHECK_LINE(last_of(fast), "saving: 15.9 EiB in 0.0 s, 18.4 EB/s");
    slow.ms = 65 * 1000;
    CHECK_LINE(last_of(slow), "saving: 100 B in 1:05, 1 B/s");
}

static void numbers(void) {
    static const struct {
        uint64_t total;
        const char *bytes;
    } sizes[] = {
        {1, "0/1 B "},
        {1023, "511/1023 B "},
        {1024, "0.5/1.0 KiB "},
        {(1 << 20) - 1, "511.9/1023.9 KiB "},
        {(uint64_t)3 << 40, "1.5/3.0 TiB "},
        {UINT64_MAX, "7.9/15.9 EiB "},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        CHECK(strstr(line_of(view(sizes[i].total / 2, sizes[i].total, 200)), sizes[i].bytes));
    static const struct {
        uint64_t rate;
        const char *text;
    } rates[] = {
        {0, "      0 B/s"},
        {999, "    999 B/s"},
        {1000, "  1.00 kB/s"},
        {9999, "  9.99 kB/s"},
        {99999, "  99.9 kB/s"},
        {812345678, "   812 MB/s"},
        {UINT64_MAX, "  18.4 EB/s"},
    };
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        struct dr_bar_view with_rate = view(0, 1000, 200);
        with_rate.rate = rates[i].rate;
        CHECK(strstr(line_of(with_rate), rates[i].text));
    }
}

static void time_left(void) {
    static const struct {
        uint64_t total, rate;
        const char *text;
    } cases[] = {
        {100, 0, "  -:-- left"},     {100, 1, "  1:40 left"},       {100, 99, "  0:02 left"},
        {3725, 1, "  1:02:05 left"}, {359999, 1, "  99:59:59 left"}, {360000, 1, "  -:-- left"},
        {UINT64_MAX, 1, "  -:-- left"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dr_bar_view of = view(0, cases[i].total, 200);
        of.rate = cases[i].rate;
        CHECK(strstr(line_of(of), cases[i].text));
    }
    struct dr_bar_view whole = view(100, 100, 200);
    CHECK(strstr(line_of(whole), "  0:00 left"));
}

static void more_than_all_is_all(void) {
    CHECK(strstr(line_of(view(UINT64_MAX, 10, 80)), " 100%  10/10 B "));
    CHECK_LINE(last_of(view(UINT64_MAX, 10, 80)), "saving: 10 B in 3.2 s, 3 B/s");
    CHECK(strstr(line_of(view(7, 0, 80)), "   0%  0/0 B "));
    CHECK(strstr(line_of(view(UINT64_MAX - 1, UINT64_MAX, 80)), " 99%"));
    CHECK(strstr(line_of(view(UINT64_MAX, UINT64_MAX, 80)), " 100%"));
}

/* Whatever the numbers and the width: within the columns, valid UTF-8, an end, and never narrower than need be. */
static void all_widths(void) {
    static const char *const labels[] = {"", "saving", "prüfe", "one label that is far too long for any of this"};
    struct rng rng = {1};
    for (int columns = -1; columns < 400; columns++) {
        for (unsigned i = 0; i < 64; i++) {
            struct dr_bar_view of = {
                .label = labels[i % 4],
                .done = rng_next(&rng) >> rng_below(&rng, 64),
                .total = rng_next(&rng) >> rng_below(&rng, 64),
                .rate = rng_next(&rng) >> rng_below(&rng, 64),
                .ms = rng_next(&rng) >> rng_below(&rng, 64),
                .columns = columns,
                .flags = (unsigned)rng_below(&rng, 4),
                .failed = rng_below(&rng, 2) == 1,
            };
            int room = (columns > 0 ? columns : 80) - 1;
            CHECK_INT(strlen(line_of(of)), <, DR_BAR_LINE);
            CHECK_INT(columns_of(line_of(of)), <=, room);
            CHECK_INT(columns_of(last_of(of)), <=, room);
            if (room >= 5)
                CHECK(strchr(line_of(of), '%'));
        }
    }
    struct dr_bar_view unknown = view(1, 2, 0);
    CHECK_INT(columns_of(line_of(unknown)), ==, columns_of(line_of(view(1, 2, 80))));
}

static void labels_steer_no_terminal(void) {
    struct dr_bar_view of = view(1, 2, 30);
    of.label = "a\x1b[2J\n\x7fü";
    CHECK(strncmp(line_of(of), "a?[2J??ü", 9) == 0);
    CHECK(strncmp(last_of(of), "a?[2J??ü: ", 11) == 0);
    of.label = "\xc3"; /* half a character */
    CHECK(strncmp(line_of(of), "\xc3 ", 2) == 0);
}

/* ---- slots ---- */

static struct dr_slots *new_slots(size_t count) {
    void *memory = mmap(NULL, dr_slots_size(count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void free_slots(struct dr_slots *slots, size_t count) { munmap(slots, dr_slots_size(count)); }

static void slots_add_up(void) {
    struct dr_slots *slots = new_slots(5);
    struct dr_onlooker onlooker = {slots, 5, 0, 0};
    CHECK(!dr_slots_look(&onlooker).over); /* nobody has joined yet */
    CHECK(dr_slots_claim(slots));
    CHECK(!dr_slots_claim(slots));
    dr_slots_join(slots, 1);
    dr_slots_join(slots, 4);
    struct dr_sums sums = dr_slots_look(&onlooker);
    CHECK_EQ(sums.joined, 2);
    CHECK(!sums.over);
    dr_slots_begin(slots, 1, 100);
    dr_slots_begin(slots, 4, 1000);
    atomic_fetch_add(&slots->slot[1].done, 150); /* more than was planned */
    atomic_fetch_add(&slots->slot[4].done, 10);
    sums = dr_slots_look(&onlooker);
    CHECK_EQ(sums.done, 110);
    CHECK_EQ(sums.total, 1100);
    CHECK_EQ(sums.running, 2);
    dr_slots_end(slots, 1, false);
    CHECK(!dr_slots_look(&onlooker).over);
    dr_slots_end(slots, 4, true);
    sums = dr_slots_look(&onlooker);
    CHECK(sums.over);
    CHECK_EQ(sums.done, 110); /* what failed is not made whole */
    CHECK_EQ(sums.failed, 1);
    free_slots(slots, 5);
}

static void sums_do_not_overflow(void) {
    struct dr_slots *slots = new_slots(2);
    struct dr_onlooker onlooker = {slots, 2, 0, 0};
    for (size_t i = 0; i < 2; i++) {
        dr_slots_join(slots, i);
        dr_slots_begin(slots, i, UINT64_MAX - 5);
        dr_slots_end(slots, i, false);
    }
    CHECK(dr_slots_look(&onlooker).total == UINT64_MAX);
    CHECK(dr_slots_look(&onlooker).done == UINT64_MAX);
    free_slots(slots, 2);
}

/* Who has joined is waited for, but not for ever. */
static void who_joins_has_time_to_begin(void) {
    struct dr_slots *slots = new_slots(2);
    struct dr_onlooker onlooker = {slots, 2, 0, 0};
    dr_slots_join(slots, 0);
    dr_slots_join(slots, 1);
    dr_slots_begin(slots, 0, 1);
    dr_slots_end(slots, 0, false);
    CHECK(!dr_slots_look(&onlooker).over);
    onlooker.busy_ms -= 10000;
    CHECK(dr_slots_look(&onlooker).over);
    dr_slots_begin(slots, 1, 1);
    CHECK(!dr_slots_look(&onlooker).over);
    free_slots(slots, 2);
}

static void a_process_that_is_gone_has_failed(void) {
    struct dr_slots *slots = new_slots(1);
    struct dr_onlooker onlooker = {slots, 1, 0, 0};
    pid_t child = fork();
    if (child == 0) {
        dr_slots_join(slots, 0);
        dr_slots_begin(slots, 0, 7);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, NULL, 0) == child);
    struct dr_sums sums = dr_slots_look(&onlooker);
    CHECK(sums.over);
    CHECK_EQ(sums.failed, 1);
    CHECK_EQ(sums.total, 7);
    free_slots(slots, 1);
}

/* Another process's memory is not believed. */
static void any_memory_is_added_up(void) {
    struct dr_slots *slots = new_slots(64);
    struct rng rng = {2};
    for (int i = 0; i < 100; i++) {
        rng_fill(&rng, slots, dr_slots_size(64));
        for (size_t slot = 0; slot < 64; slot += 2)
            atomic_store(&slots->slot[slot].state, (uint32_t)rng_below(&rng, 6));
        struct dr_onlooker onlooker = {slots, 64, 0, 0};
        struct dr_sums sums = dr_slots_look(&onlooker);
        CHECK(sums.done <= sums.total);
        CHECK_INT(sums.joined + sums.running + sums.ended, <=, 64);
    }
    free_slots(slots, 64);
}

static void *end_soon(void *context) {
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    dr_slots_end(context, 0, false);
    return NULL;
}

static void waiting_ends_at_once(void) {
    struct dr_slots *slots = new_slots(1);
    struct dr_onlooker onlooker = {slots, 1, 0, 0};
    dr_slots_join(slots, 0);
    dr_slots_look(&onlooker);
    pthread_t thread;
    double begin = check_seconds();
    CHECK_EQ(pthread_create(&thread, NULL, end_soon, slots), 0);
    while (!dr_slots_look(&onlooker).over)
        dr_slots_wait(&onlooker, 60000);
    CHECK(check_seconds() - begin < 30);
    pthread_join(thread, NULL);
    begin = check_seconds();
    dr_slots_wait(&onlooker, 30);
    CHECK(check_seconds() - begin < 30);
    free_slots(slots, 1);
}

/* ---- the thread ---- */

struct pipes {
    int in, out;
};

static struct pipes new_pipe(void) {
    int fds[2];
    CHECK_EQ(pipe2(fds, O_CLOEXEC), 0);
    return (struct pipes){fds[0], fds[1]};
}

/* All that was written, when the bar has closed its end. */
static const char *read_all(int fd) {
    static char text[1 << 16];
    size_t size = 0;
    ssize_t n;
    while ((n = read(fd, text + size, sizeof text - 1 - size)) > 0)
        size += (size_t)n;
    text[size] = '\0';
    close(fd);
    return text;
}

static void draws_until_all_have_ended(void) {
    int descriptors = check_open_descriptors();
    struct dr_slots *slots = new_slots(2);
    struct pipes pipes = new_pipe();
    dr_slots_join(slots, 0);
    dr_slots_join(slots, 1);
    dr_slots_begin(slots, 0, 1 << 20);
    dr_slots_begin(slots, 1, 1 << 20);
    struct dr_bar *bar = dr_bar_open(slots, 2, "saving", pipes.out, 0);
    CHECK(bar);
    for (int i = 0; i < 8; i++) {
        nanosleep(&(struct timespec){0, 60000000}, NULL);
        atomic_fetch_add(&slots->slot[i % 2].done, 1 << 18);
    }
    dr_slots_end(slots, 0, false);
    dr_slots_end(slots, 1, false);
    const char *text = read_all(pipes.in); /* ends: the bar has ended by itself */
    CHECK(strncmp(text, "\rsaving  [", 10) == 0);
    CHECK(strstr(text, "/2.0 MiB"));
    CHECK(strncmp(strrchr(text, '\r'), "\rsaving: 2.0 MiB in ", 20) == 0);
    CHECK(text[strlen(text) - 1] == '\n');
    CHECK(strchr(text, '\n') == text + strlen(text) - 1);
    dr_bar_close(bar);
    free_slots(slots, 2);
    CHECK_EQ(check_open_descriptors(), descriptors);
}

static void close_ends_it(void) {
    double seconds = 1;
    for (int try = 0; try < CHECK_TRIES && seconds >= 0.1; try++) {
        struct dr_slots *slots = new_slots(1);
        struct pipes pipes = new_pipe();
        dr_slots_join(slots, 0);
        dr_slots_begin(slots, 0, 100);
        struct dr_bar *bar = dr_bar_open(slots, 1, "saving", pipes.out, 0);
        CHECK(bar);
        nanosleep(&(struct timespec){0, 300000000}, NULL);
        double begin = check_seconds();
        dr_bar_close(bar);
        seconds = check_seconds() - begin;
        CHECK(strstr(read_all(pipes.in), "\rsaving: 0/100 B in 0."));
        free_slots(slots, 1);
    }
    CHECK(seconds < 0.1);
}

static void what_is_over_at_once_is_not_shown(void) {
    struct dr_slots *slots = new_slots(1);
    struct pipes pipes = new_pipe();
    dr_slots_join(slots, 0);
    dr_slots_begin(slots, 0, 100);
    dr_slots_end(slots, 0, false);
    dr_bar_close(dr_bar_open(slots, 1, "saving", pipes.out, 0));
    CHECK_LINE(read_all(pipes.in), "");
    free_slots(slots, 1);
}

/* Nobody reads: the pipe fills up, pictures are lost, and nothing waits. */
static void who_does_not_read_is_not_waited_for(void) {
    struct dr_slots *slots = new_slots(1);
    struct pipes pipes = new_pipe();
    char junk[4096] = {0};
    CHECK(fcntl(pipes.out, F_SETFL, O_NONBLOCK) == 0);
    while (write(pipes.out, junk, sizeof junk) > 0)
        ;
    CHECK(fcntl(pipes.out, F_SETFL, 0) == 0);
    dr_slots_join(slots, 0);
    dr_slots_begin(slots, 0, 100);
    struct dr_bar *bar = dr_bar_open(slots, 1, "saving", pipes.out, 0);
    CHECK(bar);
    nanosleep(&(struct timespec){0, 400000000}, NULL);
    double begin = check_seconds();
    dr_bar_close(bar);
    CHECK(check_seconds() - begin < 10);
    close(pipes.in);
    free_slots(slots, 1);
}

static _Atomic int print_flags;

static ssize_t noting_print(int fd, const void *data, size_t size, int timeout_ms) {
    atomic_store(&print_flags, fcntl(fd, F_GETFL));
    return dr_sys_real.print(fd, data, size, timeout_ms);
}

/* It may have room for a part of a line, and then never for the rest. Others write to it as before. */
static void writes_to_a_terminal_do_not_wait(void) {
    struct dr_slots *slots = new_slots(1);
    int in = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    CHECK(in >= 0 && grantpt(in) == 0 && unlockpt(in) == 0);
    int out = open(ptsname(in), O_RDWR | O_NOCTTY | O_CLOEXEC);
    CHECK(out >= 0);
    dr_slots_join(slots, 0);
    dr_slots_begin(slots, 0, 100);
    dr_sys.print = noting_print;
    struct dr_bar *bar = dr_bar_open(slots, 1, "saving", fcntl(out, F_DUPFD_CLOEXEC, 0), 0);
    CHECK(bar);
    nanosleep(&(struct timespec){0, 300000000}, NULL);
    dr_bar_close(bar);
    dr_sys.print = dr_sys_real.print;
    CHECK(atomic_load(&print_flags) & O_NONBLOCK);
    CHECK(!(fcntl(out, F_GETFL) & O_NONBLOCK));
    close(out);
    close(in);
    free_slots(slots, 1);
}

/* A terminal that is gone: EPIPE, and no signal. */
static void who_is_gone_does_no_harm(void) {
    struct dr_slots *slots = new_slots(1);
    struct pipes pipes = new_pipe();
    close(pipes.in);
    dr_slots_join(slots, 0);
    dr_slots_begin(slots, 0, 100);
    struct dr_bar *bar = dr_bar_open(slots, 1, "saving", pipes.out, 0);
    CHECK(bar);
    nanosleep(&(struct timespec){0, 400000000}, NULL);
    dr_bar_close(bar);
    free_slots(slots, 1);
}

static void failing_calls_do_no_harm(void) {
    static const char *const calls[] = {"print", "open_terminal", "columns", "process_exists", "close"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        struct dr_slots *slots = new_slots(1);
        struct pipes pipes = new_pipe();
        dr_slots_join(slots, 0);
        dr_slots_begin(slots, 0, 100);
        dr_fault_arm(&(struct dr_fault){.call = calls[i], .nth = 1, .err = EIO, .sticky = 1});
        struct dr_bar *bar = dr_bar_open(slots, 1, "saving", pipes.out, 0);
        CHECK(bar);
        nanosleep(&(struct timespec){0, 200000000}, NULL);
        dr_slots_end(slots, 0, false);
        dr_bar_close(bar);
        CHECK_INT(dr_fault_disarm(), >, 0);
        close(pipes.in);
        free_slots(slots, 1);
    }
}

static void a_forked_child_closes_without_the_thread(void) {
    struct dr_slots *slots = new_slots(1);
    struct pipes pipes = new_pipe();
    dr_slots_join(slots, 0);
    dr_slots_begin(slots, 0, 100);
    struct dr_bar *bar = dr_bar_open(slots, 1, "saving", pipes.out, 0);
    CHECK(bar);
    pid_t child = fork();
    if (child == 0) {
        dr_bar_close(bar);
        _exit(7);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    dr_bar_close(bar);
    dr_bar_close(NULL);
    close(pipes.in);
    free_slots(slots, 1);
}

CHECK_MAIN({"lines_look_so", lines_look_so}, {"last_lines_look_so", last_lines_look_so}, {"numbers", numbers},
           {"time_left", time_left}, {"more_than_all_is_all", more_than_all_is_all}, {"all_widths", all_widths},
           {"labels_steer_no_terminal", labels_steer_no_terminal}, {"slots_add_up", slots_add_up},
           {"sums_do_not_overflow", sums_do_not_overflow},
           {"who_joins_has_time_to_begin", who_joins_has_time_to_begin},
           {"a_process_that_is_gone_has_failed", a_process_that_is_gone_has_failed},
           {"any_memory_is_added_up", any_memory_is_added_up}, {"waiting_ends_at_once", waiting_ends_at_once},
           {"draws_until_all_have_ended", draws_until_all_have_ended}, {"close_ends_it", close_ends_it},
           {"what_is_over_at_once_is_not_shown", what_is_over_at_once_is_not_shown},
           {"who_does_not_read_is_not_waited_for", who_does_not_read_is_not_waited_for},
           {"writes_to_a_terminal_do_not_wait", writes_to_a_terminal_do_not_wait},
           {"who_is_gone_does_no_harm", who_is_gone_does_no_harm},
           {"failing_calls_do_no_harm", failing_calls_do_no_harm},
           {"a_forked_child_closes_without_the_thread", a_forked_child_closes_without_the_thread})
