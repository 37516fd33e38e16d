/* dcpring._C.probe_ring, probe_space, probe_directory, probe_cached and probe_crc (core/tools/probe.h). */
#include "module.h"

#include "tools/probe.h"

/* None where it was not asked. */
static PyObject *answer_tuple(const struct dr_answer *answer) {
    if (!answer->asked)
        return Py_NewRef(Py_None);
    return Py_BuildValue("(isK)", answer->err, answer->cure, (unsigned long long)answer->ns);
}

static PyObject *probe_ring(PyObject *module, PyObject *args) {
    (void)module;
    unsigned depth;
    Py_ssize_t buffer_size;
    if (!PyArg_ParseTuple(args, "In", &depth, &buffer_size))
        return NULL;
    struct dr_ring_answers answers;
    Py_BEGIN_ALLOW_THREADS
    dr_probe_ring(depth, (size_t)buffer_size, &answers);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(NI)", answer_tuple(&answers.open), answers.registered);
}

static PyObject *probe_space(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *object;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &object))
        return NULL;
    const char *directory = PyBytes_AsString(object);
    struct dr_answer answer;
    struct dr_space about;
    Py_BEGIN_ALLOW_THREADS
    answer = dr_probe_space(directory, &about);
    Py_END_ALLOW_THREADS
    Py_DECREF(object);
    return Py_BuildValue("(NKKKKK)", answer_tuple(&answer), (unsigned long long)about.file_system,
                         (unsigned long long)about.bytes, (unsigned long long)about.free_bytes,
                         (unsigned long long)about.files, (unsigned long long)about.free_files);
}

static PyObject *probe_directory(PyObject *module, PyObject *args) {
    PyObject *object;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &object))
        return NULL;
    const char *directory = PyBytes_AsString(object);
    struct dr_directory_answers a;
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_probe_directory(directory, &a, &gil.control, &error);
    gil_take(&gil);
    Py_DECREF(object);
    if (rc < 0)
        return raise_error(module_state(module), &error);
    return Py_BuildValue("{sNsNsNsNsNsNsi}", "create", answer_tuple(&a.create), "allocate", answer_tuple(&a.allocate),
                         "direct", answer_tuple(&a.direct), "sync", answer_tuple(&a.sync), "commit",
                         answer_tuple(&a.commit), "remove", answer_tuple(&a.remove), "alignment", a.alignment);
}

static PyObject *probe_cached(PyObject *module, PyObject *args) {
    PyObject *directory_object = NULL, *name_object;
    if (!PyArg_ParseTuple(args, "O&O&", PyUnicode_FSConverter, &directory_object, PyUnicode_FSConverter, &name_object))
        return NULL;
    const char *directory = PyBytes_AsString(directory_object), *name = PyBytes_AsString(name_object);
    DR_NEW_ERROR(error);
    uint64_t cached;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = dr_probe_cached(directory, name, &cached, &error);
    Py_END_ALLOW_THREADS
    Py_DECREF(directory_object);
    Py_DECREF(name_object);
    return rc < 0 ? raise_error(module_state(module), &error) : PyLong_FromUnsignedLongLong(cached);
}

static PyObject *probe_crc(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long bytes, ns;
    if (!PyArg_ParseTuple(args, "K", &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ns = dr_probe_crc(bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(ns);
}

PyMethodDef probe_methods[] = {
    {"probe_ring", probe_ring, METH_VARARGS,
     "probe_ring(depth, buffer size) -> (answer, buffers registered); an answer is (errno or 0, cure, ns), None where "
     "it was not asked"},
    {"probe_space", probe_space, METH_VARARGS,
     "probe_space(directory) -> (answer, magic number, bytes, free bytes, files, free files) of its file system"},
    {"probe_directory", probe_directory, METH_VARARGS,
     "probe_directory(directory) -> {name: answer, \"alignment\": bytes}; makes files in it, and removes them"},
    {"probe_cached", probe_cached, METH_VARARGS, "probe_cached(directory, name) -> bytes of it in the page cache"},
    {"probe_crc", probe_crc, METH_VARARGS, "probe_crc(bytes) -> ns"},
    {NULL, NULL, 0, NULL},
};
