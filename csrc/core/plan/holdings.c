/* Stripes of files, each with its holders and its writer. See holdings.h. */
#include "plan/holdings.h"

#include "base/align.h"
#include "base/array.h"
#include "base/crc.h"
#include "plan/box.h"

#include <assert.h>

int dr_holdings_init(struct dr_holdings *holdings, uint32_t world, struct dr_error *error) {
    assert(world > 0);
    *holdings = (struct dr_holdings){.world = world, .block = UINT64_MAX};
    dr_table_init(&holdings->table);
    holdings->load = dr_calloc(world, sizeof *holdings->load);
    return holdings->load ? 0 : dr_error_memory(error);
}

void dr_holdings_destroy(struct dr_holdings *holdings) {
    dr_table_destroy(&holdings->table);
    dr_rows_by_name_destroy(&holdings->by);
    dr_hash_destroy(&holdings->by_holders);
    free(holdings->ranks);
    free(holdings->load);
    free(holdings->holders);
    free(holdings->set_start);
    *holdings = (struct dr_holdings){0};
}

void dr_shares_destroy(struct dr_shares *shares) {
    free(shares->own);
    free(shares->shared);
    free(shares->writes);
    *shares = (struct dr_shares){0};
}

int dr_holdings_add(struct dr_holdings *holdings, uint32_t rank, const struct dr_table *from, size_t index,
                    int64_t start, int64_t count, struct dr_error *error) {
    assert(rank < holdings->world && index < from->count && !holdings->by.start);
    struct dr_table *table = &holdings->table;
    const struct dr_row *row = &from->rows[index];
    const struct dr_name *name = &from->names[row->name];
    const int n = row->ndim;
    int64_t dims[3 * DR_TABLE_MAX_DIMS], end;
    memcpy(dims, from->dims + row->dims, 3 * (size_t)n * sizeof *dims);
    if (count >= 0) {
        if (!dr_row_is_tensor(row) || n == 0 || start < 0 || __builtin_add_overflow(start, count, &end) ||
            end > dims[2 * n])
            return dr_error_invalid(error, DR_NO_ITEM, "rank %u is to write what it does not have", rank);
        dims[n] += start;
        dims[2 * n] = count;
    }
    struct dr_row_view view = {.type = (enum dr_row_type)row->type, .ndim = n, .dims = dims};
    uint32_t own;
    int rc = DR_ARRAY_RESERVE(holdings->ranks, table->count, holdings->rank_room, 1, error);
    if (rc == 0 && dr_row_is_tensor(row))
        rc = dr_table_properties(table, &from->properties[row->properties], &view.properties, error);
    if (rc == 0)
        rc = dr_table_name(table, dr_table_text(from, row->name), name->size, "", 0, row->name, &own, error);
    if (rc == 0)
        rc = dr_table_append(table, own, &view, error);
    if (rc == 0)
        holdings->ranks[table->count - 1] = rank;
    return rc;
}

/* ---- the segments of a tensor ---- */

/* Bytes of a file, and a rank that holds all or some of them. */
struct segment {
    uint64_t lo, hi;
    uint32_t rank;
};

struct sharing {
    struct dr_holdings *holdings;
    const struct dr_striped_file *file;
    struct dr_shares *out;
    struct segment *segments; /* of one tensor */
    size_t segment_count, segment_room;
    double *held;      /* bytes of the stripe at hand, by rank */
    uint32_t *touched; /* who holds some of it */
    uint32_t touched_count;
    uint64_t stripe; /* its number */
    size_t *last;    /* each rank's last range, plus 1 */
    uint64_t used, rounds;
    uint64_t end; /* of the file */
};

/* The elements of a box as a range in row-major order; false if there are others between them. */
static bool range_of(const int64_t *size, const int64_t *offsets, const int64_t *lengths, int ndim, uint64_t *first,
                     uint64_t *count) {
    uint64_t inner = 1;
    bool full = true;
    *first = 0;
    *count = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        if (!full && lengths[d] != 1)
            return false;
        full = full && lengths[d] == size[d];
        *first += (uint64_t)offsets[d] * inner;
        *count *= (uint64_t)lengths[d];
        inner *= (uint64_t)size[d];
    }
    return true;
}

static int compare_segments(const void *a, const void *b) {
    const struct segment *x = a, *y = b;
    if (x->lo != y->lo)
        return x->lo < y->lo ? -1 : 1;
    if (x->hi != y->hi)
        return x->hi < y->hi ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static uint64_t whole_measure(const struct dr_table *table, const struct dr_row *row) {
    return dr_box_measure(NULL, dr_row_size(table, row), row->ndim);
}

/* Whether a row is a box of the tensor that `first` is of, and this has as many bytes as there is place for. */
static bool fits(const struct dr_table *table, const struct dr_row *row, const struct dr_row *first,
                 const struct dr_laid *laid) {
    const int n = row->ndim;
    const int64_t *size = dr_row_size(table, row), *offsets = dr_row_offsets(table, row);
    const int64_t *lengths = dr_row_lengths(table, row);
    if (!dr_row_is_tensor(row) || n != first->ndim ||
        (n > 0 && memcmp(size, dr_row_size(table, first), (size_t)n * sizeof *size) != 0))
        return false;
    uint64_t bytes = laid->item_bytes;
    for (int d = 0; d < n; d++)
        if (lengths[d] > size[d] || offsets[d] > size[d] - lengths[d] ||
            __builtin_mul_overflow(bytes, (uint64_t)size[d], &bytes))
            return false;
    return bytes == laid->size;
}

static int misfit(const struct dr_table *table, uint32_t name, const char *what, struct dr_error *error) {
    return dr_error_invalid(error, DR_NO_ITEM, "what ranks hold of '%.*s' %s", dr_name_width(&table->names[name]),
                            dr_table_text(table, name), what);
}

/*
 * The segments of one tensor: one for each box that is a range of bytes, or, where one is not, as many as there are
 * ranks that hold some of it, each of them of the whole tensor. `alone` says which.
 */
static int find_segments(struct sharing *s, const struct dr_laid *laid, bool *alone, struct dr_error *error) {
    const struct dr_table *table = &s->holdings->table;
    const struct dr_rows_by_name *by = &s->holdings->by;
    const size_t begin = by->start[laid->name], end = by->start[laid->name + 1];
    uint64_t measure = 0;
    s->segment_count = 0;
    *alone = true;
    int rc = DR_ARRAY_RESERVE(s->segments, 0, s->segment_room, end - begin + 1, error);
    for (size_t i = begin; i < end && rc == 0; i++) {
        const struct dr_row *row = &table->rows[by->rows[i]], *first = &table->rows[by->rows[begin]];
        const int64_t *size = dr_row_size(table, row), *lengths = dr_row_lengths(table, row);
        uint64_t from, bytes;
        if (!fits(table, row, first, laid))
            return misfit(table, laid->name, "is of another shape, or lies outside of it", error);
        if (dr_box_is_empty(lengths, row->ndim))
            continue;
        *alone = range_of(size, dr_row_offsets(table, row), lengths, row->ndim, &from, &bytes) && *alone;
        from = laid->begin + from * laid->item_bytes;
        bytes *= laid->item_bytes;
        measure = dr_box_add_measures(measure, dr_box_measure(dr_row_offsets(table, row), lengths, row->ndim));
        s->segments[s->segment_count++] = (struct segment){from, from + bytes, s->holdings->ranks[by->rows[i]]};
    }
    if (rc == 0 && (begin == end || measure != whole_measure(table, &table->rows[by->rows[begin]])))
        return misfit(table, laid->name, "does not make it up", error);
    if (*alone)
        qsort(s->segments, s->segment_count, sizeof *s->segments, compare_segments);
    return rc;
}

/* ---- stripes ---- */

static int set_of(struct dr_holdings *h, const uint32_t *ranks, uint32_t count, uint32_t *out, struct dr_error *error) {
    const uint32_t hash = dr_hash_of(count, ranks, count * sizeof *ranks);
    for (size_t at = 0; (*out = dr_hash_next(&h->by_holders, hash, &at)) != DR_NO_ENTRY;) {
        const uint64_t *start = &h->set_start[*out];
        if (start[1] - start[0] == count && memcmp(h->holders + start[0], ranks, count * sizeof *ranks) == 0)
            return 0;
    }
    int rc = DR_ARRAY_RESERVE(h->holders, h->holder_count, h->holder_room, count, error);
    if (rc == 0)
        rc = DR_ARRAY_RESERVE(h->set_start, h->set_count, h->set_room, 2, error);
    if (rc == 0)
        rc = dr_hash_reserve(&h->by_holders, error);
    if (rc)
        return rc;
    *out = (uint32_t)h->set_count;
    dr_hash_add(&h->by_holders, hash, *out);
    memcpy(h->holders + h->holder_count, ranks, count * sizeof *ranks);
    h->set_start[h->set_count++] = h->holder_count;
    h->set_start[h->set_count] = h->holder_count += count;
    return 0;
}

/* Who holds most; of those who hold as much the one who writes this block already, or least so far. */
static uint32_t choose(struct sharing *s, uint64_t lo) {
    struct dr_holdings *h = s->holdings;
    const uint64_t block = lo / s->file->block_bytes;
    double most = 0;
    for (uint32_t i = 0; i < s->touched_count; i++)
        most = s->held[s->touched[i]] > most ? s->held[s->touched[i]] : most;
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < s->touched_count; i++) {
        const uint32_t rank = s->touched[i];
        if (s->held[rank] <= most - 1)
            continue;
        if (h->block == block && rank == h->writer)
            return rank;
        if (least == UINT32_MAX || h->load[rank] < h->load[least])
            least = rank;
    }
    h->block = block;
    return h->writer = least;
}

static int compare_ranks(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static int give_alone(struct sharing *s, uint64_t lo, uint64_t hi, struct dr_error *error) {
    const uint32_t rank = s->touched[0];
    struct dr_shares *out = s->out;
    struct dr_own_range *last = s->last[rank] ? &out->own[s->last[rank] - 1] : NULL;
    if (last && last->hi == lo) {
        last->hi = hi;
        return 0;
    }
    int rc = DR_ARRAY_RESERVE(out->own, out->own_count, out->own_room, 1, error);
    if (rc == 0) {
        out->own[out->own_count++] = (struct dr_own_range){lo, hi, rank};
        s->last[rank] = out->own_count;
    }
    return rc;
}

/* A stripe that begins behind the header lies behind it in memory, too: those of a block lie side by side. */
static int give_shared(struct sharing *s, uint64_t lo, uint64_t hi, uint32_t writer, struct dr_error *error) {
    struct dr_shares *out = s->out;
    struct dr_shared_stripe made = {.lo = lo, .hi = hi, .writer = writer};
    qsort(s->touched, s->touched_count, sizeof *s->touched, compare_ranks);
    int rc = set_of(s->holdings, s->touched, s->touched_count, &made.holders, error);
    if (rc == 0)
        rc = DR_ARRAY_RESERVE(out->shared, out->shared_count, out->shared_room, 1, error);
    if (rc)
        return rc;
    if (s->rounds == 0 || s->used + DR_CRC_BLOCK > s->file->round_bytes) {
        s->used = 0;
        s->rounds++;
    }
    made.at = s->used + lo % DR_CRC_BLOCK;
    made.round = (uint32_t)s->rounds - 1;
    s->used += DR_CRC_BLOCK;
    out->shared[out->shared_count++] = made;
    return 0;
}

/* Gives the stripe at hand to somebody, as all that hold some of it are known. */
static int end_stripe(struct sharing *s, struct dr_error *error) {
    if (s->touched_count == 0)
        return 0;
    uint64_t lo = s->file->head_bytes, hi = s->end;
    (void)dr_clip(s->stripe * DR_CRC_BLOCK, (s->stripe + 1) * DR_CRC_BLOCK, &lo, &hi);
    const bool alone = s->touched_count == 1;
    const uint32_t writer = alone ? s->touched[0] : choose(s, lo);
    s->holdings->load[writer] += hi - lo;
    s->out->writes[writer] += hi - lo;
    for (uint32_t i = 0; i < s->touched_count; i++)
        s->held[s->touched[i]] = 0;
    int rc = alone ? give_alone(s, lo, hi, error) : give_shared(s, lo, hi, writer, error);
    s->touched_count = 0;
    return rc;
}

/* Bytes [lo, hi), of which each of these segments' ranks holds the same share. */
static int add_bytes(struct sharing *s, uint64_t lo, uint64_t hi, const struct segment *holders, size_t count,
                     uint32_t shares, struct dr_error *error) {
    int rc = 0;
    for (uint64_t stripe = lo / DR_CRC_BLOCK; stripe * DR_CRC_BLOCK < hi && rc == 0; stripe++) {
        if (stripe != s->stripe)
            rc = end_stripe(s, error);
        s->stripe = stripe;
        uint64_t from = lo, to = hi;
        (void)dr_clip(stripe * DR_CRC_BLOCK, (stripe + 1) * DR_CRC_BLOCK, &from, &to);
        for (size_t i = 0; i < count && rc == 0; i++) {
            const uint32_t rank = holders[i].rank;
            if (i > 0 && rank == holders[i - 1].rank) /* another of its boxes */
                continue;
            if (s->held[rank] == 0)
                s->touched[s->touched_count++] = rank;
            s->held[rank] += (double)(to - from) / shares;
        }
    }
    return rc;
}

static int share_tensor(struct sharing *s, const struct dr_laid *laid, struct dr_error *error) {
    bool alone;
    int rc = find_segments(s, laid, &alone, error);
    if (rc == 0 && !alone) {
        uint32_t shares = 0;
        for (size_t i = 0; i < s->segment_count; i++)
            shares += i == 0 || s->segments[i].rank != s->segments[i - 1].rank;
        return add_bytes(s, laid->begin, laid->begin + laid->size, s->segments, s->segment_count, shares, error);
    }
    for (size_t i = 0; i < s->segment_count && rc == 0; i++)
        rc = add_bytes(s, s->segments[i].lo, s->segments[i].hi, &s->segments[i], 1, 1, error);
    return rc;
}

/* ---- a file ---- */

static int check_file(const struct dr_holdings *h, const struct dr_striped_file *file, uint64_t *end,
                      struct dr_error *error) {
    bool good = file->block_bytes > 0 && file->head_bytes <= INT64_MAX;
    *end = file->head_bytes;
    for (size_t i = 0; i < file->count && good; i++) {
        const struct dr_laid *laid = &file->tensors[i];
        good = laid->name < h->table.name_count && laid->begin == *end && laid->size <= INT64_MAX - *end;
        *end += good ? laid->size : 0;
    }
    return good ? 0 : dr_error_invalid(error, DR_NO_ITEM, "tensors do not lie side by side in the file");
}

int dr_holdings_share(struct dr_holdings *h, const struct dr_striped_file *file, struct dr_shares *out,
                      struct dr_error *error) {
    *out = (struct dr_shares){.writes = dr_calloc(h->world, sizeof *out->writes)};
    struct sharing s = {
        .holdings = h,
        .file = file,
        .out = out,
        .held = dr_calloc(h->world, sizeof *s.held),
        .touched = dr_malloc(h->world * sizeof *s.touched),
        .last = dr_calloc(h->world, sizeof *s.last),
        .stripe = file->head_bytes / DR_CRC_BLOCK,
    };
    int rc = out->writes && s.held && s.touched && s.last ? 0 : dr_error_memory(error);
    if (rc == 0 && !h->by.start)
        rc = dr_table_sort_by_name(&h->by, &h->table, error);
    if (rc == 0)
        rc = check_file(h, file, &s.end, error);
    for (size_t i = 0; i < file->count && rc == 0; i++)
        if (file->tensors[i].size)
            rc = share_tensor(&s, &file->tensors[i], error);
    if (rc == 0)
        rc = end_stripe(&s, error);
    free(s.segments);
    free(s.held);
    free(s.touched);
    free(s.last);
    return rc;
}
