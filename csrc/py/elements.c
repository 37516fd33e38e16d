/* dcpring._C.convert: elements made into others (core/base/elements.h). */
#include "module.h"

#include "base/elements.h"

static PyObject *convert(PyObject *module, PyObject *args) {
    (void)module;
    const char *from_name, *to_name;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "ssy*", &from_name, &to_name, &data))
        return NULL;
    const struct dr_dtype *from = dr_dtype_by_name(from_name), *to = dr_dtype_by_name(to_name);
    PyObject *result = NULL;
    if (from && to && (size_t)data.len % from->item_size == 0) {
        size_t count = (size_t)data.len / from->item_size * (dr_is_packed(from) ? 2 : 1);
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * to->item_size));
        char *out = result ? PyBytes_AsString(result) : NULL;
        struct gil gil;
        gil_release_for(&gil, (size_t)data.len);
        bool is_converted = out && dr_convert(from, to, data.buf, out, count);
        gil_take(&gil);
        if (!is_converted)
            Py_CLEAR(result);
    }
    if (!result && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%zd bytes of %s cannot be made %s", data.len, from_name, to_name);
    PyBuffer_Release(&data);
    return result;
}

PyMethodDef elements_methods[] = {
    {"convert", convert, METH_VARARGS,
     "convert(from dtype, to dtype, data) -> bytes: as Tensor.to() rounds. No torch is needed"},
    {NULL, NULL, 0, NULL},
};
