/*
 * A barrier of processes, in a word of memory that they share and that was zero at first.
 *
 * It is quick, and not patient: whoever has waited for too long ends it, for all and for good, and they go on by other
 * means. So a process that is gone, or has failed, holds nobody up for long.
 */
#ifndef DCPRING_BARRIER_H
#define DCPRING_BARRIER_H

#include "base/control.h"

#include <stdatomic.h>

/*
 * Comes, and waits until `target` processes have come, counted from the beginning: n, 2 n, 3 n, ... where there are n.
 * Gives 1, or 0 where the barrier was ended before that; the same to all who have waited for this target.
 */
int dr_barrier_wait(atomic_uint *word, unsigned target, unsigned timeout_ms, const struct dr_control *control,
                    struct dr_error *error);

/* Ends it; false where `target` had been reached by then. */
bool dr_barrier_end(atomic_uint *word, unsigned target);

/* So many may come. */
#define DR_BARRIER_MOST 0x7fffffffU

#endif
