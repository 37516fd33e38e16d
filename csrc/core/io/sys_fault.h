/*
 * Faults on purpose: fail, shorten, or delay the Nth system call, or fail the
 * Nth allocation.
 *
 * Arming lets go of what is kept, and wraps every entry of dr_sys that can fail on a healthy machine only
 * by accident; disarming restores the real calls. For tests: nothing else may
 * be using the core while it is armed or disarmed.
 */
#ifndef DCPRING_SYS_FAULT_H
#define DCPRING_SYS_FAULT_H

#include <stdbool.h>
#include <stdint.h>

struct dr_fault {
    const char *call;  /* the entry's name in struct dr_sys, NULL for any, or "malloc" for allocations (memory.h) */
    uint64_t nth;      /* the call to hit, from 1; 0 only counts */
    bool sticky;       /* that call and all after it */
    int err;           /* the errno to fail with (allocations just fail); 0 shortens transfers to half instead, if
                          there is no delay */
    unsigned delay_ms; /* before the call */
    bool
        warm; /* what is kept of engines and threads (engine_cache.h) stays: else calls are counted from a cold start */
};

void dr_fault_arm(const struct dr_fault *fault);

/*
 * From now on, whatever is armed: this is called before each call, with its name and by the thread that makes it.
 * NULL: no longer.
 */
void dr_fault_watch(void (*watcher)(const char *call));

/* Restores the real calls; returns how many calls were counted. */
uint64_t dr_fault_disarm(void);

#endif
