/* Writing one data file. See save.h. */
#include "data/save.h"

#include "base/align.h"
#include "base/memory.h"
#include "data/save_window.h"
#include "io/output.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

/* A file of no more than that goes through the page cache: its sync writes it, which saves a wait for the disk. */
#define SMALL_FILE ((size_t)256 * 1024)

struct dr_writer {
    struct dr_output output;
    bool finished, failed;
    bool overlaps;     /* calls do not wait for the disk */
    bool was_direct;   /* before its last block */
    uint64_t expected; /* bytes, from the size hint */
    uint64_t position; /* the stream's length so far */
    uint8_t *carry;    /* the bytes from the last block boundary to position: a spare buffer of the first engine */
    uint32_t *crcs;    /* of the last call's records, for the caller */
    uint8_t *digests;  /* the same; NULL without a key */
    const struct dr_digest_key *key;
    struct open_record open;
};

/* One call of dr_writer_write, for its workers. */
struct writing {
    struct dr_writer *writer;
    struct save_window window;
    uint8_t *carry_out; /* the writer's next carry; the same where no block becomes full */
};

/* ---- writing blocks ---- */

/* Takes blocks, fills and submits them. The last one, which is not full, goes to carry_out. */
static int write_blocks(struct writing *writing, struct dr_engine *engine, struct dr_error *error) {
    struct save_window *window = &writing->window;
    size_t block_size = window->options->block_size;
    const uint64_t first = dr_align_down(window->begin, block_size);
    for (size_t block; dr_workers_take(&window->workers, &block);) {
        uint64_t start = first + block * block_size;
        uint64_t end = start + block_size;
        if (end > window->end) {
            dr_save_window_fill(window, engine->worker, start, window->end, writing->carry_out);
            break;
        }
        struct dr_request *request;
        int rc = dr_output_take(&window->workers, engine, &request, error);
        if (rc < 0)
            return rc;
        if (!request || !dr_save_window_fill(window, engine->worker, start, end, request->data))
            return 0;
        rc = dr_output_submit(&writing->writer->output, engine, request, start, block_size, error);
        if (rc < 0)
            return rc;
    }
    return writing->writer->overlaps ? 0 : dr_output_wait(&window->workers, engine, error);
}

static int work(void *context, unsigned index, struct dr_error *error) {
    struct writing *writing = context;
    struct dr_engine *engine = writing->writer->output.engines[index];
    int rc = write_blocks(writing, engine, error);
    if (rc < 0 || dr_workers_stopped(&writing->window.workers))
        dr_engine_drain(engine);
    return rc;
}

static void report(const struct save_window *window, struct dr_placed *placed) {
    for (size_t i = 0; i < window->count; i++) {
        const struct piece *p = &window->pieces[i];
        placed[i] = (struct dr_placed){
            .offset = p->record,
            .length = p->end - p->record,
            .payload_offset = p->payload,
            .payload_size = p->source->total,
            .crcs = p->crcs,
            .digests = p->digests,
        };
    }
}

/* While blocks are filled from one spare buffer, the rest goes to the other. */
static int choose_carry(struct writing *writing, struct dr_error *error) {
    struct dr_writer *w = writing->writer;
    struct save_window *window = &writing->window;
    struct dr_pool *pool = &w->output.engines[0]->pool;
    uint8_t *first = dr_pool_spare(pool, 0);
    if (!first)
        return dr_error_system(error, ENOMEM, DR_CALL_MMAP, w->output.path);
    if (!w->carry)
        w->carry = first;
    window->carry = w->carry;
    size_t block_size = w->output.options.block_size;
    bool fills_none = window->end / block_size == window->begin / block_size;
    writing->carry_out = fills_none ? w->carry : dr_pool_spare(pool, w->carry == first);
    return 0;
}

static int run(struct writing *writing, const struct dr_control *control, struct dr_error *error) {
    struct dr_writer *w = writing->writer;
    struct save_window *window = &writing->window;
    if (window->end > w->expected)
        w->expected = window->end;
    int rc = window->end > SMALL_FILE ? dr_output_prepare(&w->output, w->expected, error) : 0;
    if (rc < 0)
        return rc;
    unsigned workers = dr_output_workers(&w->output, window->end - window->begin);
    rc = dr_output_engines(&w->output, workers, w->expected, error);
    if (rc == 0)
        rc = choose_carry(writing, error);
    if (rc < 0)
        return rc;
    uint64_t block_size = w->output.options.block_size;
    size_t blocks = (size_t)(dr_align_up(window->end, block_size) / block_size - window->begin / block_size);
    if (writing->carry_out == window->carry) /* nothing waits for the disk */
        rc = dr_workers_share_here(&window->workers, blocks, work, writing, error);
    else
        rc = dr_workers_share(&window->workers, blocks, workers, work, writing, control, error);
    if (rc < 0)
        return rc;
    assert(window->begin == w->position && window->end >= window->begin);
    w->carry = writing->carry_out;
    w->position = window->end;
    if (window->count == 1) {
        const struct dr_source *s = window->pieces[0].source;
        w->open.done = s->part_offset + s->size == s->total ? 0 : s->part_offset + s->size;
    }
    return 0;
}

static int check_usable(const struct dr_writer *w, struct dr_error *error) {
    if (w->output.owner != dr_process())
        return dr_error_invalid(error, DR_NO_ITEM, "the writer of %s belongs to the parent process", w->output.path);
    if (w->failed || w->finished)
        return dr_error_invalid(error, DR_NO_ITEM, "the writer of %s was closed, or failed before", w->output.path);
    return 0;
}

static void fail(struct dr_writer *w, struct dr_error *error) {
    w->failed = true;
    dr_error_at(error, w->output.path);
}

int dr_writer_write(struct dr_writer *w, const struct dr_source *sources, size_t count, struct dr_placed *placed,
                    const struct dr_control *control, struct dr_error *error) {
    int rc = check_usable(w, error);
    if (rc < 0)
        return rc;
    struct writing writing = {
        .writer = w,
        .window = {.options = &w->output.options,
                   .path = w->output.path,
                   .carry = w->carry,
                   .open = &w->open,
                   .key = w->key,
                   .begin = w->position},
    };
    struct save_window *window = &writing.window;
    free(w->crcs);
    free(w->digests);
    rc = dr_save_window_init(window, sources, count, error);
    w->crcs = window->crcs;
    w->digests = window->digests;
    if (rc == 0)
        rc = run(&writing, control, error);
    if (rc == 0)
        report(window, placed);
    else
        fail(w, error);
    free(window->pieces);
    return rc;
}

/* ---- opening, finishing, closing ---- */

int dr_writer_open(struct dr_writer **out, const char *dir, const char *name, uint64_t size_hint,
                   const struct dr_options *options, struct dr_error *error) {
    struct dr_writer *w = dr_calloc(1, sizeof *w);
    if (!w)
        return dr_error_system(error, ENOMEM, DR_CALL_MALLOC, dir);
    w->expected = size_hint;
    int rc = dr_output_open(&w->output, dir, name, true, options, error);
    if (rc == 0 && (size_hint > SMALL_FILE || options->direct == DR_DIRECT_ON))
        rc = dr_output_prepare(&w->output, size_hint, error);
    if (rc < 0) {
        dr_writer_close(w);
        return rc;
    }
    *out = w;
    return 0;
}

void dr_writer_overlap(struct dr_writer *w) { w->overlaps = true; }

void dr_writer_digest(struct dr_writer *w, const struct dr_digest_key *key) { w->key = key; }

/* The last, partial block; for direct I/O it is padded with zeros, which the file's final length cuts off. */
static int write_rest(struct dr_writer *w, struct dr_error *error) {
    uint64_t start = dr_align_down(w->position, w->output.options.block_size);
    size_t size = (size_t)(w->position - start);
    if (size == 0)
        return 0;
    assert(w->output.engine_count > 0 && w->carry); /* whoever moved the position has made them */
    w->was_direct = w->output.direct && start > 0;
    if (w->output.in_order || (start == 0 && size <= SMALL_FILE))
        dr_output_leave_direct(&w->output);
    struct dr_engine *engine = w->output.engines[0];
    struct dr_request *request;
    int rc = dr_output_take(NULL, engine, &request, error);
    if (rc < 0)
        return rc;
    size_t padded = w->output.direct ? (size_t)dr_align_up(size, DR_ALIGNMENT) : size;
    request->data = w->carry;
    memset(request->data + size, 0, padded - size);
    rc = dr_output_submit(&w->output, engine, request, start, padded, error);
    return rc < 0 ? rc : dr_output_wait(NULL, engine, error);
}

int dr_writer_finish(struct dr_writer *w, struct dr_syncs *later, const struct dr_control *control,
                     struct dr_error *error) {
    int rc = check_usable(w, error);
    if (rc < 0)
        return rc;
    w->failed = true;
    if (w->open.done)
        return dr_error_invalid(error, DR_NO_ITEM, "the last part of a tensor in %s is missing", w->output.path);
    rc = dr_output_wait_all(&w->output, control, error);
    if (rc == 0)
        rc = write_rest(w, error);
    if (rc == 0)
        rc = dr_output_sync(&w->output, w->position, later, control, error);
    if (rc < 0) {
        fail(w, error);
        return rc;
    }
    rc = dr_output_close_file(&w->output, error);
    if (rc < 0)
        return rc;
    w->failed = false;
    w->finished = true;
    return 0;
}

void dr_writer_stats(const struct dr_writer *w, struct dr_writer_stats *out) {
    *out = (struct dr_writer_stats){
        .bytes = w->position,
        .engine = w->output.engine_count ? w->output.engines[0]->ops->name : NULL,
        .direct = w->output.direct || w->was_direct,
        .checksum = w->output.options.checksum,
    };
}

void dr_writer_close(struct dr_writer *w) {
    if (!w || w->output.owner != dr_process())
        return;
    dr_output_close(&w->output, !w->finished);
    free(w->crcs);
    free(w->digests);
    free(w->open.crcs);
    free(w);
}
