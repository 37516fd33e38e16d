/*
 * The opcodes of a pickle, one after the other, with their arguments. What
 * they mean is not known here: csrc/py/pickle/unpickle.c makes objects of them.
 *
 * A pickle is untrusted: an argument lies in it, whatever length it claims, or
 * it is damaged. Nothing is allocated, and texts are those of the caller's
 * bytes.
 */
#ifndef DCPRING_PICKLE_READ_H
#define DCPRING_PICKLE_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* By their names in Python's pickletools. */
enum dr_pickle_opcode {
    DR_MARK = '(',
    DR_STOP = '.',
    DR_POP = '0',
    DR_POP_MARK = '1',
    DR_DUP = '2',
    DR_FLOAT = 'F',
    DR_INT = 'I',
    DR_BININT = 'J',
    DR_BININT1 = 'K',
    DR_LONG = 'L',
    DR_BININT2 = 'M',
    DR_NONE = 'N',
    DR_PERSID = 'P',
    DR_BINPERSID = 'Q',
    DR_REDUCE = 'R',
    DR_STRING = 'S',
    DR_BINSTRING = 'T',
    DR_SHORT_BINSTRING = 'U',
    DR_UNICODE = 'V',
    DR_BINUNICODE = 'X',
    DR_APPEND = 'a',
    DR_BUILD = 'b',
    DR_GLOBAL = 'c',
    DR_DICT = 'd',
    DR_EMPTY_DICT = '}',
    DR_APPENDS = 'e',
    DR_GET = 'g',
    DR_BINGET = 'h',
    DR_INST = 'i',
    DR_LONG_BINGET = 'j',
    DR_LIST = 'l',
    DR_EMPTY_LIST = ']',
    DR_OBJ = 'o',
    DR_PUT = 'p',
    DR_BINPUT = 'q',
    DR_LONG_BINPUT = 'r',
    DR_SETITEM = 's',
    DR_TUPLE = 't',
    DR_EMPTY_TUPLE = ')',
    DR_SETITEMS = 'u',
    DR_BINFLOAT = 'G',
    DR_BINBYTES = 'B',
    DR_SHORT_BINBYTES = 'C',
    DR_PROTO = 0x80,
    DR_NEWOBJ,
    DR_EXT1,
    DR_EXT2,
    DR_EXT4,
    DR_TUPLE1,
    DR_TUPLE2,
    DR_TUPLE3,
    DR_NEWTRUE,
    DR_NEWFALSE,
    DR_LONG1,
    DR_LONG4,
    DR_SHORT_BINUNICODE,
    DR_BINUNICODE8,
    DR_BINBYTES8,
    DR_EMPTY_SET,
    DR_ADDITEMS,
    DR_FROZENSET,
    DR_NEWOBJ_EX,
    DR_STACK_GLOBAL,
    DR_MEMOIZE,
    DR_FRAME,
    DR_BYTEARRAY8,
    DR_NEXT_BUFFER,
    DR_READONLY_BUFFER,
};

struct dr_pickle {
    const uint8_t *data;
    size_t size, at;
};

struct dr_opcode {
    uint8_t code;
    uint64_t number;     /* of those whose argument is one; BININT's is sign-extended */
    const uint8_t *text; /* a string's bytes, an int's or a float's, or a line without its end */
    size_t size;
    const uint8_t *name; /* the second line of GLOBAL and INST */
    size_t name_size;
};

/* The next opcode; NULL, or why there is none. */
const char *dr_pickle_next(struct dr_pickle *pickle, struct dr_opcode *out);

#endif
