/* The extension module: state, initialisation, and nothing else. */
#include "module.h"

#include <stddef.h>

#include "base/align.h"
#include "base/crc.h"
#include "base/digest.h"
#include "data/load.h"
#include "io/thread_pool.h"
#include "keys/key.h"
#include "record/record.h"

#define METHODS_ENTRY(name) name##_methods,
static PyMethodDef *const all_methods[] = {PARTS(METHODS_ENTRY)};

#define TYPE_ENTRY(name, part) {#name, &part##_spec, offsetof(struct module_state, part##_type)},
static const struct {
    const char *name;
    PyType_Spec *spec;
    size_t slot;
} types[] = {TYPES(TYPE_ENTRY)};

enum { TYPE_COUNT = sizeof types / sizeof *types };

static PyObject **type_slot(struct module_state *state, int i) { return (PyObject **)((char *)state + types[i].slot); }

static int add_types(PyObject *module) {
    for (int i = 0; i < TYPE_COUNT; i++) {
        PyObject **slot = type_slot(module_state(module), i);
        *slot = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (!*slot || PyModule_AddObjectRef(module, types[i].name, *slot) < 0)
            return -1;
    }
    return 0;
}

void free_instance(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

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
    if (add_types(module) < 0)
        return -1;
    static bool registered; /* once for all interpreters of the process, which share what is kept */
    if (!registered && Py_AtExit(dr_thread_pool_release) == 0)
        registered = true;
    for (size_t i = 0; i < sizeof all_methods / sizeof *all_methods; i++)
        if (PyModule_AddFunctions(module, all_methods[i]) < 0)
            return -1;
    if (PyModule_AddIntConstant(module, "CRC_BLOCK_BYTES", (long)DR_CRC_BLOCK) < 0 ||
        PyModule_AddIntConstant(module, "DIGEST_BYTES", DR_DIGEST_BYTES) < 0 ||
        PyModule_AddIntConstant(module, "DIGEST_KEY_BYTES", DR_DIGEST_KEY_BYTES) < 0 ||
        PyModule_AddIntConstant(module, "ALIGNMENT_BYTES", (long)DR_ALIGNMENT) < 0 ||
        PyModule_AddIntConstant(module, "LARGE_PAYLOAD_BYTES", (long)DR_LARGE_PAYLOAD) < 0 ||
        PyModule_AddIntConstant(module, "SLICE_GAP_BYTES", (long)DR_SLICE_GAP) < 0 ||
        PyModule_AddIntConstant(module, "KEY_PLAIN", DR_KEY_PLAIN) < 0 ||
        PyModule_AddIntConstant(module, "KEY_WRAPPED", DR_KEY_WRAPPED) < 0 ||
        PyModule_AddIntConstant(module, "KEY_ORIGINAL", DR_KEY_ORIGINAL) < 0)
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    struct module_state *state = module_state(module);
    Py_VISIT(state->corrupt_error);
    Py_VISIT(state->alloc_handles);
    for (int i = 0; i < TYPE_COUNT; i++)
        Py_VISIT(*type_slot(state, i));
    return 0;
}

static int module_clear(PyObject *module) {
    struct module_state *state = module_state(module);
    Py_CLEAR(state->corrupt_error);
    Py_CLEAR(state->alloc_handles);
    for (int i = 0; i < TYPE_COUNT; i++)
        Py_CLEAR(*type_slot(state, i));
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
