/* dcpring._C.Merge: the coordinator's plan (core/plan/merge.h). */
#include "tables.h"

#include <stdlib.h>

struct merge {
    PyObject_HEAD
    struct dr_merge core;
    struct turn turn;
};

static struct module_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

/* Whether a call may begin: `ready` is whether the merge is far enough, `what` what is amiss where it is not. */
static bool may_begin(const struct merge *self, bool ready, const char *what) {
    bool is_free = turn_is_free(&self->turn, "the merge");
    if (is_free && !ready)
        PyErr_SetString(PyExc_ValueError, what);
    return is_free && ready;
}

static PyObject *none_or(PyObject *object, int rc, const struct dr_error *error) {
    return rc < 0 ? fail(state_of(object), error) : Py_NewRef(Py_None);
}

/* Around a call of the core on so many bytes, or rows of them. */
static void begin(struct merge *self, struct gil *gil, size_t bytes) {
    self->turn.taken = true;
    gil_release_for(gil, bytes);
}

static void end(struct merge *self, struct gil *gil) {
    gil_take(gil);
    turn_give(&self->turn);
}

static size_t bytes_of_rows(const struct merge *self) { return self->core.row_count * sizeof(struct dr_row); }

static size_t bytes_of_rank(const struct dr_merge *merge, uint32_t rank) {
    return (merge->rank_rows[rank + 1] - merge->rank_rows[rank]) * sizeof(struct dr_row);
}

static PyObject *merge_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned world;
    if (refuse_keywords(type, kwargs) || !PyArg_ParseTuple(args, "I", &world))
        return NULL;
    struct merge *self = (struct merge *)PyType_GenericAlloc(type, 0);
    DR_NEW_ERROR(error);
    if (self && dr_merge_init(&self->core, world, &error) < 0) {
        fail(state_of((PyObject *)self), &error);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void merge_dealloc(PyObject *object) {
    dr_merge_destroy(&((struct merge *)object)->core);
    free_instance(object);
}

static int add_plan(struct merge *self, const Py_buffer *plan, const Py_buffer *fingerprints, struct dr_error *error) {
    uint32_t *aligned = PyMem_Malloc((size_t)fingerprints->len + 4);
    if (!aligned)
        return dr_error_memory(error);
    memcpy(aligned, fingerprints->buf, (size_t)fingerprints->len);
    struct gil gil;
    begin(self, &gil, (size_t)plan->len);
    int rc = dr_merge_add(&self->core, plan->buf, (size_t)plan->len, aligned, (size_t)fingerprints->len / 4,
                          &gil.control, error);
    end(self, &gil);
    PyMem_Free(aligned);
    return rc;
}

static PyObject *add(PyObject *object, PyObject *args) {
    struct merge *self = (struct merge *)object;
    Py_buffer plan, fingerprints;
    if (!PyArg_ParseTuple(args, "y*y*", &plan, &fingerprints))
        return NULL;
    DR_NEW_ERROR(error);
    PyObject *result = NULL;
    if (may_begin(self, self->core.phase <= DR_MERGE_BROKEN && self->core.added < self->core.world,
                  "more plans than ranks"))
        result = none_or(object, add_plan(self, &plan, &fingerprints, &error), &error);
    PyBuffer_Release(&plan);
    PyBuffer_Release(&fingerprints);
    return result;
}

static bool all_added(const struct merge *self) {
    return may_begin(self, self->core.phase == DR_MERGE_ADDING && self->core.added == self->core.world,
                     "not all plans were added, or the merge was checked already");
}

static PyObject *check(PyObject *object, PyObject *complete) {
    struct merge *self = (struct merge *)object;
    int whole = PyObject_IsTrue(complete);
    if (whole < 0 || !all_added(self))
        return NULL;
    DR_NEW_ERROR(error);
    struct gil gil;
    begin(self, &gil, bytes_of_rows(self));
    int rc = dr_merge_check(&self->core, whole, &gil.control, &error);
    end(self, &gil);
    return none_or(object, rc, &error);
}

static PyObject *tie(PyObject *object, PyObject *args) {
    struct merge *self = (struct merge *)object;
    unsigned rank;
    Py_ssize_t row, first;
    if (!PyArg_ParseTuple(args, "Inn", &rank, &row, &first) || !all_added(self))
        return NULL;
    DR_NEW_ERROR(error);
    int rc = dr_merge_tie(&self->core, rank, (size_t)row, (size_t)first, &error);
    return none_or(object, rc, &error);
}

static bool is_checked(const struct merge *self) {
    return may_begin(self, self->core.phase == DR_MERGE_CHECKED || self->core.phase == DR_MERGE_ASSIGNED,
                     "the merge is not checked yet");
}

static PyObject *fingerprints_of(const struct dr_merge *merge, uint32_t group) {
    const struct dr_row *row = &merge->groups.rows[group];
    PyObject *list = PyList_New(0);
    for (uint64_t h = merge->holder_start[group]; list && h < merge->holder_start[group + 1]; h++) {
        uint32_t rank = merge->holders[h];
        PyObject *pair = Py_BuildValue("(Ik)", rank, (unsigned long)dr_merge_fingerprint(merge, group, rank));
        if (!pair || PyList_Append(list, pair) < 0)
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    PyObject *name = list ? table_name(&merge->groups, row->name) : NULL;
    if (name)
        return Py_BuildValue("(NN)", name, list);
    Py_XDECREF(list);
    return NULL;
}

static PyObject *differing(PyObject *object, PyObject *most_object) {
    const struct dr_merge *merge = &((struct merge *)object)->core;
    DR_NEW_ERROR(error);
    uint8_t *different = NULL;
    Py_ssize_t most = PyLong_AsSsize_t(most_object), count = 0;
    if (PyErr_Occurred() || !is_checked((struct merge *)object))
        return NULL;
    struct gil gil;
    begin((struct merge *)object, &gil, bytes_of_rows((struct merge *)object));
    int rc = dr_merge_differing(merge, &different, &error);
    end((struct merge *)object, &gil);
    if (rc < 0)
        return fail(state_of(object), &error);
    PyObject *list = PyList_New(0);
    for (uint32_t g = 0; list && g < merge->groups.count; g++) {
        if (!different[g] || count++ >= most)
            continue;
        PyObject *entry = fingerprints_of(merge, g);
        if (!entry || PyList_Append(list, entry) < 0)
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    free(different);
    return list ? Py_BuildValue("(nN)", count, list) : NULL;
}

static int run_assign(struct merge *self, const struct dr_assignment *assignment, const Py_buffer *hosts,
                      struct dr_error *error) {
    uint32_t *aligned = PyMem_Malloc((size_t)hosts->len + 4);
    if (!aligned)
        return dr_error_memory(error);
    memcpy(aligned, hosts->buf, (size_t)hosts->len);
    struct dr_assignment with_hosts = *assignment;
    with_hosts.hosts = aligned;
    struct gil gil;
    begin(self, &gil, bytes_of_rows(self));
    int rc = dr_merge_assign(&self->core, &with_hosts, &gil.control, error);
    end(self, &gil);
    PyMem_Free(aligned);
    return rc;
}

static PyObject *assign(PyObject *object, PyObject *args) {
    struct merge *self = (struct merge *)object;
    int strategy;
    unsigned limit;
    Py_buffer hosts;
    unsigned long long piece_bytes;
    if (!PyArg_ParseTuple(args, "iIy*K", &strategy, &limit, &hosts, &piece_bytes))
        return NULL;
    DR_NEW_ERROR(error);
    PyObject *result = NULL;
    struct dr_assignment assignment = {(enum dr_strategy)strategy, limit, NULL, piece_bytes ? piece_bytes : 1};
    if ((size_t)hosts.len != 4 * (size_t)self->core.world || strategy < DR_BALANCED || strategy > DR_PER_HOST)
        PyErr_SetString(PyExc_ValueError, "assign with bad arguments");
    else if (is_checked(self))
        result = none_or(object, run_assign(self, &assignment, &hosts, &error), &error);
    PyBuffer_Release(&hosts);
    return result;
}

static const struct dr_merge *assigned(PyObject *object, PyObject *rank_object, uint32_t *rank) {
    const struct merge *self = (struct merge *)object;
    unsigned long number = rank_object ? PyLong_AsUnsignedLong(rank_object) : 0;
    bool ready = self->core.phase == DR_MERGE_ASSIGNED && (!rank_object || number < self->core.world);
    if (PyErr_Occurred() || !may_begin(self, ready, "not assigned yet, or no such rank"))
        return NULL;
    *rank = (uint32_t)number;
    return &self->core;
}

static PyObject *reply(PyObject *object, PyObject *rank_object) {
    struct merge *self = (struct merge *)object;
    uint32_t rank;
    const struct dr_merge *merge = assigned(object, rank_object, &rank);
    if (!merge)
        return NULL;
    struct dr_buffer out;
    DR_NEW_ERROR(error);
    struct gil gil;
    begin(self, &gil, bytes_of_rank(merge, rank));
    int rc = dr_merge_reply(merge, rank, &out, &error);
    end(self, &gil);
    return bytes_of(state_of(object), rc, &out, &error);
}

static PyObject *items(PyObject *object, PyObject *rank_object) {
    uint32_t rank, *pieces = NULL;
    size_t count = 0;
    const struct dr_merge *merge = assigned(object, rank_object, &rank);
    if (!merge)
        return NULL;
    DR_NEW_ERROR(error);
    PyObject *bytes = NULL;
    struct gil gil;
    begin((struct merge *)object, &gil, bytes_of_rank(merge, rank));
    int rc = dr_merge_items(merge, rank, &pieces, &count, &error);
    end((struct merge *)object, &gil);
    if (rc < 0)
        fail(state_of(object), &error);
    else
        bytes = PyBytes_FromStringAndSize((const char *)pieces, (Py_ssize_t)(count * sizeof *pieces));
    free(pieces);
    return bytes;
}

/* What several ranks hold, as it is found out. Sets of holders are kept once, and units refer to them. */
struct shared {
    PyObject *sets;    /* bytes of holders -> number */
    uint32_t *unit_of; /* group -> its unit, plus 1 */
    uint32_t unit_count;
    struct dr_buffer units, rows; /* of all; of one rank */
};

/* The number of a set of holders; negative on error. */
static long set_of(struct shared *s, const struct dr_shared_row *row) {
    PyObject *holders =
        PyBytes_FromStringAndSize((const char *)row->holders, (Py_ssize_t)(row->holder_count * sizeof *row->holders));
    PyObject *known = holders ? PyDict_GetItemWithError(s->sets, holders) : NULL; /* borrowed */
    PyObject *number = known ? Py_NewRef(known) : NULL;
    if (holders && !known && !PyErr_Occurred()) {
        number = PyLong_FromSsize_t(PyDict_Size(s->sets));
        if (number && PyDict_SetItem(s->sets, holders, number) < 0)
            Py_CLEAR(number);
    }
    long set = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    Py_XDECREF(holders);
    return set;
}

static int add_shared(void *context, const struct dr_shared_row *row) {
    struct shared *s = context;
    if (!s->unit_of[row->group]) {
        long set = set_of(s, row);
        if (set < 0)
            return -1;
        const uint64_t unit[3] = {row->before, row->bytes, (uint64_t)set};
        dr_buffer_put(&s->units, unit, sizeof unit);
        s->unit_of[row->group] = ++s->unit_count;
    }
    const uint32_t pair[2] = {(uint32_t)row->row, s->unit_of[row->group] - 1};
    dr_buffer_put(&s->rows, pair, sizeof pair);
    return gil_turn(row->row);
}

static PyObject *shared_of_ranks(const struct dr_merge *merge, struct shared *s, const uint64_t *before) {
    PyObject *ranks = PyList_New(merge->world);
    for (uint32_t rank = 0; ranks && rank < merge->world; rank++) {
        s->rows = (struct dr_buffer){0};
        int rc = dr_merge_shared(merge, rank, before, add_shared, s);
        PyObject *rows =
            rc < 0 ? NULL : PyBytes_FromStringAndSize((const char *)s->rows.data, (Py_ssize_t)s->rows.size);
        if (rows && s->rows.failed)
            PyErr_NoMemory();
        if (!rows || s->rows.failed || PyList_SetItem(ranks, rank, Py_NewRef(rows)) < 0)
            Py_CLEAR(ranks);
        Py_XDECREF(rows);
        dr_buffer_destroy(&s->rows);
    }
    return ranks;
}

static PyObject *shared(PyObject *object, PyObject *unused) {
    (void)unused;
    struct merge *self = (struct merge *)object;
    uint32_t rank;
    const struct dr_merge *merge = assigned(object, NULL, &rank);
    uint64_t *before = merge ? dr_merge_shared_bytes(merge) : NULL;
    struct shared s = {.unit_of = before ? calloc(merge->groups.count + 1, sizeof *s.unit_of) : NULL};
    PyObject *result = NULL, *ranks = NULL;
    if (merge && !s.unit_of)
        PyErr_NoMemory();
    else if (merge && (s.sets = PyDict_New())) {
        self->turn.taken = true;
        ranks = shared_of_ranks(merge, &s, before);
        turn_give(&self->turn);
    }
    if (ranks && s.units.failed)
        PyErr_NoMemory();
    else if (ranks)
        result = Py_BuildValue("(NNO)", PyDict_Keys(s.sets),
                               PyBytes_FromStringAndSize((const char *)s.units.data, (Py_ssize_t)s.units.size), ranks);
    Py_XDECREF(ranks);
    Py_XDECREF(s.sets);
    dr_buffer_destroy(&s.units);
    free(s.unit_of);
    free(before);
    return result;
}

static PyObject *table(PyObject *object, PyObject *unused) {
    (void)unused;
    uint32_t rank;
    const struct dr_merge *merge = assigned(object, NULL, &rank);
    struct module_state *state = state_of(object);
    PyObject *result = merge ? table_new(state) : NULL;
    if (!result)
        return NULL;
    DR_NEW_ERROR(error);
    struct gil gil;
    begin((struct merge *)object, &gil, merge->piece_count * sizeof(struct dr_row));
    int rc = dr_merge_table(merge, &((struct table *)result)->core, &error);
    end((struct merge *)object, &gil);
    if (rc < 0) {
        Py_CLEAR(result);
        fail(state, &error);
    }
    return result;
}

static PyObject *sums(PyObject *object, PyObject *unused) {
    (void)unused;
    uint32_t rank;
    const struct dr_merge *merge = assigned(object, NULL, &rank);
    PyObject *list = merge ? PyList_New(merge->world) : NULL;
    for (uint32_t r = 0; list && r < merge->world; r++) {
        const struct dr_rank_sum *s = &merge->sums[r];
        PyObject *sum = Py_BuildValue("(KKKK)", (unsigned long long)s->items, (unsigned long long)s->bytes,
                                      (unsigned long long)s->removed, (unsigned long long)s->removed_bytes);
        if (!sum || PyList_SetItem(list, r, sum) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(encoded table, fingerprints): the next rank's plan"},
    {"check", check, METH_O, "check(complete): ValueError where chunks overlap, are missing or disagree"},
    {"tie", tie, METH_VARARGS, "tie(rank, row, earlier row): two rows of the rank are the same memory"},
    {"differing", differing, METH_O,
     "differing(most) -> (count, [(name, [(rank, fingerprint)])]): replicas whose bytes differ"},
    {"assign", assign, METH_VARARGS,
     "assign(strategy, limit, hosts, piece_bytes); strategies: 0 balanced, 1 split, 2 first replica, 3 at most `limit` "
     "writers, 4 one a host; hosts: a uint32 for each rank"},
    {"reply", reply, METH_O, "reply(rank) -> bytes for read_reply"},
    {"items", items, METH_O, "items(rank) -> for each item it writes the row of table(), as uint32"},
    {"shared", shared, METH_NOARGS,
     "shared() -> (sets, units, rows): of what several ranks hold the sets of holders, each as uint32; for each unit "
     "the bytes shared before it, its bytes and its set, as uint64; by rank its rows and their units, as uint32"},
    {"table", table, METH_NOARGS, "table() -> Table: the checkpoint's chunks"},
    {"sums", sums, METH_NOARGS, "sums() -> [(items, bytes, replicas removed, their bytes)] by rank"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Merge(world): the plans of all ranks, made one"},
    {Py_tp_new, merge_new},
    {Py_tp_dealloc, merge_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec merge_spec = TYPE_SPEC("Merge", struct merge, slots, 0);

/* ---- on every rank ---- */

static int keep(void *list, size_t row, int64_t start, int64_t rows) {
    PyObject *item =
        rows < 0 ? PyLong_FromSize_t(row) : Py_BuildValue("(nLL)", (Py_ssize_t)row, (long long)start, (long long)rows);
    int rc = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return rc;
}

static PyObject *read_reply(PyObject *module, PyObject *args) {
    Py_buffer data;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*n", &data, &count))
        return NULL;
    DR_NEW_ERROR(error);
    PyObject *list = count < 0 ? PyErr_Format(PyExc_ValueError, "%zd rows", count) : PyList_New(0);
    if (list && dr_reply_read(data.buf, (size_t)data.len, (size_t)count, keep, list, &error) < 0) {
        Py_CLEAR(list);
        if (!PyErr_Occurred())
            fail(module_state(module), &error);
    }
    PyBuffer_Release(&data);
    return list;
}

PyMethodDef merge_methods[] = {
    {"read_reply", read_reply, METH_VARARGS,
     "read_reply(reply, rows of the plan) -> what this rank writes: a row, or (row, first row of the chunk, rows)"},
    {NULL, NULL, 0, NULL},
};
