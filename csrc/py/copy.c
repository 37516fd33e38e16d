/* dcpring._C.copy_tensors and what belongs to it: a list of tensors copied into memory that is kept. */
#include "tensors.h"

#include "base/memory.h"
#include "data/copy.h"
#include "io/sys.h"
#include "io/workers.h"

/* Whether the elements fill one stretch of memory, each its own part of it, in whatever order. */
static bool view_is_dense(const struct tensor_view *view) {
    int64_t order[DR_MAX_DIMS];
    int64_t count = 0;
    for (int64_t d = 0; d < view->ndim; d++) {
        if (view->sizes[d] == 0)
            return true;
        if (view->sizes[d] == 1)
            continue;
        int64_t at = count++;
        for (; at > 0 && view->strides[order[at - 1]] > view->strides[d]; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    int64_t expected = 1;
    for (int64_t n = 0; n < count; n++) {
        if (view->strides[order[n]] != expected)
            return false;
        expected *= view->sizes[order[n]];
    }
    return true;
}

static bool same_strides(const struct tensor_view *a, const struct tensor_view *b) {
    for (int64_t d = 0; d < a->ndim; d++)
        if (a->sizes[d] != 1 && a->strides[d] != b->strides[d])
            return false;
    return true;
}

/*
 * Whether a tensor can be copied into another as it would be into a new one: with the same shape, dtype and, where it
 * has no gaps, the same order of memory. What has gaps is copied without.
 */
static bool fits(const struct tensor_view *source, const struct tensor_view *target) {
    if (source->kind == TENSOR_OTHER || target->kind != TENSOR_PLAIN || source->dtype != target->dtype ||
        source->ndim != target->ndim)
        return false;
    for (int64_t d = 0; d < source->ndim; d++)
        if (source->sizes[d] != target->sizes[d])
            return false;
    return view_is_dense(source) ? same_strides(source, target) : view_is_contiguous(target);
}

static const struct tensors *two(struct module_state *state, PyObject *args, const struct tensors **targets) {
    PyObject *from = PyTuple_GetItem(args, 0), *to = PyTuple_GetItem(args, 1);
    const struct tensors *sources = held_tensors(state, from);
    *targets = sources ? held_tensors(state, to) : NULL;
    if (*targets && sources->count != (*targets)->count) {
        PyErr_Format(PyExc_ValueError, "%zd tensors into %zd", sources->count, (*targets)->count);
        *targets = NULL;
    }
    return *targets ? sources : NULL;
}

static PyObject *tensors_fit(PyObject *module, PyObject *args) {
    PyObject *from, *to;
    const struct tensors *targets;
    if (!PyArg_ParseTuple(args, "OO", &from, &to))
        return NULL;
    const struct tensors *sources = two(module_state(module), args, &targets);
    if (!sources)
        return NULL;
    for (Py_ssize_t i = 0; i < sources->count; i++)
        if (!fits(&sources->views[i], &targets->views[i]))
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

/* What is to be copied; owned. */
struct copies {
    struct dr_copy *each;
    struct dr_region *regions;
    size_t count, with_region;
};

static void copies_free(struct copies *copies) {
    free(copies->each);
    free(copies->regions);
}

static int add_copy(struct copies *copies, const struct tensor_view *source, const struct tensor_view *target) {
    struct dr_shape shape = {source->dtype, (int)source->ndim, source->sizes};
    uint64_t bytes = 0;
    if (source->kind != TENSOR_PLAIN || !fits(source, target) || !dr_shape_bytes(&shape, &bytes))
        return -1;
    struct dr_region *region = NULL;
    if (bytes && !view_is_dense(source)) {
        region = &copies->regions[copies->with_region++];
        dr_region_init(region, &shape, NULL, source->sizes, source->data, source->strides);
    }
    copies->each[copies->count++] = (struct dr_copy){source->data, region, target->data, bytes};
    return 0;
}

static int list_copies(struct copies *copies, const struct tensors *sources, const struct tensors *targets,
                       const char *mask) {
    size_t gaps = 0;
    for (Py_ssize_t i = 0; i < sources->count; i++)
        gaps += mask[i] && sources->views[i].kind == TENSOR_PLAIN && !view_is_dense(&sources->views[i]);
    copies->each = dr_malloc(((size_t)sources->count + 1) * sizeof *copies->each);
    copies->regions = dr_malloc((gaps + 1) * sizeof *copies->regions);
    if (!copies->each || !copies->regions) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < sources->count; i++)
        if (mask[i] && add_copy(copies, &sources->views[i], &targets->views[i]) < 0) {
            PyErr_Format(PyExc_ValueError, "tensor %zd is no plain memory, or has not the layout of its copy", i);
            return -1;
        }
    return 0;
}

static PyObject *copy_tensors(PyObject *module, PyObject *args) {
    struct module_state *state = module_state(module);
    PyObject *from, *to;
    const char *mask;
    Py_ssize_t length;
    unsigned workers;
    const struct tensors *targets;
    if (!PyArg_ParseTuple(args, "OOy#I", &from, &to, &mask, &length, &workers))
        return NULL;
    const struct tensors *sources = two(state, args, &targets);
    if (!sources)
        return NULL;
    if (length != sources->count || workers < 1 || workers > DR_MAX_WORKERS)
        return PyErr_Format(PyExc_ValueError, "%zd marks for %zd tensors, %u workers", length, sources->count, workers);
    struct copies copies = {0};
    DR_NEW_ERROR(error);
    if (list_copies(&copies, sources, targets, mask) == 0) {
        struct gil gil;
        gil_release(&gil);
        dr_copy_all(copies.each, copies.count, workers, &gil.control, &error);
        gil_take(&gil);
    }
    copies_free(&copies);
    if (PyErr_Occurred())
        return NULL;
    if (error.kind != DR_ERROR_NONE)
        return raise_error(state, &error);
    Py_RETURN_NONE;
}

static PyObject *advise(PyObject *module, PyObject *args) {
    unsigned long long address;
    Py_ssize_t size;
    const char *what;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kns", &address, &size, &what))
        return NULL;
    enum dr_advice advice = strcmp(what, "huge pages") == 0 ? DR_ADVICE_HUGE_PAGES : DR_ADVICE_GIVE_BACK;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = dr_sys.advise((void *)(uintptr_t)address, (size_t)size, advice);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(rc == 0);
}

PyMethodDef copy_methods[] = {
    {"tensors_fit", tensors_fit, METH_VARARGS,
     "tensors_fit(sources, targets) -> whether each can be copied into its target as into new memory"},
    {"copy_tensors", copy_tensors, METH_VARARGS,
     "copy_tensors(sources, targets, mask, workers): copies those of which the mask's byte is not 0"},
    {"advise", advise, METH_VARARGS,
     "advise(address, size, 'huge pages' or 'give back') -> whether the kernel has taken the advice on shared memory"},
    {NULL, NULL, 0, NULL},
};
