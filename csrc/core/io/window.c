/* Looking at a file through a window. See window.h. */
#include "io/window.h"

#include "base/memory.h"
#include "io/sys.h"

#include <errno.h>

int dr_window_init(struct dr_window *window, int fd, const char *path, struct dr_error *error) {
    *window = (struct dr_window){.fd = fd, .path = path, .data = dr_malloc(DR_WINDOW_BYTES)};
    return window->data ? 0 : dr_error_system(error, ENOMEM, DR_CALL_MALLOC, path);
}

void dr_window_destroy(struct dr_window *window) { free(window->data); }

const uint8_t *dr_window_look(struct dr_window *window, uint64_t offset, size_t size, uint64_t until,
                              struct dr_error *error) {
    if (offset >= window->start && offset + size <= window->start + window->filled)
        return window->data + (offset - window->start);
    if (size > DR_WINDOW_BYTES || window->fixed)
        return NULL;
    uint64_t wanted = until > offset + size ? until - offset : size;
    if (wanted > DR_WINDOW_BYTES)
        wanted = DR_WINDOW_BYTES;
    window->start = offset;
    window->filled = 0;
    while (window->filled < size) {
        ssize_t n = DR_RETRY(dr_sys.pread(window->fd, window->data + window->filled, (size_t)wanted - window->filled,
                                          (off_t)(offset + window->filled)));
        if (n < 0) {
            dr_error_io(error, (int)-n, DR_CALL_READ, window->path, (int64_t)offset, (int64_t)wanted);
            return NULL;
        }
        if (n == 0) {
            dr_error_corrupt(error, window->path, (int64_t)(offset + window->filled), DR_NO_ITEM,
                             "the file ends inside a record");
            return NULL;
        }
        window->filled += (size_t)n;
    }
    return window->data;
}
