/*
 * The storage index: where items are stored. For each a file, the record in it, the payload in
 * the record, and the payload's CRCs. What a rank reports after writing, and,
 * for all chunks of a checkpoint, half of the index in `.metadata`.
 */
#ifndef DCPRING_STORAGE_INDEX_H
#define DCPRING_STORAGE_INDEX_H

#include "plan/table.h"

enum dr_storage_kind {
    DR_STORAGE_TENSOR, /* a plain tensor: the payload can be read in parts */
    DR_STORAGE_BYTES,  /* to be read as a whole */
    DR_STORAGE_OTHER,  /* nothing is known of the payload */
    DR_STORAGE_NONE,   /* not stored (yet) */
};

struct dr_storage_entry {
    uint64_t offset, length, payload_offset, payload_size;
    uint64_t crcs; /* index of dr_crc_count() little-endian CRCs in the index's crcs */
    uint32_t file; /* index of its name */
    uint8_t kind;
    bool has_crcs;
};

struct dr_storage_index {
    struct dr_storage_entry *entries;
    size_t count;
    struct dr_table files; /* of names only */
    struct dr_buffer crcs;
};

/* `count` entries that are DR_STORAGE_NONE. */
int dr_storage_index_init(struct dr_storage_index *storage, size_t count, struct dr_error *error);
void dr_storage_index_destroy(struct dr_storage_index *storage);

int dr_storage_index_file(struct dr_storage_index *storage, const char *name, uint32_t size, uint32_t *out,
                          struct dr_error *error);
/* crcs: dr_crc_count() little-endian CRCs of the payload, or NULL. entry->file is that of a name of this index. */
int dr_storage_index_set(struct dr_storage_index *storage, size_t index, const struct dr_storage_entry *entry,
                         const void *crcs, struct dr_error *error);

/* NULL for an entry without CRCs, but not for one that has none because its payload is empty. */
const uint8_t *dr_storage_entry_crcs(const struct dr_storage_index *storage, const struct dr_storage_entry *entry);

int dr_storage_index_encode(const struct dr_storage_index *storage, struct dr_buffer *out, struct dr_error *error);
/*
 * Ranges are checked: none overflows, and payloads lie within their records. control: NULL where nobody asks to stop.
 */
int dr_storage_index_decode(struct dr_storage_index *storage, const void *data, size_t size,
                            const struct dr_control *control, struct dr_error *error);

/* Copies all entries of `from` to the given indices. */
int dr_storage_index_merge(struct dr_storage_index *storage, const struct dr_storage_index *from,
                           const uint32_t *indices, size_t count, struct dr_error *error);

#endif
