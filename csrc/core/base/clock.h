/* The monotonic clock, and condition variables that wait by it. */
#ifndef DCPRING_CLOCK_H
#define DCPRING_CLOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t dr_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t dr_clock_ms(void) { return dr_clock_ns() / 1000000u; }

/* The moment so long from now, for pthread_cond_timedwait. */
static inline struct timespec dr_clock_after(unsigned ms) {
    uint64_t ns = dr_clock_ns() + (uint64_t)ms * 1000000u;
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

static inline void dr_clock_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

#endif
