/* dcpring._C.arm_fault and disarm_fault (core/io/sys_fault.h): for tests. */
#include "module.h"

#include "io/sys_fault.h"

static PyObject *arm_fault(PyObject *module, PyObject *args) {
    (void)module;
    struct dr_fault fault = {0};
    unsigned long long nth;
    int sticky;
    if (!PyArg_ParseTuple(args, "zKip|I", &fault.call, &nth, &fault.err, &sticky, &fault.delay_ms))
        return NULL;
    fault.nth = nth;
    fault.sticky = sticky;
    dr_fault_arm(&fault);
    Py_RETURN_NONE;
}

static PyObject *disarm_fault(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyLong_FromUnsignedLongLong(dr_fault_disarm());
}

PyMethodDef fault_methods[] = {
    {"arm_fault", arm_fault, METH_VARARGS,
     "arm_fault(call or None, nth, errno or 0 to shorten transfers, sticky, delay_ms=0): for tests"},
    {"disarm_fault", disarm_fault, METH_NOARGS, "disarm_fault() -> calls counted since arm_fault"},
    {NULL, NULL, 0, NULL},
};
