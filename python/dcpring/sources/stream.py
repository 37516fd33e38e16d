"""From a source to a target: what there is to convert, and its bytes in windows of bounded size.

A source lists items and fills parts of their tensors; a target decides in which order it wants them. Between the two
is ``stream``: one thread reads a window (and casts it) while the caller's thread writes the one before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dcpring.base.casts import check_values
from dcpring.base.windows import read_ahead, split_box, windows
from dcpring.move.buffer import ALIGNMENT, Buffer

WINDOW_BYTES = 32 << 20
"""Bytes read at a time; two windows are in memory, and with casts two more."""

_MOST_PARTS = 8192
"""Tensors in a window."""

PLAIN_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)
"""Those whose tensors are elements side by side; others are left to ``torch.save``, as objects."""


class DictKey(NamedTuple):
    """A key of a mapping that is no str, in a path; ints there are places in a list."""

    key: Any

    def __str__(self) -> str:
        return str(self.key)


Path = tuple["str | int | DictKey", ...]


@dataclass(frozen=True)
class SourceItem:
    """A tensor or an object to be converted.

    Attributes:
        source: its name in the source.
        name: its name in the target.
        path: where it belongs in the target's nested state dict.
        shape: of a tensor, in elements; None for an object.
        stored: dtype in the source; None for an object.
        dtype: in the target.
        place: where its data are. Items with the same place are one tensor under several names.
        whole: it can only be read all at once.
    """

    source: str
    name: str
    path: Path
    shape: tuple[int, ...] | None = None
    stored: torch.dtype | None = None
    dtype: torch.dtype | None = None
    place: Hashable = None
    whole: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape or ())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the target; 0 for objects."""
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize


def first_names(items: Iterable[SourceItem]) -> dict[str, str]:
    """For each item's name the first one of the same tensor, which is its own where it is the only one."""
    first: dict[Hashable, str] = {}
    found = {}
    for item in items:
        same = item.name if item.place is None else (item.place, item.shape, item.stored, item.dtype)
        found[item.name] = first.setdefault(same, item.name)
    return found


class SourcePart(NamedTuple):
    """A box of an item's tensor, in contiguous memory.

    Attributes:
        item: whose tensor.
        offsets: of the box in the tensor, in elements.
        tensor: its values.
        memory: the same bytes.
    """

    item: SourceItem
    offsets: tuple[int, ...]
    tensor: Tensor
    memory: memoryview


class Source(Protocol):
    """What is converted.

    Attributes:
        format: "dcp", "torch" or "safetensors".
        items: in order; ``name`` is ``source`` and ``dtype`` is ``stored``.
        notes: what a safetensors file says of itself, by name.
        unreadable: tensors that are no items, as torch lacks their dtypes, which these are.
        files: how many there are.
    """

    format: str
    items: list[SourceItem]
    notes: Mapping[str, str]
    unreadable: Mapping[str, str]
    files: int

    def read(self, parts: Sequence[SourcePart]) -> None:
        """Fills tensors, which have the stored dtype. The parts of one item come in row-major order, without gaps.

        Raises:
            CorruptCheckpointError, OSError: with key and path.
        """
        ...

    def object_bytes(self, item: SourceItem) -> bytes:
        """An object as ``torch.save`` writes it."""
        ...

    def object_value(self, item: SourceItem) -> Any: ...


class TargetPart(NamedTuple):
    """What of an item a target stores in one place: all of it, or some of its rows."""

    item: SourceItem
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def all_of(cls, item: SourceItem) -> TargetPart:
        assert item.shape is not None
        return cls(item, (0,) * len(item.shape), item.shape)

    @property
    def nbytes(self) -> int:
        assert self.item.dtype is not None
        return math.prod(self.lengths) * self.item.dtype.itemsize


class StreamedPart(NamedTuple):
    """A piece, or the next part of one that is larger than a window.

    Attributes:
        piece: which.
        start: where in the piece it begins, in bytes.
        part: the data, in the target's dtype.
    """

    piece: TargetPart
    start: int
    part: SourcePart

    @property
    def is_whole(self) -> bool:
        return self.part.tensor.nbytes == self.piece.nbytes


class _Box(NamedTuple):
    piece: TargetPart
    start: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def _room(item: SourceItem, numel: int) -> int:
    """Bytes that so many elements take in a window's buffers."""
    assert item.stored is not None and item.dtype is not None
    return numel * max(item.stored.itemsize, item.dtype.itemsize) + ALIGNMENT


def _boxes(piece: TargetPart) -> Iterator[_Box]:
    """A piece cut into boxes that fit a window, which follow each other in row-major order."""
    item, start = piece.item, 0
    assert item.dtype is not None
    whole = item.whole or _room(item, math.prod(piece.lengths)) <= WINDOW_BYTES
    limit = (WINDOW_BYTES - ALIGNMENT) // (_room(item, 1) - ALIGNMENT)
    zeros = (0,) * len(piece.lengths)
    for offsets, lengths in [(zeros, piece.lengths)] if whole else split_box(piece.lengths, limit):
        moved = tuple(a + b for a, b in zip(piece.offsets, offsets, strict=True))
        yield _Box(piece, start, moved, lengths)
        start += math.prod(lengths) * item.dtype.itemsize


def _windows(pieces: Iterable[TargetPart]) -> Iterator[list[_Box]]:
    """Whole pieces together as long as they fit; each part of a larger one alone."""

    def size(box: _Box) -> int:
        is_whole = box.lengths == box.piece.lengths
        return _room(box.piece.item, math.prod(box.lengths)) if is_whole else WINDOW_BYTES

    return windows((box for piece in pieces for box in _boxes(piece)), size, WINDOW_BYTES, _MOST_PARTS)


@dataclass
class _StreamWindow:
    """One of the two windows in memory."""

    stored: Buffer = field(default_factory=lambda: Buffer(WINDOW_BYTES))
    cast: Buffer | None = None

    def read(self, source: Source, window: list[_Box]) -> list[StreamedPart]:
        self.stored.clear()
        parts = [self._part(box) for box in window]
        source.read(parts)
        if self.cast is not None:
            self.cast.clear()
        return [StreamedPart(box.piece, box.start, self._cast(part)) for box, part in zip(window, parts, strict=True)]

    def _part(self, box: _Box) -> SourcePart:
        item = box.piece.item
        assert item.stored is not None
        return SourcePart(item, box.offsets, *self.stored.take(box.lengths, item.stored))

    def _cast(self, part: SourcePart) -> SourcePart:
        item = part.item
        if item.dtype == item.stored:
            return part
        assert item.dtype is not None
        self.cast = self.cast or Buffer(WINDOW_BYTES)
        tensor, memory = self.cast.take(tuple(part.tensor.shape), item.dtype)
        check_values(item.source, part.tensor, item.dtype)
        tensor.copy_(part.tensor)
        return SourcePart(item, part.offsets, tensor, memory)


def stream(source: Source, pieces: Iterable[TargetPart]) -> Iterator[list[StreamedPart]]:
    """The data of tensors, in order: many small pieces at once, or one part of a large one.

    What is yielded is good until the next is asked for.
    """
    slots = itertools.cycle([_StreamWindow(), _StreamWindow()])

    def read(window: list[_Box]) -> list[StreamedPart]:
        return next(slots).read(source, window)

    with contextlib.closing(read_ahead("dcpring-read", _windows(pieces), read)) as reading:
        for _, (runs,) in reading:
            yield runs
