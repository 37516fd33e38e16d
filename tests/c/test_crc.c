/* CRC-32: known values, combination, and the grid that payloads are summed on. */
#include "base/crc.h"
#include "check.h"

static void known_values(void) {
    CHECK_EQ(dr_crc32(0, "", 0), 0);
    CHECK_EQ(dr_crc32(0, "123456789", 9), 0xcbf43926u);
    CHECK_EQ(dr_crc32(dr_crc32(0, "1234", 4), "56789", 5), 0xcbf43926u);
}

static void combine_splits(void) {
    struct rng rng = {1};
    enum { SIZE = 70000 };
    uint8_t *data = check_alloc(SIZE);
    rng_fill(&rng, data, SIZE);
    for (int i = 0; i < 2000; i++) {
        size_t size = rng_below(&rng, i % 10 ? 300 : SIZE + 1);
        size_t split = rng_below(&rng, size + 1);
        uint32_t combined =
            dr_crc32_combine(dr_crc32(0, data, split), dr_crc32(0, data + split, size - split), size - split);
        CHECK_EQ(combined, dr_crc32(0, data, size));
    }
    free(data);
}

/* Zeros have a CRC that can be made by doubling, so lengths beyond 4 GiB cost nothing. */
static void combine_beyond_4_gib(void) {
    uint8_t zeros[64] = {0};
    uint32_t crc = dr_crc32(0, zeros, 64);
    uint64_t length = 64;
    for (; length < (uint64_t)1 << 40; length *= 2)
        crc = dr_crc32_combine(crc, crc, length);
    uint32_t three = dr_crc32_combine(dr_crc32_combine(crc, crc, length), crc, length);
    uint32_t other = dr_crc32_combine(crc, dr_crc32_combine(crc, crc, length), 2 * length);
    CHECK_EQ(three, other);
    CHECK_EQ(dr_crc32_combine(0x12345678, 0, 0), 0x12345678);
}

static void check_grid(uint64_t offset, uint64_t length) {
    size_t count = dr_crc_count(offset, length);
    CHECK_EQ(count == 0, length == 0);
    uint64_t at = offset;
    for (size_t i = 0; i < count; i++) {
        uint64_t lo, hi;
        dr_crc_range(offset, length, i, &lo, &hi);
        CHECK_EQ(lo, at);
        CHECK_INT(hi, >, lo);
        CHECK_EQ(lo / DR_CRC_BLOCK, (hi - 1) / DR_CRC_BLOCK);
        CHECK(i == 0 || lo % DR_CRC_BLOCK == 0);
        at = hi;
    }
    CHECK_EQ(at, offset + length);
}

static void grid_ranges(void) {
    struct rng rng = {2};
    const uint64_t near[] = {0, 1, DR_CRC_BLOCK - 1, DR_CRC_BLOCK, DR_CRC_BLOCK + 1, 5 * DR_CRC_BLOCK};
    for (size_t i = 0; i < sizeof near / sizeof *near; i++)
        for (size_t j = 0; j < sizeof near / sizeof *near; j++)
            check_grid(near[i], near[j]);
    for (int i = 0; i < 2000; i++)
        check_grid(rng_below(&rng, (uint64_t)1 << 45), rng_below(&rng, 20 * DR_CRC_BLOCK));
}

static void whole_of_blocks(void) {
    struct rng rng = {3};
    size_t room = 5 * DR_CRC_BLOCK;
    uint8_t *data = check_alloc(room);
    rng_fill(&rng, data, room);
    for (int i = 0; i < 60; i++) {
        uint64_t offset = rng_below(&rng, 3 * DR_CRC_BLOCK), length = rng_below(&rng, i % 3 ? 4000 : room + 1);
        uint32_t crcs[8] = {0};
        for (size_t b = 0; b < dr_crc_count(offset, length); b++) {
            uint64_t lo, hi;
            dr_crc_range(offset, length, b, &lo, &hi);
            crcs[b] = dr_crc32(0, data + (lo - offset), hi - lo);
        }
        CHECK_EQ(dr_crc_whole(offset, length, crcs), dr_crc32(0, data, length));
    }
    free(data);
}

CHECK_MAIN({"known_values", known_values}, {"combine_splits", combine_splits},
           {"combine_beyond_4_gib", combine_beyond_4_gib}, {"grid_ranges", grid_ranges},
           {"whole_of_blocks", whole_of_blocks})
