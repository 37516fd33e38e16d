/* dcpring._C.Match: what a rank reads, and reading it, without a Python object for each item (core/plan/match.h). */
#include "tables.h"

#include "job.h"

#include "base/crc.h"
#include "plan/box.h"
#include "record/region.h"

struct match {
    PyObject_HEAD
    PyObject *wanted, *stored; /* the tables, kept alive */
    struct dr_match core;
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

static const struct dr_table *wanted_of(const struct match *self) { return &((struct table *)self->wanted)->core; }

static const struct dr_table *stored_of(const struct match *self) { return &((struct table *)self->stored)->core; }

static int match_tables(struct module_state *state, struct match *self, const struct dr_table *wanted,
                        const struct dr_table *stored) {
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release_for(&gil, (wanted->count + stored->count) * sizeof *stored->rows);
    int rc = dr_match(&self->core, wanted, stored, &gil.control, &error);
    gil_take(&gil);
    if (rc < 0)
        fail(state, &error);
    return rc;
}

static PyObject *match_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *wanted, *stored;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "OO", &wanted, &stored))
        return NULL;
    struct match *self = (struct match *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    struct module_state *state = state_of((PyObject *)self);
    const struct dr_table *a = table_of(state, wanted), *b = a ? table_of(state, stored) : NULL;
    if (!b || match_tables(state, self, a, b) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->wanted = Py_NewRef(wanted);
    self->stored = Py_NewRef(stored);
    return (PyObject *)self;
}

static void match_dealloc(PyObject *object) {
    struct match *self = (struct match *)object;
    dr_match_destroy(&self->core);
    Py_XDECREF(self->wanted);
    Py_XDECREF(self->stored);
    free_instance(object);
}

static Py_ssize_t match_length(PyObject *object) { return (Py_ssize_t)((struct match *)object)->core.count; }

static PyObject *missing(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct match *self = (struct match *)object;
    const struct dr_table *table = wanted_of(self);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < self->core.missing_count; i++) {
        PyObject *text = table_name(table, table->rows[self->core.missing[i]].name);
        if (!text || PyList_Append(list, text) < 0)
            Py_CLEAR(list);
        Py_XDECREF(text);
    }
    return list;
}

static PyObject *get(PyObject *object, PyObject *argument) {
    const struct match *self = (struct match *)object;
    Py_ssize_t i = PyLong_AsSsize_t(argument);
    if (i < 0 || (size_t)i >= self->core.count)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "overlap %zd", i);
    const struct dr_overlap *o = &self->core.overlaps[i];
    int n = stored_of(self)->rows[o->stored].ndim;
    const int64_t *dims = self->core.dims + o->dims;
    return Py_BuildValue("(IINNN)", o->wanted, o->stored, ints_tuple(dims, n), ints_tuple(dims + n, n),
                         ints_tuple(dims + 2 * n, n));
}

static PyObject *rows(const struct match *self, bool stored) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(self->core.count * sizeof(uint32_t)));
    uint32_t *out = bytes ? (uint32_t *)(void *)PyBytes_AsString(bytes) : NULL;
    for (size_t i = 0; out && i < self->core.count; i++)
        memcpy(out + i, stored ? &self->core.overlaps[i].stored : &self->core.overlaps[i].wanted, sizeof *out);
    return bytes;
}

static PyObject *wanted_rows(PyObject *object, PyObject *unused) {
    (void)unused;
    return rows((struct match *)object, false);
}

static PyObject *stored_rows(PyObject *object, PyObject *unused) {
    (void)unused;
    return rows((struct match *)object, true);
}

static uint64_t overlap_bytes(const struct match *self, const struct dr_overlap *o) {
    const struct dr_table *stored = stored_of(self);
    const struct dr_row *row = &stored->rows[o->stored];
    if (!dr_row_is_tensor(row))
        return 0;
    const int64_t *lengths = self->core.dims + o->dims + 2 * row->ndim;
    uint64_t bytes = stored->properties[row->properties].item_bytes;
    for (int d = 0; d < row->ndim; d++)
        bytes *= (uint64_t)lengths[d];
    return bytes;
}

static PyObject *sizes(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct match *self = (struct match *)object;
    PyObject *list = PyList_New((Py_ssize_t)self->core.count);
    for (size_t i = 0; list && i < self->core.count; i++) {
        PyObject *size = PyLong_FromUnsignedLongLong(overlap_bytes(self, &self->core.overlaps[i]));
        if (!size || PyList_SetItem(list, (Py_ssize_t)i, size) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Whether reading an overlap reads over what is not wanted: its rows lie apart, by no more than one read spans. */
static bool reads_over_gaps(const struct match *self, const struct dr_overlap *o) {
    const struct dr_table *stored = stored_of(self);
    const struct dr_row *row = &stored->rows[o->stored];
    if (overlap_bytes(self, o) == 0)
        return false;
    const int64_t *sizes = dr_row_lengths(stored, row), *lengths = self->core.dims + o->dims + 2 * row->ndim;
    uint64_t inner = stored->properties[row->properties].item_bytes, rows = 1;
    for (int d = 0; d < row->ndim; d++)
        rows *= (uint64_t)lengths[d];
    for (int d = row->ndim - 1; d > 0; d--) {
        rows /= (uint64_t)lengths[d];
        uint64_t gap = (uint64_t)(sizes[d] - lengths[d]) * inner;
        if (gap && gap <= DR_SLICE_GAP && rows > 1)
            return true;
        inner *= (uint64_t)sizes[d];
    }
    return false;
}

static PyObject *interleaved(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct match *self = (struct match *)object;
    PyObject *mask = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->core.count);
    for (size_t i = 0; mask && i < self->core.count; i++)
        PyBytes_AsString(mask)[i] = (char)reads_over_gaps(self, &self->core.overlaps[i]);
    return mask;
}

/* ---- where it goes ---- */

/* Whether no two elements share memory: with strides in ascending order, each reaches beyond all before. */
static bool is_dense(const struct tensor_view *view) {
    int64_t reach = 0, after = -1;
    for (int64_t done = 0; done < view->ndim;) {
        int64_t next = INT64_MAX, extent = 0, count = 0;
        for (int64_t d = 0; d < view->ndim; d++) {
            if (view->sizes[d] <= 1 || view->strides[d] <= after || view->strides[d] > next)
                continue;
            count = view->strides[d] < next ? 1 : count + 1;
            next = view->strides[d];
            extent = view->sizes[d] - 1;
        }
        if (count == 0)
            return true;
        if (count > 1 || next <= reach)
            return false;
        reach += next * extent;
        after = next;
        done++;
    }
    return true;
}

static bool same_dtype(const struct dr_properties *properties, const struct dr_dtype *dtype) {
    static const char prefix[] = "torch.";
    size_t size = strlen(dtype->name), before = sizeof prefix - 1;
    return properties->dtype_size == before + size && memcmp(properties->encoding, prefix, before) == 0 &&
           memcmp(properties->encoding + before, dtype->name, size) == 0;
}

static bool has_lengths(const struct tensor_view *view, const int64_t *lengths, int ndim) {
    return view->ndim == ndim && (ndim == 0 || memcmp(lengths, view->sizes, (size_t)ndim * sizeof *lengths) == 0);
}

/* Whether an overlap can be read straight into its target's memory. */
static bool is_straight(const struct match *self, const struct dr_overlap *o, const struct dr_storage_index *storage,
                        const struct tensor_view *view) {
    const struct dr_table *wanted = wanted_of(self), *stored = stored_of(self);
    const struct dr_row *want = &wanted->rows[o->wanted], *have = &stored->rows[o->stored];
    if (!dr_row_is_tensor(want) || !dr_row_is_tensor(have))
        return false; /* it is an object */
    if (storage->entries[o->stored].kind != DR_STORAGE_TENSOR)
        return false; /* where its payload lies is not known */
    if (view->kind != TENSOR_PLAIN)
        return false; /* the target's memory is elsewhere */
    if (!same_dtype(&stored->properties[have->properties], view->dtype))
        return false; /* it has to be cast */
    if (!has_lengths(view, dr_row_lengths(wanted, want), want->ndim))
        return false;      /* the target is not what the plan said */
    return is_dense(view); /* what elements that share memory hold would depend on the order of writing */
}

/* {file: bytes of tensors read from it}: every file that has something wanted. */
static PyObject *file_bytes(PyObject *object, PyObject *argument) {
    const struct match *self = (struct match *)object;
    const struct dr_storage_index *storage = storage_index_of(state_of(object), argument);
    if (!storage)
        return NULL;
    if (storage->count != stored_of(self)->count)
        return PyErr_Format(PyExc_ValueError, "the storage index is not that of the match's table");
    size_t count = storage->files.name_count;
    uint64_t *bytes = PyMem_Calloc(count + 1, sizeof *bytes);
    uint8_t *used = PyMem_Calloc(count + 1, 1);
    PyObject *dict = bytes && used ? PyDict_New() : PyErr_NoMemory();
    for (size_t i = 0; dict && i < self->core.count; i++) {
        const struct dr_storage_entry *place = &storage->entries[self->core.overlaps[i].stored];
        if (place->kind == DR_STORAGE_NONE)
            continue;
        used[place->file] = 1;
        bytes[place->file] += overlap_bytes(self, &self->core.overlaps[i]);
    }
    for (uint32_t f = 0; dict && f < count; f++) {
        if (!used[f])
            continue;
        PyObject *name =
            PyUnicode_DecodeUTF8(dr_table_text(&storage->files, f), (Py_ssize_t)storage->files.names[f].size, NULL);
        PyObject *sum = PyLong_FromUnsignedLongLong(bytes[f]);
        if (!name || !sum || PyDict_SetItem(dict, name, sum) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(name);
        Py_XDECREF(sum);
    }
    PyMem_Free(bytes);
    PyMem_Free(used);
    return dict;
}

struct planned {
    struct match *match;
    const struct dr_storage_index *storage;
    const struct tensors *targets;
};

static int parse_planned(struct module_state *state, PyObject *match, PyObject *storage, PyObject *targets,
                         struct planned *out) {
    if ((PyObject *)Py_TYPE(match) != state->match_type) {
        PyErr_SetString(PyExc_TypeError, "expected a Match");
        return -1;
    }
    *out = (struct planned){(struct match *)match, storage_index_of(state, storage), held_tensors(state, targets)};
    if (!out->storage || !out->targets)
        return -1;
    if (out->storage->count == stored_of(out->match)->count &&
        (size_t)out->targets->count == wanted_of(out->match)->count)
        return 0;
    PyErr_SetString(PyExc_ValueError, "storage index and targets are not those of the match's tables");
    return -1;
}

static PyObject *straight(PyObject *module, PyObject *args) {
    PyObject *match, *storage, *targets;
    struct planned p;
    if (!PyArg_ParseTuple(args, "OOO", &match, &storage, &targets) ||
        parse_planned(module_state(module), match, storage, targets, &p) < 0)
        return NULL;
    const struct dr_match *core = &p.match->core;
    PyObject *mask = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)core->count);
    for (size_t i = 0; mask && i < core->count; i++)
        PyBytes_AsString(mask)[i] =
            (char)is_straight(p.match, &core->overlaps[i], p.storage, &p.targets->views[core->overlaps[i].wanted]);
    return mask;
}

static void describe_read(const struct planned *p, const struct dr_overlap *o, struct dr_read *read) {
    const struct dr_table *stored = stored_of(p->match);
    const struct dr_row *row = &stored->rows[o->stored];
    const struct dr_storage_entry *place = &p->storage->entries[o->stored];
    const struct tensor_view *view = &p->targets->views[o->wanted];
    const int64_t *dims = p->match->core.dims + o->dims;
    int64_t skip = 0;
    for (int64_t d = 0; d < view->ndim; d++)
        skip += dims[d] * view->strides[d];
    *read = (struct dr_read){
        .file = place->file,
        .payload_offset = place->payload_offset,
        .payload_size = place->payload_size,
        .chunk = {view->dtype, row->ndim, dr_row_lengths(stored, row)},
        .offsets = dims + row->ndim,
        .lengths = dims + 2 * row->ndim,
        .memory = (char *)view->data + skip * (int64_t)view->dtype->item_size,
        .strides = view->strides,
        .crcs = place->has_crcs ? p->storage->crcs.data + place->crcs : NULL,
    };
}

static int describe_reads(const struct planned *p, const char *mask, struct job *job) {
    Py_ssize_t count = job->count;
    job->count = 0;
    if (job->input->count < p->storage->files.name_count) {
        PyErr_SetString(PyExc_ValueError, "fewer files than the storage index names");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const struct dr_overlap *o = &p->match->core.overlaps[i];
        if (!mask[i])
            continue;
        if (!is_straight(p->match, o, p->storage, &p->targets->views[o->wanted])) {
            PyErr_Format(PyExc_ValueError, "overlap %zd cannot be read straight into its target", i);
            return -1;
        }
        describe_read(p, o, &job->reads[job->count++]);
    }
    return 0;
}

/* The reads whose byte in the mask is 1, in their order. */
static PyObject *load_matched(PyObject *module, PyObject *args) {
    const char *mask;
    Py_ssize_t mask_size;
    PyObject *match, *storage, *targets, *input, *options, *result = NULL;
    struct planned p;
    struct module_state *state = module_state(module);
    if (!PyArg_ParseTuple(args, "OOOOy#O!", &input, &match, &storage, &targets, &mask, &mask_size, &PyTuple_Type,
                          &options) ||
        parse_planned(state, match, storage, targets, &p) < 0)
        return NULL;
    if ((size_t)mask_size != p.match->core.count)
        return PyErr_Format(PyExc_ValueError, "a mask of the wrong length");
    struct job job = {0};
    if (job_init(&job, state, input, options, mask_size) == 0 && describe_reads(&p, mask, &job) == 0)
        result = job_run(state, &job);
    job_free(&job);
    return result;
}

/* ---- from memory ---- */

/* Bytes of a record's payload that are in memory, and the overlap that takes what it wants of them. */
struct taking {
    struct dr_region region;
    uint64_t first, end;
    const uint8_t *data;
};

static int describe_taking(const struct planned *p, PyObject *entry, const struct tensor_view *memory,
                           struct taking *out) {
    unsigned long long position, first, end;
    if (!PyArg_ParseTuple(entry, "KKK", &position, &first, &end))
        return -1;
    if (position >= p->match->core.count) {
        PyErr_Format(PyExc_IndexError, "overlap %llu", position);
        return -1;
    }
    const struct dr_overlap *o = &p->match->core.overlaps[position];
    struct dr_read read;
    uint64_t payload;
    if (!is_straight(p->match, o, p->storage, &p->targets->views[o->wanted]))
        PyErr_Format(PyExc_ValueError, "overlap %llu cannot be copied straight into its target", position);
    else if (describe_read(p, o, &read), !dr_shape_bytes(&read.chunk, &payload) || first > end || end > payload)
        PyErr_SetString(PyExc_ValueError, "the bytes are not of the overlap's record");
    else if (memory->kind != TENSOR_PLAIN || memory->ndim != 1 || !view_is_contiguous(memory) ||
             memory->dtype->item_size != 1 || (uint64_t)memory->sizes[0] != end - first)
        PyErr_SetString(PyExc_ValueError, "the memory is not that of the bytes");
    else {
        *out = (struct taking){.first = first, .end = end, .data = memory->data};
        dr_region_init(&out->region, &read.chunk, read.offsets, read.lengths, read.memory, read.strides);
        return 0;
    }
    return -1;
}

/* Copies what overlaps want of bytes that are in memory. */
static PyObject *take_matched(PyObject *module, PyObject *args) {
    PyObject *match, *storage, *targets, *entries, *memory;
    struct planned p;
    struct module_state *state = module_state(module);
    if (!PyArg_ParseTuple(args, "OOOO!O", &match, &storage, &targets, &PyList_Type, &entries, &memory) ||
        parse_planned(state, match, storage, targets, &p) < 0)
        return NULL;
    const struct tensors *held = held_tensors(state, memory);
    Py_ssize_t count = PyList_Size(entries);
    if (!held || held->count != count)
        return held ? PyErr_Format(PyExc_ValueError, "%zd entries, %zd tensors", count, held->count) : NULL;
    struct taking *takings = PyMem_Calloc((size_t)count + 1, sizeof *takings);
    if (!takings)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        if (describe_taking(&p, PyList_GetItem(entries, i), &held->views[i], &takings[i]) < 0) {
            PyMem_Free(takings);
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        dr_region_scatter(&takings[i].region, takings[i].first, takings[i].end, takings[i].data);
    Py_END_ALLOW_THREADS
    PyMem_Free(takings);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"missing", missing, METH_NOARGS, "missing() -> the wanted names that are not stored"},
    {"get", get, METH_O, "get(i) -> (wanted row, stored row, offsets in the wanted chunk, in the stored one, lengths)"},
    {"wanted_rows", wanted_rows, METH_NOARGS, "wanted_rows() -> a uint32 for each overlap"},
    {"stored_rows", stored_rows, METH_NOARGS, "stored_rows() -> a uint32 for each overlap"},
    {"sizes", sizes, METH_NOARGS, "sizes() -> the bytes of each overlap, 0 for objects"},
    {"interleaved", interleaved, METH_NOARGS,
     "interleaved() -> a byte for each overlap: 1 where reading it spans gaps between its rows"},
    {"file_bytes", file_bytes, METH_O, "file_bytes(storage) -> {file: bytes of tensors wanted from it}"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot match_slots[] = {
    {Py_tp_doc, "Match(wanted, stored): the overlaps of wanted and stored chunks"},
    {Py_tp_new, match_new},
    {Py_tp_dealloc, match_dealloc},
    {Py_tp_methods, methods},
    {Py_sq_length, match_length},
    {0, NULL},
};

PyType_Spec match_spec = TYPE_SPEC("Match", struct match, match_slots, 0);

/* ---- boxes ---- */

/* Adds the measure of a box (offsets, lengths) of so many dimensions. */
static int add_measure(PyObject *box, Py_ssize_t ndim, uint64_t *sum) {
    PyObject *offsets, *lengths;
    int64_t ints[2 * DR_TABLE_MAX_DIMS];
    if (!PyArg_ParseTuple(box, "OO", &offsets, &lengths) || parse_ints(offsets, ints, ndim) < 0 ||
        parse_ints(lengths, ints + ndim, ndim) < 0)
        return -1;
    *sum = dr_box_add_measures(*sum, dr_box_measure(ints, ints + ndim, (int)ndim));
    return 0;
}

static PyObject *tiles(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *lengths, *boxes;
    int64_t ints[DR_TABLE_MAX_DIMS];
    uint64_t sum = 0;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &lengths, &PyList_Type, &boxes))
        return NULL;
    Py_ssize_t ndim = PyTuple_Size(lengths);
    if (ndim > DR_TABLE_MAX_DIMS)
        return PyErr_Format(PyExc_ValueError, "too many dimensions");
    if (parse_ints(lengths, ints, ndim) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(boxes); i++)
        if (add_measure(PyList_GetItem(boxes, i), ndim, &sum) < 0)
            return NULL;
    return PyBool_FromLong(sum == dr_box_measure(NULL, ints, (int)ndim));
}

PyMethodDef match_methods[] = {
    {"tiles", tiles, METH_VARARGS,
     "tiles(lengths, [(offsets, lengths)]) -> whether the boxes make up a box of these lengths, without sharing "
     "anything"},
    {"straight", straight, METH_VARARGS,
     "straight(match, storage, targets) -> a byte for each overlap: 1 where it can be read into its target's memory"},
    {"load_matched", load_matched, METH_VARARGS,
     "load_matched(input, match, storage, targets, mask, options) -> as load; the input's files are those of the "
     "storage index"},
    {"take_matched", take_matched, METH_VARARGS,
     "take_matched(match, storage, targets, [(overlap, first, end)], memory): copies what overlaps want of the bytes "
     "[first, end) of their records, which are in memory"},
    {NULL, NULL, 0, NULL},
};
