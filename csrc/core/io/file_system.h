/* What kind of file system a path lies on. */
#ifndef DCPRING_FILE_SYSTEM_H
#define DCPRING_FILE_SYSTEM_H

#include "base/error.h"

#include <stdbool.h>

/* Magic numbers, see statfs(2). */
#define DR_TMPFS UINT64_C(0x01021994)
#define DR_FUSE UINT64_C(0x65735546)

/* The magic number of the file system that path lies on, or its nearest ancestor that exists. */
int dr_file_system(const char *path, uint64_t *out, struct dr_error *error);

/* Whether it is the one with this magic number; false where that cannot be told. */
bool dr_file_system_is(const char *path, uint64_t magic);

#endif
