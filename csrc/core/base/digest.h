/*
 * Digests: 128 bits of a stretch of bytes, by which two stretches are found to
 * be equal without having both.
 *
 * It is a keyed universal hash: for two different stretches of the same length,
 * chosen without knowing the key, the keys for which their digests are equal
 * are fewer than one in 2^110. That holds by proof, and not by how well it looks
 * mixed: NH (Black et al., UMAC, CRYPTO 1999), four times with keys that are
 * shifted by a pair of words, makes 2 x 126 bits of each KiB, and a polynomial
 * modulo 2^127 - 1 makes one number of these. It is no cryptographic hash: who knows
 * the key can make stretches that collide.
 *
 * Digests are compared with others of the same key only. The key is stored
 * beside them.
 */
#ifndef DCPRING_DIGEST_H
#define DCPRING_DIGEST_H

#include "base/processor.h"

#include <stddef.h>
#include <stdint.h>

enum { DR_DIGEST_BYTES = 16, DR_DIGEST_CHUNK = 1024, DR_DIGEST_WORDS = DR_DIGEST_CHUNK / 8, DR_DIGEST_SUMS = 4 };

/* The key as it is given: random bytes, of which any will do. */
enum { DR_DIGEST_KEY_BYTES = 8 * (DR_DIGEST_WORDS + DR_DIGEST_SUMS + 1) };

struct dr_digest_key {
    uint64_t words[DR_DIGEST_WORDS + DR_DIGEST_SUMS - 1];
    unsigned __int128 point; /* where the polynomial is evaluated */
};

void dr_digest_key_init(struct dr_digest_key *key, const uint8_t bytes[DR_DIGEST_KEY_BYTES]);

/* Of at most 2^32 bytes. The same whatever `simd` says. */
void dr_digest_by(enum dr_simd simd, const struct dr_digest_key *key, const void *data, size_t size,
                  uint8_t out[DR_DIGEST_BYTES]);

static inline void dr_digest(const struct dr_digest_key *key, const void *data, size_t size,
                             uint8_t out[DR_DIGEST_BYTES]) {
    dr_digest_by(DR_SIMD_BEST, key, data, size, out);
}

#endif
