/* The buffer pool: alignment, taking and giving, and what a failed allocation leaves behind. */
#include "base/align.h"
#include "check.h"
#include "io/pool.h"
#include "io/sys.h"
#include "io/sys_fault.h"

static void takes_each_once(void) {
    struct dr_pool pool;
    DR_NEW_ERROR(error);
    enum { COUNT = 7 };
    size_t size = 3 * DR_ALIGNMENT;
    CHECK_OK(dr_pool_init(&pool, COUNT, size, &error), &error);
    for (int round = 0; round < 3; round++) {
        bool seen[COUNT] = {false};
        unsigned index;
        for (int i = 0; i < COUNT; i++) {
            CHECK(dr_pool_take(&pool, &index));
            CHECK_INT(index, <, COUNT);
            CHECK(!seen[index]);
            seen[index] = true;
            uint8_t *buffer = dr_pool_buffer(&pool, index);
            CHECK_EQ((uintptr_t)buffer % DR_ALIGNMENT, 0);
            CHECK_EQ(buffer - pool.memory, index * size);
            memset(buffer, (int)index, size);
        }
        CHECK(!dr_pool_take(&pool, &index));
        for (unsigned i = 0; i < COUNT; i++) {
            CHECK_EQ(dr_pool_buffer(&pool, i)[0], i);
            CHECK_EQ(dr_pool_buffer(&pool, i)[size - 1], i);
            dr_pool_give(&pool, (i + 3) % COUNT);
        }
    }
    dr_pool_destroy(&pool);
    CHECK(!pool.memory && !pool.free);
}

static void given_back_is_taken_next(void) {
    struct dr_pool pool;
    DR_NEW_ERROR(error);
    unsigned first, second, again;
    CHECK_OK(dr_pool_init(&pool, 4, DR_ALIGNMENT, &error), &error);
    CHECK(dr_pool_take(&pool, &first) && dr_pool_take(&pool, &second));
    dr_pool_give(&pool, first);
    CHECK(dr_pool_take(&pool, &again));
    CHECK_EQ(again, first);
    dr_pool_destroy(&pool);
}

static void no_memory(void) {
    struct dr_pool pool;
    DR_NEW_ERROR(error);
    dr_fault_arm(&(struct dr_fault){.call = "map", .nth = 1, .err = ENOMEM});
    CHECK_FAILS(dr_pool_init(&pool, 4, DR_ALIGNMENT, &error), &error, ENOMEM);
    CHECK_EQ(dr_fault_disarm(), 1);
    CHECK(!pool.memory && !pool.free);
}

static void alignment(void) {
    CHECK_EQ(dr_align_up(0, 4096), 0);
    CHECK_EQ(dr_align_up(1, 4096), 4096);
    CHECK_EQ(dr_align_up(4096, 4096), 4096);
    CHECK_EQ(dr_align_down(4095, 4096), 0);
    CHECK_EQ(dr_align_down(((uint64_t)1 << 40) + 5, 4096), (uint64_t)1 << 40);
}

CHECK_MAIN({"takes_each_once", takes_each_once}, {"given_back_is_taken_next", given_back_is_taken_next},
           {"no_memory", no_memory}, {"alignment", alignment})
