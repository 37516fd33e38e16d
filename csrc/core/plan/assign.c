/*
 * Sharing out: every share goes to one of its holders, so that the largest load is small. See merge.h.
 *
 * Largest first, each to the least loaded of its holders; then, while it helps,
 * a share of the most loaded rank is moved to another holder. Ties go to the
 * lower rank and the earlier share, so that the same input always gives the
 * same result.
 */
#include "plan/merge.h"

#include "base/memory.h"

#include <assert.h>

/* Improving is for the tail of an already good result: it ends after so many looks at a share, some 0.2 s. */
enum { MOST_LOOKS = 100 << 20 };

struct work {
    struct dr_share *shares;
    size_t count;
    const uint8_t *allowed;
    uint64_t *load;
    uint32_t world;
    uint64_t looks;
    struct dr_ticker ticker;
};

static bool may(const struct work *work, uint32_t rank) { return !work->allowed || work->allowed[rank]; }

static int compare_shares(const void *a, const void *b, void *context) {
    const struct dr_share *shares = context;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    if (shares[x].bytes != shares[y].bytes)
        return shares[x].bytes > shares[y].bytes ? -1 : 1;
    return (x > y) - (x < y);
}

static uint32_t least_loaded(const struct work *work, const struct dr_share *share, uint32_t except) {
    uint32_t best = UINT32_MAX;
    for (size_t i = 0; i < share->holder_count; i++) {
        uint32_t rank = share->holders[i];
        if (rank != except && may(work, rank) && (best == UINT32_MAX || work->load[rank] < work->load[best]))
            best = rank;
    }
    return best;
}

static uint32_t most_loaded(const struct work *work) {
    uint32_t best = 0;
    for (uint32_t rank = 1; rank < work->world; rank++)
        if (work->load[rank] > work->load[best])
            best = rank;
    return best;
}

static void give(const struct work *work, struct dr_share *share, uint32_t rank) {
    assert(may(work, rank) && work->load[share->owner] >= share->bytes);
    work->load[share->owner] -= share->bytes;
    share->owner = rank;
    work->load[rank] += share->bytes;
}

/* Moves one share off the most loaded rank, the one that leaves the lower of the two higher loads lowest. */
static bool move_one(struct work *work, uint32_t top) {
    uint64_t best = work->load[top];
    struct dr_share *moved = NULL;
    uint32_t to = 0;
    for (size_t i = 0; i < work->count; i++) {
        struct dr_share *share = &work->shares[i];
        if (share->owner != top || share->holder_count < 2 || share->bytes == 0)
            continue;
        uint32_t rank = least_loaded(work, share, top);
        work->looks += share->holder_count;
        if (rank == UINT32_MAX)
            continue;
        uint64_t left = work->load[top] - share->bytes, other = work->load[rank] + share->bytes;
        uint64_t higher = left > other ? left : other;
        if (higher < best) {
            best = higher;
            moved = share;
            to = rank;
        }
    }
    work->looks += work->count;
    if (moved)
        give(work, moved, to);
    return moved != NULL;
}

static int improve(struct work *work, struct dr_error *error) {
    uint64_t total = 0;
    uint32_t ranks = 0;
    for (uint32_t rank = 0; rank < work->world; rank++) {
        total += work->load[rank];
        ranks += may(work, rank);
    }
    while (ranks && work->looks < MOST_LOOKS) {
        uint32_t top = most_loaded(work);
        if (work->load[top] <= total / ranks + total / ranks / 100)
            return 0; /* within a percent of the mean */
        if (!move_one(work, top))
            return 0;
        int rc = dr_ticker_ask(&work->ticker, error);
        if (rc)
            return rc;
    }
    return 0;
}

int dr_assign(struct dr_share *shares, size_t count, const uint8_t *allowed, uint64_t *load, uint32_t world,
              const struct dr_control *control, struct dr_error *error) {
    struct work work = {shares, count, allowed, load, world, 0, {.control = control}};
    uint32_t *order = dr_malloc((count + 1) * sizeof *order);
    if (!order)
        return dr_error_memory(error);
    for (size_t i = 0; i < count; i++)
        order[i] = (uint32_t)i;
    qsort_r(order, count, sizeof *order, compare_shares, shares);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < count; i++) {
        struct dr_share *share = &shares[order[i]];
        share->owner = least_loaded(&work, share, UINT32_MAX);
        if (share->owner == UINT32_MAX)
            rc = dr_error_invalid(error, order[i], "a share has no holder that is allowed");
        else
            load[share->owner] += share->bytes;
        if (!rc)
            rc = dr_ticker_turn(&work.ticker, i, error);
    }
    free(order);
    return rc ? rc : improve(&work, error);
}
