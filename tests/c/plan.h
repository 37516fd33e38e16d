/*
 * Tables made in one line, for the tests of plans: rows from boxes, tables
 * from lists, and the bytes that a rank would send.
 */
#ifndef DCPRING_TEST_PLAN_H
#define DCPRING_TEST_PLAN_H

#include "base/crc.h"
#include "check.h"
#include "plan/table.h"

enum { PLAN_HEADER = 8 };

/* As Python encodes them: the dtype, the layout and three flags. */
#define PLAN_FLOAT32 "torch.float32\0torch.strided\0\0\0"
#define PLAN_FLOAT32_GRAD "torch.float32\0torch.strided\0\1\0"
#define PLAN_INT8 "torch.int8\0torch.strided\0\0\0"

enum { P_FLOAT32, P_FLOAT32_GRAD, P_INT8, P_COUNT };

static inline void plan_properties(struct dr_table *table) {
    static const char *const encodings[P_COUNT] = {PLAN_FLOAT32, PLAN_FLOAT32_GRAD, PLAN_INT8};
    static const uint32_t sizes[P_COUNT] = {sizeof PLAN_FLOAT32, sizeof PLAN_FLOAT32_GRAD, sizeof PLAN_INT8};
    static const uint32_t item_bytes[P_COUNT] = {4, 4, 1};
    DR_NEW_ERROR(error);
    for (int i = 0; i < P_COUNT; i++) {
        uint16_t index;
        struct dr_properties p = {(char *)encodings[i], sizes[i], (uint32_t)strlen(encodings[i]), item_bytes[i]};
        CHECK_OK(dr_table_properties(table, &p, &index, &error), &error);
        CHECK_EQ(index, i);
    }
}

/* An empty table that knows the properties above. */
static inline void plan_init(struct dr_table *table) {
    dr_table_init(table);
    plan_properties(table);
}

static inline void plan_row(struct dr_table *table, const char *name, uint32_t name_size, const char *path,
                            uint32_t path_size, const struct dr_row_view *view) {
    DR_NEW_ERROR(error);
    uint32_t index;
    CHECK_OK(dr_table_name(table, name, name_size, path, path_size, DR_NO_NAME, &index, &error), &error);
    CHECK_OK(dr_table_append(table, index, view, &error), &error);
}

static inline void plan_object(struct dr_table *table, const char *name) {
    plan_row(table, name, (uint32_t)strlen(name), "", 0, &(struct dr_row_view){.type = DR_ROW_BYTES});
}

static inline void plan_name_only(struct dr_table *table, const char *name) {
    plan_row(table, name, (uint32_t)strlen(name), "", 0, &(struct dr_row_view){.type = DR_ROW_NAME});
}

/* dims: sizes, offsets, lengths. */
static inline void plan_chunk(struct dr_table *table, const char *name, int ndim, const int64_t *dims,
                              uint16_t properties, unsigned flags) {
    plan_row(table, name, (uint32_t)strlen(name), "", 0,
             &(struct dr_row_view){
                 .type = DR_ROW_SHARD, .flags = flags, .properties = properties, .ndim = ndim, .dims = dims});
}

/* Rows [from, to) of a float32 tensor of `rows` by `columns`. */
static inline void plan_rows(struct dr_table *table, const char *name, int64_t rows, int64_t columns, int64_t from,
                             int64_t to) {
    plan_chunk(table, name, 2, (const int64_t[]){rows, columns, from, 0, to - from, columns}, P_FLOAT32,
               DR_ROW_DIVISIBLE);
}

static inline struct dr_buffer plan_encode(const struct dr_table *table) {
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    CHECK_OK(dr_table_encode(table, &out, &error), &error);
    return out;
}

/* Makes the CRC of an encoded table, or of encoded places, right again. */
static inline void plan_fix_crc(uint8_t *data, size_t size) {
    if (size < PLAN_HEADER)
        return;
    uint32_t crc = dr_crc32(0, data + PLAN_HEADER, size - PLAN_HEADER);
    for (int i = 0; i < 4; i++)
        data[4 + i] = (uint8_t)(crc >> 8 * i);
}

#endif
