/*
 * Floating-point elements made into others, as torch's Tensor.to() makes them: rounded to the nearest, ties to even.
 *
 * Everything goes through float32, a block at a time that stays in the cache. A dtype's decoder makes float32 of its
 * elements, its encoder makes its elements of float32, each times a factor. Both exist twice, in plain C and for
 * processors with AVX2, which are chosen when the program runs. Nothing here keeps state or allocates.
 */
#ifndef DCPRING_ELEMENTS_H
#define DCPRING_ELEMENTS_H

#include "base/dtype.h"
#include "base/processor.h"

#include <stddef.h>

enum { DR_ELEMENTS_BLOCK = 512 }; /* elements that callers decode at a time */

/* Neither need be aligned, nor may they overlap. */
typedef void dr_decode(const void *from, size_t count, float *to);
typedef void dr_encode(const float *from, size_t count, float factor, void *to);

struct dr_codec {
    dr_decode *decode; /* exact, but for float64, which is rounded */
    dr_encode *encode; /* NULL: there is none */
};

/* Whether a byte holds two elements, the first in its lower half. */
bool dr_is_packed(const struct dr_dtype *dtype);

/* NULL for a dtype that is no float, or that has none. */
const struct dr_codec *dr_codec_of(const struct dr_dtype *dtype, enum dr_simd simd);

/* Converts `count` elements, which are one behind the other; false: there is no such conversion. */
bool dr_convert(const struct dr_dtype *from, const struct dr_dtype *to, const void *source, void *out, size_t count);

#endif
