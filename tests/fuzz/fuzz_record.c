/*
 * dr_record_locate over any bytes: the input is the file. Whatever it says is
 * a plain tensor must lie in the file and fit its shape.
 */
#include "memory_file.h"
#include "record/record.h"

static void locate(uint64_t offset, uint64_t length) {
    struct dr_view view;
    struct dr_located located;
    DR_NEW_ERROR(error);
    uint64_t bytes;
    memset(&located, 0xa5, sizeof located);
    FUZZ_CHECK(dr_view_init(&view, -1, "memory", &error) == 0);
    int rc = dr_record_locate(&view, offset, length, &located, &error);
    dr_view_destroy(&view);
    FUZZ_CHECK(rc == -error.err && (rc == 0 || !located.plain));
    if (!located.plain)
        return;
    FUZZ_CHECK(located.ndim >= 0 && located.ndim <= DR_MAX_DIMS && located.dtype);
    FUZZ_CHECK(located.payload_offset >= offset && located.payload_offset <= offset + length);
    FUZZ_CHECK(located.payload_size <= offset + length - located.payload_offset);
    FUZZ_CHECK(dr_shape_bytes(&(struct dr_shape){located.dtype, located.ndim, located.sizes}, &bytes));
    FUZZ_CHECK(bytes == located.payload_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    memory_set_up(data, size, NULL);
    locate(0, size);
    locate(size / 2, size - size / 2);
    locate(0, size + 1000); /* the file is too short for it */
    return 0;
}

struct seed {
    const char *dtype;
    int ndim;
    int64_t sizes[6];
    uint64_t offset;
};

/* The last two are zip64; of their payloads there is nothing, which makes them files that end too early. */
static const struct seed seeds[] = {
    {"float32", 2, {3, 5}, 0},           {"float32", 0, {0}, 64},      {"bfloat16", 1, {300}, 7},
    {"int64", 3, {2, 1, 4}, 4096},       {"uint16", 2, {5, 5}, 0},     {"float8_e4m3fn", 1, {70000 % 9999}, 1},
    {"bool", 6, {1, 2, 1, 2, 1, 2}, 0},  {"complex64", 2, {0, 7}, 11}, {"uint8", 1, {(int64_t)1 << 33}, 0},
    {"int16", 2, {1 << 16, 1 << 16}, 0},
};

size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    if (index >= sizeof seeds / sizeof *seeds)
        return 0;
    const struct seed *seed = &seeds[index];
    const struct dr_shape shape = {dr_dtype_by_name(seed->dtype), seed->ndim, seed->sizes};
    uint64_t bytes;
    uint8_t tail[DR_RECORD_TAIL_MAX];
    FUZZ_CHECK(dr_shape_bytes(&shape, &bytes));
    size_t size = dr_record_head(&shape, seed->offset, out);
    size_t tail_size = dr_record_tail(&shape, seed->offset, size, 0x12345678, tail);
    if (bytes > 9000)
        bytes = 0;
    FUZZ_CHECK(size + bytes + tail_size <= FUZZ_SEED_MAX);
    memset(out + size, 'p', bytes);
    memcpy(out + size + bytes, tail, tail_size);
    return size + bytes + tail_size;
}
