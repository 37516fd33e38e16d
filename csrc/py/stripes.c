/* dcpring._C.StripeFile and fill_stripes: files that several processes write (core/data/stripes.h). */
#include "module.h"

#include "tensors.h"

#include "base/align.h"
#include "base/bytes.h"
#include "data/stripes.h"

struct stripe_file {
    PyObject_HEAD
    struct dr_output core;
    PyObject *watch; /* which the core writes to, or None */
    uint64_t expected;
    bool open;
    struct turn turn;
    bool removed; /* if it is closed now: it was made, and is not kept */
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

/* ---- what a call is given ---- */

struct stripe_job {
    struct dr_stripes core;
    struct dr_stripe *stripes;
    struct dr_patch *patches;
    struct dr_payload *payloads;
    int64_t *ints;
    uint32_t *crcs;
    Py_buffer memory; /* shared; none where obj is NULL */
};

static void stripe_job_free(struct stripe_job *job) {
    if (job->memory.obj)
        PyBuffer_Release(&job->memory);
    PyMem_Free(job->stripes);
    PyMem_Free(job->patches);
    PyMem_Free(job->payloads);
    PyMem_Free(job->ints);
    PyMem_Free(job->crcs);
}

/* (lo, hi, offset in the shared memory or -1) */
static int parse_stripe(struct stripe_job *job, PyObject *item, struct dr_stripe *stripe) {
    unsigned long long lo, hi;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(item, "KKn", &lo, &hi, &at))
        return -1;
    if (lo >= hi || hi > INT64_MAX || lo % DR_ALIGNMENT ||
        (at >= 0 && (uint64_t)job->memory.len < (uint64_t)at + (hi - lo))) {
        PyErr_SetString(PyExc_ValueError, "a stripe is out of range");
        return -1;
    }
    *stripe = (struct dr_stripe){.lo = lo, .hi = hi};
    if (at >= 0)
        stripe->shared = (uint8_t *)job->memory.buf + at;
    return 0;
}

static int parse_stripes(struct stripe_job *job, PyObject *list, PyObject *memory) {
    if (memory != Py_None && PyObject_GetBuffer(memory, &job->memory, PyBUF_WRITABLE) < 0)
        return -1;
    job->core.count = (size_t)PyList_Size(list);
    job->core.stripes = job->stripes = PyMem_Calloc(job->core.count + 1, sizeof *job->stripes);
    if (!job->stripes) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < job->core.count; i++)
        if (parse_stripe(job, PyList_GetItem(list, (Py_ssize_t)i), &job->stripes[i]) < 0)
            return -1;
    return 0;
}

static bool is_box_of(const struct dr_patch *patch) {
    for (int d = 0; d < patch->shape.ndim; d++)
        if (patch->offsets[d] < 0 || patch->lengths[d] < 1 || patch->shape.sizes[d] < patch->lengths[d] ||
            patch->offsets[d] > patch->shape.sizes[d] - patch->lengths[d])
            return false;
    return true;
}

/* (payload_offset, sizes of the whole tensor, offsets of the box) */
static int parse_patch(PyObject *item, const struct tensor_view *view, struct dr_patch *patch, int64_t **ints) {
    unsigned long long payload_offset;
    PyObject *sizes, *offsets;
    if (!PyArg_ParseTuple(item, "KO!O!", &payload_offset, &PyTuple_Type, &sizes, &PyTuple_Type, &offsets))
        return -1;
    int64_t *at = *ints;
    Py_ssize_t ndim = (Py_ssize_t)view->ndim;
    if (parse_ints(sizes, at, ndim) < 0 || parse_ints(offsets, at + ndim, ndim) < 0)
        return -1;
    *ints += 2 * ndim;
    *patch = (struct dr_patch){
        .shape = {view->dtype, (int)ndim, at},
        .payload.offset = payload_offset,
        .offsets = at + ndim,
        .lengths = view->sizes,
        .strides = view->strides,
        .data = view->data,
    };
    if (view->kind != TENSOR_PLAIN || ndim > DR_MAX_DIMS || payload_offset > INT64_MAX ||
        !dr_shape_bytes(&patch->shape, &patch->payload.size) || patch->payload.size > INT64_MAX - payload_offset ||
        !is_box_of(patch)) {
        PyErr_SetString(PyExc_ValueError, "a box is not a part of its tensor, or no plain CPU memory");
        return -1;
    }
    return 0;
}

static int parse_patches(struct stripe_job *job, PyObject *list, const struct tensors *tensors) {
    size_t dimensions = 0;
    for (Py_ssize_t i = 0; i < tensors->count; i++)
        dimensions += 2 * (size_t)tensors->views[i].ndim;
    job->core.patch_count = (size_t)tensors->count;
    job->core.patches = job->patches = PyMem_Calloc((size_t)tensors->count + 1, sizeof *job->patches);
    int64_t *ints = job->ints = PyMem_Calloc(dimensions + 1, sizeof *job->ints);
    if (!job->patches || !job->ints) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyList_Size(list) != tensors->count) {
        PyErr_SetString(PyExc_ValueError, "expected a box for each tensor");
        return -1;
    }
    for (Py_ssize_t i = 0; i < tensors->count; i++) {
        if (parse_patch(PyList_GetItem(list, i), &tensors->views[i], &job->patches[i], &ints) < 0)
            return -1;
        if (i > 0 && job->patches[i].payload.offset < job->patches[i - 1].payload.offset) {
            PyErr_SetString(PyExc_ValueError, "the boxes are not in the order of the file");
            return -1;
        }
    }
    return 0;
}

/* (offset, size) */
static int parse_payloads(struct stripe_job *job, PyObject *list) {
    job->core.payload_count = (size_t)PyList_Size(list);
    job->core.payloads = job->payloads = PyMem_Calloc(job->core.payload_count + 1, sizeof *job->payloads);
    if (!job->payloads) {
        PyErr_NoMemory();
        return -1;
    }
    uint64_t end = 0;
    for (size_t i = 0; i < job->core.payload_count; i++) {
        unsigned long long offset, size;
        if (!PyArg_ParseTuple(PyList_GetItem(list, (Py_ssize_t)i), "KK", &offset, &size))
            return -1;
        if (offset < end || offset > INT64_MAX || size > INT64_MAX - offset) {
            PyErr_SetString(PyExc_ValueError, "the tensors of a file overlap, or are not in its order");
            return -1;
        }
        job->payloads[i] = (struct dr_payload){offset, size};
        end = offset + size;
    }
    return 0;
}

/* ---- filling ---- */

static PyObject *run_fill(struct module_state *state, struct stripe_job *job, unsigned workers) {
    for (size_t i = 0; i < job->core.count; i++)
        if (!job->stripes[i].shared)
            return PyErr_Format(PyExc_ValueError, "a stripe has no shared memory to be filled");
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_stripes_fill(&job->core, workers, &gil.control, &error);
    gil_take(&gil);
    if (rc < 0)
        return raise_error(state, &error);
    Py_RETURN_NONE;
}

static PyObject *fill_stripes(PyObject *module, PyObject *args) {
    struct module_state *state = module_state(module);
    PyObject *list, *boxes, *tensors_object, *memory;
    unsigned workers;
    if (!PyArg_ParseTuple(args, "O!O!OOI", &PyList_Type, &list, &PyList_Type, &boxes, &tensors_object, &memory,
                          &workers))
        return NULL;
    const struct tensors *tensors = held_tensors(state, tensors_object);
    struct stripe_job job = {0};
    PyObject *result = NULL;
    if (tensors && parse_stripes(&job, list, memory) == 0 && parse_patches(&job, boxes, tensors) == 0)
        result = run_fill(state, &job, workers);
    stripe_job_free(&job);
    return result;
}

PyMethodDef stripe_methods[] = {
    {"fill_stripes", fill_stripes, METH_VARARGS,
     "fill_stripes([(lo, hi, offset in the memory)], [(payload_offset, sizes, offsets)], Tensors, memory, workers): "
     "copies what the tensors, which are boxes, have of the stripes"},
    {NULL, NULL, 0, NULL},
};

/* ---- the file ---- */

static const char what_it_is[] = "the file";

static bool enter(struct stripe_file *self) { return turn_take(&self->turn, self->open, what_it_is); }

static int open_core(struct stripe_file *self, const char *directory, const char *name, uint64_t allocated,
                     const struct dr_options *options) {
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_output_open(&self->core, directory, name, allocated > 0, options, &error);
    if (rc == 0)
        rc = dr_output_prepare(&self->core, allocated, &error);
    gil_take(&gil);
    self->open = self->removed = true;
    if (rc < 0)
        raise_error(state_of((PyObject *)self), &error);
    return rc;
}

static PyObject *file_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *directory = NULL, *name = NULL, *tuple;
    unsigned long long allocated, expected;
    if (refuse_keywords(type, kwargs) ||
        !PyArg_ParseTuple(args, "O&O&KKO!", PyUnicode_FSConverter, &directory, PyUnicode_FSConverter, &name, &allocated,
                          &expected, &PyTuple_Type, &tuple))
        return NULL;
    struct dr_options options;
    struct stripe_file *self = NULL;
    if (parse_options(PyType_GetModuleState(type), tuple, &options) == 0)
        self = (struct stripe_file *)PyType_GenericAlloc(type, 0);
    if (self) {
        self->watch = Py_NewRef(PyTuple_GetItem(tuple, PyTuple_Size(tuple) - 1));
        self->expected = expected;
        if (open_core(self, PyBytes_AsString(directory), PyBytes_AsString(name), allocated, &options) < 0)
            Py_CLEAR(self);
    }
    Py_DECREF(directory);
    Py_DECREF(name);
    return (PyObject *)self;
}

static void close_core(struct stripe_file *self) {
    if (!self->open)
        return;
    self->open = false;
    Py_BEGIN_ALLOW_THREADS
    dr_output_close(&self->core, self->removed);
    Py_END_ALLOW_THREADS
}

static void file_dealloc(PyObject *object) {
    close_core((struct stripe_file *)object);
    Py_XDECREF(((struct stripe_file *)object)->watch);
    free_instance(object);
}

/* Gives each stripe room for its CRCs. */
static int allocate_crcs(struct stripe_job *job) {
    size_t total = 0;
    for (size_t i = 0; i < job->core.count; i++)
        total += dr_stripe_crcs(&job->core, &job->stripes[i]);
    job->crcs = PyMem_Calloc(total + 1, sizeof *job->crcs);
    if (!job->crcs) {
        PyErr_NoMemory();
        return -1;
    }
    uint32_t *next = job->crcs;
    for (size_t i = 0; i < job->core.count; i++) {
        job->stripes[i].crcs = next;
        next += dr_stripe_crcs(&job->core, &job->stripes[i]);
    }
    return 0;
}

static PyObject *crcs_of(const struct stripe_job *job, size_t index) {
    const struct dr_stripe *stripe = &job->stripes[index];
    size_t count = stripe->crcs ? dr_stripe_crcs(&job->core, stripe) : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count));
    for (size_t i = 0; bytes && i < count; i++)
        dr_put_le((uint8_t *)PyBytes_AsString(bytes) + 4 * i, stripe->crcs[i], 4);
    return bytes;
}

static PyObject *run_write(struct stripe_file *self, struct stripe_job *job) {
    size_t block = self->core.options.block_size;
    for (size_t i = 0; i < job->core.count; i++)
        if (job->stripes[i].hi - job->stripes[i].lo > block)
            return PyErr_Format(PyExc_ValueError, "a stripe is larger than a block");
    if (self->core.options.checksum && allocate_crcs(job) < 0)
        return NULL;
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_stripes_write(&job->core, &self->core, self->expected, &gil.control, &error);
    if (rc < 0)
        dr_error_at(&error, self->core.path);
    gil_take(&gil);
    if (rc < 0)
        return raise_error(state_of((PyObject *)self), &error);
    PyObject *list = PyList_New((Py_ssize_t)job->core.count);
    for (size_t i = 0; list && i < job->core.count; i++) {
        PyObject *bytes = crcs_of(job, i);
        if (!bytes || PyList_SetItem(list, (Py_ssize_t)i, bytes) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *write_stripes(PyObject *object, PyObject *args) {
    struct stripe_file *self = (struct stripe_file *)object;
    PyObject *list, *boxes, *tensors_object, *memory, *payloads;
    if (!PyArg_ParseTuple(args, "O!O!OOO!", &PyList_Type, &list, &PyList_Type, &boxes, &tensors_object, &memory,
                          &PyList_Type, &payloads))
        return NULL;
    const struct tensors *tensors = held_tensors(state_of(object), tensors_object);
    struct stripe_job job = {0};
    PyObject *result = NULL;
    if (tensors && enter(self)) {
        if (parse_stripes(&job, list, memory) == 0 && parse_patches(&job, boxes, tensors) == 0 &&
            parse_payloads(&job, payloads) == 0)
            result = run_write(self, &job);
        turn_give(&self->turn);
    }
    stripe_job_free(&job);
    return result;
}

static PyObject *write_at(PyObject *object, PyObject *args) {
    struct stripe_file *self = (struct stripe_file *)object;
    unsigned long long offset;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "Ky*", &offset, &data))
        return NULL;
    int rc = -1;
    if (enter(self)) {
        DR_NEW_ERROR(error);
        Py_BEGIN_ALLOW_THREADS
        rc = dr_output_write_at(&self->core, offset, data.buf, (size_t)data.len, &error);
        Py_END_ALLOW_THREADS
        if (rc < 0)
            raise_error(state_of(object), &error);
        turn_give(&self->turn);
    }
    PyBuffer_Release(&data);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *finish(PyObject *object, PyObject *args) {
    struct stripe_file *self = (struct stripe_file *)object;
    PyObject *length_object, *set;
    struct dr_syncs *syncs;
    uint64_t length = DR_ANY_LENGTH;
    if (!PyArg_ParseTuple(args, "OO", &length_object, &set))
        return NULL;
    if (length_object != Py_None)
        length = PyLong_AsUnsignedLongLong(length_object);
    if (PyErr_Occurred() || !enter(self))
        return NULL;
    if (syncs_take(state_of(object), set, &syncs) < 0) {
        turn_give(&self->turn);
        return NULL;
    }
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_output_sync(&self->core, length, syncs, &gil.control, &error);
    if (rc == 0)
        rc = dr_output_close_file(&self->core, &error);
    gil_take(&gil);
    syncs_give(set);
    self->removed = rc < 0;
    turn_give(&self->turn);
    if (rc < 0)
        return raise_error(state_of(object), &error);
    Py_RETURN_NONE;
}

static PyObject *close_file(PyObject *object, PyObject *unused) {
    (void)unused;
    struct stripe_file *self = (struct stripe_file *)object;
    if (!turn_is_free(&self->turn, what_it_is))
        return NULL;
    close_core(self);
    Py_RETURN_NONE;
}

static PyObject *stats(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct dr_output *core = &((struct stripe_file *)object)->core;
    return Py_BuildValue("(sO)", core->engine_count ? core->engines[0]->ops->name : "",
                         core->direct ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"write", write_stripes, METH_VARARGS,
     "write([(lo, hi, offset in the memory or -1)], [(payload_offset, sizes, offsets)], Tensors, memory or None, "
     "[(offset, size) of each tensor of the file]) -> [CRCs of each stripe]: begins to write them; what fails later is "
     "told by a later call"},
    {"write_at", write_at, METH_VARARGS, "write_at(offset, bytes): through the page cache"},
    {"finish", finish, METH_VARARGS,
     "finish(length or None, Syncs or None): waits until all is written, and cuts the file to its length; its data are "
     "durable, or are so once these Syncs were waited for"},
    {"close", close_file, METH_NOARGS,
     "close(): frees everything; a file that was made is removed unless it was finished"},
    {"stats", stats, METH_NOARGS, "stats() -> (engine, direct)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "StripeFile(directory, name, allocated, expected, options): a file of which stripes are written; it is "
                "made, and its bytes allocated, where these are not 0, and must be there otherwise"},
    {Py_tp_new, file_new},
    {Py_tp_dealloc, file_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec stripe_file_spec = TYPE_SPEC("StripeFile", struct stripe_file, slots, 0);
