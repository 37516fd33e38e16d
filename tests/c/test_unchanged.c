/* Which tensors have changed since they were written: digests of a writer, compared with what is in memory. */
#include "sample.h"

#include "base/crc.h"
#include "data/unchanged.h"

static const struct dr_control never;
enum { COUNT = 30, MIB = 1 << 20 };

/* A file of random tensors and the digests that its writer gave. */
struct saved {
    struct sample samples[COUNT];
    struct dr_source sources[COUNT];
    struct dr_known known[COUNT];
    uint8_t *digests;
    struct dr_digest_key key;
};

static void make_key(struct rng *rng, struct dr_digest_key *key) {
    uint8_t bytes[DR_DIGEST_KEY_BYTES];
    rng_fill(rng, bytes, sizeof bytes);
    dr_digest_key_init(key, bytes);
}

static void note(struct saved *saved, const struct dr_placed *placed) {
    uint8_t *next = saved->digests;
    for (size_t i = 0; i < COUNT; i++) {
        size_t size = DR_DIGEST_BYTES * dr_crc_count(placed[i].payload_offset, placed[i].payload_size);
        CHECK(placed[i].digests);
        memcpy(next, placed[i].digests, size);
        saved->known[i].source = &saved->sources[i];
        saved->known[i].payload_offset = placed[i].payload_offset;
        saved->known[i].digests = next;
        next += size;
    }
}

static void save(struct saved *saved, struct rng *rng, const struct dr_options *options) {
    struct dr_writer *writer;
    struct dr_placed placed[COUNT];
    DR_NEW_ERROR(error);
    make_key(rng, &saved->key);
    for (size_t i = 0; i < COUNT; i++) {
        sample_tensor(&saved->samples[i], rng, i % 6 ? 20000 : 3 * MIB, i % 3 == 0);
        saved->sources[i] = saved->samples[i].source;
    }
    saved->digests = check_alloc(64 * COUNT * DR_DIGEST_BYTES);
    CHECK_OK(dr_writer_open(&writer, check_dir, "f", 0, options, &error), &error);
    dr_writer_digest(writer, &saved->key);
    CHECK_OK(dr_writer_write(writer, saved->sources, COUNT, placed, &never, &error), &error);
    note(saved, placed);
    CHECK_OK(dr_writer_finish(writer, NULL, &never, &error), &error);
    dr_writer_close(writer);
    unlink(check_path("f"));
}

static void forget(struct saved *saved) {
    sample_free(saved->samples, COUNT);
    free(saved->digests);
}

static void find(struct saved *saved, unsigned workers) {
    DR_NEW_ERROR(error);
    CHECK_OK(dr_find_changed(&saved->key, saved->known, COUNT, workers, &never, &error), &error);
}

static void finds_what_changed(void) {
    struct rng rng = {80};
    for (unsigned round = 0; round < 6; round++) {
        struct saved saved;
        struct dr_options options = {.engine = "threads",
                                     .queue_depth = 4,
                                     .block_size = (1 + round % 3) * MIB,
                                     .workers = 1 + round % 3,
                                     .checksum = round % 2};
        save(&saved, &rng, &options);
        find(&saved, 1 + round % 4);
        for (size_t i = 0; i < COUNT; i++)
            CHECK(!saved.known[i].differs);
        size_t changed = 6 * rng_below(&rng, COUNT / 6);
        const struct dr_source *source = &saved.sources[changed];
        uint8_t first[DR_SAMPLE_BYTES], second[DR_SAMPLE_BYTES];
        dr_sample(&saved.key, source, first);
        if (source->size) { /* the first byte of the first element */
            *(uint8_t *)(uintptr_t)source->data ^= 1;
            find(&saved, 3);
            dr_sample(&saved.key, source, second);
            CHECK(memcmp(first, second, sizeof first) != 0);
        }
        for (size_t i = 0; i < COUNT; i++)
            CHECK_EQ(saved.known[i].differs, i == changed && source->size > 0);
        forget(&saved);
    }
}

/* A sample looks at a few places only; the digests look at all. */
static void samples_are_of_few_bytes(void) {
    struct rng rng = {81};
    struct saved saved;
    struct dr_options options = {
        .engine = "threads", .queue_depth = 4, .block_size = MIB, .workers = 2, .checksum = true};
    save(&saved, &rng, &options);
    int64_t sizes[] = {2 * MIB};
    struct sample sample;
    sample_shape(&sample, &rng, "uint8", 1, sizes);
    uint8_t before[DR_SAMPLE_BYTES], after[DR_SAMPLE_BYTES];
    dr_sample(&saved.key, &sample.source, before);
    ((uint8_t *)(uintptr_t)sample.source.data)[1000] ^= 1;
    dr_sample(&saved.key, &sample.source, after);
    CHECK_BYTES(before, after, sizeof after);
    sample_free(&sample, 1);
    forget(&saved);
}

static void parts_have_no_digests(void) {
    struct rng rng = {82};
    struct dr_writer *writer;
    DR_NEW_ERROR(error);
    struct dr_digest_key key;
    struct dr_placed placed;
    struct sample sample;
    int64_t sizes[] = {100};
    struct dr_options options = {.engine = "threads", .queue_depth = 4, .block_size = MIB, .workers = 1};
    make_key(&rng, &key);
    sample_shape(&sample, &rng, "uint8", 1, sizes);
    CHECK_OK(dr_writer_open(&writer, check_dir, "f", 0, &options, &error), &error);
    dr_writer_digest(writer, &key);
    struct dr_source part = sample.source;
    part.size = 50;
    part.strides = NULL;
    CHECK_FAILS(dr_writer_write(writer, &part, 1, &placed, &never, &error), &error, EINVAL);
    dr_writer_close(writer);
    sample_free(&sample, 1);
}

CHECK_MAIN({"finds_what_changed", finds_what_changed}, {"samples_are_of_few_bytes", samples_are_of_few_bytes},
           {"parts_have_no_digests", parts_have_no_digests})
