/* Samples and comparisons. See unchanged.h. */
#include "data/unchanged.h"

#include "base/crc.h"
#include "base/memory.h"
#include "base/sort.h"
#include "record/region.h"

#include <errno.h>
#include <string.h>

/* ---- samples ---- */

enum { STRETCHES = 4, STRETCH = 64 };

/* A tensor's payload, to be looked at piece by piece. */
struct payload {
    const uint8_t *bytes; /* NULL: they have to be gathered */
    struct dr_region region;
};

static void payload_init(struct payload *payload, const struct dr_source *source) {
    payload->bytes = source->data;
    if (!source->strides)
        return;
    dr_region_init(&payload->region, &source->shape, NULL, source->shape.sizes, (void *)(uintptr_t)source->data,
                   source->strides);
    payload->bytes = payload->region.run == source->size ? payload->region.memory : NULL;
}

/* The bytes [from, to): where they lie in memory, or gathered into the room. */
static const uint8_t *bytes_of(const struct payload *payload, uint64_t from, uint64_t to, uint8_t *room) {
    if (payload->bytes)
        return payload->bytes + from;
    dr_region_gather(&payload->region, from, to, room);
    return room;
}

static void copy(const struct payload *payload, uint64_t from, uint64_t to, uint8_t *out) {
    const uint8_t *bytes = bytes_of(payload, from, to, out);
    if (bytes != out)
        memcpy(out, bytes, (size_t)(to - from));
}

void dr_sample(const struct dr_digest_key *key, const struct dr_source *source, uint8_t out[DR_SAMPLE_BYTES]) {
    uint8_t bytes[STRETCHES * STRETCH], digest[DR_DIGEST_BYTES];
    struct payload payload;
    uint64_t size = source->size;
    payload_init(&payload, source);
    if (size <= sizeof bytes) {
        if (size)
            copy(&payload, 0, size, bytes);
    } else {
        uint64_t apart = (size - STRETCH) / (STRETCHES - 1);
        for (unsigned i = 0; i < STRETCHES; i++)
            copy(&payload, i * apart, i * apart + STRETCH, bytes + i * STRETCH);
        size = sizeof bytes;
    }
    dr_digest(key, bytes, (size_t)size, digest);
    memcpy(out, digest, DR_SAMPLE_BYTES);
}

/* ---- comparing ---- */

struct comparing {
    const struct dr_digest_key *key;
    struct dr_known *known;
    size_t count;
    uint64_t *first; /* by tensor, how many blocks come before its own; one more, of all */
    struct dr_workers workers;
};

static void compare(const struct comparing *comparing, struct dr_known *known, size_t index, uint8_t *room) {
    uint64_t lo, hi;
    uint8_t digest[DR_DIGEST_BYTES];
    const struct dr_source *source = known->source;
    dr_crc_range(known->payload_offset, source->size, index, &lo, &hi);
    struct payload payload;
    payload_init(&payload, source);
    const uint8_t *bytes = bytes_of(&payload, lo - known->payload_offset, hi - known->payload_offset, room);
    dr_digest(comparing->key, bytes, (size_t)(hi - lo), digest);
    if (memcmp(digest, known->digests + index * DR_DIGEST_BYTES, sizeof digest) != 0)
        atomic_store(&known->differs, true);
}

static int work(void *context, unsigned index, struct dr_error *error) {
    (void)index;
    struct comparing *comparing = context;
    uint8_t *room = dr_malloc(DR_CRC_BLOCK);
    if (!room)
        return dr_error_memory(error);
    for (size_t block; dr_workers_take(&comparing->workers, &block);) {
        size_t tensor = dr_stretch_at(comparing->first, comparing->count, block);
        struct dr_known *known = &comparing->known[tensor];
        if (!atomic_load_explicit(&known->differs, memory_order_relaxed))
            compare(comparing, known, (size_t)(block - comparing->first[tensor]), room);
    }
    free(room);
    return 0;
}

int dr_find_changed(const struct dr_digest_key *key, struct dr_known *known, size_t count, unsigned workers,
                    const struct dr_control *control, struct dr_error *error) {
    struct comparing comparing = {.key = key, .known = known, .count = count};
    comparing.first = dr_calloc(count + 1, sizeof *comparing.first);
    if (!comparing.first)
        return dr_error_memory(error);
    for (size_t i = 0; i < count; i++) {
        atomic_init(&known[i].differs, false);
        comparing.first[i + 1] = comparing.first[i] + dr_crc_count(known[i].payload_offset, known[i].source->size);
    }
    size_t blocks = (size_t)comparing.first[count];
    int rc = dr_workers_share(&comparing.workers, blocks, workers, work, &comparing, control, error);
    free(comparing.first);
    return rc;
}
