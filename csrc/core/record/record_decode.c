/*
 * Finding the payload in a record that anyone wrote. See record.h.
 *
 * Everything read here is untrusted. What is not understood is "not plain",
 * and left to torch.load.
 */
#include "record/record.h"

#include "base/pickle_read.h"

#include <string.h>

enum {
    MAX_DIRECTORY = 32 * 1024,
    MAX_PICKLE = 16 * 1024,
};

/* ---- the pickle of a plain tensor ---- */

struct cursor {
    const uint8_t *at, *end;
};

static bool skip_memo(struct cursor *c) {
    for (;;) {
        if (c->at < c->end && *c->at == DR_BINPUT && c->end - c->at >= 2)
            c->at += 2;
        else if (c->at < c->end && *c->at == DR_LONG_BINPUT && c->end - c->at >= 5)
            c->at += 5;
        else
            return true;
    }
}

static bool expect(struct cursor *c, int opcode) {
    if (c->at >= c->end || *c->at != opcode)
        return false;
    c->at++;
    return skip_memo(c);
}

static bool get_line(struct cursor *c, char *out, size_t room) {
    const uint8_t *newline = memchr(c->at, '\n', (size_t)(c->end - c->at));
    if (!newline || (size_t)(newline - c->at) >= room)
        return false;
    memcpy(out, c->at, (size_t)(newline - c->at));
    out[newline - c->at] = '\0';
    c->at = newline + 1;
    return true;
}

static bool get_global(struct cursor *c, char module[64], char name[64]) {
    if (c->at >= c->end || *c->at != DR_GLOBAL)
        return false;
    c->at++;
    return get_line(c, module, 64) && get_line(c, name, 64) && skip_memo(c);
}

static bool is_global(struct cursor *c, const char *module, const char *name) {
    char m[64], n[64];
    return get_global(c, m, n) && strcmp(m, module) == 0 && strcmp(n, name) == 0;
}

/* A string; `text` NULL takes any. */
static bool is_string(struct cursor *c, const char *text) {
    if (c->end - c->at < 5 || *c->at != DR_BINUNICODE)
        return false;
    uint64_t size = dr_get_le(c->at + 1, 4);
    if ((uint64_t)(c->end - c->at) - 5 < size)
        return false;
    if (text && (size != strlen(text) || memcmp(c->at + 5, text, size) != 0))
        return false;
    c->at += 5 + size;
    return skip_memo(c);
}

static bool get_int(struct cursor *c, int64_t *value) {
    size_t left = (size_t)(c->end - c->at);
    unsigned bytes = 0, skip = 1;
    if (left == 0)
        return false;
    switch (*c->at) {
    case DR_BININT1:
        bytes = 1;
        break;
    case DR_BININT2:
        bytes = 2;
        break;
    case DR_BININT:
        bytes = 4;
        break;
    case DR_LONG1:
        skip = 2;
        bytes = left >= 2 ? c->at[1] : 9;
        break;
    default:
        return false;
    }
    if (bytes > 8 || left < skip + bytes)
        return false;
    *value = (int64_t)dr_get_le(c->at + skip, bytes);
    c->at += skip + bytes;
    return *value >= 0;
}

static bool get_tuple(struct cursor *c, int64_t values[DR_MAX_DIMS], int *count) {
    *count = 0;
    if (expect(c, DR_EMPTY_TUPLE))
        return true;
    bool marked = expect(c, DR_MARK);
    while (*count < DR_MAX_DIMS && get_int(c, &values[*count]))
        ++*count;
    if (marked)
        return expect(c, DR_TUPLE);
    return *count >= 1 && *count <= 3 && expect(c, DR_TUPLE1 + *count - 1);
}

static bool contiguous(const int64_t *sizes, const int64_t *strides, int count) {
    int64_t expected = 1;
    for (int d = count - 1; d >= 0; d--) {
        if (sizes[d] == 0)
            return true;
        if (sizes[d] != 1 && strides[d] != expected)
            return false;
        if (__builtin_mul_overflow(expected, sizes[d], &expected))
            return false;
    }
    return true;
}

static bool get_storage(struct cursor *c, bool legacy, const struct dr_dtype **dtype, int64_t *length) {
    char module[64], name[64];
    if (!expect(c, DR_MARK) || !is_string(c, "storage") || !get_global(c, module, name))
        return false;
    if (legacy && strcmp(module, "torch") == 0)
        *dtype = dr_dtype_by_storage(name);
    else if (!legacy && strcmp(module, "torch.storage") == 0 && strcmp(name, "UntypedStorage") == 0)
        *dtype = NULL;
    else
        return false;
    return is_string(c, "0") && is_string(c, NULL) && get_int(c, length) && expect(c, DR_TUPLE) &&
           expect(c, DR_BINPERSID);
}

/* Reads the one shape of pickle that a plain tensor has; false for any other. */
static bool parse_pickle(const uint8_t *data, size_t size, struct dr_located *out) {
    struct cursor c = {data, data + size};
    char module[64], name[64];
    if (size < 2 || data[0] != DR_PROTO || data[1] != 2)
        return false;
    c.at += 2;
    if (!get_global(&c, module, name) || strcmp(module, "torch._utils") != 0)
        return false;
    bool legacy = strcmp(name, "_rebuild_tensor_v2") == 0;
    if (!legacy && strcmp(name, "_rebuild_tensor_v3") != 0)
        return false;
    int64_t length, start, strides[DR_MAX_DIMS];
    int stride_count;
    if (!expect(&c, DR_MARK) || !get_storage(&c, legacy, &out->dtype, &length) || !get_int(&c, &start) || start != 0)
        return false;
    if (!get_tuple(&c, out->sizes, &out->ndim) || !get_tuple(&c, strides, &stride_count))
        return false;
    if (stride_count != out->ndim || !contiguous(out->sizes, strides, out->ndim))
        return false;
    if (!expect(&c, DR_NEWFALSE) || !is_global(&c, "collections", "OrderedDict") || !expect(&c, DR_EMPTY_TUPLE) ||
        !expect(&c, DR_REDUCE))
        return false;
    if (!legacy) {
        if (!get_global(&c, module, name) || strcmp(module, "torch") != 0)
            return false;
        out->dtype = dr_dtype_by_name(name);
    }
    if (!out->dtype || !expect(&c, DR_TUPLE) || !expect(&c, DR_REDUCE) || !expect(&c, DR_STOP))
        return false;
    struct dr_shape shape = {out->dtype, out->ndim, out->sizes};
    uint64_t bytes;
    return dr_shape_bytes(&shape, &bytes) && bytes == out->payload_size &&
           (uint64_t)length == (legacy ? bytes / out->dtype->item_size : bytes);
}

/* ---- the entries that matter ---- */

struct members {
    struct dr_entry pickle, byteorder, payload;
    bool has_pickle, has_byteorder, has_payload;
    bool others; /* a second storage */
};

static bool is_named(const char *name, size_t size, const char *wanted) {
    return size == strlen(wanted) && memcmp(name, wanted, size) == 0;
}

static void sort_in(struct members *members, const struct dr_entry *entry) {
    const char *slash = memchr(entry->name, '/', entry->name_size);
    if (!slash)
        return;
    const char *name = slash + 1;
    size_t size = entry->name_size - (size_t)(name - entry->name);
    if (is_named(name, size, "data.pkl")) {
        members->pickle = *entry;
        members->has_pickle = true;
    } else if (is_named(name, size, "byteorder")) {
        members->byteorder = *entry;
        members->has_byteorder = true;
    } else if (is_named(name, size, "data/0")) {
        members->payload = *entry;
        members->has_payload = true;
    } else if (size > 5 && memcmp(name, "data/", 5) == 0) {
        members->others = true;
    }
}

static bool read_directory(const struct dr_archive *a, struct members *members) {
    struct dr_directory dir;
    struct dr_entry entry;
    if (!dr_archive_open(a, &dir) || dir.size > MAX_DIRECTORY)
        return false;
    while (dir.left > 0) {
        if (!dr_archive_next(a, &dir, &entry))
            return false;
        sort_in(members, &entry);
    }
    return true;
}

/* Where a member's bytes start, if they are there as they are. */
static bool member_data(const struct dr_archive *a, const struct dr_entry *entry, uint64_t *start) {
    return entry->method == 0 && !(entry->flags & DR_ZIP_ENCRYPTED) && entry->size == entry->packed_size &&
           dr_archive_data(a, entry, start);
}

static bool locate(const struct dr_archive *a, struct dr_located *out) {
    struct members members = {0};
    uint64_t start;
    if (!read_directory(a, &members) || members.others || !members.has_payload || !members.has_pickle)
        return false;
    if (members.has_byteorder) {
        if (!member_data(a, &members.byteorder, &start) || members.byteorder.size != 6)
            return false;
        const uint8_t *order = dr_archive_look(a, start, 6, 0);
        if (!order || memcmp(order, "little", 6) != 0)
            return false;
    }
    if (!member_data(a, &members.payload, &start))
        return false;
    out->payload_offset = a->offset + start;
    out->payload_size = members.payload.size;
    out->crc = members.payload.crc;
    if (!member_data(a, &members.pickle, &start) || members.pickle.size > MAX_PICKLE)
        return false;
    const uint8_t *pickle = dr_archive_look(a, start, (size_t)members.pickle.size, 0);
    return pickle && parse_pickle(pickle, (size_t)members.pickle.size, out);
}

int dr_record_locate(struct dr_view *view, uint64_t offset, uint64_t length, struct dr_located *out,
                     struct dr_error *error) {
    const struct dr_archive archive = {view, offset, length, error};
    out->plain = locate(&archive, out);
    return error->kind != DR_ERROR_NONE ? -error->err : 0;
}
