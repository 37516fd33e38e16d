/* What a load reads: checked reads, their extents, and the blocks these make. Made and freed by load.c. */
#ifndef DCPRING_LOAD_PLAN_H
#define DCPRING_LOAD_PLAN_H

#include "load.h"

struct dr_load_file {
    const char *name;
    char *path;
    uint64_t size;
    size_t blocks_left;
    int buffered_fd, direct_fd; /* -1 while closed */
    bool direct_tried;
};

/* Bytes [lo, hi) of a file that a read needs. */
struct dr_load_extent {
    size_t file;
    uint64_t lo, hi;
    size_t read;
};

/* One I/O. lo is aligned; the extents from first_extent on that start before hi may lie in it. */
struct dr_load_block {
    size_t file;
    uint64_t lo, hi;
    size_t first_extent;
};

struct dr_load_plan {
    int dirfd;
    bool opened;
    struct dr_load_file *files;
    size_t file_count;
    struct dr_read *reads;
    size_t read_count;
    struct dr_load_extent *extents; /* sorted by file and lo */
    size_t extent_count, extent_room;
    struct dr_load_block *blocks;
    size_t block_count, block_room;
    uint32_t **sums; /* per read that has only a whole CRC and is read wholly: its block CRCs; else NULL */
};

int dr_load_plan_open_files(struct dr_load_plan *plan, const char *dir, const char *const *names, size_t count,
                            struct dr_error *error);
int dr_load_plan_init(struct dr_load_plan *plan, const char *dir, const char *const *names, size_t name_count,
                      struct dr_read *reads, size_t read_count, const struct dr_options *options,
                      struct dr_error *error);

/* After everything was read: payloads that have only a CRC of the whole. */
int dr_load_plan_check_sums(const struct dr_load_plan *plan, struct dr_error *error);

/* Another descriptor of the file, through the page cache. */
int dr_load_file_open(const struct dr_load_plan *plan, const struct dr_load_file *file, int *fd, struct dr_error *error);
void dr_load_file_close(struct dr_load_file *file);
void dr_load_plan_destroy(struct dr_load_plan *plan);

#endif
