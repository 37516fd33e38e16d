/*
 * What the bindings share: module state, errors, options and the GIL.
 *
 * The bindings turn Python's arguments into the core's arrays, let go of the
 * GIL, call the core once, and turn the result back. They make no system call,
 * let the core make none while they hold the GIL (tests/test_gil.py), and hold
 * no state outside of the module.
 */
#ifndef DCPRING_MODULE_H
#define DCPRING_MODULE_H

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "io/options.h"
#include "io/sync.h"
#include "io/workers.h"
#include "torch_shim.h"

/* TYPE(name, part): the types of the module. Each has a `part_spec`, and the state a `part_type`. */
#define TYPES(TYPE) \
    TYPE(FileWriter, writer) \
    TYPE(Table, table) \
    TYPE(Merge, merge) \
    TYPE(StorageIndex, storage_index) \
    TYPE(Match, match) \
    TYPE(Tensors, tensors) \
    TYPE(Watch, watch) \
    TYPE(Input, input) \
    TYPE(StripeFile, stripe_file) \
    TYPE(Syncs, syncs) \
    TYPE(Holdings, holdings)

struct module_state {
    PyObject *corrupt_error; /* dcpring.CorruptCheckpointError */
    PyObject *alloc_handles; /* torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors */
#define TYPE_SLOT(name, part) PyObject *part##_type;
    TYPES(TYPE_SLOT)
    struct torch_shim torch;
};

struct module_state *module_state(PyObject *module);

/* ---- errors.c ---- */

/* Sets the Python exception for a core failure, with `item` (an index or None) on it; returns NULL. */
PyObject *raise_error(struct module_state *state, const struct dr_error *error);
/* The same, with `changed` on it, too, which is borrowed. */
PyObject *raise_with(struct module_state *state, const struct dr_error *error, PyObject *changed);
/* The same for what has no file, where no memory is MemoryError. */
PyObject *fail(struct module_state *state, const struct dr_error *error);
/* The buffer as bytes, freed; fail() where rc is negative. */
PyObject *bytes_of(struct module_state *state, int rc, struct dr_buffer *buffer, const struct dr_error *error);

/* ---- types ---- */

#define TYPE_SPEC(type_name, type, type_slots, more_flags) \
    {.name = "dcpring._C." type_name, \
     .basicsize = sizeof(type), \
     .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more_flags), \
     .slots = type_slots}
/* The end of what deallocates an instance: gives its memory back, and its type. */
void free_instance(PyObject *object);
/* Raises TypeError where a type that knows no keywords is given some. */
bool refuse_keywords(PyTypeObject *type, PyObject *kwargs);

/* ---- args.c ---- */

/* (engine, direct, queue_depth, block_size, workers, checksum, sync, watch); borrows the watch from it. */
int parse_options(struct module_state *state, PyObject *tuple, struct dr_options *options);

/* Reads a tuple of `count` ints (a torch.Size, say). */
int parse_ints(PyObject *tuple, int64_t *out, Py_ssize_t count);

/* Paths as the file system has them, of a list of str (or of what else os.fsencode takes); free with paths_free. */
struct paths {
    const char **names;
    Py_ssize_t count;
    PyObject *objects; /* a tuple of bytes, which the names point into */
};
int paths_parse(struct paths *paths, PyObject *list);
void paths_free(struct paths *paths);

/* The GIL while the core works: released by gil_release, taken for a moment to look for signals. */
struct gil {
    PyThreadState *thread; /* NULL: it was kept */
    struct dr_control control;
};
void gil_release(struct gil *gil);
/* The same for work on so many bytes: for what takes no longer than Python itself keeps the GIL, it is kept. */
void gil_release_for(struct gil *gil, size_t bytes);
void gil_take(struct gil *gil);
/*
 * For turn `turn` of a loop over Python's objects: now and then lets other threads run, and looks for signals. -1 with
 * an exception. Whatever others can reach may have changed then, lists that were passed in as well.
 */
int gil_turn(size_t turn);

/*
 * Whose turn it is with an object of which a call lets go of the GIL: one call at a time has it. `what` is the object
 * in the words of the exception that is set where another has it, or where it is not open.
 */
struct turn {
    bool taken;
};
bool turn_is_free(const struct turn *turn, const char *what);
bool turn_take(struct turn *turn, bool is_open, const char *what);
static inline void turn_give(struct turn *turn) { turn->taken = false; }

/* ---- watch.c ---- */

/* The core's side of a Watch, borrowed; NULL for None. */
int parse_watch(struct module_state *state, PyObject *object, struct dr_watch **out);

/* ---- syncs.c ---- */

/*
 * The core's side of a Syncs, which nobody else can take until syncs_give; NULL for None, of which both take no notice.
 */
int syncs_take(struct module_state *state, PyObject *object, struct dr_syncs **out);
void syncs_give(PyObject *object);

/* ---- one per exposed part ---- */

#define EXTERN_SPEC(name, part) extern PyType_Spec part##_spec;
TYPES(EXTERN_SPEC)
/* PART(name): whose `name_methods` are functions of the module. */
#ifdef DCPRING_TEST
#define TEST_PARTS(PART) PART(test_hook)
#else
#define TEST_PARTS(PART)
#endif
#define PARTS(PART) \
    PART(reader) \
    PART(directory) \
    PART(key) \
    PART(probe) \
    PART(torch) \
    PART(archive) \
    PART(table) \
    PART(merge) \
    PART(storage_index) \
    PART(match) \
    PART(verify) \
    PART(compare) \
    PART(unpickle) \
    PART(names) \
    PART(holds_only) \
    PART(stripe) \
    PART(barrier) \
    PART(elements) \
    PART(unchanged) \
    PART(copy) \
    PART(kept) \
    TEST_PARTS(PART)
#define DECLARE_METHODS(name) extern PyMethodDef name##_methods[];
PARTS(DECLARE_METHODS)

#endif
