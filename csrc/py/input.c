/* dcpring._C.Input: the files of a directory that are read (core/io/input.h), kept from one call to the next. */
#include "input.h"

struct input {
    PyObject_HEAD
    struct dr_input core;
    PyObject *directory; /* bytes, which the core points into */
    struct paths files;  /* the same */
    unsigned users;      /* calls under way, with the GIL released */
    bool open;
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

struct dr_input *input_take(struct module_state *state, PyObject *object) {
    struct input *self = (struct input *)object;
    if ((PyObject *)Py_TYPE(object) != state->input_type) {
        PyErr_SetString(PyExc_TypeError, "expected an Input");
        return NULL;
    }
    if (!self->open) {
        PyErr_SetString(PyExc_ValueError, "the input is closed");
        return NULL;
    }
    self->users++;
    return &self->core;
}

void input_give(PyObject *object) { ((struct input *)object)->users--; }

static void close_core(struct input *self) {
    if (!self->open)
        return;
    self->open = false;
    Py_BEGIN_ALLOW_THREADS
    dr_input_destroy(&self->core);
    Py_END_ALLOW_THREADS
}

static int open_core(struct input *self) {
    DR_NEW_ERROR(error);
    const char *directory = PyBytes_AsString(self->directory);
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = dr_input_init(&self->core, directory, self->files.names, (size_t)self->files.count, &error);
    Py_END_ALLOW_THREADS
    self->open = true;
    if (rc < 0)
        raise_error(state_of((PyObject *)self), &error);
    return rc;
}

static PyObject *input_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *directory = NULL, *files;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "O&O", PyUnicode_FSConverter, &directory, &files))
        return NULL;
    struct input *self = (struct input *)PyType_GenericAlloc(type, 0);
    if (!self) {
        Py_DECREF(directory);
        return NULL;
    }
    self->directory = directory;
    if (paths_parse(&self->files, files) < 0 || open_core(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void input_dealloc(PyObject *object) {
    struct input *self = (struct input *)object;
    close_core(self);
    paths_free(&self->files);
    Py_XDECREF(self->directory);
    free_instance(object);
}

static PyObject *close_input(PyObject *object, PyObject *unused) {
    (void)unused;
    struct input *self = (struct input *)object;
    if (self->users > 0)
        return PyErr_Format(PyExc_ValueError, "the input is in use by another thread");
    close_core(self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"close", close_input, METH_NOARGS, "close(): closes all files"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Input(directory, files): data files to read; each is opened when something of it is wanted, and kept open"},
    {Py_tp_new, input_new},
    {Py_tp_dealloc, input_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec input_spec = TYPE_SPEC("Input", struct input, slots, 0);
