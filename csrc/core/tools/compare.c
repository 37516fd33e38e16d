/*
 * Comparing element by element, a block at a time. See compare.h.
 *
 * A block whose bytes are the same costs a memcmp, and with floating point a
 * look for NaN. In others the elements become doubles, which hold all of them
 * exactly but 64-bit integers; the distance of those is computed as integers.
 */
#include "tools/compare.h"

#include "base/elements.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = 512 };

/* What a block needs besides its bytes. */
struct scratch {
    double a[2 * BLOCK], b[2 * BLOCK]; /* complex numbers take two */
    double distance[BLOCK];            /* NaN where an element is */
    double size[BLOCK];                /* the larger of the absolute values */
    bool same[BLOCK], both_nan[BLOCK];
    const struct dr_codec *codec; /* of floats that have one */
};

/* ---- elements as doubles ---- */

#define DECODE(name, type) \
    static void decode_##name(const void *from, size_t count, const struct dr_codec *codec, double *to) { \
        (void)codec; \
        const type *in = from; \
        for (size_t i = 0; i < count; i++) \
            to[i] = (double)in[i]; \
    }

DECODE(float32, float)
DECODE(float64, double)
DECODE(int8, int8_t)
DECODE(int16, int16_t)
DECODE(int32, int32_t)
DECODE(int64, int64_t)
DECODE(uint8, uint8_t)
DECODE(uint16, uint16_t)
DECODE(uint32, uint32_t)
DECODE(uint64, uint64_t)

static void decode_float(const void *from, size_t count, const struct dr_codec *codec, double *to) {
    float block[2 * BLOCK];
    codec->decode(from, count, block);
    for (size_t i = 0; i < count; i++)
        to[i] = (double)block[i];
}

/* ---- types ---- */

struct type {
    const char *name;
    void (*decode)(const void *from, size_t count, const struct dr_codec *codec, double *to); /* NULL: no numbers */
    bool is_float, is_complex;
};

static const struct type types[] = {
    {"float32", decode_float32, true, false},       {"float64", decode_float64, true, false},
    {"float16", decode_float, true, false},         {"bfloat16", decode_float, true, false},
    {"int64", decode_int64, false, false},          {"int32", decode_int32, false, false},
    {"int16", decode_int16, false, false},          {"int8", decode_int8, false, false},
    {"uint8", decode_uint8, false, false},          {"bool", decode_uint8, false, false},
    {"complex64", decode_float32, true, true},      {"complex128", decode_float64, true, true},
    {"complex32", decode_float, true, true},        {"uint16", decode_uint16, false, false},
    {"uint32", decode_uint32, false, false},        {"uint64", decode_uint64, false, false},
    {"float8_e5m2", decode_float, true, false},     {"float8_e4m3fn", decode_float, true, false},
    {"float8_e5m2fnuz", decode_float, true, false}, {"float8_e4m3fnuz", decode_float, true, false},
    {"float8_e8m0fnu", decode_float, true, false},
};

static const struct type *type_of(const struct dr_dtype *dtype) {
    static const struct type none = {0};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, dtype->name) == 0)
            return &types[i];
    return &none;
}

/* ---- a block ---- */

#define MARK(name, type) \
    static void mark_##name(const void *left, const void *right, size_t count, bool *same) { \
        const type *a = left, *b = right; \
        for (size_t i = 0; i < count; i++) \
            same[i] = a[i] == b[i]; \
    }

MARK(1, uint8_t)
MARK(2, uint16_t)
MARK(4, uint32_t)
MARK(8, uint64_t)

static void mark_same(const void *a, const void *b, size_t count, size_t item_size, bool *same) {
    switch (item_size) {
    case 1:
        mark_1(a, b, count, same);
        return;
    case 2:
        mark_2(a, b, count, same);
        return;
    case 4:
        mark_4(a, b, count, same);
        return;
    case 8:
        mark_8(a, b, count, same);
        return;
    }
    for (size_t i = 0; i < count; i++)
        same[i] = memcmp((const char *)a + i * item_size, (const char *)b + i * item_size, item_size) == 0;
}

static void measure_reals(struct scratch *s, size_t count, uint64_t nans[2]) {
    uint64_t in_a = 0, in_b = 0;
    for (size_t i = 0; i < count; i++) {
        double a = s->a[i], b = s->b[i];
        bool nan_a = a != a, nan_b = b != b;
        in_a += nan_a;
        in_b += nan_b;
        s->both_nan[i] = nan_a & nan_b;
        s->distance[i] = fabs(a - b);
        s->size[i] = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
    }
    nans[0] += in_a;
    nans[1] += in_b;
}

static void measure_complex(struct scratch *s, size_t count, uint64_t nans[2]) {
    for (size_t i = 0; i < count; i++) {
        const double *a = s->a + 2 * i, *b = s->b + 2 * i;
        bool nan_a = a[0] != a[0] || a[1] != a[1], nan_b = b[0] != b[0] || b[1] != b[1];
        nans[0] += nan_a;
        nans[1] += nan_b;
        s->both_nan[i] = nan_a && nan_b;
        double size_a = hypot(a[0], a[1]), size_b = hypot(b[0], b[1]);
        s->size[i] = size_a > size_b ? size_a : size_b;
        s->distance[i] = nan_a || nan_b ? NAN : hypot(a[0] - b[0], a[1] - b[1]);
    }
}

/* Doubles would take neighbours beyond 2^53 for the same. */
static void measure_exactly(const void *left, const void *right, size_t count, bool is_signed, double *distance) {
    const uint64_t *a = left, *b = right;
    const uint64_t flip = is_signed ? (uint64_t)1 << 63 : 0; /* makes the order that of unsigned numbers */
    for (size_t i = 0; i < count; i++) {
        uint64_t x = a[i] ^ flip, y = b[i] ^ flip;
        distance[i] = (double)(x > y ? x - y : y - x);
    }
}

static bool is_close(const struct scratch *s, size_t i, const struct dr_tolerance *t) {
    if (s->both_nan[i])
        return true;
    double allowed = t->absolute + t->relative * s->size[i];
    return isfinite(s->distance[i]) && s->distance[i] <= allowed;
}

static void tally(const struct scratch *s, size_t count, int64_t base, const struct dr_tolerance *tolerance,
                  bool numbers, struct dr_difference *out) {
    const bool tolerant = numbers && (tolerance->absolute > 0 || tolerance->relative > 0);
    for (size_t i = 0; i < count; i++) {
        if (s->same[i])
            continue;
        out->changed++;
        if (!tolerant || !is_close(s, i, tolerance)) {
            out->differing++;
            if (out->first < 0)
                out->first = base + (int64_t)i;
        }
        if (!numbers || s->distance[i] != s->distance[i])
            continue;
        double distance = s->distance[i];
        if (distance > out->distance || out->farthest < 0) {
            out->distance = distance;
            out->farthest = base + (int64_t)i;
        }
        if (isinf(distance))
            out->relative = INFINITY;
        else if (distance > out->relative * s->size[i])
            out->relative = distance / s->size[i];
    }
}

static void count_nans(const struct type *type, const char *data, size_t count, struct scratch *s, uint64_t nans[2]) {
    uint64_t found = 0;
    if (type->is_complex) {
        type->decode(data, 2 * count, s->codec, s->a);
        for (size_t i = 0; i < count; i++)
            found += s->a[2 * i] != s->a[2 * i] || s->a[2 * i + 1] != s->a[2 * i + 1];
    } else {
        type->decode(data, count, s->codec, s->a);
        for (size_t i = 0; i < count; i++)
            found += s->a[i] != s->a[i];
    }
    nans[0] += found;
    nans[1] += found;
}

static void measure(const struct type *type, const char *a, const char *b, size_t count, size_t item_size,
                    struct scratch *s, uint64_t nans[2]) {
    size_t scalars = type->is_complex ? 2 * count : count;
    type->decode(a, scalars, s->codec, s->a);
    type->decode(b, scalars, s->codec, s->b);
    if (type->is_complex)
        measure_complex(s, count, nans);
    else
        measure_reals(s, count, nans);
    if (!type->is_float && item_size == 8)
        measure_exactly(a, b, count, type->decode == decode_int64, s->distance);
}

void dr_compare(const struct dr_dtype *dtype, const void *a, const void *b, size_t count,
                const struct dr_tolerance *tolerance, struct dr_difference *out) {
    const struct type *type = type_of(dtype);
    const size_t item_size = dtype->item_size;
    struct scratch s;
    s.codec = dr_codec_of(type->is_complex ? dr_dtype_by_name("float16") : dtype, DR_SIMD_BEST);
    *out = (struct dr_difference){.first = -1, .farthest = -1};
    for (size_t base = 0; base < count; base += BLOCK) {
        size_t size = count - base < BLOCK ? count - base : BLOCK;
        const char *left = (const char *)a + base * item_size, *right = (const char *)b + base * item_size;
        if (memcmp(left, right, size * item_size) == 0) {
            if (type->is_float)
                count_nans(type, left, size, &s, out->nans);
            continue;
        }
        mark_same(left, right, size, item_size, s.same);
        if (type->decode)
            measure(type, left, right, size, item_size, &s, out->nans);
        tally(&s, size, (int64_t)base, tolerance, type->decode != NULL, out);
    }
}
