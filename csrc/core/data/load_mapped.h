/*
 * The sparse blocks of a load: those of which at most half is wanted, in rows
 * with gaps between them, as columns of a matrix are. They are used where the
 * page cache has them (io/mapped.h). Blocks that cannot be had so are left, for
 * who reads them to say why.
 */
#ifndef DCPRING_LOAD_MAPPED_H
#define DCPRING_LOAD_MAPPED_H

#include "data/load_plan.h"

/* As dr_stream's, for the plan's blocks. */
typedef int dr_use_block(void *context, const struct dr_block *piece, const uint8_t *data, uint64_t *crc_ns,
                         struct dr_error *error);

/*
 * Uses sparse blocks, and takes them out of the plan. With DR_DIRECT_AUTO those alone that the page cache holds; none
 * with DR_DIRECT_ON, or where an engine is named.
 */
int dr_load_mapped(struct dr_load_plan *plan, const struct dr_options *options, dr_use_block *use, void *context,
                   const struct dr_control *control, struct dr_stream_stats *stats, struct dr_error *error);

#endif
