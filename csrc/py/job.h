/* One call of dr_load with everything it holds: filled step by step, freed by job_free whatever was filled. */
#ifndef DCPRING_JOB_H
#define DCPRING_JOB_H

#include "tensors.h"

#include "../core/load.h"

struct job {
    const char **names;
    Py_ssize_t name_count;
    struct dr_options options;
    struct tensors tensors;
    struct dr_read *reads;
    Py_ssize_t count;
    int64_t *ints; /* sizes, offsets and lengths of all reads */
};

int job_init(struct job *job, struct module_state *state, PyObject *names, PyObject *options, Py_ssize_t count);
/* Loads, without the GIL; (bytes, cached_bytes, engine, direct). */
PyObject *job_run(struct module_state *state, const char *directory, struct job *job);
void job_free(struct job *job);

#endif
