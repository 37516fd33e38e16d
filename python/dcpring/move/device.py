"""Between accelerators and host memory: a few reusable pinned buffers, copies overlapped with file I/O.

``Downloader`` is for saves: whoever iterates works on a piece in one buffer while the next piece is being copied into
the other. ``Uploader`` is for loads: some buffers are read into while others are being copied from. Copies are started
by the thread that uses them, and none is under way when they are done, whether or not they succeed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from dcpring.base.memory import is_lazy_view
from dcpring.base.windows import split_box, windows
from dcpring.torchside import accelerators
from dcpring.torchside.accelerators import is_accelerator
from dcpring.torchside.tensors import PLAIN_TYPES, narrowed, start_copies

logger = logging.getLogger("dcpring")

DEFAULT_PIECE_BYTES = 8 << 20
"""Of each of a Downloader's two buffers, where the save does not say."""

_ALIGNMENT = 64
"""Copies in a buffer start where any dtype may."""

_LEAST_ALONE_BYTES = 256 << 10
"""Of tensors that cross the link one by one: the call for a smaller one takes longer than the link."""


def on_accelerator(tensor: Tensor) -> bool:
    return is_accelerator(tensor.device)


def padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pinned_memory(size: int) -> Tensor:
    """Bytes of host memory: pinned, or ordinary with a warning where there is no pinned memory to be had."""
    try:
        return accelerators.active.pinned(size)
    except RuntimeError as error:
        say_cannot_pin(size, error)
        return ordinary_memory(size)


def say_cannot_pin(size: int, error: RuntimeError) -> None:
    logger.warning(
        "%d MiB of pinned host memory cannot be had (%s): copies go through ordinary memory, which takes longer; "
        "see how much the machine has left, and how much the container may use",
        *(-(-size >> 20), str(error).partition("\n")[0]),
    )


def ordinary_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Elements:
    """A stretch of memory, seen as elements of any dtype."""

    def __init__(self, memory: Tensor) -> None:
        self._views = {memory.dtype: memory}
        self._memory = memory

    def of(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._views:
            self._views[dtype] = self._memory.view(dtype)
        return self._views[dtype]


@dataclass
class _Side:
    """One of two buffers, and the copies that are under way into it or from it.

    Attributes:
        memory: its bytes.
        used: how many of the bytes.
        events: behind the copies.
    """

    memory: Elements
    used: int = 0
    events: list[torch.Event] = field(default_factory=list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count, start = math.prod(shape), self.used
        self.used += padded(count * dtype.itemsize)
        flat = self.memory.of(dtype).narrow(0, start // dtype.itemsize, count)
        return flat if len(shape) == 1 else flat.view(shape)

    def wait(self) -> None:
        """Until nothing is under way; then the buffer is empty."""
        for event in self.events:
            event.synchronize()
        self.events, self.used = [], 0


class Room:
    """Memory of a device in which small tensors lie side by side, as their host copies do, to cross the link in one.

    It is used on one stream at a time, whose order is all that keeps copies apart. It is of the stream that is current
    for the device when it is made: what uses it on another one waits for that first.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._memory = Elements(torch.empty(padded(size_bytes), dtype=torch.uint8, device=device))

    @classmethod
    def on(cls, device: torch.device, size_bytes: int) -> Room | None:
        """One if the device has the memory. Without it tensors go one by one."""
        try:
            return cls(device, size_bytes)
        except RuntimeError:
            return None

    def to_host(self, sources: list[Tensor], hosts: list[Tensor]) -> None:
        """Starts copies as ``copy_to_host`` does. What lies between the dense hosts in their memory is overwritten."""
        buffer, within, counterparts = self._opposite(hosts)
        copy_to_host(sources, counterparts)
        buffer.copy_(within, non_blocking=True)

    def from_host(self, targets: list[Tensor], hosts: list[Tensor]) -> None:
        """Starts copies from dense tensors that lie in one memory."""
        buffer, within, counterparts = self._opposite(hosts)
        within.copy_(buffer, non_blocking=True)
        start_copies(targets, counterparts)

    def _opposite(self, hosts: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The stretch of host memory in which tensors lie, as much of the room, and where they are in that."""
        starts = [host.storage_offset() * host.itemsize for host in hosts]
        begin = min(starts) // _ALIGNMENT * _ALIGNMENT
        size = max(start + host.nbytes for start, host in zip(starts, hosts, strict=True)) - begin
        buffer = torch.empty(0, dtype=torch.uint8).set_(hosts[0].untyped_storage(), begin, (size,), (1,))
        counterparts = [
            self._memory.of(host.dtype).as_strided(host.shape, host.stride(), (start - begin) // host.itemsize)
            for start, host in zip(starts, hosts, strict=True)
        ]
        return buffer, self._memory.of(torch.uint8)[:size], counterparts


def _cross_together(tensors: list[Tensor]) -> bool:
    return len(tensors) > 1 and sum(tensor.nbytes for tensor in tensors) < len(tensors) * _LEAST_ALONE_BYTES


def side_by_side(hosts: Mapping[int, Tensor], limit: int) -> Iterator[list[int]]:
    """Runs of dense tensors that follow each other in one memory with nothing in between, of at most so many bytes."""
    run: list[int] = []
    begin = end = 0
    memory = -1
    for key, host in sorted(hosts.items(), key=lambda pair: pair[1].data_ptr()):
        start, storage = host.data_ptr(), host.untyped_storage().data_ptr()
        if run and (storage != memory or start - end >= _ALIGNMENT or start + host.nbytes - begin > limit):
            yield run
            run = []
        if not run:
            begin, memory = start, storage
        run.append(key)
        end = start + host.nbytes
    if run:
        yield run


def is_small(tensor: Tensor) -> bool:
    """Sparse tensors do not say how many bytes they have."""
    return tensor.layout == torch.strided and tensor.nbytes < _LEAST_ALONE_BYTES


# ---- from accelerators ----


@dataclass
class HostCopies:
    """Host copies of some tensors, valid until the next piece is asked for.

    Either whole tensors (``part_offset`` 0 and shapes as on the device), or one contiguous part of one tensor.

    Attributes:
        indices: which tensors.
        tensors: their copies; a part is one-dimensional.
        part_offset: bytes of the tensor before the part.
        whole: False for a part.
    """

    indices: list[int]
    tensors: list[Tensor]
    part_offset: int = 0
    whole: bool = True


class Downloader:
    """Copies tensors of accelerators to the host, piece by piece, over all the tensors and devices of a save.

    The tensors are as they are when the work is done that this thread has given to the current stream of their device
    before it calls ``pieces``. Who writes to them on another stream makes the current one wait for that, as before any
    other use. Copies run on another stream. Beside the two buffers on the host they take memory on the device:
    as much for tensors that are not contiguous, and one buffer's for small ones.

    Args:
        piece_bytes: of each buffer; rounded down to a power of two, as torch would round it up.
    """

    def __init__(self, piece_bytes: int = DEFAULT_PIECE_BYTES) -> None:
        self._piece_bytes = 1 << (max(piece_bytes, _ALIGNMENT).bit_length() - 1)
        self._sides: list[_Side] = []

    def pieces(self, tensors: list[Tensor]) -> Generator[HostCopies, None, None]:
        """The tensors, all of one device, in order. Close it where not all pieces are asked for."""
        if not tensors:
            return
        if not self._sides:
            self._sides = [_Side(Elements(pinned_memory(self._piece_bytes))) for _ in range(2)]
        device = tensors[0].device
        room = Room.on(device, self._piece_bytes) if sum(map(is_small, tensors)) > 1 else None
        stream = accelerators.active.copy_stream(device)
        stream.wait_stream(accelerators.active.current_stream(device))
        pending: tuple[_Side, HostCopies] | None = None
        try:
            for turn, (piece, sources) in enumerate(self._cut(tensors)):
                side = self._sides[turn % 2]
                self._start(stream, side, piece, sources, room)
                if pending is not None:
                    yield self._arrived(*pending)
                pending = (side, piece)
            if pending is not None:
                yield self._arrived(*pending)
        finally:
            stream.synchronize()  # after an error copies are under way that have no event
            for side in self._sides:
                side.wait()

    def _cut(self, tensors: list[Tensor]) -> Iterator[tuple[HostCopies, list[Tensor]]]:
        """Pieces with their device sources; small tensors share a piece, large ones come in parts."""
        for window in windows(range(len(tensors)), lambda index: padded(tensors[index].nbytes), self._piece_bytes):
            chosen = [tensors[index] for index in window]
            if chosen[0].nbytes > self._piece_bytes:
                yield from self._cut_large(window[0], chosen[0])
            else:
                yield HostCopies(window, []), chosen

    def _cut_large(self, index: int, tensor: Tensor) -> Iterator[tuple[HostCopies, list[Tensor]]]:
        start = 0
        for part in parts_of(tensor, self._piece_bytes):
            yield HostCopies([index], [], start, whole=False), [part]
            start += part.nbytes

    @staticmethod
    def _start(stream: torch.Stream, side: _Side, piece: HostCopies, sources: list[Tensor], room: Room | None) -> None:
        side.wait()
        event = accelerators.active.event(sources[0].device)
        with stream:
            hosts = [side.take(tuple(source.shape), source.dtype) for source in sources]
            if room is not None and _cross_together(hosts):
                room.to_host(sources, hosts)
            else:
                copy_to_host(sources, hosts)
            piece.tensors += hosts if piece.whole else [host.view(-1) for host in hosts]
        event.record(stream)
        side.events.append(event)

    @staticmethod
    def _arrived(side: _Side, piece: HostCopies) -> HostCopies:
        for event in side.events:
            event.synchronize()
        return piece


def parts_of(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views of a tensor that follow each other in row-major order, of at most ``limit`` bytes (or one element)."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max(limit // tensor.element_size(), 1))
        return
    for offsets, lengths in split_box(tuple(tensor.shape), limit // tensor.element_size()):
        yield narrowed(tensor, offsets, lengths)


def copy_to_host(sources: list[Tensor], hosts: list[Tensor]) -> None:
    """Starts copies on the sources' current streams; the sources must live until they are done.

    Conjugate and negative views become what they stand for on the device: torch would copy the bytes behind them, and
    change them on the host without waiting for their arrival. What is made for that, and for tensors that are not
    contiguous, is of the same stream, whose later work alone can get that memory.
    """
    start_copies(hosts, [source.resolve_conj().resolve_neg() for source in sources])


# ---- to accelerators ----


HOST_BYTES = 32 << 20
"""Host memory that an Uploader takes at most, and that a load handles at once of whatever else passes through it."""

WINDOWS = 4
"""Of an Uploader for accelerators: two that are read into, and two that are copied from."""

T = TypeVar("T")


class Uploader:
    """Host memory that tensors are read into, window after window, and copied from to where they belong.

        with Uploader(targets, ...) as uploader:
            for number, window in enumerate(...):  # of at most uploader.window_bytes, each tensor padded()
                uploader.turn(number)
                hosts = uploader.take(number, [(shape, dtype), ...])
                ...  # read
                uploader.send(number, zip(parts of the targets, hosts))

    Copies to an accelerator go on its current stream, so what this thread does there next sees what was loaded; when
    the ``with`` is left they are done, and the memory is let go of.

    Args:
        targets: all that will be copied to.
        needed_bytes: of all of them, each padded.

    Attributes:
        window_bytes: what can be taken at once.
        ahead: windows that may be read into before the first of them is sent; 0: none.
    """

    def __init__(self, targets: Iterable[Tensor], needed_bytes: int) -> None:
        elsewhere = list(filter(on_accelerator, targets))
        self._devices = {tensor.device for tensor in elsewhere}
        self._has_small = sum(map(is_small, elsewhere)) > 1
        self._sides: list[_Side] = []
        self._room: Room | None = None
        self._most_sides = WINDOWS if self._devices else 1
        self.ahead = WINDOWS // 2 if self._devices else 0
        most = max(HOST_BYTES // self._most_sides // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)
        self.window_bytes = min(most, max(padded(needed_bytes), _ALIGNMENT))

    def __enter__(self) -> Uploader:
        if self._has_small and len(self._devices) == 1:
            self._room = Room.on(next(iter(self._devices)), self.window_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for device in self._devices:
            accelerators.active.current_stream(device).synchronize()
        self._sides, self._room = [], None

    @contextlib.contextmanager
    def readers(self) -> Iterator[Callable[[Callable[[], T]], Callable[[], T]]]:
        """Gives a function that begins a read in a thread, and returns what waits for its result.

        Where no window may be read ahead, the read happens in what waits, in the caller's thread.
        """
        if not self.ahead:
            yield lambda read: read
            return
        with ThreadPoolExecutor(self.ahead, "dcpring-window") as pool:
            yield lambda read: pool.submit(read).result

    def turn(self, number: int) -> None:
        """Waits until nothing is copied any more from the memory of the window of this number, counted from 0."""
        if number >= len(self._sides) < self._most_sides:
            memory = pinned_memory if self._devices else ordinary_memory
            self._sides.append(_Side(Elements(memory(self.window_bytes))))
        self._side(number).wait()

    def take(self, number: int, wanted: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Host tensors of these shapes and dtypes in a window whose turn it is."""
        return [self._side(number).take(shape, dtype) for shape, dtype in wanted]

    def send(self, number: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies from a window, (target, host) by pairs."""
        later: list[tuple[Tensor, Tensor]] = []
        for target, host in pairs:
            if self._devices and _can_wait(target, host):
                later.append((target, host))
            else:
                target.copy_(host)
        if later:
            self._start([target for target, _ in later], [host for _, host in later])
        for device in self._devices:
            event = accelerators.active.event(device)
            event.record(accelerators.active.current_stream(device))
            self._side(number).events.append(event)

    def _start(self, targets: list[Tensor], hosts: list[Tensor]) -> None:
        if self._room is not None and _cross_together(hosts):
            self._room.from_host(targets, hosts)
        else:
            start_copies(targets, hosts)

    def _side(self, number: int) -> _Side:
        return self._sides[number % self._most_sides]


def _can_wait(target: Tensor, host: Tensor) -> bool:
    """Whether the copy may be done later: one of bytes. Others are made on the host, as they are for the CPU."""
    return (
        on_accelerator(target)
        and type(target) in PLAIN_TYPES
        and target.layout == torch.strided
        and target.dtype == host.dtype
        and not is_lazy_view(target)
    )
