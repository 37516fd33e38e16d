/*
 * Plans of two ranks, as the input has them: decoded, merged, checked, shared
 * out, sent back, matched, pickled and laid out in a file, as far as they let
 * themselves.
 *
 * Their headers and CRCs are made right, for a CRC keeps everything else out.
 * The first bytes of the input choose limits, fingerprints, and how much is the
 * first rank's.
 */
#include "base/crc.h"
#include "fuzz.h"
#include "plan.h"
#include "plan/box.h"
#include "plan/holdings.h"
#include "plan/match.h"
#include "plan/merge.h"
#include "plan/metadata_pickle.h"

enum { RANKS = 2, MAX_FINGERPRINTS = 8, CHOICES = 5 };

struct plan {
    uint8_t *data;
    size_t size;
    struct dr_table table;
    bool good;
};

static void prepare(struct plan *plan, const uint8_t *data, size_t size) {
    DR_NEW_ERROR(error);
    *plan = (struct plan){.data = malloc(size + PLAN_HEADER), .size = size + PLAN_HEADER};
    FUZZ_CHECK(plan->data);
    memcpy(plan->data, "DRT\1", 4);
    memcpy(plan->data + PLAN_HEADER, data, size);
    plan_fix_crc(plan->data, plan->size);
    dr_table_init(&plan->table);
    int rc = dr_table_decode(&plan->table, plan->data, plan->size, NULL, &error);
    FUZZ_CHECK(rc == -error.err);
    plan->good = rc == 0;
}

/* What is decoded can be encoded, and is then the same. */
static void encode_again(const struct dr_table *table) {
    struct dr_buffer once, twice;
    struct dr_table again;
    DR_NEW_ERROR(error);
    dr_table_init(&again);
    FUZZ_CHECK(dr_table_encode(table, &once, &error) == 0);
    FUZZ_CHECK(dr_table_decode(&again, once.data, once.size, NULL, &error) == 0);
    FUZZ_CHECK(again.count == table->count);
    for (size_t i = 0; i < table->count; i++)
        FUZZ_CHECK(dr_row_bytes(table, &table->rows[i]) == dr_row_bytes(&again, &again.rows[i]));
    FUZZ_CHECK(dr_table_encode(&again, &twice, &error) == 0);
    FUZZ_CHECK(once.size == twice.size && memcmp(once.data, twice.data, once.size) == 0);
    dr_buffer_destroy(&once);
    dr_buffer_destroy(&twice);
    dr_table_destroy(&again);
}

static void pickle(const struct dr_table *table) {
    static const struct dr_fragment none = {"N", 1};
    struct dr_fragment *properties = calloc(table->property_count + 1, sizeof *properties);
    struct dr_storage_index places;
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    FUZZ_CHECK(properties && dr_storage_index_init(&places, table->count, &error) == 0);
    for (size_t i = 0; i < table->count; i++) {
        struct dr_storage_entry place = {.kind = (uint8_t)(i % 4), .length = 100, .payload_size = i % 2 ? 100 : 0};
        FUZZ_CHECK(dr_storage_index_file(&places, "file", 4, &place.file, &error) == 0);
        FUZZ_CHECK(dr_storage_index_set(&places, i, &place, i % 3 ? "crcs" : NULL, &error) == 0);
    }
    for (size_t i = 0; i < table->property_count; i++)
        properties[i] = none;
    for (int mappings = 0; mappings < 2; mappings++) {
        struct dr_metadata_parts parts = {properties, none, none, mappings};
        dr_error_clear(&error);
        int rc = dr_metadata_pickle(table, mappings ? &places : NULL, &parts, &out, &error);
        FUZZ_CHECK(rc == -error.err);
        FUZZ_CHECK(rc < 0 || (out.data[0] == 0x80 && out.data[out.size - 1] == '.'));
        dr_buffer_destroy(&out);
    }
    dr_storage_index_destroy(&places);
    free(properties);
}

/* Whether two overlaps of a wanted row share elements. */
static bool share(const int64_t *a, const int64_t *b, int ndim) {
    for (int d = 0; d < ndim; d++)
        if (a[d] >= b[d] + b[2 * ndim + d] || b[d] >= a[d] + a[2 * ndim + d])
            return false;
    return true;
}

/*
 * The overlaps of a row that is a tensor, those from `first` on, hold each of its elements once; gives where they end.
 */
static size_t is_tiled(const struct dr_match *found, const struct dr_table *wanted, uint32_t index, size_t first) {
    const struct dr_row *row = &wanted->rows[index];
    int ndim = row->ndim;
    double held = 0;
    size_t end = first;
    for (; end < found->count && found->overlaps[end].wanted == index; end++) {
        const int64_t *dims = found->dims + found->overlaps[end].dims;
        held += dr_box_volume(dims + 2 * ndim, ndim);
        for (size_t other = first; other < end; other++)
            FUZZ_CHECK(!share(found->dims + found->overlaps[other].dims, dims, ndim));
    }
    FUZZ_CHECK(held == dr_box_volume(dr_row_lengths(wanted, row), ndim));
    return end;
}

static bool is_missing(const struct dr_match *found, uint32_t index) {
    for (size_t i = 0; i < found->missing_count; i++)
        if (found->missing[i] == index)
            return true;
    return false;
}

static void check_tiling(const struct dr_match *found, const struct dr_table *wanted, const struct dr_table *stored) {
    size_t at = 0;
    for (uint32_t i = 0; i < wanted->count; i++) {
        bool object = at < found->count && found->overlaps[at].wanted == i &&
                      !dr_row_is_tensor(&stored->rows[found->overlaps[at].stored]);
        if (object)
            at++;
        else if (dr_row_is_tensor(&wanted->rows[i]) && !is_missing(found, i))
            at = is_tiled(found, wanted, i, at);
    }
    FUZZ_CHECK(at == found->count);
}

/* Every overlap lies in both of its chunks, and all of a row make it up. */
static void match(const struct dr_table *wanted, const struct dr_table *stored) {
    struct dr_match found;
    DR_NEW_ERROR(error);
    int rc = dr_match(&found, wanted, stored, NULL, &error);
    FUZZ_CHECK(rc == -error.err);
    for (size_t i = 0; i < found.count; i++) {
        const struct dr_overlap *o = &found.overlaps[i];
        FUZZ_CHECK(o->wanted < wanted->count && o->stored < stored->count);
        const struct dr_row *w = &wanted->rows[o->wanted], *s = &stored->rows[o->stored];
        FUZZ_CHECK(dr_row_is_tensor(w) || !dr_row_is_tensor(s));
        const int64_t *dims = found.dims + o->dims;
        for (int d = 0; dr_row_is_tensor(s) && d < w->ndim; d++) {
            int64_t length = dims[2 * w->ndim + d];
            FUZZ_CHECK(length > 0 && dims[d] >= 0 && dims[w->ndim + d] >= 0);
            FUZZ_CHECK(dims[d] <= dr_row_lengths(wanted, w)[d] - length);
            FUZZ_CHECK(dims[w->ndim + d] <= dr_row_lengths(stored, s)[d] - length);
        }
    }
    if (rc == 0)
        check_tiling(&found, wanted, stored);
    dr_match_destroy(&found);
}

/* ---- files that ranks write together ---- */

enum { MAX_LAID = 64, MAX_STRIPES = 1 << 12 };

/* Lays tensors of both out, the first row's size of each; false where they take too long to look at. */
static bool lay_out(const struct dr_table *table, struct dr_laid laid[MAX_LAID], struct dr_striped_file *file) {
    uint64_t end = file->head_bytes;
    bool seen[MAX_LAID] = {false};
    for (size_t i = 0; i < table->count; i++) {
        const struct dr_row *row = &table->rows[i];
        if (row->name >= MAX_LAID || seen[row->name] || !dr_row_is_tensor(row))
            continue;
        const double elements = dr_box_volume(dr_row_size(table, row), row->ndim);
        const uint32_t item_bytes = table->properties[row->properties].item_bytes;
        if (elements * item_bytes > 100.0 * DR_CRC_BLOCK)
            return false;
        seen[row->name] = true;
        laid[file->count++] = (struct dr_laid){row->name, item_bytes, end, (uint64_t)elements * item_bytes};
        end += laid[file->count - 1].size;
    }
    return true;
}

/* Every stripe is given once, and its writer is one of its holders. */
static void check_shares(const struct dr_holdings *held, const struct dr_shares *shares, uint64_t begin, uint64_t end) {
    static uint8_t given[MAX_STRIPES + 2];
    memset(given, 0, sizeof given);
    for (size_t i = 0; i < shares->own_count; i++)
        for (uint64_t stripe = shares->own[i].lo / DR_CRC_BLOCK; stripe * DR_CRC_BLOCK < shares->own[i].hi; stripe++)
            given[stripe]++;
    for (size_t i = 0; i < shares->shared_count; i++) {
        const struct dr_shared_stripe *s = &shares->shared[i];
        FUZZ_CHECK(s->holders < held->set_count && s->writer < RANKS && s->lo < s->hi);
        FUZZ_CHECK(held->set_start[s->holders + 1] - held->set_start[s->holders] == RANKS);
        given[s->lo / DR_CRC_BLOCK]++;
    }
    for (uint64_t stripe = begin / DR_CRC_BLOCK; stripe * DR_CRC_BLOCK < end; stripe++)
        FUZZ_CHECK(given[stripe] == 1);
}

static void write_together(const struct plan plans[RANKS], const uint8_t choices[CHOICES]) {
    struct dr_holdings held;
    struct dr_laid laid[MAX_LAID];
    struct dr_striped_file file = {laid, 0, (uint64_t)choices[1] << 12, (uint64_t)(choices[0] % 4 + 1) << 20, 2 << 20};
    struct dr_shares shares = {0};
    DR_NEW_ERROR(error);
    FUZZ_CHECK(dr_holdings_init(&held, RANKS, &error) == 0);
    int rc = 0;
    for (uint32_t rank = 0; rank < RANKS; rank++)
        for (size_t row = 0; row < plans[rank].table.count && rc == 0; row++)
            rc = dr_holdings_add(&held, rank, &plans[rank].table, row, 0, choices[2] % 7 == row ? choices[0] : -1,
                                 &error);
    FUZZ_CHECK(rc == -error.err);
    if (rc == 0 && lay_out(&held.table, laid, &file)) {
        rc = dr_holdings_share(&held, &file, &shares, &error);
        FUZZ_CHECK(rc == -error.err);
        const struct dr_laid *last = file.count ? &laid[file.count - 1] : NULL;
        if (rc == 0 && last && last->begin + last->size > file.head_bytes)
            check_shares(&held, &shares, file.head_bytes, last->begin + last->size);
    }
    dr_shares_destroy(&shares);
    dr_holdings_destroy(&held);
}

/* ---- the coordinator ---- */

struct items {
    const struct dr_merge *merge;
    const uint32_t *pieces;
    uint32_t rank;
    size_t at, count;
};

static int is_next(void *context, size_t row, int64_t start, int64_t rows) {
    struct items *items = context;
    FUZZ_CHECK(items->at < items->count);
    const struct dr_piece *piece = &items->merge->pieces[items->pieces[items->at++]];
    FUZZ_CHECK(piece->writer == items->rank && piece->rows == rows && (rows < 0 || piece->start == start));
    FUZZ_CHECK(items->merge->row_group[items->merge->rank_rows[items->rank] + row] == piece->group);
    return 0;
}

static void read_replies(const struct dr_merge *merge) {
    size_t all = 0;
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        struct items items = {.merge = merge, .rank = rank};
        struct dr_buffer reply;
        DR_NEW_ERROR(error);
        uint32_t *pieces;
        FUZZ_CHECK(dr_merge_reply(merge, rank, &reply, &error) == 0);
        FUZZ_CHECK(dr_merge_items(merge, rank, &pieces, &items.count, &error) == 0);
        items.pieces = pieces;
        size_t rows = merge->rank_rows[rank + 1] - merge->rank_rows[rank];
        FUZZ_CHECK(dr_reply_read(reply.data, reply.size, rows, is_next, &items, &error) == 0);
        FUZZ_CHECK(items.at == items.count && items.count == merge->sums[rank].items);
        all += items.count;
        dr_buffer_destroy(&reply);
        free(pieces);
    }
    FUZZ_CHECK(all == merge->piece_count && all >= merge->groups.count);
}

static int is_shared(void *context, const struct dr_shared_row *row) {
    const struct dr_merge *merge = context;
    FUZZ_CHECK(row->holder_count == RANKS && row->holders[0] == 0 && row->holders[1] == 1 && row->writer < RANKS);
    FUZZ_CHECK(row->row < merge->row_count);
    return 0;
}

static void look_at_shared(struct dr_merge *merge) {
    uint64_t *before = dr_merge_shared_bytes(merge);
    FUZZ_CHECK(before);
    for (uint32_t rank = 0; rank < RANKS; rank++)
        FUZZ_CHECK(dr_merge_shared(merge, rank, before, is_shared, merge) == 0);
    free(before);
}

static void share_out(struct dr_merge *merge, const uint8_t choices[CHOICES]) {
    static const uint32_t hosts[RANKS] = {7, 7};
    for (int strategy = DR_BALANCED; strategy <= DR_PER_HOST; strategy++) {
        struct dr_assignment assignment = {(enum dr_strategy)strategy, choices[0] % 4u, hosts, choices[1] + 1u};
        DR_NEW_ERROR(error);
        struct dr_table table;
        int rc = dr_merge_assign(merge, &assignment, NULL, &error);
        FUZZ_CHECK(rc == -error.err && (rc == 0 || strategy >= DR_LIMITED));
        if (rc)
            continue;
        read_replies(merge);
        look_at_shared(merge);
        dr_table_init(&table);
        FUZZ_CHECK(dr_merge_table(merge, &table, &error) == 0 && table.count == merge->piece_count);
        pickle(&table);
        dr_table_destroy(&table);
    }
}

static void merge_both(const struct plan plans[RANKS], const uint8_t choices[CHOICES]) {
    static const uint32_t fingerprints[MAX_FINGERPRINTS] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct dr_merge merge;
    DR_NEW_ERROR(error);
    FUZZ_CHECK(dr_merge_init(&merge, RANKS, &error) == 0);
    int rc = 0;
    for (int rank = 0; rank < RANKS && rc == 0; rank++) {
        size_t count = choices[2] >> 4 * rank & 15;
        rc = dr_merge_add(&merge, plans[rank].data, plans[rank].size, fingerprints, count % (MAX_FINGERPRINTS + 1),
                          NULL, &error);
        FUZZ_CHECK(rc == -error.err);
    }
    if (!rc)
        rc = dr_merge_check(&merge, choices[0] & 16, NULL, &error);
    FUZZ_CHECK(rc == -error.err);
    if (!rc) {
        uint8_t *different;
        FUZZ_CHECK(dr_merge_differing(&merge, &different, &error) == 0);
        for (uint32_t g = 0; g < merge.groups.count; g++)
            FUZZ_CHECK(!different[g] || dr_merge_fingerprint(&merge, g, 0) != dr_merge_fingerprint(&merge, g, 1));
        free(different);
        share_out(&merge, choices);
    }
    dr_merge_destroy(&merge);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct plan plans[RANKS];
    if (size < CHOICES)
        return 0;
    size_t left = size - CHOICES, first = (data[3] | (size_t)data[4] << 8) % (left + 1);
    prepare(&plans[0], data + CHOICES, first);
    prepare(&plans[1], data + CHOICES + first, left - first);
    for (int i = 0; i < RANKS; i++)
        if (plans[i].good) {
            encode_again(&plans[i].table);
            pickle(&plans[i].table);
            match(&plans[i].table, &plans[i].table);
        }
    if (plans[0].good && plans[1].good)
        match(&plans[0].table, &plans[1].table);
    merge_both(plans, data);
    if (plans[0].good && plans[1].good)
        write_together(plans, data);
    for (int i = 0; i < RANKS; i++) {
        dr_table_destroy(&plans[i].table);
        free(plans[i].data);
    }
    return 0;
}

/* ---- seeds ---- */

static void seed_plan(struct dr_table *table, unsigned seed, int64_t rank) {
    static const char path[] = "\2\14\0";
    plan_init(table);
    int64_t dims[3 * DR_TABLE_MAX_DIMS] = {0};
    if (seed == 0)
        return;
    for (int64_t layer = 0; layer < seed; layer++) {
        char name[64];
        snprintf(name, sizeof name, "layers.%d.weight", (int)layer);
        plan_row(
            table, name, (uint32_t)strlen(name), path, sizeof path - 1,
            &(struct dr_row_view){.type = DR_ROW_SHARD,
                                  .flags = DR_ROW_DIVISIBLE,
                                  .ndim = 2,
                                  .dims = (const int64_t[]){8, 4, seed % 2 ? 4 * rank : 0, 0, seed % 2 ? 4 : 8, 4}});
    }
    plan_row(table, "step", 4, "\1\0", 2, &(struct dr_row_view){.type = DR_ROW_BYTES, .flags = DR_ROW_HASHED});
    if (seed == 2)
        plan_name_only(table, "on the other stage");
    plan_chunk(table, "scalar", 0, NULL, P_INT8, 0);
    for (int64_t i = 0; i < 2 && seed > 2; i++) /* a grid: two chunks for each rank */
        plan_chunk(table, "grid", 2, (const int64_t[]){6, 6, 3 * i, 3 * rank, 3, 3}, P_FLOAT32_GRAD, 0);
    for (int d = 0; d < DR_TABLE_MAX_DIMS; d++)
        dims[d] = dims[2 * DR_TABLE_MAX_DIMS + d] = 1;
    if (seed == 4)
        plan_chunk(table, "of many dimensions", DR_TABLE_MAX_DIMS, dims, P_INT8, DR_ROW_DIVISIBLE);
}

size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    enum { SEEDS = 6 };
    if (index >= SEEDS)
        return 0;
    size_t size = CHOICES, sizes[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
        struct dr_table table;
        seed_plan(&table, index, rank);
        struct dr_buffer bytes = plan_encode(&table);
        sizes[rank] = bytes.size - PLAN_HEADER;
        FUZZ_CHECK(size + sizes[rank] <= FUZZ_SEED_MAX);
        memcpy(out + size, bytes.data + PLAN_HEADER, sizes[rank]);
        size += sizes[rank];
        dr_buffer_destroy(&bytes);
        dr_table_destroy(&table);
    }
    memcpy(out, (const uint8_t[CHOICES]){16 + 1, 3, index == 1 ? 0x11 : 0, (uint8_t)sizes[0], (uint8_t)(sizes[0] >> 8)},
           CHOICES);
    return size;
}
