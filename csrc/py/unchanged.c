/* dcpring._C.samples and find_changed: which tensors an earlier save has written already (core/data/unchanged.h). */
#include "tensors.h"

#include "base/crc.h"
#include "data/unchanged.h"

/* The tensors of one call as the core takes them. */
struct sources {
    const struct tensors *tensors;
    struct dr_digest_key *key;
    struct dr_source *each;
};

static void sources_free(struct sources *sources) {
    PyMem_Free(sources->key);
    PyMem_Free(sources->each);
}

static int sources_init(struct sources *sources, PyObject *module, PyObject *tensors, PyObject *key) {
    *sources = (struct sources){.tensors = held_tensors(module_state(module), tensors)};
    if (!sources->tensors || !(sources->key = parse_digest_key(key)))
        return -1;
    sources->each = PyMem_Calloc((size_t)sources->tensors->count + 1, sizeof *sources->each);
    if (!sources->each) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < sources->tensors->count; i++) {
        if (sources->tensors->views[i].kind != TENSOR_PLAIN) {
            PyErr_Format(PyExc_ValueError, "tensor %zd is not plain CPU memory", i);
            return -1;
        }
        sources->each[i] = view_source(&sources->tensors->views[i]);
    }
    return 0;
}

static PyObject *samples(PyObject *module, PyObject *args) {
    struct sources sources = {0};
    PyObject *tensors, *key, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO", &tensors, &key))
        return NULL;
    if (sources_init(&sources, module, tensors, key) == 0)
        result = PyBytes_FromStringAndSize(NULL, DR_SAMPLE_BYTES * sources.tensors->count);
    if (result) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(result);
        struct gil gil;
        gil_release_for(&gil, (size_t)sources.tensors->count * 512);
        for (Py_ssize_t i = 0; i < sources.tensors->count; i++)
            dr_sample(sources.key, &sources.each[i], out + DR_SAMPLE_BYTES * i);
        gil_take(&gil);
    }
    sources_free(&sources);
    return result;
}

/* What is known of a tensor: which it is, where it lies in its file, and the digests, which stay the list's. */
static int parse_known(struct dr_known *known, const struct sources *sources, PyObject *index, PyObject *offset,
                       PyObject *digests) {
    Py_ssize_t i = PyLong_AsSsize_t(index);
    if (i < 0 || i >= sources->tensors->count) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_IndexError, "tensor %zd", i);
        return -1;
    }
    const struct dr_source *source = &sources->each[i];
    known->source = source;
    known->payload_offset = PyLong_AsUnsignedLongLong(offset);
    if (PyErr_Occurred())
        return -1;
    size_t count = known->payload_offset <= INT64_MAX ? dr_crc_count(known->payload_offset, source->size) : 0;
    if (!PyBytes_Check(digests) || (size_t)PyBytes_Size(digests) != DR_DIGEST_BYTES * count) {
        PyErr_SetString(PyExc_ValueError, "there must be a digest for each CRC block of a tensor");
        return -1;
    }
    known->digests = (const uint8_t *)PyBytes_AsString(digests);
    return 0;
}

static PyObject *mask_of(const struct dr_known *known, Py_ssize_t count) {
    PyObject *mask = PyBytes_FromStringAndSize(NULL, count);
    for (Py_ssize_t i = 0; mask && i < count; i++)
        PyBytes_AsString(mask)[i] = atomic_load(&known[i].differs) ? 1 : 0;
    return mask;
}

static PyObject *find_among(PyObject *module, const struct sources *sources, PyObject *indices, PyObject *offsets,
                            PyObject *digests, unsigned workers) {
    Py_ssize_t count = PyList_Size(indices);
    if (PyList_Size(offsets) != count || PyList_Size(digests) != count || workers < 1 || workers > DR_MAX_WORKERS)
        return PyErr_Format(PyExc_ValueError, "expected an offset and digests for each tensor, and some workers");
    struct dr_known *known = PyMem_Calloc((size_t)count + 1, sizeof *known);
    if (!known)
        return PyErr_NoMemory();
    PyObject *mask = NULL;
    Py_ssize_t parsed = 0;
    while (parsed < count && parse_known(&known[parsed], sources, PyList_GetItem(indices, parsed),
                                         PyList_GetItem(offsets, parsed), PyList_GetItem(digests, parsed)) == 0)
        parsed++;
    if (parsed == count) {
        DR_NEW_ERROR(error);
        struct gil gil;
        gil_release(&gil);
        int rc = dr_find_changed(sources->key, known, (size_t)count, workers, &gil.control, &error);
        gil_take(&gil);
        mask = rc < 0 ? raise_error(module_state(module), &error) : mask_of(known, count);
    }
    PyMem_Free(known);
    return mask;
}

static PyObject *find_changed(PyObject *module, PyObject *args) {
    struct sources sources = {0};
    PyObject *tensors, *indices, *offsets, *digests, *key, *mask = NULL;
    unsigned workers;
    if (!PyArg_ParseTuple(args, "OO!O!O!OI", &tensors, &PyList_Type, &indices, &PyList_Type, &offsets, &PyList_Type,
                          &digests, &key, &workers))
        return NULL;
    if (sources_init(&sources, module, tensors, key) == 0)
        mask = find_among(module, &sources, indices, offsets, digests, workers);
    sources_free(&sources);
    return mask;
}

PyMethodDef unchanged_methods[] = {
    {"samples", samples, METH_VARARGS, "samples(Tensors, key) -> 8 bytes for each, which differ if the tensors do"},
    {"find_changed", find_changed, METH_VARARGS,
     "find_changed(Tensors, which, payload offsets, digests, key, workers) -> bytes: 1 for each of those that the "
     "digests are not of"},
    {NULL, NULL, 0, NULL},
};
