/* The table of element types. See dtype.h. */
#include "base/dtype.h"

#include <stddef.h>
#include <string.h>

const struct dr_dtype dr_dtypes[] = {
    {"float32", "FloatStorage", 4},
    {"float64", "DoubleStorage", 8},
    {"float16", "HalfStorage", 2},
    {"bfloat16", "BFloat16Storage", 2},
    {"int64", "LongStorage", 8},
    {"int32", "IntStorage", 4},
    {"int16", "ShortStorage", 2},
    {"int8", "CharStorage", 1},
    {"uint8", "ByteStorage", 1},
    {"bool", "BoolStorage", 1},
    {"complex64", "ComplexFloatStorage", 8},
    {"complex128", "ComplexDoubleStorage", 16},
    {"complex32", NULL, 4},
    {"uint16", NULL, 2},
    {"uint32", NULL, 4},
    {"uint64", NULL, 8},
    {"float8_e5m2", NULL, 1},
    {"float8_e4m3fn", NULL, 1},
    {"float8_e5m2fnuz", NULL, 1},
    {"float8_e4m3fnuz", NULL, 1},
    {"float8_e8m0fnu", NULL, 1},
    {"float4_e2m1fn_x2", NULL, 1},
    {NULL, NULL, 0},
};

const struct dr_dtype *dr_dtype_by_name(const char *name) {
    for (const struct dr_dtype *d = dr_dtypes; d->name; d++)
        if (strcmp(d->name, name) == 0)
            return d;
    return NULL;
}

const struct dr_dtype *dr_dtype_by_storage(const char *storage) {
    for (const struct dr_dtype *d = dr_dtypes; d->name; d++)
        if (d->storage && strcmp(d->storage, storage) == 0)
            return d;
    return NULL;
}
