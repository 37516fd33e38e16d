/* Elements of each format: with and without vector instructions, at every length of a loop's end, and by hand. */
#include "check.h"

#include "base/elements.h"

#include <math.h>

enum { MOST = 600 };

static const char *const names[] = {"float32",        "bfloat16",        "float16",         "float8_e4m3fn",
                                    "float8_e5m2",    "float64",         "float8_e4m3fnuz", "float8_e5m2fnuz",
                                    "float8_e8m0fnu", "float4_e2m1fn_x2"};
enum { NAMES = sizeof names / sizeof *names };

static struct rng rng = {1};

static bool same(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)); }

/* From an address that is not aligned, and not a byte more than there is. */
static void decoders_agree(void) {
    for (int n = 0; n < NAMES; n++) {
        const struct dr_dtype *dtype = dr_dtype_by_name(names[n]);
        const struct dr_codec *best = dr_codec_of(dtype, DR_SIMD_BEST), *plain = dr_codec_of(dtype, DR_SIMD_NONE);
        for (size_t count = 0; count < 100; count++) {
            size_t bytes = dr_is_packed(dtype) ? (count + 1) / 2 : count * dtype->item_size;
            unsigned char *codes = malloc(bytes + 1);
            float a[100] = {0}, b[100] = {0};
            rng_fill(&rng, codes + 1, bytes);
            best->decode(codes + 1, count, a);
            plain->decode(codes + 1, count, b);
            for (size_t i = 0; i < 100; i++)
                CHECK(same(a[i], b[i]));
            free(codes);
        }
    }
}

static void encoders_agree(void) {
    for (int n = 0; n < NAMES; n++) {
        const struct dr_dtype *dtype = dr_dtype_by_name(names[n]);
        const struct dr_codec *best = dr_codec_of(dtype, DR_SIMD_BEST), *plain = dr_codec_of(dtype, DR_SIMD_NONE);
        for (size_t count = 0; best->encode && count < 300; count++) {
            size_t bytes = count * dtype->item_size;
            unsigned char *a = malloc(bytes + 1), *b = malloc(bytes + 1);
            float values[300], back[2][300];
            for (size_t i = 0; i < count; i++) {
                uint32_t bits = (uint32_t)rng_next(&rng);
                if (i % 2) /* near 1, where all formats round */
                    bits = (bits & 0x83ffffffu) + (120u << 23);
                memcpy(&values[i], &bits, sizeof bits);
            }
            best->encode(values, count, 1.5f, a + 1);
            plain->encode(values, count, 1.5f, b + 1);
            plain->decode(a + 1, count, back[0]);
            plain->decode(b + 1, count, back[1]);
            for (size_t i = 0; i < count; i++)
                CHECK(same(back[0][i], back[1][i]));
            free(a);
            free(b);
        }
    }
}

static float decoded(const char *name, unsigned code) {
    uint16_t bits = (uint16_t)code;
    float value;
    dr_codec_of(dr_dtype_by_name(name), DR_SIMD_BEST)->decode(&bits, 1, &value);
    return value;
}

static unsigned encoded(const char *name, float value) {
    uint16_t bits = 0;
    dr_codec_of(dr_dtype_by_name(name), DR_SIMD_BEST)->encode(&value, 1, 1, &bits);
    return bits;
}

static void by_hand(void) {
    CHECK(decoded("float8_e4m3fn", 0x7e) == 448 && isnan(decoded("float8_e4m3fn", 0xff)));
    CHECK(decoded("float8_e4m3fn", 0x81) == -0x1p-9f && signbit(decoded("float8_e4m3fn", 0x80)));
    CHECK(decoded("float8_e5m2", 0xfc) == -INFINITY && decoded("float8_e5m2", 0x01) == 0x1p-16f);
    CHECK(decoded("float8_e4m3fnuz", 0x7f) == 240 && isnan(decoded("float8_e4m3fnuz", 0x80)));
    CHECK(decoded("float8_e5m2fnuz", 0x7f) == 57344 && decoded("float8_e5m2fnuz", 0x01) == 0x1p-17f);
    CHECK(decoded("float8_e8m0fnu", 0) == 0x1p-127f && decoded("float8_e8m0fnu", 254) == 0x1p127f);
    CHECK(decoded("float16", 0x0001) == 0x1p-24f && decoded("float16", 0xfc00) == -INFINITY);
    CHECK_EQ(encoded("float8_e4m3fn", 464), 0x7e); /* half way to what would be 480 */
    CHECK_EQ(encoded("float8_e4m3fn", 480), 0x7e);
    CHECK_EQ(encoded("float8_e4m3fn", -INFINITY), 0xfe);
    CHECK_EQ(encoded("float8_e4m3fn", 0x1p-10f), 0); /* half of the smallest: to even */
    CHECK_EQ(encoded("float8_e4m3fn", 0x1.8p-9f), 2);
    CHECK_EQ(encoded("float8_e4m3fn", NAN) & 0x7f, 0x7f);
    CHECK_EQ(encoded("float8_e5m2", 61440), 0x7c);
    CHECK_EQ(encoded("float8_e5m2", nextafterf(61440, 0)), 0x7b);
    CHECK_EQ(encoded("float8_e5m2", NAN) & 0x7f, 0x7f);
    CHECK_EQ(encoded("float16", 65520), 0x7c00);
    CHECK_EQ(encoded("float16", nextafterf(65520, 0)), 0x7bff);
    CHECK_EQ(encoded("float16", -0x1p-25f), 0x8000);
    CHECK_EQ(encoded("bfloat16", 1 + 0x1p-8f), 0x3f80);
    CHECK_EQ(encoded("bfloat16", 1 + 0x1.8p-7f), 0x3f82);
}

/* More than fits a block, whose elements every format has. */
static void conversions(void) {
    float values[MOST], back[MOST];
    unsigned char out[MOST * 8];
    for (int i = 0; i < MOST; i++)
        values[i] = (float)(i % 9 - 4) / 2;
    for (int n = 0; n < 5; n++) {
        const struct dr_dtype *one = dr_dtype_by_name("float32"), *other = dr_dtype_by_name(names[n]);
        CHECK(dr_convert(one, other, values, out, MOST) && dr_convert(other, one, out, back, MOST));
        CHECK_BYTES(values, back, sizeof back);
    }
    CHECK(!dr_convert(dr_dtype_by_name("int32"), dr_dtype_by_name("float32"), values, out, 1));
    CHECK(!dr_convert(dr_dtype_by_name("float32"), dr_dtype_by_name("float64"), values, out, 1));
}

CHECK_MAIN({"decoders_agree", decoders_agree}, {"encoders_agree", encoders_agree}, {"by_hand", by_hand},
           {"conversions", conversions})
