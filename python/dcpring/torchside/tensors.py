"""Kinds of tensors: which are plain, what DTensors and ShardedTensors are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring.torchside.versions import function, optional

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class _Absent:
    """Stands for a class that this torch does not have: nothing is an instance of it."""


if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
else:
    ShardedTensor = optional("torch.distributed._shard.sharded_tensor", "ShardedTensor", _Absent)
    Shard = optional("torch.distributed._shard.sharded_tensor", "Shard", _Absent)

local_shape_and_offset: Callable[[Any, Any, Any], tuple[tuple[int, ...], tuple[int, ...]]] = function(
    "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"
)
"""Lengths and offsets of this rank's part of a DTensor: its shape, mesh and placements."""


def local_tensor(value: DTensor) -> Tensor:
    """This rank's part of a DTensor, as it is: ``to_local`` gives another object, or waits for it."""
    return value._local_tensor


def with_shards(value: ShardedTensor, shards: list[Shard]) -> ShardedTensor:
    """A ShardedTensor like another one, with these shards on this rank."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=value.metadata(), process_group=value._process_group
    )


def narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """The box of a tensor that begins at ``offsets``; a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=False)):
        if length < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, length)
    return tensor
