/* The workers: all of them work, the first failure stops all, a cancel gets through. */
#include "check.h"
#include "io/sys.h"
#include "io/sys_fault.h"
#include "io/workers.h"

struct job {
    struct dr_workers workers;
    atomic_uint ran, stopped;
    unsigned failing; /* the worker that fails, or UINT32_MAX */
    unsigned fail_after_ms;
    bool forever; /* work until stopped */
    atomic_uint polls, cancel_at;
    atomic_bool ready;
    double start, cancelled;
    pthread_t caller;
    bool polled_elsewhere;
};

static void sleep_ms(unsigned ms) { nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL); }

static int work(void *context, unsigned index, struct dr_error *error) {
    struct job *job = context;
    atomic_fetch_or(&job->ran, 1u << index);
    if (index == job->failing) {
        sleep_ms(job->fail_after_ms);
        return dr_error_io(error, EIO, DR_CALL_READ, "somewhere", index, 1);
    }
    while (job->forever && !dr_workers_stopped(&job->workers))
        sleep_ms(1);
    atomic_fetch_add(&job->stopped, dr_workers_stopped(&job->workers));
    return 0;
}

static int poll_control(void *context) {
    struct job *job = context;
    if (!pthread_equal(pthread_self(), job->caller))
        job->polled_elsewhere = true;
    unsigned polls = atomic_fetch_add(&job->polls, 1) + 1;
    if (job->cancel_at == 0 || polls < job->cancel_at)
        return 0;
    if (job->cancelled == 0)
        job->cancelled = check_seconds();
    return 1;
}

static int run(struct job *job, unsigned workers, struct dr_error *error) {
    const struct dr_control control = {poll_control, job};
    dr_error_clear(error);
    job->caller = pthread_self();
    job->start = check_seconds();
    return dr_workers_run(&job->workers, workers, work, job, &control, error);
}

static void all_of_them_work(void) {
    for (unsigned workers = 1; workers <= 20; workers++) {
        struct job job = {.failing = UINT32_MAX};
        struct dr_error error;
        CHECK_OK(run(&job, workers, &error), &error);
        CHECK_EQ(job.ran, (1u << workers) - 1);
    }
    const struct dr_control never = {0};
    struct job job = {.failing = UINT32_MAX};
    DR_NEW_ERROR(error);
    CHECK_OK(dr_workers_run(&job.workers, 3, work, &job, &never, &error), &error);
}

static void a_failure_stops_all(void) {
    for (unsigned failing = 0; failing < 4; failing++) {
        struct job job = {.failing = failing, .fail_after_ms = 20, .forever = true};
        struct dr_error error;
        CHECK_FAILS(run(&job, 4, &error), &error, EIO);
        CHECK_EQ(job.stopped, 3);
        CHECK_EQ(error.offset, failing);
        CHECK(strcmp(error.path, "somewhere") == 0);
        CHECK(check_seconds() - job.start < 5);
    }
}

static void cancel_gets_through(void) {
    double seconds = 1;
    for (int try = 0; try < CHECK_TRIES && seconds >= 0.2; try++) {
        struct job job = {.failing = UINT32_MAX, .forever = true, .cancel_at = 3};
        struct dr_error error;
        CHECK_FAILS(run(&job, 4, &error), &error, ECANCELED);
        seconds = check_seconds() - job.cancelled;
        CHECK_EQ(error.kind, DR_ERROR_CANCELLED);
        CHECK_EQ(job.stopped, 4);
        CHECK_EQ(job.polls, 3); /* and is not asked again */
        CHECK(!job.polled_elsewhere);
    }
    CHECK(seconds < 0.2);
}

/* Asked often enough that a Ctrl-C is answered within 0.2 s. */
static void polls_often(void) {
    unsigned polls = 0;
    for (int try = 0; try < CHECK_TRIES && polls < 4; try++) {
        struct job job = {.failing = 0, .fail_after_ms = 400};
        struct dr_error error;
        CHECK_FAILS(run(&job, 2, &error), &error, EIO);
        polls = job.polls;
        CHECK_INT(polls, <=, 100);
    }
    CHECK_INT(polls, >=, 4);
}

/* ---- where no thread can be started ---- */

static int work_here(void *context, unsigned index, struct dr_error *error) {
    struct job *job = context;
    CHECK(pthread_equal(pthread_self(), job->caller));
    return work(context, index, error);
}

static int run_here(struct job *job, struct dr_error *error) {
    const struct dr_control control = {poll_control, job};
    dr_error_clear(error);
    job->caller = pthread_self();
    dr_fault_arm(&(struct dr_fault){.call = "thread", .nth = 1, .err = EAGAIN, .sticky = true});
    int rc = dr_workers_run(&job->workers, 4, work_here, job, &control, error);
    dr_fault_disarm();
    return rc;
}

static void the_caller_works(void) {
    struct dr_error error;
    struct job job = {.failing = UINT32_MAX};
    CHECK_OK(run_here(&job, &error), &error);
    CHECK_EQ(job.ran, 1);
    struct job fails = {.failing = 0};
    CHECK_FAILS(run_here(&fails, &error), &error, EIO);
    struct job asks = {.failing = UINT32_MAX, .forever = true, .cancel_at = 3};
    CHECK_FAILS(run_here(&asks, &error), &error, ECANCELED);
    CHECK_EQ(asks.polls, 3);
}

/* Fewer than were asked for do the work of all. */
static void fewer_threads(void) {
    struct job job = {.failing = UINT32_MAX};
    struct dr_error error;
    dr_fault_arm(&(struct dr_fault){.call = "thread", .nth = 3, .err = EAGAIN, .sticky = true});
    CHECK_OK(run(&job, 4, &error), &error);
    dr_fault_disarm();
    CHECK_EQ(job.ran & 3, 3); /* and more where one was done before another was asked for */
}

/* ---- one after another, or several at once ---- */

enum { MANY = 200 };

struct items {
    pthread_t caller;
    unsigned sleep_ms, fails_at; /* none: UINT32_MAX */
    atomic_uint done[MANY], by_others, polls;
    bool cancel;
};

static int do_one(void *context, size_t index, struct dr_error *error) {
    struct items *items = context;
    if (items->sleep_ms)
        sleep_ms(items->sleep_ms);
    atomic_fetch_add(&items->done[index], 1);
    atomic_fetch_add(&items->by_others, !pthread_equal(pthread_self(), items->caller));
    return index == items->fails_at ? dr_error_io(error, EIO, DR_CALL_READ, "somewhere", (int64_t)index, 1) : 0;
}

static int poll_items(void *context) {
    struct items *items = context;
    atomic_fetch_add(&items->polls, 1);
    return items->cancel;
}

static int do_each(struct items *items, struct dr_error *error) {
    const struct dr_control control = {poll_items, items};
    dr_error_clear(error);
    items->caller = pthread_self();
    return dr_workers_each(MANY, 8, do_one, items, &control, error);
}

static void each_is_done_once(void) {
    for (unsigned ms = 0; ms <= 5; ms += 5) {
        struct items items = {.sleep_ms = ms, .fails_at = UINT32_MAX};
        struct dr_error error;
        CHECK_OK(do_each(&items, &error), &error);
        for (unsigned i = 0; i < MANY; i++)
            CHECK_EQ(items.done[i], 1);
        if (ms > 0)
            CHECK_EQ(items.by_others, MANY - 1); /* the first one took too long */
    }
    DR_NEW_ERROR(error);
    CHECK_OK(dr_workers_each(0, 8, do_one, NULL, NULL, &error), &error);
}

static void each_ends_with_a_failure(void) {
    for (unsigned ms = 0; ms <= 5; ms += 5)
        for (unsigned at = 0; at < MANY; at += MANY / 2) {
            struct items items = {.sleep_ms = ms, .fails_at = at};
            struct dr_error error;
            CHECK_FAILS(do_each(&items, &error), &error, EIO);
            CHECK_EQ(error.offset, at);
        }
    struct items items = {.sleep_ms = 50, .fails_at = UINT32_MAX, .cancel = true};
    struct dr_error error;
    CHECK_FAILS(do_each(&items, &error), &error, ECANCELED);
    CHECK_EQ(items.polls, 1);
}

/* ---- dr_workers_wait ---- */

static bool is_ready(const void *context) {
    const struct job *job = context;
    return atomic_load(&job->ready);
}

/* Worker 0 makes ready after a while, or fails, or does nothing; the others wait for that. */
static int work_waiting(void *context, unsigned index, struct dr_error *error) {
    struct job *job = context;
    if (index != 0) {
        bool ready = dr_workers_wait(&job->workers, is_ready, job);
        atomic_fetch_add(ready ? &job->ran : &job->stopped, 1);
        return 0;
    }
    sleep_ms(20);
    if (job->failing == 0)
        return dr_error_system(error, EIO, DR_CALL_READ, "somewhere");
    if (job->cancel_at == 0) {
        atomic_store(&job->ready, true);
        dr_workers_notify(&job->workers);
    }
    return 0;
}

static void waits_for_another(void) {
    const struct dr_control never = {0};
    for (int i = 0; i < 20; i++) {
        struct job job = {.failing = UINT32_MAX};
        DR_NEW_ERROR(error);
        CHECK_OK(dr_workers_run(&job.workers, 4, work_waiting, &job, &never, &error), &error);
        CHECK_EQ(job.ran & 3, 3); /* and more where one was done before another was asked for */
    }
}

static void waiting_ends_with_a_failure(void) {
    const struct dr_control never = {0};
    struct job job = {.failing = 0};
    DR_NEW_ERROR(error);
    CHECK_FAILS(dr_workers_run(&job.workers, 4, work_waiting, &job, &never, &error), &error, EIO);
    CHECK_EQ(job.stopped, 3);
}

static void waiting_ends_with_a_cancel(void) {
    struct job job = {.failing = UINT32_MAX, .cancel_at = 2};
    const struct dr_control control = {poll_control, &job};
    DR_NEW_ERROR(error);
    job.caller = pthread_self();
    CHECK_FAILS(dr_workers_run(&job.workers, 4, work_waiting, &job, &control, &error), &error, ECANCELED);
    CHECK_EQ(job.stopped, 3);
}

static void an_earlier_error_is_kept(void) {
    const struct dr_control never = {0};
    struct job job = {.failing = 0};
    DR_NEW_ERROR(error);
    dr_error_system(&error, EPERM, DR_CALL_OPEN, "before");
    CHECK_EQ(dr_workers_run(&job.workers, 2, work, &job, &never, &error), -EPERM);
    CHECK(strcmp(error.path, "before") == 0);
}

/* ---- a caller whose thread ends ---- */

static atomic_uint at_work, ended_early;

/* Uses what lies on the caller's stack for as long as it is not stopped. */
static int work_on_the_stack(void *context, unsigned index, struct dr_error *error) {
    struct job *job = context;
    (void)error;
    atomic_fetch_add(&at_work, 1);
    while (!dr_workers_stopped(&job->workers)) {
        atomic_fetch_or(&job->ran, 1u << index);
        sleep_ms(1);
    }
    sleep_ms(50); /* a transfer that has to be waited for */
    atomic_fetch_or(&job->stopped, 1u << index);
    atomic_fetch_sub(&at_work, 1);
    return 0;
}

static int end_the_thread(void *context) {
    struct job *job = context;
    if (job->ran == 7)
        pthread_exit(NULL);
    return 0;
}

static void *call_and_end(void *unused) {
    (void)unused;
    struct job job = {.failing = UINT32_MAX};
    const struct dr_control control = {end_the_thread, &job};
    DR_NEW_ERROR(error);
    dr_workers_run(&job.workers, 3, work_on_the_stack, &job, &control, &error);
    atomic_store(&ended_early, 1); /* never reached */
    return NULL;
}

static void the_callers_thread_ends(void) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, call_and_end, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(atomic_load(&at_work), 0);
    CHECK_EQ(atomic_load(&ended_early), 0);
}

CHECK_MAIN({"all_of_them_work", all_of_them_work}, {"a_failure_stops_all", a_failure_stops_all},
           {"cancel_gets_through", cancel_gets_through}, {"polls_often", polls_often},
           {"the_caller_works", the_caller_works}, {"fewer_threads", fewer_threads},
           {"each_is_done_once", each_is_done_once}, {"each_ends_with_a_failure", each_ends_with_a_failure},
           {"waits_for_another", waits_for_another}, {"waiting_ends_with_a_failure", waiting_ends_with_a_failure},
           {"waiting_ends_with_a_cancel", waiting_ends_with_a_cancel},
           {"an_earlier_error_is_kept", an_earlier_error_is_kept}, {"the_callers_thread_ends", the_callers_thread_ends})
