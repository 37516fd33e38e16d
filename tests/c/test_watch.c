/*
 * What a watch sees of a save and of a load: every byte counted once, every block in its spans, nothing beyond the
 * room.
 */
#include "base/align.h"
#include "base/crc.h"
#include "sample.h"

#include <fcntl.h>

enum { MIB = 1 << 20, PAYLOAD = 7 * MIB + 12345, ROOM = 256 };

static const struct dr_control never;
static uint8_t payload[PAYLOAD], loaded[PAYLOAD];

static struct dr_options make_options(const char *engine, struct dr_watch *watch) {
    return (struct dr_options){.engine = engine,
                               .direct = DR_DIRECT_AUTO,
                               .queue_depth = 4,
                               .block_size = MIB,
                               .workers = 2,
                               .checksum = true,
                               .sync = true,
                               .watch = watch};
}

/* Writes the payload as one string of bytes; its CRCs go to crcs. */
static uint64_t save(const char *name, const struct dr_options *options, uint8_t *crcs) {
    struct rng rng = {60};
    rng_fill(&rng, payload, PAYLOAD);
    DR_NEW_ERROR(error);
    struct dr_writer *writer;
    struct dr_source source = {.data = payload, .size = PAYLOAD, .total = PAYLOAD};
    struct dr_placed placed;
    unlink(check_path(name));
    CHECK_OK(dr_writer_open(&writer, check_dir, name, PAYLOAD, options, &error), &error);
    CHECK_OK(dr_writer_write(writer, &source, 1, &placed, &never, &error), &error);
    memcpy(crcs, placed.crcs, 4 * dr_crc_count(0, PAYLOAD));
    CHECK_OK(dr_writer_finish(writer, NULL, &never, &error), &error);
    struct dr_writer_stats stats;
    dr_writer_stats(writer, &stats);
    dr_writer_close(writer);
    return stats.bytes;
}

static void load(const char *name, const struct dr_options *options, const uint8_t *crcs) {
    static const int64_t size = PAYLOAD, zero = 0, one = 1;
    DR_NEW_ERROR(error);
    struct dr_read read = {.payload_size = PAYLOAD,
                           .chunk = {dr_dtype_by_name("uint8"), 1, &size},
                           .offsets = &zero,
                           .lengths = &size,
                           .memory = loaded,
                           .strides = &one,
                           .crcs = crcs};
    struct dr_stream_stats stats;
    CHECK_OK(sample_dr_load(&name, 1, &read, 1, options, &never, &stats, &error), &error);
    CHECK_EQ(stats.bytes, PAYLOAD);
    CHECK_BYTES(loaded, payload, PAYLOAD);
}

static void drop_cache(const char *name) {
    int fd = open(check_path(name), O_RDONLY);
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
}

/* Bytes of all spans of a step; each lies in time, and after `since`. */
static uint64_t bytes_of(const struct dr_watch *watch, enum dr_step step, uint64_t since, uint64_t *crc_ns) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < watch->count && i < watch->room; i++) {
        const struct dr_span *s = &watch->spans[i];
        CHECK(since <= s->begin && s->begin <= s->end);
        CHECK_INT(s->crc, <=, s->end - s->begin);
        CHECK_INT(s->worker, <, 2);
        CHECK(s->slot < 2 || s->slot == DR_NO_SLOT);
        bytes += s->step == step ? s->size : 0;
        *crc_ns += s->step == step ? s->crc : 0;
    }
    return bytes;
}

static void watched(void) {
    static struct dr_span spans[ROOM];
    static uint8_t crcs[4 * (PAYLOAD / MIB + 2)];
    for (int n = 0; n < 2; n++) {
        _Atomic uint64_t done = 5;
        struct dr_watch watch = {&done, spans, ROOM, 0};
        uint64_t since = dr_watch_now(&watch), crc_ns = 0, none = 0;
        struct dr_options options = make_options(n ? "threads" : "auto", &watch);
        uint64_t written = save("watched", &options, crcs);
        CHECK_INT(done, >=, 5 + written);
        CHECK_INT(done, <, 5 + written + DR_ALIGNMENT); /* the last block is padded */
        CHECK_EQ(bytes_of(&watch, DR_STEP_FILL, since, &crc_ns), PAYLOAD);
        CHECK_INT(crc_ns, >, 0);
        CHECK_INT(bytes_of(&watch, DR_STEP_WRITE, since, &none), >=, PAYLOAD);
        CHECK_EQ(bytes_of(&watch, DR_STEP_SYNC, since, &none), PAYLOAD);
        CHECK_EQ(bytes_of(&watch, DR_STEP_ALLOCATE, since, &none), PAYLOAD);
        CHECK_EQ(none, 0);
        for (int cached = 0; cached < 2; cached++) {
            if (!cached)
                drop_cache("watched");
            atomic_store(&done, 0);
            atomic_store(&watch.count, 0);
            crc_ns = 0;
            load("watched", &options, crcs);
            CHECK_EQ(done, PAYLOAD);
            CHECK_EQ(bytes_of(&watch, DR_STEP_READ, since, &none), PAYLOAD);
            CHECK_EQ(bytes_of(&watch, DR_STEP_USE, since, &crc_ns), PAYLOAD);
            CHECK_INT(crc_ns, >, 0);
            options.direct = DR_DIRECT_OFF; /* fills the page cache for the second turn */
            load("watched", &options, crcs);
            options.direct = DR_DIRECT_AUTO;
        }
    }
}

static void no_room(void) {
    static struct dr_span spans[3];
    static uint8_t crcs[4 * (PAYLOAD / MIB + 2)];
    spans[2].size = 77; /* beyond the room: not to be touched */
    struct dr_watch watch = {NULL, spans, 2, 0};
    struct dr_options options = make_options("auto", &watch);
    save("full", &options, crcs);
    CHECK_INT(watch.count, >, 16);
    CHECK_EQ(spans[2].size, 77);
}

static void only_counting(void) {
    static uint8_t crcs[4 * (PAYLOAD / MIB + 2)];
    _Atomic uint64_t done = 0;
    struct dr_watch watch = {&done, NULL, 0, 0};
    struct dr_options options = make_options("auto", &watch);
    save("counted", &options, crcs);
    CHECK_INT(done, >=, PAYLOAD);
    CHECK_EQ(watch.count, 0);
    CHECK_EQ(dr_watch_now(&watch), 0);
}

CHECK_MAIN({"watched", watched}, {"no_room", no_room}, {"only_counting", only_counting})
