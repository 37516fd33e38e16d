/*
 * Comparing element by element, a block at a time. See compare.h.
 *
 * A block whose bytes are the same costs a memcmp, and with floating point a
 * look for NaN. In others the elements become doubles, which hold all of them
 * exactly but 64-bit integers; the distance of those is computed as integers.
 */
#include "tools/compare.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { BLOCK = 512, SMALL = 256 };

/* What a block needs besides its bytes. */
struct scratch {
    double a[2 * BLOCK], b[2 * BLOCK]; /* complex numbers take two */
    double distance[BLOCK];            /* NaN where an element is */
    double size[BLOCK];                /* the larger of the absolute values */
    bool same[BLOCK], both_nan[BLOCK];
    double small[SMALL]; /* what each byte stands for in an 8-bit format */
};

/* ---- elements as doubles ---- */

#define DECODE(name, type) \
    static void decode_##name(const void *from, size_t count, const double *small, double *to) { \
        (void)small; \
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

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void decode_bfloat16(const void *from, size_t count, const double *small, double *to) {
    (void)small;
    const uint16_t *in = from;
    for (size_t i = 0; i < count; i++)
        to[i] = (double)float_of((uint32_t)in[i] << 16);
}

static void decode_float16(const void *from, size_t count, const double *small, double *to) {
    (void)small;
    const uint16_t *in = from;
    for (size_t i = 0; i < count; i++) {
        uint32_t rest = in[i] & 0x7fffu;
        /* The exponent's bias is 112 less than a float's, denormals included; all ones stay all ones. */
        float size = rest >= 0x7c00u ? float_of(rest << 13 | 0x7f800000u) : float_of(rest << 13) * 0x1p112f;
        to[i] = in[i] & 0x8000u ? -(double)size : (double)size;
    }
}

static void decode_small(const void *from, size_t count, const double *small, double *to) {
    const uint8_t *in = from;
    for (size_t i = 0; i < count; i++)
        to[i] = small[in[i]];
}

/* ---- 8-bit formats ---- */

/* How the codes with no finite value are chosen. */
enum special {
    IEEE,      /* the highest exponent: infinities and NaN */
    ALL_ONES,  /* NaN where all bits but the sign are set */
    MINUS_ZERO /* NaN where minus zero would be */
};

struct small_format {
    int exponent_bits, mantissa_bits, bias;
    enum special special;
};

static const struct small_format e5m2 = {5, 2, 15, IEEE}, e4m3fn = {4, 3, 7, ALL_ONES},
                                 e5m2fnuz = {5, 2, 16, MINUS_ZERO}, e4m3fnuz = {4, 3, 8, MINUS_ZERO},
                                 e8m0 = {8, 0, 127, ALL_ONES};

static double small_value(const struct small_format *f, unsigned code) {
    unsigned exponent = (code >> f->mantissa_bits) & ((1u << f->exponent_bits) - 1);
    unsigned mantissa = code & ((1u << f->mantissa_bits) - 1), one = 1u << f->mantissa_bits;
    bool signless = f->exponent_bits + f->mantissa_bits == 8, negative = !signless && code & 0x80u;
    unsigned rest = signless ? code : code & 0x7fu;
    if (f->special == MINUS_ZERO && code == 0x80u)
        return NAN;
    if (f->special == ALL_ONES && rest == (signless ? 0xffu : 0x7fu))
        return NAN;
    if (f->special == IEEE && exponent == (1u << f->exponent_bits) - 1)
        return mantissa ? NAN : negative ? -INFINITY : INFINITY;
    double value = exponent || signless ? ldexp(one + mantissa, (int)exponent - f->bias - f->mantissa_bits)
                                        : ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return negative ? -value : value;
}

/* ---- types ---- */

struct type {
    const char *name;
    void (*decode)(const void *from, size_t count, const double *small, double *to); /* NULL: no numbers */
    const struct small_format *small;
    bool is_float, is_complex;
};

static const struct type types[] = {
    {"float32", decode_float32, NULL, true, false},
    {"float64", decode_float64, NULL, true, false},
    {"float16", decode_float16, NULL, true, false},
    {"bfloat16", decode_bfloat16, NULL, true, false},
    {"int64", decode_int64, NULL, false, false},
    {"int32", decode_int32, NULL, false, false},
    {"int16", decode_int16, NULL, false, false},
    {"int8", decode_int8, NULL, false, false},
    {"uint8", decode_uint8, NULL, false, false},
    {"bool", decode_uint8, NULL, false, false},
    {"complex64", decode_float32, NULL, true, true},
    {"complex128", decode_float64, NULL, true, true},
    {"complex32", decode_float16, NULL, true, true},
    {"uint16", decode_uint16, NULL, false, false},
    {"uint32", decode_uint32, NULL, false, false},
    {"uint64", decode_uint64, NULL, false, false},
    {"float8_e5m2", decode_small, &e5m2, true, false},
    {"float8_e4m3fn", decode_small, &e4m3fn, true, false},
    {"float8_e5m2fnuz", decode_small, &e5m2fnuz, true, false},
    {"float8_e4m3fnuz", decode_small, &e4m3fnuz, true, false},
    {"float8_e8m0fnu", decode_small, &e8m0, true, false},
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
        type->decode(data, 2 * count, s->small, s->a);
        for (size_t i = 0; i < count; i++)
            found += s->a[2 * i] != s->a[2 * i] || s->a[2 * i + 1] != s->a[2 * i + 1];
    } else {
        type->decode(data, count, s->small, s->a);
        for (size_t i = 0; i < count; i++)
            found += s->a[i] != s->a[i];
    }
    nans[0] += found;
    nans[1] += found;
}

static void measure(const struct type *type, const char *a, const char *b, size_t count, size_t item_size,
                    struct scratch *s, uint64_t nans[2]) {
    size_t scalars = type->is_complex ? 2 * count : count;
    type->decode(a, scalars, s->small, s->a);
    type->decode(b, scalars, s->small, s->b);
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
    *out = (struct dr_difference){.first = -1, .farthest = -1};
    for (unsigned code = 0; type->small && code < SMALL; code++)
        s.small[code] = small_value(type->small, code);
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
