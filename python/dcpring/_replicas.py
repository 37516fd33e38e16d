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
from dcpring._values import digest
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.tensors import is_whole, local_tensor

MAX_BYTES = 64 << 10
"""Larger tensors are not compared: that would cost a pass over the model."""


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
    prints = [crcs[index] if index in crcs else _object_crc(value) for index, value in enumerate(local)]
    return array.array("I", prints).tobytes()


def _object_crc(value: Any) -> int:
    return int.from_bytes(digest(value)[:4], "little")


def _tensor_crcs(tensors: list[Tensor]) -> list[int]:
    with torch.no_grad():
        here = [tensor.detach() for tensor in tensors]
        for device in {tensor.device for tensor in here if tensor.device.type != "cpu"}:
            _bring_here(here, device)
        here = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in here]
        return [
            _crc_of(tensor) if crc is None else crc for tensor, crc in zip(here, _C.Tensors(here).crcs(), strict=True)
        ]


def _crc_of(tensor: Tensor) -> int:
    """Of a tensor that the core cannot look at (a dtype of few bits, say)."""
    out = io.BytesIO()
    torch.save(tensor, out)
    return zlib.crc32(out.getbuffer())


def _bring_here(tensors: list[Tensor], device: torch.device) -> None:
    """Copies all tensors of a device to the host, in one transfer."""
    chosen = [index for index, tensor in enumerate(tensors) if tensor.device == device]
    parts = [tensors[index].resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for index in chosen]
    host = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.uint8)
    for index, part in zip(chosen, host.split([part.numel() for part in parts]), strict=True):
        tensors[index] = part.clone()
