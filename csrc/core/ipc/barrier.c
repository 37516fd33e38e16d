/* A barrier of processes. See barrier.h. */
#include "ipc/barrier.h"

#include "io/sys.h"

#include <assert.h>

/* The word counts who came; this bit says that it has ended. */
#define ENDED (DR_BARRIER_MOST + 1)

static bool is_reached(unsigned word, unsigned target) { return (word & DR_BARRIER_MOST) >= target; }

/* Counts this process in, unless the barrier has ended; gives the word from then on. */
static unsigned come(atomic_uint *word) {
    unsigned seen = atomic_load(word);
    while (!(seen & ENDED) && !atomic_compare_exchange_weak(word, &seen, seen + 1))
        ;
    return seen & ENDED ? seen : seen + 1;
}

bool dr_barrier_end(atomic_uint *word, unsigned target) {
    unsigned seen = atomic_fetch_or(word, ENDED);
    dr_sys.futex_wake(word);
    return !is_reached(seen, target);
}

int dr_barrier_wait(atomic_uint *word, unsigned target, unsigned timeout_ms, const struct dr_control *control,
                    struct dr_error *error) {
    assert(target > 0 && target <= DR_BARRIER_MOST);
    uint64_t until = dr_clock_ms() + timeout_ms;
    struct dr_ticker ticker = {.control = control};
    unsigned seen = come(word);
    if (seen == target)
        dr_sys.futex_wake(word);
    for (; !is_reached(seen, target); seen = atomic_load(word)) {
        if (seen & ENDED)
            return 0;
        if (dr_clock_ms() >= until)
            return !dr_barrier_end(word, target);
        dr_sys.futex_wait(word, seen, DR_POLL_MS);
        int rc = dr_ticker_ask(&ticker, error);
        if (rc < 0)
            return rc;
    }
    return 1;
}
