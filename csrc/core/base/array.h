/*
 * Arrays that grow: a pointer, a count and the room there is, kept by their
 * owner, who frees the pointer. An empty one is all zeros.
 */
#ifndef DCPRING_ARRAY_H
#define DCPRING_ARRAY_H

#include "base/error.h"
#include "base/memory.h"

/* The array with room for `more` elements behind the first `count`, at least doubled; NULL when that cannot be had. */
static inline void *dr_array_grown(void *array, size_t count, size_t *room, size_t more, size_t element) {
    size_t wanted = *room < 8 ? 16 : 2 * *room, needed, bytes;
    if (__builtin_add_overflow(count, more, &needed))
        return NULL;
    wanted = wanted > needed ? wanted : needed;
    void *grown = __builtin_mul_overflow(wanted, element, &bytes) ? NULL : dr_realloc(array, bytes);
    if (grown)
        *room = wanted;
    return grown;
}

/*
 * Makes room for `more` elements (1 at least) behind the first `count`: 0, or -ENOMEM and the array as it was. `array`
 * and `room` are the owner's variables.
 */
#define DR_ARRAY_RESERVE(array, count, room, more, error) \
    __extension__({ \
        size_t dr_count = (count), dr_more = (more); \
        bool dr_there = (room) - dr_count >= dr_more; \
        void *dr_grown = dr_there ? NULL : dr_array_grown((array), dr_count, &(room), dr_more, sizeof *(array)); \
        if (dr_grown) \
            (array) = dr_grown; \
        dr_there || dr_grown ? 0 : dr_error_memory(error); \
    })

#endif
