/* Digests: what they are by their definition, both ways to make them, and that a changed bit changes them. */
#include "base/bytes.h"
#include "base/digest.h"
#include "check.h"

typedef unsigned __int128 wide;

static const wide PRIME = ((wide)1 << 127) - 1;

static void make_key(struct rng *rng, struct dr_digest_key *key) {
    uint8_t bytes[DR_DIGEST_KEY_BYTES];
    rng_fill(rng, bytes, sizeof bytes);
    dr_digest_key_init(key, bytes);
}

/* ---- the definition, one bit and one word at a time ---- */

static wide times(wide a, wide b) {
    wide product = 0;
    for (; b; b >>= 1, a = a * 2 % PRIME)
        if (b & 1)
            product = (product + a) % PRIME;
    return product;
}

static uint32_t key_word(const struct dr_digest_key *key, size_t index) {
    return (uint32_t)(key->words[index / 2] >> (index % 2 ? 32 : 0));
}

static uint64_t nh(const struct dr_digest_key *key, const uint8_t *chunk, size_t size, size_t shift) {
    uint64_t sum = 0;
    for (size_t word = 0; word * 4 < size; word += 2) {
        uint32_t m[2];
        for (size_t i = 0; i < 2; i++)
            m[i] = (uint32_t)dr_get_le(chunk + 4 * (word + i), 4) + key_word(key, word + i + 2 * shift);
        sum += (uint64_t)m[0] * m[1];
    }
    return sum;
}

static void define(const struct dr_digest_key *key, const uint8_t *data, size_t size, uint8_t out[DR_DIGEST_BYTES]) {
    wide value = 0, low_62 = ((wide)1 << 62) - 1;
    for (size_t at = 0; at < size; at += DR_DIGEST_CHUNK) {
        uint8_t chunk[DR_DIGEST_CHUNK] = {0};
        size_t here = size - at < sizeof chunk ? size - at : sizeof chunk, padded = (here + 31) / 32 * 32;
        memcpy(chunk, data + at, here);
        for (size_t t = 0; t < 4; t += 2) {
            wide number = nh(key, chunk, padded, t) | (nh(key, chunk, padded, t + 1) & low_62) << 64;
            value = (times(value, key->point) + number) % PRIME;
        }
    }
    value = (times(value, key->point) + size) % PRIME;
    dr_put_le(out, (uint64_t)value, 8);
    dr_put_le(out + 8, (uint64_t)(value >> 64), 8);
}

static void as_defined(void) {
    struct rng rng = {70};
    uint8_t *data = check_alloc(9000);
    for (int i = 0; i < 400; i++) {
        struct dr_digest_key key;
        uint8_t expected[DR_DIGEST_BYTES], found[DR_DIGEST_BYTES];
        size_t size = rng_below(&rng, i % 4 ? 200 : 9000), at = rng_below(&rng, 9000 - size);
        make_key(&rng, &key);
        rng_fill(&rng, data, 9000);
        if (i % 7 == 0)
            memset(data, i % 2 ? 0xff : 0, 9000);
        define(&key, data + at, size, expected);
        dr_digest(&key, data + at, size, found);
        CHECK_BYTES(found, expected, sizeof found);
        dr_digest_by(DR_SIMD_NONE, &key, data + at, size, found);
        CHECK_BYTES(found, expected, sizeof found);
    }
    free(data);
}

/* The largest numbers that there can be. */
static void at_the_ends(void) {
    uint8_t bytes[DR_DIGEST_KEY_BYTES], *data = check_alloc(5000), expected[DR_DIGEST_BYTES], found[DR_DIGEST_BYTES];
    struct dr_digest_key key;
    for (int i = 0; i < 4; i++) {
        memset(bytes, i & 1 ? 0xff : 0, sizeof bytes);
        memset(data, i & 2 ? 0xff : 0, 5000);
        dr_digest_key_init(&key, bytes);
        define(&key, data, 5000, expected);
        dr_digest(&key, data, 5000, found);
        CHECK_BYTES(found, expected, sizeof found);
    }
    free(data);
}

static void every_bit_counts(void) {
    struct rng rng = {71};
    enum { SIZE = 2500 };
    uint8_t data[SIZE], before[DR_DIGEST_BYTES], after[DR_DIGEST_BYTES];
    struct dr_digest_key key;
    make_key(&rng, &key);
    rng_fill(&rng, data, SIZE);
    dr_digest(&key, data, SIZE, before);
    for (size_t bit = 0; bit < 8 * SIZE; bit++) {
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        dr_digest(&key, data, SIZE, after);
        CHECK(memcmp(before, after, sizeof after) != 0);
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (size_t size = 0; size < SIZE; size++) { /* zeros that are part of it, and those that pad it */
        uint8_t zeros[SIZE] = {0};
        dr_digest(&key, zeros, size, before);
        dr_digest(&key, zeros, size + 1, after);
        CHECK(memcmp(before, after, sizeof after) != 0);
    }
}

CHECK_MAIN({"as_defined", as_defined}, {"at_the_ends", at_the_ends}, {"every_bit_counts", every_bit_counts})
