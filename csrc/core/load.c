/* Reading slices. See load.h; load_plan.c decides what to read, this does it. */
#include "load.h"

#include "crc.h"
#include "engine.h"
#include "file.h"
#include "load_plan.h"
#include "region.h"
#include "sys.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { WAIT_MS = 100 };

struct load {
    const struct dr_options *options;
    struct dr_load_plan plan;
    struct dr_crew crew;
    atomic_size_t next; /* block to take */
    unsigned depth;     /* buffers per worker */
    pthread_mutex_t files_lock;
    atomic_uint_fast64_t bytes, cached_bytes;
    atomic_bool direct;
    const char *_Atomic engine;
};

/* ---- which descriptor a block is read through ---- */

/* Files are opened with their first block and closed with their last: few are open at a time. */
static int open_file(struct load *load, struct dr_load_file *file, struct dr_error *error) {
    int rc = 0;
    pthread_mutex_lock(&load->files_lock);
    if (file->buffered_fd < 0)
        rc = dr_load_file_open(&load->plan, file, &file->buffered_fd, error);
    if (rc == 0 && !file->direct_tried && load->options->direct != DR_DIRECT_OFF) {
        file->direct_tried = true;
        rc = dr_load_file_open(&load->plan, file, &file->direct_fd, error);
        if (rc == 0)
            rc = dr_file_use_direct(file->direct_fd, file->path, load->options->direct, error);
        if (rc == 0) {
            dr_sys.close(file->direct_fd);
            file->direct_fd = -1;
        }
    }
    pthread_mutex_unlock(&load->files_lock);
    return rc < 0 ? rc : 0;
}

static void close_block(struct load *load, const struct dr_load_block *block) {
    struct dr_load_file *file = &load->plan.files[block->file];
    pthread_mutex_lock(&load->files_lock);
    if (--file->blocks_left == 0)
        dr_load_file_close(file);
    pthread_mutex_unlock(&load->files_lock);
}

static bool is_cached(const struct dr_load_file *file, const struct dr_load_block *block) {
    uint64_t size = block->hi - block->lo;
    return dr_sys.cached(file->buffered_fd, (off_t)block->lo, size) >= (int64_t)size;
}

/* ---- what is done with a block's bytes ---- */

static uint32_t stored_crc(const struct dr_read *read, size_t index) {
    const uint8_t *p = read->crcs + 4 * index;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* The last CRC block that was checked: slices of one payload often share it. */
struct checked {
    uint64_t payload_offset, payload_size;
    const uint8_t *crcs;
    size_t count; /* blocks of that payload before this index are done */
};

static bool is_same_payload(const struct checked *checked, const struct dr_read *read) {
    return checked->payload_offset == read->payload_offset && checked->payload_size == read->payload_size &&
           checked->crcs == read->crcs;
}

/* Checks, or notes for dr_load_plan's final check, every CRC block of the payload that touches [lo, hi) and is here. */
static int check_crcs(const struct load *load, const struct dr_load_block *block, const uint8_t *data, uint64_t lo,
                      uint64_t hi, size_t index, struct checked *checked, uint64_t *crc_ns, struct dr_error *error) {
    const struct dr_read *read = &load->plan.reads[index];
    uint32_t *sums = load->plan.sums ? load->plan.sums[index] : NULL;
    if (!load->options->checksum || (!read->crcs && !sums))
        return 0;
    size_t first = (size_t)(lo / DR_CRC_BLOCK - read->payload_offset / DR_CRC_BLOCK);
    size_t count = dr_crc_count(lo, hi - lo);
    if (!is_same_payload(checked, read) || sums)
        *checked = (struct checked){read->payload_offset, read->payload_size, read->crcs, 0};
    for (size_t i = first > checked->count ? first : checked->count; i < first + count; i++) {
        uint64_t from, to;
        dr_crc_range(read->payload_offset, read->payload_size, i, &from, &to);
        if (from < block->lo || to > block->hi)
            continue;
        checked->count = i + 1;
        uint32_t crc = dr_watch_crc32(load->options->watch, crc_ns, 0, data + (from - block->lo), to - from);
        if (sums)
            sums[i] = crc;
        else if (crc != stored_crc(read, i))
            return dr_error_corrupt(error, load->plan.files[read->file].path, (int64_t)from, (int64_t)index,
                                    "CRC-32 of bytes %llu to %llu is %08x, was %08x when they were written",
                                    (unsigned long long)from, (unsigned long long)to, crc, stored_crc(read, i));
    }
    return 0;
}

static void scatter(struct dr_read *read, const struct dr_load_block *block, const uint8_t *data, uint64_t lo,
                    uint64_t hi) {
    struct dr_region region;
    dr_region_init(&region, &read->chunk, read->offsets, read->lengths, read->memory, read->strides);
    dr_region_scatter(&region, lo - read->payload_offset, hi - read->payload_offset, data + (lo - block->lo));
    __atomic_store_n(&read->touched, true, __ATOMIC_RELAXED);
}

static int use_extents(struct load *load, const struct dr_load_block *block, const uint8_t *data, uint64_t *crc_ns,
                       struct dr_error *error) {
    const struct dr_load_plan *plan = &load->plan;
    struct checked checked = {.payload_offset = UINT64_MAX};
    for (size_t i = block->first_extent; i < plan->extent_count; i++) {
        const struct dr_load_extent *extent = &plan->extents[i];
        if (extent->file != block->file || extent->lo >= block->hi)
            break;
        uint64_t lo = extent->lo > block->lo ? extent->lo : block->lo;
        uint64_t hi = extent->hi < block->hi ? extent->hi : block->hi;
        if (lo >= hi)
            continue;
        int rc = check_crcs(load, block, data, lo, hi, extent->read, &checked, crc_ns, error);
        if (rc < 0)
            return rc;
        scatter(&plan->reads[extent->read], block, data, lo, hi);
    }
    return 0;
}

static int use_block(struct load *load, unsigned worker, const struct dr_load_block *block, const uint8_t *data,
                     struct dr_error *error) {
    struct dr_watch *watch = load->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch), .offset = block->lo, .size = block->hi - block->lo,
                           .step = DR_STEP_USE, .file = (uint32_t)block->file, .worker = worker};
    int rc = use_extents(load, block, data, &span.crc, error);
    dr_watch_note(watch, span);
    return rc;
}

/* ---- the two ways to read a block ---- */

static bool read_all(int fd, uint8_t *data, uint64_t lo, uint64_t hi) {
    while (lo < hi) {
        ssize_t n = dr_sys.pread(fd, data, hi - lo, (off_t)lo);
        if (n <= 0 && n != -EINTR)
            return false;
        lo += n > 0 ? (uint64_t)n : 0;
        data += n > 0 ? n : 0;
    }
    return true;
}

/*
 * A block that the page cache holds, one CRC block at a time: the buffer then stays in the processor's cache between
 * the three passes over it. 1 when it was used up, 0 when it must be read the other way (which also reports errors).
 */
static int read_cached(struct load *load, unsigned worker, const struct dr_load_block *block, uint8_t *buffer,
                       struct dr_error *error) {
    const struct dr_load_file *file = &load->plan.files[block->file];
    if (!is_cached(file, block))
        return 0;
    struct dr_watch *watch = load->options->watch;
    struct dr_span span = {.begin = dr_watch_now(watch), .offset = block->lo, .size = block->hi - block->lo,
                           .step = DR_STEP_READ, .file = (uint32_t)block->file, .worker = worker};
    struct dr_load_block part = *block;
    for (part.lo = block->lo; part.lo < block->hi; part.lo = part.hi) {
        part.hi = dr_align_down(part.lo, DR_CRC_BLOCK) + DR_CRC_BLOCK;
        if (part.hi > block->hi)
            part.hi = block->hi;
        if (!read_all(file->buffered_fd, buffer, part.lo, part.hi))
            return 0;
        int rc = use_block(load, worker, &part, buffer, error);
        if (rc < 0)
            return rc;
    }
    atomic_fetch_add(&load->bytes, block->hi - block->lo);
    atomic_fetch_add(&load->cached_bytes, block->hi - block->lo);
    dr_watch_count(watch, block->hi - block->lo);
    dr_watch_note(watch, span);
    return 1;
}

static int submit_block(struct load *load, struct dr_engine *engine, struct dr_request *request,
                        const struct dr_load_block *block, struct dr_error *error) {
    const struct dr_load_file *file = &load->plan.files[block->file];
    bool direct = file->direct_fd >= 0;
    uint64_t size = block->hi - block->lo;
    request->op = DR_READ;
    request->fd = direct ? file->direct_fd : file->buffered_fd;
    request->direct = direct;
    request->offset = (int64_t)block->lo;
    request->size = (uint32_t)(direct ? dr_align_up(size, DR_ALIGNMENT) : size);
    request->needed = (uint32_t)size;
    request->path = file->path;
    request->user = (void *)(uintptr_t)block;
    request->file = (uint32_t)block->file;
    atomic_fetch_add(&load->bytes, size);
    if (direct)
        atomic_store(&load->direct, true);
    return dr_engine_submit(engine, request, error);
}

/* ---- the workers ---- */

/* Puts a block in flight, or reads it at once through the page cache. */
static int start_block(struct load *load, struct dr_engine *engine, struct dr_request *request,
                       const struct dr_load_block *block, struct dr_error *error) {
    int rc = open_file(load, &load->plan.files[block->file], error);
    if (rc == 0)
        rc = read_cached(load, engine->worker, block, request->data, error);
    if (rc == 0)
        return submit_block(load, engine, request, block, error);
    dr_engine_release(engine, request);
    close_block(load, block);
    return rc < 0 ? rc : 0;
}

static int fill_queue(struct load *load, struct dr_engine *engine, struct dr_error *error) {
    while (!dr_crew_stopped(&load->crew) && atomic_load(&load->next) < load->plan.block_count) {
        struct dr_request *request = dr_engine_take(engine);
        if (!request)
            return 0;
        size_t index = atomic_fetch_add(&load->next, 1);
        if (index >= load->plan.block_count) {
            dr_engine_release(engine, request);
            return 0;
        }
        int rc = start_block(load, engine, request, &load->plan.blocks[index], error);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_blocks(struct load *load, struct dr_engine *engine, struct dr_error *error) {
    while (!dr_crew_stopped(&load->crew)) {
        struct dr_request *done;
        int rc = fill_queue(load, engine, error);
        if (rc < 0)
            return rc;
        if (engine->in_flight == 0)
            return 0;
        rc = dr_engine_wait(engine, WAIT_MS, &done, error);
        if (rc < 0)
            return rc;
        if (!done)
            continue;
        const struct dr_load_block *block = done->user;
        rc = use_block(load, engine->worker, block, done->data, error);
        dr_engine_release(engine, done);
        close_block(load, block);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int work(void *context, unsigned index, struct dr_error *error) {
    struct load *load = context;
    struct dr_engine *engine = NULL;
    int rc = dr_engine_open(&engine, load->options->engine, load->depth, load->options->block_size, error);
    if (rc < 0)
        return rc;
    engine->watch = load->options->watch;
    engine->worker = index;
    atomic_store(&load->engine, engine->ops->name);
    rc = read_blocks(load, engine, error);
    dr_engine_close(engine);
    return rc;
}

static int run(struct load *load, const struct dr_control *control, struct dr_error *error) {
    const struct dr_options *options = load->options;
    size_t blocks = load->plan.block_count;
    if (blocks == 0)
        return 0;
    unsigned workers = blocks < options->workers ? (unsigned)blocks : options->workers;
    size_t share = (blocks + workers - 1) / workers;
    load->depth = options->queue_depth / options->workers;
    if (load->depth > share)
        load->depth = (unsigned)share;
    if (load->depth == 0)
        load->depth = 1;
    return dr_crew_run(&load->crew, workers, work, load, control, error);
}

static bool is_about(const struct dr_load_plan *plan, const struct dr_read *read, const struct dr_error *error) {
    if (read->file >= plan->file_count ||
        strncmp(plan->files[read->file].path, error->path, sizeof error->path - 1) != 0)
        return false;
    int64_t length = error->length > 0 ? error->length : 1;
    return error->offset < 0 || (error->offset < (int64_t)(read->payload_offset + read->payload_size) &&
                                 error->offset + length > (int64_t)read->payload_offset);
}

/* A failed call knows its file and offset: says which of the reads that concerns. */
static void find_item(const struct dr_load_plan *plan, const struct dr_read *reads, size_t count,
                      struct dr_error *error) {
    for (size_t i = 0; i < count && error->item == DR_NO_ITEM; i++)
        if (is_about(plan, &reads[i], error))
            error->item = (int64_t)i;
}

int dr_load(const char *dir, const char *const *names, size_t name_count, struct dr_read *reads, size_t read_count,
            const struct dr_options *options, const struct dr_control *control, struct dr_load_stats *stats,
            struct dr_error *error) {
    struct load load = {.options = options};
    *stats = (struct dr_load_stats){0};
    int rc = dr_load_plan_init(&load.plan, dir, names, name_count, reads, read_count, options, error);
    if (rc == 0) {
        pthread_mutex_init(&load.files_lock, NULL);
        rc = run(&load, control, error);
        pthread_mutex_destroy(&load.files_lock);
    }
    if (rc == 0)
        rc = dr_load_plan_check_sums(&load.plan, error);
    if (rc < 0) {
        find_item(&load.plan, reads, read_count, error);
        dr_error_at(error, dir);
    }
    *stats = (struct dr_load_stats){
        .bytes = load.bytes, .cached_bytes = load.cached_bytes, .direct = load.direct, .engine = load.engine};
    dr_load_plan_destroy(&load.plan);
    return rc;
}
