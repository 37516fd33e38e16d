/* The extension module: state, initialisation, and nothing else. */
#include "module.h"

#include "base/align.h"
#include "base/crc.h"
#include "base/digest.h"
#include "data/load.h"
#include "io/kept.h"
#include "keys/key.h"
#include "record/record.h"

static PyMethodDef *const all_methods[] = {
    torch_methods,    reader_methods,        directory_methods, fault_methods,  table_methods,
    merge_methods,    storage_index_methods, match_methods,     key_methods,    probe_methods,
    verify_methods,   compare_methods,       unpickle_methods,  record_methods, stripe_methods,
    elements_methods, unchanged_methods,     copy_methods,      kept_methods,   barrier_methods,
};

enum { TYPES = 10 };

struct type_entry {
    const char *name;
    PyType_Spec *spec;
    PyObject **slot;
};

static void list_types(struct module_state *state, struct type_entry out[TYPES]) {
    out[0] = (struct type_entry){"FileWriter", &writer_spec, &state->writer_type};
    out[1] = (struct type_entry){"Table", &table_spec, &state->table_type};
    out[2] = (struct type_entry){"Merge", &merge_spec, &state->merge_type};
    out[3] = (struct type_entry){"StorageIndex", &storage_index_spec, &state->storage_index_type};
    out[4] = (struct type_entry){"Match", &match_spec, &state->match_type};
    out[5] = (struct type_entry){"Tensors", &tensors_spec, &state->tensors_type};
    out[6] = (struct type_entry){"Watch", &watch_spec, &state->watch_type};
    out[7] = (struct type_entry){"Input", &input_spec, &state->input_type};
    out[8] = (struct type_entry){"StripeFile", &stripe_file_spec, &state->stripe_file_type};
    out[9] = (struct type_entry){"Syncs", &syncs_spec, &state->syncs_type};
}

static int add_types(PyObject *module) {
    struct type_entry types[TYPES];
    list_types(module_state(module), types);
    for (int i = 0; i < TYPES; i++) {
        *types[i].slot = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (!*types[i].slot || PyModule_AddObjectRef(module, types[i].name, *types[i].slot) < 0)
            return -1;
    }
    return 0;
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
    if (!registered && Py_AtExit(dr_kept_release) == 0)
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
    struct type_entry types[TYPES];
    list_types(state, types);
    for (int i = 0; i < TYPES; i++)
        Py_VISIT(*types[i].slot);
    return 0;
}

static int module_clear(PyObject *module) {
    struct module_state *state = module_state(module);
    Py_CLEAR(state->corrupt_error);
    Py_CLEAR(state->alloc_handles);
    struct type_entry types[TYPES];
    list_types(state, types);
    for (int i = 0; i < TYPES; i++)
        Py_CLEAR(*types[i].slot);
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
