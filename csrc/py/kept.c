/* dcpring._C.release_kept and its like: what is kept between saves and loads (core/io/thread_pool.h). */
#include "module.h"

#include "io/engine_cache.h"
#include "io/thread_pool.h"

static PyObject *release_kept(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    dr_thread_pool_release();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *kept(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    unsigned threads;
    struct dr_engine_cache_amount amount;
    Py_BEGIN_ALLOW_THREADS
    threads = dr_thread_pool_idle();
    amount = dr_engine_cache_amount();
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(IIn)", amount.engines, threads, (Py_ssize_t)amount.bytes);
}

PyMethodDef kept_methods[] = {
    {"release_kept", release_kept, METH_NOARGS, "release_kept(): closes engines and ends threads that nobody uses"},
    {"kept", kept, METH_NOARGS, "kept() -> (engines, threads that wait, bytes of the engines' buffers)"},
    {NULL, NULL, 0, NULL},
};
