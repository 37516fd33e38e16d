/* Names through a tree of modules, both ways. See key.h. */
#include "keys/key_batch.h"

#include "base/hash.h"
#include "base/memory.h"

#define ABSENT DR_NO_ENTRY

/*
 * A node's host is itself, or for a wrapped module the nearest node above that
 * has a canonical name: what is below the host's wrapped modules is canonically
 * a child of the host.
 */
struct dr_key_tree {
    const struct dr_key_node *nodes;
    size_t count;
    struct dr_hash by_parent; /* nodes by parent and name: raw children */
    struct dr_hash by_host;   /* by canonical parent and canonical name, of which the first counts */
    uint32_t *host;           /* by node */
    uint32_t *inner;          /* by node: the innermost of the modules that it wraps, or itself */
};

/* ---- looking things up ---- */

static uint32_t child_of(const struct dr_key_tree *tree, uint32_t parent, struct dr_key name) {
    uint32_t hash = dr_hash_of(parent, name.text, name.size), node;
    for (size_t at = 0; (node = dr_hash_next(&tree->by_parent, hash, &at)) != ABSENT;)
        if (tree->nodes[node].parent == parent && dr_key_equal(tree->nodes[node].name, name))
            break;
    return node;
}

/*
 * The node whose name and place in the tree are canonically those of `node`: a.parametrizations.weight.original's are
 * a.weight's.
 */
static uint32_t named_as(const struct dr_key_tree *tree, uint32_t node) {
    return tree->nodes[node].kind == DR_KEY_ORIGINAL ? tree->nodes[node].parent : node;
}

static uint32_t canonical_parent(const struct dr_key_tree *tree, uint32_t node) {
    uint32_t parent = tree->nodes[named_as(tree, node)].parent;
    return tree->host[tree->nodes[node].kind == DR_KEY_ORIGINAL ? tree->nodes[parent].parent : parent];
}

static uint32_t canonical_child_of(const struct dr_key_tree *tree, uint32_t host, struct dr_key name) {
    uint32_t hash = dr_hash_of(host, name.text, name.size), node;
    for (size_t at = 0; (node = dr_hash_next(&tree->by_host, hash, &at)) != ABSENT;)
        if (canonical_parent(tree, node) == host && dr_key_equal(tree->nodes[named_as(tree, node)].name, name))
            break;
    return node;
}

/* ---- making it ---- */

static int check_node(const struct dr_key_node *nodes, size_t index, struct dr_error *error) {
    const struct dr_key_node *node = &nodes[index];
    bool good =
        node->parent < index && (unsigned)node->kind < DR_KEY_KINDS && nodes[node->parent].kind != DR_KEY_ORIGINAL;
    if (good && node->kind == DR_KEY_ORIGINAL) {
        uint32_t list = node->parent, lists = nodes[list].parent;
        good = list != 0 && lists != 0 && nodes[list].kind == DR_KEY_PLAIN && nodes[lists].kind == DR_KEY_PLAIN;
    }
    if (good && memchr(node->name.text, '.', node->name.size))
        good = false;
    return good ? 0 : dr_error_invalid(error, (int64_t)index, "node %zu of the tree of names is out of place", index);
}

static void add(struct dr_hash *table, uint32_t scope, struct dr_key name, uint32_t node) {
    dr_hash_add(table, dr_hash_of(scope, name.text, name.size), node);
}

static int add_node(struct dr_key_tree *tree, uint32_t index, struct dr_error *error) {
    const struct dr_key_node *nodes = tree->nodes, *node = &nodes[index];
    int rc = check_node(nodes, index, error);
    if (rc < 0)
        return rc;
    if (child_of(tree, node->parent, node->name) != ABSENT)
        return dr_error_invalid(error, (int64_t)index, "node %u of the tree of names is there twice", index);
    rc = dr_hash_reserve(&tree->by_parent, error);
    if (rc == 0)
        rc = dr_hash_reserve(&tree->by_host, error);
    if (rc < 0)
        return rc;
    add(&tree->by_parent, node->parent, node->name, index);
    tree->host[index] = node->kind == DR_KEY_WRAPPED ? tree->host[node->parent] : index;
    if (node->kind == DR_KEY_WRAPPED)
        return 0;
    uint32_t host = canonical_parent(tree, index);
    struct dr_key name = nodes[named_as(tree, index)].name;
    if (canonical_child_of(tree, host, name) == ABSENT)
        add(&tree->by_host, host, name, index);
    return 0;
}

/* Nodes come after their parents, and the first of several wrapped modules counts. */
static void find_inner(struct dr_key_tree *tree) {
    for (uint32_t i = 0; i < tree->count; i++)
        tree->inner[i] = i;
    for (uint32_t i = (uint32_t)tree->count - 1; i > 0; i--)
        if (tree->nodes[i].kind == DR_KEY_WRAPPED)
            tree->inner[tree->nodes[i].parent] = tree->inner[i];
}

static int fill(struct dr_key_tree *tree, struct dr_error *error) {
    tree->inner = dr_calloc(tree->count, sizeof *tree->inner);
    tree->host = dr_calloc(tree->count, sizeof *tree->host);
    int rc = tree->inner && tree->host ? 0 : dr_error_memory(error);
    for (uint32_t i = 1; i < tree->count && rc == 0; i++)
        rc = add_node(tree, i, error);
    if (rc == 0)
        find_inner(tree);
    return rc;
}

int dr_key_tree_make(struct dr_key_tree **out, const struct dr_key_node *nodes, size_t count, struct dr_error *error) {
    *out = NULL;
    if (count < 1 || count >= ABSENT)
        return dr_error_invalid(error, DR_NO_ITEM, "a tree of names has %zu nodes", count);
    struct dr_key_tree *tree = dr_calloc(1, sizeof *tree);
    if (!tree)
        return dr_error_memory(error);
    tree->nodes = nodes;
    tree->count = count;
    int rc = fill(tree, error);
    if (rc < 0)
        dr_key_tree_free(tree);
    else
        *out = tree;
    return rc;
}

void dr_key_tree_free(struct dr_key_tree *tree) {
    if (!tree)
        return;
    dr_hash_destroy(&tree->by_parent);
    dr_hash_destroy(&tree->by_host);
    free(tree->host);
    free(tree->inner);
    free(tree);
}

/* ---- raw to canonical ---- */

/* Turns a.parametrizations.weight into a.weight. */
static void drop_lists(const struct dr_key_tree *tree, uint32_t original, struct dr_key_text *text) {
    uint32_t list = tree->nodes[original].parent, lists = tree->nodes[list].parent;
    size_t kept = tree->nodes[list].name.size, dropped = tree->nodes[lists].name.size + 1;
    char *end = text->text + text->size;
    memmove(end - kept - dropped, end - kept, kept);
    text->size -= dropped;
}

/* How far the name before this one was looked up: names of a model share their beginnings with their neighbours. */
struct walk {
    struct dr_key name;
    size_t depth;
    struct step {
        size_t offset, made; /* where the next component begins; how much of the canonical name there is */
        uint32_t node;
        bool started;
    } steps[16];
};

static size_t common_prefix(struct dr_key a, struct dr_key b) {
    size_t size = a.size < b.size ? a.size : b.size, i = 0;
    while (i < size && a.text[i] == b.text[i])
        i++;
    return i;
}

/* Goes back to where both names still agree; steps[0] is the root. */
static struct step resume(struct walk *walk, struct dr_key name, struct dr_key_text *text) {
    size_t common = walk->depth > 1 ? common_prefix(walk->name, name) : 0;
    while (walk->depth > 1 && walk->steps[walk->depth - 1].offset > common)
        walk->depth--;
    walk->depth = walk->depth ? walk->depth : 1;
    walk->name = name;
    struct step step = walk->steps[walk->depth - 1];
    text->size = step.made;
    text->started = step.started;
    return step;
}

static int make_canonical(const struct dr_key_tree *tree, struct dr_key name, struct walk *walk,
                          struct dr_key_text *text, struct dr_error *error) {
    struct step step = resume(walk, name, text);
    for (;;) {
        struct dr_key part = dr_key_component(name, step.offset);
        bool last = step.offset + part.size == name.size;
        step.node = child_of(tree, step.node, part);
        if (step.node == ABSENT)
            return dr_key_text_join(text, dr_key_rest(name, step.offset), error);
        enum dr_key_kind kind = tree->nodes[step.node].kind;
        if (last && kind == DR_KEY_ORIGINAL) {
            drop_lists(tree, step.node, text);
            walk->depth = 0;
            return 0;
        }
        int rc = last || kind != DR_KEY_WRAPPED ? dr_key_text_join(text, part, error) : 0;
        if (rc < 0 || last)
            return rc;
        step = (struct step){step.offset + part.size + 1, text->size, step.node, text->started};
        if (walk->depth < sizeof walk->steps / sizeof *walk->steps)
            walk->steps[walk->depth++] = step;
    }
}

/* ---- canonical to raw ---- */

/* Appends the path from a node to another one below it, filling it in from its end. */
static int join_path(const struct dr_key_tree *tree, uint32_t from, uint32_t to, struct dr_key_text *text,
                     struct dr_error *error) {
    size_t size = 0;
    for (uint32_t node = to; node != from; node = tree->nodes[node].parent)
        size += tree->nodes[node].name.size + 1;
    if (size == 0)
        return 0;
    char *place = dr_key_text_extend(text, size - 1, error);
    if (!place)
        return -error->err;
    char *end = place + size - 1;
    for (uint32_t node = to; node != from; node = tree->nodes[node].parent) {
        struct dr_key name = tree->nodes[node].name;
        end -= name.size;
        memcpy(end, name.text, name.size);
        if (end > place)
            *--end = '.';
    }
    return 0;
}

static int make_raw(const struct dr_key_tree *tree, struct dr_key name, struct dr_key_text *text,
                    struct dr_error *error) {
    uint32_t host = 0;
    for (size_t offset = 0;;) {
        struct dr_key part = dr_key_component(name, offset);
        bool last = offset + part.size == name.size;
        uint32_t found = canonical_child_of(tree, host, part);
        if (found == ABSENT || (tree->nodes[found].kind == DR_KEY_ORIGINAL && !last)) {
            int rc = join_path(tree, host, tree->inner[host], text, error);
            return rc < 0 ? rc : dr_key_text_join(text, dr_key_rest(name, offset), error);
        }
        int rc = join_path(tree, host, found, text, error);
        if (rc < 0 || last)
            return rc;
        host = found;
        offset += part.size + 1;
    }
}

/* ---- batches ---- */

int dr_key_canonical(const struct dr_key_tree *tree, const struct dr_key *names, size_t count,
                     struct dr_key_batch *batch, struct dr_error *error) {
    struct dr_key_text text = {0};
    struct walk walk = {0};
    int rc = dr_key_batch_init(batch, count, error);
    for (size_t i = 0; i < count && rc == 0; i++) {
        rc = make_canonical(tree, names[i], &walk, &text, error);
        if (rc == 0)
            rc = dr_key_batch_keep(batch, i, names[i], &text, error);
    }
    dr_key_text_free(&text);
    return rc;
}

int dr_key_raw(const struct dr_key_tree *tree, const struct dr_key *names, size_t count, struct dr_key_batch *batch,
               struct dr_error *error) {
    struct dr_key_text text = {0};
    int rc = dr_key_batch_init(batch, count, error);
    for (size_t i = 0; i < count && rc == 0; i++) {
        dr_key_text_clear(&text);
        rc = make_raw(tree, names[i], &text, error);
        if (rc == 0)
            rc = dr_key_batch_keep(batch, i, names[i], &text, error);
    }
    dr_key_text_free(&text);
    return rc;
}
