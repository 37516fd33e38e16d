/*
 * Runs a fuzz target without libFuzzer: its seeds, random mutations of them
 * from a fixed start (or another one), and files given by name.
 *
 *   replay_x [-n MUTATIONS [-s START]] [FILE OR FOLDER]...
 *   replay_x -w FOLDER        writes the seeds as a corpus for libFuzzer
 */
#include "fuzz.h"

#include <dirent.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>

static uint64_t state = 1;

static uint64_t next_random(void) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t below(uint64_t limit) { return next_random() % limit; }

/* One change: a byte, a run of bytes copied elsewhere, or a cut. */
static size_t mutate(uint8_t *data, size_t size) {
    static const uint8_t telling[] = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff};
    if (size == 0)
        return 0;
    size_t at = below(size), length = 1 + below(8);
    switch (below(6)) {
    case 0:
        data[at] = (uint8_t)next_random();
        return size;
    case 1:
        data[at] ^= (uint8_t)(1 << below(8));
        return size;
    case 2:
        data[at] = telling[below(sizeof telling)];
        return size;
    case 3:
        memset(data + at, telling[below(sizeof telling)], length < size - at ? length : size - at);
        return size;
    case 4: {
        size_t from = below(size), most = size - (at > from ? at : from);
        memmove(data + at, data + from, length < most ? length : most);
        return size;
    }
    default:
        return below(20) == 0 ? at : size;
    }
}

/* libFuzzer's inputs have no room behind them; neither have these, so that a sanitizer sees the first byte too far. */
static void run_one(const uint8_t *data, size_t size) {
    uint8_t *exact = malloc(size ? size : 1);
    if (!exact)
        exit(1);
    memcpy(exact, data, size);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
}

static void run_mutations(unsigned long count) {
    static uint8_t data[FUZZ_SEED_MAX];
    unsigned seeds = 0;
    while (fuzz_seed(seeds, data) > 0)
        seeds++;
    for (unsigned i = 0; i < seeds; i++)
        run_one(data, fuzz_seed(i, data));
    for (unsigned long i = 0; i < count; i++) {
        size_t size = fuzz_seed((unsigned)below(seeds), data);
        for (uint64_t changes = 1 + below(4); changes > 0; changes--)
            size = mutate(data, size);
        run_one(data, size);
    }
    printf("%u seeds, %lu mutations\n", seeds, count);
}

static void run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    struct stat st;
    if (!file || fstat(fileno(file), &st) != 0) {
        perror(path);
        exit(1);
    }
    uint8_t *data = malloc((size_t)st.st_size + 1);
    size_t size = data ? fread(data, 1, (size_t)st.st_size, file) : 0;
    fclose(file);
    run_one(data, size);
    free(data);
}

static void run_path(const char *path) {
    DIR *dir = opendir(path);
    if (!dir) {
        run_file(path);
        return;
    }
    for (const struct dirent *entry; (entry = readdir(dir));) {
        char name[1024];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.')
            run_file(name);
    }
    closedir(dir);
}

static void write_seeds(const char *folder) {
    uint8_t data[FUZZ_SEED_MAX];
    size_t size;
    for (unsigned i = 0; (size = fuzz_seed(i, data)) > 0; i++) {
        char name[1024];
        snprintf(name, sizeof name, "%s/seed%u", folder, i);
        FILE *file = fopen(name, "wb");
        if (!file || fwrite(data, 1, size, file) != size || fclose(file) != 0) {
            perror(name);
            exit(1);
        }
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "-w") == 0) {
        write_seeds(argv[2]);
        return 0;
    }
    bool counted = argc > 2 && strcmp(argv[1], "-n") == 0, seeded = counted && argc > 4 && strcmp(argv[3], "-s") == 0;
    if (seeded)
        state = strtoull(argv[4], NULL, 10);
    const char *program = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    printf("%s: ", program);
    fflush(stdout);
    run_mutations(counted ? strtoul(argv[2], NULL, 10) : 1500);
    for (int i = seeded ? 5 : counted ? 3 : 1; i < argc; i++)
        run_path(argv[i]);
    return 0;
}
