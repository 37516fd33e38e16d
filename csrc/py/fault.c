/* dcpring._C.arm_fault, disarm_fault and watch_gil (core/io/sys_fault.h): for tests. */
#include "module.h"

#include "io/sys.h"
#include "io/sys_fault.h"

#include <dlfcn.h>

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

PyMethodDef fault_methods[] = {
    {"arm_fault", arm_fault, METH_VARARGS,
     "arm_fault(call or None, nth, errno or 0 to shorten transfers, sticky, delay_ms=0, warm=False): for tests; lets "
     "go "
     "of what is kept, unless it is to begin warm"},
    {"watch_gil", watch_gil, METH_O,
     "watch_gil(list): from now on notes in it each system call of the core that is made with the GIL held, as the one "
     "that this makes is: close; for tests"},
    {"disarm_fault", disarm_fault, METH_NOARGS, "disarm_fault() -> calls counted since arm_fault"},
    {NULL, NULL, 0, NULL},
};
