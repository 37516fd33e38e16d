/* Writing records. See record.h; the byte layout is in docs/format.md. */
#include "base/align.h"
#include "base/crc.h"
#include "record/record.h"

#include <assert.h>
#include <string.h>

#define ROOT "archive/"
#define ZIP64_LIMIT 0xffffffffu

enum { LOCAL_SIZE = 30, CENTRAL_SIZE = 46, END_SIZE = 22, END64_SIZE = 56 + 20, PAD_ID = 0x4246, FLAG_DESCRIPTOR = 8, VERSION_ZIP64 = 45, VERSION_PLAIN = 20 };

struct bytes {
    uint8_t *data;
    size_t size;
};

static void put(struct bytes *out, const void *data, size_t size) {
    memcpy(out->data + out->size, data, size);
    out->size += size;
}

static void put_le(struct bytes *out, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++)
        out->data[out->size++] = (uint8_t)(value >> (8 * i));
}

static void put_text(struct bytes *out, const char *text) { put(out, text, strlen(text)); }

/* ---- data.pkl ---- */

static void put_int(struct bytes *out, int64_t value) {
    if (value >= 0 && value <= 0xff) {
        put_text(out, "K");
        put_le(out, (uint64_t)value, 1);
    } else if (value >= 0 && value <= 0xffff) {
        put_text(out, "M");
        put_le(out, (uint64_t)value, 2);
    } else if (value >= 0 && value <= 0x7fffffff) {
        put_text(out, "J");
        put_le(out, (uint64_t)value, 4);
    } else {
        put_text(out, "\x8a\x08");
        put_le(out, (uint64_t)value, 8);
    }
}

static void put_string(struct bytes *out, const char *text) {
    put_text(out, "X");
    put_le(out, strlen(text), 4);
    put_text(out, text);
}

static void put_global(struct bytes *out, const char *module, const char *name) {
    put_text(out, "c");
    put_text(out, module);
    put_text(out, "\n");
    put_text(out, name);
    put_text(out, "\n");
}

static void put_tuple(struct bytes *out, const int64_t *values, int count) {
    put_text(out, "(");
    for (int i = 0; i < count; i++)
        put_int(out, values[i]);
    put_text(out, "t");
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

static void put_pickle(struct bytes *out, const struct dr_shape *shape) {
    int64_t strides[DR_MAX_DIMS];
    contiguous_strides(shape, strides);
    bool legacy = shape->dtype->storage != NULL;
    uint64_t size = payload_bytes(shape);
    put_text(out, "\x80\x02");
    put_global(out, "torch._utils", legacy ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    put_text(out, "((");
    put_string(out, "storage");
    if (legacy)
        put_global(out, "torch", shape->dtype->storage);
    else
        put_global(out, "torch.storage", "UntypedStorage");
    put_string(out, "0");
    put_string(out, "cpu");
    put_int(out, (int64_t)(legacy ? size / shape->dtype->item_size : size));
    put_text(out, "tQ");
    put_int(out, 0);
    put_tuple(out, shape->sizes, shape->ndim);
    put_tuple(out, strides, shape->ndim);
    put_text(out, "\x89");
    put_global(out, "collections", "OrderedDict");
    put_text(out, ")R");
    if (!legacy)
        put_global(out, "torch", shape->dtype->name);
    put_text(out, "tR.");
}

/* ---- zip ---- */

struct entry {
    const char *name;
    uint32_t crc;
    uint64_t size;
    uint64_t header; /* offset of the local header from the record's start */
    unsigned flags;
};

static void put_local(struct bytes *out, struct entry *entry, uint64_t extra_size) {
    bool later = entry->flags & FLAG_DESCRIPTOR;
    bool zip64 = entry->size >= ZIP64_LIMIT;
    uint64_t size = zip64 ? ZIP64_LIMIT : later ? 0 : entry->size;
    entry->header = out->size;
    put_le(out, 0x04034b50, 4);
    put_le(out, zip64 ? VERSION_ZIP64 : VERSION_PLAIN, 2);
    put_le(out, entry->flags, 2);
    put_le(out, 0, 2 + 2 + 2); /* stored; no time, no date */
    put_le(out, later ? 0 : entry->crc, 4);
    put_le(out, size, 4);
    put_le(out, size, 4);
    put_le(out, strlen(entry->name), 2);
    put_le(out, extra_size, 2);
    put_text(out, entry->name);
}

static void put_small(struct bytes *out, struct entry *entry, const void *data, size_t size) {
    entry->crc = dr_crc32(0, data, size);
    entry->size = size;
    put_local(out, entry, 0);
    put(out, data, size);
}

/* The payload's local header, padded in its extra field so that the payload is aligned in the file. */
static void put_payload_header(struct bytes *out, struct entry *entry, uint64_t record_offset) {
    bool zip64 = entry->size >= ZIP64_LIMIT;
    uint64_t alignment = entry->size >= DR_LARGE_PAYLOAD ? DR_ALIGNMENT : DR_SMALL_ALIGNMENT;
    uint64_t fixed = zip64 ? 20 : 0;
    uint64_t at = record_offset + out->size + LOCAL_SIZE + strlen(entry->name) + fixed;
    uint64_t pad = dr_align_up(at, alignment) - at;
    if (pad > 0 && pad < 4)
        pad += alignment;
    put_local(out, entry, fixed + pad);
    if (zip64) {
        put_le(out, 1, 2);
        put_le(out, 16, 2);
        put_le(out, 0, 8);
        put_le(out, 0, 8);
    }
    if (pad > 0) {
        put_le(out, PAD_ID, 2);
        put_le(out, pad - 4, 2);
        memset(out->data + out->size, 0, pad - 4);
        out->size += pad - 4;
    }
}

enum { PICKLE, BYTEORDER, VERSION, PAYLOAD, ENTRIES };

static void put_head(struct bytes *out, const struct dr_shape *shape, uint64_t offset, struct entry entries[ENTRIES]) {
    uint8_t pickle[4096];
    struct bytes pickled = {pickle, 0};
    put_pickle(&pickled, shape);
    entries[PICKLE] = (struct entry){.name = ROOT "data.pkl"};
    entries[BYTEORDER] = (struct entry){.name = ROOT "byteorder"};
    entries[VERSION] = (struct entry){.name = ROOT "version"};
    entries[PAYLOAD] =
        (struct entry){.name = ROOT "data/0", .size = payload_bytes(shape), .flags = FLAG_DESCRIPTOR};
    put_small(out, &entries[PICKLE], pickle, pickled.size);
    put_small(out, &entries[BYTEORDER], "little", 6);
    put_small(out, &entries[VERSION], "3\n", 2);
    put_payload_header(out, &entries[PAYLOAD], offset);
    assert(pickled.size <= sizeof pickle && out->size <= DR_RECORD_HEAD_MAX);
}

size_t dr_record_head(const struct dr_shape *shape, uint64_t offset, uint8_t out[DR_RECORD_HEAD_MAX]) {
    struct entry entries[ENTRIES];
    struct bytes head = {out, 0};
    put_head(&head, shape, offset, entries);
    return head.size;
}

static void put_descriptor(struct bytes *out, const struct entry *entry) {
    unsigned width = entry->size >= ZIP64_LIMIT ? 8 : 4;
    put_le(out, 0x08074b50, 4);
    put_le(out, entry->crc, 4);
    put_le(out, entry->size, width);
    put_le(out, entry->size, width);
}

static void put_central(struct bytes *out, const struct entry *entry) {
    bool zip64 = entry->size >= ZIP64_LIMIT;
    unsigned version = zip64 ? VERSION_ZIP64 : VERSION_PLAIN;
    put_le(out, 0x02014b50, 4);
    put_le(out, version, 2);
    put_le(out, version, 2);
    put_le(out, entry->flags, 2);
    put_le(out, 0, 2 + 2 + 2);
    put_le(out, entry->crc, 4);
    put_le(out, zip64 ? ZIP64_LIMIT : entry->size, 4);
    put_le(out, zip64 ? ZIP64_LIMIT : entry->size, 4);
    put_le(out, strlen(entry->name), 2);
    put_le(out, zip64 ? 20 : 0, 2);
    put_le(out, 0, 2 + 2 + 2); /* no comment, first disk, binary */
    put_le(out, 0, 4);
    put_le(out, entry->header, 4);
    put_text(out, entry->name);
    if (zip64) {
        put_le(out, 1, 2);
        put_le(out, 16, 2);
        put_le(out, entry->size, 8);
        put_le(out, entry->size, 8);
    }
}

static void put_end(struct bytes *out, uint64_t directory, uint64_t directory_size) {
    bool zip64 = directory >= ZIP64_LIMIT;
    if (zip64) {
        put_le(out, 0x06064b50, 4);
        put_le(out, 44, 8);
        put_le(out, VERSION_ZIP64, 2);
        put_le(out, VERSION_ZIP64, 2);
        put_le(out, 0, 4);
        put_le(out, 0, 4);
        put_le(out, ENTRIES, 8);
        put_le(out, ENTRIES, 8);
        put_le(out, directory_size, 8);
        put_le(out, directory, 8);
        put_le(out, 0x07064b50, 4);
        put_le(out, 0, 4);
        put_le(out, directory + directory_size, 8);
        put_le(out, 1, 4);
    }
    put_le(out, 0x06054b50, 4);
    put_le(out, 0, 4);
    put_le(out, ENTRIES, 2);
    put_le(out, ENTRIES, 2);
    put_le(out, directory_size, 4);
    put_le(out, zip64 ? ZIP64_LIMIT : directory, 4);
    put_le(out, 0, 2);
}

size_t dr_record_tail(const struct dr_shape *shape, uint64_t offset, size_t head_size, uint32_t payload_crc,
                      uint8_t out[DR_RECORD_TAIL_MAX]) {
    uint8_t head_again[DR_RECORD_HEAD_MAX];
    struct bytes head = {head_again, 0};
    struct entry entries[ENTRIES];
    put_head(&head, shape, offset, entries);
    entries[PAYLOAD].crc = payload_crc;

    struct bytes tail = {out, 0};
    put_descriptor(&tail, &entries[PAYLOAD]);
    uint64_t directory = head_size + entries[PAYLOAD].size + tail.size;
    size_t start = tail.size;
    for (int i = 0; i < ENTRIES; i++)
        put_central(&tail, &entries[i]);
    put_end(&tail, directory, tail.size - start);
    assert(tail.size <= DR_RECORD_TAIL_MAX && tail.size == dr_record_tail_size(shape, head_size));
    return tail.size;
}

size_t dr_record_tail_size(const struct dr_shape *shape, size_t head_size) {
    static const size_t names = sizeof ROOT "data.pkl" + sizeof ROOT "byteorder" + sizeof ROOT "version" +
                                sizeof ROOT "data/0" - ENTRIES;
    uint64_t size = payload_bytes(shape);
    bool zip64 = size >= ZIP64_LIMIT;
    size_t descriptor = zip64 ? 24 : 16;
    size_t directory = ENTRIES * CENTRAL_SIZE + names + (zip64 ? 20 : 0);
    return descriptor + directory + END_SIZE + (head_size + size + descriptor >= ZIP64_LIMIT ? END64_SIZE : 0);
}
