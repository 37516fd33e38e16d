/*
 * Tensors copied from memory to memory, all of a list in one call: a state that
 * is staged, so that training may go on while the copy is written.
 *
 * Workers take the list in pieces of DR_COPY_PIECE bytes, so that small tensors
 * cost little and large ones are shared out.
 */
#ifndef DCPRING_COPY_H
#define DCPRING_COPY_H

#include "base/control.h"
#include "record/region.h"

enum { DR_COPY_PIECE = 1 << 20 };

/* Neither memory may overlap that of another entry's `to`. */
struct dr_copy {
    const void *from;               /* `bytes` of them; not looked at where there is a region */
    const struct dr_region *region; /* else: its box is gathered. NULL: what is copied lies in one stretch */
    void *to;
    uint64_t bytes;
};

/* Copies all; on an error, which is Ctrl-C or a lack of memory or threads, any part of it may have been copied. */
int dr_copy_all(const struct dr_copy *copies, size_t count, unsigned workers, const struct dr_control *control,
                struct dr_error *error);

#endif
