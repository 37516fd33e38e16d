/*
 * Tensors, by way of libtorch's C shim (aoti_torch_*).
 *
 * Only torch_shim.c knows torch. The shim's functions are looked up in the
 * libtorch that `import torch` has loaded, so that building needs no torch and
 * one build serves many versions; tests/test_torch_shim.py checks the
 * prototypes against the installed headers.
 */
#ifndef DCPRING_TORCH_SHIM_H
#define DCPRING_TORCH_SHIM_H

#include "base/dtype.h"

#include <stdint.h>

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef int32_t AOTITorchError;

enum { TORCH_DTYPES = 32 };

struct torch_shim {
    AOTITorchError (*get_data_ptr)(AtenTensorHandle tensor, void **ret_data_ptr);
    AOTITorchError (*get_dim)(AtenTensorHandle tensor, int64_t *ret_dim);
    AOTITorchError (*get_sizes)(AtenTensorHandle tensor, int64_t **ret_sizes);
    AOTITorchError (*get_strides)(AtenTensorHandle tensor, int64_t **ret_strides);
    AOTITorchError (*get_storage_offset)(AtenTensorHandle tensor, int64_t *ret_storage_offset);
    AOTITorchError (*get_storage_size)(AtenTensorHandle tensor, int64_t *ret_size);
    AOTITorchError (*get_dtype)(AtenTensorHandle tensor, int32_t *ret_dtype);
    AOTITorchError (*get_device_type)(AtenTensorHandle tensor, int32_t *ret_device_type);
    AOTITorchError (*get_layout)(AtenTensorHandle tensor, int32_t *ret_layout);
    AOTITorchError (*delete_tensor_object)(AtenTensorHandle tensor);
    int32_t device_cpu, layout_strided;
    struct {
        int32_t code;
        const struct dr_dtype *dtype;
    } dtypes[TORCH_DTYPES];
    int dtype_count;
};

enum tensor_kind {
    TENSOR_PLAIN = 0,  /* strided, in CPU memory that holds all of it, of a dtype that the record format knows */
    TENSOR_DEVICE = 1, /* the same on another device: copy it down first */
    TENSOR_OTHER = 2,  /* torch.save must take it */
};

struct tensor_view {
    enum tensor_kind kind;
    void *data;
    int64_t ndim;
    const int64_t *sizes, *strides; /* the tensor's own; valid while it lives */
    const struct dr_dtype *dtype;
};

#endif
