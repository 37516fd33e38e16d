"""How far saves, loads and commands are: a bar on standard error, or a function that is told.

Who works counts bytes in a slot of ``_C.Slots``, the core's workers by themselves through a ``_C.Watch``. The bar reads
them, from a thread of the core's that never needs the GIL; a function is called from a thread of Python's.

Of a save or a load by several ranks, those of a host share the memory of the slots. The first that sets up makes it,
and leaves a word for it in the process group's store; a rank that cannot open it goes on with memory of its own, and is
not seen. All have joined before the first begins, as DCP gathers the plans in between (with ``use_collectives=False``
some may be late, and not seen). Nobody waits for anybody: the bar ends when all that have joined have ended, be it
after the coordinator's own part.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch.distributed as dist

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.base.groups import agree, has_group, host_id

logger = logging.getLogger("dcpring")

_REPORT_MS = 200
"""Between two calls of a function."""

_LAST_CALL_SECONDS = 1.0
"""How long the end of a save or load may wait for the function's last call."""

Operation = Literal["save", "load"]

_LABELS: dict[Operation, str] = {"save": "saving", "load": "loading"}


@dataclass(frozen=True)
class Progress:
    """How far a save or a load is: all ranks of the coordinator's host together.

    Attributes:
        operation: "save" or "load".
        done_bytes: written, or read.
        total_bytes: that are planned; of tensors, and of a load also of objects.
        seconds: since the coordinator began to write or read.
        bytes_per_second: on average.
        finished: this is the last call. With ``done_bytes`` below ``total_bytes`` it has failed.
    """

    operation: Operation
    done_bytes: int
    total_bytes: int
    seconds: float
    bytes_per_second: float
    finished: bool


ProgressOption = bool | Callable[[Progress], None]


# ---- the bar ----


def is_terminal() -> bool:
    """Whether standard error is one."""
    try:
        return sys.stderr.isatty() and os.isatty(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by what has no descriptor
        return False


def _draw(slots: _C.Slots, label: str, flags: int = 0) -> _C.Bar | None:
    """Draws the slots on standard error, a terminal, until they have ended; None where there is no thread to be had."""
    if (getattr(sys.stderr, "encoding", None) or "").lower().replace("-", "") == "utf8":
        flags |= _C.BAR_UNICODE
    if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        flags |= _C.BAR_COLOUR
    try:
        sys.stderr.flush()
        return _C.Bar(slots, label, os.dup(sys.stderr.fileno()), flags)
    except (OSError, ValueError, RuntimeError):
        logger.info("there is no progress bar", exc_info=True)
        return None


class Bar:
    """Work of a command, which may have a bar.

    Attributes:
        watch: for core calls that do the work.
    """

    def __init__(self, counter: memoryview) -> None:
        self.watch = _C.Watch(counter, 0)

    def advance(self, count: int) -> None:
        """Counts bytes of work that no core call does."""
        self.watch.add(count)


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, enabled: bool | None = None) -> Iterator[Bar]:
    """A bar while the body runs, if that takes more than 1/8 s. Nothing of it stays: commands say what they have done.

    Args:
        label: what is being done, in the program's own words.
        total: bytes that it will be.
        enabled: whether to draw it, where standard error is a terminal; None: yes.
    """
    slots, counter, _ = _own_slots()
    slots.begin(0, total)
    drawn = _draw(slots, label, _C.BAR_TRANSIENT) if enabled is not False and is_terminal() else None
    failed = True
    try:
        yield Bar(counter)
        failed = False
    finally:
        slots.end(0, failed)
        if drawn is not None:
            drawn.close()


# ---- a function that is told ----


def _report(slots: _C.Slots, operation: Operation, function: Callable[[Progress], None]) -> None:
    """Calls the function until the slots have ended. What it raises is logged once."""
    began = time.monotonic()
    has_failed = False
    over = False
    while not over:
        done, total, over = slots.look()
        seconds = time.monotonic() - began
        try:
            function(Progress(operation, done, total, seconds, done / seconds if seconds else 0.0, over))
        except Exception:
            if not has_failed:
                logger.warning("the function given as progress= failed; the %s goes on", operation, exc_info=True)
            has_failed = True
        if not over:
            slots.wait(_REPORT_MS)


# ---- a rank's part of a save or load ----


class Meter:
    """One rank's part of one save or load. This one does nothing: no progress was asked for.

    It is entered for the work itself; ``begin`` says within that how much there is to do.

    Attributes:
        counter: 8 bytes in which the core counts; None: it need not.
    """

    counter: memoryview | None = None

    def begin(self, total: Callable[[], int]) -> None:
        """Work begins: so many bytes."""

    def advance(self, count: int) -> None:
        """Counts bytes that no core call has."""

    def end(self, failed: bool) -> None:
        """Work has ended."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(kind is not None)

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        return Meter, ()  # a writer may be sent to another process, its last save's memory not


class _SlotMeter(Meter):
    """Counts in a slot.

    Args:
        slots, counter, index: the memory, the 8 bytes of the slot's count, and the slot.
        show: begins to show the slots; returns what ends that, called once all have ended.
    """

    def __init__(
        self, slots: _C.Slots, counter: memoryview, index: int, show: Callable[[_C.Slots], Callable[[], None]]
    ) -> None:
        self.counter = counter
        self._slots, self._index, self._show = slots, index, show
        self._watch = _C.Watch(counter, 0)
        self._settle: Callable[[], None] = _nothing

    def begin(self, total: Callable[[], int]) -> None:
        self._slots.begin(self._index, total())
        self._settle = self._show(self._slots)

    def advance(self, count: int) -> None:
        self._watch.add(count)

    def end(self, failed: bool) -> None:
        self._slots.end(self._index, failed)
        if self._slots.over():
            self._settle()


def _nothing() -> None:
    pass


def checked_progress(progress: ProgressOption) -> ProgressOption:
    """The option of a reader or writer; ValueError for what it cannot be."""
    if isinstance(progress, bool) or callable(progress):
        return progress
    raise ValueError(f"progress={progress!r}: must be True, False or a function")


def start_meter(progress: ProgressOption, operation: Operation, path: str, is_coordinator: bool) -> Meter:
    """The meter of a save or load that is being set up on this rank."""
    if not progress:
        return Meter()

    def show(slots: _C.Slots) -> Callable[[], None]:
        if not is_coordinator:
            return _nothing
        if callable(progress):
            return _tell(slots, operation, progress)
        # Loads with no_dist=True have as many coordinators as there are ranks, and share a terminal.
        bar = _draw(slots, _LABELS[operation]) if is_terminal() and slots.claim() else None
        return bar.close if bar is not None else _nothing

    slots, counter, index = _shared_slots(operation, path) or _own_slots()
    return _SlotMeter(slots, counter, index, show)


def _tell(slots: _C.Slots, operation: Operation, function: Callable[[Progress], None]) -> Callable[[], None]:
    thread = threading.Thread(target=_report, args=(slots, operation, function), name="dcpring-progress", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # there is no thread to be had, as when the program is ending
        logger.warning("the function given as progress= is not called: %s", error)
        return _nothing
    return lambda: thread.join(_LAST_CALL_SECONDS)


# ---- memory ----

_Place = tuple[_C.Slots, memoryview, int]
"""Slots, the 8 bytes of the count in one of them, and its number."""


def _join(memory: mmap.mmap, count: int, index: int) -> _Place:
    slots = _C.Slots(memory, count)
    where = slots.join(index)
    return slots, memoryview(memory)[where : where + 8], index


def _own_slots() -> _Place:
    return _join(mmap.mmap(-1, _C.Slots.size(1)), 1, 0)


def _shared_slots(operation: Operation, path: str) -> _Place | None:
    """A slot among those of this host's ranks; None where there are no others, or they cannot be reached."""
    if not has_group() or dist.get_world_size() == 1:
        return None
    ranks = dist.get_world_size()
    try:
        memory = _host_memory(f"dcpring/progress/{host_id()}/{operation}/{path}", _C.Slots.size(ranks))
        return _join(memory, ranks, dist.get_rank())
    except Exception as error:  # of the system's, or of the store's: none is worth a save
        logger.info("this rank's progress is not seen, as it cannot share memory with the others: %s", error)
        return None


def _host_memory(name: str, size: int) -> mmap.mmap:
    """Memory that all ranks of this host get by this name; whose it is keeps it open for the others."""
    descriptor, word = shared_memory.create(size)
    try:
        agreed = agree(name, word)
        memory = shared_memory.open_word(agreed, size)
    except BaseException:
        os.close(descriptor)
        raise
    if agreed == word:
        weakref.finalize(memory, os.close, descriptor)
    else:
        os.close(descriptor)
    return memory
