/* The element types that `torch.save` knows, and how its pickles name them. */
#ifndef DCPRING_DTYPE_H
#define DCPRING_DTYPE_H

#include <stdint.h>

struct dr_dtype {
    const char *name;    /* as in torch.float32 */
    const char *storage; /* legacy storage class, as in torch.FloatStorage; NULL where torch has none */
    uint32_t item_size;  /* bytes */
};

/* Ends with an entry whose name is NULL. */
extern const struct dr_dtype dr_dtypes[];

/* NULL when there is none. */
const struct dr_dtype *dr_dtype_by_name(const char *name);
const struct dr_dtype *dr_dtype_by_storage(const char *storage);

#endif
