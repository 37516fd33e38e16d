/*
 * Starting a thread of the core's own: with a small stack, and blind to signals.
 *
 * A signal to the process must reach a thread of the program's, which may wait for it with all others blocking it. So
 * ours block all but those of faults, which belong to the thread that makes them.
 */
#ifndef DCPRING_THREAD_H
#define DCPRING_THREAD_H

#include <pthread.h>

/* 0, or -errno. The thread is to be joined or detached. */
int dr_thread_start(pthread_t *id, void *(*run)(void *), void *argument);

#endif
