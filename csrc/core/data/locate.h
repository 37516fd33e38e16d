/* Finding out what records are that the metadata says little about, by looking at them; at many of them at once. */
#ifndef DCPRING_LOCATE_H
#define DCPRING_LOCATE_H

#include "base/control.h"
#include "io/input.h"
#include "record/record.h"

/* One record to be understood: dr_record_locate for many. */
struct dr_lookup {
    size_t file;
    uint64_t offset, length;
    struct dr_located located;
};

/* The lookups come sorted by file and offset. */
int dr_locate(struct dr_input *input, struct dr_lookup *lookups, size_t count, const struct dr_control *control,
              struct dr_error *error);

#endif
