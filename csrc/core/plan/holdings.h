/*
 * Files that all ranks write together: what each rank holds of their tensors, and who writes which bytes.
 *
 * All ranks' rows are added, and then one file after the other is shared out. Tensors lie in a file side by side, and
 * it is cut into stripes on the grid of its CRC blocks. Of most stripes one rank holds everything, and writes it from
 * its memory. Any other is put together by all that hold some of it, and written by the one that holds most; of those
 * that hold as much by the one that writes this block already, or that writes least so far. So no two ranks write the
 * same page of a file, and each block's CRC is one rank's to sum. Stripes that are put together come in rounds of
 * bounded size.
 *
 * Everything that is returned is the caller's to destroy. Time is linear in the stripes and their holders.
 */
#ifndef DCPRING_HOLDINGS_H
#define DCPRING_HOLDINGS_H

#include "plan/table.h"

struct dr_holdings {
    uint32_t world;
    struct dr_table table; /* a row for each that was added */
    uint32_t *ranks;       /* whose it is */
    size_t rank_room;
    uint64_t *load; /* what each rank writes of the files so far */
    uint64_t block; /* the last that several could write, and who does */
    uint32_t writer;
    struct dr_rows_by_name by; /* none before the first file */
    uint32_t *holders;         /* sets of ranks: holders[set_start[i]] to holders[set_start[i + 1]], in order */
    uint64_t *set_start;
    size_t holder_count, holder_room, set_count, set_room;
    struct dr_hash by_holders;
};

/* A tensor's place in a file. */
struct dr_laid {
    uint32_t name;       /* index in the holdings' table */
    uint32_t item_bytes; /* of an element in the file */
    uint64_t begin, size;
};

struct dr_striped_file {
    const struct dr_laid *tensors; /* in the order of the file, without gaps */
    size_t count;
    uint64_t head_bytes; /* before the first of them */
    uint64_t block_bytes, round_bytes;
};

/* What one rank alone holds and writes. */
struct dr_own_range {
    uint64_t lo, hi;
    uint32_t rank;
};

/* A stripe that several hold. */
struct dr_shared_stripe {
    uint64_t lo, hi;
    uint64_t at; /* in the memory of its round */
    uint32_t round, writer;
    uint32_t holders; /* the set */
};

struct dr_shares {
    struct dr_own_range *own;
    struct dr_shared_stripe *shared;
    size_t own_count, own_room, shared_count, shared_room;
    uint64_t *writes; /* bytes, of each rank */
};

int dr_holdings_init(struct dr_holdings *holdings, uint32_t world, struct dr_error *error);
void dr_holdings_destroy(struct dr_holdings *holdings);

/* A row of a rank's table; or, where `count` is not negative, so many of its rows of elements from `start` on. Ranks
 * come in order, and all of them before the first file. */
int dr_holdings_add(struct dr_holdings *holdings, uint32_t rank, const struct dr_table *table, size_t row,
                    int64_t start, int64_t count, struct dr_error *error);

/* Shares a file out. What ranks hold of its tensors must fit their places, and be all of them. */
int dr_holdings_share(struct dr_holdings *holdings, const struct dr_striped_file *file, struct dr_shares *out,
                      struct dr_error *error);
void dr_shares_destroy(struct dr_shares *shares);

#endif
