/* dcpring._C.holds_only: whether an object, and all that it holds, is of classes that a load allows. */
#include "module.h"

/* What is nested deeper, or has more containers in it, is not looked through: a few lists can hold each other very
 * often. */
enum { MOST_LEVELS = 50, MOST_CONTAINERS = 1 << 20 };

struct looker {
    PyObject *types;     /* a tuple: of what holds nothing */
    PyObject *ordered;   /* OrderedDict, which holds attributes too */
    unsigned containers; /* seen by now */
};

static int look(struct looker *looker, PyObject *value, int levels);

/* What is in it is held, as the collector may run whatever empties it. */
static int look_at_dict(struct looker *looker, PyObject *dict, int levels) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int rc = 1;
    while (rc == 1 && PyDict_Next(dict, &at, &key, &value)) {
        Py_INCREF(key);
        Py_INCREF(value);
        rc = look(looker, key, levels);
        if (rc == 1)
            rc = look(looker, value, levels);
        Py_DECREF(key);
        Py_DECREF(value);
    }
    return rc;
}

static int look_at_items(struct looker *looker, PyObject *values, int levels) {
    PyObject *iterator = PyObject_GetIter(values), *value;
    int rc = iterator ? 1 : -1;
    while (rc == 1 && (value = PyIter_Next(iterator))) {
        rc = look(looker, value, levels);
        Py_DECREF(value);
    }
    Py_XDECREF(iterator);
    return rc == 1 && PyErr_Occurred() ? -1 : rc;
}

/* As look() says it. */
static int has_no_attributes(PyObject *value) {
    PyObject *attributes = PyObject_GetAttrString(value, "__dict__");
    Py_ssize_t count = attributes ? PyObject_Size(attributes) : -1;
    Py_XDECREF(attributes);
    return count < 0 ? -1 : count == 0;
}

static bool is_among(PyObject *types, PyObject *type) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(types); i++)
        if (PyTuple_GetItem(types, i) == type)
            return true;
    return false;
}

/* 1 where all is allowed, 0 where something is not, -1 on an error. No code of the values' classes is run. */
static int look(struct looker *looker, PyObject *value, int levels) {
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (is_among(looker->types, type))
        return 1;
    if (levels == 0 || ++looker->containers > MOST_CONTAINERS)
        return 0;
    if (type == (PyObject *)&PyDict_Type)
        return look_at_dict(looker, value, levels - 1);
    if (type == (PyObject *)&PyList_Type || type == (PyObject *)&PyTuple_Type || type == (PyObject *)&PySet_Type ||
        type == (PyObject *)&PyFrozenSet_Type)
        return look_at_items(looker, value, levels - 1);
    if (type != looker->ordered)
        return 0;
    int rc = has_no_attributes(value);
    return rc == 1 ? look_at_dict(looker, value, levels - 1) : rc;
}

static PyObject *holds_only(PyObject *module, PyObject *args) {
    (void)module;
    struct looker looker = {0};
    PyObject *value;
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &looker.types, &looker.ordered, &value))
        return NULL;
    int rc = look(&looker, value, MOST_LEVELS);
    return rc < 0 ? NULL : PyBool_FromLong(rc);
}

PyMethodDef holds_only_methods[] = {
    {"holds_only", holds_only, METH_VARARGS,
     "holds_only(types, OrderedDict, value) -> bool: whether it, and all that its containers hold, is of these types"},
    {NULL, NULL, 0, NULL},
};
