/* Making names: one at a time in a text that grows, then kept in a batch. Internal to the key files. */
#ifndef DCPRING_KEY_BATCH_H
#define DCPRING_KEY_BATCH_H

#include "keys/key.h"

/* The name in the making, owned by whoever declares it; {0} is an empty one. */
struct dr_key_text {
    char *text;
    size_t size, room;
    bool started; /* has a component, even if it is an empty one */
};

static inline void dr_key_text_clear(struct dr_key_text *text) {
    text->size = 0;
    text->started = false;
}

void dr_key_text_free(struct dr_key_text *text);

/* Appends `size` bytes for the caller to fill, behind a dot unless they are the first; NULL without memory. */
char *dr_key_text_extend(struct dr_key_text *text, size_t size, struct dr_error *error);

/* Appends a component, or several joined by dots. */
int dr_key_text_join(struct dr_key_text *text, struct dr_key component, struct dr_error *error);

/* The component at `offset`, up to the next dot or the end: an empty name has one, which is empty. */
struct dr_key dr_key_component(struct dr_key name, size_t offset);

/* The name from `offset` on. */
static inline struct dr_key dr_key_rest(struct dr_key name, size_t offset) {
    return (struct dr_key){name.text + offset, name.size - offset};
}

static inline bool dr_key_equal(struct dr_key a, struct dr_key b) {
    return a.size == b.size && __builtin_memcmp(a.text, b.text, a.size) == 0;
}

int dr_key_batch_init(struct dr_key_batch *batch, size_t count, struct dr_error *error);

/* Name number `index` is the text: `original` itself when it is the same, else a copy. */
int dr_key_batch_keep(struct dr_key_batch *batch, size_t index, struct dr_key original, const struct dr_key_text *text,
                      struct dr_error *error);

#endif
