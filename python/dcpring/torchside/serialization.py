"""Private names of ``torch.save`` and ``torch.load``; those that pickles name are part of the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcpring.torchside.versions import function

rebuild_tensor: Callable[..., Any] = function("torch._utils", "_rebuild_tensor_v2")
"""What a pickle makes a tensor with: storage, offset, sizes, strides, requires_grad, hooks."""

rebuild_tensor_of_dtype: Callable[..., Any] = function("torch._utils", "_rebuild_tensor_v3")
"""The same for a dtype that has no class of storages: it comes last."""

LAYOUT_GETTER = ("torch.serialization", "_get_layout")
"""What a pickle makes a ``torch.layout`` with: module and name."""


def place_in_file(storage: torch.UntypedStorage) -> int:
    """Where a storage that was loaded without its data lies in its file; -1 where it is not known."""
    return getattr(storage, "_checkpoint_offset", -1)


def described(storage: Any) -> tuple[str, int, torch.UntypedStorage]:
    """The name of a storage's class in a pickle, its number of elements there, and its memory."""
    if isinstance(storage, torch.storage.TypedStorage):
        return storage._pickle_storage_type(), storage._size(), storage._untyped_storage
    return "", storage.nbytes(), storage


def identity(storage: torch.UntypedStorage) -> int:
    """The same for storages that are the same memory."""
    return storage._cdata
