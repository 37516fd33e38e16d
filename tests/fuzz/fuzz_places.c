/*
 * Places as the input has them: what is decoded overflows nowhere, lies in
 * files that are named, can be encoded again, merged, and pickled. And the
 * coordinator's reply, which has no CRC of its own.
 */
#include "fuzz.h"
#include "plan.h"
#include "plan/merge.h"
#include "plan/metadata_pickle.h"

enum { REPLY_ROWS = 21 };

static void check_places(const struct dr_storage_index *places) {
    for (size_t i = 0; i < places->count; i++) {
        const struct dr_storage_entry *p = &places->entries[i];
        if (p->kind == DR_STORAGE_NONE)
            continue;
        FUZZ_CHECK(p->kind < DR_STORAGE_NONE && p->file < places->files.name_count);
        FUZZ_CHECK(p->offset <= INT64_MAX && p->length <= INT64_MAX - p->offset);
        if (p->kind == DR_STORAGE_OTHER)
            continue;
        FUZZ_CHECK(p->payload_offset >= p->offset && p->payload_offset <= p->offset + p->length);
        FUZZ_CHECK(p->payload_size <= p->offset + p->length - p->payload_offset);
        if (p->has_crcs)
            FUZZ_CHECK(p->crcs + 4 * dr_crc_count(p->payload_offset, p->payload_size) <= places->crcs.size);
    }
}

static bool same_places(const struct dr_storage_index *a, const struct dr_storage_index *b) {
    bool same = a->count == b->count;
    for (size_t i = 0; same && i < a->count; i++) {
        const struct dr_storage_entry *x = &a->entries[i], *y = &b->entries[i];
        same = x->kind == y->kind && x->offset == y->offset && x->length == y->length &&
               x->payload_offset == y->payload_offset && x->payload_size == y->payload_size &&
               x->has_crcs == y->has_crcs;
    }
    return same;
}

static void encode_again(const struct dr_storage_index *places) {
    struct dr_buffer out;
    struct dr_storage_index again;
    DR_NEW_ERROR(error);
    FUZZ_CHECK(dr_storage_index_encode(places, &out, &error) == 0);
    FUZZ_CHECK(dr_storage_index_decode(&again, out.data, out.size, NULL, &error) == 0);
    FUZZ_CHECK(same_places(places, &again));
    dr_buffer_destroy(&out);
    dr_storage_index_destroy(&again);
}

/* To the same indices of other places: all arrive, unless one is not there. */
static void merge(const struct dr_storage_index *places) {
    struct dr_storage_index all;
    DR_NEW_ERROR(error);
    bool whole = true;
    uint32_t *indices = calloc(places->count + 1, sizeof *indices);
    FUZZ_CHECK(indices && dr_storage_index_init(&all, places->count, &error) == 0);
    for (size_t i = 0; i < places->count; i++) {
        indices[i] = (uint32_t)i;
        whole &= places->entries[i].kind != DR_STORAGE_NONE;
    }
    int rc = dr_storage_index_merge(&all, places, indices, places->count, &error);
    FUZZ_CHECK(rc == -error.err && (rc == 0) == whole);
    if (whole)
        FUZZ_CHECK(same_places(&all, places));
    dr_storage_index_destroy(&all);
    free(indices);
}

/* As the places of a tensor of so many chunks. */
static void pickle(const struct dr_storage_index *places) {
    static const struct dr_fragment none = {"N", 1};
    static const struct dr_fragment properties[P_COUNT] = {{"N", 1}, {"N", 1}, {"N", 1}};
    const struct dr_metadata_parts parts = {properties, none, none, false};
    struct dr_table table;
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    plan_init(&table);
    for (int64_t i = 0; i < (int64_t)places->count; i++)
        plan_chunk(&table, "w", 1, (const int64_t[]){1 << 30, i, 1}, P_INT8, 0);
    FUZZ_CHECK(dr_metadata_pickle(&table, places, &parts, &out, &error) == 0);
    dr_buffer_destroy(&out);
    dr_table_destroy(&table);
}

static void decode(const uint8_t *data, size_t size) {
    struct dr_storage_index places;
    DR_NEW_ERROR(error);
    uint8_t *encoded = malloc(size + PLAN_HEADER);
    FUZZ_CHECK(encoded);
    memcpy(encoded, "DRP\1", 4);
    memcpy(encoded + PLAN_HEADER, data, size);
    plan_fix_crc(encoded, size + PLAN_HEADER);
    int rc = dr_storage_index_decode(&places, encoded, size + PLAN_HEADER, NULL, &error);
    FUZZ_CHECK(rc == -error.err);
    free(encoded);
    if (rc == 0) {
        check_places(&places);
        encode_again(&places);
        merge(&places);
        pickle(&places);
    }
    dr_storage_index_destroy(&places);
}

struct kept_rows {
    size_t row;
    bool any;
};

static int kept(void *context, size_t row, int64_t start, int64_t rows) {
    struct kept_rows *before = context;
    FUZZ_CHECK(row < REPLY_ROWS && start >= 0 && rows >= -1);
    FUZZ_CHECK(!before->any || row >= before->row);
    *before = (struct kept_rows){row, true};
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct kept_rows before = {0};
    DR_NEW_ERROR(error);
    decode(data, size);
    FUZZ_CHECK(dr_reply_read(data, size, REPLY_ROWS, kept, &before, &error) == -error.err);
    return 0;
}

static void seed_places(struct dr_storage_index *places, unsigned seed) {
    DR_NEW_ERROR(error);
    FUZZ_CHECK(dr_storage_index_init(places, seed * 3, &error) == 0);
    for (unsigned i = 0; i < seed * 3; i++) {
        char file[32];
        uint32_t size = (uint32_t)snprintf(file, sizeof file, "__%u_0.0123456789abcdef.distcp", i % seed);
        struct dr_storage_entry place = {
            .kind = (uint8_t)(i % (seed % 2 ? 3 : 4)), .offset = 4096 * (uint64_t)i, .length = 3000};
        if (place.kind == DR_STORAGE_NONE)
            continue;
        if (place.kind != DR_STORAGE_OTHER) {
            place.payload_offset = place.offset + 256;
            place.payload_size = i % 5 ? 2000 : 0;
        }
        FUZZ_CHECK(dr_storage_index_file(places, file, size, &place.file, &error) == 0);
        FUZZ_CHECK(dr_storage_index_set(places, i, &place, place.kind == DR_STORAGE_TENSOR ? "crc!" : NULL, &error) ==
                   0);
    }
}

size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    static const uint8_t replies[][8] = {{REPLY_ROWS, 0xff, 0x0f, 0x10, 12, 0, 5}, {REPLY_ROWS, 1, 0, 0, 3, 5, 5}};
    enum { SEEDS = 6, REPLIES = sizeof replies / sizeof *replies };
    if (index >= SEEDS)
        return 0;
    if (index < REPLIES) {
        memcpy(out, replies[index], sizeof *replies);
        return sizeof *replies - 1;
    }
    struct dr_storage_index places;
    struct dr_buffer bytes;
    DR_NEW_ERROR(error);
    seed_places(&places, index - REPLIES + 1);
    FUZZ_CHECK(dr_storage_index_encode(&places, &bytes, &error) == 0 && bytes.size <= FUZZ_SEED_MAX);
    size_t size = bytes.size - PLAN_HEADER;
    memcpy(out, bytes.data + PLAN_HEADER, size);
    dr_buffer_destroy(&bytes);
    dr_storage_index_destroy(&places);
    return size;
}
