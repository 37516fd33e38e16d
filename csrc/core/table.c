/* Tables of rows: growing arrays, and a hash table of the names. See table.h. */
#include "table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void dr_table_init(struct dr_table *table) { *table = (struct dr_table){0}; }

void dr_table_destroy(struct dr_table *table) {
    for (size_t i = 0; i < table->property_count; i++)
        free(table->properties[i].encoding);
    free(table->properties);
    free(table->rows);
    free(table->dims);
    free(table->names);
    free(table->text);
    free(table->name_slots);
    dr_table_init(table);
}

/* Makes room for `more` elements behind `count`. */
static int grow(void *array_pointer, size_t count, size_t *room, size_t more, size_t element, struct dr_error *error) {
    if (*room - count >= more)
        return 0;
    void *old;
    memcpy(&old, array_pointer, sizeof old);
    size_t wanted = *room * 2 > count + more ? *room * 2 : count + more + 16;
    void *grown = wanted <= SIZE_MAX / element ? realloc(old, wanted * element) : NULL;
    if (!grown)
        return dr_error_memory(error);
    memcpy(array_pointer, &grown, sizeof grown);
    *room = wanted;
    return 0;
}

/* ---- names ---- */

static uint64_t hash_text(const char *text, uint32_t size) {
    uint64_t hash = 0x9e3779b97f4a7c15u ^ size;
    for (; size >= 8; text += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    uint64_t rest = 0;
    memcpy(&rest, text, size);
    hash = (hash ^ rest) * 0xc4ceb9fe1a85ec53u;
    return hash ^ hash >> 29;
}

static bool is_name(const struct dr_table *table, uint32_t index, const char *name, uint32_t size) {
    const struct dr_name *n = &table->names[index];
    return n->size == size && memcmp(table->text + n->text, name, size) == 0;
}

static size_t slot_of(const struct dr_table *table, const char *name, uint32_t size) {
    size_t mask = table->slot_count - 1, slot = hash_text(name, size) & mask;
    while (table->name_slots[slot] && !is_name(table, table->name_slots[slot] - 1, name, size))
        slot = (slot + 1) & mask;
    return slot;
}

uint32_t dr_table_find(const struct dr_table *table, const char *name, uint32_t size, uint32_t guess) {
    if (guess < table->name_count && is_name(table, guess, name, size))
        return guess;
    if (!table->slot_count)
        return DR_NO_NAME;
    uint32_t found = table->name_slots[slot_of(table, name, size)];
    return found ? found - 1 : DR_NO_NAME;
}

static int grow_slots(struct dr_table *table, struct dr_error *error) {
    if (table->slot_count >= 2 * (table->name_count + 1))
        return 0;
    size_t count = table->slot_count ? 2 * table->slot_count : 64;
    uint32_t *slots = calloc(count, sizeof *slots);
    if (!slots)
        return dr_error_memory(error);
    free(table->name_slots);
    table->name_slots = slots;
    table->slot_count = count;
    for (size_t i = 0; i < table->name_count; i++) {
        const struct dr_name *n = &table->names[i];
        slots[slot_of(table, table->text + n->text, n->size)] = (uint32_t)i + 1;
    }
    return 0;
}

int dr_table_name(struct dr_table *table, const char *name, uint32_t size, const char *path, uint32_t path_size,
                  uint32_t guess, uint32_t *out, struct dr_error *error) {
    *out = dr_table_find(table, name, size, guess);
    if (*out != DR_NO_NAME)
        return 0;
    if (table->name_count >= DR_NO_NAME - 1)
        return dr_error_invalid(error, DR_NO_ITEM, "too many names");
    int rc = grow_slots(table, error);
    if (!rc)
        rc = grow(&table->names, table->name_count, &table->name_room, 1, sizeof *table->names, error);
    if (!rc)
        rc = grow(&table->text, table->text_size, &table->text_room, (size_t)size + path_size + 1, 1, error);
    if (rc)
        return rc;
    *out = (uint32_t)table->name_count;
    table->names[table->name_count++] = (struct dr_name){table->text_size, size, path_size};
    memcpy(table->text + table->text_size, name, size);
    if (path_size)
        memcpy(table->text + table->text_size + size, path, path_size);
    table->text_size += (size_t)size + path_size;
    table->name_slots[slot_of(table, name, size)] = *out + 1;
    return 0;
}

/* ---- properties ---- */

int dr_table_properties(struct dr_table *table, const struct dr_properties *properties, uint16_t *out,
                        struct dr_error *error) {
    for (size_t i = 0; i < table->property_count; i++) {
        const struct dr_properties *p = &table->properties[i];
        if (p->size == properties->size && p->item_bytes == properties->item_bytes &&
            memcmp(p->encoding, properties->encoding, p->size) == 0) {
            *out = (uint16_t)i;
            return 0;
        }
    }
    if (table->property_count >= DR_MAX_PROPERTIES)
        return dr_error_invalid(error, DR_NO_ITEM, "too many kinds of tensors");
    struct dr_properties *grown =
        realloc(table->properties, (table->property_count + 1) * sizeof *table->properties);
    if (!grown)
        return dr_error_memory(error);
    table->properties = grown;
    struct dr_properties *added = &grown[table->property_count];
    *added = *properties;
    added->encoding = malloc((size_t)properties->size + 1);
    if (!added->encoding)
        return dr_error_memory(error);
    memcpy(added->encoding, properties->encoding, properties->size);
    *out = (uint16_t)table->property_count++;
    return 0;
}

/* ---- rows ---- */

int dr_table_append(struct dr_table *table, uint32_t name, const struct dr_row_view *view, struct dr_error *error) {
    size_t ints = 3 * (size_t)view->ndim;
    int rc = grow(&table->rows, table->count, &table->room, 1, sizeof *table->rows, error);
    if (!rc)
        rc = grow(&table->dims, table->dims_count, &table->dims_room, ints + 1, sizeof *table->dims, error);
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
