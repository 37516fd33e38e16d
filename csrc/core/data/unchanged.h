/*
 * Finding out which tensors still hold what an earlier save has written of them.
 *
 * A sample, of some hundred bytes, says at once that a tensor has changed.
 * Where it has not, the digests of its blocks decide: all of them are made
 * again and compared, until one differs. Nothing is read but memory.
 */
#ifndef DCPRING_UNCHANGED_H
#define DCPRING_UNCHANGED_H

#include "data/save.h"

enum { DR_SAMPLE_BYTES = 8 };

/* A tensor, as a whole, and what is known of it. */
struct dr_known {
    const struct dr_source *source;
    uint64_t payload_offset; /* in the file that the digests are of: where its blocks begin */
    const uint8_t *digests;  /* dr_crc_count() of them */
    atomic_bool differs;     /* the answer */
};

/* A digest of a few stretches of the payload. */
void dr_sample(const struct dr_digest_key *key, const struct dr_source *source, uint8_t out[DR_SAMPLE_BYTES]);

/* Compares all of them, with so many workers. */
int dr_find_changed(const struct dr_digest_key *key, struct dr_known *known, size_t count, unsigned workers,
                    const struct dr_control *control, struct dr_error *error);

#endif
