/*
 * dr_verify over any file and any metadata: the input is both. It always comes
 * to an end with findings, blames only records that were asked for, within
 * their bytes, and reads no file much more than once.
 *
 * The file is in memory, and all its system calls are ours.
 */
#include "base/align.h"
#include "base/crc.h"
#include "data/verify.h"
#include "memory_file.h"

enum { MOST_CHECKS = 6, CHECK_BYTES = 16, MOST_DIMS = 3 };

static uint64_t bad; /* the page that cannot be read */

static ssize_t pread_but_bad(int fd, void *data, size_t size, off_t offset) {
    size = memory_left(size, offset);
    if (size > 0 && (uint64_t)offset / DR_ALIGNMENT <= bad && bad < ((uint64_t)offset + size) / DR_ALIGNMENT)
        return -EIO;
    return memory_pread(fd, data, size, offset);
}

static int64_t memory_cached(int fd, off_t offset, size_t size) {
    (void)fd;
    (void)offset;
    return bad & 1 ? (int64_t)size : 0;
}

static uint64_t take(const uint8_t **at, unsigned bytes) {
    uint64_t value = 0;
    for (; bytes > 0; bytes--)
        value = value << 8 | *(*at)++;
    return value;
}

static void make_check(const uint8_t *at, struct dr_check *c, int64_t sizes[MOST_DIMS], uint8_t *crcs) {
    unsigned dtypes = 0;
    while (dr_dtypes[dtypes].name)
        dtypes++;
    uint64_t flags = take(&at, 1);
    *c = (struct dr_check){.kind = flags & 3, .transformed = flags >> 2 & 1};
    c->offset = take(&at, 2) % (file.size + 2);
    c->length = take(&at, 2);
    if (flags & 8)
        c->length = c->offset <= file.size ? file.size - c->offset : INT64_MAX / 2;
    c->payload_offset = c->offset + take(&at, 2) % 1024;
    c->payload_size = take(&at, 2);
    if ((c->kind == DR_CHECK_BYTES || c->kind == DR_CHECK_RAW) && flags & 16) {
        c->payload_offset = c->offset;
        c->payload_size = c->length;
    }
    uint64_t dtype = take(&at, 1);
    for (int d = 0; d < MOST_DIMS; d++)
        sizes[d] = (int8_t)take(&at, 1);
    c->shape = (struct dr_shape){dtype & 128 ? NULL : &dr_dtypes[dtype % dtypes], (int)(flags >> 6), sizes};
    if (c->payload_size < DR_CRC_BLOCK && flags & 32)
        c->crcs = crcs;
}

static void check_findings(const struct dr_findings *findings, const struct dr_check *checks, size_t count) {
    for (size_t i = 0; i < findings->count; i++) {
        const struct dr_problem *p = &findings->problems[i];
        FUZZ_CHECK(p->check < count && p->what);
        const struct dr_check *c = &checks[p->check];
        if (p->length > 0 && c->kind == DR_CHECK_OTHER)
            FUZZ_CHECK(p->offset >= c->offset && p->offset + p->length <= c->offset + c->length);
        FUZZ_CHECK(i == 0 || findings->problems[i - 1].offset <= p->offset);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const name = "file";
    static const struct dr_control never;
    static uint8_t crcs[16];
    struct dr_check checks[MOST_CHECKS];
    int64_t sizes[MOST_CHECKS][MOST_DIMS];
    struct dr_findings findings;
    struct dr_stream_stats stats;
    struct dr_error error;
    size_t count = size > 0 ? data[0] % (MOST_CHECKS + 1) : 0;
    if (size < 2 + count * CHECK_BYTES)
        return 0;
    memory_set_up(data + 2 + count * CHECK_BYTES, size - 2 - count * CHECK_BYTES,
                  &(struct memory_ways){pread_but_bad, memory_cached});
    bad = data[1] & 128 ? UINT64_MAX : data[1];
    const struct dr_options options = {.engine = "threads",
                                       .direct = data[1] & 1 ? DR_DIRECT_AUTO : DR_DIRECT_OFF,
                                       .queue_depth = 2,
                                       .block_size = DR_CRC_BLOCK,
                                       .workers = 1,
                                       .checksum = true};
    for (size_t i = 0; i < count; i++)
        make_check(data + 2 + i * CHECK_BYTES, &checks[i], sizes[i], crcs);
    for (int quick = 0; quick < 2; quick++) {
        dr_error_clear(&error);
        struct dr_input input;
        FUZZ_CHECK(dr_input_init(&input, "dir", &name, 1, &error) == 0);
        FUZZ_CHECK(dr_verify(&input, checks, count, quick, &options, &never, &findings, &stats, &error) == 0);
        FUZZ_CHECK(input.files[0].holders == 0);
        dr_input_destroy(&input);
        FUZZ_CHECK(stats.bytes <= file.size + 2 * (uint64_t)DR_ALIGNMENT * MOST_CHECKS);
        check_findings(&findings, checks, count);
        dr_findings_destroy(&findings);
    }
    return 0;
}

/* Records as they are, asked for as what they are, and as anyone's archives. */
size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    enum { SEEDS = 8 };
    if (index >= SEEDS)
        return 0;
    memset(out, 0, FUZZ_SEED_MAX);
    const int64_t sizes[MOST_DIMS] = {3 + (int64_t)index, 5, 2};
    const struct dr_shape shape = {&dr_dtypes[index % 4], (int)index % 3 + 1, sizes};
    uint64_t bytes;
    FUZZ_CHECK(dr_shape_bytes(&shape, &bytes));
    size_t start = 2 + CHECK_BYTES;
    uint8_t *record = out + start;
    size_t head = dr_record_head(&shape, 0, record);
    memset(record + head, (int)index, bytes);
    enum dr_check_kind kind = index % 2 ? DR_CHECK_OTHER : DR_CHECK_TENSOR;
    uint32_t crc = kind == DR_CHECK_OTHER ? dr_crc32(0, record + head, bytes) : 0;
    size_t tail = dr_record_tail(&shape, 0, head, crc, record + head + bytes);
    out[0] = 1;
    out[1] = index % 4 < 2 ? 255 : 254;
    uint8_t *check = out + 2;
    check[0] = (uint8_t)(kind | 8 | (unsigned)shape.ndim << 6);
    check[5] = (uint8_t)(head >> 8);
    check[6] = (uint8_t)head;
    check[7] = (uint8_t)(bytes >> 8);
    check[8] = (uint8_t)bytes;
    check[9] = (uint8_t)(index % 4);
    for (int d = 0; d < MOST_DIMS; d++)
        check[10 + d] = (uint8_t)sizes[d];
    return start + head + bytes + tail;
}
