/* The thread that draws a progress bar. See bar.h. */
#include "bar.h"

#include "sys.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    FRAME_MS = 125,
    STACK_BYTES = 256 * 1024,
    SAMPLES = 32,       /* frames over which the rate is taken: 4 s */
    GRACE_MS = 2000,    /* for a slot that has joined and does not begin, once no other is at work */
    LAST_LINE_MS = 200, /* how long a slow terminal may take to have the last line */
};

struct sample {
    uint64_t ms, done;
};

struct dr_bar {
    struct dr_slots *slots;
    size_t count;
    char label[DR_BAR_LABEL];
    int fd;
    unsigned flags;
    pid_t owner;
    pthread_t thread;
    atomic_bool stop;
    /* the thread's own */
    uint64_t begin_ms, busy_ms;
    struct sample samples[SAMPLES];
    size_t sample_count;
    char shown[DR_BAR_LINE];
};

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Bytes a second since the oldest sample that is kept. */
static uint64_t note_rate(struct dr_bar *bar, uint64_t ms, uint64_t done) {
    size_t n = bar->sample_count++;
    struct sample oldest = bar->samples[n < SAMPLES ? 0 : n % SAMPLES];
    bar->samples[n % SAMPLES] = (struct sample){ms, done};
    if (n == 0 || ms <= oldest.ms || done <= oldest.done)
        return 0;
    return (uint64_t)((double)(done - oldest.done) * 1000 / (double)(ms - oldest.ms));
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

/* "\r", a line, and an escape that clears the rest; the same picture is not sent twice. */
static void draw(struct dr_bar *bar, const struct dr_sums *sums, uint64_t ms) {
    struct dr_bar_view view = view_of(bar, sums, ms);
    view.rate = note_rate(bar, ms, sums->done);
    char line[DR_BAR_LINE], out[DR_BAR_LINE + 8];
    dr_bar_line(&view, line);
    if (sums->total == 0 || strcmp(line, bar->shown) == 0)
        return;
    size_t size = strlen(line);
    out[0] = '\r';
    memcpy(out + 1, line, size);
    memcpy(out + 1 + size, "\x1b[K", 3);
    if (dr_sys.print(bar->fd, out, size + 4, 0) > 0)
        memcpy(bar->shown, line, size + 1);
}

static void draw_last(struct dr_bar *bar, const struct dr_sums *sums, uint64_t ms) {
    struct dr_bar_view view = view_of(bar, sums, ms);
    char line[DR_BAR_LINE], out[DR_BAR_LINE + 8];
    dr_bar_last(&view, line);
    if (sums->total == 0)
        return;
    size_t size = bar->flags & DR_BAR_ERASE ? 0 : strlen(line);
    out[0] = '\r';
    memcpy(out + 1, line, size);
    memcpy(out + 1 + size, "\x1b[K\r\n", 5);
    dr_sys.print(bar->fd, out, 1 + size + (bar->flags & DR_BAR_ERASE ? 3 : 5), LAST_LINE_MS);
}

static bool is_over(struct dr_bar *bar, const struct dr_sums *sums, uint64_t ms) {
    if (atomic_load(&bar->stop))
        return true;
    if (sums->running > 0 || sums->ended == 0)
        bar->busy_ms = ms;
    return sums->running == 0 && sums->ended > 0 && (sums->joined == 0 || ms - bar->busy_ms > GRACE_MS);
}

static void *run(void *argument) {
    struct dr_bar *bar = argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (;;) {
        uint32_t changes = atomic_load(&bar->slots->changes);
        uint64_t ms = now_ms();
        struct dr_sums sums = dr_slots_sum(bar->slots, bar->count);
        if (is_over(bar, &sums, ms)) {
            draw_last(bar, &sums, ms);
            return NULL;
        }
        draw(bar, &sums, ms);
        dr_slots_wait(bar->slots, changes, FRAME_MS);
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

struct dr_bar *dr_bar_open(struct dr_slots *slots, size_t count, const char *label, int fd, unsigned flags) {
    struct dr_bar *bar = calloc(1, sizeof *bar);
    if (bar) {
        *bar = (struct dr_bar){.slots = slots, .count = count, .fd = fd, .flags = flags, .owner = getpid()};
        bar->begin_ms = bar->busy_ms = now_ms();
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
        dr_slots_wake(bar->slots);
        pthread_join(bar->thread, NULL);
    }
    dr_sys.close(bar->fd);
    free(bar);
}
