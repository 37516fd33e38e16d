/* One call of dr_load with everything it holds: filled step by step, freed by job_free whatever was filled. */
#ifndef DCPRING_JOB_H
#define DCPRING_JOB_H

#include "input.h"
#include "tensors.h"

#include "data/dequantise.h"

struct job {
    PyObject *input_object; /* borrowed, and taken */
    struct dr_input *input;
    struct dr_options options;
    struct tensors tensors;
    struct tensors scales; /* of the reads that are quantised */
    struct dr_read *reads;
    struct dr_quantised *forms; /* of each read, where it is quantised */
    Py_ssize_t count;
    int64_t *ints; /* sizes, offsets and lengths of all reads */
};

int job_init(struct job *job, struct module_state *state, PyObject *input, PyObject *options, Py_ssize_t count);
/* Loads, without the GIL; (bytes, cached_bytes, engine, direct). */
PyObject *job_run(struct module_state *state, struct job *job);
void job_free(struct job *job);

#endif
