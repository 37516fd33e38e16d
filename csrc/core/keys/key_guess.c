/* Names without a model: what their text alone tells. See key.h. */
#include "keys/key_batch.h"

#include <string.h>

#define KEY(literal) {literal, sizeof literal - 1}

/* Nobody but torch.compile, FSDP and the activation wrappers calls a child so. */
static const struct dr_key only_wrappers[] = {
    KEY("_orig_mod"),
    KEY("_fsdp_wrapped_module"),
    KEY("_checkpoint_wrapped_module"),
};

/* What DDP, AveragedModel, adapters and parametrizations use, and others too. */
static const struct dr_key perhaps_wrappers[] = {
    KEY("module"),
    KEY("base_layer"),
    KEY("parametrizations"),
};

static bool is_one_of(const struct dr_key *list, size_t count, struct dr_key part) {
    for (size_t i = 0; i < count; i++)
        if (dr_key_equal(list[i], part))
            return true;
    return false;
}

#define IS_ONE_OF(list, part) is_one_of(list, sizeof list / sizeof *list, part)

/* The last component is a tensor's own name, whatever it is. */
static int guess(struct dr_key name, struct dr_key_text *text, uint8_t *ambiguous, struct dr_error *error) {
    int rc = 0;
    for (size_t offset = 0; rc == 0;) {
        struct dr_key part = dr_key_component(name, offset);
        if (offset + part.size == name.size)
            return dr_key_text_join(text, part, error);
        if (!IS_ONE_OF(only_wrappers, part))
            rc = dr_key_text_join(text, part, error);
        *ambiguous |= IS_ONE_OF(perhaps_wrappers, part);
        offset += part.size + 1;
    }
    return rc;
}

int dr_key_guess(const struct dr_key *names, size_t count, struct dr_key_batch *batch, uint8_t *ambiguous,
                 struct dr_error *error) {
    struct dr_key_text text = {0};
    int rc = dr_key_batch_init(batch, count, error);
    for (size_t i = 0; i < count && rc == 0; i++) {
        dr_key_text_clear(&text);
        ambiguous[i] = 0;
        rc = guess(names[i], &text, &ambiguous[i], error);
        if (rc == 0)
            rc = dr_key_batch_keep(batch, i, names[i], &text, error);
    }
    dr_key_text_free(&text);
    return rc;
}
