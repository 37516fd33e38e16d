/* A list of tensors as the core sees them. The caller keeps the Python list alive for as long. */
#ifndef DCPRING_TENSORS_H
#define DCPRING_TENSORS_H

#include "module.h"

#include "data/save.h"

struct tensors {
    const struct torch_shim *shim;
    Py_ssize_t count;
    AtenTensorHandle *handles; /* owned */
    struct tensor_view *views;
};

int tensors_init(struct tensors *tensors, struct module_state *state, PyObject *list);
void tensors_free(struct tensors *tensors);
/* Looks at them again: Python may have given them other memory, or another shape. */
void tensors_look(struct tensors *tensors);

/* Whether its elements lie one behind the other. */
bool view_is_contiguous(const struct tensor_view *view);

/* What the core is to write of a view, whose memory stays the tensor's. */
struct dr_source view_source(const struct tensor_view *view);

/* A key for digests, of an object with so many bytes; to be freed with PyMem_Free. NULL with an exception. */
struct dr_digest_key *parse_digest_key(PyObject *bytes);

/* dcpring._C.Tensors */
struct held_tensors {
    PyObject_HEAD
    PyObject *list;
    struct tensors tensors;
};

/*
 * What a Tensors holds, as it is now, for the length of a call; NULL with an exception when the object is something
 * else.
 */
const struct tensors *held_tensors(struct module_state *state, PyObject *object);

#endif
