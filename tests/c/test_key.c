/* Names: through trees of wrappers and back, by their text alone, and those that become one. */
#include "check.h"
#include "keys/key.h"

#define KEY(literal) ((struct dr_key){literal, sizeof literal - 1})
#define COUNT(array) (sizeof array / sizeof *array)

static struct dr_key key_of(const char *text) { return (struct dr_key){text, strlen(text)}; }

static void check_key(struct dr_key key, const char *expected) {
    if (key.size != strlen(expected) || memcmp(key.text, expected, key.size) != 0)
        CHECK_FAIL("got '%.*s', not '%s'", (int)key.size, key.text, expected);
}

struct pair {
    const char *raw, *canonical;
};

/* Every raw name gives its canonical one, and the reverse. */
static void check_pairs(const struct dr_key_node *nodes, size_t count, const struct pair *pairs, size_t pair_count) {
    DR_NEW_ERROR(error);
    struct dr_key_tree *tree;
    struct dr_key_batch batch;
    CHECK_OK(dr_key_tree_make(&tree, nodes, count, &error), &error);
    for (size_t i = 0; i < pair_count; i++) {
        struct dr_key raw = key_of(pairs[i].raw), canonical = key_of(pairs[i].canonical);
        CHECK_OK(dr_key_canonical(tree, &raw, 1, &batch, &error), &error);
        check_key(batch.keys[0], pairs[i].canonical);
        CHECK(strcmp(pairs[i].raw, pairs[i].canonical) != 0 || batch.keys[0].text == raw.text);
        dr_key_batch_destroy(&batch);
        CHECK_OK(dr_key_raw(tree, &canonical, 1, &batch, &error), &error);
        check_key(batch.keys[0], pairs[i].raw);
        dr_key_batch_destroy(&batch);
    }
    dr_key_tree_free(tree);
}

static void no_wrappers(void) {
    const struct dr_key_node nodes[] = {{{0}, 0, DR_KEY_PLAIN}};
    const struct pair pairs[] = {
        {"module.weight", "module.weight"}, {"_orig_mod", "_orig_mod"}, {"", ""}, {".", "."}, {"a..b.", "a..b."},
    };
    check_pairs(nodes, COUNT(nodes), pairs, COUNT(pairs));
}

/* DDP(compile(model)) whose children are called like wrappers. */
static void reserved_names(void) {
    const struct dr_key_node nodes[] = {
        {{0}, 0, DR_KEY_PLAIN},
        {KEY("module"), 0, DR_KEY_WRAPPED},
        {KEY("_orig_mod"), 1, DR_KEY_WRAPPED},
    };
    const struct pair pairs[] = {
        {"module._orig_mod.weight", "weight"},
        {"module._orig_mod.module.weight", "module.weight"},
        {"module._orig_mod._orig_mod.weight", "_orig_mod.weight"},
        {"module._orig_mod.module", "module"},
        {"module._orig_mod.", ""},
        {"module._orig_mod..module", ".module"},
    };
    check_pairs(nodes, COUNT(nodes), pairs, COUNT(pairs));
}

/* AveragedModel's counter is its own; what the model under it calls so has no name of its own left. */
static void own_names(void) {
    const struct dr_key_node nodes[] = {
        {{0}, 0, DR_KEY_PLAIN},          {KEY("n_averaged"), 0, DR_KEY_PLAIN},  {KEY("module"), 0, DR_KEY_WRAPPED},
        {KEY("layer"), 2, DR_KEY_PLAIN}, {KEY("_orig_mod"), 3, DR_KEY_WRAPPED},
    };
    const struct pair pairs[] = {
        {"n_averaged", "n_averaged"},
        {"module.layer._orig_mod.weight", "layer.weight"},
        {"module.head.weight", "head.weight"},
    };
    check_pairs(nodes, COUNT(nodes), pairs, COUNT(pairs));
}

static void parametrizations(void) {
    const struct dr_key_node nodes[] = {
        {{0}, 0, DR_KEY_PLAIN},           {KEY("_orig_mod"), 0, DR_KEY_WRAPPED},
        {KEY("bias"), 1, DR_KEY_PLAIN},   {KEY("parametrizations"), 1, DR_KEY_PLAIN},
        {KEY("weight"), 3, DR_KEY_PLAIN}, {KEY("original"), 4, DR_KEY_ORIGINAL},
    };
    const struct pair pairs[] = {
        {"_orig_mod.parametrizations.weight.original", "weight"},
        {"_orig_mod.parametrizations.weight.0.lora_a", "parametrizations.weight.0.lora_a"},
        {"_orig_mod.bias", "bias"},
        {"_orig_mod.weight.x", "weight.x"},
    };
    check_pairs(nodes, COUNT(nodes), pairs, COUNT(pairs));
}

static void two_become_one(void) {
    const struct dr_key_node nodes[] = {{{0}, 0, DR_KEY_PLAIN}, {KEY("module"), 0, DR_KEY_WRAPPED}};
    struct dr_key names[] = {KEY("b"), KEY("module.a"), KEY("a")};
    DR_NEW_ERROR(error);
    struct dr_key_tree *tree;
    struct dr_key_batch batch;
    CHECK_OK(dr_key_tree_make(&tree, nodes, COUNT(nodes), &error), &error);
    CHECK_OK(dr_key_canonical(tree, names, 3, &batch, &error), &error);
    CHECK_FAILS(dr_key_distinct(names, &batch, &error), &error, EINVAL);
    CHECK_EQ(error.item, 2);
    CHECK(strcmp(error.detail, "'module.a' and 'a' would both be called 'a'") == 0);
    dr_key_batch_destroy(&batch);
    dr_key_tree_free(tree);
}

/* Names of a mebibyte: the message shows their ends, cut between characters. */
static void long_names(void) {
    enum { SIZE = 1 << 20 };
    const struct dr_key_node nodes[] = {{{0}, 0, DR_KEY_PLAIN}, {KEY("module"), 0, DR_KEY_WRAPPED}};
    char *text = check_alloc(SIZE + 7);
    memcpy(text, "module.", 7);
    for (size_t i = 0; i < SIZE; i++)
        text[7 + i] = "\xc3\xa9"[i % 2];
    struct dr_key names[] = {{text, SIZE + 7}, {text + 7, SIZE}};
    DR_NEW_ERROR(error);
    struct dr_key_tree *tree;
    struct dr_key_batch batch;
    CHECK_OK(dr_key_tree_make(&tree, nodes, COUNT(nodes), &error), &error);
    CHECK_OK(dr_key_canonical(tree, names, 2, &batch, &error), &error);
    CHECK_EQ(batch.keys[0].size, SIZE);
    CHECK_BYTES(batch.keys[0].text, text + 7, SIZE);
    CHECK_FAILS(dr_key_distinct(names, &batch, &error), &error, EINVAL);
    size_t odd = 0;
    for (const char *c = error.detail; *c; c++)
        odd += (unsigned char)*c >= 0x80;
    CHECK(odd > 0 && odd % 2 == 0 && strstr(error.detail, "..."));
    dr_key_batch_destroy(&batch);
    dr_key_tree_free(tree);
    free(text);
}

static void guesses(void) {
    const struct {
        const char *name, *expected;
        int ambiguous;
    } cases[] = {
        {"a._orig_mod.b._checkpoint_wrapped_module.c", "a.b.c", 0},
        {"_fsdp_wrapped_module._orig_mod.w", "w", 0},
        {"module.w", "module.w", 1},
        {"a.module", "a.module", 0},
        {"a._orig_mod", "a._orig_mod", 0},
        {"a.parametrizations.w.original", "a.parametrizations.w.original", 1},
        {"q.base_layer._orig_mod.w", "q.base_layer.w", 1},
        {"my_orig_mod.w", "my_orig_mod.w", 0},
        {"", "", 0},
        {".._orig_mod..", "...", 0},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        DR_NEW_ERROR(error);
        struct dr_key_batch batch;
        struct dr_key name = key_of(cases[i].name);
        uint8_t ambiguous = 0xa5;
        CHECK_OK(dr_key_guess(&name, 1, &batch, &ambiguous, &error), &error);
        check_key(batch.keys[0], cases[i].expected);
        CHECK_EQ(ambiguous, cases[i].ambiguous);
        dr_key_batch_destroy(&batch);
    }
}

static void bad_trees(void) {
    const struct dr_key_node later_parent[] = {{{0}, 0, DR_KEY_PLAIN}, {KEY("a"), 1, DR_KEY_PLAIN}};
    const struct dr_key_node twice[] = {
        {{0}, 0, DR_KEY_PLAIN}, {KEY("a"), 0, DR_KEY_PLAIN}, {KEY("a"), 0, DR_KEY_WRAPPED}};
    const struct dr_key_node kind[] = {{{0}, 0, DR_KEY_PLAIN}, {KEY("a"), 0, DR_KEY_KINDS}};
    const struct dr_key_node dot[] = {{{0}, 0, DR_KEY_PLAIN}, {KEY("a.b"), 0, DR_KEY_PLAIN}};
    const struct dr_key_node shallow[] = {
        {{0}, 0, DR_KEY_PLAIN}, {KEY("w"), 0, DR_KEY_PLAIN}, {KEY("original"), 1, DR_KEY_ORIGINAL}};
    const struct {
        const struct dr_key_node *nodes;
        size_t count;
    } bad[] = {{later_parent, 2}, {twice, 3}, {kind, 2}, {dot, 2}, {shallow, 3}, {kind, 0}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        DR_NEW_ERROR(error);
        struct dr_key_tree *tree;
        CHECK_FAILS(dr_key_tree_make(&tree, bad[i].nodes, bad[i].count, &error), &error, EINVAL);
        CHECK(tree == NULL);
    }
}

/* Seconds for names that share long beginnings, as those of real models do. */
static double name_many(size_t count) {
    enum { BLOCKS = 1000, ROOM = 80 };
    struct dr_key_node *nodes = check_alloc((2 + 2 * BLOCKS) * sizeof *nodes);
    struct dr_key *names = check_alloc(count * sizeof *names);
    char *texts = check_alloc(count * ROOM), *numbers = check_alloc(BLOCKS * 8);
    nodes[1] = (struct dr_key_node){KEY("layers"), 0, DR_KEY_PLAIN};
    for (uint32_t i = 0; i < BLOCKS; i++) {
        int size = snprintf(numbers + 8 * i, 8, "%u", i);
        nodes[2 + 2 * i] = (struct dr_key_node){{numbers + 8 * i, (size_t)size}, 1, DR_KEY_PLAIN};
        nodes[3 + 2 * i] = (struct dr_key_node){KEY("_orig_mod"), 2 + 2 * i, DR_KEY_WRAPPED};
    }
    for (size_t i = 0; i < count; i++) {
        char *text = texts + i * ROOM;
        int size = snprintf(text, ROOM, "layers.%zu._orig_mod.feed_forward.w%zu.weight", i % BLOCKS, i / BLOCKS);
        names[i] = (struct dr_key){text, (size_t)size};
    }
    DR_NEW_ERROR(error);
    struct dr_key_tree *tree;
    struct dr_key_batch batch;
    double start = check_seconds();
    CHECK_OK(dr_key_tree_make(&tree, nodes, 2 + 2 * BLOCKS, &error), &error);
    CHECK_OK(dr_key_canonical(tree, names, count, &batch, &error), &error);
    CHECK_OK(dr_key_distinct(names, &batch, &error), &error);
    double seconds = check_seconds() - start;
    check_key(batch.keys[0], "layers.0.feed_forward.w0.weight");
    dr_key_batch_destroy(&batch);
    dr_key_tree_free(tree);
    free(numbers);
    free(texts);
    free(names);
    free(nodes);
    return seconds;
}

/* Ten times the names cost about ten times as much, not a hundred times. */
static void many_names(void) {
    bool linear = false;
    for (int try = 0; try < CHECK_TRIES && !linear; try++)
        linear = name_many(200000) < 40 * name_many(20000);
    CHECK(linear);
}

CHECK_MAIN({"no_wrappers", no_wrappers}, {"reserved_names", reserved_names}, {"own_names", own_names},
           {"parametrizations", parametrizations}, {"two_become_one", two_become_one}, {"long_names", long_names},
           {"guesses", guesses}, {"bad_trees", bad_trees}, {"many_names", many_names})
