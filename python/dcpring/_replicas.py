"""Fingerprints of what is replicated and small, so that ranks which hold different bytes of it are noticed."""

from __future__ import annotations

import array
import io
import zlib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.tensors import PLAIN_TYPES, is_whole, local_tensor

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
    prints = [crcs[index] if index in crcs else object_crc(value) for index, value in enumerate(local)]
    return array.array("I", prints).tobytes()


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


def object_crc(value: Any, depth: int = 0) -> int:
    """A checksum by value: equal objects have equal ones, however they share parts in memory, and in whatever order.

    Of what cannot be compared by value only the class counts.
    """
    kind = type(value)
    if depth > 100:
        return 0
    if kind in _ATOMS:
        return _crc(kind, repr(value).encode(errors="surrogatepass"))
    if kind in (list, tuple):
        return _crc(kind, *(object_crc(entry, depth + 1).to_bytes(4, "little") for entry in value))
    if kind in (set, frozenset):
        return _crc(set, *sorted(object_crc(entry, depth + 1).to_bytes(4, "little") for entry in value))
    if kind in (dict, OrderedDict):
        pairs = (object_crc(pair, depth + 1).to_bytes(4, "little") for pair in value.items())
        return _crc(dict, *sorted(pairs))
    if kind in PLAIN_TYPES and value.layout == torch.strided and not value.is_meta:
        return _crc(kind, f"{value.dtype}{list(value.shape)}".encode(), _tensor_crcs([value])[0].to_bytes(4, "little"))
    return _crc(kind)


_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def _crc(kind: type, *parts: bytes) -> int:
    crc = zlib.crc32(kind.__qualname__.encode())
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
