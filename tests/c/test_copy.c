/*
 * Copies from memory to memory: every byte arrives where it belongs, and none beside it, whatever the sizes, the
 * alignment and the number of workers; tensors with gaps arrive without; a cancel and a lack of memory are errors.
 */
#include "base/memory.h"
#include "check.h"
#include "data/copy.h"

enum { MIB = 1 << 20, GUARD = 64, MOST = 4096 };

static const struct dr_control never;

/* Sizes that lie around lines, pieces and the size from which copies go past the cache. */
static const uint64_t sizes[] = {0,   1,       63,      64,      65,          4096,        MIB - 1,
                                 MIB, MIB + 1, 3 * MIB, 100 * 1, 5 * MIB + 7, 9 * MIB + 65};

static void fill(uint8_t *bytes, size_t size) {
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 131 + i / 251);
}

/* One list of all these sizes, each target `shift` bytes behind a line, with a guard behind it. */
static void copy_list(unsigned workers, size_t shift) {
    enum { COUNT = sizeof sizes / sizeof *sizes };
    struct dr_copy copies[COUNT];
    uint8_t *from[COUNT], *to[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        from[i] = malloc(sizes[i] + 1);
        to[i] = aligned_alloc(64, (sizes[i] + shift + GUARD + 63) / 64 * 64);
        CHECK(from[i] && to[i]);
        fill(from[i], sizes[i] + 1);
        memset(to[i] + shift, 0xEE, sizes[i] + GUARD);
        copies[i] = (struct dr_copy){from[i] + (i % 2 && sizes[i] > 0), NULL, to[i] + shift, sizes[i]};
    }
    DR_NEW_ERROR(error);
    CHECK_OK(dr_copy_all(copies, COUNT, workers, &never, &error), &error);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_BYTES(to[i] + shift, copies[i].from, sizes[i]);
        for (size_t g = 0; g < GUARD - shift; g++)
            CHECK_EQ(to[i][shift + sizes[i] + g], 0xEE);
        free(from[i]);
        free(to[i]);
    }
}

static void all_sizes_arrive(void) {
    for (unsigned workers = 1; workers <= 3; workers++) {
        copy_list(workers, 0);
        copy_list(workers, 8);
    }
}

/* A single one that one worker alone would take. */
static void a_huge_one_is_shared_out(void) {
    size_t size = 40 * MIB;
    uint8_t *from = malloc(size), *to = malloc(size);
    CHECK(from && to);
    fill(from, size);
    struct dr_copy copy = {from, NULL, to, size};
    DR_NEW_ERROR(error);
    CHECK_OK(dr_copy_all(&copy, 1, 2, &never, &error), &error);
    CHECK_BYTES(to, from, size);
    free(from);
    free(to);
}

static void many_small_ones(void) {
    static uint16_t from[MOST][300], to[MOST][320];
    static struct dr_copy copies[MOST];
    fill((uint8_t *)from, sizeof from);
    memset(to, 0xEE, sizeof to);
    for (size_t i = 0; i < MOST; i++)
        copies[i] = (struct dr_copy){from[i], NULL, to[i], sizeof from[i]};
    DR_NEW_ERROR(error);
    CHECK_OK(dr_copy_all(copies, MOST, 2, &never, &error), &error);
    for (size_t i = 0; i < MOST; i++) {
        CHECK_BYTES(to[i], from[i], sizeof from[i]);
        for (size_t g = 300; g < 320; g++)
            CHECK_EQ(to[i][g], 0xEEEE);
    }
}

/* Every third column of a matrix, over several pieces. */
static void gaps_are_left_out(void) {
    enum { ROWS = 1500, COLUMNS = 900 };
    static int32_t from[ROWS][COLUMNS * 3], to[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS * 3; c++)
            from[r][c] = r * 10000 + c;
    int64_t lengths[] = {ROWS, COLUMNS}, strides[] = {COLUMNS * 3, 3};
    struct dr_shape shape = {dr_dtype_by_name("int32"), 2, lengths};
    struct dr_region region;
    dr_region_init(&region, &shape, NULL, lengths, from, strides);
    struct dr_copy copy = {NULL, &region, to, sizeof to};
    DR_NEW_ERROR(error);
    CHECK_OK(dr_copy_all(&copy, 1, 2, &never, &error), &error);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            CHECK_EQ(to[r][c], r * 10000 + c * 3);
}

static void nothing_is_no_error(void) {
    DR_NEW_ERROR(error);
    CHECK_OK(dr_copy_all(NULL, 0, 2, &never, &error), &error);
}

static int cancel(void *context) {
    (void)context;
    return 1;
}

/* So much that it takes longer than the first time that anybody asks. */
static void a_cancel_gets_through(void) {
    enum { TIMES = 4000 };
    static struct dr_copy copies[TIMES];
    uint8_t *from = calloc(1, 4 * MIB), *to = malloc(4 * MIB);
    CHECK(from && to);
    for (int i = 0; i < TIMES; i++)
        copies[i] = (struct dr_copy){from, NULL, to, 4 * MIB};
    const struct dr_control control = {cancel, NULL};
    DR_NEW_ERROR(error);
    CHECK_FAILS(dr_copy_all(copies, TIMES, 1, &control, &error), &error, ECANCELED);
    CHECK_EQ(error.kind, DR_ERROR_CANCELLED);
    free(from);
    free(to);
}

static bool refuse(void) { return true; }

static void a_lack_of_memory_is_an_error(void) {
    uint8_t from[4] = {1, 2, 3, 4}, to[4];
    struct dr_copy copy = {from, NULL, to, 4};
    DR_NEW_ERROR(error);
    dr_memory_fails = refuse;
    int rc = dr_copy_all(&copy, 1, 1, &never, &error);
    dr_memory_fails = NULL;
    CHECK_FAILS(rc, &error, ENOMEM);
}

CHECK_MAIN({"all_sizes_arrive", all_sizes_arrive}, {"a_huge_one_is_shared_out", a_huge_one_is_shared_out},
           {"many_small_ones", many_small_ones}, {"gaps_are_left_out", gaps_are_left_out},
           {"nothing_is_no_error", nothing_is_no_error}, {"a_cancel_gets_through", a_cancel_gets_through},
           {"a_lack_of_memory_is_an_error", a_lack_of_memory_is_an_error})
