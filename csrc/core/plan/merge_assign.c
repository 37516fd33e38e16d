/*
 * Who writes what: the strategies, all in terms of dr_assign. See merge.h.
 *
 * A strategy is a set of ranks that may write, and whether large groups are cut
 * into pieces first. The rest is the same for all.
 */
#include "plan/merge.h"

#include "base/array.h"

#include <assert.h>

/* What an object counts as: its size is not known before it is pickled. */
enum { OBJECT_BYTES = 512 };

/* No piece is larger than a rank's fair part divided by this, so that pieces can be shared out evenly. */
enum { PIECES_PER_RANK = 16 };

static uint64_t weight(const struct dr_merge *merge, uint32_t group) {
    const struct dr_row *row = &merge->groups.rows[group];
    return dr_row_is_tensor(row) ? dr_row_bytes(&merge->groups, row) : OBJECT_BYTES;
}

/* ---- which ranks may write ---- */

static void allow_first(const struct dr_merge *merge, uint8_t *allowed) {
    for (uint32_t g = 0; g < merge->groups.count; g++)
        allowed[dr_merge_holders(merge, g)[0]] = 1;
}

struct cover {
    const struct dr_merge *merge;
    const uint32_t *hosts; /* NULL: any ranks */
    uint8_t *allowed, *excluded, *covered;
    uint64_t *gain; /* bytes that a rank would add */
    uint32_t chosen, limit;
};

static void choose(struct cover *cover, uint32_t rank) {
    const struct dr_merge *merge = cover->merge;
    cover->allowed[rank] = 1;
    cover->chosen++;
    for (uint32_t other = 0; other < merge->world; other++)
        cover->excluded[other] |= other == rank || (cover->hosts && cover->hosts[other] == cover->hosts[rank]);
    for (uint64_t i = merge->rank_rows[rank]; i < merge->rank_rows[rank + 1]; i++) {
        uint32_t group = merge->row_group[i];
        if (group == DR_NO_GROUP || cover->covered[group])
            continue;
        cover->covered[group] = 1;
        for (size_t h = 0; h < dr_merge_holder_count(merge, group); h++)
            cover->gain[dr_merge_holders(merge, group)[h]] -= weight(merge, group) + 1;
    }
}

static uint32_t best_gain(const struct cover *cover) {
    uint32_t best = UINT32_MAX;
    for (uint32_t rank = 0; rank < cover->merge->world; rank++)
        if (!cover->excluded[rank] && cover->gain[rank] &&
            (best == UINT32_MAX || cover->gain[rank] > cover->gain[best]))
            best = rank;
    return best;
}

static int uncovered(const struct cover *cover, uint32_t group, struct dr_error *error) {
    const struct dr_merge *merge = cover->merge;
    const struct dr_row *row = &merge->groups.rows[group];
    const struct dr_name *name = &merge->groups.names[row->name];
    int width = (int)(name->size < 100 ? name->size : 100);
    int64_t offset = row->ndim ? dr_row_offsets(&merge->groups, row)[0] : 0;
    return dr_error_invalid(
        error, group,
        "'%.*s' (the shard at row %lld) is held by none of the %u ranks that %s allows to write; its "
        "lowest holder is rank %u. Use writers=\"first_replica\"",
        width, dr_table_text(&merge->groups, row->name), (long long)offset, cover->chosen,
        cover->hosts ? "writers=\"per_node\"" : "the limit on writers", dr_merge_holders(merge, group)[0]);
}

/* Greedily: the rank that adds the most bytes, until all is covered; then more ranks while there may be. */
static int cover_all(struct cover *cover, struct dr_error *error) {
    const struct dr_merge *merge = cover->merge;
    for (uint32_t g = 0; g < merge->groups.count; g++)
        for (size_t h = 0; h < dr_merge_holder_count(merge, g); h++)
            cover->gain[dr_merge_holders(merge, g)[h]] += weight(merge, g) + 1;
    uint32_t rank;
    while (cover->chosen < cover->limit && (rank = best_gain(cover)) != UINT32_MAX)
        choose(cover, rank);
    for (uint32_t g = 0; g < merge->groups.count; g++)
        if (!cover->covered[g])
            return uncovered(cover, g, error);
    for (rank = 0; rank < merge->world && cover->chosen < cover->limit; rank++)
        if (!cover->excluded[rank] && merge->rank_rows[rank + 1] > merge->rank_rows[rank])
            choose(cover, rank);
    return 0;
}

static int allow_cover(const struct dr_merge *merge, const struct dr_assignment *assignment, uint8_t *allowed,
                       struct dr_error *error) {
    struct cover cover = {
        .merge = merge,
        .hosts = assignment->strategy == DR_PER_HOST ? assignment->hosts : NULL,
        .allowed = allowed,
        .excluded = dr_calloc(merge->world + 1, 1),
        .covered = dr_calloc(merge->groups.count + 1, 1),
        .gain = dr_calloc((size_t)merge->world + 1, sizeof(uint64_t)),
        .limit = assignment->strategy == DR_PER_HOST ? merge->world : assignment->limit,
    };
    int rc = cover.excluded && cover.covered && cover.gain ? cover_all(&cover, error) : dr_error_memory(error);
    free(cover.excluded);
    free(cover.covered);
    free(cover.gain);
    return rc;
}

static int allow(const struct dr_merge *merge, const struct dr_assignment *assignment, uint8_t *allowed,
                 struct dr_error *error) {
    switch (assignment->strategy) {
    case DR_FIRST_REPLICA:
        allow_first(merge, allowed);
        return 0;
    case DR_LIMITED:
    case DR_PER_HOST:
        return allow_cover(merge, assignment, allowed, error);
    default:
        memset(allowed, 1, merge->world);
        return 0;
    }
}

/* ---- pieces ---- */

static int add_piece(struct dr_merge *merge, const struct dr_piece *piece, struct dr_error *error) {
    int rc = DR_ARRAY_RESERVE(merge->pieces, merge->piece_count, merge->piece_room, 1, error);
    if (rc)
        return rc;
    merge->pieces[merge->piece_count++] = *piece;
    return 0;
}

/* Rows of a group in one piece; -1: the group stays whole. */
static int64_t rows_per_piece(const struct dr_merge *merge, uint32_t group, uint64_t most_bytes) {
    const struct dr_row *row = &merge->groups.rows[group];
    uint64_t bytes = weight(merge, group);
    if (!dr_row_is_tensor(row) || !(row->flags & DR_ROW_DIVISIBLE) || row->ndim == 0 ||
        dr_merge_holder_count(merge, group) < 2 || bytes <= most_bytes)
        return -1;
    int64_t rows = dr_row_lengths(&merge->groups, row)[0];
    uint64_t count = (bytes + most_bytes - 1) / most_bytes;
    int64_t each = (rows + (int64_t)count - 1) / (int64_t)count;
    return each > 0 && each < rows ? each : -1;
}

static int cut(struct dr_merge *merge, uint32_t group, uint64_t most_bytes, struct dr_error *error) {
    struct dr_piece piece = {.group = group, .rows = rows_per_piece(merge, group, most_bytes)};
    if (piece.rows < 0)
        return add_piece(merge, &piece, error);
    const struct dr_row *row = &merge->groups.rows[group];
    int64_t each = piece.rows, total = dr_row_lengths(&merge->groups, row)[0];
    int rc = 0;
    for (piece.start = 0; rc == 0 && piece.start < total; piece.start += each) {
        piece.rows = each < total - piece.start ? each : total - piece.start;
        rc = add_piece(merge, &piece, error);
    }
    return rc;
}

static int make_pieces(struct dr_merge *merge, const struct dr_assignment *assignment, struct dr_error *error) {
    size_t count = merge->groups.count;
    uint64_t total = 0, most = UINT64_MAX;
    if (assignment->strategy == DR_SPLIT && merge->world) {
        for (uint32_t g = 0; g < count; g++)
            total = __builtin_add_overflow(total, weight(merge, g), &total) ? UINT64_MAX : total;
        most = total / ((uint64_t)merge->world * PIECES_PER_RANK) + 1;
        most = most > assignment->piece_bytes ? most : assignment->piece_bytes;
    }
    free(merge->group_pieces);
    free(merge->order_of);
    merge->group_pieces = dr_calloc(count + 2, sizeof *merge->group_pieces);
    merge->order_of = dr_calloc(count + 1, sizeof *merge->order_of);
    if (!merge->group_pieces || !merge->order_of)
        return dr_error_memory(error);
    merge->piece_count = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t group = merge->order[i];
        merge->order_of[group] = (uint32_t)i;
        merge->group_pieces[i] = merge->piece_count;
        int rc = cut(merge, group, most, error);
        if (rc)
            return rc;
    }
    merge->group_pieces[count] = merge->piece_count;
    return 0;
}

static uint64_t piece_weight(const struct dr_merge *merge, const struct dr_piece *piece) {
    uint64_t bytes = weight(merge, piece->group);
    if (piece->rows < 0)
        return bytes;
    uint64_t rows = (uint64_t)dr_row_lengths(&merge->groups, &merge->groups.rows[piece->group])[0];
    return bytes / rows * (uint64_t)piece->rows;
}

/* ---- the result ---- */

static void sum_up(struct dr_merge *merge) {
    memset(merge->sums, 0, merge->world * sizeof *merge->sums);
    for (uint32_t rank = 0; rank < merge->added; rank++)
        for (uint64_t i = merge->rank_rows[rank]; i < merge->rank_rows[rank + 1]; i++)
            if (merge->row_group[i] != DR_NO_GROUP) {
                const struct dr_row *row = &merge->groups.rows[merge->row_group[i]];
                merge->sums[rank].removed++;
                merge->sums[rank].removed_bytes += dr_row_bytes(&merge->groups, row);
            }
    for (size_t p = 0; p < merge->piece_count; p++) {
        const struct dr_piece *piece = &merge->pieces[p];
        assert(piece->group < merge->groups.count && piece->writer < merge->world);
        bool tensor = dr_row_is_tensor(&merge->groups.rows[piece->group]);
        uint64_t bytes = tensor ? piece_weight(merge, piece) : 0;
        merge->sums[piece->writer].items++;
        merge->sums[piece->writer].bytes += bytes;
        merge->sums[piece->writer].removed_bytes -= bytes;
        merge->sums[piece->writer].removed--; /* a writer has at most one piece of a group: see join() */
    }
}

/* ---- groups that are the same memory ---- */

static bool have_same_holders(const struct dr_merge *merge, uint32_t a, uint32_t b) {
    size_t count = dr_merge_holder_count(merge, a);
    return count == dr_merge_holder_count(merge, b) &&
           memcmp(dr_merge_holders(merge, a), dr_merge_holders(merge, b), count * sizeof(uint32_t)) == 0;
}

static bool are_cut_alike(const struct dr_merge *merge, uint32_t a, uint32_t b) {
    struct dr_piece_range x = dr_merge_pieces(merge, a), y = dr_merge_pieces(merge, b);
    return x.to - x.from == y.to - y.from;
}

/*
 * The group that decides who writes this one, so that one rank writes both and stores their bytes once. DR_NO_GROUP
 * where a group decides for itself: it is not tied, or other ranks hold the other one, or that has other pieces.
 */
static uint32_t leader_of(const struct dr_merge *merge, uint32_t group) {
    uint32_t leader = merge->tied ? merge->tied[group] : DR_NO_GROUP;
    if (leader == DR_NO_GROUP)
        return DR_NO_GROUP;
    assert(leader < merge->groups.count && leader != group);
    if (merge->tied[leader] != DR_NO_GROUP) /* it follows another one itself */
        return DR_NO_GROUP;
    return have_same_holders(merge, group, leader) && are_cut_alike(merge, group, leader) ? leader : DR_NO_GROUP;
}

/* Piece by piece, the writers of those that lead become those of their followers. */
static void follow_leaders(struct dr_merge *merge) {
    for (uint32_t group = 0; merge->tied && group < merge->groups.count; group++) {
        uint32_t leader = leader_of(merge, group);
        if (leader == DR_NO_GROUP)
            continue;
        struct dr_piece_range own = dr_merge_pieces(merge, group), others = dr_merge_pieces(merge, leader);
        for (uint64_t p = own.from; p < own.to; p++)
            merge->pieces[p].writer = merge->pieces[others.from + (p - own.from)].writer;
    }
}

/* ---- who writes each piece ---- */

static int share_out(struct dr_merge *merge, const uint8_t *allowed, const struct dr_control *control,
                     struct dr_error *error) {
    struct dr_share *shares = dr_calloc(merge->piece_count + 1, sizeof *shares);
    uint64_t *load = dr_calloc((size_t)merge->world + 1, sizeof *load);
    int rc = shares && load ? 0 : dr_error_memory(error);
    for (size_t p = 0; rc == 0 && p < merge->piece_count; p++) {
        uint32_t group = merge->pieces[p].group;
        shares[p] = (struct dr_share){
            .bytes = leader_of(merge, group) == DR_NO_GROUP ? piece_weight(merge, &merge->pieces[p]) : 0,
            .holders = dr_merge_holders(merge, group),
            .holder_count = dr_merge_holder_count(merge, group),
        };
    }
    if (!rc)
        rc = dr_assign(shares, merge->piece_count, allowed, load, merge->world, control, error);
    for (size_t p = 0; rc == 0 && p < merge->piece_count; p++)
        merge->pieces[p].writer = shares[p].owner;
    if (!rc)
        follow_leaders(merge);
    free(shares);
    free(load);
    return rc;
}

/* ---- joining what one rank writes of a group ---- */

/* By writer, but those of `last` behind all others. */
static int compare_writers(const void *a, const void *b, void *last) {
    uint32_t x = ((const struct dr_piece *)a)->writer, y = ((const struct dr_piece *)b)->writer;
    bool x_is_last = x == *(const uint32_t *)last, y_is_last = y == *(const uint32_t *)last;
    return x_is_last != y_is_last ? x_is_last - y_is_last : (x > y) - (x < y);
}

/* Whether a piece is all of its group's rows. */
static bool is_all(const struct dr_merge *merge, const struct dr_piece *piece) {
    const struct dr_row *row = &merge->groups.rows[piece->group];
    return row->ndim > 0 && piece->rows == dr_row_lengths(&merge->groups, row)[0];
}

/*
 * A group's pieces, of which each writer's become one. All are of one size but the last, which may be smaller: so who
 * writes which of them does not change the loads, and they are dealt out anew, with neighbours for each writer. The
 * last piece stays with its writer, and his others are put before it. Example, of pieces a to e: writers 2 1 2 0 1
 * become 0 2 2 1 1, and so three pieces, a, bc and de.
 *
 * What it makes is put at `out`, which may be where the pieces are, or before; returns how many.
 */
static size_t join(struct dr_merge *merge, struct dr_piece *pieces, size_t count, struct dr_piece *out) {
    assert(count > 1 && out <= pieces);
    uint32_t last = pieces[count - 1].writer;
    qsort_r(pieces, count - 1, sizeof *pieces, compare_writers, &last);
    size_t joined = 0;
    int64_t start = 0;
    for (size_t i = 0; i < count; i++) {
        struct dr_piece piece = pieces[i];
        piece.start = start;
        start += piece.rows;
        if (joined && out[joined - 1].writer == piece.writer)
            out[joined - 1].rows += piece.rows;
        else
            out[joined++] = piece;
    }
    if (joined == 1 && is_all(merge, &out[0]))
        out[0].rows = -1;
    return joined;
}

static void join_pieces(struct dr_merge *merge) {
    size_t kept = 0;
    uint64_t next = 0;
    for (size_t i = 0; i < merge->groups.count; i++) {
        uint64_t from = next;
        next = merge->group_pieces[i + 1];
        merge->group_pieces[i] = kept;
        if (next == from + 1)
            merge->pieces[kept++] = merge->pieces[from];
        else
            kept += join(merge, merge->pieces + from, next - from, merge->pieces + kept);
    }
    merge->group_pieces[merge->groups.count] = kept;
    merge->piece_count = kept;
}

int dr_merge_assign(struct dr_merge *merge, const struct dr_assignment *assignment, const struct dr_control *control,
                    struct dr_error *error) {
    assert(merge->phase == DR_MERGE_CHECKED || merge->phase == DR_MERGE_ASSIGNED);
    dr_merge_enter(merge, DR_MERGE_CHECKED);
    uint8_t *allowed = dr_calloc((size_t)merge->world + 1, 1);
    int rc = allowed ? allow(merge, assignment, allowed, error) : dr_error_memory(error);
    if (!rc)
        rc = make_pieces(merge, assignment, error);
    if (!rc)
        rc = share_out(merge, allowed, control, error);
    if (!rc) {
        join_pieces(merge);
        sum_up(merge);
        dr_merge_enter(merge, DR_MERGE_ASSIGNED);
    }
    free(allowed);
    return rc;
}
