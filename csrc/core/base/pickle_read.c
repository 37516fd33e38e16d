/* Opcodes and their arguments. See pickle_read.h. */
#include "base/pickle_read.h"

#include "base/bytes.h"

#include <string.h>

enum argument {
    UNKNOWN,
    NOTHING,
    NUMBER1,
    NUMBER2,
    NUMBER4,
    NUMBER8,
    SIGNED4,
    BYTES8,
    LINE,
    LINES,
    COUNTED1,
    COUNTED4,
    COUNTED8,
};

/* clang-format off: a table */
static const uint8_t arguments[256] = {
    [DR_MARK] = NOTHING,
    [DR_STOP] = NOTHING,
    [DR_POP] = NOTHING,
    [DR_POP_MARK] = NOTHING,
    [DR_DUP] = NOTHING,
    [DR_FLOAT] = LINE,
    [DR_INT] = LINE,
    [DR_BININT] = SIGNED4,
    [DR_BININT1] = NUMBER1,
    [DR_LONG] = LINE,
    [DR_BININT2] = NUMBER2,
    [DR_NONE] = NOTHING,
    [DR_PERSID] = LINE,
    [DR_BINPERSID] = NOTHING,
    [DR_REDUCE] = NOTHING,
    [DR_STRING] = LINE,
    [DR_BINSTRING] = COUNTED4,
    [DR_SHORT_BINSTRING] = COUNTED1,
    [DR_UNICODE] = LINE,
    [DR_BINUNICODE] = COUNTED4,
    [DR_APPEND] = NOTHING,
    [DR_BUILD] = NOTHING,
    [DR_GLOBAL] = LINES,
    [DR_DICT] = NOTHING,
    [DR_EMPTY_DICT] = NOTHING,
    [DR_APPENDS] = NOTHING,
    [DR_GET] = LINE,
    [DR_BINGET] = NUMBER1,
    [DR_INST] = LINES,
    [DR_LONG_BINGET] = NUMBER4,
    [DR_LIST] = NOTHING,
    [DR_EMPTY_LIST] = NOTHING,
    [DR_OBJ] = NOTHING,
    [DR_PUT] = LINE,
    [DR_BINPUT] = NUMBER1,
    [DR_LONG_BINPUT] = NUMBER4,
    [DR_SETITEM] = NOTHING,
    [DR_TUPLE] = NOTHING,
    [DR_EMPTY_TUPLE] = NOTHING,
    [DR_SETITEMS] = NOTHING,
    [DR_BINFLOAT] = BYTES8,
    [DR_BINBYTES] = COUNTED4,
    [DR_SHORT_BINBYTES] = COUNTED1,
    [DR_PROTO] = NUMBER1,
    [DR_NEWOBJ] = NOTHING,
    [DR_EXT1] = NUMBER1,
    [DR_EXT2] = NUMBER2,
    [DR_EXT4] = NUMBER4,
    [DR_TUPLE1] = NOTHING,
    [DR_TUPLE2] = NOTHING,
    [DR_TUPLE3] = NOTHING,
    [DR_NEWTRUE] = NOTHING,
    [DR_NEWFALSE] = NOTHING,
    [DR_LONG1] = COUNTED1,
    [DR_LONG4] = COUNTED4,
    [DR_SHORT_BINUNICODE] = COUNTED1,
    [DR_BINUNICODE8] = COUNTED8,
    [DR_BINBYTES8] = COUNTED8,
    [DR_EMPTY_SET] = NOTHING,
    [DR_ADDITEMS] = NOTHING,
    [DR_FROZENSET] = NOTHING,
    [DR_NEWOBJ_EX] = NOTHING,
    [DR_STACK_GLOBAL] = NOTHING,
    [DR_MEMOIZE] = NOTHING,
    [DR_FRAME] = NUMBER8,
    [DR_BYTEARRAY8] = COUNTED8,
    [DR_NEXT_BUFFER] = NOTHING,
    [DR_READONLY_BUFFER] = NOTHING,
};
/* clang-format on */

static bool get_number(struct dr_pickle *p, unsigned bytes, uint64_t *out) {
    if (p->size - p->at < bytes)
        return false;
    *out = dr_get_le(p->data + p->at, bytes);
    p->at += bytes;
    return true;
}

static bool get_bytes(struct dr_pickle *p, uint64_t size, const uint8_t **text, size_t *text_size) {
    if (p->size - p->at < size)
        return false;
    *text = p->data + p->at;
    *text_size = (size_t)size;
    p->at += (size_t)size;
    return true;
}

static bool get_counted(struct dr_pickle *p, unsigned bytes, struct dr_opcode *out) {
    uint64_t size;
    return get_number(p, bytes, &size) && get_bytes(p, size, &out->text, &out->size);
}

static bool get_line(struct dr_pickle *p, const uint8_t **text, size_t *size) {
    const uint8_t *start = p->data + p->at;
    const uint8_t *end = memchr(start, '\n', p->size - p->at);
    if (!end)
        return false;
    *text = start;
    *size = (size_t)(end - start);
    p->at += *size + 1;
    return true;
}

static bool get_argument(struct dr_pickle *p, struct dr_opcode *out) {
    switch ((enum argument)arguments[out->code]) {
    case NUMBER1:
        return get_number(p, 1, &out->number);
    case NUMBER2:
        return get_number(p, 2, &out->number);
    case NUMBER4:
        return get_number(p, 4, &out->number);
    case NUMBER8:
        return get_number(p, 8, &out->number);
    case SIGNED4:
        if (!get_number(p, 4, &out->number))
            return false;
        out->number = (uint64_t)(int64_t)(int32_t)(uint32_t)out->number;
        return true;
    case BYTES8:
        return get_bytes(p, 8, &out->text, &out->size);
    case LINE:
        return get_line(p, &out->text, &out->size);
    case LINES:
        return get_line(p, &out->text, &out->size) && get_line(p, &out->name, &out->name_size);
    case COUNTED1:
        return get_counted(p, 1, out);
    case COUNTED4:
        return get_counted(p, 4, out);
    case COUNTED8:
        return get_counted(p, 8, out);
    case UNKNOWN:
    case NOTHING:
        break;
    }
    return true;
}

const char *dr_pickle_next(struct dr_pickle *pickle, struct dr_opcode *out) {
    *out = (struct dr_opcode){0};
    if (pickle->at >= pickle->size)
        return "it ends too early";
    out->code = pickle->data[pickle->at++];
    if (arguments[out->code] == UNKNOWN)
        return "it has an opcode that no pickle has";
    return get_argument(pickle, out) ? NULL : "it ends too early";
}
