/* Laying out sources in a data file, and filling its blocks. See save_window.h. */
#include "data/save_window.h"

#include "base/align.h"
#include "base/crc.h"
#include "base/memory.h"
#include "record/region.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

/* Bytes gathered before they are summed: small enough to stay in the nearest caches. */
#define STEP ((uint64_t)128 * 1024)

static bool is_first(const struct dr_source *s) { return s->part_offset == 0; }

static bool is_last(const struct dr_source *s) { return s->part_offset + s->size == s->total; }

/* ---- laying out ---- */

static size_t crcs_of_piece(const struct piece *p) { return dr_crc_count(p->payload, p->source->total); }

static int check_source(const struct open_record *open, const struct dr_source *s, size_t index, size_t count,
                        bool is_digested, struct dr_error *error) {
    uint64_t bytes = s->total;
    if (s->shape.dtype && (s->shape.ndim > DR_MAX_DIMS || !dr_shape_bytes(&s->shape, &bytes)))
        return dr_error_invalid(error, (int64_t)index, "a tensor of %d dimensions is too large", s->shape.ndim);
    if (bytes != s->total || s->size > s->total || s->part_offset > s->total - s->size ||
        (s->size == 0 && s->total != 0))
        return dr_error_invalid(error, (int64_t)index, "the size of a tensor is not what its shape says");
    if (s->part_offset != open->done || (s->size != s->total && count != 1))
        return dr_error_invalid(error, (int64_t)index, "the parts of a tensor must come in order, one a call");
    if (s->strides && s->size != s->total)
        return dr_error_invalid(error, (int64_t)index, "a part of a tensor must be contiguous");
    if (is_digested && s->size != s->total)
        return dr_error_invalid(error, (int64_t)index, "no digests are made of a tensor in parts");
    return 0;
}

/* Whether a file can be so long: what is left of a tensor behind `at`. */
static int check_length(const struct dr_source *s, size_t index, uint64_t at, struct dr_error *error) {
    const uint64_t most = INT64_MAX - DR_RECORD_HEAD_MAX - DR_RECORD_TAIL_MAX, left = s->total - s->part_offset;
    if (at <= most && left <= most - at)
        return 0;
    return dr_error_invalid(error, (int64_t)index, "a tensor of %" PRIu64 " bytes would make a file that is too large",
                            s->total);
}

static uint64_t place(struct open_record *open, struct piece *p, const struct dr_source *s, uint64_t at) {
    uint8_t head[DR_RECORD_HEAD_MAX];
    p->source = s;
    p->begin = at;
    if (is_first(s)) {
        p->record = at;
        p->head_size = s->shape.dtype ? dr_record_head(&s->shape, at, head) : 0;
        p->data = at + p->head_size;
        open->offset = p->record;
        open->head_size = p->head_size;
    } else {
        p->record = open->offset;
        p->head_size = open->head_size;
        p->data = at;
    }
    p->payload = p->record + p->head_size;
    p->end = p->data + s->size;
    if (is_last(s) && s->shape.dtype)
        p->end += dr_record_tail_size(&s->shape, p->head_size);
    atomic_init(&p->unsummed, s->size);
    return p->end;
}

/* Gives each piece room for its CRCs. Those of an unfinished record outlive the window. */
static int allocate_crcs(struct save_window *window, struct dr_error *error) {
    struct open_record *open = window->open;
    size_t total = 0;
    for (size_t i = 0; i < window->count; i++)
        if (is_first(window->pieces[i].source) && is_last(window->pieces[i].source))
            total += crcs_of_piece(&window->pieces[i]);
    window->crcs = dr_calloc(total ? total : 1, sizeof *window->crcs);
    if (!window->crcs)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, window->path);
    uint32_t *next = window->crcs;
    for (size_t i = 0; i < window->count; i++) {
        struct piece *p = &window->pieces[i];
        if (is_first(p->source) && is_last(p->source)) {
            p->crcs = next;
            next += crcs_of_piece(p);
            continue;
        }
        if (is_first(p->source)) {
            free(open->crcs);
            open->crcs = dr_calloc(crcs_of_piece(p), sizeof *open->crcs);
            if (!open->crcs)
                return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, window->path);
        }
        p->crcs = open->crcs;
        if (!p->crcs)
            return dr_error_invalid(error, (int64_t)i, "the first part of a tensor is missing");
    }
    return 0;
}

/* The same for its digests. */
static int allocate_digests(struct save_window *window, struct dr_error *error) {
    size_t total = 0;
    for (size_t i = 0; i < window->count; i++)
        total += crcs_of_piece(&window->pieces[i]);
    window->digests = dr_calloc(total + 1, DR_DIGEST_BYTES);
    if (!window->digests)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, window->path);
    uint8_t *next = window->digests;
    for (size_t i = 0; i < window->count; i++) {
        window->pieces[i].digests = next;
        next += DR_DIGEST_BYTES * crcs_of_piece(&window->pieces[i]);
    }
    return 0;
}

int dr_save_window_init(struct save_window *window, const struct dr_source *sources, size_t count,
                        struct dr_error *error) {
    window->pieces = dr_calloc(count ? count : 1, sizeof *window->pieces);
    if (!window->pieces)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, window->path);
    window->count = count;
    window->end = window->begin;
    for (size_t i = 0; i < count; i++) {
        int rc = check_source(window->open, &sources[i], i, count, window->key != NULL, error);
        if (rc == 0)
            rc = check_length(&sources[i], i, window->end, error);
        if (rc < 0)
            return rc;
        window->end = place(window->open, &window->pieces[i], &sources[i], window->end);
    }
    int rc = allocate_crcs(window, error);
    return rc == 0 && window->key ? allocate_digests(window, error) : rc;
}

/* ---- filling blocks ---- */

static void fill_head(const struct piece *p, uint64_t lo, uint64_t hi, uint8_t *block) {
    uint64_t from = lo, to = hi;
    if (!dr_clip(p->begin, p->data, &from, &to))
        return;
    uint8_t head[DR_RECORD_HEAD_MAX];
    dr_record_head(&p->source->shape, p->record, head);
    memcpy(block + (from - lo), head + (from - p->begin), to - from);
}

static void gather(const struct piece *p, const struct dr_region *region, uint64_t from, uint64_t to, uint8_t *out) {
    if (region)
        dr_region_gather(region, from - p->payload, to - p->payload, out);
    else
        memcpy(out, (const uint8_t *)p->source->data + (from - p->data), to - from);
}

/* An I/O block holds every CRC block that it touches wholly, as far as that is the payload's. */
static void digest_blocks(const struct dr_digest_key *key, const struct piece *p, uint64_t from, uint64_t to,
                          const uint8_t *data) {
    uint64_t first_block = p->payload / DR_CRC_BLOCK;
    for (uint64_t at = from, next; at < to; at = next) {
        next = dr_align_down(at, DR_CRC_BLOCK) + DR_CRC_BLOCK;
        if (next > to)
            next = to;
        dr_digest(key, data + (at - from), next - at, p->digests + DR_DIGEST_BYTES * (at / DR_CRC_BLOCK - first_block));
    }
}

static void fill_data(struct save_window *window, struct piece *p, uint64_t lo, uint64_t hi, uint8_t *block,
                      uint64_t *crc_ns) {
    uint64_t from = lo, to = hi;
    const struct dr_source *s = p->source;
    if (!dr_clip(p->data, p->data + s->size, &from, &to))
        return;
    struct dr_region region;
    if (s->strides)
        dr_region_init(&region, &s->shape, NULL, s->shape.sizes, (void *)(uintptr_t)s->data, s->strides);
    /* A transposed matrix is gathered many rows at a time, or each of its elements costs a cache line. */
    bool at_once = s->strides && region.ndim > 1;
    if (at_once)
        gather(p, &region, from, to, block + (from - lo));
    const struct dr_options *options = window->options;
    uint64_t first_block = p->payload / DR_CRC_BLOCK;
    for (uint64_t at = from, next; at < to; at = next) {
        next = dr_align_down(at, STEP) + STEP;
        if (next > to)
            next = to;
        uint8_t *out = block + (at - lo);
        if (!at_once)
            gather(p, s->strides ? &region : NULL, at, next, out);
        if (options->checksum) {
            uint32_t *crc = &p->crcs[at / DR_CRC_BLOCK - first_block];
            *crc = dr_watch_crc32(options->watch, crc_ns, *crc, out, next - at);
        }
    }
    if (p->digests)
        digest_blocks(window->key, p, from, to, block + (from - lo));
    if (atomic_fetch_sub(&p->unsummed, to - from) == to - from)
        dr_workers_notify(&window->workers);
}

static bool is_summed(const void *context) {
    const struct piece *p = context;
    return atomic_load(&p->unsummed) == 0;
}

static bool fill_tail(struct save_window *window, struct piece *p, uint64_t lo, uint64_t hi, uint8_t *block) {
    assert(p->record <= p->payload && p->payload <= p->data && p->data + p->source->size <= p->end);
    uint64_t tail = p->data + p->source->size, from = lo, to = hi;
    if (!dr_clip(tail, p->end, &from, &to))
        return true;
    if (!is_summed(p) && !dr_workers_wait(&window->workers, is_summed, p))
        return false;
    uint8_t bytes[DR_RECORD_TAIL_MAX];
    uint32_t crc = dr_crc_whole(p->payload, p->source->total, p->crcs);
    dr_record_tail(&p->source->shape, p->record, p->head_size, crc, bytes);
    memcpy(block + (from - lo), bytes + (from - tail), to - from);
    return true;
}

/* The first piece that ends behind a stream position. */
static size_t find_piece(const struct save_window *window, uint64_t position) {
    size_t lo = 0, hi = window->count;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (window->pieces[middle].end <= position)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

static bool fill(struct save_window *window, uint64_t start, uint64_t end, uint8_t *block, uint64_t *crc_ns) {
    uint64_t lo = start;
    if (start < window->begin) {
        lo = window->begin;
        if (block != window->carry)
            memcpy(block, window->carry, lo - start);
        block += lo - start;
    }
    size_t first = find_piece(window, lo);
    for (size_t i = first; i < window->count && window->pieces[i].begin < end; i++) {
        fill_head(&window->pieces[i], lo, end, block);
        fill_data(window, &window->pieces[i], lo, end, block, crc_ns);
    }
    for (size_t i = first; i < window->count && window->pieces[i].begin < end; i++)
        if (!fill_tail(window, &window->pieces[i], lo, end, block))
            return false;
    return true;
}

bool dr_save_window_fill(struct save_window *window, unsigned worker, uint64_t start, uint64_t end, uint8_t *block) {
    assert(start % window->options->block_size == 0 && start < end && end <= window->end);
    assert(end - start <= window->options->block_size);
    struct dr_watch *watch = window->options->watch;
    struct dr_span span = {
        .begin = dr_watch_now(watch), .offset = start, .size = end - start, .step = DR_STEP_FILL, .worker = worker};
    bool filled = fill(window, start, end, block, &span.crc);
    dr_watch_note(watch, span);
    return filled;
}
