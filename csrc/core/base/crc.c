/* Block CRCs and how they combine. See crc.h. */
#include "base/crc.h"

#include <assert.h>
#include <libdeflate.h>
#include <stdbool.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads and CRCs are stored as they are in memory: dcpring is for little-endian machines"
#endif

#define POLYNOMIAL 0xedb88320u

uint32_t dr_crc32(uint32_t crc, const void *data, size_t size) { return libdeflate_crc32(crc, data, size); }

/* a * b modulo the CRC polynomial, bits reflected. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* x to the power of 8 * bytes, by repeated squaring. */
static uint32_t shift_by(uint64_t bytes) {
    uint32_t result = 1u << 31; /* x^0 */
    uint32_t square = 1u << 23; /* x^8 */
    for (; bytes != 0; bytes >>= 1) {
        if (bytes & 1)
            result = multiply(square, result);
        square = multiply(square, square);
    }
    return result;
}

uint32_t dr_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
    return multiply(shift_by(length_b), crc_a) ^ crc_b;
}

size_t dr_crc_count(uint64_t offset, uint64_t length) {
    if (length == 0)
        return 0;
    return (size_t)((offset + length - 1) / DR_CRC_BLOCK - offset / DR_CRC_BLOCK + 1);
}

void dr_crc_range(uint64_t offset, uint64_t length, size_t index, uint64_t *lo, uint64_t *hi) {
    assert(index < dr_crc_count(offset, length));
    uint64_t start = (offset / DR_CRC_BLOCK + index) * DR_CRC_BLOCK;
    *lo = start > offset ? start : offset;
    *hi = start + DR_CRC_BLOCK < offset + length ? start + DR_CRC_BLOCK : offset + length;
}

uint32_t dr_crc_whole(uint64_t offset, uint64_t length, const uint32_t *blocks) {
    size_t count = dr_crc_count(offset, length);
    if (count == 0)
        return 0;
    uint32_t whole_block = shift_by(DR_CRC_BLOCK);
    uint32_t crc = blocks[0];
    for (size_t i = 1; i < count; i++) {
        uint64_t lo, hi;
        dr_crc_range(offset, length, i, &lo, &hi);
        bool full = hi - lo == DR_CRC_BLOCK;
        crc = multiply(full ? whole_block : shift_by(hi - lo), crc) ^ blocks[i];
    }
    return crc;
}
