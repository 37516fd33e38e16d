/*
 * Saving and loading through both methods, with and without direct I/O: what
 * is written byte for byte, what comes back, and what is refused.
 */
#include "sample.h"

#include "base/crc.h"
#include "io/sys.h"
#include "io/sys_fault.h"

#include <fcntl.h>
#include <sys/wait.h>

enum { MIB = 1 << 20 };

static const struct dr_control never;
static const char *const engines[] = {"uring", "threads", "auto"};

static struct dr_options make_options(const char *engine, enum dr_direct direct) {
    return (struct dr_options){
        .engine = engine, .direct = direct, .queue_depth = 4, .block_size = MIB, .workers = 2, .checksum = true};
}

static bool has_direct(void) {
    int fd = open(check_path("probe"), O_RDWR | O_CREAT | O_DIRECT, 0666);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

enum { WAYS = 9 };

/* The n-th way to do the I/O; false when it is not to be had here. */
static bool vary(unsigned n, struct rng *rng, struct dr_options *options) {
    enum dr_direct direct = (enum dr_direct)(n / 3 % 3);
    *options = make_options(engines[n % 3], direct);
    options->block_size = (size_t)(1 + rng_below(rng, 4)) * MIB;
    options->workers = (unsigned)(1 + rng_below(rng, 3));
    options->queue_depth = (unsigned)(1 + rng_below(rng, 8));
    return (n % 3 != 0 || sample_has_uring()) && (direct != DR_DIRECT_ON || has_direct());
}

static void forget(const char *name) { unlink(check_path(name)); }

static void drop_cache(const char *name) {
    int fd = open(check_path(name), O_RDONLY);
    CHECK_INT(fd, >=, 0);
    CHECK_EQ(fdatasync(fd), 0);
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
}

/* A few large ones, many small ones, byte strings, parts. */
static size_t make_samples(struct sample *samples, size_t room, struct rng *rng) {
    for (size_t i = 0; i < room; i++) {
        struct sample *s = &samples[i];
        uint64_t most = rng_below(rng, 6) == 0 ? 3 * MIB : 20000;
        if (rng_below(rng, 5) == 0)
            sample_bytes(s, rng, rng_below(rng, most));
        else
            sample_tensor(s, rng, most, rng_below(rng, 3) == 0);
        if (!s->source.strides && s->source.total > 1 && rng_below(rng, 5) == 0)
            s->part_bytes = 1 + rng_below(rng, s->source.total - 1) / (1 + rng_below(rng, 3));
        if (s->part_bytes && s->source.total / s->part_bytes > 20)
            s->part_bytes = s->source.total / 7;
    }
    return room;
}

/* ---- round trips ---- */

static void load_slices(const char *name, const struct sample *samples, size_t count, const struct dr_options *options,
                        struct rng *rng) {
    enum { READS = 60 };
    struct target targets[READS];
    struct dr_read reads[READS];
    struct dr_stream_stats stats;
    DR_NEW_ERROR(error);
    uint64_t needed = 0;
    for (int i = 0; i < READS; i++) {
        const struct sample *s = &samples[rng_below(rng, count)];
        target_init(&targets[i], &reads[i], s, 0, rng, SLICE_RANDOM, rng_below(rng, 2));
        if (s->source.shape.dtype && rng_below(rng, 3) == 0) {
            reads[i].crcs = NULL;
            reads[i].has_whole_crc = true;
            reads[i].whole_crc = dr_crc32(0, s->payload, s->source.total);
        }
        needed += targets[i].needed;
    }
    CHECK_OK(sample_dr_load(&name, 1, reads, READS, options, &never, &stats, &error), &error);
    for (int i = 0; i < READS; i++) {
        target_check(&targets[i]);
        CHECK_EQ(reads[i].touched, targets[i].needed > 0);
    }
    CHECK_EQ(stats.engine == NULL, needed == 0);
    CHECK_INT(stats.cached_bytes, <=, stats.bytes);
    target_free(targets, READS);
}

static void round_trips(void) {
    struct rng rng = {30};
    for (unsigned n = 0; n < WAYS; n++) {
        enum { COUNT = 25 };
        struct sample samples[COUNT];
        struct dr_options options;
        struct dr_error error;
        struct dr_writer_stats saved;
        struct dr_stream_stats loaded;
        if (!vary(n, &rng, &options))
            continue;
        size_t count = make_samples(samples, COUNT, &rng);
        uint64_t hint = rng_below(&rng, 3) * 4 * MIB;
        CHECK_OK(sample_save("f", samples, count, 1 + rng_below(&rng, 10), hint, &options, NULL, &saved, &error),
                 &error);
        sample_check_file("f", samples, count, true);
        CHECK_EQ(saved.bytes, samples[count - 1].placed.offset + samples[count - 1].placed.length);
        CHECK(options.direct != DR_DIRECT_OFF || !saved.direct);
        CHECK(options.direct != DR_DIRECT_ON || saved.direct);
        CHECK(strcmp(options.engine, "auto") == 0 || strcmp(options.engine, saved.engine) == 0);
        for (int cold = 0; cold < 2; cold++) {
            if (cold)
                drop_cache("f");
            CHECK_OK(sample_load_all("f", samples, count, &options, NULL, &loaded, &error), &error);
            load_slices("f", samples, count, &options, &rng);
        }
        sample_free(samples, count);
        forget("f");
    }
}

static void without_checksums(void) {
    struct rng rng = {31};
    struct sample samples[10];
    struct dr_error error;
    struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    options.checksum = false;
    size_t count = make_samples(samples, 10, &rng);
    CHECK_OK(sample_save("f", samples, count, 4, 0, &options, NULL, NULL, &error), &error);
    sample_check_file("f", samples, count, false);
    CHECK_OK(sample_load_all("f", samples, count, &options, NULL, NULL, &error), &error);
    sample_free(samples, count);
    forget("f");
}

/* Empty files, empty windows, files that end on a block's boundary. */
static void odd_lengths(void) {
    struct rng rng = {32};
    const uint64_t sizes[] = {0, 1, 4095, 4096, MIB - 1, MIB, MIB + 1};
    for (unsigned d = 0; d <= DR_DIRECT_AUTO; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (size_t count = 0; count <= 2; count++) {
                struct sample samples[2];
                struct dr_error error;
                const struct dr_options options = make_options("auto", d && !has_direct() ? DR_DIRECT_AUTO : d);
                for (size_t s = 0; s < count; s++)
                    sample_bytes(&samples[s], &rng, sizes[i]);
                CHECK_OK(sample_save("f", samples, count, 1, 100, &options, NULL, NULL, &error), &error);
                sample_check_file("f", samples, count, true);
                CHECK_OK(sample_load_all("f", samples, count, &options, NULL, NULL, &error), &error);
                sample_free(samples, count);
                forget("f");
            }
    struct dr_writer *w;
    DR_NEW_ERROR(error);
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    struct sample sample;
    sample_bytes(&sample, &rng, 1000);
    CHECK_OK(dr_writer_open(&w, check_dir, "f", 0, &options, &error), &error);
    for (int i = 0; i < 3; i++) {
        struct dr_placed placed;
        CHECK_OK(dr_writer_write(w, NULL, 0, NULL, &never, &error), &error);
        CHECK_OK(dr_writer_write(w, &sample.source, 1, &placed, &never, &error), &error);
        CHECK_EQ(placed.offset, 1000 * i);
    }
    CHECK_OK(dr_writer_finish(w, NULL, &never, &error), &error);
    dr_writer_close(w);
    sample_free(&sample, 1);
    forget("f");
}

static void many_small(void) {
    enum { COUNT = 3000 };
    struct rng rng = {33};
    struct sample *samples = check_alloc(COUNT * sizeof *samples);
    struct dr_error error;
    struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    options.workers = 3;
    for (size_t i = 0; i < COUNT; i++)
        sample_tensor(&samples[i], &rng, 1 + rng_below(&rng, 6000), i % 7 == 0);
    CHECK_OK(sample_save("f", samples, COUNT, 1000, 0, &options, NULL, NULL, &error), &error);
    sample_check_file("f", samples, COUNT, true);
    CHECK_OK(sample_load_all("f", samples, COUNT, &options, NULL, NULL, &error), &error);
    /* Records are found again from their bytes alone. */
    struct dr_lookup *lookups = check_alloc(COUNT * sizeof *lookups);
    for (size_t i = 0; i < COUNT; i++)
        lookups[i] = (struct dr_lookup){.offset = samples[i].placed.offset, .length = samples[i].placed.length};
    CHECK_OK(sample_dr_locate((const char *const[]){"f"}, 1, lookups, COUNT, &never, &error), &error);
    for (size_t i = 0; i < COUNT; i++) {
        const struct dr_located *located = &lookups[i].located;
        CHECK(located->plain && located->dtype == samples[i].source.shape.dtype);
        CHECK_EQ(located->payload_offset, samples[i].placed.payload_offset);
        CHECK_EQ(located->payload_size, samples[i].placed.payload_size);
        CHECK_EQ(located->crc, dr_crc32(0, samples[i].payload, samples[i].source.total));
    }
    free(lookups);
    sample_free(samples, COUNT);
    free(samples);
    forget("f");
}

/* One load from several files, each opened and closed once its blocks are read. */
static void several_files(void) {
    enum { FILES = 9, EACH = 6 };
    struct rng rng = {34};
    struct sample samples[FILES][EACH];
    struct target targets[FILES * EACH];
    struct dr_read reads[FILES * EACH];
    char names[FILES][16];
    const char *list[FILES];
    struct dr_stream_stats stats;
    struct dr_error error;
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    for (size_t f = 0; f < FILES; f++) {
        snprintf(names[f], sizeof names[f], "f%zu", f);
        list[f] = names[f];
        make_samples(samples[f], EACH, &rng);
        CHECK_OK(sample_save(names[f], samples[f], EACH, 3, 0, &options, NULL, NULL, &error), &error);
        if (f % 2)
            drop_cache(names[f]);
        for (size_t i = 0; i < EACH; i++) {
            size_t r = i * FILES + f;
            target_init(&targets[r], &reads[r], &samples[f][i], f, &rng, SLICE_RANDOM, i % 2);
        }
    }
    CHECK_OK(sample_dr_load(list, FILES, reads, FILES * EACH, &options, &never, &stats, &error), &error);
    for (size_t r = 0; r < FILES * EACH; r++)
        target_check(&targets[r]);
    target_free(targets, FILES * EACH);
    for (size_t f = 0; f < FILES; f++) {
        sample_free(samples[f], EACH);
        forget(names[f]);
    }
}

/* No more is read than a slice needs, and no byte twice. */
static void reads_only_what_is_needed(void) {
    struct rng rng = {35};
    struct sample sample;
    struct dr_stream_stats stats;
    struct dr_error error;
    const char *name = "f";
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    sample_shape(&sample, &rng, "float32", 2, (int64_t[]){1024, 2048});
    CHECK_OK(sample_save(name, &sample, 1, 1, 0, &options, NULL, NULL, &error), &error);
    drop_cache(name);
    for (int d = 0; d < 2; d++)
        for (int part = 0; part < 4; part++) {
            struct target target = {.lengths = {sample.sizes[0], sample.sizes[1]}};
            struct dr_read read;
            target.lengths[d] /= 4;
            target.offsets[d] = part * target.lengths[d];
            target_finish(&target, &read, &sample, 0, &rng, false);
            CHECK_OK(sample_dr_load(&name, 1, &read, 1, &options, &never, &stats, &error), &error);
            target_check(&target);
            CHECK_INT(stats.bytes, <=, d == 0 ? target.needed * 11 / 10 : sample.source.total);
            target_free(&target, 1);
        }
    struct target targets[5];
    struct dr_read reads[5];
    for (int i = 0; i < 5; i++)
        target_init(&targets[i], &reads[i], &sample, 0, &rng, SLICE_WHOLE, i % 2);
    CHECK_OK(sample_dr_load(&name, 1, reads, 5, &options, &never, &stats, &error), &error);
    CHECK_INT(stats.bytes, <=, sample.source.total + 8192);
    for (int i = 0; i < 5; i++)
        target_check(&targets[i]);
    target_free(targets, 5);
    sample_free(&sample, 1);
    forget(name);
}

/* ---- what is wrong with a file ---- */

static void flip_bit(const char *name, uint64_t offset) {
    int fd = open(check_path(name), O_RDWR);
    uint8_t byte;
    CHECK_EQ(pread(fd, &byte, 1, (off_t)offset), 1);
    byte ^= 0x10;
    CHECK_EQ(pwrite(fd, &byte, 1, (off_t)offset), 1);
    close(fd);
}

static void flipped_bits(void) {
    enum { COUNT = 12 };
    struct rng rng = {36};
    struct sample samples[COUNT];
    struct dr_error error;
    const char *name = "f";
    for (size_t i = 0; i < COUNT; i++)
        sample_shape(&samples[i], &rng, "int16", 2, (int64_t[]){i % 4 == 0 ? 900 : 3, 1000});
    struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    CHECK_OK(sample_save(name, samples, COUNT, COUNT, 0, &options, NULL, NULL, &error), &error);
    for (int i = 0; i < 24; i++) {
        size_t hit = rng_below(&rng, COUNT);
        uint64_t at = samples[hit].placed.payload_offset + rng_below(&rng, samples[hit].source.total);
        options.engine = engines[1 + i % 2];
        options.direct = i % 3 ? DR_DIRECT_AUTO : DR_DIRECT_OFF;
        flip_bit(name, at);
        if (i % 4 == 0) {
            /* With only a CRC of the whole it is caught all the same. */
            struct target target;
            struct dr_read read;
            struct dr_stream_stats stats;
            target_init(&target, &read, &samples[hit], 0, &rng, SLICE_WHOLE, false);
            read.crcs = NULL;
            read.has_whole_crc = true;
            read.whole_crc = dr_crc32(0, samples[hit].payload, samples[hit].source.total);
            dr_error_clear(&error);
            CHECK_FAILS(sample_dr_load(&name, 1, &read, 1, &options, &never, &stats, &error), &error, EBADMSG);
            CHECK_EQ(error.item, 0);
            target_free(&target, 1);
        } else {
            CHECK_FAILS(sample_load_all(name, samples, COUNT, &options, NULL, NULL, &error), &error, EBADMSG);
            CHECK_EQ(error.item, hit);
            CHECK_INT(error.offset, <=, at);
            CHECK_INT(error.offset + DR_CRC_BLOCK, >, at);
        }
        CHECK_EQ(error.kind, DR_ERROR_CORRUPT);
        CHECK(strcmp(error.path, check_path(name)) == 0);
        CHECK(error.detail[0]);
        flip_bit(name, at);
    }
    options.checksum = false;
    flip_bit(name, samples[3].placed.payload_offset);
    samples[3].payload[0] ^= 0x10;
    CHECK_OK(sample_load_all(name, samples, COUNT, &options, NULL, NULL, &error), &error);
    sample_free(samples, COUNT);
    forget(name);
}

/* All is checked before the first byte lands. */
static void check_refused(const char *name, struct dr_read *reads, size_t count, const struct target *targets, int err,
                          int64_t item) {
    struct dr_stream_stats stats;
    DR_NEW_ERROR(error);
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    int before = check_open_descriptors();
    CHECK_FAILS(sample_dr_load(&name, 1, reads, count, &options, &never, &stats, &error), &error, err);
    CHECK_EQ(check_open_descriptors(), before);
    if (item >= 0)
        CHECK_EQ(error.item, item);
    for (size_t i = 0; i < count; i++) {
        CHECK(target_is_untouched(&targets[i]));
        CHECK(!reads[i].touched);
    }
}

static void lies_about_a_file(void) {
    enum { COUNT = 3 };
    struct rng rng = {37};
    struct sample samples[COUNT];
    struct target targets[COUNT];
    struct dr_read reads[COUNT];
    struct dr_error error;
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    for (size_t i = 0; i < COUNT; i++)
        sample_shape(&samples[i], &rng, "float32", 2, (int64_t[]){100, 200});
    CHECK_OK(sample_save("f", samples, COUNT, COUNT, 0, &options, NULL, NULL, &error), &error);
    for (size_t i = 0; i < COUNT; i++)
        target_init(&targets[i], &reads[i], &samples[i], 0, &rng, SLICE_WHOLE, false);
    struct dr_read right = reads[1];
    const uint64_t file_size = samples[2].placed.offset + samples[2].placed.length;
    reads[1].payload_offset = file_size - reads[1].payload_size + 1;
    check_refused("f", reads, COUNT, targets, EBADMSG, 1);
    reads[1].payload_offset = UINT64_MAX - 10;
    check_refused("f", reads, COUNT, targets, EBADMSG, 1);
    reads[1] = right;
    reads[1].payload_size = UINT64_MAX;
    check_refused("f", reads, COUNT, targets, EBADMSG, 1);
    reads[1].payload_size = right.payload_size - 4;
    check_refused("f", reads, COUNT, targets, EBADMSG, 1);
    reads[1] = right;
    reads[1].chunk.sizes = (int64_t[]){-100, -200};
    check_refused("f", reads, COUNT, targets, EBADMSG, 1);
    reads[1].chunk.sizes = (int64_t[]){(int64_t)1 << 62, 16};
    check_refused("f", reads, COUNT, targets, EBADMSG, 1);
    reads[1] = right;
    static const int64_t slices[][4] = {{-1, 0, 100, 200}, {1, 0, 100, 200},     {0, 0, 100, 201},
                                        {0, 0, -1, 200},   {INT64_MAX, 0, 1, 1}, {0, INT64_MAX, 1, INT64_MAX},
                                        {0, 201, 1, 0}};
    for (size_t i = 0; i < sizeof slices / sizeof *slices; i++) {
        reads[1].offsets = slices[i];
        reads[1].lengths = slices[i] + 2;
        check_refused("f", reads, COUNT, targets, EINVAL, 1);
    }
    reads[1] = right;
    for (uint64_t size = 0; size < file_size; size += 1 + file_size / 20) {
        CHECK_EQ(truncate(check_path("f"), (off_t)size), 0);
        check_refused("f", reads, COUNT, targets, EBADMSG, -1);
    }
    target_free(targets, COUNT);
    sample_free(samples, COUNT);
    forget("f");
}

/* The file shrinks after its length was checked. */
static int fstat_as_before(int fd, struct stat *out) {
    int rc = dr_sys_real.fstat(fd, out);
    out->st_size = 8 * MIB;
    return rc;
}

static void shrinks_meanwhile(void) {
    struct rng rng = {38};
    struct sample sample;
    struct dr_error error;
    sample_bytes(&sample, &rng, 3 * MIB);
    struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    CHECK_OK(sample_save("f", &sample, 1, 1, 0, &options, NULL, NULL, &error), &error);
    dr_sys.fstat = fstat_as_before;
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(truncate(check_path("f"), 2 * MIB - i / 3 * 1000), 0);
        options.direct = (enum dr_direct)(i % 3);
        if (options.direct == DR_DIRECT_ON && !has_direct())
            continue;
        if (i % 2)
            drop_cache("f");
        CHECK_FAILS(sample_load_all("f", &sample, 1, &options, NULL, NULL, &error), &error, EBADMSG);
        CHECK_EQ(error.item, 0);
    }
    dr_sys = dr_sys_real;
    sample_free(&sample, 1);
    forget("f");
}

static void bad_names(void) {
    static const struct {
        const char *name;
        int err;
    } names[] = {
        {"missing", ENOENT},
        {"../secret", EBADMSG},
        {"sub/../../secret", EBADMSG},
        {"..", EBADMSG},
        {"/etc/hostname", EBADMSG},
        {"", EBADMSG},
        {"sub/..", EBADMSG},
        {"out", EXDEV},
        {"absolute", EXDEV},
        {"up/secret", EXDEV},
        {"sub", EBADMSG},
        {"fifo", EBADMSG},
        {"sub/missing", ENOENT},
        {"file/below", ENOTDIR},
    };
    size_t end = strlen(check_dir);
    check_write_file("secret", "0123456789", 10);
    CHECK_EQ(mkdir(check_path("base"), 0777), 0);
    CHECK_INT(end + 5, <, sizeof check_dir);
    strcpy(check_dir + end, "/base");
    check_write_file("file", "0123456789", 10);
    CHECK_EQ(mkdir(check_path("sub"), 0777), 0);
    CHECK_EQ(symlink("../secret", check_path("out")), 0);
    CHECK_EQ(symlink("..", check_path("up")), 0);
    CHECK_EQ(symlink("/etc/passwd", check_path("absolute")), 0);
    CHECK_EQ(mkfifo(check_path("fifo"), 0666), 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct target target = {.lengths = {10}};
        struct rng rng = {1};
        struct sample sample;
        struct dr_read read;
        sample_bytes(&sample, &rng, 10);
        sample.placed.payload_size = 10;
        target_finish(&target, &read, &sample, 0, &rng, false);
        int err = names[i].err;
        if (err == EXDEV && !check_has_openat2())
            err = strchr(names[i].name, '/') ? ENOTDIR : ELOOP;
        alarm(10);
        check_refused(names[i].name, &read, 1, &target, err, -1);
        struct dr_lookup lookup = {.length = 10};
        DR_NEW_ERROR(error);
        CHECK_FAILS(sample_dr_locate(&names[i].name, 1, &lookup, 1, &never, &error), &error, err);
        target_free(&target, 1);
        sample_free(&sample, 1);
    }
    check_dir[end] = '\0';
}

/* ---- what a writer refuses ---- */

static void existing_file(void) {
    struct rng rng = {39};
    struct sample sample;
    struct dr_error error;
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    sample_bytes(&sample, &rng, 10);
    check_write_file("there", "old", 3);
    CHECK_FAILS(sample_save("there", &sample, 1, 1, 0, &options, NULL, NULL, &error), &error, EEXIST);
    CHECK(check_exists("there"));
    CHECK_FAILS(sample_save("../there2", &sample, 1, 1, 0, &options, NULL, NULL, &error), &error, EXDEV);
    CHECK_FAILS(sample_save("no/there2", &sample, 1, 1, 0, &options, NULL, NULL, &error), &error, ENOENT);
    sample_free(&sample, 1);
}

/* Each makes the writer fail, and the file go. */
static void impossible_sources(void) {
    static const uint8_t data[4000];
    const struct dr_dtype *f = dr_dtype_by_name("float32");
    const struct dr_source whole = {.shape = {f, 1, (int64_t[]){1000}}, .data = data, .size = 4000, .total = 4000};
    struct dr_source wrong[8];
    for (int i = 0; i < 8; i++)
        wrong[i] = whole;
    wrong[0].total = wrong[0].size = 3996;
    wrong[1].size = 4004;
    wrong[2].part_offset = 4;
    wrong[3].part_offset = 2000, wrong[3].size = 2000;
    wrong[4].strides = (int64_t[]){1}, wrong[4].size = 2000;
    wrong[5].shape.sizes = (int64_t[]){-1000};
    wrong[6].shape.ndim = DR_MAX_DIMS + 1;
    wrong[7].size = UINT64_MAX, wrong[7].part_offset = 8;
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    for (int i = 0; i < 8; i++)
        for (size_t at = 0; at < 2; at++) {
            struct dr_source sources[2] = {whole, whole};
            struct dr_placed placed[2];
            struct dr_writer *w;
            DR_NEW_ERROR(error);
            sources[at] = wrong[i];
            CHECK_OK(dr_writer_open(&w, check_dir, "f", 0, &options, &error), &error);
            CHECK_FAILS(dr_writer_write(w, sources, 2, placed, &never, &error), &error, EINVAL);
            CHECK_EQ(error.item, at);
            dr_error_clear(&error);
            CHECK_FAILS(dr_writer_write(w, &whole, 1, placed, &never, &error), &error, EINVAL);
            dr_error_clear(&error);
            CHECK_FAILS(dr_writer_finish(w, NULL, &never, &error), &error, EINVAL);
            dr_writer_close(w);
            CHECK(!check_exists("f"));
        }
}

/* Calls of dr_writer_write with parts of a tensor of 4000 bytes; the last one is refused, or the finish is. */
static void parts_out_of_order(void) {
    static const uint8_t data[4000];
    static const struct {
        uint64_t offset[3], size[3];
        int calls;
    } cases[] = {
        {{0, 1000}, {2000, 2000}, 2},             /* overlap */
        {{0, 3000}, {2000, 1000}, 2},             /* gap */
        {{0, 0}, {2000, 4000}, 2},                /* another in between */
        {{0, 0}, {2000, 2000}, 2},                /* begun again */
        {{2000}, {2000}, 1},                      /* no beginning */
        {{0, 2000, 2000}, {2000, 2000, 2000}, 3}, /* too much */
        {{0}, {2000}, 1},                         /* no end */
        {{0, 2000}, {2000, 1999}, 2},             /* almost an end */
        {{0, 0}, {0, 4000}, 2},                   /* a part of nothing */
    };
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dr_writer *w;
        DR_NEW_ERROR(error);
        int rc = 0;
        CHECK_OK(dr_writer_open(&w, check_dir, "f", 0, &options, &error), &error);
        for (int c = 0; c < cases[i].calls && rc == 0; c++) {
            struct dr_placed placed;
            const struct dr_source part = {.shape = {dr_dtype_by_name("int8"), 1, (int64_t[]){4000}},
                                           .data = data + cases[i].offset[c],
                                           .size = cases[i].size[c],
                                           .total = 4000,
                                           .part_offset = cases[i].offset[c]};
            rc = dr_writer_write(w, &part, 1, &placed, &never, &error);
        }
        if (rc == 0)
            rc = dr_writer_finish(w, NULL, &never, &error);
        if (rc != -EINVAL)
            CHECK_FAIL("failed: case %zu gave %d", i, rc);
        dr_writer_close(w);
        CHECK(!check_exists("f"));
    }
}

static void unfinished_files_go(void) {
    struct rng rng = {40};
    struct sample sample;
    struct dr_placed placed;
    struct dr_writer *w;
    DR_NEW_ERROR(error);
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    sample_bytes(&sample, &rng, 3 * MIB);
    for (int written = 0; written < 2; written++) {
        int before = check_open_descriptors();
        CHECK_OK(dr_writer_open(&w, check_dir, "f", 0, &options, &error), &error);
        if (written)
            CHECK_OK(dr_writer_write(w, &sample.source, 1, &placed, &never, &error), &error);
        CHECK(check_exists("f"));
        pid_t child = fork();
        if (child == 0) { /* a child's writer is its parent's: it must not take the file away */
            DR_NEW_ERROR(refused);
            int rc = dr_writer_write(w, &sample.source, 1, &placed, &never, &refused);
            dr_writer_close(w);
            _exit(rc == -EINVAL ? 0 : 1);
        }
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
        CHECK(check_exists("f"));
        dr_writer_close(w);
        CHECK(!check_exists("f"));
        CHECK_EQ(check_open_descriptors(), before);
    }
    dr_writer_close(NULL);
    sample_free(&sample, 1);
}

static void no_space_is_known_at_once(void) {
    struct rng rng = {41};
    struct sample sample;
    struct dr_error error;
    const struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    sample_bytes(&sample, &rng, 3 * MIB);
    dr_fault_arm(&(struct dr_fault){.call = "fallocate", .nth = 1, .err = ENOSPC});
    CHECK_FAILS(sample_save("f", &sample, 1, 1, 3 * MIB, &options, NULL, NULL, &error), &error, ENOSPC);
    CHECK(!check_exists("f"));
    CHECK(dr_error_cure(&error)[0]);
    dr_fault_arm(&(struct dr_fault){.call = "fallocate", .nth = 1, .err = EOPNOTSUPP});
    CHECK_OK(sample_save("f", &sample, 1, 1, 3 * MIB, &options, NULL, NULL, &error), &error);
    dr_fault_disarm();
    sample_check_file("f", &sample, 1, true);
    sample_free(&sample, 1);
    forget("f");
}

static void direct_refused(void) {
    struct rng rng = {42};
    struct sample sample;
    struct dr_error error;
    struct dr_writer_stats saved;
    struct dr_stream_stats loaded;
    struct dr_options options = make_options("auto", DR_DIRECT_ON);
    sample_bytes(&sample, &rng, 3 * MIB);
    const struct dr_fault refuse = {.call = "set_direct", .nth = 1, .sticky = true, .err = EINVAL};
    dr_fault_arm(&refuse);
    CHECK_FAILS(sample_save("f", &sample, 1, 1, 0, &options, NULL, NULL, &error), &error, EINVAL);
    CHECK(error.call == DR_CALL_O_DIRECT);
    CHECK(!check_exists("f"));
    options.direct = DR_DIRECT_AUTO;
    CHECK_OK(sample_save("f", &sample, 1, 1, 0, &options, NULL, &saved, &error), &error);
    CHECK(!saved.direct);
    drop_cache("f");
    CHECK_OK(sample_load_all("f", &sample, 1, &options, NULL, &loaded, &error), &error);
    CHECK(!loaded.direct);
    options.direct = DR_DIRECT_ON;
    CHECK_FAILS(sample_load_all("f", &sample, 1, &options, NULL, NULL, &error), &error, EINVAL);
    dr_fault_disarm();
    sample_free(&sample, 1);
    forget("f");
}

/* ---- cancelling ---- */

static ssize_t slow_pwrite(int fd, const void *data, size_t size, off_t offset) {
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    return dr_sys_real.pwrite(fd, data, size, offset);
}

static ssize_t slow_pread(int fd, void *data, size_t size, off_t offset) {
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    return dr_sys_real.pread(fd, data, size, offset);
}

static int cancel_after_50_ms(void *context) {
    double *cancelled = context;
    if (*cancelled == 0 && check_seconds() - cancelled[1] > 0.05)
        *cancelled = check_seconds();
    return *cancelled != 0;
}

/* Seconds from the cancel to the return. */
static double cancel_once(struct sample *sample, bool saving) {
    struct dr_error error;
    struct dr_options options = make_options("threads", DR_DIRECT_OFF);
    options.queue_depth = 2;
    double times[2] = {0, check_seconds()};
    const struct dr_control control = {cancel_after_50_ms, times};
    dr_sys.pwrite = slow_pwrite;
    dr_sys.pread = slow_pread;
    if (saving)
        CHECK_FAILS(sample_save("f", sample, 1, 1, 0, &options, &control, NULL, &error), &error, ECANCELED);
    else
        CHECK_FAILS(sample_load_all("f", sample, 1, &options, &control, NULL, &error), &error, ECANCELED);
    double seconds = check_seconds() - times[0];
    CHECK_EQ(error.kind, DR_ERROR_CANCELLED);
    dr_sys = dr_sys_real;
    return seconds;
}

static void cancels(void) {
    struct rng rng = {43};
    struct sample sample;
    struct dr_error error;
    double seconds = 1;
    const struct dr_options options = make_options("threads", DR_DIRECT_OFF);
    sample_bytes(&sample, &rng, 20 * MIB);
    for (int try = 0; try < CHECK_TRIES && seconds >= 0.2; try++) {
        seconds = cancel_once(&sample, true);
        CHECK(!check_exists("f"));
    }
    CHECK(seconds < 0.2);
    CHECK_OK(sample_save("f", &sample, 1, 1, 0, &options, NULL, NULL, &error), &error);
    seconds = 1;
    for (int try = 0; try < CHECK_TRIES && seconds >= 0.2; try++)
        seconds = cancel_once(&sample, false);
    CHECK(seconds < 0.2);
    sample_free(&sample, 1);
    forget("f");
}

/* ---- small windows ---- */

static atomic_uint writes, at_once, most_at_once;
static unsigned failing; /* which write; 0: none */

static ssize_t counted_pwrite(int fd, const void *data, size_t size, off_t offset) {
    unsigned number = atomic_fetch_add(&writes, 1) + 1, now = atomic_fetch_add(&at_once, 1) + 1;
    unsigned most = atomic_load(&most_at_once);
    while (now > most && !atomic_compare_exchange_weak(&most_at_once, &most, now))
        ;
    ssize_t n = slow_pwrite(fd, data, size, offset);
    atomic_fetch_sub(&at_once, 1);
    return number == failing ? -EIO : n;
}

static int save_one_by_one(struct sample *samples, size_t count, bool overlaps, struct dr_error *error) {
    struct dr_options options = make_options("threads", DR_DIRECT_OFF);
    struct dr_writer *w;
    options.workers = 1;
    atomic_store(&writes, 0);
    atomic_store(&most_at_once, 0);
    dr_error_clear(error);
    int rc = dr_writer_open(&w, check_dir, "f", 0, &options, error);
    if (rc < 0)
        return rc;
    if (overlaps)
        dr_writer_overlap(w);
    for (size_t i = 0; i < count && rc == 0; i++)
        rc = dr_writer_write(w, &samples[i].source, 1, &samples[i].placed, &never, error);
    if (rc == 0)
        rc = dr_writer_finish(w, NULL, &never, error);
    dr_writer_close(w);
    return rc;
}

/* A block that one call has filled is written while the next calls fill more; its failure is not lost. */
static void blocks_go_on_behind_a_call(void) {
    enum { COUNT = 12 };
    struct rng rng = {44};
    struct sample samples[COUNT];
    struct dr_error error;
    for (int i = 0; i < COUNT; i++)
        sample_bytes(&samples[i], &rng, MIB + 1000);
    dr_sys.pwrite = counted_pwrite;
    CHECK_OK(save_one_by_one(samples, COUNT, false, &error), &error);
    CHECK_EQ(atomic_load(&most_at_once), 1);
    forget("f");
    CHECK_OK(save_one_by_one(samples, COUNT, true, &error), &error);
    CHECK(atomic_load(&most_at_once) > 1);
    CHECK(check_exists("f"));
    unsigned all = atomic_load(&writes);
    forget("f");
    for (failing = 1; failing <= all; failing++) {
        CHECK_FAILS(save_one_by_one(samples, COUNT, true, &error), &error, EIO);
        CHECK(!check_exists("f"));
    }
    dr_sys = dr_sys_real;
    sample_free(samples, COUNT);
}

/* ---- a file system that takes files from their beginning to their end ---- */

static off_t taken; /* of the one file */

static int no_fallocate(int fd, off_t size) {
    (void)fd, (void)size;
    return -EOPNOTSUPP;
}

static int no_ftruncate(int fd, off_t size) {
    (void)fd, (void)size;
    return -EPERM;
}

static int statfs_of_fuse(const char *path, struct statfs *out) {
    int rc = dr_sys_real.statfs(path, out);
    out->f_type = 0x65735546;
    return rc;
}

static ssize_t pwrite_in_order(int fd, const void *data, size_t size, off_t offset) {
    if (offset != taken)
        return -ESPIPE;
    ssize_t n = dr_sys_real.pwrite(fd, data, size > MIB / 2 ? MIB / 2 : size, offset);
    taken += n > 0 ? n : 0;
    return n;
}

static void goes_from_the_beginning_to_the_end(void) {
    enum { COUNT = 40 };
    struct rng rng = {45};
    struct sample samples[COUNT];
    for (unsigned n = 0; n < 4 * WAYS; n++) {
        struct dr_options options;
        struct dr_error error;
        if (!vary(n, &rng, &options) || options.direct == DR_DIRECT_ON)
            continue;
        size_t count = make_samples(samples, COUNT, &rng);
        dr_sys.fallocate = no_fallocate;
        dr_sys.ftruncate = no_ftruncate;
        dr_sys.statfs = statfs_of_fuse;
        if (n % 2) { /* all of whose writes are seen */
            options.engine = "threads";
            dr_sys.pwrite = pwrite_in_order;
        }
        taken = 0;
        CHECK_OK(sample_save("f", samples, count, 7, 10 * MIB, &options, NULL, NULL, &error), &error);
        dr_sys = dr_sys_real;
        sample_check_file("f", samples, count, true);
        sample_free(samples, count);
        forget("f");
    }
}

CHECK_MAIN({"round_trips", round_trips}, {"without_checksums", without_checksums}, {"odd_lengths", odd_lengths},
           {"many_small", many_small}, {"several_files", several_files},
           {"reads_only_what_is_needed", reads_only_what_is_needed}, {"flipped_bits", flipped_bits},
           {"lies_about_a_file", lies_about_a_file}, {"shrinks_meanwhile", shrinks_meanwhile}, {"bad_names", bad_names},
           {"existing_file", existing_file}, {"impossible_sources", impossible_sources},
           {"parts_out_of_order", parts_out_of_order}, {"unfinished_files_go", unfinished_files_go},
           {"no_space_is_known_at_once", no_space_is_known_at_once}, {"direct_refused", direct_refused},
           {"cancels", cancels}, {"blocks_go_on_behind_a_call", blocks_go_on_behind_a_call},
           {"goes_from_the_beginning_to_the_end", goes_from_the_beginning_to_the_end})
