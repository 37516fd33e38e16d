/*
 * The opcodes of any bytes: each argument lies behind its opcode and in front
 * of the next, and reading ends with the bytes.
 */
#include "base/pickle_read.h"
#include "fuzz.h"

#include <string.h>

static void check_text(const struct dr_pickle *pickle, size_t before, const uint8_t *text, size_t size) {
    if (text)
        FUZZ_CHECK(text > pickle->data + before && text + size <= pickle->data + pickle->at);
    else
        FUZZ_CHECK(size == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct dr_pickle pickle = {data, size, 0};
    for (;;) {
        struct dr_opcode op;
        size_t before = pickle.at;
        const char *problem = dr_pickle_next(&pickle, &op);
        FUZZ_CHECK(pickle.at <= size);
        if (problem)
            return 0;
        FUZZ_CHECK(pickle.at > before && op.code == data[before]);
        check_text(&pickle, before, op.text, op.size);
        check_text(&pickle, before, op.name, op.name_size);
    }
}

size_t fuzz_seed(unsigned index, uint8_t out[FUZZ_SEED_MAX]) {
    static const struct {
        const char *data;
        size_t size;
    } seeds[] = {
#define SEED(literal) {literal, sizeof literal - 1}
        SEED("\x80\x02}q\x00(X\x01\x00\x00\x00"
             "aq\x01K\x01M\x00\x02J\x00\x00\x00\x80u."),
        SEED("(lp0\nI1\naL-5L\naF1.5\naVtext\naI01\nacos\nsystem\n(S'x'\ntRa."),
        SEED("\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x93\x8f(C\x01x\x90\x85R\x94."),
        SEED("\x80\x05\x96\x03\x00\x00\x00\x00\x00\x00\x00"
             "abc\x8d\x01\x00\x00\x00\x00\x00\x00\x00xG?\xf8\x00\x00\x00\x00\x00\x00\x8a\x01\xff."),
#undef SEED
    };
    if (index >= sizeof seeds / sizeof *seeds)
        return 0;
    memcpy(out, seeds[index].data, seeds[index].size);
    return seeds[index].size;
}
