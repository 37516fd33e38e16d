/*
 * What a fuzz target offers to its drivers: libFuzzer, and replay.c.
 *
 * Seeds are made by the target, so that no binary files need to be kept.
 */
#ifndef DCPRING_FUZZ_H
#define DCPRING_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { FUZZ_SEED_MAX = 16384 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Writes seed `index` and returns its size; 0 when there are no more. */
size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]);

#define FUZZ_CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

#endif
