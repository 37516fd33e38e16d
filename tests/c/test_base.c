/* What everything else is made of: arrays that grow, bytes in and out, hash tables, boxes. */
#include "base/array.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/sort.h"
#include "check.h"
#include "plan/box.h"

#include <errno.h>

/* ---- arrays ---- */

static void arrays_grow(void) {
    DR_NEW_ERROR(error);
    uint32_t *array = NULL;
    size_t room = 0;
    for (uint32_t i = 0; i < 10000; i++) {
        size_t before = room;
        CHECK_OK(DR_ARRAY_RESERVE(array, i, room, 1, &error), &error);
        CHECK(room > i && (room == before || room >= 2 * before));
        array[i] = i;
    }
    for (uint32_t i = 0; i < 10000; i++)
        CHECK_EQ(array[i], i);
    CHECK_FAILS(DR_ARRAY_RESERVE(array, 10000, room, SIZE_MAX / 2, &error), &error, ENOMEM);
    CHECK_FAILS(DR_ARRAY_RESERVE(array, 10000, room, SIZE_MAX, &error), &error, ENOMEM);
    CHECK_EQ(array[9999], 9999);
    free(array);
}

/* ---- bytes ---- */

static void bytes_round_trip(void) {
    struct rng rng = {4};
    struct dr_buffer out;
    struct dr_bytes in;
    DR_NEW_ERROR(error);
    uint64_t values[500];
    dr_buffer_begin(&out, "TST\1");
    for (int i = 0; i < 500; i++) {
        values[i] = i < 4 ? (const uint64_t[]){0, 127, 128, UINT64_MAX}[i] : rng_next(&rng) >> rng_below(&rng, 64);
        dr_buffer_varint(&out, values[i]);
        dr_buffer_le(&out, values[i], 8);
        dr_buffer_put(&out, &values[i], rng_below(&rng, 2) * 3);
    }
    CHECK_OK(dr_buffer_seal(&out, &error), &error);
    CHECK(!dr_bytes_open(&in, out.data, out.size, "TST\1"));
    rng = (struct rng){4};
    for (int i = 0; i < 500; i++) {
        if (i >= 4) {
            rng_next(&rng);
            rng_below(&rng, 64);
        }
        CHECK_EQ(dr_bytes_varint(&in), values[i]);
        CHECK_EQ(dr_get_le(dr_bytes_take(&in, 8), 8), values[i]);
        dr_bytes_take(&in, rng_below(&rng, 2) * 3);
    }
    CHECK(!in.bad && dr_bytes_left(&in) == 0);
    CHECK_EQ(dr_bytes_varint(&in), 0);
    CHECK(in.bad && !dr_bytes_take(&in, 1));
    dr_buffer_destroy(&out);
}

/* ---- hash tables ---- */

enum { MOST = 4000, ROOM = 20 };

struct text {
    char bytes[ROOM];
    size_t size;
    uint32_t scope;
};

static uint32_t find(const struct dr_hash *table, const struct text *texts, const struct text *wanted) {
    uint32_t hash = dr_hash_of(wanted->scope, wanted->bytes, wanted->size), index;
    for (size_t at = 0; (index = dr_hash_next(table, hash, &at)) != DR_NO_ENTRY;)
        if (texts[index].scope == wanted->scope && texts[index].size == wanted->size &&
            memcmp(texts[index].bytes, wanted->bytes, wanted->size) == 0)
            break;
    return index;
}

/* Against a search through all, with texts that differ little. */
static void hash_table(void) {
    static struct text texts[MOST];
    struct rng rng = {7};
    struct dr_hash table = {0};
    DR_NEW_ERROR(error);
    size_t count = 0;
    for (uint32_t i = 0; i < MOST; i++) {
        texts[i].size = rng_below(&rng, ROOM);
        texts[i].scope = (uint32_t)rng_below(&rng, 3);
        for (size_t j = 0; j < texts[i].size; j++)
            texts[i].bytes[j] = "ab"[rng_below(&rng, 16) == 0];
        uint32_t first = 0;
        while (first < i && (texts[first].scope != texts[i].scope || texts[first].size != texts[i].size ||
                             memcmp(texts[first].bytes, texts[i].bytes, texts[i].size) != 0))
            first++;
        CHECK_EQ(find(&table, texts, &texts[i]), first < i ? first : DR_NO_ENTRY);
        if (first < i)
            continue;
        CHECK_OK(dr_hash_reserve(&table, &error), &error);
        dr_hash_add(&table, dr_hash_of(texts[i].scope, texts[i].bytes, texts[i].size), i);
        CHECK_EQ(find(&table, texts, &texts[i]), i);
        count++;
    }
    CHECK(count > MOST / 10 && count < MOST && table.count == count);
    dr_hash_destroy(&table);
}

/*
 * Pairs of words that make FNV-like and multiplying hashes collide whatever goes before, numbers in a row, and words of
 * few bits: all are spread as random numbers are. The most of 2^16 balls in 2^16 bins is 8 or 9.
 */
static void hashes_are_spread(void) {
    enum { COUNT = 1 << 16 };
    static uint8_t filled[COUNT];
    for (int kind = 0; kind < 3; kind++) {
        memset(filled, 0, sizeof filled);
        unsigned most = 0;
        for (uint64_t i = 0; i < COUNT; i++) {
            uint64_t state = ((0x9e3779b97f4a7c15u ^ 16) ^ i * 0x2545f4914f6cdd1du) * 0xff51afd7ed558ccdu;
            uint64_t words[3][2] = {{i * 0x2545f4914f6cdd1du, state ^ state >> 32 ^ 12345}, {i, 0}, {0, i << 48}};
            unsigned now = ++filled[dr_hash_of(0, words[kind], 16) % COUNT];
            most = now > most ? now : most;
        }
        CHECK_INT(most, <, 16);
    }
}

/* ---- counting sort ---- */

struct thing {
    uint64_t number;
    uint32_t key;
};

static void sorted_into_groups(void) {
    enum { COUNT = 500, GROUPS = 40 };
    struct rng rng = {13};
    for (int round = 0; round < 100; round++) {
        static struct thing things[COUNT];
        uint64_t start[GROUPS + 2] = {0};
        size_t sorted[COUNT], groups = rng_below(&rng, GROUPS), count = rng_below(&rng, COUNT), placed = 0;
        for (size_t i = 0; i < count; i++)
            things[i].key = groups && rng_below(&rng, 5) ? (uint32_t)rng_below(&rng, groups) : DR_SORT_NOWHERE;
        uint64_t *next = dr_sort_starts(start, groups, &things->key, sizeof *things, count);
        for (size_t i = 0; i < count; i++)
            if (things[i].key != DR_SORT_NOWHERE) {
                sorted[next[things[i].key]++] = i;
                placed++;
            }
        CHECK_EQ(start[0], 0);
        CHECK_EQ(start[groups], placed);
        for (size_t g = 0; g < groups; g++)
            for (uint64_t at = start[g]; at < start[g + 1]; at++) {
                CHECK_EQ(things[sorted[at]].key, g);
                CHECK(at == start[g] || sorted[at - 1] < sorted[at]);
            }
    }
}

/* ---- boxes ---- */

/* Boxes that tile a box have its measure, and others have not. */
static void measures(void) {
    struct rng rng = {12};
    for (int round = 0; round < 200; round++) {
        int64_t lengths[3], cut[3];
        for (int d = 0; d < 3; d++) {
            lengths[d] = 2 + (int64_t)rng_below(&rng, 100);
            cut[d] = 1 + (int64_t)rng_below(&rng, (uint64_t)lengths[d] - 1);
        }
        uint64_t sum = 0, moved = 0;
        for (int part = 0; part < 8; part++) {
            int64_t offsets[3], sizes[3];
            for (int d = 0; d < 3; d++) {
                offsets[d] = part >> d & 1 ? cut[d] : 0;
                sizes[d] = part >> d & 1 ? lengths[d] - cut[d] : cut[d];
            }
            sum = dr_box_add_measures(sum, dr_box_measure(offsets, sizes, 3));
            offsets[0] += part == 3;
            moved = dr_box_add_measures(moved, dr_box_measure(offsets, sizes, 3));
        }
        CHECK_EQ(sum, dr_box_measure(NULL, lengths, 3));
        CHECK(moved != sum);
    }
    CHECK_EQ(dr_box_measure(NULL, NULL, 0), 1);
    CHECK_EQ(dr_box_measure(NULL, (int64_t[]){5, 0}, 2), 0);
}

static void boxes_in_words(void) {
    char out[24];
    dr_box_write_sizes(out, sizeof out, (int64_t[]){4, 8}, 2);
    CHECK(strcmp(out, "[4, 8]") == 0);
    dr_box_write(out, sizeof out, (int64_t[]){0, 8}, (int64_t[]){4, 8}, 2);
    CHECK(strcmp(out, "[0:4, 8:16]") == 0);
    dr_box_write_sizes(out, sizeof out, (int64_t[]){INT64_MAX, INT64_MAX}, 2);
    CHECK_EQ(strlen(out), sizeof out - 1);
}

/* ---- errors ---- */

static const char *cure_of(enum dr_call call, int err) {
    DR_NEW_ERROR(error);
    dr_error_system(&error, err, call, "name");
    return dr_error_cure(&error);
}

static void cures_are_named(void) {
    const int met[] = {ENOSPC, EDQUOT, EFBIG,   EMFILE, ENFILE,    EROFS, EACCES, EPERM,  ENOMEM,   ENAMETOOLONG,
                       EXDEV,  ELOOP,  ENOTDIR, ESTALE, ETIMEDOUT, EIO,   ENXIO,  ENODEV, ENOTCONN, EHOSTDOWN};
    for (size_t i = 0; i < sizeof met / sizeof *met; i++)
        CHECK(cure_of(DR_CALL_WRITE, met[i])[0]);
    CHECK(strstr(cure_of(DR_CALL_FALLOCATE, EFBIG), "ulimit -f"));
    CHECK(strstr(cure_of(DR_CALL_URING_SETUP, ENOMEM), "ulimit -l"));
    CHECK(strstr(cure_of(DR_CALL_URING_SETUP, EPERM), "io_uring_disabled"));
    CHECK(strstr(cure_of(DR_CALL_URING_SETUP, ENOSYS), "io_uring_disabled"));
    CHECK(strstr(cure_of(DR_CALL_URING_ENTER, EPERM), "io_uring_disabled"));
    CHECK(strstr(cure_of(DR_CALL_URING_ENTER, ENOSYS), "io_uring_disabled"));
    CHECK(strstr(cure_of(DR_CALL_URING_SETUP, EMFILE), "ulimit -n"));
    CHECK(strstr(cure_of(DR_CALL_O_DIRECT, EINVAL), "direct I/O"));
    CHECK_EQ(cure_of(DR_CALL_WRITE, EINVAL)[0], 0);
}

CHECK_MAIN({"arrays_grow", arrays_grow}, {"bytes_round_trip", bytes_round_trip}, {"hash_table", hash_table},
           {"hashes_are_spread", hashes_are_spread}, {"sorted_into_groups", sorted_into_groups}, {"measures", measures},
           {"boxes_in_words", boxes_in_words}, {"cures_are_named", cures_are_named})
