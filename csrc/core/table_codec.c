/*
 * The encoded form of a table. See table.h, and docs/format.md for the bytes.
 *
 * Names are front-coded against the one before, numbers are varints, and what
 * is as in the row before is left out. A CRC-32 covers everything.
 */
#include "table.h"

#include "crc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char magic[4] = {'D', 'R', 'T', 1};
enum { HEADER_BYTES = 8, MAX_PROPERTY_BYTES = 4096, MIN_ROW_BYTES = 1 };

/* The first byte of an encoded row: the type in two bits, its flags in two, and these. */
enum { SAME_NAME = 1 << 4, SAME_PATH = 1 << 5, SAME_PROPERTIES = 1 << 6, PARTIAL = 1 << 7 };

/* ---- bytes out ---- */

void dr_buffer_put(struct dr_buffer *buffer, const void *data, size_t size) {
    if (buffer->failed || size == 0)
        return;
    if (buffer->room - buffer->size < size) {
        size_t room = buffer->room * 2 > buffer->size + size ? buffer->room * 2 : buffer->size + size + 256;
        uint8_t *grown = realloc(buffer->data, room);
        if (!grown) {
            dr_buffer_destroy(buffer);
            buffer->failed = true;
            return;
        }
        buffer->data = grown;
        buffer->room = room;
    }
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

void dr_buffer_byte(struct dr_buffer *buffer, uint8_t byte) { dr_buffer_put(buffer, &byte, 1); }

void dr_buffer_varint(struct dr_buffer *buffer, uint64_t value) {
    uint8_t bytes[10];
    size_t n = 0;
    while (value >= 128) {
        bytes[n++] = (uint8_t)(value | 128);
        value >>= 7;
    }
    bytes[n++] = (uint8_t)value;
    dr_buffer_put(buffer, bytes, n);
}

void dr_buffer_destroy(struct dr_buffer *buffer) {
    free(buffer->data);
    *buffer = (struct dr_buffer){0};
}

void dr_buffer_begin(struct dr_buffer *buffer, const char kind[4]) {
    *buffer = (struct dr_buffer){0};
    dr_buffer_put(buffer, kind, 4);
    dr_buffer_put(buffer, (uint8_t[4]){0}, 4);
}

int dr_buffer_seal(struct dr_buffer *buffer, struct dr_error *error) {
    if (buffer->failed)
        return dr_error_memory(error);
    uint32_t crc = dr_crc32(0, buffer->data + HEADER_BYTES, buffer->size - HEADER_BYTES);
    for (int i = 0; i < 4; i++)
        buffer->data[4 + i] = (uint8_t)(crc >> 8 * i);
    return 0;
}

/* ---- bytes in ---- */

const char *dr_bytes_open(struct dr_bytes *bytes, const void *data, size_t size, const char kind[4]) {
    const uint8_t *at = data;
    if (size < HEADER_BYTES || memcmp(at, kind, 4) != 0)
        return "no header; or another version of dcpring made it";
    uint32_t crc = at[4] | (uint32_t)at[5] << 8 | (uint32_t)at[6] << 16 | (uint32_t)at[7] << 24;
    if (crc != dr_crc32(0, at + HEADER_BYTES, size - HEADER_BYTES))
        return "its CRC-32 does not match";
    *bytes = (struct dr_bytes){at + HEADER_BYTES, at + size, false};
    return NULL;
}

uint64_t dr_bytes_varint(struct dr_bytes *bytes) {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && bytes->at < bytes->end; shift += 7) {
        uint8_t byte = *bytes->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            if (shift == 63 && byte > 1)
                break;
            return value;
        }
    }
    bytes->bad = true;
    bytes->at = bytes->end;
    return 0;
}

uint64_t dr_bytes_limited(struct dr_bytes *bytes, uint64_t most) {
    uint64_t value = dr_bytes_varint(bytes);
    if (value <= most)
        return value;
    bytes->bad = true;
    bytes->at = bytes->end;
    return 0;
}

const uint8_t *dr_bytes_take(struct dr_bytes *bytes, uint64_t size) {
    const uint8_t *taken = bytes->at;
    if ((uint64_t)(bytes->end - bytes->at) < size) {
        bytes->bad = true;
        bytes->at = bytes->end;
        return NULL;
    }
    bytes->at += size;
    return taken;
}

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

static void encode_name(struct dr_buffer *out, const struct dr_table *table, uint32_t name, uint32_t previous) {
    const struct dr_name *n = &table->names[name];
    const char *text = dr_table_text(table, name);
    uint32_t shared = 0;
    if (previous != DR_NO_NAME) {
        const char *before = dr_table_text(table, previous);
        uint32_t most = n->size < table->names[previous].size ? n->size : table->names[previous].size;
        while (shared < most && text[shared] == before[shared])
            shared++;
    }
    dr_buffer_varint(out, shared);
    dr_buffer_varint(out, n->size - shared);
    dr_buffer_put(out, text + shared, n->size - shared);
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

static void encode_row(struct dr_buffer *out, const struct dr_table *table, size_t index) {
    const struct dr_row *row = &table->rows[index];
    const struct dr_row *before = index ? row - 1 : NULL;
    bool tensor = dr_row_is_tensor(row);
    unsigned head = row->type | (unsigned)row->flags << 2;
    if (before && before->name == row->name)
        head |= SAME_NAME | SAME_PATH;
    else if (before && same_path(table, before->name, row->name))
        head |= SAME_PATH;
    if (before && before->properties == row->properties)
        head |= SAME_PROPERTIES;
    const int64_t *dims = dr_row_size(table, row);
    bool partial = tensor && is_partial(dims, row->ndim);
    dr_buffer_byte(out, (uint8_t)(head | (partial ? PARTIAL : 0)));
    if (!(head & SAME_NAME))
        encode_name(out, table, row->name, before ? before->name : DR_NO_NAME);
    if (!(head & SAME_PATH)) {
        const struct dr_name *n = &table->names[row->name];
        dr_buffer_varint(out, n->path_size);
        dr_buffer_put(out, dr_table_text(table, row->name) + n->size, n->path_size);
    }
    if (!(head & SAME_PROPERTIES))
        dr_buffer_varint(out, row->properties);
    if (tensor)
        encode_dims(out, dims, row->ndim, partial);
}

int dr_table_encode(const struct dr_table *table, struct dr_buffer *out, struct dr_error *error) {
    dr_buffer_begin(out, magic);
    encode_properties(out, table);
    dr_buffer_varint(out, table->count);
    for (size_t i = 0; i < table->count; i++)
        encode_row(out, table, i);
    return dr_buffer_seal(out, error);
}

/* ---- decoding ---- */

static int garbled(struct dr_error *error, const char *what) {
    return dr_error_invalid(error, DR_NO_ITEM, "a compact plan is garbled or truncated (%s)", what);
}

static int decode_properties(struct dr_cursor *cursor, struct dr_error *error) {
    struct dr_bytes *bytes = &cursor->bytes;
    size_t count = dr_bytes_limited(bytes, DR_MAX_PROPERTIES);
    if (bytes->bad || count > (size_t)(bytes->end - bytes->at))
        return garbled(error, "properties");
    cursor->properties = calloc(count + 1, sizeof *cursor->properties);
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

/* Front coding lets few bytes stand for long names: more than this for each is no plan, but an attack. */
enum { MOST_TEXT_PER_BYTE = 1024, TEXT_ALLOWANCE = 16 << 20 };

int dr_cursor_open(struct dr_cursor *cursor, const void *data, size_t size, struct dr_error *error) {
    *cursor = (struct dr_cursor){0};
    const char *problem = dr_bytes_open(&cursor->bytes, data, size, magic);
    if (problem)
        return garbled(error, problem);
    cursor->text_left = (uint64_t)size * MOST_TEXT_PER_BYTE + TEXT_ALLOWANCE;
    int rc = decode_properties(cursor, error);
    if (rc)
        return rc;
    cursor->rows_left = dr_bytes_limited(&cursor->bytes, (uint64_t)(cursor->bytes.end - cursor->bytes.at));
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
    if (!suffix)
        return garbled(error, "a name");
    if (cursor->name_room < shared + more + 1) {
        size_t room = 2 * (shared + more) + 64;
        char *grown = realloc(cursor->name, room);
        if (!grown)
            return dr_error_memory(error);
        cursor->name = grown;
        cursor->name_room = room;
    }
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
    const uint8_t *head = dr_bytes_take(bytes, 1);
    if (!head)
        return garbled(error, "rows are missing");
    bool first = row->name == NULL;
    if (first && *head & (SAME_NAME | SAME_PATH | SAME_PROPERTIES))
        return garbled(error, "the first row refers to one before");
    row->type = *head & 3;
    row->flags = *head >> 2 & 3;
    int rc = *head & SAME_NAME ? 0 : decode_name(cursor, error);
    if (rc)
        return rc;
    if (!(*head & SAME_PATH)) {
        row->path_size = (uint32_t)dr_bytes_limited(bytes, UINT32_MAX / 2);
        row->path = (const char *)dr_bytes_take(bytes, row->path_size);
    }
    if (!(*head & SAME_PROPERTIES))
        row->properties = (uint16_t)dr_bytes_limited(bytes, DR_MAX_PROPERTIES);
    if (bytes->bad)
        return garbled(error, "a row");
    uint64_t text = *head & SAME_NAME ? 0 : (uint64_t)row->name_size + row->path_size;
    if (text > cursor->text_left)
        return garbled(error, "names");
    cursor->text_left -= text;
    row->ndim = 0;
    if (row->type == DR_ROW_TENSOR || row->type == DR_ROW_SHARD)
        rc = decode_dims(cursor, *head & PARTIAL, error);
    return rc ? rc : 1;
}

static int append_from(struct dr_table *table, const struct dr_cursor *cursor, uint32_t *previous,
                       struct dr_error *error) {
    struct dr_row_view view = cursor->row;
    uint32_t name;
    int rc = dr_table_name(table, view.name, view.name_size, view.path, view.path_size, *previous, &name, error);
    if (!rc && view.ndim == 0 && view.type != DR_ROW_TENSOR && view.type != DR_ROW_SHARD)
        view.properties = 0;
    if (!rc)
        rc = dr_table_append(table, name, &view, error);
    *previous = name;
    return rc;
}

int dr_table_decode(struct dr_table *table, const void *data, size_t size, struct dr_error *error) {
    struct dr_cursor cursor;
    int rc = dr_cursor_open(&cursor, data, size, error);
    for (size_t i = 0; rc == 0 && i < cursor.property_count; i++) {
        uint16_t index;
        rc = dr_table_properties(table, &cursor.properties[i], &index, error);
        if (rc == 0 && index != i)
            rc = garbled(error, "properties that are equal");
    }
    uint32_t previous = DR_NO_NAME;
    while (rc == 0 && (rc = dr_cursor_next(&cursor, error)) > 0)
        rc = append_from(table, &cursor, &previous, error);
    dr_cursor_close(&cursor);
    return rc;
}
