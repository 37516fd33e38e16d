/* Opening data files, and what there is to do to a directory: small calls, made from the caller's thread. */
#ifndef DCPRING_FILE_H
#define DCPRING_FILE_H

#include "base/control.h"
#include "io/sync.h"

/* "dir/name", for errors. NULL when memory is gone. */
char *dr_path_join(const char *dir, const char *name);

/*
 * Turns O_DIRECT on where options and file system allow: 1 when it is on, 0
 * when not. DR_DIRECT_ON makes a refusal an error.
 */
int dr_file_use_direct(int fd, const char *path, enum dr_direct direct, struct dr_error *error);

/*
 * Which names are durable when a directory was made: none yet; those of new directories above it; or also its own,
 * whoever has made it.
 */
enum dr_names { DR_NAMES_LATER, DR_NAMES_ABOVE, DR_NAMES_ALL };

/* mkdir -p; 1 where it was not there. */
int dr_directory_make(const char *path, enum dr_names names, struct dr_error *error);

/*
 * Creates a file, which must not exist, or with is_there fills an empty one, which must. With a set of syncs it is
 * complete and durable once these are over.
 */
int dr_directory_write(const char *dir, const char *name, bool is_there, const void *data, size_t size,
                       struct dr_syncs *syncs, const struct dr_control *control, struct dr_error *error);

/* Renames tmp, which is complete and durable, over the file called name, or removes it. With sync that is durable, too.
 */
int dr_directory_rename(const char *dir, const char *tmp, const char *name, bool sync, struct dr_error *error);

/*
 * Both: creates tmp, which must not exist, makes it durable, renames it over name, and makes that durable: name holds
 * the old bytes or the new.
 */
int dr_directory_commit(const char *dir, const char *tmp, const char *name, const void *data, size_t size, bool sync,
                        struct dr_error *error);

/*
 * Renames tmp, which is complete and durable, to name, which is one or the other at any time. A file that was called
 * name is gone then; a directory with something in it is called tmp. (Where the file system cannot exchange the names
 * of directories, name is missing for a moment, and the old directory is called tmp with ".old" behind it, for good if
 * it cannot be renamed once more.)
 */
int dr_directory_replace(const char *dir, const char *tmp, const char *name, bool sync, struct dr_error *error);

/* How one file came to be in two directories. */
enum dr_link { DR_LINK_HARD, DR_LINK_CLONE };

/*
 * Lets dir/name be the file from_dir/from, which has at least `size` bytes: by a hard link, or where there can be none
 * by a file that shares its blocks. With a set of syncs its bytes are durable once these are over, but not its name;
 * is_durable says that the old file's are already.
 */
int dr_directory_link(const char *from_dir, const char *from, const char *dir, const char *name, uint64_t size,
                      bool is_durable, struct dr_syncs *syncs, const struct dr_control *control, enum dr_link *how,
                      struct dr_error *error);

/* Removes files of dir, all that it can; names with a "/" are refused, missing ones are no error. */
int dr_directory_remove(const char *dir, const char *const *names, size_t count, struct dr_error *error);

#endif
