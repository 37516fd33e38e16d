/*
 * dr_verify: sound files have no problems, and whatever is changed, cut off or
 * unreadable is found, with its place, and nothing else is blamed.
 */
#include "base/align.h"
#include "sample.h"

#include "base/crc.h"
#include "data/verify.h"
#include "io/sys.h"
#include "io/sys_fault.h"

enum { MIB = 1 << 20, MOST = 40 };

static struct sample samples[MOST];
static struct dr_check checks[MOST];
static size_t count;

static const char *const names[] = {"f"};

/* ---- files and what is asked ---- */

enum { WAYS = 6 };

static struct dr_options way(unsigned n) {
    return (struct dr_options){.engine = n % 2 && sample_has_uring() ? "uring" : "threads",
                               .direct = n / 2 % 2 ? DR_DIRECT_AUTO : DR_DIRECT_OFF,
                               .queue_depth = 4,
                               .block_size = n < 4 ? MIB : 4 * MIB,
                               .workers = 1 + n % 3,
                               .checksum = true};
}

static void forget(void) {
    sample_free(samples, count);
    memset(samples, 0, sizeof samples);
    memset(checks, 0, sizeof checks);
    count = 0;
}

static void add_check(size_t i, bool as_archive) {
    const struct sample *s = &samples[i];
    bool tensor = s->source.shape.dtype != NULL;
    checks[i] = (struct dr_check){.kind = tensor ? DR_CHECK_TENSOR : DR_CHECK_BYTES,
                                  .offset = s->placed.offset,
                                  .length = s->placed.length,
                                  .payload_offset = s->placed.payload_offset,
                                  .payload_size = s->placed.payload_size,
                                  .crcs = s->crcs,
                                  .shape = {s->source.shape.dtype, s->source.shape.ndim, s->sizes}};
    if (tensor && as_archive) {
        checks[i].kind = DR_CHECK_OTHER;
        checks[i].crcs = NULL;
    }
}

/* Saves the first n samples as "f"; asks for tensors by what we know of them, or as anyone's archives. */
static void save(size_t n, bool as_archives) {
    struct dr_error error;
    const struct dr_options options = way(0);
    count = n;
    unlink(check_path("f"));
    CHECK_OK(sample_save("f", samples, n, 4, 0, &options, NULL, NULL, &error), &error);
    for (size_t i = 0; i < n; i++)
        add_check(i, as_archives);
}

static void make_small(struct rng *rng, bool as_archives) {
    sample_shape(&samples[0], rng, "float32", 2, (int64_t[]){30, 10});
    sample_bytes(&samples[1], rng, 700);
    sample_shape(&samples[2], rng, "uint16", 1, (int64_t[]){0});
    sample_shape(&samples[3], rng, "bfloat16", 0, (int64_t[]){0});
    sample_shape(&samples[4], rng, "int8", 1, (int64_t[]){MIB + 5000});
    sample_shape(&samples[5], rng, "float8_e4m3fn", 3, (int64_t[]){5, 1, 7});
    save(6, as_archives);
}

static void make_large(struct rng *rng, bool as_archives) {
    sample_shape(&samples[0], rng, "int16", 1, (int64_t[]){100});
    sample_shape(&samples[1], rng, "float32", 2, (int64_t[]){1300, 1024});
    sample_bytes(&samples[2], rng, 3 * MIB + 17);
    sample_shape(&samples[3], rng, "int64", 1, (int64_t[]){700000});
    save(4, as_archives);
}

static int verify_files(const char *const *files, size_t file_count, struct dr_check *asked, size_t asked_count,
                        bool quick, const struct dr_options *options, const struct dr_control *control,
                        struct dr_findings *found, struct dr_stream_stats *stats, struct dr_error *error) {
    struct dr_input input;
    *found = (struct dr_findings){0};
    int rc = dr_input_init(&input, check_dir, files, file_count, error);
    if (rc == 0)
        rc = dr_verify(&input, asked, asked_count, quick, options, control, found, stats, error);
    dr_input_destroy(&input);
    return rc;
}

static struct dr_findings check_quickly(const struct dr_options *options, bool quick, struct dr_stream_stats *stats) {
    static const struct dr_control never;
    struct dr_findings findings;
    struct dr_stream_stats ignored;
    DR_NEW_ERROR(error);
    int before = check_open_descriptors();
    CHECK_OK(verify_files(names, 1, checks, count, quick, options, &never, &findings, stats ? stats : &ignored, &error),
             &error);
    CHECK_EQ(check_open_descriptors(), before);
    return findings;
}

static struct dr_findings check(const struct dr_options *options) { return check_quickly(options, false, NULL); }

static void expect_sound(const struct dr_options *options) {
    struct dr_findings found = check(options);
    if (found.count > 0)
        CHECK_FAIL("record %zu of kind %d: %s, %" PRIu64 " bytes at %" PRIu64, found.problems[0].check,
                   checks[found.problems[0].check].kind, found.problems[0].what, found.problems[0].length,
                   found.problems[0].offset);
    CHECK_EQ(found.repeated, 0);
    dr_findings_destroy(&found);
}

/* Exactly one problem, of this record, that covers the byte and stays within the record. */
static void expect_one(const struct dr_findings *found, size_t index, uint64_t offset) {
    CHECK_EQ(found->count, 1);
    const struct dr_problem *p = &found->problems[0];
    CHECK_EQ(p->check, index);
    CHECK_INT(p->offset, <=, offset);
    CHECK_INT(p->offset + p->length, >, offset);
    CHECK_INT(p->offset, >=, checks[index].offset);
    CHECK_INT(p->offset + p->length, <=, checks[index].offset + checks[index].length);
}

static void flip(uint64_t offset) {
    FILE *file = fopen(check_path("f"), "r+b");
    CHECK(file);
    fseek(file, (long)offset, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, (long)offset, SEEK_SET);
    fputc(byte ^ 0x10, file);
    CHECK_EQ(fclose(file), 0);
}

static size_t owner_of(uint64_t offset) {
    for (size_t i = 0; i < count; i++)
        if (offset >= checks[i].offset && offset < checks[i].offset + checks[i].length)
            return i;
    CHECK_FAIL("nobody owns %" PRIu64, offset);
}

static uint64_t file_size(void) {
    struct stat st;
    CHECK_EQ(stat(check_path("f"), &st), 0);
    return (uint64_t)st.st_size;
}

/* ---- sound files ---- */

static void sound_files(void) {
    struct rng rng = {1};
    for (unsigned round = 0; round < 4; round++) {
        for (size_t i = 0; i < MOST; i++)
            if (rng_below(&rng, 4) == 0)
                sample_bytes(&samples[i], &rng, rng_below(&rng, 1 << rng_below(&rng, 22)));
            else
                sample_tensor(&samples[i], &rng, 1 + rng_below(&rng, 1 << rng_below(&rng, 23)), false);
        save(MOST, round % 2);
        for (unsigned n = 0; n < WAYS; n++) {
            const struct dr_options options = way(n);
            expect_sound(&options);
        }
        forget();
    }
}

static void every_byte_is_read_once(void) {
    struct rng rng = {2};
    struct dr_stream_stats stats;
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        make_large(&rng, false);
        struct dr_findings found = check_quickly(&options, false, &stats);
        CHECK_INT(stats.bytes, <=, file_size() + count * 2 * DR_ALIGNMENT);
        CHECK_INT(stats.bytes, >=, file_size() - count * (DR_RECORD_HEAD_MAX + DR_RECORD_TAIL_MAX));
        dr_findings_destroy(&found);
        found = check_quickly(&options, true, &stats);
        CHECK_EQ(found.count, 0);
        CHECK_INT(stats.bytes, <=, 2 * DR_ALIGNMENT);
        dr_findings_destroy(&found);
        forget();
    }
}

/* ---- damage ---- */

static void flip_and_check(const struct dr_options *options, uint64_t offset) {
    flip(offset);
    struct dr_findings found = check(options);
    expect_one(&found, owner_of(offset), offset);
    dr_findings_destroy(&found);
    flip(offset);
}

/* Nothing in a file that we wrote may change unseen. */
static void every_flip_is_found(void) {
    struct rng rng = {3};
    const struct dr_options options = way(0);
    make_small(&rng, false);
    uint64_t large = checks[4].offset, behind = large + checks[4].length, size = file_size();
    for (uint64_t at = 0; at < size; at += at < large + 5000 || at > behind - 700 ? 3 : 50021)
        flip_and_check(&options, at);
    forget();
}

static void flips_in_large_records(void) {
    struct rng rng = {4};
    make_large(&rng, false);
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        for (unsigned i = 0; i < 15; i++)
            flip_and_check(&options, rng_below(&rng, file_size()));
        for (size_t i = 0; i < count; i++) {
            flip_and_check(&options, checks[i].offset);
            flip_and_check(&options, checks[i].payload_offset);
            flip_and_check(&options, checks[i].payload_offset + checks[i].payload_size - 1);
            flip_and_check(&options, checks[i].offset + checks[i].length - 1);
        }
        expect_sound(&options);
    }
    forget();
}

/* As an archive: payload, pickle, names and all that is said twice. The rest of headers is nobody's loss. */
static void flips_in_archives(void) {
    struct rng rng = {5};
    unsigned unseen = 0, tried = 0;
    make_large(&rng, true);
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        flip_and_check(&options, checks[1].payload_offset + rng_below(&rng, checks[1].payload_size));
        flip_and_check(&options, checks[3].payload_offset);
        flip_and_check(&options, checks[0].offset + 46); /* its pickle */
        flip_and_check(&options, checks[3].offset + checks[3].length - 22);
    }
    const struct dr_options options = way(0);
    for (uint64_t at = 0; at < checks[0].length; at++, tried++) {
        flip(checks[0].offset + at);
        struct dr_findings found = check(&options);
        for (size_t i = 0; i < found.count; i++)
            CHECK_EQ(found.problems[i].check, 0);
        unseen += found.count == 0;
        dr_findings_destroy(&found);
        flip(checks[0].offset + at);
    }
    /* Of each entry: version (local), versions, attributes and disk (directory); padding. */
    CHECK_INT(unseen, <=, 4 * (2 + 4 + 8) + checks[0].payload_offset - checks[0].offset);
    CHECK_INT(unseen, <, tried / 3);
    forget();
}

static void several_faults(void) {
    struct rng rng = {6};
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        make_large(&rng, false);
        uint64_t payload = checks[1].payload_offset;
        flip(checks[0].offset + 3);
        flip(payload + 10);
        flip(payload + MIB + 10);
        flip(payload + 4 * MIB);
        flip(checks[3].offset + checks[3].length - 1);
        struct dr_findings found = check(&options);
        CHECK_EQ(found.count, 4); /* the two blocks side by side are one */
        CHECK_EQ(found.problems[0].check, 0);
        CHECK_EQ(found.problems[1].offset, payload);
        CHECK_INT(found.problems[1].length, >, MIB);
        CHECK(!found.problems[1].has_crcs && found.problems[2].has_crcs);
        CHECK_EQ(found.problems[2].check, 1);
        CHECK_EQ(found.problems[3].check, 3);
        dr_findings_destroy(&found);
        forget();
    }
}

/* Very many faults of one record: some are kept, all are counted, and other records' are not lost. */
static void more_faults_than_are_kept(void) {
    enum { BLOCKS = 200 };
    struct rng rng = {7};
    const struct dr_options options = way(1);
    sample_shape(&samples[0], &rng, "int8", 1, (int64_t[]){BLOCKS * MIB});
    sample_bytes(&samples[1], &rng, 100);
    save(2, false);
    uint64_t grid = dr_align_up(checks[0].payload_offset, MIB);
    for (uint64_t i = 0; i < BLOCKS - 2; i += 2)
        flip(grid + i * MIB);
    flip(checks[1].offset);
    struct dr_findings found = check(&options);
    CHECK_EQ(found.count + found.unkept, (BLOCKS - 2) / 2 + 1);
    CHECK_INT(found.unkept, >, 0);
    CHECK_EQ(found.problems[found.count - 1].check, 1);
    dr_findings_destroy(&found);
    forget();
}

static void wrong_metadata(void) {
    struct rng rng = {8};
    const struct dr_options options = way(0);
    make_small(&rng, false);
    int64_t sizes[2] = {10, 30};
    const struct dr_check good = checks[0];
    checks[0].shape.sizes = sizes;
    struct dr_findings found = check(&options);
    CHECK_EQ(found.count, 2); /* its pickle, and the CRC of that in the directory */
    dr_findings_destroy(&found);
    checks[0].kind = DR_CHECK_OTHER;
    checks[0].crcs = NULL;
    found = check(&options);
    expect_one(&found, 0, good.offset);
    dr_findings_destroy(&found);
    checks[0] = good;
    checks[0].shape.dtype = dr_dtype_by_name("float64");
    found = check(&options);
    expect_one(&found, 0, good.payload_offset);
    dr_findings_destroy(&found);
    checks[0] = good;
    checks[0].length--;
    found = check(&options);
    expect_one(&found, 0, good.offset);
    dr_findings_destroy(&found);
    forget();
}

/* Payloads alone, with no record around them. */
static void raw_payloads(void) {
    struct rng rng = {18};
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        make_large(&rng, false);
        for (size_t i = 0; i < count; i++) {
            checks[i].kind = DR_CHECK_RAW;
            checks[i].offset = checks[i].payload_offset;
            checks[i].length = checks[i].payload_size;
        }
        expect_sound(&options);
        flip(checks[1].offset + checks[1].length - 1);
        struct dr_findings found = check(&options);
        expect_one(&found, 1, checks[1].offset + checks[1].length - 1);
        dr_findings_destroy(&found);
        const uint8_t *crcs = checks[1].crcs;
        checks[1].crcs = NULL;
        expect_sound(&options);
        CHECK_EQ(checks[1].unverified, DR_UNVERIFIED_BARE);
        checks[1].crcs = crcs;
        checks[1].length--;
        found = check(&options);
        expect_one(&found, 1, checks[1].offset);
        dr_findings_destroy(&found);
        forget();
    }
}

/* However many records share bytes, none is read twice. */
static void records_that_share_bytes(void) {
    struct rng rng = {9};
    const struct dr_options options = way(0);
    struct dr_stream_stats stats;
    make_large(&rng, false);
    for (size_t i = count; i < MOST; i++) {
        checks[i] = checks[1];
        checks[i].kind = DR_CHECK_OTHER;
        checks[i].offset += i;
        checks[i].length -= i;
    }
    count = MOST;
    struct dr_findings found = check_quickly(&options, false, &stats);
    CHECK_EQ(found.count, MOST - 4);
    CHECK_INT(stats.bytes, <=, file_size() + MOST * 2 * DR_ALIGNMENT);
    dr_findings_destroy(&found);
    count = 4;
    forget();
}

/* ---- files that are not as they should be ---- */

static void missing_and_short_files(void) {
    struct rng rng = {10};
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        make_large(&rng, false);
        CHECK_EQ(truncate(check_path("f"), (off_t)(checks[3].offset + 1000)), 0);
        struct dr_findings found = check(&options);
        expect_one(&found, 3, checks[3].offset + 1000);
        dr_findings_destroy(&found);
        CHECK_EQ(truncate(check_path("f"), 0), 0);
        found = check(&options);
        CHECK_EQ(found.count, count);
        dr_findings_destroy(&found);
        CHECK_EQ(unlink(check_path("f")), 0);
        found = check_quickly(&options, n % 2, NULL);
        CHECK_EQ(found.count, count);
        CHECK(strstr(found.problems[2].what, "missing"));
        dr_findings_destroy(&found);
        CHECK_EQ(mkfifo(check_path("f"), 0600), 0);
        found = check(&options);
        CHECK_EQ(found.count, count);
        CHECK(strstr(found.problems[0].what, "regular"));
        dr_findings_destroy(&found);
        unlink(check_path("f"));
        forget();
    }
}

static void names_that_lead_out(void) {
    struct rng rng = {11};
    struct dr_stream_stats stats;
    struct dr_findings found;
    struct dr_error error;
    static const struct dr_control never;
    const struct dr_options options = way(0);
    make_small(&rng, false);
    for (unsigned i = 0; i < 3; i++) {
        const char *bad = (const char *[]){"../f", "/etc/passwd", "x/../f"}[i];
        dr_error_clear(&error);
        CHECK_OK(verify_files(&bad, 1, checks, count, false, &options, &never, &found, &stats, &error), &error);
        CHECK_EQ(found.count, count);
        CHECK(strstr(found.problems[0].what, "outside"));
        dr_findings_destroy(&found);
    }
    forget();
}

/* ---- what cannot be read ---- */

static uint64_t bad_lo, bad_hi;
static atomic_uint failures_left;

/* A device with bad sectors, or one that fails a few times. */
static ssize_t failing_pread(int fd, void *data, size_t size, off_t offset) {
    unsigned left = atomic_load(&failures_left);
    bool bad = (uint64_t)offset < bad_hi && (uint64_t)offset + size > bad_lo;
    if (bad && left > 0) {
        if (left != UINT32_MAX)
            atomic_fetch_sub(&failures_left, 1);
        return -EIO;
    }
    return dr_sys_real.pread(fd, data, size, offset);
}

static struct dr_findings check_on_bad_device(const struct dr_options *options, uint64_t lo, uint64_t hi,
                                              unsigned failures) {
    struct dr_options threads = *options;
    threads.engine = "threads";
    bad_lo = lo;
    bad_hi = hi;
    atomic_store(&failures_left, failures);
    dr_sys.pread = failing_pread;
    struct dr_findings found = check(&threads);
    dr_sys = dr_sys_real;
    return found;
}

static void bad_sectors(void) {
    struct rng rng = {12};
    for (unsigned n = 0; n < WAYS; n++)
        for (unsigned kind = 0; kind < 2; kind++) {
            const struct dr_options options = way(n);
            make_large(&rng, kind);
            uint64_t sector = dr_align_up(checks[1].payload_offset + rng_below(&rng, 4 * MIB), DR_ALIGNMENT);
            struct dr_findings found = check_on_bad_device(&options, sector, sector + 2 * DR_ALIGNMENT, UINT32_MAX);
            CHECK_EQ(found.count, 1);
            CHECK_EQ(found.problems[0].check, 1);
            CHECK_EQ(found.problems[0].err, EIO);
            CHECK_EQ(found.problems[0].offset, sector);
            CHECK_EQ(found.problems[0].length, 2 * DR_ALIGNMENT);
            dr_findings_destroy(&found);
            found = check_on_bad_device(&options, 0, file_size(), UINT32_MAX);
            CHECK_INT(found.count, >=, count);
            for (size_t i = 0; i < found.count; i++)
                CHECK_EQ(found.problems[i].err, EIO);
            dr_findings_destroy(&found);
            forget();
        }
}

/* Only records that lie on the bad sector are blamed, though all were read with one block. */
static void bad_sector_among_small_records(void) {
    struct rng rng = {13};
    for (size_t i = 0; i < MOST; i++)
        sample_shape(&samples[i], &rng, "float32", 1, (int64_t[]){1024});
    save(MOST, false);
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        uint64_t sector = dr_align_up(checks[20].offset, DR_ALIGNMENT);
        struct dr_findings found = check_on_bad_device(&options, sector, sector + DR_ALIGNMENT, UINT32_MAX);
        CHECK_INT(found.count, >=, 1);
        CHECK_INT(found.count, <=, 2);
        for (size_t i = 0; i < found.count; i++) {
            const struct dr_check *c = &checks[found.problems[i].check];
            CHECK(c->offset < sector + DR_ALIGNMENT && c->offset + c->length > sector);
        }
        dr_findings_destroy(&found);
    }
    forget();
}

static void read_at_the_second_attempt(void) {
    struct rng rng = {14};
    const struct dr_options options = way(2);
    make_large(&rng, false);
    uint64_t at = checks[1].payload_offset + 2 * MIB;
    /* One for what the page cache has, which is then read directly. */
    struct dr_findings found = check_on_bad_device(&options, at, at + 1, 2);
    CHECK_EQ(found.count, 0);
    CHECK_EQ(found.repeated, 1);
    dr_findings_destroy(&found);
    forget();
}

/* Not a fault of the checkpoint's: who asks for direct I/O where there is none gets an error, as a load gives it. */
static void direct_where_there_is_none(void) {
    struct rng rng = {17};
    static const struct dr_control never;
    struct dr_options options = way(2);
    options.direct = DR_DIRECT_ON;
    make_large(&rng, false);
    struct dr_findings found;
    struct dr_stream_stats stats;
    DR_NEW_ERROR(error);
    dr_fault_arm(&(struct dr_fault){.call = "set_direct", .nth = 1, .err = EINVAL, .sticky = 1});
    CHECK_EQ(verify_files(names, 1, checks, count, false, &options, &never, &found, &stats, &error), -EINVAL);
    dr_fault_disarm();
    CHECK(error.call == DR_CALL_O_DIRECT);
    dr_findings_destroy(&found);
    forget();
}

/* Every system call fails once: an error, or findings; no descriptor stays open, and it ends. */
static void every_call_fails(void) {
    struct rng rng = {15};
    static const struct dr_control never;
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        make_large(&rng, n % 2);
        uint64_t counted = 1, nth = 0;
        while (counted >= nth++) {
            struct dr_findings found;
            struct dr_stream_stats stats;
            DR_NEW_ERROR(error);
            int before = check_open_descriptors();
            alarm(30);
            dr_fault_arm(&(struct dr_fault){.nth = nth, .err = EIO});
            int rc = verify_files(names, 1, checks, count, false, &options, &never, &found, &stats, &error);
            counted = dr_fault_disarm();
            CHECK_EQ(rc, -error.err);
            CHECK_EQ(check_open_descriptors(), before);
            for (size_t i = 0; rc == 0 && i < found.count; i++)
                CHECK(found.problems[i].err == EIO || found.problems[i].has_crcs == false);
            dr_findings_destroy(&found);
        }
        CHECK_INT(nth, >, 20);
        forget();
    }
}

static int stop_at_once(void *context) {
    (void)context;
    return 1;
}

static void cancelled(void) {
    struct rng rng = {16};
    const struct dr_control control = {stop_at_once, NULL};
    for (unsigned n = 0; n < WAYS; n++) {
        const struct dr_options options = way(n);
        struct dr_findings found;
        struct dr_stream_stats stats;
        DR_NEW_ERROR(error);
        make_large(&rng, false);
        int before = check_open_descriptors();
        int rc = verify_files(names, 1, checks, count, false, &options, &control, &found, &stats, &error);
        CHECK(rc == -ECANCELED || rc == 0); /* it may be over before it is asked */
        CHECK_EQ(check_open_descriptors(), before);
        dr_findings_destroy(&found);
        forget();
    }
}

struct clocked {
    double asked; /* when it was asked to stop; 0 before */
    unsigned polls;
};

static int stop_at_third_poll(void *context) {
    struct clocked *clocked = context;
    if (++clocked->polls == 3)
        clocked->asked = check_seconds();
    return clocked->polls >= 3;
}

/* A disk on which every read takes 20 ms and fails: all of one block would be tried for 20 s. */
static void cancelled_while_rereading(void) {
    struct rng rng = {17};
    for (unsigned n = 0; n < 4; n += 2) { /* by threads, through the page cache and directly */
        const struct dr_options options = way(n);
        struct clocked clocked = {0};
        const struct dr_control control = {stop_at_third_poll, &clocked};
        struct dr_findings found;
        struct dr_stream_stats stats;
        struct dr_error error;
        double best = 1e9;
        make_large(&rng, false);
        for (int attempt = 0; attempt < CHECK_TRIES && best > 1; attempt++) {
            clocked = (struct clocked){0};
            dr_error_clear(&error);
            dr_fault_arm(&(struct dr_fault){.call = "pread", .nth = 1, .sticky = true, .err = EIO, .delay_ms = 20});
            CHECK_FAILS(verify_files(names, 1, checks, count, false, &options, &control, &found, &stats, &error),
                        &error, ECANCELED);
            double seconds = check_seconds() - clocked.asked;
            dr_fault_disarm();
            dr_findings_destroy(&found);
            best = seconds < best ? seconds : best;
        }
        CHECK(best < 1);
        forget();
    }
}

CHECK_MAIN({"sound_files", sound_files}, {"every_byte_is_read_once", every_byte_is_read_once},
           {"every_flip_is_found", every_flip_is_found}, {"flips_in_large_records", flips_in_large_records},
           {"flips_in_archives", flips_in_archives}, {"several_faults", several_faults},
           {"more_faults_than_are_kept", more_faults_than_are_kept}, {"wrong_metadata", wrong_metadata},
           {"raw_payloads", raw_payloads}, {"records_that_share_bytes", records_that_share_bytes},
           {"missing_and_short_files", missing_and_short_files}, {"names_that_lead_out", names_that_lead_out},
           {"bad_sectors", bad_sectors}, {"bad_sector_among_small_records", bad_sector_among_small_records},
           {"read_at_the_second_attempt", read_at_the_second_attempt},
           {"direct_where_there_is_none", direct_where_there_is_none}, {"every_call_fails", every_call_fails},
           {"cancelled", cancelled}, {"cancelled_while_rereading", cancelled_while_rereading})
