/*
 * A view of a file, for looking at small things here and there: what lies
 * near each other is read at once. It belongs to one thread.
 */
#ifndef DCPRING_VIEW_H
#define DCPRING_VIEW_H

#include "base/error.h"

#include <stdbool.h>

enum { DR_VIEW_BYTES = 256 * 1024 };

/* Read with pread as it is needed; or a fixed one, over memory of the caller's. */
struct dr_view {
    int fd;
    bool fixed;
    const char *path;
    uint8_t *data;
    uint64_t start;
    size_t filled;
};

int dr_view_init(struct dr_view *view, int fd, const char *path, struct dr_error *error);
/* Not for fixed ones. */
void dr_view_destroy(struct dr_view *view);

/*
 * The bytes at [offset, offset + size), valid until the next look; NULL when they cannot be had: an error, more
 * than DR_VIEW_BYTES, outside of a fixed view. `until` is how far reading ahead is useful.
 */
const uint8_t *dr_view_look(struct dr_view *view, uint64_t offset, size_t size, uint64_t until, struct dr_error *error);

#endif
