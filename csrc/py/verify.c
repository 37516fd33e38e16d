/* dcpring._C.verify (core/data/verify.h). */
#include "input.h"

#include "base/crc.h"
#include "data/verify.h"

/* One call of dr_verify with everything it holds. */
struct verify_job {
    struct dr_input *input;
    struct dr_options options;
    struct dr_check *checks;
    Py_ssize_t count;
    int64_t *sizes; /* of all shapes */
};

static int parse_crcs(struct dr_check *check, PyObject *crcs) {
    char *data;
    Py_ssize_t size;
    if (crcs == Py_None)
        return 0;
    if (PyBytes_AsStringAndSize(crcs, &data, &size) < 0)
        return -1;
    if ((size_t)size != 4 * dr_crc_count(check->payload_offset, check->payload_size)) {
        PyErr_SetString(PyExc_ValueError, "the metadata has the wrong number of CRCs for a record");
        return -1;
    }
    check->crcs = (const uint8_t *)data;
    return 0;
}

static bool is_range(unsigned long long offset, unsigned long long size) {
    return offset <= INT64_MAX && size <= INT64_MAX - offset;
}

/* (file, kind, offset, length, payload_offset, payload_size, crcs, dtype, sizes, transformed) */
static int parse_check(struct verify_job *job, PyObject *item, struct dr_check *check, int64_t **sizes) {
    Py_ssize_t file;
    unsigned char kind;
    unsigned long long offset, length, payload_offset, payload_size;
    PyObject *crcs, *shape;
    const char *dtype;
    int transformed;
    if (!PyArg_ParseTuple(item, "nbKKKKOzO!p", &file, &kind, &offset, &length, &payload_offset, &payload_size, &crcs,
                          &dtype, &PyTuple_Type, &shape, &transformed))
        return -1;
    if (file < 0 || (size_t)file >= job->input->count || kind > DR_CHECK_RAW || !is_range(offset, length) ||
        !is_range(payload_offset, payload_size) || PyTuple_Size(shape) > DR_MAX_DIMS) {
        PyErr_SetString(PyExc_ValueError, "a record to check is out of range");
        return -1;
    }
    *check = (struct dr_check){.kind = kind,
                               .file = (size_t)file,
                               .offset = offset,
                               .length = length,
                               .payload_offset = payload_offset,
                               .payload_size = payload_size,
                               .shape = {dtype ? dr_dtype_by_name(dtype) : NULL, (int)PyTuple_Size(shape), *sizes},
                               .transformed = transformed};
    if (parse_ints(shape, *sizes, check->shape.ndim) < 0)
        return -1;
    *sizes += check->shape.ndim;
    return parse_crcs(check, crcs);
}

static int parse_checks(struct verify_job *job, PyObject *items) {
    size_t ints = 0;
    job->count = PyList_Size(items);
    for (Py_ssize_t i = 0; i < job->count; i++) {
        PyObject *item = PyList_GetItem(items, i);
        PyObject *shape = PyTuple_Check(item) && PyTuple_Size(item) == 10 ? PyTuple_GetItem(item, 8) : NULL;
        ints += shape && PyTuple_Check(shape) ? (size_t)PyTuple_Size(shape) : 0;
    }
    job->checks = PyMem_Calloc((size_t)job->count + 1, sizeof *job->checks);
    job->sizes = PyMem_Calloc(ints + 1, sizeof *job->sizes);
    if (!job->checks || !job->sizes) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *sizes = job->sizes;
    for (Py_ssize_t i = 0; i < job->count; i++)
        if (parse_check(job, PyList_GetItem(items, i), &job->checks[i], &sizes) < 0)
            return -1;
    return 0;
}

static PyObject *problem_tuple(const struct dr_problem *p) {
    PyObject *crcs =
        p->has_crcs ? Py_BuildValue("(kk)", (unsigned long)p->expected, (unsigned long)p->found) : Py_NewRef(Py_None);
    return crcs ? Py_BuildValue("(nLKsiN)", (Py_ssize_t)p->check, p->of_file ? -1LL : (long long)p->offset,
                                (unsigned long long)p->length, p->what, p->err, crcs)
                : NULL;
}

static PyObject *result_of(const struct verify_job *job, const struct dr_findings *findings,
                           const struct dr_stream_stats *stats) {
    PyObject *problems = PyList_New((Py_ssize_t)findings->count);
    for (size_t i = 0; problems && i < findings->count; i++) {
        PyObject *tuple = problem_tuple(&findings->problems[i]);
        if (!tuple || PyList_SetItem(problems, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(problems);
    }
    PyObject *left = PyBytes_FromStringAndSize(NULL, job->count);
    if (!problems || !left) {
        Py_XDECREF(problems);
        Py_XDECREF(left);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < job->count; i++)
        PyBytes_AsString(left)[i] = (char)job->checks[i].unverified;
    return Py_BuildValue("(NNKK(KKsO))", problems, left, (unsigned long long)findings->unkept,
                         (unsigned long long)findings->repeated, (unsigned long long)stats->bytes,
                         (unsigned long long)stats->cached_bytes, stats->engine ? stats->engine : "",
                         stats->direct ? Py_True : Py_False);
}

static PyObject *run_job(struct module_state *state, struct verify_job *job, bool quick) {
    struct dr_findings findings;
    struct dr_stream_stats stats;
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_verify(job->input, job->checks, (size_t)job->count, quick, &job->options, &gil.control, &findings,
                       &stats, &error);
    gil_take(&gil);
    PyObject *result = rc < 0 ? raise_error(state, &error) : result_of(job, &findings, &stats);
    dr_findings_destroy(&findings);
    return result;
}

static PyObject *verify(PyObject *module, PyObject *args) {
    PyObject *input, *items, *options, *result = NULL;
    int quick;
    if (!PyArg_ParseTuple(args, "OO!pO!", &input, &PyList_Type, &items, &quick, &PyTuple_Type, &options))
        return NULL;
    struct module_state *state = module_state(module);
    struct verify_job job = {0};
    if (parse_options(state, options, &job.options) < 0 || !(job.input = input_take(state, input)))
        return NULL;
    if (parse_checks(&job, items) == 0)
        result = run_job(state, &job, quick);
    PyMem_Free(job.checks);
    PyMem_Free(job.sizes);
    input_give(input);
    return result;
}

PyMethodDef verify_methods[] = {
    {"verify", verify, METH_VARARGS,
     "verify(input, items, quick, options) -> (problems, left, unkept, repeated, (bytes, cached_bytes, engine, "
     "direct)); an item is (file, kind, offset, length, payload_offset, payload_size, crcs or None, dtype or None, "
     "sizes, "
     "transformed), a problem (item, offset, length, what, errno, (expected, found) or None)"},
    {NULL, NULL, 0, NULL},
};
