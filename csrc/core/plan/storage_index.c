/* The storage index, and its encoded form. See storage_index.h, and docs/format.md for the bytes. */
#include "plan/storage_index.h"

#include "base/crc.h"
#include "base/memory.h"

#include <assert.h>
#include <string.h>

static const char magic[4] = {'D', 'R', 'P', 1};
enum { KIND_BITS = 2 };

int dr_storage_index_init(struct dr_storage_index *storage, size_t count, struct dr_error *error) {
    *storage = (struct dr_storage_index){.count = count};
    dr_table_init(&storage->files);
    storage->entries = dr_calloc(count + 1, sizeof *storage->entries);
    if (!storage->entries)
        return dr_error_memory(error);
    for (size_t i = 0; i < count; i++)
        storage->entries[i].kind = DR_STORAGE_NONE;
    return 0;
}

void dr_storage_index_destroy(struct dr_storage_index *storage) {
    free(storage->entries);
    dr_table_destroy(&storage->files);
    dr_buffer_destroy(&storage->crcs);
    *storage = (struct dr_storage_index){0};
}

int dr_storage_index_file(struct dr_storage_index *storage, const char *name, uint32_t size, uint32_t *out,
                          struct dr_error *error) {
    return dr_table_name(&storage->files, name, size, "", 0, (uint32_t)storage->files.name_count - 1, out, error);
}

int dr_storage_index_set(struct dr_storage_index *storage, size_t index, const struct dr_storage_entry *entry,
                         const void *crcs, struct dr_error *error) {
    assert(index < storage->count && entry->kind <= DR_STORAGE_NONE && entry->file < storage->files.name_count);
    struct dr_storage_entry *at = &storage->entries[index];
    *at = *entry;
    at->has_crcs = crcs != NULL;
    at->crcs = storage->crcs.size;
    if (crcs)
        dr_buffer_put(&storage->crcs, crcs, 4 * dr_crc_count(entry->payload_offset, entry->payload_size));
    return storage->crcs.failed ? dr_error_memory(error) : 0;
}

const uint8_t *dr_storage_entry_crcs(const struct dr_storage_index *storage, const struct dr_storage_entry *entry) {
    static const uint8_t none[1];
    return !entry->has_crcs ? NULL : storage->crcs.data ? storage->crcs.data + entry->crcs : none;
}

/* ---- the encoded form ---- */

static void encode_entry(struct dr_buffer *out, const struct dr_storage_index *storage,
                         const struct dr_storage_entry *entry) {
    dr_buffer_varint(out, (uint64_t)entry->file << (KIND_BITS + 1) | (uint64_t)entry->kind << 1 | entry->has_crcs);
    if (entry->kind == DR_STORAGE_NONE)
        return;
    dr_buffer_varint(out, entry->offset);
    dr_buffer_varint(out, entry->length);
    if (entry->kind == DR_STORAGE_OTHER)
        return;
    dr_buffer_varint(out, entry->payload_offset - entry->offset);
    dr_buffer_varint(out, entry->payload_size);
    if (entry->has_crcs)
        dr_buffer_put(out, dr_storage_entry_crcs(storage, entry),
                      4 * dr_crc_count(entry->payload_offset, entry->payload_size));
}

int dr_storage_index_encode(const struct dr_storage_index *storage, struct dr_buffer *out, struct dr_error *error) {
    dr_buffer_begin(out, magic);
    dr_buffer_varint(out, storage->files.name_count);
    for (uint32_t i = 0; i < storage->files.name_count; i++) {
        dr_buffer_varint(out, storage->files.names[i].size);
        dr_buffer_put(out, dr_table_text(&storage->files, i), storage->files.names[i].size);
    }
    dr_buffer_varint(out, storage->count);
    for (size_t i = 0; i < storage->count; i++)
        encode_entry(out, storage, &storage->entries[i]);
    return dr_buffer_seal(out, error);
}

static int garbled(struct dr_error *error, const char *what) {
    return dr_error_invalid(error, DR_NO_ITEM, "a list of stored items is garbled or truncated (%s)", what);
}

static int decode_files(struct dr_storage_index *storage, struct dr_bytes *bytes, struct dr_error *error) {
    uint64_t count = dr_bytes_limited(bytes, dr_bytes_left(bytes));
    for (uint64_t i = 0; i < count; i++) {
        uint32_t index, size = (uint32_t)dr_bytes_limited(bytes, UINT32_MAX / 2);
        const uint8_t *name = dr_bytes_take(bytes, size);
        if (!name)
            return garbled(error, "a file name");
        int rc = dr_storage_index_file(storage, (const char *)name, size, &index, error);
        if (rc)
            return rc;
        if (index != i)
            return garbled(error, "a file name comes twice");
    }
    return bytes->bad ? garbled(error, "file names") : 0;
}

static int decode_entry(struct dr_storage_index *storage, size_t index, struct dr_bytes *bytes,
                        struct dr_error *error) {
    uint64_t head = dr_bytes_varint(bytes);
    bool has_crcs = head & 1;
    struct dr_storage_entry entry = {.kind = head >> 1 & 3, .file = (uint32_t)(head >> (KIND_BITS + 1))};
    if (bytes->bad || (entry.kind != DR_STORAGE_NONE && head >> (KIND_BITS + 1) >= storage->files.name_count))
        return garbled(error, "a place");
    if (entry.kind == DR_STORAGE_NONE)
        return 0;
    entry.offset = dr_bytes_limited(bytes, INT64_MAX);
    entry.length = dr_bytes_limited(bytes, INT64_MAX - entry.offset);
    const uint8_t *crcs = NULL;
    if (entry.kind != DR_STORAGE_OTHER) {
        uint64_t ahead = dr_bytes_limited(bytes, entry.length);
        entry.payload_offset = entry.offset + ahead;
        entry.payload_size = dr_bytes_limited(bytes, entry.length - ahead);
        if (has_crcs && !bytes->bad)
            crcs = dr_bytes_take(bytes, 4 * (uint64_t)dr_crc_count(entry.payload_offset, entry.payload_size));
    }
    if (bytes->bad)
        return garbled(error, "a place");
    return dr_storage_index_set(storage, index, &entry, crcs, error);
}

int dr_storage_index_decode(struct dr_storage_index *storage, const void *data, size_t size,
                            const struct dr_control *control, struct dr_error *error) {
    *storage = (struct dr_storage_index){0};
    struct dr_bytes bytes;
    struct dr_ticker ticker = {.control = control};
    const char *problem = dr_bytes_open(&bytes, data, size, magic);
    if (problem)
        return garbled(error, problem);
    int rc = decode_files(storage, &bytes, error);
    if (rc)
        return rc;
    struct dr_table files = storage->files;
    uint64_t count = dr_bytes_limited(&bytes, dr_bytes_left(&bytes));
    rc = dr_storage_index_init(storage, count, error);
    storage->files = files;
    for (size_t i = 0; rc == 0 && i < count; i++) {
        rc = decode_entry(storage, i, &bytes, error);
        if (rc == 0)
            rc = dr_ticker_turn(&ticker, i, error);
    }
    if (!rc && (bytes.bad || bytes.at != bytes.end))
        rc = garbled(error, "its length");
    return rc;
}

int dr_storage_index_merge(struct dr_storage_index *storage, const struct dr_storage_index *from,
                           const uint32_t *indices, size_t count, struct dr_error *error) {
    if (count != from->count)
        return dr_error_invalid(error, DR_NO_ITEM, "a rank wrote %zu items where %zu were planned", from->count, count);
    for (size_t i = 0; i < count; i++) {
        struct dr_storage_entry entry = from->entries[i];
        if (entry.kind == DR_STORAGE_NONE || indices[i] >= storage->count ||
            storage->entries[indices[i]].kind != DR_STORAGE_NONE)
            return dr_error_invalid(error, DR_NO_ITEM, "a rank's report of what it wrote does not fit the plan");
        const struct dr_name *name = &from->files.names[entry.file];
        int rc =
            dr_storage_index_file(storage, dr_table_text(&from->files, entry.file), name->size, &entry.file, error);
        if (!rc)
            rc = dr_storage_index_set(storage, indices[i], &entry, dr_storage_entry_crcs(from, &from->entries[i]),
                                      error);
        if (rc)
            return rc;
    }
    return 0;
}
