/* Arguments in, and the GIL. See module.h. */
#include "module.h"

#include "base/crc.h"

int parse_options(struct module_state *state, PyObject *tuple, struct dr_options *options) {
    int direct, checksum, sync;
    unsigned depth, workers;
    Py_ssize_t block_size;
    PyObject *watch;
    if (!PyArg_ParseTuple(tuple, "siInIpiO;options", &options->engine, &direct, &depth, &block_size, &workers,
                          &checksum, &sync, &watch))
        return -1;
    if (sync < DR_SYNC_OFF || sync > DR_SYNC_LENGTH || direct < DR_DIRECT_OFF || direct > DR_DIRECT_AUTO ||
        workers < 1 || workers > DR_MAX_WORKERS || depth < 1 || depth > 4096 || block_size < (Py_ssize_t)DR_CRC_BLOCK ||
        block_size > ((Py_ssize_t)1 << 30) || block_size % (Py_ssize_t)DR_CRC_BLOCK != 0) {
        PyErr_SetString(PyExc_ValueError, "an I/O option is out of range");
        return -1;
    }
    /* The core may keep the name: let it be one that lives for ever. */
    options->engine = strcmp(options->engine, "uring") == 0     ? "uring"
                      : strcmp(options->engine, "threads") == 0 ? "threads"
                                                                : "auto";
    options->direct = (enum dr_direct)direct;
    options->queue_depth = depth;
    options->block_size = (size_t)block_size;
    options->workers = workers;
    options->checksum = checksum;
    options->sync = (enum dr_sync)sync;
    return parse_watch(state, watch, &options->watch);
}

int parse_ints(PyObject *tuple, int64_t *out, Py_ssize_t count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "expected a tuple of %zd ints", count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

void paths_free(struct paths *paths) {
    PyMem_Free(paths->names);
    Py_XDECREF(paths->objects);
    *paths = (struct paths){0};
}

int paths_parse(struct paths *paths, PyObject *list) {
    *paths = (struct paths){0};
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of paths");
        return -1;
    }
    Py_ssize_t count = PyList_Size(list);
    paths->names = PyMem_Calloc((size_t)count + 1, sizeof *paths->names);
    paths->objects = paths->names ? PyTuple_New(count) : PyErr_NoMemory();
    for (; paths->objects && paths->count < count; paths->count++) {
        PyObject *object = PyList_GetItem(list, paths->count), *bytes;
        if (!object || !PyUnicode_FSConverter(object, &bytes))
            break;
        paths->names[paths->count] = PyBytes_AsString(bytes);
        PyTuple_SetItem(paths->objects, paths->count, bytes);
    }
    if (paths->objects && paths->count == count)
        return 0;
    paths_free(paths);
    return -1;
}

static int look_for_signals(void *context) {
    struct gil *gil = context;
    PyEval_RestoreThread(gil->thread);
    int rc = PyErr_CheckSignals();
    gil->thread = PyEval_SaveThread();
    return rc;
}

void gil_release(struct gil *gil) {
    gil->control = (struct dr_control){look_for_signals, gil};
    gil->thread = PyEval_SaveThread();
}

/* What the core decodes, or merges, in about a millisecond. */
enum { SHORT_WORK_BYTES = 64 * 1024 };

void gil_release_for(struct gil *gil, size_t bytes) {
    if (bytes > SHORT_WORK_BYTES)
        gil_release(gil);
    else
        *gil = (struct gil){0};
}

void gil_take(struct gil *gil) {
    if (gil->thread)
        PyEval_RestoreThread(gil->thread);
}

/* What takes some milliseconds, as Python itself keeps the GIL for. */
enum { TURNS_WITH_GIL = 1 << 14 };

int gil_turn(size_t turn) {
    if (turn % TURNS_WITH_GIL != TURNS_WITH_GIL - 1)
        return 0;
    Py_BEGIN_ALLOW_THREADS
    Py_END_ALLOW_THREADS
    return PyErr_CheckSignals();
}

bool turn_is_free(const struct turn *turn, const char *what) {
    if (turn->taken)
        PyErr_Format(PyExc_ValueError, "%s is in use by another thread", what);
    return !turn->taken;
}

bool turn_take(struct turn *turn, bool is_open, const char *what) {
    if (!turn_is_free(turn, what))
        return false;
    if (!is_open)
        PyErr_Format(PyExc_ValueError, "%s is closed", what);
    turn->taken = is_open;
    return is_open;
}
