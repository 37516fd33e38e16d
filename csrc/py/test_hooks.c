/*
 * What tests need of the module, and no wheel has: faults in system calls (core/io/sys_fault.h), who has the GIL
 * meanwhile, a record of what reaches the file system (core/io/sys_record.h), and how long things are kept. setup.py
 * compiles this, and the two files of the core, with DCPRING_TEST alone.
 */
#include "module.h"

#include "io/sys.h"
#include "io/sys_fault.h"
#include "io/sys_record.h"
#include "io/thread_pool.h"

#include <dlfcn.h>

/* ---- faults ---- */

static PyObject *arm_fault(PyObject *module, PyObject *args) {
    (void)module;
    struct dr_fault fault = {0};
    unsigned long long nth;
    int sticky, is_warm = false;
    if (!PyArg_ParseTuple(args, "zKip|Ip", &fault.call, &nth, &fault.err, &sticky, &fault.delay_ms, &is_warm))
        return NULL;
    fault.nth = nth;
    fault.sticky = sticky;
    fault.warm = is_warm;
    Py_BEGIN_ALLOW_THREADS
    dr_fault_arm(&fault);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *disarm_fault(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyLong_FromUnsignedLongLong(dr_fault_disarm());
}

/* ---- who has the GIL ---- */

static int (*holds_gil)(void); /* PyGILState_Check, which the stable ABI has not */
static PyObject *held;         /* a list of the calls that were made with it */

static void look(const char *call) {
    PyObject *name = holds_gil() ? PyUnicode_FromString(call) : NULL;
    if (name)
        PyList_Append(held, name);
    Py_XDECREF(name);
}

static PyObject *watch_gil(PyObject *module, PyObject *list) {
    (void)module;
    void *address = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    if (!address || !PyList_Check(list))
        return PyErr_Format(PyExc_RuntimeError, "this Python does not tell who has the GIL, or that is no list");
    memcpy(&holds_gil, &address, sizeof address);
    Py_XDECREF(held);
    held = Py_NewRef(list);
    dr_fault_watch(look);
    dr_sys.close(-1);
    Py_RETURN_NONE;
}

/* ---- what reaches the file system ---- */

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

/* ---- what is kept ---- */

static PyObject *keep_for(PyObject *module, PyObject *args) {
    (void)module;
    unsigned ms;
    if (!PyArg_ParseTuple(args, "I", &ms))
        return NULL;
    dr_thread_pool_set_idle_ms(ms);
    Py_RETURN_NONE;
}

PyMethodDef test_hook_methods[] = {
    {"arm_fault", arm_fault, METH_VARARGS,
     "arm_fault(call or None, nth, errno or 0 to shorten transfers, sticky, delay_ms=0, warm=False): lets go of "
     "what is kept, unless it is to begin warm"},
    {"watch_gil", watch_gil, METH_O,
     "watch_gil(list): from now on notes in it each system call of the core that is made with the GIL held, as the one "
     "that this makes is: close"},
    {"disarm_fault", disarm_fault, METH_NOARGS, "disarm_fault() -> calls counted since arm_fault"},
    {"start_recording", start_recording, METH_VARARGS,
     "start_recording(fd): notes what the core does to the file system"},
    {"stop_recording", stop_recording, METH_NOARGS, NULL},
    {"keep_for", keep_for, METH_VARARGS,
     "keep_for(ms): how long engines and threads are kept; release_kept() before it"},
    {NULL, NULL, 0, NULL},
};
