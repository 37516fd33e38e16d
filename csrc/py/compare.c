/* dcpring._C.compare: how two lists of tensors differ. */
#include "tensors.h"

#include "tools/compare.h"

/* The elements of both, if they can be compared where they are. */
static bool count_elements(const struct tensor_view *a, const struct tensor_view *b, uint64_t *count) {
    if (a->kind != TENSOR_PLAIN || b->kind != TENSOR_PLAIN || a->dtype != b->dtype || a->ndim != b->ndim)
        return false;
    for (int64_t d = 0; d < a->ndim; d++)
        if (a->sizes[d] != b->sizes[d])
            return false;
    struct dr_shape shape = {a->dtype, (int)a->ndim, a->sizes};
    uint64_t bytes;
    if (!dr_shape_bytes(&shape, &bytes) || (bytes && !(view_is_contiguous(a) && view_is_contiguous(b))))
        return false;
    *count = bytes / a->dtype->item_size;
    return true;
}

static int compare_all(const struct tensors *a, const struct tensors *b, const struct dr_tolerance *tolerance,
                       struct dr_difference *out) {
    for (Py_ssize_t i = 0; i < a->count; i++) {
        uint64_t count;
        if (!count_elements(&a->views[i], &b->views[i], &count)) {
            PyErr_Format(PyExc_ValueError, "tensors %zd are not contiguous CPU memory of one dtype and shape", i);
            return -1;
        }
    }
    struct gil gil;
    gil_release(&gil);
    for (Py_ssize_t i = 0; i < a->count; i++) {
        uint64_t count = 0;
        count_elements(&a->views[i], &b->views[i], &count);
        dr_compare(a->views[i].dtype, a->views[i].data, b->views[i].data, count, tolerance, &out[i]);
    }
    gil_take(&gil);
    return 0;
}

static PyObject *differences_list(const struct dr_difference *differences, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        const struct dr_difference *d = &differences[i];
        PyObject *entry = Py_BuildValue("(KKKKLLdd)", (unsigned long long)d->changed, (unsigned long long)d->differing,
                                        (unsigned long long)d->nans[0], (unsigned long long)d->nans[1],
                                        (long long)d->first, (long long)d->farthest, d->distance, d->relative);
        if (!entry || PyList_SetItem(list, i, entry) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *compare(PyObject *module, PyObject *args) {
    PyObject *left, *right, *result = NULL;
    struct dr_tolerance tolerance;
    struct module_state *state = module_state(module);
    if (!PyArg_ParseTuple(args, "OOdd", &left, &right, &tolerance.absolute, &tolerance.relative))
        return NULL;
    const struct tensors *a = held_tensors(state, left), *b = a ? held_tensors(state, right) : NULL;
    if (!b)
        return NULL;
    if (a->count != b->count)
        return PyErr_Format(PyExc_ValueError, "%zd tensors against %zd", a->count, b->count);
    struct dr_difference *differences = PyMem_Calloc((size_t)a->count + 1, sizeof *differences);
    if (!differences)
        return PyErr_NoMemory();
    if (compare_all(a, b, &tolerance, differences) == 0)
        result = differences_list(differences, a->count);
    PyMem_Free(differences);
    return result;
}

PyMethodDef compare_methods[] = {
    {"compare", compare, METH_VARARGS,
     "compare(a, b, atol, rtol) -> for each pair (changed, differing, NaN in a, in b, first, farthest, distance, "
     "relative): see csrc/core/tools/compare.h"},
    {NULL, NULL, 0, NULL},
};
