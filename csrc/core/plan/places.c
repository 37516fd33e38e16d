/* Places, and their encoded form. See places.h, and docs/format.md for the bytes. */
#include "plan/places.h"

#include "base/crc.h"
#include "base/memory.h"

#include <assert.h>
#include <string.h>

static const char magic[4] = {'D', 'R', 'P', 1};
enum { KIND_BITS = 2 };

int dr_places_init(struct dr_places *places, size_t count, struct dr_error *error) {
    *places = (struct dr_places){.count = count};
    dr_table_init(&places->files);
    places->places = dr_calloc(count + 1, sizeof *places->places);
    if (!places->places)
        return dr_error_memory(error);
    for (size_t i = 0; i < count; i++)
        places->places[i].kind = DR_PLACE_NONE;
    return 0;
}

void dr_places_destroy(struct dr_places *places) {
    free(places->places);
    dr_table_destroy(&places->files);
    dr_buffer_destroy(&places->crcs);
    *places = (struct dr_places){0};
}

int dr_places_file(struct dr_places *places, const char *name, uint32_t size, uint32_t *out, struct dr_error *error) {
    return dr_table_name(&places->files, name, size, "", 0, (uint32_t)places->files.name_count - 1, out, error);
}

int dr_places_set(struct dr_places *places, size_t index, const struct dr_place *place, const void *crcs,
                  struct dr_error *error) {
    assert(index < places->count && place->kind <= DR_PLACE_NONE && place->file < places->files.name_count);
    struct dr_place *at = &places->places[index];
    *at = *place;
    at->has_crcs = crcs != NULL;
    at->crcs = places->crcs.size;
    if (crcs)
        dr_buffer_put(&places->crcs, crcs, 4 * dr_crc_count(place->payload_offset, place->payload_size));
    return places->crcs.failed ? dr_error_memory(error) : 0;
}

const uint8_t *dr_place_crcs(const struct dr_places *places, const struct dr_place *place) {
    static const uint8_t none[1];
    return !place->has_crcs ? NULL : places->crcs.data ? places->crcs.data + place->crcs : none;
}

/* ---- the encoded form ---- */

static void encode_place(struct dr_buffer *out, const struct dr_places *places, const struct dr_place *place) {
    dr_buffer_varint(out, (uint64_t)place->file << (KIND_BITS + 1) | (uint64_t)place->kind << 1 | place->has_crcs);
    if (place->kind == DR_PLACE_NONE)
        return;
    dr_buffer_varint(out, place->offset);
    dr_buffer_varint(out, place->length);
    if (place->kind == DR_PLACE_OTHER)
        return;
    dr_buffer_varint(out, place->payload_offset - place->offset);
    dr_buffer_varint(out, place->payload_size);
    if (place->has_crcs)
        dr_buffer_put(out, dr_place_crcs(places, place),
                      4 * dr_crc_count(place->payload_offset, place->payload_size));
}

int dr_places_encode(const struct dr_places *places, struct dr_buffer *out, struct dr_error *error) {
    dr_buffer_begin(out, magic);
    dr_buffer_varint(out, places->files.name_count);
    for (uint32_t i = 0; i < places->files.name_count; i++) {
        dr_buffer_varint(out, places->files.names[i].size);
        dr_buffer_put(out, dr_table_text(&places->files, i), places->files.names[i].size);
    }
    dr_buffer_varint(out, places->count);
    for (size_t i = 0; i < places->count; i++)
        encode_place(out, places, &places->places[i]);
    return dr_buffer_seal(out, error);
}

static int garbled(struct dr_error *error, const char *what) {
    return dr_error_invalid(error, DR_NO_ITEM, "a list of stored items is garbled or truncated (%s)", what);
}

static int decode_files(struct dr_places *places, struct dr_bytes *bytes, struct dr_error *error) {
    uint64_t count = dr_bytes_limited(bytes, dr_bytes_left(bytes));
    for (uint64_t i = 0; i < count; i++) {
        uint32_t index, size = (uint32_t)dr_bytes_limited(bytes, UINT32_MAX / 2);
        const uint8_t *name = dr_bytes_take(bytes, size);
        if (!name)
            return garbled(error, "a file name");
        int rc = dr_places_file(places, (const char *)name, size, &index, error);
        if (rc)
            return rc;
        if (index != i)
            return garbled(error, "a file name comes twice");
    }
    return bytes->bad ? garbled(error, "file names") : 0;
}

static int decode_place(struct dr_places *places, size_t index, struct dr_bytes *bytes, struct dr_error *error) {
    uint64_t head = dr_bytes_varint(bytes);
    bool has_crcs = head & 1;
    struct dr_place place = {.kind = head >> 1 & 3, .file = (uint32_t)(head >> (KIND_BITS + 1))};
    if (bytes->bad || (place.kind != DR_PLACE_NONE && head >> (KIND_BITS + 1) >= places->files.name_count))
        return garbled(error, "a place");
    if (place.kind == DR_PLACE_NONE)
        return 0;
    place.offset = dr_bytes_limited(bytes, INT64_MAX);
    place.length = dr_bytes_limited(bytes, INT64_MAX - place.offset);
    const uint8_t *crcs = NULL;
    if (place.kind != DR_PLACE_OTHER) {
        uint64_t ahead = dr_bytes_limited(bytes, place.length);
        place.payload_offset = place.offset + ahead;
        place.payload_size = dr_bytes_limited(bytes, place.length - ahead);
        if (has_crcs && !bytes->bad)
            crcs = dr_bytes_take(bytes, 4 * (uint64_t)dr_crc_count(place.payload_offset, place.payload_size));
    }
    if (bytes->bad)
        return garbled(error, "a place");
    return dr_places_set(places, index, &place, crcs, error);
}

int dr_places_decode(struct dr_places *places, const void *data, size_t size, const struct dr_control *control,
                     struct dr_error *error) {
    *places = (struct dr_places){0};
    struct dr_bytes bytes;
    struct dr_ticker ticker = {.control = control};
    const char *problem = dr_bytes_open(&bytes, data, size, magic);
    if (problem)
        return garbled(error, problem);
    int rc = decode_files(places, &bytes, error);
    if (rc)
        return rc;
    struct dr_table files = places->files;
    uint64_t count = dr_bytes_limited(&bytes, dr_bytes_left(&bytes));
    rc = dr_places_init(places, count, error);
    places->files = files;
    for (size_t i = 0; rc == 0 && i < count; i++) {
        rc = decode_place(places, i, &bytes, error);
        if (rc == 0)
            rc = dr_ticker_turn(&ticker, i, error);
    }
    if (!rc && (bytes.bad || bytes.at != bytes.end))
        rc = garbled(error, "its length");
    return rc;
}

int dr_places_merge(struct dr_places *places, const struct dr_places *from, const uint32_t *indices, size_t count,
                    struct dr_error *error) {
    if (count != from->count)
        return dr_error_invalid(error, DR_NO_ITEM, "a rank wrote %zu items where %zu were planned", from->count, count);
    for (size_t i = 0; i < count; i++) {
        struct dr_place place = from->places[i];
        if (place.kind == DR_PLACE_NONE || indices[i] >= places->count ||
            places->places[indices[i]].kind != DR_PLACE_NONE)
            return dr_error_invalid(error, DR_NO_ITEM, "a rank's report of what it wrote does not fit the plan");
        const struct dr_name *name = &from->files.names[place.file];
        int rc = dr_places_file(places, dr_table_text(&from->files, place.file), name->size, &place.file, error);
        if (!rc)
            rc = dr_places_set(places, indices[i], &place, dr_place_crcs(from, &from->places[i]), error);
        if (rc)
            return rc;
    }
    return 0;
}
