/*
 * The Nth system call fails, for every N, during a small save and a small
 * load: the result is an error or right data, nothing is left behind, and it
 * ends.
 */
#include "sample.h"

#include "io/sys.h"
#include "io/sys_fault.h"

enum { COUNT = 6, MIB = 1 << 20 };

static struct sample samples[COUNT];

static const char *const calls[] = {
    "open_dir",   "open_below", "close",          "fstat",        "pread",        "pwrite", "set_direct",
    "fallocate",  "ftruncate",  "fdatasync",      "fsync",        "cached",       "map",    "direct_alignment",
    "uring_init", "uring_try",  "uring_register", "uring_submit", "uring_result", "thread", NULL};

static struct dr_options make_options(unsigned way) {
    return (struct dr_options){.engine = way % 2 && sample_has_uring() ? "uring" : "threads",
                               .direct = way / 2 % 2 ? DR_DIRECT_AUTO : DR_DIRECT_OFF,
                               .queue_depth = 4,
                               .block_size = MIB,
                               .workers = 1 + (way + 1) / 2 % 2,
                               .checksum = true,
                               .sync = true};
}

static void make_samples(void) {
    struct rng rng = {50};
    if (samples[0].memory)
        return;
    sample_tensor(&samples[0], &rng, 1000, true);
    sample_shape(&samples[1], &rng, "float32", 2, (int64_t[]){150, 1000});
    sample_bytes(&samples[2], &rng, 5000);
    sample_shape(&samples[3], &rng, "int8", 1, (int64_t[]){MIB + 1000});
    samples[3].part_bytes = 700000;
    sample_tensor(&samples[4], &rng, 100, false);
    sample_shape(&samples[5], &rng, "bfloat16", 1, (int64_t[]){70000});
}

/* What failed in the last save or load. */
static enum dr_call failed_call;

/* Saves under a fault; gives the result, after checking that it is a sound one. */
static int save_under(const struct dr_fault *fault, const struct dr_options *options, uint64_t *counted) {
    struct dr_error error;
    unlink(check_path("f"));
    int before = check_open_descriptors();
    alarm(30);
    dr_fault_arm(fault);
    int rc = sample_save("f", samples, COUNT, 2, 3 * MIB, options, NULL, NULL, &error);
    *counted = dr_fault_disarm();
    CHECK_EQ(check_open_descriptors(), before);
    CHECK_EQ(rc, -error.err);
    CHECK_EQ(rc == 0, error.kind == DR_ERROR_NONE);
    failed_call = error.call;
    if (rc == 0)
        sample_check_file("f", samples, COUNT, true);
    else
        CHECK(!check_exists("f"));
    return rc;
}

static int load_under(const struct dr_fault *fault, const struct dr_options *options, uint64_t *counted) {
    struct dr_error error;
    int before = check_open_descriptors();
    alarm(30);
    dr_fault_arm(fault);
    int rc = sample_load_all("f", samples, COUNT, options, NULL, NULL, &error);
    *counted = dr_fault_disarm();
    CHECK_EQ(check_open_descriptors(), before);
    CHECK_EQ(rc, -error.err);
    CHECK_EQ(rc == 0, error.kind == DR_ERROR_NONE);
    failed_call = error.call;
    return rc;
}

static int locate_under(const struct dr_fault *fault, uint64_t *counted) {
    static const struct dr_control never;
    struct dr_lookup lookups[COUNT] = {{0}};
    DR_NEW_ERROR(error);
    const char *name = "f";
    for (size_t i = 0; i < COUNT; i++)
        lookups[i] = (struct dr_lookup){.offset = samples[i].placed.offset, .length = samples[i].placed.length};
    int before = check_open_descriptors();
    dr_fault_arm(fault);
    int rc = sample_dr_locate(&name, 1, lookups, COUNT, &never, &error);
    *counted = dr_fault_disarm();
    CHECK_EQ(check_open_descriptors(), before);
    CHECK_EQ(rc, -error.err);
    for (size_t i = 0; i < COUNT && rc == 0; i++) {
        CHECK_EQ(lookups[i].located.plain, samples[i].source.shape.dtype != NULL);
        if (lookups[i].located.plain)
            CHECK_EQ(lookups[i].located.payload_offset, samples[i].placed.payload_offset);
    }
    return rc;
}

/* The same for a save that comes after another, and finds what that has left to it. */
static void nth_call_of_a_second_save(void) {
    make_samples();
    for (unsigned way = 0; way < 4; way++) {
        struct dr_options options = make_options(way);
        struct dr_error error;
        options.sync = way == 0;
        uint64_t counted = 0, failed = 0;
        for (uint64_t n = 1; n <= counted + 1; n++) {
            unlink(check_path("f"));
            CHECK_OK(sample_save("f", samples, COUNT, 2, 3 * MIB, &options, NULL, NULL, &error), &error);
            unlink(check_path("f"));
            dr_fault_arm(&(struct dr_fault){.nth = n, .err = EIO, .warm = true});
            int rc = sample_save("f", samples, COUNT, 2, 3 * MIB, &options, NULL, NULL, &error);
            counted = dr_fault_disarm();
            CHECK(rc == 0 || rc == -EIO);
            failed += rc < 0;
            if (rc == 0)
                sample_check_file("f", samples, COUNT, true);
            else
                CHECK(!check_exists("f"));
        }
        CHECK_INT(failed, >, 5);
    }
}

static void save_well(const struct dr_options *options) {
    uint64_t counted;
    CHECK_EQ(save_under(&(struct dr_fault){.nth = 0}, options, &counted), 0);
    CHECK_INT(counted, >, 5);
}

/* The errors tried: a broken device, an interrupted call, and transfers that are only cut short. */
static const int errors[] = {EIO, EINTR, 0};

/* Ways 2 and 3 are direct, and cost the disk's time. */
static bool is_tried(unsigned way, int err) { return way < 2 || err != EINTR; }

/* What is interrupted is repeated, but for a close, after which nothing is open, and making a ring, which never is. */
static bool may_fail_with(int err) {
    return err != EINTR || failed_call == DR_CALL_CLOSE || failed_call == DR_CALL_URING_SETUP;
}

/*
 * Success, the error that was made, or what a call that failed so stands for: no memory, an io_uring without an
 * operation.
 */
static bool is_sound(int rc, int err, const struct dr_options *options) {
    return rc == 0 || (rc == -err && may_fail_with(err)) || rc == -ENOMEM ||
           (rc == -ENOSYS && strcmp(options->engine, "uring") == 0);
}

/* Each loop ends with the first n that no call reached. */
static void nth_call_of_a_save(void) {
    make_samples();
    for (unsigned way = 0; way < 4; way++)
        for (size_t e = 0; e < sizeof errors / sizeof *errors; e++) {
            struct dr_options options = make_options(way);
            options.sync = e == 0 && way == 0;
            if (!is_tried(way, errors[e]))
                continue;
            uint64_t counted = 0, failed = 0;
            for (uint64_t n = 1; n <= counted + 1; n++) {
                int rc = save_under(&(struct dr_fault){.nth = n, .err = errors[e]}, &options, &counted);
                CHECK(is_sound(rc, errors[e], &options));
                failed += rc < 0;
            }
            CHECK_EQ(failed == 0, errors[e] == 0);
        }
}

static void nth_call_of_a_load(void) {
    make_samples();
    for (unsigned way = 0; way < 4; way++)
        for (size_t e = 0; e < sizeof errors / sizeof *errors; e++) {
            const struct dr_options options = make_options(way);
            uint64_t counted = 0, failed = 0;
            if (!is_tried(way, errors[e]))
                continue;
            save_well(&options);
            for (uint64_t n = 1; n <= counted + 1; n++) {
                int rc = load_under(&(struct dr_fault){.nth = n, .err = errors[e]}, &options, &counted);
                CHECK(is_sound(rc, errors[e], &options));
                failed += rc < 0;
            }
            /* Which call is the nth depends on threads, and most are repeated. This one is made, and needed. */
            failed += load_under(&(struct dr_fault){.call = "map", .nth = 1, .err = errors[e]}, &options, &counted) < 0;
            CHECK_EQ(failed == 0, errors[e] == 0);
        }
}

static void nth_call_of_a_locate(void) {
    make_samples();
    const struct dr_options options = make_options(0);
    save_well(&options);
    for (size_t e = 0; e < sizeof errors / sizeof *errors; e++) {
        uint64_t counted = 0;
        for (uint64_t n = 1; n <= counted + 1; n++)
            locate_under(&(struct dr_fault){.nth = n, .err = errors[e]}, &counted);
    }
}

/* A call fails and goes on failing: a full disk, a dead device, no memory. */
static void each_call_for_good(void) {
    make_samples();
    for (unsigned way = 0; way < 4; way++)
        for (size_t c = 0; calls[c]; c++)
            for (uint64_t n = 1; n <= (way < 2 ? 2 : 1); n++) {
                struct dr_options options = make_options(way);
                options.sync = strstr(calls[c], "sync") != NULL;
                struct dr_fault fault = {.call = calls[c], .nth = n, .sticky = true, .err = n == 1 ? ENOSPC : EIO};
                uint64_t counted;
                if (save_under(&fault, &options, &counted) < 0)
                    save_well(&options);
                load_under(&fault, &options, &counted);
                locate_under(&fault, &counted);
            }
}

/* After the first, everything fails, even what tidies up: still an error, and it ends. */
static void everything_from_the_nth_call_on(void) {
    make_samples();
    struct dr_options options = make_options(0);
    options.sync = false;
    save_well(&options);
    uint64_t counted = 0;
    for (uint64_t n = 1; n <= counted + 1; n++) {
        int rc = load_under(&(struct dr_fault){.nth = n, .sticky = true, .err = EIO}, &options, &counted);
        CHECK(rc < 0 || n > 5);
    }
    counted = 0;
    for (uint64_t n = 1; n <= counted + 1; n++) {
        struct dr_error error;
        unlink(check_path("f"));
        int before = check_open_descriptors();
        dr_fault_arm(&(struct dr_fault){.nth = n, .sticky = true, .err = EIO});
        int rc = sample_save("f", samples, COUNT, 2, 0, &options, NULL, NULL, &error);
        counted = dr_fault_disarm();
        CHECK_EQ(check_open_descriptors(), before);
        if (rc == 0)
            sample_check_file("f", samples, COUNT, true);
    }
    sample_free(samples, COUNT);
    memset(samples, 0, sizeof samples);
}

CHECK_MAIN({"nth_call_of_a_save", nth_call_of_a_save}, {"nth_call_of_a_second_save", nth_call_of_a_second_save},
           {"nth_call_of_a_load", nth_call_of_a_load}, {"nth_call_of_a_locate", nth_call_of_a_locate},
           {"each_call_for_good", each_call_for_good},
           {"everything_from_the_nth_call_on", everything_from_the_nth_call_on})
