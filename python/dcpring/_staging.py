"""A copy of a state dict in one buffer that is kept from save to save.

The buffer belongs to its Checkpointer. It is allocated by the first stage(), in pinned memory where there is an
accelerator, and again only for a state that does not fit. What stage() returns lives in it until the next stage().
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcpring.torchside.tensors import Shard, ShardedTensor, keep_attributes, with_shards

_ALIGNMENT = 64


class StagingBuffer:
    """Copies states so that training may go on while they are written.

    Attributes:
        allocations: how often memory was taken.
        size_bytes: what is held now.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def size_bytes(self) -> int:
        return self._memory.numel()

    def stage(self, state: Any) -> Any:
        """The same tree with every tensor copied into the buffer, and everything else copied deeply."""
        sources: list[Tensor] = []
        _each_local(state, sources.append)
        needed = sum(_padded(tensor) for tensor in sources)
        if needed > self.size_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # never two at a time
            pinned = torch.accelerator.is_available()
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
            self.allocations += 1
        self._used = 0
        staged = self._copy(state)
        if any(tensor.device.type != "cpu" for tensor in sources):
            torch.accelerator.synchronize()
        return staged

    def release(self) -> None:
        """Gives the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            local = self._take(value.to_local())
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        if isinstance(value, ShardedTensor):
            shards = [Shard(self._take(shard.tensor), copy.copy(shard.metadata)) for shard in value.local_shards()]
            return with_shards(value, shards)
        if isinstance(value, Tensor):
            return keep_attributes(value, self._take(value))
        if type(value) is dict:
            return {key: self._copy(part) for key, part in value.items()}
        if type(value) is list:
            return [self._copy(part) for part in value]
        return copy.deepcopy(value)

    def _take(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not _fits(tensor):
            return tensor.clone()
        place = self._memory[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._used += _padded(tensor)
        return place.copy_(tensor, non_blocking=True)


def _each_local(value: Any, visit: Any) -> None:
    """Calls ``visit`` with every tensor that this rank holds in plain memory."""
    if isinstance(value, DTensor):
        visit(value.to_local())
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            visit(shard.tensor)
    elif isinstance(value, Tensor):
        visit(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            _each_local(part, visit)
    elif type(value) is list:
        for part in value:
            _each_local(part, visit)


def _fits(tensor: Tensor) -> bool:
    """Plain memory; sparse, quantized and subclassed tensors are cloned."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT if _fits(tensor) else 0
