/* Comparing elements: counts, distances and places, by block and across blocks. */
#include "check.h"
#include "tools/compare.h"

#include <math.h>

static const struct dr_tolerance exact = {0, 0};

static struct dr_difference compare(const char *dtype, const void *a, const void *b, size_t count) {
    struct dr_difference difference;
    dr_compare(dr_dtype_by_name(dtype), a, b, count, &exact, &difference);
    return difference;
}

static void nothing_to_compare(void) {
    for (const struct dr_dtype *d = dr_dtypes; d->name; d++) {
        struct dr_difference found = compare(d->name, "", "", 0);
        CHECK(found.changed == 0 && found.first == -1 && found.farthest == -1);
    }
}

/* One element at a time, at each place of several blocks. */
static void every_place(void) {
    enum { COUNT = 1300 };
    float a[COUNT], b[COUNT];
    for (int i = 0; i < COUNT; i++)
        a[i] = b[i] = (float)i;
    for (int i = 0; i < COUNT; i++) {
        b[i] = -1;
        struct dr_difference found = compare("float32", a, b, COUNT);
        CHECK_EQ(found.changed, 1);
        CHECK_EQ(found.differing, 1);
        CHECK_EQ(found.first, i);
        CHECK_EQ(found.farthest, i);
        CHECK(found.distance == i + 1.0);
        b[i] = (float)i;
    }
}

static void the_farthest_is_not_the_first(void) {
    double a[700] = {0}, b[700] = {0};
    b[3] = 1e-3;
    b[600] = -2;
    struct dr_difference found = compare("float64", a, b, 700);
    CHECK(found.changed == 2 && found.first == 3 && found.farthest == 600 && found.distance == 2);
    CHECK(found.relative == 1);
}

static void tolerance(void) {
    float a[] = {1, 100, NAN, INFINITY, 0}, b[] = {1.5f, 101, -NAN, 1, -0.0f};
    struct dr_difference found;
    dr_compare(dr_dtype_by_name("float32"), a, b, 5, &(struct dr_tolerance){0.5, 0.01}, &found);
    CHECK_EQ(found.changed, 5);
    CHECK_EQ(found.differing, 1);
    CHECK_EQ(found.first, 3);
    CHECK(isinf(found.distance) && isinf(found.relative) && found.nans[0] == 1 && found.nans[1] == 1);
}

static void complex_distances(void) {
    float a[] = {0, 0, 3, 4, NAN, 0}, b[] = {3, 4, 3, 4, 1, 0};
    struct dr_difference found = compare("complex64", a, b, 3);
    CHECK(found.changed == 2 && found.farthest == 0 && found.distance == 5 && found.relative == 1);
    CHECK(found.nans[0] == 1 && found.nans[1] == 0);
}

/* Every code of each 8-bit format against the next one: what it stands for is finite, or NaN, as the format says. */
static void small_floats(void) {
    const struct {
        const char *name;
        unsigned nans;
        double largest;
    } formats[] = {{"float8_e5m2", 6, INFINITY},
                   {"float8_e4m3fn", 2, 448},
                   {"float8_e5m2fnuz", 1, 57344},
                   {"float8_e4m3fnuz", 1, 240},
                   {"float8_e8m0fnu", 1, 0x1p127}};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        uint8_t codes[256], zero[256];
        for (int i = 0; i < 256; i++) {
            codes[i] = (uint8_t)i;
            zero[i] = 0;
        }
        struct dr_difference found = compare(formats[f].name, codes, zero, 256);
        CHECK_EQ(found.nans[0], formats[f].nans);
        double base = f == 4 ? 0x1p-127 : 0;
        CHECK(found.distance == formats[f].largest - base);
    }
}

static void bytes_without_numbers(void) {
    uint8_t a[] = {1, 2, 3}, b[] = {1, 2, 4};
    struct dr_difference found = compare("float4_e2m1fn_x2", a, b, 3);
    CHECK(found.changed == 1 && found.differing == 1 && found.first == 2 && found.farthest == -1);
}

CHECK_MAIN({"nothing_to_compare", nothing_to_compare}, {"every_place", every_place},
           {"the_farthest_is_not_the_first", the_farthest_is_not_the_first}, {"tolerance", tolerance},
           {"complex_distances", complex_distances}, {"small_floats", small_floats},
           {"bytes_without_numbers", bytes_without_numbers})
