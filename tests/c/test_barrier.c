/*
 * A barrier of processes: nobody is let through before all have come, and one that does not come holds nobody up. The
 * processes are threads here, which a sanitizer sees, and once children in memory that is mapped by all.
 */
#include "ipc/barrier.h"

#include "check.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { PROCESSES = 4, ROUNDS = 2000, PATIENT = 1000 * CHECK_SECONDS, HURRIED = 30 };

static int wait_at(atomic_uint *word, unsigned target, unsigned timeout_ms) {
    DR_NEW_ERROR(error);
    int rc = dr_barrier_wait(word, target, timeout_ms, NULL, &error);
    CHECK(rc >= 0);
    return rc;
}

/* ---- all come ---- */

struct meeting {
    atomic_uint word;
    atomic_uint come[ROUNDS];
    unsigned plain; /* written before the barrier by one, and read after it by all */
};

static void *come_each_round(void *argument) {
    struct meeting *meeting = argument;
    for (unsigned round = 0; round < ROUNDS; round++) {
        if (atomic_fetch_add(&meeting->come[round], 1) == 0)
            meeting->plain = round;
        CHECK_EQ(wait_at(&meeting->word, (2 * round + 1) * PROCESSES, PATIENT), 1);
        CHECK_EQ(atomic_load(&meeting->come[round]), PROCESSES);
        CHECK_EQ(meeting->plain, round);
        CHECK_EQ(wait_at(&meeting->word, (2 * round + 2) * PROCESSES, PATIENT), 1);
    }
    return NULL;
}

static void in_threads(void *(*body)(void *), void *argument, unsigned count) {
    pthread_t threads[PROCESSES];
    for (unsigned i = 0; i < count; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, body, argument), 0);
    for (unsigned i = 0; i < count; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
}

static void nobody_passes_before_all_have_come(void) {
    static struct meeting meeting;
    in_threads(come_each_round, &meeting, PROCESSES);
}

static void processes_meet_in_shared_memory(void) {
    struct meeting *meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(meeting != MAP_FAILED);
    for (unsigned i = 0; i < PROCESSES; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            come_each_round(meeting);
            _exit(0);
        }
    }
    for (unsigned i = 0; i < PROCESSES; i++) {
        int status;
        CHECK(wait(&status) > 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    munmap(meeting, sizeof *meeting);
}

/* ---- one does not come ---- */

static void *find_it_ended(void *argument) {
    CHECK_EQ(wait_at(argument, PROCESSES, HURRIED), 0);
    return NULL;
}

static void who_waits_too_long_ends_it_for_all(void) {
    atomic_uint word = 0;
    in_threads(find_it_ended, &word, PROCESSES - 1);
    CHECK_EQ(wait_at(&word, PROCESSES, PATIENT), 0); /* the one that comes late */
}

static void *wait_for_the_end(void *argument) {
    CHECK_EQ(wait_at(argument, PROCESSES, PATIENT), 0);
    return NULL;
}

static void *end(void *argument) {
    CHECK(dr_barrier_end(argument, PROCESSES));
    return NULL;
}

static void who_fails_ends_it(void) {
    atomic_uint word = 0;
    pthread_t ending;
    CHECK_EQ(pthread_create(&ending, NULL, end, &word), 0);
    in_threads(wait_for_the_end, &word, PROCESSES - 1);
    CHECK_EQ(pthread_join(ending, NULL), 0);
}

static void what_was_reached_stays_so(void) {
    atomic_uint word = 0;
    CHECK_EQ(wait_at(&word, 1, PATIENT), 1);
    CHECK(!dr_barrier_end(&word, 1));
    CHECK_EQ(wait_at(&word, 2, PATIENT), 0);
    CHECK(dr_barrier_end(&word, 2));
}

/* Whether all are let through or none, however the last one's coming and the end fall together. */
static void *tell(void *argument) {
    struct meeting *meeting = argument;
    atomic_fetch_add(&meeting->come[wait_at(&meeting->word, PROCESSES, PATIENT)], 1);
    return NULL;
}

static void *end_any(void *argument) {
    dr_barrier_end(argument, PROCESSES);
    return NULL;
}

static void all_hear_the_same(void) {
    for (unsigned i = 0; i < 300; i++) {
        static struct meeting meeting;
        memset(&meeting, 0, sizeof meeting);
        pthread_t ending;
        CHECK_EQ(pthread_create(&ending, NULL, end_any, &meeting.word), 0);
        in_threads(tell, &meeting, PROCESSES);
        CHECK_EQ(pthread_join(ending, NULL), 0);
        unsigned let_through = atomic_load(&meeting.come[1]);
        CHECK(let_through == 0 || let_through == PROCESSES);
    }
}

static int cancel(void *context) { return ++*(int *)context > 1; }

static void waiting_is_cancelled(void) {
    atomic_uint word = 0;
    int asked = 0;
    struct dr_control control = {cancel, &asked};
    DR_NEW_ERROR(error);
    CHECK_EQ(dr_barrier_wait(&word, 2, PATIENT, &control, &error), -ECANCELED);
}

CHECK_MAIN({"nobody_passes_before_all_have_come", nobody_passes_before_all_have_come},
           {"processes_meet_in_shared_memory", processes_meet_in_shared_memory},
           {"who_waits_too_long_ends_it_for_all", who_waits_too_long_ends_it_for_all},
           {"who_fails_ends_it", who_fails_ends_it}, {"what_was_reached_stays_so", what_was_reached_stays_so},
           {"all_hear_the_same", all_hear_the_same}, {"waiting_is_cancelled", waiting_is_cancelled})
