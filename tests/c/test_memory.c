/*
 * The Nth allocation fails, for every N of all that the core does: the result
 * is -ENOMEM or the right one, and nothing is left open or behind. That nothing
 * is leaked either is seen with the leak checker (make asan).
 */
#include "sample.h"

#include "data/verify.h"
#include "io/file.h"
#include "io/file_system.h"
#include "io/sys_fault.h"
#include "keys/key.h"
#include "plan.h"
#include "plan/match.h"
#include "plan/merge.h"
#include "plan/metadata_pickle.h"

enum { COUNT = 5, MIB = 1 << 20 };

static struct sample samples[COUNT];
static const struct dr_control never;
static struct dr_options options;

static void allocations(int (*attempt)(struct dr_error *error), bool and_all_after, uint64_t least) {
    uint64_t counted = 0, failed = 0;
    for (uint64_t n = 1; n <= counted + 1; n++) {
        DR_NEW_ERROR(error);
        int before = check_open_descriptors();
        alarm(60);
        dr_fault_arm(&(struct dr_fault){.call = "malloc", .nth = n, .err = ENOMEM, .sticky = and_all_after});
        int rc = attempt(&error);
        counted = dr_fault_disarm();
        CHECK_EQ(check_open_descriptors(), before);
        if (rc != 0)
            CHECK_FAILS(rc, &error, ENOMEM);
        failed += rc != 0;
    }
    CHECK_INT(failed, >=, least);
}

/*
 * Attempts it with the first, the second, ... allocation failing, until there are no more; and with all after it too.
 * An attempt checks what it gives when it succeeds, and frees it.
 */
static void each_allocation(int (*attempt)(struct dr_error *error), uint64_t least) {
    allocations(attempt, false, least);
    allocations(attempt, true, least);
}

/* ---- files ---- */

static void make_samples(void) {
    struct rng rng = {60};
    if (samples[0].memory)
        return;
    sample_tensor(&samples[0], &rng, 1000, true);
    sample_shape(&samples[1], &rng, "float32", 2, (int64_t[]){600, 1000});
    sample_bytes(&samples[2], &rng, 5000);
    sample_shape(&samples[3], &rng, "int8", 1, (int64_t[]){MIB + 1000});
    samples[3].part_bytes = 700000;
    sample_tensor(&samples[4], &rng, 100, false);
}

static int save_all(struct dr_error *error) {
    unlink(check_path("f"));
    int rc = sample_save("f", samples, COUNT, 2, 3 * MIB, &options, &never, NULL, error);
    if (rc == 0)
        sample_check_file("f", samples, COUNT, true);
    else
        CHECK(!check_exists("f"));
    return rc;
}

static int load_all(struct dr_error *error) {
    return sample_load_all("f", samples, COUNT, &options, &never, NULL, error);
}

static int locate_all(struct dr_error *error) {
    struct dr_lookup lookups[COUNT] = {{0}};
    const char *name = "f";
    for (size_t i = 0; i < COUNT; i++)
        lookups[i] = (struct dr_lookup){.offset = samples[i].placed.offset, .length = samples[i].placed.length};
    int rc = sample_dr_locate(&name, 1, lookups, COUNT, &never, error);
    for (size_t i = 0; i < COUNT && rc == 0; i++)
        CHECK_EQ(lookups[i].located.plain, samples[i].source.shape.dtype != NULL);
    return rc;
}

/* As known tensors and strings, or all as archives of torch.save; the file's last byte is wrong. */
static int verify_as(bool archives, struct dr_error *error) {
    struct dr_check checks[COUNT];
    struct dr_findings found;
    struct dr_stream_stats stats;
    const char *name = "f";
    for (size_t i = 0; i < COUNT; i++) {
        const struct sample *s = &samples[i];
        bool tensor = s->source.shape.dtype != NULL;
        checks[i] = (struct dr_check){.kind = !tensor    ? DR_CHECK_BYTES
                                              : archives ? DR_CHECK_OTHER
                                                         : DR_CHECK_TENSOR,
                                      .offset = s->placed.offset,
                                      .length = s->placed.length,
                                      .payload_offset = s->placed.payload_offset,
                                      .payload_size = s->placed.payload_size,
                                      .crcs = tensor && archives ? NULL : s->crcs,
                                      .shape = {s->source.shape.dtype, s->source.shape.ndim, s->sizes}};
    }
    struct dr_input input;
    memset(&found, 0, sizeof found);
    int rc = dr_input_init(&input, check_dir, &name, 1, error);
    if (rc == 0)
        rc = dr_verify(&input, checks, COUNT, false, &options, &never, &found, &stats, error);
    dr_input_destroy(&input);
    if (rc == 0) {
        CHECK_EQ(found.count, 1);
        CHECK_EQ(found.problems[0].check, COUNT - 1);
    }
    dr_findings_destroy(&found);
    return rc;
}

static int verify_tensors(struct dr_error *error) { return verify_as(false, error); }

static int verify_archives(struct dr_error *error) { return verify_as(true, error); }

static void spoil_the_end(void) {
    size_t size;
    uint8_t *data = check_read_file("f", &size);
    data[size - 1] ^= 1;
    check_write_file("f", data, size);
    free(data);
}

static void files(void) {
    make_samples();
    for (unsigned way = 0; way < 4; way++) {
        struct dr_error error;
        options = (struct dr_options){.engine = way % 2 && sample_has_uring() ? "uring" : "threads",
                                      .direct = DR_DIRECT_OFF,
                                      .queue_depth = 4,
                                      .block_size = MIB,
                                      .workers = 1 + way / 2,
                                      .checksum = true};
        each_allocation(save_all, 10);
        CHECK_OK(save_all(&error), &error);
        each_allocation(load_all, 5);
        each_allocation(locate_all, 2);
        spoil_the_end();
        each_allocation(verify_tensors, 6);
        each_allocation(verify_archives, 6);
    }
    sample_free(samples, COUNT);
    memset(samples, 0, sizeof samples);
}

static int commit(struct dr_error *error) {
    check_write_file("current", "old", 3);
    int rc = dr_directory_commit(check_dir, "new", "current", "newer", 5, false, error);
    size_t size;
    char *data = (char *)check_read_file("current", &size);
    CHECK(rc == 0 ? size == 5 && memcmp(data, "newer", 5) == 0 : size == 3 && memcmp(data, "old", 3) == 0);
    CHECK(!check_exists("new"));
    free(data);
    return rc;
}

static int make_directory(struct dr_error *error) {
    int rc = dr_directory_make(check_path("x/y/z"), DR_NAMES_ALL, error);
    CHECK(rc < 0 || check_exists("x/y/z"));
    rmdir(check_path("x/y/z"));
    rmdir(check_path("x/y"));
    rmdir(check_path("x"));
    return rc < 0 ? rc : 0;
}

static int file_system(struct dr_error *error) {
    uint64_t magic;
    return dr_file_system(check_path("not/there"), &magic, error);
}

static void directories(void) {
    each_allocation(commit, 1);
    each_allocation(make_directory, 1);
    each_allocation(file_system, 1);
}

/* ---- plans ---- */

enum { RANKS = 3, ROWS = 40 };

static struct dr_buffer plans[RANKS];
static struct dr_table wanted;

/* Rows of many names and kinds, so that all arrays and tables grow. */
static void make_plans(void) {
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        struct dr_table table;
        plan_init(&table);
        for (int64_t i = 0; i < ROWS; i++) {
            char name[40];
            snprintf(name, sizeof name, "layer.%d", (int)i);
            if (i % 8 == 0)
                plan_object(&table, name);
            else if (i % 2)
                plan_chunk(&table, name, 2, (const int64_t[]){6, 4, 2 * rank, 0, 2, 4}, P_FLOAT32, 0);
            else
                plan_rows(&table, name, 1000, 4, 0, 1000);
        }
        plans[rank] = plan_encode(&table);
        if (rank == 0)
            wanted = table;
        else
            dr_table_destroy(&table);
    }
}

static int code_table(struct dr_error *error) {
    struct dr_table table;
    struct dr_buffer out = {0};
    dr_table_init(&table);
    int rc = dr_table_decode(&table, plans[0].data, plans[0].size, &never, error);
    if (rc == 0)
        rc = dr_table_encode(&table, &out, error);
    if (rc == 0) {
        CHECK_EQ(out.size, plans[0].size);
        CHECK_BYTES(out.data, plans[0].data, out.size);
    }
    dr_buffer_destroy(&out);
    dr_table_destroy(&table);
    return rc;
}

static int add_all(struct dr_merge *merge, struct dr_error *error) {
    int rc = dr_merge_init(merge, RANKS, error);
    for (uint32_t rank = 0; rank < RANKS && rc == 0; rank++)
        rc = dr_merge_add(merge, plans[rank].data, plans[rank].size, NULL, 0, &never, error);
    for (size_t row = 2; row < 8 && rc == 0; row += 2)
        rc = dr_merge_tie(merge, 0, row, row - 1, error);
    if (rc == 0)
        rc = dr_merge_check(merge, true, &never, error);
    return rc;
}

static int count_item(void *context, size_t row, int64_t start, int64_t rows) {
    (void)row;
    (void)start;
    (void)rows;
    ++*(size_t *)context;
    return 0;
}

static int reply_to_all(const struct dr_merge *merge, struct dr_error *error) {
    int rc = 0;
    size_t all = 0, read = 0;
    for (uint32_t rank = 0; rank < RANKS && rc == 0; rank++) {
        struct dr_buffer out = {0};
        uint32_t *items = NULL;
        size_t count = 0;
        rc = dr_merge_items(merge, rank, &items, &count, error);
        if (rc == 0)
            rc = dr_merge_reply(merge, rank, &out, error);
        if (rc == 0)
            CHECK_OK(dr_reply_read(out.data, out.size, ROWS, count_item, &read, error), error);
        all += count;
        free(items);
        dr_buffer_destroy(&out);
    }
    CHECK(rc != 0 || (read == all && all == merge->piece_count));
    return rc;
}

static int pickle(const struct dr_table *table, struct dr_error *error) {
    static const struct dr_fragment none = {"N", 1};
    static const struct dr_fragment properties[P_COUNT] = {{"N", 1}, {"N", 1}, {"N", 1}};
    const struct dr_metadata_parts parts = {properties, none, none, false};
    struct dr_storage_index places;
    struct dr_buffer out = {0};
    int rc = dr_storage_index_init(&places, table->count, error);
    for (size_t i = 0; i < table->count && rc == 0; i++) {
        struct dr_storage_entry place = {.kind = DR_STORAGE_TENSOR, .length = 100, .payload_size = 100};
        rc = dr_storage_index_file(&places, "file", 4, &place.file, error);
        if (rc == 0)
            rc = dr_storage_index_set(&places, i, &place, "crcs", error);
    }
    if (rc == 0)
        rc = dr_metadata_pickle(table, &places, &parts, &out, error);
    CHECK(rc != 0 || (out.data[0] == 0x80 && out.data[out.size - 1] == '.'));
    dr_buffer_destroy(&out);
    dr_storage_index_destroy(&places);
    return rc;
}

static int use_table(const struct dr_table *table, struct dr_error *error) {
    struct dr_match match;
    int rc = dr_match(&match, &wanted, table, &never, error);
    CHECK(rc != 0 || match.count >= ROWS);
    dr_match_destroy(&match);
    return rc ? rc : pickle(table, error);
}

/* All that a coordinator does; after a failed assignment the next one works. */
static int plan_all(struct dr_error *error) {
    static const uint32_t hosts[RANKS] = {1, 1, 1};
    struct dr_merge merge;
    struct dr_table table;
    uint8_t *different = NULL;
    dr_table_init(&table);
    int rc = add_all(&merge, error);
    if (rc == 0)
        rc = dr_merge_differing(&merge, &different, error);
    for (int strategy = DR_BALANCED; strategy <= DR_LIMITED && rc == 0; strategy++) {
        const struct dr_assignment assignment = {(enum dr_strategy)strategy, RANKS, hosts, 16};
        rc = dr_merge_assign(&merge, &assignment, &never, error);
        CHECK_EQ(merge.phase, rc == 0 ? DR_MERGE_ASSIGNED : DR_MERGE_CHECKED);
        if (rc == 0)
            rc = reply_to_all(&merge, error);
    }
    if (rc == 0) {
        uint64_t *before = dr_merge_shared_bytes(&merge);
        rc = before ? 0 : dr_error_memory(error);
        free(before);
    }
    if (rc == 0)
        rc = dr_merge_table(&merge, &table, error);
    if (rc == 0)
        rc = use_table(&table, error);
    free(different);
    dr_table_destroy(&table);
    dr_merge_destroy(&merge);
    return rc;
}

static int code_places(struct dr_error *error) {
    struct dr_storage_index places, again, all;
    struct dr_buffer out = {0};
    memset(&again, 0, sizeof again);
    memset(&all, 0, sizeof all);
    uint32_t indices[ROWS];
    int rc = dr_storage_index_init(&places, ROWS, error);
    for (uint32_t i = 0; i < ROWS && rc == 0; i++) {
        char file[16];
        struct dr_storage_entry place = {
            .kind = DR_STORAGE_BYTES, .offset = 100 * i, .length = 100, .payload_offset = 100 * i};
        place.payload_size = 100;
        indices[i] = ROWS - 1 - i;
        snprintf(file, sizeof file, "file %u", i);
        rc = dr_storage_index_file(&places, file, (uint32_t)strlen(file), &place.file, error);
        if (rc == 0)
            rc = dr_storage_index_set(&places, i, &place, "crcs", error);
    }
    if (rc == 0)
        rc = dr_storage_index_encode(&places, &out, error);
    if (rc == 0)
        rc = dr_storage_index_decode(&again, out.data, out.size, &never, error);
    if (rc == 0)
        rc = dr_storage_index_init(&all, ROWS, error);
    if (rc == 0)
        rc = dr_storage_index_merge(&all, &again, indices, ROWS, error);
    CHECK(rc != 0 || all.entries[0].offset == 100 * (ROWS - 1));
    dr_buffer_destroy(&out);
    dr_storage_index_destroy(&places);
    dr_storage_index_destroy(&again);
    dr_storage_index_destroy(&all);
    return rc;
}

static void planning(void) {
    make_plans();
    each_allocation(code_table, 5);
    each_allocation(plan_all, 20);
    each_allocation(code_places, 8);
    for (int rank = 0; rank < RANKS; rank++)
        dr_buffer_destroy(&plans[rank]);
    dr_table_destroy(&wanted);
}

/* ---- names ---- */

#define KEY(literal) {literal, sizeof literal - 1}

static int translate(struct dr_error *error) {
    static const struct dr_key_node nodes[] = {
        {KEY(""), 0, DR_KEY_PLAIN}, {KEY("module"), 0, DR_KEY_WRAPPED}, {KEY("layer"), 1, DR_KEY_PLAIN}};
    static const struct dr_key names[] = {KEY("module.layer.weight"), KEY("module.layer.bias"), KEY("other")};
    struct dr_key_tree *tree = NULL;
    struct dr_key_batch canonical = {0}, raw = {0};
    int rc = dr_key_tree_make(&tree, nodes, 3, error);
    if (rc == 0)
        rc = dr_key_canonical(tree, names, 3, &canonical, error);
    if (rc == 0)
        rc = dr_key_distinct(names, &canonical, error);
    if (rc == 0)
        rc = dr_key_raw(tree, canonical.keys, 2, &raw, error);
    for (int i = 0; i < 2 && rc == 0; i++)
        CHECK(raw.keys[i].size == names[i].size && memcmp(raw.keys[i].text, names[i].text, names[i].size) == 0);
    dr_key_batch_destroy(&canonical);
    dr_key_batch_destroy(&raw);
    dr_key_tree_free(tree);
    return rc;
}

static void names(void) { each_allocation(translate, 6); }

CHECK_MAIN({"files", files}, {"directories", directories}, {"planning", planning}, {"names", names})
