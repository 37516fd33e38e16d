/* Boxes of quantised tensors, at any place in their blocks and in any parts, against the formula for one element. */
#include "check.h"

#include "base/elements.h"
#include "data/dequantise.h"

#include <math.h>

enum { NDIM = 3 };

/* Memory ends where what is in it does, so that the sanitizers see what is read behind it. */
struct example {
    struct dr_quantised form;
    struct dr_read read;
    int64_t sizes[NDIM], offsets[NDIM], lengths[NDIM], strides[NDIM];
    uint8_t *payload, *exponents;
    char *memory;
    float *scales;
    size_t payload_bytes, memory_bytes;
};

static struct rng rng = {1};

static int64_t below(int64_t limit) { return (int64_t)rng_below(&rng, (uint64_t)limit); }

static void make_scales(struct example *e) {
    size_t blocks = (size_t)dr_quantised_blocks(&e->form, e->lengths[0] * e->lengths[1]);
    e->scales = check_alloc(blocks * sizeof *e->scales);
    e->exponents = check_alloc(blocks);
    for (size_t i = 0; i < blocks; i++) {
        e->exponents[i] = i % 5 == 0 ? 255 : (uint8_t)below(256);
        e->scales[i] = i % 7 == 0 ? 0 : i % 11 == 0 ? INFINITY : ldexpf((float)below(1000), (int)below(200) - 100);
    }
    if (dr_is_packed(e->form.codes))
        e->form.exponents = e->exponents;
    else
        e->form.scales = e->scales;
}

static void make(struct example *e, const char *codes, const char *target, int64_t bytes) {
    *e = (struct example){.form = {.codes = dr_dtype_by_name(codes), .target = dr_dtype_by_name(target)}};
    bool packed = dr_is_packed(e->form.codes);
    e->lengths[0] = below(4);
    e->lengths[1] = 1 + below(5);
    e->lengths[2] = bytes;
    e->form.first = packed ? below(2) : 0;
    e->form.columns = packed ? 2 * bytes - e->form.first - below(2) : bytes;
    e->form.block_rows = packed ? 1 : 1 + below(8);
    e->form.block_columns = 1 + below(packed ? 64 : 9);
    e->form.skip_rows = below(e->form.block_rows);
    e->form.skip_columns = below(e->form.block_columns);
    make_scales(e);
    e->payload_bytes = 1;
    for (int d = 0; d < NDIM; d++) {
        e->offsets[d] = below(4);
        e->sizes[d] = e->offsets[d] + e->lengths[d] + below(4);
        e->payload_bytes *= (size_t)e->sizes[d];
    }
    e->payload = check_alloc(e->payload_bytes);
    rng_fill(&rng, e->payload, e->payload_bytes);
    e->strides[2] = 1;
    e->strides[1] = e->form.columns + below(3);
    e->strides[0] = e->strides[1] * (e->lengths[1] + below(2));
    e->memory_bytes = (size_t)(e->strides[0] * e->lengths[0]) * e->form.target->item_size;
    e->memory = check_alloc(e->memory_bytes);
    memset(e->memory, 0x55, e->memory_bytes);
    e->read = (struct dr_read){.chunk = {dr_dtype_by_name("uint8"), NDIM, e->sizes},
                               .offsets = e->offsets,
                               .lengths = e->lengths,
                               .memory = e->memory,
                               .strides = e->strides,
                               .quantised = &e->form};
}

static void destroy(struct example *e) {
    free(e->payload);
    free(e->exponents);
    free(e->memory);
    free(e->scales);
}

static float element(const struct example *e, int64_t outer, int64_t inner, int64_t column) {
    const struct dr_quantised *form = &e->form;
    int64_t across = (form->skip_columns + form->columns - 1) / form->block_columns + 1;
    int64_t block = (form->skip_rows + outer * e->lengths[1] + inner) / form->block_rows * across;
    block += (form->skip_columns + column) / form->block_columns;
    const uint8_t *row = e->payload + ((e->offsets[0] + outer) * e->sizes[1] + e->offsets[1] + inner) * e->sizes[2];
    const struct dr_codec *codec = dr_codec_of(form->codes, DR_SIMD_NONE);
    float value[2];
    if (form->scales) {
        codec->decode(row + e->offsets[2] + column, 1, value);
        return value[0] * form->scales[block];
    }
    int64_t at = form->first + column;
    codec->decode(row + e->offsets[2] + at / 2, 2, value);
    return ldexpf(value[at % 2], form->exponents[block] - 127);
}

static bool same(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)); }

static void check_memory(const struct example *e) {
    const size_t item = e->form.target->item_size;
    const struct dr_codec *codec = dr_codec_of(e->form.target, DR_SIMD_NONE);
    for (int64_t i = 0; i < e->strides[0] * e->lengths[0]; i++) {
        int64_t outer = i / e->strides[0], inner = i % e->strides[0] / e->strides[1], column = i % e->strides[1];
        const char *got = e->memory + (size_t)i * item;
        if (inner >= e->lengths[1] || column >= e->form.columns) {
            CHECK(got[0] == 0x55 && got[item - 1] == 0x55);
            continue;
        }
        float a = element(e, outer, inner, column), b;
        char rounded[4];
        codec->encode(&a, 1, 1, rounded);
        codec->decode(rounded, 1, &a);
        codec->decode(got, 1, &b);
        CHECK(same(a, b));
    }
}

/* The payload comes in parts, as blocks of a file do, in any order. */
static void make_in_parts(struct example *e, uint64_t lo, uint64_t hi, uint64_t most) {
    if (hi - lo <= most) {
        uint8_t *part = check_alloc((size_t)(hi - lo));
        memcpy(part, e->payload + lo, (size_t)(hi - lo));
        dr_dequantise(&e->read, lo, hi, part);
        free(part);
        return;
    }
    uint64_t middle = lo + 1 + rng_below(&rng, hi - lo - 1);
    make_in_parts(e, middle, hi, most);
    make_in_parts(e, lo, middle, most);
}

static void every_box(void) {
    static const char *const codes[] = {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn_x2"};
    static const char *const targets[] = {"float32", "bfloat16", "float16"};
    for (int round = 0; round < 600; round++) {
        struct example e;
        make(&e, codes[round % 4], targets[round % 3], round % 10 ? 1 + below(70) : 300 + below(600));
        make_in_parts(&e, 0, e.payload_bytes, 1 + rng_below(&rng, e.payload_bytes + 1));
        check_memory(&e);
        destroy(&e);
    }
}

static void what_is_not_good(void) {
    const struct dr_dtype *e4m3 = dr_dtype_by_name("float8_e4m3fn"), *e2m1 = dr_dtype_by_name("float4_e2m1fn_x2");
    const struct dr_dtype *float32 = dr_dtype_by_name("float32"), *int32 = dr_dtype_by_name("int32");
    struct dr_quantised form = {.codes = e4m3, .target = float32, .columns = 5, .block_rows = 2, .block_columns = 3};
    CHECK(dr_quantised_good(&form, 5) && !dr_quantised_good(&form, 4));
    form.first = 1;
    CHECK(!dr_quantised_good(&form, 5));
    form.codes = e2m1;
    CHECK(dr_quantised_good(&form, 3) && !dr_quantised_good(&form, 4));
    form.skip_columns = 3;
    CHECK(!dr_quantised_good(&form, 3));
    form.skip_columns = 2;
    form.skip_rows = 2;
    CHECK(!dr_quantised_good(&form, 3));
    form.skip_rows = 1;
    form.target = int32;
    CHECK(!dr_quantised_good(&form, 3));
    form.target = float32;
    form.codes = float32;
    CHECK(!dr_quantised_good(&form, 3));
}

CHECK_MAIN({"every_box", every_box}, {"what_is_not_good", what_is_not_good})
