/*
 * Rows of a plan: what a rank holds or wants, or what a checkpoint holds.
 *
 * A row is an object, a tensor, or one chunk of a tensor, with its name. Names
 * are kept once, rows of the same name share theirs. A table owns all that it
 * points to; rows are only ever appended.
 *
 * The encoded form (table_codec.c) is what ranks send each other: see
 * docs/format.md. A cursor reads it row by row, without a table.
 */
#ifndef DCPRING_TABLE_H
#define DCPRING_TABLE_H

#include "base/bytes.h"
#include "base/control.h"
#include "base/hash.h"

enum { DR_TABLE_MAX_DIMS = 64, DR_MAX_PROPERTIES = 65535 };

enum dr_row_type {
    DR_ROW_BYTES,  /* an object */
    DR_ROW_TENSOR, /* a whole tensor */
    DR_ROW_SHARD,  /* one chunk of a tensor */
    DR_ROW_NAME,   /* nothing to store: only the name and its path */
};

enum dr_row_flag {
    DR_ROW_HASHED = 1,    /* a fingerprint of its bytes is sent along */
    DR_ROW_DIVISIBLE = 2, /* may be cut along dimension 0 */
};

/* What a tensor has besides shape and bytes. `encoding` is Python's (dtype, layout and flags), compared as bytes. */
struct dr_properties {
    char *encoding;
    uint32_t size;
    uint32_t dtype_size; /* the first bytes of encoding: what must agree between ranks */
    uint32_t item_bytes; /* of one element */
};

struct dr_row {
    uint64_t dims; /* index of size[ndim], offsets[ndim], lengths[ndim] in the table's dims */
    uint32_t name;
    uint16_t properties;
    uint8_t ndim;
    uint8_t type : 4, flags : 4;
};

struct dr_name {
    uint64_t text; /* index in the table's text; the path follows the name */
    uint32_t size, path_size;
};

struct dr_table {
    struct dr_row *rows;
    size_t count, room;
    int64_t *dims;
    size_t dims_count, dims_room;
    struct dr_name *names;
    size_t name_count, name_room;
    char *text;
    size_t text_size, text_room;
    struct dr_hash by_name;
    struct dr_properties *properties;
    size_t property_count, property_room;
    struct dr_hash by_encoding; /* properties */
};

/* One row with its surroundings, in whatever memory: what is appended, and what a cursor shows. */
struct dr_row_view {
    const char *name, *path;
    uint32_t name_size, path_size;
    enum dr_row_type type;
    unsigned flags;
    uint16_t properties;
    int ndim;
    const int64_t *dims; /* size, offsets, lengths */
};

void dr_table_init(struct dr_table *table);
void dr_table_destroy(struct dr_table *table);

#define DR_NO_NAME UINT32_MAX

/* The index of a name, DR_NO_NAME when the table has none. `guess` is looked at first. */
uint32_t dr_table_find(const struct dr_table *table, const char *name, uint32_t size, uint32_t guess);

/* The same; a new name is added, with its path. */
int dr_table_name(struct dr_table *table, const char *name, uint32_t size, const char *path, uint32_t path_size,
                  uint32_t guess, uint32_t *out, struct dr_error *error);

/* The index of properties that are equal, added when they are new. */
int dr_table_properties(struct dr_table *table, const struct dr_properties *properties, uint16_t *out,
                        struct dr_error *error);

/* Appends a row whose properties are an index in this table, and whose name is the index `name`. */
int dr_table_append(struct dr_table *table, uint32_t name, const struct dr_row_view *view, struct dr_error *error);

const char *dr_table_text(const struct dr_table *table, uint32_t name);
/* How much of a name a message shows. */
int dr_name_width(const struct dr_name *name);
const int64_t *dr_row_size(const struct dr_table *table, const struct dr_row *row);
const int64_t *dr_row_offsets(const struct dr_table *table, const struct dr_row *row);
const int64_t *dr_row_lengths(const struct dr_table *table, const struct dr_row *row);
bool dr_row_is_tensor(const struct dr_row *row);

/* The rows of each name: rows[start[name]] to rows[start[name + 1]], in their order. */
struct dr_rows_by_name {
    uint64_t *start;
    uint32_t *rows;
};

/* dr_rows_by_name_destroy is due whatever is returned. */
int dr_table_sort_by_name(struct dr_rows_by_name *by, const struct dr_table *table, struct dr_error *error);
void dr_rows_by_name_destroy(struct dr_rows_by_name *by);

/* Bytes of the row's chunk; 0 for objects. */
uint64_t dr_row_bytes(const struct dr_table *table, const struct dr_row *row);

/* Whether no size, offset or product of them is negative or too large: what every row must pass. */
bool dr_dims_good(const int64_t *dims, int ndim, uint32_t item_bytes);

/* ---- the encoded form ---- */

/* The caller frees out with dr_buffer_destroy. */
int dr_table_encode(const struct dr_table *table, struct dr_buffer *out, struct dr_error *error);
/* control: NULL where nobody asks to stop. */
int dr_table_decode(struct dr_table *table, const void *data, size_t size, const struct dr_control *control,
                    struct dr_error *error);

struct dr_cursor {
    struct dr_bytes bytes;
    struct dr_properties *properties; /* of this encoding */
    size_t property_count;
    size_t rows_left;
    uint64_t text_left; /* bytes of names and paths that may still come */
    char *name;
    size_t name_room;
    int64_t dims[3 * DR_TABLE_MAX_DIMS];
    struct dr_row_view row; /* the current one; its properties index cursor->properties */
    bool same_name;         /* it has the name of the row before: there is no need to look it up again */
};

/* Checks the header and the CRC. dr_cursor_close is due whatever is returned. */
int dr_cursor_open(struct dr_cursor *cursor, const void *data, size_t size, struct dr_error *error);
/* 1: cursor->row is the next row; 0: there is none; -errno. */
int dr_cursor_next(struct dr_cursor *cursor, struct dr_error *error);
void dr_cursor_close(struct dr_cursor *cursor);

#endif
