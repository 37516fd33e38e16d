/*
 * Files that all ranks write together: every stripe has one writer, who holds some of it, and all its holders.
 *
 * Tensors are of few and large elements, cut at random and handed to random ranks; an oracle that looks at every
 * element says who holds what of a stripe.
 */
#include "plan.h"

#include "base/crc.h"
#include "plan/holdings.h"

enum { MAX_RANKS = 8, ROWS = 12, COLUMNS = 10, TENSORS = 3, PER_STRIPE = 16, MAX_STRIPES = 64 };

#define ITEM (DR_CRC_BLOCK / PER_STRIPE)
#define HEAD ((uint64_t)3 * ITEM)
#define ROUND (4 * DR_CRC_BLOCK)

struct files {
    struct dr_holdings holdings;
    struct dr_table of[MAX_RANKS];
    uint32_t world;
    struct dr_laid laid[TENSORS];
    uint64_t end;
    int owner[TENSORS * ROWS * COLUMNS]; /* by element, in the order of the file */
    bool ranges[TENSORS];
    struct dr_shares shares;
    struct dr_error error;
    struct rng rng;
};

static void begin(struct files *f, uint32_t world) {
    *f = (struct files){.world = world, .end = HEAD};
    dr_error_clear(&f->error);
    CHECK_OK(dr_holdings_init(&f->holdings, world, &f->error), &f->error);
    for (uint32_t rank = 0; rank < world; rank++)
        plan_init(&f->of[rank]);
}

static void end(struct files *f) {
    for (uint32_t rank = 0; rank < f->world; rank++)
        dr_table_destroy(&f->of[rank]);
    dr_holdings_destroy(&f->holdings);
    dr_shares_destroy(&f->shares);
}

static void hold(struct files *f, uint32_t rank, const char *name, int64_t row, int64_t column, int64_t rows,
                 int64_t columns) {
    plan_chunk(&f->of[rank], name, 2, (const int64_t[]){ROWS, COLUMNS, row, column, rows, columns}, P_INT8, 0);
}

static void add_all(struct files *f) {
    for (uint32_t rank = 0; rank < f->world; rank++)
        for (size_t row = 0; row < f->of[rank].count; row++)
            CHECK_OK(dr_holdings_add(&f->holdings, rank, &f->of[rank], row, 0, -1, &f->error), &f->error);
}

static int share(struct files *f, size_t count) {
    const struct dr_striped_file file = {f->laid, count, HEAD, 2 * DR_CRC_BLOCK, ROUND};
    return dr_holdings_share(&f->holdings, &file, &f->shares, &f->error);
}

static void lay_out(struct files *f, const char *const *names, size_t count) {
    for (size_t t = 0; t < count; t++) {
        uint32_t name = dr_table_find(&f->holdings.table, names[t], (uint32_t)strlen(names[t]), DR_NO_NAME);
        f->laid[t] = (struct dr_laid){name, ITEM, f->end, ROWS * COLUMNS * ITEM};
        f->end += f->laid[t].size;
    }
}

/* ---- against the oracle ---- */

static void own(struct files *f, size_t tensor, uint32_t rank, const int64_t box[4]) {
    for (int64_t i = 0; i < box[2]; i++)
        for (int64_t j = 0; j < box[3]; j++)
            f->owner[(int64_t)tensor * ROWS * COLUMNS + (box[0] + i) * COLUMNS + box[1] + j] = (int)rank;
}

/* Cuts a tensor into boxes, and gives each to some rank. */
static void cut(struct files *f, size_t tensor, const char *name) {
    int64_t boxes[16][4] = {{0, 0, ROWS, COLUMNS}};
    int count = 1;
    f->ranges[tensor] = true;
    for (int cuts = (int)rng_below(&f->rng, 8); cuts > 0; cuts--) {
        int64_t *box = boxes[rng_below(&f->rng, (uint64_t)count)], *other = boxes[count];
        int axis = (int)rng_below(&f->rng, 3) == 0;
        if (box[2 + axis] < 2)
            continue;
        int64_t at = 1 + (int64_t)rng_below(&f->rng, (uint64_t)box[2 + axis] - 1);
        memcpy(other, box, sizeof boxes[0]);
        other[axis] += at;
        other[2 + axis] -= at;
        box[2 + axis] = at;
        count++;
    }
    for (int i = 0; i < count; i++) {
        uint32_t rank = (uint32_t)rng_below(&f->rng, f->world);
        hold(f, rank, name, boxes[i][0], boxes[i][1], boxes[i][2], boxes[i][3]);
        own(f, tensor, rank, boxes[i]);
        f->ranges[tensor] = f->ranges[tensor] && (boxes[i][3] == COLUMNS || boxes[i][2] == 1);
    }
}

/* Who holds some of a stripe: of a tensor that is not all ranges, all who hold some of it. */
static void expect(const struct files *f, uint64_t lo, uint64_t hi, bool holders[MAX_RANKS]) {
    memset(holders, 0, MAX_RANKS * sizeof *holders);
    for (uint64_t i = (lo - HEAD) / ITEM; i < (hi - HEAD) / ITEM; i++) {
        const uint64_t tensor = i / (ROWS * COLUMNS), first = tensor * ROWS * COLUMNS;
        holders[f->owner[i]] = true;
        for (uint64_t j = first; j < first + ROWS * COLUMNS && !f->ranges[tensor]; j++)
            holders[f->owner[j]] = true;
    }
}

static void check_own(const struct files *f, int given[MAX_STRIPES], uint64_t writes[MAX_RANKS]) {
    bool holders[MAX_RANKS];
    for (size_t i = 0; i < f->shares.own_count; i++) {
        const struct dr_own_range *range = &f->shares.own[i];
        writes[range->rank] += range->hi - range->lo;
        for (uint64_t stripe = range->lo / DR_CRC_BLOCK; stripe * DR_CRC_BLOCK < range->hi; stripe++)
            given[stripe]++;
        expect(f, range->lo, range->hi, holders);
        for (uint32_t rank = 0; rank < MAX_RANKS; rank++)
            CHECK_EQ(holders[rank], rank == range->rank);
    }
}

static void check_shared(const struct files *f, int given[MAX_STRIPES], uint64_t writes[MAX_RANKS]) {
    bool holders[MAX_RANKS];
    for (size_t i = 0; i < f->shares.shared_count; i++) {
        const struct dr_shared_stripe *s = &f->shares.shared[i], *before = i ? s - 1 : NULL;
        writes[s->writer] += s->hi - s->lo;
        given[s->lo / DR_CRC_BLOCK]++;
        CHECK(s->at + (s->hi - s->lo) <= ROUND && s->at % DR_CRC_BLOCK == s->lo % DR_CRC_BLOCK);
        CHECK_EQ(s->round, before ? before->round + (s->at < before->at) : 0);
        expect(f, s->lo, s->hi, holders);
        CHECK(holders[s->writer]);
        uint64_t at = f->holdings.set_start[s->holders];
        for (uint32_t rank = 0; rank < MAX_RANKS; rank++)
            if (holders[rank])
                CHECK_EQ(f->holdings.holders[at++], rank);
        CHECK_EQ(at, f->holdings.set_start[s->holders + 1]);
    }
}

static void check_shares(const struct files *f) {
    int given[MAX_STRIPES] = {0};
    uint64_t writes[MAX_RANKS] = {0};
    check_own(f, given, writes);
    check_shared(f, given, writes);
    for (uint64_t stripe = HEAD / DR_CRC_BLOCK; stripe * DR_CRC_BLOCK < f->end; stripe++)
        CHECK_EQ(given[stripe], 1);
    for (uint32_t rank = 0; rank < f->world; rank++)
        CHECK_EQ(f->shares.writes[rank], writes[rank]);
}

static void every_stripe_has_one_writer(void) {
    static const char *const names[TENSORS] = {"a", "b", "c"};
    for (int turn = 0; turn < 2000; turn++) {
        struct files f;
        begin(&f, 1 + (uint32_t)turn % MAX_RANKS);
        f.rng.state = (uint64_t)turn;
        for (size_t t = 0; t < TENSORS; t++)
            cut(&f, t, names[t]);
        add_all(&f);
        lay_out(&f, names, TENSORS);
        CHECK_OK(share(&f, TENSORS), &f.error);
        check_shares(&f);
        end(&f);
    }
}

/* By columns all hold all stripes: each writes as much as the others, and blocks stay whole. */
static void columns_are_even(void) {
    static const char *const name = "w";
    struct files f;
    begin(&f, 2);
    hold(&f, 0, name, 0, 0, ROWS, COLUMNS / 2);
    hold(&f, 1, name, 0, COLUMNS / 2, ROWS, COLUMNS / 2);
    add_all(&f);
    lay_out(&f, &name, 1);
    CHECK_OK(share(&f, 1), &f.error);
    CHECK_EQ(f.shares.own_count, 0);
    CHECK_EQ(f.holdings.set_count, 1);
    for (size_t i = 0; i < f.shares.shared_count; i++)
        CHECK_EQ(f.shares.shared[i].writer, f.shares.shared[i].lo / (2 * DR_CRC_BLOCK) % 2);
    end(&f);
}

/* Some rows of a row, as a plan is cut; they make up the tensor with the rest of it. */
static void parts_of_rows(void) {
    static const char *const name = "w";
    struct files f;
    begin(&f, 2);
    hold(&f, 0, name, 0, 0, ROWS, COLUMNS);
    CHECK_OK(dr_holdings_add(&f.holdings, 0, &f.of[0], 0, 0, 5, &f.error), &f.error);
    CHECK_OK(dr_holdings_add(&f.holdings, 1, &f.of[0], 0, 5, ROWS - 5, &f.error), &f.error);
    lay_out(&f, &name, 1);
    CHECK_OK(share(&f, 1), &f.error);
    CHECK(f.shares.writes[0] && f.shares.writes[1] && f.shares.writes[0] < f.shares.writes[1]);
    end(&f);
    begin(&f, 1);
    hold(&f, 0, name, 0, 0, ROWS, COLUMNS);
    CHECK_FAILS(dr_holdings_add(&f.holdings, 0, &f.of[0], 0, 5, ROWS, &f.error), &f.error, EINVAL);
    end(&f);
}

/* ---- what does not fit ---- */

static void refused(const int64_t (*boxes)[4], int count, uint64_t size, const char *words) {
    static const char *const name = "w";
    struct files f;
    begin(&f, MAX_RANKS);
    for (int i = 0; i < count; i++)
        hold(&f, (uint32_t)i, name, boxes[i][0], boxes[i][1], boxes[i][2], boxes[i][3]);
    add_all(&f);
    lay_out(&f, &name, 1);
    f.laid[0].size = size;
    CHECK_FAILS(share(&f, 1), &f.error, EINVAL);
    if (!strstr(f.error.detail, words))
        CHECK_FAIL("'%s' is not in: %s", words, f.error.detail);
    end(&f);
}

static void holdings_that_do_not_fit(void) {
    const uint64_t size = ROWS * COLUMNS * ITEM;
    refused((const int64_t[][4]){{0, 0, 5, COLUMNS}, {6, 0, ROWS - 6, COLUMNS}}, 2, size, "does not make it up");
    refused((const int64_t[][4]){{0, 0, 6, COLUMNS}, {0, 0, 6, COLUMNS}}, 2, size, "does not make it up");
    refused((const int64_t[][4]){{0, 0, ROWS, 5}, {0, 4, ROWS, 5}}, 2, size, "does not make it up");
    refused((const int64_t[][4]){{1, 0, ROWS, COLUMNS}}, 1, size, "lies outside of it");
    refused((const int64_t[][4]){{0, 0, ROWS, COLUMNS}}, 1, size - ITEM, "of another shape");
    struct files f;
    begin(&f, 1);
    hold(&f, 0, "w", 0, 0, ROWS, COLUMNS);
    add_all(&f);
    lay_out(&f, (const char *const[]){"w", "nobody's"}, 2);
    CHECK_FAILS(share(&f, 2), &f.error, EINVAL);
    end(&f);
}

CHECK_MAIN({"every_stripe_has_one_writer", every_stripe_has_one_writer}, {"columns_are_even", columns_are_even},
           {"parts_of_rows", parts_of_rows}, {"holdings_that_do_not_fit", holdings_that_do_not_fit})
