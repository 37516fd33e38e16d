/*
 * A hash table from (scope, text) to a number: children of a node by name, and
 * names that were seen before. Its size is fixed, nothing is ever removed, and
 * texts are borrowed.
 */
#ifndef DCPRING_KEY_TABLE_H
#define DCPRING_KEY_TABLE_H

#include "key.h"

#define DR_KEY_ABSENT UINT32_MAX

struct dr_key_table {
    struct dr_key_entry *entries;
    struct dr_key_slot *slots;
    size_t count, mask;
    uint64_t seed;
};

/* Room for `most` entries, which is all that may be put in. */
int dr_key_table_init(struct dr_key_table *table, size_t most, uint64_t seed, struct dr_error *error);
void dr_key_table_destroy(struct dr_key_table *table);

/* The number found, or DR_KEY_ABSENT. */
uint32_t dr_key_table_get(const struct dr_key_table *table, uint32_t scope, struct dr_key key);

/* Puts the number in, unless one is there already: that one is returned, else DR_KEY_ABSENT. */
uint32_t dr_key_table_add(struct dr_key_table *table, uint32_t scope, struct dr_key key, uint32_t value);

#endif
