/*
 * Encoded tables and places that are made to cost much: time and memory are
 * in proportion to their size, and a cancel ends what takes long.
 */
#include "plan.h"
#include "plan/match.h"
#include "plan/merge.h"
#include "plan/storage_index.h"

/* CPU time, so that a busy machine makes no difference. What is in proportion takes a fiftieth of it. */
enum { MOST_SECONDS = 3 };

static double cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static struct dr_buffer begin_table(void) {
    struct dr_buffer out = {0};
    dr_buffer_begin(&out, "DRT\1");
    return out;
}

/* Decodes it, and adds it to a merge; gives the error of the first, 0 where it can be decoded. */
static int take_in(struct dr_buffer *bytes, size_t *text_size) {
    struct dr_table table;
    struct dr_merge merge;
    DR_NEW_ERROR(error);
    CHECK_OK(dr_buffer_seal(bytes, &error), &error);
    double start = cpu_seconds();
    dr_table_init(&table);
    int rc = dr_table_decode(&table, bytes->data, bytes->size, NULL, &error);
    if (text_size)
        *text_size = table.text_size;
    dr_error_clear(&error);
    CHECK_OK(dr_merge_init(&merge, 1, &error), &error);
    CHECK_EQ(dr_merge_add(&merge, bytes->data, bytes->size, NULL, 0, NULL, &error), rc);
    CHECK_INT(merge.groups.text_size, <=, table.text_size + 4096);
    double seconds = cpu_seconds() - start;
    if (seconds > MOST_SECONDS)
        CHECK_FAIL("%zu bytes took %.1f s", bytes->size, seconds);
    dr_merge_destroy(&merge);
    dr_table_destroy(&table);
    dr_buffer_destroy(bytes);
    return rc;
}

/* Two words: the second undoes whatever an unkeyed multiplying hash has made of the first. */
static void colliding_name(uint64_t i, uint64_t out[2]) {
    uint64_t state = ((0x9e3779b97f4a7c15u ^ 16) ^ i * 0x2545f4914f6cdd1du) * 0xff51afd7ed558ccdu;
    out[0] = i * 0x2545f4914f6cdd1du;
    out[1] = state ^ state >> 32 ^ 12345;
}

static struct dr_buffer table_of_names(uint64_t count) {
    struct dr_buffer out = begin_table();
    dr_buffer_varint(&out, 0);
    dr_buffer_varint(&out, count);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t name[2];
        colliding_name(i, name);
        dr_buffer_put(&out, "\0\0\20", 3); /* an object, nothing shared, 16 bytes */
        dr_buffer_put(&out, name, sizeof name);
        dr_buffer_put(&out, "\0\0", 2);
    }
    return out;
}

static void names_that_collide(void) {
    struct dr_buffer table = table_of_names(60000);
    CHECK_EQ(take_in(&table, NULL), 0);
    struct dr_buffer files = {0};
    struct dr_storage_index places;
    DR_NEW_ERROR(error);
    dr_buffer_begin(&files, "DRP\1");
    dr_buffer_varint(&files, 60000);
    for (uint64_t i = 0; i < 60000; i++) {
        uint64_t name[2];
        colliding_name(i, name);
        dr_buffer_byte(&files, 16);
        dr_buffer_put(&files, name, sizeof name);
    }
    dr_buffer_varint(&files, 0);
    CHECK_OK(dr_buffer_seal(&files, &error), &error);
    double start = cpu_seconds();
    CHECK_OK(dr_storage_index_decode(&places, files.data, files.size, NULL, &error), &error);
    CHECK(cpu_seconds() - start < MOST_SECONDS);
    dr_storage_index_destroy(&places);
    dr_buffer_destroy(&files);
}

/* Chunks whose offsets make an unkeyed hash collide. */
static void chunks_that_collide(void) {
    enum { COUNT = 60000 };
    struct dr_table table;
    plan_init(&table);
    for (uint64_t i = 0; table.count < COUNT; i++) {
        uint64_t state = (0x9e3779b97f4a7c15u ^ i) * 0xff51afd7ed558ccdu;
        int64_t offset = (int64_t)(state ^ state >> 32 ^ 12345);
        if (offset >= 0)
            plan_chunk(&table, "w", 2, (const int64_t[]){4 * COUNT, 1 << 20, (int64_t)i, offset, 1, 0}, P_INT8, 0);
    }
    struct dr_buffer bytes = plan_encode(&table);
    CHECK_EQ(take_in(&bytes, NULL), 0);
    dr_table_destroy(&table);
}

static void many_kinds(void) {
    struct dr_buffer out = begin_table();
    dr_buffer_varint(&out, DR_MAX_PROPERTIES);
    for (uint32_t i = 0; i < DR_MAX_PROPERTIES; i++) {
        dr_buffer_put(&out, "\4\1\4", 3);
        dr_buffer_le(&out, i, 4);
    }
    dr_buffer_varint(&out, 0);
    CHECK_EQ(take_in(&out, NULL), 0);
}

/* Rows of one byte each that have the long name of the row before. */
static void one_long_name(void) {
    enum { NAME = 1 << 20, ROWS = 1 << 20 };
    char *name = check_alloc(NAME);
    struct dr_buffer out = begin_table();
    dr_buffer_varint(&out, 0);
    dr_buffer_varint(&out, ROWS);
    dr_buffer_put(&out, "\3\0", 2); /* names alone: there is nothing to merge */
    dr_buffer_varint(&out, NAME);
    dr_buffer_put(&out, name, NAME);
    dr_buffer_put(&out, "\0\0", 2);
    for (int i = 1; i < ROWS; i++)
        dr_buffer_byte(&out, 3 | 7 << 4);
    size_t text;
    CHECK_EQ(take_in(&out, &text), 0);
    CHECK_EQ(text, NAME);
    free(name);
}

/* A name, or a path, that is shared by very many is refused long before it has taken the memory. */
static void text_without_end(void) {
    enum { PREFIX = 24 << 10, ROWS = 20000 };
    char *prefix = check_alloc(PREFIX);
    for (int paths = 0; paths < 2; paths++) {
        struct dr_buffer out = begin_table();
        dr_buffer_varint(&out, 0);
        dr_buffer_varint(&out, ROWS);
        for (uint32_t i = 0; i < ROWS; i++) {
            bool long_name = i == 0 && !paths;
            dr_buffer_byte(&out, i ? 3 << 5 : 0);
            dr_buffer_varint(&out, i && !paths ? PREFIX : 0);
            dr_buffer_varint(&out, long_name ? PREFIX : 4);
            dr_buffer_put(&out, long_name ? prefix : (const char *)&i, long_name ? PREFIX : 4);
            if (i > 0)
                continue;
            dr_buffer_varint(&out, paths ? PREFIX : 0);
            dr_buffer_put(&out, prefix, paths ? PREFIX : 0);
            dr_buffer_varint(&out, 0);
        }
        size_t size = out.size, text;
        CHECK_EQ(take_in(&out, &text), -EINVAL);
        CHECK_INT(text, <=, 64 * size + (17 << 20));
    }
    free(prefix);
}

/* What is encoded can always be decoded, however long names are and however much they share. */
static void long_names_of_our_own(void) {
    enum { SIZE = 16 << 10, ROWS = 3000 };
    struct dr_table table, again;
    struct dr_error error;
    char *name = check_alloc(SIZE);
    memset(name, 'n', SIZE);
    plan_init(&table);
    for (int i = 0; i < ROWS; i++) {
        for (int at = 1, rest = i; at <= 4; at++, rest /= 10)
            name[SIZE - at] = (char)('0' + rest % 10);
        plan_row(&table, name, SIZE, name, i % 2 ? SIZE / 2 : 0, &(struct dr_row_view){.type = DR_ROW_BYTES});
    }
    struct dr_buffer bytes = plan_encode(&table);
    dr_error_clear(&error);
    dr_table_init(&again);
    CHECK_OK(dr_table_decode(&again, bytes.data, bytes.size, NULL, &error), &error);
    CHECK_EQ(again.text_size, table.text_size);
    CHECK_BYTES(again.text, table.text, table.text_size);
    CHECK_INT(bytes.size, <, table.text_size); /* as much is shared as may be */
    dr_buffer_destroy(&bytes);
    dr_table_destroy(&table);
    dr_table_destroy(&again);
    free(name);
}

/* ---- cancelling ---- */

static unsigned polls;

static int stop(void *context) {
    (void)context;
    polls++;
    return 1;
}

/* Whatever takes long asks whether to go on, and ends where it shall not. */
static void cancelled(void) {
    enum { ROWS = 400000 };
    const struct dr_control control = {stop, NULL};
    struct dr_table table, big;
    struct dr_match match;
    struct dr_merge merge;
    DR_NEW_ERROR(error);
    struct dr_buffer out = table_of_names(ROWS), chunks;
    CHECK_OK(dr_buffer_seal(&out, &error), &error);
    dr_table_init(&table);
    CHECK_FAILS(dr_table_decode(&table, out.data, out.size, &control, &error), &error, ECANCELED);
    CHECK_INT(table.count, <, ROWS);
    dr_error_clear(&error);
    CHECK_OK(dr_merge_init(&merge, 1, &error), &error);
    CHECK_FAILS(dr_merge_add(&merge, out.data, out.size, NULL, 0, &control, &error), &error, ECANCELED);
    dr_merge_destroy(&merge);

    plan_init(&big);
    for (int64_t i = 0; i < ROWS; i++)
        plan_chunk(&big, "w", 1, (const int64_t[]){ROWS, i, 1}, P_INT8, 0);
    dr_error_clear(&error);
    CHECK_FAILS(dr_match(&match, &big, &big, &control, &error), &error, ECANCELED);
    dr_match_destroy(&match);
    chunks = plan_encode(&big);
    dr_error_clear(&error);
    CHECK_OK(dr_merge_init(&merge, 1, &error), &error);
    CHECK_OK(dr_merge_add(&merge, chunks.data, chunks.size, NULL, 0, NULL, &error), &error);
    merge.groups.dims[3 * (ROWS - 1) + 1]--; /* two chunks are one upon the other: they are compared */
    polls = 0;
    int rc = dr_merge_check(&merge, true, &control, &error);
    CHECK((rc == -ECANCELED && polls == 1) || (rc == -EINVAL && polls == 0));
    dr_merge_destroy(&merge);
    dr_buffer_destroy(&chunks);
    dr_buffer_destroy(&out);
    dr_table_destroy(&table);
    dr_table_destroy(&big);
}

CHECK_MAIN({"names_that_collide", names_that_collide}, {"chunks_that_collide", chunks_that_collide},
           {"many_kinds", many_kinds}, {"one_long_name", one_long_name}, {"text_without_end", text_without_end},
           {"long_names_of_our_own", long_names_of_our_own}, {"cancelled", cancelled})
