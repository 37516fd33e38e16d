/* Tables of rows: growing arrays, and hash tables of names and of properties. See table.h. */
#include "plan/table.h"

#include "base/array.h"
#include "base/sort.h"

#include <assert.h>

void dr_table_init(struct dr_table *table) { *table = (struct dr_table){0}; }

void dr_table_destroy(struct dr_table *table) {
    for (size_t i = 0; i < table->property_count; i++)
        free(table->properties[i].encoding);
    free(table->properties);
    free(table->rows);
    free(table->dims);
    free(table->names);
    free(table->text);
    dr_hash_destroy(&table->by_name);
    dr_hash_destroy(&table->by_encoding);
    dr_table_init(table);
}

/* ---- names ---- */

static bool is_name(const struct dr_table *table, uint32_t index, const char *name, uint32_t size) {
    const struct dr_name *n = &table->names[index];
    return n->size == size && memcmp(table->text + n->text, name, size) == 0;
}

static uint32_t find_hashed(const struct dr_table *table, const char *name, uint32_t size, uint32_t hash) {
    uint32_t index;
    for (size_t at = 0; (index = dr_hash_next(&table->by_name, hash, &at)) != DR_NO_ENTRY;)
        if (is_name(table, index, name, size))
            return index;
    return DR_NO_NAME;
}

uint32_t dr_table_find(const struct dr_table *table, const char *name, uint32_t size, uint32_t guess) {
    if (guess < table->name_count && is_name(table, guess, name, size))
        return guess;
    return find_hashed(table, name, size, dr_hash_of(0, name, size));
}

static int add_name(struct dr_table *table, const struct dr_name *added, const char *name, const char *path,
                    uint32_t hash, struct dr_error *error) {
    size_t more = (size_t)added->size + added->path_size;
    if (table->name_count >= DR_NO_NAME - 1)
        return dr_error_invalid(error, DR_NO_ITEM, "too many names");
    int rc = dr_hash_reserve(&table->by_name, error);
    if (!rc)
        rc = DR_ARRAY_RESERVE(table->names, table->name_count, table->name_room, 1, error);
    if (!rc)
        rc = DR_ARRAY_RESERVE(table->text, table->text_size, table->text_room, more + 1, error);
    if (rc)
        return rc;
    char *text = table->text + table->text_size;
    memcpy(text, name, added->size);
    if (added->path_size)
        memcpy(text + added->size, path, added->path_size);
    table->text_size += more;
    dr_hash_add(&table->by_name, hash, (uint32_t)table->name_count);
    table->names[table->name_count++] = *added;
    return 0;
}

int dr_table_name(struct dr_table *table, const char *name, uint32_t size, const char *path, uint32_t path_size,
                  uint32_t guess, uint32_t *out, struct dr_error *error) {
    *out = guess;
    if (guess < table->name_count && is_name(table, guess, name, size))
        return 0;
    uint32_t hash = dr_hash_of(0, name, size);
    *out = find_hashed(table, name, size, hash);
    if (*out != DR_NO_NAME)
        return 0;
    struct dr_name added = {table->text_size, size, path_size};
    int rc = add_name(table, &added, name, path, hash, error);
    *out = rc ? DR_NO_NAME : (uint32_t)table->name_count - 1;
    return rc;
}

/* ---- properties ---- */

/* Nearly all tables have so few that comparing them is quicker than hashing. */
enum { FEW_PROPERTIES = 4 };

static bool is_equal(const struct dr_properties *p, const struct dr_properties *q) {
    return p->size == q->size && p->item_bytes == q->item_bytes && memcmp(p->encoding, q->encoding, p->size) == 0;
}

static uint32_t find_properties(const struct dr_table *table, const struct dr_properties *wanted, uint32_t hash) {
    uint32_t index;
    for (size_t at = 0; (index = dr_hash_next(&table->by_encoding, hash, &at)) != DR_NO_ENTRY;)
        if (is_equal(&table->properties[index], wanted))
            break;
    return index;
}

static int add_properties(struct dr_table *table, const struct dr_properties *properties, uint32_t hash,
                          struct dr_error *error) {
    if (table->property_count >= DR_MAX_PROPERTIES)
        return dr_error_invalid(error, DR_NO_ITEM, "too many kinds of tensors");
    int rc = dr_hash_reserve(&table->by_encoding, error);
    if (!rc)
        rc = DR_ARRAY_RESERVE(table->properties, table->property_count, table->property_room, 1, error);
    char *encoding = rc ? NULL : dr_malloc((size_t)properties->size + 1);
    if (!encoding)
        return rc ? rc : dr_error_memory(error);
    memcpy(encoding, properties->encoding, properties->size);
    dr_hash_add(&table->by_encoding, hash, (uint32_t)table->property_count);
    struct dr_properties *added = &table->properties[table->property_count++];
    *added = *properties;
    added->encoding = encoding;
    return 0;
}

int dr_table_properties(struct dr_table *table, const struct dr_properties *properties, uint16_t *out,
                        struct dr_error *error) {
    for (uint16_t i = 0; i < FEW_PROPERTIES && i < table->property_count; i++)
        if (is_equal(&table->properties[i], properties)) {
            *out = i;
            return 0;
        }
    uint32_t hash = dr_hash_of(properties->item_bytes, properties->encoding, properties->size);
    uint32_t found = find_properties(table, properties, hash);
    int rc = found == DR_NO_ENTRY ? add_properties(table, properties, hash, error) : 0;
    *out = (uint16_t)(found == DR_NO_ENTRY ? table->property_count - 1 : found);
    return rc;
}

/* ---- rows ---- */

int dr_table_append(struct dr_table *table, uint32_t name, const struct dr_row_view *view, struct dr_error *error) {
    assert(name < table->name_count && view->ndim >= 0 && view->ndim <= DR_TABLE_MAX_DIMS);
    assert(view->type <= DR_ROW_NAME && (view->properties < table->property_count || view->properties == 0));
    size_t ints = 3 * (size_t)view->ndim;
    int rc = DR_ARRAY_RESERVE(table->rows, table->count, table->room, 1, error);
    if (!rc)
        rc = DR_ARRAY_RESERVE(table->dims, table->dims_count, table->dims_room, ints + 1, error);
    if (rc)
        return rc;
    table->rows[table->count++] = (struct dr_row){
        .dims = table->dims_count,
        .name = name,
        .properties = view->properties,
        .ndim = (uint8_t)view->ndim,
        .type = (uint8_t)(view->type & 15),
        .flags = (uint8_t)(view->flags & 15),
    };
    if (ints)
        memcpy(table->dims + table->dims_count, view->dims, ints * sizeof *table->dims);
    table->dims_count += ints;
    return 0;
}

const char *dr_table_text(const struct dr_table *table, uint32_t name) { return table->text + table->names[name].text; }

int dr_name_width(const struct dr_name *name) { return (int)(name->size < 120 ? name->size : 120); }

const int64_t *dr_row_size(const struct dr_table *table, const struct dr_row *row) { return table->dims + row->dims; }

const int64_t *dr_row_offsets(const struct dr_table *table, const struct dr_row *row) {
    return table->dims + row->dims + row->ndim;
}

const int64_t *dr_row_lengths(const struct dr_table *table, const struct dr_row *row) {
    return table->dims + row->dims + 2 * row->ndim;
}

bool dr_row_is_tensor(const struct dr_row *row) { return row->type == DR_ROW_TENSOR || row->type == DR_ROW_SHARD; }

static bool product(const int64_t *sizes, int ndim, uint64_t start, uint64_t *out) {
    uint64_t bytes = start;
    for (int d = 0; d < ndim; d++)
        if (sizes[d] < 0 || __builtin_mul_overflow(bytes, (uint64_t)sizes[d], &bytes) || bytes > INT64_MAX)
            return false;
    *out = bytes;
    return true;
}

uint64_t dr_row_bytes(const struct dr_table *table, const struct dr_row *row) {
    uint64_t bytes = 0;
    if (dr_row_is_tensor(row))
        product(dr_row_lengths(table, row), row->ndim, table->properties[row->properties].item_bytes, &bytes);
    return bytes;
}

bool dr_dims_good(const int64_t *dims, int ndim, uint32_t item_bytes) {
    uint64_t bytes;
    if (!product(dims, ndim, item_bytes, &bytes) || !product(dims + 2 * ndim, ndim, item_bytes, &bytes))
        return false;
    for (int d = 0; d < ndim; d++) {
        int64_t end;
        if (dims[ndim + d] < 0 || __builtin_add_overflow(dims[ndim + d], dims[2 * ndim + d], &end))
            return false;
    }
    return true;
}

int dr_table_sort_by_name(struct dr_rows_by_name *by, const struct dr_table *table, struct dr_error *error) {
    by->start = dr_calloc(table->name_count + 2, sizeof *by->start);
    by->rows = dr_malloc((table->count + 1) * sizeof *by->rows);
    if (!by->start || !by->rows)
        return dr_error_memory(error);
    const uint32_t *names = table->count ? &table->rows->name : NULL;
    uint64_t *next = dr_sort_starts(by->start, table->name_count, names, sizeof *table->rows, table->count);
    for (size_t i = 0; i < table->count; i++)
        by->rows[next[table->rows[i].name]++] = (uint32_t)i;
    return 0;
}

void dr_rows_by_name_destroy(struct dr_rows_by_name *by) {
    free(by->start);
    free(by->rows);
    *by = (struct dr_rows_by_name){0};
}
