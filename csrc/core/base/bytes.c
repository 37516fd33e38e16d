/* Bytes put together and taken apart. See bytes.h. */
#include "base/bytes.h"

#include "base/array.h"
#include "base/crc.h"

/* ---- out ---- */

bool dr_buffer_grow(struct dr_buffer *buffer, size_t size) {
    uint8_t *grown = buffer->failed ? NULL : dr_array_grown(buffer->data, buffer->size, &buffer->room, size, 1);
    if (!grown) {
        dr_buffer_destroy(buffer);
        buffer->failed = true;
        return false;
    }
    buffer->data = grown;
    return true;
}

size_t dr_put_varint(uint8_t data[DR_VARINT_BYTES], uint64_t value) {
    size_t n = 0;
    for (; value >= 128; value >>= 7)
        data[n++] = (uint8_t)(value | 128);
    data[n++] = (uint8_t)value;
    return n;
}

void dr_buffer_varint(struct dr_buffer *buffer, uint64_t value) {
    uint8_t bytes[DR_VARINT_BYTES];
    dr_buffer_put(buffer, bytes, dr_put_varint(bytes, value));
}

void dr_buffer_destroy(struct dr_buffer *buffer) {
    free(buffer->data);
    *buffer = (struct dr_buffer){0};
}

void dr_buffer_begin(struct dr_buffer *buffer, const char kind[4]) {
    *buffer = (struct dr_buffer){0};
    dr_buffer_put(buffer, kind, 4);
    dr_buffer_le(buffer, 0, 4);
}

int dr_buffer_seal(struct dr_buffer *buffer, struct dr_error *error) {
    if (buffer->failed)
        return dr_error_memory(error);
    dr_put_le(buffer->data + 4, dr_crc32(0, buffer->data + DR_FRAME_BYTES, buffer->size - DR_FRAME_BYTES), 4);
    return 0;
}

/* ---- in ---- */

const char *dr_bytes_open(struct dr_bytes *bytes, const void *data, size_t size, const char kind[4]) {
    const uint8_t *at = data;
    if (size < DR_FRAME_BYTES || memcmp(at, kind, 4) != 0)
        return "no header; or another version of dcpring made it";
    if (dr_get_le(at + 4, 4) != dr_crc32(0, at + DR_FRAME_BYTES, size - DR_FRAME_BYTES))
        return "its CRC-32 does not match";
    *bytes = (struct dr_bytes){at + DR_FRAME_BYTES, at + size, false};
    return NULL;
}

static uint64_t go_bad(struct dr_bytes *bytes) {
    bytes->bad = true;
    bytes->at = bytes->end;
    return 0;
}

uint64_t dr_bytes_varint(struct dr_bytes *bytes) {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && bytes->at < bytes->end; shift += 7) {
        uint8_t byte = *bytes->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            if (shift == 63 && byte > 1)
                break;
            return value;
        }
    }
    return go_bad(bytes);
}

uint64_t dr_bytes_limited(struct dr_bytes *bytes, uint64_t most) {
    uint64_t value = dr_bytes_varint(bytes);
    return value <= most ? value : go_bad(bytes);
}

const uint8_t *dr_bytes_take(struct dr_bytes *bytes, uint64_t size) {
    const uint8_t *taken = bytes->at;
    if (dr_bytes_left(bytes) < size) {
        go_bad(bytes);
        return NULL;
    }
    bytes->at += size;
    return taken;
}
