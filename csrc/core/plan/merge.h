/*
 * The coordinator's work: the plans of all ranks become one.
 *
 * dr_merge_add reads one rank's encoded plan and sorts its rows into groups:
 * a group is one object or one chunk, with the ranks that hold it (its
 * holders). dr_merge_check says whether the chunks make up their tensors;
 * dr_merge_assign gives every group, or the pieces it is cut into, a writer.
 *
 * Time and memory are linear in the rows added, but for sorting.
 */
#ifndef DCPRING_MERGE_H
#define DCPRING_MERGE_H

#include "plan/table.h"

/* How far a merge is. dr_merge_enter changes it, and every other function says in which it may be called. */
enum dr_merge_phase {
    DR_MERGE_ADDING,   /* ranks' plans are being added */
    DR_MERGE_BROKEN,   /* a plan was bad, of which something is left: nothing can be added or checked */
    DR_MERGE_CHECKED,  /* holders and order are set */
    DR_MERGE_ASSIGNED, /* and so are the pieces, and the sums */
};

/* What is written as one item: a group, or some of its rows along dimension 0. */
struct dr_piece {
    uint32_t group;
    uint32_t writer;
    int64_t start, rows; /* along dimension 0, relative to the chunk; rows is -1 for a whole group */
};

struct dr_rank_sum {
    uint64_t items, bytes; /* to be written; objects count as no bytes */
    uint64_t removed;      /* rows held that others write */
    uint64_t removed_bytes;
};

struct dr_merge {
    enum dr_merge_phase phase;
    struct dr_table groups; /* a row for each group, by first appearance */
    uint32_t world;

    struct dr_hash by_chunk; /* groups by name and offsets */
    uint32_t *name_first;    /* a name's first group */
    size_t name_first_room;

    uint32_t *row_group;       /* of every row added; DR_NO_GROUP for rows with nothing to store */
    uint32_t *row_fingerprint; /* fingerprints, 0 for rows without */
    size_t row_count, row_room, fingerprint_room;
    uint64_t *rank_rows; /* world + 1: where each rank's rows start */
    uint32_t added;      /* ranks so far; they come in order */
    uint32_t *tied;      /* the group that a group is the same memory as, DR_NO_GROUP for none; NULL: none is */

    /* from DR_MERGE_CHECKED on */
    uint32_t *holders;      /* ranks, group by group */
    uint64_t *holder_start; /* groups.count + 1 */
    uint32_t *order;        /* groups by name, then offsets */

    /* in DR_MERGE_ASSIGNED */
    struct dr_piece *pieces; /* in the order of the metadata: by group in `order`, then by first row */
    size_t piece_count, piece_room;
    uint64_t *group_pieces; /* groups.count + 1, by `order`: where the pieces of each start */
    uint32_t *order_of;     /* group -> its place in order */
    struct dr_rank_sum *sums;
};

#define DR_NO_GROUP UINT32_MAX

/* ---- looking into a merge ---- */

/* From DR_MERGE_CHECKED on: the ranks that hold a group, in ascending order, and how many they are. */
static inline const uint32_t *dr_merge_holders(const struct dr_merge *merge, uint32_t group) {
    return merge->holders + merge->holder_start[group];
}

static inline size_t dr_merge_holder_count(const struct dr_merge *merge, uint32_t group) {
    return merge->holder_start[group + 1] - merge->holder_start[group];
}

/* In DR_MERGE_ASSIGNED: a group's pieces are merge->pieces[from] to merge->pieces[to]; there is one at least. */
struct dr_piece_range {
    uint64_t from, to;
};

static inline struct dr_piece_range dr_merge_pieces(const struct dr_merge *merge, uint32_t group) {
    uint32_t place = merge->order_of[group];
    return (struct dr_piece_range){merge->group_pieces[place], merge->group_pieces[place + 1]};
}

/* ---- the phases ---- */

int dr_merge_init(struct dr_merge *merge, uint32_t world, struct dr_error *error);
void dr_merge_destroy(struct dr_merge *merge);

/* Goes from one phase to another; from assigned also back to checked, for another assignment. */
void dr_merge_enter(struct dr_merge *merge, enum dr_merge_phase phase);

/*
 * While adding: the next rank's plan. fingerprints: one for each row that is DR_ROW_HASHED, or fingerprint_count 0. A
 * bad plan breaks the merge. Here and below, control is NULL where nobody asks to stop.
 */
int dr_merge_add(struct dr_merge *merge, const void *plan, size_t size, const uint32_t *fingerprints,
                 size_t fingerprint_count, const struct dr_control *control, struct dr_error *error);

/*
 * While adding, after all ranks: says that two rows of a rank are the same memory. Their groups get the same writer
 * where they have the same holders, so that the bytes can be written once.
 */
int dr_merge_tie(struct dr_merge *merge, uint32_t rank, size_t row, size_t first, struct dr_error *error);

/*
 * While adding, after all ranks: chunks lie within their tensors and do not overlap, and with `complete` nothing is
 * missing. Then it is checked; where that fails, error->item is the group concerned, and it is still adding.
 */
int dr_merge_check(struct dr_merge *merge, bool complete, const struct dr_control *control, struct dr_error *error);

/* Checked: a byte for each group, 1 where its holders sent different fingerprints. The caller frees it. */
int dr_merge_differing(const struct dr_merge *merge, uint8_t **out, struct dr_error *error);
/* The fingerprint that a rank sent for a group; 0 for none. Linear in the rank's rows. */
uint32_t dr_merge_fingerprint(const struct dr_merge *merge, uint32_t group, uint32_t rank);

enum dr_strategy {
    DR_BALANCED,      /* every holder may write */
    DR_SPLIT,         /* the same, and large groups are cut */
    DR_FIRST_REPLICA, /* only ranks that are the lowest holder of something */
    DR_LIMITED,       /* at most `limit` ranks */
    DR_PER_HOST,      /* at most one rank of each host */
};

struct dr_assignment {
    enum dr_strategy strategy;
    uint32_t limit;
    const uint32_t *hosts; /* of each rank, for DR_PER_HOST */
    uint64_t piece_bytes;  /* no piece is smaller, for DR_SPLIT */
};

/* Checked or assigned. When it fails, it is checked. */
int dr_merge_assign(struct dr_merge *merge, const struct dr_assignment *assignment, const struct dr_control *control,
                    struct dr_error *error);

/* ---- assigned ---- */

/*
 * What goes back to a rank: which of its rows it writes, a bitmap, and which of them in pieces. The caller frees out.
 */
int dr_merge_reply(const struct dr_merge *merge, uint32_t rank, struct dr_buffer *out, struct dr_error *error);

/* The same, taken apart: `kept` is called for every item to be written, in order of rows; start 0, rows -1: whole. */
typedef int dr_reply_row(void *context, size_t row, int64_t start, int64_t rows);
int dr_reply_read(const void *data, size_t size, size_t row_count, dr_reply_row *kept, void *context,
                  struct dr_error *error);

/* The pieces that a rank writes, as indices of merge->pieces in the order of dr_reply_read; *count of them. */
int dr_merge_items(const struct dr_merge *merge, uint32_t rank, uint32_t **out, size_t *count, struct dr_error *error);

/* One row of a rank that other ranks hold too. */
struct dr_shared_row {
    size_t row;
    uint32_t group, writer;
    const uint32_t *holders;
    size_t holder_count;
    uint64_t before, bytes; /* bytes of the shared groups before this one, and its own */
};

/*
 * Calls `shared` for each of a rank's rows that has several holders and is not cut, in order. `before` is
 * dr_merge_shared_bytes's.
 */
typedef int dr_shared(void *context, const struct dr_shared_row *row);
int dr_merge_shared(const struct dr_merge *merge, uint32_t rank, const uint64_t *before, dr_shared *shared,
                    void *context);
/* For each group the bytes of all groups before it that have several holders. The caller frees it. */
uint64_t *dr_merge_shared_bytes(const struct dr_merge *merge);

/* All pieces as a table: the chunks of the checkpoint. */
int dr_merge_table(const struct dr_merge *merge, struct dr_table *out, struct dr_error *error);

/* ---- assign.c ---- */

/* One thing that some ranks hold and one must take. */
struct dr_share {
    uint64_t bytes;
    const uint32_t *holders; /* ascending */
    size_t holder_count;
    uint32_t owner; /* out */
};

/*
 * Gives each share an owner among its holders that are allowed (NULL: all are), so that the largest load is small:
 * largest shares first, each to the least loaded, then moves while they help. Every share must have an
 * allowed holder. load (one for each rank) is added to. The same input gives the same result.
 */
int dr_assign(struct dr_share *shares, size_t count, const uint8_t *allowed, uint64_t *load, uint32_t world,
              const struct dr_control *control, struct dr_error *error);

#endif
