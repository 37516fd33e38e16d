/*
 * DCP's Metadata as a pickle, written from tables: what pickle.dumps would
 * make of the same objects, without making them.
 *
 * The pickle (protocol 4) names the same classes and sets the same attributes
 * as stock DCP's; every unpickler of `.metadata` reads it.
 */
#ifndef DCPRING_METADATA_PICKLE_H
#define DCPRING_METADATA_PICKLE_H

#include "plan/storage_index.h"

/* A pickle without its PROTO and STOP that leaves one object on the stack and uses no memo. */
struct dr_fragment {
    const void *data;
    size_t size;
};

struct dr_metadata_parts {
    const struct dr_fragment *properties; /* one for each of the table's properties */
    struct dr_fragment storage_meta, version;
    bool mappings; /* planner_data is the names' paths, else None */
};

/*
 * Rows of one name must follow each other; names that no row has are left out. storage: one for each row, or NULL:
 * storage_data is None. The caller frees out with dr_buffer_destroy.
 */
int dr_metadata_pickle(const struct dr_table *table, const struct dr_storage_index *storage,
                       const struct dr_metadata_parts *parts, struct dr_buffer *out, struct dr_error *error);

#endif
