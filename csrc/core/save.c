/* Writing one data file. See save.h. */
#include "save.h"

#include "crc.h"
#include "engine.h"
#include "file.h"
#include "region.h"
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Bytes gathered before they are summed: small enough to stay in the nearest caches. */
#define STEP ((uint64_t)128 * 1024)

enum { WAIT_MS = 100 };

struct dr_writer {
    struct dr_options options;
    char *name, *path, *dir;
    int dirfd, fd;
    pid_t owner; /* a forked child inherits the memory, but neither the rings nor the file are its own */
    bool direct, finished, failed;
    uint64_t expected; /* bytes, from the size hint */
    uint64_t position; /* the stream's length so far */
    uint8_t *carry;    /* the bytes from the last block boundary to position */
    struct dr_engine *engines[DR_MAX_WORKERS];
    unsigned engine_count;
    uint32_t *crcs;      /* of the last window's records, for the caller */
    uint32_t *open_crcs; /* of a record whose parts have not all come */
    uint64_t open_offset;
    size_t open_head;
    uint64_t open_done; /* payload bytes of it that are written; 0 when no record is open */
};

/* One source laid out in the file. */
struct piece {
    const struct dr_source *source;
    uint64_t record; /* file offset of the record */
    uint64_t begin;  /* of what this piece adds: the head, or more payload */
    uint64_t data;   /* of its payload bytes */
    uint64_t end;    /* behind its payload bytes, and behind the tail if it is the last part */
    uint64_t payload;
    size_t head_size;
    uint32_t *crcs;
    atomic_uint_fast64_t unsummed; /* bytes of this piece whose CRC is not in crcs yet */
};

struct window {
    struct dr_writer *writer;
    struct dr_crew crew;
    struct piece *pieces;
    size_t count;
    uint64_t begin, end; /* stream positions */
    uint8_t *carry_out;
    atomic_uint_fast64_t next; /* block to take */
};

static bool is_first(const struct dr_source *s) { return s->part_offset == 0; }

static bool is_last(const struct dr_source *s) { return s->part_offset + s->size == s->total; }

/* ---- laying out ---- */

static size_t crcs_of_piece(const struct piece *p) { return dr_crc_count(p->payload, p->source->total); }

static int check_source(const struct dr_writer *w, const struct dr_source *s, size_t index, size_t count,
                        struct dr_error *error) {
    uint64_t bytes = s->total;
    if (s->shape.dtype && (s->shape.ndim > DR_MAX_DIMS || !dr_shape_bytes(&s->shape, &bytes)))
        return dr_error_invalid(error, (int64_t)index, "a tensor of %d dimensions is too large", s->shape.ndim);
    if (bytes != s->total || s->size > s->total || s->part_offset > s->total - s->size ||
        (s->size == 0 && s->total != 0))
        return dr_error_invalid(error, (int64_t)index, "the size of a tensor is not what its shape says");
    if (s->part_offset != w->open_done || (s->size != s->total && count != 1))
        return dr_error_invalid(error, (int64_t)index, "the parts of a tensor must come in order, one a call");
    if (s->strides && s->size != s->total)
        return dr_error_invalid(error, (int64_t)index, "a part of a tensor must be contiguous");
    return 0;
}

static uint64_t place(struct dr_writer *w, struct piece *p, const struct dr_source *s, uint64_t at) {
    uint8_t head[DR_RECORD_HEAD_MAX];
    p->source = s;
    p->begin = at;
    if (is_first(s)) {
        p->record = at;
        p->head_size = s->shape.dtype ? dr_record_head(&s->shape, at, head) : 0;
        p->data = at + p->head_size;
        w->open_offset = p->record;
        w->open_head = p->head_size;
    } else {
        p->record = w->open_offset;
        p->head_size = w->open_head;
        p->data = at;
    }
    p->payload = p->record + p->head_size;
    p->end = p->data + s->size;
    if (is_last(s) && s->shape.dtype)
        p->end += dr_record_tail_size(&s->shape, p->head_size);
    atomic_init(&p->unsummed, s->size);
    return p->end;
}

/* Gives each piece room for its CRCs. Those of an unfinished record live on in the writer. */
static int allocate_crcs(struct dr_writer *w, struct window *window, struct dr_error *error) {
    size_t total = 0;
    for (size_t i = 0; i < window->count; i++)
        if (is_first(window->pieces[i].source) && is_last(window->pieces[i].source))
            total += crcs_of_piece(&window->pieces[i]);
    free(w->crcs);
    w->crcs = calloc(total ? total : 1, sizeof *w->crcs);
    if (!w->crcs)
        return dr_error_system(error, ENOMEM, "malloc", w->path);
    uint32_t *next = w->crcs;
    for (size_t i = 0; i < window->count; i++) {
        struct piece *p = &window->pieces[i];
        if (is_first(p->source) && is_last(p->source)) {
            p->crcs = next;
            next += crcs_of_piece(p);
            continue;
        }
        if (is_first(p->source)) {
            free(w->open_crcs);
            w->open_crcs = calloc(crcs_of_piece(p), sizeof *w->open_crcs);
        }
        p->crcs = w->open_crcs;
        if (!p->crcs)
            return dr_error_invalid(error, (int64_t)i, "the first part of a tensor is missing");
    }
    return 0;
}

static int lay_out(struct window *window, const struct dr_source *sources, size_t count, struct dr_error *error) {
    struct dr_writer *w = window->writer;
    window->pieces = calloc(count ? count : 1, sizeof *window->pieces);
    if (!window->pieces)
        return dr_error_system(error, ENOMEM, "malloc", w->path);
    window->count = count;
    window->begin = window->end = w->position;
    for (size_t i = 0; i < count; i++) {
        int rc = check_source(w, &sources[i], i, count, error);
        if (rc < 0)
            return rc;
        window->end = place(w, &window->pieces[i], &sources[i], window->end);
    }
    return allocate_crcs(w, window, error);
}

/* ---- filling blocks ---- */

/* The part of [begin, begin + size) that lies in [lo, hi). */
static bool overlap(uint64_t begin, uint64_t size, uint64_t lo, uint64_t hi, uint64_t *from, uint64_t *to) {
    *from = begin > lo ? begin : lo;
    *to = begin + size < hi ? begin + size : hi;
    return *from < *to;
}

static void fill_head(const struct piece *p, uint64_t lo, uint64_t hi, uint8_t *block) {
    uint64_t from, to;
    if (!overlap(p->begin, p->data - p->begin, lo, hi, &from, &to))
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

static void fill_data(struct window *window, struct piece *p, uint64_t lo, uint64_t hi, uint8_t *block) {
    uint64_t from, to;
    const struct dr_source *s = p->source;
    if (!overlap(p->data, s->size, lo, hi, &from, &to))
        return;
    struct dr_region region;
    if (s->strides)
        dr_region_init(&region, &s->shape, NULL, s->shape.sizes, (void *)(uintptr_t)s->data, s->strides);
    /* A transposed matrix is gathered many rows at a time, or each of its elements costs a cache line. */
    bool at_once = s->strides && region.ndim > 1;
    if (at_once)
        gather(p, &region, from, to, block + (from - lo));
    bool checksum = window->writer->options.checksum;
    uint64_t first_block = p->payload / DR_CRC_BLOCK;
    for (uint64_t at = from, next; at < to; at = next) {
        next = dr_align_down(at, STEP) + STEP;
        if (next > to)
            next = to;
        uint8_t *out = block + (at - lo);
        if (!at_once)
            gather(p, s->strides ? &region : NULL, at, next, out);
        if (checksum) {
            uint32_t *crc = &p->crcs[at / DR_CRC_BLOCK - first_block];
            *crc = dr_crc32(*crc, out, next - at);
        }
    }
    if (atomic_fetch_sub(&p->unsummed, to - from) == to - from)
        dr_crew_notify(&window->crew);
}

static bool is_summed(const void *context) {
    const struct piece *p = context;
    return atomic_load(&p->unsummed) == 0;
}

static bool fill_tail(struct window *window, struct piece *p, uint64_t lo, uint64_t hi, uint8_t *block) {
    uint64_t tail = p->data + p->source->size, from, to;
    if (!overlap(tail, p->end - tail, lo, hi, &from, &to))
        return true;
    if (!is_summed(p) && !dr_crew_wait(&window->crew, is_summed, p))
        return false;
    uint8_t bytes[DR_RECORD_TAIL_MAX];
    uint32_t crc = dr_crc_whole(p->payload, p->source->total, p->crcs);
    dr_record_tail(&p->source->shape, p->record, p->head_size, crc, bytes);
    memcpy(block + (from - lo), bytes + (from - tail), to - from);
    return true;
}

/* The first piece that ends behind a stream position. */
static size_t find_piece(const struct window *window, uint64_t position) {
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

/* Fills the stream's bytes [start, end) of a block; false when the crew was stopped. */
static bool fill_block(struct window *window, uint64_t start, uint64_t end, uint8_t *block) {
    const struct dr_writer *w = window->writer;
    uint64_t lo = start;
    if (start < window->begin) {
        lo = window->begin;
        memcpy(block, w->carry, lo - start);
        block += lo - start;
    }
    size_t first = find_piece(window, lo);
    for (size_t i = first; i < window->count && window->pieces[i].begin < end; i++) {
        fill_head(&window->pieces[i], lo, end, block);
        fill_data(window, &window->pieces[i], lo, end, block);
    }
    for (size_t i = first; i < window->count && window->pieces[i].begin < end; i++)
        if (!fill_tail(window, &window->pieces[i], lo, end, block))
            return false;
    return true;
}

/* ---- writing blocks ---- */

static int take(struct dr_crew *crew, struct dr_engine *engine, struct dr_request **request, struct dr_error *error) {
    while (!(*request = dr_engine_take(engine)) && !(crew && dr_crew_stopped(crew))) {
        struct dr_request *done;
        int rc = dr_engine_wait(engine, WAIT_MS, &done, error);
        if (rc < 0)
            return rc;
        if (done)
            dr_engine_release(engine, done);
    }
    return 0;
}

static int put_out(struct dr_writer *w, struct dr_engine *engine, struct dr_request *request, uint64_t offset,
                   size_t size, struct dr_error *error) {
    request->op = DR_WRITE;
    request->fd = w->fd;
    request->direct = w->direct;
    request->size = request->needed = (uint32_t)size;
    request->offset = (int64_t)offset;
    request->path = w->path;
    return dr_engine_submit(engine, request, error);
}

static int finish_requests(struct dr_crew *crew, struct dr_engine *engine, struct dr_error *error) {
    while (engine->in_flight > 0 && !(crew && dr_crew_stopped(crew))) {
        struct dr_request *done;
        int rc = dr_engine_wait(engine, WAIT_MS, &done, error);
        if (rc < 0)
            return rc;
        if (done)
            dr_engine_release(engine, done);
    }
    return 0;
}

static int pour(struct window *window, struct dr_engine *engine, struct dr_error *error) {
    struct dr_writer *w = window->writer;
    size_t block_size = w->options.block_size;
    while (!dr_crew_stopped(&window->crew)) {
        uint64_t start = atomic_fetch_add(&window->next, 1) * block_size;
        uint64_t end = start + block_size;
        if (start >= window->end)
            break;
        if (end > window->end) {
            fill_block(window, start, window->end, window->carry_out);
            break;
        }
        struct dr_request *request;
        int rc = take(&window->crew, engine, &request, error);
        if (rc < 0)
            return rc;
        if (!request || !fill_block(window, start, end, request->data))
            return 0;
        rc = put_out(w, engine, request, start, block_size, error);
        if (rc < 0)
            return rc;
    }
    return finish_requests(&window->crew, engine, error);
}

/* A thread's requests are cancelled when it ends, so none is left in flight by then. */
static int pour_and_drain(void *context, unsigned index, struct dr_error *error) {
    struct window *window = context;
    struct dr_engine *engine = window->writer->engines[index];
    int rc = pour(window, engine, error);
    dr_engine_drain(engine);
    return rc;
}

static unsigned workers_for(const struct dr_writer *w, uint64_t bytes) {
    uint64_t blocks = bytes / w->options.block_size + 1;
    return blocks < w->options.workers ? (unsigned)blocks : w->options.workers;
}

/* Buffers beyond what the file needs are never allocated. */
static int open_engines(struct dr_writer *w, unsigned count, struct dr_error *error) {
    unsigned depth = w->options.queue_depth / w->options.workers;
    uint64_t blocks = (w->expected > w->position ? w->expected : w->position) / w->options.block_size + 1;
    if (blocks < depth)
        depth = (unsigned)blocks;
    while (w->engine_count < count) {
        int rc = dr_engine_open(&w->engines[w->engine_count], w->options.engine, depth ? depth : 1,
                                w->options.block_size, error);
        if (rc < 0)
            return rc;
        w->engine_count++;
    }
    return 0;
}

static void report(const struct window *window, struct dr_placed *placed) {
    for (size_t i = 0; i < window->count; i++) {
        const struct piece *p = &window->pieces[i];
        placed[i] = (struct dr_placed){
            .offset = p->record,
            .length = p->end - p->record,
            .payload_offset = p->payload,
            .payload_size = p->source->total,
            .crcs = p->crcs,
        };
    }
}

static int run_window(struct window *window, const struct dr_control *control, struct dr_error *error) {
    struct dr_writer *w = window->writer;
    unsigned workers = workers_for(w, window->end - window->begin);
    if (window->end > w->expected)
        w->expected = window->end;
    int rc = open_engines(w, workers, error);
    if (rc < 0)
        return rc;
    atomic_init(&window->next, window->begin / w->options.block_size);
    rc = dr_crew_run(&window->crew, workers, pour_and_drain, window, control, error);
    if (rc < 0)
        return rc;
    uint8_t *old = w->carry;
    w->carry = window->carry_out;
    window->carry_out = old;
    w->position = window->end;
    if (window->count == 1) {
        const struct dr_source *s = window->pieces[0].source;
        w->open_done = is_last(s) ? 0 : s->part_offset + s->size;
    }
    return 0;
}

static int check_usable(const struct dr_writer *w, struct dr_error *error) {
    if (w->owner != getpid())
        return dr_error_invalid(error, DR_NO_ITEM, "the writer of %s belongs to the parent process", w->path);
    if (w->failed || w->finished)
        return dr_error_invalid(error, DR_NO_ITEM, "the writer of %s was closed, or failed before", w->path);
    return 0;
}

static void fail(struct dr_writer *w, struct dr_error *error) {
    w->failed = true;
    dr_error_at(error, w->path);
}

int dr_writer_write(struct dr_writer *w, const struct dr_source *sources, size_t count, struct dr_placed *placed,
                    const struct dr_control *control, struct dr_error *error) {
    int rc = check_usable(w, error);
    if (rc < 0)
        return rc;
    struct window window = {.writer = w};
    rc = lay_out(&window, sources, count, error);
    if (rc == 0 && !(window.carry_out = dr_sys.map(w->options.block_size)))
        rc = dr_error_system(error, ENOMEM, "mmap", w->path);
    if (rc == 0)
        rc = run_window(&window, control, error);
    if (rc == 0)
        report(&window, placed);
    else
        fail(w, error);
    if (window.carry_out)
        dr_sys.unmap(window.carry_out, w->options.block_size);
    free(window.pieces);
    return rc;
}

/* ---- opening, finishing, closing ---- */

static int create_file(struct dr_writer *w, uint64_t size_hint, struct dr_error *error) {
    w->dirfd = dr_sys.open_dir(w->dir);
    if (w->dirfd < 0)
        return dr_error_system(error, -w->dirfd, "open", w->dir);
    w->fd = dr_sys.open_below(w->dirfd, w->name, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (w->fd < 0)
        return dr_error_system(error, -w->fd, "open", w->path);
    int rc = dr_file_use_direct(w->fd, w->path, w->options.direct, error);
    if (rc < 0)
        return rc;
    w->direct = rc;
    /* Where the file system cannot preallocate the file just grows; a full disk is known at once where it can. */
    rc = size_hint ? dr_sys.fallocate(w->fd, (off_t)dr_align_up(size_hint, DR_ALIGNMENT)) : 0;
    if (rc == -ENOSPC || rc == -EDQUOT || rc == -EFBIG || rc == -EIO)
        return dr_error_io(error, -rc, "fallocate", w->path, 0, (int64_t)size_hint);
    return 0;
}

int dr_writer_open(struct dr_writer **out, const char *dir, const char *name, uint64_t size_hint,
                   const struct dr_options *options, struct dr_error *error) {
    struct dr_writer *w = calloc(1, sizeof *w);
    if (!w)
        return dr_error_system(error, ENOMEM, "malloc", dir);
    w->options = *options;
    w->dirfd = w->fd = -1;
    w->owner = getpid();
    w->expected = size_hint;
    w->dir = strdup(dir);
    w->name = strdup(name);
    w->path = dr_path_join(dir, name);
    int rc = w->dir && w->name && w->path ? create_file(w, size_hint, error)
                                          : dr_error_system(error, ENOMEM, "malloc", dir);
    if (rc < 0) {
        dr_writer_close(w);
        return rc;
    }
    *out = w;
    return 0;
}

/* The last, partial block; for direct I/O it is padded with zeros, which the file's final length cuts off. */
static int write_rest(struct dr_writer *w, struct dr_error *error) {
    uint64_t start = dr_align_down(w->position, w->options.block_size);
    size_t size = (size_t)(w->position - start);
    if (size == 0)
        return 0;
    struct dr_engine *engine = w->engines[0];
    struct dr_request *request;
    int rc = take(NULL, engine, &request, error);
    if (rc < 0)
        return rc;
    size_t padded = w->direct ? (size_t)dr_align_up(size, DR_ALIGNMENT) : size;
    memcpy(request->data, w->carry, size);
    memset(request->data + size, 0, padded - size);
    rc = put_out(w, engine, request, start, padded, error);
    return rc < 0 ? rc : finish_requests(NULL, engine, error);
}

static int make_durable(struct dr_writer *w, const struct dr_control *control, struct dr_error *error) {
    int rc = dr_sys.ftruncate(w->fd, (off_t)w->position);
    if (rc < 0)
        return dr_error_system(error, -rc, "ftruncate", w->path);
    if (!w->options.sync)
        return 0;
    return dr_file_sync(w->fd, w->path, control, error);
}

int dr_writer_finish(struct dr_writer *w, const struct dr_control *control, struct dr_error *error) {
    int rc = check_usable(w, error);
    if (rc < 0)
        return rc;
    w->failed = true;
    if (w->open_done)
        return dr_error_invalid(error, DR_NO_ITEM, "the last part of a tensor in %s is missing", w->path);
    rc = write_rest(w, error);
    if (rc == 0)
        rc = make_durable(w, control, error);
    if (rc < 0) {
        fail(w, error);
        return rc;
    }
    int fd = w->fd;
    w->fd = -1;
    rc = dr_sys.close(fd);
    if (rc < 0)
        return dr_error_system(error, -rc, "close", w->path);
    w->failed = false;
    w->finished = true;
    return 0;
}

void dr_writer_stats(const struct dr_writer *w, struct dr_writer_stats *out) {
    *out = (struct dr_writer_stats){
        .bytes = w->position,
        .engine = w->engine_count ? w->engines[0]->ops->name : NULL,
        .direct = w->direct,
        .checksum = w->options.checksum,
    };
}

void dr_writer_close(struct dr_writer *w) {
    if (!w)
        return;
    if (w->owner != getpid())
        return;
    bool created = w->fd >= 0 || w->failed;
    for (unsigned i = 0; i < w->engine_count; i++)
        dr_engine_close(w->engines[i]);
    if (w->fd >= 0)
        dr_sys.close(w->fd);
    if (created && !w->finished)
        dr_sys.unlink(w->dirfd, w->name);
    if (w->dirfd >= 0)
        dr_sys.close(w->dirfd);
    if (w->carry)
        dr_sys.unmap(w->carry, w->options.block_size);
    free(w->crcs);
    free(w->open_crcs);
    free(w->name);
    free(w->path);
    free(w->dir);
    free(w);
}
