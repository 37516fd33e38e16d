"""A load's calls of the core. Boxes of tensors are read into their memory, or into windows of host memory.

Calls are made by the thread that loads, or by threads of an ``Uploader``; all else is done by the thread that loads.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.groups import world_size
from dcpring.base.masks import both, zeros
from dcpring.base.memory import NOTHING
from dcpring.base.windows import windows
from dcpring.errors import CorruptCheckpointError
from dcpring.move import device
from dcpring.move.crc import RunningCrcs, buffer_at
from dcpring.move.device import Uploader
from dcpring.move.load.explain import Explainer
from dcpring.move.load.inputs import Inputs
from dcpring.move.load.targets import bump_versions, is_plain_memory
from dcpring.move.load.task import Task
from dcpring.move.load.wanted import (
    BoxRead,
    CompactPlan,
    Payload,
    QuantisedPayload,
    dequantised,
    reads_of_quantised,
)
from dcpring.plan.pieces import range_of_box

ReadStats = tuple[int, int, str, bool]
"""Bytes, those of the page cache, the engine, and whether it was direct."""

ByteRange = tuple[int, int, int, bytes | None]
"""The number of a file, where in it, how many bytes, and their CRCs."""


class Executor:
    """Reads what it is asked for, counts it, and explains what fails.

    Attributes:
        inputs: the files.
        explain: explains what fails.
        stats: what is counted.
        options: of the core.
    """

    def __init__(self, task: Task, inputs: Inputs, explain: Explainer) -> None:
        self.inputs, self.explain, self.stats = inputs, explain, task.stats
        self._events, self._watch = task.load.events, task.load.watch()
        self._sums, options = task.origin.sums, task.rules.options
        self._is_checked = options.checksum
        self.options = self._cached = options.for_core(False, self._watch)
        if options.direct == "auto" and world_size() > 1:
            # Ranks of this host find in the page cache what several of them want, as what lies between rows.
            self._cached = replace(options, direct=False).for_core(False, self._watch)

    # ---- records ----

    def check_ends(self, ends: Sequence[tuple[int, int, int]]) -> None:
        """Whether files are long enough, which the core looks at before it reads.

        Args:
            ends: the position, the number of the file, and the end of what is wanted of it.
        """
        if ends:
            with self.explain.core(position for position, *_ in ends):
                _C.load_bytes(self.inputs.core, [(file, end, 0, None) for _, file, end in ends], self.options)

    def records(self, positions: Sequence[int], ranges: list[ByteRange]) -> list[bytes]:
        """Reads whole records."""
        with self.explain.core(positions), self._events.core(self._watch, "read objects", self.inputs.names):
            data, stats = _C.load_bytes(self.inputs.core, ranges, self.options)
        self.count(stats)
        return data

    # ---- tensors ----

    def fill_all(self, plan: CompactPlan, mask: bytes) -> None:
        """Fills the positions of a mask, all of which the core can read straight into their tensors."""
        gaps = plan.interleaved if self._cached is not self.options else bytes(len(mask))
        for options, chosen in ((self.options, both(mask, zeros(gaps))), (self._cached, both(mask, gaps))):
            positions = [position for position, is_chosen in enumerate(chosen) if is_chosen]
            if positions:
                with self.explain.core(positions, fills=True), self.watched():
                    where = plan.match, plan.storage, plan.tensors
                    self.count(_C.load_matched(self.inputs.core, *where, chosen, options))
                bump_versions(plan.filled(positions))
        self.stats.tensor_bytes += plan.size_bytes(mask)

    def fill(self, boxes: Sequence[BoxRead]) -> None:
        """Fills tensors: straight where their memory is their values, through windows elsewhere."""
        memory = [box.memory for box in boxes]
        kinds = _C.Tensors([tensor if type(tensor) is Tensor else NOTHING for tensor in memory]).kinds()
        straight, others = list[BoxRead](), list[BoxRead]()
        for box, kind in zip(boxes, kinds, strict=True):
            (straight if kind == 0 and _is_straight(box) else others).append(box)
        if straight:
            with self.watched():
                self.count(*self.read(straight, fills=True))
            self._check_sums(straight, self._sums)
            bump_versions(box.memory for box in straight)
        if others:
            self._fill_through_windows(others)
        self.stats.tensor_bytes += sum(tensor.nbytes for tensor in memory)

    def read(self, boxes: Sequence[BoxRead], fills: bool = False) -> list[ReadStats]:
        """Reads boxes into their memory, in whatever thread; of quantised tensors the scales come before the codes.

        Args:
            fills: whether the memory is that of the state dict.
        """
        found = self._read_plain([box for box in boxes if isinstance(box.source, Payload)], fills)
        quantised = (part for box in boxes if isinstance(box.source, QuantisedPayload) for part in dequantised(box))
        for parts in windows(quantised, lambda part: part.scale_bytes, device.HOST_BYTES):
            scales, values, codes = reads_of_quantised(parts)
            found += self._read_plain(scales)
            found += self._read_plain(codes, fills, [_for_core(value) for value in values])
        return found

    def _read_plain(self, boxes: list[BoxRead], fills: bool = False, *scales: list[Tensor]) -> list[ReadStats]:
        if self._cached is self.options:
            ways = [(self.options, boxes)]
        else:
            marks = [box.is_for_others for box in boxes]
            ways = [
                (options, [box for box, mark in zip(boxes, marks, strict=True) if mark == is_cached])
                for options, is_cached in ((self.options, False), (self._cached, True))
            ]
        return [self.read_once(chosen, options, fills, *scales) for options, chosen in ways if chosen]

    def read_once(
        self, boxes: Sequence[BoxRead], options: Any, fills: bool = False, *scales: list[Tensor]
    ) -> ReadStats:
        """Makes one call of the core, in whatever thread."""
        with self.explain.core([box.position for box in boxes], fills):
            told, memory = [box.for_core for box in boxes], [box.memory for box in boxes]
            return _C.load(self.inputs.core, told, memory, options, *scales)

    def watched(self) -> AbstractContextManager[None]:
        """Encloses calls of the core that read tensors, for the trace."""
        return self._events.core(self._watch, "read tensors", self.inputs.names)

    def count(self, *calls: ReadStats) -> None:
        for read, cached, engine, direct in calls:
            self.stats.bytes += read
            self.stats.cached_bytes += cached
            self.stats.engine = engine or self.stats.engine
            self.stats.direct |= direct

    def _fill_through_windows(self, boxes: list[BoxRead]) -> None:
        """Reads windows of host copies, some at the same time; a large tensor comes in several boxes."""
        sums = self._sums or RunningCrcs()
        waiting: collections.deque[tuple[int, list[BoxRead], list[BoxRead], Callable[[], list[ReadStats]]]]
        waiting = collections.deque()

        def arrived() -> None:
            number, parts, copies, result = waiting.popleft()
            self.count(*result())
            self._check_sums(copies, sums)
            self.explain.filled.append([part.position for part in parts])
            pairs = zip(parts, copies, strict=True)
            uploader.send(number, [(part.memory, copy.memory) for part, copy in pairs])

        with Uploader([box.memory for box in boxes], sum(box.host_bytes for box in boxes)) as uploader:
            cut = uploader.window_bytes
            parts = _in_order(boxes, cut)
            with self.watched(), uploader.readers() as begin:
                for number, window in enumerate(windows(parts, lambda part: part.host_bytes, cut)):
                    uploader.turn(number)
                    hosts = uploader.take(number, ((part.lengths, part.source.dtype) for part in window))
                    copies = [part._replace(memory=host) for part, host in zip(window, hosts, strict=True)]
                    waiting.append((number, window, copies, begin(functools.partial(self.read, copies))))
                    if len(waiting) > uploader.ahead:
                        arrived()
                while waiting:
                    arrived()

    def _check_sums(self, boxes: Iterable[BoxRead], sums: RunningCrcs | None) -> None:
        """Checks what the core cannot: a CRC over all of a record, of which it has seen only a part."""
        if sums is None or not self._is_checked:
            return
        for box in boxes:
            source = box.source
            if not isinstance(source, Payload) or source.whole_crc is None or box.lengths == source.sizes:
                continue
            name = self.inputs.names[source.file]
            if not _add_sum(sums, name, box, source, source.whole_crc):
                end = source.payload_offset + source.payload_bytes
                why = (
                    f"bytes {source.payload_offset} to {end} of the file, all of this value, are damaged (CRC-32 is "
                    "not what it was when they were written); load another checkpoint"
                )
                path = f"{self.explain.path}/{name}"
                raise CorruptCheckpointError(f"{self.explain.name(box.position)}: {why}", path, source.payload_offset)


def _is_straight(box: BoxRead) -> bool:
    """Whether the core may write to the memory of a tensor in host memory."""
    memory, source = box.memory, box.source
    if type(memory) is not Tensor or memory.dtype != source.dtype or not is_plain_memory(memory):
        return False
    return isinstance(source, Payload) or memory.size(-1) <= 1 or memory.stride(-1) == 1


def _in_order(boxes: Iterable[BoxRead], most_bytes: int) -> Iterator[BoxRead]:
    """Boxes in the order of the files, in parts of so many bytes."""

    def place(box: BoxRead) -> tuple[int, int]:
        first = box.source.stored[0]
        return first.file, first.payload_offset

    for box in sorted(boxes, key=place):
        yield from box.parts(most_bytes // box.source.dtype.itemsize)


def _for_core(scales: Tensor) -> Tensor:
    return scales if scales.dtype == torch.uint8 else scales.to(torch.float32)


def _add_sum(sums: RunningCrcs, file: str, box: BoxRead, source: Payload, crc: int) -> bool:
    """Adds what was read of a record to its CRC; False: the record is damaged."""
    bounds = range_of_box(source.sizes, box.offsets, box.lengths)
    if bounds is None:
        return True
    data = box.memory.contiguous()
    part = buffer_at(data.data_ptr(), data.nbytes)
    return sums.add((file, source.payload_offset), bounds[0] * data.itemsize, part, source.payload_bytes, crc)
