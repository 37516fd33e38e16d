/* dcpring._C.start_recording and stop_recording (core/io/sys_record.h): for tests. */
#include "module.h"

#include "io/sys_record.h"

static PyObject *start_recording(PyObject *module, PyObject *args) {
    (void)module;
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    dr_record_start(fd);
    Py_RETURN_NONE;
}

static PyObject *stop_recording(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    int rc = dr_record_stop();
    if (rc < 0) {
        errno = -rc;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

PyMethodDef record_methods[] = {
    {"start_recording", start_recording, METH_VARARGS,
     "start_recording(fd): notes what the core does to the file system; for tests"},
    {"stop_recording", stop_recording, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
