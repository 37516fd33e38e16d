/* dcpring._C.FileWriter: one data file being written (core/data/save.h). */
#include "module.h"

#include "tables.h"
#include "tensors.h"

#include "base/crc.h"
#include "data/save.h"

struct writer {
    PyObject_HEAD
    struct dr_writer *core;
    PyObject *watch; /* which the core writes to, or None */
    PyObject *name;  /* of the file, as a str */
    struct turn turn;
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

static const char what_it_is[] = "the file writer";

static bool enter(struct writer *self) { return turn_take(&self->turn, self->core != NULL, what_it_is); }

/* Opens a file below a directory, both as bytes of the file system. */
static PyObject *open_writer(PyTypeObject *type, const char *directory, const char *name, PyObject *text,
                             uint64_t size_hint, PyObject *tuple) {
    struct dr_options options;
    if (parse_options(PyType_GetModuleState(type), tuple, &options) < 0)
        return NULL;
    struct writer *self = (struct writer *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->watch = Py_NewRef(PyTuple_GetItem(tuple, PyTuple_Size(tuple) - 1));
    self->name = Py_NewRef(text);
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
    PyObject *directory = NULL, *name, *path = NULL, *tuple, *self = NULL;
    unsigned long long size_hint;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&UKO!", names, PyUnicode_FSConverter, &directory, &name,
                                     &size_hint, &PyTuple_Type, &tuple))
        return NULL;
    if (PyUnicode_FSConverter(name, &path))
        self = open_writer(type, PyBytes_AsString(directory), PyBytes_AsString(path), name, size_hint, tuple);
    Py_DECREF(directory);
    Py_XDECREF(path);
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
    Py_XDECREF(((struct writer *)object)->name);
    free_instance(object);
}

/* Where places are noted: positions of entries (NULL: all, in order), and the kind of each (NULL: `kind` for all). */
struct noting {
    PyObject *storage, *positions;
    Py_buffer kinds;
    unsigned char kind;
};

/* The arguments after the first: storage, positions or None, kinds or None. */
static int noting_init(struct noting *noting, PyObject *storage, PyObject *positions, PyObject *kinds,
                       unsigned char kind) {
    *noting = (struct noting){.storage = storage, .kind = kind};
    if (positions && positions != Py_None) {
        if (!PyList_Check(positions)) {
            PyErr_SetString(PyExc_TypeError, "positions must be a list, or None");
            return -1;
        }
        noting->positions = positions;
    }
    return kinds && kinds != Py_None ? PyObject_GetBuffer(kinds, &noting->kinds, PyBUF_SIMPLE) : 0;
}

static void noting_free(struct noting *noting) {
    if (noting->kinds.obj)
        PyBuffer_Release(&noting->kinds);
}

static int note_all(struct writer *self, const struct noting *noting, const struct dr_placed *placed,
                    Py_ssize_t count) {
    Py_ssize_t size;
    const char *name = PyUnicode_AsUTF8AndSize(self->name, &size);
    struct dr_writer_stats written;
    dr_writer_stats(self->core, &written);
    const unsigned char *kinds = noting->kinds.obj ? noting->kinds.buf : NULL;
    if (!name)
        return -1;
    if (kinds && noting->kinds.len != count) {
        PyErr_SetString(PyExc_ValueError, "expected one kind for each");
        return -1;
    }
    struct storage_file file = {.name = name, .name_size = size, .has_crcs = written.checksum};
    return storage_index_note(state_of((PyObject *)self), noting->storage, &file, noting->positions, kinds,
                              noting->kind, placed, count);
}

/* Bytes of the digests of all of them: a list with an element for each. */
static PyObject *digests_of(const struct dr_placed *placed, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        size_t blocks = dr_crc_count(placed[i].payload_offset, placed[i].payload_size);
        PyObject *made =
            PyBytes_FromStringAndSize((const char *)placed[i].digests, (Py_ssize_t)(blocks * DR_DIGEST_BYTES));
        if (!made || PyList_SetItem(list, i, made) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Writes, notes where (but for NULL), and returns how many bytes of payload were noted, or the digests where there
 * are some. The sources' memory is the caller's. */
static PyObject *write_sources(struct writer *self, const struct dr_source *sources, Py_ssize_t count,
                               const struct noting *noting) {
    struct dr_placed *placed = PyMem_Calloc((size_t)count + 1, sizeof *placed);
    if (!placed)
        return PyErr_NoMemory();
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_writer_write(self->core, sources, (size_t)count, placed, &gil.control, &error);
    gil_take(&gil);
    if (rc < 0)
        raise_error(state_of((PyObject *)self), &error);
    else if (noting)
        rc = note_all(self, noting, placed, count);
    PyObject *result = NULL;
    if (rc == 0 && count && placed[0].digests) {
        result = digests_of(placed, count);
    } else if (rc == 0) {
        unsigned long long bytes = 0;
        for (Py_ssize_t i = 0; noting && i < count; i++)
            bytes += placed[i].payload_size;
        result = PyLong_FromUnsignedLongLong(bytes);
    }
    PyMem_Free(placed);
    return result;
}

static PyObject *write_views(struct writer *self, const struct tensors *tensors, const struct noting *noting) {
    struct dr_source *sources = PyMem_Calloc((size_t)tensors->count + 1, sizeof *sources);
    if (!sources)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    Py_ssize_t i = 0;
    for (; i < tensors->count && tensors->views[i].kind == TENSOR_PLAIN; i++)
        sources[i] = view_source(&tensors->views[i]);
    if (i < tensors->count)
        PyErr_Format(PyExc_ValueError, "tensor %zd is not plain CPU memory", i);
    else
        result = write_sources(self, sources, tensors->count, noting);
    PyMem_Free(sources);
    return result;
}

static PyObject *write_tensors(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *list, *storage, *positions = NULL, *kinds = NULL, *bytes = Py_None;
    if (!PyArg_ParseTuple(args, "OO|OOO", &list, &storage, &positions, &kinds, &bytes))
        return NULL;
    const struct tensors *tensors = held_tensors(state_of(object), list);
    struct noting noting;
    if (!tensors || noting_init(&noting, storage, positions, kinds, DR_STORAGE_TENSOR) < 0)
        return NULL;
    struct dr_digest_key *key = bytes == Py_None ? NULL : parse_digest_key(bytes);
    PyObject *result = NULL;
    if ((key || bytes == Py_None) && enter(self)) {
        dr_writer_digest(self->core, key);
        result = write_views(self, tensors, &noting);
        dr_writer_digest(self->core, NULL);
        turn_give(&self->turn);
    }
    PyMem_Free(key);
    noting_free(&noting);
    return result;
}

static PyObject *write_buffers(struct writer *self, PyObject *list, Py_buffer *views, struct dr_source *sources,
                               Py_ssize_t count, const struct noting *noting) {
    Py_ssize_t held = 0;
    PyObject *result = NULL;
    for (; held < count; held++) {
        if (PyObject_GetBuffer(PyList_GetItem(list, held), &views[held], PyBUF_SIMPLE) < 0)
            break;
        uint64_t size = (uint64_t)views[held].len;
        sources[held] = (struct dr_source){.data = views[held].buf, .size = size, .total = size};
    }
    if (held == count)
        result = write_sources(self, sources, count, noting);
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *write_bytes(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *list, *storage = Py_None, *positions = NULL;
    struct noting noting;
    if (!PyArg_ParseTuple(args, "O!|OO", &PyList_Type, &list, &storage, &positions) ||
        noting_init(&noting, storage, positions, NULL, DR_STORAGE_BYTES) < 0 || !enter(self))
        return NULL;
    Py_ssize_t count = PyList_Size(list);
    Py_buffer *views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    struct dr_source *sources = PyMem_Calloc((size_t)count + 1, sizeof *sources);
    const struct noting *noted = storage == Py_None ? NULL : &noting;
    PyObject *result = views && sources ? write_buffers(self, list, views, sources, count, noted) : PyErr_NoMemory();
    PyMem_Free(views);
    PyMem_Free(sources);
    turn_give(&self->turn);
    return result;
}

/* A contiguous part, as a source of a tensor of another shape. */
static PyObject *write_part_of(struct writer *self, const struct tensors *tensors, PyObject *shape,
                               uint64_t part_offset, const struct noting *noting) {
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
    bool is_last = part_offset + source.size == source.total;
    return write_sources(self, &source, 1, is_last ? noting : NULL);
}

static PyObject *write_part(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *list, *shape, *storage, *positions = NULL, *kinds = NULL;
    unsigned long long part_offset;
    struct noting noting;
    if (!PyArg_ParseTuple(args, "O!O!KO|OO", &PyList_Type, &list, &PyTuple_Type, &shape, &part_offset, &storage,
                          &positions, &kinds) ||
        noting_init(&noting, storage, positions, kinds, DR_STORAGE_TENSOR) < 0)
        return NULL;
    struct tensors tensors;
    PyObject *result = NULL;
    if (enter(self)) {
        if (tensors_init(&tensors, state_of(object), list) == 0) {
            result = tensors.count == 1 ? write_part_of(self, &tensors, shape, part_offset, &noting)
                                        : PyErr_Format(PyExc_ValueError, "expected one tensor");
            tensors_free(&tensors);
        }
        turn_give(&self->turn);
    }
    noting_free(&noting);
    return result;
}

static PyObject *overlap(PyObject *object, PyObject *unused) {
    (void)unused;
    struct writer *self = (struct writer *)object;
    if (!enter(self))
        return NULL;
    dr_writer_overlap(self->core);
    turn_give(&self->turn);
    Py_RETURN_NONE;
}

static PyObject *finish(PyObject *object, PyObject *args) {
    struct writer *self = (struct writer *)object;
    PyObject *set = Py_None;
    struct dr_syncs *syncs;
    if (!PyArg_ParseTuple(args, "|O", &set) || !enter(self))
        return NULL;
    if (syncs_take(state_of(object), set, &syncs) < 0) {
        turn_give(&self->turn);
        return NULL;
    }
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_writer_finish(self->core, syncs, &gil.control, &error);
    gil_take(&gil);
    syncs_give(set);
    turn_give(&self->turn);
    if (rc < 0)
        return raise_error(state_of(object), &error);
    Py_RETURN_NONE;
}

static PyObject *close_writer(PyObject *object, PyObject *unused) {
    (void)unused;
    struct writer *self = (struct writer *)object;
    if (!turn_is_free(&self->turn, what_it_is))
        return NULL;
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
    turn_give(&self->turn);
    return Py_BuildValue("(KsO)", (unsigned long long)s.bytes, s.engine ? s.engine : "", s.direct ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"write_tensors", write_tensors, METH_VARARGS,
     "write_tensors(Tensors, StorageIndex, positions=None, kinds=None, key=None) -> bytes: notes where each lies in "
     "the index at these positions (all, in order) as of these kinds (0); with a key -> [digests of each one's "
     "blocks]"},
    {"write_bytes", write_bytes, METH_VARARGS,
     "write_bytes(buffers, StorageIndex=None, positions=None) -> bytes: likewise, as kind 1"},
    {"write_part", write_part, METH_VARARGS,
     "write_part([contiguous part], shape of the whole, bytes before the part, StorageIndex, [position], kinds): notes "
     "the whole with its last part"},
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
