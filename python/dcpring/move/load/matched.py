"""A compact plan's items, read without an object of Python for each: straight, through windows, or handed on."""

from __future__ import annotations

import array
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.masks import both, either, mask_of, zeros
from dcpring.base.memory import NOTHING, lazy_views
from dcpring.errors import CorruptCheckpointError
from dcpring.format.lazy import Chunks
from dcpring.format.metadata import Placed
from dcpring.format.properties import dtypes_of
from dcpring.move.load.handon import Exchange
from dcpring.move.load.landing import Landing
from dcpring.move.load.reads import Call, Reads, Window
from dcpring.move.load.targets import bump_versions
from dcpring.move.load.wanted import Wanted, not_stored
from dcpring.plan.items import ReadItems
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.plan.pieces import Piece, common_bytes, take
from dcpring.plan.rows import row_of
from dcpring.plan.table import BYTES_ROW


class Matched:
    """A compact plan: what can be read straight into its tensor never becomes an object of Python.

    Attributes:
        items: all of them.
        storage: where the checkpoint's rows are stored.
        tensors: where each wanted row goes, for the core; stand-ins for what is not plain memory.
        mask: 1 for each item that can be read straight into its target.
        landing: what is read into windows, and copied from there; None where all targets are in host memory, and where
            there is an exchange.
        exchange: hands on between ranks; None: this rank reads all for itself.
    """

    def __init__(
        self, items: ReadItems, chunks: Chunks, planner: RingLoadPlanner, exchange: Exchange | None = None
    ) -> None:
        assert chunks.storage is not None
        self.items, self.storage, self.exchange = items, chunks.storage, exchange
        self._planner = planner
        self._table = chunks.table
        self._targets = [NOTHING if tensor is None else tensor for tensor in planner.targets(items.wanted)]
        for position in lazy_views(self._targets):
            self._targets[position] = NOTHING
        self.tensors = _C.Tensors(self._targets)
        self.mask = _C.straight(items.match, self.storage, self.tensors)
        self.landing: Landing | None = None
        if exchange is None and any(self.tensors.kinds()):
            self.landing = Landing(items.match, self.storage, self._targets)

    def rest(self, path: str) -> dict[int, Wanted]:
        """What takes another way, by the positions of the items. ``path`` is for errors."""
        rows = array.array("I", self.items.match.stored_rows())
        dtypes = dtypes_of(self._table)
        wanted: dict[int, Wanted] = {}
        reached = self.mask if self.landing is None else either(self.mask, self.landing.mask)
        for position in (position for position, good in enumerate(reached) if not good):
            place = self.storage.get(rows[position])
            row = row_of(self._table, rows[position])
            if place is None:
                raise not_stored(row.key, row.offsets, path)
            is_object = row.kind == BYTES_ROW
            stored = None if is_object else (row.lengths, dtypes[row.properties])
            wanted[position] = Wanted(self.items.make(position), Placed(*place), stored)
        return wanted

    def size_bytes(self, mask: bytes) -> int:
        return sum(itertools.compress(self._sizes, mask))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return self.items.match.sizes()

    @functools.cached_property
    def _interleaved(self) -> tuple[bytes, bytes]:
        """A mask of the items without gaps between their rows, and one of those with."""
        with_gaps = self.items.match.interleaved()
        return zeros(with_gaps), with_gaps

    def wanted_bytes(self) -> int:
        """What this rank reads into memory, some of it for others alone."""
        match, exchange = self.items.match, self.exchange
        surplus = 0 if exchange is None else exchange.surplus_bytes(lambda at: match.get(at)[3:])
        landed = 0 if self.landing is None else self.size_bytes(self.landing.mask)
        return surplus + self.size_bytes(self.mask) + landed

    def note_filled(self, rows: Iterable[int]) -> None:
        bump_versions([self._targets[row] for row in dict.fromkeys(rows)])

    # ---- reading ----

    def read(self, reads: Reads, mask: bytes) -> None:
        """Reads items straight into their targets."""
        reads.run(self._calls(reads, mask, self.tensors))
        self.note_filled(itertools.compress(array.array("I", self.items.match.wanted_rows()), mask))
        reads.stats.tensor_bytes += self.size_bytes(mask)

    def read_windows(self, reads: Reads, landing: Landing) -> None:
        """Reads what comes through windows, after what goes straight into its targets."""

        def window_of(number: int, positions: list[int], pairs: list[tuple[Tensor, Tensor]]) -> Window:
            mask = mask_of(len(landing.mask), positions)
            reads.stats.tensor_bytes += self.size_bytes(mask)
            return Window(number, positions, self._calls(reads, mask, landing.tensors), pairs)

        with landing, torch.no_grad():
            reads.stream(landing.uploader, itertools.starmap(window_of, landing.windows()))

    def _calls(self, reads: Reads, mask: bytes, tensors: _C.Tensors) -> list[Call]:
        calls: list[Call] = []
        for gaps, options in reads.ways:
            chosen = mask if gaps is None else both(mask, self._interleaved[gaps])
            if any(chosen):
                where = self.items.match, self.storage, tensors
                read = functools.partial(_C.load_matched, reads.inputs.core, *where, chosen, options)
                calls.append(Call(itertools.compress(range(len(chosen)), chosen), read))
        return calls

    def call_for_pieces(self, reads: Reads, pieces: list[tuple[Piece, Tensor]]) -> Call:
        """What reads pieces of records as bytes."""
        explain = reads.explain
        boxes: list[tuple[Any, ...]] = []
        for piece, _ in pieces:
            stored = self.storage.get(piece.row)
            assert stored is not None
            place = Placed(*stored)
            if place.payload_bytes != piece.record_bytes:
                raise CorruptCheckpointError(
                    f"{explain.name(piece.overlaps[0])}: the record has {place.payload_bytes} bytes, its shape and "
                    f"dtype need {piece.record_bytes}",
                    f"{explain.path}/{place.file}",
                    place.payload_offset,
                )
            where = reads.inputs.numbers[place.file], place.payload_offset, place.payload_bytes
            boxes.append((*where, place.crcs, None, *piece.as_bytes()))
        targets = [memory.view(box[-1]) for box, (_, memory) in zip(boxes, pieces, strict=True)]
        read = functools.partial(_C.load, reads.inputs.core, boxes, targets, reads.options)
        return Call([piece.overlaps[0] for piece, _ in pieces], read)

    def take(self, taken: list[tuple[int, Piece, Tensor]]) -> list[int]:
        """Fills items with what they have of pieces that are in memory; the bytes of each."""
        match = self.items.match
        boxes = [match.get(position)[3:] for position, _, _ in taken]
        in_core = [
            at
            for at, (position, piece, data) in enumerate(taken)
            if self.mask[position] and piece.box is None and data.is_cpu
        ]
        ranges = [(taken[at][0], *taken[at][1].byte_range) for at in in_core]
        memory = _C.Tensors([taken[at][2] for at in in_core])
        _C.take_matched(match, self.storage, self.tensors, ranges, memory)
        rows = array.array("I", match.wanted_rows())
        self.note_filled(rows[position] for position, _, _ in ranges)
        for at in set(range(len(taken))).difference(in_core):
            position, piece, data = taken[at]
            with torch.no_grad():
                take(piece, data, *boxes[at], self._planner.resolve_tensor(self.items.make(position)))
        return [common_bytes(piece, *box) for (_, piece, _), box in zip(taken, boxes, strict=True)]
