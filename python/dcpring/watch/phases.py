"""What one rank's save or load does, and when: its phases always, all else when it is traced or profiled.

A storage writer or reader has a ``Tracer``. For each save or load that makes an object of ``Phases`` (a reading of the
clock for each phase, which the planners' reports need), or an ``Operation``, which also takes spans: of phases, calls
of the core, waits, and what the core's workers do. DCP calls all of it on one thread. ``trace_file`` writes them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from torch.autograd import profiler
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from dcpring import _C
from dcpring.base.groups import world_size
from dcpring.base.whose import saying_whose, tell_host
from dcpring.errors import CheckpointError
from dcpring.torchside import profiling
from dcpring.watch.trace_file import STEPS, Recorded, Span, TraceFile, Work, trace_file

ENVIRONMENT = "DCPRING_TRACE"

WATCH_ROOM = 1 << 15
"""Spans of the core that are kept for each file of a save, or call of a load: 2 MiB."""

_MOST_WORK = 50_000
"""Spans of the core that are kept for one operation."""

READ_METADATA, LOCAL_PLAN = "read metadata", "local plan"
GATHER_PLANS, GLOBAL_PLAN, SCATTER_PLANS = "gather plans", "global plan", "scatter plans"
WRITE, GATHER_RESULTS, COMMIT, CLEAN_UP, READ = "write", "gather results", "commit", "clean-up", "read"
"""The phases. Those that begin with "gather" and "scatter" are waits: the coordinator's for all, the others' for it."""

THE_PLANS, THE_RESULTS, NOTHING = "the plans", "the results", "nothing"
"""What a rank waits for when a step is done, where that is not one phase on all ranks. Without results to wait for it
is over, as without anything."""

_NOT_HEARD_OF = "its end was not seen: it failed, here or on another rank, or was given up"


class Phases:
    """One phase after the other, of a save or a load that is not traced.

    Attributes:
        name: of the phase that it is in, "" in none.
        room: for spans of the core.
        identity: the same on all ranks; "" where it is not traced.
        is_coordinator: whether this rank plans for all, and commits.
        is_alone: whether each rank plans and commits by itself.
        is_sure: whether it is known to be a save or a load: metadata is also read for other reasons.
        is_over: whether its end has been seen.
    """

    room = 0
    identity = ""

    def __init__(self) -> None:
        self.name = ""
        self.is_coordinator = False
        self.is_alone = False
        self.is_sure = False
        self.is_over = False
        self._since = 0
        self._seconds: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """Ends the phase that it is in, if that is another, and begins this one."""
        if name != self.name:
            now = time.monotonic_ns()
            self._end(now, {})
            self.name, self._since = name, now

    def end(self, **about: Any) -> None:
        """Ends the phase that it is in."""
        self._end(time.monotonic_ns(), about)

    def _end(self, now: int, about: dict[str, Any]) -> None:
        if self.name:
            name, self.name = self.name, ""
            self._note_phase(name, self._since, now, about)

    def _note_phase(self, name: str, begin: int, end: int, about: dict[str, Any]) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + (end - begin) / 1e9

    def seconds(self) -> dict[str, float]:
        """By name, of the phases that have ended."""
        return self._seconds

    def join(self, is_coordinator: bool, is_alone: bool = False) -> None:
        """It is a save or a load, which this rank leads or not; or where each plans and commits by itself."""
        self.is_coordinator, self.is_alone, self.is_sure = is_coordinator, is_alone, True

    def wait(self, what: str) -> None:
        """A step is done: begins what this rank waits for then, a phase or one of those above."""
        if what == THE_PLANS:
            self.begin(GATHER_PLANS if self.is_coordinator else SCATTER_PLANS)
        elif what == THE_RESULTS and (self.is_coordinator or self.is_alone):
            self.begin(GATHER_RESULTS)
            self.flush()
        elif what in (THE_RESULTS, NOTHING):
            self.finish()
        else:
            self.begin(what)

    # ---- what only an Operation does ----

    def share(self, identity: str) -> None:
        """What the coordinator calls it."""

    def span(self, name: str, kind: str = "step", **about: Any) -> AbstractContextManager[dict[str, Any]]:
        """A part of the phase; gives what is to be said about it, which may be added to."""
        return contextlib.nullcontext({})

    def core(self, watch: _C.Watch | None, name: str, files: Sequence[str]) -> AbstractContextManager[None]:
        """Calls of the core about these files, seen by a watch."""
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Writes what is known so far."""

    def finish(self) -> None:
        """It is over, and this rank knows of no failure."""
        self.end()
        self.is_over = True

    def fail(self, error: BaseException) -> None:
        """Something that DCP called has raised this. Unless another phase begins it has failed."""

    def abandon(self) -> None:
        """Nothing more will be heard of it."""
        self.is_over = True


class Operation(Phases):
    """A save or a load that is traced or profiled.

    Args:
        kind: "save" or "load".
        checkpoint: its path.
        file: where the trace goes; None: it is only profiled.
        staged: when its state was copied.
    """

    room = WATCH_ROOM

    def __init__(self, kind: str, checkpoint: str, file: TraceFile | None, staged: Sequence[Span] = ()) -> None:
        super().__init__()
        self.identity = uuid.uuid4().hex
        self._file = file
        self._mark: _Mark | None = None
        self._recorded = Recorded(kind, checkpoint, _clock_offset(), spans=list(staged))

    def begin(self, name: str) -> None:
        if name != self.name:
            super().begin(name)
            self._recorded.failure = ""
            self._mark = _Mark(name)

    def _note_phase(self, name: str, begin: int, end: int, about: dict[str, Any]) -> None:
        super()._note_phase(name, begin, end, about)
        self._recorded.spans.append(Span("main", name, "phase", begin, end, about))
        if self._mark is not None:
            self._mark.close()

    def join(self, is_coordinator: bool, is_alone: bool = False) -> None:
        super().join(is_coordinator, is_alone)
        self._recorded.is_coordinator, self._recorded.is_alone = is_coordinator, is_alone

    def share(self, identity: str) -> None:
        self.identity = identity or self.identity

    @contextlib.contextmanager
    def span(self, name: str, kind: str = "step", **about: Any) -> Iterator[dict[str, Any]]:
        begin, mark = time.monotonic_ns(), _Mark(name)
        try:
            yield about
        except BaseException as error:
            about["failed"] = _text_of(error)
            raise
        finally:
            mark.close()
            self._recorded.spans.append(Span("main", name, kind, begin, time.monotonic_ns(), about))

    @contextlib.contextmanager
    def core(self, watch: _C.Watch | None, name: str, files: Sequence[str]) -> Iterator[None]:
        with self.span(name, "core") as about:
            try:
                yield
            finally:
                self._take(watch, files, about)
        _Mark(f"{name}: {_summary(about)}").close()

    def _take(self, watch: _C.Watch | None, files: Sequence[str], about: dict[str, Any]) -> None:
        """Takes what the watch has seen, and says how much of what that was."""
        seen, lost = ([], 0) if watch is None else watch.take()
        room = max(0, _MOST_WORK - len(self._recorded.work))
        self._recorded.work += [Work(*one[:6], files[one[6]], *one[7:]) for one in seen[:room]]
        self._recorded.lost += lost + len(seen[room:])
        for step, begin, end, _, size, crc, *_ in seen:
            kind = STEPS[step]
            about[f"{kind} s"] = about.get(f"{kind} s", 0.0) + (end - begin) / 1e9
            if crc:
                about["CRC s"] = about.get("CRC s", 0.0) + crc / 1e9
            if kind in ("write", "read"):
                about["bytes"] = about.get("bytes", 0) + size

    def flush(self) -> None:
        if self._file is None:
            return
        recorded = self._recorded
        recorded.identity = self.identity
        recorded.open = None
        if self.name:
            recorded.open = Span("main", self.name, "phase", self._since, time.monotonic_ns(), {"unfinished": True})
        self._file.put(recorded)

    def finish(self) -> None:
        super().finish()
        self.flush()

    def fail(self, error: BaseException) -> None:
        where = self.name
        self.end(failed=_text_of(error))
        self._recorded.failure = f"{where}: {_text_of(error)}" if where else _text_of(error)
        self.flush()

    def abandon(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self.is_sure and not self._recorded.failure:
            self._recorded.failure = f"{self.name}: {_NOT_HEARD_OF}"
            self.end(failed=_NOT_HEARD_OF)
            self.flush()


class _Mark:
    """A span of torch.profiler, from now until it is closed on the same thread."""

    def __init__(self, name: str) -> None:
        self._thread = threading.get_ident()
        self._record = profiler.record_function(f"dcpring: {name}")
        self._record.__enter__()

    def close(self) -> None:
        if threading.get_ident() == self._thread:
            self._record.__exit__(None, None, None)


class Tracer:
    """What a writer or a reader traces with.

    Args:
        path: of the trace, None: what the environment says.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = os.environ.get(ENVIRONMENT, "") if path is None else os.fspath(path)
        self._staged: Span | None = None
        self._in_background = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process goes on with what was staged here: DCP's background process."""
        staged, self._staged = self._staged, None
        return {"path": self._path, "staged": staged}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        self._staged = state["staged"]
        self._in_background = self._staged is not None

    def start(self, kind: str, checkpoint: str | os.PathLike[str]) -> Phases:
        """A save or a load begins."""
        if not self._path and not profiling.is_on():
            return Phases()
        file = trace_file(self._path, self._in_background) if self._path else None
        staged, self._staged = self._staged, None
        return Operation(kind, str(checkpoint), file, [] if staged is None else [staged])

    def staged(self, staging: Staging) -> None:
        """What is saved next was copied then."""
        if self._path:
            self._staged = Span("staging", "staging", "staging", staging.begin, staging.end, {})


@dataclass
class Staging:
    """When a state was copied: ns of CLOCK_MONOTONIC."""

    begin: int = 0
    end: int = 0

    @classmethod
    @contextlib.contextmanager
    def timed(cls) -> Iterator[Staging]:
        """Of what is done in a ``with``."""
        staging = cls(time.monotonic_ns())
        with profiler.record_function("dcpring: staging") if profiling.is_on() else contextlib.nullcontext():
            yield staging
        staging.end = time.monotonic_ns()


Method = TypeVar("Method", bound=Callable[..., Any])
Plan = TypeVar("Plan", SavePlan, LoadPlan)


def step(phase: str = "", then: str = "") -> Callable[[Method], Method]:
    """Of what DCP calls, in a class with ``_phases``: a step of a save or a load, which fails with what this raises.

    Errors say whose ranks they name, and on which host they were.

    Args:
        phase: that it begins; "" where it belongs to the one before.
        then: what this rank waits for when it is done, see ``Phases.wait``; "" where more of the phase follows.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell_host()
            if phase:
                self._phases.begin(phase)
            try:
                with saying_whose():
                    result = method(self, *args, **kwargs)
            except BaseException as error:
                self._phases.fail(error)
                if world_size() == 1 or _can_travel(error):
                    raise
                raise CheckpointError(_text_of(error)) from error
            if then:
                self._phases.wait(then)
            return result

        return cast(Method, call)

    return decorate


def _can_travel(error: BaseException) -> bool:
    """Whether other ranks can be sent an exception. DCP sends all, and leaves the ranks waiting where that raises."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


# ---- from the coordinator to all ranks ----


@dataclass
class Sent:
    """Storage data of a plan that has none of its own.

    Attributes:
        traced_as: what the coordinator calls the load.
    """

    traced_as: str


def send(phases: Phases, plans: list[Plan]) -> list[Plan]:
    """The plans with what the coordinator calls the save or load, where it traces."""
    if not phases.identity:
        return plans
    for index, plan in enumerate(plans):
        if plan.storage_data is None:
            plans[index] = replace(plan, storage_data=Sent(phases.identity))
        elif hasattr(plan.storage_data, "__dict__"):
            plan.storage_data.traced_as = phases.identity
    return plans


def receive(phases: Phases, plan: SavePlan | LoadPlan) -> None:
    phases.share(getattr(plan.storage_data, "traced_as", ""))


# ---- helpers ----


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _summary(about: dict[str, Any]) -> str:
    """For torch.profiler, which only sees threads that it knows: not the core's."""
    gib = about.get("bytes", 0) / (1 << 30)
    return ", ".join([f"{gib:.3f} GiB", *(f"{name} {value:.3f}" for name, value in about.items() if " s" in name)])


def _clock_offset() -> int:
    """What to add to CLOCK_MONOTONIC for the wall clock, in ns: read three times, the one with the least in between."""
    offsets = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        offsets.append((after - before, wall - (before + after) // 2))
    return min(offsets)[1]
