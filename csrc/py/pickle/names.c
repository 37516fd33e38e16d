/* dcpring._C.names_in_pickle: what a pickle names, found without running it. */
#include "module.h"

#include "base/pickle_read.h"

/* Opcodes that name something which does not stand beside them. */
static bool names_otherwise(uint8_t code) {
    return code == DR_STACK_GLOBAL || code == DR_INST || code == DR_EXT1 || code == DR_EXT2 || code == DR_EXT4;
}

static int add_names(struct dr_pickle *pickle, PyObject *names, bool *are_all) {
    struct dr_opcode op = {0};
    while (op.code != DR_STOP) {
        *are_all = !dr_pickle_next(pickle, &op) && !names_otherwise(op.code);
        if (!*are_all)
            return 0;
        if (op.code != DR_GLOBAL)
            continue;
        PyObject *name = Py_BuildValue("(y#y#)", (const char *)op.text, (Py_ssize_t)op.size, (const char *)op.name,
                                       (Py_ssize_t)op.name_size);
        int error = name ? PySet_Add(names, name) : -1;
        Py_XDECREF(name);
        if (error)
            return -1;
    }
    return 0;
}

static PyObject *names_in_pickle(PyObject *module, PyObject *object) {
    (void)module;
    Py_buffer data;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    struct dr_pickle pickle = {data.buf, (size_t)data.len, 0};
    bool are_all = false;
    PyObject *names = PySet_New(NULL);
    if (names && add_names(&pickle, names, &are_all) < 0)
        Py_CLEAR(names);
    PyBuffer_Release(&data);
    if (names && !are_all) {
        Py_DECREF(names);
        Py_RETURN_NONE;
    }
    return names;
}

PyMethodDef names_methods[] = {
    {"names_in_pickle", names_in_pickle, METH_O,
     "names_in_pickle(data): the set of pairs (module, name) that it names, None if not all can be seen"},
    {NULL, NULL, 0, NULL},
};
