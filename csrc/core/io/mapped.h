/*
 * Files that are used where the page cache has them, without a copy.
 *
 * For rows of which a few bytes each are wanted, that is several times as cheap
 * as reading all of them. A page that cannot be had, as the file was cut shorter
 * or the disk fails, raises SIGBUS; within dr_mapped_use that is a return value.
 * Between dr_mapped_begin and dr_mapped_end the process has a handler for it,
 * which leaves the faults of others to the handler that was there before.
 */
#ifndef DCPRING_MAPPED_H
#define DCPRING_MAPPED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A part of a file that is mapped; {0}: none. It belongs to one thread. */
struct dr_mapped {
    uint8_t *memory;
    size_t file; /* whatever tells it from others */
    uint64_t lo, hi;
};

void dr_mapped_begin(void);
void dr_mapped_end(void);

/* Has the bytes [lo, hi) of a file in the window, and some of those beside them; -errno where it cannot be mapped. */
int dr_mapped_move(struct dr_mapped *window, size_t file, int fd, uint64_t size, uint64_t lo, uint64_t hi);
void dr_mapped_close(struct dr_mapped *window);

/*
 * Calls use(context), which may read the window; false when a page of it could not be had. Then `use` has ended in the
 * middle: it holds nothing that would have to be given back.
 */
bool dr_mapped_use(const struct dr_mapped *window, void (*use)(void *context), void *context);

#endif
