/* dcpring._C.barrier_wait and barrier_end: a barrier of processes in shared memory (core/ipc/barrier.h). */
#include "module.h"

#include "ipc/barrier.h"

/* The word at the beginning of some memory; NULL, and an error, where there is none. */
static atomic_uint *word_of(const Py_buffer *memory, unsigned target) {
    if (memory->len < (Py_ssize_t)sizeof(atomic_uint) || (uintptr_t)memory->buf % _Alignof(atomic_uint) || target < 1 ||
        target > DR_BARRIER_MOST) {
        PyErr_SetString(PyExc_ValueError, "a barrier needs an aligned word, and a number to wait for");
        return NULL;
    }
    return memory->buf;
}

static PyObject *barrier_wait(PyObject *module, PyObject *args) {
    Py_buffer memory;
    unsigned target, timeout_ms;
    if (!PyArg_ParseTuple(args, "w*II", &memory, &target, &timeout_ms))
        return NULL;
    atomic_uint *word = word_of(&memory, target);
    PyObject *result = NULL;
    if (word) {
        DR_NEW_ERROR(error);
        struct gil gil;
        gil_release(&gil);
        int rc = dr_barrier_wait(word, target, timeout_ms, &gil.control, &error);
        gil_take(&gil);
        result = rc < 0 ? raise_error(module_state(module), &error) : PyBool_FromLong(rc);
    }
    PyBuffer_Release(&memory);
    return result;
}

static PyObject *barrier_end(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer memory;
    if (!PyArg_ParseTuple(args, "w*", &memory))
        return NULL;
    atomic_uint *word = word_of(&memory, 1);
    if (word) {
        Py_BEGIN_ALLOW_THREADS
        dr_barrier_end(word, 1);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&memory);
    return word ? Py_NewRef(Py_None) : NULL;
}

PyMethodDef barrier_methods[] = {
    {"barrier_wait", barrier_wait, METH_VARARGS,
     "barrier_wait(memory, how many are to have come since the beginning, timeout_ms) -> whether they have; False for "
     "all from when one has waited for too long, or called barrier_end"},
    {"barrier_end", barrier_end, METH_VARARGS, "barrier_end(memory): nobody waits in it any longer"},
    {NULL, NULL, 0, NULL},
};
