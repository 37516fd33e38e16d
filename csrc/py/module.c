/* The extension module: state, initialisation, and nothing else. */
#include "module.h"

#include "../core/crc.h"
#include "../core/pool.h"
#include "../core/record.h"

static int add_methods(PyObject *module, PyMethodDef *methods) { return PyModule_AddFunctions(module, methods); }

static PyObject *import_error_class(const char *name) {
    PyObject *errors = PyImport_ImportModule("dcpring.errors");
    PyObject *result = errors ? PyObject_GetAttrString(errors, name) : NULL;
    Py_XDECREF(errors);
    return result;
}

struct module_state *module_state(PyObject *module) { return PyModule_GetState(module); }

static int module_exec(PyObject *module) {
    struct module_state *state = module_state(module);
    state->corrupt_error = import_error_class("CorruptCheckpointError");
    if (!state->corrupt_error)
        return -1;
    state->writer_type = PyType_FromModuleAndSpec(module, &writer_spec, NULL);
    if (!state->writer_type || PyModule_AddObjectRef(module, "FileWriter", state->writer_type) < 0)
        return -1;
    if (add_methods(module, torch_methods) < 0 || add_methods(module, reader_methods) < 0 ||
        add_methods(module, directory_methods) < 0 || add_methods(module, fault_methods) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "CRC_BLOCK_BYTES", (long)DR_CRC_BLOCK) < 0 ||
        PyModule_AddIntConstant(module, "ALIGNMENT_BYTES", (long)DR_ALIGNMENT) < 0 ||
        PyModule_AddIntConstant(module, "LARGE_PAYLOAD_BYTES", (long)DR_LARGE_PAYLOAD) < 0)
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    struct module_state *state = module_state(module);
    Py_VISIT(state->corrupt_error);
    Py_VISIT(state->alloc_handles);
    Py_VISIT(state->writer_type);
    return 0;
}

static int module_clear(PyObject *module) {
    struct module_state *state = module_state(module);
    Py_CLEAR(state->corrupt_error);
    Py_CLEAR(state->alloc_handles);
    Py_CLEAR(state->writer_type);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dcpring._C",
    .m_doc = "The C side of dcpring. Not an interface for users.",
    .m_size = sizeof(struct module_state),
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
