/* The opcodes of pickles, and arguments that are cut off at every byte. */
#include "base/pickle_read.h"
#include "check.h"

#define PICKLE(literal) ((struct dr_pickle){(const uint8_t *)literal, sizeof literal - 1, 0})

static struct dr_opcode next(struct dr_pickle *pickle, uint8_t code) {
    struct dr_opcode op;
    const char *problem = dr_pickle_next(pickle, &op);
    if (problem)
        CHECK_FAIL("%s", problem);
    CHECK_EQ(op.code, code);
    return op;
}

static void check_text(const uint8_t *text, size_t size, const char *expected) {
    CHECK(size == strlen(expected) && memcmp(text, expected, size) == 0);
}

static void arguments(void) {
    struct dr_pickle p = PICKLE("\x80\x04K\xffM\x00\x01J\xff\xff\xff\xffr\x00\x00\x00\x80\x8c\x03"
                                "abccos\nsystem\nI12\n.");
    CHECK_EQ(next(&p, DR_PROTO).number, 4);
    CHECK_EQ(next(&p, DR_BININT1).number, 255);
    CHECK_EQ(next(&p, DR_BININT2).number, 256);
    CHECK_EQ((int64_t)next(&p, DR_BININT).number, -1);
    CHECK_EQ(next(&p, DR_LONG_BINPUT).number, 1u << 31);
    struct dr_opcode op = next(&p, DR_SHORT_BINUNICODE);
    check_text(op.text, op.size, "abc");
    op = next(&p, DR_GLOBAL);
    check_text(op.text, op.size, "os");
    check_text(op.name, op.name_size, "system");
    op = next(&p, DR_INT);
    check_text(op.text, op.size, "12");
    next(&p, DR_STOP);
    CHECK_EQ(p.at, p.size);
    CHECK(dr_pickle_next(&p, &op) != NULL);
}

/* Of every opcode an argument that is longer than what is there. */
static void cut_off(void) {
    for (int code = 0; code < 256; code++) {
        uint8_t data[32];
        memset(data, 0xff, sizeof data);
        data[0] = (uint8_t)code;
        for (size_t size = 1; size <= sizeof data; size++) {
            uint8_t *exact = check_alloc(size);
            memcpy(exact, data, size);
            struct dr_pickle p = {exact, size, 0};
            struct dr_opcode op;
            if (!dr_pickle_next(&p, &op))
                CHECK(p.at <= size && op.size < size && op.name_size < size);
            free(exact);
        }
    }
}

static void unknown(void) {
    struct dr_pickle p = PICKLE("\xff"), empty = PICKLE("");
    struct dr_opcode op;
    CHECK(dr_pickle_next(&p, &op) != NULL);
    CHECK(dr_pickle_next(&empty, &op) != NULL);
}

CHECK_MAIN({"arguments", arguments}, {"cut_off", cut_off}, {"unknown", unknown})
