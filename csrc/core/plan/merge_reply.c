/* What the coordinator sends back, and the table of the checkpoint's chunks. See merge.h. */
#include "plan/merge.h"

#include "base/memory.h"

#include <assert.h>

/* Whether what is asked for is there, of this rank. */
static inline bool is_assigned(const struct dr_merge *merge, uint32_t rank) {
    return merge->phase == DR_MERGE_ASSIGNED && rank < merge->world;
}

/* Of a row; without a group it has none. */
static struct dr_piece_range pieces_or_none(const struct dr_merge *merge, uint32_t group) {
    return group == DR_NO_GROUP ? (struct dr_piece_range){0, 0} : dr_merge_pieces(merge, group);
}

static bool is_whole(const struct dr_merge *merge, struct dr_piece_range range) {
    return range.to == range.from + 1 && merge->pieces[range.from].rows < 0;
}

/* ---- to a rank ---- */

static void put_pieces(const struct dr_merge *merge, uint32_t rank, size_t row, uint32_t group, struct dr_buffer *out) {
    struct dr_piece_range range = dr_merge_pieces(merge, group);
    for (uint64_t p = range.from; p < range.to && !is_whole(merge, range); p++) {
        const struct dr_piece *piece = &merge->pieces[p];
        if (piece->writer != rank)
            continue;
        dr_buffer_varint(out, row);
        dr_buffer_varint(out, (uint64_t)piece->start);
        dr_buffer_varint(out, (uint64_t)piece->rows);
    }
}

int dr_merge_reply(const struct dr_merge *merge, uint32_t rank, struct dr_buffer *out, struct dr_error *error) {
    assert(is_assigned(merge, rank));
    *out = (struct dr_buffer){0};
    const uint32_t *groups = merge->row_group + merge->rank_rows[rank];
    size_t count = merge->rank_rows[rank + 1] - merge->rank_rows[rank];
    dr_buffer_varint(out, count);
    for (size_t i = 0; i < count; i += 8) {
        uint8_t bits = 0;
        for (size_t b = 0; b < 8 && i + b < count; b++) {
            struct dr_piece_range range = pieces_or_none(merge, groups[i + b]);
            bool kept = is_whole(merge, range) && range.to > range.from && merge->pieces[range.from].writer == rank;
            bits |= (uint8_t)(kept << b);
        }
        dr_buffer_byte(out, bits);
    }
    for (size_t i = 0; i < count; i++)
        if (groups[i] != DR_NO_GROUP)
            put_pieces(merge, rank, i, groups[i], out);
    return out->failed ? dr_error_memory(error) : 0;
}

static int bad_reply(struct dr_error *error) {
    return dr_error_invalid(error, DR_NO_ITEM, "the coordinator's reply does not fit this rank's plan");
}

/* The next piece: false at the end. */
static bool next_piece(struct dr_bytes *bytes, size_t row_count, uint64_t piece[3]) {
    if (bytes->at == bytes->end)
        return false;
    piece[0] = dr_bytes_limited(bytes, row_count ? row_count - 1 : 0);
    piece[1] = dr_bytes_limited(bytes, INT64_MAX);
    piece[2] = dr_bytes_limited(bytes, INT64_MAX);
    return !bytes->bad;
}

int dr_reply_read(const void *data, size_t size, size_t row_count, dr_reply_row *kept, void *context,
                  struct dr_error *error) {
    struct dr_bytes bytes = {data, (const uint8_t *)data + size, false};
    if (dr_bytes_varint(&bytes) != row_count || bytes.bad)
        return bad_reply(error);
    const uint8_t *bits = dr_bytes_take(&bytes, row_count / 8 + (row_count % 8 != 0));
    if (!bits)
        return bad_reply(error);
    uint64_t piece[3];
    bool more = next_piece(&bytes, row_count, piece);
    int rc = 0;
    for (size_t row = 0; rc == 0 && row < row_count; row++) {
        if (bits[row / 8] >> row % 8 & 1)
            rc = kept(context, row, 0, -1);
        while (rc == 0 && more && piece[0] == row) {
            rc = kept(context, row, (int64_t)piece[1], (int64_t)piece[2]);
            more = next_piece(&bytes, row_count, piece);
        }
    }
    return rc ? rc : more || bytes.bad ? bad_reply(error) : 0;
}

int dr_merge_items(const struct dr_merge *merge, uint32_t rank, uint32_t **out, size_t *count, struct dr_error *error) {
    assert(is_assigned(merge, rank));
    *count = 0;
    *out = dr_malloc((merge->sums[rank].items + 1) * sizeof **out);
    if (!*out)
        return dr_error_memory(error);
    for (uint64_t i = merge->rank_rows[rank]; i < merge->rank_rows[rank + 1]; i++) {
        uint32_t group = merge->row_group[i];
        struct dr_piece_range range = pieces_or_none(merge, group);
        for (uint64_t p = range.from; p < range.to; p++)
            if (merge->pieces[p].writer == rank)
                (*out)[(*count)++] = (uint32_t)p;
    }
    assert(*count == merge->sums[rank].items);
    return 0;
}

/* ---- what is shared ---- */

uint64_t *dr_merge_shared_bytes(const struct dr_merge *merge) {
    assert(merge->phase == DR_MERGE_CHECKED || merge->phase == DR_MERGE_ASSIGNED);
    uint64_t *before = dr_calloc(merge->groups.count + 1, sizeof *before), sum = 0;
    for (size_t g = 0; before && g < merge->groups.count; g++) {
        before[g] = sum;
        if (dr_merge_holder_count(merge, (uint32_t)g) > 1)
            sum += dr_row_bytes(&merge->groups, &merge->groups.rows[g]);
    }
    return before;
}

int dr_merge_shared(const struct dr_merge *merge, uint32_t rank, const uint64_t *before, dr_shared *shared,
                    void *context) {
    assert(is_assigned(merge, rank));
    int rc = 0;
    for (uint64_t i = merge->rank_rows[rank]; rc == 0 && i < merge->rank_rows[rank + 1]; i++) {
        uint32_t group = merge->row_group[i];
        if (group == DR_NO_GROUP)
            continue;
        struct dr_piece_range range = dr_merge_pieces(merge, group);
        struct dr_shared_row row = {
            .row = i - merge->rank_rows[rank],
            .group = group,
            .writer = merge->pieces[range.from].writer,
            .holders = dr_merge_holders(merge, group),
            .holder_count = dr_merge_holder_count(merge, group),
            .before = before[group],
            .bytes = dr_row_bytes(&merge->groups, &merge->groups.rows[group]),
        };
        if (row.holder_count > 1 && is_whole(merge, range))
            rc = shared(context, &row);
    }
    return rc;
}

/* ---- all chunks ---- */

static int copy_names(const struct dr_table *from, struct dr_table *out, struct dr_error *error) {
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < from->property_count; i++) {
        uint16_t unused;
        rc = dr_table_properties(out, &from->properties[i], &unused, error);
    }
    for (uint32_t i = 0; rc == 0 && i < from->name_count; i++) {
        const struct dr_name *name = &from->names[i];
        const char *text = dr_table_text(from, i);
        uint32_t index;
        rc = dr_table_name(out, text, name->size, text + name->size, name->path_size, i, &index, error);
    }
    return rc;
}

static int append_piece(const struct dr_merge *merge, const struct dr_piece *piece, struct dr_table *out,
                        struct dr_error *error) {
    const struct dr_row *row = &merge->groups.rows[piece->group];
    int64_t dims[3 * DR_TABLE_MAX_DIMS];
    if (row->ndim)
        memcpy(dims, dr_row_size(&merge->groups, row), 3 * (size_t)row->ndim * sizeof *dims);
    if (piece->rows >= 0) {
        dims[row->ndim] += piece->start;
        dims[2 * row->ndim] = piece->rows;
    }
    struct dr_row_view view = {.type = row->type, .properties = row->properties, .ndim = row->ndim, .dims = dims};
    if (piece->rows >= 0)
        view.type = DR_ROW_SHARD;
    return dr_table_append(out, row->name, &view, error);
}

int dr_merge_table(const struct dr_merge *merge, struct dr_table *out, struct dr_error *error) {
    assert(merge->phase == DR_MERGE_ASSIGNED);
    int rc = copy_names(&merge->groups, out, error);
    for (size_t p = 0; rc == 0 && p < merge->piece_count; p++)
        rc = append_piece(merge, &merge->pieces[p], out, error);
    return rc;
}
