"""Kinds of tensors: which are plain, what DTensors and ShardedTensors are made of.

A tensor is *plain* if stock takes it for what it looks like: all of a tensor, whose values are its memory. Its type
alone does not tell: since torch 2.14 a ``torch.Tensor`` with certain attributes (``CheckpointableTensor``) stands for
shards of a larger one. So one that has any attributes is shown to stock, whose word holds for what is not known here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from dcpring.torchside import versions
from dcpring.torchside.composed import Composed
from dcpring.torchside.dcp import create_write_items
from dcpring.torchside.versions import optional

PLAIN_TYPES: frozenset[type] = frozenset({Tensor, torch.nn.Parameter})


class _Absent:
    """Stands for a class that this torch does not have: nothing is an instance of it."""


if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
else:
    ShardedTensor = optional("torch.distributed._shard.sharded_tensor", "ShardedTensor", _Absent)
    Shard = optional("torch.distributed._shard.sharded_tensor", "Shard", _Absent)

StridedShard: Any = optional("torch.distributed.tensor.placement_types", "_StridedShard", _Absent)
"""The placement that cuts a dimension into pieces, and takes a share of each."""

CUTS_AS_ONE = versions.release(torch.__version__) < (2, 10)
"""Whether ``_StridedShard`` cuts into all shares of all pieces at once, with one rounding; later it cuts twice."""


def are_plain(values: Sequence[Any]) -> list[bool]:
    """For each value, whether it is a plain tensor, and this torch is one whose plain tensors are known."""
    if not versions.tested:
        return [False] * len(values)
    return [type(value) in PLAIN_TYPES and (not value.__dict__ or _is_whole(value)) for value in values]


def is_plain(value: Any) -> bool:
    """``are_plain`` of one value."""
    return are_plain((value,))[0]


def is_whole(value: Any) -> bool:
    """Whether a value is a tensor that stock takes for what it looks like; one such is plain if torch is known."""
    return type(value) in PLAIN_TYPES and (not value.__dict__ or _is_whole(value))


_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)
"""What stock raises for a tensor that it cannot save."""


def _is_whole(tensor: Tensor) -> bool:
    try:
        items = create_write_items("", tensor)
    except _REFUSALS:
        return False
    data = items[0].tensor_data if len(items) == 1 else None
    return (
        data is not None
        and items[0].type == WriteItemType.TENSOR
        and data.size == data.chunk.sizes == tensor.size()
        and not any(data.chunk.offsets)
    )


def global_size(value: Any) -> torch.Size:
    """The size of the whole of which a tensor is this rank's part, as stock has it."""
    if not isinstance(value, DTensor | ShardedTensor | Composed) and not is_whole(value):
        with contextlib.suppress(*_REFUSALS):
            for item in create_write_items("", value):
                if item.tensor_data is not None:
                    return item.tensor_data.size
    size: torch.Size = value.size()
    return size


def local_tensor(value: DTensor) -> Tensor:
    """This rank's part of a DTensor, as it is: ``to_local`` gives another object, or waits for it."""
    return value._local_tensor


def order_of_cuts(value: DTensor) -> tuple[Any, bool]:
    """What a DTensor says of the order in which mesh dimensions cut it, besides its placements.

    Returns:
        For each dimension of the tensor that is cut its number and the mesh dimensions, the first cut first, or None;
        and whether strided shards stand for such an order, where they can.
    """
    spec = value._spec
    encoded = getattr(spec, "use_strided_shard_as_shard_order", None)
    return getattr(spec, "shard_order", None), encoded is not False


def version(value: Tensor) -> int:
    """How often a tensor was changed in place; 0 where that is not counted."""
    return 0 if value.is_inference() else value._version


_counted = attrgetter("_version")


def versions_of(values: Sequence[Tensor]) -> list[int]:
    """``version`` of all; 0 of those whose class does not say."""
    try:
        return list(map(_counted, values))
    except Exception:
        return [getattr(value, "_version", 0) if not value.is_inference() else 0 for value in values]


def is_frozen(value: Any) -> bool:
    """Whether a value says of itself that it is not trained: a parameter without a gradient."""
    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def frozen_parameter(tensor: Tensor) -> Tensor:
    """The same memory as a value of which ``is_frozen`` holds. A DTensor becomes one itself."""
    if isinstance(tensor, DTensor):
        tensor._is_param = True  # as Parameter does with another view of it
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=False)


def with_local(value: DTensor, local: Tensor) -> DTensor:
    """A DTensor like another one, with this part on this rank, wherever that lies.

    ``DTensor.from_local`` would bring it to the mesh's device. Some versions take the offset of the local tensor for
    the DTensor's, and one that has an offset is pickled as if it had memory of its own, which crashes.
    """
    at_start = local if local.storage_offset() == 0 else local.as_strided(local.size(), local.stride(), 0)
    made: DTensor = DTensor(at_start, value._spec, requires_grad=value.requires_grad)
    made._local_tensor = local
    return made


def with_shards(value: ShardedTensor, tensors: Sequence[Tensor]) -> ShardedTensor:
    """A ShardedTensor like another one, with these as its shards on this rank, wherever they lie.

    What ShardedTensor offers to make one refuses shards that need a gradient, are pinned, or lie elsewhere than its
    metadata says.
    """
    kind = {"dtype": value.dtype, "layout": value.layout, "pin_memory": False, "requires_grad": value.requires_grad}
    made = ShardedTensor.__new__(ShardedTensor, value.sharding_spec(), value.size(), **kind)
    shards = [copy.copy(shard) for shard in value.local_shards()]
    for shard, tensor in zip(shards, tensors, strict=True):
        shard.tensor = tensor
    made.__dict__.update(value.__dict__, _local_shards=shards, _sharded_tensor_id=None)
    return made


def narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The box of a tensor that begins at ``offsets``; a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=False)):
        if length < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor


_COPIED_TOGETHER = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16}
    | {torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""Of lists of one of these dtypes, all on one device, torch makes one kernel; it raises for some others."""


def start_copies(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, of the same dtype, on that one's current stream.

    This may be under way when it returns. On a device contiguous tensors are copied together. None is a lazy view.
    """
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in _COPIED_TOGETHER and target.is_contiguous() and source.is_contiguous():
            into, values = together.setdefault(target.dtype, ([], []))
            into.append(target)
            values.append(source)
        else:
            target.copy_(source, non_blocking=True)
    for into, values in together.values():
        torch._foreach_copy_(into, values, non_blocking=True)
