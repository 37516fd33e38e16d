/*
 * Boxes of a tensor's elements: offsets and lengths in each dimension.
 *
 * Whether boxes tile another one exactly is found in one pass, without
 * comparing any two of them. Give every coordinate of every dimension a random
 * weight: a box then has a measure, the product over its dimensions of the sum
 * of the weights it spans. Boxes that tile a box have measures that add up to
 * its own. If they do not tile it, the difference is a polynomial in the weights
 * that is not zero, and by the Schwartz-Zippel lemma vanishes with a probability
 * of at most dimensions / 2^61. Nobody outside of the process knows the weights.
 */
#ifndef DCPRING_BOX_H
#define DCPRING_BOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* offsets NULL: zeros. */
uint64_t dr_box_measure(const int64_t *offsets, const int64_t *lengths, int ndim);
/* The measure of two boxes that share nothing. */
uint64_t dr_box_add_measures(uint64_t a, uint64_t b);

/* Elements, roughly: for messages. */
double dr_box_volume(const int64_t *lengths, int ndim);

bool dr_box_is_empty(const int64_t *lengths, int ndim);

/* Writes "[4, 8]". */
void dr_box_write_sizes(char *out, size_t room, const int64_t *sizes, int ndim);
/* Writes "[0:4, 8:16]". */
void dr_box_write(char *out, size_t room, const int64_t *offsets, const int64_t *lengths, int ndim);

#endif
