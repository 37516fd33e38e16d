/* Mapped files: what is there is used, what cannot be had is a return value, and faults of others stay theirs. */
#include "check.h"
#include "io/mapped.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

enum { PAGE = 4096, PAGES = 64, SIZE = PAGE * PAGES };

struct sum {
    const struct dr_mapped *window;
    uint64_t lo, hi, found;
    bool ended;
};

static void add(void *context) {
    struct sum *sum = context;
    for (uint64_t at = sum->lo; at < sum->hi; at++)
        sum->found += sum->window->memory[at - sum->window->lo];
    sum->ended = true;
}

static int open_file(size_t size) {
    uint8_t *data = malloc(SIZE);
    CHECK(data);
    memset(data, 1, SIZE);
    check_write_file("file", data, size);
    free(data);
    int fd = open(check_path("file"), O_RDONLY);
    CHECK(fd >= 0);
    return fd;
}

static void cut(size_t size) { CHECK_EQ(truncate(check_path("file"), (off_t)size), 0); }

static void uses_what_is_there(void) {
    int fd = open_file(SIZE - 100);
    struct dr_mapped window = {0};
    dr_mapped_begin();
    CHECK_EQ(dr_mapped_move(&window, 3, fd, SIZE - 100, PAGE, SIZE - 100), 0);
    struct sum sum = {.window = &window, .lo = PAGE + 1, .hi = SIZE - 100};
    CHECK(dr_mapped_use(&window, add, &sum));
    CHECK_EQ(sum.found, (uint64_t)SIZE - 100 - PAGE - 1);
    uint8_t *before = window.memory;
    CHECK_EQ(dr_mapped_move(&window, 3, fd, SIZE - 100, 2 * PAGE, 3 * PAGE), 0);
    CHECK(window.memory == before);
    CHECK_EQ(dr_mapped_move(&window, 3, fd, SIZE - 100, 0, PAGE), 0);
    CHECK_EQ(window.lo, 0);
    close(fd);
    CHECK(dr_mapped_move(&window, 4, fd, SIZE, 0, PAGE) < 0);
    CHECK(!window.memory);
    dr_mapped_close(&window);
    dr_mapped_end();
}

/* Again and again: the signal is not blocked after the first time. */
static void says_what_cannot_be_had(void) {
    dr_mapped_begin();
    for (int round = 0; round < 3; round++) {
        int fd = open_file(SIZE);
        struct dr_mapped window = {0};
        CHECK_EQ(dr_mapped_move(&window, 0, fd, SIZE, 0, SIZE), 0);
        struct sum sum = {.window = &window, .hi = SIZE};
        CHECK(dr_mapped_use(&window, add, &sum));
        cut(PAGE);
        sum = (struct sum){.window = &window, .hi = SIZE};
        CHECK(!dr_mapped_use(&window, add, &sum));
        CHECK(!sum.ended);
        sum = (struct sum){.window = &window, .hi = PAGE};
        CHECK(dr_mapped_use(&window, add, &sum));
        dr_mapped_close(&window);
        close(fd);
    }
    dr_mapped_end();
}

static void *cut_and_use(void *unused) {
    (void)unused;
    struct dr_mapped window = {0};
    int fd = open(check_path("file"), O_RDONLY);
    CHECK_EQ(dr_mapped_move(&window, 0, fd, SIZE, 0, SIZE), 0);
    for (int i = 0; i < 200; i++) {
        struct sum sum = {.window = &window, .hi = SIZE};
        CHECK(!dr_mapped_use(&window, add, &sum));
    }
    dr_mapped_close(&window);
    close(fd);
    return NULL;
}

static void threads_have_each_their_own(void) {
    pthread_t threads[4];
    close(open_file(SIZE));
    cut(PAGE);
    dr_mapped_begin();
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, cut_and_use, NULL), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    dr_mapped_end();
}

static sigjmp_buf others_out;
static volatile int others_faults;

static void others_handler(int number) {
    CHECK_EQ(number, SIGBUS);
    others_faults++;
    siglongjmp(others_out, 1);
}

static void leaves_the_faults_of_others(void) {
    struct sigaction others = {.sa_handler = others_handler, .sa_flags = SA_NODEFER}, now;
    CHECK_EQ(sigaction(SIGBUS, &others, NULL), 0);
    int fd = open_file(SIZE);
    volatile uint8_t *memory = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    cut(PAGE);
    dr_mapped_begin();
    dr_mapped_begin();
    if (sigsetjmp(others_out, 1) == 0)
        CHECK_FAIL("%d was read", memory[2 * PAGE]);
    CHECK_EQ(others_faults, 1);
    dr_mapped_end();
    dr_mapped_end();
    CHECK_EQ(sigaction(SIGBUS, NULL, &now), 0);
    CHECK(now.sa_handler == others_handler);
    signal(SIGBUS, SIG_DFL);
    munmap((void *)(uintptr_t)memory, SIZE);
    close(fd);
}

/* Who has set a handler meanwhile keeps it. */
static void leaves_the_handlers_of_others(void) {
    struct sigaction others = {.sa_handler = others_handler}, now;
    dr_mapped_begin();
    CHECK_EQ(sigaction(SIGBUS, &others, NULL), 0);
    dr_mapped_end();
    CHECK_EQ(sigaction(SIGBUS, NULL, &now), 0);
    CHECK(now.sa_handler == others_handler);
    signal(SIGBUS, SIG_DFL);
}

CHECK_MAIN({"uses_what_is_there", uses_what_is_there}, {"says_what_cannot_be_had", says_what_cannot_be_had},
           {"threads_have_each_their_own", threads_have_each_their_own},
           {"leaves_the_faults_of_others", leaves_the_faults_of_others},
           {"leaves_the_handlers_of_others", leaves_the_handlers_of_others})
