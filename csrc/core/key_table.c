/* Open addressing with linear probing, at most half full. See key_table.h. */
#include "key_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct dr_key_entry {
    struct dr_key key;
    uint32_t scope, value;
};

/* A part of the hash that the place does not show, so that few texts are compared in vain. */
struct dr_key_slot {
    uint32_t tag, entry_plus_1;
};

static uint64_t mix(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t load_8(const char *text) {
    uint64_t word;
    memcpy(&word, text, sizeof word);
    return word;
}

static uint64_t load_4(const char *text) {
    uint32_t word;
    memcpy(&word, text, sizeof word);
    return word;
}

/* At most 8 bytes as a number, every byte of them in it; the size is hashed on its own. */
static uint64_t load_tail(const char *text, size_t size) {
    if (size >= 4)
        return load_4(text) << 32 | load_4(text + size - 4);
    if (size > 0)
        return (uint64_t)(uint8_t)text[0] << 16 | (uint64_t)(uint8_t)text[size / 2] << 8 | (uint8_t)text[size - 1];
    return 0;
}

static uint64_t hash_key(uint64_t seed, uint32_t scope, struct dr_key key) {
    const uint64_t odd = 0x9e3779b97f4a7c15u, other = 0xd6e8feb86659fd93u;
    uint64_t hash = mix(seed ^ scope ^ odd, key.size ^ other);
    for (; key.size > 8; key.text += 8, key.size -= 8)
        hash = mix(hash ^ load_8(key.text) ^ seed, odd);
    return mix(hash ^ load_tail(key.text, key.size), other);
}

int dr_key_table_init(struct dr_key_table *table, size_t most, uint64_t seed, struct dr_error *error) {
    size_t slots = 16;
    while (slots < 2 * most)
        slots *= 2;
    *table = (struct dr_key_table){
        .entries = calloc(most ? most : 1, sizeof *table->entries),
        .slots = calloc(slots, sizeof *table->slots),
        .mask = slots - 1,
        .seed = seed,
    };
    if (table->entries && table->slots)
        return 0;
    dr_key_table_destroy(table);
    return dr_error_system(error, ENOMEM, "calloc", NULL);
}

void dr_key_table_destroy(struct dr_key_table *table) {
    free(table->entries);
    free(table->slots);
    *table = (struct dr_key_table){0};
}

/* The slot that holds the key, or the empty one where it would go. */
static struct dr_key_slot *find(const struct dr_key_table *table, uint64_t hash, uint32_t scope, struct dr_key key) {
    for (size_t i = hash & table->mask;; i = (i + 1) & table->mask) {
        struct dr_key_slot *slot = &table->slots[i];
        if (slot->entry_plus_1 == 0)
            return slot;
        const struct dr_key_entry *entry = &table->entries[slot->entry_plus_1 - 1];
        if (slot->tag == (uint32_t)(hash >> 32) && entry->scope == scope && entry->key.size == key.size &&
            memcmp(entry->key.text, key.text, key.size) == 0)
            return slot;
    }
}

uint32_t dr_key_table_get(const struct dr_key_table *table, uint32_t scope, struct dr_key key) {
    const struct dr_key_slot *slot = find(table, hash_key(table->seed, scope, key), scope, key);
    return slot->entry_plus_1 ? table->entries[slot->entry_plus_1 - 1].value : DR_KEY_ABSENT;
}

uint32_t dr_key_table_add(struct dr_key_table *table, uint32_t scope, struct dr_key key, uint32_t value) {
    uint64_t hash = hash_key(table->seed, scope, key);
    struct dr_key_slot *slot = find(table, hash, scope, key);
    if (slot->entry_plus_1)
        return table->entries[slot->entry_plus_1 - 1].value;
    table->entries[table->count++] = (struct dr_key_entry){key, scope, value};
    *slot = (struct dr_key_slot){(uint32_t)(hash >> 32), (uint32_t)table->count};
    return DR_KEY_ABSENT;
}
