/* Files that are mapped. See mapped.h. */
#include "io/mapped.h"

#include "base/align.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

/* Of a file at a time: mapping costs little beside using so much, and little of it is counted as the process's. */
#define WINDOW ((uint64_t)16 << 20)
#define PAGE ((uint64_t)4096)

/* What the thread at hand uses; in memory that is there before the thread is, as the handler must not allocate. */
static __thread __attribute__((tls_model("initial-exec"))) struct {
    sigjmp_buf *out; /* NULL: nothing */
    uintptr_t lo, hi;
    bool is_others; /* a fault that is not ours is being handled */
} at_hand;

static struct {
    pthread_mutex_t lock;
    unsigned users;
    struct sigaction before;
} handler = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void die(int number) {
    signal(number, SIG_DFL);
    raise(number);
}

static void on_fault(int number, siginfo_t *about, void *context) {
    uintptr_t at = (uintptr_t)about->si_addr;
    if (at_hand.out && at >= at_hand.lo && at < at_hand.hi)
        siglongjmp(*at_hand.out, 1);
    const struct sigaction *before = &handler.before;
    if (at_hand.is_others) { /* the handler before has called this one */
        die(number);
        return;
    }
    at_hand.is_others = true;
    if (before->sa_flags & SA_SIGINFO)
        before->sa_sigaction(number, about, context);
    else if (before->sa_handler != SIG_DFL && before->sa_handler != SIG_IGN)
        before->sa_handler(number);
    else
        die(number);
    at_hand.is_others = false;
}

void dr_mapped_begin(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    pthread_mutex_lock(&handler.lock);
    if (handler.users++ == 0)
        sigaction(SIGBUS, &action, &handler.before);
    pthread_mutex_unlock(&handler.lock);
}

void dr_mapped_end(void) {
    struct sigaction now;
    pthread_mutex_lock(&handler.lock);
    if (--handler.users == 0 && sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) &&
        now.sa_sigaction == on_fault)
        sigaction(SIGBUS, &handler.before, NULL);
    pthread_mutex_unlock(&handler.lock);
}

int dr_mapped_move(struct dr_mapped *window, size_t file, int fd, uint64_t size, uint64_t lo, uint64_t hi) {
    if (window->memory && window->file == file && window->lo <= lo && hi <= window->hi)
        return 0;
    dr_mapped_close(window);
    uint64_t from = dr_align_down(lo, PAGE), to = from + WINDOW;
    if (to < hi)
        to = hi;
    if (to > size)
        to = size > hi ? size : hi;
    void *memory = mmap(NULL, (size_t)(to - from), PROT_READ, MAP_SHARED, fd, (off_t)from);
    if (memory == MAP_FAILED)
        return -errno;
    *window = (struct dr_mapped){memory, file, from, to};
    return 0;
}

void dr_mapped_close(struct dr_mapped *window) {
    if (window->memory)
        munmap(window->memory, (size_t)(window->hi - window->lo));
    *window = (struct dr_mapped){0};
}

bool dr_mapped_use(const struct dr_mapped *window, void (*use)(void *context), void *context) {
    sigjmp_buf out;
    if (sigsetjmp(out, 0) != 0) {
        at_hand.out = NULL;
        return false;
    }
    at_hand.lo = (uintptr_t)window->memory;
    at_hand.hi = dr_align_up(at_hand.lo + (uintptr_t)(window->hi - window->lo), PAGE);
    at_hand.out = &out;
    use(context);
    at_hand.out = NULL;
    return true;
}
