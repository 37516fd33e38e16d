/* dcpring._C.Table: the rows of a plan (core/plan/table.h), made from tensors, and turned into bytes or a pickle. */
#include "tables.h"

#include "tensors.h"

#include "plan/metadata_pickle.h"
#include "plan/strides.h"

#include <stdio.h>

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

PyObject *ints_tuple(const int64_t *ints, int count) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(ints[i]);
        if (!number || PyTuple_SetItem(tuple, i, number) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *table_new(struct module_state *state) {
    struct table *self = (struct table *)PyType_GenericAlloc((PyTypeObject *)state->table_type, 0);
    if (self)
        dr_table_init(&self->core);
    return (PyObject *)self;
}

/* ---- making one ---- */

struct builder {
    struct module_state *state;
    struct dr_table *table;
    PyObject *names, *paths, *values, *describe;
    const char *flags;
    struct tensors tensors;
    struct dr_error error;
};

/* Flags of a plain tensor, as make_table takes them: two end up in the properties, two in the row. */
enum { REQUIRES_GRAD = 1, PINNED = 2, ROW_FLAGS_SHIFT = 2, WITH_STRIDES = 16 };

static int no_core_error(struct builder *b, int rc) {
    if (rc < 0)
        fail(b->state, &b->error);
    return rc;
}

/* The bytes that Python's format.properties.encode_properties makes for a strided tensor. */
static int plain_properties(struct builder *b, const struct tensor_view *tensor, char flags, uint16_t *out) {
    const struct dr_dtype *dtype = tensor->dtype;
    char encoding[96 + DR_MAX_STRIDES_BYTES];
    size_t dtype_size = (size_t)snprintf(encoding, sizeof encoding, "torch.%s", dtype->name);
    size_t size = dtype_size + 1 + (size_t)snprintf(encoding + dtype_size + 1, 32, "torch.strided");
    encoding[size++] = 0;
    encoding[size++] = flags & REQUIRES_GRAD ? 1 : 0;
    encoding[size++] = 0;
    encoding[size++] = flags & PINNED ? 1 : 0;
    if (flags & WITH_STRIDES)
        size += dr_strides_encode(tensor->sizes, tensor->strides, (int)tensor->ndim, encoding + size);
    struct dr_properties properties = {encoding, (uint32_t)size, (uint32_t)dtype_size, dtype->item_size};
    return no_core_error(b, dr_table_properties(b->table, &properties, out, &b->error));
}

static int append(struct builder *b, uint32_t name, const struct dr_row_view *view) {
    return no_core_error(b, dr_table_append(b->table, name, view, &b->error));
}

static int append_plain(struct builder *b, uint32_t name, const struct tensor_view *tensor, char flags) {
    int64_t dims[3 * DR_TABLE_MAX_DIMS];
    int n = (int)tensor->ndim;
    for (int d = 0; d < n; d++) {
        dims[d] = dims[2 * n + d] = tensor->sizes[d];
        dims[n + d] = 0;
    }
    struct dr_row_view view = {
        .type = DR_ROW_TENSOR, .flags = (unsigned)(flags >> ROW_FLAGS_SHIFT) & 3, .ndim = n, .dims = dims};
    if (plain_properties(b, tensor, flags, &view.properties) < 0)
        return -1;
    return append(b, name, &view);
}

/* (type, size, offsets, lengths, properties, bytes of the dtype in these, item_bytes, flags) */
static int append_spec(struct builder *b, uint32_t name, PyObject *spec) {
    int type;
    PyObject *size, *offsets, *lengths;
    const char *encoding;
    Py_ssize_t encoding_size;
    unsigned dtype_size, item_bytes, flags;
    if (!PyArg_ParseTuple(spec, "iOOOy#III", &type, &size, &offsets, &lengths, &encoding, &encoding_size, &dtype_size,
                          &item_bytes, &flags))
        return -1;
    int64_t dims[3 * DR_TABLE_MAX_DIMS];
    Py_ssize_t n = PyTuple_Size(size);
    if (n < 0 || n > DR_TABLE_MAX_DIMS || encoding_size > 4096 || dtype_size > encoding_size) {
        PyErr_SetString(PyExc_ValueError, "a tensor has too many dimensions");
        return -1;
    }
    if (parse_ints(size, dims, n) < 0 || parse_ints(offsets, dims + n, n) < 0 ||
        parse_ints(lengths, dims + 2 * n, n) < 0)
        return -1;
    if (!dr_dims_good(dims, (int)n, item_bytes)) {
        PyErr_SetString(PyExc_ValueError, "a size or offset is negative or too large");
        return -1;
    }
    struct dr_properties properties = {(char *)encoding, (uint32_t)encoding_size, dtype_size, item_bytes};
    struct dr_row_view view = {.type = (enum dr_row_type)(type & 3), .flags = flags & 3, .ndim = (int)n, .dims = dims};
    if (no_core_error(b, dr_table_properties(b->table, &properties, &view.properties, &b->error)) < 0)
        return -1;
    return append(b, name, &view);
}

static int append_value(struct builder *b, uint32_t name, PyObject *value, Py_ssize_t *tensor, char flags) {
    if (value == Py_None || value == Py_Ellipsis) {
        struct dr_row_view view = {.type = value == Py_None ? DR_ROW_BYTES : DR_ROW_NAME,
                                   .flags = (unsigned)(flags >> ROW_FLAGS_SHIFT) & 1};
        return append(b, name, &view);
    }
    if (PyTuple_Check(value))
        return append_spec(b, name, value);
    if (PyList_Check(value)) {
        int rc = 0;
        for (Py_ssize_t i = 0; rc == 0 && i < PyList_Size(value); i++)
            rc = append_spec(b, name, PyList_GetItem(value, i));
        return rc;
    }
    const struct tensor_view *view = &b->tensors.views[(*tensor)++];
    if (view->kind != TENSOR_OTHER)
        return append_plain(b, name, view, flags);
    PyObject *spec = PyObject_CallFunctionObjArgs(b->describe, PyList_GetItem(b->names, name), value, NULL);
    int rc = !spec ? -1 : append_spec(b, name, spec);
    Py_XDECREF(spec);
    return rc;
}

const char *utf8_of(PyObject *name, Py_ssize_t *size, PyObject **held) {
    const char *text = PyUnicode_AsUTF8AndSize(name, size);
    if (text || !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
        return text;
    PyErr_Clear();
    *held = PyUnicode_AsEncodedString(name, "utf-8", "surrogatepass");
    char *bytes = NULL;
    return *held && PyBytes_AsStringAndSize(*held, &bytes, size) == 0 ? bytes : NULL;
}

static int append_name(struct builder *b, Py_ssize_t i, uint32_t *name) {
    Py_ssize_t size, path_size = 0;
    PyObject *held = NULL;
    const char *text = utf8_of(PyList_GetItem(b->names, i), &size, &held);
    char *path = "";
    int rc = -1;
    if (text && (b->paths == Py_None || PyBytes_AsStringAndSize(PyList_GetItem(b->paths, i), &path, &path_size) == 0)) {
        if (size > INT32_MAX || path_size > INT32_MAX)
            PyErr_SetString(PyExc_ValueError, "a name is too long");
        else
            rc = no_core_error(b, dr_table_name(b->table, text, (uint32_t)size, path, (uint32_t)path_size, DR_NO_NAME,
                                                name, &b->error));
    }
    Py_XDECREF(held);
    return rc;
}

static int append_named(struct builder *b, Py_ssize_t i, Py_ssize_t *tensor) {
    uint32_t name;
    size_t before = b->table->name_count;
    if (append_name(b, i, &name) < 0)
        return -1;
    if (b->table->name_count == before) {
        PyErr_Format(PyExc_ValueError, "the name %R comes twice", PyList_GetItem(b->names, i));
        return -1;
    }
    return append_value(b, name, PyList_GetItem(b->values, i), tensor, b->flags[i]);
}

static PyObject *tensors_among(PyObject *values) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < PyList_Size(values); i++) {
        PyObject *value = PyList_GetItem(values, i);
        bool tensor = value != Py_None && value != Py_Ellipsis && !PyTuple_Check(value) && !PyList_Check(value);
        if (tensor && PyList_Append(list, value) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static int build(struct builder *b) {
    PyObject *tensors = tensors_among(b->values);
    if (!tensors)
        return -1;
    int rc = tensors_init(&b->tensors, b->state, tensors);
    Py_ssize_t tensor = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < PyList_Size(b->names); i++)
        rc = append_named(b, i, &tensor);
    if (b->tensors.shim)
        tensors_free(&b->tensors);
    Py_DECREF(tensors);
    return rc;
}

static PyObject *make_table(PyObject *module, PyObject *args) {
    struct builder b = {.state = module_state(module)};
    Py_ssize_t flag_count;
    if (!PyArg_ParseTuple(args, "O!OO!y#O", &PyList_Type, &b.names, &b.paths, &PyList_Type, &b.values, &b.flags,
                          &flag_count, &b.describe))
        return NULL;
    Py_ssize_t count = PyList_Size(b.names);
    if (PyList_Size(b.values) != count || flag_count != count ||
        (b.paths != Py_None && (!PyList_Check(b.paths) || PyList_Size(b.paths) != count)))
        return PyErr_Format(PyExc_ValueError, "names, paths, values and flags differ in length");
    dr_error_clear(&b.error);
    PyObject *self = table_new(b.state);
    if (!self)
        return NULL;
    b.table = &((struct table *)self)->core;
    if (build(&b) < 0)
        Py_CLEAR(self);
    return self;
}

static PyObject *decode_table(PyObject *module, PyObject *args) {
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    struct module_state *state = module_state(module);
    DR_NEW_ERROR(error);
    PyObject *self = table_new(state);
    if (self) {
        struct gil gil;
        gil_release_for(&gil, (size_t)data.len);
        int rc = dr_table_decode(&((struct table *)self)->core, data.buf, (size_t)data.len, &gil.control, &error);
        gil_take(&gil);
        if (rc < 0) {
            Py_CLEAR(self);
            fail(state, &error);
        }
    }
    PyBuffer_Release(&data);
    return self;
}

/* ---- looking at one ---- */

static void table_dealloc(PyObject *object) {
    dr_table_destroy(&((struct table *)object)->core);
    free_instance(object);
}

static Py_ssize_t table_length(PyObject *object) { return (Py_ssize_t)((struct table *)object)->core.count; }

static PyObject *encode(PyObject *object, PyObject *unused) {
    (void)unused;
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    const struct dr_table *table = &((struct table *)object)->core;
    struct gil gil;
    gil_release_for(&gil, table->count * sizeof *table->rows + table->text_size);
    int rc = dr_table_encode(table, &out, &error);
    gil_take(&gil);
    return bytes_of(state_of(object), rc, &out, &error);
}

PyObject *table_name(const struct dr_table *table, uint32_t name) {
    return PyUnicode_DecodeUTF8(dr_table_text(table, name), (Py_ssize_t)table->names[name].size, "surrogatepass");
}

static PyObject *names(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct dr_table *table = &((struct table *)object)->core;
    PyObject *list = PyList_New((Py_ssize_t)table->count);
    PyObject *last = NULL;
    for (size_t i = 0; list && i < table->count; i++) {
        bool same = last && table->rows[i].name == table->rows[i - 1].name;
        PyObject *name = same ? Py_NewRef(last) : table_name(table, table->rows[i].name);
        if (!name || PyList_SetItem(list, (Py_ssize_t)i, name) < 0 || gil_turn(i) < 0)
            Py_CLEAR(list);
        last = name;
    }
    return list;
}

static PyObject *row(PyObject *object, PyObject *argument) {
    const struct dr_table *table = &((struct table *)object)->core;
    Py_ssize_t i = PyLong_AsSsize_t(argument);
    if (i < 0 || (size_t)i >= table->count)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "row %zd", i);
    const struct dr_row *r = &table->rows[i];
    return Py_BuildValue("(NiNNNii)", table_name(table, r->name), (int)r->type,
                         ints_tuple(dr_row_size(table, r), r->ndim), ints_tuple(dr_row_offsets(table, r), r->ndim),
                         ints_tuple(dr_row_lengths(table, r), r->ndim), (int)r->properties, (int)r->flags);
}

static PyObject *column(PyObject *object, uint8_t (*of)(const struct dr_row *)) {
    const struct dr_table *table = &((struct table *)object)->core;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)table->count);
    for (size_t i = 0; bytes && i < table->count; i++)
        PyBytes_AsString(bytes)[i] = (char)of(&table->rows[i]);
    return bytes;
}

static uint8_t type_of(const struct dr_row *r) { return r->type; }

static uint8_t flags_of(const struct dr_row *r) { return r->flags; }

static PyObject *flags(PyObject *object, PyObject *unused) {
    (void)unused;
    return column(object, flags_of);
}

static PyObject *types(PyObject *object, PyObject *unused) {
    (void)unused;
    return column(object, type_of);
}

static PyObject *sizes(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct dr_table *table = &((struct table *)object)->core;
    PyObject *list = PyList_New((Py_ssize_t)table->count);
    for (size_t i = 0; list && i < table->count; i++) {
        PyObject *size = PyLong_FromUnsignedLongLong(dr_row_bytes(table, &table->rows[i]));
        if (!size || PyList_SetItem(list, (Py_ssize_t)i, size) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *properties(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct dr_table *table = &((struct table *)object)->core;
    PyObject *list = PyList_New((Py_ssize_t)table->property_count);
    for (size_t i = 0; list && i < table->property_count; i++) {
        const struct dr_properties *p = &table->properties[i];
        PyObject *bytes = PyBytes_FromStringAndSize(p->encoding, (Py_ssize_t)p->size);
        if (!bytes || PyList_SetItem(list, (Py_ssize_t)i, bytes) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* ---- as a pickle ---- */

static int fragments_of(PyObject *list, struct dr_fragment *out, size_t count) {
    if (!PyList_Check(list) || (size_t)PyList_Size(list) != count) {
        PyErr_SetString(PyExc_ValueError, "expected one fragment for each of the properties");
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyList_GetItem(list, (Py_ssize_t)i), &data, &size) < 0)
            return -1;
        out[i] = (struct dr_fragment){data, (size_t)size};
    }
    return 0;
}

static PyObject *write_pickle(struct module_state *state, const struct dr_table *table,
                              const struct dr_storage_index *storage, const struct dr_metadata_parts *parts) {
    DR_NEW_ERROR(error);
    struct dr_buffer out = {0};
    struct gil gil;
    gil_release_for(&gil, table->count * sizeof *table->rows + table->text_size);
    int rc = dr_metadata_pickle(table, storage, parts, &out, &error);
    gil_take(&gil);
    return bytes_of(state, rc, &out, &error);
}

static PyObject *pickle(PyObject *object, PyObject *args) {
    const struct dr_table *table = &((struct table *)object)->core;
    PyObject *storage, *list, *bytes = NULL;
    struct dr_metadata_parts parts;
    Py_ssize_t storage_meta_size, version_size;
    int mappings;
    struct module_state *state = state_of(object);
    if (!PyArg_ParseTuple(args, "OOy#y#p", &storage, &list, &parts.storage_meta.data, &storage_meta_size,
                          &parts.version.data, &version_size, &mappings))
        return NULL;
    const struct dr_storage_index *stored = storage == Py_None ? NULL : storage_index_of(state, storage);
    if (storage != Py_None && !stored)
        return NULL;
    if (stored && stored->count != table->count)
        return PyErr_Format(PyExc_ValueError, "a storage index of %zu for %zu rows", stored->count, table->count);
    struct dr_fragment *fragments = PyMem_Calloc(table->property_count + 1, sizeof *fragments);
    if (!fragments)
        return PyErr_NoMemory();
    parts.properties = fragments;
    parts.storage_meta.size = (size_t)storage_meta_size;
    parts.version.size = (size_t)version_size;
    parts.mappings = mappings;
    if (fragments_of(list, fragments, table->property_count) == 0)
        bytes = write_pickle(state, table, stored, &parts);
    PyMem_Free(fragments);
    return bytes;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_NOARGS, "encode() -> bytes"},
    {"names", names, METH_NOARGS, "names() -> the name of each row"},
    {"types", types, METH_NOARGS, "types() -> bytes: 0 object, 1 tensor, 2 shard, 3 only a name"},
    {"flags", flags, METH_NOARGS, "flags() -> bytes: 1 hashed, 2 divisible"},
    {"sizes", sizes, METH_NOARGS, "sizes() -> the bytes of each row's chunk"},
    {"row", row, METH_O, "row(i) -> (name, type, size, offsets, lengths, index of properties, flags)"},
    {"properties", properties, METH_NOARGS, "properties() -> [bytes]"},
    {"pickle", pickle, METH_VARARGS,
     "pickle(storage or None, pickled properties, pickled storage_meta, pickled version, mappings) -> DCP's Metadata, "
     "pickled"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The rows of a plan. Made by make_table and decode_table; never changed."},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, table_length},
    {0, NULL},
};

PyType_Spec table_spec = TYPE_SPEC("Table", struct table, slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);

PyMethodDef table_methods[] = {
    {"make_table", make_table, METH_VARARGS,
     "make_table(names, paths or None, values, flags, describe) -> Table; a value is a tensor, None (an object), ... "
     "(a name alone), a row (type, size, offsets, lengths, properties, bytes of the dtype in these, item bytes, "
     "flags), or a list of rows"},
    {"decode_table", decode_table, METH_VARARGS, "decode_table(bytes) -> Table"},
    {NULL, NULL, 0, NULL},
};
