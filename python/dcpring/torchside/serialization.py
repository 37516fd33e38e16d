"""Private names of ``torch.save`` and ``torch.load``; those that pickles name are part of the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcpring.torchside.versions import function, optional, release, required

rebuild_tensor: Callable[..., Any] = required("torch._utils", "_rebuild_tensor_v2")
"""What a pickle makes a tensor with: storage, offset, sizes, strides, requires_grad, hooks."""

rebuild_tensor_of_dtype: Callable[..., Any] = required("torch._utils", "_rebuild_tensor_v3")
"""The same for a dtype that has no class of storages: it comes last."""

_sparse_of_all_threads: list[Any] = optional("torch._utils", "_sparse_tensors_to_validate", [])
_sparse_of_this_thread: Callable[[], list[Any]] = optional("torch._utils", "_get_sparse_tensors_to_validate", list)

LAYOUT_GETTER = ("torch.serialization", "_get_layout")
"""What a pickle makes a ``torch.layout`` with: module and name."""

REBUILDERS: dict[str, Callable[..., Any]] = {
    f"torch._utils:{name}": rebuild
    for name in (
        *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        *("_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_nested_tensor"),
        *("_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass"),
        *("_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor"),
    )
    if (rebuild := optional("torch._utils", name)) is not None
}
"""What pickles make tensors with, by "module:name"; the same as those that ``weights_only`` loads know."""

REBUILD_AS_TYPE: tuple[str, Callable[..., Any]] = (
    "torch._tensor:_rebuild_from_type_v2",
    function("torch._tensor", "_rebuild_from_type_v2"),
)
"""What they make a tensor of a subclass, or with attributes, with: one of those, the class, arguments, the state."""

QUANTIZATIONS: type = type(torch.per_tensor_affine)
"""The class of quantization schemes."""


def forget_unfinished_load() -> None:
    """A ``torch.load`` that fails leaves its sparse tensors behind, for the next to look at, which fails then too."""
    _sparse_of_this_thread().clear()
    _sparse_of_all_threads.clear()


loads_without_data = release(torch.__version__) >= (2, 10)
"""Whether ``torch.load(map_location="meta")`` reads no data, and says where they lie; before, it reads all of them."""


def place_in_file(storage: torch.UntypedStorage) -> int:
    """Where a storage that was loaded without its data lies in its file; -1 where it is not known."""
    offset: int | None = getattr(storage, "_checkpoint_offset", None)
    return -1 if offset is None else offset


def described(storage: Any) -> tuple[str, int, torch.UntypedStorage]:
    """The name of a storage's class in a pickle, its number of elements there, and its memory."""
    if isinstance(storage, torch.storage.TypedStorage):
        return storage._pickle_storage_type(), storage._size(), storage._untyped_storage
    return "", storage.nbytes(), storage


def identity(storage: torch.UntypedStorage) -> int:
    """The same for storages that are the same memory."""
    return storage._cdata
