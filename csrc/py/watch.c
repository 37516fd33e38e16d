/* dcpring._C.Watch: what a save or a load does while it works (core/io/watch.h). */
#include "module.h"

struct watch {
    PyObject_HEAD
    struct dr_watch core;
    Py_buffer counter; /* holds core.done; without obj there is none */
};

int parse_watch(struct module_state *state, PyObject *object, struct dr_watch **out) {
    *out = NULL;
    if (object == Py_None)
        return 0;
    if ((PyObject *)Py_TYPE(object) != state->watch_type) {
        PyErr_SetString(PyExc_TypeError, "expected a Watch or None");
        return -1;
    }
    *out = &((struct watch *)object)->core;
    return 0;
}

static int take_counter(struct watch *self, PyObject *counter) {
    if (counter == Py_None)
        return 0;
    if (PyObject_GetBuffer(counter, &self->counter, PyBUF_WRITABLE) < 0)
        return -1;
    if (self->counter.len != sizeof *self->core.done || (uintptr_t)self->counter.buf % sizeof *self->core.done != 0) {
        PyErr_SetString(PyExc_ValueError, "a counter is 8 aligned bytes");
        return -1;
    }
    self->core.done = self->counter.buf;
    return 0;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *counter;
    Py_ssize_t room;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "On", &counter, &room))
        return NULL;
    if (room < 0 || room > PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(struct dr_span))
        return PyErr_Format(PyExc_ValueError, "room for %zd spans", room);
    struct watch *self = (struct watch *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->core.room = (size_t)room;
    self->core.spans = room ? PyMem_Calloc((size_t)room, sizeof *self->core.spans) : NULL;
    if (room && !self->core.spans)
        PyErr_NoMemory();
    if (PyErr_Occurred() || take_counter(self, counter) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void watch_dealloc(PyObject *object) {
    struct watch *self = (struct watch *)object;
    if (self->counter.obj)
        PyBuffer_Release(&self->counter);
    PyMem_Free(self->core.spans);
    free_instance(object);
}

static PyObject *take(PyObject *object, PyObject *unused) {
    (void)unused;
    struct dr_watch *watch = &((struct watch *)object)->core;
    size_t seen = atomic_exchange(&watch->count, 0);
    size_t kept = seen < watch->room ? seen : watch->room;
    PyObject *list = PyList_New((Py_ssize_t)kept);
    for (size_t i = 0; list && i < kept; i++) {
        const struct dr_span *s = &watch->spans[i];
        PyObject *tuple =
            Py_BuildValue("(IKKKKKIII)", s->step, (unsigned long long)s->begin, (unsigned long long)s->end,
                          (unsigned long long)s->offset, (unsigned long long)s->size, (unsigned long long)s->crc,
                          s->file, s->worker, s->slot);
        if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
            Py_CLEAR(list);
    }
    return list ? Py_BuildValue("(Nn)", list, (Py_ssize_t)(seen - kept)) : NULL;
}

static PyObject *add(PyObject *object, PyObject *args) {
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "K", &bytes))
        return NULL;
    dr_watch_count(&((struct watch *)object)->core, bytes);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(bytes): counts what Python has done"},
    {"take", take, METH_NOARGS,
     "take() -> ([(step, begin ns, end ns, offset, size, CRC ns, file, worker, slot)], how many found no room); "
     "forgets "
     "them. Not while a call that has the watch is under way"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Watch(counter, room): counts bytes in 8 bytes of a buffer (or None), and keeps that many spans"},
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec watch_spec = TYPE_SPEC("Watch", struct watch, slots, 0);
