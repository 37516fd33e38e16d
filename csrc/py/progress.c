/* dcpring._C.Slots and Bar: how far work is (core/tools/slots.h), and its picture on a terminal (core/tools/bar.h). */
#include "module.h"

#include "tools/bar.h"

/* ---- Slots ---- */

struct slots {
    PyObject_HEAD
    Py_buffer memory; /* without obj there is none */
    struct dr_onlooker onlooker;
};

static struct dr_slots *core_of(struct slots *self) { return self->onlooker.slots; }

static PyObject *slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *memory;
    Py_ssize_t count;
    if (kwargs || !PyArg_ParseTuple(args, "On", &memory, &count))
        return NULL;
    struct slots *self = (struct slots *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    Py_ssize_t most = (PY_SSIZE_T_MAX - (Py_ssize_t)dr_slots_size(0)) / (Py_ssize_t)sizeof(struct dr_slot);
    if (count < 1 || count > most || self->memory.len < (Py_ssize_t)dr_slots_size((size_t)count) ||
        (uintptr_t)self->memory.buf % _Alignof(struct dr_slots) != 0) {
        PyErr_Format(PyExc_ValueError, "%zd slots do not lie in %zd bytes there", count, self->memory.len);
        Py_DECREF(self);
        return NULL;
    }
    self->onlooker.slots = self->memory.buf;
    self->onlooker.count = (size_t)count;
    return (PyObject *)self;
}

static void slots_dealloc(PyObject *object) {
    struct slots *self = (struct slots *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static int check_index(struct slots *self, Py_ssize_t index) {
    if (index >= 0 && (size_t)index < self->onlooker.count)
        return 0;
    PyErr_Format(PyExc_ValueError, "slot %zd of %zu", index, self->onlooker.count);
    return -1;
}

static PyObject *slots_join(PyObject *object, PyObject *args) {
    struct slots *self = (struct slots *)object;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "n", &index) || check_index(self, index) < 0)
        return NULL;
    dr_slots_join(core_of(self), (size_t)index);
    const struct dr_slot *slot = &core_of(self)->slot[index];
    return PyLong_FromSsize_t((const char *)&slot->done - (const char *)core_of(self));
}

static PyObject *slots_begin(PyObject *object, PyObject *args) {
    struct slots *self = (struct slots *)object;
    Py_ssize_t index;
    unsigned long long total;
    if (!PyArg_ParseTuple(args, "nK", &index, &total) || check_index(self, index) < 0)
        return NULL;
    dr_slots_begin(core_of(self), (size_t)index, total);
    Py_RETURN_NONE;
}

static PyObject *slots_end(PyObject *object, PyObject *args) {
    struct slots *self = (struct slots *)object;
    Py_ssize_t index;
    int failed;
    if (!PyArg_ParseTuple(args, "np", &index, &failed) || check_index(self, index) < 0)
        return NULL;
    dr_slots_end(core_of(self), (size_t)index, failed);
    Py_RETURN_NONE;
}

static PyObject *slots_look(PyObject *object, PyObject *unused) {
    (void)unused;
    struct dr_sums sums = dr_slots_look(&((struct slots *)object)->onlooker);
    return Py_BuildValue("(KKO)", (unsigned long long)sums.done, (unsigned long long)sums.total,
                         sums.over ? Py_True : Py_False);
}

/* Who looks and waits in another thread must still see what this one has seen. */
static PyObject *slots_over(PyObject *object, PyObject *unused) {
    (void)unused;
    struct dr_onlooker onlooker = ((struct slots *)object)->onlooker;
    return PyBool_FromLong(dr_slots_look(&onlooker).over);
}

static PyObject *slots_wait(PyObject *object, PyObject *args) {
    const struct dr_onlooker *onlooker = &((struct slots *)object)->onlooker;
    int timeout_ms;
    if (!PyArg_ParseTuple(args, "i", &timeout_ms))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    dr_slots_wait(onlooker, timeout_ms);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *slots_claim(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(dr_slots_claim(core_of((struct slots *)object)));
}

static PyObject *slots_size(PyObject *type, PyObject *args) {
    (void)type;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "n", &count))
        return NULL;
    return PyLong_FromSize_t(dr_slots_size((size_t)count));
}

static PyMethodDef slots_methods[] = {
    {"size", slots_size, METH_VARARGS | METH_STATIC, "size(count) -> bytes of memory that so many slots take"},
    {"claim", slots_claim, METH_NOARGS, "claim() -> whether the caller is the first to ask, and so shows them"},
    {"join", slots_join, METH_VARARGS, "join(slot) -> where in the memory the 8 bytes of its count lie"},
    {"begin", slots_begin, METH_VARARGS, "begin(slot, total bytes)"},
    {"end", slots_end, METH_VARARGS, "end(slot, failed)"},
    {"look", slots_look, METH_NOARGS, "look() -> (done bytes, total bytes, whether it is over)"},
    {"over", slots_over, METH_NOARGS, "over() -> whether it is over; for wait this is no look"},
    {"wait", slots_wait, METH_VARARGS,
     "wait(timeout ms): until a slot has joined, begun or ended since the last look. Lets go of the GIL"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_doc, "Slots(memory, count): how far work is, in memory (zeros at first) that processes may share"},
    {Py_tp_new, slots_new},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_methods, slots_methods},
    {0, NULL},
};

PyType_Spec slots_spec = {
    .name = "dcpring._C.Slots",
    .basicsize = sizeof(struct slots),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots_slots,
};

/* ---- Bar ---- */

struct bar {
    PyObject_HEAD
    struct dr_bar *core; /* NULL once closed */
    PyObject *slots;
};

static PyObject *bar_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *slots;
    const char *label;
    int fd;
    unsigned flags;
    if (kwargs || !PyArg_ParseTuple(args, "OsiI", &slots, &label, &fd, &flags))
        return NULL;
    struct module_state *state = PyType_GetModuleState(type);
    if ((PyObject *)Py_TYPE(slots) != state->slots_type)
        return PyErr_Format(PyExc_TypeError, "expected Slots");
    struct bar *self = (struct bar *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    struct slots *shown = (struct slots *)slots;
    self->slots = Py_NewRef(slots);
    self->core = dr_bar_open(core_of(shown), shown->onlooker.count, label, fd, flags);
    if (!self->core) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_RuntimeError, "there is no thread to be had for a progress bar");
    }
    return (PyObject *)self;
}

static PyObject *bar_close(PyObject *object, PyObject *unused) {
    (void)unused;
    struct bar *self = (struct bar *)object;
    struct dr_bar *core = self->core;
    self->core = NULL;
    Py_BEGIN_ALLOW_THREADS
    dr_bar_close(core);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void bar_dealloc(PyObject *object) {
    struct bar *self = (struct bar *)object;
    PyTypeObject *type = Py_TYPE(object);
    struct dr_bar *core = self->core;
    Py_BEGIN_ALLOW_THREADS /* its thread may be waiting for a slow terminal */
    dr_bar_close(core);
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->slots);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef bar_methods[] = {
    {"close", bar_close, METH_NOARGS, "close(): draws the last line if that is not there yet, and ends the thread"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bar_slots[] = {
    {Py_tp_doc, "Bar(slots, label, fd, flags): draws until all slots have ended; fd is the bar's, in any case"},
    {Py_tp_new, bar_new},
    {Py_tp_dealloc, bar_dealloc},
    {Py_tp_methods, bar_methods},
    {0, NULL},
};

PyType_Spec bar_spec = {
    .name = "dcpring._C.Bar",
    .basicsize = sizeof(struct bar),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = bar_slots,
};
