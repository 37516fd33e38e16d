/*
 * Names and trees of wrappers that the input decides. A canonical name is no
 * longer than the raw one; raw and canonical names that a tree gives agree;
 * whatever is wrong is an error.
 *
 * Input: the number of nodes, then for each parent, kind and name (by number
 * from a few), then names, one a line.
 */
#include "fuzz.h"
#include "keys/key.h"

#include <string.h>

enum { MAX_NODES = 24, MAX_NAMES = 64 };

static const char *const words[] = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "parametrizations",
    "weight",
    "original",
    "layers",
    "0",
    "n_averaged",
    "",
    "w",
    ".",
    "\xc3\xa9",
    "_checkpoint_wrapped_module",
    "base_layer",
    "a.b",
};

struct input {
    const uint8_t *at;
    size_t left;
};

static unsigned take(struct input *in) {
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->at++;
}

static size_t make_nodes(struct input *in, struct dr_key_node nodes[MAX_NODES]) {
    size_t count = take(in) % (MAX_NODES + 1);
    for (size_t i = 0; i < count; i++) {
        nodes[i].parent = take(in) % MAX_NODES;
        nodes[i].kind = (enum dr_key_kind)(take(in) % (DR_KEY_KINDS + 1));
        const char *word = words[take(in) % (sizeof words / sizeof *words)];
        nodes[i].name = (struct dr_key){word, strlen(word)};
    }
    return count;
}

static size_t make_names(struct input *in, struct dr_key names[MAX_NAMES]) {
    size_t count = 0;
    for (const char *text = (const char *)in->at, *end = text + in->left; count < MAX_NAMES;) {
        const char *line = memchr(text, '\n', (size_t)(end - text));
        names[count++] = (struct dr_key){text, (size_t)((line ? line : end) - text)};
        if (!line)
            break;
        text = line + 1;
    }
    return count;
}

static bool same(struct dr_key a, struct dr_key b) { return a.size == b.size && memcmp(a.text, b.text, a.size) == 0; }

static bool any_same(const struct dr_key *keys, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < i; j++)
            if (same(keys[i], keys[j]))
                return true;
    return false;
}

static void check_distinct(const struct dr_key *names, const struct dr_key_batch *batch) {
    DR_NEW_ERROR(error);
    int rc = dr_key_distinct(names, batch, &error);
    FUZZ_CHECK(rc == -error.err && (rc < 0) == any_same(batch->keys, batch->count));
    FUZZ_CHECK(rc == 0 || (error.item > 0 && (size_t)error.item < batch->count));
}

/* Names of a batch are looked up from where they differ from the one before: that changes nothing. */
static void check_each_alone(const struct dr_key_tree *tree, const struct dr_key *names,
                             const struct dr_key_batch *together) {
    for (size_t i = 0; i < together->count; i++) {
        DR_NEW_ERROR(error);
        struct dr_key_batch alone;
        FUZZ_CHECK(dr_key_canonical(tree, &names[i], 1, &alone, &error) == 0);
        FUZZ_CHECK(same(alone.keys[0], together->keys[i]));
        dr_key_batch_destroy(&alone);
    }
}

/* What a name's raw form is canonically is a fixed point: raw and canonical forms of it stay as they are. */
static void check_there_and_back(const struct dr_key_tree *tree, const struct dr_key *names, size_t count) {
    DR_NEW_ERROR(error);
    struct dr_key_batch canonical, raw, again, last;
    FUZZ_CHECK(dr_key_canonical(tree, names, count, &canonical, &error) == 0);
    FUZZ_CHECK(dr_key_raw(tree, canonical.keys, count, &raw, &error) == 0);
    FUZZ_CHECK(dr_key_canonical(tree, raw.keys, count, &again, &error) == 0);
    FUZZ_CHECK(dr_key_raw(tree, again.keys, count, &last, &error) == 0);
    for (size_t i = 0; i < count; i++) {
        FUZZ_CHECK(canonical.keys[i].size <= names[i].size);
        FUZZ_CHECK(!same(again.keys[i], canonical.keys[i]) || same(last.keys[i], raw.keys[i]));
    }
    check_distinct(names, &canonical);
    check_each_alone(tree, names, &canonical);
    dr_key_batch_destroy(&last);
    dr_key_batch_destroy(&again);
    dr_key_batch_destroy(&raw);
    dr_key_batch_destroy(&canonical);
}

static void check_guess(const struct dr_key *names, size_t count) {
    DR_NEW_ERROR(error);
    struct dr_key_batch once, twice;
    uint8_t ambiguous[MAX_NAMES], still[MAX_NAMES];
    FUZZ_CHECK(dr_key_guess(names, count, &once, ambiguous, &error) == 0);
    FUZZ_CHECK(dr_key_guess(once.keys, count, &twice, still, &error) == 0);
    for (size_t i = 0; i < count; i++)
        FUZZ_CHECK(same(once.keys[i], twice.keys[i]) && ambiguous[i] <= 1 && ambiguous[i] == still[i]);
    check_distinct(names, &once);
    dr_key_batch_destroy(&twice);
    dr_key_batch_destroy(&once);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, size};
    struct dr_key_node nodes[MAX_NODES] = {0};
    struct dr_key names[MAX_NAMES];
    struct dr_key_tree *tree;
    DR_NEW_ERROR(error);
    size_t node_count = make_nodes(&in, nodes), name_count = make_names(&in, names);
    int rc = dr_key_tree_make(&tree, nodes, node_count, &error);
    FUZZ_CHECK(rc == -error.err && (rc == 0) == (tree != NULL));
    if (tree)
        check_there_and_back(tree, names, name_count);
    dr_key_tree_free(tree);
    check_guess(names, name_count);
    return 0;
}

struct seed {
    uint8_t nodes[3 * 8 + 1];
    const char *names;
};

/* Nodes are (parent, kind, word); the root first. */
static const struct seed seeds[] = {
    {{2, 0, 0, 0, 0, 1, 0}, "module.w\nmodule.module.w\nw\n\nmodule"},
    {{4, 0, 0, 0, 0, 0, 8, 0, 1, 0, 2, 1, 1}, "n_averaged\nmodule._orig_mod.w\nmodule._orig_mod._orig_mod.w"},
    {{6, 0, 0, 0, 0, 1, 1, 1, 0, 10, 1, 0, 3, 3, 0, 4, 4, 2, 5},
     "_orig_mod.parametrizations.weight.original\n_orig_mod.w\n_orig_mod.parametrizations.weight.0.x\nweight"},
    {{5, 0, 0, 0, 0, 0, 6, 1, 0, 7, 2, 1, 13, 3, 1, 1},
     "layers.0._checkpoint_wrapped_module._orig_mod.w\nlayers.1.w\n.."},
};

size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    if (index >= sizeof seeds / sizeof *seeds)
        return 0;
    size_t size = 1 + 3 * (size_t)seeds[index].nodes[0], length = strlen(seeds[index].names);
    memcpy(out, seeds[index].nodes, size);
    memcpy(out + size, seeds[index].names, length);
    return size + length;
}
