/* A list of tensors as the core sees them. The caller keeps the Python list alive for as long. */
#ifndef DCPRING_TENSORS_H
#define DCPRING_TENSORS_H

#include "module.h"

#include "../core/record.h"

struct tensors {
    const struct torch_shim *shim;
    Py_ssize_t count;
    AtenTensorHandle *handles; /* owned */
    struct tensor_view *views;
};

int tensors_init(struct tensors *tensors, struct module_state *state, PyObject *list);
void tensors_free(struct tensors *tensors);

#endif
