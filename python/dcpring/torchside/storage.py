"""Memory of tensors: such as other processes can map, and what refers to memory without keeping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as WeakReference

from dcpring.torchside.versions import function

_new_shared: Callable[..., Any] = function("torch.UntypedStorage", "_new_shared_fd_cpu")


def map_shared(descriptor: int, size: int) -> torch.UntypedStorage:
    """The memory of a descriptor, which torch duplicates, and hands to processes that a tensor in it is sent to."""
    storage: torch.UntypedStorage = _new_shared(descriptor, size)
    return storage


def weak_reference(storage: torch.UntypedStorage) -> WeakReference:
    """Equal to another one if that is of the same storage, living or dead, and of none that took a dead one's place."""
    return WeakReference(storage)
