/*
 * Checking one record, whoever wrote it. See verify.h for what covers what.
 *
 * The same code looks at a record that is in memory and at one that is not:
 * headers are small enough for a view, and data that are not in it become
 * parts, which are streamed later.
 */
#include "data/verify_record.h"

#include "base/array.h"
#include "base/crc.h"
#include "base/pickle_read.h"

#include <assert.h>
#include <string.h>

/* One record being checked, by one thread. */
struct record {
    struct dr_verify *verify;
    size_t index;
    struct dr_check *check;
    struct dr_view *view, *ahead;
    struct dr_error error; /* of the last look */
    uint64_t *crc_ns;
};

/* ---- saying what is wrong ---- */

static void note_problem(const struct record *r, uint64_t offset, uint64_t length, const char *what) {
    dr_verify_note(r->verify,
                   &(struct dr_problem){.check = r->index, .offset = offset, .length = length, .what = what});
}

void dr_verify_note_crc(struct dr_verify *v, size_t check, uint64_t offset, uint64_t length, uint32_t expected,
                        uint32_t found) {
    dr_verify_note(v, &(struct dr_problem){.check = check,
                                           .offset = offset,
                                           .length = length,
                                           .what = "its checksum does not match",
                                           .has_crcs = true,
                                           .expected = expected,
                                           .found = found});
}

/* What a look at [offset, offset + length) did not give: because of an error, or because it is not there. */
static void note_missing(struct record *r, uint64_t offset, uint64_t length, const char *what) {
    if (r->error.kind == DR_ERROR_NONE) {
        note_problem(r, offset, length, what);
        return;
    }
    bool system = r->error.kind == DR_ERROR_SYSTEM;
    dr_verify_note(r->verify, &(struct dr_problem){.check = r->index,
                                                   .offset = offset,
                                                   .length = length,
                                                   .what = system ? "cannot be read" : "the file ends before it",
                                                   .err = system ? r->error.err : 0});
    dr_error_clear(&r->error);
}

static void mark_unverified(const struct record *r, enum dr_unverified what) { r->check->unverified |= what; }

/* ---- data ---- */

void dr_verify_blocks(struct dr_verify *v, struct dr_verify_part *part, const uint8_t *data, uint64_t lo, uint64_t hi,
                      uint64_t *crc_ns) {
    assert(lo >= part->offset && lo < hi && hi <= part->offset + part->size);
    size_t first = (size_t)(lo / DR_CRC_BLOCK - part->offset / DR_CRC_BLOCK);
    size_t count = dr_crc_count(lo, hi - lo);
    for (size_t i = first; i < first + count; i++) {
        uint64_t from, to;
        dr_crc_range(part->offset, part->size, i, &from, &to);
        uint32_t crc = dr_watch_crc32(v->options->watch, crc_ns, 0, data + (from - lo), to - from);
        if (!part->crcs)
            part->sums[i] = crc;
        else if (crc != dr_crc_stored(part->crcs, i))
            dr_verify_note_crc(v, part->check, from, to - from, dr_crc_stored(part->crcs, i), crc);
    }
}

/* Data to be streamed later. */
static void add_part(const struct record *r, const struct dr_verify_part *part) {
    struct dr_verify *v = r->verify;
    uint32_t *sums = part->crcs ? NULL : dr_calloc(dr_crc_count(part->offset, part->size), sizeof *sums);
    DR_NEW_ERROR(ignored);
    pthread_mutex_lock(&v->lock);
    if ((part->crcs || sums) && DR_ARRAY_RESERVE(v->parts, v->part_count, v->part_room, 1, &ignored) == 0) {
        v->parts[v->part_count] = *part;
        v->parts[v->part_count++].sums = sums;
    } else {
        v->no_memory = true;
        free(sums);
    }
    pthread_mutex_unlock(&v->lock);
}

/* Bytes [offset, offset + size) of the file: now, where they are in memory, else later. */
static void check_data(struct record *r, uint64_t offset, uint64_t size, const uint8_t *crcs, uint32_t whole_crc) {
    struct dr_verify_part part = {r->index, offset, size, crcs, whole_crc, NULL, false};
    if (size == 0)
        return;
    if (!r->view->fixed && (crcs || size > DR_VIEW_BYTES / 2)) {
        add_part(r, &part);
        return;
    }
    const uint8_t *data = dr_view_look(r->ahead, offset, (size_t)size, offset + size, &r->error);
    if (!data) {
        note_missing(r, offset, size, "is not in the record");
    } else if (crcs) {
        dr_verify_blocks(r->verify, &part, data, offset, offset + size, r->crc_ns);
    } else {
        uint32_t crc = dr_watch_crc32(r->verify->options->watch, r->crc_ns, 0, data, size);
        if (crc != whole_crc)
            dr_verify_note_crc(r->verify, r->index, offset, size, whole_crc, crc);
    }
}

/* ---- our tensors ---- */

/* The bytes at offset are these, or a problem says from where to where they are not. */
static void check_bytes(struct record *r, struct dr_view *view, uint64_t offset, const uint8_t *expected, size_t size,
                        const char *what) {
    const uint8_t *data = dr_view_look(view, offset, size, offset + size, &r->error);
    if (!data) {
        note_missing(r, offset, size, what);
        return;
    }
    size_t first = 0, end = size;
    while (first < size && data[first] == expected[first])
        first++;
    while (end > first && data[end - 1] == expected[end - 1])
        end--;
    if (first < size)
        note_problem(r, offset + first, end - first, what);
}

static uint32_t whole_crc(const struct dr_check *c) {
    size_t count = c->crcs ? dr_crc_count(c->payload_offset, c->payload_size) : 0;
    uint32_t crc = count > 0 ? dr_crc_stored(c->crcs, 0) : 0;
    for (size_t i = 1; i < count; i++) {
        uint64_t lo, hi;
        dr_crc_range(c->payload_offset, c->payload_size, i, &lo, &hi);
        crc = dr_crc32_combine(crc, dr_crc_stored(c->crcs, i), hi - lo);
    }
    return crc;
}

static void check_tensor(struct record *r) {
    struct dr_check *c = r->check;
    uint8_t head[DR_RECORD_HEAD_MAX], tail[DR_RECORD_TAIL_MAX];
    uint64_t bytes;
    if (!c->shape.dtype || c->shape.ndim > DR_MAX_DIMS || !dr_shape_bytes(&c->shape, &bytes) ||
        bytes != c->payload_size) {
        note_problem(r, c->payload_offset, c->payload_size, "its size does not fit its shape and dtype");
        return;
    }
    size_t head_size = dr_record_head(&c->shape, c->offset, head);
    size_t tail_size = dr_record_tail(&c->shape, c->offset, head_size, whole_crc(c), tail);
    if (c->payload_offset != c->offset + head_size || c->length != head_size + c->payload_size + tail_size) {
        note_problem(r, c->offset, c->length,
                     "its place in the metadata is not that of a tensor of its shape and dtype");
        return;
    }
    check_bytes(r, r->ahead, c->offset, head, head_size, "the head of its record is damaged");
    check_bytes(r, r->view, c->payload_offset + c->payload_size, tail, tail_size,
                "the tail of its record (the zip directory) is damaged");
    if (!c->crcs && c->payload_size > 0)
        mark_unverified(r, DR_UNVERIFIED_BARE);
    else if (!r->verify->quick)
        check_data(r, c->payload_offset, c->payload_size, c->crcs, 0);
}

/* ---- archives of torch.save ---- */

static const char damaged_directory[] = "its zip directory is damaged";
static const char damaged_header[] = "a header in its zip is damaged";

/* Looking where the directory is, and where the entries are. */
struct archive {
    struct record *record;
    struct dr_archive directory, entries;
};

/* Bytes [from, to) of the record are wrong, or could not be read. */
static void note_zip(const struct archive *a, uint64_t from, uint64_t to, const char *what) {
    uint64_t length = a->directory.length;
    to = to < length ? to : length;
    from = from < to ? from : to;
    note_missing(a->record, a->directory.offset + from, to - from, what);
}

/* What an entry's local header has to say like the directory. */
static bool is_same_local(const uint8_t *d, const struct dr_entry *e) {
    bool later = e->flags & DR_ZIP_SIZES_LATER;
    uint64_t packed = dr_get_le(d + 18, 4), size = dr_get_le(d + 22, 4);
    return dr_get_le(d, 4) == DR_ZIP_LOCAL && dr_get_le(d + 6, 2) == e->flags && dr_get_le(d + 8, 2) == e->method &&
           dr_get_le(d + 10, 4) == e->time && dr_get_le(d + 26, 2) == e->name_size &&
           memcmp(d + DR_ZIP_LOCAL_SIZE, e->name, e->name_size) == 0 &&
           (later || (dr_get_le(d + 14, 4) == e->crc && (size == DR_ZIP_LIMIT || size == e->size) &&
                      (packed == DR_ZIP_LIMIT || packed == e->packed_size)));
}

/* The same of the descriptor behind its data. */
static bool is_same_descriptor(const uint8_t *d, const struct dr_entry *e, unsigned width) {
    uint64_t mask = width == 4 ? UINT32_MAX : UINT64_MAX;
    return d && dr_get_le(d, 4) == DR_ZIP_DESCRIPTOR && dr_get_le(d + 4, 4) == e->crc &&
           dr_get_le(d + 8, width) == (e->packed_size & mask) && dr_get_le(d + 8 + width, width) == (e->size & mask);
}

/* "archive/data/7": a storage's bytes, as against what says what they are. */
static bool is_storage(const struct dr_entry *e) {
    const char *slash = memchr(e->name, '/', e->name_size);
    return slash && e->name_size - (size_t)(slash + 1 - e->name) > 5 && memcmp(slash + 1, "data/", 5) == 0;
}

static void check_entry_data(const struct archive *a, const struct dr_entry *e, uint64_t start) {
    struct record *r = a->record;
    if (e->method != 0 || e->flags & DR_ZIP_ENCRYPTED || e->size != e->packed_size)
        mark_unverified(r, DR_UNVERIFIED_PACKED);
    else if (e->crc == 0 && e->size > 0)
        mark_unverified(r, DR_UNVERIFIED_BARE); /* written without a CRC */
    else if (!r->verify->quick || !is_storage(e))
        check_data(r, a->entries.offset + start, e->size, NULL, e->crc);
}

/* Checks an entry, which must begin at `from`; gives where it ends, 0 when that is not known. */
static uint64_t check_entry(const struct archive *a, const struct dr_entry *e, uint64_t from) {
    uint64_t size = DR_ZIP_LOCAL_SIZE + e->name_size;
    const uint8_t *d = dr_archive_look(&a->entries, e->header, size, 4096);
    if (!d || !is_same_local(d, e) || e->header != from) {
        note_zip(a, e->header, e->header + size, damaged_header);
        return 0;
    }
    uint64_t start = e->header + size + dr_get_le(d + 28, 2);
    if (start > a->entries.length || e->packed_size > a->entries.length - start) {
        note_zip(a, e->header, e->header + size, damaged_header);
        return 0;
    }
    uint64_t end = start + e->packed_size;
    check_entry_data(a, e, start);
    if (!(e->flags & DR_ZIP_SIZES_LATER))
        return end;
    for (unsigned width = 4; width <= 8; width += 4)
        if (is_same_descriptor(dr_archive_look(&a->entries, end, 8 + 2 * width, 4096), e, width))
            return end + 8 + 2 * width;
    note_zip(a, end, end + 16, damaged_header);
    return 0;
}

/* What lies behind the directory says where it is, once or twice. */
static bool is_end_right(const struct dr_archive *a, const struct dr_directory *dir) {
    uint64_t at = dir->offset + dir->size, end = a->length - DR_ZIP_END_SIZE;
    uint64_t between = end - at;
    const uint8_t *d = at <= end && between <= DR_ZIP_END64_SIZE + DR_ZIP_LOCATOR_SIZE
                           ? dr_archive_look(a, at, between + DR_ZIP_END_SIZE, 0)
                           : NULL;
    if (!d)
        return false;
    const uint8_t *last = d + between;
    uint64_t entries = dr_get_le(last + 10, 2);
    if (dr_get_le(last + 4, 4) != 0 || dr_get_le(last + 8, 2) != entries ||
        entries != (dir->entries < DR_ZIP_MANY ? dir->entries : DR_ZIP_MANY))
        return false;
    const uint8_t *locator = d + DR_ZIP_END64_SIZE;
    return between == 0 || (between == DR_ZIP_END64_SIZE + DR_ZIP_LOCATOR_SIZE && dr_get_le(d, 4) == DR_ZIP_END64 &&
                            dr_get_le(d + 4, 8) == DR_ZIP_END64_SIZE - 12 && dr_get_le(d + 16, 8) == 0 &&
                            dr_get_le(d + 24, 8) == dir->entries && dr_get_le(d + 32, 8) == dir->entries &&
                            dr_get_le(d + 40, 8) == dir->size && dr_get_le(d + 48, 8) == dir->offset &&
                            dr_get_le(locator, 4) == DR_ZIP_LOCATOR && dr_get_le(locator + 4, 4) == 0 &&
                            dr_get_le(locator + 8, 8) == at && dr_get_le(locator + 16, 4) == 1);
}

/* A directory that is read from a file may have millions of entries. */
static bool is_stopped(const struct record *r) { return !r->view->fixed && dr_workers_stopped(&r->verify->workers); }

static void check_entries(const struct archive *a, struct dr_directory *dir) {
    uint64_t length = a->directory.length, from = 0;
    if (!is_end_right(&a->directory, dir)) {
        note_zip(a, dir->offset + dir->size, length, damaged_directory);
        return;
    }
    while (dir->left > 0 && !is_stopped(a->record)) {
        struct dr_entry entry;
        uint64_t at = dir->next;
        if (!dr_archive_next(&a->directory, dir, &entry)) {
            note_zip(a, at, dir->offset + dir->size, damaged_directory);
            return;
        }
        from = check_entry(a, &entry, from);
        if (from == 0)
            return;
    }
    if (dir->left == 0 && (dir->next != dir->offset + dir->size || from != dir->offset))
        note_zip(a, dir->offset, length, damaged_directory);
}

/* Whether it begins, or ends, like an archive; -1 when that cannot be read. */
static int resembles_archive(const struct archive *a) {
    uint64_t length = a->directory.length;
    const uint8_t *first = dr_archive_look(&a->entries, 0, 4, 4096);
    if (first && dr_get_le(first, 4) == DR_ZIP_LOCAL)
        return 1;
    const uint8_t *last =
        length >= DR_ZIP_END_SIZE ? dr_archive_look(&a->directory, length - DR_ZIP_END_SIZE, DR_ZIP_END_SIZE, 0) : NULL;
    if (last && dr_get_le(last, 4) == DR_ZIP_END)
        return 1;
    return a->record->error.kind == DR_ERROR_NONE ? 0 : -1;
}

/* What torch.load takes besides archives begins with a pickle's protocol. */
static bool is_pickle(const struct archive *a) {
    const uint8_t *first = dr_archive_look(&a->entries, 0, 1, 4096);
    return first && *first == DR_PROTO;
}

static void check_described(struct record *r) {
    const struct dr_check *c = r->check;
    struct dr_located located;
    if (!c->shape.dtype)
        return;
    if (dr_record_locate(r->view, c->offset, c->length, &located, &r->error) < 0) {
        note_missing(r, c->offset, c->length, "");
        return;
    }
    if (located.plain && (located.dtype != c->shape.dtype || located.ndim != c->shape.ndim ||
                          memcmp(located.sizes, c->shape.sizes, (size_t)located.ndim * sizeof *located.sizes) != 0))
        note_problem(r, c->offset, c->length, "its shape or dtype is not what the metadata says");
}

static void check_archive(struct record *r) {
    const struct dr_check *c = r->check;
    const struct archive a = {.record = r,
                              .directory = {r->view, c->offset, c->length, &r->error},
                              .entries = {r->ahead, c->offset, c->length, &r->error}};
    struct dr_directory dir;
    int archive = resembles_archive(&a);
    if (archive == 0 && (c->transformed || is_pickle(&a)))
        mark_unverified(r, DR_UNVERIFIED_BARE);
    else if (archive <= 0)
        note_zip(&a, 0, c->length, "it is no archive of torch.save");
    else if (!dr_archive_open(&a.directory, &dir))
        note_zip(&a, c->length - DR_ZIP_END_SIZE, c->length, damaged_directory);
    else {
        check_entries(&a, &dir);
        check_described(r);
    }
}

void dr_verify_record(struct dr_verify *verify, size_t index, struct dr_view *view, struct dr_view *ahead,
                      uint64_t *crc_ns) {
    struct dr_check *c = &verify->checks[index];
    struct record record = {
        .verify = verify, .index = index, .check = c, .view = view, .ahead = ahead, .crc_ns = crc_ns};
    dr_error_clear(&record.error);
    if (c->kind == DR_CHECK_TENSOR)
        check_tensor(&record);
    else if ((c->kind == DR_CHECK_BYTES || c->kind == DR_CHECK_RAW) &&
             (c->payload_offset != c->offset || c->payload_size != c->length))
        note_problem(&record, c->offset, c->length, "its place in the metadata contradicts itself");
    else if (c->kind == DR_CHECK_RAW && !c->crcs && c->length > 0)
        mark_unverified(&record, DR_UNVERIFIED_BARE);
    else if (c->kind == DR_CHECK_OTHER || (!c->crcs && c->length > 0))
        check_archive(&record);
    else if (!verify->quick)
        check_data(&record, c->payload_offset, c->payload_size, c->crcs, 0);
}
