/* Formats of floating-point elements, and the loops that decode and encode them. See elements.h. */
#include "base/elements.h"

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The loops are written for the compiler to make vector instructions of: without branches, choosing among integers. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    uint32_t mask = 0u - (uint32_t)condition;
    return (yes & mask) | (no & ~mask);
}

/* ---- formats of up to 16 bits: sign, exponent, mantissa ---- */

/* Which codes have no finite value. */
enum special {
    IEEE,      /* the highest exponent: infinities and NaN */
    ALL_ONES,  /* NaN where all bits but the sign are set */
    MINUS_ZERO /* NaN where minus zero would be */
};

struct format {
    int exponent_bits, mantissa_bits, bias;
    enum special special;
};

static const struct format float16 = {5, 10, 15, IEEE}, e5m2 = {5, 2, 15, IEEE}, e4m3fn = {4, 3, 7, ALL_ONES},
                           e5m2fnuz = {5, 2, 16, MINUS_ZERO}, e4m3fnuz = {4, 3, 8, MINUS_ZERO};

enum { NAN_BITS = 0x7fc00000, INFINITY_BITS = 0x7f800000 };

/* `f` is a constant where this is called: nothing of it is left in the loop. */
INLINE uint32_t decode_bits(const struct format f, uint32_t code) {
    const int width = f.exponent_bits + f.mantissa_bits, shift = 23 - f.mantissa_bits;
    const uint32_t most = (1u << width) - 1, sign = code >> width, rest = code & most;
    const uint32_t normal = (rest << shift) + ((uint32_t)(127 - f.bias) << 23);
    const float unit = float_of((uint32_t)(127 + 1 - f.bias - f.mantissa_bits) << 23);
    uint32_t bits = choose(rest < 1u << f.mantissa_bits, bits_of((float)(int32_t)rest * unit), normal);
    if (f.special == IEEE)
        bits = choose(rest > most - (1u << f.mantissa_bits), rest << shift | INFINITY_BITS, bits);
    if (f.special == ALL_ONES)
        bits = choose(rest == most, NAN_BITS, bits);
    if (f.special == MINUS_ZERO)
        bits = choose(code == 1u << width, NAN_BITS, bits);
    return bits | sign << 31;
}

/* What is too large becomes infinite; in formats without infinities the largest number, as in torch since 2.13. */
INLINE uint32_t encode_bits(const struct format f, uint32_t bits) {
    const int width = f.exponent_bits + f.mantissa_bits, shift = 23 - f.mantissa_bits;
    const uint32_t most = (1u << width) - 1, sign = bits >> 31, size = bits & 0x7fffffffu;
    const uint32_t smallest = (uint32_t)(128 - f.bias) << 23, infinite = most - (1u << f.mantissa_bits) + 1;
    /* Added to a small number, this leaves the number's mantissa, rounded, in its own lowest bits. */
    const uint32_t magic = (uint32_t)(127 - f.bias + shift + 1) << 23;
    const uint32_t subnormal = bits_of(float_of(size) + float_of(magic)) - magic;
    const uint32_t rounded = (size + ((1u << (shift - 1)) - 1) + (size >> shift & 1)) >> shift;
    uint32_t code = choose(size < smallest, subnormal, rounded - ((uint32_t)(127 - f.bias) << f.mantissa_bits));
    const uint32_t largest = f.special == IEEE ? infinite : most - 1;
    code = choose(code > largest, largest, code);
    const uint32_t nan = f.special == IEEE && f.mantissa_bits > 2 ? infinite | 1u << (f.mantissa_bits - 1) : most;
    return choose(size > INFINITY_BITS, nan, code) | sign << width;
}

INLINE uint32_t round_to_bfloat16(uint32_t bits) {
    return choose((bits & 0x7fffffffu) > INFINITY_BITS, 0x7fc0, (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* A power of two; the highest code is NaN. */
INLINE uint32_t power_of_two(uint32_t code) {
    return choose(code == 255, NAN_BITS, choose(code == 0, 1u << 22, code << 23));
}

/* One of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. */
INLINE uint32_t decode_e2m1(uint32_t code) {
    const uint32_t rest = code & 7;
    return choose(rest < 2, rest * (126u << 23), (rest << 22) + (126u << 23)) | (code & 8) << 28;
}

/* ---- loops for any processor ---- */

#define DECODER(name, attribute, type, bits) \
    attribute static void decode_##name(const void *from, size_t count, float *to) { \
        const uint8_t *restrict in = from; \
        float *restrict out = to; \
        for (size_t i = 0; i < count; i++) { \
            type code; \
            memcpy(&code, in + i * sizeof code, sizeof code); \
            out[i] = float_of(bits); \
        } \
    }

#define ENCODER(name, attribute, type, bits) \
    attribute static void encode_##name(const float *from, size_t count, float factor, void *to) { \
        const float *restrict in = from; \
        uint8_t *restrict out = to; \
        for (size_t i = 0; i < count; i++) { \
            const uint32_t value = bits_of(in[i] * factor); \
            const type code = (type)(bits); \
            memcpy(out + i * sizeof code, &code, sizeof code); \
        } \
    }

DECODER(float64, , double, bits_of((float)code))
DECODER(float32, , uint32_t, code)
DECODER(bfloat16, , uint16_t, (uint32_t)code << 16)
DECODER(float16, , uint16_t, decode_bits(float16, code))
DECODER(e5m2, , uint8_t, decode_bits(e5m2, code))
DECODER(e4m3fn, , uint8_t, decode_bits(e4m3fn, code))
DECODER(e5m2fnuz, , uint8_t, decode_bits(e5m2fnuz, code))
DECODER(e4m3fnuz, , uint8_t, decode_bits(e4m3fnuz, code))
DECODER(e8m0, , uint8_t, power_of_two(code))
ENCODER(float32, , uint32_t, value)
ENCODER(bfloat16, , uint16_t, round_to_bfloat16(value))
ENCODER(float16, , uint16_t, encode_bits(float16, value))
ENCODER(e5m2, , uint8_t, encode_bits(e5m2, value))
ENCODER(e4m3fn, , uint8_t, encode_bits(e4m3fn, value))

/* The first of two elements is in the lower half of the byte. */
static void decode_e2m1x2(const void *from, size_t count, float *to) {
    const uint8_t *in = from;
    size_t i = 0;
    for (; i + 2 <= count; i += 2) {
        to[i] = float_of(decode_e2m1(in[i / 2] & 15u));
        to[i + 1] = float_of(decode_e2m1(in[i / 2] >> 4));
    }
    if (i < count)
        to[i] = float_of(decode_e2m1(in[i / 2] & 15u));
}

static const struct {
    const char *name;
    struct dr_codec codec;
} codecs[] = {
    {"float32", {decode_float32, encode_float32}}, {"bfloat16", {decode_bfloat16, encode_bfloat16}},
    {"float16", {decode_float16, encode_float16}}, {"float8_e4m3fn", {decode_e4m3fn, encode_e4m3fn}},
    {"float8_e5m2", {decode_e5m2, encode_e5m2}},   {"float64", {decode_float64, NULL}},
    {"float8_e4m3fnuz", {decode_e4m3fnuz, NULL}},  {"float8_e5m2fnuz", {decode_e5m2fnuz, NULL}},
    {"float8_e8m0fnu", {decode_e8m0, NULL}},       {"float4_e2m1fn_x2", {decode_e2m1x2, NULL}},
};

enum { CODECS = sizeof codecs / sizeof *codecs };

/* ---- loops for AVX2 and F16C ---- */

#if defined(__x86_64__)

#define WITH_AVX2 __attribute__((target("avx2,f16c")))

DECODER(float32_avx2, WITH_AVX2, uint32_t, code)
DECODER(bfloat16_avx2, WITH_AVX2, uint16_t, (uint32_t)code << 16)
ENCODER(e5m2_avx2, WITH_AVX2, uint8_t, encode_bits(e5m2, value))
ENCODER(e4m3fn_avx2, WITH_AVX2, uint8_t, encode_bits(e4m3fn, value))

#define LOAD(address) _mm_loadu_si128((const __m128i *)(const void *)(address))
#define STORE(address, bytes) _mm_storeu_si128((__m128i *)(void *)(address), bytes)

/* Eight numbers of 16 bits, and eight more. */
WITH_AVX2 INLINE void store_halves(float *to, __m256i halves, __m256 factor) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor));
    _mm256_storeu_ps(to + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor));
}

WITH_AVX2 static void decode_float16_avx2(const void *from, size_t count, float *to) {
    const uint8_t *in = from;
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(LOAD(in + 2 * i)));
    if (i < count)
        decode_float16(in + 2 * i, count - i, to + i);
}

/* The upper half of a float16. */
WITH_AVX2 static void decode_e5m2_avx2(const void *from, size_t count, float *to) {
    const uint8_t *in = from;
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        store_halves(to + i, _mm256_slli_epi16(_mm256_cvtepu8_epi16(LOAD(in + i)), 8), _mm256_set1_ps(1));
    if (i < count)
        decode_e5m2(in + i, count - i, to + i);
}

/* As the bits of a float16 they stand for the 256th part: its bias is 8 more. */
WITH_AVX2 static void decode_e4m3fn_avx2(const void *from, size_t count, float *to) {
    const __m256i most = _mm256_set1_epi16(0x7f), nan = _mm256_set1_epi16(0x7e00), sign = _mm256_set1_epi16(0x80);
    const uint8_t *in = from;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i codes = _mm256_cvtepu8_epi16(LOAD(in + i)), rest = _mm256_and_si256(codes, most);
        const __m256i size =
            _mm256_or_si256(_mm256_slli_epi16(rest, 7), _mm256_and_si256(_mm256_cmpeq_epi16(rest, most), nan));
        const __m256i signs = _mm256_slli_epi16(_mm256_and_si256(codes, sign), 8);
        store_halves(to + i, _mm256_or_si256(size, signs), _mm256_set1_ps(256));
    }
    if (i < count)
        decode_e4m3fn(in + i, count - i, to + i);
}

/* A table of 16 gives the upper byte of each number as a float16; the lower is 0. */
WITH_AVX2 static void decode_e2m1x2_avx2(const void *from, size_t count, float *to) {
    const __m128i upper = _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40,
                                        -0x3e, -0x3c, -0x3a);
    const __m128i low = _mm_set1_epi8(15);
    const uint8_t *in = from;
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m128i codes = LOAD(in + i / 2);
        const __m128i even = _mm_shuffle_epi8(upper, _mm_and_si128(codes, low));
        const __m128i odd = _mm_shuffle_epi8(upper, _mm_and_si128(_mm_srli_epi16(codes, 4), low));
        const __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
        store_halves(to + i, _mm256_slli_epi16(_mm256_cvtepu8_epi16(first), 8), _mm256_set1_ps(1));
        store_halves(to + i + 16, _mm256_slli_epi16(_mm256_cvtepu8_epi16(second), 8), _mm256_set1_ps(1));
    }
    if (i < count)
        decode_e2m1x2(in + i / 2, count - i, to + i);
}

/* The upper halves of eight float32, rounded, as numbers of 32 bits. */
WITH_AVX2 INLINE __m256i upper_halves(const float *from, __m256 factor) {
    const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(from), factor);
    const __m256i bits = _mm256_castps_si256(value),
                  is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(NAN_BITS), is_nan), 16);
}

WITH_AVX2 static void encode_float32_avx2(const float *from, size_t count, float factor, void *to) {
    const __m256 factors = _mm256_set1_ps(factor);
    uint8_t *out = to;
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps((float *)(void *)(out + 4 * i), _mm256_mul_ps(_mm256_loadu_ps(from + i), factors));
    if (i < count)
        encode_float32(from + i, count - i, factor, out + 4 * i);
}

WITH_AVX2 static void encode_bfloat16_avx2(const float *from, size_t count, float factor, void *to) {
    const __m256 factors = _mm256_set1_ps(factor);
    uint8_t *out = to;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256i packed =
            _mm256_packus_epi32(upper_halves(from + i, factors), upper_halves(from + i + 8, factors));
        _mm256_storeu_si256((__m256i *)(void *)(out + 2 * i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    if (i < count)
        encode_bfloat16(from + i, count - i, factor, out + 2 * i);
}

WITH_AVX2 static void encode_float16_avx2(const float *from, size_t count, float factor, void *to) {
    const __m256 factors = _mm256_set1_ps(factor);
    uint8_t *out = to;
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        STORE(out + 2 * i,
              _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(from + i), factors), _MM_FROUND_TO_NEAREST_INT));
    if (i < count)
        encode_float16(from + i, count - i, factor, out + 2 * i);
}

/* In the order of `codecs`. */
static const struct dr_codec codecs_avx2[CODECS] = {
    {decode_float32_avx2, encode_float32_avx2},
    {decode_bfloat16_avx2, encode_bfloat16_avx2},
    {decode_float16_avx2, encode_float16_avx2},
    {decode_e4m3fn_avx2, encode_e4m3fn_avx2},
    {decode_e5m2_avx2, encode_e5m2_avx2},
    {decode_float64, NULL},
    {decode_e4m3fnuz, NULL},
    {decode_e5m2fnuz, NULL},
    {decode_e8m0, NULL},
    {decode_e2m1x2_avx2, NULL},
};
#endif

/* ---- by dtype ---- */

bool dr_is_packed(const struct dr_dtype *dtype) { return strcmp(dtype->name, "float4_e2m1fn_x2") == 0; }

const struct dr_codec *dr_codec_of(const struct dr_dtype *dtype, enum dr_simd simd) {
    for (size_t i = 0; i < CODECS; i++) {
        if (strcmp(codecs[i].name, dtype->name) != 0)
            continue;
#if defined(__x86_64__)
        if (simd == DR_SIMD_BEST && dr_has_avx2())
            return &codecs_avx2[i];
#endif
        (void)simd;
        return &codecs[i].codec;
    }
    return NULL;
}

bool dr_convert(const struct dr_dtype *from, const struct dr_dtype *to, const void *source, void *out, size_t count) {
    const struct dr_codec *in = dr_codec_of(from, DR_SIMD_BEST), *after = dr_codec_of(to, DR_SIMD_BEST);
    if (!in || !after || !after->encode)
        return false;
    float block[DR_ELEMENTS_BLOCK];
    const char *next = source;
    char *end = out;
    for (size_t size; count > 0; count -= size) {
        size = count < DR_ELEMENTS_BLOCK ? count : DR_ELEMENTS_BLOCK;
        in->decode(next, size, block);
        after->encode(block, size, 1, end);
        next += dr_is_packed(from) ? size / 2 : size * from->item_size;
        end += size * to->item_size;
    }
    return true;
}
