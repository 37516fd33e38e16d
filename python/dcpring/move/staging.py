"""A copy of a state dict in memory that is kept from save to save.

The memory belongs to its Checkpointer's StagingBuffer. It is taken by the first stage(), pinned where tensors lie on
an accelerator, and again only for a state that does not fit. What stage() returns lives in it until the next stage().
All runs in the thread that calls; what it returns may be read by any.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dcpring.base.memory import is_lazy_view, same_memory
from dcpring.move.device import copy_to_host, on_accelerator, ordinary_memory, padded, parts_of, pinned_memory
from dcpring.names.diff import check_state_dict
from dcpring.plan.flatten import is_terminal
from dcpring.torchside import accelerators
from dcpring.torchside.accelerators import is_accelerator
from dcpring.torchside.tensors import PLAIN_TYPES, ShardedTensor, local_tensor, with_local, with_shards

_LARGEST_BLOCK = 1 << 30
_SMALLEST_BLOCK = 1 << 20
"""Of pinned memory, but for a larger tensor: torch takes powers of two, and a state of 65 GB is not to take 128."""

_PART_BYTES = 8 << 20
"""Tensors that are no stretch of memory are copied by as much, for each of which torch takes some on the device."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class StagingBuffer:
    """Copies states so that training may go on while they are written.

    What is saved of the copy is what would have been saved of the state: the same names, values and properties, and
    tensors that are tied are copied once and stay tied. Of the properties ``pin_memory`` tells of the copy, and so do
    the ``strides`` that torch 2.15 adds, where a tensor has gaps in memory or is a conjugate or negative view.

    Attributes:
        allocations: how often memory was taken.
        size_bytes: what is held now.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._ordinary = _Memory(pinned=False)
        self._pinned = _Memory(pinned=True)

    @property
    def size_bytes(self) -> int:
        return self._ordinary.size_bytes + self._pinned.size_bytes

    def stage(self, state: Any) -> Any:
        """The same tree with every tensor copied to the host, and everything else copied deeply; mappings are dicts.

        It waits twice for each accelerator on which the state has tensors: before it copies, for all that any thread
        has given to any of its streams, so that what training still writes is there; and afterwards, so that training
        may write again. Accelerators without a tensor of the state are not waited for.
        """
        opened = _Opened(state)
        places = self._places(opened.tensors)
        devices = _Devices()
        try:
            for device in {tensor.device for tensor in opened.tensors}:
                devices.meet(device)
            with torch.no_grad():
                hosts = [_copied(tensor.detach(), place) for tensor, place in zip(opened.tensors, places, strict=True)]
                return _Copier(opened, hosts, devices).copy(opened.tree)
        finally:
            devices.wait()  # after an error too: the memory will be used again

    def release(self) -> None:
        """Gives the memory back to the system, the pinned memory that torch would keep included."""
        self._ordinary.release()
        self._pinned.release()

    def _places(self, tensors: list[Tensor]) -> list[Tensor]:
        """Bytes of host memory for each of the tensors."""
        places = [_NOTHING] * len(tensors)
        pinned = [on_accelerator(tensor) for tensor in tensors]
        for memory in (self._ordinary, self._pinned):
            chosen = [n for n, is_pinned in enumerate(pinned) if is_pinned == memory.is_pinned]
            self.allocations += memory.make_room([tensors[n].nbytes for n in chosen])
            for n, place in zip(chosen, memory.places, strict=True):
                places[n] = place
        return places


_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Devices:
    """The accelerators of one state, waited for when one is met first."""

    def __init__(self) -> None:
        self._met: set[torch.device] = set()

    def meet(self, device: torch.device) -> None:
        if is_accelerator(device) and device not in self._met:
            self._met.add(device)
            accelerators.active.synchronize(device)

    def wait(self) -> None:
        for device in self._met:
            accelerators.active.synchronize(device)


# ---- memory ----


class _Memory:
    """Blocks of host memory; pinned, or ordinary.

    Attributes:
        places: room for each of the sizes that were asked for last.
    """

    def __init__(self, pinned: bool) -> None:
        self.is_pinned = pinned
        self.places: list[Tensor] = []
        self._blocks: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def make_room(self, sizes: list[int]) -> bool:
        """Finds ``places``. True: new memory was taken, after the old was given back: there are never two at a time."""
        rooms = [padded(size) for size in sizes]
        placed = fitted(rooms, [block.numel() for block in self._blocks])
        is_new = placed is None
        if placed is None:
            self.release()
            wanted = blocks_for(rooms) if self.is_pinned else [sum(rooms)]
            self._blocks = [(pinned_memory if self.is_pinned else ordinary_memory)(size) for size in wanted]
            placed = fitted(rooms, wanted)
            assert placed is not None
        self.places = [
            self._blocks[number].narrow(0, start, size) if size else _NOTHING
            for (number, start), size in zip(placed, sizes, strict=True)
        ]
        return is_new

    def release(self) -> None:
        had = bool(self._blocks)
        self._blocks, self.places = [], []
        if had and self.is_pinned:
            accelerators.active.give_back_pinned()


def fitted(sizes: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where so many bytes go, (block, offset) by size: the largest first, each into the first block that has room.

    None where they do not fit. The same sizes fit into the same blocks again, and into what ``blocks_for`` says.
    """
    placed = [(0, 0)] * len(sizes)
    used = [0] * len(blocks)
    order = _largest_first(sizes)
    smallest = sizes[order[-1]] if order else 0
    first = 0  # blocks before it are full
    for index in order:
        while first < len(blocks) and blocks[first] - used[first] < smallest:
            first += 1
        number = next((n for n in range(first, len(blocks)) if blocks[n] - used[n] >= sizes[index]), None)
        if number is None:
            return None
        placed[index] = (number, used[number])
        used[number] += sizes[index]
    return placed


def blocks_for(sizes: Sequence[int]) -> list[int]:
    """Powers of two in which ``fitted`` finds room for so many bytes each, with little left over."""
    blocks: list[int] = []
    left: list[int] = []
    rest = sum(sizes)
    for index in _largest_first(sizes):
        size = sizes[index]
        number = next((n for n, room in enumerate(left) if room >= size), None)
        if number is None:
            most = min(_LARGEST_BLOCK, 1 << (max(rest, 1).bit_length() - 1))
            blocks.append(max(_SMALLEST_BLOCK, most, 1 << (size - 1).bit_length()))
            left.append(blocks[-1])
            number = -1
        left[number] -= size
        rest -= size
    return blocks


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Those of any size, by number."""
    return sorted((index for index, size in enumerate(sizes) if size), key=lambda index: -sizes[index])


# ---- the tree ----


class _Opened:
    """A state as the planner opens it: mappings, and lists that hold tensors or mappings.

    Attributes:
        tree: dicts and lists, and the values that the planner will see.
        tensors: all that this rank holds in plain memory; of tied ones the first.
        places: which of these a tensor is, by its id().
    """

    def __init__(self, state: Any) -> None:
        self._plain: dict[int, Tensor] = {}
        try:
            self.tree = self._open(state)
        except RecursionError:
            check_state_dict(state)
            raise
        found = list(self._plain.values())
        same = same_memory(dict(enumerate(found)))
        distinct = [n for n in range(len(found)) if n not in same]
        numbers = {n: number for number, n in enumerate(distinct)}
        self.tensors = [found[n] for n in distinct]
        self.places = {id(tensor): numbers[same.get(n, n)] for n, tensor in enumerate(found)}

    def _open(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._note(value)
        elif isinstance(value, Mapping):
            return {key: self._open(part) for key, part in value.items()}
        elif isinstance(value, list) and not is_terminal(value):
            return [self._open(part) for part in value]
        return value

    def _note(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            self._note(local_tensor(tensor))
        elif isinstance(tensor, ShardedTensor):
            for shard in tensor.local_shards():
                self._note(shard.tensor)
        elif _is_plain(tensor):
            self._plain[id(tensor)] = tensor


def _is_plain(value: Tensor) -> bool:
    """Whether it is plain memory; sparse, quantized and subclassed tensors know themselves how they are copied."""
    return (
        type(value) in PLAIN_TYPES
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
        and bool(value.data_ptr() or not value.numel())
    )


class _Copier:
    """Copies a state, of which the plain tensors are copied already."""

    def __init__(self, opened: _Opened, hosts: list[Tensor], devices: _Devices) -> None:
        self._places, self._hosts = opened.places, hosts
        self._given = [False] * len(hosts)
        self._deep = _DeepCopies(devices)

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {key: self.copy(part) for key, part in value.items()}
        if kind is list and not is_terminal(value):
            return [self.copy(part) for part in value]
        if isinstance(value, Tensor):
            return self._tensor(value)
        return value if kind in _ATOMS else self._deep.copy(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return with_local(tensor, self._tensor(local_tensor(tensor)))
        if isinstance(tensor, ShardedTensor):
            return with_shards(tensor, [self._tensor(shard.tensor) for shard in tensor.local_shards()])
        if tensor.is_meta:
            return tensor
        place = self._places.get(id(tensor))
        if place is None:
            made = tensor.detach().cpu() if on_accelerator(tensor) else tensor.detach().clone()
        else:
            made = self._hosts[place].detach() if self._given[place] else self._hosts[place]
            self._given[place] = True
        return _like(made, tensor)


def _copied(tensor: Tensor, place: Tensor) -> Tensor:
    """The tensor's values in host memory, in its own order of memory where it has no gaps."""
    flat = place.view(tensor.dtype)
    if not is_lazy_view(tensor):
        if tensor.is_contiguous():
            return flat.view(tensor.shape).copy_(tensor, non_blocking=True)
        if _is_dense(tensor):
            return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor, non_blocking=True)
    limit = _PART_BYTES if on_accelerator(tensor) else max(tensor.nbytes, 1)
    start = 0
    for part in parts_of(tensor, limit):
        copy_to_host(part, flat[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return flat.view(tensor.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each its own part of it."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _like(made: Tensor, tensor: Tensor) -> Tensor:
    """What planners look at beside the values: whether there is a gradient, and the attributes that say what a plain
    tensor is a part of (DCP's CheckpointableTensor)."""
    if tensor.requires_grad:
        made.requires_grad_()
    if tensor.__dict__:  # what a class's copy has of its own it keeps
        made.__dict__.update({**tensor.__dict__, **made.__dict__})
    return made


class _DeepCopies(TorchFunctionMode):
    """Deep copies of objects, which may hold tensors anywhere, on any device."""

    def __init__(self, devices: _Devices) -> None:
        super().__init__()
        self._devices = devices
        self._memo: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        with self:
            return copy.deepcopy(value, self._memo)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor):
                self._devices.meet(tensor.device)
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:  # which torch refuses, but would pickle
            tensor, memo = args
            memo[id(tensor)] = func(tensor.detach(), memo).requires_grad_()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
