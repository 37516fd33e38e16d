/*
 * What a rank reads: the chunks that it wants, matched with the chunks that a
 * checkpoint holds. Every overlap of a wanted and a stored chunk is one read.
 */
#ifndef DCPRING_MATCH_H
#define DCPRING_MATCH_H

#include "plan/table.h"

struct dr_overlap {
    uint32_t wanted, stored; /* rows */
    uint64_t dims;           /* index in the match's dims: offsets in the wanted chunk, in the stored one, lengths; as
                                many of each as the stored row has dimensions */
};

struct dr_match {
    struct dr_overlap *overlaps;
    size_t count, room;
    int64_t *dims;
    size_t dims_count, dims_room;
    uint32_t *missing; /* wanted rows whose names are not stored */
    size_t missing_count;
};

/*
 * Matches every wanted row that is a tensor or an object. An object that is stored as a tensor, a tensor with another
 * shape, or chunks that do not cover what is wanted are errors, whose item is the wanted row. A tensor that is
 * stored as an object is that object. Chunks that are listed twice count once; others that share elements are an error,
 * for then it is not known whether all of what is wanted is read. control: NULL where nobody asks to stop.
 */
int dr_match(struct dr_match *match, const struct dr_table *wanted, const struct dr_table *stored,
             const struct dr_control *control, struct dr_error *error);
void dr_match_destroy(struct dr_match *match);

#endif
