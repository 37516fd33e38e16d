/* NH and a polynomial. See digest.h. */
#include "base/digest.h"

#include "base/bytes.h"
#include "base/processor.h"

#include <assert.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef unsigned __int128 wide;

#define PRIME (((wide)1 << 127) - 1)
#define LOW_126 (((wide)1 << 126) - 1)

/* What is summed at a time; the last one is padded with zeros. */
enum { STEP = 32 };

void dr_digest_key_init(struct dr_digest_key *key, const uint8_t bytes[DR_DIGEST_KEY_BYTES]) {
    for (size_t i = 0; i < DR_DIGEST_WORDS + DR_DIGEST_SUMS - 1; i++)
        key->words[i] = dr_get_le(bytes + 8 * i, 8);
    const uint8_t *point = bytes + sizeof key->words;
    key->point = ((wide)dr_get_le(point + 8, 8) << 64 | dr_get_le(point, 8)) & LOW_126;
}

/* ---- sums of a chunk ---- */

static inline uint64_t load(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t product(uint64_t word, uint64_t key) {
    return (uint64_t)((uint32_t)word + (uint32_t)key) * ((uint32_t)(word >> 32) + (uint32_t)(key >> 32));
}

static void add_plain(const uint64_t *key, const uint8_t *data, size_t steps, uint64_t sums[DR_DIGEST_SUMS]) {
    for (size_t i = 0; i < steps * (STEP / 8); i++) {
        uint64_t word = load(data + 8 * i);
        for (size_t t = 0; t < DR_DIGEST_SUMS; t++)
            sums[t] += product(word, key[i + t]);
    }
}

#if defined(__x86_64__)
#define WITH_AVX2 __attribute__((target("avx2")))

WITH_AVX2 static inline __m256i product_avx2(__m256i words, const uint64_t *key) {
    __m256i mixed = _mm256_add_epi32(words, _mm256_loadu_si256((const void *)key));
    return _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
}

WITH_AVX2 static void add_avx2(const uint64_t *key, const uint8_t *data, size_t steps, uint64_t sums[DR_DIGEST_SUMS]) {
    __m256i found[DR_DIGEST_SUMS] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                                     _mm256_setzero_si256()};
    for (size_t i = 0; i < steps; i++, key += STEP / 8) {
        __m256i words = _mm256_loadu_si256((const void *)(data + STEP * i));
        found[0] = _mm256_add_epi64(found[0], product_avx2(words, key));
        found[1] = _mm256_add_epi64(found[1], product_avx2(words, key + 1));
        found[2] = _mm256_add_epi64(found[2], product_avx2(words, key + 2));
        found[3] = _mm256_add_epi64(found[3], product_avx2(words, key + 3));
    }
    for (size_t t = 0; t < DR_DIGEST_SUMS; t++) {
        uint64_t lanes[STEP / 8];
        _mm256_storeu_si256((void *)lanes, found[t]);
        sums[t] += lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }
}
#endif

static void add(const uint64_t *key, const uint8_t *data, size_t steps, bool simd, uint64_t sums[DR_DIGEST_SUMS]) {
#if defined(__x86_64__)
    if (simd) {
        add_avx2(key, data, steps, sums);
        return;
    }
#endif
    (void)simd;
    add_plain(key, data, steps, sums);
}

/* ---- the polynomial ---- */

/* The same number modulo the prime; at most 2^127. */
static inline wide folded(wide x) { return (x & PRIME) + (x >> 127); }

/* a * b modulo the prime; a is at most 2^127, as the result is, and b below 2^126. */
static wide multiply(wide a, wide b) {
    uint64_t a0 = (uint64_t)a, a1 = (uint64_t)(a >> 64), b0 = (uint64_t)b, b1 = (uint64_t)(b >> 64);
    wide low = (wide)a0 * b0, high = (wide)a1 * b1;
    wide middle = (wide)a1 * b0 + (wide)a0 * b1; /* below 2^128, as a1 <= 2^63 and b1 < 2^62 */
    wide sum = folded(((middle & (UINT64_MAX >> 1)) << 64) + folded(low));
    return folded(sum + 2 * high + (middle >> 63));
}

static wide absorb(const struct dr_digest_key *key, wide value, uint64_t low, uint64_t high) {
    return folded(multiply(value, key->point) + (((wide)high << 64 | low) & LOW_126));
}

/* ---- both ---- */

static wide digest(const struct dr_digest_key *key, const uint8_t *at, size_t size, bool simd) {
    wide value = 0;
    for (size_t left = size; left > 0;) {
        size_t chunk = left < DR_DIGEST_CHUNK ? left : DR_DIGEST_CHUNK, steps = chunk / STEP, rest = chunk % STEP;
        uint64_t sums[DR_DIGEST_SUMS] = {0};
        add(key->words, at, steps, simd, sums);
        if (rest) {
            uint8_t last[STEP] = {0};
            memcpy(last, at + STEP * steps, rest);
            add(key->words + STEP / 8 * steps, last, 1, simd, sums);
        }
        value = absorb(key, value, sums[0], sums[1]);
        value = absorb(key, value, sums[2], sums[3]);
        at += chunk;
        left -= chunk;
    }
    value = absorb(key, value, size, 0);
    return value >= PRIME ? value - PRIME : value;
}

void dr_digest_by(enum dr_simd simd, const struct dr_digest_key *key, const void *data, size_t size,
                  uint8_t out[DR_DIGEST_BYTES]) {
    assert(size <= UINT32_MAX);
    wide value = digest(key, data, size, simd == DR_SIMD_BEST && dr_has_avx2());
    dr_put_le(out, (uint64_t)value, 8);
    dr_put_le(out + 8, (uint64_t)(value >> 64), 8);
}
