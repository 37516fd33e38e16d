/* What a load reads: checked reads, their extents, and the blocks these make. Made and freed by load.c. */
#ifndef DCPRING_LOAD_PLAN_H
#define DCPRING_LOAD_PLAN_H

#include "data/load.h"
#include "io/stream.h"

/* Bytes [lo, hi) of a file that a read needs; within one block of the grid. */
struct dr_load_extent {
    size_t file;
    uint64_t lo, hi;
    size_t read;
    bool sparse; /* at most half of it is wanted, and it is copied */
};

struct dr_load_plan {
    struct dr_input *input;
    struct dr_read *reads;
    size_t read_count;
    struct dr_load_extent *extents; /* sorted by file and lo */
    size_t extent_count, extent_room;
    struct dr_block *blocks; /* each has its extents from block.first on, up to the first that starts behind it */
    size_t block_count, block_room;
    uint32_t *
        *sums; /* of each read: the CRCs of its blocks if it has one CRC of its own and is read whole, else NULL */
};

/* Looks at every file that a read refers to. */
int dr_load_plan_init(struct dr_load_plan *plan, struct dr_input *input, struct dr_read *reads, size_t read_count,
                      const struct dr_options *options, const struct dr_control *control, struct dr_error *error);

/* After everything was read: payloads that have only a CRC of the whole. */
int dr_load_plan_check_sums(const struct dr_load_plan *plan, struct dr_error *error);

void dr_load_plan_destroy(struct dr_load_plan *plan);

#endif
