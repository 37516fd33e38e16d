/* Being asked to stop: how Ctrl-C reaches the core. */
#ifndef DCPRING_CONTROL_H
#define DCPRING_CONTROL_H

#include "base/clock.h"
#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

/* poll returns nonzero to cancel; it is called from the thread that called into the core. NULL never cancels. */
struct dr_control {
    int (*poll)(void *context);
    void *context;
};

enum { DR_POLL_MS = 20 };

/* Asking from a loop that does nothing but compute, or makes calls that may be slow: now and then, by the clock. */
struct dr_ticker {
    const struct dr_control *control; /* NULL: nobody to ask */
    uint64_t next_ms;                 /* 0: not asked yet */
};

/* 0, or -ECANCELED. Reads the clock: in a tight loop for one turn in many. */
static inline int dr_ticker_ask(struct dr_ticker *ticker, struct dr_error *error) {
    if (!ticker->control || !ticker->control->poll)
        return 0;
    uint64_t now = dr_clock_ms();
    bool due = ticker->next_ms != 0 && now >= ticker->next_ms;
    if (due || ticker->next_ms == 0)
        ticker->next_ms = now + DR_POLL_MS;
    return due && ticker->control->poll(ticker->control->context) ? dr_error_cancelled(error) : 0;
}

/* The same for turn `turn` of a tight loop. */
static inline int dr_ticker_turn(struct dr_ticker *ticker, size_t turn, struct dr_error *error) {
    return turn % 1024 == 1023 ? dr_ticker_ask(ticker, error) : 0;
}

#endif
