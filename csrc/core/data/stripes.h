/*
 * Writing one file together: each of several processes writes some stripes of
 * it, [lo, hi), and no other process writes there.
 *
 * Tensors lie in the file one behind the other. A process holds boxes of them,
 * its patches. A stripe of which it holds everything is gathered from these
 * when it is written. Of other stripes every process fills what it holds into
 * memory that they share (dr_stripes_fill), and when all have done so, one of
 * them writes it from there.
 *
 * Workers take the stripes in order; see io/output.h for the file.
 */
#ifndef DCPRING_STRIPES_H
#define DCPRING_STRIPES_H

#include "io/output.h"
#include "record/record.h"

/* The bytes of a tensor in the file. */
struct dr_payload {
    uint64_t offset, size;
};

/* A box of a tensor, and where its elements are. */
struct dr_patch {
    struct dr_payload payload;        /* of the whole tensor; found by it, so it comes first */
    struct dr_shape shape;            /* of the whole tensor */
    const int64_t *offsets, *lengths; /* elements */
    const int64_t *strides;           /* of the memory, in elements */
    const void *data;
};

struct dr_stripe {
    uint64_t lo, hi; /* lo is a multiple of DR_ALIGNMENT; at most a block */
    uint8_t *shared; /* where it is put together; NULL: the patches have all of it */
    uint32_t *crcs;  /* dr_stripe_crcs() of them, to be written; NULL: none are summed */
};

struct dr_stripes {
    const struct dr_stripe *stripes;
    size_t count;
    const struct dr_patch *patches; /* in the order of their payloads */
    size_t patch_count;
    const struct dr_payload *payloads; /* of all tensors in the stripes, in order */
    size_t payload_count;
};

/* How many CRCs a stripe has: one for each grid block of each payload in it. */
size_t dr_stripe_crcs(const struct dr_stripes *stripes, const struct dr_stripe *stripe);

/* Puts what there is of the patches into the stripes' shared memory. */
int dr_stripes_fill(const struct dr_stripes *stripes, unsigned workers, const struct dr_control *control,
                    struct dr_error *error);

/*
 * Fills blocks with the stripes and begins to write them, and gives their CRCs. The memory that the stripes came from
 * is the caller's again; a failure to write them may come with a later call, or with dr_output_sync. The last bytes of
 * the file are padded: it is to be cut to its length.
 * expected: bytes that all calls for this output will write, so that no more is allocated for them.
 */
int dr_stripes_write(const struct dr_stripes *stripes, struct dr_output *output, uint64_t expected,
                     const struct dr_control *control, struct dr_error *error);

#endif
