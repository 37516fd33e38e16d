/* Open addressing with linear probing, at most half full. See hash.h. */
#include "base/hash.h"

#include "base/bytes.h"
#include "base/memory.h"

#include <assert.h>
#include <sys/auxv.h>

/* ---- hashing ---- */

/* Constants once the program has begun. */
static uint64_t keys[4];

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* From the 16 random bytes that the kernel gives every program at its start. */
__attribute__((constructor)) static void make_keys(void) {
    uint64_t seed[2] = {0, 0};
    const void *random = (const void *)getauxval(AT_RANDOM);
    if (random)
        memcpy(seed, random, sizeof seed);
    for (int i = 0; i < 4; i++) {
        uint64_t z = seed[i % 2] + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        keys[i] = z ^ z >> 31;
    }
}

static inline uint64_t load_8(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t load_4(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

uint64_t dr_hash_wide(uint64_t number, const void *data, size_t size) {
    const uint8_t *at = data;
    uint64_t hash = fold(number ^ keys[0], size ^ keys[1]), a = 0, b = 0;
    for (size_t left = size; left > 16; left -= 16, at += 16)
        hash = fold(load_8(at) ^ keys[2], load_8(at + 8) ^ hash);
    size_t left = size - (size_t)(at - (const uint8_t *)data); /* at most 16: every byte of them is in a or b */
    if (left >= 8) {
        a = load_8(at);
        b = load_8(at + left - 8);
    } else if (left >= 4) {
        a = load_4(at);
        b = load_4(at + left - 4);
    } else if (left > 0) {
        a = (uint64_t)at[0] << 16 | (uint64_t)at[left / 2] << 8 | at[left - 1];
    }
    return fold(fold(a ^ keys[2], b ^ hash) ^ keys[3], keys[1]);
}

uint32_t dr_hash_of(uint64_t number, const void *data, size_t size) {
    return (uint32_t)dr_hash_wide(number, data, size);
}

/* ---- tables ---- */

void dr_hash_destroy(struct dr_hash *table) {
    free(table->slots);
    *table = (struct dr_hash){0};
}

static void put(struct dr_hash *table, struct dr_hash_slot added) {
    size_t at = added.hash & (table->room - 1);
    while (table->slots[at].entry_plus_1)
        at = (at + 1) & (table->room - 1);
    table->slots[at] = added;
}

int dr_hash_reserve(struct dr_hash *table, struct dr_error *error) {
    if (table->room >= 2 * (table->count + 1))
        return 0;
    struct dr_hash grown = {.room = table->room ? 2 * table->room : 64, .count = table->count};
    grown.slots = dr_calloc(grown.room, sizeof *grown.slots);
    if (!grown.slots)
        return dr_error_memory(error);
    for (size_t i = 0; i < table->room; i++)
        if (table->slots[i].entry_plus_1)
            put(&grown, table->slots[i]);
    free(table->slots);
    *table = grown;
    return 0;
}

void dr_hash_add(struct dr_hash *table, uint32_t hash, uint32_t entry) {
    assert(table->room >= 2 * (table->count + 1) && entry < DR_NO_ENTRY);
    put(table, (struct dr_hash_slot){hash, entry + 1});
    table->count++;
}
