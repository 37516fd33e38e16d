/* Plans into groups, and the groups' holders. See merge.h; merge_check.c and merge_assign.c do the rest. */
#include "plan/merge.h"

#include "base/array.h"
#include "plan/box.h"

#include <assert.h>
#include <stdio.h>

int dr_merge_init(struct dr_merge *merge, uint32_t world, struct dr_error *error) {
    *merge = (struct dr_merge){.world = world};
    dr_table_init(&merge->groups);
    merge->rank_rows = dr_calloc((size_t)world + 1, sizeof *merge->rank_rows);
    merge->sums = dr_calloc((size_t)world + 1, sizeof *merge->sums);
    return merge->rank_rows && merge->sums ? 0 : dr_error_memory(error);
}

void dr_merge_destroy(struct dr_merge *merge) {
    dr_table_destroy(&merge->groups);
    dr_hash_destroy(&merge->by_chunk);
    free(merge->name_first);
    free(merge->row_group);
    free(merge->row_fingerprint);
    free(merge->rank_rows);
    free(merge->tied);
    free(merge->holders);
    free(merge->holder_start);
    free(merge->order);
    free(merge->pieces);
    free(merge->group_pieces);
    free(merge->order_of);
    free(merge->sums);
    *merge = (struct dr_merge){0};
}

void dr_merge_enter(struct dr_merge *merge, enum dr_merge_phase phase) {
    switch (phase) {
    case DR_MERGE_ADDING:
        assert(!"a merge never goes back to adding");
        break;
    case DR_MERGE_BROKEN:
        assert(merge->phase == DR_MERGE_ADDING);
        break;
    case DR_MERGE_CHECKED:
        assert(merge->phase != DR_MERGE_BROKEN && merge->added == merge->world);
        assert(merge->holders && merge->holder_start && merge->order);
        break;
    case DR_MERGE_ASSIGNED:
        assert(merge->phase == DR_MERGE_CHECKED);
        assert(merge->group_pieces && merge->order_of && merge->piece_count >= merge->groups.count);
        break;
    }
    merge->phase = phase;
}

/* ---- finding groups by name and offsets ---- */

static uint32_t hash_chunk(uint32_t name, const int64_t *offsets, int ndim) {
    return dr_hash_of(name, offsets, (size_t)ndim * sizeof *offsets);
}

static bool is_group(const struct dr_merge *merge, uint32_t group, uint32_t name, const int64_t *offsets, int ndim) {
    const struct dr_row *row = &merge->groups.rows[group];
    return row->name == name && row->ndim == ndim &&
           (ndim == 0 || memcmp(dr_row_offsets(&merge->groups, row), offsets, (size_t)ndim * sizeof *offsets) == 0);
}

static uint32_t find_group(const struct dr_merge *merge, uint32_t name, const int64_t *offsets, int ndim) {
    uint32_t hash = hash_chunk(name, offsets, ndim), group;
    for (size_t at = 0; (group = dr_hash_next(&merge->by_chunk, hash, &at)) != DR_NO_ENTRY;)
        if (is_group(merge, group, name, offsets, ndim))
            return group;
    return DR_NO_GROUP;
}

/* ---- one row ---- */

static void describe(const struct dr_table *table, const struct dr_row *row, char *out, size_t room) {
    if (!dr_row_is_tensor(row)) {
        snprintf(out, room, "an object");
        return;
    }
    const struct dr_properties *p = &table->properties[row->properties];
    size_t n = (size_t)snprintf(out, room, "%.*s ", (int)p->dtype_size, p->encoding);
    if (n < room)
        dr_box_write_sizes(out + n, room - n, dr_row_size(table, row), row->ndim);
}

static int disagreement(struct dr_merge *merge, uint32_t group, const struct dr_row *row, struct dr_error *error) {
    char was[96], is[96];
    const struct dr_row *first = &merge->groups.rows[group];
    const struct dr_name *name = &merge->groups.names[row->name];
    describe(&merge->groups, first, was, sizeof was);
    describe(&merge->groups, row, is, sizeof is);
    return dr_error_invalid(error, group, "'%.*s' is %s on rank %u, but %s on an earlier rank; ranks must agree on it",
                            dr_name_width(name), dr_table_text(&merge->groups, row->name), is, merge->added, was);
}

/* What all rows of a name must have in common. */
static bool agrees(const struct dr_merge *merge, const struct dr_row *a, const struct dr_row *b) {
    const struct dr_table *t = &merge->groups;
    if (dr_row_is_tensor(a) != dr_row_is_tensor(b))
        return false;
    if (!dr_row_is_tensor(a))
        return true;
    const struct dr_properties *p = &t->properties[a->properties], *q = &t->properties[b->properties];
    return a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(dr_row_size(t, a), dr_row_size(t, b), (size_t)a->ndim * sizeof *t->dims) == 0) &&
           (p == q || (p->dtype_size == q->dtype_size && p->item_bytes == q->item_bytes &&
                       memcmp(p->encoding, q->encoding, p->dtype_size) == 0));
}

static int note_first(struct dr_merge *merge, uint32_t name, uint32_t group, struct dr_error *error) {
    size_t before = merge->name_first_room;
    if (name >= before) {
        int rc = DR_ARRAY_RESERVE(merge->name_first, before, merge->name_first_room, name + 1 - before, error);
        if (rc)
            return rc;
        for (size_t i = before; i < merge->name_first_room; i++)
            merge->name_first[i] = DR_NO_GROUP;
    }
    if (merge->name_first[name] == DR_NO_GROUP)
        merge->name_first[name] = group;
    return 0;
}

static int new_group(struct dr_merge *merge, uint32_t name, const struct dr_row_view *view, uint32_t *out,
                     struct dr_error *error) {
    if (merge->groups.count >= DR_NO_GROUP - 1)
        return dr_error_invalid(error, DR_NO_ITEM, "too many chunks");
    int rc = dr_hash_reserve(&merge->by_chunk, error);
    if (!rc)
        rc = dr_table_append(&merge->groups, name, view, error);
    if (rc)
        return rc;
    *out = (uint32_t)merge->groups.count - 1;
    dr_hash_add(&merge->by_chunk, hash_chunk(name, view->dims + view->ndim, view->ndim), *out);
    if ((rc = note_first(merge, name, *out, error)))
        return rc;
    const struct dr_row *first = &merge->groups.rows[merge->name_first[name]], *row = &merge->groups.rows[*out];
    return agrees(merge, first, row) ? 0 : disagreement(merge, merge->name_first[name], row, error);
}

/* A row that may belong to a group that is there: equal but for flags that any rank may lack. */
static int join_group(struct dr_merge *merge, uint32_t group, const struct dr_row_view *view, struct dr_error *error) {
    struct dr_table *groups = &merge->groups;
    struct dr_row *row = &groups->rows[group];
    size_t bytes = 3 * (size_t)view->ndim * sizeof *view->dims;
    bool same = row->ndim == view->ndim && row->properties == view->properties &&
                (bytes == 0 || memcmp(dr_row_size(groups, row), view->dims, bytes) == 0);
    row->flags &= view->flags & 15;
    if (same && dr_row_is_tensor(row) == (view->type != DR_ROW_BYTES))
        return 0;
    /* Compare as rows of the table; what differs may be a property that does not matter. */
    int rc = dr_table_append(groups, row->name, view, error);
    if (rc)
        return rc;
    row = &groups->rows[group];
    struct dr_row *joined = &groups->rows[groups->count - 1];
    if (!agrees(merge, row, joined))
        rc = disagreement(merge, group, joined, error);
    else if (bytes && memcmp(dr_row_lengths(groups, row), dr_row_lengths(groups, joined), bytes / 3) != 0)
        rc = dr_error_invalid(error, group,
                              "'%.*s': rank %u holds a chunk at the same offset as an earlier rank's, of another size",
                              dr_name_width(&groups->names[row->name]), dr_table_text(groups, row->name), merge->added);
    groups->dims_count = joined->dims;
    groups->count--;
    return rc;
}

static int group_of(struct dr_merge *merge, const struct dr_row_view *view, uint32_t name, uint32_t guess,
                    uint32_t *out, struct dr_error *error) {
    static const int64_t none[1];
    struct dr_row_view own = *view;
    if (own.ndim == 0)
        own.dims = none;
    const int64_t *offsets = own.dims + own.ndim;
    bool guessed = guess < merge->groups.count && is_group(merge, guess, name, offsets, own.ndim);
    *out = guessed ? guess : find_group(merge, name, offsets, own.ndim);
    return *out == DR_NO_GROUP ? new_group(merge, name, &own, out, error) : join_group(merge, *out, &own, error);
}

/* ---- one rank ---- */

static int make_room(struct dr_merge *merge, size_t more, bool fingerprints, struct dr_error *error) {
    int rc = DR_ARRAY_RESERVE(merge->row_group, merge->row_count, merge->row_room, more + 1, error);
    size_t before = merge->fingerprint_room, needed = merge->row_count + more + 1;
    if (rc || (!fingerprints && !merge->row_fingerprint) || before >= needed)
        return rc;
    rc = DR_ARRAY_RESERVE(merge->row_fingerprint, before, merge->fingerprint_room, needed - before, error);
    if (!rc)
        memset(merge->row_fingerprint + before, 0, (merge->fingerprint_room - before) * sizeof *merge->row_fingerprint);
    return rc;
}

static int global_properties(struct dr_merge *merge, const struct dr_cursor *cursor, uint16_t **out,
                             struct dr_error *error) {
    *out = dr_malloc((cursor->property_count + 1) * sizeof **out);
    if (!*out)
        return dr_error_memory(error);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < cursor->property_count; i++)
        rc = dr_table_properties(&merge->groups, &cursor->properties[i], &(*out)[i], error);
    return rc;
}

struct fingerprints {
    const uint32_t *at;
    size_t left;
};

/* The row, name and group before, and the fingerprints that are left. */
struct adding {
    const struct dr_cursor *cursor;
    const uint16_t *properties;
    uint32_t name, group;
    struct fingerprints fingerprints;
};

static int take_fingerprint(struct dr_merge *merge, struct adding *adding, unsigned flags, struct dr_error *error) {
    struct fingerprints *fingerprints = &adding->fingerprints;
    if (merge->row_fingerprint)
        merge->row_fingerprint[merge->row_count] = 0;
    if (!(flags & DR_ROW_HASHED) || !fingerprints->at)
        return 0;
    if (!fingerprints->left)
        return dr_error_invalid(error, DR_NO_ITEM, "a compact plan came with too few fingerprints");
    merge->row_fingerprint[merge->row_count] = *fingerprints->at ? *fingerprints->at : 1;
    fingerprints->at++;
    fingerprints->left--;
    return 0;
}

static int add_row(struct dr_merge *merge, struct adding *adding, struct dr_error *error) {
    struct dr_row_view view = adding->cursor->row; /* the cursor's own stays: the next row may be as it */
    int rc = adding->cursor->same_name ? 0
                                       : dr_table_name(&merge->groups, view.name, view.name_size, view.path,
                                                       view.path_size, adding->name + 1, &adding->name, error);
    if (rc)
        return rc;
    bool stored = view.type != DR_ROW_NAME;
    view.properties = view.type == DR_ROW_BYTES || !stored ? 0 : adding->properties[view.properties];
    if (stored && (rc = group_of(merge, &view, adding->name, adding->group + 1, &adding->group, error)))
        return rc;
    rc = take_fingerprint(merge, adding, view.flags, error);
    if (rc == 0)
        merge->row_group[merge->row_count++] = stored ? adding->group : DR_NO_GROUP;
    return rc;
}

static int add_rows(struct dr_merge *merge, struct dr_cursor *cursor, const uint16_t *properties,
                    const struct fingerprints *fingerprints, const struct dr_control *control, struct dr_error *error) {
    struct adding adding = {cursor, properties, DR_NO_NAME, DR_NO_GROUP, *fingerprints};
    struct dr_ticker ticker = {.control = control};
    int rc = make_room(merge, cursor->rows_left, fingerprints->left > 0, error);
    while (rc == 0 && (rc = dr_cursor_next(cursor, error)) > 0) {
        rc = add_row(merge, &adding, error);
        if (rc == 0)
            rc = dr_ticker_turn(&ticker, merge->row_count, error);
    }
    if (!rc && adding.fingerprints.left)
        rc = dr_error_invalid(error, DR_NO_ITEM, "a compact plan came with too many fingerprints");
    return rc;
}

int dr_merge_add(struct dr_merge *merge, const void *plan, size_t size, const uint32_t *fingerprints,
                 size_t fingerprint_count, const struct dr_control *control, struct dr_error *error) {
    if (merge->phase == DR_MERGE_BROKEN)
        return dr_error_invalid(error, DR_NO_ITEM, "a plan before was bad");
    assert(merge->phase == DR_MERGE_ADDING && merge->added < merge->world);
    struct dr_cursor cursor;
    const struct fingerprints all = {fingerprint_count ? fingerprints : NULL, fingerprint_count};
    uint16_t *properties = NULL;
    int rc = dr_cursor_open(&cursor, plan, size, error);
    if (!rc)
        rc = global_properties(merge, &cursor, &properties, error);
    if (!rc)
        rc = add_rows(merge, &cursor, properties, &all, control, error);
    free(properties);
    dr_cursor_close(&cursor);
    if (rc)
        dr_merge_enter(merge, DR_MERGE_BROKEN);
    else
        merge->rank_rows[++merge->added] = merge->row_count;
    return rc;
}

int dr_merge_tie(struct dr_merge *merge, uint32_t rank, size_t row, size_t first, struct dr_error *error) {
    assert(merge->phase == DR_MERGE_ADDING && merge->added == merge->world);
    size_t count = rank < merge->added ? merge->rank_rows[rank + 1] - merge->rank_rows[rank] : 0;
    if (row >= count || first >= row)
        return dr_error_invalid(error, DR_NO_ITEM, "rank %u says of rows that it does not have that they are tied",
                                rank);
    if (!merge->tied) {
        merge->tied = dr_malloc((merge->groups.count + 1) * sizeof *merge->tied);
        if (!merge->tied)
            return dr_error_memory(error);
        for (size_t g = 0; g < merge->groups.count; g++)
            merge->tied[g] = DR_NO_GROUP;
    }
    uint32_t group = merge->row_group[merge->rank_rows[rank] + row];
    uint32_t other = merge->row_group[merge->rank_rows[rank] + first];
    if (group != DR_NO_GROUP && other != DR_NO_GROUP && group != other && merge->tied[other] == DR_NO_GROUP)
        merge->tied[group] = other;
    return 0;
}
