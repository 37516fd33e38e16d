/* dcpring._C.Syncs: what is being made durable (core/io/sync.h). */
#include "module.h"

struct syncs {
    PyObject_HEAD
    struct dr_syncs core;
    PyObject *watch; /* which the spans go to when they are waited for, or None */
    struct turn turn;
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

int syncs_take(struct module_state *state, PyObject *object, struct dr_syncs **out) {
    *out = NULL;
    if (object == Py_None)
        return 0;
    if ((PyObject *)Py_TYPE(object) != state->syncs_type) {
        PyErr_SetString(PyExc_TypeError, "expected a Syncs or None");
        return -1;
    }
    struct syncs *self = (struct syncs *)object;
    if (!turn_take(&self->turn, true, "the set of syncs"))
        return -1;
    *out = &self->core;
    return 0;
}

void syncs_give(PyObject *object) {
    if (object != Py_None)
        turn_give(&((struct syncs *)object)->turn);
}

static PyObject *syncs_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *watch;
    struct dr_watch *ignored;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "O", &watch) ||
        parse_watch(PyType_GetModuleState(type), watch, &ignored) < 0)
        return NULL;
    struct syncs *self = (struct syncs *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    dr_syncs_init(&self->core);
    self->watch = Py_NewRef(watch);
    return (PyObject *)self;
}

static void syncs_dealloc(PyObject *object) {
    struct syncs *self = (struct syncs *)object;
    dr_syncs_abandon(&self->core);
    Py_XDECREF(self->watch);
    free_instance(object);
}

static PyObject *add(PyObject *object, PyObject *path,
                     int (*begin)(struct dr_syncs *, const char *, struct dr_error *)) {
    PyObject *encoded;
    struct dr_syncs *core;
    if (!PyUnicode_FSConverter(path, &encoded))
        return NULL;
    int rc = syncs_take(state_of(object), object, &core);
    if (rc < 0) {
        Py_DECREF(encoded);
        return NULL;
    }
    const char *name = PyBytes_AsString(encoded);
    DR_NEW_ERROR(error);
    Py_BEGIN_ALLOW_THREADS
    rc = begin(core, name, &error);
    Py_END_ALLOW_THREADS
    syncs_give(object);
    Py_DECREF(encoded);
    if (rc < 0)
        return raise_error(state_of(object), &error);
    Py_RETURN_NONE;
}

static PyObject *add_directory(PyObject *object, PyObject *path) { return add(object, path, dr_syncs_add_directory); }

static PyObject *add_above(PyObject *object, PyObject *path) { return add(object, path, dr_syncs_add_above); }

static PyObject *wait_for_all(PyObject *object, PyObject *unused) {
    (void)unused;
    struct syncs *self = (struct syncs *)object;
    struct dr_syncs *core;
    struct dr_watch *watch;
    if (parse_watch(state_of(object), self->watch, &watch) < 0 || syncs_take(state_of(object), object, &core) < 0)
        return NULL;
    DR_NEW_ERROR(error);
    struct gil gil;
    gil_release(&gil);
    int rc = dr_syncs_wait(core, &gil.control, watch, &error);
    gil_take(&gil);
    syncs_give(object);
    if (rc < 0)
        return raise_error(state_of(object), &error);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"directory", add_directory, METH_O, "directory(path): begins to make the names in it durable"},
    {"above", add_above, METH_O, "above(path): the same for the directory above, and so for the name of this one"},
    {"wait", wait_for_all, METH_NOARGS, "wait(): until all is durable; raises the first failure"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Syncs(watch or None): what is being made durable, at the same time"},
    {Py_tp_new, syncs_new},
    {Py_tp_dealloc, syncs_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec syncs_spec = TYPE_SPEC("Syncs", struct syncs, slots, 0);
