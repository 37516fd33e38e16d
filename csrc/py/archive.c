/* dcpring._C.archive_of_pickle: an object's pickle as an archive of torch.save's (core/record/record.h). */
#include "module.h"

#include "base/crc.h"
#include "record/record.h"

static PyObject *archive_of_pickle(PyObject *module, PyObject *object) {
    (void)module;
    Py_buffer pickle;
    if (PyObject_GetBuffer(object, &pickle, PyBUF_SIMPLE) < 0)
        return NULL;
    size_t size = (size_t)pickle.len;
    uint8_t head[DR_OBJECT_AROUND_MAX], tail[DR_OBJECT_AROUND_MAX];
    struct gil gil;
    gil_release_for(&gil, size);
    uint32_t crc = dr_crc32(0, pickle.buf, size);
    gil_take(&gil);
    size_t head_size = dr_object_head(size, crc, head), tail_size = dr_object_tail(size, crc, tail);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head_size + size + tail_size));
    if (result) {
        char *out = PyBytes_AsString(result);
        memcpy(out, head, head_size);
        memcpy(out + head_size, pickle.buf, size);
        memcpy(out + head_size + size, tail, tail_size);
    }
    PyBuffer_Release(&pickle);
    return result;
}

PyMethodDef archive_methods[] = {
    {"archive_of_pickle", archive_of_pickle, METH_O,
     "archive_of_pickle(data) -> bytes: as torch.save writes an object that holds no tensor"},
    {NULL, NULL, 0, NULL},
};
