/* Plans into groups, and the groups' holders. See merge.h; merge_check.c and merge_assign.c do the rest. */
#include "merge.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dr_merge_init(struct dr_merge *merge, uint32_t world, struct dr_error *error) {
    *merge = (struct dr_merge){.world = world};
    dr_table_init(&merge->groups);
    merge->rank_rows = calloc((size_t)world + 1, sizeof *merge->rank_rows);
    merge->sums = calloc((size_t)world + 1, sizeof *merge->sums);
    return merge->rank_rows && merge->sums ? 0 : dr_error_memory(error);
}

void dr_merge_destroy(struct dr_merge *merge) {
    dr_table_destroy(&merge->groups);
    free(merge->group_slots);
    free(merge->name_first);
    free(merge->row_group);
    free(merge->row_print);
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

/* ---- the hash table of groups: a name and offsets ---- */

static uint64_t hash_chunk(uint32_t name, const int64_t *offsets, int ndim) {
    uint64_t hash = (name + 1) * 0x9e3779b97f4a7c15u;
    for (int d = 0; d < ndim; d++) {
        hash = (hash ^ (uint64_t)offsets[d]) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return hash ^ hash >> 29;
}

static bool is_group(const struct dr_merge *merge, uint32_t group, uint32_t name, const int64_t *offsets, int ndim) {
    const struct dr_row *row = &merge->groups.rows[group];
    return row->name == name && row->ndim == ndim &&
           (ndim == 0 || memcmp(dr_row_offsets(&merge->groups, row), offsets, (size_t)ndim * sizeof *offsets) == 0);
}

static size_t slot_of(const struct dr_merge *merge, uint32_t name, const int64_t *offsets, int ndim) {
    size_t mask = merge->slot_count - 1, slot = hash_chunk(name, offsets, ndim) & mask;
    while (merge->group_slots[slot] && !is_group(merge, merge->group_slots[slot] - 1, name, offsets, ndim))
        slot = (slot + 1) & mask;
    return slot;
}

static int grow_slots(struct dr_merge *merge, struct dr_error *error) {
    if (merge->slot_count >= 2 * (merge->groups.count + 1))
        return 0;
    size_t count = merge->slot_count ? 2 * merge->slot_count : 1024;
    uint32_t *slots = calloc(count, sizeof *slots);
    if (!slots)
        return dr_error_memory(error);
    free(merge->group_slots);
    merge->group_slots = slots;
    merge->slot_count = count;
    for (size_t i = 0; i < merge->groups.count; i++) {
        const struct dr_row *row = &merge->groups.rows[i];
        slots[slot_of(merge, row->name, dr_row_offsets(&merge->groups, row), row->ndim)] = (uint32_t)i + 1;
    }
    return 0;
}

/* ---- one row ---- */

static int name_width(uint32_t size) { return (int)(size < 120 ? size : 120); }

static void describe(const struct dr_table *table, const struct dr_row *row, char *out, size_t room) {
    size_t n = 0;
    out[0] = 0;
    if (!dr_row_is_tensor(row)) {
        snprintf(out, room, "an object");
        return;
    }
    const struct dr_properties *p = &table->properties[row->properties];
    n = (size_t)snprintf(out, room, "%.*s [", (int)p->dtype_size, p->encoding);
    for (int d = 0; d < row->ndim && n < room; d++)
        n += (size_t)snprintf(out + n, room - n, "%s%lld", d ? ", " : "", (long long)dr_row_size(table, row)[d]);
    if (n < room)
        snprintf(out + n, room - n, "]");
}

static int disagreement(struct dr_merge *merge, uint32_t group, const struct dr_row *row, struct dr_error *error) {
    char was[96], is[96];
    const struct dr_row *first = &merge->groups.rows[group];
    const struct dr_name *name = &merge->groups.names[row->name];
    describe(&merge->groups, first, was, sizeof was);
    describe(&merge->groups, row, is, sizeof is);
    return dr_error_invalid(error, group, "'%.*s' is %s on rank %u, but %s on an earlier rank; ranks must agree on it",
                            name_width(name->size), dr_table_text(&merge->groups, row->name), is, merge->added, was);
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
           (a->ndim == 0 ||
            memcmp(dr_row_size(t, a), dr_row_size(t, b), (size_t)a->ndim * sizeof *t->dims) == 0) &&
           (p == q || (p->dtype_size == q->dtype_size && p->item_bytes == q->item_bytes &&
                       memcmp(p->encoding, q->encoding, p->dtype_size) == 0));
}

static int note_first(struct dr_merge *merge, uint32_t name, uint32_t group, struct dr_error *error) {
    if (name >= merge->name_first_room) {
        size_t room = 2 * (size_t)name + 256;
        uint32_t *grown = realloc(merge->name_first, room * sizeof *grown);
        if (!grown)
            return dr_error_memory(error);
        for (size_t i = merge->name_first_room; i < room; i++)
            grown[i] = DR_NO_GROUP;
        merge->name_first = grown;
        merge->name_first_room = room;
    }
    if (merge->name_first[name] == DR_NO_GROUP)
        merge->name_first[name] = group;
    return 0;
}

static int new_group(struct dr_merge *merge, uint32_t name, const struct dr_row_view *view, uint32_t *out,
                     struct dr_error *error) {
    if (merge->groups.count >= DR_NO_GROUP - 1)
        return dr_error_invalid(error, DR_NO_ITEM, "too many chunks");
    int rc = grow_slots(merge, error);
    if (!rc)
        rc = dr_table_append(&merge->groups, name, view, error);
    if (rc)
        return rc;
    *out = (uint32_t)merge->groups.count - 1;
    merge->group_slots[slot_of(merge, name, view->dims + view->ndim, view->ndim)] = *out + 1;
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
                              name_width(groups->names[row->name].size), dr_table_text(groups, row->name),
                              merge->added);
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
    *out = DR_NO_GROUP;
    if (guess < merge->groups.count && is_group(merge, guess, name, offsets, own.ndim))
        *out = guess;
    else if (merge->slot_count)
        *out = merge->group_slots[slot_of(merge, name, offsets, own.ndim)] - 1; /* 0 - 1 is DR_NO_GROUP */
    return *out == DR_NO_GROUP ? new_group(merge, name, &own, out, error) : join_group(merge, *out, &own, error);
}

/* ---- one rank ---- */

static int make_room(struct dr_merge *merge, size_t more, bool prints, struct dr_error *error) {
    if (!merge->row_group || merge->row_room - merge->row_count < more) {
        size_t room = merge->row_room * 2 > merge->row_count + more ? merge->row_room * 2 : merge->row_count + more;
        uint32_t *grown = realloc(merge->row_group, (room + 1) * sizeof *grown);
        if (!grown)
            return dr_error_memory(error);
        merge->row_group = grown;
        merge->row_room = room;
    }
    if ((!prints && !merge->row_print) || merge->print_room >= merge->row_count + more)
        return 0;
    uint32_t *grown = realloc(merge->row_print, (merge->row_room + 1) * sizeof *grown);
    if (!grown)
        return dr_error_memory(error);
    memset(grown + merge->print_room, 0, (merge->row_room + 1 - merge->print_room) * sizeof *grown);
    merge->row_print = grown;
    merge->print_room = merge->row_room;
    return 0;
}

static int global_properties(struct dr_merge *merge, const struct dr_cursor *cursor, uint16_t **out,
                             struct dr_error *error) {
    *out = malloc((cursor->property_count + 1) * sizeof **out);
    if (!*out)
        return dr_error_memory(error);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < cursor->property_count; i++)
        rc = dr_table_properties(&merge->groups, &cursor->properties[i], &(*out)[i], error);
    return rc;
}

struct prints {
    const uint32_t *at;
    size_t left;
};

static int add_row(struct dr_merge *merge, const struct dr_row_view *row, const uint16_t *properties, uint32_t *name,
                   uint32_t *group, struct prints *prints, struct dr_error *error) {
    struct dr_row_view view = *row; /* the cursor's own stays: the next row may be as it */
    int rc = dr_table_name(&merge->groups, view.name, view.name_size, view.path, view.path_size, *name + 1, name, error);
    if (rc)
        return rc;
    bool stored = view.type != DR_ROW_NAME;
    view.properties = view.type == DR_ROW_BYTES || !stored ? 0 : properties[view.properties];
    uint32_t found = DR_NO_GROUP;
    if (stored && (rc = group_of(merge, &view, *name, *group + 1, &found, error)))
        return rc;
    if (stored)
        *group = found;
    if (merge->row_print)
        merge->row_print[merge->row_count] = 0;
    if (view.flags & DR_ROW_HASHED && prints->at) {
        if (!prints->left)
            return dr_error_invalid(error, DR_NO_ITEM, "a compact plan came with too few fingerprints");
        merge->row_print[merge->row_count] = *prints->at ? *prints->at : 1;
        prints->at++;
        prints->left--;
    }
    merge->row_group[merge->row_count++] = found;
    return 0;
}

int dr_merge_add(struct dr_merge *merge, const void *plan, size_t size, const uint32_t *prints, size_t print_count,
                 struct dr_error *error) {
    struct dr_cursor cursor = {0};
    struct prints left = {print_count ? prints : NULL, print_count};
    uint16_t *properties = NULL;
    uint32_t name = DR_NO_NAME, group = DR_NO_GROUP;
    int rc = merge->broken ? dr_error_invalid(error, DR_NO_ITEM, "a plan before was bad") : 0;
    if (!rc)
        rc = dr_cursor_open(&cursor, plan, size, error);
    if (!rc)
        rc = global_properties(merge, &cursor, &properties, error);
    if (!rc)
        rc = make_room(merge, cursor.rows_left, print_count > 0, error);
    while (rc == 0 && (rc = dr_cursor_next(&cursor, error)) > 0)
        rc = add_row(merge, &cursor.row, properties, &name, &group, &left, error);
    if (!rc && left.left)
        rc = dr_error_invalid(error, DR_NO_ITEM, "a compact plan came with too many fingerprints");
    free(properties);
    dr_cursor_close(&cursor);
    if (!rc)
        merge->rank_rows[++merge->added] = merge->row_count;
    merge->broken = rc != 0;
    return rc;
}

int dr_merge_tie(struct dr_merge *merge, uint32_t rank, size_t row, size_t first, struct dr_error *error) {
    size_t count = rank < merge->added ? merge->rank_rows[rank + 1] - merge->rank_rows[rank] : 0;
    if (row >= count || first >= row)
        return dr_error_invalid(error, DR_NO_ITEM, "rank %u says of rows that it does not have that they are tied", rank);
    if (!merge->tied) {
        merge->tied = malloc((merge->groups.count + 1) * sizeof *merge->tied);
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
