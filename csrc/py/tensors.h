/* A list of tensors as the core sees them. The caller keeps the Python list alive for as long. */
#ifndef DCPRING_TENSORS_H
#define DCPRING_TENSORS_H

#include "module.h"

#include "record/record.h"

struct tensors {
    const struct torch_shim *shim;
    Py_ssize_t count;
    AtenTensorHandle *handles; /* owned */
    struct tensor_view *views;
};

int tensors_init(struct tensors *tensors, struct module_state *state, PyObject *list);
void tensors_free(struct tensors *tensors);

/* Whether its elements lie one behind the other. */
bool view_is_contiguous(const struct tensor_view *view);

/* dcpring._C.Tensors */
struct held_tensors {
    PyObject_HEAD
    PyObject *list;
    struct tensors tensors;
};

/* What a Tensors holds; NULL with an exception when the object is something else. */
const struct tensors *held_tensors(struct module_state *state, PyObject *object);

#endif
