/*
 * The coordinator's work: plans merged, checked, shared out and sent back; and what a rank reads of a checkpoint.
 *
 * Tilings are made by cutting a box at random places, again and again, and handed to random ranks; an oracle that
 * looks at every element says what they should come to.
 */
#include "plan.h"
#include "plan/match.h"
#include "plan/merge.h"

enum { MAX_RANKS = 16, MAX_NDIM = 4, MAX_BOXES = 24, MAX_TENSORS = 5 };

/* ---- plans of several ranks ---- */

struct plans {
    uint32_t world;
    struct dr_table of[MAX_RANKS];
    struct dr_merge merge;
    struct dr_error error;
};

static void begin(struct plans *p, uint32_t world) {
    *p = (struct plans){.world = world};
    for (uint32_t rank = 0; rank < world; rank++)
        plan_init(&p->of[rank]);
}

static void end(struct plans *p) {
    dr_merge_destroy(&p->merge);
    for (uint32_t rank = 0; rank < p->world; rank++)
        dr_table_destroy(&p->of[rank]);
}

static int add_all(struct plans *p) {
    int rc = 0;
    dr_error_clear(&p->error);
    dr_merge_destroy(&p->merge);
    CHECK_OK(dr_merge_init(&p->merge, p->world, &p->error), &p->error);
    for (uint32_t rank = 0; rank < p->world && rc == 0; rank++) {
        struct dr_buffer bytes = plan_encode(&p->of[rank]);
        rc = dr_merge_add(&p->merge, bytes.data, bytes.size, NULL, 0, NULL, &p->error);
        dr_buffer_destroy(&bytes);
    }
    CHECK_EQ(rc, -p->error.err);
    return rc;
}

static int check_all(struct plans *p, bool complete) {
    int rc = add_all(p);
    return rc ? rc : dr_merge_check(&p->merge, complete, NULL, &p->error);
}

/* The plans are refused, and the message says all of these. */
static void refused(struct plans *p, const char *const *words) {
    CHECK_FAILS(check_all(p, true), &p->error, EINVAL);
    for (; *words; words++)
        if (!strstr(p->error.detail, *words))
            CHECK_FAIL("'%s' is not in: %s", *words, p->error.detail);
    end(p);
}

#define REFUSED(plans, ...) refused(plans, (const char *const[]){__VA_ARGS__, NULL})

/* ---- merging ---- */

static void groups_and_holders(void) {
    struct plans p;
    begin(&p, 4);
    for (uint32_t rank = 0; rank < 4; rank++) {
        int64_t half = rank % 2;
        plan_object(&p.of[rank], "step");
        plan_name_only(&p.of[rank], "not here");
        plan_rows(&p.of[rank], "w", 10, 3, half * 5, half * 5 + 5);
        if (rank == 2)
            plan_chunk(&p.of[rank], "scalar", 0, NULL, P_FLOAT32, 0);
    }
    CHECK_OK(check_all(&p, true), &p.error);
    CHECK_EQ(p.merge.groups.count, 4);
    const uint32_t holders[] = {0, 1, 2, 3, 0, 2, 1, 3, 2};
    const uint64_t starts[] = {0, 4, 6, 8, 9};
    CHECK_BYTES(p.merge.holder_start, starts, sizeof starts);
    CHECK_BYTES(p.merge.holders, holders, sizeof holders);
    end(&p);
}

/* What ranks may differ in: requires_grad, TENSOR or SHARD, flags, and the order of keys. */
static void differences_that_do_not_matter(void) {
    struct plans p;
    begin(&p, 2);
    plan_rows(&p.of[0], "w", 4, 4, 0, 4);
    plan_object(&p.of[0], "o");
    plan_object(&p.of[1], "o");
    plan_row(&p.of[1], "w", 1, "", 0,
             &(struct dr_row_view){.type = DR_ROW_TENSOR,
                                   .properties = P_FLOAT32_GRAD,
                                   .ndim = 2,
                                   .dims = (const int64_t[]){4, 4, 0, 0, 4, 4}});
    CHECK_OK(check_all(&p, true), &p.error);
    CHECK_EQ(p.merge.groups.count, 2);
    CHECK_EQ(p.merge.groups.rows[0].flags & DR_ROW_DIVISIBLE, 0); /* one rank cannot cut it */
    end(&p);
}

/* Ranks number their properties each in their own way; rows that are "as the one before" keep theirs. */
static void ranks_with_other_properties(void) {
    const int64_t dims[] = {4, 0, 4};
    struct plans p;
    struct dr_error error;
    begin(&p, 3);
    for (uint32_t rank = 0; rank < 3; rank++) {
        uint16_t index[P_COUNT];
        struct dr_table known, *table = &p.of[rank];
        plan_init(&known);
        dr_table_destroy(table);
        dr_error_clear(&error);
        for (uint32_t i = 0; i < P_COUNT; i++) {
            uint32_t turned = (i + rank) % P_COUNT;
            CHECK_OK(dr_table_properties(table, &known.properties[turned], &index[turned], &error), &error);
        }
        for (int i = 0; i < 30; i++) {
            char name[] = {(char)('0' + rank), (char)('0' + i), 0};
            if (i % 7 == 6)
                plan_object(table, name);
            else
                plan_chunk(table, name, 1, dims, index[i / 4 % P_COUNT], 0);
        }
        dr_table_destroy(&known);
    }
    CHECK_OK(check_all(&p, true), &p.error);
    for (uint32_t g = 0; g < p.merge.groups.count; g++) {
        const struct dr_row *row = &p.merge.groups.rows[g];
        if (dr_row_is_tensor(row))
            CHECK_EQ(row->properties, g % 30 / 4 % P_COUNT);
    }
    end(&p);
}

static void disagreements(void) {
    const int64_t whole[] = {4, 4, 0, 0, 4, 4}, other[] = {4, 5, 0, 0, 4, 5}, flat[] = {16, 0, 16};
    struct plans p;
    begin(&p, 3);
    plan_chunk(&p.of[0], "layer.w", 2, whole, P_FLOAT32, 0);
    plan_chunk(&p.of[2], "layer.w", 2, other, P_FLOAT32, 0);
    REFUSED(&p, "'layer.w'", "[4, 5]", "rank 2", "[4, 4]", "float32");
    begin(&p, 2);
    plan_chunk(&p.of[0], "layer.w", 2, whole, P_FLOAT32, 0);
    plan_chunk(&p.of[1], "layer.w", 2, whole, P_INT8, 0);
    REFUSED(&p, "'layer.w'", "int8 [4, 4] on rank 1", "float32 [4, 4]");
    begin(&p, 2);
    plan_chunk(&p.of[0], "layer.w", 2, whole, P_FLOAT32, 0);
    plan_chunk(&p.of[1], "layer.w", 1, flat, P_FLOAT32, 0);
    REFUSED(&p, "'layer.w'", "[16]", "rank 1");
    begin(&p, 2);
    plan_chunk(&p.of[0], "layer.w", 2, whole, P_FLOAT32, 0);
    plan_object(&p.of[1], "layer.w");
    REFUSED(&p, "'layer.w'", "an object on rank 1", "float32 [4, 4]");
    begin(&p, 2);
    plan_object(&p.of[0], "scalar");
    plan_chunk(&p.of[1], "scalar", 0, NULL, P_FLOAT32, 0);
    REFUSED(&p, "'scalar'", "float32 [] on rank 1", "an object");
    begin(&p, 2);
    plan_rows(&p.of[0], "w", 10, 2, 0, 5);
    plan_rows(&p.of[1], "w", 10, 2, 5, 10);
    plan_rows(&p.of[1], "w", 11, 2, 10, 11);
    REFUSED(&p, "'w'", "[11, 2] on rank 1", "[10, 2]");
    begin(&p, 2);
    plan_rows(&p.of[0], "w", 10, 2, 0, 5);
    plan_rows(&p.of[1], "w", 10, 2, 0, 6);
    REFUSED(&p, "'w'", "rank 1", "same offset");
}

static void chunks_that_do_not_fit(void) {
    struct plans p;
    begin(&p, 3);
    plan_rows(&p.of[1], "w", 10, 2, 0, 10);
    plan_rows(&p.of[1], "w", 10, 2, 0, 10);
    REFUSED(&p, "'w'", "rank 1", "the same chunk twice");
    begin(&p, 3);
    plan_object(&p.of[2], "o");
    plan_object(&p.of[2], "o");
    REFUSED(&p, "'o'", "rank 2", "it twice");
    begin(&p, 3);
    plan_rows(&p.of[0], "w", 10, 2, 0, 6);
    plan_rows(&p.of[2], "w", 10, 2, 5, 10);
    REFUSED(&p, "'w'", "overlap", "[0:6, 0:2] of rank 0", "[5:10, 0:2] of rank 2");
    begin(&p, 3);
    plan_rows(&p.of[0], "w", 10, 2, 0, 3);
    plan_rows(&p.of[2], "w", 10, 2, 5, 10);
    REFUSED(&p, "'w'", "16 of 20 elements", "missing");
    begin(&p, 3);
    plan_rows(&p.of[0], "w", 10, 2, 0, 5);
    plan_rows(&p.of[2], "w", 10, 2, 5, 11);
    REFUSED(&p, "'w'", "[5:11, 0:2] of rank 2", "outside");
    begin(&p, 3); /* as many elements as there should be, but not the right ones */
    plan_rows(&p.of[0], "w", 10, 2, 0, 5);
    plan_rows(&p.of[1], "w", 10, 2, 4, 9);
    REFUSED(&p, "'w'", "overlap", "rank 0", "rank 1");
    begin(&p, 2);
    plan_chunk(&p.of[0], "w", 2, (const int64_t[]){4, 4, 0, 0, 2, 4}, P_FLOAT32, 0);
    plan_chunk(&p.of[1], "w", 2, (const int64_t[]){4, 4, 2, 0, 2, 3}, P_FLOAT32, 0);
    REFUSED(&p, "'w'", "14 of 16");
}

/* A key of a thousand bytes, and as many dimensions as there may be: messages are cut, not written over. */
static void long_messages(void) {
    enum { LONG = 1000 };
    char name[LONG + 1];
    int64_t dims[3 * DR_TABLE_MAX_DIMS];
    struct plans p;
    memset(name, 'n', LONG);
    name[LONG] = 0;
    for (int kind = 0; kind < 5; kind++) {
        for (int d = 0; d < DR_TABLE_MAX_DIMS; d++) {
            dims[d] = dims[2 * DR_TABLE_MAX_DIMS + d] = 1;
            dims[DR_TABLE_MAX_DIMS + d] = kind == 0 ? INT64_MAX - 1 : 0;
        }
        begin(&p, 2);
        plan_chunk(&p.of[0], name, DR_TABLE_MAX_DIMS, dims, P_INT8, 0);
        dims[0] = kind == 1 ? 2 : 1;
        dims[2 * DR_TABLE_MAX_DIMS] = kind == 2 ? 0 : 1;
        if (kind < 4)
            plan_chunk(&p.of[1], name, DR_TABLE_MAX_DIMS, dims, kind == 3 ? P_FLOAT32 : P_INT8, 0);
        if (kind == 4)
            plan_object(&p.of[1], name);
        REFUSED(&p, "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn");
    }
}

/* Ranks whose part is empty: the end of the tensor, as DTensor has it, or a dimension of no size. */
static void empty_chunks(void) {
    struct plans p;
    begin(&p, 6);
    for (uint32_t rank = 0; rank < 6; rank++) {
        int64_t from = rank < 3 ? rank : 3;
        plan_rows(&p.of[rank], "few", 3, 7, from, rank < 3 ? from + 1 : 3);
        plan_rows(&p.of[rank], "none", 0, 7, 0, 0);
        plan_rows(&p.of[rank], "thin", 12, 0, 2 * rank, 2 * rank + 2);
    }
    CHECK_OK(check_all(&p, true), &p.error);
    CHECK_EQ(p.merge.groups.count, 4 + 1 + 6);
    struct dr_assignment assignment = {DR_BALANCED, 0, NULL, 1};
    CHECK_OK(dr_merge_assign(&p.merge, &assignment, NULL, &p.error), &p.error);
    CHECK_EQ(p.merge.piece_count, 11);
    end(&p);
    begin(&p, 2); /* an empty chunk in the middle of another covers nothing */
    plan_rows(&p.of[0], "w", 10, 2, 0, 10);
    plan_rows(&p.of[1], "w", 10, 2, 5, 5);
    CHECK_OK(check_all(&p, true), &p.error);
    end(&p);
}

/* With one rank's plan alone, parts may be missing, but not overlap. */
static void incomplete_plans(void) {
    struct plans p;
    begin(&p, 1);
    plan_rows(&p.of[0], "w", 10, 2, 2, 4);
    plan_rows(&p.of[0], "w", 10, 2, 6, 8);
    CHECK_OK(check_all(&p, false), &p.error);
    plan_rows(&p.of[0], "w", 10, 2, 3, 5);
    CHECK_FAILS(check_all(&p, false), &p.error, EINVAL);
    end(&p);
}

/* After a bad plan nothing goes on, whatever the caller does. */
static void after_a_bad_plan(void) {
    struct dr_assignment assignment = {DR_FIRST_REPLICA, 0, NULL, 1};
    struct plans p;
    begin(&p, 2);
    plan_rows(&p.of[0], "w", 10, 2, 0, 10);
    plan_object(&p.of[0], "w");
    CHECK_FAILS(add_all(&p), &p.error, EINVAL);
    for (int i = 0; i < 2; i++) {
        struct dr_buffer bytes = plan_encode(&p.of[1]);
        dr_error_clear(&p.error);
        CHECK_FAILS(dr_merge_add(&p.merge, bytes.data, bytes.size, NULL, 0, NULL, &p.error), &p.error, EINVAL);
        dr_buffer_destroy(&bytes);
    }
    dr_error_clear(&p.error);
    CHECK_FAILS(dr_merge_check(&p.merge, true, NULL, &p.error), &p.error, EINVAL);
    end(&p);
    begin(&p, 0);
    CHECK_OK(check_all(&p, true), &p.error);
    for (int strategy = DR_BALANCED; strategy <= DR_LIMITED; strategy++) {
        assignment.strategy = (enum dr_strategy)strategy;
        CHECK_OK(dr_merge_assign(&p.merge, &assignment, NULL, &p.error), &p.error);
    }
    end(&p);
}

/* Few bytes that stand for very many names are refused, not expanded. */
static void names_without_end(void) {
    enum { PREFIX = 24 << 10, ROWS = 4000 };
    for (int paths = 0; paths < 2; paths++) {
        struct dr_buffer out = {0};
        char *text = check_alloc(PREFIX);
        memset(text, 'n', PREFIX);
        dr_buffer_put(&out, "DRT\1\0\0\0\0", 8);
        dr_buffer_varint(&out, 0);
        dr_buffer_varint(&out, ROWS);
        for (uint32_t i = 0; i < ROWS; i++) {
            uint32_t shared = i ? paths ? 0 : PREFIX : 0;
            dr_buffer_byte(&out, i ? DR_ROW_BYTES | 3 << 5 : DR_ROW_BYTES);
            dr_buffer_varint(&out, shared);
            dr_buffer_varint(&out, i || paths ? 4 : PREFIX);
            dr_buffer_put(&out, i || paths ? (const char *)&i : text, i || paths ? 4 : PREFIX);
            if (i == 0) {
                dr_buffer_varint(&out, paths ? PREFIX : 0);
                dr_buffer_put(&out, text, paths ? PREFIX : 0);
                dr_buffer_varint(&out, 0);
            }
        }
        plan_fix_crc(out.data, out.size);
        struct dr_table table;
        struct dr_merge merge;
        DR_NEW_ERROR(error);
        dr_table_init(&table);
        CHECK_FAILS(dr_table_decode(&table, out.data, out.size, NULL, &error), &error, EINVAL);
        dr_error_clear(&error);
        CHECK_OK(dr_merge_init(&merge, 1, &error), &error);
        CHECK_FAILS(dr_merge_add(&merge, out.data, out.size, NULL, 0, NULL, &error), &error, EINVAL);
        CHECK_INT(merge.groups.text_size, <=, 64 * out.size + (17 << 20));
        dr_table_destroy(&table);
        dr_merge_destroy(&merge);
        dr_buffer_destroy(&out);
        free(text);
    }
}

/* ---- fingerprints ---- */

static int add_fingerprinted(struct plans *p, const uint32_t *fingerprints, size_t each) {
    int rc = 0;
    dr_error_clear(&p->error);
    CHECK_OK(dr_merge_init(&p->merge, p->world, &p->error), &p->error);
    for (uint32_t rank = 0; rank < p->world && rc == 0; rank++) {
        struct dr_buffer bytes = plan_encode(&p->of[rank]);
        rc = dr_merge_add(&p->merge, bytes.data, bytes.size, fingerprints + rank * each, each, NULL, &p->error);
        dr_buffer_destroy(&bytes);
    }
    return rc;
}

static void hashed(struct dr_table *table, const char *name, unsigned flags) {
    plan_row(table, name, (uint32_t)strlen(name), "", 0, &(struct dr_row_view){.type = DR_ROW_BYTES, .flags = flags});
}

static void fingerprints(void) {
    const uint32_t fingerprints[] = {10, 20, 10, 21, 10, 20};
    struct plans p;
    begin(&p, 3);
    for (uint32_t rank = 0; rank < 3; rank++) {
        hashed(&p.of[rank], "same", DR_ROW_HASHED);
        hashed(&p.of[rank], "unknown", 0);
        hashed(&p.of[rank], "differs", DR_ROW_HASHED);
    }
    CHECK_OK(add_fingerprinted(&p, fingerprints, 2), &p.error);
    CHECK_OK(dr_merge_check(&p.merge, true, NULL, &p.error), &p.error);
    uint8_t *different;
    CHECK_OK(dr_merge_differing(&p.merge, &different, &p.error), &p.error);
    CHECK_BYTES(different, "\0\0\1", 3);
    free(different);
    for (uint32_t rank = 0; rank < 3; rank++) {
        CHECK_EQ(dr_merge_fingerprint(&p.merge, 0, rank), 10);
        CHECK_EQ(dr_merge_fingerprint(&p.merge, 1, rank), 0);
        CHECK_EQ(dr_merge_fingerprint(&p.merge, 2, rank), fingerprints[2 * rank + 1]);
    }
    for (size_t each = 1; each <= 3; each += 2) {
        const uint32_t many[9] = {0};
        dr_merge_destroy(&p.merge);
        CHECK_FAILS(add_fingerprinted(&p, many, each), &p.error, EINVAL);
    }
    end(&p);
}

/* One rank compares, another does not: its rows count as unknown, not as different. */
static void some_fingerprints(void) {
    struct plans p;
    begin(&p, 4);
    for (uint32_t rank = 0; rank < 4; rank++)
        for (int i = 0; i < 40; i++)
            hashed(&p.of[rank], (char[]){'a', (char)('0' + i), 0}, DR_ROW_HASHED);
    dr_error_clear(&p.error);
    CHECK_OK(dr_merge_init(&p.merge, p.world, &p.error), &p.error);
    uint32_t fingerprints[40];
    for (uint32_t i = 0; i < 40; i++)
        fingerprints[i] = i * 7; /* the first is 0, which is as good as any */
    for (uint32_t rank = 0; rank < 4; rank++) {
        struct dr_buffer bytes = plan_encode(&p.of[rank]);
        CHECK_OK(dr_merge_add(&p.merge, bytes.data, bytes.size, fingerprints, rank % 2 ? 40 : 0, NULL, &p.error),
                 &p.error);
        dr_buffer_destroy(&bytes);
    }
    CHECK_OK(dr_merge_check(&p.merge, true, NULL, &p.error), &p.error);
    uint8_t *different;
    CHECK_OK(dr_merge_differing(&p.merge, &different, &p.error), &p.error);
    for (int i = 0; i < 40; i++) {
        CHECK_EQ(different[i], 0);
        CHECK_EQ(dr_merge_fingerprint(&p.merge, (uint32_t)i, 2), 0);
        CHECK_EQ(dr_merge_fingerprint(&p.merge, (uint32_t)i, 3), i ? fingerprints[i] : 1);
    }
    free(different);
    end(&p);
}

/* ---- random tilings ---- */

struct tiling {
    int ndim;
    int64_t size[MAX_NDIM];
    size_t count;
    int64_t boxes[MAX_BOXES][2 * MAX_NDIM]; /* offsets, lengths */
};

static struct tiling make_tiling(struct rng *rng) {
    struct tiling t = {.ndim = (int)rng_below(rng, MAX_NDIM + 1), .count = 1};
    for (int d = 0; d < t.ndim; d++)
        t.boxes[0][t.ndim + d] = t.size[d] = 1 + (int64_t)rng_below(rng, 6);
    for (size_t cuts = rng_below(rng, MAX_BOXES); cuts > 0 && t.ndim > 0 && t.count < MAX_BOXES; cuts--) {
        size_t from = rng_below(rng, t.count);
        int d = (int)rng_below(rng, (uint64_t)t.ndim);
        int64_t *box = t.boxes[from], *added = t.boxes[t.count];
        if (box[t.ndim + d] < 2)
            continue;
        int64_t at = 1 + (int64_t)rng_below(rng, (uint64_t)box[t.ndim + d] - 1);
        memcpy(added, box, sizeof t.boxes[0]);
        added[d] += at;
        added[t.ndim + d] -= at;
        box[t.ndim + d] = at;
        t.count++;
    }
    return t;
}

static void give_box(struct plans *p, const char *name, const struct tiling *t, size_t box, uint32_t rank) {
    int64_t dims[3 * MAX_NDIM];
    size_t n = (size_t)t->ndim * sizeof *dims;
    memcpy(dims, t->size, n);
    memcpy(dims + t->ndim, t->boxes[box], 2 * n);
    plan_chunk(&p->of[rank], name, t->ndim, dims, P_FLOAT32, DR_ROW_DIVISIBLE);
}

/* Each box to one rank or more. */
static void give_tiling(struct plans *p, struct rng *rng, const char *name, const struct tiling *t) {
    for (size_t box = 0; box < t->count; box++) {
        uint32_t first = (uint32_t)rng_below(rng, p->world);
        for (uint32_t rank = 0; rank < p->world; rank++)
            if (rank == first || rng_below(rng, 4) == 0)
                give_box(p, name, t, box, rank);
    }
}

/* Whether every element of the tensor is in exactly one box, and no box leaves it. */
static bool tiles(const struct tiling *t) {
    int64_t elements = 1, index[MAX_NDIM] = {0};
    for (size_t b = 0; b < t->count; b++)
        for (int d = 0; d < t->ndim; d++)
            if (t->boxes[b][d] + t->boxes[b][t->ndim + d] > t->size[d])
                return false;
    for (int d = 0; d < t->ndim; d++)
        elements *= t->size[d];
    for (; elements > 0; elements--) {
        int held = 0;
        for (size_t b = 0; b < t->count; b++) {
            bool inside = true;
            for (int d = 0; d < t->ndim; d++)
                inside &= index[d] >= t->boxes[b][d] && index[d] < t->boxes[b][d] + t->boxes[b][t->ndim + d];
            held += inside;
        }
        if (held != 1)
            return false;
        for (int d = t->ndim - 1; d >= 0 && ++index[d] == t->size[d]; d--)
            index[d] = 0;
    }
    return true;
}

static void tilings_are_accepted(void) {
    struct rng rng = {11};
    for (int round = 0; round < 4000; round++) {
        struct plans p;
        begin(&p, 1 + (uint32_t)rng_below(&rng, 6));
        struct tiling t = make_tiling(&rng);
        CHECK(tiles(&t));
        give_tiling(&p, &rng, "w", &t);
        CHECK_OK(check_all(&p, true), &p.error);
        CHECK_EQ(p.merge.groups.count, t.count);
        end(&p);
    }
}

static void perturb(struct rng *rng, struct tiling *t) {
    size_t box = rng_below(rng, t->count);
    int d = t->ndim ? (int)rng_below(rng, (uint64_t)t->ndim) : 0;
    int64_t *offset = &t->boxes[box][d], *length = &t->boxes[box][t->ndim + d];
    switch (rng_below(rng, 5)) {
    case 0: /* one is missing */
        memcpy(t->boxes[box], t->boxes[--t->count], sizeof t->boxes[0]);
        break;
    case 1:
        *length += t->ndim > 0;
        break;
    case 2:
        *length -= t->ndim > 0;
        break;
    case 3:
        *offset += t->ndim > 0;
        break;
    default:
        *offset -= t->ndim > 0 && *offset > 0;
        break;
    }
}

static bool has_twins(const struct tiling *t) {
    for (size_t a = 0; a < t->count; a++)
        for (size_t b = 0; b < a; b++)
            if (memcmp(t->boxes[a], t->boxes[b], 2 * (size_t)t->ndim * sizeof **t->boxes) == 0)
                return true;
    return false;
}

/* A tiling with one or two changes is accepted or refused as the oracle says. */
static void perturbed_tilings(void) {
    struct rng rng = {12};
    unsigned bad = 0, good = 0;
    for (int round = 0; round < 12000; round++) {
        struct plans p;
        begin(&p, 1 + (uint32_t)rng_below(&rng, 4));
        struct tiling t = make_tiling(&rng);
        for (uint64_t changes = 1 + rng_below(&rng, 2); changes > 0 && t.count > 0; changes--)
            perturb(&rng, &t);
        if (has_twins(&t))
            t.count = 0; /* replicas of each other */
        give_tiling(&p, &rng, "w", &t);
        bool expected = tiles(&t) || t.count == 0; /* nobody knows of a tensor without chunks */
        int rc = check_all(&p, true);
        if (rc && expected && strstr(p.error.detail, "same offset"))
            rc = 0; /* an empty chunk where another starts: allowed to be refused */
        CHECK_EQ(rc, expected ? 0 : -EINVAL);
        *(expected ? &good : &bad) += 1;
        end(&p);
    }
    CHECK_INT(good, >, 1000);
    CHECK_INT(bad, >, 5000);
}

/* ---- sharing out ---- */

static bool is_holder(const struct dr_merge *merge, uint32_t group, uint32_t rank) {
    for (uint64_t h = merge->holder_start[group]; h < merge->holder_start[group + 1]; h++)
        if (merge->holders[h] == rank)
            return true;
    return false;
}

static int64_t rows_of(const struct dr_merge *merge, uint32_t group) {
    const struct dr_row *row = &merge->groups.rows[group];
    return row->ndim ? dr_row_lengths(&merge->groups, row)[0] : 1;
}

/* Every group is written once and wholly, by ranks that hold it. */
static void check_pieces(const struct dr_merge *merge, uint32_t *writers) {
    int64_t *done = check_alloc((merge->groups.count + 1) * sizeof *done);
    *writers = 0;
    uint8_t writes[MAX_RANKS] = {0};
    for (size_t i = 0; i < merge->piece_count; i++) {
        const struct dr_piece *piece = &merge->pieces[i];
        CHECK_INT(piece->group, <, merge->groups.count);
        CHECK(is_holder(merge, piece->group, piece->writer));
        writes[piece->writer] = 1;
        if (piece->rows < 0) {
            CHECK_EQ(done[piece->group], 0);
            done[piece->group] = INT64_MAX;
            continue;
        }
        CHECK_EQ(piece->start, done[piece->group]);
        CHECK_INT(piece->rows, >, 0);
        CHECK_INT(piece->rows, <, rows_of(merge, piece->group));
        done[piece->group] += piece->rows;
    }
    for (uint32_t g = 0; g < merge->groups.count; g++)
        CHECK(done[g] == INT64_MAX || done[g] == rows_of(merge, g));
    for (uint32_t rank = 0; rank < merge->world; rank++)
        *writers += writes[rank];
    free(done);
}

struct reader {
    const struct dr_merge *merge;
    const uint32_t *items;
    uint32_t rank;
    size_t at, count;
};

static int compare_kept(void *context, size_t row, int64_t start, int64_t rows) {
    struct reader *r = context;
    CHECK_INT(r->at, <, r->count);
    const struct dr_piece *piece = &r->merge->pieces[r->items[r->at++]];
    CHECK_EQ(piece->writer, r->rank);
    CHECK_EQ(r->merge->row_group[r->merge->rank_rows[r->rank] + row], piece->group);
    CHECK_EQ(rows, piece->rows);
    CHECK_EQ(start, rows < 0 ? 0 : piece->start);
    return 0;
}

static int count_kept(void *context, size_t row, int64_t start, int64_t rows) {
    (void)row;
    (void)start;
    (void)rows;
    ++*(size_t *)context;
    return 0;
}

/* Replies say what dr_merge_items says; sums add up; garbled replies are errors or harmless. */
static void check_replies(const struct dr_merge *merge, struct rng *rng) {
    uint64_t items = 0, bytes = 0, all = 0;
    for (uint32_t rank = 0; rank < merge->world; rank++) {
        struct reader r = {.merge = merge, .rank = rank};
        struct dr_buffer reply;
        DR_NEW_ERROR(error);
        uint32_t *own;
        size_t rows = merge->rank_rows[rank + 1] - merge->rank_rows[rank], ignored = 0;
        uint64_t held = 0, held_bytes = 0;
        CHECK_OK(dr_merge_items(merge, rank, &own, &r.count, &error), &error);
        r.items = own;
        CHECK_OK(dr_merge_reply(merge, rank, &reply, &error), &error);
        CHECK_OK(dr_reply_read(reply.data, reply.size, rows, compare_kept, &r, &error), &error);
        CHECK_EQ(r.at, r.count);
        CHECK_EQ(merge->sums[rank].items, r.count);
        for (uint64_t i = merge->rank_rows[rank]; i < merge->rank_rows[rank + 1]; i++)
            if (merge->row_group[i] != DR_NO_GROUP) {
                held++;
                held_bytes += dr_row_bytes(&merge->groups, &merge->groups.rows[merge->row_group[i]]);
            }
        CHECK_EQ(merge->sums[rank].items + merge->sums[rank].removed, held);
        CHECK_EQ(merge->sums[rank].bytes + merge->sums[rank].removed_bytes, held_bytes);
        items += merge->sums[rank].items;
        bytes += merge->sums[rank].bytes;
        dr_error_clear(&error);
        CHECK_FAILS(dr_reply_read(reply.data, reply.size, rows + 1, count_kept, &ignored, &error), &error, EINVAL);
        for (size_t cut = 0; cut < reply.size; cut++) {
            dr_error_clear(&error);
            int rc = dr_reply_read(reply.data, cut, rows, count_kept, &ignored, &error);
            CHECK(rc == -error.err && (rc == -EINVAL || cut > rows / 8)); /* whole pieces may be cut off unnoticed */
        }
        reply.data[rng_below(rng, reply.size)] ^= (uint8_t)(1 + rng_below(rng, 255));
        dr_error_clear(&error);
        CHECK_EQ(dr_reply_read(reply.data, reply.size, rows, count_kept, &ignored, &error), -error.err);
        dr_buffer_destroy(&reply);
        free(own);
    }
    for (uint32_t g = 0; g < merge->groups.count; g++)
        all += dr_row_bytes(&merge->groups, &merge->groups.rows[g]);
    CHECK_EQ(items, merge->piece_count);
    CHECK_EQ(bytes, all);
}

/* By name, then by the offsets of what was cut, then by the cuts. */
static void check_order(const struct dr_merge *merge, const struct dr_piece *before, const struct dr_piece *piece) {
    const struct dr_table *t = &merge->groups;
    const struct dr_row *a = &t->rows[before->group], *b = &t->rows[piece->group];
    CHECK_INT(a->name, <=, b->name);
    if (before->group == piece->group)
        CHECK_INT(before->start, <, piece->start);
    for (int d = 0; a->name == b->name && a != b && d < b->ndim; d++) {
        CHECK_INT(dr_row_offsets(t, a)[d], <=, dr_row_offsets(t, b)[d]);
        if (dr_row_offsets(t, a)[d] < dr_row_offsets(t, b)[d])
            break;
    }
}

/* The checkpoint's chunks are the pieces. */
static void check_table(const struct dr_merge *merge) {
    struct dr_table table;
    DR_NEW_ERROR(error);
    dr_table_init(&table);
    CHECK_OK(dr_merge_table(merge, &table, &error), &error);
    CHECK_EQ(table.count, merge->piece_count);
    for (size_t i = 0; i < table.count; i++) {
        const struct dr_piece *piece = &merge->pieces[i];
        const struct dr_row *row = &table.rows[i], *group = &merge->groups.rows[piece->group];
        CHECK_EQ(row->name, group->name);
        CHECK_EQ(dr_row_is_tensor(row), dr_row_is_tensor(group));
        for (int d = 0; d < row->ndim; d++) {
            bool cut = piece->rows >= 0 && d == 0;
            CHECK_EQ(dr_row_size(&table, row)[d], dr_row_size(&merge->groups, group)[d]);
            CHECK_EQ(dr_row_offsets(&table, row)[d],
                     dr_row_offsets(&merge->groups, group)[d] + (cut ? piece->start : 0));
            CHECK_EQ(dr_row_lengths(&table, row)[d], cut ? piece->rows : dr_row_lengths(&merge->groups, group)[d]);
        }
        if (i)
            check_order(merge, piece - 1, piece);
    }
    dr_table_destroy(&table);
}

static void random_plans(struct plans *p, struct rng *rng) {
    begin(p, 1 + (uint32_t)rng_below(rng, MAX_RANKS));
    for (uint64_t tensors = rng_below(rng, MAX_TENSORS + 1); tensors > 0; tensors--) {
        char name[] = {'t', (char)('0' + tensors), 0};
        struct tiling t = make_tiling(rng);
        give_tiling(p, rng, name, &t);
    }
    for (uint64_t objects = rng_below(rng, 4); objects > 0; objects--)
        for (uint32_t rank = 0; rank < p->world; rank++) {
            char name[] = {'o', (char)('0' + objects), 0};
            if (rng_below(rng, 3))
                plan_object(&p->of[rank], name);
            else
                plan_name_only(&p->of[rank], name);
        }
}

static void every_strategy(void) {
    struct rng rng = {13};
    for (int round = 0; round < 1500; round++) {
        struct plans p;
        uint32_t hosts[MAX_RANKS], limit = (uint32_t)rng_below(&rng, MAX_RANKS), writers;
        random_plans(&p, &rng);
        for (uint32_t rank = 0; rank < p.world; rank++)
            hosts[rank] = (uint32_t)rng_below(&rng, 1 + rng_below(&rng, p.world));
        CHECK_OK(check_all(&p, true), &p.error);
        for (int strategy = DR_BALANCED; strategy <= DR_PER_HOST; strategy++) {
            struct dr_assignment assignment = {(enum dr_strategy)strategy, limit, hosts, 1 + rng_below(&rng, 100)};
            dr_error_clear(&p.error);
            int rc = dr_merge_assign(&p.merge, &assignment, NULL, &p.error);
            CHECK_EQ(rc, -p.error.err);
            if (rc) {
                CHECK(strategy >= DR_LIMITED && strstr(p.error.detail, "held by none of"));
                continue;
            }
            check_pieces(&p.merge, &writers);
            check_replies(&p.merge, &rng);
            check_table(&p.merge);
            if (strategy == DR_LIMITED)
                CHECK_INT(writers, <=, limit);
            uint8_t lowest[MAX_RANKS] = {0};
            for (uint32_t g = 0; g < p.merge.groups.count; g++)
                lowest[p.merge.holders[p.merge.holder_start[g]]] = 1;
            for (uint32_t a = 0; a < p.world; a++)
                for (uint32_t b = 0; b < a && strategy == DR_PER_HOST; b++)
                    CHECK(hosts[a] != hosts[b] || !p.merge.sums[a].items || !p.merge.sums[b].items);
            for (uint32_t rank = 0; rank < p.world && strategy == DR_FIRST_REPLICA; rank++)
                CHECK(lowest[rank] || !p.merge.sums[rank].items);
        }
        end(&p);
    }
}

/* A limit that leaves a shard without a writer is refused, and the message says which. */
static void limits_that_are_too_small(void) {
    const uint32_t hosts[] = {0, 0, 1, 1};
    struct plans p;
    begin(&p, 4);
    for (uint32_t rank = 0; rank < 4; rank++) {
        plan_rows(&p.of[rank], "a.w", 40, 2, 10 * rank, 10 * rank + 10);
        plan_rows(&p.of[rank], "b.w", 4, 2, 2 * (rank % 2), 2 * (rank % 2) + 2);
    }
    CHECK_OK(check_all(&p, true), &p.error);
    for (uint32_t limit = 0; limit <= 5; limit++) {
        struct dr_assignment assignment = {DR_LIMITED, limit, hosts, 1};
        dr_error_clear(&p.error);
        int rc = dr_merge_assign(&p.merge, &assignment, NULL, &p.error);
        CHECK_EQ(rc, limit < 4 ? -EINVAL : 0);
        if (rc)
            CHECK(strstr(p.error.detail, "'a.w' (the shard at row ") &&
                  strstr(p.error.detail, "lowest holder is rank "));
    }
    struct dr_assignment per_host = {DR_PER_HOST, 0, hosts, 1};
    dr_error_clear(&p.error);
    CHECK_FAILS(dr_merge_assign(&p.merge, &per_host, NULL, &p.error), &p.error, EINVAL);
    CHECK(strstr(p.error.detail, "per_node"));
    end(&p);
    begin(&p, 4); /* the same without the sharded tensor: one rank of each host will do */
    for (uint32_t rank = 0; rank < 4; rank++)
        plan_rows(&p.of[rank], "b.w", 4, 2, 2 * (rank % 2), 2 * (rank % 2) + 2);
    CHECK_OK(check_all(&p, true), &p.error);
    CHECK_OK(dr_merge_assign(&p.merge, &per_host, NULL, &p.error), &p.error);
    CHECK(p.merge.sums[0].items && p.merge.sums[3].items && !p.merge.sums[1].items && !p.merge.sums[2].items);
    end(&p);
}

static uint64_t largest_load(const struct dr_merge *merge) {
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < merge->world; rank++)
        most = merge->sums[rank].bytes > most ? merge->sums[rank].bytes : most;
    return most;
}

/* 40 tensors, half of them replicated, of the others a quarter on each rank; `lopsided`: some are ten times larger. */
static uint64_t mixed_plans(struct plans *p, struct rng *rng, bool lopsided) {
    uint64_t total = 0;
    begin(p, 4);
    for (int i = 0; i < 40; i++) {
        char name[] = {'w', (char)('0' + i), 0};
        int64_t rows = 4 * (1 + (int64_t)rng_below(rng, lopsided && rng_below(rng, 6) == 0 ? 400 : 40));
        for (int64_t rank = 0; rank < 4; rank++)
            plan_rows(&p->of[rank], name, rows, 64, i % 2 ? rows / 4 * rank : 0, i % 2 ? rows / 4 * (rank + 1) : rows);
        total += (uint64_t)rows * 256;
    }
    CHECK_OK(check_all(p, true), &p->error);
    return total;
}

/* Within 5 % of the mean, whole where no tensor is too large for that, and always when they may be cut. */
static void loads_are_even(void) {
    struct rng rng = {14};
    for (int round = 0; round < 400; round++) {
        struct plans p;
        struct dr_assignment assignment = {round % 2 ? DR_SPLIT : DR_BALANCED, 0, NULL, 1};
        uint64_t ideal = mixed_plans(&p, &rng, round % 2) / 4;
        CHECK_OK(dr_merge_assign(&p.merge, &assignment, NULL, &p.error), &p.error);
        CHECK_INT(largest_load(&p.merge), <=, ideal + ideal / 20);
        end(&p);
    }
}

/* Against the best of all ways, for few shares: what is given out one by one and then improved is close to it. */
static void shares_against_the_best(void) {
    enum { RANKS = 3, SHARES = 7, ROUNDS = 3000 };
    struct rng rng = {15};
    double sum = 0, worst = 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct dr_share shares[SHARES];
        uint32_t holders[SHARES][RANKS];
        uint64_t load[RANKS] = {0}, best = UINT64_MAX;
        DR_NEW_ERROR(error);
        for (int s = 0; s < SHARES; s++) {
            uint64_t mask = 1 + rng_below(&rng, (1 << RANKS) - 1);
            size_t count = 0;
            for (uint32_t rank = 0; rank < RANKS; rank++)
                if (mask >> rank & 1)
                    holders[s][count++] = rank;
            shares[s] = (struct dr_share){1 + rng_below(&rng, 100), holders[s], count, 0};
        }
        CHECK_OK(dr_assign(shares, SHARES, NULL, load, RANKS, NULL, &error), &error);
        uint64_t again[RANKS] = {0}, most = 0;
        for (int s = 0; s < SHARES; s++)
            again[shares[s].owner] += shares[s].bytes;
        CHECK_BYTES(again, load, sizeof load);
        for (int rank = 0; rank < RANKS; rank++)
            most = load[rank] > most ? load[rank] : most;
        for (uint32_t code = 0; code < 2187 /* RANKS to the power of SHARES */; code++) {
            uint64_t tried[RANKS] = {0}, top = 0;
            uint32_t digits = code;
            bool possible = true;
            for (int s = 0; s < SHARES; s++, digits /= RANKS) {
                bool found = false;
                for (size_t h = 0; h < shares[s].holder_count; h++)
                    found |= holders[s][h] == digits % RANKS;
                possible &= found;
                tried[digits % RANKS] += shares[s].bytes;
            }
            for (int rank = 0; rank < RANKS; rank++)
                top = tried[rank] > top ? tried[rank] : top;
            if (possible && top < best)
                best = top;
        }
        CHECK_INT(most, >=, best);
        double ratio = (double)most / (double)best;
        sum += ratio;
        worst = ratio > worst ? ratio : worst;
    }
    printf("   largest load over the best possible: %.4f on average, %.3f at worst\n", sum / ROUNDS, worst);
    CHECK(sum / ROUNDS < 1.05 && worst < 1.9);
}

/* The same plans give the same replies, also when something else was assigned in between. */
static void the_same_again(void) {
    struct rng rng = {16};
    for (int round = 0; round < 200; round++) {
        struct plans p;
        random_plans(&p, &rng);
        struct dr_piece *first[2] = {NULL};
        size_t counts[2] = {0};
        for (int turn = 0; turn < 2; turn++) {
            CHECK_OK(check_all(&p, true), &p.error);
            for (int strategy = DR_FIRST_REPLICA; strategy >= DR_BALANCED; strategy--) {
                struct dr_assignment assignment = {(enum dr_strategy)strategy, 0, NULL, 16};
                CHECK_OK(dr_merge_assign(&p.merge, &assignment, NULL, &p.error), &p.error);
                if (strategy == DR_FIRST_REPLICA)
                    continue;
                if (turn) {
                    CHECK_EQ(p.merge.piece_count, counts[strategy]);
                    for (size_t i = 0; i < counts[strategy]; i++) {
                        const struct dr_piece *a = &p.merge.pieces[i], *b = &first[strategy][i];
                        CHECK(a->group == b->group && a->writer == b->writer && a->rows == b->rows);
                    }
                } else {
                    counts[strategy] = p.merge.piece_count;
                    first[strategy] = check_alloc(counts[strategy] * sizeof **first);
                    if (counts[strategy])
                        memcpy(first[strategy], p.merge.pieces, counts[strategy] * sizeof **first);
                }
            }
        }
        free(first[0]);
        free(first[1]);
        end(&p);
    }
}

/* Tensors so large that their bytes together overflow are shared out in few pieces. */
static void sums_that_overflow(void) {
    const int64_t huge = (int64_t)1 << 62;
    struct plans p;
    begin(&p, 2);
    for (uint32_t rank = 0; rank < 2; rank++)
        for (int i = 0; i < 4; i++)
            plan_chunk(&p.of[rank], (char[]){'w', (char)('0' + i), 0}, 1, (const int64_t[]){huge, 0, huge}, P_INT8,
                       DR_ROW_DIVISIBLE);
    CHECK_OK(check_all(&p, true), &p.error);
    for (int strategy = DR_BALANCED; strategy <= DR_SPLIT; strategy++) {
        struct dr_assignment assignment = {(enum dr_strategy)strategy, 0, NULL, 1};
        CHECK_OK(dr_merge_assign(&p.merge, &assignment, NULL, &p.error), &p.error);
        CHECK_INT(p.merge.piece_count, <, 100);
    }
    end(&p);
}

static void garbled_replies(void) {
    static const struct {
        const char *bytes;
        size_t size, rows;
    } bad[] = {
        {"", 0, 0},                                                 /* nothing at all */
        {"\2\3", 2, 3},                                             /* of another plan */
        {"\3", 1, 3},                                               /* no bitmap */
        {"\3\0\3\0\1", 5, 3},                                       /* a piece of a row that is not there */
        {"\3\0\2\0\1\1\0\1", 8, 3},                                 /* rows in the wrong order */
        {"\3\0\2\0", 4, 3},                                         /* half a piece */
        {"\3\0\2\200", 4, 3},                                       /* half a number */
        {"\3\0\0\0\377\377\377\377\377\377\377\377\377\1", 14, 3},  /* more rows than there can be */
        {"\0\1", 2, 0},                                             /* more than there is */
        {"\377\377\377\377\377\377\377\377\377\1", 10, (size_t)-1}, /* no plan has so many rows */
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        DR_NEW_ERROR(error);
        size_t kept = 0;
        CHECK_FAILS(dr_reply_read(bad[i].bytes, bad[i].size, bad[i].rows, count_kept, &kept, &error), &error, EINVAL);
    }
}

/* ---- matching ---- */

static int match_all(struct dr_match *match, const struct dr_table *wanted, const struct dr_table *stored,
                     struct dr_error *error) {
    dr_error_clear(error);
    int rc = dr_match(match, wanted, stored, NULL, error);
    CHECK_EQ(rc, -error->err);
    return rc;
}

/* How often an overlap of these rows covers an element of the wanted chunk, and that it says the right place. */
static void check_overlaps(const struct dr_match *match, const struct dr_table *wanted, const struct dr_table *stored,
                           uint32_t row) {
    const struct dr_row *w = &wanted->rows[row];
    int64_t index[MAX_NDIM] = {0}, elements = 1;
    for (int d = 0; d < w->ndim; d++)
        elements *= dr_row_lengths(wanted, w)[d];
    for (; elements > 0; elements--) {
        int covered = 0;
        for (size_t i = 0; i < match->count; i++) {
            const struct dr_overlap *o = &match->overlaps[i];
            const int64_t *dims = match->dims + o->dims;
            const struct dr_row *s = &stored->rows[o->stored];
            bool inside = o->wanted == row;
            for (int d = 0; d < w->ndim && inside; d++) {
                int64_t at = index[d] - dims[d], from = dims[w->ndim + d];
                inside = at >= 0 && at < dims[2 * w->ndim + d];
                CHECK(!inside || (from + at < dr_row_lengths(stored, s)[d] &&
                                  dr_row_offsets(wanted, w)[d] + index[d] == dr_row_offsets(stored, s)[d] + from + at));
            }
            covered += inside;
        }
        CHECK_EQ(covered, 1);
        for (int d = w->ndim - 1; d >= 0 && ++index[d] == dr_row_lengths(wanted, w)[d]; d--)
            index[d] = 0;
    }
}

static void matches_of_tilings(void) {
    struct rng rng = {17};
    for (int round = 0; round < 1500; round++) {
        struct plans p;
        struct dr_match match;
        struct dr_error error;
        begin(&p, 2);
        struct tiling from = make_tiling(&rng), to = from;
        do
            to = make_tiling(&rng);
        while (to.ndim != from.ndim);
        memcpy(to.size, from.size, sizeof to.size);
        for (size_t box = 0; box < to.count; box++) /* any boxes will do on this side */
            for (int d = 0; d < to.ndim; d++) {
                to.boxes[box][d] = (int64_t)rng_below(&rng, (uint64_t)to.size[d] + 1);
                to.boxes[box][to.ndim + d] = (int64_t)rng_below(&rng, (uint64_t)(to.size[d] - to.boxes[box][d]) + 1);
            }
        plan_object(&p.of[1], "o");
        for (size_t box = 0; box < from.count; box++)
            give_box(&p, "w", &from, box, 1);
        for (size_t box = 0; box < to.count; box++)
            give_box(&p, "w", &to, box, 0);
        plan_object(&p.of[0], "not stored");
        plan_object(&p.of[0], "o");
        plan_name_only(&p.of[0], "of no interest");
        CHECK_OK(match_all(&match, &p.of[0], &p.of[1], &error), &error);
        for (uint32_t row = 0; row < to.count; row++)
            check_overlaps(&match, &p.of[0], &p.of[1], row);
        CHECK_EQ(match.missing_count, 1);
        CHECK_EQ(match.missing[0], to.count);
        CHECK_EQ(match.overlaps[match.count - 1].wanted, to.count + 1);
        CHECK_EQ(match.overlaps[match.count - 1].stored, 0);
        for (size_t i = 1; i < match.count; i++)
            CHECK_INT(match.overlaps[i - 1].wanted, <=, match.overlaps[i].wanted);
        dr_match_destroy(&match);
        end(&p);
    }
}

static void matches_that_fail(void) {
    enum { WHOLE, SHORT, WIDE, FLAT, OBJECT, KINDS };
    struct dr_table tables[KINDS];
    struct dr_match match;
    struct dr_error error;
    for (int kind = 0; kind < KINDS; kind++)
        plan_init(&tables[kind]);
    plan_rows(&tables[WHOLE], "w", 10, 4, 0, 10);
    plan_rows(&tables[SHORT], "w", 10, 4, 0, 6);
    plan_rows(&tables[WIDE], "w", 10, 5, 0, 10);
    plan_chunk(&tables[FLAT], "w", 1, (const int64_t[]){40, 0, 40}, P_FLOAT32, 0);
    plan_object(&tables[OBJECT], "w");
    static const struct {
        int wanted, stored;
        const char *message;
    } cases[] = {
        {WHOLE, SHORT, "24 of the 40 elements"},       {WHOLE, WIDE, "[10, 5] and current: [10, 4]"},
        {WHOLE, FLAT, "[40] and current: [10, 4]"},    {FLAT, WHOLE, "[10, 4] and current: [40]"},
        {OBJECT, WHOLE, "a tensor in the checkpoint"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_FAILS(match_all(&match, &tables[cases[i].wanted], &tables[cases[i].stored], &error), &error, EINVAL);
        CHECK_EQ(error.item, 0);
        if (!strstr(error.detail, cases[i].message))
            CHECK_FAIL("'%s' is not in: %s", cases[i].message, error.detail);
        dr_match_destroy(&match);
    }
    CHECK_OK(match_all(&match, &tables[SHORT], &tables[WHOLE], &error), &error);
    dr_match_destroy(&match);
    CHECK_OK(match_all(&match, &tables[WHOLE], &tables[OBJECT], &error), &error); /* a tensor that was pickled */
    CHECK(match.count == 1 && match.overlaps[0].wanted == 0 && match.overlaps[0].stored == 0);
    dr_match_destroy(&match);
    for (int kind = 0; kind < KINDS; kind++)
        dr_table_destroy(&tables[kind]);
}

/* Stored chunks that share elements never count as more than they are. */
static void matches_of_chunks_that_overlap(void) {
    struct dr_table wanted, stored;
    struct dr_match match;
    struct dr_error error;
    plan_init(&wanted);
    plan_init(&stored);
    plan_rows(&wanted, "twice", 10, 4, 0, 10);
    plan_rows(&wanted, "twice with a hole", 10, 4, 0, 10);
    plan_rows(&wanted, "shifted", 10, 4, 0, 10);
    plan_chunk(&wanted, "scalar", 0, NULL, P_FLOAT32, 0);
    for (int64_t i = 0; i < 6; i++)
        plan_rows(&stored, "twice", 10, 4, i % 2 * 5, i % 2 * 5 + 5);
    for (int i = 0; i < 2; i++)
        plan_rows(&stored, "twice with a hole", 10, 4, 0, 5);
    plan_rows(&stored, "shifted", 10, 4, 0, 6);
    plan_rows(&stored, "shifted", 10, 4, 2, 8);
    plan_chunk(&stored, "scalar", 0, NULL, P_FLOAT32, 0);
    plan_chunk(&stored, "scalar", 0, NULL, P_FLOAT32, 0);
    static const struct {
        uint32_t row, overlaps;
        const char *message; /* NULL: they are found */
    } cases[] = {
        {0, 2, NULL},
        {1, 0, "only 20 of the 40 elements"},
        {2, 0, "chunks of 'shifted' overlap"},
        {3, 1, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dr_row row = wanted.rows[cases[i].row];
        struct dr_table one = wanted;
        one.rows = &row;
        one.count = 1;
        dr_error_clear(&error);
        int rc = dr_match(&match, &one, &stored, NULL, &error);
        CHECK_EQ(rc, cases[i].message ? -EINVAL : 0);
        if (cases[i].message && !strstr(error.detail, cases[i].message))
            CHECK_FAIL("'%s' is not in: %s", cases[i].message, error.detail);
        CHECK(cases[i].message || match.count == cases[i].overlaps);
        CHECK(cases[i].message || match.count < 2 || (match.overlaps[0].stored == 0 && match.overlaps[1].stored == 1));
        dr_match_destroy(&match);
    }
    dr_table_destroy(&wanted);
    dr_table_destroy(&stored);
}

CHECK_MAIN({"groups_and_holders", groups_and_holders},
           {"differences_that_do_not_matter", differences_that_do_not_matter},
           {"ranks_with_other_properties", ranks_with_other_properties}, {"disagreements", disagreements},
           {"chunks_that_do_not_fit", chunks_that_do_not_fit}, {"long_messages", long_messages},
           {"empty_chunks", empty_chunks}, {"incomplete_plans", incomplete_plans},
           {"after_a_bad_plan", after_a_bad_plan}, {"names_without_end", names_without_end},
           {"fingerprints", fingerprints}, {"some_fingerprints", some_fingerprints},
           {"tilings_are_accepted", tilings_are_accepted}, {"perturbed_tilings", perturbed_tilings},
           {"every_strategy", every_strategy}, {"limits_that_are_too_small", limits_that_are_too_small},
           {"loads_are_even", loads_are_even}, {"shares_against_the_best", shares_against_the_best},
           {"the_same_again", the_same_again}, {"sums_that_overflow", sums_that_overflow},
           {"garbled_replies", garbled_replies}, {"matches_of_tilings", matches_of_tilings},
           {"matches_that_fail", matches_that_fail}, {"matches_of_chunks_that_overlap", matches_of_chunks_that_overlap})
