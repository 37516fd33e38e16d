/*
 * Sorting, and finding in what is sorted.
 *
 * Counting sort: things whose keys are small numbers, brought into groups of the same key; within a group they stay
 * in their order. Three lines of the caller's do it:
 *
 *     uint64_t *next = dr_sort_starts(start, groups, keys, sizeof *keys, count);
 *     for (size_t i = 0; i < count; i++)
 *         sorted[next[keys[i]]++] = i;
 *
 * Those of group g are then sorted[start[g]] to sorted[start[g + 1]]. `next` is no array of its own, but start + 1:
 * next[g] is where g starts before the loop, and where g ends behind it, and that is what start[g + 1] has to be.
 */
#ifndef DCPRING_SORT_H
#define DCPRING_SORT_H

#include <stddef.h>
#include <stdint.h>

/* A key of what belongs to no group: it is not counted, and not to be placed. */
#define DR_SORT_NOWHERE UINT32_MAX

/*
 * Counts the keys, which are below `groups`; gives where each group's first one goes. `start` has room for groups + 2,
 * and is all zeros. Keys are uint32_t, `stride` bytes apart: they may be members of structs.
 */
static inline uint64_t *dr_sort_starts(uint64_t *start, size_t groups, const uint32_t *keys, size_t stride,
                                       size_t count) {
    uint64_t *next = start + 1;
    const char *at = (const char *)keys;
    for (size_t i = 0; i < count; i++, at += stride) {
        uint32_t key = *(const uint32_t *)(const void *)at;
        if (key != DR_SORT_NOWHERE)
            next[key + 1]++;
    }
    for (size_t g = 1; g < groups; g++)
        next[g] += next[g - 1];
    return next;
}

/* Of stretches that follow each other, from starts[i] to starts[i + 1], the one that `at` lies in; below the end of
 * all. */
static inline size_t dr_stretch_at(const uint64_t *starts, size_t count, uint64_t at) {
    size_t lo = 0, hi = count;
    while (hi - lo > 1) {
        size_t middle = lo + (hi - lo) / 2;
        if (starts[middle] <= at)
            lo = middle;
        else
            hi = middle;
    }
    return lo;
}

#endif
