/* dcpring._C.make_directory, commit, remove_files and the like (core/io/file.h). */
#include "module.h"

#include "io/file.h"
#include "io/file_system.h"

static PyObject *finish_call(PyObject *module, int rc, const struct dr_error *error) {
    if (rc < 0)
        return raise_error(module_state(module), error);
    Py_RETURN_NONE;
}

static PyObject *make_directory(PyObject *module, PyObject *args) {
    PyObject *object;
    int sync, is_last = true, rc;
    if (!PyArg_ParseTuple(args, "O&p|p", PyUnicode_FSConverter, &object, &sync, &is_last))
        return NULL;
    const char *path = PyBytes_AsString(object);
    enum dr_names names = !sync ? DR_NAMES_LATER : is_last ? DR_NAMES_ALL : DR_NAMES_ABOVE;
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_make(path, names, &error);
    Py_END_ALLOW_THREADS
    Py_DECREF(object);
    return rc < 0 ? raise_error(module_state(module), &error) : PyBool_FromLong(rc);
}

static PyObject *file_system(PyObject *module, PyObject *args) {
    PyObject *object;
    uint64_t magic = 0;
    int rc;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &object))
        return NULL;
    const char *path = PyBytes_AsString(object);
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_file_system(path, &magic, &error);
    Py_END_ALLOW_THREADS
    Py_DECREF(object);
    return rc < 0 ? raise_error(module_state(module), &error) : PyLong_FromUnsignedLongLong(magic);
}

static PyObject *sync_directory(PyObject *module, PyObject *args) {
    PyObject *object;
    int rc;
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &object))
        return NULL;
    const char *path = PyBytes_AsString(object);
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_sync(path, &error);
    Py_END_ALLOW_THREADS
    Py_DECREF(object);
    return finish_call(module, rc, &error);
}

/* A directory and two names in it, as bytes of the file system. */
struct pair {
    PyObject *directory, *tmp, *name;
};

static void free_pair(struct pair *pair) {
    Py_DECREF(pair->directory);
    Py_DECREF(pair->tmp);
    Py_DECREF(pair->name);
}

static PyObject *commit(PyObject *module, PyObject *args) {
    struct pair pair;
    Py_buffer data;
    int sync, rc;
    if (!PyArg_ParseTuple(args, "O&O&O&y*p", PyUnicode_FSConverter, &pair.directory, PyUnicode_FSConverter, &pair.tmp,
                          PyUnicode_FSConverter, &pair.name, &data, &sync))
        return NULL;
    const char *directory = PyBytes_AsString(pair.directory), *tmp = PyBytes_AsString(pair.tmp);
    const char *name = PyBytes_AsString(pair.name);
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_commit(directory, tmp, name, data.buf, (size_t)data.len, sync, &error);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    free_pair(&pair);
    return finish_call(module, rc, &error);
}

static PyObject *write_file(PyObject *module, PyObject *args) {
    PyObject *directory = NULL, *name = NULL, *set;
    Py_buffer data;
    struct dr_syncs *syncs;
    int is_there;
    if (!PyArg_ParseTuple(args, "O&O&py*O", PyUnicode_FSConverter, &directory, PyUnicode_FSConverter, &name, &is_there,
                          &data, &set))
        return NULL;
    DR_NEW_ERROR(error);
    int rc = syncs_take(module_state(module), set, &syncs);
    bool taken = rc == 0;
    if (taken) {
        struct gil gil;
        gil_release(&gil);
        rc = dr_directory_write(PyBytes_AsString(directory), PyBytes_AsString(name), is_there, data.buf,
                                (size_t)data.len, syncs, &gil.control, &error);
        gil_take(&gil);
        syncs_give(set);
    }
    PyBuffer_Release(&data);
    Py_DECREF(directory);
    Py_DECREF(name);
    return taken ? finish_call(module, rc, &error) : NULL;
}

typedef int move_file(const char *directory, const char *tmp, const char *name, bool sync, struct dr_error *error);

static PyObject *move_pair(PyObject *module, PyObject *args, move_file *move) {
    struct pair pair;
    int sync, rc;
    if (!PyArg_ParseTuple(args, "O&O&O&p", PyUnicode_FSConverter, &pair.directory, PyUnicode_FSConverter, &pair.tmp,
                          PyUnicode_FSConverter, &pair.name, &sync))
        return NULL;
    const char *directory = PyBytes_AsString(pair.directory), *tmp = PyBytes_AsString(pair.tmp);
    const char *name = PyBytes_AsString(pair.name);
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = move(directory, tmp, name, sync, &error);
    Py_END_ALLOW_THREADS
    free_pair(&pair);
    return finish_call(module, rc, &error);
}

static PyObject *rename_file(PyObject *module, PyObject *args) { return move_pair(module, args, dr_directory_rename); }

static PyObject *replace(PyObject *module, PyObject *args) { return move_pair(module, args, dr_directory_replace); }

/* Two files, each by its directory and its name, as bytes of the file system. */
struct ends {
    PyObject *from_dir, *from, *dir, *name;
};

static PyObject *link_paths(PyObject *module, const struct ends *ends, uint64_t size, int is_durable,
                            struct dr_syncs *syncs) {
    const char *from_dir = PyBytes_AsString(ends->from_dir), *from = PyBytes_AsString(ends->from);
    const char *dir = PyBytes_AsString(ends->dir), *name = PyBytes_AsString(ends->name);
    enum dr_link how = DR_LINK_HARD;
    DR_NEW_ERROR(error);
    int rc;
    struct gil gil;
    gil_release(&gil);
    rc = dr_directory_link(from_dir, from, dir, name, size, is_durable, syncs, &gil.control, &how, &error);
    gil_take(&gil);
    return rc < 0 ? raise_error(module_state(module), &error) : PyBool_FromLong(how == DR_LINK_CLONE);
}

static PyObject *link_file(PyObject *module, PyObject *args) {
    struct ends ends;
    unsigned long long size;
    int is_durable;
    PyObject *set, *is_clone = NULL;
    struct dr_syncs *syncs;
    if (!PyArg_ParseTuple(args, "O&O&O&O&KpO", PyUnicode_FSConverter, &ends.from_dir, PyUnicode_FSConverter, &ends.from,
                          PyUnicode_FSConverter, &ends.dir, PyUnicode_FSConverter, &ends.name, &size, &is_durable,
                          &set))
        return NULL;
    if (syncs_take(module_state(module), set, &syncs) == 0) {
        is_clone = link_paths(module, &ends, size, is_durable, syncs);
        syncs_give(set);
    }
    Py_DECREF(ends.from_dir);
    Py_DECREF(ends.from);
    Py_DECREF(ends.dir);
    Py_DECREF(ends.name);
    return is_clone;
}

static PyObject *remove_files(PyObject *module, PyObject *args) {
    PyObject *object = NULL, *list;
    struct paths names;
    int rc;
    if (!PyArg_ParseTuple(args, "O&O", PyUnicode_FSConverter, &object, &list))
        return NULL;
    if (paths_parse(&names, list) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    const char *directory = PyBytes_AsString(object);
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = dr_directory_remove(directory, names.names, (size_t)names.count, &error);
    Py_END_ALLOW_THREADS
    paths_free(&names);
    Py_DECREF(object);
    return finish_call(module, rc, &error);
}

static PyObject *cure(PyObject *module, PyObject *args) {
    struct dr_error error = {.kind = DR_ERROR_SYSTEM};
    (void)module;
    if (!PyArg_ParseTuple(args, "i", &error.err))
        return NULL;
    return PyUnicode_FromString(dr_error_cure(&error));
}

PyMethodDef directory_methods[] = {
    {"make_directory", make_directory, METH_VARARGS,
     "make_directory(path, sync, last=True) -> whether it is new: mkdir -p; without `last` only the names of those "
     "above "
     "it are synced"},
    {"file_system", file_system, METH_VARARGS, "file_system(path) -> the magic number of the file system it lies on"},
    {"sync_directory", sync_directory, METH_VARARGS, "sync_directory(path): its names are durable"},
    {"commit", commit, METH_VARARGS, "commit(directory, tmp, name, data, sync): name holds the old bytes or the new"},
    {"write_file", write_file, METH_VARARGS,
     "write_file(directory, name, is there, data, syncs or None): creates it, or fills the empty one; it is durable "
     "once "
     "the Syncs were waited for"},
    {"rename_file", rename_file, METH_VARARGS,
     "rename_file(directory, tmp, name, sync): the commit of what is durable"},
    {"replace", replace, METH_VARARGS,
     "replace(directory, tmp, name, sync): tmp is called name; what was name, if anything, is tmp"},
    {"link_file", link_file, METH_VARARGS,
     "link_file(from directory, from name, directory, name, least bytes, is durable, Syncs or None) -> whether it is a "
     "clone"},
    {"remove_files", remove_files, METH_VARARGS, "remove_files(directory, names): missing ones are no error"},
    {"cure", cure, METH_VARARGS, "cure(errno) -> what to do about it, \"\" where nothing is known"},
    {NULL, NULL, 0, NULL},
};
