/* Tables and places: the names' hash, and what encoding and decoding give back, of good bytes and of bad ones. */
#include "plan.h"
#include "plan/storage_index.h"

enum { MAX_ROWS = 60, MAX_NAME = 400 };

/* ---- tables of anything ---- */

static const char *random_text(struct rng *rng, char *room, uint32_t *size) {
    *size = (uint32_t)rng_below(rng, rng_below(rng, 8) ? 24 : MAX_NAME);
    for (uint32_t i = 0; i < *size; i++)
        room[i] = (char)(rng_below(rng, 6) ? 'a' + (char)rng_below(rng, 3) : (char)rng_next(rng));
    return room;
}

static int random_dims(struct rng *rng, int64_t *dims) {
    int ndim = rng_below(rng, 10) == 0 ? DR_TABLE_MAX_DIMS : (int)rng_below(rng, 5);
    for (int d = 0; d < ndim; d++) {
        dims[d] = ndim == DR_TABLE_MAX_DIMS ? 1 : (int64_t)rng_below(rng, 1000);
        dims[ndim + d] = rng_below(rng, 2) ? 0 : (int64_t)rng_below(rng, (uint64_t)dims[d] + 1);
        dims[2 * ndim + d] =
            rng_below(rng, 2) ? dims[d] - dims[ndim + d] : (int64_t)rng_below(rng, ndim == DR_TABLE_MAX_DIMS ? 2 : 300);
    }
    if (ndim == 1 && rng_below(rng, 4) == 0)
        dims[0] = INT64_MAX / 4;
    return ndim;
}

static void random_table(struct rng *rng, struct dr_table *table) {
    static const char paths[] = "\0\1\2\3paths";
    char name[MAX_NAME] = "";
    uint32_t size = 0;
    plan_init(table);
    for (size_t rows = rng_below(rng, MAX_ROWS); rows > 0; rows--) {
        int64_t dims[3 * DR_TABLE_MAX_DIMS];
        struct dr_row_view view = {.type = (enum dr_row_type)rng_below(rng, 4), .flags = (unsigned)rng_below(rng, 4)};
        if (view.type == DR_ROW_TENSOR || view.type == DR_ROW_SHARD) {
            view.properties = (uint16_t)rng_below(rng, P_COUNT);
            view.ndim = random_dims(rng, dims);
            view.dims = dims;
        }
        if (rng_below(rng, 3))
            random_text(rng, name, &size);
        plan_row(table, name, size, paths, (uint32_t)rng_below(rng, sizeof paths), &view);
    }
}

static void same_table(const struct dr_table *a, const struct dr_table *b) {
    CHECK_EQ(a->count, b->count);
    CHECK_EQ(a->name_count, b->name_count);
    CHECK_EQ(a->property_count, b->property_count);
    for (uint32_t i = 0; i < a->name_count; i++) {
        CHECK_EQ(a->names[i].size, b->names[i].size);
        CHECK_EQ(a->names[i].path_size, b->names[i].path_size);
        CHECK_BYTES(dr_table_text(a, i), dr_table_text(b, i), a->names[i].size + a->names[i].path_size);
    }
    for (size_t i = 0; i < a->property_count; i++) {
        CHECK_EQ(a->properties[i].size, b->properties[i].size);
        CHECK_EQ(a->properties[i].dtype_size, b->properties[i].dtype_size);
        CHECK_EQ(a->properties[i].item_bytes, b->properties[i].item_bytes);
        CHECK_BYTES(a->properties[i].encoding, b->properties[i].encoding, a->properties[i].size);
    }
    for (size_t i = 0; i < a->count; i++) {
        const struct dr_row *x = &a->rows[i], *y = &b->rows[i];
        CHECK(x->name == y->name && x->type == y->type && x->flags == y->flags && x->ndim == y->ndim);
        CHECK_EQ(x->properties, y->properties);
        if (x->ndim)
            CHECK_BYTES(dr_row_size(a, x), dr_row_size(b, y), 3 * x->ndim * sizeof(int64_t));
        CHECK_EQ(dr_row_bytes(a, x), dr_row_bytes(b, y));
    }
}

static int decode(struct dr_table *table, const void *data, size_t size, struct dr_error *error) {
    dr_table_init(table);
    dr_error_clear(error);
    return dr_table_decode(table, data, size, NULL, error);
}

static void tables_round_trip(void) {
    struct rng rng = {1};
    for (int round = 0; round < 1500; round++) {
        struct dr_table table, again;
        struct dr_error error;
        random_table(&rng, &table);
        struct dr_buffer bytes = plan_encode(&table);
        CHECK_OK(decode(&again, bytes.data, bytes.size, &error), &error);
        same_table(&table, &again);
        struct dr_buffer twice = plan_encode(&again);
        CHECK_EQ(twice.size, bytes.size);
        CHECK_BYTES(twice.data, bytes.data, bytes.size);
        dr_buffer_destroy(&twice);
        dr_buffer_destroy(&bytes);
        dr_table_destroy(&again);
        dr_table_destroy(&table);
    }
}

/* The cursor shows what the table holds, and ends where it ends. */
static void cursor_reads_the_same(void) {
    struct rng rng = {2};
    for (int round = 0; round < 300; round++) {
        struct dr_table table;
        struct dr_cursor cursor;
        DR_NEW_ERROR(error);
        random_table(&rng, &table);
        struct dr_buffer bytes = plan_encode(&table);
        CHECK_OK(dr_cursor_open(&cursor, bytes.data, bytes.size, &error), &error);
        for (size_t i = 0; i < table.count; i++) {
            CHECK_EQ(dr_cursor_next(&cursor, &error), 1);
            const struct dr_row *row = &table.rows[i];
            CHECK(cursor.row.type == (enum dr_row_type)row->type && cursor.row.flags == row->flags);
            CHECK_EQ(cursor.row.name_size, table.names[row->name].size);
            CHECK_BYTES(cursor.row.name, dr_table_text(&table, row->name), cursor.row.name_size);
            CHECK_EQ(cursor.row.ndim, row->ndim);
            if (row->ndim)
                CHECK_BYTES(cursor.row.dims, dr_row_size(&table, row), 3 * row->ndim * sizeof(int64_t));
        }
        CHECK_EQ(dr_cursor_next(&cursor, &error), 0);
        dr_cursor_close(&cursor);
        dr_buffer_destroy(&bytes);
        dr_table_destroy(&table);
    }
}

/* ---- bad bytes ---- */

/* The bytes are copied to memory of exactly their size, so that a sanitizer sees what is read behind them. */
static int decode_exactly(const uint8_t *data, size_t size, struct dr_table *table, struct dr_error *error) {
    uint8_t *exact = malloc(size ? size : 1);
    CHECK(exact);
    memcpy(exact, data, size);
    int rc = decode(table, exact, size, error);
    free(exact);
    return rc;
}

static void refused(const uint8_t *data, size_t size) {
    struct dr_table table;
    struct dr_error error;
    CHECK_FAILS(decode_exactly(data, size, &table, &error), &error, EINVAL);
    CHECK_EQ(error.kind, DR_ERROR_INVALID);
    dr_table_destroy(&table);
}

/* What gets past the CRC is an error or a table, and a table can be encoded and read again. */
static void survived(const uint8_t *data, size_t size) {
    struct dr_table table, again;
    struct dr_error error;
    int rc = decode_exactly(data, size, &table, &error);
    CHECK_EQ(rc, -error.err);
    if (rc == 0) {
        struct dr_buffer bytes = plan_encode(&table);
        CHECK_OK(decode(&again, bytes.data, bytes.size, &error), &error);
        CHECK_EQ(again.count, table.count);
        for (size_t i = 0; i < table.count; i++)
            CHECK_EQ(dr_row_bytes(&table, &table.rows[i]), dr_row_bytes(&again, &again.rows[i]));
        dr_table_destroy(&again);
        dr_buffer_destroy(&bytes);
    }
    dr_table_destroy(&table);
}

static void garbled_tables(void) {
    struct rng rng = {3};
    for (int round = 0; round < 5; round++) {
        struct dr_table table;
        random_table(&rng, &table);
        struct dr_buffer bytes = plan_encode(&table);
        for (size_t size = 0; size < bytes.size; size++)
            refused(bytes.data, size);
        for (size_t i = 0; i < bytes.size; i++) {
            bytes.data[i] ^= (uint8_t)(1 + rng_below(&rng, 255));
            refused(bytes.data, bytes.size);
            plan_fix_crc(bytes.data, bytes.size);
            survived(bytes.data, bytes.size);
            dr_buffer_destroy(&bytes);
            bytes = plan_encode(&table);
        }
        for (size_t size = PLAN_HEADER; size < bytes.size; size++) {
            uint8_t *cut = check_alloc(size);
            memcpy(cut, bytes.data, size);
            plan_fix_crc(cut, size);
            refused(cut, size); /* rows, or what follows the last, are missing */
            free(cut);
        }
        dr_buffer_put(&bytes, "x", 1);
        plan_fix_crc(bytes.data, bytes.size);
        refused(bytes.data, bytes.size);
        dr_buffer_destroy(&bytes);
        dr_table_destroy(&table);
    }
}

static void begin_table(struct dr_buffer *out) {
    *out = (struct dr_buffer){0};
    dr_buffer_put(out, "DRT\1\0\0\0\0", 8);
}

static void finish_refused(struct dr_buffer *out) {
    plan_fix_crc(out->data, out->size);
    refused(out->data, out->size);
    dr_buffer_destroy(out);
}

static void put_property(struct dr_buffer *out, uint64_t item_bytes, uint64_t dtype_size, const char *encoding) {
    dr_buffer_varint(out, item_bytes);
    dr_buffer_varint(out, dtype_size);
    dr_buffer_varint(out, strlen(encoding));
    dr_buffer_put(out, encoding, strlen(encoding));
}

/* Numbers that are too large, one at a time, in an encoding that is otherwise right. */
static void numbers_out_of_range(void) {
    enum { ITEM, DTYPE, SHARED, MORE, PATH, PROPERTY, NDIM, SIZE, MASK, OFFSET, LENGTH, ROWS, FIELDS };
    static const uint64_t good[FIELDS] = {4, 5, 0, 1, 0, 0, 1, 10, 1, 2, 3, 1};
    static const uint64_t bad[] = {UINT64_MAX, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT32_MAX, INT32_MAX};
    for (int field = -1; field < FIELDS; field++)
        for (size_t kind = 0; kind < sizeof bad / sizeof *bad; kind++) {
            uint64_t v[FIELDS];
            memcpy(v, good, sizeof v);
            if (field >= 0)
                v[field] = bad[kind];
            if ((field == SIZE || field == OFFSET || field == LENGTH) && v[field] < INT64_MAX)
                continue; /* a large number, but a possible one */
            struct dr_buffer out;
            begin_table(&out);
            dr_buffer_varint(&out, 1);
            put_property(&out, v[ITEM], v[DTYPE], "dtype+");
            dr_buffer_varint(&out, v[ROWS]);
            dr_buffer_byte(&out, DR_ROW_SHARD | 1 << 7);
            dr_buffer_varint(&out, v[SHARED]);
            dr_buffer_varint(&out, v[MORE]);
            dr_buffer_put(&out, "n", 1);
            for (int f = PATH; f <= LENGTH; f++)
                dr_buffer_varint(&out, v[f]);
            if (field >= 0) {
                finish_refused(&out);
                continue;
            }
            plan_fix_crc(out.data, out.size);
            struct dr_table table;
            struct dr_error error;
            CHECK_OK(decode(&table, out.data, out.size, &error), &error);
            CHECK_EQ(dr_row_bytes(&table, table.rows), 12);
            dr_table_destroy(&table);
            dr_buffer_destroy(&out);
        }
}

/* Products of sizes that each are possible. */
static void sizes_that_overflow(void) {
    const int64_t big = (int64_t)1 << 40;
    CHECK(dr_dims_good((const int64_t[]){big, 1 << 20, 0, 0, big, 1 << 20}, 2, 4));
    CHECK(!dr_dims_good((const int64_t[]){big, big, 0, 0, 1, 1}, 2, 4));
    CHECK(!dr_dims_good((const int64_t[]){1, 1, 0, 0, big, big}, 2, 4));
    CHECK(!dr_dims_good((const int64_t[]){-1, 0, 1}, 1, 4));
    CHECK(!dr_dims_good((const int64_t[]){1, -1, 1}, 1, 4));
    CHECK(!dr_dims_good((const int64_t[]){1, 0, -1}, 1, 4));
    CHECK(!dr_dims_good((const int64_t[]){1, INT64_MAX, 1}, 1, 4));
    CHECK(dr_dims_good(NULL, 0, 4));
    struct dr_table table;
    plan_init(&table);
    plan_chunk(&table, "w", 2, (const int64_t[]){big, big, 0, 0, 1, 1}, P_FLOAT32, 0);
    struct dr_buffer bytes = plan_encode(&table);
    struct dr_table again;
    struct dr_error error;
    CHECK_FAILS(decode(&again, bytes.data, bytes.size, &error), &error, EINVAL);
    CHECK(strstr(error.detail, "'w'") && strstr(error.detail, "too large"));
    dr_table_destroy(&again);
    dr_buffer_destroy(&bytes);
    dr_table_destroy(&table);
}

static void properties_that_are_equal(void) {
    struct dr_buffer out;
    begin_table(&out);
    dr_buffer_varint(&out, 2);
    put_property(&out, 4, 5, "dtype+");
    put_property(&out, 4, 5, "dtype+");
    dr_buffer_varint(&out, 0);
    finish_refused(&out);
}

/* ---- names ---- */

static void many_names(void) {
    enum { COUNT = 30000 };
    struct dr_table table;
    DR_NEW_ERROR(error);
    char name[64];
    plan_init(&table);
    CHECK_EQ(dr_table_find(&table, "x", 1, 0), DR_NO_NAME);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t index, size = (uint32_t)snprintf(name, sizeof name, "layers.%u.weight", i);
        CHECK_OK(dr_table_name(&table, name, size, "path", i % 5, DR_NO_NAME, &index, &error), &error);
        CHECK_EQ(index, i);
    }
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t index, size = (uint32_t)snprintf(name, sizeof name, "layers.%u.weight", i);
        CHECK_EQ(dr_table_find(&table, name, size, i), i);
        CHECK_EQ(dr_table_find(&table, name, size, i + 1), i);
        CHECK_EQ(dr_table_find(&table, name, size, DR_NO_NAME), i);
        CHECK_EQ(dr_table_find(&table, name, size - 1, i), DR_NO_NAME);
        CHECK_OK(dr_table_name(&table, name, size, "another", 7, i / 2, &index, &error), &error);
        CHECK_EQ(index, i);
        CHECK_EQ(table.names[i].path_size, i % 5); /* the first path stays */
    }
    CHECK_EQ(table.name_count, COUNT);
    dr_table_destroy(&table);
}

/* Names that differ in one byte, in a NUL, or in length alone are different names. */
static void names_that_are_close(void) {
    static const char zeros[40];
    struct dr_table table;
    DR_NEW_ERROR(error);
    plan_init(&table);
    for (uint32_t size = 0; size < sizeof zeros; size++) {
        uint32_t index;
        CHECK_OK(dr_table_name(&table, zeros, size, "", 0, DR_NO_NAME, &index, &error), &error);
        CHECK_EQ(index, size);
    }
    for (uint32_t i = 0; i < sizeof zeros; i++) {
        char changed[sizeof zeros] = {0};
        changed[i] = 1;
        CHECK_EQ(dr_table_find(&table, changed, sizeof zeros - 1, DR_NO_NAME),
                 i == sizeof zeros - 1 ? sizeof zeros - 1 : DR_NO_NAME);
    }
    dr_table_destroy(&table);
}

static void equal_properties_are_kept_once(void) {
    struct dr_table table;
    plan_init(&table);
    plan_properties(&table); /* gives the same indices */
    CHECK_EQ(table.property_count, P_COUNT);
    dr_table_destroy(&table);
}

/* ---- places ---- */

static void random_places(struct rng *rng, struct dr_storage_index *places, size_t count) {
    DR_NEW_ERROR(error);
    CHECK_OK(dr_storage_index_init(places, count, &error), &error);
    for (size_t i = 0; i < count; i++) {
        uint8_t crcs[4 * 8];
        char file[32];
        struct dr_storage_entry place = {.kind = (uint8_t)rng_below(rng, 4)};
        if (place.kind == DR_STORAGE_NONE)
            continue;
        place.offset = rng_below(rng, (uint64_t)1 << (rng_below(rng, 60) + 1));
        place.payload_offset = place.offset + (place.kind == DR_STORAGE_OTHER ? 0 : rng_below(rng, 500));
        place.payload_size = place.kind == DR_STORAGE_OTHER ? 0 : rng_below(rng, 6 * DR_CRC_BLOCK);
        place.length = place.payload_offset - place.offset + place.payload_size + rng_below(rng, 300);
        place.payload_offset = place.kind == DR_STORAGE_OTHER ? 0 : place.payload_offset;
        rng_fill(rng, crcs, sizeof crcs);
        bool summed = place.kind != DR_STORAGE_OTHER && place.payload_size && rng_below(rng, 2);
        uint32_t size = (uint32_t)snprintf(file, sizeof file, "__%d_0.distcp", (int)rng_below(rng, 3));
        CHECK_OK(dr_storage_index_file(places, file, size, &place.file, &error), &error);
        CHECK_OK(dr_storage_index_set(places, i, &place, summed ? crcs : NULL, &error), &error);
    }
}

static void same_place(const struct dr_storage_index *a, size_t i, const struct dr_storage_index *b, size_t j) {
    const struct dr_storage_entry *x = &a->entries[i], *y = &b->entries[j];
    CHECK_EQ(x->kind, y->kind);
    if (x->kind == DR_STORAGE_NONE)
        return;
    CHECK(x->offset == y->offset && x->length == y->length && x->has_crcs == y->has_crcs);
    CHECK(x->payload_offset == y->payload_offset && x->payload_size == y->payload_size);
    CHECK_EQ(a->files.names[x->file].size, b->files.names[y->file].size);
    CHECK_BYTES(dr_table_text(&a->files, x->file), dr_table_text(&b->files, y->file), a->files.names[x->file].size);
    if (x->has_crcs)
        CHECK_BYTES(a->crcs.data + x->crcs, b->crcs.data + y->crcs,
                    4 * dr_crc_count(x->payload_offset, x->payload_size));
}

static struct dr_buffer encode_places(const struct dr_storage_index *places) {
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    CHECK_OK(dr_storage_index_encode(places, &out, &error), &error);
    return out;
}

static int decode_places(const uint8_t *data, size_t size, struct dr_storage_index *places, struct dr_error *error) {
    uint8_t *exact = malloc(size ? size : 1);
    CHECK(exact);
    memcpy(exact, data, size);
    dr_error_clear(error);
    int rc = dr_storage_index_decode(places, exact, size, NULL, error);
    free(exact);
    CHECK_EQ(rc, -error->err);
    return rc;
}

static void places_round_trip(void) {
    struct rng rng = {5};
    for (int round = 0; round < 800; round++) {
        struct dr_storage_index places, again;
        struct dr_error error;
        size_t count = rng_below(&rng, 40);
        random_places(&rng, &places, count);
        struct dr_buffer bytes = encode_places(&places);
        CHECK_OK(decode_places(bytes.data, bytes.size, &again, &error), &error);
        CHECK_EQ(again.count, count);
        for (size_t i = 0; i < count; i++)
            same_place(&places, i, &again, i);
        dr_buffer_destroy(&bytes);
        dr_storage_index_destroy(&again);
        dr_storage_index_destroy(&places);
    }
}

/* Whatever is decoded can be used: it overflows nowhere, its files exist, and its CRCs are there. */
static void check_places(const struct dr_storage_index *places) {
    for (size_t i = 0; i < places->count; i++) {
        const struct dr_storage_entry *p = &places->entries[i];
        if (p->kind == DR_STORAGE_NONE)
            continue;
        CHECK_INT(p->file, <, places->files.name_count);
        CHECK(p->offset <= INT64_MAX && p->length <= INT64_MAX - p->offset);
        if (p->kind != DR_STORAGE_OTHER)
            CHECK(p->payload_offset >= p->offset && p->payload_offset - p->offset <= p->length - p->payload_size &&
                  p->payload_size <= p->length);
        if (p->has_crcs)
            CHECK(p->crcs + 4 * dr_crc_count(p->payload_offset, p->payload_size) <= places->crcs.size);
    }
}

static void garbled_places(void) {
    struct rng rng = {6};
    for (int round = 0; round < 12; round++) {
        struct dr_storage_index places, again;
        struct dr_error error;
        random_places(&rng, &places, 1 + rng_below(&rng, 12));
        struct dr_buffer bytes = encode_places(&places);
        for (size_t size = 0; size < bytes.size; size++) {
            CHECK_FAILS(decode_places(bytes.data, size, &again, &error), &error, EINVAL);
            dr_storage_index_destroy(&again);
            uint8_t *cut = check_alloc(size);
            memcpy(cut, bytes.data, size);
            plan_fix_crc(cut, size);
            CHECK_FAILS(decode_places(cut, size, &again, &error), &error, EINVAL);
            dr_storage_index_destroy(&again);
            free(cut);
        }
        for (size_t i = 0; i < bytes.size; i++) {
            uint8_t *changed = check_alloc(bytes.size);
            memcpy(changed, bytes.data, bytes.size);
            changed[i] ^= (uint8_t)(1 + rng_below(&rng, 255));
            CHECK_FAILS(decode_places(changed, bytes.size, &again, &error), &error, EINVAL);
            dr_storage_index_destroy(&again);
            plan_fix_crc(changed, bytes.size);
            if (decode_places(changed, bytes.size, &again, &error) == 0)
                check_places(&again);
            dr_storage_index_destroy(&again);
            free(changed);
        }
        dr_buffer_destroy(&bytes);
        dr_storage_index_destroy(&places);
    }
}

/* Each rank's places go where its items are in the checkpoint. */
static void places_are_merged(void) {
    enum { RANKS = 5, EACH = 9 };
    struct rng rng = {7};
    struct dr_storage_index all, of[RANKS];
    DR_NEW_ERROR(error);
    uint32_t order[RANKS * EACH];
    CHECK_OK(dr_storage_index_init(&all, RANKS * EACH, &error), &error);
    for (uint32_t i = 0; i < RANKS * EACH; i++) {
        uint32_t j = (uint32_t)rng_below(&rng, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        random_places(&rng, &of[rank], EACH);
        for (size_t i = 0; i < EACH; i++)
            if (of[rank].entries[i].kind == DR_STORAGE_NONE) {
                uint32_t file;
                CHECK_OK(dr_storage_index_file(&of[rank], "f", 1, &file, &error), &error);
                CHECK_OK(dr_storage_index_set(&of[rank], i,
                                              &(struct dr_storage_entry){.kind = DR_STORAGE_OTHER, .file = file}, NULL,
                                              &error),
                         &error);
            }
        CHECK_OK(dr_storage_index_merge(&all, &of[rank], order + rank * EACH, EACH, &error), &error);
    }
    for (int rank = 0; rank < RANKS; rank++)
        for (size_t i = 0; i < EACH; i++)
            same_place(&of[rank], i, &all, order[rank * EACH + i]);
    CHECK_FAILS(dr_storage_index_merge(&all, &of[0], order, EACH, &error), &error, EINVAL); /* they are there already */
    dr_error_clear(&error);
    CHECK_FAILS(dr_storage_index_merge(&all, &of[0], order, EACH - 1, &error), &error, EINVAL);
    dr_error_clear(&error);
    order[0] = RANKS * EACH;
    CHECK_FAILS(dr_storage_index_merge(&all, &of[0], order, EACH, &error), &error, EINVAL);
    for (int rank = 0; rank < RANKS; rank++)
        dr_storage_index_destroy(&of[rank]);
    dr_storage_index_destroy(&all);
}

/* A payload of no bytes has no CRCs, and a list of none is still one. */
static void places_of_empty_payloads(void) {
    struct dr_storage_index places, again, all;
    DR_NEW_ERROR(error);
    CHECK_OK(dr_storage_index_init(&places, 1, &error), &error);
    struct dr_storage_entry place = {.kind = DR_STORAGE_TENSOR, .offset = 7, .length = 100, .payload_offset = 64};
    CHECK_OK(dr_storage_index_file(&places, "f", 1, &place.file, &error), &error);
    CHECK_OK(dr_storage_index_set(&places, 0, &place, "", &error), &error);
    struct dr_buffer bytes = encode_places(&places);
    CHECK_OK(decode_places(bytes.data, bytes.size, &again, &error), &error);
    same_place(&places, 0, &again, 0);
    CHECK(again.entries[0].has_crcs);
    CHECK_OK(dr_storage_index_init(&all, 1, &error), &error);
    CHECK_OK(dr_storage_index_merge(&all, &again, (const uint32_t[]){0}, 1, &error), &error);
    same_place(&again, 0, &all, 0);
    dr_buffer_destroy(&bytes);
    dr_storage_index_destroy(&places);
    dr_storage_index_destroy(&again);
    dr_storage_index_destroy(&all);
}

CHECK_MAIN({"tables_round_trip", tables_round_trip}, {"cursor_reads_the_same", cursor_reads_the_same},
           {"garbled_tables", garbled_tables}, {"numbers_out_of_range", numbers_out_of_range},
           {"sizes_that_overflow", sizes_that_overflow}, {"properties_that_are_equal", properties_that_are_equal},
           {"many_names", many_names}, {"names_that_are_close", names_that_are_close},
           {"equal_properties_are_kept_once", equal_properties_are_kept_once}, {"places_round_trip", places_round_trip},
           {"garbled_places", garbled_places}, {"places_are_merged", places_are_merged},
           {"places_of_empty_payloads", places_of_empty_payloads})
