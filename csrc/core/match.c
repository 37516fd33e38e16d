/* Matching wanted with stored chunks. See match.h. */
#include "match.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void dr_match_destroy(struct dr_match *match) {
    free(match->overlaps);
    free(match->dims);
    free(match->missing);
    *match = (struct dr_match){0};
}

/* The stored rows of each name: rows[start[name] .. start[name + 1]). */
struct by_name {
    uint64_t *start;
    uint32_t *rows;
};

static int sort_by_name(struct by_name *by, const struct dr_table *table, struct dr_error *error) {
    by->start = calloc(table->name_count + 3, sizeof *by->start);
    by->rows = malloc((table->count + 1) * sizeof *by->rows);
    if (!by->start || !by->rows)
        return dr_error_memory(error);
    uint64_t *cursor = by->start + 1;
    for (size_t i = 0; i < table->count; i++)
        cursor[table->rows[i].name + 1]++;
    for (size_t n = 1; n < table->name_count; n++)
        cursor[n] += cursor[n - 1];
    for (size_t i = 0; i < table->count; i++)
        by->rows[cursor[table->rows[i].name]++] = (uint32_t)i;
    return 0;
}

/* ---- one pair ---- */

/* Writes the overlap of two chunks as three vectors; false when there is none. */
static bool overlap(const struct dr_table *w, const struct dr_row *a, const struct dr_table *s, const struct dr_row *b,
                    int64_t *out) {
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
    if (match->count == match->room) {
        size_t room = 2 * match->room + 256;
        struct dr_overlap *grown = realloc(match->overlaps, room * sizeof *grown);
        if (!grown)
            return dr_error_memory(error);
        match->overlaps = grown;
        match->room = room;
    }
    if (match->dims_room - match->dims_count < ints + 1) {
        size_t room = 2 * match->dims_room + ints + 1024;
        int64_t *grown = realloc(match->dims, room * sizeof *grown);
        if (!grown)
            return dr_error_memory(error);
        match->dims = grown;
        match->dims_room = room;
    }
    return 0;
}

static void add(struct dr_match *match, uint32_t wanted, uint32_t stored, size_t ints) {
    match->overlaps[match->count++] = (struct dr_overlap){wanted, stored, match->dims_count};
    match->dims_count += ints;
}

static double volume(const int64_t *lengths, int ndim) {
    double v = 1;
    for (int d = 0; d < ndim; d++)
        v *= (double)lengths[d];
    return v;
}

/* ---- one wanted row ---- */

struct context {
    struct dr_match *match;
    const struct dr_table *wanted, *stored;
    struct by_name by;
};

static void write_size(char *out, size_t room, const int64_t *size, int ndim) {
    size_t n = (size_t)snprintf(out, room, "[");
    for (int d = 0; d < ndim && n < room; d++)
        n += (size_t)snprintf(out + n, room - n, "%s%lld", d ? ", " : "", (long long)size[d]);
    if (n < room)
        snprintf(out + n, room - n, "]");
}

static int wrong_size(const struct context *c, uint32_t row, const struct dr_row *stored, struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    char was[96], is[96];
    write_size(was, sizeof was, dr_row_size(c->stored, stored), stored->ndim);
    write_size(is, sizeof is, dr_row_size(c->wanted, wanted), wanted->ndim);
    const struct dr_name *name = &c->wanted->names[wanted->name];
    return dr_error_invalid(error, row, "Size mismatch between saved %s and current: %s for %.*s", was, is,
                            (int)(name->size < 120 ? name->size : 120), dr_table_text(c->wanted, wanted->name));
}

static int wrong_kind(const struct context *c, uint32_t row, struct dr_error *error) {
    const struct dr_name *name = &c->wanted->names[c->wanted->rows[row].name];
    return dr_error_invalid(error, row, "'%.*s' is a tensor in the checkpoint, and an object in the state dict",
                            (int)(name->size < 120 ? name->size : 120),
                            dr_table_text(c->wanted, c->wanted->rows[row].name));
}

static int not_covered(const struct context *c, uint32_t row, double found, struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    const struct dr_name *name = &c->wanted->names[wanted->name];
    return dr_error_invalid(error, row, "the checkpoint holds only %.0f of the %.0f elements wanted of '%.*s'", found,
                            volume(dr_row_lengths(c->wanted, wanted), wanted->ndim),
                            (int)(name->size < 120 ? name->size : 120), dr_table_text(c->wanted, wanted->name));
}

static int match_tensor(const struct context *c, uint32_t row, const uint32_t *stored, size_t count,
                        struct dr_error *error) {
    const struct dr_row *wanted = &c->wanted->rows[row];
    const struct dr_row *first = &c->stored->rows[stored[0]];
    size_t ints = 3 * (size_t)wanted->ndim;
    if (first->ndim != wanted->ndim ||
        (ints && memcmp(dr_row_size(c->stored, first), dr_row_size(c->wanted, wanted), ints / 3 * sizeof(int64_t)) != 0))
        return wrong_size(c, row, first, error);
    double found = 0;
    for (size_t i = 0; i < count; i++) {
        const struct dr_row *candidate = &c->stored->rows[stored[i]];
        int rc = make_room(c->match, ints, error);
        if (rc)
            return rc;
        int64_t *dims = c->match->dims + c->match->dims_count;
        if (candidate->ndim != wanted->ndim || !dr_row_is_tensor(candidate))
            return wrong_size(c, row, candidate, error);
        if (!overlap(c->wanted, wanted, c->stored, candidate, dims))
            continue;
        found += volume(dims + 2 * wanted->ndim, wanted->ndim);
        add(c->match, row, stored[i], ints);
    }
    return found < volume(dr_row_lengths(c->wanted, wanted), wanted->ndim) ? not_covered(c, row, found, error) : 0;
}

static int match_row(const struct context *c, uint32_t row, uint32_t *guess, struct dr_error *error) {
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
             struct dr_error *error) {
    *match = (struct dr_match){.missing = calloc(wanted->count + 1, sizeof(uint32_t))};
    struct context context = {match, wanted, stored, {0}};
    int rc = match->missing ? sort_by_name(&context.by, stored, error) : dr_error_memory(error);
    uint32_t guess = 0;
    for (size_t i = 0; rc == 0 && i < wanted->count; i++)
        if (wanted->rows[i].type != DR_ROW_NAME)
            rc = match_row(&context, (uint32_t)i, &guess, error);
    free(context.by.start);
    free(context.by.rows);
    return rc;
}
