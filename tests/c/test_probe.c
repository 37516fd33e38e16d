/* Probes: what works is said to work, each call that fails is said to fail, and nothing stays behind. */
#include "check.h"
#include "io/pool.h"
#include "io/sys.h"
#include "io/sys_fault.h"
#include "tools/probe.h"

#include <fcntl.h>

static const struct dr_control never;

/* Files of the directory. */
static int count_files(const char *path) {
    DIR *dir = opendir(path);
    CHECK(dir);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(dir));)
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

static struct dr_directory_answers ask(const char *path) {
    struct dr_directory_answers out;
    DR_NEW_ERROR(error);
    CHECK_OK(dr_probe_directory(path, &out, &never, &error), &error);
    return out;
}

static void healthy_directory(void) {
    int before = check_open_descriptors();
    struct dr_directory_answers out = ask(check_dir);
    const struct dr_answer *all[] = {&out.create, &out.allocate, &out.sync, &out.commit, &out.remove};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        CHECK(all[i]->asked);
        CHECK_EQ(all[i]->err, 0);
        CHECK_EQ(all[i]->cure[0], 0);
    }
    CHECK_INT(out.sync.ns, >, 0);
    CHECK_INT(out.commit.ns, >, 0);
    CHECK_EQ(count_files(check_dir), 0);
    CHECK_EQ(check_open_descriptors(), before);
}

/* The answer that a call's failure must be found in. */
struct blame {
    const char *call;
    size_t answer;
};
#define BLAMED(call, answer) {call, offsetof(struct dr_directory_answers, answer)}

static void each_call_fails(void) {
    static const struct blame blames[] = {
        BLAMED("open_dir", create),   BLAMED("open_below", create), BLAMED("fallocate", allocate),
        BLAMED("set_direct", direct), BLAMED("pwrite", sync),       BLAMED("fdatasync", sync),
        BLAMED("rename", commit),     BLAMED("fsync", commit),
    };
    int before = check_open_descriptors();
    for (size_t i = 0; i < sizeof blames / sizeof *blames; i++) {
        dr_fault_arm(&(struct dr_fault){.call = blames[i].call, .nth = 1, .sticky = true, .err = ENOSPC});
        struct dr_directory_answers out = ask(check_dir);
        dr_fault_disarm();
        const struct dr_answer *answer = (const void *)((const char *)&out + blames[i].answer);
        CHECK(answer->asked);
        CHECK_EQ(answer->err, ENOSPC);
        CHECK(strstr(answer->cure, "free space"));
        CHECK_EQ(count_files(check_dir), 0);
        CHECK_EQ(check_open_descriptors(), before);
    }
}

static void space(void) {
    struct dr_space about;
    CHECK_EQ(dr_probe_space(check_dir, &about).err, 0);
    CHECK_INT(about.bytes, >=, about.free_bytes);
    CHECK_INT(about.free_bytes, >, 0);
    CHECK_INT(about.file_system, >, 0);
    dr_fault_arm(&(struct dr_fault){.call = "statfs", .nth = 1, .err = EIO});
    struct dr_answer answer = dr_probe_space(check_dir, &about);
    dr_fault_disarm();
    CHECK_EQ(answer.err, EIO);
    CHECK(strstr(answer.cure, "dmesg"));
    CHECK_EQ(about.bytes, 0);
}

static void what_stands_on_it_is_not_asked(void) {
    dr_fault_arm(&(struct dr_fault){.call = "open_below", .nth = 1, .sticky = true, .err = EACCES});
    struct dr_directory_answers out = ask(check_dir);
    dr_fault_disarm();
    CHECK(!out.allocate.asked && !out.direct.asked && !out.sync.asked && !out.commit.asked && !out.remove.asked);
    dr_fault_arm(&(struct dr_fault){.call = "fdatasync", .nth = 1, .sticky = true, .err = EIO});
    out = ask(check_dir);
    dr_fault_disarm();
    CHECK(!out.commit.asked && out.remove.asked);
}

static void what_is_there_stays(void) {
    check_write_file(DR_PROBE_FILE, "mine", 4);
    struct dr_directory_answers out = ask(check_dir);
    CHECK_EQ(out.create.err, EEXIST);
    size_t size;
    uint8_t *data = check_read_file(DR_PROBE_FILE, &size);
    CHECK(data);
    CHECK_EQ(size, 4);
    free(data);
    CHECK_EQ(unlink(check_path(DR_PROBE_FILE)), 0);
}

static int cancel(void *context) {
    (void)context;
    return 1;
}

static atomic_int synced; /* the descriptor of the sync that is left alone */
static atomic_bool closed;

static int slow_sync(int fd) {
    atomic_store(&synced, fd);
    nanosleep(&(struct timespec){0, 200000000}, NULL);
    return dr_sys_real.fdatasync(fd);
}

static int noted_close(int fd) {
    int rc = dr_sys_real.close(fd);
    if (fd == atomic_load(&synced))
        atomic_store(&closed, true);
    return rc;
}

static void cancelled(void) {
    struct dr_directory_answers out;
    DR_NEW_ERROR(error);
    const struct dr_control control = {cancel, NULL};
    dr_sys.fdatasync = slow_sync;
    dr_sys.close = noted_close;
    atomic_store(&synced, -1);
    CHECK_FAILS(dr_probe_directory(check_dir, &out, &control, &error), &error, ECANCELED);
    CHECK_EQ(error.kind, DR_ERROR_CANCELLED);
    CHECK_EQ(count_files(check_dir), 0);
    while (!atomic_load(&closed)) /* the sync ends by itself */
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    dr_sys = dr_sys_real;
}

static void rings(void) {
    struct dr_ring_answers out;
    int before = check_open_descriptors();
    dr_fault_arm(&(struct dr_fault){.call = "uring_init", .nth = 1, .err = EPERM});
    dr_probe_ring(4, 1 << 20, &out);
    CHECK_EQ(out.open.err, EPERM);
    CHECK(strstr(out.open.cure, "io_uring_disabled"));
    dr_fault_arm(&(struct dr_fault){.call = "uring_supports", .nth = 1, .err = 1});
    dr_probe_ring(4, 1 << 20, &out);
    dr_fault_disarm();
    if (out.open.err == EPERM) /* no rings here at all */
        exit(CHECK_SKIPPED);
    CHECK_EQ(out.open.err, ENOSYS);
    dr_fault_arm(&(struct dr_fault){.call = "uring_register", .nth = 1, .err = ENOMEM});
    dr_probe_ring(4, 1 << 20, &out);
    dr_fault_disarm();
    CHECK_EQ(out.open.err, 0);
    CHECK_EQ(out.registered, 2);
    CHECK_EQ(check_open_descriptors(), before);
}

static void cached(void) {
    static const uint8_t data[1 << 16] = {1};
    uint64_t bytes;
    DR_NEW_ERROR(error);
    check_write_file("cached", data, sizeof data);
    CHECK_OK(dr_probe_cached(check_dir, "cached", &bytes, &error), &error);
    CHECK_EQ(bytes, sizeof data);
    int fd = open(check_path("cached"), O_RDONLY);
    CHECK_EQ(fsync(fd), 0);
    CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    CHECK_OK(dr_probe_cached(check_dir, "cached", &bytes, &error), &error);
    CHECK_INT(bytes, <, sizeof data);
    close(fd);
    CHECK_FAILS(dr_probe_cached(check_dir, "none", &bytes, &error), &error, ENOENT);
    CHECK_EQ(unlink(check_path("cached")), 0);
}

static void crc_takes_time(void) { CHECK_INT(dr_probe_crc(64 << 20), >, 0); }

CHECK_MAIN({"healthy_directory", healthy_directory}, {"each_call_fails", each_call_fails}, {"space", space},
           {"what_stands_on_it_is_not_asked", what_stands_on_it_is_not_asked},
           {"what_is_there_stays", what_is_there_stays}, {"cancelled", cancelled}, {"rings", rings}, {"cached", cached},
           {"crc_takes_time", crc_takes_time})
