/* Directories and the commit: what they do, and what is left when any of their calls fails. */
#include "check.h"
#include "io/file.h"
#include "io/sys.h"
#include "io/sys_fault.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

static const struct dr_control never;

static bool is_directory(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static void check_content(const char *name, const char *expected) {
    size_t size;
    uint8_t *data = check_read_file(name, &size);
    CHECK(data);
    CHECK_EQ(size, strlen(expected));
    CHECK_BYTES(data, expected, size);
    free(data);
}

/* ---- making directories ---- */

static void makes_directories(void) {
    static const char *const names[] = {"a", "a", "b/c/d", "b/c/e/", "b//f", "./g", "b/./h", "b/../i"};
    for (int sync = 0; sync < 2; sync++)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            DR_NEW_ERROR(error);
            const char *path = check_path(names[i]);
            bool is_new = !check_exists(names[i]);
            int rc = dr_directory_make(path, sync ? DR_NAMES_ALL : DR_NAMES_LATER, &error);
            CHECK_OK(rc, &error);
            CHECK_EQ(rc, is_new);
            CHECK(is_directory(path));
        }
}

static void makes_relative_directories(void) {
    char before[512];
    CHECK(getcwd(before, sizeof before));
    CHECK_EQ(chdir(check_dir), 0);
    static const char *const names[] = {"relative", "r/s/t", "./u/v", "."};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        DR_NEW_ERROR(error);
        CHECK_OK(dr_directory_make(names[i], DR_NAMES_ALL, &error), &error);
        CHECK(is_directory(names[i]));
    }
    CHECK_EQ(chdir(before), 0);
}

static void refuses_what_cannot_be_made(void) {
    DR_NEW_ERROR(error);
    check_write_file("plain", "x", 1);
    CHECK_FAILS(dr_directory_make(check_path("plain"), DR_NAMES_ALL, &error), &error, ENOTDIR);
    CHECK(strcmp(error.path, check_path("plain")) == 0);
    CHECK(dr_error_cure(&error)[0]);
    dr_error_clear(&error);
    CHECK_FAILS(dr_directory_make(check_path("plain/below"), DR_NAMES_ALL, &error), &error, ENOTDIR);
    dr_error_clear(&error);
    CHECK_FAILS(dr_directory_make("", DR_NAMES_ALL, &error), &error, ENOENT);
    CHECK_EQ(symlink("nowhere", check_path("dangling")), 0);
    dr_error_clear(&error);
    CHECK_FAILS(dr_directory_make(check_path("dangling"), DR_NAMES_ALL, &error), &error, ENOENT);
}

/* Another process may make the same directory at the same time. */
static int mkdir_raced(const char *path, mode_t mode) {
    dr_sys_real.mkdir(path, mode);
    return dr_sys_real.mkdir(path, mode);
}

static void another_made_it_first(void) {
    DR_NEW_ERROR(error);
    dr_sys.mkdir = mkdir_raced;
    CHECK_OK(dr_directory_make(check_path("race/d"), DR_NAMES_ALL, &error), &error);
    dr_sys = dr_sys_real;
    CHECK(is_directory(check_path("race/d")));
}

/* An interrupted call is repeated, and a parent that may not be read is not synced. */
static void making_fails_at_each_call(void) {
    const int errors[] = {EIO, EINTR};
    for (int e = 0; e < 2; e++) {
        uint64_t calls = 1;
        for (uint64_t n = 0; n <= calls; n++) {
            char name[32];
            DR_NEW_ERROR(error);
            snprintf(name, sizeof name, "each%d.%d/deep/er", e, (int)n);
            int before = check_open_descriptors();
            dr_fault_arm(&(struct dr_fault){.nth = n, .err = errors[e]});
            int rc = dr_directory_make(check_path(name), DR_NAMES_ALL, &error);
            calls = n == 0 ? dr_fault_disarm() : (dr_fault_disarm(), calls);
            CHECK_EQ(check_open_descriptors(), before);
            CHECK_EQ(rc, error.kind == DR_ERROR_NONE ? 1 : -EIO);
            CHECK(rc < 0 || is_directory(check_path(name)));
            CHECK(errors[e] != EINTR || rc == 1);
        }
        CHECK_INT(calls, >=, 9);
    }
    DR_NEW_ERROR(error);
    dr_fault_arm(&(struct dr_fault){.call = "open_dir", .nth = 1, .err = EACCES, .sticky = true});
    CHECK_OK(dr_directory_make(check_path("not/read"), DR_NAMES_ALL, &error), &error);
    dr_fault_disarm();
    CHECK(is_directory(check_path("not/read")));
}

static void interrupted_without_end(void) {
    DR_NEW_ERROR(error);
    dr_fault_arm(&(struct dr_fault){.call = "mkdir", .nth = 1, .err = EINTR, .sticky = true});
    CHECK_FAILS(dr_directory_make(check_path("never"), DR_NAMES_ALL, &error), &error, EINTR);
    dr_fault_disarm();
}

/* ---- commit ---- */

static int commit(const char *text, bool sync, struct dr_error *error) {
    dr_error_clear(error);
    return dr_directory_commit(check_path("c"), ".metadata.tmp", ".metadata", text, strlen(text), sync, error);
}

static void commits(void) {
    struct dr_error error;
    CHECK_EQ(mkdir(check_path("c"), 0777), 0);
    for (int sync = 0; sync < 2; sync++) {
        CHECK_OK(commit("first, the longer one", sync, &error), &error);
        check_content("c/.metadata", "first, the longer one");
        CHECK_OK(commit("second", sync, &error), &error);
        check_content("c/.metadata", "second");
        CHECK(!check_exists("c/.metadata.tmp"));
    }
    CHECK_OK(commit("", true, &error), &error);
    check_content("c/.metadata", "");
    /* Another's temporary file is not touched. */
    check_write_file("c/.metadata.tmp", "another's", 9);
    CHECK_FAILS(commit("third", true, &error), &error, EEXIST);
    check_content("c/.metadata.tmp", "another's");
    check_content("c/.metadata", "");
    CHECK_EQ(unlink(check_path("c/.metadata.tmp")), 0);
    dr_error_clear(&error);
    CHECK_FAILS(dr_directory_commit(check_path("none"), "t", "n", "x", 1, true, &error), &error, ENOENT);
}

static void commit_fails_at_each_call(void) {
    const int errors[] = {EIO, ENOSPC, EINTR, 0};
    for (int e = 0; e < 4; e++) {
        uint64_t calls = 1;
        for (uint64_t n = 0; n <= calls; n++) {
            struct dr_error error;
            CHECK_OK(commit("old", true, &error), &error);
            int before = check_open_descriptors();
            dr_fault_arm(&(struct dr_fault){.nth = n, .err = errors[e]});
            int rc = commit("the new one", true, &error);
            uint64_t counted = dr_fault_disarm();
            if (n == 0)
                calls = counted;
            CHECK_EQ(check_open_descriptors(), before);
            CHECK(!check_exists("c/.metadata.tmp"));
            size_t size;
            uint8_t *data = check_read_file("c/.metadata", &size);
            CHECK(data);
            bool is_new = size == 11 && memcmp(data, "the new one", 11) == 0;
            bool is_old = size == 3 && memcmp(data, "old", 3) == 0;
            free(data);
            CHECK(is_new || is_old);
            CHECK(rc < 0 || is_new);
            CHECK_EQ(rc, -error.err);
            CHECK(errors[e] != 0 || rc == 0);
            CHECK(errors[e] != EINTR || rc == 0 || error.call == DR_CALL_CLOSE); /* the others are repeated */
        }
        CHECK_INT(calls, >=, 7);
    }
}

/* ---- replacing ---- */

static int replace(struct dr_error *error) {
    dr_error_clear(error);
    return dr_directory_replace(check_path("p"), "tmp", "name", true, error);
}

/* A directory "p/tmp" with a file of this name in it. */
static void make_folder(const char *file) {
    char path[64];
    snprintf(path, sizeof path, "p/tmp/%s", file);
    CHECK_EQ(mkdir(check_path("p/tmp"), 0777), 0);
    check_write_file(path, "x", 1);
}

static void replaces_files(void) {
    struct dr_error error;
    CHECK_EQ(mkdir(check_path("p"), 0777), 0);
    CHECK_FAILS(replace(&error), &error, ENOENT);
    for (int i = 0; i < 2; i++) {
        check_write_file("p/tmp", i ? "second" : "first", i ? 6 : 5);
        dr_fault_arm(&(struct dr_fault){.call = "exchange", .nth = 1, .err = EINVAL}); /* files have no need of it */
        CHECK_OK(replace(&error), &error);
        CHECK_EQ(dr_fault_disarm(), 0);
        check_content("p/name", i ? "second" : "first");
        CHECK(!check_exists("p/tmp"));
    }
    CHECK_EQ(unlink(check_path("p/name")), 0);
}

/* A directory takes the place of another, with what is in it. */
static void replaces_directories(void) {
    struct dr_error error;
    make_folder("0");
    CHECK_OK(replace(&error), &error);
    CHECK(check_exists("p/name/0") && !check_exists("p/tmp"));
    const int refusals[] = {0, EINVAL, ENOSYS, EPERM};
    const char *const before[] = {"p/tmp/0", "p/tmp/1", "p/tmp/2", "p/tmp/3"};
    const char *const after[] = {"p/name/1", "p/name/2", "p/name/3", "p/name/4"};
    for (int i = 0; i < 4; i++) {
        make_folder(strrchr(after[i], '/') + 1);
        dr_fault_arm(&(struct dr_fault){.call = "exchange", .nth = refusals[i] ? 1 : 0, .err = refusals[i]});
        CHECK_OK(replace(&error), &error);
        dr_fault_disarm();
        CHECK(check_exists(before[i]) && check_exists(after[i]));
        CHECK(!check_exists("p/tmp.old"));
        CHECK_EQ(unlink(check_path(before[i])), 0);
        CHECK_EQ(rmdir(check_path("p/tmp")), 0);
    }
    CHECK_EQ(unlink(check_path("p/name/4")), 0);
    CHECK_EQ(rmdir(check_path("p/name")), 0);
}

/* Where names cannot be exchanged: exchange fails always, and of the renames the nth. */
static unsigned renames, failing_rename;

static int no_exchange(int dirfd, const char *a, const char *b) {
    (void)dirfd, (void)a, (void)b;
    return -EINVAL;
}

static int failing(int dirfd, const char *from, const char *to) {
    return ++renames == failing_rename ? -EIO : dr_sys_real.rename(dirfd, from, to);
}

/* The first rename is the one that an exchange is tried after. */
static void replaces_slowly_or_not_at_all(void) {
    for (failing_rename = 1; failing_rename <= 5; failing_rename++) {
        struct dr_error error;
        make_folder("old");
        CHECK_OK(replace(&error), &error);
        make_folder("new");
        renames = 0;
        dr_sys.exchange = no_exchange;
        dr_sys.rename = failing;
        int rc = replace(&error);
        dr_sys = dr_sys_real;
        bool is_new = failing_rename >= 4;
        CHECK_EQ(rc, is_new ? 0 : -EIO);
        CHECK(check_exists(is_new ? "p/name/new" : "p/name/old"));
        const char *old = failing_rename == 4 ? "p/tmp.old" : "p/tmp";
        const char *rest[] = {"p/name/new", "p/name/old", "p/tmp/new", "p/tmp/old", "p/tmp.old/old"};
        CHECK(!is_new || check_exists(old));
        for (int i = 0; i < 5; i++)
            unlink(check_path(rest[i]));
        CHECK_EQ(rmdir(check_path("p/name")), 0);
        CHECK_EQ(rmdir(check_path(is_new ? old : "p/tmp")), 0);
    }
}

static void replace_fails_at_each_call(void) {
    uint64_t calls = 1;
    for (uint64_t n = 0; n <= calls; n++) {
        struct dr_error error;
        check_write_file("p/tmp", "new", 3);
        check_write_file("p/name", "old", 3);
        int before = check_open_descriptors();
        dr_fault_arm(&(struct dr_fault){.nth = n, .err = EIO});
        int rc = replace(&error);
        calls = n == 0 ? dr_fault_disarm() : (dr_fault_disarm(), calls);
        CHECK_EQ(check_open_descriptors(), before);
        CHECK_EQ(rc, -error.err);
        CHECK(check_exists("p/name"));
        if (rc == 0)
            check_content("p/name", "new");
    }
    CHECK_INT(calls, >=, 4);
    unlink(check_path("p/tmp"));
    CHECK_EQ(unlink(check_path("p/name")), 0);
}

/* ---- links ---- */

static int link_file(bool is_durable, uint64_t size, enum dr_link *how, struct dr_error *error) {
    struct dr_syncs syncs;
    dr_syncs_init(&syncs);
    dr_error_clear(error);
    int rc = dr_directory_link(check_path("l1"), "old", check_path("l2"), "new", size, is_durable, &syncs, &never, how,
                               error);
    int waited = dr_syncs_wait(&syncs, &never, NULL, error);
    if (rc == 0 && waited < 0)
        unlink(check_path("l2/new"));
    return rc < 0 ? rc : waited;
}

static void make_linked(void) {
    if (!check_exists("l1")) {
        CHECK_EQ(mkdir(check_path("l1"), 0777), 0);
        CHECK_EQ(mkdir(check_path("l2"), 0777), 0);
    }
    unlink(check_path("l1/old"));
    unlink(check_path("l2/new"));
    check_write_file("l1/old", "bytes", 5);
}

static unsigned links_of(const char *name) {
    struct stat st;
    CHECK_EQ(stat(check_path(name), &st), 0);
    return (unsigned)st.st_nlink;
}

static int no_link(int from_dirfd, const char *from, int dirfd, const char *name) {
    (void)from_dirfd, (void)from, (void)dirfd, (void)name;
    return -EMLINK;
}

/* What a file system does that can share blocks. */
static int copy_file(int from, int fd) {
    char data[16];
    ssize_t size = pread(from, data, sizeof data, 0);
    return size < 0 || pwrite(fd, data, (size_t)size, 0) != size ? -EIO : 0;
}

static void links_files(void) {
    struct dr_error error;
    enum dr_link how;
    make_linked();
    CHECK_OK(link_file(false, 5, &how, &error), &error);
    CHECK_EQ(how, DR_LINK_HARD);
    CHECK_EQ(links_of("l1/old"), 2);
    CHECK_EQ(unlink(check_path("l1/old")), 0); /* neither needs the other */
    check_content("l2/new", "bytes");
    make_linked();
    dr_sys.link = no_link;
    dr_sys.clone = copy_file;
    CHECK_OK(link_file(true, 5, &how, &error), &error);
    dr_sys = dr_sys_real;
    CHECK_EQ(how, DR_LINK_CLONE);
    CHECK_EQ(links_of("l2/new"), 1);
    check_content("l2/new", "bytes");
}

static void refuses_to_link(void) {
    struct dr_error error;
    enum dr_link how;
    make_linked();
    CHECK_FAILS(link_file(true, 6, &how, &error), &error, EINVAL); /* it is shorter than it was */
    CHECK_EQ(unlink(check_path("l1/old")), 0);
    CHECK_FAILS(link_file(true, 5, &how, &error), &error, ENOENT);
    CHECK_EQ(symlink("../l2", check_path("l1/old")), 0);
    CHECK_INT(link_file(true, 0, &how, &error), <, 0);
    make_linked();
    check_write_file("l2/new", "there", 5); /* nothing that exists is replaced */
    CHECK_FAILS(link_file(true, 5, &how, &error), &error, EEXIST);
    check_content("l2/new", "there");
    make_linked();
    dr_sys.link = no_link;
    dr_sys.clone = dr_sys_real.clone;
    int rc = link_file(true, 5, &how, &error);
    dr_sys = dr_sys_real;
    if (rc < 0) { /* else this file system shares blocks */
        CHECK_EQ(error.err, EMLINK);
        CHECK(!check_exists("l2/new"));
    }
}

static void link_fails_at_each_call(void) {
    uint64_t calls = 1;
    for (int is_clone = 0; is_clone < 2; is_clone++)
        for (uint64_t n = 0; n <= calls; n++) {
            struct dr_error error;
            enum dr_link how;
            make_linked();
            int before = check_open_descriptors();
            dr_fault_arm(&(struct dr_fault){.nth = n, .err = EIO});
            if (is_clone) {
                dr_sys.link = no_link;
                dr_sys.clone = copy_file;
            }
            int rc = link_file(false, 5, &how, &error);
            calls = n == 0 ? dr_fault_disarm() : (dr_fault_disarm(), calls);
            CHECK_EQ(check_open_descriptors(), before);
            CHECK_EQ(rc, -error.err);
            check_content("l1/old", "bytes");
            CHECK_EQ(rc == 0, check_exists("l2/new"));
        }
    CHECK_INT(calls, >=, 6);
}

/* ---- removing ---- */

static void removes_files(void) {
    DR_NEW_ERROR(error);
    CHECK_EQ(mkdir(check_path("r1"), 0777), 0);
    CHECK_EQ(mkdir(check_path("r1/sub"), 0777), 0);
    check_write_file("r1/x", "x", 1);
    check_write_file("r1/y", "y", 1);
    check_write_file("r1/sub/z", "z", 1);
    check_write_file("outside", "o", 1);
    CHECK_EQ(symlink("../outside", check_path("r1/link")), 0);
    CHECK_OK(dr_directory_remove(check_path("r1"), (const char *const[]){"x", "missing", "link"}, 3, &error), &error);
    CHECK(!check_exists("r1/x") && check_exists("r1/y") && !check_exists("r1/link") && check_exists("outside"));
    static const char *const refused[] = {"sub/z", "../outside", "/etc/hostname"};
    for (int i = 0; i < 3; i++) {
        dr_error_clear(&error);
        CHECK_FAILS(dr_directory_remove(check_path("r1"), &refused[i], 1, &error), &error, EINVAL);
    }
    CHECK(check_exists("r1/sub/z") && check_exists("outside"));
    dr_error_clear(&error);
    CHECK_FAILS(dr_directory_remove(check_path("none"), refused, 0, &error), &error, ENOENT);
}

/* ---- direct and sync ---- */

static void direct_modes(void) {
    DR_NEW_ERROR(error);
    int fd = open(check_path("direct"), O_RDWR | O_CREAT, 0666);
    CHECK_EQ(dr_file_use_direct(fd, "direct", DR_DIRECT_OFF, &error), 0);
    dr_fault_arm(&(struct dr_fault){.call = "set_direct", .nth = 1, .sticky = true, .err = EINVAL});
    CHECK_EQ(dr_file_use_direct(fd, "direct", DR_DIRECT_AUTO, &error), 0);
    CHECK_FAILS(dr_file_use_direct(fd, "direct", DR_DIRECT_ON, &error), &error, EINVAL);
    CHECK(error.call == DR_CALL_O_DIRECT);
    dr_fault_disarm();
    dr_error_clear(&error);
    int on = dr_file_use_direct(fd, "direct", DR_DIRECT_AUTO, &error);
    CHECK_EQ((fcntl(fd, F_GETFL) & O_DIRECT) != 0, on);
    close(fd);
}

static int slow_fdatasync(int fd) {
    nanosleep(&(struct timespec){0, 500000000}, NULL);
    return dr_sys_real.fdatasync(fd);
}

static atomic_bool closed;

static int noted_close(int fd) {
    int rc = dr_sys_real.close(fd);
    atomic_store(&closed, true);
    return rc;
}

static int cancel_at_second_poll(void *context) {
    unsigned *polls = context;
    return ++*polls >= 2;
}

static void sync_can_be_left(void) {
    DR_NEW_ERROR(error);
    unsigned polls = 0;
    int before = check_open_descriptors();
    int fd = open(check_path("synced"), O_RDWR | O_CREAT, 0666);
    CHECK_OK(dr_file_sync(fd, "synced", DR_SYNC_DATA, &never, &error), &error);
    dr_sys.fdatasync = slow_fdatasync;
    dr_sys.close = noted_close;
    double start = check_seconds();
    const struct dr_control control = {cancel_at_second_poll, &polls};
    CHECK_FAILS(dr_file_sync(fd, "synced", DR_SYNC_DATA, &control, &error), &error, ECANCELED);
    CHECK(check_seconds() - start < 0.45); /* the sync takes 0.5 */
    close(fd);
    while (!atomic_load(&closed)) /* the sync ends by itself */
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    dr_sys = dr_sys_real;
    CHECK_EQ(check_open_descriptors(), before);
}

static void sync_fails(void) {
    DR_NEW_ERROR(error);
    int fd = open(check_path("synced"), O_RDWR | O_CREAT, 0666);
    dr_fault_arm(&(struct dr_fault){.call = "fdatasync", .nth = 1, .err = EIO});
    CHECK_FAILS(dr_file_sync(fd, "synced", DR_SYNC_DATA, &never, &error), &error, EIO);
    CHECK(error.call == DR_CALL_FDATASYNC);
    dr_error_clear(&error);
    dr_fault_arm(&(struct dr_fault){.call = "fdatasync", .nth = 1, .err = EINTR});
    CHECK_OK(dr_file_sync(fd, "synced", DR_SYNC_DATA, &never, &error), &error);
    CHECK_EQ(dr_fault_disarm(), 2);
    close(fd);
}

/* ---- sets of syncs ---- */

static atomic_uint under_way, most_under_way;

static int counted_fdatasync(int fd) {
    (void)fd;
    unsigned now = atomic_fetch_add(&under_way, 1) + 1, most = atomic_load(&most_under_way);
    while (now > most && !atomic_compare_exchange_weak(&most_under_way, &most, now))
        ;
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    atomic_fetch_sub(&under_way, 1);
    return 0;
}

static void syncs_go_together(void) {
    struct dr_syncs syncs;
    DR_NEW_ERROR(error);
    struct dr_span spans[40];
    struct dr_watch watch = {.spans = spans, .room = 40};
    int before = check_open_descriptors();
    int fd = open(check_path("synced"), O_RDWR | O_CREAT, 0666);
    dr_syncs_init(&syncs);
    dr_sys.fdatasync = counted_fdatasync;
    atomic_store(&most_under_way, 0);
    for (int i = 0; i < 30; i++)
        CHECK_OK(dr_syncs_add_file(&syncs, dup(fd), "synced", DR_SYNC_DATA, 7, &never, &error), &error);
    close(fd);
    CHECK_OK(dr_syncs_add_directory(&syncs, check_dir, &error), &error);
    CHECK_OK(dr_syncs_add_above(&syncs, check_dir, &error), &error);
    CHECK_OK(dr_syncs_wait(&syncs, &never, &watch, &error), &error);
    dr_sys = dr_sys_real;
    CHECK_EQ(atomic_load(&under_way), 0);
    CHECK_INT(atomic_load(&most_under_way), >, 1);
    CHECK_INT(atomic_load(&most_under_way), <=, DR_SYNCS_AT_ONCE);
    CHECK_EQ(watch.count, 30); /* of directories nothing is noted */
    for (unsigned i = 0; i < 30; i++) {
        CHECK_EQ(spans[i].file, i);
        CHECK(spans[i].size == 7 && spans[i].step == DR_STEP_SYNC && spans[i].begin < spans[i].end);
        for (unsigned k = 0; k < i; k++) /* those in one slot do not overlap */
            CHECK(spans[k].slot != spans[i].slot || spans[k].end <= spans[i].begin);
    }
    CHECK_OK(dr_syncs_wait(&syncs, &never, NULL, &error), &error);
    CHECK_EQ(check_open_descriptors(), before);
}

static pthread_t syncer;

static int fdatasync_by(int fd) {
    (void)fd;
    syncer = pthread_self();
    return 0;
}

static int statfs_of_memory(const char *path, struct statfs *out) {
    int rc = dr_sys_real.statfs(path, out);
    out->f_type = 0x01021994;
    return rc;
}

static void memory_is_synced_by_the_caller(void) {
    DR_NEW_ERROR(error);
    const char *path = check_path("synced");
    int fd = open(path, O_RDWR | O_CREAT, 0666);
    dr_sys.fdatasync = fdatasync_by;
    for (int in_memory = 0; in_memory < 2; in_memory++) {
        dr_sys.statfs = in_memory ? statfs_of_memory : dr_sys_real.statfs;
        CHECK_OK(dr_file_sync(fd, path, DR_SYNC_DATA, &never, &error), &error);
        CHECK_EQ(!!pthread_equal(syncer, pthread_self()), in_memory);
    }
    dr_sys = dr_sys_real;
    close(fd);
}

static int failing_fsync(int fd) {
    (void)fd;
    return -EIO;
}

/* The others are waited for all the same. */
static void the_first_of_some_failures(void) {
    struct dr_syncs syncs;
    DR_NEW_ERROR(error);
    int before = check_open_descriptors();
    int fd = open(check_path("synced"), O_RDWR | O_CREAT, 0666);
    dr_syncs_init(&syncs);
    dr_sys.fsync = failing_fsync;
    CHECK_OK(dr_syncs_add_file(&syncs, dup(fd), "data", DR_SYNC_DATA, 0, &never, &error), &error);
    CHECK_OK(dr_syncs_add_file(&syncs, dup(fd), "first", DR_SYNC_LENGTH, 0, &never, &error), &error);
    CHECK_OK(dr_syncs_add_directory(&syncs, check_dir, &error), &error);
    CHECK_FAILS(dr_syncs_wait(&syncs, &never, NULL, &error), &error, EIO);
    CHECK(strcmp(error.path, "first") == 0 && error.call == DR_CALL_FSYNC);
    dr_sys = dr_sys_real;
    dr_error_clear(&error);
    CHECK_FAILS(dr_syncs_add_directory(&syncs, check_path("absent"), &error), &error, ENOENT);
    dr_error_clear(&error);
    CHECK_OK(dr_syncs_add_file(&syncs, fd, "left alone", DR_SYNC_DATA, 0, &never, &error), &error);
    dr_syncs_abandon(&syncs);
    dr_syncs_abandon(&syncs);
    for (int tries = 0; check_open_descriptors() > before && tries < 1000; tries++)
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    CHECK_EQ(check_open_descriptors(), before);
}

static int failing_close(int fd) {
    dr_sys_real.close(fd);
    return -ENOSPC;
}

/* NFS says only then that it could not write. Of a directory nothing was written. */
static void closing_fails(void) {
    struct dr_syncs syncs;
    DR_NEW_ERROR(error);
    int before = check_open_descriptors();
    dr_syncs_init(&syncs);
    dr_sys.close = failing_close;
    CHECK_OK(dr_syncs_add_directory(&syncs, check_dir, &error), &error);
    CHECK_OK(dr_syncs_wait(&syncs, &never, NULL, &error), &error);
    int fd = open(check_path("synced"), O_RDWR | O_CREAT, 0666);
    CHECK_OK(dr_syncs_add_file(&syncs, fd, "synced", DR_SYNC_DATA, 0, &never, &error), &error);
    CHECK_FAILS(dr_syncs_wait(&syncs, &never, NULL, &error), &error, ENOSPC);
    CHECK(strcmp(error.path, "synced") == 0 && error.call == DR_CALL_CLOSE);
    dr_sys = dr_sys_real;
    CHECK_EQ(check_open_descriptors(), before);
}

/* ---- which process ---- */

/* However it was forked: by clone too, of which nobody is told. */
static void forked_processes_have_numbers_of_their_own(void) {
    CHECK_EQ(dr_process(), getpid());
    for (int raw = 0; raw < 2; raw++) {
        pid_t child = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : fork();
        if (child == 0)
            _exit(dr_process() == (pid_t)syscall(SYS_getpid) ? 0 : 1);
        int status;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
        CHECK_EQ(dr_process(), getpid());
    }
}

/* ---- names ---- */

struct escape {
    const char *name;
    bool refused;
};

static void opens_only_below(void) {
    CHECK_EQ(mkdir(check_path("base"), 0777), 0);
    CHECK_EQ(mkdir(check_path("base/sub"), 0777), 0);
    check_write_file("secret", "s", 1);
    check_write_file("base/sub/file", "f", 1);
    CHECK_EQ(symlink("../secret", check_path("base/out")), 0);
    CHECK_EQ(symlink(check_path("secret"), check_path("base/absolute")), 0);
    CHECK_EQ(symlink("..", check_path("base/up")), 0);
    static const struct escape names[] = {
        {"sub/file", false}, {"./sub/./file", false}, {"out", true},           {"absolute", true},
        {"up/secret", true}, {"../secret", true},     {"/etc/hostname", true},
    };
    int dirfd = dr_sys.open_dir(check_path("base"));
    CHECK_INT(dirfd, >=, 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int fd = dr_sys.open_below(dirfd, names[i].name, O_RDONLY, 0);
        CHECK_EQ(fd < 0, names[i].refused);
        if (fd >= 0)
            close(fd);
    }
    close(dirfd);
}

CHECK_MAIN({"makes_directories", makes_directories}, {"makes_relative_directories", makes_relative_directories},
           {"refuses_what_cannot_be_made", refuses_what_cannot_be_made},
           {"another_made_it_first", another_made_it_first}, {"making_fails_at_each_call", making_fails_at_each_call},
           {"interrupted_without_end", interrupted_without_end}, {"commits", commits},
           {"commit_fails_at_each_call", commit_fails_at_each_call}, {"replaces_files", replaces_files},
           {"replaces_directories", replaces_directories},
           {"replaces_slowly_or_not_at_all", replaces_slowly_or_not_at_all},
           {"replace_fails_at_each_call", replace_fails_at_each_call}, {"links_files", links_files},
           {"refuses_to_link", refuses_to_link}, {"link_fails_at_each_call", link_fails_at_each_call},
           {"removes_files", removes_files}, {"direct_modes", direct_modes}, {"sync_can_be_left", sync_can_be_left},
           {"sync_fails", sync_fails}, {"syncs_go_together", syncs_go_together},
           {"memory_is_synced_by_the_caller", memory_is_synced_by_the_caller},
           {"the_first_of_some_failures", the_first_of_some_failures}, {"closing_fails", closing_fails},
           {"forked_processes_have_numbers_of_their_own", forked_processes_have_numbers_of_their_own},
           {"opens_only_below", opens_only_below})
