/* The thread that draws a progress bar. See bar.h. */
#include "tools/bar.h"

#include "base/clock.h"
#include "base/memory.h"
#include "io/sys.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    FRAME_MS = 125,
    STACK_BYTES = 256 * 1024,
    SAMPLES = 32,       /* frames over which the rate is taken: 4 s */
    LAST_LINE_MS = 200, /* how long a slow terminal may take to have the last line */
};

struct sample {
    uint64_t ms, done;
};

struct dr_bar {
    char label[DR_BAR_LABEL];
    int fd;
    unsigned flags;
    pid_t owner;
    pthread_t thread;
    atomic_bool stop;
    /* the thread's own */
    struct dr_onlooker onlooker;
    uint64_t begin_ms;
    struct sample samples[SAMPLES];
    size_t sample_count;
    char shown[DR_BAR_LINE];
};

/* Bytes a second since the oldest sample that is kept. */
static uint64_t note_rate(struct dr_bar *bar, uint64_t ms, uint64_t done) {
    size_t n = bar->sample_count++;
    struct sample oldest = bar->samples[n < SAMPLES ? 0 : n % SAMPLES];
    bar->samples[n % SAMPLES] = (struct sample){ms, done};
    if (n == 0 || ms <= oldest.ms || done <= oldest.done)
        return 0;
    return dr_bar_rate(done - oldest.done, ms - oldest.ms);
}

static struct dr_bar_view view_of(struct dr_bar *bar, const struct dr_sums *sums, uint64_t ms) {
    return (struct dr_bar_view){
        .label = bar->label,
        .done = sums->done,
        .total = sums->total,
        .ms = ms - bar->begin_ms,
        .columns = dr_sys.columns(bar->fd),
        .flags = bar->flags,
        .failed = sums->failed > 0,
    };
}

/* Puts a line in the place of the one that is there. */
static bool show(struct dr_bar *bar, const char *line, const char *end, int timeout_ms) {
    char out[DR_BAR_LINE + 8];
    int size = snprintf(out, sizeof out, "\r%s\x1b[K%s", line, end);
    return dr_sys.print(bar->fd, out, (size_t)size, timeout_ms) > 0;
}

/* What is over at once is not shown at all, and the same picture is not sent twice. */
static void draw(struct dr_bar *bar, const struct dr_sums *sums, uint64_t ms) {
    struct dr_bar_view view = view_of(bar, sums, ms);
    view.rate = note_rate(bar, ms, sums->done);
    char line[DR_BAR_LINE];
    dr_bar_line(&view, line);
    if (view.ms >= FRAME_MS && view.total > 0 && strcmp(line, bar->shown) != 0 && show(bar, line, "", 0))
        memcpy(bar->shown, line, strlen(line) + 1);
}

static void draw_last(struct dr_bar *bar, const struct dr_sums *sums, uint64_t ms) {
    struct dr_bar_view view = view_of(bar, sums, ms);
    char line[DR_BAR_LINE];
    bool stays = !(bar->flags & DR_BAR_TRANSIENT);
    dr_bar_last(&view, line);
    if (bar->shown[0])
        show(bar, stays ? line : "", stays ? "\n" : "", LAST_LINE_MS);
}

static void *run(void *argument) {
    struct dr_bar *bar = argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    pthread_setname_np(pthread_self(), "dcpring-bar");
    for (;;) {
        struct dr_sums sums = dr_slots_look(&bar->onlooker);
        uint64_t ms = dr_clock_ms();
        if (sums.over || atomic_load(&bar->stop)) {
            draw_last(bar, &sums, ms);
            dr_sys.close(bar->fd);
            return NULL;
        }
        draw(bar, &sums, ms);
        dr_slots_wait(&bar->onlooker, FRAME_MS);
    }
}

static int start(struct dr_bar *bar) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int rc = pthread_create(&bar->thread, &attributes, run, bar);
    pthread_attr_destroy(&attributes);
    return rc;
}

/* A terminal that has room for a part of a line would hold up who writes all of it. */
static int without_waiting(int fd) {
    int own = dr_sys.open_terminal(fd);
    if (own < 0)
        return fd;
    dr_sys.close(fd);
    return own;
}

struct dr_bar *dr_bar_open(struct dr_slots *slots, size_t count, const char *label, int fd, unsigned flags) {
    struct dr_bar *bar = dr_calloc(1, sizeof *bar);
    fd = without_waiting(fd);
    if (bar) {
        *bar = (struct dr_bar){.onlooker = {slots, count, 0, 0}, .fd = fd, .flags = flags, .owner = getpid()};
        bar->begin_ms = dr_clock_ms();
        memcpy(bar->label, label, strnlen(label, sizeof bar->label - 1));
    }
    if (!bar || start(bar) != 0) {
        free(bar);
        dr_sys.close(fd);
        return NULL;
    }
    return bar;
}

void dr_bar_close(struct dr_bar *bar) {
    if (!bar)
        return;
    if (bar->owner == getpid()) {
        atomic_store(&bar->stop, true);
        dr_slots_wake(bar->onlooker.slots);
        pthread_join(bar->thread, NULL);
    }
    free(bar);
}
