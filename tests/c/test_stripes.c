/*
 * A file that several processes write: stripes that one of them holds, and such that are put together, come out as one
 * process would write them, with the CRCs of each tensor's blocks; and whatever system call fails is an error.
 */
#include "base/align.h"
#include "base/crc.h"
#include "data/stripes.h"
#include "io/sys_fault.h"
#include "sample.h"

#include <fcntl.h>

enum { MIB = 1 << 20, HEAD = 8192, ROWS = 700, COLUMNS = 1003, SMALL = 37, RANKS = 3 };

static const struct dr_control never;
static uint8_t matrix[ROWS][COLUMNS][2], small[SMALL], written[8 * MIB];
static const struct dr_payload payloads[] = {{HEAD, sizeof matrix}, {HEAD + sizeof matrix, SMALL}};
static const uint64_t file_end = HEAD + sizeof matrix + SMALL;

static struct dr_options make_options(const char *engine, enum dr_direct direct) {
    return (struct dr_options){.engine = engine,
                               .direct = direct,
                               .queue_depth = 4,
                               .block_size = MIB,
                               .workers = 2,
                               .checksum = true,
                               .sync = DR_SYNC_LENGTH};
}

/* What a rank holds: columns of the matrix, transposed in its memory, and the last rank the small tensor. */
struct held {
    uint8_t columns[COLUMNS][ROWS][2];
    int64_t sizes[2], offsets[2], lengths[2], strides[2], one, zero, count;
    struct dr_patch patches[2];
    struct dr_stripes stripes;
};

static struct held ranks[RANKS];

static void hold(int rank) {
    struct held *h = &ranks[rank];
    int64_t first = COLUMNS * rank / RANKS, end = COLUMNS * (rank + 1) / RANKS;
    *h = (struct held){.sizes = {ROWS, COLUMNS},
                       .offsets = {0, first},
                       .lengths = {ROWS, end - first},
                       .strides = {1, ROWS},
                       .one = 1,
                       .count = SMALL};
    for (int64_t c = first; c < end; c++)
        for (int r = 0; r < ROWS; r++)
            memcpy(h->columns[c - first][r], matrix[r][c], 2);
    h->patches[0] = (struct dr_patch){.shape = {dr_dtype_by_name("bfloat16"), 2, h->sizes},
                                      .payload = {HEAD, sizeof matrix},
                                      .offsets = h->offsets,
                                      .lengths = h->lengths,
                                      .strides = h->strides,
                                      .data = h->columns};
    h->patches[1] = (struct dr_patch){.shape = {dr_dtype_by_name("uint8"), 1, &h->count},
                                      .payload = {payloads[1].offset, SMALL},
                                      .offsets = &h->zero,
                                      .lengths = &h->count,
                                      .strides = &h->one,
                                      .data = small};
    h->stripes = (struct dr_stripes){
        .patches = h->patches, .patch_count = rank == RANKS - 1 ? 2 : 1, .payloads = payloads, .payload_count = 2};
}

static void make_values(void) {
    struct rng rng = {61};
    rng_fill(&rng, matrix, sizeof matrix);
    rng_fill(&rng, small, SMALL);
    for (int rank = 0; rank < RANKS; rank++)
        hold(rank);
}

static size_t cut(struct dr_stripe *stripes, uint8_t *shared) {
    size_t count = 0;
    for (uint64_t lo = HEAD; lo < file_end; count++, lo = stripes[count - 1].hi) {
        uint64_t hi = dr_align_down(lo, MIB) + MIB;
        stripes[count] = (struct dr_stripe){.lo = lo, .hi = hi < file_end ? hi : file_end, .shared = shared + lo};
    }
    return count;
}

static void check_file(const char *name, const uint32_t *crcs) {
    int fd = open(check_path(name), O_RDONLY);
    CHECK_EQ(read(fd, written, sizeof written), (ssize_t)file_end);
    close(fd);
    CHECK_BYTES(written + HEAD, matrix, sizeof matrix);
    CHECK_BYTES(written + HEAD + sizeof matrix, small, SMALL);
    for (size_t p = 0; p < 2; p++)
        for (size_t i = 0; i < dr_crc_count(payloads[p].offset, payloads[p].size); i++, crcs++) {
            uint64_t lo, hi;
            dr_crc_range(payloads[p].offset, payloads[p].size, i, &lo, &hi);
            CHECK_EQ(*crcs, dr_crc32(0, written + lo, hi - lo));
        }
}

/* All ranks fill all stripes; each writes those of its turn. 0, or what the first failure gave. */
static int save_together(const char *name, const struct dr_options *options, uint32_t *crcs, struct dr_error *error) {
    static _Alignas(4096) uint8_t shared[8 * MIB];
    struct dr_stripe stripes[8];
    size_t count = cut(stripes, shared);
    memset(shared, 0, sizeof shared);
    unlink(check_path(name));
    struct dr_output made;
    int rc = dr_output_open(&made, check_dir, name, true, options, error);
    rc = rc < 0 ? rc : dr_output_prepare(&made, file_end, error);
    for (int rank = 0; rank < RANKS && rc == 0; rank++) {
        struct dr_stripes all = ranks[rank].stripes;
        all.stripes = stripes, all.count = count;
        rc = dr_stripes_fill(&all, 2, &never, error);
    }
    for (size_t i = 0; i < count && rc == 0; i++) {
        struct dr_stripes one = ranks[i % RANKS].stripes;
        struct dr_output output;
        stripes[i].crcs = crcs;
        crcs += dr_stripe_crcs(&one, &stripes[i]);
        one.stripes = &stripes[i], one.count = 1;
        rc = dr_output_open(&output, check_dir, name, false, options, error);
        rc = rc < 0 ? rc : dr_stripes_write(&one, &output, MIB, &never, error);
        rc = rc < 0 ? rc : dr_output_sync(&output, DR_ANY_LENGTH, NULL, &never, error);
        dr_output_close(&output, true); /* which removes nothing, as it has made nothing */
    }
    rc = rc < 0 ? rc : dr_output_sync(&made, file_end, NULL, &never, error);
    dr_output_close(&made, rc < 0);
    return rc;
}

static void stripes_of_several(void) {
    make_values();
    const char *engines[] = {"uring", "threads"};
    for (int e = 0; e < 2; e++)
        for (int direct = DR_DIRECT_OFF; direct <= DR_DIRECT_AUTO; direct += DR_DIRECT_AUTO) {
            struct dr_options options = make_options(engines[e], (enum dr_direct)direct);
            DR_NEW_ERROR(error);
            uint32_t crcs[16];
            CHECK_OK(save_together("together", &options, crcs, &error), &error);
            check_file("together", crcs);
        }
}

/* Whole rows, from memory that is not shared. */
static void stripes_of_one(void) {
    make_values();
    static const int64_t sizes[] = {ROWS, COLUMNS}, zeros[] = {0, 0}, strides[] = {COLUMNS, 1};
    struct dr_patch patches[] = {ranks[RANKS - 1].patches[0], ranks[RANKS - 1].patches[1]};
    patches[0].offsets = zeros, patches[0].lengths = sizes, patches[0].strides = strides, patches[0].data = matrix;
    struct dr_stripe cuts[8];
    uint32_t crcs[16], *next = crcs;
    struct dr_stripes all = {.stripes = cuts, .patches = patches, .patch_count = 2, .payloads = payloads};
    all.payload_count = 2;
    all.count = cut(cuts, written);
    for (size_t i = 0; i < all.count; i++) {
        cuts[i].shared = NULL, cuts[i].crcs = next;
        next += dr_stripe_crcs(&all, &cuts[i]);
    }
    struct dr_options options = make_options("auto", DR_DIRECT_AUTO);
    DR_NEW_ERROR(error);
    struct dr_output output;
    CHECK_OK(dr_output_open(&output, check_dir, "one", true, &options, &error), &error);
    CHECK_OK(dr_stripes_write(&all, &output, file_end, &never, &error), &error);
    CHECK_OK(dr_output_sync(&output, file_end, NULL, &never, &error), &error);
    CHECK_OK(dr_output_close_file(&output, &error), &error);
    dr_output_close(&output, false);
    check_file("one", crcs);
}

static void every_call_fails(void) {
    make_values();
    struct dr_options options = make_options("threads", DR_DIRECT_AUTO);
    struct dr_error error;
    uint32_t crcs[16];
    for (uint64_t nth = 1, failures = 0;; nth++) {
        dr_error_clear(&error);
        dr_fault_arm(&(struct dr_fault){.nth = nth, .err = EIO});
        int rc = save_together("faulty", &options, crcs, &error);
        uint64_t calls = dr_fault_disarm();
        if (rc < 0) {
            failures++;
            CHECK(error.kind != DR_ERROR_NONE && access(check_path("faulty"), F_OK) != 0);
        } else {
            check_file("faulty", crcs);
        }
        if (calls < nth) {
            CHECK_INT(failures, >, 10);
            return;
        }
    }
}

CHECK_MAIN({"stripes_of_several", stripes_of_several}, {"stripes_of_one", stripes_of_one},
           {"every_call_fails", every_call_fails})
