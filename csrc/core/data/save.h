/*
 * Writing one data file: records and byte strings, one behind the other.
 *
 * The file is one stream of bytes. A window of sources is laid out first;
 * then workers take the stream's blocks in order, gather each block's bytes
 * into an I/O buffer, sum them while they are in cache, and write the buffer.
 * A record's tail needs the sums of its whole payload, which lies in lower
 * blocks: whoever fills the tail's block waits for them, and as blocks are
 * taken in order that wait always ends.
 *
 * What does not fill a block at the end of a window is carried over to the
 * next one. Sources are only looked at during dr_writer_write.
 */
#ifndef DCPRING_SAVE_H
#define DCPRING_SAVE_H

#include "base/digest.h"
#include "io/options.h"
#include "io/sync.h"
#include "io/workers.h"
#include "record/record.h"

/* One tensor, one part of a tensor, or one string of bytes (shape.dtype NULL). */
struct dr_source {
    struct dr_shape shape; /* of the whole tensor */
    const void *data;
    const int64_t *strides; /* elements; NULL: `data` is contiguous */
    uint64_t size;          /* bytes of this source */
    uint64_t total;         /* bytes of the whole payload; more than size when it comes in parts */
    uint64_t part_offset;   /* bytes of the payload that earlier parts held */
};

struct dr_placed {
    uint64_t offset, length; /* the record in the file */
    uint64_t payload_offset; /* in the file */
    uint64_t payload_size;
    const uint32_t *crcs;   /* dr_crc_count() of them; the writer's, until its next call */
    const uint8_t *digests; /* as many, of DR_DIGEST_BYTES each; NULL without dr_writer_digest */
};

struct dr_writer;

/* Creates dir/name, which must not exist. size_hint: what the file will hold, roughly; 0 when unknown. */
int dr_writer_open(struct dr_writer **out, const char *dir, const char *name, uint64_t size_hint,
                   const struct dr_options *options, struct dr_error *error);

/*
 * From now on digests are made of each CRC block of the sources, with this key, which is the caller's; NULL: none. No
 * source may come in parts then.
 */
void dr_writer_digest(struct dr_writer *writer, const struct dr_digest_key *key);

/*
 * Appends the sources. A tensor in parts comes one part a call, in order and
 * with nothing in between; placed is set with each, and its crcs are complete
 * with the last.
 */
int dr_writer_write(struct dr_writer *writer, const struct dr_source *sources, size_t count, struct dr_placed *placed,
                    const struct dr_control *control, struct dr_error *error);

/*
 * For callers of small windows: from now on dr_writer_write does not wait for the blocks that it has filled. A failure
 * of theirs comes with a later call, and the watch counts them then.
 */
void dr_writer_overlap(struct dr_writer *writer);

/*
 * Writes what is left, cuts the file to its length, and makes it as durable as options.sync says, or, where it is given
 * a set of syncs, lets these do so. (Not its name: see dr_syncs_add_directory.)
 */
int dr_writer_finish(struct dr_writer *writer, struct dr_syncs *later, const struct dr_control *control,
                     struct dr_error *error);

struct dr_writer_stats {
    uint64_t bytes;
    const char *engine; /* NULL before anything was written */
    bool direct;
    bool checksum; /* the crcs of dr_placed are set */
};
void dr_writer_stats(const struct dr_writer *writer, struct dr_writer_stats *out);

/* Frees the writer; the file is removed unless dr_writer_finish succeeded. NULL is allowed; a forked child's call does
 * nothing. */
void dr_writer_close(struct dr_writer *writer);

#endif
