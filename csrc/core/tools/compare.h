/*
 * How two arrays of elements differ: how many, and by how much at most.
 *
 * Elements are compared by their bits, so a NaN is equal to the same NaN, and 0
 * is not -0. Distances are of the numbers that they stand for; those of complex
 * numbers are in the plane. Elements that are no numbers by themselves (two in
 * a byte) have none. Nothing here keeps state or allocates.
 */
#ifndef DCPRING_COMPARE_H
#define DCPRING_COMPARE_H

#include "base/dtype.h"

#include <stddef.h>
#include <stdint.h>

/* Close: |a - b| <= absolute + relative * max(|a|, |b|), or both are NaN. */
struct dr_tolerance {
    double absolute, relative;
};

struct dr_difference {
    uint64_t changed;   /* elements with other bits */
    uint64_t differing; /* of these, the ones that are not close; without a tolerance all of them */
    uint64_t nans[2];   /* elements of each array that are NaN */
    int64_t first;      /* the first that differs, -1 where none does */
    int64_t farthest;   /* the one with the largest distance, -1 where no two numbers have other bits */
    double distance;    /* there: |a - b| */
    double relative;    /* the largest |a - b| / max(|a|, |b|), maybe of another element; infinite where |a - b| is */
};

/* Compares `count` elements. Both arrays are aligned as the elements are. */
void dr_compare(const struct dr_dtype *dtype, const void *a, const void *b, size_t count,
                const struct dr_tolerance *tolerance, struct dr_difference *out);

#endif
