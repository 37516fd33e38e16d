"""A load's calls of the core, one after the other, or some at a time in the threads of an Uploader."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from dcpring import _C
from dcpring.base.groups import world_size
from dcpring.format.metadata import Placed
from dcpring.move.device import Uploader
from dcpring.move.load.explain import Explainer
from dcpring.move.load.inputs import Inputs
from dcpring.move.load.task import Task

ReadStats = tuple[int, int, str, bool]
"""Bytes, those of the page cache, the engine, and whether it was direct."""

Range = tuple[int, int, int]
"""Of a record: its file's number, its offset and its length."""


class Call(NamedTuple):
    """A call of the core that reads tensors, in whatever thread.

    Attributes:
        positions: of the items, in the order in which the core has them.
        read: the call.
    """

    positions: Iterable[int]
    read: Callable[[], ReadStats]


class Window(NamedTuple):
    """Items, or parts of them, that come through host memory together.

    Attributes:
        number: of the window, from 0.
        positions: of the items.
        calls: which fill the memory.
        pairs: targets, and the memory that is copied to them.
        check: what is to be done between the two, in the order of windows.
    """

    number: int
    positions: list[int]
    calls: list[Call]
    pairs: list[tuple[Tensor, Tensor]]
    check: Callable[[], None] = lambda: None


class Reads:
    """Reads what it is asked for, counts it, and explains what goes wrong.

    Attributes:
        inputs: the files, open while something is loaded.
        explain: has the words.
        stats: what is counted.
        options: of the core.
        ways: to read tensors, each with whether it is for bytes that others may want, as those between rows; None: for
            all.
    """

    inputs: Inputs

    def __init__(self, task: Task, explain: Explainer) -> None:
        self._events, self._watch = task.run.events, task.run.watch()
        self.explain, self.stats = explain, task.stats
        options = task.rules.options
        self.options = options.for_core(False, self._watch)
        self.ways: tuple[tuple[bool | None, Any], ...] = ((None, self.options),)
        # What others want, as what lies between the rows of one rank, those on this host may find in the page cache.
        if options.direct == "auto" and world_size() > 1:
            self.ways = (False, self.options), (True, replace(options, direct=False).for_core(False, self._watch))

    def range_of(self, place: Placed) -> Range:
        return self.inputs.numbers[place.file], place.offset, place.length

    def check_ends(self, ends: list[tuple[int, int, int]]) -> None:
        """Whether files reach to where what is wanted ends, which the core looks at before it reads.

        Args:
            ends: the item's position, the file's number, and where in it.
        """
        if ends:
            with self.explain.core(position for position, *_ in ends):
                _C.load_bytes(self.inputs.core, [(file, end, 0, None) for _, file, end in ends], self.options)

    def records(self, positions: Sequence[int], ranges: list[tuple[int, int, int, bytes | None]]) -> list[bytes]:
        """Whole records; their ranges are those of files, each with its CRCs."""
        with self.explain.core(positions), self._events.core(self._watch, "read objects", self.inputs.names):
            data, stats = _C.load_bytes(self.inputs.core, ranges, self.options)
        self._count(stats)
        return data

    def run(self, calls: Iterable[Call], fills: bool = True) -> None:
        """Makes calls, one after the other.

        Args:
            fills: whether they overwrite their items; else they read into other memory.
        """
        for call in calls:
            self.end(call, call.read, fills)

    def end(self, call: Call, result: Callable[[], ReadStats], fills: bool = False) -> None:
        """Counts what a call gives, or explains what it raises, wherever it was begun."""
        with self.explain.core(call.positions, fills):
            with self._events.core(self._watch, "read tensors", self.inputs.names):
                stats = result()
            self._count(stats)

    def stream(self, uploader: Uploader, made: Iterable[Window]) -> None:
        """Reads windows, some of them at the same time, and has each copied from when it is there."""

        def arrived(window: Window, results: list[Callable[[], ReadStats]]) -> None:
            for call, result in zip(window.calls, results, strict=True):
                with self.explain.core(call.positions):
                    self._count(result())
            window.check()
            self.explain.filled.append(window.positions)
            uploader.send(window.number, window.pairs)

        waiting: collections.deque[tuple[Window, list[Callable[[], ReadStats]]]] = collections.deque()
        with self._events.core(self._watch, "read tensors", self.inputs.names), uploader.readers() as begin:
            for window in made:
                waiting.append((window, [begin(call.read) for call in window.calls]))
                if len(waiting) > uploader.ahead:
                    arrived(*waiting.popleft())
            while waiting:
                arrived(*waiting.popleft())

    def _count(self, stats: ReadStats) -> None:
        read, cached, engine, direct = stats
        self.stats.bytes += read
        self.stats.cached_bytes += cached
        self.stats.engine = engine or self.stats.engine
        self.stats.direct |= direct
