/*
 * Notes what the core does to the file system, for tests of crashes.
 *
 * While recording, every call that changes a file system is noted in a log once
 * it is over: what it was, by names and by numbers of inodes (with those of
 * their devices), the bytes that were written, and when it began and ended
 * (CLOCK_MONOTONIC). A note is one write, appended, so that any number of
 * threads and processes can share a log. tests/crash/recording.py reads it,
 * and adds the calls that Python makes.
 *
 * The calls go on to the table that was there before, faults included (see
 * sys_fault.h). As there, nothing else may use the core while recording begins
 * or ends.
 */
#ifndef DCPRING_SYS_RECORD_H
#define DCPRING_SYS_RECORD_H

#include <stdint.h>

enum dr_record_call {
    DR_RECORD_CREATE = 1, /* file `inode` as `name` in `directory` */
    DR_RECORD_MKDIR,      /* directory `inode` as `name` in `directory` */
    DR_RECORD_WRITE,      /* `size` bytes, which follow the name, at `offset` of `inode` */
    DR_RECORD_SUBMIT,     /* the same, which begins now; `id` tells it from others of this process */
    DR_RECORD_COMPLETE,   /* what `id` began is over; `size` bytes of it were written */
    DR_RECORD_RESIZE,     /* `inode` has `size` bytes now */
    DR_RECORD_ALLOCATE,   /* `inode` has at least `size` bytes now */
    DR_RECORD_FDATASYNC,  /* of `inode` */
    DR_RECORD_FSYNC,      /* of `inode` */
    DR_RECORD_RENAME,     /* `name` in `directory` to `other` */
    DR_RECORD_EXCHANGE,   /* `name` in `directory` with `other` */
    DR_RECORD_UNLINK,     /* `name` in `directory` */
    DR_RECORD_LINK,       /* file `inode`, which has a name, as `name` in `directory`, too */
};

/* What a note begins with, as it lies in memory; name, other and data follow it. */
struct dr_record_note {
    uint32_t call, process;
    uint64_t begin_ns, end_ns;
    uint64_t inode, directory, id;
    uint64_t offset, size;
    uint32_t name_size, other_size, data_size, unused;
};

/* Appends to the file behind the descriptor, which stays the caller's, until it is stopped. */
void dr_record_start(int fd);

/* Gives the table back that was there before; returns 0, or -errno of the first note that could not be written. */
int dr_record_stop(void);

#endif
