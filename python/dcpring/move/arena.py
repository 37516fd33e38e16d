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
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from sys import getrefcount

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.base.memory import is_dense
from dcpring.move.device import Elements, on_accelerator, ordinary_memory, padded, pinned_memory, say_cannot_pin
from dcpring.torchside import accelerators
from dcpring.torchside.storage import map_shared, uses
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
        self._host, self._pinned = _Host(self._is_shared), _Pinned()
        self._kept: _Kept | None = None
        self._process = os.getpid()

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return self._host.size_bytes + self._pinned.size_bytes

    @property
    def is_used(self) -> bool:
        """Whether anybody but the arena refers to a tensor in it, or to a view of one."""
        return self._kept is not None and self._kept.is_used(self._storages())

    def tensors_for(self, sources: list[Tensor], handles: _C.Tensors) -> tuple[list[Tensor], _C.Tensors]:
        """A tensor in host memory for each of the sources, in their order of memory where they have no gaps.

        They are those of the call before where all have the same layout and lie on devices of the same kind.
        """
        if self._process != os.getpid():
            self._begin()
        kept = self._kept
        has_moved = kept is not None and kept.addresses != _addresses(self._storages())
        if kept is None or has_moved or kept.kinds != handles.kinds() or not _C.tensors_fit(handles, kept.handles):
            self._kept = kept = None  # before memory is taken, so that there are never two
            kept = self._kept = self._made_for(sources, handles.kinds())
        return kept.tensors, kept.handles

    def release(self) -> None:
        """Gives the memory back to the system, the pinned memory that torch would keep included."""
        if self._process == os.getpid() and not self.is_used:
            self._kept = None
            self._host.give_back()
        self._kept = None
        self._host.release()
        self._pinned.release()

    def _made_for(self, sources: list[Tensor], kinds: bytes) -> _Kept:
        made: list[Tensor] = [_NOTHING] * len(sources)
        hosts: list[int] = []
        elsewhere: list[int] = []
        for n, source in enumerate(sources):
            (elsewhere if on_accelerator(source) else hosts).append(n)
        groups: list[tuple[_Memory, list[int]]] = [(self._host, hosts), (self._pinned, elsewhere)]
        is_one_mapping = self._is_shared and accelerators.active.can_pin()
        if is_one_mapping:  # in which small tensors of a device lie side by side, as they do in blocks
            groups = [(self._host, sorted(elsewhere, key=lambda n: -sources[n].nbytes) + hosts)]
        for memory, chosen in groups:
            sizes = [sources[n].nbytes for n in chosen]
            self.allocations += memory.make_room(sizes, len(elsewhere) if is_one_mapping else 0)
            for n, (block, start) in zip(chosen, memory.places, strict=True):
                made[n] = _like(sources[n], memory.blocks[block], start)
        if is_one_mapping:
            self._host.pin()
        return _Kept(made, kinds, self._storages())

    def _storages(self) -> list[torch.UntypedStorage]:
        return [*self._host.storages, *self._pinned.storages]


def _addresses(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    return [storage.data_ptr() for storage in storages]


class _Kept:
    """Tensors in an arena, and how often each was referred to before anybody else had it.

    Attributes:
        addresses: of the memory, which torch moves where a tensor in it goes to a process that cannot map it.
    """

    def __init__(self, tensors: list[Tensor], kinds: bytes, storages: Sequence[torch.UntypedStorage]) -> None:
        self.tensors, self.kinds = tensors, kinds
        self.handles = _C.Tensors(tensors)
        self.addresses = _addresses(storages)
        self._references, self._uses = self._count(storages)

    def is_used(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        return self._count(storages) != (self._references, self._uses)

    def _count(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[int], list[int]]:
        return list(map(getrefcount, self.tensors)), list(map(uses, storages))


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
    """A block of memory, and whether anything lies in it."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__(memory)
        self.size_bytes = memory.numel()
        self.storage = memory.untyped_storage()
        self._uses = uses(self.storage)

    def is_free(self) -> bool:
        """Whether no tensor lies in it."""
        self.forget()
        return uses(self.storage) == self._uses


class _Memory:
    """Blocks of host memory.

    Attributes:
        places: (block, offset) for each of the sizes that were asked for last.
    """

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.places: list[tuple[int, int]] = []

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        return [block.storage for block in self.blocks]

    @property
    def size_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks)

    def make_room(self, sizes: list[int], to_pin: int) -> bool:
        """Finds ``places``. True: new memory was taken, after the old was given back: there are never two at a time.

        Where somebody still refers to a tensor of a layout before, the old memory lives as long as that.

        Args:
            to_pin: as many of the sizes, the first ones, are to be pinned where the memory is not from the start.
        """
        if not all(block.is_free() for block in self.blocks):
            self.release()
        return self._find(sizes, to_pin)

    def _find(self, sizes: list[int], to_pin: int) -> bool:
        raise NotImplementedError

    def release(self) -> None:
        self.blocks, self.places = [], []


class _Host(_Memory):
    """One block, of which the front may be pinned, in stretches of whole tensors: no copy may cross to another one.

    While memory is pinned the driver may hold up what training gives to the device.
    """

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self._take = shared_bytes if is_shared else ordinary_memory
        self._stretches: list[tuple[int, int]] = []
        self._pinned: list[tuple[int, int]] = []
        self._finalizers: list[Callable[[], object]] = []

    def pin(self) -> None:
        """Pins what is to be, until ``release`` is called or this is gone."""
        if all(any(a <= begin and end <= z for a, z in self._pinned) for begin, end in self._stretches):
            return
        self._unpin()
        start = self.blocks[0].storage.data_ptr()
        for begin, end in self._stretches:
            try:
                accelerators.active.pin(start + begin, end - begin)
            except RuntimeError as error:
                say_cannot_pin(end - begin, error)
                self._unpin()
                return
            unpin = weakref.finalize(self, _unpin, start + begin, os.getpid())  # before the blocks go
            unpin.atexit = False
            self._finalizers.append(unpin)
            self._pinned.append((begin, end))

    def _unpin(self) -> None:
        for unpin in self._finalizers:
            unpin()
        self._pinned, self._finalizers = [], []

    def release(self) -> None:
        self._unpin()
        super().release()

    def _find(self, sizes: list[int], to_pin: int) -> bool:
        self.places, self._stretches, total, begin = [], [], 0, 0
        for n, size in enumerate(sizes):
            if n < to_pin and begin < total and total + padded(size) - begin > _PIN_BYTES:
                self._stretches.append((begin, total))
                begin = total = -(-(total + padded(1)) // _PAGE) * _PAGE  # not side by side with what is before
            self.places.append((0, total))
            total += padded(size)
            if n == to_pin - 1 and begin < total:
                self._stretches.append((begin, total))
        if total <= self.size_bytes and self.blocks:
            return False
        places, stretches = self.places, self._stretches
        self.release()
        self.blocks, self.places, self._stretches = [_Block(self._take(total))], places, stretches
        return total > 0

    def give_back(self) -> None:
        """Lets the pages go that nobody needs: a forked process that has inherited the mapping would keep them."""
        self._unpin()
        for storage in self.storages:
            if storage.is_shared() and storage.nbytes():
                _C.advise(storage.data_ptr(), storage.nbytes(), "give back")


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


class _Pinned(_Memory):
    """Blocks that accelerators can copy to by themselves."""

    def _find(self, sizes: list[int], to_pin: int) -> bool:
        rooms = [padded(size) for size in sizes]
        placed = fitted(rooms, [block.size_bytes for block in self.blocks])
        is_new = placed is None
        if placed is None:
            self.release()
            wanted = blocks_for(rooms)
            self.blocks = [_Block(pinned_memory(size)) for size in wanted]
            placed = fitted(rooms, wanted)
            assert placed is not None
        self.places = [place if room else (0, 0) for place, room in zip(placed, rooms, strict=True)]
        if not self.blocks and rooms:  # of tensors without elements only
            self.blocks = [_Block(_NOTHING)]
        return is_new

    def release(self) -> None:
        had = self.size_bytes > 0
        super().release()
        if had:
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
