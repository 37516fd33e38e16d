/* Batches of names, the text that a name is made in, and names that became one. See key.h and key_batch.h. */
#include "keys/key_batch.h"

#include "base/array.h"
#include "base/hash.h"

#include <stdio.h>

enum { CHUNK_BYTES = 1 << 16, SHOWN_BYTES = 80 };

/* Texts of a batch. They never move, so that keys can point at them. */
struct dr_key_chunk {
    struct dr_key_chunk *next;
    size_t used, room;
    char bytes[];
};

/* ---- the text ---- */

void dr_key_text_free(struct dr_key_text *text) {
    free(text->text);
    *text = (struct dr_key_text){0};
}

static int reserve(struct dr_key_text *text, size_t more, struct dr_error *error) {
    if (more > SIZE_MAX / 2 - text->size)
        return dr_error_invalid(error, DR_NO_ITEM, "a name is too long");
    return DR_ARRAY_RESERVE(text->text, text->size, text->room, more, error);
}

char *dr_key_text_extend(struct dr_key_text *text, size_t size, struct dr_error *error) {
    if (reserve(text, size < SIZE_MAX ? size + 1 : size, error) < 0)
        return NULL;
    if (text->started)
        text->text[text->size++] = '.';
    text->started = true;
    text->size += size;
    return text->text + text->size - size;
}

int dr_key_text_join(struct dr_key_text *text, struct dr_key component, struct dr_error *error) {
    char *place = dr_key_text_extend(text, component.size, error);
    if (!place)
        return -error->err;
    memcpy(place, component.text, component.size);
    return 0;
}

struct dr_key dr_key_component(struct dr_key name, size_t offset) {
    const char *start = name.text + offset;
    const char *dot = memchr(start, '.', name.size - offset);
    return (struct dr_key){start, dot ? (size_t)(dot - start) : name.size - offset};
}

/* ---- the batch ---- */

int dr_key_batch_init(struct dr_key_batch *batch, size_t count, struct dr_error *error) {
    *batch = (struct dr_key_batch){.count = count};
    if (count >= DR_NO_ENTRY)
        return dr_error_invalid(error, DR_NO_ITEM, "%zu names are too many", count);
    batch->keys = dr_calloc(count ? count : 1, sizeof *batch->keys);
    return batch->keys ? 0 : dr_error_memory(error);
}

void dr_key_batch_destroy(struct dr_key_batch *batch) {
    while (batch->chunks) {
        struct dr_key_chunk *next = batch->chunks->next;
        free(batch->chunks);
        batch->chunks = next;
    }
    free(batch->keys);
    *batch = (struct dr_key_batch){0};
}

static char *chunk_room(struct dr_key_batch *batch, size_t size, struct dr_error *error) {
    struct dr_key_chunk *chunk = batch->chunks;
    if (!chunk || chunk->room - chunk->used < size) {
        size_t room = size > CHUNK_BYTES ? size : CHUNK_BYTES;
        chunk = dr_malloc(sizeof *chunk + room);
        if (!chunk) {
            dr_error_memory(error);
            return NULL;
        }
        *chunk = (struct dr_key_chunk){.next = batch->chunks, .room = room};
        batch->chunks = chunk;
    }
    chunk->used += size;
    return chunk->bytes + chunk->used - size;
}

int dr_key_batch_keep(struct dr_key_batch *batch, size_t index, struct dr_key original, const struct dr_key_text *text,
                      struct dr_error *error) {
    batch->keys[index] = original;
    if (dr_key_equal(original, (struct dr_key){text->text, text->size}))
        return 0;
    char *place = chunk_room(batch, text->size, error);
    if (!place)
        return -error->err;
    memcpy(place, text->text, text->size);
    batch->keys[index] = (struct dr_key){place, text->size};
    return 0;
}

/* ---- names that became one ---- */

static bool starts_character(char byte) { return ((unsigned char)byte & 0xc0) != 0x80; }

/* The name for a message: its two ends when it is long, cut between characters, without control characters. */
static void show(struct dr_key key, char out[2 * SHOWN_BYTES]) {
    size_t head = key.size, tail = key.size;
    if (key.size > SHOWN_BYTES) {
        for (head = SHOWN_BYTES / 2; head > 0 && !starts_character(key.text[head]); head--)
            ;
        for (tail = key.size - SHOWN_BYTES / 2; tail < key.size && !starts_character(key.text[tail]); tail++)
            ;
    }
    int n = snprintf(out, 2 * SHOWN_BYTES, "%.*s%s%.*s", (int)head, key.text, tail < key.size ? "..." : "",
                     (int)(key.size - tail), key.text + tail);
    for (int i = 0; i < n; i++)
        if ((unsigned char)out[i] < ' ' || out[i] == 0x7f)
            out[i] = '?';
}

static int raise_clash(const struct dr_key *names, const struct dr_key_batch *batch, size_t first, size_t second,
                       struct dr_error *error) {
    char a[2 * SHOWN_BYTES], b[2 * SHOWN_BYTES], both[2 * SHOWN_BYTES];
    show(names[first], a);
    show(names[second], b);
    show(batch->keys[first], both);
    return dr_error_invalid(error, (int64_t)second, "'%s' and '%s' would both be called '%s'", a, b, both);
}

/* The name before number `index` that is equal to it, or DR_NO_ENTRY; then that one is in the table too. */
static int add_distinct(struct dr_hash *table, const struct dr_key_batch *batch, uint32_t index, uint32_t *first,
                        struct dr_error *error) {
    struct dr_key key = batch->keys[index];
    uint32_t hash = dr_hash_of(0, key.text, key.size);
    for (size_t at = 0; (*first = dr_hash_next(table, hash, &at)) != DR_NO_ENTRY;)
        if (dr_key_equal(batch->keys[*first], key))
            return 0;
    int rc = dr_hash_reserve(table, error);
    if (rc == 0)
        dr_hash_add(table, hash, index);
    return rc;
}

int dr_key_distinct(const struct dr_key *names, const struct dr_key_batch *batch, struct dr_error *error) {
    struct dr_hash table = {0};
    int rc = 0;
    for (size_t i = 0; i < batch->count && rc == 0; i++) {
        uint32_t first;
        rc = add_distinct(&table, batch, (uint32_t)i, &first, error);
        if (rc == 0 && first != DR_NO_ENTRY)
            rc = raise_clash(names, batch, first, i, error);
    }
    dr_hash_destroy(&table);
    return rc;
}
