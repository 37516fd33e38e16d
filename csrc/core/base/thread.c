/* Starting a thread. See thread.h. */
#include "base/thread.h"

#include <signal.h>

enum { STACK_BYTES = 1024 * 1024 };

static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};

int dr_thread_start(pthread_t *id, void *(*run)(void *), void *argument) {
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&blocked, faults[i]);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    int err = pthread_create(id, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -err;
}
