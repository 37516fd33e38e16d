/*
 * Finding the payload in a record that anyone wrote. See record.h.
 *
 * Everything read here is untrusted: each offset and length is checked
 * against the record before it is used. What is not understood is "not
 * plain", and left to torch.load.
 */
#include "record.h"
#include "sys.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    WINDOW_BYTES = 256 * 1024,
    LOCAL_SIZE = 30,
    CENTRAL_SIZE = 46,
    END_SIZE = 22,
    END64_SIZE = 56,
    LOCATOR_SIZE = 20,
    MAX_DIRECTORY = 32 * 1024,
    MAX_PICKLE = 16 * 1024,
};

int dr_window_init(struct dr_window *window, int fd, const char *path, struct dr_error *error) {
    *window = (struct dr_window){.fd = fd, .path = path, .data = malloc(WINDOW_BYTES)};
    return window->data ? 0 : dr_error_system(error, ENOMEM, "malloc", path);
}

void dr_window_destroy(struct dr_window *window) { free(window->data); }

/* The bytes at [offset, offset + size), or NULL. `until` is how far reading ahead is useful. */
static const uint8_t *look(struct dr_window *window, uint64_t offset, size_t size, uint64_t until,
                           struct dr_error *error) {
    if (size > WINDOW_BYTES)
        return NULL;
    if (offset >= window->start && offset + size <= window->start + window->filled)
        return window->data + (offset - window->start);
    uint64_t wanted = until > offset + size ? until - offset : size;
    if (wanted > WINDOW_BYTES)
        wanted = WINDOW_BYTES;
    window->start = offset;
    window->filled = 0;
    while (window->filled < size) {
        ssize_t n = dr_sys.pread(window->fd, window->data + window->filled, (size_t)wanted - window->filled,
                                 (off_t)(offset + window->filled));
        if (n == -EINTR)
            continue;
        if (n < 0) {
            dr_error_io(error, (int)-n, "read", window->path, (int64_t)offset, (int64_t)wanted);
            return NULL;
        }
        if (n == 0) {
            dr_error_corrupt(error, window->path, (int64_t)(offset + window->filled), DR_NO_ITEM,
                             "the file ends inside a record");
            return NULL;
        }
        window->filled += (size_t)n;
    }
    return window->data;
}

static uint64_t get_le(const uint8_t *data, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value |= (uint64_t)data[i] << (8 * i);
    return value;
}

/* ---- the pickle of a plain tensor ---- */

struct cursor {
    const uint8_t *at, *end;
};

static bool skip_memo(struct cursor *c) {
    for (;;) {
        if (c->at < c->end && *c->at == 'q' && c->end - c->at >= 2)
            c->at += 2;
        else if (c->at < c->end && *c->at == 'r' && c->end - c->at >= 5)
            c->at += 5;
        else
            return true;
    }
}

static bool expect(struct cursor *c, const char *opcodes) {
    for (; *opcodes; opcodes++) {
        if (c->at >= c->end || *c->at != (uint8_t)*opcodes)
            return false;
        c->at++;
        skip_memo(c);
    }
    return true;
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
    if (c->at >= c->end || *c->at != 'c')
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
    if (c->end - c->at < 5 || *c->at != 'X')
        return false;
    uint64_t size = get_le(c->at + 1, 4);
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
    case 'K':
        bytes = 1;
        break;
    case 'M':
        bytes = 2;
        break;
    case 'J':
        bytes = 4;
        break;
    case 0x8a:
        skip = 2;
        bytes = left >= 2 ? c->at[1] : 9;
        break;
    default:
        return false;
    }
    if (bytes > 8 || left < skip + bytes)
        return false;
    *value = (int64_t)get_le(c->at + skip, bytes);
    c->at += skip + bytes;
    return *value >= 0;
}

static bool get_tuple(struct cursor *c, int64_t values[DR_MAX_DIMS], int *count) {
    *count = 0;
    if (expect(c, ")"))
        return true;
    bool marked = expect(c, "(");
    while (*count < DR_MAX_DIMS && get_int(c, &values[*count]))
        ++*count;
    if (marked)
        return expect(c, "t");
    return *count >= 1 && *count <= 3 && expect(c, *count == 1 ? "\x85" : *count == 2 ? "\x86" : "\x87");
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
    if (!expect(c, "(") || !is_string(c, "storage") || !get_global(c, module, name))
        return false;
    if (legacy && strcmp(module, "torch") == 0)
        *dtype = dr_dtype_by_storage(name);
    else if (!legacy && strcmp(module, "torch.storage") == 0 && strcmp(name, "UntypedStorage") == 0)
        *dtype = NULL;
    else
        return false;
    return is_string(c, "0") && is_string(c, NULL) && get_int(c, length) && expect(c, "tQ");
}

/* Reads the one shape of pickle that a plain tensor has; false for any other. */
static bool parse_pickle(const uint8_t *data, size_t size, struct dr_located *out) {
    struct cursor c = {data, data + size};
    char module[64], name[64];
    if (size < 2 || data[0] != 0x80 || data[1] != 2)
        return false;
    c.at += 2;
    if (!get_global(&c, module, name) || strcmp(module, "torch._utils") != 0)
        return false;
    bool legacy = strcmp(name, "_rebuild_tensor_v2") == 0;
    if (!legacy && strcmp(name, "_rebuild_tensor_v3") != 0)
        return false;
    int64_t length, start, strides[DR_MAX_DIMS];
    int stride_count;
    if (!expect(&c, "(") || !get_storage(&c, legacy, &out->dtype, &length) || !get_int(&c, &start) || start != 0)
        return false;
    if (!get_tuple(&c, out->sizes, &out->ndim) || !get_tuple(&c, strides, &stride_count))
        return false;
    if (stride_count != out->ndim || !contiguous(out->sizes, strides, out->ndim))
        return false;
    if (!expect(&c, "\x89") || !is_global(&c, "collections", "OrderedDict") || !expect(&c, ")R"))
        return false;
    if (!legacy) {
        if (!get_global(&c, module, name) || strcmp(module, "torch") != 0)
            return false;
        out->dtype = dr_dtype_by_name(name);
    }
    if (!out->dtype || !expect(&c, "tR."))
        return false;
    struct dr_shape shape = {out->dtype, out->ndim, out->sizes};
    uint64_t bytes;
    return dr_shape_bytes(&shape, &bytes) && bytes == out->payload_size &&
           (uint64_t)length == (legacy ? bytes / out->dtype->item_size : bytes);
}

/* ---- the zip around it ---- */

struct archive {
    struct dr_window *window;
    uint64_t offset, length; /* the record in the file */
    struct dr_error *error;
};

struct member {
    uint64_t header, size;
    uint32_t crc;
    bool stored, present;
};

static const uint8_t *at(const struct archive *a, uint64_t offset, size_t size, uint64_t ahead) {
    if (offset > a->length || size > a->length - offset)
        return NULL;
    uint64_t until = offset + ahead < a->length ? offset + ahead : a->length;
    return look(a->window, a->offset + offset, size, a->offset + until, a->error);
}

struct directory {
    uint64_t offset, size, entries;
};

static bool find_directory(const struct archive *a, struct directory *out) {
    if (a->length < END_SIZE)
        return false;
    uint64_t end = a->length - END_SIZE;
    uint64_t tail = a->length < 4096 ? 0 : a->length - 4096;
    if (!at(a, tail, (size_t)(a->length - tail), 0))
        return false;
    const uint8_t *d = at(a, end, END_SIZE, 0);
    if (!d || get_le(d, 4) != 0x06054b50 || get_le(d + 20, 2) != 0)
        return false;
    *out = (struct directory){get_le(d + 16, 4), get_le(d + 12, 4), get_le(d + 10, 2)};
    if (out->offset != 0xffffffff && out->size != 0xffffffff && out->entries != 0xffff)
        return true;
    if (end < LOCATOR_SIZE || !(d = at(a, end - LOCATOR_SIZE, LOCATOR_SIZE, 0)) || get_le(d, 4) != 0x07064b50)
        return false;
    d = at(a, get_le(d + 8, 8), END64_SIZE, 0);
    if (!d || get_le(d, 4) != 0x06064b50)
        return false;
    *out = (struct directory){get_le(d + 48, 8), get_le(d + 40, 8), get_le(d + 32, 8)};
    return true;
}

/* Replaces what says 0xffffffff by the values of the zip64 extra field. */
static bool apply_zip64(const uint8_t *extra, size_t size, struct member *m) {
    uint64_t *wanted[2] = {m->size == 0xffffffff ? &m->size : NULL, m->header == 0xffffffff ? &m->header : NULL};
    if (!wanted[0] && !wanted[1])
        return true;
    while (size >= 4) {
        size_t field = (size_t)get_le(extra + 2, 2);
        if (field > size - 4)
            return false;
        if (get_le(extra, 2) == 1) {
            size_t used = 0;
            size_t need = (wanted[0] ? 16u : 0u) + (wanted[1] ? 8u : 0u);
            if (field < need)
                return false;
            if (wanted[0]) {
                *wanted[0] = get_le(extra + 4, 8);
                used = 16;
            }
            if (wanted[1])
                *wanted[1] = get_le(extra + 4 + used, 8);
            return true;
        }
        extra += 4 + field;
        size -= 4 + field;
    }
    return false;
}

struct members {
    struct member pickle, byteorder, payload;
    bool others; /* a second storage */
};

static struct member *member_for(struct members *members, const char *name, size_t size) {
    const char *slash = memchr(name, '/', size);
    if (!slash)
        return NULL;
    size_t rest = size - (size_t)(slash + 1 - name);
    if (rest == 8 && memcmp(slash + 1, "data.pkl", 8) == 0)
        return &members->pickle;
    if (rest == 9 && memcmp(slash + 1, "byteorder", 9) == 0)
        return &members->byteorder;
    if (rest == 6 && memcmp(slash + 1, "data/0", 6) == 0)
        return &members->payload;
    if (rest > 5 && memcmp(slash + 1, "data/", 5) == 0)
        members->others = true;
    return NULL;
}

static bool read_directory(const struct archive *a, const struct directory *dir, struct members *members) {
    if (dir->size > MAX_DIRECTORY)
        return false;
    const uint8_t *d = at(a, dir->offset, (size_t)dir->size, 0);
    if (!d)
        return false;
    const uint8_t *end = d + dir->size;
    for (uint64_t i = 0; i < dir->entries; i++) {
        if (end - d < CENTRAL_SIZE || get_le(d, 4) != 0x02014b50)
            return false;
        size_t name = (size_t)get_le(d + 28, 2), extra = (size_t)get_le(d + 30, 2), comment = (size_t)get_le(d + 32, 2);
        if ((size_t)(end - d) < CENTRAL_SIZE + name + extra + comment)
            return false;
        struct member *m = member_for(members, (const char *)d + CENTRAL_SIZE, name);
        if (m) {
            *m = (struct member){.header = get_le(d + 42, 4),
                                 .size = get_le(d + 24, 4),
                                 .crc = (uint32_t)get_le(d + 16, 4),
                                 .stored = get_le(d + 10, 2) == 0 && (get_le(d + 8, 2) & 1) == 0,
                                 .present = true};
            if (!apply_zip64(d + CENTRAL_SIZE + name, extra, m))
                return false;
        }
        d += CENTRAL_SIZE + name + extra + comment;
    }
    return true;
}

/* Where a member's bytes start, from the record's start; false when they do not fit in the record. */
static bool member_data(const struct archive *a, const struct member *m, uint64_t *start) {
    if (!m->present || !m->stored)
        return false;
    const uint8_t *d = at(a, m->header, LOCAL_SIZE, 4096);
    if (!d || get_le(d, 4) != 0x04034b50)
        return false;
    *start = m->header + LOCAL_SIZE + get_le(d + 26, 2) + get_le(d + 28, 2);
    return *start <= a->length && m->size <= a->length - *start;
}

static bool locate(const struct archive *a, struct dr_located *out) {
    struct directory dir;
    struct members members = {0};
    uint64_t start;
    if (!find_directory(a, &dir) || !read_directory(a, &dir, &members) || members.others)
        return false;
    if (members.byteorder.present) {
        if (!member_data(a, &members.byteorder, &start) || members.byteorder.size != 6)
            return false;
        const uint8_t *order = at(a, start, 6, 0);
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
    const uint8_t *pickle = at(a, start, (size_t)members.pickle.size, 0);
    return pickle && parse_pickle(pickle, (size_t)members.pickle.size, out);
}

int dr_record_locate(struct dr_window *window, uint64_t offset, uint64_t length, struct dr_located *out,
                     struct dr_error *error) {
    struct archive archive = {window, offset, length, error};
    out->plain = locate(&archive, out);
    return error->kind != DR_ERROR_NONE ? -error->err : 0;
}
