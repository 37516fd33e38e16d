/*
 * Checking all records: what is read in which order, and what happens to what cannot be read. See verify.h;
 * verify_record.c checks each.
 *
 * 1. Files are looked at, records sorted by place; those that do not lie in their file, or share bytes with another,
 *    are noted, and not read.
 * 2. Large records' headers, by many threads, each with two views.
 * 3. Blocks, by dr_stream: groups of small records, and the parts that step 2 found.
 * 4. CRCs of whole parts, from those of their blocks.
 */
#include "data/verify_record.h"

#include "base/align.h"
#include "base/array.h"
#include "base/crc.h"
#include "io/sys.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADER_READERS = 16,       /* threads that wait for small reads */
    QUICK_SMALL = 64 * 1024,   /* without checking data, larger records are not read as a whole */
    GROUP_GAP = 16 * 1024,     /* between records of a group */
    MOST_BAD_RANGES = 64,      /* of a block */
    REREAD_PARTS = 16,         /* a stretch that cannot be read is tried again in so many parts */
    MOST_FAILED_REREADS = 4096 /* a device that is wholly dead is not asked for each of its sectors */
};

struct verify_run {
    struct dr_verify verify;
    size_t *order; /* of records that are read, by file and offset */
    size_t order_count;
    uint64_t small; /* the largest record that is read in a group */
    size_t *large;  /* of order: the others */
    size_t large_count;
    struct dr_block *blocks;
    size_t block_count, block_room;
    atomic_uint failed_rereads;
    atomic_uint_fast64_t repeated;
};

static void note_problem(struct verify_run *run, size_t check, uint64_t offset, uint64_t length, const char *what,
                         int err) {
    dr_verify_note(&run->verify,
                   &(struct dr_problem){.check = check, .offset = offset, .length = length, .what = what, .err = err});
}

/* ---- 1: which records are read ---- */

static int by_place(const void *a, const void *b, void *context) {
    const struct dr_check *checks = context;
    const struct dr_check *x = &checks[*(const size_t *)a], *y = &checks[*(const size_t *)b];
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->length != y->length ? (x->length > y->length ? -1 : 1) : (x > y) - (x < y);
}

static const char *file_problem(const struct dr_input_file *file, const struct dr_error *error) {
    if (dr_input_is_outside(file->name))
        return "its file is outside of the checkpoint directory";
    if (error->kind == DR_ERROR_CORRUPT)
        return "its file is not a regular file";
    if (error->err == EXDEV)
        return "its file is a symbolic link that leads out of the checkpoint directory";
    if (error->err == ELOOP)
        return "its file is one of symbolic links that lead in a circle, or out of the checkpoint directory";
    return error->err == ENOENT ? "its file is missing" : "its file cannot be opened";
}

/* Whether something failed for a lack of ours, which says nothing of the checkpoint: checking cannot go on. */
static bool is_our_lack(const struct dr_error *why) {
    return dr_input_is_lack(why) || (why->kind == DR_ERROR_SYSTEM && why->err == ENOMEM);
}

/* 1: the file is there; 0: every record of it has that problem. */
static int look_at_file(struct verify_run *run, const size_t *records, size_t count, struct dr_error *error) {
    struct dr_verify *v = &run->verify;
    size_t file = v->checks[records[0]].file;
    DR_NEW_ERROR(why);
    if (dr_input_look(v->input, file, &why) == 0)
        return 1;
    if (is_our_lack(&why)) {
        *error = why;
        return -why.err;
    }
    const char *what = file_problem(&v->input->files[file], &why);
    bool is_told = why.err == ENOENT || why.err == EXDEV || why.err == ELOOP; /* by the words alone */
    int err = why.kind == DR_ERROR_SYSTEM && !is_told ? why.err : 0;
    for (size_t i = 0; i < count; i++)
        dr_verify_note(v, &(struct dr_problem){.check = records[i], .what = what, .err = err, .of_file = true});
    return 0;
}

/* Leaves out of a file's records those that cannot be read, or share bytes with one before. */
static void choose(struct verify_run *run, const size_t *records, size_t count) {
    struct dr_verify *v = &run->verify;
    uint64_t size = v->input->files[v->checks[records[0]].file].size, end = 0;
    for (size_t i = 0; i < count; i++) {
        const struct dr_check *c = &v->checks[records[i]];
        if (c->offset >= size && c->length > 0) {
            dr_verify_note(
                v, &(struct dr_problem){.check = records[i], .what = "its file ends before it", .of_file = true});
        } else if (c->offset > size || c->length > size - c->offset) {
            uint64_t from = c->offset > size ? c->offset : size;
            note_problem(run, records[i], from, c->offset + c->length - from, "the file ends before it", 0);
        } else if (c->length == 0) {
            struct dr_view nothing = {.fd = -1, .fixed = true};
            uint64_t crc_ns = 0;
            dr_verify_record(v, records[i], &nothing, &nothing, &crc_ns);
        } else if (c->offset < end) {
            note_problem(run, records[i], c->offset, c->length, "it shares bytes with another record", 0);
        } else {
            run->order[run->order_count++] = records[i];
            end = c->offset + c->length;
        }
    }
}

static int plan_records(struct verify_run *run, const struct dr_control *control, struct dr_error *error) {
    struct dr_verify *v = &run->verify;
    size_t *sorted = dr_malloc((v->count + 1) * sizeof *sorted);
    run->order = dr_malloc((v->count + 1) * sizeof *run->order);
    run->large = dr_malloc((v->count + 1) * sizeof *run->large);
    if (!sorted || !run->order || !run->large) {
        free(sorted);
        return dr_error_memory(error);
    }
    for (size_t i = 0; i < v->count; i++)
        sorted[i] = i;
    qsort_r(sorted, v->count, sizeof *sorted, by_place, v->checks);
    struct dr_ticker ticker = {.control = control};
    int rc = dr_input_look_many(v->input, &v->checks->file, sizeof *v->checks, v->count, control, error);
    for (size_t i = 0, end; i < v->count && rc >= 0; i = end) {
        for (end = i + 1; end < v->count && v->checks[sorted[end]].file == v->checks[sorted[i]].file; end++)
            ;
        rc = look_at_file(run, sorted + i, end - i, error);
        if (rc > 0)
            choose(run, sorted + i, end - i);
        if (rc >= 0)
            rc = dr_ticker_ask(&ticker, error);
    }
    free(sorted);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < run->order_count; i++)
        if (v->checks[run->order[i]].length > run->small)
            run->large[run->large_count++] = run->order[i];
    return 0;
}

/* ---- 2: headers of large records ---- */

/* A thread's two views, and the file that they are over, which it holds. */
struct reader {
    struct dr_view view, ahead;
    size_t file;
    int fd; /* -1: none */
};

static void leave_file(struct verify_run *run, struct reader *reader) {
    if (reader->fd >= 0)
        dr_input_release(run->verify.input, reader->file);
    reader->fd = -1;
}

static int turn_to_file(struct verify_run *run, struct reader *reader, size_t file, struct dr_error *error) {
    struct dr_input *input = run->verify.input;
    if (reader->fd >= 0 && reader->file == file)
        return 0;
    leave_file(run, reader);
    reader->file = file;
    reader->view.filled = reader->ahead.filled = 0;
    int rc = dr_input_hold(input, file, 1, DR_INPUT_WAIT, &reader->fd, error);
    reader->view.fd = reader->ahead.fd = reader->fd;
    reader->view.path = reader->ahead.path = input->files[file].path;
    return rc;
}

static int read_headers(struct verify_run *run, struct reader *reader, struct dr_error *error) {
    struct dr_verify *v = &run->verify;
    for (size_t index; dr_workers_take(&run->verify.workers, &index);) {
        const struct dr_check *c = &v->checks[run->large[index]];
        uint64_t crc_ns = 0;
        DR_NEW_ERROR(why);
        int rc = turn_to_file(run, reader, c->file, &why);
        if (rc == 0) {
            dr_verify_record(v, run->large[index], &reader->view, &reader->ahead, &crc_ns);
        } else if (is_our_lack(&why)) {
            *error = why;
            return rc;
        } else {
            note_problem(run, run->large[index], c->offset, c->length, "its file cannot be opened", why.err);
        }
    }
    return 0;
}

static int read_some_headers(void *context, unsigned worker, struct dr_error *error) {
    struct reader reader = {.fd = -1};
    (void)worker;
    int rc = dr_view_init(&reader.view, -1, NULL, error);
    if (rc == 0)
        rc = dr_view_init(&reader.ahead, -1, NULL, error);
    if (rc == 0)
        rc = read_headers(context, &reader, error);
    leave_file(context, &reader);
    dr_view_destroy(&reader.view);
    dr_view_destroy(&reader.ahead);
    return rc;
}

/* ---- 3: blocks ---- */

static int add_block(struct verify_run *run, struct dr_block block, struct dr_error *error) {
    int rc = DR_ARRAY_RESERVE(run->blocks, run->block_count, run->block_room, 1, error);
    if (rc)
        return rc;
    run->blocks[run->block_count++] = block;
    return 0;
}

static bool is_small(const struct verify_run *run, size_t at) {
    return run->verify.checks[run->order[at]].length <= run->small;
}

/* A block of as many small records as fit in it, from order[first] on; *end is behind the last one. */
static int add_group(struct verify_run *run, size_t first, size_t *end, struct dr_error *error) {
    const struct dr_check *checks = run->verify.checks, *c = &checks[run->order[first]];
    struct dr_block block = {.file = c->file,
                             .lo = dr_align_down(c->offset, DR_ALIGNMENT),
                             .hi = c->offset + c->length,
                             .first = first,
                             .in_one = true};
    size_t i = first + 1;
    for (; i < run->order_count && is_small(run, i); i++) {
        const struct dr_check *next = &checks[run->order[i]];
        if (next->file != c->file || next->offset > block.hi + GROUP_GAP ||
            next->offset + next->length - block.lo > run->verify.options->block_size)
            break;
        block.hi = next->offset + next->length;
    }
    *end = i;
    return add_block(run, block, error);
}

static int add_groups(struct verify_run *run, struct dr_error *error) {
    int rc = 0;
    for (size_t i = 0; i < run->order_count && rc == 0;) {
        if (is_small(run, i))
            rc = add_group(run, i, &i, error);
        else
            i++;
    }
    return rc;
}

/* A part, cut at the grid of blocks. */
static int add_part(struct verify_run *run, size_t index, struct dr_error *error) {
    const struct dr_verify_part *part = &run->verify.parts[index];
    uint64_t block_size = run->verify.options->block_size, end = part->offset + part->size;
    int rc = 0;
    for (uint64_t at = dr_align_down(part->offset, DR_ALIGNMENT), next; at < end && rc == 0; at = next) {
        next = dr_align_down(at, block_size) + block_size;
        next = next < end ? next : end;
        rc = add_block(
            run, (struct dr_block){.file = run->verify.checks[part->check].file, .lo = at, .hi = next, .first = index},
            error);
    }
    return rc;
}

static int block_by_place(const void *a, const void *b) {
    const struct dr_block *x = a, *y = b;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    return x->lo != y->lo ? (x->lo < y->lo ? -1 : 1) : 0;
}

static int plan_blocks(struct verify_run *run, struct dr_error *error) {
    int rc = run->verify.no_memory ? dr_error_memory(error) : add_groups(run, error);
    for (size_t i = 0; i < run->verify.part_count && rc == 0; i++)
        rc = add_part(run, i, error);
    if (rc == 0 && run->block_count > 0)
        qsort(run->blocks, run->block_count, sizeof *run->blocks, block_by_place);
    return rc;
}

/* Stretches of a block that could not be read, in order. */
struct bad_ranges {
    size_t count;
    struct bad_range {
        uint64_t lo, hi;
        int err; /* 0: the file ends */
    } at[MOST_BAD_RANGES];
};

static const struct bad_range *bad_range_in(const struct bad_ranges *bad, uint64_t lo, uint64_t hi) {
    for (size_t i = 0; bad && i < bad->count; i++)
        if (bad->at[i].lo < hi && bad->at[i].hi > lo)
            return &bad->at[i];
    return NULL;
}

/* Notes what of [lo, hi) is in bad ranges; false when nothing is. */
static bool note_bad_ranges(struct verify_run *run, const struct bad_ranges *bad, size_t check, uint64_t lo,
                            uint64_t hi) {
    if (!bad_range_in(bad, lo, hi))
        return false;
    for (size_t i = 0; i < bad->count; i++) {
        const struct bad_range *range = &bad->at[i];
        uint64_t from = lo, to = hi;
        if (dr_clip(range->lo, range->hi, &from, &to))
            note_problem(run, check, from, to - from, range->err ? "cannot be read" : "the file ends before it",
                         range->err);
    }
    return true;
}

static void use_group(struct verify_run *run, const struct dr_block *block, const uint8_t *data,
                      const struct bad_ranges *bad, uint64_t *crc_ns) {
    struct dr_verify *v = &run->verify;
    struct dr_view view = {.fd = -1,
                           .fixed = true,
                           .path = v->input->files[block->file].path,
                           .data = (uint8_t *)(uintptr_t)data,
                           .start = block->lo,
                           .filled = block->hi - block->lo};
    for (size_t i = block->first; i < run->order_count && is_small(run, i); i++) {
        const struct dr_check *c = &v->checks[run->order[i]];
        if (c->file != block->file || c->offset + c->length > block->hi)
            break;
        if (!note_bad_ranges(run, bad, run->order[i], c->offset, c->offset + c->length))
            dr_verify_record(v, run->order[i], &view, &view, crc_ns);
    }
}

static void use_part(struct verify_run *run, const struct dr_block *piece, const uint8_t *data,
                     const struct bad_ranges *bad, uint64_t *crc_ns) {
    struct dr_verify_part *part = &run->verify.parts[piece->first];
    uint64_t lo = piece->lo, hi = piece->hi;
    dr_clip(part->offset, part->offset + part->size, &lo, &hi);
    for (uint64_t at = lo, next; at < hi; at = next) {
        next = dr_align_down(at, DR_CRC_BLOCK) + DR_CRC_BLOCK;
        next = next < hi ? next : hi;
        if (note_bad_ranges(run, bad, part->check, at, next))
            atomic_store(&part->incomplete, true);
        else
            dr_verify_blocks(&run->verify, part, data + (at - piece->lo), at, next, crc_ns);
    }
}

static void use_without(struct verify_run *run, const struct dr_block *piece, const uint8_t *data,
                        const struct bad_ranges *bad, uint64_t *crc_ns) {
    if (piece->in_one)
        use_group(run, piece, data, bad, crc_ns);
    else
        use_part(run, piece, data, bad, crc_ns);
}

static int use(void *context, const struct dr_block *piece, const uint8_t *data, uint64_t *crc_ns,
               struct dr_error *error) {
    struct verify_run *run = context;
    use_without(run, piece, data, NULL, crc_ns);
    return run->verify.no_memory ? dr_error_memory(error) : 0;
}

/* ---- blocks that cannot be read ---- */

static void add_bad_range(struct bad_ranges *bad, uint64_t lo, uint64_t hi, int err) {
    struct bad_range *last = bad->count > 0 ? &bad->at[bad->count - 1] : NULL;
    if (last && ((last->hi == lo && last->err == err) || bad->count == MOST_BAD_RANGES))
        last->hi = hi;
    else
        bad->at[bad->count++] = (struct bad_range){lo, hi, err};
}

/* Reading a block again. */
struct reread {
    struct verify_run *run;
    struct dr_workers *workers;
    int fd;
    struct bad_ranges bad;
};

/* Reads [lo, hi) again, in ever smaller parts around what cannot be read. data is where lo goes. */
static void reread(struct reread *r, uint8_t *data, uint64_t lo, uint64_t hi) {
    if (dr_workers_stopped(r->workers))
        return;
    int why = dr_read_range(r->fd, data, lo, hi);
    if (why == 0)
        return;
    bool tired = atomic_fetch_add(&r->run->failed_rereads, 1) >= MOST_FAILED_REREADS;
    if (hi - lo <= DR_ALIGNMENT || tired) {
        add_bad_range(&r->bad, lo, hi, why > 0 ? why : 0);
        return;
    }
    uint64_t step = dr_align_up((hi - lo) / REREAD_PARTS, DR_ALIGNMENT);
    for (uint64_t at = lo, next; at < hi; at = next) {
        next = at + step < hi ? at + step : hi;
        reread(r, data + (at - lo), at, next);
    }
}

/* At a read error: the block is read again, and used without what still cannot be read. */
static int use_what_can_be_read(void *context, struct dr_workers *workers, const struct dr_block *block, int fd,
                                uint8_t *buffer, const struct dr_error *why, struct dr_error *error) {
    struct verify_run *run = context;
    struct reread again = {.run = run, .workers = workers, .fd = fd};
    uint64_t crc_ns = 0;
    if (is_our_lack(why)) {
        *error = *why;
        return -why->err;
    }
    if (fd >= 0)
        reread(&again, buffer, block->lo, block->hi);
    else
        add_bad_range(&again.bad, block->lo, block->hi, why->err);
    if (dr_workers_stopped(workers))
        return 0;
    if (again.bad.count == 0)
        atomic_fetch_add(&run->repeated, 1);
    dr_watch_count(run->verify.options->watch, block->hi - block->lo);
    use_without(run, block, buffer, &again.bad, &crc_ns);
    return run->verify.no_memory ? dr_error_memory(error) : 0;
}

/* ---- 4: whole CRCs ---- */

static void check_sums(struct verify_run *run) {
    for (size_t i = 0; i < run->verify.part_count; i++) {
        const struct dr_verify_part *part = &run->verify.parts[i];
        if (!part->sums || part->incomplete)
            continue;
        uint32_t crc = dr_crc_whole(part->offset, part->size, part->sums);
        if (crc != part->whole_crc)
            dr_verify_note_crc(&run->verify, part->check, part->offset, part->size, part->whole_crc, crc);
    }
}

/* ---- all of it ---- */

static int check_all(struct verify_run *run, const struct dr_control *control, struct dr_stream_stats *stats,
                     struct dr_error *error) {
    struct dr_verify *v = &run->verify;
    int rc = plan_records(run, control, error);
    if (rc == 0)
        rc = dr_workers_share(&v->workers, run->large_count, HEADER_READERS, read_some_headers, run, control, error);
    if (rc == 0)
        rc = plan_blocks(run, error);
    const struct dr_stream stream = {v->input, run->blocks, run->block_count, v->options, use, use_what_can_be_read,
                                     run};
    if (rc == 0)
        rc = dr_stream_run(&stream, control, stats, error);
    if (rc == 0)
        check_sums(run);
    return rc == 0 && v->no_memory ? dr_error_memory(error) : rc;
}

static void free_run(struct verify_run *run) {
    for (size_t i = 0; i < run->verify.part_count; i++)
        free(run->verify.parts[i].sums);
    free(run->verify.parts);
    free(run->verify.noted);
    free(run->order);
    free(run->large);
    free(run->blocks);
    pthread_mutex_destroy(&run->verify.lock);
}

int dr_verify(struct dr_input *input, struct dr_check *checks, size_t count, bool quick,
              const struct dr_options *options, const struct dr_control *control, struct dr_findings *findings,
              struct dr_stream_stats *stats, struct dr_error *error) {
    struct verify_run run = {.verify = {.input = input,
                                        .checks = checks,
                                        .count = count,
                                        .quick = quick,
                                        .options = options,
                                        .findings = findings},
                             .small = quick ? QUICK_SMALL : options->block_size - DR_ALIGNMENT};
    *findings = (struct dr_findings){0};
    *stats = (struct dr_stream_stats){0};
    pthread_mutex_init(&run.verify.lock, NULL);
    run.verify.noted = dr_calloc(count + 1, sizeof *run.verify.noted);
    int rc = run.verify.noted ? check_all(&run, control, stats, error) : dr_error_memory(error);
    if (rc == 0)
        dr_verify_sort(&run.verify);
    else
        dr_error_at(error, input->dir);
    findings->repeated = run.repeated;
    free_run(&run);
    return rc;
}
