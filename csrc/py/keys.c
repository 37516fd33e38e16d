/* dcpring._C.canonical_keys, raw_keys and guess_keys (core/keys/key.h). */
#include "module.h"

#include "keys/key.h"

/* Everything that one call holds. The texts belong to the strings, and those to the caller's lists. */
struct names {
    struct dr_key *keys;
    struct dr_key_node *nodes;
    struct dr_key_tree *tree;
    size_t count, node_count;
};

static void names_free(struct names *names) {
    dr_key_tree_free(names->tree);
    PyMem_Free(names->nodes);
    PyMem_Free(names->keys);
}

static int parse_key(PyObject *object, struct dr_key *key) {
    Py_ssize_t size;
    key->text = PyUnicode_AsUTF8AndSize(object, &size);
    key->size = (size_t)size;
    return key->text ? 0 : -1;
}

static void raise_bad_key(PyObject *list, Py_ssize_t index) {
    PyObject *object = PyList_GetItem(list, index);
    PyErr_Clear();
    if (PyUnicode_Check(object))
        PyErr_Format(PyExc_ValueError, "key number %zd, %.200A, cannot be written as UTF-8", index, object);
    else
        PyErr_Format(PyExc_TypeError, "key number %zd, %.200R, is not a str", index, object);
}

static int parse_keys(struct names *names, PyObject *list) {
    names->count = (size_t)PyList_Size(list);
    names->keys = PyMem_Calloc(names->count + 1, sizeof *names->keys);
    if (!names->keys) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < names->count; i++)
        if (parse_key(PyList_GetItem(list, (Py_ssize_t)i), &names->keys[i]) < 0) {
            if (!PyErr_ExceptionMatches(PyExc_MemoryError))
                raise_bad_key(list, (Py_ssize_t)i);
            return -1;
        }
    return 0;
}

/* A list of (name, parent, kind). */
static int parse_nodes(struct names *names, PyObject *list) {
    names->node_count = (size_t)PyList_Size(list);
    names->nodes = PyMem_Calloc(names->node_count + 1, sizeof *names->nodes);
    if (!names->nodes) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < names->node_count; i++) {
        struct dr_key_node *node = &names->nodes[i];
        PyObject *name;
        unsigned kind;
        if (!PyArg_ParseTuple(PyList_GetItem(list, (Py_ssize_t)i), "UII;a node", &name, &node->parent, &kind) ||
            parse_key(name, &node->name) < 0)
            return -1;
        node->kind = kind < DR_KEY_KINDS ? (enum dr_key_kind)kind : DR_KEY_KINDS;
    }
    return 0;
}

/* The caller's own strings where the names are those that came in. */
static PyObject *batch_list(const struct names *names, const struct dr_key_batch *batch, PyObject *given) {
    PyObject *result = PyList_New((Py_ssize_t)batch->count);
    for (size_t i = 0; result && i < batch->count; i++) {
        struct dr_key key = batch->keys[i];
        PyObject *item = key.text == names->keys[i].text ? Py_NewRef(PyList_GetItem(given, (Py_ssize_t)i))
                                                         : PyUnicode_FromStringAndSize(key.text, (Py_ssize_t)key.size);
        if (!item || PyList_SetItem(result, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(result);
    }
    return result;
}

typedef int translate(const struct dr_key_tree *tree, const struct dr_key *names, size_t count,
                      struct dr_key_batch *batch, struct dr_error *error);

static PyObject *translate_keys(PyObject *module, PyObject *args, translate *call) {
    PyObject *nodes, *keys, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &nodes, &PyList_Type, &keys))
        return NULL;
    struct names names = {0};
    struct dr_key_batch batch = {0};
    DR_NEW_ERROR(error);
    if (parse_keys(&names, keys) == 0 && parse_nodes(&names, nodes) == 0) {
        int rc = dr_key_tree_make(&names.tree, names.nodes, names.node_count, &error);
        if (rc == 0)
            rc = call(names.tree, names.keys, names.count, &batch, &error);
        if (rc == 0)
            rc = dr_key_distinct(names.keys, &batch, &error);
        result = rc == 0 ? batch_list(&names, &batch, keys) : raise_error(module_state(module), &error);
    }
    dr_key_batch_destroy(&batch);
    names_free(&names);
    return result;
}

static PyObject *canonical_keys(PyObject *module, PyObject *args) {
    return translate_keys(module, args, dr_key_canonical);
}

static PyObject *raw_keys(PyObject *module, PyObject *args) { return translate_keys(module, args, dr_key_raw); }

static PyObject *guess_list(PyObject *module, struct names *names, PyObject *keys, PyObject *flags) {
    struct dr_key_batch batch;
    DR_NEW_ERROR(error);
    uint8_t *ambiguous = (uint8_t *)PyBytes_AsString(flags);
    int rc = dr_key_guess(names->keys, names->count, &batch, ambiguous, &error);
    if (rc == 0)
        rc = dr_key_distinct(names->keys, &batch, &error);
    PyObject *list = rc == 0 ? batch_list(names, &batch, keys) : raise_error(module_state(module), &error);
    dr_key_batch_destroy(&batch);
    PyObject *result = list ? PyTuple_Pack(2, list, flags) : NULL;
    Py_XDECREF(list);
    return result;
}

static PyObject *guess_keys(PyObject *module, PyObject *args) {
    PyObject *keys, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &keys))
        return NULL;
    struct names names = {0};
    PyObject *flags = PyBytes_FromStringAndSize(NULL, PyList_Size(keys));
    if (flags && parse_keys(&names, keys) == 0)
        result = guess_list(module, &names, keys, flags);
    Py_XDECREF(flags);
    names_free(&names);
    return result;
}

PyMethodDef key_methods[] = {
    {"canonical_keys", canonical_keys, METH_VARARGS, "canonical_keys(nodes, keys): without what wrappers put in"},
    {"raw_keys", raw_keys, METH_VARARGS, "raw_keys(nodes, keys): the inverse of canonical_keys"},
    {"guess_keys", guess_keys, METH_VARARGS, "guess_keys(keys): by their text alone, and which are ambiguous"},
    {NULL, NULL, 0, NULL},
};
