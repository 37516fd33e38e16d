/* The Python objects of planning, as the bindings share them: each wraps one of the core's structs. */
#ifndef DCPRING_TABLES_H
#define DCPRING_TABLES_H

#include "module.h"

#include "data/save.h"
#include "plan/match.h"
#include "plan/merge.h"
#include "plan/storage_index.h"

struct table {
    PyObject_HEAD
    struct dr_table core;
};

struct storage_index {
    PyObject_HEAD
    struct dr_storage_index core;
    struct turn turn;
};

PyObject *table_new(struct module_state *state);

/* What an object wraps; NULL with an exception where it is another kind of object, or in use by another thread. */
const struct dr_table *table_of(struct module_state *state, PyObject *object);

/* A name as a str, and a str in UTF-8, with surrogates that stand alone as pickles have them: then the bytes are
 * `held`'s, which is the caller's to release. */
PyObject *table_name(const struct dr_table *table, uint32_t name);
const char *utf8_of(PyObject *name, Py_ssize_t *size, PyObject **held);
const struct dr_storage_index *storage_index_of(struct module_state *state, PyObject *object);

/* A file that places are noted in; its name is UTF-8. */
struct storage_file {
    const char *name;
    Py_ssize_t name_size;
    bool has_crcs;
};

/* Notes what was written at these positions (a list; NULL: all, in order) as of these kinds, or all of one. */
int storage_index_note(struct module_state *state, PyObject *storage, const struct storage_file *file,
                       PyObject *positions, const unsigned char *kinds, unsigned char kind,
                       const struct dr_placed *placed, Py_ssize_t count);

PyObject *ints_tuple(const int64_t *ints, int count);

#endif
