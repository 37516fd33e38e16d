/* The one place where core failures become Python exceptions. */
#include "module.h"

#include <stdio.h>

static void describe(const struct dr_error *error, char *out, size_t room) {
    const char *cure = dr_error_cure(error);
    int n;
    if (error->kind == DR_ERROR_SYSTEM)
        n = snprintf(out, room, "%s: %s failed", dr_error_said(error), dr_error_call(error));
    else
        n = snprintf(out, room, "%s", error->detail);
    if (n >= 0 && (size_t)n < room && error->kind == DR_ERROR_SYSTEM && error->offset >= 0)
        n += snprintf(out + n, room - (size_t)n, " (%lld bytes at offset %lld)", (long long)error->length,
                      (long long)error->offset);
    if (n >= 0 && (size_t)n < room && *cure)
        snprintf(out + n, room - (size_t)n, "; %s", cure);
}

/* The text may end in the middle of a character, where a name was cut. */
static PyObject *make_exception(struct module_state *state, const struct dr_error *error, const char *message) {
    PyObject *path = PyUnicode_DecodeFSDefault(error->path);
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
    PyObject *exception = NULL;
    if (!path || !text)
        ;
    else if (error->kind == DR_ERROR_SYSTEM && !*error->path)
        exception = PyObject_CallFunction(PyExc_OSError, "iO", error->err, text);
    else if (error->kind == DR_ERROR_SYSTEM)
        exception = PyObject_CallFunction(PyExc_OSError, "iOO", error->err, text, path);
    else if (error->kind == DR_ERROR_CORRUPT)
        exception = PyObject_CallFunction(state->corrupt_error, "OOL", text, path, (long long)error->offset);
    else
        exception = PyObject_CallFunctionObjArgs(PyExc_ValueError, text, NULL);
    Py_XDECREF(path);
    Py_XDECREF(text);
    return exception;
}

PyObject *raise_error(struct module_state *state, const struct dr_error *error) {
    return raise_with(state, error, NULL);
}

PyObject *raise_with(struct module_state *state, const struct dr_error *error, PyObject *changed) {
    char message[768];
    /* The poll callback has left KeyboardInterrupt, or whatever the signal handler raised. */
    if (PyErr_Occurred())
        return NULL;
    describe(error, message, sizeof message);
    PyObject *exception = make_exception(state, error, message);
    if (!exception)
        return NULL;
    PyObject *item = error->item == DR_NO_ITEM ? Py_NewRef(Py_None) : PyLong_FromLongLong(error->item);
    if (item && PyObject_SetAttrString(exception, "item", item) == 0 &&
        (!changed || PyObject_SetAttrString(exception, "changed", changed) == 0))
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_XDECREF(item);
    Py_DECREF(exception);
    return NULL;
}

PyObject *fail(struct module_state *state, const struct dr_error *error) {
    if (error->kind == DR_ERROR_SYSTEM && error->err == ENOMEM)
        return PyErr_NoMemory();
    return raise_error(state, error);
}

PyObject *bytes_of(struct module_state *state, int rc, struct dr_buffer *buffer, const struct dr_error *error) {
    PyObject *bytes =
        rc < 0 ? fail(state, error) : PyBytes_FromStringAndSize((const char *)buffer->data, (Py_ssize_t)buffer->size);
    dr_buffer_destroy(buffer);
    return bytes;
}

bool refuse_keywords(PyTypeObject *type, PyObject *kwargs) {
    if (kwargs)
        PyErr_Format(PyExc_TypeError, "%S takes no keyword arguments", type);
    return kwargs;
}
