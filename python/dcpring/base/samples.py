"""Samples of tensors that the core cannot look at, as they lie on an accelerator: of the bytes that it would take."""

from __future__ import annotations

import torch
from torch import Tensor

_STRETCHES, _STRETCH_BYTES = 4, 64
"""The first bytes, the last ones, and some between, as in core/data/unchanged.c."""


def sample_view(tensor: Tensor) -> Tensor:
    """The sampled bytes of a tensor without gaps in memory, as a view that has a row for each stretch.

    The core's sample of a copy of this is its sample of the tensor, if that is contiguous.
    """
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
    apart = (flat.numel() - _STRETCH_BYTES) // (_STRETCHES - 1)
    return flat.as_strided((_STRETCHES, _STRETCH_BYTES), (apart, 1), flat.storage_offset())
