/* dcpring._C.FileWriter: one data file being written (core/data/save.h). */
#include "module.h"

#include "tensors.h"

#include "base/crc.h"
#include "data/save.h"

struct writer {
    PyObject_HEAD
    struct dr_writer *core;
    PyObject *watch; /* which the core writes to, or None */
    bool busy;       /* a call is under way, with the GIL released */
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

static bool enter(struct writer *self) {
    if (!self->core || self->busy) {
        PyErr_SetString(PyExc_ValueError,
                        self->busy ? "the file writer is in use by another thread" : "the file writer is closed");
        return false;
    }
    self->busy = true;
    return true;
}

/* Opens a file below a directory, both as bytes of the file system. */
static PyObject *open_writer(PyTypeObject *type, const char *directory, const char *name, uint64_t size_hint,
                             PyObject *tuple) {
    struct dr_options options;
    if (parse_options(PyType_GetModuleState(type), tuple, &options) < 0)
        return NULL;
    struct writer *self = (struct writer *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->watch = Py_NewRef(PyTuple_GetItem(tuple, PyTuple_Size(tuple) - 1));
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_writer_open(&self->core, directory, name, size_hint, &options, &error);
    gil_take(&gil);
    if (rc < 0) {
        raise_error(state_of((PyObject *)self), &error);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"directory", "name", "size_hint", "options", NULL};
    PyObject *directory = NULL, *name = NULL, *tuple;
    unsigned long long size_hint;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&KO!", names, PyUnicode_FSConverter, &directory,
                                     PyUnicode_FSConverter, &name, &size_hint, &PyTuple_Type, &tuple))
        return NULL;
    PyObject *self = open_writer(type, PyBytes_AsString(directory), PyBytes_AsString(name), size_hint, tuple);
    Py_DECREF(directory);
    Py_DECREF(name);
    return self;
}

static void close_core(struct writer *self) {
    struct dr_writer *core = self->core;
    self->core = NULL;
    Py_BEGIN_ALLOW_THREADS
    dr_writer_close(core);
    Py_END_ALLOW_THREADS
}

static void writer_dealloc(PyObject *object) {
    close_core((struct writer *)object);
    Py_XDECREF(((struct writer *)object)->watch);
    free_instance(object);
}

static PyObject *placed_tuple(const struct dr_placed *p, bool checksum) {
    size_t blocks = dr_crc_count(p->payload_offset, p->payload_size), count = checksum ? blocks : 0;
    PyObject *tuple = Py_BuildValue("(KKKKy#)", (unsigned long long)p->offset, (unsigned long long)p->length,
                                    (unsigned long long)p->payload_offset, (unsigned long long)p->payload_size,
                                    (const char *)(count ? p->crcs : NULL), (Py_ssize_t)(count * sizeof *p->crcs));
    if (!tuple || !p->digests)
        return tuple;
    return Py_BuildValue("(Ny#)", tuple, (const char *)p->digests, (Py_ssize_t)(blocks * DR_DIGEST_BYTES));
}

/* Writes and returns a list of placed tuples. The sources' memory is the caller's. */
static PyObject *write_sources(struct writer *self, const struct dr_source *sources, Py_ssize_t count) {
    struct dr_placed *placed = PyMem_Calloc((size_t)count + 1, sizeof *placed);
    if (!placed)
        return PyErr_NoMemory();
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_writer_write(self->core, sources, (size_t)count, placed, &gil.control, &error);
    gil_take(&gil);
    PyObject *list = NULL;
    if (rc < 0)
        raise_error(state_of((PyObject *)self), &error);
    else
        list = PyList_New(count);
    struct dr_writer_stats writer_stats;
    dr_writer_stats(self->core, &writer_stats);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *tuple = placed_tuple(&placed[i], writer_stats.checksum);
        if (!tuple || PyList_SetItem(list, i, tuple) < 0)
            Py_CLEAR(list);
    }
    PyMem_Free(placed);
    return list;
}

static PyObject *write_views(struct writer *self, const struct tensors *tensors) {
    struct dr_source *sources = PyMem_Calloc((size_t)tensors->count + 1, sizeof *sources);
    if (!sources)
        return PyErr_NoMemory();
    PyObject *list = NULL;
    Py_ssize_t i = 0;
    for (; i < tensors->count && tensors->views[i].kind == TENSOR_PLAIN; i++)
        sources[i] = view_source(&tensors->views[i]);
    if (i < tensors->count)
        PyErr_Format(PyExc_ValueError, "tensor %zd is not plain CPU memory", i);
    else
        list = write_sources(self, sources, tensors->count);
    PyMem_Free(sources);
    return list;
}

static PyObject *write_tensors(PyObject *object, PyObject *argument) {
    struct writer *self = (struct writer *)object;
    const struct tensors *tensors = held_tensors(state_of(object), argument);
    if (!tensors || !enter(self))
        return NULL;
    PyObject *placed = write_views(self, tensors);
    self->busy = false;
    return placed;
}

static PyObject *write_digested(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *list, *bytes;
    if (!PyArg_ParseTuple(args, "OO", &list, &bytes))
        return NULL;
    const struct tensors *tensors = held_tensors(state_of(object), list);
    struct dr_digest_key *key = tensors ? parse_digest_key(bytes) : NULL;
    PyObject *placed = NULL;
    if (key && enter(self)) {
        dr_writer_digest(self->core, key);
        placed = write_views(self, tensors);
        dr_writer_digest(self->core, NULL);
        self->busy = false;
    }
    PyMem_Free(key);
    return placed;
}

static PyObject *write_buffers(struct writer *self, PyObject *list, Py_buffer *views, struct dr_source *sources,
                               Py_ssize_t count) {
    Py_ssize_t held = 0;
    PyObject *placed = NULL;
    for (; held < count; held++) {
        if (PyObject_GetBuffer(PyList_GetItem(list, held), &views[held], PyBUF_SIMPLE) < 0)
            break;
        uint64_t size = (uint64_t)views[held].len;
        sources[held] = (struct dr_source){.data = views[held].buf, .size = size, .total = size};
    }
    if (held == count)
        placed = write_sources(self, sources, count);
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    return placed;
}

static PyObject *write_bytes(PyObject *object, PyObject *list) {
    struct writer *self = (struct writer *)object;
    if (!PyList_Check(list))
        return PyErr_Format(PyExc_TypeError, "expected a list of bytes-like objects");
    if (!enter(self))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    Py_buffer *views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    struct dr_source *sources = PyMem_Calloc((size_t)count + 1, sizeof *sources);
    PyObject *placed = views && sources ? write_buffers(self, list, views, sources, count) : PyErr_NoMemory();
    PyMem_Free(views);
    PyMem_Free(sources);
    self->busy = false;
    return placed;
}

/* A contiguous part, as a source of a tensor of another shape. */
static PyObject *write_part_of(struct writer *self, const struct tensors *tensors, PyObject *shape,
                               uint64_t part_offset) {
    int64_t sizes[DR_MAX_DIMS];
    Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim < 0 || ndim > DR_MAX_DIMS || parse_ints(shape, sizes, ndim) < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "too many dimensions");
    struct dr_source source = view_source(&tensors->views[0]);
    source.shape.ndim = (int)ndim;
    source.shape.sizes = sizes;
    source.strides = NULL;
    source.part_offset = part_offset;
    if (tensors->views[0].kind != TENSOR_PLAIN || !dr_shape_bytes(&source.shape, &source.total) ||
        (source.size && !view_is_contiguous(&tensors->views[0])))
        return PyErr_Format(PyExc_ValueError, "the part is not contiguous CPU memory");
    PyObject *list = write_sources(self, &source, 1);
    PyObject *placed = list ? Py_NewRef(PyList_GetItem(list, 0)) : NULL;
    Py_XDECREF(list);
    return placed;
}

static PyObject *write_part(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *list, *shape;
    unsigned long long part_offset;
    if (!PyArg_ParseTuple(args, "O!O!K", &PyList_Type, &list, &PyTuple_Type, &shape, &part_offset) || !enter(self))
        return NULL;
    struct tensors tensors;
    PyObject *placed = NULL;
    if (tensors_init(&tensors, state_of(object), list) == 0) {
        placed = tensors.count == 1 ? write_part_of(self, &tensors, shape, part_offset)
                                    : PyErr_Format(PyExc_ValueError, "expected one tensor");
        tensors_free(&tensors);
    }
    self->busy = false;
    return placed;
}

static PyObject *overlap(PyObject *object, PyObject *unused) {
    (void)unused;
    struct writer *self = (struct writer *)object;
    if (!enter(self))
        return NULL;
    dr_writer_overlap(self->core);
    self->busy = false;
    Py_RETURN_NONE;
}

static PyObject *finish(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *set = Py_None;
    struct dr_syncs *syncs;
    if (!PyArg_ParseTuple(args, "|O", &set) || !enter(self))
        return NULL;
    if (syncs_take(state_of(object), set, &syncs) < 0) {
        self->busy = false;
        return NULL;
    }
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_writer_finish(self->core, syncs, &gil.control, &error);
    gil_take(&gil);
    syncs_give(set);
    self->busy = false;
    if (rc < 0)
        return raise_error(state_of(object), &error);
    Py_RETURN_NONE;
}

static PyObject *close_writer(PyObject *object, PyObject *unused) {
    (void)unused;
    struct writer *self = (struct writer *)object;
    if (self->busy)
        return PyErr_Format(PyExc_ValueError, "the file writer is in use by another thread");
    close_core(self);
    Py_RETURN_NONE;
}

static PyObject *stats(PyObject *object, PyObject *unused) {
    (void)unused;
    struct writer *self = (struct writer *)object;
    if (!enter(self))
        return NULL;
    struct dr_writer_stats s;
    dr_writer_stats(self->core, &s);
    self->busy = false;
    return Py_BuildValue("(KsO)", (unsigned long long)s.bytes, s.engine ? s.engine : "", s.direct ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"write_tensors", write_tensors, METH_O,
     "write_tensors(Tensors) -> [(offset, length, payload_offset, payload_size, crcs)]"},
    {"write_digested", write_digested, METH_VARARGS,
     "write_digested(Tensors, key) -> [(as write_tensors, digests of the blocks that the CRCs are of)]"},
    {"write_bytes", write_bytes, METH_O, "write_bytes(buffers) -> as write_tensors"},
    {"write_part", write_part, METH_VARARGS,
     "write_part([contiguous part], shape of the whole, bytes before the part) -> as one of write_tensors"},
    {"overlap", overlap, METH_NOARGS, "overlap(): from now on no call but finish waits for the disk"},
    {"finish", finish, METH_VARARGS,
     "finish(syncs=None): the file gets its length and is made durable, or is so once these Syncs were waited for"},
    {"close", close_writer, METH_NOARGS, "close(): frees everything; the file is removed unless it was finished"},
    {"stats", stats, METH_NOARGS, "stats() -> (bytes, engine, direct)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "FileWriter(directory, name, size_hint, options): creates a data file, which must not exist"},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec writer_spec = TYPE_SPEC("FileWriter", struct writer, slots, 0);
