/* Boxes of elements. See box.h. */
#include "plan/box.h"

#include "base/hash.h"

#include <stdio.h>

#define PRIME (((uint64_t)1 << 61) - 1)

static uint64_t multiply(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    uint64_t sum = (uint64_t)(product & PRIME) + (uint64_t)(product >> 61);
    return sum >= PRIME ? sum - PRIME : sum;
}

/* The sum of the weights of coordinates below x. */
static uint64_t weight_below(int dimension, int64_t x) {
    return dr_hash_wide((uint64_t)dimension, &x, sizeof x) % PRIME;
}

uint64_t dr_box_measure(const int64_t *offsets, const int64_t *lengths, int ndim) {
    uint64_t product = 1;
    for (int d = 0; d < ndim; d++) {
        int64_t from = offsets ? offsets[d] : 0;
        uint64_t lo = weight_below(d, from), hi = weight_below(d, from + lengths[d]);
        product = multiply(product, hi >= lo ? hi - lo : hi + PRIME - lo);
    }
    return product;
}

uint64_t dr_box_add_measures(uint64_t a, uint64_t b) { return (a + b) % PRIME; }

double dr_box_volume(const int64_t *lengths, int ndim) {
    double volume = 1;
    for (int d = 0; d < ndim; d++)
        volume *= (double)lengths[d];
    return volume;
}

bool dr_box_is_empty(const int64_t *lengths, int ndim) {
    for (int d = 0; d < ndim; d++)
        if (lengths[d] == 0)
            return true;
    return false;
}

void dr_box_write_sizes(char *out, size_t room, const int64_t *sizes, int ndim) {
    size_t n = (size_t)snprintf(out, room, "[");
    for (int d = 0; d < ndim && n < room; d++)
        n += (size_t)snprintf(out + n, room - n, "%s%lld", d ? ", " : "", (long long)sizes[d]);
    if (n < room)
        snprintf(out + n, room - n, "]");
}

void dr_box_write(char *out, size_t room, const int64_t *offsets, const int64_t *lengths, int ndim) {
    size_t n = (size_t)snprintf(out, room, "[");
    for (int d = 0; d < ndim && n < room; d++)
        n += (size_t)snprintf(out + n, room - n, "%s%lld:%lld", d ? ", " : "", (long long)offsets[d],
                              (long long)(offsets[d] + lengths[d]));
    if (n < room)
        snprintf(out + n, room - n, "]");
}
