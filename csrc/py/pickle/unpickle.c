/*
 * dcpring._C.unpickle: the machine that a pickle is a program for.
 *
 * It makes what is only data: numbers, texts, tuples, lists, dicts, sets. For
 * all else it asks the reader, an object of Python: what a name stands for, and
 * what it means to call that, to make an instance of it, or to give one its
 * state. Nothing else is called and no attribute is looked up or set here, so
 * what a pickle can do is what the reader's methods do.
 *
 * The stack and the memo hold references. Both grow by at most one entry for
 * each opcode, an opcode makes at most one object, and a text lies in the
 * pickle. But a few bytes can name again and again what is long, to have it
 * copied by a call, set as a state, or hashed as a key. So what these are given
 * is charged for each time, by its length, and in all that may be no more than
 * a multiple of the pickle's size: nor are memory and time, then.
 */
#include "module.h"

#include "base/bytes.h"
#include "base/pickle_read.h"
#include "plan/table.h"

#include <stdlib.h>

/* Charges, and what there is of them. What lies in the pickle once, and is used once, is never charged for more. */
enum {
    CHARGE_PER_BYTE = 64, /* of the pickle */
    CHARGE_FREE = 1 << 20,
    ITEM_CHARGE = 64, /* of a container that may be copied */
    PART_CHARGE = 8,  /* of a tuple that is hashed */
    KEY_CHARGE = 256, /* whatever else is hashed and does not keep its hash */
};

enum {
    KEY_DEPTH = 100,
    LONG_KEYS = 1 << 13, /* whose hashes anybody can let be the same */
    RECORD_PARTS = 1024, /* of a record's tuple that is hashed each time that the record is; torch has no such tensor */
};

struct refs {
    PyObject **items;
    size_t count, room;
};

struct machine {
    struct dr_pickle pickle;
    struct refs stack, memo;
    PyObject *sparse; /* the memo's entries beyond the end of its array; NULL while there are none */
    PyObject *reader; /* borrowed */
    size_t *marks, mark_count, mark_room; /* heights of the stack */
    bool stopped;
    uint64_t charges; /* that are left */
    unsigned long_keys;
    /* Metadata has many of these, so they are made here: the reader's set of classes that are called with one tuple,
     * and its dict of those of nothing but attributes, with the types that some of these must have. */
    PyObject *tuples, *records, *dict_name;
    /* bound methods of the reader */
    PyObject *find_class, *call, *make, *build, *extend, *update, *persistent_load, *refuse;
};

static int damaged(const struct machine *m, const char *what) {
    PyErr_Format(PyExc_ValueError, "the pickle is damaged: %s (at byte %zu)", what, m->pickle.at);
    return -1;
}

/* ---- the stack ---- */

/* Room for one more; sizes of items are those of pointers. */
static void *grown(void *items, size_t count, size_t *room, size_t size) {
    if (count < *room)
        return items;
    size_t wanted = *room ? *room * 2 : 64;
    void *larger = PyMem_Realloc(items, wanted * size);
    if (larger)
        *room = wanted;
    else
        PyErr_NoMemory();
    return larger;
}

/* Takes over the reference, on errors too. NULL: an error has been set. */
static int append(struct refs *refs, PyObject *object) {
    PyObject **items = object ? grown(refs->items, refs->count, &refs->room, sizeof *items) : NULL;
    if (!items) {
        Py_XDECREF(object);
        return -1;
    }
    refs->items = items;
    refs->items[refs->count++] = object;
    return 0;
}

static int push(struct machine *m, PyObject *object) { return append(&m->stack, object); }

/* What is below belongs to a container that is not finished. */
static size_t fence(const struct machine *m) { return m->mark_count ? m->marks[m->mark_count - 1] : 0; }

static int require(const struct machine *m, size_t count) {
    return m->stack.count >= fence(m) + count ? 0 : damaged(m, "its stack is empty");
}

/* Both only after require(). */
static PyObject *pop(struct machine *m) { return m->stack.items[--m->stack.count]; }
static PyObject *top(const struct machine *m) { return m->stack.items[m->stack.count - 1]; }

static void cut(struct refs *refs, size_t count) {
    while (refs->count > count)
        Py_DECREF(refs->items[--refs->count]);
}

static int mark(struct machine *m) {
    size_t *marks = grown(m->marks, m->mark_count, &m->mark_room, sizeof *marks);
    if (!marks)
        return -1;
    m->marks = marks;
    m->marks[m->mark_count++] = m->stack.count;
    return 0;
}

/* Where the items above the last mark begin; with `below`, there must be something under it. */
static int unmark(struct machine *m, bool below, size_t *start) {
    if (m->mark_count == 0)
        return damaged(m, "a mark is missing");
    *start = m->marks[--m->mark_count];
    return below && *start <= fence(m) ? damaged(m, "its stack is empty") : 0;
}

static PyObject *take_tuple(struct machine *m, size_t start) {
    size_t count = m->stack.count - start;
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, (Py_ssize_t)i, Py_NewRef(m->stack.items[start + i]));
    cut(&m->stack, start);
    return tuple;
}

static PyObject *take_list(struct machine *m, size_t start) {
    size_t count = m->stack.count - start;
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++)
        PyList_SetItem(list, (Py_ssize_t)i, Py_NewRef(m->stack.items[start + i]));
    cut(&m->stack, start);
    return list;
}

/* Puts a result in the place of the topmost `count` items. */
static int replace(struct machine *m, size_t count, PyObject *result) {
    cut(&m->stack, m->stack.count - count);
    return push(m, result);
}

/* ---- what is used again and again ---- */

static bool charge(struct machine *m, uint64_t amount) {
    bool is_enough = amount <= m->charges;
    m->charges -= is_enough ? amount : m->charges;
    return is_enough;
}

/* Bytes of an int beyond the 64 bits that most have, 0 for those. */
static uint64_t long_bytes(PyObject *number) {
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow > 0 && PyLong_AsUnsignedLongLong(number) != (unsigned long long)-1)
        return 0;
    PyErr_Clear();
    PyObject *bits = overflow ? PyObject_CallMethod(number, "bit_length", NULL) : NULL;
    value = bits ? PyLong_AsLongLong(bits) : 0;
    Py_XDECREF(bits);
    return (uint64_t)value / 8;
}

static uint64_t length_charge(PyObject *object) {
    if (PyUnicode_Check(object))
        return (uint64_t)PyUnicode_GetLength(object);
    if (PyBytes_Check(object))
        return (uint64_t)PyBytes_Size(object);
    if (PyByteArray_Check(object))
        return (uint64_t)PyByteArray_Size(object);
    if (PyTuple_Check(object))
        return ITEM_CHARGE * (uint64_t)PyTuple_Size(object);
    if (PyList_Check(object))
        return ITEM_CHARGE * (uint64_t)PyList_Size(object);
    if (PyDict_Check(object))
        return ITEM_CHARGE * (uint64_t)PyDict_Size(object);
    if (PyAnySet_Check(object))
        return ITEM_CHARGE * (uint64_t)PySet_Size(object);
    return PyLong_Check(object) ? long_bytes(object) : 0;
}

/* For arguments of a call, or the state of an instance: what is in a tuple counts, too. */
static int charge_for(struct machine *m, PyObject *given) {
    bool is_enough = charge(m, length_charge(given));
    for (Py_ssize_t i = 0; is_enough && PyTuple_Check(given) && i < PyTuple_Size(given); i++)
        is_enough = charge(m, length_charge(PyTuple_GetItem(given, i)));
    return is_enough ? 0 : damaged(m, "it uses what is long too often");
}

/* ---- keys ---- */

/* Hashing a tuple hashes all in it, each time. */
static bool charge_hash(struct machine *m, PyObject *object, int depth) {
    if (PyUnicode_CheckExact(object) || PyBytes_CheckExact(object)) /* which keep their hashes */
        return true;
    if (PyLong_Check(object)) {
        uint64_t bytes = long_bytes(object);
        m->long_keys += bytes > 0;
        return charge(m, bytes) && m->long_keys <= LONG_KEYS;
    }
    if (!PyTuple_Check(object))
        return charge(m, object == Py_None || PyFloat_CheckExact(object) ? PART_CHARGE : KEY_CHARGE);
    Py_ssize_t count = PyTuple_Size(object);
    bool is_enough = depth > 0 && charge(m, PART_CHARGE * ((uint64_t)count + 1));
    for (Py_ssize_t i = 0; is_enough && i < count; i++)
        is_enough = charge_hash(m, PyTuple_GetItem(object, i), depth - 1);
    return is_enough;
}

static int check_key(struct machine *m, PyObject *object) {
    bool is_key = !PySlice_Check(object) && charge_hash(m, object, KEY_DEPTH);
    return is_key ? 0 : damaged(m, "a key has too many parts, or keys that are long come too often");
}

/* ---- numbers and texts ---- */

static int run_bool_or_none(struct machine *m, const struct dr_opcode *op) {
    return push(m, Py_NewRef(op->code == DR_NONE ? Py_None : op->code == DR_NEWTRUE ? Py_True : Py_False));
}

static int run_binint(struct machine *m, const struct dr_opcode *op) {
    return push(m, PyLong_FromLongLong((long long)op->number));
}

/* As every pickler writes an int: digits, without a zero in front. */
static bool is_decimal(const char *text) {
    text += *text == '-';
    size_t digits = strspn(text, "0123456789");
    return digits > 0 && text[digits] == '\0' && (digits == 1 || text[0] != '0');
}

static PyObject *line_of(const uint8_t *text, size_t size) {
    return PyBytes_FromStringAndSize((const char *)text, (Py_ssize_t)size);
}

static PyObject *parse_int(const struct machine *m, const char *text) {
    if (is_decimal(text))
        return PyLong_FromString(text, NULL, 10);
    damaged(m, "a number is none");
    return NULL;
}

static int run_int(struct machine *m, const struct dr_opcode *op) {
    bool is_long = op->code == DR_LONG && op->size > 0 && op->text[op->size - 1] == 'L';
    PyObject *line = line_of(op->text, op->size - is_long), *value = NULL;
    const char *text = line ? PyBytes_AsString(line) : NULL;
    if (text && strlen(text) != op->size - is_long)
        damaged(m, "a number is none");
    else if (text && op->code == DR_INT && (!strcmp(text, "00") || !strcmp(text, "01")))
        value = PyBool_FromLong(text[1] == '1');
    else if (text)
        value = parse_int(m, text);
    Py_XDECREF(line);
    return push(m, value);
}

static PyObject *large_int(const struct dr_opcode *op) {
    PyObject *make = PyObject_GetAttrString((PyObject *)&PyLong_Type, "from_bytes");
    PyObject *args = Py_BuildValue("(y#s)", (const char *)op->text, (Py_ssize_t)op->size, "little");
    PyObject *named = Py_BuildValue("{s:O}", "signed", Py_True);
    PyObject *value = make && args && named ? PyObject_Call(make, args, named) : NULL;
    Py_XDECREF(make);
    Py_XDECREF(args);
    Py_XDECREF(named);
    return value;
}

static int run_long(struct machine *m, const struct dr_opcode *op) {
    if (op->size > 8)
        return push(m, large_int(op));
    uint64_t value = dr_get_le(op->text, (unsigned)op->size);
    if (op->size > 0 && op->size < 8 && op->text[op->size - 1] & 0x80)
        value |= ~(uint64_t)0 << (8 * op->size);
    return push(m, PyLong_FromLongLong((long long)value));
}

static int run_float(struct machine *m, const struct dr_opcode *op) {
    PyObject *line = line_of(op->text, op->size);
    double value = line ? PyOS_string_to_double(PyBytes_AsString(line), NULL, NULL) : -1;
    Py_XDECREF(line);
    return PyErr_Occurred() ? -1 : push(m, PyFloat_FromDouble(value));
}

static int run_binfloat(struct machine *m, const struct dr_opcode *op) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | op->text[i];
    double value;
    memcpy(&value, &bits, sizeof value);
    return push(m, PyFloat_FromDouble(value));
}

static int run_text(struct machine *m, const struct dr_opcode *op) {
    const char *text = (const char *)op->text;
    Py_ssize_t size = (Py_ssize_t)op->size;
    if (op->code == DR_UNICODE)
        return push(m, PyUnicode_DecodeRawUnicodeEscape(text, size, NULL));
    return push(m, PyUnicode_DecodeUTF8(text, size, "surrogatepass"));
}

static int run_bytes(struct machine *m, const struct dr_opcode *op) { return push(m, line_of(op->text, op->size)); }

static int run_bytearray(struct machine *m, const struct dr_opcode *op) {
    return push(m, PyByteArray_FromStringAndSize((const char *)op->text, (Py_ssize_t)op->size));
}

/* ---- containers ---- */

static int run_mark(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    return mark(m);
}

static int run_empty(struct machine *m, const struct dr_opcode *op) {
    switch (op->code) {
    case DR_EMPTY_TUPLE:
        return push(m, PyTuple_New(0));
    case DR_EMPTY_LIST:
        return push(m, PyList_New(0));
    case DR_EMPTY_DICT:
        return push(m, PyDict_New());
    default:
        return push(m, PySet_New(NULL));
    }
}

static int run_short_tuple(struct machine *m, const struct dr_opcode *op) {
    size_t count = (size_t)(op->code - DR_TUPLE1) + 1;
    return require(m, count) < 0 ? -1 : push(m, take_tuple(m, m->stack.count - count));
}

static int run_tuple_or_list(struct machine *m, const struct dr_opcode *op) {
    size_t start;
    if (unmark(m, false, &start) < 0)
        return -1;
    return push(m, op->code == DR_TUPLE ? take_tuple(m, start) : take_list(m, start));
}

static int set_items(struct machine *m, PyObject *dict, size_t start) {
    for (size_t i = start; i + 1 < m->stack.count; i += 2)
        if (PyDict_SetItem(dict, m->stack.items[i], m->stack.items[i + 1]) < 0)
            return -1;
    return 0;
}

static int check_pairs(struct machine *m, size_t start) {
    if ((m->stack.count - start) % 2)
        return damaged(m, "a key has no value");
    for (size_t i = start; i < m->stack.count; i += 2)
        if (check_key(m, m->stack.items[i]) < 0)
            return -1;
    return 0;
}

static int run_dict(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    size_t start;
    if (unmark(m, false, &start) < 0 || check_pairs(m, start) < 0)
        return -1;
    PyObject *dict = PyDict_New();
    if (dict && set_items(m, dict, start) < 0)
        Py_CLEAR(dict);
    cut(&m->stack, start);
    return push(m, dict);
}

/* Hands items to a container that is not one of Python's plain ones; `start` is above it. */
static int hand_over(struct machine *m, PyObject *method, size_t start) {
    PyObject *items = take_list(m, start);
    PyObject *done = items ? PyObject_CallFunctionObjArgs(method, top(m), items, NULL) : NULL;
    Py_XDECREF(items);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int add_items(struct machine *m, size_t start) {
    PyObject *list = m->stack.items[start - 1];
    if (!PyList_CheckExact(list))
        return hand_over(m, m->extend, start);
    for (size_t i = start; i < m->stack.count; i++)
        if (PyList_Append(list, m->stack.items[i]) < 0)
            return -1;
    cut(&m->stack, start);
    return 0;
}

static int add_pairs(struct machine *m, size_t start) {
    PyObject *dict = m->stack.items[start - 1];
    if (check_pairs(m, start) < 0)
        return -1;
    if (!PyDict_CheckExact(dict))
        return hand_over(m, m->update, start);
    if (set_items(m, dict, start) < 0)
        return -1;
    cut(&m->stack, start);
    return 0;
}

static int run_append(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    return require(m, 2) < 0 ? -1 : add_items(m, m->stack.count - 1);
}

static int run_appends(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    size_t start;
    return unmark(m, true, &start) < 0 ? -1 : add_items(m, start);
}

static int run_setitem(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    return require(m, 3) < 0 ? -1 : add_pairs(m, m->stack.count - 2);
}

static int run_setitems(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    size_t start;
    return unmark(m, true, &start) < 0 ? -1 : add_pairs(m, start);
}

static int add_all(struct machine *m, PyObject *set, size_t start) {
    for (size_t i = start; i < m->stack.count; i++)
        if (check_key(m, m->stack.items[i]) < 0 || PySet_Add(set, m->stack.items[i]) < 0)
            return -1;
    cut(&m->stack, start);
    return 0;
}

static int run_additems(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    size_t start;
    if (unmark(m, true, &start) < 0)
        return -1;
    PyObject *set = m->stack.items[start - 1];
    return Py_IS_TYPE(set, &PySet_Type) ? add_all(m, set, start) : damaged(m, "it adds to what is no set");
}

static int run_frozenset(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    size_t start;
    if (unmark(m, false, &start) < 0)
        return -1;
    PyObject *set = PySet_New(NULL), *frozen = NULL;
    if (set && add_all(m, set, start) == 0)
        frozen = PyFrozenSet_New(set);
    Py_XDECREF(set);
    return push(m, frozen);
}

/* ---- the stack itself, and the memo ---- */

static int run_pop(struct machine *m, const struct dr_opcode *op) {
    size_t start = m->stack.count - 1;
    bool marked = op->code == DR_POP_MARK || (m->mark_count && fence(m) == m->stack.count);
    if (marked ? unmark(m, false, &start) < 0 : require(m, 1) < 0)
        return -1;
    cut(&m->stack, start);
    return 0;
}

static int run_dup(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    return require(m, 1) < 0 ? -1 : push(m, Py_NewRef(top(m)));
}

/* An index in the memo; those of GET and PUT are texts. */
static int memo_index(const struct machine *m, const struct dr_opcode *op, uint64_t *index) {
    *index = op->number;
    if (op->code != DR_GET && op->code != DR_PUT)
        return 0;
    *index = 0;
    for (size_t i = 0; i < op->size; i++) {
        if (op->text[i] < '0' || op->text[i] > '9' || i > 15)
            return damaged(m, "an index in its memo is none");
        *index = *index * 10 + (uint64_t)(op->text[i] - '0');
    }
    return op->size ? 0 : damaged(m, "an index in its memo is none");
}

/*
 * Python's picklers number what they memoize one by one; the few that leave numbers out get a dict, as an array up to
 * any number would take any amount of memory. Python's own unpickler has one: the reader is told not to rely on it.
 */
static int put_sparse(struct machine *m, uint64_t index) {
    if (!m->sparse && (!(m->sparse = PyDict_New()) || PyObject_SetAttrString(m->reader, "plain", Py_False) < 0))
        return -1;
    PyObject *key = PyLong_FromUnsignedLongLong(index);
    int rc = key ? PyDict_SetItem(m->sparse, key, top(m)) : -1;
    Py_XDECREF(key);
    return rc;
}

static int run_put(struct machine *m, const struct dr_opcode *op) {
    uint64_t index = m->memo.count;
    if (require(m, 1) < 0 || (op->code != DR_MEMOIZE && memo_index(m, op, &index) < 0))
        return -1;
    if (op->code == DR_MEMOIZE && m->sparse)
        return damaged(m, "it numbers what it memoizes in two ways");
    if (index > m->memo.count)
        return put_sparse(m, index);
    if (index == m->memo.count)
        return append(&m->memo, Py_NewRef(top(m)));
    PyObject *old = m->memo.items[index];
    m->memo.items[index] = Py_NewRef(top(m));
    Py_DECREF(old);
    return 0;
}

static PyObject *get_sparse(const struct machine *m, uint64_t index) {
    PyObject *key = m->sparse ? PyLong_FromUnsignedLongLong(index) : NULL;
    PyObject *found = key ? PyDict_GetItem(m->sparse, key) : NULL;
    Py_XDECREF(key);
    return found;
}

static int run_get(struct machine *m, const struct dr_opcode *op) {
    uint64_t index;
    if (memo_index(m, op, &index) < 0)
        return -1;
    PyObject *found = index < m->memo.count ? m->memo.items[index] : get_sparse(m, index);
    return found ? push(m, Py_NewRef(found)) : damaged(m, "it uses what it has not memoized");
}

static int run_proto(struct machine *m, const struct dr_opcode *op) {
    return op->number <= 5 ? 0 : damaged(m, "it has a protocol that Python does not");
}

static int run_frame(struct machine *m, const struct dr_opcode *op) {
    return op->number <= m->pickle.size - m->pickle.at ? 0 : damaged(m, "it ends too early");
}

static int run_stop(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    m->stopped = true;
    return m->mark_count == 0 ? require(m, 1) : damaged(m, "a mark is left");
}

/* ---- what the reader decides ---- */

static int find(struct machine *m, PyObject *module, PyObject *name) {
    PyObject *found = NULL;
    if (module && name)
        found = PyObject_CallFunctionObjArgs(m->find_class, module, name, NULL);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return push(m, found);
}

static int run_global(struct machine *m, const struct dr_opcode *op) {
    PyObject *module = PyUnicode_DecodeUTF8((const char *)op->text, (Py_ssize_t)op->size, NULL);
    PyObject *name = module ? PyUnicode_DecodeUTF8((const char *)op->name, (Py_ssize_t)op->name_size, NULL) : NULL;
    return find(m, module, name);
}

static int run_stack_global(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    if (require(m, 2) < 0)
        return -1;
    PyObject *name = pop(m), *module = pop(m);
    if (PyUnicode_CheckExact(name) && PyUnicode_CheckExact(module))
        return find(m, module, name);
    Py_DECREF(name);
    Py_DECREF(module);
    return damaged(m, "a name is no text");
}

/* Asks the reader for what the topmost `count` items make, and puts it in their place. */
static int run_made(struct machine *m, PyObject *method, size_t count) {
    if (require(m, count) < 0)
        return -1;
    PyObject **args = m->stack.items + m->stack.count - count;
    if (!PyTuple_CheckExact(args[1]))
        return damaged(m, "arguments are no tuple");
    if (charge_for(m, args[1]) < 0 || (count == 3 && charge_for(m, args[2]) < 0))
        return -1;
    PyObject *made = PyObject_CallFunctionObjArgs(method, args[0], args[1], count == 3 ? args[2] : NULL, NULL);
    return replace(m, count, made);
}

/* Of what a set is to be made of. */
static int check_members(struct machine *m, PyObject *list) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++)
        if (check_key(m, PyList_GetItem(list, i)) < 0)
            return -1;
    return 0;
}

static int run_reduce(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    if (require(m, 2) < 0)
        return -1;
    PyObject *function = m->stack.items[m->stack.count - 2], *args = top(m);
    PyObject *only = PyTuple_CheckExact(args) && PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    bool is_set = function == (PyObject *)&PySet_Type || function == (PyObject *)&PyFrozenSet_Type;
    if (only && is_set && PyList_CheckExact(only) && check_members(m, only) < 0)
        return -1;
    bool direct =
        only && PyTuple_CheckExact(only) && PyType_CheckExact(function) && PySet_Contains(m->tuples, function) == 1;
    if (!direct)
        return run_made(m, m->call, 2);
    return charge_for(m, args) < 0 ? -1 : replace(m, 2, PyObject_CallObject(function, args));
}

/* The types of a record's attributes, borrowed; NULL for all other classes. */
static PyObject *record_types(const struct machine *m, PyObject *cls) {
    return PyType_CheckExact(cls) ? PyDict_GetItem(m->records, cls) : NULL;
}

static int run_newobj(struct machine *m, const struct dr_opcode *op) {
    size_t count = op->code == DR_NEWOBJ_EX ? 3 : 2;
    if (require(m, count) < 0)
        return -1;
    PyObject *cls = m->stack.items[m->stack.count - count], *args = top(m);
    if (count != 2 || !record_types(m, cls) || !PyTuple_CheckExact(args) || PyTuple_Size(args) != 0)
        return run_made(m, m->make, count);
    newfunc make = (newfunc)PyType_GetSlot(&PyBaseObject_Type, Py_tp_new);
    return replace(m, 2, make((PyTypeObject *)cls, args, NULL));
}

/* No names of Python's own. */
static bool are_attributes(PyObject *state) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    if (!PyDict_CheckExact(state))
        return false;
    while (PyDict_Next(state, &at, &name, &value)) {
        if (!PyUnicode_CheckExact(name))
            return false;
        if (PyUnicode_GetLength(name) >= 2 && PyUnicode_ReadChar(name, 0) == '_' && PyUnicode_ReadChar(name, 1) == '_')
            return false;
    }
    return true;
}

/* What is missing is as the class has it: pickles leave out None. */
static bool is_one_of(PyObject *object, PyObject *types) {
    for (Py_ssize_t i = 0; object && i < PyTuple_Size(types); i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(types, i))
            return true;
    return !object;
}

static bool have_types(PyObject *state, PyObject *types) {
    PyObject *name, *allowed;
    Py_ssize_t at = 0;
    while (PyDict_Next(types, &at, &name, &allowed))
        if (!is_one_of(PyDict_GetItem(state, name), allowed))
            return false;
    return true;
}

/* A record's attributes that have to have a type are what it is hashed by. */
static bool are_short(PyObject *state, PyObject *types) {
    PyObject *name, *ignored;
    Py_ssize_t at = 0;
    while (PyDict_Next(types, &at, &name, &ignored)) {
        PyObject *value = PyDict_GetItem(state, name);
        if (value && PyTuple_Check(value) ? PyTuple_Size(value) > RECORD_PARTS
                                          : value && PyLong_Check(value) && long_bytes(value) > 0)
            return false;
    }
    return true;
}

static int set_attributes(const struct machine *m, PyObject *instance, PyObject *state, PyObject *types) {
    if (!are_short(state, types))
        return damaged(m, "what it hashes is longer than what a tensor has");
    PyObject *own = PyObject_GetAttr(instance, m->dict_name);
    int rc = own ? PyDict_Update(own, state) : -1;
    Py_XDECREF(own);
    return rc;
}

static int run_build(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    if (require(m, 2) < 0)
        return -1;
    PyObject *state = pop(m), *instance = top(m), *done = NULL;
    PyObject *types = record_types(m, (PyObject *)Py_TYPE(instance));
    int rc = charge_for(m, state);
    if (rc == 0 && types && are_attributes(state) && have_types(state, types)) {
        rc = set_attributes(m, instance, state, types);
    } else if (rc == 0) {
        done = PyObject_CallFunctionObjArgs(m->build, instance, state, NULL);
        rc = done ? 0 : -1;
    }
    Py_DECREF(state);
    Py_XDECREF(done);
    return rc;
}

static int run_binpersid(struct machine *m, const struct dr_opcode *op) {
    (void)op;
    if (require(m, 1) < 0)
        return -1;
    return replace(m, 1, PyObject_CallFunctionObjArgs(m->persistent_load, top(m), NULL));
}

/* The names are looked up first, so that the error is about them. */
static int run_inst(struct machine *m, const struct dr_opcode *op) {
    return run_global(m, op) < 0 ? -1 : damaged(m, "it has an opcode that Python has not written since 2.3");
}

static int run_refused(struct machine *m, const struct dr_opcode *op) {
    PyObject *done = PyObject_CallFunction(m->refuse, "iK", (int)op->code, (unsigned long long)op->number);
    Py_XDECREF(done);
    return done ? damaged(m, "it has an opcode that is not read") : -1;
}

/* ---- running ---- */

typedef int step(struct machine *m, const struct dr_opcode *op);

static step *const steps[256] = {
    [DR_NONE] = run_bool_or_none,
    [DR_NEWTRUE] = run_bool_or_none,
    [DR_NEWFALSE] = run_bool_or_none,
    [DR_BININT] = run_binint,
    [DR_BININT1] = run_binint,
    [DR_BININT2] = run_binint,
    [DR_INT] = run_int,
    [DR_LONG] = run_int,
    [DR_LONG1] = run_long,
    [DR_LONG4] = run_long,
    [DR_FLOAT] = run_float,
    [DR_BINFLOAT] = run_binfloat,
    [DR_UNICODE] = run_text,
    [DR_BINUNICODE] = run_text,
    [DR_SHORT_BINUNICODE] = run_text,
    [DR_BINUNICODE8] = run_text,
    [DR_BINBYTES] = run_bytes,
    [DR_SHORT_BINBYTES] = run_bytes,
    [DR_BINBYTES8] = run_bytes,
    [DR_BYTEARRAY8] = run_bytearray,
    [DR_MARK] = run_mark,
    [DR_EMPTY_TUPLE] = run_empty,
    [DR_EMPTY_LIST] = run_empty,
    [DR_EMPTY_DICT] = run_empty,
    [DR_EMPTY_SET] = run_empty,
    [DR_TUPLE1] = run_short_tuple,
    [DR_TUPLE2] = run_short_tuple,
    [DR_TUPLE3] = run_short_tuple,
    [DR_TUPLE] = run_tuple_or_list,
    [DR_LIST] = run_tuple_or_list,
    [DR_DICT] = run_dict,
    [DR_APPEND] = run_append,
    [DR_APPENDS] = run_appends,
    [DR_SETITEM] = run_setitem,
    [DR_SETITEMS] = run_setitems,
    [DR_ADDITEMS] = run_additems,
    [DR_FROZENSET] = run_frozenset,
    [DR_POP] = run_pop,
    [DR_POP_MARK] = run_pop,
    [DR_DUP] = run_dup,
    [DR_PUT] = run_put,
    [DR_BINPUT] = run_put,
    [DR_LONG_BINPUT] = run_put,
    [DR_MEMOIZE] = run_put,
    [DR_GET] = run_get,
    [DR_BINGET] = run_get,
    [DR_LONG_BINGET] = run_get,
    [DR_PROTO] = run_proto,
    [DR_FRAME] = run_frame,
    [DR_STOP] = run_stop,
    [DR_GLOBAL] = run_global,
    [DR_STACK_GLOBAL] = run_stack_global,
    [DR_REDUCE] = run_reduce,
    [DR_NEWOBJ] = run_newobj,
    [DR_NEWOBJ_EX] = run_newobj,
    [DR_BUILD] = run_build,
    [DR_BINPERSID] = run_binpersid,
    [DR_INST] = run_inst,
    /* all others: run_refused */
};

static int run(struct machine *m) {
    for (unsigned long done = 1; !m->stopped; done++) {
        struct dr_opcode op;
        const char *problem = dr_pickle_next(&m->pickle, &op);
        if (problem)
            return damaged(m, problem);
        if ((steps[op.code] ? steps[op.code] : run_refused)(m, &op) < 0)
            return -1;
        if (gil_turn(done) < 0)
            return -1;
    }
    return 0;
}

static int bind(struct machine *m, PyObject *reader) {
    struct {
        const char *name;
        PyObject **slot;
    } const parts[] = {
        {"tuples", &m->tuples}, {"records", &m->records}, {"find_class", &m->find_class},
        {"call", &m->call},     {"make", &m->make},       {"build", &m->build},
        {"extend", &m->extend}, {"update", &m->update},   {"persistent_load", &m->persistent_load},
        {"refuse", &m->refuse},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!(*parts[i].slot = PyObject_GetAttrString(reader, parts[i].name)))
            return -1;
    if (!(m->dict_name = PyUnicode_InternFromString("__dict__")))
        return -1;
    return PyAnySet_Check(m->tuples) && PyDict_Check(m->records) ? 0 : damaged(m, "its reader is none");
}

static void clear(struct machine *m) {
    PyObject *const parts[] = {m->tuples, m->records, m->dict_name, m->find_class,      m->call,  m->make,
                               m->build,  m->extend,  m->update,    m->persistent_load, m->refuse};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        Py_XDECREF(parts[i]);
    Py_XDECREF(m->sparse);
    cut(&m->stack, 0);
    cut(&m->memo, 0);
    PyMem_Free(m->stack.items);
    PyMem_Free(m->memo.items);
    PyMem_Free(m->marks);
}

static PyObject *unpickle(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer data;
    PyObject *reader, *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O", &data, &reader))
        return NULL;
    struct machine m = {.pickle = {data.buf, (size_t)data.len, 0},
                        .reader = reader,
                        .charges = CHARGE_FREE + CHARGE_PER_BYTE * (uint64_t)data.len};
    if (bind(&m, reader) == 0 && run(&m) == 0)
        result = pop(&m);
    clear(&m);
    PyBuffer_Release(&data);
    return result;
}

PyMethodDef unpickle_methods[] = {
    {"unpickle", unpickle, METH_VARARGS, "unpickle(data, reader): what was pickled, as far as the reader allows it"},
    {NULL, NULL, 0, NULL},
};
