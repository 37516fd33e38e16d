"""Files that all ranks write together: where each tensor lies in them, and who writes which bytes.

1. The storage lays the tensors of all ranks' plans out in files, one behind the other (``Layout``).
2. A file is cut into stripes on the grid of its CRC blocks. Of most stripes one rank holds everything, and writes it
   from its memory. Any other is put together, in memory that ranks share, and written by the rank that holds most of
   it (``assign``). So no two ranks write the same page of a file, and each block's CRC is one rank's to sum.

Stripes that are put together come in rounds of bounded size, for ``move.stripes`` to carry out.
"""

from __future__ import annotations

import functools
import math
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcpring import _C
from dcpring.format.properties import decode_properties
from dcpring.plan.items import Items
from dcpring.plan.pieces import range_of_box
from dcpring.plan.rows import row_of
from dcpring.plan.table import BYTES_ROW

STRIPE_BYTES = _C.CRC_BLOCK_BYTES

ROUND_BYTES = 12 << 20
"""What is put together at a time."""

ROUNDS_IN_MEMORY = 2
"""A host's ranks share the memory of so many: one is filled while some still take what is theirs of the last."""

Ints = tuple[int, ...]


class Box(NamedTuple):
    """What a rank is to write of a tensor.

    Attributes:
        name: of the tensor, in the state dict.
        dtype, shape: of the whole tensor.
        offsets, lengths: of the box in it.
    """

    name: str
    dtype: torch.dtype
    shape: Ints
    offsets: Ints
    lengths: Ints


def boxes_of(items: Sequence[WriteItem]) -> Iterator[Box | str]:
    """What the items of a plan write, in their order; of an object its name."""
    if isinstance(items, Items) and items.untouched:
        yield from _boxes_of_rows(items)
        return
    for item in items:
        data = item.tensor_data
        if item.type == WriteItemType.BYTE_IO or data is None:
            yield item.index.fqn
        else:
            chunk, dtype = data.chunk, data.properties.dtype
            yield Box(item.index.fqn, dtype, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes))


def _boxes_of_rows(items: Items) -> Iterator[Box | str]:
    dtypes = [decode_properties(encoded).dtype for encoded in items.table.properties()]
    for kept in items.kept:
        row = row_of(items.table, kept)
        is_object = row.kind == BYTES_ROW
        yield row.key if is_object else Box(row.key, dtypes[row.properties], row.size, row.offsets, row.lengths)


# ---- where tensors lie ----


class Laid(NamedTuple):
    """A tensor's place in a file.

    Attributes:
        name: in the state dict.
        stored: in the file.
        dtype: of the elements in the file.
        shape: of the tensor.
        size_bytes: in the file.
        begin: offset of its first byte there.
    """

    name: str
    stored: str
    dtype: torch.dtype
    shape: Ints
    size_bytes: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes

    @property
    def crc_count(self) -> int:
        """How many blocks of the CRC grid it touches."""
        return (self.end - 1) // STRIPE_BYTES - self.begin // STRIPE_BYTES + 1 if self.size_bytes else 0


@dataclass(frozen=True)
class Layout:
    """One file.

    Attributes:
        name: under which it is written.
        head_bytes: what lies before the tensors; a multiple of the alignment of direct I/O.
        tensors: in the order of the file, without gaps.
    """

    name: str
    head_bytes: int
    tensors: list[Laid]

    @property
    def size_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else self.head_bytes


# ---- who writes what ----


class Shared(NamedTuple):
    """A stripe that several ranks hold.

    Attributes:
        lo, hi: in the file.
        at: offset in the memory of a round.
        writer: who writes it.
        holders: who fills some of it, the writer too.
    """

    lo: int
    hi: int
    at: int
    writer: int
    holders: Ints


@dataclass
class FileStripes:
    """One rank's part of a file, but for what is put together in rounds.

    Attributes:
        own: ranges [lo, hi) that it writes from its memory.
        writes_bytes: of the file, in all.
    """

    own: list[tuple[int, int]] = field(default_factory=list)
    writes_bytes: int = 0


SharedRounds = list[list[Shared]]
"""Of a file, the stripes of each round."""


@dataclass
class Common:
    """What the coordinator tells all ranks.

    Attributes:
        files: all of them.
        rounds: of each.
        hosts: of all ranks.
        token: names the save.
        omitted: names whose data are saved under others: tied tensors.
        block_bytes: the coordinator's, for all: what is written at a time.
    """

    files: list[Layout]
    rounds: list[SharedRounds]
    hosts: list[str]
    token: str
    omitted: frozenset[str]
    block_bytes: int

    def packed(self) -> bytes:
        return zlib.compress(pickle.dumps(self), 1)


@dataclass
class Assignment:
    """What the coordinator tells a rank.

    Attributes:
        packed: the same for all ranks, and so packed once.
        parts: this rank's of each file.
    """

    packed: bytes
    parts: list[FileStripes]

    @functools.cached_property
    def common(self) -> Common:
        return pickle.loads(zlib.decompress(self.packed))

    @property
    def has_rounds(self) -> bool:
        return any(self.common.rounds)


class _Segment(NamedTuple):
    """Bytes of a file that these ranks hold together."""

    lo: int
    hi: int
    ranks: Ints


def _segments(laid: Laid, boxes: Sequence[tuple[int, Box]]) -> list[_Segment]:
    """Of one tensor: a segment for each box that is a range of bytes, or one for all boxes."""
    size = laid.dtype.itemsize
    found = []
    for rank, box in boxes:
        bounds = range_of_box(box.shape, box.offsets, box.lengths)
        if bounds is None:
            return [_Segment(laid.begin, laid.end, tuple(dict.fromkeys(rank for rank, _ in boxes)))]
        found.append(_Segment(laid.begin + bounds[0] * size, laid.begin + bounds[1] * size, (rank,)))
    return sorted(found)


def _stripes(layout: Layout, segments: Iterable[_Segment]) -> Iterator[tuple[int, int, dict[int, float]]]:
    """The stripes of a file, and how many bytes of each a rank holds, by rank."""
    held: dict[int, float] = {}
    current = layout.head_bytes // STRIPE_BYTES
    for segment in segments:
        for number in range(segment.lo // STRIPE_BYTES, (segment.hi - 1) // STRIPE_BYTES + 1):
            if number != current:
                yield *_bounds(layout, current), held
                held, current = {}, number
            lo, hi = _bounds(layout, number)
            size = (min(hi, segment.hi) - max(lo, segment.lo)) / len(segment.ranks)
            if held:
                held.update((rank, held.get(rank, 0.0) + size) for rank in segment.ranks)
            else:
                held = dict.fromkeys(segment.ranks, size)
    if held:
        yield *_bounds(layout, current), held


def _bounds(layout: Layout, number: int) -> tuple[int, int]:
    lo, hi = number * STRIPE_BYTES, (number + 1) * STRIPE_BYTES
    return max(lo, layout.head_bytes), min(hi, layout.size_bytes)


class _Assignment:
    """Gives stripes to ranks, evenly.

    Args:
        world: how many ranks there are.
        block_bytes: stripes of a block go to one rank, where several hold as much.
    """

    def __init__(self, world: int, block_bytes: int) -> None:
        self._load = [0] * world
        self._block_bytes = block_bytes
        self._last = (-1, -1)
        self._holders: dict[Ints, Ints] = {}

    def parts(
        self, layout: Layout, boxes: Mapping[str, Sequence[tuple[int, Box]]]
    ) -> tuple[list[FileStripes], SharedRounds]:
        """All ranks' parts of a file, and its rounds; ``boxes`` by the names of its tensors."""
        parts = [FileStripes() for _ in self._load]
        rounds: SharedRounds = []
        segments = (one for laid in layout.tensors if laid.size_bytes for one in _segments(laid, boxes[laid.name]))
        used = ROUND_BYTES
        for lo, hi, held in _stripes(layout, segments):
            writer = next(iter(held)) if len(held) == 1 else self._chosen(lo, held)
            self._load[writer] += hi - lo
            parts[writer].writes_bytes += hi - lo
            if len(held) == 1:
                _extend(parts[writer].own, lo, hi)
                continue
            if used + STRIPE_BYTES > ROUND_BYTES:
                used = 0
                rounds.append([])
            holders = tuple(sorted(held))
            holders = self._holders.setdefault(holders, holders)  # one object of each kind, which is pickled once
            # A stripe that begins behind the header lies behind it in memory, too: those of a block lie side by side.
            rounds[-1].append(Shared(lo, hi, used + lo % STRIPE_BYTES, writer, holders))
            used += STRIPE_BYTES
        return parts, rounds

    def _chosen(self, lo: int, held: Mapping[int, float]) -> int:
        """Who holds most; of those who hold as much the one who writes this block already, or least so far."""
        most = max(held.values())
        equal = [rank for rank, size in held.items() if size > most - 1]
        block, writer = self._last
        if block != lo // self._block_bytes or writer not in equal:
            writer = min(equal, key=lambda rank: self._load[rank])
        self._last = lo // self._block_bytes, writer
        return writer


def _extend(ranges: list[tuple[int, int]], lo: int, hi: int) -> None:
    if ranges and ranges[-1][1] == lo:
        ranges[-1] = ranges[-1][0], hi
    else:
        ranges.append((lo, hi))


def assign(
    layouts: Sequence[Layout], boxes: Sequence[Sequence[Box]], block_bytes: int
) -> tuple[list[list[FileStripes]], list[SharedRounds]]:
    """By rank, its part of each file; and of each file the rounds.

    Args:
        boxes: by rank; together they are all that is laid out, none of it twice.
        block_bytes: of one I/O.
    """
    by_name: dict[str, list[tuple[int, Box]]] = {}
    for rank, of_rank in enumerate(boxes):
        for box in of_rank:
            if math.prod(box.lengths):
                by_name.setdefault(box.name, []).append((rank, box))
    assignment = _Assignment(len(boxes), block_bytes)
    by_file = [assignment.parts(layout, by_name) for layout in layouts]
    by_rank = [[parts[rank] for parts, _ in by_file] for rank in range(len(boxes))]
    return by_rank, [rounds for _, rounds in by_file]
