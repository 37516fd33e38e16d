"""Host memory for a copy of a state, taken once and used for copy after copy.

Copies of what lies in host memory go into one mapping. Where that is shared it has one descriptor, whatever the number
of tensors: a process that they are sent to maps it, and copies nothing. What lies on an accelerator goes to the front
of that, which is pinned; where torch cannot pin memory that is there, or nothing is shared, into pinned blocks of
torch's. An arena belongs to one StagingBuffer, which alone decides when its memory is written to again; memory that an
arena lets go of lives for as long as a tensor in it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import operator
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.base.memory import is_dense
from dcpring.move.device import Elements, on_accelerator, ordinary_memory, padded, pinned_memory, say_cannot_pin
from dcpring.torchside import accelerators
from dcpring.torchside.storage import map_shared
from dcpring.torchside.versions import say_once

_LARGEST_BLOCK = 1 << 30
_SMALLEST_BLOCK = 1 << 20
"""Of pinned memory, but for a larger tensor: torch takes powers of two, and a state of 65 GB is not to take 128."""

_HUGE_PAGE = 2 << 20

_PAGE = mmap.PAGESIZE

_PIN_BYTES = 1 << 30
"""Of memory that is there, pinned in one go, but for a larger tensor."""


class Arena:
    """Room for the tensors of one state, with the same tensors in it for as long as the states are alike.

    Args:
        is_shared: other processes can map the memory, but for pinned blocks of torch's. It takes longer to be had.

    Attributes:
        allocations: how often memory was taken.
    """

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._begin()

    def _begin(self) -> None:
        """With no memory. A forked child begins anew: it must not write to what its parent reads."""
        self.allocations = 0
        self._mapping, self._pinned = _Mapping(self._is_shared), _PinnedBlocks()
        self._kept: _Kept | None = None
        self._process = os.getpid()

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return self._mapping.size_bytes + self._pinned.size_bytes

    def tensors_for(self, sources: list[Tensor], handles: _C.Tensors) -> tuple[list[Tensor], _C.Tensors]:
        """A tensor in host memory for each of the sources, in their order of memory where they have no gaps.

        They are those of the call before where all have the same layout and lie on devices of the same kind.
        """
        if self._process != os.getpid():
            self._begin()
        kept, addresses = self._kept, [block.address for block in self._blocks()]
        is_same = kept is not None and kept.addresses == addresses and kept.kinds == handles.kinds()
        if kept is None or not is_same or not _C.tensors_fit(handles, kept.handles):
            self._kept = kept = None  # before memory is taken, so that there are never two
            kept = self._kept = self._made_for(sources, handles.kinds())
        return kept.tensors, kept.handles

    def release(self, is_free: bool = False) -> None:
        """Gives the memory back to the system, the pinned memory that torch would keep included.

        Args:
            is_free: also what a tensor lies in that somebody still refers to: nobody reads it any more.
        """
        self._kept = None
        if is_free and self._process == os.getpid():
            self._mapping.give_back()
        self._mapping.release()
        self._pinned.release()

    def _made_for(self, sources: list[Tensor], kinds: bytes) -> _Kept:
        hosts: list[int] = []
        elsewhere: list[int] = []
        for n, source in enumerate(sources):
            (elsewhere if on_accelerator(source) else hosts).append(n)
        is_one_mapping = self._is_shared and accelerators.active.can_pin()
        if is_one_mapping:  # in which small tensors of a device lie side by side, as they do in blocks
            front = sorted(elsewhere, key=lambda n: -sources[n].nbytes)
            groups: list[tuple[_Memory, list[int]]] = [(self._mapping, front + hosts)]
        else:
            front, groups = [], [(self._mapping, hosts), (self._pinned, elsewhere)]
        made = [_NOTHING] * len(sources)
        for memory, chosen in groups:
            places, is_new = memory.places_for([padded(sources[n].nbytes) for n in chosen], len(front))
            self.allocations += is_new
            for n, (block, start) in zip(chosen, places, strict=True):
                made[n] = _like(sources[n], memory.blocks[block], start)
        self._mapping.pin()
        return _Kept(made, kinds, _C.Tensors(made), [block.address for block in self._blocks()])

    def _blocks(self) -> list[_Block]:
        return [*self._mapping.blocks, *self._pinned.blocks]


class _Kept(NamedTuple):
    """Tensors in an arena.

    Attributes:
        kinds: of what they are copies of.
        addresses: of the memory, which torch moves where a tensor in it goes to a process that cannot map it.
    """

    tensors: list[Tensor]
    kinds: bytes
    handles: _C.Tensors
    addresses: list[int]


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _like(source: Tensor, block: _Block, start: int) -> Tensor:
    strides = source.stride() if is_dense(source) else _contiguous(source.shape)
    return block.of(source.dtype).as_strided(source.shape, strides, start // source.dtype.itemsize)


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * max(shape[d], 1)
    return strides


class _Block(Elements):
    """A block of memory."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__(memory)
        self.size_bytes = memory.numel()
        self.storage = memory.untyped_storage()

    @property
    def address(self) -> int:
        return self.storage.data_ptr()


class _Memory:
    """Blocks of host memory, which are taken anew where a layout does not fit into them."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)

    def places_for(self, sizes: list[int], to_pin: int) -> tuple[list[tuple[int, int]], bool]:
        """The block and the offset of each of the sizes, and whether new memory was taken for them.

        The old memory is given back before, so that there are never two at a time.

        Args:
            to_pin: as many of the sizes, the first ones, are to be pinned where the memory is not from the start.
        """
        places, wanted = self._laid_out(sizes, to_pin)
        had = [block.size_bytes for block in self.blocks]
        if len(had) >= len(wanted) and all(map(operator.ge, had, wanted)):
            return places, False
        self.release()
        self.blocks = [_Block(self._take(size)) for size in wanted]
        return places, sum(wanted) > 0

    def _laid_out(self, sizes: list[int], to_pin: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Where so many bytes go, and the blocks for that."""
        raise NotImplementedError

    def _take(self, size: int) -> Tensor:
        raise NotImplementedError

    def release(self) -> None:
        self.blocks = []


class _Mapping(_Memory):
    """One block, of which the front may be pinned, in stretches of whole tensors: no copy may cross to another one.

    While memory is pinned the driver may hold up what training gives to the device.
    """

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self._take = shared_bytes if is_shared else ordinary_memory  # type: ignore[method-assign]
        self._stretches: list[tuple[int, int]] = []
        self._pinned: dict[tuple[int, int], weakref.finalize[Any, Any]] = {}

    def _laid_out(self, sizes: list[int], to_pin: int) -> tuple[list[tuple[int, int]], list[int]]:
        self._stretches, places, total, begin = [], [], 0, 0
        for n, size in enumerate(sizes):
            if n < to_pin and begin < total and total + size - begin > _PIN_BYTES:
                self._stretches.append((begin, total))
                begin = total = -(-(total + padded(1)) // _PAGE) * _PAGE  # not side by side with what is before
            places.append((0, total))
            total += size
            if n == to_pin - 1 and begin < total:
                self._stretches.append((begin, total))
        return places, [total]

    def pin(self) -> None:
        """Pins what is to be, until ``release`` is called or this is gone."""
        if all(any(a <= begin and end <= z for a, z in self._pinned) for begin, end in self._stretches):
            return
        self._unpin()
        start = self.blocks[0].address
        for begin, end in self._stretches:
            try:
                accelerators.active.pin(start + begin, end - begin)
            except RuntimeError as error:
                say_cannot_pin(end - begin, error)
                self._unpin()
                return
            unpin = weakref.finalize(self, _unpin, start + begin, os.getpid())  # before the blocks go
            unpin.atexit = False
            self._pinned[begin, end] = unpin

    def _unpin(self) -> None:
        for unpin in self._pinned.values():
            unpin()
        self._pinned = {}

    def release(self) -> None:
        self._unpin()
        super().release()

    def give_back(self) -> None:
        """Lets the pages go that nobody needs: a forked process that has inherited the mapping would keep them."""
        self._unpin()
        for block in self.blocks:
            if block.storage.is_shared() and block.size_bytes:
                _C.advise(block.address, block.size_bytes, "give back")


def _unpin(address: int, process: int) -> None:
    """A forked child has no accelerator, and its parent's memory stays pinned."""
    if process == os.getpid():
        with contextlib.suppress(RuntimeError):  # an accelerator that has failed says so wherever it is asked
            accelerators.active.unpin(address)


def shared_bytes(size: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        descriptor, _ = shared_memory.create(size)
    except OSError as error:
        say_once(
            logging.WARNING,
            f"there is no shared memory to be had ({error}): a copy of the state goes into ordinary memory, and is "
            "copied once more where a process of its own saves it",
        )
        return ordinary_memory(size)
    try:
        storage = map_shared(descriptor, size)
    finally:
        os.close(descriptor)
    if size >= _HUGE_PAGE:
        _C.advise(storage.data_ptr(), size, "huge pages")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _PinnedBlocks(_Memory):
    """Blocks that accelerators can copy to by themselves."""

    def _laid_out(self, sizes: list[int], to_pin: int) -> tuple[list[tuple[int, int]], list[int]]:
        places, wanted = packed(sizes)
        return places, wanted or [0] * bool(sizes)  # of tensors without elements only

    def _take(self, size: int) -> Tensor:
        return pinned_memory(size) if size else _NOTHING

    def release(self) -> None:
        had = self.size_bytes > 0
        super().release()
        if had:
            accelerators.active.give_back_pinned()


def packed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Blocks of powers of two in which so many bytes each have room, with little left over; and their places.

    Each goes into the first block that has room, the largest first. A place is the number of the block, and the offset
    in it.
    """
    places = [(0, 0)] * len(sizes)
    blocks: list[int] = []
    used: list[int] = []
    rest, first = sum(sizes), 0  # blocks before the first have no room for the smallest
    order = sorted(filter(sizes.__getitem__, range(len(sizes))), key=lambda index: -sizes[index])
    for index in order:
        size = sizes[index]
        while first < len(blocks) and blocks[first] - used[first] < sizes[order[-1]]:
            first += 1
        number = next((n for n in range(first, len(blocks)) if blocks[n] - used[n] >= size), len(blocks))
        if number == len(blocks):
            most = min(_LARGEST_BLOCK, 1 << (rest.bit_length() - 1))
            blocks.append(max(_SMALLEST_BLOCK, most, 1 << (size - 1).bit_length()))
            used.append(0)
        places[index] = number, used[number]
        used[number] += size
        rest -= size
    return places, blocks
