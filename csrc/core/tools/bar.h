/*
 * A progress bar on a terminal, drawn by a thread of its own.
 *
 * The thread reads slots (slots.h) and writes to a descriptor; it needs no
 * lock of anybody's, and no interpreter. A terminal that takes nothing (it was
 * stopped, or its program is slow) loses pictures rather than holding up the
 * thread. It ends by itself, with a last line, when all slots have ended, or
 * when the bar is closed. Work of less than a frame (1/8 s) shows nothing.
 *
 * The slots belong to the caller, until the bar is closed. One thread at a
 * time may use a bar.
 */
#ifndef DCPRING_BAR_H
#define DCPRING_BAR_H

#include "tools/slots.h"

enum dr_bar_flags {
    DR_BAR_UNICODE = 1,
    DR_BAR_COLOUR = 2,
    DR_BAR_TRANSIENT = 4, /* nothing of it stays */
};

/* ---- what a line looks like ---- */

struct dr_bar_view {
    const char *label; /* UTF-8 */
    uint64_t done, total; /* bytes */
    uint64_t rate; /* bytes a second, of late; 0: not known yet */
    uint64_t ms;   /* since the start */
    int columns;   /* of the terminal; the last one stays free */
    unsigned flags;
    bool failed;
};

enum { DR_BAR_LABEL = 80, DR_BAR_LINE = 1024 };

/* The picture, or the last line, without an end of line, as a string. */
void dr_bar_line(const struct dr_bar_view *view, char out[DR_BAR_LINE]);
void dr_bar_last(const struct dr_bar_view *view, char out[DR_BAR_LINE]);

/* Bytes a second, as many as there can be; ms is not 0. */
uint64_t dr_bar_rate(uint64_t bytes, uint64_t ms);

/* ---- the thread ---- */

struct dr_bar;

/* fd is the bar's from here on. NULL when there is no memory or no thread to be had; fd is closed then. */
struct dr_bar *dr_bar_open(struct dr_slots *slots, size_t count, const char *label, int fd, unsigned flags);

/* Ends it within moments, whatever the slots say. In a forked child there is no thread: only frees. NULL is allowed. */
void dr_bar_close(struct dr_bar *bar);

#endif
