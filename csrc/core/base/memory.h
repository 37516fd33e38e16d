/*
 * Every allocation of the core, so that tests can let the Nth one fail.
 *
 * They are the C library's, and free() frees them; only dr_memory_fails comes
 * before. Like dr_sys it is only set while nothing of the core is at work.
 */
#ifndef DCPRING_MEMORY_H
#define DCPRING_MEMORY_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Whether the allocation at hand shall fail; NULL, which it is but for tests: none shall. */
extern bool (*dr_memory_fails)(void);

static inline bool dr_memory_refused(void) { return dr_memory_fails && dr_memory_fails(); }

static inline void *dr_malloc(size_t size) { return dr_memory_refused() ? NULL : malloc(size); }

static inline void *dr_calloc(size_t count, size_t size) { return dr_memory_refused() ? NULL : calloc(count, size); }

static inline void *dr_realloc(void *data, size_t size) { return dr_memory_refused() ? NULL : realloc(data, size); }

static inline char *dr_strdup(const char *text) { return dr_memory_refused() ? NULL : strdup(text); }

static inline char *dr_strndup(const char *text, size_t size) {
    return dr_memory_refused() ? NULL : strndup(text, size);
}

#endif
