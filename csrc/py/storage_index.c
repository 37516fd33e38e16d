/* dcpring._C.StorageIndex: where items are stored (core/plan/storage_index.h). */
#include "tables.h"

#include "base/crc.h"

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

static void *wrapped(PyObject *object, PyObject *type, const char *name) {
    if ((PyObject *)Py_TYPE(object) == type)
        return object;
    PyErr_Format(PyExc_TypeError, "expected a %s", name);
    return NULL;
}

const struct dr_table *table_of(struct module_state *state, PyObject *object) {
    struct table *self = wrapped(object, state->table_type, "Table");
    return self ? &self->core : NULL;
}

const struct dr_storage_index *storage_index_of(struct module_state *state, PyObject *object) {
    struct storage_index *self = wrapped(object, state->storage_index_type, "StorageIndex");
    return self && turn_is_free(&self->turn, "the storage index") ? &self->core : NULL;
}

/* From here to leave() nobody else can use it; NULL with an exception where somebody does. */
static struct dr_storage_index *enter(PyObject *object) {
    struct storage_index *self = (struct storage_index *)object;
    if (!storage_index_of(state_of(object), object))
        return NULL;
    self->turn.taken = true;
    return &self->core;
}

static void leave(PyObject *object) { turn_give(&((struct storage_index *)object)->turn); }

static PyObject *storage_index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t count;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "n", &count))
        return NULL;
    struct storage_index *self = (struct storage_index *)PyType_GenericAlloc(type, 0);
    DR_NEW_ERROR(error);
    if (self && dr_storage_index_init(&self->core, count > 0 ? (size_t)count : 0, &error) < 0) {
        fail(state_of((PyObject *)self), &error);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void storage_index_dealloc(PyObject *object) {
    dr_storage_index_destroy(&((struct storage_index *)object)->core);
    free_instance(object);
}

static Py_ssize_t storage_index_length(PyObject *object) {
    return (Py_ssize_t)((struct storage_index *)object)->core.count;
}

/* (file, kind, offset, length, payload_offset, payload_size, crcs or None) */
static int set_entry(struct dr_storage_index *storage, Py_ssize_t index, PyObject *entry, struct dr_error *error) {
    const char *file;
    Py_ssize_t file_size, crcs_size = 0;
    unsigned char kind;
    unsigned long long offset, length, payload_offset, payload_size;
    const char *crcs;
    if (!PyArg_ParseTuple(entry, "s#bKKKKz#", &file, &file_size, &kind, &offset, &length, &payload_offset,
                          &payload_size, &crcs, &crcs_size))
        return -1;
    bool sums = crcs && crcs_size;
    if (offset > INT64_MAX || length > INT64_MAX - offset ||
        (kind != DR_STORAGE_OTHER &&
         (payload_offset < offset || payload_size > length || payload_offset - offset > length - payload_size)))
        return PyErr_Format(PyExc_ValueError, "a place that is out of range"), -1;
    if (kind > DR_STORAGE_OTHER || file_size > INT32_MAX ||
        (sums && (size_t)crcs_size != 4 * dr_crc_count(payload_offset, payload_size))) {
        PyErr_SetString(PyExc_ValueError, "a bad place");
        return -1;
    }
    struct dr_storage_entry place = {.offset = offset,
                                     .length = length,
                                     .payload_offset = payload_offset,
                                     .payload_size = payload_size,
                                     .kind = kind};
    int rc = dr_storage_index_file(storage, file, (uint32_t)file_size, &place.file, error);
    return rc ? rc : dr_storage_index_set(storage, (size_t)index, &place, sums ? crcs : NULL, error);
}

/* Which entry the i-th of a list is for; -1 with an exception. */
static Py_ssize_t index_of(const struct dr_storage_index *storage, PyObject *indices, Py_ssize_t i) {
    PyObject *number = indices ? PyList_GetItem(indices, i) : NULL; /* other threads may have shortened the list */
    if (indices && !number)
        return -1;
    Py_ssize_t index = number ? PyLong_AsSsize_t(number) : i;
    if (index >= 0 && (size_t)index < storage->count)
        return index;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "entry %zd of %zu", index, storage->count);
    return -1;
}

static int put_all(struct module_state *state, struct dr_storage_index *storage, PyObject *list, PyObject *indices) {
    if (PyList_Size(list) != (indices ? PyList_Size(indices) : (Py_ssize_t)storage->count)) {
        PyErr_SetString(PyExc_ValueError, "expected a list of as many entries as indices, or as there are");
        return -1;
    }
    DR_NEW_ERROR(error);
    int rc = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < PyList_Size(list); i++) {
        Py_ssize_t index = index_of(storage, indices, i);
        rc = index < 0 ? -1 : set_entry(storage, index, PyList_GetItem(list, i), &error);
        if (rc == 0)
            rc = gil_turn((size_t)i);
        else if (!PyErr_Occurred())
            fail(state, &error);
    }
    return rc;
}

static PyObject *put(PyObject *object, PyObject *args) {
    PyObject *list, *indices = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyList_Type, &list, &PyList_Type, &indices))
        return NULL;
    struct dr_storage_index *storage = enter(object);
    if (!storage)
        return NULL;
    int rc = put_all(state_of(object), storage, list, indices);
    leave(object);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

static int note_one(struct dr_storage_index *storage, Py_ssize_t index, uint32_t file, bool has_crcs,
                    unsigned char kind, const struct dr_placed *p, struct dr_error *error) {
    struct dr_storage_entry place = {.offset = p->offset,
                                     .length = p->length,
                                     .payload_offset = p->payload_offset,
                                     .payload_size = p->payload_size,
                                     .file = file,
                                     .kind = kind};
    bool sums = has_crcs && dr_crc_count(p->payload_offset, p->payload_size);
    return dr_storage_index_set(storage, (size_t)index, &place, sums ? p->crcs : NULL, error);
}

int storage_index_note(struct module_state *state, PyObject *object, const struct storage_file *file,
                       PyObject *positions, const unsigned char *kinds, unsigned char kind,
                       const struct dr_placed *placed, Py_ssize_t count) {
    if (!storage_index_of(state, object))
        return -1;
    struct dr_storage_index *storage = enter(object);
    uint32_t number = 0;
    DR_NEW_ERROR(error);
    int rc = -1;
    if (positions ? PyList_Size(positions) != count : (size_t)count > storage->count)
        PyErr_SetString(PyExc_ValueError, "expected a position for each");
    else
        rc = count ? dr_storage_index_file(storage, file->name, (uint32_t)file->name_size, &number, &error) : 0;
    for (Py_ssize_t i = 0; rc == 0 && i < count; i++) {
        Py_ssize_t index = index_of(storage, positions, i);
        rc = index < 0 ? -1
                       : note_one(storage, index, number, file->has_crcs, kinds ? kinds[i] : kind, &placed[i], &error);
        if (rc == 0)
            rc = gil_turn((size_t)i);
    }
    if (rc < 0 && !PyErr_Occurred())
        fail(state, &error);
    leave(object);
    return rc;
}

static size_t bytes_of_entries(const struct dr_storage_index *storage) {
    return storage->count * sizeof *storage->entries + storage->crcs.size;
}

static int merge_into(struct dr_storage_index *into, const struct dr_storage_index *from, const Py_buffer *indices,
                      struct dr_error *error) {
    uint32_t *aligned = PyMem_Malloc((size_t)indices->len + 4);
    if (!aligned)
        return dr_error_memory(error);
    memcpy(aligned, indices->buf, (size_t)indices->len);
    struct gil gil;
    gil_release_for(&gil, bytes_of_entries(from));
    int rc = dr_storage_index_merge(into, from, aligned, (size_t)indices->len / 4, error);
    gil_take(&gil);
    PyMem_Free(aligned);
    return rc;
}

static PyObject *merge(PyObject *object, PyObject *args) {
    PyObject *other;
    Py_buffer indices;
    struct module_state *state = state_of(object);
    if (!PyArg_ParseTuple(args, "Oy*", &other, &indices))
        return NULL;
    struct dr_storage_index *into = storage_index_of(state, other) ? enter(object) : NULL;
    struct dr_storage_index *from = into ? enter(other) : NULL; /* an error where it is the same */
    DR_NEW_ERROR(error);
    if (from && merge_into(into, from, &indices, &error) < 0)
        fail(state, &error);
    if (from)
        leave(other);
    if (into)
        leave(object);
    PyBuffer_Release(&indices);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *encode(PyObject *object, PyObject *unused) {
    (void)unused;
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    const struct dr_storage_index *storage = enter(object);
    if (!storage)
        return NULL;
    struct gil gil;
    gil_release_for(&gil, bytes_of_entries(storage));
    int rc = dr_storage_index_encode(storage, &out, &error);
    gil_take(&gil);
    leave(object);
    return bytes_of(state_of(object), rc, &out, &error);
}

static PyObject *file_object(const struct dr_storage_index *storage, uint32_t file) {
    return PyUnicode_DecodeUTF8(dr_table_text(&storage->files, file), (Py_ssize_t)storage->files.names[file].size,
                                NULL);
}

static PyObject *get(PyObject *object, PyObject *argument) {
    const struct dr_storage_index *storage = storage_index_of(state_of(object), object);
    Py_ssize_t i = PyLong_AsSsize_t(argument);
    if (!storage)
        return NULL;
    if (i < 0 || (size_t)i >= storage->count)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "place %zd", i);
    const struct dr_storage_entry *p = &storage->entries[i];
    if (p->kind == DR_STORAGE_NONE)
        Py_RETURN_NONE;
    const char *crcs = p->has_crcs ? (const char *)storage->crcs.data + p->crcs : NULL;
    Py_ssize_t size = p->has_crcs ? (Py_ssize_t)(4 * dr_crc_count(p->payload_offset, p->payload_size)) : 0;
    return Py_BuildValue("(NiKKKKy#)", file_object(storage, p->file), (int)p->kind, (unsigned long long)p->offset,
                         (unsigned long long)p->length, (unsigned long long)p->payload_offset,
                         (unsigned long long)p->payload_size, crcs, size);
}

/* Where each file must reach to at least. */
static PyObject *file_sizes(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct dr_storage_index *storage = storage_index_of(state_of(object), object);
    if (!storage)
        return NULL;
    size_t count = storage->files.name_count;
    uint64_t *ends = PyMem_Calloc(count + 1, sizeof *ends);
    PyObject *dict = ends ? PyDict_New() : PyErr_NoMemory();
    for (size_t i = 0; dict && i < storage->count; i++) {
        const struct dr_storage_entry *p = &storage->entries[i];
        if (p->kind != DR_STORAGE_NONE && p->offset + p->length > ends[p->file])
            ends[p->file] = p->offset + p->length;
    }
    for (uint32_t f = 0; dict && f < count; f++) {
        PyObject *name = file_object(storage, f), *end = PyLong_FromUnsignedLongLong(ends[f]);
        if (!name || !end || PyDict_SetItem(dict, name, end) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(name);
        Py_XDECREF(end);
    }
    PyMem_Free(ends);
    return dict;
}

static PyMethodDef methods[] = {
    {"put", put, METH_VARARGS,
     "put([(file, kind, offset, length, payload_offset, payload_size, crcs or None)], indices): sets these entries, or "
     "all; kinds: 0 a plain tensor, 1 bytes, 2 other"},
    {"merge", merge, METH_VARARGS, "merge(storage, indices as uint32): copies entries to these indices"},
    {"encode", encode, METH_NOARGS, "encode() -> bytes"},
    {"get", get, METH_O, "get(i) -> as put takes it; None where nothing is stored"},
    {"file_sizes", file_sizes, METH_NOARGS, "file_sizes() -> {file: bytes it must have at least}"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "StorageIndex(count): where items are stored"},
    {Py_tp_new, storage_index_new},
    {Py_tp_dealloc, storage_index_dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, storage_index_length},
    {0, NULL},
};

PyType_Spec storage_index_spec = TYPE_SPEC("StorageIndex", struct storage_index, slots, 0);

static PyObject *decode_storage_index(PyObject *module, PyObject *args) {
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    struct module_state *state = module_state(module);
    struct storage_index *self =
        (struct storage_index *)PyType_GenericAlloc((PyTypeObject *)state->storage_index_type, 0);
    DR_NEW_ERROR(error);
    if (self) {
        struct gil gil;
        gil_release_for(&gil, (size_t)data.len);
        int rc = dr_storage_index_decode(&self->core, data.buf, (size_t)data.len, &gil.control, &error);
        gil_take(&gil);
        if (rc < 0) {
            Py_CLEAR(self);
            fail(state, &error);
        }
    }
    PyBuffer_Release(&data);
    return (PyObject *)self;
}

PyMethodDef storage_index_methods[] = {
    {"decode_storage_index", decode_storage_index, METH_VARARGS, "decode_storage_index(bytes) -> StorageIndex"},
    {NULL, NULL, 0, NULL},
};
