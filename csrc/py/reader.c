/* dcpring._C.load, load_bytes and locate (core/data/load.h). */
#include "module.h"

#include "job.h"

#include "base/crc.h"
#include "data/locate.h"

void job_free(struct job *job) {
    if (job->input)
        input_give(job->input_object);
    if (job->tensors.shim)
        tensors_free(&job->tensors);
    if (job->scales.shim)
        tensors_free(&job->scales);
    PyMem_Free(job->forms);
    PyMem_Free(job->reads);
    PyMem_Free(job->ints);
}

int job_init(struct job *job, struct module_state *state, PyObject *input, PyObject *options, Py_ssize_t count) {
    *job = (struct job){.count = count, .input_object = input};
    if (parse_options(state, options, &job->options) < 0 || !(job->input = input_take(state, input)))
        return -1;
    job->reads = PyMem_Calloc((size_t)count + 1, sizeof *job->reads);
    if (!job->reads) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int parse_crcs(struct dr_read *read, PyObject *crcs, PyObject *whole) {
    if (whole != Py_None) {
        read->whole_crc = (uint32_t)PyLong_AsUnsignedLong(whole);
        read->has_whole_crc = true;
        return PyErr_Occurred() ? -1 : 0;
    }
    if (crcs == Py_None)
        return 0;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(crcs, &data, &size) < 0)
        return -1;
    if ((size_t)size != 4 * dr_crc_count(read->payload_offset, read->payload_size)) {
        PyErr_SetString(PyExc_ValueError, "the metadata has the wrong number of CRCs for a tensor");
        return -1;
    }
    read->crcs = (const uint8_t *)data;
    return 0;
}

static int check_file(const struct job *job, size_t file) {
    if (file < job->input->count)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a file index is out of range");
    return -1;
}

/* Payload ranges come from metadata: nothing may overflow. */
static int check_range(unsigned long long offset, unsigned long long size) {
    if (offset <= INT64_MAX && size <= INT64_MAX - offset)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a byte range is out of range");
    return -1;
}

/* The elements of a tensor, whose memory is contiguous; -1 for another. */
static int64_t count_elements(const struct tensor_view *view) {
    struct dr_shape shape = {view->dtype, (int)view->ndim, view->sizes};
    uint64_t bytes;
    if (view->kind != TENSOR_PLAIN || !dr_shape_bytes(&shape, &bytes) || !view_is_contiguous(view))
        return -1;
    return (int64_t)(bytes / view->dtype->item_size);
}

/* Whether what the form makes of the read fills the tensor. */
static bool fills(const struct dr_read *read, const struct dr_quantised *form, const struct tensor_view *view,
                  const struct tensor_view *scales) {
    const int last = read->chunk.ndim - 1;
    int64_t rows = 1;
    if (last < 0 || view->kind != TENSOR_PLAIN || !dr_quantised_good(form, read->lengths[last]) ||
        (form->columns > 1 && view->strides[last] != 1))
        return false;
    for (int d = 0; d < last; rows *= view->sizes[d++])
        if (read->lengths[d] != view->sizes[d])
            return false;
    return (form->scales || form->exponents) && count_elements(scales) == dr_quantised_blocks(form, rows);
}

/* (dtype of the codes, first, block_rows, block_columns, skip_rows, skip_columns, which of the scales) */
static int parse_form(struct job *job, Py_ssize_t index, PyObject *item, struct dr_quantised *form) {
    struct dr_read *read = &job->reads[index];
    const struct tensor_view *view = &job->tensors.views[index], *scales;
    const char *codes;
    long long n[5];
    Py_ssize_t number;
    if (!PyArg_ParseTuple(item, "sLLLLLn", &codes, &n[0], &n[1], &n[2], &n[3], &n[4], &number))
        return -1;
    const struct dr_dtype *dtype = dr_dtype_by_name(codes);
    if (dtype && view->ndim > 0 && number >= 0 && number < job->scales.count) {
        scales = &job->scales.views[number];
        *form = (struct dr_quantised){dtype, view->dtype, view->sizes[view->ndim - 1], n[0], NULL, NULL, n[1], n[2],
                                      n[3],  n[4]};
        if (scales->kind == TENSOR_PLAIN && strcmp(scales->dtype->name, "float32") == 0)
            form->scales = scales->data;
        else if (scales->kind == TENSOR_PLAIN && strcmp(scales->dtype->name, "uint8") == 0)
            form->exponents = scales->data;
        read->chunk.dtype = dr_dtype_by_name("uint8");
        read->quantised = form;
        if (fills(read, form, view, scales))
            return 0;
    }
    PyErr_Format(PyExc_ValueError, "codes, scales and destination %zd do not fit each other", index);
    return -1;
}

/*
 * (file, payload_offset, payload_size, crcs, whole_crc, chunk sizes, slice offsets, slice lengths), and how it is made
 * if it is quantised: sizes, offsets and lengths are of its bytes then.
 */
static int parse_read(struct job *job, Py_ssize_t index, PyObject *item, int64_t **ints) {
    struct dr_read *read = &job->reads[index];
    const struct tensor_view *view = &job->tensors.views[index];
    unsigned long long payload_offset, payload_size;
    Py_ssize_t file;
    PyObject *crcs, *whole, *sizes, *offsets, *lengths, *form = NULL;
    if (!PyArg_ParseTuple(item, "nKKOOO!OO|O!", &file, &payload_offset, &payload_size, &crcs, &whole, &PyTuple_Type,
                          &sizes, &offsets, &lengths, &PyTuple_Type, &form))
        return -1;
    int64_t *at = *ints;
    Py_ssize_t ndim = PyTuple_Size(sizes);
    if (ndim != view->ndim || parse_ints(sizes, at, ndim) < 0 || parse_ints(offsets, at + ndim, ndim) < 0 ||
        parse_ints(lengths, at + 2 * ndim, ndim) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the destination has another number of dimensions");
        return -1;
    }
    *read = (struct dr_read){
        .file = (size_t)file,
        .payload_offset = payload_offset,
        .payload_size = payload_size,
        .chunk = {view->dtype, (int)ndim, at},
        .offsets = at + ndim,
        .lengths = at + 2 * ndim,
        .memory = view->data,
        .strides = view->strides,
    };
    *ints += 3 * ndim;
    if (check_file(job, read->file) < 0 || check_range(payload_offset, payload_size) < 0)
        return -1;
    if (form && parse_form(job, index, form, &job->forms[index]) < 0)
        return -1;
    const size_t size = (size_t)ndim * sizeof *view->sizes;
    if (!form && (view->kind != TENSOR_PLAIN || memcmp(read->lengths, view->sizes, size) != 0)) {
        PyErr_SetString(PyExc_ValueError, "the destination is not a plain CPU tensor of the slice's shape");
        return -1;
    }
    return parse_crcs(read, crcs, whole);
}

static int parse_reads(struct job *job, PyObject *items) {
    size_t total = 0;
    for (Py_ssize_t i = 0; i < job->count; i++)
        total += 3 * (size_t)job->tensors.views[i].ndim;
    job->ints = PyMem_Calloc(total + 1, sizeof *job->ints);
    job->forms = PyMem_Calloc((size_t)job->count + 1, sizeof *job->forms);
    if (!job->ints || !job->forms) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *ints = job->ints;
    for (Py_ssize_t i = 0; i < job->count; i++)
        if (parse_read(job, i, PyList_GetItem(items, i), &ints) < 0)
            return -1;
    return 0;
}

/* With the indices of the reads whose memory was written to before the failure. */
static PyObject *raise_load_error(struct module_state *state, const struct job *job, const struct dr_error *error) {
    PyObject *changed = PyErr_Occurred() ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; changed && i < job->count; i++) {
        PyObject *index = job->reads[i].touched ? PyLong_FromSsize_t(i) : NULL;
        if (job->reads[i].touched && (!index || PyList_Append(changed, index) < 0))
            Py_CLEAR(changed);
        Py_XDECREF(index);
    }
    raise_with(state, error, changed);
    Py_XDECREF(changed);
    return NULL;
}

PyObject *job_run(struct module_state *state, struct job *job) {
    struct dr_stream_stats stats;
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_load(job->input, job->reads, (size_t)job->count, &job->options, &gil.control, &stats, &error);
    gil_take(&gil);
    if (rc < 0)
        return raise_load_error(state, job, &error);
    return Py_BuildValue("(KKsO)", (unsigned long long)stats.bytes, (unsigned long long)stats.cached_bytes,
                         stats.engine ? stats.engine : "", stats.direct ? Py_True : Py_False);
}

static PyObject *load(PyObject *module, PyObject *args) {
    PyObject *input, *items, *tensors, *options, *scales = NULL, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO!O!O!|O!", &input, &PyList_Type, &items, &PyList_Type, &tensors, &PyTuple_Type,
                          &options, &PyList_Type, &scales))
        return NULL;
    struct module_state *state = module_state(module);
    struct job job = {0};
    Py_ssize_t count = PyList_Size(items);
    if (PyList_Size(tensors) != count)
        return PyErr_Format(PyExc_ValueError, "%zd items, but %zd tensors", count, PyList_Size(tensors));
    if (job_init(&job, state, input, options, count) == 0 && tensors_init(&job.tensors, state, tensors) == 0 &&
        (!scales || tensors_init(&job.scales, state, scales) == 0) && parse_reads(&job, items) == 0)
        result = job_run(state, &job);
    job_free(&job);
    return result;
}

/* (file, offset, size, crcs): the bytes as a one-dimensional uint8 tensor, whose memory is a bytes object. */
static PyObject *parse_byte_range(struct job *job, Py_ssize_t index, PyObject *item) {
    struct dr_read *read = &job->reads[index];
    static const int64_t one = 1, zero = 0;
    unsigned long long offset, size;
    Py_ssize_t file;
    PyObject *crcs;
    if (!PyArg_ParseTuple(item, "nKKO", &file, &offset, &size, &crcs) || check_file(job, (size_t)file) < 0 ||
        check_range(offset, size) < 0)
        return NULL;
    job->ints[index] = (int64_t)size;
    *read = (struct dr_read){
        .file = (size_t)file,
        .payload_offset = offset,
        .payload_size = size,
        .chunk = {dr_dtype_by_name("uint8"), 1, &job->ints[index]},
        .offsets = &zero,
        .lengths = &job->ints[index],
        .strides = &one,
    };
    if (parse_crcs(read, crcs, Py_None) < 0)
        return NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    read->memory = bytes ? PyBytes_AsString(bytes) : NULL;
    return bytes;
}

static PyObject *parse_byte_ranges(struct job *job, PyObject *items) {
    job->ints = PyMem_Calloc((size_t)job->count + 1, sizeof *job->ints);
    PyObject *list = job->ints ? PyList_New(job->count) : PyErr_NoMemory();
    for (Py_ssize_t i = 0; list && i < job->count; i++) {
        PyObject *bytes = parse_byte_range(job, i, PyList_GetItem(items, i));
        if (!bytes || PyList_SetItem(list, i, bytes) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *load_bytes(PyObject *module, PyObject *args) {
    PyObject *input, *items, *options, *list = NULL, *stats = NULL;
    if (!PyArg_ParseTuple(args, "OO!O!", &input, &PyList_Type, &items, &PyTuple_Type, &options))
        return NULL;
    struct module_state *state = module_state(module);
    struct job job = {0};
    if (job_init(&job, state, input, options, PyList_Size(items)) == 0 && (list = parse_byte_ranges(&job, items)))
        stats = job_run(state, &job);
    job_free(&job);
    PyObject *result = stats ? PyTuple_Pack(2, list, stats) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(stats);
    return result;
}

/* ---- locate ---- */

static PyObject *located_tuple(const struct dr_located *located) {
    if (!located->plain)
        return Py_NewRef(Py_None);
    PyObject *sizes = PyTuple_New(located->ndim);
    for (int d = 0; sizes && d < located->ndim; d++) {
        PyObject *size = PyLong_FromLongLong(located->sizes[d]);
        if (!size || PyTuple_SetItem(sizes, d, size) < 0)
            Py_CLEAR(sizes);
    }
    if (!sizes)
        return NULL;
    return Py_BuildValue("(KKksN)", (unsigned long long)located->payload_offset,
                         (unsigned long long)located->payload_size, (unsigned long)located->crc, located->dtype->name,
                         sizes);
}

static PyObject *run_locate(struct module_state *state, struct dr_input *input, struct dr_lookup *lookups,
                            Py_ssize_t count) {
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_locate(input, lookups, (size_t)count, &gil.control, &error);
    gil_take(&gil);
    if (rc < 0)
        return raise_error(state, &error);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *tuple = located_tuple(&lookups[i].located);
        if (!tuple || PyList_SetItem(list, i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static int parse_lookups(PyObject *items, size_t file_count, struct dr_lookup *lookups, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long offset, length;
        Py_ssize_t file;
        if (!PyArg_ParseTuple(PyList_GetItem(items, i), "nKK", &file, &offset, &length) ||
            check_range(offset, length) < 0)
            return -1;
        if (file < 0 || (size_t)file >= file_count) {
            PyErr_SetString(PyExc_ValueError, "a file index is out of range");
            return -1;
        }
        lookups[i].file = (size_t)file;
        lookups[i].offset = offset;
        lookups[i].length = length;
    }
    return 0;
}

static PyObject *locate(PyObject *module, PyObject *args) {
    PyObject *input_object, *items, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO!", &input_object, &PyList_Type, &items))
        return NULL;
    struct dr_input *input = input_take(module_state(module), input_object);
    if (!input)
        return NULL;
    Py_ssize_t count = PyList_Size(items);
    struct dr_lookup *lookups = PyMem_Calloc((size_t)count + 1, sizeof *lookups);
    if (!lookups)
        PyErr_NoMemory();
    else if (parse_lookups(items, input->count, lookups, count) == 0)
        result = run_locate(module_state(module), input, lookups, count);
    PyMem_Free(lookups);
    input_give(input_object);
    return result;
}

/* ---- sums ---- */

static PyObject *crc32(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    unsigned long crc = 0;
    if (!PyArg_ParseTuple(args, "y*|k", &data, &crc))
        return NULL;
    uint32_t sum;
    Py_BEGIN_ALLOW_THREADS
    sum = dr_crc32((uint32_t)crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(sum);
}

PyMethodDef reader_methods[] = {
    {"load", load, METH_VARARGS,
     "load(input, items, tensors, options, scales=[]) -> (bytes, cached_bytes, engine, direct); an item is (file, "
     "payload_offset, payload_size, crcs or None, whole crc or None, chunk sizes, slice offsets, slice lengths), of a "
     "quantised tensor's bytes with (dtype of the codes, first, block_rows, block_columns, skip_rows, skip_columns, "
     "which "
     "of the scales): see csrc/core/data/dequantise.h"},
    {"load_bytes", load_bytes, METH_VARARGS,
     "load_bytes(input, [(file, offset, size, crcs or None)], options) -> ([bytes], as load)"},
    {"locate", locate, METH_VARARGS,
     "locate(input, [(file, offset, length)] by file) -> [None or (payload_offset, payload_size, crc, dtype, "
     "sizes)]"},
    {"crc32", crc32, METH_VARARGS, "crc32(data, crc=0) -> as zlib.crc32, several times as fast"},
    {NULL, NULL, 0, NULL},
};
