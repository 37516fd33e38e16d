/* Strides in the encoding of properties: what is written is read, and what is no strides is none. */
#include "plan/strides.h"

#include "check.h"

static const char base[] = "torch.float32\0torch.strided\0\0\0"; /* and the zero at the end: three flags */
enum { DTYPE = 13, BASE = sizeof base };

/* A table with one row of these lengths, whose properties end in `size` bytes at `strides`. */
static void make(struct dr_table *table, const int64_t *lengths, int ndim, const char *strides, size_t size) {
    char encoding[BASE + DR_MAX_STRIDES_BYTES + 8];
    memcpy(encoding, base, BASE);
    if (size)
        memcpy(encoding + BASE, strides, size);
    int64_t dims[3 * DR_TABLE_MAX_DIMS] = {0};
    for (int dim = 0; dim < ndim; dim++)
        dims[dim] = dims[2 * ndim + dim] = lengths[dim];
    struct dr_properties properties = {encoding, (uint32_t)(BASE + size), DTYPE, 4};
    struct dr_row_view view = {.type = DR_ROW_TENSOR, .ndim = ndim, .dims = dims};
    DR_NEW_ERROR(error);
    uint32_t name;
    dr_table_init(table);
    CHECK_EQ(dr_table_properties(table, &properties, &view.properties, &error), 0);
    CHECK_EQ(dr_table_name(table, "w", 1, "", 0, 0, &name, &error), 0);
    CHECK_EQ(dr_table_append(table, name, &view, &error), 0);
}

static void check(const int64_t *lengths, const int64_t *strides, int ndim, enum dr_stride_kind expected) {
    char bytes[DR_MAX_STRIDES_BYTES];
    int64_t found[DR_TABLE_MAX_DIMS] = {0};
    struct dr_table table;
    size_t size = dr_strides_encode(lengths, strides, ndim, bytes);
    make(&table, lengths, ndim, bytes, size);
    CHECK_EQ(dr_row_strides(&table, table.rows, found), expected);
    for (int d = 0; expected == DR_STRIDED && d < ndim; d++)
        CHECK_EQ(found[d], strides[d]);
    CHECK_EQ(size, expected == DR_CONTIGUOUS ? 1 : size);
    dr_table_destroy(&table);
}

static void round_trip(void) {
    check((int64_t[]){3, 4}, (int64_t[]){4, 1}, 2, DR_CONTIGUOUS);
    check((int64_t[]){3, 4}, (int64_t[]){1, 3}, 2, DR_STRIDED);
    check((int64_t[]){2, 0, 3}, (int64_t[]){3, 3, 1}, 3, DR_CONTIGUOUS);
    check((int64_t[]){2, 0, 3}, (int64_t[]){0, 3, 1}, 3, DR_STRIDED);
    check((int64_t[]){5}, (int64_t[]){0}, 1, DR_STRIDED);
    check(NULL, NULL, 0, DR_CONTIGUOUS);
    check((int64_t[]){2, 2}, (int64_t[]){INT64_MAX, INT64_MAX}, 2, DR_STRIDED);
    check((int64_t[]){1, 1}, (int64_t[]){128, 127}, 2, DR_STRIDED);
    int64_t lengths[DR_TABLE_MAX_DIMS], strides[DR_TABLE_MAX_DIMS];
    for (int d = 0; d < DR_TABLE_MAX_DIMS; d++) {
        lengths[d] = 1;
        strides[d] = INT64_MAX - d;
    }
    check(lengths, strides, DR_TABLE_MAX_DIMS, DR_STRIDED);
}

static void none(const char *bytes, size_t size) {
    int64_t found[DR_TABLE_MAX_DIMS];
    struct dr_table table;
    make(&table, (int64_t[]){3, 4}, 2, bytes, size);
    CHECK_EQ(dr_row_strides(&table, table.rows, found), DR_NO_STRIDES);
    dr_table_destroy(&table);
}

static void no_strides(void) {
    none("", 0);
    none("\0", 1);
    none("\3\1\1", 3);
    none("\1\1", 2);                                        /* more than the word that they are contiguous */
    none("\2\1", 2);                                        /* too few */
    none("\2\1\1\1", 4);                                    /* too many */
    none("\2\1\x80", 3);                                    /* cut off */
    none("\2\1\xff\xff\xff\xff\xff\xff\xff\xff\xff\1", 12); /* too large */
}

/* Encodings that have no layout, or no flags, come from strangers. */
static void short_encodings(void) {
    DR_NEW_ERROR(error);
    int64_t found[DR_TABLE_MAX_DIMS];
    for (uint32_t size = 0; size < BASE; size++) {
        struct dr_table table;
        dr_table_init(&table);
        struct dr_properties properties = {(char *)base, size, size < DTYPE ? size : DTYPE, 4};
        struct dr_row row = {0};
        CHECK_EQ(dr_table_properties(&table, &properties, &row.properties, &error), 0);
        CHECK_EQ(dr_row_strides(&table, &row, found), DR_NO_STRIDES);
        dr_table_destroy(&table);
    }
}

CHECK_MAIN({"round_trip", round_trip}, {"no_strides", no_strides}, {"short_encodings", short_encodings})
