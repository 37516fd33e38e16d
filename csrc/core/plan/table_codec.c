/*
 * The encoded form of a table. See table.h, and docs/format.md for the bytes.
 *
 * Names are front-coded against the one before, numbers are varints, and what
 * is as in the row before is left out. A CRC-32 covers everything.
 */
#include "plan/table.h"

#include "base/array.h"

#include <assert.h>

static const char magic[4] = {'D', 'R', 'T', 1};
enum { MAX_PROPERTY_BYTES = 4096 };

/*
 * Front coding lets a few bytes stand for a long name, and decoding shall not take more memory than is in proportion to
 * its input. Names and paths are so many times as long as what is encoded, and this much, at most: the encoder writes
 * names out where sharing would make it more, and the decoder refuses what is.
 */
enum { TEXT_PER_BYTE = 64, TEXT_ALLOWANCE = 16 << 20 };

/* The first byte of an encoded row: the type in two bits, its flags in two, and these. */
enum { SAME_NAME = 1 << 4, SAME_PATH = 1 << 5, SAME_PROPERTIES = 1 << 6, PARTIAL = 1 << 7 };

/* ---- encoding ---- */

static void encode_properties(struct dr_buffer *out, const struct dr_table *table) {
    dr_buffer_varint(out, table->property_count);
    for (size_t i = 0; i < table->property_count; i++) {
        const struct dr_properties *p = &table->properties[i];
        dr_buffer_varint(out, p->item_bytes);
        dr_buffer_varint(out, p->dtype_size);
        dr_buffer_varint(out, p->size);
        dr_buffer_put(out, p->encoding, p->size);
    }
}

struct encoder {
    struct dr_buffer *out;
    const struct dr_table *table;
    uint64_t text; /* bytes of the names and paths that were encoded */
};

/* Whether a row may refer to the one before, which saves the bytes of its text. */
static bool may_share(const struct encoder *e, uint32_t name) {
    const struct dr_name *n = &e->table->names[name];
    return e->text + n->size + n->path_size <= (uint64_t)e->out->size * TEXT_PER_BYTE + TEXT_ALLOWANCE;
}

static void encode_name(const struct encoder *e, uint32_t name, uint32_t previous) {
    const struct dr_name *n = &e->table->names[name];
    const char *text = dr_table_text(e->table, name);
    uint32_t shared = 0;
    if (previous != DR_NO_NAME) {
        const char *before = dr_table_text(e->table, previous);
        uint32_t before_size = e->table->names[previous].size, most = n->size < before_size ? n->size : before_size;
        while (shared < most && text[shared] == before[shared])
            shared++;
    }
    dr_buffer_varint(e->out, shared);
    dr_buffer_varint(e->out, n->size - shared);
    dr_buffer_put(e->out, text + shared, n->size - shared);
}

static bool same_path(const struct dr_table *table, uint32_t a, uint32_t b) {
    const struct dr_name *x = &table->names[a], *y = &table->names[b];
    return x->path_size == y->path_size &&
           memcmp(dr_table_text(table, a) + x->size, dr_table_text(table, b) + y->size, x->path_size) == 0;
}

static void encode_dims(struct dr_buffer *out, const int64_t *dims, int ndim, bool partial) {
    dr_buffer_varint(out, (uint64_t)ndim);
    for (int d = 0; d < ndim; d++)
        dr_buffer_varint(out, (uint64_t)dims[d]);
    if (!partial)
        return;
    uint64_t mask = 0;
    for (int d = 0; d < ndim; d++)
        if (dims[ndim + d] != 0 || dims[2 * ndim + d] != dims[d])
            mask |= (uint64_t)1 << d;
    dr_buffer_varint(out, mask);
    for (int d = 0; d < ndim; d++)
        if (mask >> d & 1) {
            dr_buffer_varint(out, (uint64_t)dims[ndim + d]);
            dr_buffer_varint(out, (uint64_t)dims[2 * ndim + d]);
        }
}

static bool is_partial(const int64_t *dims, int ndim) {
    for (int d = 0; d < ndim; d++)
        if (dims[ndim + d] != 0 || dims[2 * ndim + d] != dims[d])
            return true;
    return false;
}

/* The first byte, but for PARTIAL; before is NULL for the first row. */
static unsigned head_of(const struct encoder *e, const struct dr_row *row, const struct dr_row *before, bool share) {
    unsigned head = row->type | (unsigned)row->flags << 2;
    if (before && before->name == row->name)
        head |= SAME_NAME | SAME_PATH;
    else if (before && share && same_path(e->table, before->name, row->name))
        head |= SAME_PATH;
    if (before && before->properties == row->properties)
        head |= SAME_PROPERTIES;
    return head;
}

static void encode_text(struct encoder *e, const struct dr_row *row, unsigned head, uint32_t previous) {
    const struct dr_name *n = &e->table->names[row->name];
    if (head & SAME_NAME)
        return;
    encode_name(e, row->name, previous);
    if (!(head & SAME_PATH)) {
        dr_buffer_varint(e->out, n->path_size);
        dr_buffer_put(e->out, dr_table_text(e->table, row->name) + n->size, n->path_size);
    }
    e->text += (uint64_t)n->size + n->path_size;
}

static void encode_row(struct encoder *e, size_t index) {
    const struct dr_row *row = &e->table->rows[index], *before = index ? row - 1 : NULL;
    bool tensor = dr_row_is_tensor(row), share = may_share(e, row->name);
    const int64_t *dims = dr_row_size(e->table, row);
    bool partial = tensor && is_partial(dims, row->ndim);
    unsigned head = head_of(e, row, before, share);
    dr_buffer_byte(e->out, (uint8_t)(head | (partial ? PARTIAL : 0)));
    encode_text(e, row, head, before && share ? before->name : DR_NO_NAME);
    if (!(head & SAME_PROPERTIES))
        dr_buffer_varint(e->out, row->properties);
    if (tensor)
        encode_dims(e->out, dims, row->ndim, partial);
}

int dr_table_encode(const struct dr_table *table, struct dr_buffer *out, struct dr_error *error) {
    struct encoder e = {.out = out, .table = table};
    dr_buffer_begin(out, magic);
    encode_properties(out, table);
    dr_buffer_varint(out, table->count);
    for (size_t i = 0; i < table->count; i++)
        encode_row(&e, i);
    return dr_buffer_seal(out, error);
}

/* ---- decoding ---- */

static int garbled(struct dr_error *error, const char *what) {
    return dr_error_invalid(error, DR_NO_ITEM, "a compact plan is garbled or truncated (%s)", what);
}

static int decode_properties(struct dr_cursor *cursor, struct dr_error *error) {
    struct dr_bytes *bytes = &cursor->bytes;
    size_t count = dr_bytes_limited(bytes, DR_MAX_PROPERTIES);
    if (bytes->bad || count > dr_bytes_left(bytes))
        return garbled(error, "properties");
    cursor->properties = dr_calloc(count + 1, sizeof *cursor->properties);
    if (!cursor->properties)
        return dr_error_memory(error);
    cursor->property_count = count;
    for (size_t i = 0; i < count; i++) {
        struct dr_properties *p = &cursor->properties[i];
        p->item_bytes = (uint32_t)dr_bytes_limited(bytes, 1 << 20);
        p->dtype_size = (uint32_t)dr_bytes_limited(bytes, MAX_PROPERTY_BYTES);
        p->size = (uint32_t)dr_bytes_limited(bytes, MAX_PROPERTY_BYTES);
        p->encoding = (char *)dr_bytes_take(bytes, p->size); /* the encoding's own bytes: only read */
        if (bytes->bad || p->dtype_size > p->size)
            return garbled(error, "properties");
    }
    return 0;
}

int dr_cursor_open(struct dr_cursor *cursor, const void *data, size_t size, struct dr_error *error) {
    *cursor = (struct dr_cursor){0};
    const char *problem = dr_bytes_open(&cursor->bytes, data, size, magic);
    if (problem)
        return garbled(error, problem);
    cursor->text_left = (uint64_t)size * TEXT_PER_BYTE + TEXT_ALLOWANCE;
    int rc = decode_properties(cursor, error);
    if (rc)
        return rc;
    cursor->rows_left = dr_bytes_limited(&cursor->bytes, dr_bytes_left(&cursor->bytes));
    return cursor->bytes.bad ? garbled(error, "row count") : 0;
}

void dr_cursor_close(struct dr_cursor *cursor) {
    free(cursor->properties);
    free(cursor->name);
    *cursor = (struct dr_cursor){0};
}

static int decode_name(struct dr_cursor *cursor, struct dr_error *error) {
    struct dr_row_view *row = &cursor->row;
    uint32_t shared = (uint32_t)dr_bytes_limited(&cursor->bytes, row->name_size);
    uint64_t more = dr_bytes_limited(&cursor->bytes, UINT32_MAX / 2);
    const uint8_t *suffix = dr_bytes_take(&cursor->bytes, more);
    if (!suffix || shared + more > UINT32_MAX)
        return garbled(error, "a name");
    int rc = DR_ARRAY_RESERVE(cursor->name, shared, cursor->name_room, more + 1, error);
    if (rc)
        return rc;
    memcpy(cursor->name + shared, suffix, more);
    row->name = cursor->name;
    row->name_size = shared + (uint32_t)more;
    return 0;
}

static int decode_dims(struct dr_cursor *cursor, bool partial, struct dr_error *error) {
    struct dr_row_view *row = &cursor->row;
    struct dr_bytes *bytes = &cursor->bytes;
    int ndim = (int)dr_bytes_limited(bytes, DR_TABLE_MAX_DIMS);
    int64_t *dims = cursor->dims;
    for (int d = 0; d < ndim; d++) {
        dims[d] = dims[2 * ndim + d] = (int64_t)dr_bytes_limited(bytes, INT64_MAX);
        dims[ndim + d] = 0;
    }
    uint64_t mask = partial ? dr_bytes_varint(bytes) : 0;
    if (ndim < 64 && mask >> ndim)
        return garbled(error, "dimensions");
    for (int d = 0; d < ndim; d++)
        if (mask >> d & 1) {
            dims[ndim + d] = (int64_t)dr_bytes_limited(bytes, INT64_MAX);
            dims[2 * ndim + d] = (int64_t)dr_bytes_limited(bytes, INT64_MAX);
        }
    row->ndim = ndim;
    row->dims = dims;
    if (bytes->bad || row->properties >= cursor->property_count)
        return garbled(error, "dimensions");
    if (!dr_dims_good(dims, ndim, cursor->properties[row->properties].item_bytes))
        return dr_error_invalid(error, DR_NO_ITEM, "'%.*s': a size in a compact plan is too large",
                                (int)(row->name_size < 200 ? row->name_size : 200), row->name);
    return 0;
}

int dr_cursor_next(struct dr_cursor *cursor, struct dr_error *error) {
    struct dr_row_view *row = &cursor->row;
    struct dr_bytes *bytes = &cursor->bytes;
    if (cursor->rows_left == 0)
        return bytes->at == bytes->end ? 0 : garbled(error, "there is more than its rows");
    cursor->rows_left--;
    const uint8_t *start = dr_bytes_take(bytes, 1);
    if (!start)
        return garbled(error, "rows are missing");
    uint8_t head = *start;
    bool first = row->name == NULL;
    if (first && head & (SAME_NAME | SAME_PATH | SAME_PROPERTIES))
        return garbled(error, "the first row refers to one before");
    cursor->same_name = head & SAME_NAME;
    row->type = head & 3;
    row->flags = head >> 2 & 3;
    int rc = head & SAME_NAME ? 0 : decode_name(cursor, error);
    if (rc)
        return rc;
    if (!(head & SAME_PATH)) {
        row->path_size = (uint32_t)dr_bytes_limited(bytes, UINT32_MAX / 2);
        row->path = (const char *)dr_bytes_take(bytes, row->path_size);
    }
    if (!(head & SAME_PROPERTIES))
        row->properties = (uint16_t)dr_bytes_limited(bytes, DR_MAX_PROPERTIES);
    if (bytes->bad)
        return garbled(error, "a row");
    uint64_t text = head & SAME_NAME ? 0 : (uint64_t)row->name_size + row->path_size;
    if (text > cursor->text_left)
        return garbled(error, "names");
    cursor->text_left -= text;
    row->ndim = 0;
    if (row->type == DR_ROW_TENSOR || row->type == DR_ROW_SHARD)
        rc = decode_dims(cursor, head & PARTIAL, error);
    return rc ? rc : 1;
}

static int append_from(struct dr_table *table, const struct dr_cursor *cursor, uint32_t *name, struct dr_error *error) {
    struct dr_row_view view = cursor->row;
    int rc = cursor->same_name
                 ? 0
                 : dr_table_name(table, view.name, view.name_size, view.path, view.path_size, *name, name, error);
    if (!rc && view.ndim == 0 && view.type != DR_ROW_TENSOR && view.type != DR_ROW_SHARD)
        view.properties = 0;
    if (!rc)
        rc = dr_table_append(table, *name, &view, error);
    return rc;
}

int dr_table_decode(struct dr_table *table, const void *data, size_t size, const struct dr_control *control,
                    struct dr_error *error) {
    struct dr_cursor cursor;
    struct dr_ticker ticker = {.control = control};
    int rc = dr_cursor_open(&cursor, data, size, error);
    for (size_t i = 0; rc == 0 && i < cursor.property_count; i++) {
        uint16_t index;
        rc = dr_table_properties(table, &cursor.properties[i], &index, error);
        if (rc == 0 && index != i)
            rc = garbled(error, "properties that are equal");
    }
    uint32_t name = DR_NO_NAME;
    while (rc == 0 && (rc = dr_cursor_next(&cursor, error)) > 0) {
        rc = append_from(table, &cursor, &name, error);
        if (!rc)
            rc = dr_ticker_turn(&ticker, table->count, error);
    }
    dr_cursor_close(&cursor);
    return rc;
}
