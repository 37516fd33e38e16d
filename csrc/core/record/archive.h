/*
 * The zip around a record, whoever wrote it: its directory, and where the
 * entries' bytes lie. Only what torch.save makes is understood: one file, no
 * comment at its end.
 *
 * Everything read here is untrusted: each offset and length is checked against
 * the record before it is used.
 */
#ifndef DCPRING_ARCHIVE_H
#define DCPRING_ARCHIVE_H

#include "base/bytes.h"
#include "io/view.h"
#include "record/zip.h"

struct dr_archive {
    struct dr_view *view;
    uint64_t offset, length; /* the record in the file */
    struct dr_error *error;
};

/* Bytes of the record, from its start; NULL when it has none there. `ahead` as for a view, but a length. */
const uint8_t *dr_archive_look(const struct dr_archive *archive, uint64_t offset, size_t size, uint64_t ahead);

/* All offsets count from the record's start. */
struct dr_directory {
    uint64_t offset, size, entries;
    uint64_t next, left; /* the entry that dr_archive_next will read, and how many are left */
};

struct dr_entry {
    const char *name; /* valid until the next look */
    size_t name_size;
    uint64_t header; /* of the local header */
    uint64_t size, packed_size;
    uint32_t crc, time;
    unsigned flags, method;
};

/* Finds the directory; false when there is none, or on an error. */
bool dr_archive_open(const struct dr_archive *archive, struct dr_directory *out);
/* The directory's next entry; false when there is none, or it is not in order. */
bool dr_archive_next(const struct dr_archive *archive, struct dr_directory *directory, struct dr_entry *out);
/* Where an entry's bytes start; false when they do not fit in the record. */
bool dr_archive_data(const struct dr_archive *archive, const struct dr_entry *entry, uint64_t *start);

#endif
