/* Matching wanted with stored chunks. See match.h. */
#include "plan/match.h"

#include "base/array.h"
#include "plan/box.h"

#include <assert.h>

void dr_match_destroy(struct dr_match *match) {
    free(match->overlaps);
    free(match->dims);
    free(match->missing);
    *match = (struct dr_match){0};
}

/* ---- one pair ---- */

/* Writes the overlap of two chunks as three vectors; false when there is none. */
static bool intersect(const struct dr_table *w, const struct dr_row *a, const struct dr_table *s,
                      const struct dr_row *b, int64_t *out) {
    const int64_t *from = dr_row_offsets(w, a), *size = dr_row_lengths(w, a);
    const int64_t *other = dr_row_offsets(s, b), *other_size = dr_row_lengths(s, b);
    int n = a->ndim;
    for (int d = 0; d < n; d++) {
        int64_t lo = from[d] > other[d] ? from[d] : other[d];
        int64_t end = from[d] + size[d], other_end = other[d] + other_size[d];
        int64_t hi = end < other_end ? end : other_end;
        if (lo >= hi)
            return false;
        out[d] = lo - from[d];
        out[n + d] = lo - other[d];
        out[2 * n + d] = hi - lo;
    }
    return true;
}

static int make_room(struct dr_match *match, size_t ints, struct dr_error *error) {
    int rc = DR_ARRAY_RESERVE(match->overlaps, match->count, match->room, 1, error);
    return rc ? rc : DR_ARRAY_RESERVE(match->dims, match->dims_count, match->dims_room, ints + 1, error);
}

static void add(struct dr_match *match, uint32_t wanted, uint32_t stored, size_t ints) {
    assert(match->count < match->room && match->dims_count + ints <= match->dims_room);
    match->overlaps[match->count++] = (struct dr_overlap){wanted, stored, match->dims_count};
    match->dims_count += ints;
}

/* ---- one wanted row ---- */

struct context {
    struct dr_match *match;
    const struct dr_table *wanted, *stored;
    struct dr_rows_by_name by;
    struct dr_ticker ticker;
};

static const char *name_of(const struct context *c, uint32_t row) {
    return dr_table_text(c->wanted, c->wanted->rows[row].name);
}

static int width_of(const struct context *c, uint32_t row) {
    return dr_name_width(&c->wanted->names[c->wanted->rows[row].name]);
}

static int wrong_size(const struct context *c, uint32_t row, const struct dr_row *stored, struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    char was[96], is[96];
    dr_box_write_sizes(was, sizeof was, dr_row_size(c->stored, stored), stored->ndim);
    dr_box_write_sizes(is, sizeof is, dr_row_size(c->wanted, wanted), wanted->ndim);
    return dr_error_invalid(error, row, "Size mismatch between saved %s and current: %s for %.*s", was, is,
                            width_of(c, row), name_of(c, row));
}

static int wrong_kind(const struct context *c, uint32_t row, struct dr_error *error) {
    return dr_error_invalid(error, row, "'%.*s' is a tensor in the checkpoint, and an object in the state dict",
                            width_of(c, row), name_of(c, row));
}

/* Where overlaps do not tile what is wanted: less of it is stored, or some of it twice. */
static int not_covered(const struct context *c, uint32_t row, size_t first, struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    int ndim = wanted->ndim;
    double found = 0, needed = dr_box_volume(dr_row_lengths(c->wanted, wanted), ndim);
    for (size_t i = first; i < c->match->count; i++)
        found += dr_box_volume(c->match->dims + c->match->overlaps[i].dims + 2 * ndim, ndim);
    if (found < needed)
        return dr_error_invalid(error, row, "the checkpoint holds only %.0f of the %.0f elements wanted of '%.*s'",
                                found, needed, width_of(c, row), name_of(c, row));
    return dr_error_invalid(error, row,
                            "the checkpoint's chunks of '%.*s' overlap, so that it is not known whether they hold all "
                            "of it; no save writes that: its metadata is damaged",
                            width_of(c, row), name_of(c, row));
}

/* ---- whether the overlaps of a wanted row, those from match->overlaps[first] on, tile it ---- */

static bool is_tiled(const struct context *c, uint32_t row, size_t first) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    const int64_t *lengths = dr_row_lengths(c->wanted, wanted);
    int ndim = wanted->ndim;
    const struct dr_match *match = c->match;
    if (match->count == first + 1 && (ndim == 0 || memcmp(match->dims + match->overlaps[first].dims + 2 * ndim, lengths,
                                                          (size_t)ndim * sizeof *lengths) == 0))
        return true;
    uint64_t sum = 0;
    for (size_t i = first; i < match->count; i++) {
        const int64_t *dims = match->dims + match->overlaps[i].dims;
        sum = dr_box_add_measures(sum, dr_box_measure(dims, dims + 2 * ndim, ndim));
    }
    return sum == dr_box_measure(NULL, lengths, ndim);
}

/* Drops overlaps that are one before them once more: chunks that are listed twice are read once, and count once. */
static int drop_repeated(const struct context *c, size_t first, int ndim, struct dr_error *error) {
    struct dr_match *match = c->match;
    struct dr_hash seen = {0};
    size_t kept = first, bytes = (size_t)ndim * sizeof *match->dims;
    int rc = 0;
    for (size_t i = first; i < match->count && rc == 0; i++) {
        const int64_t *dims = match->dims + match->overlaps[i].dims;
        uint32_t hash = dr_hash_of(dr_hash_wide(0, dims, bytes), dims + 2 * ndim, bytes), other;
        for (size_t at = 0; (other = dr_hash_next(&seen, hash, &at)) != DR_NO_ENTRY;) {
            const int64_t *same = match->dims + match->overlaps[other].dims;
            if (memcmp(same, dims, bytes) == 0 && memcmp(same + 2 * ndim, dims + 2 * ndim, bytes) == 0)
                break;
        }
        if (other != DR_NO_ENTRY)
            continue;
        rc = dr_hash_reserve(&seen, error);
        if (rc == 0)
            dr_hash_add(&seen, hash, (uint32_t)kept);
        match->overlaps[kept++] = match->overlaps[i];
    }
    match->count = kept;
    dr_hash_destroy(&seen);
    return rc;
}

static int match_tensor(struct context *c, uint32_t row, const uint32_t *stored, size_t count, struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    const struct dr_row *first = &c->stored->rows[stored[0]];
    size_t ints = 3 * (size_t)wanted->ndim;
    if (first->ndim != wanted->ndim || (ints && memcmp(dr_row_size(c->stored, first), dr_row_size(c->wanted, wanted),
                                                       ints / 3 * sizeof(int64_t)) != 0))
        return wrong_size(c, row, first, error);
    size_t before = c->match->count;
    for (size_t i = 0; i < count; i++) {
        const struct dr_row *candidate = &c->stored->rows[stored[i]];
        int rc = make_room(c->match, ints, error);
        if (rc == 0)
            rc = dr_ticker_turn(&c->ticker, i, error);
        if (rc)
            return rc;
        int64_t *dims = c->match->dims + c->match->dims_count;
        if (candidate->ndim != wanted->ndim || !dr_row_is_tensor(candidate))
            return wrong_size(c, row, candidate, error);
        if (intersect(c->wanted, wanted, c->stored, candidate, dims))
            add(c->match, row, stored[i], ints);
    }
    if (is_tiled(c, row, before))
        return 0;
    int rc = drop_repeated(c, before, wanted->ndim, error);
    return rc || is_tiled(c, row, before) ? rc : not_covered(c, row, before, error);
}

static int match_row(struct context *c, uint32_t row, uint32_t *guess, struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    const struct dr_name *text = &c->wanted->names[wanted->name];
    uint32_t name = dr_table_find(c->stored, dr_table_text(c->wanted, wanted->name), text->size, *guess);
    if (name == DR_NO_NAME || c->by.start[name] == c->by.start[name + 1]) {
        c->match->missing[c->match->missing_count++] = row;
        return 0;
    }
    *guess = name + 1;
    const uint32_t *stored = c->by.rows + c->by.start[name];
    bool stored_tensor = dr_row_is_tensor(&c->stored->rows[stored[0]]);
    if (stored_tensor && dr_row_is_tensor(wanted))
        return match_tensor(c, row, stored, c->by.start[name + 1] - c->by.start[name], error);
    if (stored_tensor)
        return wrong_kind(c, row, error);
    int rc = make_room(c->match, 0, error);
    if (!rc)
        add(c->match, row, stored[0], 0);
    return rc;
}

int dr_match(struct dr_match *match, const struct dr_table *wanted, const struct dr_table *stored,
             const struct dr_control *control, struct dr_error *error) {
    *match = (struct dr_match){.missing = dr_calloc(wanted->count + 1, sizeof(uint32_t))};
    struct context context = {match, wanted, stored, {0}, {.control = control}};
    int rc = match->missing ? dr_table_sort_by_name(&context.by, stored, error) : dr_error_memory(error);
    uint32_t guess = 0;
    for (size_t i = 0; rc == 0 && i < wanted->count; i++) {
        if (wanted->rows[i].type != DR_ROW_NAME)
            rc = match_row(&context, (uint32_t)i, &guess, error);
        if (rc == 0)
            rc = dr_ticker_turn(&context.ticker, i, error);
    }
    dr_rows_by_name_destroy(&context.by);
    return rc;
}
