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
    "properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "ring",
    "ring_strides",
};

enum { BATCH = 1000, RING_VERSION = 1 };

struct pickler {
    struct dr_buffer *out;
    const struct dr_table *table;
    const struct dr_places *places;
    const struct dr_metadata_parts *parts;
    uint8_t *seen;       /* names that are in the memo */
    uint8_t *seen_files;
};

static void op(struct pickler *p, int opcode) { dr_buffer_byte(p->out, (uint8_t)opcode); }

static void little_endian(struct pickler *p, uint64_t value, unsigned bytes) { dr_buffer_le(p->out, value, bytes); }

static void memo(struct pickler *p, int short_op, int long_op, uint64_t index) {
    op(p, index < 256 ? short_op : long_op);
    little_endian(p, index, index < 256 ? 1 : 4);
}

static void put(struct pickler *p, uint64_t index) { memo(p, DR_BINPUT, DR_LONG_BINPUT, index); }

static void get(struct pickler *p, uint64_t index) { memo(p, DR_BINGET, DR_LONG_BINGET, index); }

static void integer(struct pickler *p, uint64_t value) {
    if (value < 256) {
        op(p, DR_BININT1);
        little_endian(p, value, 1);
    } else if (value < 65536) {
        op(p, DR_BININT2);
        little_endian(p, value, 2);
    } else if (value <= INT32_MAX) {
        op(p, DR_BININT);
        little_endian(p, value, 4);
    } else {
        op(p, DR_LONG1);
        little_endian(p, 9, 1); /* eight bytes, and a zero for the sign */
        little_endian(p, value, 8);
        little_endian(p, 0, 1);
    }
}

static void text(struct pickler *p, const char *data, uint32_t size) {
    op(p, size < 256 ? DR_SHORT_BINUNICODE : DR_BINUNICODE);
    little_endian(p, size, size < 256 ? 1 : 4);
    dr_buffer_put(p->out, data, size);
}

static void bytes(struct pickler *p, const void *data, size_t size) {
    op(p, size < 256 ? DR_SHORT_BINBYTES : DR_BINBYTES);
    little_endian(p, size, size < 256 ? 1 : 4);
    dr_buffer_put(p->out, data, size);
}

static void name(struct pickler *p, uint32_t index) {
    uint64_t entry = CONSTANTS + p->table->property_count + index;
    if (p->seen[index]) {
        get(p, entry);
        return;
    }
    text(p, dr_table_text(p->table, index), p->table->names[index].size);
    put(p, entry);
    p->seen[index] = 1;
}

static void size(struct pickler *p, const int64_t *dims, int ndim) {
    get(p, SIZE);
    op(p, DR_MARK);
    for (int d = 0; d < ndim; d++)
        integer(p, (uint64_t)dims[d]);
    op(p, DR_TUPLE);
    op(p, DR_TUPLE1);
    op(p, DR_REDUCE);
}

/* Constants first, so that everything later can refer to them: each is pushed, noted and popped. */
static void constants(struct pickler *p) {
    for (int i = 0; i < CLASSES; i++) {
        op(p, DR_GLOBAL);
        dr_buffer_put(p->out, classes[i], strlen(classes[i]));
        put(p, (uint64_t)i);
        op(p, DR_POP);
    }
    for (int i = CLASSES; i < CONSTANTS; i++) {
        text(p, attributes[i - CLASSES], (uint32_t)strlen(attributes[i - CLASSES]));
        put(p, (uint64_t)i);
        op(p, DR_POP);
    }
    for (size_t i = 0; i < p->table->property_count; i++) {
        dr_buffer_put(p->out, p->parts->properties[i].data, p->parts->properties[i].size);
        put(p, CONSTANTS + i);
        op(p, DR_POP);
    }
}

/* A dictionary or list is filled in batches, which bounds the unpickler's stack. */
static void batch(struct pickler *p, size_t *filled, int opcode) {
    if (*filled % BATCH == 0) {
        if (*filled)
            op(p, opcode);
        op(p, DR_MARK);
    }
    ++*filled;
}

static void end_batches(struct pickler *p, size_t filled, int opcode) {
    if (filled)
        op(p, opcode);
}

static void object(struct pickler *p, enum constant class) {
    get(p, class);
    op(p, DR_EMPTY_TUPLE);
    op(p, DR_NEWOBJ);
}

static void begin_state(struct pickler *p) {
    op(p, DR_EMPTY_DICT);
    op(p, DR_MARK);
}

static void end_state(struct pickler *p) {
    op(p, DR_SETITEMS);
    op(p, DR_BUILD);
}

static void chunk(struct pickler *p, const struct dr_row *row) {
    object(p, CHUNK_METADATA);
    begin_state(p);
    get(p, K_OFFSETS);
    size(p, dr_row_offsets(p->table, row), row->ndim);
    get(p, K_SIZES);
    size(p, dr_row_lengths(p->table, row), row->ndim);
    end_state(p);
}

/* An attribute of ours, as no torch before 2.15 reads TensorProperties that have strides. */
static void strides_of(struct pickler *p, const struct dr_row *row) {
    int64_t strides[DR_TABLE_MAX_DIMS];
    enum dr_stride_kind kind = dr_row_strides(p->table, row, strides);
    if (kind == DR_NO_STRIDES)
        return;
    get(p, K_RING_STRIDES);
    if (kind == DR_CONTIGUOUS) {
        op(p, DR_NEWTRUE);
        return;
    }
    op(p, DR_MARK);
    for (int d = 0; d < row->ndim; d++)
        integer(p, (uint64_t)strides[d]);
    op(p, DR_TUPLE);
}

/* The value for rows [from, to), which have one name. */
static void stored_as(struct pickler *p, size_t from, size_t to) {
    const struct dr_row *row = &p->table->rows[from];
    if (!dr_row_is_tensor(row)) {
        object(p, BYTES_METADATA);
        return;
    }
    object(p, TENSOR_METADATA);
    begin_state(p);
    get(p, K_PROPERTIES);
    get(p, CONSTANTS + row->properties);
    get(p, K_SIZE);
    size(p, dr_row_size(p->table, row), row->ndim);
    get(p, K_CHUNKS);
    op(p, DR_EMPTY_LIST);
    size_t filled = 0;
    for (size_t i = from; i < to; i++) {
        batch(p, &filled, DR_APPENDS);
        chunk(p, &p->table->rows[i]);
    }
    end_batches(p, filled, DR_APPENDS);
    strides_of(p, row);
    end_state(p);
}

static size_t run_end(const struct dr_table *table, size_t from) {
    size_t to = from + 1;
    while (to < table->count && table->rows[to].name == table->rows[from].name)
        to++;
    return to;
}

static void state_dict_metadata(struct pickler *p) {
    size_t filled = 0;
    op(p, DR_EMPTY_DICT);
    for (size_t from = 0, to; from < p->table->count; from = to) {
        to = run_end(p->table, from);
        if (p->table->rows[from].type == DR_ROW_NAME)
            continue;
        batch(p, &filled, DR_SETITEMS);
        name(p, p->table->rows[from].name);
        stored_as(p, from, to);
    }
    end_batches(p, filled, DR_SETITEMS);
}

/* A path is its number of parts; for all but the last twice their length, plus 1 for an int; then 1 for an int last. */
static int path(struct pickler *p, uint32_t index, struct dr_error *error) {
    const struct dr_name *n = &p->table->names[index];
    const char *at = dr_table_text(p->table, index), *end = at + n->size;
    struct dr_bytes code = {(const uint8_t *)end, (const uint8_t *)end + n->path_size, false};
    uint64_t count = dr_bytes_limited(&code, n->path_size);
    op(p, DR_MARK);
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
            integer(p, number);
        } else if (part == n->size) {
            name(p, index);
        } else {
            text(p, at, (uint32_t)part);
        }
        at += part + (i + 1 < count && part < (uint64_t)(end - at)); /* and the dot */
    }
    op(p, DR_TUPLE);
    return 0;
}

static int mappings(struct pickler *p, struct dr_error *error) {
    size_t filled = 0;
    if (!p->parts->mappings) {
        op(p, DR_NONE);
        return 0;
    }
    op(p, DR_EMPTY_DICT);
    for (uint32_t i = 0; i < p->table->name_count; i++) {
        if (!p->table->names[i].path_size)
            continue;
        batch(p, &filled, DR_SETITEMS);
        name(p, i);
        int rc = path(p, i, error);
        if (rc)
            return rc;
    }
    end_batches(p, filled, DR_SETITEMS);
    return 0;
}

static void metadata_index(struct pickler *p, const struct dr_row *row, size_t number) {
    object(p, METADATA_INDEX);
    begin_state(p);
    get(p, K_FQN);
    name(p, row->name);
    get(p, K_INDEX);
    if (dr_row_is_tensor(row)) {
        integer(p, number);
        get(p, K_OFFSET);
        size(p, dr_row_offsets(p->table, row), row->ndim);
    } else {
        op(p, DR_NONE);
    }
    end_state(p);
}

static void ring(struct pickler *p, const struct dr_place *place) {
    get(p, K_RING);
    op(p, DR_MARK);
    integer(p, RING_VERSION);
    integer(p, place->kind);
    integer(p, place->payload_offset);
    integer(p, place->payload_size);
    if (place->has_crcs)
        bytes(p, dr_place_crcs(p->places, place), 4 * dr_crc_count(place->payload_offset, place->payload_size));
    else
        op(p, DR_NONE);
    op(p, DR_TUPLE);
}

static void file_name(struct pickler *p, uint32_t file) {
    uint64_t entry = CONSTANTS + p->table->property_count + p->table->name_count + file;
    if (p->seen_files[file]) {
        get(p, entry);
        return;
    }
    text(p, dr_table_text(&p->places->files, file), p->places->files.names[file].size);
    put(p, entry);
    p->seen_files[file] = 1;
}

static void storage_info(struct pickler *p, const struct dr_place *place) {
    object(p, STORAGE_INFO);
    begin_state(p);
    get(p, K_RELATIVE_PATH);
    file_name(p, place->file);
    get(p, K_OFFSET);
    integer(p, place->offset);
    get(p, K_LENGTH);
    integer(p, place->length);
    if (place->kind != DR_PLACE_OTHER)
        ring(p, place);
    end_state(p);
}

static void storage_data(struct pickler *p) {
    size_t filled = 0, number = 0;
    if (!p->places) {
        op(p, DR_NONE);
        return;
    }
    op(p, DR_EMPTY_DICT);
    for (size_t i = 0; i < p->table->count; i++) {
        const struct dr_row *row = &p->table->rows[i];
        number = i && row->name == row[-1].name ? number + 1 : 0;
        if (p->places->places[i].kind == DR_PLACE_NONE)
            continue;
        batch(p, &filled, DR_SETITEMS);
        metadata_index(p, row, number);
        storage_info(p, &p->places->places[i]);
    }
    end_batches(p, filled, DR_SETITEMS);
}

static void fragment(struct pickler *p, const struct dr_fragment *fragment) {
    dr_buffer_put(p->out, fragment->data, fragment->size);
}

static void key(struct pickler *p, const char *literal) { text(p, literal, (uint32_t)strlen(literal)); }

static int metadata(struct pickler *p, struct dr_error *error) {
    static const char class[] = "torch.distributed.checkpoint.metadata\nMetadata\n";
    op(p, DR_PROTO);
    dr_buffer_byte(p->out, 4);
    constants(p);
    op(p, DR_GLOBAL);
    dr_buffer_put(p->out, class, strlen(class));
    op(p, DR_EMPTY_TUPLE);
    op(p, DR_NEWOBJ);
    begin_state(p);
    key(p, "state_dict_metadata");
    state_dict_metadata(p);
    key(p, "planner_data");
    int rc = mappings(p, error);
    key(p, "storage_data");
    storage_data(p);
    key(p, "storage_meta");
    fragment(p, &p->parts->storage_meta);
    key(p, "version");
    fragment(p, &p->parts->version);
    end_state(p);
    op(p, DR_STOP);
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

int dr_metadata_pickle(const struct dr_table *table, const struct dr_places *places,
                       const struct dr_metadata_parts *parts, struct dr_buffer *out, struct dr_error *error) {
    *out = (struct dr_buffer){0};
    struct pickler p = {out, table, places, parts, dr_calloc(table->name_count + 1, 1),
                        dr_calloc((places ? places->files.name_count : 0) + 1, 1)};
    int rc = p.seen && p.seen_files ? check_runs(table, error) : dr_error_memory(error);
    if (!rc)
        rc = metadata(&p, error);
    free(p.seen);
    free(p.seen_files);
    return !rc && out->failed ? dr_error_memory(error) : rc;
}
