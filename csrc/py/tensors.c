/* dcpring._C.Tensors: a list of tensors as the core sees them, kept from one call to the next. */
#include "tensors.h"

#include "base/crc.h"

#include <stdlib.h>

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

const struct tensors *held_tensors(struct module_state *state, PyObject *object) {
    if ((PyObject *)Py_TYPE(object) != state->tensors_type) {
        PyErr_SetString(PyExc_TypeError, "expected a Tensors");
        return NULL;
    }
    struct tensors *tensors = &((struct held_tensors *)object)->tensors;
    tensors_look(tensors);
    return tensors;
}

static PyObject *tensors_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *list;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "O!", &PyList_Type, &list))
        return NULL;
    struct held_tensors *self = (struct held_tensors *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->list = PyList_GetSlice(list, 0, PyList_Size(list)); /* nobody else's, so that it cannot change */
    if (!self->list || tensors_init(&self->tensors, state_of((PyObject *)self), self->list) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void tensors_dealloc(PyObject *object) {
    struct held_tensors *self = (struct held_tensors *)object;
    if (self->tensors.shim)
        tensors_free(&self->tensors);
    Py_XDECREF(self->list);
    free_instance(object);
}

static PyObject *kinds(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct tensors *tensors = held_tensors(state_of(object), object);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, tensors->count);
    for (Py_ssize_t i = 0; bytes && i < tensors->count; i++)
        PyBytes_AsString(bytes)[i] = (char)tensors->views[i].kind;
    return bytes;
}

bool view_is_contiguous(const struct tensor_view *view) {
    int64_t stride = 1;
    for (int64_t d = view->ndim; d-- > 0; stride *= view->sizes[d])
        if (view->sizes[d] != 1 && view->strides[d] != stride)
            return false;
    return true;
}

static PyObject *crcs(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct tensors *tensors = held_tensors(state_of(object), object);
    PyObject *list = PyList_New(tensors->count);
    for (Py_ssize_t i = 0; list && i < tensors->count; i++) {
        const struct tensor_view *view = &tensors->views[i];
        struct dr_shape shape = {view->dtype, (int)view->ndim, view->sizes};
        uint64_t bytes = 0;
        bool plain = view->kind == TENSOR_PLAIN && view_is_contiguous(view) && dr_shape_bytes(&shape, &bytes);
        struct gil gil;
        gil_release_for(&gil, bytes);
        uint32_t sum = plain ? dr_crc32(0, view->data, bytes) : 0;
        gil_take(&gil);
        PyObject *crc = plain ? PyLong_FromUnsignedLong(sum) : Py_NewRef(Py_None);
        if (!crc || PyList_SetItem(list, i, crc) < 0)
            Py_CLEAR(list);
    }
    return list;
}

struct pointer {
    uintptr_t address;
    Py_ssize_t index;
};

static int by_address(const void *a, const void *b) {
    const struct pointer *left = a, *right = b;
    if (left->address != right->address)
        return left->address < right->address ? -1 : 1;
    return left->index < right->index ? -1 : left->index > right->index;
}

static PyObject *list_shared(const struct pointer *pointers, Py_ssize_t count) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        bool shared = (i > 0 && pointers[i - 1].address == pointers[i].address) ||
                      (i + 1 < count && pointers[i + 1].address == pointers[i].address);
        PyObject *index = shared ? PyLong_FromSsize_t(pointers[i].index) : NULL;
        if (shared && (!index || PyList_Append(list, index) < 0))
            Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}

static PyObject *shared(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct tensors *tensors = held_tensors(state_of(object), object);
    struct pointer *pointers = PyMem_Malloc(((size_t)tensors->count + 1) * sizeof *pointers);
    if (!pointers)
        return PyErr_NoMemory();
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < tensors->count; i++)
        if (tensors->views[i].kind == TENSOR_PLAIN && tensors->views[i].data)
            pointers[count++] = (struct pointer){(uintptr_t)tensors->views[i].data, i};
    qsort(pointers, (size_t)count, sizeof *pointers, by_address);
    PyObject *list = list_shared(pointers, count);
    PyMem_Free(pointers);
    return list;
}

struct dr_source view_source(const struct tensor_view *view) {
    struct dr_source source = {
        .shape = {view->dtype, (int)view->ndim, view->sizes}, .data = view->data, .strides = view->strides};
    dr_shape_bytes(&source.shape, &source.size);
    source.total = source.size;
    return source;
}

struct dr_digest_key *parse_digest_key(PyObject *bytes) {
    if (!PyBytes_Check(bytes) || PyBytes_Size(bytes) != DR_DIGEST_KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key for digests is %d bytes", DR_DIGEST_KEY_BYTES);
        return NULL;
    }
    struct dr_digest_key *key = PyMem_Calloc(1, sizeof *key);
    if (!key)
        return (struct dr_digest_key *)PyErr_NoMemory();
    dr_digest_key_init(key, (const uint8_t *)PyBytes_AsString(bytes));
    return key;
}

static PyMethodDef methods[] = {
    {"kinds", kinds, METH_NOARGS,
     "kinds() -> bytes: 0 plain CPU memory, 1 another device, 2 only torch.save can take it"},
    {"shared", shared, METH_NOARGS,
     "shared() -> [which of those in CPU memory begin where another one begins, by address]"},
    {"crcs", crcs, METH_NOARGS,
     "crcs() -> [CRC-32 of the elements; None where they do not lie contiguously in CPU memory]"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Tensors(list): the tensors as the core sees them"},
    {Py_tp_new, tensors_new},
    {Py_tp_dealloc, tensors_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec tensors_spec = TYPE_SPEC("Tensors", struct held_tensors, slots, 0);
