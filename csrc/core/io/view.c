/* Looking at a file through a view. See view.h. */
#include "io/view.h"

#include "base/memory.h"
#include "io/sys.h"

#include <errno.h>

int dr_view_init(struct dr_view *view, int fd, const char *path, struct dr_error *error) {
    *view = (struct dr_view){.fd = fd, .path = path, .data = dr_malloc(DR_VIEW_BYTES)};
    return view->data ? 0 : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
}

void dr_view_destroy(struct dr_view *view) { free(view->data); }

const uint8_t *dr_view_look(struct dr_view *view, uint64_t offset, size_t size, uint64_t until,
                            struct dr_error *error) {
    if (offset >= view->start && offset + size <= view->start + view->filled)
        return view->data + (offset - view->start);
    if (size > DR_VIEW_BYTES || view->fixed)
        return NULL;
    uint64_t wanted = until > offset + size ? until - offset : size;
    if (wanted > DR_VIEW_BYTES)
        wanted = DR_VIEW_BYTES;
    view->start = offset;
    view->filled = 0;
    while (view->filled < size) {
        ssize_t n = DR_RETRY(dr_sys.pread(view->fd, view->data + view->filled, (size_t)wanted - view->filled,
                                          (off_t)(offset + view->filled)));
        if (n < 0) {
            dr_error_io(error, (int)-n, DR_CALL_READ, view->path, (int64_t)offset, (int64_t)wanted);
            return NULL;
        }
        if (n == 0) {
            dr_error_corrupt(error, view->path, (int64_t)(offset + view->filled), DR_NO_ITEM,
                             "the file ends inside a record");
            return NULL;
        }
        view->filled += (size_t)n;
    }
    return view->data;
}
