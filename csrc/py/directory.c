/* dcpring._C.make_directory, commit and remove_files (core/file.h). */
#include "module.h"

#include "../core/file.h"

static PyObject *finish_call(PyObject *module, int rc, const struct dr_error *error) {
    if (rc < 0)
        return raise_error(module_state(module), error);
    Py_RETURN_NONE;
}

static PyObject *make_directory(PyObject *module, PyObject *args) {
    const char *path;
    int sync, rc;
    if (!PyArg_ParseTuple(args, "sp", &path, &sync))
        return NULL;
    struct dr_error error;
    dr_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_make(path, sync, &error);
    Py_END_ALLOW_THREADS
    return finish_call(module, rc, &error);
}

static PyObject *file_system(PyObject *module, PyObject *args) {
    const char *path;
    uint64_t magic = 0;
    int rc;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    struct dr_error error;
    dr_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_file_system(path, &magic, &error);
    Py_END_ALLOW_THREADS
    return rc < 0 ? raise_error(module_state(module), &error) : PyLong_FromUnsignedLongLong(magic);
}

static PyObject *sync_directory(PyObject *module, PyObject *args) {
    const char *path;
    int rc;
    if (!PyArg_ParseTuple(args, "s", &path))
        return NULL;
    struct dr_error error;
    dr_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_sync(path, &error);
    Py_END_ALLOW_THREADS
    return finish_call(module, rc, &error);
}

static PyObject *commit(PyObject *module, PyObject *args) {
    const char *directory, *tmp, *name;
    Py_buffer data;
    int sync, rc;
    if (!PyArg_ParseTuple(args, "sssy*p", &directory, &tmp, &name, &data, &sync))
        return NULL;
    struct dr_error error;
    dr_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_commit(directory, tmp, name, data.buf, (size_t)data.len, sync, &error);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return finish_call(module, rc, &error);
}

static PyObject *replace(PyObject *module, PyObject *args) {
    const char *directory, *tmp, *name;
    int sync, rc;
    if (!PyArg_ParseTuple(args, "sssp", &directory, &tmp, &name, &sync))
        return NULL;
    struct dr_error error;
    dr_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_replace(directory, tmp, name, sync, &error);
    Py_END_ALLOW_THREADS
    return finish_call(module, rc, &error);
}

static PyObject *remove_files(PyObject *module, PyObject *args) {
    const char *directory;
    PyObject *list;
    Py_ssize_t count;
    int rc;
    if (!PyArg_ParseTuple(args, "sO", &directory, &list))
        return NULL;
    const char **names = parse_names(list, &count);
    if (!names)
        return NULL;
    struct dr_error error;
    dr_error_clear(&error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_remove(directory, names, (size_t)count, &error);
    Py_END_ALLOW_THREADS
    PyMem_Free(names);
    return finish_call(module, rc, &error);
}

PyMethodDef directory_methods[] = {
    {"make_directory", make_directory, METH_VARARGS, "make_directory(path, sync): mkdir -p"},
    {"file_system", file_system, METH_VARARGS, "file_system(path) -> the magic number of the file system it lies on"},
    {"sync_directory", sync_directory, METH_VARARGS, "sync_directory(path): its names are durable"},
    {"commit", commit, METH_VARARGS, "commit(directory, tmp, name, data, sync): name holds the old bytes or the new"},
    {"replace", replace, METH_VARARGS,
     "replace(directory, tmp, name, sync): tmp is called name; what was name, if anything, is tmp"},
    {"remove_files", remove_files, METH_VARARGS, "remove_files(directory, names): missing ones are no error"},
    {NULL, NULL, 0, NULL},
};
