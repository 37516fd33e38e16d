/*
 * Where items are stored: for each a file, the record in it, the payload in
 * the record, and the payload's CRCs. What a rank reports after writing, and,
 * for all chunks of a checkpoint, half of the index in `.metadata`.
 */
#ifndef DCPRING_PLACES_H
#define DCPRING_PLACES_H

#include "plan/table.h"

enum dr_place_kind {
    DR_PLACE_TENSOR, /* a plain tensor: the payload can be read in parts */
    DR_PLACE_BYTES,  /* to be read as a whole */
    DR_PLACE_OTHER,  /* nothing is known of the payload */
    DR_PLACE_NONE,   /* not stored (yet) */
};

struct dr_place {
    uint64_t offset, length, payload_offset, payload_size;
    uint64_t crcs;   /* index of dr_crc_count() little-endian CRCs in the places' crcs */
    uint32_t file;   /* index of its name */
    uint8_t kind;
    bool has_crcs;
};

struct dr_places {
    struct dr_place *places;
    size_t count;
    struct dr_table files; /* of names only */
    struct dr_buffer crcs;
};

/* `count` places that are DR_PLACE_NONE. */
int dr_places_init(struct dr_places *places, size_t count, struct dr_error *error);
void dr_places_destroy(struct dr_places *places);

int dr_places_file(struct dr_places *places, const char *name, uint32_t size, uint32_t *out, struct dr_error *error);
/* crcs: dr_crc_count() little-endian CRCs of the payload, or NULL. place->file is an index of this places. */
int dr_places_set(struct dr_places *places, size_t index, const struct dr_place *place, const void *crcs,
                  struct dr_error *error);

/* NULL for a place without CRCs, but not for one that has none because its payload is empty. */
const uint8_t *dr_place_crcs(const struct dr_places *places, const struct dr_place *place);

int dr_places_encode(const struct dr_places *places, struct dr_buffer *out, struct dr_error *error);
/*
 * Ranges are checked: none overflows, and payloads lie within their records. control: NULL where nobody asks to stop.
 */
int dr_places_decode(struct dr_places *places, const void *data, size_t size, const struct dr_control *control,
                     struct dr_error *error);

/* Copies all places of `from` to the given indices. */
int dr_places_merge(struct dr_places *places, const struct dr_places *from, const uint32_t *indices, size_t count,
                    struct dr_error *error);

#endif
