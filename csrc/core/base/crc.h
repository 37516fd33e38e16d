/*
 * CRC-32 (the zip polynomial) of payloads, block by block.
 *
 * Blocks lie on a grid of file offsets, DR_CRC_BLOCK apart, so that every
 * block is inside one I/O buffer whatever the payload's own offset: the first
 * and the last block of a payload may be short.
 */
#ifndef DCPRING_CRC_H
#define DCPRING_CRC_H

#include "base/bytes.h"

#define DR_CRC_BLOCK ((uint64_t)1 << 20)

uint32_t dr_crc32(uint32_t crc, const void *data, size_t size);

/* The CRC of A followed by B, from the CRC of each and the length of B. */
uint32_t dr_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

/* How many grid blocks the bytes [offset, offset + length) of a file touch. */
size_t dr_crc_count(uint64_t offset, uint64_t length);

/* The bytes [*lo, *hi) of block `index` of such a range. */
void dr_crc_range(uint64_t offset, uint64_t length, size_t index, uint64_t *lo, uint64_t *hi);

/* The CRC of block `index` as files and metadata have it: all CRCs of a payload one behind the other, little-endian. */
static inline uint32_t dr_crc_stored(const uint8_t *crcs, size_t index) {
    return (uint32_t)dr_get_le(crcs + 4 * index, 4);
}

/* The CRC of the whole range from the CRCs of its blocks. */
uint32_t dr_crc_whole(uint64_t offset, uint64_t length, const uint32_t *blocks);

#endif
