/* Checking one record, and where its faults are noted. Made and freed by verify.c; used by any thread. */
#ifndef DCPRING_VERIFY_RECORD_H
#define DCPRING_VERIFY_RECORD_H

#include "data/verify.h"

/* Data of a record that are too large to be looked at with its headers: to be streamed. */
struct dr_verify_part {
    size_t check;
    uint64_t offset, size;
    const uint8_t *crcs; /* of its blocks; NULL: whole_crc is of all of it, and sums has its blocks' */
    uint32_t whole_crc;
    uint32_t *sums;
    atomic_bool incomplete; /* some block could not be read */
};

/* What is known of a record's problems; guarded by the lock. */
struct dr_verify_noted {
    uint32_t last, count; /* of its problems: the index of the last one, and how many are kept */
};

struct dr_verify {
    struct dr_input *input;
    struct dr_check *checks;
    size_t count;
    bool quick;
    const struct dr_options *options;
    struct dr_workers workers; /* who read headers */
    pthread_mutex_t lock;      /* of all below */
    struct dr_findings *findings;
    struct dr_verify_noted *noted; /* by check */
    struct dr_verify_part *parts;
    size_t part_count, part_room;
    atomic_bool no_memory;
};

/*
 * Checks a record by its views: `view` and `ahead` are two over the same bytes, for what lies at its end and at its
 * beginning. What does not fit in a view becomes a part.
 */
void dr_verify_record(struct dr_verify *verify, size_t check, struct dr_view *view, struct dr_view *ahead,
                      uint64_t *crc_ns);

/* Checks, or sums, the CRC blocks of a part that lie in [lo, hi), which data holds. */
void dr_verify_blocks(struct dr_verify *verify, struct dr_verify_part *part, const uint8_t *data, uint64_t lo,
                      uint64_t hi, uint64_t *crc_ns);

/* Notes a problem. */
void dr_verify_note(struct dr_verify *verify, const struct dr_problem *problem);

/* Notes that bytes have another CRC than is stored. */
void dr_verify_note_crc(struct dr_verify *verify, size_t check, uint64_t offset, uint64_t length, uint32_t expected,
                        uint32_t found);

/* In order; neighbours with the same fault become one. */
void dr_verify_sort(struct dr_verify *verify);

#endif
