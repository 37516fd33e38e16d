/*
 * Hash tables: from a key to the index of the entry that has it.
 *
 * The entries and their keys are the owner's; a table only knows the hash of
 * each. Keys come from strangers' checkpoints, so the hash multiplies them with
 * numbers that this process alone knows: nobody can choose names that collide.
 * Hashes differ from process to process, and nothing else may depend on them.
 */
#ifndef DCPRING_HASH_H
#define DCPRING_HASH_H

#include "base/error.h"

#define DR_NO_ENTRY UINT32_MAX

/* An empty table is all zeros. */
struct dr_hash {
    struct dr_hash_slot {
        uint32_t hash, entry_plus_1; /* 0: the slot is free */
    } *slots;
    size_t room, count; /* room is 0 or a power of two, and at least twice the count */
};

void dr_hash_destroy(struct dr_hash *table);

/* The hash of a number and `size` bytes. */
uint32_t dr_hash_of(uint64_t number, const void *data, size_t size);

/* 64 bits that look random to whoever does not know the process's key: one of them for each number and `size` bytes. */
uint64_t dr_hash_wide(uint64_t number, const void *data, size_t size);

/* Makes room for one more entry. */
int dr_hash_reserve(struct dr_hash *table, struct dr_error *error);

/* Adds an entry, for which there is room. */
void dr_hash_add(struct dr_hash *table, uint32_t hash, uint32_t entry);

/*
 * The entries that have a hash, one a call, and then DR_NO_ENTRY. *at is 0 before the first call. Those with other keys
 * are among them, though rarely.
 */
static inline uint32_t dr_hash_next(const struct dr_hash *table, uint32_t hash, size_t *at) {
    while (table->room) {
        const struct dr_hash_slot *slot = &table->slots[(hash + (*at)++) & (table->room - 1)];
        if (slot->entry_plus_1 == 0)
            break;
        if (slot->hash == hash)
            return slot->entry_plus_1 - 1;
    }
    return DR_NO_ENTRY;
}

#endif
