"""Fingerprints of what several ranks hold, or may hold, so that ranks which hold different bytes of it are noticed.

Those of large tensors are of a sample. A tensor that is spread over some of the ranks only has one too: other ranks may
have spread another of the same name over theirs.
"""

from __future__ import annotations

import array
import io
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.groups import world_size
from dcpring.base.samples import sample_view
from dcpring.base.values import digest
from dcpring.base.windows import windows
from dcpring.format.ledger import key_of
from dcpring.torchside.accelerators import is_accelerator
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.tensors import is_whole, local_tensor

MAX_BYTES = 64 << 10
"""Of larger tensors a sample is compared: all of them would cost a pass over the model."""

_KEY = key_of(b"replicas")

_WINDOW_BYTES = 8 << 20
"""So many bytes are copied at a time: there may be many small tensors."""


def is_hashed(value: Any) -> bool:
    """Whether a value of a state dict is an object, or a tensor that other ranks hold too, or may have another of."""
    if isinstance(value, DTensor):
        replicated = any(
            placement.is_replicate() and size > 1
            for placement, size in zip(value.placements, value.device_mesh.shape, strict=True)
        )
        local = local_tensor(value)
        return (replicated or not _spans(value.device_mesh)) and is_whole(local) and _is_compared(local)
    if is_whole(value):
        return not value.is_meta and value.layout == torch.strided and _is_compared(value)
    return not isinstance(value, Tensor) and not plans_for_itself(value)


def _is_compared(tensor: Tensor) -> bool:
    """Whether a tensor is small, or such that a sample can be had of it without a copy."""
    if tensor.nbytes <= MAX_BYTES:
        return True
    is_plain = not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return is_plain and tensor.is_contiguous() and tensor.device.type != "meta"


def _spans(mesh: DeviceMesh) -> bool:
    """Whether a mesh has all ranks."""
    return mesh.size() >= world_size()


def partial_meshes(values: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each mesh, of those that have not all, that tensors are spread over."""
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    return tuple({tuple(mesh.mesh.flatten().tolist()) for mesh in meshes.values() if not _spans(mesh)})


def fingerprints(values: list[Any]) -> bytes:
    """A uint32 for each value that ``is_hashed``."""
    local = [local_tensor(value) if isinstance(value, DTensor) else value for value in values]
    tensors = [index for index, value in enumerate(local) if isinstance(value, Tensor)]
    small = [index for index in tensors if local[index].nbytes <= MAX_BYTES]
    large = [index for index in tensors if local[index].nbytes > MAX_BYTES]
    found = dict(zip(small, _tensor_crcs([local[index] for index in small]), strict=True))
    found |= zip(large, _samples([local[index] for index in large]), strict=True)
    return array.array("I", [found[i] if i in found else _object_crc(local[i]) for i in range(len(local))]).tobytes()


def _samples(tensors: list[Tensor]) -> list[int]:
    """Of some stretches of each tensor, the same wherever it lies."""
    sampled = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_accelerator(tensor.device):
            by_device.setdefault(tensor.device, []).append(index)
    for chosen in by_device.values():
        here = torch.stack([sample_view(tensors[index]) for index in chosen]).cpu()
        for index, sample in zip(chosen, here, strict=True):
            sampled[index] = sample
    known = _C.Tensors(sampled)
    if any(known.kinds()):  # dtypes that the core does not know
        known = _C.Tensors([tensor.detach().view(-1).view(torch.uint8) for tensor in sampled])
    return [sample & 0xFFFFFFFF for sample in memoryview(_C.samples(known, _KEY)).cast("Q")] if sampled else []


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
