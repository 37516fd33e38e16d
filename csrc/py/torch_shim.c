/* Binding libtorch's C shim, and looking at tensors through it. See torch_shim.h. */
#include "module.h"

#include "tensors.h"

#include <dlfcn.h>
#include <stdio.h>

static void *find(void *library, const char *name, const char *version) {
    char symbol[96];
    snprintf(symbol, sizeof symbol, "aoti_torch_%s", name);
    void *address = dlsym(library, symbol);
    if (!address && version)
        PyErr_Format(
            PyExc_ImportError,
            "dcpring needs the symbol %s of libtorch, which torch %s does not have; install torch 2.9 or newer", symbol,
            version);
    return address;
}

/* ISO C has no cast from void * to a function pointer; POSIX promises that their bytes are the same. */
#define BIND(field) \
    do { \
        void *address = find(library, #field, version); \
        if (!address) \
            return -1; \
        memcpy(&shim->field, &address, sizeof address); \
    } while (0)

static int bind_functions(struct torch_shim *shim, void *library, const char *version) {
    BIND(get_data_ptr);
    BIND(get_dim);
    BIND(get_sizes);
    BIND(get_strides);
    BIND(get_storage_offset);
    BIND(get_storage_size);
    BIND(get_dtype);
    BIND(get_device_type);
    BIND(get_layout);
    BIND(delete_tensor_object);
    return 0;
}

static int constant(void *library, const char *name, const char *version, int32_t *out) {
    void *address = find(library, name, version);
    if (!address)
        return -1;
    int32_t (*get)(void);
    memcpy(&get, &address, sizeof address);
    *out = get();
    return 0;
}

/* Returns the names of those that this torch has no function for: bind_dtype may still come to know their codes. */
static PyObject *bind_dtypes(struct torch_shim *shim, void *library) {
    char name[64];
    PyObject *unknown = PyList_New(0);
    for (const struct dr_dtype *d = dr_dtypes; unknown && d->name && shim->dtype_count < TORCH_DTYPES; d++) {
        snprintf(name, sizeof name, "dtype_%s", d->name);
        int n = shim->dtype_count;
        if (constant(library, name, NULL, &shim->dtypes[n].code) == 0) {
            shim->dtypes[n].dtype = d;
            shim->dtype_count++;
            continue;
        }
        PyObject *text = PyUnicode_FromString(d->name);
        if (!text || PyList_Append(unknown, text) < 0)
            Py_CLEAR(unknown);
        Py_XDECREF(text);
    }
    return unknown;
}

static PyObject *bind_torch(PyObject *module, PyObject *args) {
    const char *version;
    PyObject *path, *alloc;
    if (!PyArg_ParseTuple(args, "O&sO", PyUnicode_FSConverter, &path, &version, &alloc))
        return NULL;
    struct module_state *state = module_state(module);
    void *library = dlopen(PyBytes_AsString(path), RTLD_NOLOAD | RTLD_LAZY);
    if (!library)
        PyErr_Format(PyExc_ImportError, "dcpring found no loaded libtorch at %s (torch %s)", PyBytes_AsString(path),
                     version);
    Py_DECREF(path);
    if (!library)
        return NULL;
    struct torch_shim shim = {0};
    if (bind_functions(&shim, library, version) < 0 ||
        constant(library, "device_type_cpu", version, &shim.device_cpu) < 0 ||
        constant(library, "layout_strided", version, &shim.layout_strided) < 0)
        return NULL;
    PyObject *unknown = bind_dtypes(&shim, library);
    if (!unknown)
        return NULL;
    state->torch = shim;
    Py_XDECREF(state->alloc_handles);
    Py_INCREF(alloc);
    state->alloc_handles = alloc;
    return unknown;
}

static const struct dr_dtype *dtype_of(const struct torch_shim *shim, int32_t code) {
    for (int i = 0; i < shim->dtype_count; i++)
        if (shim->dtypes[i].code == code)
            return shim->dtypes[i].dtype;
    return NULL;
}

/* Whether a tensor of at least one element lies in its storage, which may have been resized below it. */
static bool is_in_storage(const struct torch_shim *shim, AtenTensorHandle handle, const struct tensor_view *view) {
    int64_t last, size, bytes;
    if (shim->get_storage_offset(handle, &last) || shim->get_storage_size(handle, &size))
        return false;
    for (int64_t d = 0; d < view->ndim; d++) {
        int64_t step;
        if (__builtin_mul_overflow(view->sizes[d] - 1, view->strides[d], &step) ||
            __builtin_add_overflow(last, step, &last))
            return false;
    }
    return !__builtin_add_overflow(last, 1, &last) &&
           !__builtin_mul_overflow(last, (int64_t)view->dtype->item_size, &bytes) && bytes <= size;
}

/* What cannot be looked at is TENSOR_OTHER: torch.save decides. */
static struct tensor_view look_at(const struct torch_shim *shim, AtenTensorHandle handle) {
    struct tensor_view view = {.kind = TENSOR_OTHER};
    int32_t layout, device, dtype;
    int64_t *sizes, *strides;
    if (shim->get_layout(handle, &layout) || layout != shim->layout_strided)
        return view;
    if (shim->get_dtype(handle, &dtype) || !(view.dtype = dtype_of(shim, dtype)))
        return view;
    if (shim->get_dim(handle, &view.ndim) || view.ndim > DR_MAX_DIMS)
        return view;
    if (shim->get_sizes(handle, &sizes) || shim->get_strides(handle, &strides) ||
        shim->get_device_type(handle, &device))
        return view;
    view.sizes = sizes;
    view.strides = strides;
    if (device != shim->device_cpu) {
        view.kind = TENSOR_DEVICE;
        return view;
    }
    if (shim->get_data_ptr(handle, &view.data))
        return view;
    struct dr_shape shape = {view.dtype, (int)view.ndim, view.sizes};
    uint64_t bytes;
    if (dr_shape_bytes(&shape, &bytes) && (bytes == 0 || (view.data && is_in_storage(shim, handle, &view))))
        view.kind = TENSOR_PLAIN;
    return view;
}

void tensors_free(struct tensors *tensors) {
    for (Py_ssize_t i = 0; i < tensors->count; i++)
        tensors->shim->delete_tensor_object(tensors->handles[i]);
    PyMem_Free(tensors->handles);
    PyMem_Free(tensors->views);
    *tensors = (struct tensors){0};
}

static int take_handles(struct tensors *tensors, PyObject *capsules, Py_ssize_t count) {
    tensors->handles = PyMem_Calloc((size_t)count + 1, sizeof *tensors->handles);
    tensors->views = PyMem_Calloc((size_t)count + 1, sizeof *tensors->views);
    if (!tensors->handles || !tensors->views) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        AtenTensorHandle handle = PyCapsule_GetPointer(PyList_GetItem(capsules, i), NULL);
        if (!handle)
            return -1;
        tensors->handles[tensors->count++] = handle;
    }
    return 0;
}

/*
 * dcpring.torchside.shim calls bind_torch. It waits for the first tensors, as it imports torch, which not all callers
 * need.
 */
static int bind_once(struct module_state *state) {
    if (state->alloc_handles)
        return 0;
    PyObject *binding = PyImport_ImportModule("dcpring.torchside.shim");
    if (!binding)
        return -1;
    Py_DECREF(binding);
    if (state->alloc_handles)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "dcpring._C.bind_torch was not called");
    return -1;
}

int tensors_init(struct tensors *tensors, struct module_state *state, PyObject *list) {
    *tensors = (struct tensors){.shim = &state->torch};
    if (bind_once(state) < 0)
        return -1;
    PyObject *capsules = PyObject_CallFunctionObjArgs(state->alloc_handles, list, NULL);
    if (!capsules)
        return -1;
    int rc = take_handles(tensors, capsules, PyList_Size(capsules));
    Py_DECREF(capsules);
    if (rc < 0) {
        tensors_free(tensors);
        return -1;
    }
    tensors_look(tensors);
    return 0;
}

void tensors_look(struct tensors *tensors) {
    for (Py_ssize_t i = 0; i < tensors->count; i++)
        tensors->views[i] = look_at(tensors->shim, tensors->handles[i]);
}

/* The code of a dtype that torch has no function for, from a tensor that has it. */
static PyObject *bind_dtype(PyObject *module, PyObject *args) {
    const char *name;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "sO!", &name, &PyList_Type, &list))
        return NULL;
    struct module_state *state = module_state(module);
    struct torch_shim *shim = &state->torch;
    struct tensors tensors;
    if (tensors_init(&tensors, state, list) < 0)
        return NULL;
    for (const struct dr_dtype *d = dr_dtypes; d->name && shim->dtype_count < TORCH_DTYPES; d++) {
        int32_t code;
        if (strcmp(d->name, name) == 0 && tensors.count == 1 && !shim->get_dtype(tensors.handles[0], &code) &&
            !dtype_of(shim, code)) {
            shim->dtypes[shim->dtype_count].code = code;
            shim->dtypes[shim->dtype_count++].dtype = d;
        }
    }
    tensors_free(&tensors);
    Py_RETURN_NONE;
}

PyMethodDef torch_methods[] = {
    {"bind_torch", bind_torch, METH_VARARGS,
     "bind_torch(libtorch_path, torch_version, alloc_handles) -> [dtypes that it has no function for]"},
    {"bind_dtype", bind_dtype, METH_VARARGS, "bind_dtype(name, [a tensor of this dtype])"},
    {NULL, NULL, 0, NULL},
};
