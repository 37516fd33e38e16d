/* Writing records. See record.h; the byte layout is in docs/format.md. */
#include "record/record.h"

#include "base/align.h"
#include "base/crc.h"
#include "base/pickle_read.h"

#include <assert.h>
#include <string.h>

#define ROOT "archive/"

/* What is written to; its owner has made sure of the room. */
struct output {
    uint8_t *data;
    size_t size;
    uint64_t before; /* bytes of the record that lie before it */
};

static void put(struct output *out, const void *data, size_t size) {
    memcpy(out->data + out->size, data, size);
    out->size += size;
}

static void put_le(struct output *out, uint64_t value, unsigned bytes) {
    dr_put_le(out->data + out->size, value, bytes);
    out->size += bytes;
}

static void put_text(struct output *out, const char *text) { put(out, text, strlen(text)); }

/* ---- data.pkl ---- */

static void put_op(struct output *out, enum dr_pickle_opcode opcode) { out->data[out->size++] = (uint8_t)opcode; }

static void put_int(struct output *out, int64_t value) {
    if (value >= 0 && value <= UINT8_MAX) {
        put_op(out, DR_BININT1);
        put_le(out, (uint64_t)value, 1);
    } else if (value >= 0 && value <= UINT16_MAX) {
        put_op(out, DR_BININT2);
        put_le(out, (uint64_t)value, 2);
    } else if (value >= 0 && value <= INT32_MAX) {
        put_op(out, DR_BININT);
        put_le(out, (uint64_t)value, 4);
    } else {
        put_op(out, DR_LONG1);
        put_le(out, 8, 1);
        put_le(out, (uint64_t)value, 8);
    }
}

static void put_string(struct output *out, const char *text) {
    put_op(out, DR_BINUNICODE);
    put_le(out, strlen(text), 4);
    put_text(out, text);
}

static void put_global(struct output *out, const char *module, const char *name) {
    put_op(out, DR_GLOBAL);
    put_text(out, module);
    put_text(out, "\n");
    put_text(out, name);
    put_text(out, "\n");
}

static void put_tuple(struct output *out, const int64_t *values, int count) {
    put_op(out, DR_MARK);
    for (int i = 0; i < count; i++)
        put_int(out, values[i]);
    put_op(out, DR_TUPLE);
}

static void contiguous_strides(const struct dr_shape *shape, int64_t *strides) {
    int64_t stride = 1;
    for (int d = shape->ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= shape->sizes[d] > 1 ? shape->sizes[d] : 1;
    }
}

bool dr_shape_bytes(const struct dr_shape *shape, uint64_t *bytes) {
    uint64_t total = shape->dtype->item_size;
    bool empty = false;
    for (int d = 0; d < shape->ndim; d++) {
        if (shape->sizes[d] < 0)
            return false;
        if (shape->sizes[d] == 0)
            empty = true;
        else if (__builtin_mul_overflow(total, (uint64_t)shape->sizes[d], &total) || total > INT64_MAX)
            return false;
    }
    *bytes = empty ? 0 : total;
    return true;
}

static uint64_t payload_bytes(const struct dr_shape *shape) {
    uint64_t bytes = 0;
    dr_shape_bytes(shape, &bytes);
    return bytes;
}

/* ("storage", class of the storage, "0", "cpu", elements): what torch's unpickler makes a storage of. */
static void put_storage(struct output *out, const struct dr_shape *shape, uint64_t elements) {
    put_op(out, DR_MARK);
    put_string(out, "storage");
    if (shape->dtype->storage)
        put_global(out, "torch", shape->dtype->storage);
    else
        put_global(out, "torch.storage", "UntypedStorage");
    put_string(out, "0");
    put_string(out, "cpu");
    put_int(out, (int64_t)elements);
    put_op(out, DR_TUPLE);
    put_op(out, DR_BINPERSID);
}

/* _rebuild_tensor_v2(storage, 0, sizes, strides, False, OrderedDict()); v3 for a dtype without a storage of its own. */
static void put_pickle(struct output *out, const struct dr_shape *shape) {
    int64_t strides[DR_MAX_DIMS];
    contiguous_strides(shape, strides);
    bool legacy = shape->dtype->storage != NULL;
    uint64_t size = payload_bytes(shape);
    put_op(out, DR_PROTO);
    put_le(out, 2, 1);
    put_global(out, "torch._utils", legacy ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    put_op(out, DR_MARK);
    put_storage(out, shape, legacy ? size / shape->dtype->item_size : size);
    put_int(out, 0);
    put_tuple(out, shape->sizes, shape->ndim);
    put_tuple(out, strides, shape->ndim);
    put_op(out, DR_NEWFALSE);
    put_global(out, "collections", "OrderedDict");
    put_op(out, DR_EMPTY_TUPLE);
    put_op(out, DR_REDUCE);
    if (!legacy)
        put_global(out, "torch", shape->dtype->name);
    put_op(out, DR_TUPLE);
    put_op(out, DR_REDUCE);
    put_op(out, DR_STOP);
}

/* ---- zip ---- */

enum { EXTRA64_SIZE = DR_ZIP_EXTRA_SIZE + 16 }; /* with two sizes */

struct entry {
    const char *name;
    uint32_t crc;
    uint64_t size;
    uint64_t header; /* offset of the local header from the record's start */
    unsigned flags;
};

static uint64_t limited(uint64_t value) { return value < DR_ZIP_LIMIT ? value : DR_ZIP_LIMIT; }

static void put_extra64(struct output *out, const uint64_t *values, unsigned count) {
    put_le(out, DR_ZIP_EXTRA64, 2);
    put_le(out, count * 8, 2);
    for (unsigned i = 0; i < count; i++)
        put_le(out, values[i], 8);
}

/* Its extra field goes on with `padding` bytes, which the caller puts. */
static void put_local(struct output *out, struct entry *entry, uint64_t padding) {
    bool later = entry->flags & DR_ZIP_SIZES_LATER;
    bool zip64 = entry->size >= DR_ZIP_LIMIT;
    uint64_t known = later ? 0 : entry->size;
    uint64_t size = zip64 ? DR_ZIP_LIMIT : known;
    entry->header = out->before + out->size;
    put_le(out, DR_ZIP_LOCAL, 4);
    put_le(out, zip64 ? DR_ZIP_VERSION64 : DR_ZIP_VERSION, 2);
    put_le(out, entry->flags, 2);
    put_le(out, 0, 2 + 2 + 2); /* stored; no time, no date */
    put_le(out, later ? 0 : entry->crc, 4);
    put_le(out, size, 4);
    put_le(out, size, 4);
    put_le(out, strlen(entry->name), 2);
    put_le(out, (zip64 ? EXTRA64_SIZE : 0) + padding, 2);
    put_text(out, entry->name);
    if (zip64)
        put_extra64(out, (const uint64_t[]){known, known}, 2);
}

static void put_small(struct output *out, struct entry *entry, const void *data, size_t size) {
    entry->crc = dr_crc32(0, data, size);
    entry->size = size;
    put_local(out, entry, 0);
    put(out, data, size);
}

/* The payload's local header, padded in its extra field so that the payload is aligned in the file. */
static void put_payload_header(struct output *out, struct entry *entry, uint64_t record_offset) {
    bool zip64 = entry->size >= DR_ZIP_LIMIT;
    uint64_t alignment = entry->size >= DR_LARGE_PAYLOAD ? DR_ALIGNMENT : DR_SMALL_ALIGNMENT;
    uint64_t fixed = zip64 ? EXTRA64_SIZE : 0;
    uint64_t at = record_offset + out->size + DR_ZIP_LOCAL_SIZE + strlen(entry->name) + fixed;
    uint64_t pad = dr_align_up(at, alignment) - at;
    if (pad > 0 && pad < DR_ZIP_EXTRA_SIZE)
        pad += alignment;
    put_local(out, entry, pad);
    if (pad > 0) {
        put_le(out, DR_ZIP_EXTRA_PADDING, 2);
        put_le(out, pad - DR_ZIP_EXTRA_SIZE, 2);
        memset(out->data + out->size, 0, pad - DR_ZIP_EXTRA_SIZE);
        out->size += pad - DR_ZIP_EXTRA_SIZE;
    }
}

enum { PICKLE, BYTEORDER, VERSION, PAYLOAD, ENTRIES };

/* The entry that is read first, without its bytes. */
static void put_pickle_header(struct output *out, uint64_t size, uint32_t crc, struct entry entries[ENTRIES]) {
    entries[PICKLE] = (struct entry){.name = ROOT "data.pkl", .crc = crc, .size = size};
    put_local(out, &entries[PICKLE], 0);
}

/* What every archive has beside its pickle. */
static void put_marks(struct output *out, struct entry entries[ENTRIES]) {
    entries[BYTEORDER] = (struct entry){.name = ROOT "byteorder"};
    entries[VERSION] = (struct entry){.name = ROOT "version"};
    put_small(out, &entries[BYTEORDER], "little", 6);
    put_small(out, &entries[VERSION], "3\n", 2);
}

static void put_head(struct output *out, const struct dr_shape *shape, uint64_t offset, struct entry entries[ENTRIES]) {
    uint8_t pickle[4096];
    struct output pickled = {.data = pickle};
    put_pickle(&pickled, shape);
    put_pickle_header(out, pickled.size, dr_crc32(0, pickle, pickled.size), entries);
    put(out, pickle, pickled.size);
    put_marks(out, entries);
    entries[PAYLOAD] = (struct entry){.name = ROOT "data/0", .size = payload_bytes(shape), .flags = DR_ZIP_SIZES_LATER};
    put_payload_header(out, &entries[PAYLOAD], offset);
    assert(pickled.size <= sizeof pickle && out->size <= DR_RECORD_HEAD_MAX);
}

size_t dr_record_head(const struct dr_shape *shape, uint64_t offset, uint8_t out[DR_RECORD_HEAD_MAX]) {
    struct entry entries[ENTRIES];
    struct output head = {.data = out};
    put_head(&head, shape, offset, entries);
    return head.size;
}

static void put_descriptor(struct output *out, const struct entry *entry) {
    unsigned width = entry->size >= DR_ZIP_LIMIT ? 8 : 4;
    put_le(out, DR_ZIP_DESCRIPTOR, 4);
    put_le(out, entry->crc, 4);
    put_le(out, entry->size, width);
    put_le(out, entry->size, width);
}

static void put_central(struct output *out, const struct entry *entry) {
    const uint64_t numbers[] = {entry->size, entry->size, entry->header};
    uint64_t large[3];
    unsigned count = 0;
    for (int i = 0; i < 3; i++)
        if (numbers[i] >= DR_ZIP_LIMIT)
            large[count++] = numbers[i];
    unsigned version = count > 0 ? DR_ZIP_VERSION64 : DR_ZIP_VERSION;
    uint64_t size = limited(entry->size);
    put_le(out, DR_ZIP_CENTRAL, 4);
    put_le(out, version, 2);
    put_le(out, version, 2);
    put_le(out, entry->flags, 2);
    put_le(out, 0, 2 + 2 + 2);
    put_le(out, entry->crc, 4);
    put_le(out, size, 4);
    put_le(out, size, 4);
    put_le(out, strlen(entry->name), 2);
    put_le(out, count > 0 ? DR_ZIP_EXTRA_SIZE + count * 8 : 0, 2);
    put_le(out, 0, 2 + 2 + 2); /* no comment, first disk, binary */
    put_le(out, 0, 4);
    put_le(out, limited(entry->header), 4);
    put_text(out, entry->name);
    if (count > 0)
        put_extra64(out, large, count);
}

static void put_directory(struct output *out, const struct entry *entries, unsigned count) {
    uint64_t directory = out->before + out->size;
    size_t start = out->size;
    for (unsigned i = 0; i < count; i++)
        put_central(out, &entries[i]);
    uint64_t directory_size = out->size - start;
    if (directory >= DR_ZIP_LIMIT) {
        put_le(out, DR_ZIP_END64, 4);
        put_le(out, DR_ZIP_END64_SIZE - 12, 8); /* of it follow */
        put_le(out, DR_ZIP_VERSION64, 2);
        put_le(out, DR_ZIP_VERSION64, 2);
        put_le(out, 0, 4);
        put_le(out, 0, 4);
        put_le(out, count, 8);
        put_le(out, count, 8);
        put_le(out, directory_size, 8);
        put_le(out, directory, 8);
        put_le(out, DR_ZIP_LOCATOR, 4);
        put_le(out, 0, 4);
        put_le(out, directory + directory_size, 8);
        put_le(out, 1, 4);
    }
    put_le(out, DR_ZIP_END, 4);
    put_le(out, 0, 4);
    put_le(out, count, 2);
    put_le(out, count, 2);
    put_le(out, directory_size, 4);
    put_le(out, limited(directory), 4);
    put_le(out, 0, 2);
}

size_t dr_record_tail(const struct dr_shape *shape, uint64_t offset, size_t head_size, uint32_t payload_crc,
                      uint8_t out[DR_RECORD_TAIL_MAX]) {
    uint8_t head_again[DR_RECORD_HEAD_MAX];
    struct output head = {.data = head_again};
    struct entry entries[ENTRIES];
    put_head(&head, shape, offset, entries);
    entries[PAYLOAD].crc = payload_crc;

    struct output tail = {.data = out, .before = head_size + entries[PAYLOAD].size};
    put_descriptor(&tail, &entries[PAYLOAD]);
    put_directory(&tail, entries, ENTRIES);
    assert(tail.size <= DR_RECORD_TAIL_MAX && tail.size == dr_record_tail_size(shape, head_size));
    return tail.size;
}

size_t dr_record_tail_size(const struct dr_shape *shape, size_t head_size) {
    static const size_t names =
        sizeof ROOT "data.pkl" + sizeof ROOT "byteorder" + sizeof ROOT "version" + sizeof ROOT "data/0" - ENTRIES;
    uint64_t size = payload_bytes(shape);
    bool zip64 = size >= DR_ZIP_LIMIT;
    size_t descriptor = zip64 ? 24 : 16;
    size_t directory = ENTRIES * DR_ZIP_CENTRAL_SIZE + names + (zip64 ? EXTRA64_SIZE : 0);
    bool end64 = head_size + size + descriptor >= DR_ZIP_LIMIT;
    return descriptor + directory + (end64 ? DR_ZIP_END64_SIZE + DR_ZIP_LOCATOR_SIZE : 0) + DR_ZIP_END_SIZE;
}

/* ---- objects ---- */

size_t dr_object_head(uint64_t size, uint32_t crc, uint8_t out[DR_OBJECT_AROUND_MAX]) {
    struct entry entries[ENTRIES];
    struct output head = {.data = out};
    put_pickle_header(&head, size, crc, entries);
    return head.size;
}

size_t dr_object_tail(uint64_t size, uint32_t crc, uint8_t out[DR_OBJECT_AROUND_MAX]) {
    uint8_t head_again[DR_OBJECT_AROUND_MAX];
    struct output head = {.data = head_again};
    struct entry entries[ENTRIES];
    put_pickle_header(&head, size, crc, entries);

    struct output tail = {.data = out, .before = head.size + size};
    put_marks(&tail, entries);
    put_directory(&tail, entries, PAYLOAD);
    assert(tail.size <= DR_OBJECT_AROUND_MAX);
    return tail.size;
}
