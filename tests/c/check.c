/* Running cases, and the scratch directory. See check.h. */
#include "check.h"

#include <fcntl.h>
#include <ftw.h>

char check_dir[256];

static const char *skipped;
static pid_t owner;

void check_skip(const char *why) { skipped = why; }

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *where) {
    (void)st;
    (void)type;
    (void)where;
    return remove(path);
}

static void remove_scratch(void) {
    if (owner == getpid())
        nftw(check_dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void make_scratch(const char *parent) {
    if (!parent)
        parent = getenv("TMPDIR");
    snprintf(check_dir, sizeof check_dir, "%s/dcpring-test-XXXXXX", parent ? parent : "/var/tmp");
    if (!mkdtemp(check_dir))
        CHECK_FAIL("cannot make a scratch directory %s: %s", check_dir, strerror(errno));
    owner = getpid();
    atexit(remove_scratch);
}

static bool is_wanted(const char *name, char **names, int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return count == 0;
}

int check_main(int argc, char **argv, const struct check_case *cases, size_t count) {
    const char *program = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    bool has_dir = argc > 2 && strcmp(argv[1], "-d") == 0;
    int first = has_dir ? 3 : 1;
    make_scratch(has_dir ? argv[2] : NULL);
    unsigned passed = 0, left_out = 0;
    double start = check_seconds();
    dr_thread_pool_set_idle_ms(CHECK_SECONDS *
                               1000); /* tests replace dr_sys, which who lets go of something looks at */
    for (size_t i = 0; i < count; i++) {
        if (!is_wanted(cases[i].name, argv + first, argc - first))
            continue;
        alarm(CHECK_SECONDS);
        skipped = NULL;
        double case_start = check_seconds();
        cases[i].run();
        if (skipped)
            printf("skip %s: %s\n", cases[i].name, skipped);
        else
            printf("ok %s (%.2f s)\n", cases[i].name, check_seconds() - case_start);
        fflush(stdout);
        passed += !skipped;
        left_out += skipped != NULL;
    }
    dr_thread_pool_release();
    printf("%s: %u passed, %u skipped, %.1f s\n", program, passed, left_out, check_seconds() - start);
    return passed == 0 && left_out > 0 ? CHECK_SKIPPED : 0;
}
