/*
 * Names of state-dict entries, and what wrappers of modules add to them.
 *
 * A raw name is the path of a tensor in a model's tree of modules, joined by
 * dots; the canonical name is the same path without what wrappers (DDP,
 * torch.compile, ...) put into it. Which components those are is said by a
 * tree of nodes that the caller makes from the types of the modules: no name is
 * judged by its text, but in dr_key_guess, which is for names without a model.
 *
 * All functions work on a batch of names. Texts are UTF-8, of any bytes and
 * any length, not terminated; they belong to the caller and must outlive what
 * is made of them. Nothing here keeps state or looks at a clock, file or locale.
 */
#ifndef DCPRING_KEY_H
#define DCPRING_KEY_H

#include "base/error.h"

#include <stdbool.h>

struct dr_key {
    const char *text;
    size_t size;
};

enum dr_key_kind {
    DR_KEY_PLAIN,    /* a component like any other; unlisted components are plain too */
    DR_KEY_WRAPPED,  /* the module that a wrapper holds: no part of the canonical name */
    DR_KEY_ORIGINAL, /* a.parametrizations.weight.original, which is canonically a.weight */
    DR_KEY_KINDS,
};

/*
 * One component of a path. Nodes come after their parents, and node 0 is the
 * root, whose name means nothing. Listed must be all that leads to a wrapped or
 * original node, and what a wrapper owns besides the module that it holds.
 */
struct dr_key_node {
    struct dr_key name;
    uint32_t parent;
    enum dr_key_kind kind;
};

/* The nodes, ready to be searched. Refers to the caller's array and texts. */
struct dr_key_tree;

int dr_key_tree_make(struct dr_key_tree **out, const struct dr_key_node *nodes, size_t count, struct dr_error *error);
void dr_key_tree_free(struct dr_key_tree *tree);

/* Results: `count` names, of which those that did not change are the caller's own texts. */
struct dr_key_batch {
    struct dr_key *keys;
    size_t count;
    struct dr_key_chunk *chunks;
};

void dr_key_batch_destroy(struct dr_key_batch *batch);

/* Each initialises the batch, which must be destroyed whatever is returned. */

/* Raw names to canonical ones. */
int dr_key_canonical(const struct dr_key_tree *tree, const struct dr_key *names, size_t count,
                     struct dr_key_batch *batch, struct dr_error *error);

/* Canonical names to raw ones: the inverse. A name that the tree does not list goes to the innermost wrapped module. */
int dr_key_raw(const struct dr_key_tree *tree, const struct dr_key *names, size_t count, struct dr_key_batch *batch,
               struct dr_error *error);

/*
 * Without a model: drops the components that only wrappers use. ambiguous[i]
 * is set where the name holds a component that may be a wrapper's or may not
 * ("module"); those stay.
 */
int dr_key_guess(const struct dr_key *names, size_t count, struct dr_key_batch *batch, uint8_t *ambiguous,
                 struct dr_error *error);

/* DR_ERROR_INVALID, with both names, when two names became one; error->item is the later one. */
int dr_key_distinct(const struct dr_key *names, const struct dr_key_batch *batch, struct dr_error *error);

#endif
