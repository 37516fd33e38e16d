"""Which tensors are the same memory, whether memory holds their values, and how the core can take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dcpring import _C
from dcpring.torchside.tensors import PLAIN_TYPES

NOTHING = torch.empty(0)
"""Stands in, in a list for the core, for a tensor that it must not look at."""


def is_lazy_view(tensor: Tensor) -> bool:
    """Whether the bytes in memory are not the values: a conjugate or negative view."""
    return tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())


def lazy_views(tensors: Sequence[Tensor]) -> list[int]:
    """The positions of those that ``is_lazy_view``; cheap where there are none."""
    if any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_conj, tensors)):
        return [position for position, tensor in enumerate(tensors) if is_lazy_view(tensor)]
    return []


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each its own part of it."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


FREED = "its memory was given back, or a part of it, as untyped_storage().resize_() does; make it again first"


def is_freed(tensor: Tensor) -> bool:
    """Whether it lies in memory that was given back (``untyped_storage().resize_()``), which torch uses anyway."""
    known = tensor.layout == torch.strided and type(tensor) in PLAIN_TYPES
    if not known or tensor.is_meta or tensor.is_nested or not tensor.numel():
        return False
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needed = 1 if tensor.is_quantized else (last + 1) * tensor.itemsize  # some of these have two elements in a byte
    return tensor.untyped_storage().size() < needed


def memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same values in the same memory, as tied ones are."""
    look = (tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return tensor.data_ptr(), *look, tensor.is_neg(), tensor.is_complex() and tensor.is_conj()


def same_memory(tensors: Mapping[int, Tensor]) -> dict[int, int]:
    """Of tensors that are the same memory as an earlier one, which; cheap where there are none."""
    pointers = [tensor.data_ptr() for tensor in tensors.values()]
    if len(set(pointers)) == len(pointers):
        return {}
    first: dict[tuple[Any, ...], int] = {}
    same: dict[int, int] = {}
    for pointer, (index, tensor) in zip(pointers, tensors.items(), strict=True):
        if not pointer or tensor.numel() == 0:  # some devices have no pointers
            continue
        if (earlier := first.setdefault(memory_key(tensor), index)) != index:
            same[index] = earlier
    return same


# ---- for the core ----

PLAIN, DEVICE, OTHER, LAZY = 0, 1, 2, 3
"""How the core can take a tensor."""


def handles_and_kinds(tensors: list[Tensor]) -> tuple[_C.Tensors, bytes]:
    """The tensors for the core, and how each can be taken: as it lies in memory, through a copy from its device, only
    by torch.save, or once it has been made what it stands for: a conjugate or negative view in CPU memory.
    """
    lazy = [index for index in lazy_views(tensors) if tensors[index].device.type == "cpu"]
    strange = {index: OTHER if is_freed(tensors[index]) else LAZY for index in lazy}
    strange.update((index, OTHER) for index, tensor in enumerate(tensors) if type(tensor) not in PLAIN_TYPES)
    if not strange:
        handles = _C.Tensors(tensors)
        return handles, handles.kinds()
    handles = _C.Tensors([NOTHING if index in strange else tensor for index, tensor in enumerate(tensors)])
    kinds = bytearray(handles.kinds())
    for index, kind in strange.items():
        kinds[index] = kind
    return handles, bytes(kinds)
