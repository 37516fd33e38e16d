/*
 * Bytes put together and taken apart: little-endian numbers, varints (seven
 * bits a byte, the lowest first), and texts.
 *
 * What ranks send each other, and the tables of a checkpoint, have one frame:
 * four bytes that tell kind and version, the CRC-32 of what follows, and that.
 */
#ifndef DCPRING_BYTES_H
#define DCPRING_BYTES_H

#include "base/error.h"

#include <stdbool.h>
#include <string.h>

enum { DR_FRAME_BYTES = 8, DR_VARINT_BYTES = 10 };

static inline uint64_t dr_get_le(const uint8_t *data, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value |= (uint64_t)data[i] << (8 * i);
    return value;
}

static inline void dr_put_le(uint8_t *data, uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i++)
        data[i] = (uint8_t)(value >> (8 * i));
}

/* Returns how many bytes it took. */
size_t dr_put_varint(uint8_t data[DR_VARINT_BYTES], uint64_t value);

/* ---- out ---- */

/*
 * Bytes appended to one another. When memory is gone `failed` is set, and the buffer is empty and stays so, without
 * room.
 */
struct dr_buffer {
    uint8_t *data;
    size_t size, room;
    bool failed;
};

/* Makes room for `size` more bytes; false when memory is gone. */
bool dr_buffer_grow(struct dr_buffer *buffer, size_t size);

/* Appends `size` bytes for the caller to fill; NULL when memory is gone. */
static inline uint8_t *dr_buffer_extend(struct dr_buffer *buffer, size_t size) {
    if (buffer->room - buffer->size < size && !dr_buffer_grow(buffer, size))
        return NULL;
    buffer->size += size;
    return buffer->data + buffer->size - size;
}

static inline void dr_buffer_put(struct dr_buffer *buffer, const void *data, size_t size) {
    uint8_t *place = size ? dr_buffer_extend(buffer, size) : NULL;
    if (place)
        memcpy(place, data, size);
}

static inline void dr_buffer_le(struct dr_buffer *buffer, uint64_t value, unsigned bytes) {
    uint8_t *place = dr_buffer_extend(buffer, bytes);
    if (place)
        dr_put_le(place, value, bytes);
}

static inline void dr_buffer_byte(struct dr_buffer *buffer, uint8_t byte) { dr_buffer_le(buffer, byte, 1); }

void dr_buffer_varint(struct dr_buffer *buffer, uint64_t value);
void dr_buffer_destroy(struct dr_buffer *buffer);

/* Begins a frame; dr_buffer_seal fills in the CRC. */
void dr_buffer_begin(struct dr_buffer *buffer, const char kind[4]);
int dr_buffer_seal(struct dr_buffer *buffer, struct dr_error *error);

/* ---- in ---- */

/* Bytes being taken apart. `bad` once something did not fit; every later read gives 0. */
struct dr_bytes {
    const uint8_t *at, *end;
    bool bad;
};

/* Opens a frame: NULL, or what is wrong with it. */
const char *dr_bytes_open(struct dr_bytes *bytes, const void *data, size_t size, const char kind[4]);

static inline size_t dr_bytes_left(const struct dr_bytes *bytes) { return (size_t)(bytes->end - bytes->at); }

uint64_t dr_bytes_varint(struct dr_bytes *bytes);
/* A varint that must be at most `most`. */
uint64_t dr_bytes_limited(struct dr_bytes *bytes, uint64_t most);
/* The next `size` bytes; NULL where there are not so many. */
const uint8_t *dr_bytes_take(struct dr_bytes *bytes, uint64_t size);

#endif
