"""What one rank's save or load does, and when: a list of spans that reports, metrics and traces read once it is over.

A storage writer or reader has a ``Tracer``, which gives each save or load its ``Events``. DCP makes all calls of one on
one thread, so phases follow each other, and to begin one ends the one before. Where there is a trace or torch.profiler,
parts of phases, calls of the core and what the core's workers do are noted too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

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
"""Spans of the core that are kept for one save or load."""

READ_METADATA, LOCAL_PLAN = "read metadata", "local plan"
GATHER_PLANS, GLOBAL_PLAN, SCATTER_PLANS = "gather plans", "global plan", "scatter plans"
WRITE, GATHER_RESULTS, COMMIT, CLEAN_UP, READ = "write", "gather results", "commit", "clean-up", "read"
"""The phases. Those that begin with "gather" and "scatter" are waits: the coordinator's for all, the others' for it."""

_NOT_HEARD_OF = "its end was not seen: it failed, here or on another rank, or was given up"

Plan = TypeVar("Plan", SavePlan, LoadPlan)


class Events(Recorded):
    """What a save or a load does on this rank.

    Args:
        kind: "save" or "load".
        checkpoint: its path.
        is_recorded: whether more than phases is noted: there is a trace file or a profiler.
        file: the trace file; None without.
        staged: when its state was copied.

    Attributes:
        started: when its first phase began, ns of CLOCK_MONOTONIC; 0 before.
        phase: the name of the phase that it is in, "" in none.
        room: for spans of the core.
        is_sure: whether it is known to be a save or a load: metadata is also read for other reasons.
        is_over: whether its end has been seen.
    """

    def __init__(
        self,
        kind: str = "",
        checkpoint: str = "",
        *,
        is_recorded: bool = False,
        file: TraceFile | None = None,
        staged: Sequence[Span] = (),
    ) -> None:
        super().__init__(kind, checkpoint, spans=list(staged))
        self.started = 0
        self.phase = ""
        self.room = 0
        self.is_sure = False
        self.is_over = False
        self.is_recorded = is_recorded
        self._since = 0
        self._file = file
        self._mark: _Mark | None = None
        if is_recorded:
            self.clock_offset, self.identity, self.room = _clock_offset(), uuid.uuid4().hex, WATCH_ROOM

    def seconds(self) -> dict[str, float]:
        """How long each phase took, of those that have ended."""
        taken: dict[str, float] = {}
        for span in self.spans:
            if span.kind == "phase":
                taken[span.name] = taken.get(span.name, 0.0) + (span.end - span.begin) / 1e9
        return taken

    # ---- phases ----

    def begin(self, phase: str) -> None:
        """Begins a phase, and ends the one before. Nothing happens if it is in that phase already."""
        if phase == self.phase:
            return
        self.end()
        self.phase, self._since = phase, time.monotonic_ns()
        self.started = self.started or self._since
        if self.is_recorded:
            self.failure, self._mark = "", _Mark(phase)

    def end(self, **about: Any) -> None:
        """Ends the phase that it is in, if any."""
        if self.phase:
            self.spans.append(Span("main", self.phase, "phase", self._since, time.monotonic_ns(), about))
            self.phase = ""
            if self._mark is not None:
                self._mark.close()

    @contextlib.contextmanager
    def step(self, phase: str = "") -> Iterator[None]:
        """What DCP calls, which all ranks hear of if it raises: the save or load has failed then.

        Errors say whose ranks they name, and on which host they were raised.

        Args:
            phase: that begins with it; "" where it belongs to the one before.
        """
        is_alone = world_size() == 1
        if not is_alone:
            tell_host()
        if phase:
            self.begin(phase)
        try:
            with contextlib.nullcontext() if is_alone else saying_whose():
                yield
        except BaseException as error:
            self.fail(error)
            if is_alone or _can_travel(error):
                raise
            raise CheckpointError(_text_of(error)) from error

    def set_up(self, is_coordinator: bool, is_alone: bool = False) -> None:
        """It is a save or a load, which this rank leads or not, or where each rank plans and commits alone."""
        self.is_coordinator, self.is_alone, self.is_sure = is_coordinator, is_alone, True

    def wait_for_plans(self) -> None:
        """This rank has made its plan: the coordinator waits for all plans, the others for its answer."""
        self.begin(GATHER_PLANS if self.is_coordinator else SCATTER_PLANS)

    def wait_for_results(self) -> None:
        """This rank has written: who commits waits for the others, for the others it is over."""
        if self.is_coordinator or self.is_alone:
            self.begin(GATHER_RESULTS)
            self._put()
        else:
            self.finish()

    def finish(self) -> None:
        """It is over, and this rank knows of no failure."""
        self.end()
        self.is_over = True
        self._put()

    def fail(self, error: BaseException) -> None:
        """Something that DCP called has raised this. Unless another phase begins it has failed."""
        phase, text = self.phase, _text_of(error)
        self.end(failed=text)
        self.failure = f"{phase}: {text}" if phase else text
        self._put()

    def abandon(self) -> None:
        """Nothing more will be heard of it."""
        if self.is_sure and not self.is_over and not self.failure:
            self.failure = f"{self.phase}: {_NOT_HEARD_OF}"
            self.end(failed=_NOT_HEARD_OF)
            self._put()
        self.is_over = True

    def _put(self) -> None:
        """Writes what is known so far to the trace, if there is one."""
        if self._file is None:
            return
        now = time.monotonic_ns()
        self.open = Span("main", self.phase, "phase", self._since, now, {"unfinished": True}) if self.phase else None
        self._file.put(self)

    # ---- parts of phases ----

    @contextlib.contextmanager
    def span(self, name: str, kind: str = "step", **about: Any) -> Iterator[dict[str, Any]]:
        """A part of the phase. Gives the dict of what else is said about it, which may be added to."""
        if not self.is_recorded:
            yield about
            return
        begin, mark = time.monotonic_ns(), _Mark(name)
        try:
            yield about
        except BaseException as error:
            about["failed"] = _text_of(error)
            raise
        finally:
            mark.close()
            self.spans.append(Span("main", name, kind, begin, time.monotonic_ns(), about))

    @contextlib.contextmanager
    def core(self, watch: _C.Watch | None, name: str, files: Sequence[str]) -> Iterator[None]:
        """Calls of the core about these files, seen by a watch."""
        with self.span(name, "core") as about:
            try:
                yield
            finally:
                if self.is_recorded:
                    self._take(watch, files, about)
        if self.is_recorded:
            _Mark(f"{name}: {_summary(about)}").close()

    def _take(self, watch: _C.Watch | None, files: Sequence[str], about: dict[str, Any]) -> None:
        """Takes what the watch has seen, and says how much of what that was."""
        seen, lost = ([], 0) if watch is None else watch.take()
        room = max(0, _MOST_WORK - len(self.work))
        self.work += [Work(*one[:6], files[one[6]], *one[7:]) for one in seen[:room]]
        self.lost += lost + len(seen[room:])
        for step, begin, end, _, size, crc, *_ in seen:
            kind = STEPS[step]
            about[f"{kind} s"] = about.get(f"{kind} s", 0.0) + (end - begin) / 1e9
            if crc:
                about["CRC s"] = about.get("CRC s", 0.0) + crc / 1e9
            if kind in ("write", "read"):
                about["bytes"] = about.get("bytes", 0) + size

    # ---- one name on all ranks ----

    def name_in(self, plans: list[Plan]) -> list[Plan]:
        """The coordinator's plans, with what it calls the save or load where it is recorded."""
        if not self.identity:
            return plans
        for index, plan in enumerate(plans):
            if plan.storage_data is None:
                plans[index] = replace(plan, storage_data=SimpleNamespace(traced_as=self.identity))
            elif hasattr(plan.storage_data, "__dict__"):
                plan.storage_data.traced_as = self.identity
        return plans

    def take_name(self, plan: SavePlan | LoadPlan) -> None:
        """Takes over what the coordinator calls the save or load."""
        self.identity = getattr(plan.storage_data, "traced_as", "") or self.identity


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
        path: of the trace; None: what the environment says.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = os.environ.get(ENVIRONMENT, "") if path is None else os.fspath(path)
        self._staged: list[Span] = []
        self._in_background = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process, DCP's for saves in the background, goes on with what was staged here."""
        staged, self._staged = self._staged, []
        return {"_path": self._path, "_staged": staged, "_in_background": bool(staged)}

    def start(self, kind: str, checkpoint: str | os.PathLike[str]) -> Events:
        """A save or a load begins."""
        if not self._path and not profiling.is_on():
            return Events(kind)
        file = trace_file(self._path, self._in_background) if self._path else None
        staged, self._staged = self._staged, []
        return Events(kind, str(checkpoint), is_recorded=True, file=file, staged=staged)

    def note_staged(self, staging: Staging) -> None:
        """What is saved next was copied then."""
        if self._path:
            self._staged = [Span("staging", "staging", "staging", staging.begin, staging.end, {})]


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


def _can_travel(error: BaseException) -> bool:
    """Whether other ranks can be sent an exception. DCP sends all, and leaves the ranks waiting where that raises."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


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
