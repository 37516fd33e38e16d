"""How far saves, loads and commands are: a bar (tqdm's) on standard error, or a function that is told.

Who works counts bytes in a slot, the core's workers by themselves through a ``_C.Watch``. A thread looks at the slots
some times a second, until all have ended, and draws or tells.

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
from enum import IntEnum
from types import TracebackType
from typing import Any, Literal, NamedTuple

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.base.groups import agree, host_id, rank_in, world_size

logger = logging.getLogger("dcpring")

_DRAW_SECONDS, _TELL_SECONDS = 1 / 8, 1 / 5
"""Between two pictures of a bar, and two calls of a function. Work that takes less than one picture shows none."""

_LAST_CALL_SECONDS = 1.0
"""How long the end of a save or load may wait for the last picture or call."""

_GRACE_SECONDS = 2.0
"""For a slot that has joined and does not begin, once no other is at work."""

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


# ---- slots ----


class _State(IntEnum):
    FREE = 0
    JOINED = 1  # will begin
    RUNNING = 2
    DONE = 3
    FAILED = 4


class Sums(NamedTuple):
    """Of all slots: bytes done, bytes in all, and whether nobody is at work any more."""

    done: int
    total: int
    over: bool


class Slots:
    """How far work is, in memory that processes may share: for each that takes part a cache line.

    A slot is four words of 8 bytes: bytes done, bytes in all, a ``_State``, and the process. Each process writes its
    own slot, the core's workers the bytes done; whoever has the memory may look. Memory of zeros is ready for use. What
    another process puts into it is only added up and shown. Any thread may look.
    """

    _SIZE = 64
    _DONE, _TOTAL, _STATE, _PROCESS = range(4)

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memoryview(memory)
        self._words = self._memory.cast("Q")
        self._changed = threading.Event()
        self._busy = time.monotonic()

    @classmethod
    def bytes(cls, count: int) -> int:
        """Of memory that so many slots take."""
        return cls._SIZE * count

    def join(self, index: int) -> memoryview:
        """This process will do work. Returns the 8 bytes in which it counts what is done."""
        for word, value in enumerate((0, 0, _State.JOINED, os.getpid())):
            self._put(index, word, value)
        return self._memory[index * self._SIZE :][:8]

    def begin(self, index: int, total: int) -> None:
        self._put(index, self._TOTAL, total)
        self._put(index, self._STATE, _State.RUNNING)

    def end(self, index: int, failed: bool) -> None:
        """What has ended well is done wholly: a plan says only about how many bytes there will be."""
        if not failed:
            self._put(index, self._DONE, self._read(index)[self._TOTAL])
        self._put(index, self._STATE, _State.FAILED if failed else _State.DONE)
        self._changed.set()

    def look(self) -> Sums:
        slots = [slot for slot in map(self._read, range(len(self._memory) // self._SIZE)) if slot[self._STATE]]
        states = [self._state_now(slot) for slot in slots]
        now = time.monotonic()
        if busy := _State.RUNNING in states or not any(state >= _State.DONE for state in states):
            self._busy = now
        over = not busy and (_State.JOINED not in states or now - self._busy > _GRACE_SECONDS)
        return Sums(sum(min(slot[:2]) for slot in slots), sum(slot[self._TOTAL] for slot in slots), over)

    def wait(self, seconds: float) -> None:
        """Returns after this time, or when a slot of this process has ended since the last wait."""
        self._changed.wait(seconds)
        self._changed.clear()

    def _state_now(self, slot: tuple[int, ...]) -> int:
        """A slot whose process is gone counts as failed."""
        state = slot[self._STATE]
        return state if state >= _State.DONE or _exists(slot[self._PROCESS]) else _State.FAILED

    def _read(self, index: int) -> tuple[int, ...]:
        first = index * self._SIZE // 8
        return tuple(self._words[first : first + 4])

    def _put(self, index: int, word: int, value: int) -> None:
        self._words[index * self._SIZE // 8 + word] = value


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def _show(slots: Slots, every_seconds: float, show: Callable[[Sums, float], None], daemon: bool) -> Callable[[], None]:
    """Starts a thread that shows slots until they have ended; returns what waits a moment for the last picture or call.

    A thread that draws is no daemon, as what the end of the program cuts off while it holds standard error would bring
    that down; it ends with the main thread. One that calls a function is, as the function may never return.
    """
    began = time.monotonic()

    def run() -> None:
        while threading.main_thread().is_alive():
            sums = slots.look()
            show(sums, time.monotonic() - began)
            if sums.over:
                break
            slots.wait(every_seconds)

    thread = threading.Thread(target=run, name="dcpring-progress", daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:  # there is no thread to be had, as when the program is ending
        logger.warning("progress is not shown: %s", error)
        return _nothing
    return lambda: thread.join(_LAST_CALL_SECONDS)


def _nothing() -> None:
    pass


# ---- the bar ----


def _is_terminal() -> bool:
    """Whether standard error is one."""
    try:
        return sys.stderr.isatty() and os.isatty(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by what has no descriptor
        return False


def is_shown() -> bool:
    """Whether a bar has a place: a terminal or a notebook."""
    return "ipykernel" in sys.modules or _is_terminal()


class _Picture:
    """Shows slots as a bar. It is made when there is more than one picture's time to show."""

    def __init__(self, label: str, stays: bool) -> None:
        self._label = "".join(character if character.isprintable() else "?" for character in label)
        self._stays = stays
        self._bar: Any = None
        self._gave_up = False

    def __call__(self, sums: Sums, seconds: float) -> None:
        if self._gave_up or (self._bar is None and (sums.over or seconds < _DRAW_SECONDS)):
            return
        try:
            self._draw(sums, seconds)
        except Exception as error:  # tqdm is missing; the terminal is gone; what a bar meets is worth no save
            logger.warning("there is no progress bar: %s", error)
            self._gave_up = True

    def _draw(self, sums: Sums, seconds: float) -> None:
        done, total, over = sums
        if self._bar is None:
            self._bar = _tqdm()(
                desc=self._label, total=total, leave=self._stays, unit="B", unit_scale=True, unit_divisor=1024,
                mininterval=0, miniters=0, **_screen(),
            )  # fmt: skip
        vars(self._bar).update(_screen())
        if total != self._bar.total:
            self._bar.reset(total)  # a rank that begins later makes the whole larger
        self._bar.start_t = time.time() - seconds
        self._bar.update(max(0, done - self._bar.n))
        if over:
            self._bar.close()


def _screen() -> dict[str, int]:
    """What a bar may take. tqdm draws nothing on a terminal that does not know its size, as in many a container."""
    if not _is_terminal():
        return {}
    size = os.get_terminal_size(sys.stderr.fileno())
    return {"ncols": (size.columns or 80) - 1, "nrows": size.lines or 24}


def _tqdm() -> Any:
    """tqdm's bar for where this runs, without its thread, which looks after bars that nobody updates."""
    from tqdm.auto import tqdm

    return type("tqdm", (tqdm,), {"monitor_interval": 0})


def _draw(slots: Slots, label: str, stays: bool) -> Callable[[], None]:
    """Begins to draw the slots; returns what waits for the last picture."""
    return _show(slots, _DRAW_SECONDS, _Picture(label, stays), daemon=False)


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, enabled: bool | None = None) -> Iterator[Meter]:
    """A bar while the body runs, if that takes more than 1/8 s. Nothing of it stays: commands say what they have done.

    Args:
        label: what is being done, in the program's own words.
        total: bytes that it will be.
        enabled: whether to draw it, where standard error is a terminal; None: yes.
    """

    def show(slots: Slots) -> Callable[[], None]:
        return _draw(slots, label, stays=False) if enabled is not False and is_shown() else _nothing

    meter = Meter(_own_slots(), 0, show)
    with meter:
        meter.begin(lambda: total)
        yield meter


# ---- a function that is told ----


def _teller(operation: Operation, function: Callable[[Progress], None]) -> Callable[[Sums, float], None]:
    """Calls the function. The first thing that it raises is logged."""
    failures: list[Exception] = []

    def call(sums: Sums, seconds: float) -> None:
        rate = sums.done / seconds if seconds else 0.0
        try:
            function(Progress(operation, sums.done, sums.total, seconds, rate, sums.over))
        except Exception as error:
            if not failures:
                message = "the function given as progress= failed; the %s goes on"
                logger.warning(message, operation, exc_info=True)
            failures.append(error)

    return call


# ---- a rank's part of a save or load ----


class Meter:
    """One rank's part of one save or load, or the work of a command. Without slots nobody wants to know of it.

    It is entered for the work itself; ``begin`` says within that how much there is to do.

    Args:
        slots, index: the slot that it counts in; None for none.
        show: begins to show the slots; returns what ends that, called once all have ended.

    Attributes:
        counter: 8 bytes in which the core counts; None: it need not.
        watch: for core calls that do the work; None without slots.
    """

    def __init__(
        self, slots: Slots | None = None, index: int = 0, show: Callable[[Slots], Callable[[], None]] | None = None
    ) -> None:
        self._slots, self._index, self._show = slots, index, show
        self._settle = _nothing
        self.counter = None if slots is None else slots.join(index)
        self.watch = None if self.counter is None else _C.Watch(self.counter, 0)

    def begin(self, total: Callable[[], int]) -> None:
        """Work begins: so many bytes."""
        if self._slots is not None:
            self._slots.begin(self._index, total())
            self._settle = self._show(self._slots) if self._show is not None else _nothing

    def advance(self, count: int) -> None:
        """Counts bytes that no core call has."""
        if self.watch is not None:
            self.watch.add(count)

    def end(self, failed: bool) -> None:
        """Work has ended."""
        if self._slots is not None:
            self._slots.end(self._index, failed)
            if self._slots.look().over:
                self._settle()

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(kind is not None)


def checked_progress(progress: ProgressOption) -> ProgressOption:
    """The option of a reader or writer; ValueError for what it cannot be."""
    if isinstance(progress, bool) or callable(progress):
        return progress
    raise ValueError(f"progress={progress!r}: must be True, False or a function")


def start_meter(progress: ProgressOption, operation: Operation, path: str, is_coordinator: bool) -> Meter:
    """The meter of a save or load that is being set up on this rank."""
    if not progress:
        return Meter()
    name = f"dcpring/progress/{host_id()}/{operation}/{path}"
    shared, rank = _shared_slots(name), rank_in()

    def show(slots: Slots) -> Callable[[], None]:
        if not is_coordinator:
            return _nothing
        if callable(progress):
            return _show(slots, _TELL_SECONDS, _teller(operation, progress), daemon=True)
        # Loads with no_dist=True have as many coordinators as there are ranks, and share a terminal.
        is_first = shared is None or agree(f"{name}/shown", str(rank)) == str(rank)
        return _draw(slots, _LABELS[operation], stays=True) if is_shown() and is_first else _nothing

    return Meter(_own_slots(), 0, show) if shared is None else Meter(shared, rank, show)


# ---- memory ----


def _own_slots() -> Slots:
    return Slots(mmap.mmap(-1, Slots.bytes(1)))


def _shared_slots(name: str) -> Slots | None:
    """The slots of this host's ranks; None where there are no others, or they cannot be reached."""
    if world_size() == 1:
        return None
    try:
        return Slots(_host_memory(name, Slots.bytes(world_size())))
    except Exception as error:  # of the system's, or of the store's: none is worth a save
        logger.info("this rank's progress is not seen, as it cannot share memory with the others: %s", error)
        return None


def _host_memory(name: str, size: int) -> mmap.mmap:
    """Memory that all ranks of this host get by this name; whose it is keeps it open for the others."""
    descriptor, word = shared_memory.create(size)
    try:
        agreed = agree(name, word)
        memory = shared_memory.open_word(agreed)
    except BaseException:
        os.close(descriptor)
        raise
    if agreed == word:
        weakref.finalize(memory, os.close, descriptor)
    else:
        os.close(descriptor)
    return memory
