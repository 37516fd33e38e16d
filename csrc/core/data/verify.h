/*
 * Checking a checkpoint: every byte that something covers is read once and
 * compared with what covers it. Nothing stops at the first fault: what is
 * wrong is collected, record by record.
 *
 * Covered are: of our tensors the payload by its block CRCs, and head and tail
 * by what dr_record_head and dr_record_tail make of shape and place; of our
 * other records, and of raw ones, all bytes by block CRCs; of torch.save's
 * archives every entry by its CRC, and its headers by each other.
 *
 * The records of a file lie side by side. Where several fit in a block they
 * are read with it and checked in memory. Of larger ones the headers are read
 * first, by many threads, which shows where the data are; these are streamed.
 */
#ifndef DCPRING_VERIFY_H
#define DCPRING_VERIFY_H

#include "io/stream.h"
#include "record/record.h"

enum dr_check_kind {
    DR_CHECK_TENSOR, /* as dr_record_head makes them */
    DR_CHECK_BYTES,  /* the payload is all of it */
    DR_CHECK_OTHER,  /* what torch.save made, or anything */
    DR_CHECK_RAW,    /* the payload is all of it: a tensor's elements, as files of safetensors have them */
};

enum dr_unverified {
    DR_UNVERIFIED_BARE = 1,   /* bytes that nothing covers */
    DR_UNVERIFIED_PACKED = 2, /* a zip entry that is compressed or encrypted */
};

/* A record. Two that share bytes are a fault; whoever has two names for one record asks for it once. */
struct dr_check {
    enum dr_check_kind kind;
    size_t file; /* index of its name */
    uint64_t offset, length;
    uint64_t payload_offset, payload_size; /* not of DR_CHECK_OTHER */
    const uint8_t *crcs;                   /* dr_crc_count() little-endian CRCs of the payload, or NULL */
    struct dr_shape shape;                 /* what the metadata says; dtype NULL where it says nothing */
    bool transformed;                      /* by an extension: it may be anything */
    unsigned unverified;                   /* out: what of it could not be checked (enum dr_unverified) */
};

struct dr_problem {
    size_t check;            /* index of the record */
    uint64_t offset, length; /* in the file */
    const char *what;        /* static */
    int err;                 /* errno, 0 for none */
    bool of_file;            /* as a whole: offset and length mean nothing */
    bool has_crcs;
    uint32_t expected, found;
};

struct dr_findings {
    struct dr_problem *problems; /* by file and offset */
    size_t count;                /* at least one of every bad record; neighbours that have the same fault are one */
    size_t room;
    uint64_t unkept;   /* more, of records with very many */
    uint64_t repeated; /* blocks that could be read only at the second attempt */
};

/*
 * quick: structure and sizes only, of tensors no bytes. Fails only where checking itself cannot go on. The findings
 * are the caller's to free with dr_findings_destroy, whatever is returned.
 */
int dr_verify(struct dr_input *input, struct dr_check *checks, size_t count, bool quick,
              const struct dr_options *options, const struct dr_control *control, struct dr_findings *findings,
              struct dr_stream_stats *stats, struct dr_error *error);

void dr_findings_destroy(struct dr_findings *findings);

#endif
