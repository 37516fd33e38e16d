"""Fingerprints of what is replicated and small, so that ranks which hold different bytes of it are noticed."""

from __future__ import annotations

import array
import io
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.values import digest
from dcpring.base.windows import windows
from dcpring.torchside.accelerators import is_accelerator
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.tensors import is_whole, local_tensor

MAX_BYTES = 64 << 10
"""Larger tensors are not compared: that would cost a pass over the model."""

_WINDOW_BYTES = 8 << 20
"""So many bytes are copied at a time: there may be many small tensors."""


def is_hashed(value: Any) -> bool:
    """Whether a value of a state dict is an object, or a small tensor that other ranks hold too."""
    if isinstance(value, DTensor):
        replicated = any(
            placement.is_replicate() and size > 1
            for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
        )
        local = local_tensor(value)
        return replicated and is_whole(local) and local.nbytes <= MAX_BYTES
    if is_whole(value):
        return not value.is_meta and value.layout == torch.strided and value.nbytes <= MAX_BYTES
    return not isinstance(value, Tensor) and not plans_for_itself(value)


def fingerprints(values: list[Any]) -> bytes:
    """A uint32 for each value that ``is_hashed``."""
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    tensors = [index for index, value in enumerate(local) if isinstance(value, Tensor)]
    crcs = dict(zip(tensors, _tensor_crcs([local[index] for index in tensors]), strict=True))
    fingerprints = [crcs[index] if index in crcs else _object_crc(value) for index, value in enumerate(local)]
    return array.array("I", fingerprints).tobytes()


def _object_crc(value: Any) -> int:
    return int.from_bytes(digest(value)[:4], "little")


def _tensor_crcs(tensors: list[Tensor]) -> list[int]:
    """Of the elements' bytes. Tensors of accelerators are brought over in windows, each in one transfer."""
    crcs = [0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for chosen in by_device.values():
        for window in windows(chosen, lambda index: tensors[index].nbytes, _WINDOW_BYTES):
            with torch.no_grad():
                here = _brought_here([tensors[index].detach() for index in window])
            for index, tensor, crc in zip(window, here, _C.Tensors(here).crcs(), strict=True):
                crcs[index] = _crc_of(tensor) if crc is None else crc
    return crcs


def _crc_of(tensor: Tensor) -> int:
    """Of a tensor whose dtype the core does not know."""
    if not tensor.is_quantized and tensor.dtype != torch.uint8:
        return _tensor_crcs([tensor.view(-1).view(torch.uint8)])[0]
    out = io.BytesIO()
    torch.save(tensor, out)
    return zlib.crc32(out.getbuffer())


def _brought_here(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors of the same bytes in host memory. They are all of one device."""
    tensors = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    if not is_accelerator(tensors[0].device):
        return tensors
    if any(tensor.is_quantized for tensor in tensors):  # their bytes are not to be had
        return [tensor.cpu() for tensor in tensors]
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    return list(torch.cat(parts).cpu().split([part.numel() for part in parts]))
