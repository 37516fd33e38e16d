/* dcpring._C.Holdings: who writes which bytes of files that all ranks write together (core/plan/holdings.h). */
#include "tables.h"

#include "plan/holdings.h"

struct holdings {
    PyObject_HEAD
    struct dr_holdings core;
    PyObject *sets; /* the sets of holders that were given out, as tuples */
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

static PyObject *holdings_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t world;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "n", &world))
        return NULL;
    if (world <= 0 || world > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "a world of %zd ranks", world);
    struct holdings *self = (struct holdings *)PyType_GenericAlloc(type, 0);
    DR_NEW_ERROR(error);
    if (!self || !(self->sets = PyList_New(0))) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    if (dr_holdings_init(&self->core, (uint32_t)world, &error) < 0) {
        fail(state_of((PyObject *)self), &error);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void holdings_dealloc(PyObject *object) {
    struct holdings *self = (struct holdings *)object;
    dr_holdings_destroy(&self->core);
    Py_XDECREF(self->sets);
    free_instance(object);
}

/* A row's number, or (row, first row of elements, how many). */
static int add_kept(struct holdings *self, uint32_t rank, const struct dr_table *table, PyObject *kept) {
    long long start = 0, count = -1;
    Py_ssize_t row;
    if (!PyTuple_Check(kept))
        row = PyLong_AsSsize_t(kept);
    else if (!PyArg_ParseTuple(kept, "nLL", &row, &start, &count))
        return -1;
    if (PyErr_Occurred())
        return -1;
    if (row < 0 || (size_t)row >= table->count || (PyTuple_Check(kept) && count < 0)) {
        PyErr_Format(PyExc_IndexError, "row %zd", row);
        return -1;
    }
    DR_NEW_ERROR(error);
    int rc = dr_holdings_add(&self->core, rank, table, (size_t)row, start, count, &error);
    if (rc < 0)
        fail(state_of((PyObject *)self), &error);
    return rc;
}

static PyObject *add(PyObject *object, PyObject *args) {
    struct holdings *self = (struct holdings *)object;
    unsigned rank;
    PyObject *of, *kept;
    if (!PyArg_ParseTuple(args, "IOO!", &rank, &of, &PyList_Type, &kept))
        return NULL;
    const struct dr_table *table = table_of(state_of(object), of);
    if (!table)
        return NULL;
    if (rank >= self->core.world || self->core.by.start)
        return PyErr_Format(PyExc_ValueError, "rank %u cannot be added", rank);
    for (Py_ssize_t i = 0; i < PyList_Size(kept); i++)
        if (add_kept(self, rank, table, PyList_GetItem(kept, i)) < 0)
            return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *described(const struct dr_table *table, const struct dr_row *row) {
    if (!dr_row_is_tensor(row))
        return Py_NewRef(Py_None);
    const struct dr_properties *p = &table->properties[row->properties];
    return Py_BuildValue("(Ny#)", ints_tuple(dr_row_size(table, row), row->ndim), p->encoding, (Py_ssize_t)p->size);
}

static PyObject *tensors(PyObject *object, PyObject *unused) {
    (void)unused;
    const struct dr_table *table = &((struct holdings *)object)->core.table;
    PyObject *found = PyDict_New();
    for (size_t i = 0, known = 0; found && i < table->count && known < table->name_count; i++) {
        if (table->rows[i].name < known)
            continue;
        known++;
        PyObject *name = table_name(table, table->rows[i].name), *value = described(table, &table->rows[i]);
        if (!name || !value || PyDict_SetItem(found, name, value) < 0)
            Py_CLEAR(found);
        Py_XDECREF(name);
        Py_XDECREF(value);
    }
    return found;
}

static uint32_t find(const struct holdings *self, PyObject *name) {
    Py_ssize_t size;
    PyObject *held = NULL;
    const char *text = utf8_of(name, &size, &held);
    uint32_t found = text ? dr_table_find(&self->core.table, text, (uint32_t)size, DR_NO_NAME) : DR_NO_NAME;
    if (text && found == DR_NO_NAME)
        PyErr_SetObject(PyExc_KeyError, name);
    Py_XDECREF(held);
    return found;
}

static PyObject *holders(PyObject *object, PyObject *name) {
    const struct holdings *self = (struct holdings *)object;
    const struct dr_table *table = &self->core.table;
    const uint32_t wanted = find(self, name);
    PyObject *list = wanted == DR_NO_NAME ? NULL : PyList_New(0);
    for (size_t i = 0; list && i < table->count; i++) {
        const struct dr_row *row = &table->rows[i];
        if (row->name != wanted || !dr_row_is_tensor(row) || dr_row_bytes(table, row) == 0)
            continue;
        PyObject *rank = PyLong_FromUnsignedLong(self->core.ranks[i]);
        if (!rank || PyList_Append(list, rank) < 0)
            Py_CLEAR(list);
        Py_XDECREF(rank);
    }
    return list;
}

/* ---- a file ---- */

static int parse_laid(const struct holdings *self, PyObject *list, struct dr_laid *out) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++, out++) {
        PyObject *name;
        unsigned long long begin, size;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "UIKK", &name, &out->item_bytes, &begin, &size) ||
            (out->name = find(self, name)) == DR_NO_NAME)
            return -1;
        out->begin = begin, out->size = size;
    }
    return 0;
}

static PyObject *set_tuple(struct holdings *self, uint32_t set) {
    const struct dr_holdings *h = &self->core;
    for (Py_ssize_t known = PyList_Size(self->sets); (size_t)known <= set; known++) {
        const uint64_t begin = h->set_start[known], end = h->set_start[known + 1];
        PyObject *tuple = PyTuple_New((Py_ssize_t)(end - begin));
        for (uint64_t i = begin; tuple && i < end; i++) {
            PyObject *rank = PyLong_FromUnsignedLong(h->holders[i]);
            if (!rank || PyTuple_SetItem(tuple, (Py_ssize_t)(i - begin), rank) < 0)
                Py_CLEAR(tuple);
        }
        int rc = tuple ? PyList_Append(self->sets, tuple) : -1;
        Py_XDECREF(tuple);
        if (rc < 0)
            return NULL;
    }
    return Py_NewRef(PyList_GetItem(self->sets, (Py_ssize_t)set));
}

static int append(PyObject *list, PyObject *item) {
    int rc = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return rc;
}

/* By rank: (its ranges, the bytes that it writes). */
static PyObject *parts_of(const struct holdings *self, const struct dr_shares *shares) {
    PyObject *parts = PyList_New(0);
    for (uint32_t rank = 0; parts && rank < self->core.world; rank++)
        if (append(parts, Py_BuildValue("([]K)", (unsigned long long)shares->writes[rank])) < 0)
            Py_CLEAR(parts);
    for (size_t i = 0; parts && i < shares->own_count; i++) {
        const struct dr_own_range *own = &shares->own[i];
        PyObject *ranges = PyTuple_GetItem(PyList_GetItem(parts, (Py_ssize_t)own->rank), 0);
        if (append(ranges, Py_BuildValue("(KK)", (unsigned long long)own->lo, (unsigned long long)own->hi)) < 0)
            Py_CLEAR(parts);
    }
    return parts;
}

static PyObject *rounds_of(struct holdings *self, const struct dr_shares *shares) {
    PyObject *rounds = PyList_New(0);
    for (size_t i = 0; rounds && i < shares->shared_count; i++) {
        const struct dr_shared_stripe *s = &shares->shared[i];
        PyObject *set = set_tuple(self, s->holders);
        if (!set || ((size_t)PyList_Size(rounds) <= s->round && append(rounds, PyList_New(0)) < 0) ||
            append(PyList_GetItem(rounds, (Py_ssize_t)s->round),
                   Py_BuildValue("(KKKIO)", (unsigned long long)s->lo, (unsigned long long)s->hi,
                                 (unsigned long long)s->at, s->writer, set)) < 0)
            Py_CLEAR(rounds);
        Py_XDECREF(set);
    }
    return rounds;
}

static PyObject *share(PyObject *object, PyObject *args) {
    struct holdings *self = (struct holdings *)object;
    unsigned long long head, block, round;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "O!KKK", &PyList_Type, &list, &head, &block, &round))
        return NULL;
    const Py_ssize_t count = PyList_Size(list);
    struct dr_laid *laid = PyMem_Calloc((size_t)count + 1, sizeof *laid);
    if (!laid)
        return PyErr_NoMemory();
    struct dr_striped_file file = {laid, (size_t)count, head, block, round};
    struct dr_shares shares = {0};
    DR_NEW_ERROR(error);
    PyObject *result = NULL;
    if (parse_laid(self, list, laid) == 0) {
        if (dr_holdings_share(&self->core, &file, &shares, &error) < 0) {
            fail(state_of(object), &error);
        } else {
            PyObject *parts = parts_of(self, &shares), *rounds = parts ? rounds_of(self, &shares) : NULL;
            result = rounds ? PyTuple_Pack(2, parts, rounds) : NULL;
            Py_XDECREF(parts);
            Py_XDECREF(rounds);
        }
    }
    dr_shares_destroy(&shares);
    PyMem_Free(laid);
    return result;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(rank, table, kept): what a rank writes of its table, as read_reply gives it"},
    {"tensors", tensors, METH_NOARGS, "tensors() -> {name: (size, properties)}, None for an object"},
    {"holders", holders, METH_O, "holders(name) -> the ranks that have some of it"},
    {"share", share, METH_VARARGS,
     "share([(name, item_bytes, begin, size)], head_bytes, block_bytes, round_bytes) -> by rank ([(lo, hi)], bytes it "
     "writes), and of each round [(lo, hi, place in memory, writer, holders)]"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Holdings(world): what all ranks hold of files that they write together"},
    {Py_tp_new, holdings_new},
    {Py_tp_dealloc, holdings_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec holdings_spec = TYPE_SPEC("Holdings", struct holdings, slots, 0);
