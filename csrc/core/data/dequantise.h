/*
 * Tensors that are stored as small codes, of which each block has a scale of its own.
 *
 * What is stored is a tensor of bytes, with one or two codes in each; what is made of it has as many rows, in all
 * dimensions but the last. An element is its code's value times its block's scale, as float32, and is then rounded to
 * the dtype of the target: what torch makes of it. Nothing here keeps state or allocates.
 */
#ifndef DCPRING_DEQUANTISE_H
#define DCPRING_DEQUANTISE_H

#include "data/load.h"

/* How a box of such a tensor is made. Blocks begin before it where it was cut out of the middle of some. */
struct dr_quantised {
    const struct dr_dtype *codes, *target;
    int64_t columns;          /* elements in a row of the box */
    int64_t first;            /* 1: the first code of each row's first byte is not of the box */
    const float *scales;      /* of all blocks that the box touches, row-major; NULL: there are exponents */
    const uint8_t *exponents; /* the scales are 2 to the power of these less 127, up to 2 to the power of 128 */
    int64_t block_rows, block_columns;
    int64_t skip_rows, skip_columns; /* of the first blocks, less than they have */
};

/* Whether its numbers, and its dtypes, are of a box that can be made of `bytes` in each row. */
bool dr_quantised_good(const struct dr_quantised *form, int64_t bytes);

/* How many blocks a box of so many rows touches. */
int64_t dr_quantised_blocks(const struct dr_quantised *form, int64_t rows);

/*
 * Makes of the payload bytes [lo, hi), which `data` holds, what of read->memory is to be made of them. The read's
 * chunk, offsets and lengths are of bytes; the elements of the last dimension of its memory lie side by side.
 */
void dr_dequantise(const struct dr_read *read, uint64_t lo, uint64_t hi, const uint8_t *data);

#endif
