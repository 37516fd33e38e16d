"""What ranks read for each other: pieces of stored records, of bounded size, and the same on all ranks that need them.

A rank needs overlaps: boxes of records. Reading one spans its rows and the gaps between them, where these are small.
Ranks that need different columns of the same rows therefore read the same bytes. These are what is cut into pieces:

- A range of elements in row-major order, where no gap is left. It is cut where the file's blocks are, so that each
  piece is a whole number of blocks, and of their CRCs.
- A box, where wider gaps are: it is cut along its rows.

A piece that has been read lies in memory element by element. Each rank copies from it what lies in its overlaps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dcpring import _C
from dcpring.base.windows import common_box, split_box
from dcpring.torchside.tensors import narrowed

PIECE_BYTES = 4 << 20
"""No piece is larger, unless one element is. A multiple of the core's blocks of CRCs."""

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a record.

    Attributes:
        row: of the table of what is stored: the record.
        shape: of the record.
        item_bytes: of its elements.
        first, end: the range of elements; of a box, from 0 to their number.
        box: offsets and lengths, None for a range.
        overlaps: positions of this rank's overlaps that have something in it.
        is_exact: each of them has all of it.
    """

    row: int
    shape: Ints
    item_bytes: int
    first: int
    end: int
    box: tuple[Ints, Ints] | None = None
    overlaps: tuple[int, ...] = ()
    is_exact: bool = False

    @property
    def size_bytes(self) -> int:
        return (self.end - self.first) * self.item_bytes

    @property
    def record_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    def __str__(self) -> str:
        return f"{self.first}-{self.end}" if self.box is None else f"{self.box}"

    def as_bytes(self) -> tuple[Ints, Ints, Ints]:
        """The record as a tensor of bytes, and the piece in it: sizes, offsets, lengths."""
        if self.box is None:
            return (self.record_bytes,), (self.first * self.item_bytes,), (self.size_bytes,)
        sizes, offsets, lengths = ((*part[:-1], part[-1] * self.item_bytes) for part in (self.shape, *self.box))
        return sizes, offsets, lengths

    @property
    def byte_range(self) -> tuple[int, int]:
        return self.first * self.item_bytes, self.end * self.item_bytes

    def boxes(self) -> list[tuple[Ints, Ints]]:
        """Boxes that follow each other in its memory and make it up."""
        return _boxes_of_range(self.shape, self.first, self.end) if self.box is None else [self.box]


def covering(shape: Ints, offsets: Ints, lengths: Ints, item_bytes: int) -> tuple[Ints, Ints]:
    """The box that is read for an overlap: with all columns, where the gaps between its rows are read over."""
    low, size = list(offsets), list(lengths)
    inner = item_bytes
    for axis in reversed(range(len(shape))):
        gap = (shape[axis] - lengths[axis]) * inner
        if 0 < gap <= _C.SLICE_GAP_BYTES and math.prod(lengths[:axis]) > 1:
            low[axis], size[axis] = 0, shape[axis]
        inner *= shape[axis]
    return tuple(low), tuple(size)


def cut(whole: Piece, payload_offset: int) -> Iterator[Piece]:
    """Cuts what is read of a record: a box, as ``covering`` gives it.

    Args:
        payload_offset: of the record's elements, in the file.
    """
    assert whole.box is not None
    shape, box, item_bytes = whole.shape, whole.box, whole.item_bytes
    bounds = range_of_box(shape, *box)
    if bounds is None:
        for part in split_box(box[1], max(PIECE_BYTES // item_bytes, 1)):
            offsets = tuple(outer + inner for outer, inner in zip(box[0], part[0], strict=True))
            yield replace(whole, end=math.prod(part[1]), box=(offsets, part[1]))
        return
    first, end = bounds
    if (end - first) * item_bytes > PIECE_BYTES:
        begins = payload_offset + first * item_bytes
        for place in range(begins // PIECE_BYTES + 1, (payload_offset + end * item_bytes - 1) // PIECE_BYTES + 1):
            middle = (place * PIECE_BYTES - payload_offset) // item_bytes
            if first < middle < end:
                yield replace(whole, first=first, end=middle, box=None)
                first = middle
    yield replace(whole, first=first, end=end, box=None)


def range_of_box(shape: Ints, offsets: Ints, lengths: Ints) -> tuple[int, int] | None:
    """The elements of a box as a range in row-major order; None if there are others between them."""
    count, first, inner = 1, 0, 1
    is_full = True
    for size, offset, length in zip(reversed(shape), reversed(offsets), reversed(lengths), strict=True):
        if not is_full and length != 1:
            return None
        is_full = is_full and length == size
        first += offset * inner
        count *= length
        inner *= size
    return first, first + count


def overlap_of(
    offsets: Sequence[int], lengths: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> tuple[Ints, Ints, Ints] | None:
    """Of two boxes in a tensor: where in the first, where in the second, and how much they share; None for nothing."""
    common = common_box((tuple(offsets), tuple(lengths)), (tuple(start), tuple(size)))
    if common is None:
        return None
    low, shared = common
    return tuple(map(operator.sub, low, offsets)), tuple(map(operator.sub, low, start)), shared


def _boxes_of_range(shape: Ints, first: int, end: int) -> list[tuple[Ints, Ints]]:
    """The boxes that a range of elements consists of, in its order: part of a row, whole rows, part of a row."""
    if len(shape) < 2:
        return [((first,), (end - first,)) if shape else ((), ())]
    inner = math.prod(shape[1:])
    row, skipped = divmod(first, inner)
    last_row, left = divmod(end, inner)

    def within(number: int, low: int, high: int) -> list[tuple[Ints, Ints]]:
        return [((number, *at), (1, *size)) for at, size in _boxes_of_range(shape[1:], low, high)]

    if row == last_row:
        return within(row, skipped, left)
    found = within(row, skipped, inner) if skipped else []
    row += bool(skipped)
    if row < last_row:
        found.append(((row, *(0,) * (len(shape) - 1)), (last_row - row, *shape[1:])))
    return found + (within(last_row, 0, left) if left else [])


def _common(piece: Piece, offsets: Ints, lengths: Ints) -> Iterator[tuple[int, Ints, Ints, Ints, Ints]]:
    """What lies both in a piece and in an overlap, as boxes.

    Yields:
        For each of the piece's boxes that has some of it: where it lies in the piece, in bytes; its lengths; and of
        what both have, the offsets in that box, those in the overlap, and the lengths.
    """
    at = 0
    for box_offsets, box_lengths in piece.boxes():
        if common := overlap_of(box_offsets, box_lengths, offsets, lengths):
            yield at, box_lengths, *common
        at += math.prod(box_lengths) * piece.item_bytes


def common_bytes(piece: Piece, offsets: Ints, lengths: Ints) -> int:
    """How much of a piece an overlap has."""
    if piece.is_exact:
        return piece.size_bytes
    return sum(math.prod(common) * piece.item_bytes for *_, common in _common(piece, offsets, lengths))


def take(piece: Piece, memory: Tensor, offsets: Ints, lengths: Ints, part: Tensor) -> None:
    """Copies what lies both in a piece and in an overlap.

    Args:
        memory: the piece's bytes, uint8 in one dimension.
        offsets, lengths: of the overlap in the record.
        part: the tensor that the overlap fills.
    """
    for at, box, in_box, in_overlap, common in _common(piece, offsets, lengths):
        bytes_of_box = math.prod(box) * piece.item_bytes
        source = narrowed(memory[at : at + bytes_of_box].view(part.dtype).view(box), in_box, common)
        narrowed(part, in_overlap, common).copy_(source)
