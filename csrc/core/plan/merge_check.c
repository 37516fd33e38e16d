/*
 * Whether the chunks of every tensor make it up, and who holds each. See merge.h.
 *
 * Chunks that tile a tensor exactly are recognised by their measures (box.h);
 * only where they do not are they compared, to say which are wrong.
 */
#include "plan/merge.h"

#include "base/memory.h"
#include "base/sort.h"
#include "plan/box.h"

#include <assert.h>

_Static_assert(DR_NO_GROUP == DR_SORT_NOWHERE, "rows without a group have no holders");

/* ---- holders ---- */

static int twice(const struct dr_merge *merge, uint32_t group, uint32_t rank, struct dr_error *error) {
    const struct dr_row *row = &merge->groups.rows[group];
    return dr_error_invalid(error, group, "'%.*s': rank %u plans %s twice",
                            dr_name_width(&merge->groups.names[row->name]), dr_table_text(&merge->groups, row->name),
                            rank, row->ndim ? "the same chunk" : "it");
}

/* The ranks of all rows, by group; rows are in the order of ranks. `last` is the last rank of each group, plus 1. */
static int sort_holders(struct dr_merge *merge, uint32_t *last, struct dr_error *error) {
    uint64_t *next = dr_sort_starts(merge->holder_start, merge->groups.count, merge->row_group,
                                    sizeof *merge->row_group, merge->row_count);
    for (uint32_t rank = 0; rank < merge->added; rank++)
        for (uint64_t i = merge->rank_rows[rank]; i < merge->rank_rows[rank + 1]; i++) {
            uint32_t group = merge->row_group[i];
            if (group == DR_NO_GROUP)
                continue;
            if (last[group] == rank + 1)
                return twice(merge, group, rank, error);
            last[group] = rank + 1;
            merge->holders[next[group]++] = rank;
        }
    return 0;
}

static int find_holders(struct dr_merge *merge, struct dr_error *error) {
    size_t count = merge->groups.count;
    uint32_t *last = dr_calloc(count + 1, sizeof *last);
    free(merge->holder_start);
    free(merge->holders);
    merge->holder_start = dr_calloc(count + 2, sizeof *merge->holder_start);
    merge->holders = dr_malloc((merge->row_count + 1) * sizeof *merge->holders);
    int rc = last && merge->holder_start && merge->holders ? sort_holders(merge, last, error) : dr_error_memory(error);
    free(last);
    return rc;
}

/* ---- the order of groups ---- */

static int compare_offsets(const struct dr_merge *merge, uint32_t a, uint32_t b) {
    const struct dr_table *t = &merge->groups;
    const int64_t *x = dr_row_offsets(t, &t->rows[a]), *y = dr_row_offsets(t, &t->rows[b]);
    for (int d = 0; d < t->rows[a].ndim; d++)
        if (x[d] != y[d])
            return x[d] < y[d] ? -1 : 1;
    return a < b ? -1 : 1;
}

static int compare_groups(const void *a, const void *b, void *merge) {
    return compare_offsets(merge, *(const uint32_t *)a, *(const uint32_t *)b);
}

static void sort_by_offsets(const struct dr_merge *merge, uint32_t *chunks, size_t count) {
    for (size_t i = 1; i < count; i++)
        if (compare_offsets(merge, chunks[i - 1], chunks[i]) > 0) {
            qsort_r(chunks, count, sizeof *chunks, compare_groups, (void *)merge);
            return;
        }
}

static int sort_groups(struct dr_merge *merge, struct dr_error *error) {
    size_t count = merge->groups.count, names = merge->groups.name_count;
    free(merge->order);
    merge->order = dr_malloc((count + 1) * sizeof *merge->order);
    uint64_t *start = dr_calloc(names + 2, sizeof *start);
    if (!merge->order || !start) {
        free(start);
        return dr_error_memory(error);
    }
    const struct dr_row *rows = merge->groups.rows;
    uint64_t *next = dr_sort_starts(start, names, count ? &rows->name : NULL, sizeof *rows, count);
    for (size_t g = 0; g < count; g++)
        merge->order[next[rows[g].name]++] = (uint32_t)g;
    for (size_t n = 0; n < names; n++)
        sort_by_offsets(merge, merge->order + start[n], start[n + 1] - start[n]);
    free(start);
    return 0;
}

/* ---- what is wrong ---- */

struct tensor_chunks { /* the groups of one name */
    const struct dr_merge *merge;
    const uint32_t *groups;
    size_t count;
    struct dr_ticker *ticker;
};

static void write_box(char *out, size_t room, const struct dr_table *t, const struct dr_row *row) {
    dr_box_write(out, room, dr_row_offsets(t, row), dr_row_lengths(t, row), row->ndim);
}

static bool do_overlap(const struct dr_table *t, const struct dr_row *a, const struct dr_row *b) {
    for (int d = 0; d < a->ndim; d++) {
        int64_t lo = dr_row_offsets(t, a)[d], other = dr_row_offsets(t, b)[d];
        if (lo >= other + dr_row_lengths(t, b)[d] || other >= lo + dr_row_lengths(t, a)[d])
            return false;
    }
    return true;
}

static int overlapping(const struct tensor_chunks *chunks, uint32_t a, uint32_t b, struct dr_error *error) {
    const struct dr_merge *merge = chunks->merge;
    const struct dr_table *t = &merge->groups;
    const struct dr_name *name = &t->names[t->rows[a].name];
    char first[80], second[80];
    write_box(first, sizeof first, t, &t->rows[a]);
    write_box(second, sizeof second, t, &t->rows[b]);
    return dr_error_invalid(error, a, "'%.*s': chunks overlap, %s of rank %u and %s of rank %u", dr_name_width(name),
                            dr_table_text(t, t->rows[a].name), first, *dr_merge_holders(merge, a), second,
                            *dr_merge_holders(merge, b));
}

static int compare_ints(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The dimension in which most chunks start at a place of their own: sweeping along it compares the fewest. */
static int sweep_dimension(const struct tensor_chunks *chunks, int64_t *scratch) {
    const struct dr_table *t = &chunks->merge->groups;
    int best = 0;
    size_t most = 0;
    for (int d = 0; d < t->rows[chunks->groups[0]].ndim; d++) {
        for (size_t i = 0; i < chunks->count; i++)
            scratch[i] = dr_row_offsets(t, &t->rows[chunks->groups[i]])[d];
        qsort(scratch, chunks->count, sizeof *scratch, compare_ints);
        size_t distinct = 1;
        for (size_t i = 1; i < chunks->count; i++)
            distinct += scratch[i] != scratch[i - 1];
        if (distinct > most) {
            most = distinct;
            best = d;
        }
    }
    return best;
}

struct sweep {
    const struct dr_table *table;
    int dimension;
};

static int compare_starts(const void *a, const void *b, void *context) {
    const struct sweep *s = context;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    int64_t p = dr_row_offsets(s->table, &s->table->rows[x])[s->dimension];
    int64_t q = dr_row_offsets(s->table, &s->table->rows[y])[s->dimension];
    return p != q ? (p < q ? -1 : 1) : (x > y) - (x < y);
}

static bool is_empty(const struct dr_table *t, const struct dr_row *row) {
    return dr_box_is_empty(dr_row_lengths(t, row), row->ndim);
}

static int sweep(const struct tensor_chunks *chunks, int dimension, struct dr_error *error) {
    const struct dr_table *t = &chunks->merge->groups;
    for (size_t i = 0; i < chunks->count; i++) {
        const struct dr_row *a = &t->rows[chunks->groups[i]];
        int64_t end = dr_row_offsets(t, a)[dimension] + dr_row_lengths(t, a)[dimension];
        for (size_t j = i + 1; j < chunks->count && !is_empty(t, a); j++) {
            const struct dr_row *b = &t->rows[chunks->groups[j]];
            if (dr_row_offsets(t, b)[dimension] >= end)
                break;
            if (!is_empty(t, b) && do_overlap(t, a, b))
                return overlapping(chunks, chunks->groups[i], chunks->groups[j], error);
            int rc = dr_ticker_turn(chunks->ticker, j, error);
            if (rc)
                return rc;
        }
    }
    return 0;
}

static int find_overlap(const struct tensor_chunks *chunks, struct dr_error *error) {
    const struct dr_table *t = &chunks->merge->groups;
    if (t->rows[chunks->groups[0]].ndim == 0)
        return 0;
    int64_t *scratch = dr_malloc(chunks->count * sizeof *scratch);
    uint32_t *sorted = dr_malloc(chunks->count * sizeof *sorted);
    int rc = 0;
    if (!scratch || !sorted) {
        rc = dr_error_memory(error);
    } else {
        struct sweep along = {t, sweep_dimension(chunks, scratch)};
        memcpy(sorted, chunks->groups, chunks->count * sizeof *sorted);
        qsort_r(sorted, chunks->count, sizeof *sorted, compare_starts, &along);
        rc = sweep(&(struct tensor_chunks){chunks->merge, sorted, chunks->count, chunks->ticker}, along.dimension,
                   error);
    }
    free(scratch);
    free(sorted);
    return rc;
}

static int missing(const struct tensor_chunks *chunks, struct dr_error *error) {
    const struct dr_table *t = &chunks->merge->groups;
    const struct dr_row *first = &t->rows[chunks->groups[0]];
    double held = 0;
    for (size_t i = 0; i < chunks->count; i++)
        held += dr_box_volume(dr_row_lengths(t, &t->rows[chunks->groups[i]]), first->ndim);
    const struct dr_name *name = &t->names[first->name];
    return dr_error_invalid(error, chunks->groups[0],
                            "'%.*s': its chunks hold %.0f of %.0f elements; some rank's part is missing from the plans "
                            "(is every rank that holds a part in the process group of this save?)",
                            dr_name_width(name), dr_table_text(t, first->name), held,
                            dr_box_volume(dr_row_size(t, first), first->ndim));
}

static int check_bounds(const struct tensor_chunks *chunks, uint32_t group, struct dr_error *error) {
    const struct dr_table *t = &chunks->merge->groups;
    const struct dr_row *row = &t->rows[group];
    for (int d = 0; d < row->ndim; d++)
        if (dr_row_offsets(t, row)[d] + dr_row_lengths(t, row)[d] > dr_row_size(t, row)[d]) {
            char box[120];
            write_box(box, sizeof box, t, row);
            return dr_error_invalid(error, group, "'%.*s': chunk %s of rank %u lies outside of the tensor",
                                    dr_name_width(&t->names[row->name]), dr_table_text(t, row->name), box,
                                    *dr_merge_holders(chunks->merge, group));
        }
    return 0;
}

static int check_tensor(const struct tensor_chunks *chunks, bool complete, struct dr_error *error) {
    const struct dr_table *t = &chunks->merge->groups;
    const struct dr_row *first = &t->rows[chunks->groups[0]];
    if (!dr_row_is_tensor(first))
        return 0;
    uint64_t sum = 0, whole = dr_box_measure(NULL, dr_row_size(t, first), first->ndim);
    for (size_t i = 0; i < chunks->count; i++) {
        int rc = check_bounds(chunks, chunks->groups[i], error);
        if (rc)
            return rc;
        const struct dr_row *row = &t->rows[chunks->groups[i]];
        uint64_t measure = dr_box_measure(dr_row_offsets(t, row), dr_row_lengths(t, row), row->ndim);
        sum = dr_box_add_measures(sum, measure);
    }
    if (sum == whole || (chunks->count == 1 && !complete))
        return 0;
    int rc = find_overlap(chunks, error);
    return rc || !complete ? rc : missing(chunks, error);
}

static int check_tensors(const struct dr_merge *merge, bool complete, struct dr_ticker *ticker,
                         struct dr_error *error) {
    int rc = 0;
    for (size_t i = 0, end, turn = 0; rc == 0 && i < merge->groups.count; i = end) {
        uint32_t name = merge->groups.rows[merge->order[i]].name;
        for (end = i + 1; end < merge->groups.count && merge->groups.rows[merge->order[end]].name == name; end++)
            ;
        rc = check_tensor(&(struct tensor_chunks){merge, merge->order + i, end - i, ticker}, complete, error);
        if (rc == 0)
            rc = dr_ticker_turn(ticker, turn++, error);
    }
    return rc;
}

int dr_merge_check(struct dr_merge *merge, bool complete, const struct dr_control *control, struct dr_error *error) {
    if (merge->phase == DR_MERGE_BROKEN)
        return dr_error_invalid(error, DR_NO_ITEM, "a plan was bad");
    assert(merge->phase == DR_MERGE_ADDING && merge->added == merge->world);
    struct dr_ticker ticker = {.control = control};
    int rc = find_holders(merge, error);
    if (!rc)
        rc = sort_groups(merge, error);
    if (!rc)
        rc = check_tensors(merge, complete, &ticker, error);
    if (!rc)
        dr_merge_enter(merge, DR_MERGE_CHECKED);
    return rc;
}

/* ---- fingerprints ---- */

uint32_t dr_merge_fingerprint(const struct dr_merge *merge, uint32_t group, uint32_t rank) {
    for (uint64_t i = merge->rank_rows[rank]; merge->row_fingerprint && i < merge->rank_rows[rank + 1]; i++)
        if (merge->row_group[i] == group)
            return merge->row_fingerprint[i];
    return 0;
}

int dr_merge_differing(const struct dr_merge *merge, uint8_t **out, struct dr_error *error) {
    assert(merge->phase == DR_MERGE_CHECKED || merge->phase == DR_MERGE_ASSIGNED);
    uint32_t *fingerprints = dr_calloc(merge->groups.count + 1, sizeof *fingerprints);
    *out = dr_calloc(merge->groups.count + 1, 1);
    if (!fingerprints || !*out) {
        free(fingerprints);
        free(*out);
        *out = NULL;
        return dr_error_memory(error);
    }
    for (size_t i = 0; merge->row_fingerprint && i < merge->row_count; i++) {
        uint32_t group = merge->row_group[i], own = merge->row_fingerprint[i];
        if (group == DR_NO_GROUP || !own)
            continue;
        if (!fingerprints[group])
            fingerprints[group] = own;
        (*out)[group] |= fingerprints[group] != own;
    }
    free(fingerprints);
    return 0;
}
