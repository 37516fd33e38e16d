/* Writing DCP's Metadata as a pickle. See metadata_pickle.h. */
#include "plan/metadata_pickle.h"

#include "base/crc.h"
#include "base/memory.h"
#include "base/pickle_read.h"
#include "plan/strides.h"

#include <errno.h>
#include <string.h>

/* Memo entries: classes, attribute names, then properties, then names. */
enum constant {
    TENSOR_METADATA,
    BYTES_METADATA,
    CHUNK_METADATA,
    METADATA_INDEX,
    STORAGE_INFO,
    SIZE,
    CLASSES,
    K_PROPERTIES = CLASSES,
    K_SIZE,
    K_CHUNKS,
    K_OFFSETS,
    K_SIZES,
    K_FQN,
    K_OFFSET,
    K_INDEX,
    K_RELATIVE_PATH,
    K_LENGTH,
    K_RING,
    K_RING_STRIDES,
    CONSTANTS,
};

static const char *const classes[CLASSES] = {
    [TENSOR_METADATA] = "torch.distributed.checkpoint.metadata\nTensorStorageMetadata\n",
    [BYTES_METADATA] = "torch.distributed.checkpoint.metadata\nBytesStorageMetadata\n",
    [CHUNK_METADATA] = "torch.distributed.checkpoint.metadata\nChunkStorageMetadata\n",
    [METADATA_INDEX] = "torch.distributed.checkpoint.metadata\nMetadataIndex\n",
    [STORAGE_INFO] = "torch.distributed.checkpoint.filesystem\n_StorageInfo\n",
    [SIZE] = "torch\nSize\n",
};

static const char *const attributes[CONSTANTS - CLASSES] = {
    "properties", "size",  "chunks",        "offsets", "sizes", "fqn",
    "offset",     "index", "relative_path", "length",  "ring",  "ring_strides",
};

enum { BATCH = 1000, RING_VERSION = 1 };

struct pickler {
    struct dr_buffer *out;
    const struct dr_table *table;
    const struct dr_storage_index *storage;
    const struct dr_metadata_parts *parts;
    uint8_t *seen; /* names that are in the memo */
    uint8_t *seen_files;
};

static void put_op(struct pickler *p, int opcode) { dr_buffer_byte(p->out, (uint8_t)opcode); }

static void put_le(struct pickler *p, uint64_t value, unsigned bytes) { dr_buffer_le(p->out, value, bytes); }

static void put_memo_op(struct pickler *p, int short_op, int long_op, uint64_t index) {
    put_op(p, index < 256 ? short_op : long_op);
    put_le(p, index, index < 256 ? 1 : 4);
}

static void put_binput(struct pickler *p, uint64_t index) { put_memo_op(p, DR_BINPUT, DR_LONG_BINPUT, index); }

static void put_binget(struct pickler *p, uint64_t index) { put_memo_op(p, DR_BINGET, DR_LONG_BINGET, index); }

static void put_int(struct pickler *p, uint64_t value) {
    if (value < 256) {
        put_op(p, DR_BININT1);
        put_le(p, value, 1);
    } else if (value < 65536) {
        put_op(p, DR_BININT2);
        put_le(p, value, 2);
    } else if (value <= INT32_MAX) {
        put_op(p, DR_BININT);
        put_le(p, value, 4);
    } else {
        put_op(p, DR_LONG1);
        put_le(p, 9, 1); /* eight bytes, and a zero for the sign */
        put_le(p, value, 8);
        put_le(p, 0, 1);
    }
}

static void put_text(struct pickler *p, const char *data, uint32_t size) {
    put_op(p, size < 256 ? DR_SHORT_BINUNICODE : DR_BINUNICODE);
    put_le(p, size, size < 256 ? 1 : 4);
    dr_buffer_put(p->out, data, size);
}

static void put_bytes(struct pickler *p, const void *data, size_t size) {
    put_op(p, size < 256 ? DR_SHORT_BINBYTES : DR_BINBYTES);
    put_le(p, size, size < 256 ? 1 : 4);
    dr_buffer_put(p->out, data, size);
}

static void put_name(struct pickler *p, uint32_t index) {
    uint64_t memo = CONSTANTS + p->table->property_count + index;
    if (p->seen[index]) {
        put_binget(p, memo);
        return;
    }
    put_text(p, dr_table_text(p->table, index), p->table->names[index].size);
    put_binput(p, memo);
    p->seen[index] = 1;
}

static void put_size(struct pickler *p, const int64_t *dims, int ndim) {
    put_binget(p, SIZE);
    put_op(p, DR_MARK);
    for (int d = 0; d < ndim; d++)
        put_int(p, (uint64_t)dims[d]);
    put_op(p, DR_TUPLE);
    put_op(p, DR_TUPLE1);
    put_op(p, DR_REDUCE);
}

/* Constants first, so that everything later can refer to them: each is pushed, noted and popped. */
static void put_constants(struct pickler *p) {
    for (int i = 0; i < CLASSES; i++) {
        put_op(p, DR_GLOBAL);
        dr_buffer_put(p->out, classes[i], strlen(classes[i]));
        put_binput(p, (uint64_t)i);
        put_op(p, DR_POP);
    }
    for (int i = CLASSES; i < CONSTANTS; i++) {
        put_text(p, attributes[i - CLASSES], (uint32_t)strlen(attributes[i - CLASSES]));
        put_binput(p, (uint64_t)i);
        put_op(p, DR_POP);
    }
    for (size_t i = 0; i < p->table->property_count; i++) {
        dr_buffer_put(p->out, p->parts->properties[i].data, p->parts->properties[i].size);
        put_binput(p, CONSTANTS + i);
        put_op(p, DR_POP);
    }
}

/* A dictionary or list is filled in batches, which bounds the unpickler's stack. */
static void begin_item(struct pickler *p, size_t *filled, int opcode) {
    if (*filled % BATCH == 0) {
        if (*filled)
            put_op(p, opcode);
        put_op(p, DR_MARK);
    }
    ++*filled;
}

static void end_items(struct pickler *p, size_t filled, int opcode) {
    if (filled)
        put_op(p, opcode);
}

static void put_object(struct pickler *p, enum constant class) {
    put_binget(p, class);
    put_op(p, DR_EMPTY_TUPLE);
    put_op(p, DR_NEWOBJ);
}

static void begin_state(struct pickler *p) {
    put_op(p, DR_EMPTY_DICT);
    put_op(p, DR_MARK);
}

static void end_state(struct pickler *p) {
    put_op(p, DR_SETITEMS);
    put_op(p, DR_BUILD);
}

static void put_chunk(struct pickler *p, const struct dr_row *row) {
    put_object(p, CHUNK_METADATA);
    begin_state(p);
    put_binget(p, K_OFFSETS);
    put_size(p, dr_row_offsets(p->table, row), row->ndim);
    put_binget(p, K_SIZES);
    put_size(p, dr_row_lengths(p->table, row), row->ndim);
    end_state(p);
}

/* An attribute of ours, as no torch before 2.15 reads TensorProperties that have strides. */
static void put_strides(struct pickler *p, const struct dr_row *row) {
    int64_t strides[DR_TABLE_MAX_DIMS];
    enum dr_stride_kind kind = dr_row_strides(p->table, row, strides);
    if (kind == DR_NO_STRIDES)
        return;
    put_binget(p, K_RING_STRIDES);
    if (kind == DR_CONTIGUOUS) {
        put_op(p, DR_NEWTRUE);
        return;
    }
    put_op(p, DR_MARK);
    for (int d = 0; d < row->ndim; d++)
        put_int(p, (uint64_t)strides[d]);
    put_op(p, DR_TUPLE);
}

/* The value for rows [from, to), which have one name. */
static void put_stored(struct pickler *p, size_t from, size_t to) {
    const struct dr_row *row = &p->table->rows[from];
    if (!dr_row_is_tensor(row)) {
        put_object(p, BYTES_METADATA);
        return;
    }
    put_object(p, TENSOR_METADATA);
    begin_state(p);
    put_binget(p, K_PROPERTIES);
    put_binget(p, CONSTANTS + row->properties);
    put_binget(p, K_SIZE);
    put_size(p, dr_row_size(p->table, row), row->ndim);
    put_binget(p, K_CHUNKS);
    put_op(p, DR_EMPTY_LIST);
    size_t filled = 0;
    for (size_t i = from; i < to; i++) {
        begin_item(p, &filled, DR_APPENDS);
        put_chunk(p, &p->table->rows[i]);
    }
    end_items(p, filled, DR_APPENDS);
    put_strides(p, row);
    end_state(p);
}

static size_t run_end(const struct dr_table *table, size_t from) {
    size_t to = from + 1;
    while (to < table->count && table->rows[to].name == table->rows[from].name)
        to++;
    return to;
}

static void put_state_dict_metadata(struct pickler *p) {
    size_t filled = 0;
    put_op(p, DR_EMPTY_DICT);
    for (size_t from = 0, to; from < p->table->count; from = to) {
        to = run_end(p->table, from);
        if (p->table->rows[from].type == DR_ROW_NAME)
            continue;
        begin_item(p, &filled, DR_SETITEMS);
        put_name(p, p->table->rows[from].name);
        put_stored(p, from, to);
    }
    end_items(p, filled, DR_SETITEMS);
}

/* A path is its number of parts; for all but the last twice their length, plus 1 for an int; then 1 for an int last. */
static int put_path(struct pickler *p, uint32_t index, struct dr_error *error) {
    const struct dr_name *n = &p->table->names[index];
    const char *at = dr_table_text(p->table, index), *end = at + n->size;
    struct dr_bytes code = {(const uint8_t *)end, (const uint8_t *)end + n->path_size, false};
    uint64_t count = dr_bytes_limited(&code, n->path_size);
    put_op(p, DR_MARK);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t head = dr_bytes_varint(&code);
        uint64_t part = i + 1 < count ? head >> 1 : (uint64_t)(end - at);
        if (code.bad || part > (uint64_t)(end - at))
            return dr_error_invalid(error, DR_NO_ITEM, "the path of a name in a compact plan is garbled");
        if (head & 1) {
            uint64_t number = 0;
            for (uint64_t c = 0; c < part; c++) {
                if (at[c] < '0' || at[c] > '9' || number > INT64_MAX / 20)
                    return dr_error_invalid(error, DR_NO_ITEM, "the path of a name in a compact plan is garbled");
                number = 10 * number + (uint64_t)(at[c] - '0');
            }
            put_int(p, number);
        } else if (part == n->size) {
            put_name(p, index);
        } else {
            put_text(p, at, (uint32_t)part);
        }
        at += part + (i + 1 < count && part < (uint64_t)(end - at)); /* and the dot */
    }
    put_op(p, DR_TUPLE);
    return 0;
}

static int put_mappings(struct pickler *p, struct dr_error *error) {
    size_t filled = 0;
    if (!p->parts->mappings) {
        put_op(p, DR_NONE);
        return 0;
    }
    put_op(p, DR_EMPTY_DICT);
    for (uint32_t i = 0; i < p->table->name_count; i++) {
        if (!p->table->names[i].path_size)
            continue;
        begin_item(p, &filled, DR_SETITEMS);
        put_name(p, i);
        int rc = put_path(p, i, error);
        if (rc)
            return rc;
    }
    end_items(p, filled, DR_SETITEMS);
    return 0;
}

static void put_metadata_index(struct pickler *p, const struct dr_row *row, size_t number) {
    put_object(p, METADATA_INDEX);
    begin_state(p);
    put_binget(p, K_FQN);
    put_name(p, row->name);
    put_binget(p, K_INDEX);
    if (dr_row_is_tensor(row)) {
        put_int(p, number);
        put_binget(p, K_OFFSET);
        put_size(p, dr_row_offsets(p->table, row), row->ndim);
    } else {
        put_op(p, DR_NONE);
    }
    end_state(p);
}

static void put_ring(struct pickler *p, const struct dr_storage_entry *entry) {
    put_binget(p, K_RING);
    put_op(p, DR_MARK);
    put_int(p, RING_VERSION);
    put_int(p, entry->kind);
    put_int(p, entry->payload_offset);
    put_int(p, entry->payload_size);
    if (entry->has_crcs)
        put_bytes(p, dr_storage_entry_crcs(p->storage, entry),
                  4 * dr_crc_count(entry->payload_offset, entry->payload_size));
    else
        put_op(p, DR_NONE);
    put_op(p, DR_TUPLE);
}

static void put_file_name(struct pickler *p, uint32_t file) {
    uint64_t memo = CONSTANTS + p->table->property_count + p->table->name_count + file;
    if (p->seen_files[file]) {
        put_binget(p, memo);
        return;
    }
    put_text(p, dr_table_text(&p->storage->files, file), p->storage->files.names[file].size);
    put_binput(p, memo);
    p->seen_files[file] = 1;
}

static void put_storage_info(struct pickler *p, const struct dr_storage_entry *entry) {
    put_object(p, STORAGE_INFO);
    begin_state(p);
    put_binget(p, K_RELATIVE_PATH);
    put_file_name(p, entry->file);
    put_binget(p, K_OFFSET);
    put_int(p, entry->offset);
    put_binget(p, K_LENGTH);
    put_int(p, entry->length);
    if (entry->kind != DR_STORAGE_OTHER)
        put_ring(p, entry);
    end_state(p);
}

static void put_storage_data(struct pickler *p) {
    size_t filled = 0, number = 0;
    if (!p->storage) {
        put_op(p, DR_NONE);
        return;
    }
    put_op(p, DR_EMPTY_DICT);
    for (size_t i = 0; i < p->table->count; i++) {
        const struct dr_row *row = &p->table->rows[i];
        number = i && row->name == row[-1].name ? number + 1 : 0;
        if (p->storage->entries[i].kind == DR_STORAGE_NONE)
            continue;
        begin_item(p, &filled, DR_SETITEMS);
        put_metadata_index(p, row, number);
        put_storage_info(p, &p->storage->entries[i]);
    }
    end_items(p, filled, DR_SETITEMS);
}

static void put_fragment(struct pickler *p, const struct dr_fragment *fragment) {
    dr_buffer_put(p->out, fragment->data, fragment->size);
}

static void put_key(struct pickler *p, const char *literal) { put_text(p, literal, (uint32_t)strlen(literal)); }

static int put_metadata(struct pickler *p, struct dr_error *error) {
    static const char class[] = "torch.distributed.checkpoint.metadata\nMetadata\n";
    put_op(p, DR_PROTO);
    dr_buffer_byte(p->out, 4);
    put_constants(p);
    put_op(p, DR_GLOBAL);
    dr_buffer_put(p->out, class, strlen(class));
    put_op(p, DR_EMPTY_TUPLE);
    put_op(p, DR_NEWOBJ);
    begin_state(p);
    put_key(p, "state_dict_metadata");
    put_state_dict_metadata(p);
    put_key(p, "planner_data");
    int rc = put_mappings(p, error);
    put_key(p, "storage_data");
    put_storage_data(p);
    put_key(p, "storage_meta");
    put_fragment(p, &p->parts->storage_meta);
    put_key(p, "version");
    put_fragment(p, &p->parts->version);
    end_state(p);
    put_op(p, DR_STOP);
    return rc;
}

/* Rows of a name that do not follow each other would overwrite one another. */
static int check_runs(const struct dr_table *table, struct dr_error *error) {
    uint8_t *seen = dr_calloc(table->name_count + 1, 1);
    if (!seen)
        return dr_error_memory(error);
    int rc = 0;
    for (size_t from = 0; rc == 0 && from < table->count; from = run_end(table, from)) {
        uint32_t index = table->rows[from].name;
        if (seen[index])
            rc = dr_error_invalid(error, (int64_t)from, "rows of one name are apart");
        seen[index] = 1;
    }
    free(seen);
    return rc;
}

int dr_metadata_pickle(const struct dr_table *table, const struct dr_storage_index *storage,
                       const struct dr_metadata_parts *parts, struct dr_buffer *out, struct dr_error *error) {
    *out = (struct dr_buffer){0};
    struct pickler p = {out,
                        table,
                        storage,
                        parts,
                        dr_calloc(table->name_count + 1, 1),
                        dr_calloc((storage ? storage->files.name_count : 0) + 1, 1)};
    int rc = p.seen && p.seen_files ? check_runs(table, error) : dr_error_memory(error);
    if (!rc)
        rc = put_metadata(&p, error);
    free(p.seen);
    free(p.seen_files);
    return !rc && out->failed ? dr_error_memory(error) : rc;
}
