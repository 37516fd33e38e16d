"""Trace files: what the operations of one process did, as JSON that Perfetto and Chrome read.

One object per path, for as long as the process lives. The file is written anew, beside and renamed, whenever an
operation has ended; each operation is kept as the text that stands for it. Any thread may put operations in.

Times are whole microseconds since 1970: rounding down keeps the order of all times, so what nests still nests.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dcpring.base.files import replace_file

logger = logging.getLogger("dcpring")

MOST_EVENTS = 100_000
"""In a file; about 17 MB."""

STEPS = ("allocate", "fill", "write", "fsync", "read", "use", "set up")
"""The core's names for what it does (csrc/core/io/watch.h), by number."""

NO_SLOT = (1 << 32) - 1
FORMAT = 1

_SAVED_IN_BACKGROUND = ".background"
_TIDS_PER_WORKER = 1 << 13
_TIDS_PER_TRACK = 1 << 20


class Span(NamedTuple):
    """From when to when something was done: ns of CLOCK_MONOTONIC.

    Attributes:
        lane: "main" (what DCP calls), "staging", "worker 0", or "worker 0 io 2": one of its buffers.
        name: what.
        kind: "phase", "core" (calls of the core), "wait" (for other ranks, in a phase), "step", "staging".
        about: what else there is to say.
    """

    lane: str
    name: str
    kind: str
    begin: int
    end: int
    about: dict[str, Any]


class Work(NamedTuple):
    """A span of the core."""

    step: int
    begin: int
    end: int
    offset: int
    size: int
    crc: int
    file: str
    worker: int
    slot: int


@dataclass
class Recorded:
    """A save or a load.

    Attributes:
        kind: "save" or "load".
        checkpoint: its path.
        clock_offset: from CLOCK_MONOTONIC to the wall clock, ns.
        identity: the same on all ranks.
        is_alone: each rank plans and commits by itself.
        failure: "" for none.
        open: the phase that it is in.
        lost: spans of the core that there was no room for.
        number: in its file, given by it.
        track: in its file: operations at the same time have lanes of their own.
    """

    kind: str
    checkpoint: str
    clock_offset: int = 0
    identity: str = ""
    is_coordinator: bool = False
    is_alone: bool = False
    failure: str = ""
    spans: list[Span] = field(default_factory=list)
    open: Span | None = None
    work: list[Work] = field(default_factory=list)
    lost: int = 0
    number: int | None = None
    track: int = 0

    def all_spans(self) -> list[Span]:
        return self.spans if self.open is None else [*self.spans, self.open]


@dataclass
class _Written:
    """An operation in the file.

    Attributes:
        begin, end: microseconds.
        lanes: by thread id.
        text: its events, with commas between them.
        count: of these.
    """

    begin: int
    end: int
    track: int
    lanes: dict[int, str]
    text: bytes = b""
    count: int = 0


class TraceFile:
    """See the module's docstring."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._path = path
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.RLock()  # an operation may be given up while the collector runs, in the middle of put()
        self._waiting: deque[Recorded] = deque()
        self._is_busy = False
        self._operations: dict[int, _Written] = {}
        self._next = 0
        self._dropped = 0
        self._lost = 0
        self._has_failed = False

    def put(self, recorded: Recorded) -> None:
        """Adds an operation, or what is now known of it, and writes the file. A failure is logged, and not raised."""
        self._waiting.append(recorded)
        with self._lock:
            if self._is_busy:  # the call that the collector has interrupted takes it too
                return
            self._is_busy = True
            try:
                while self._waiting:
                    self._take(self._waiting.popleft())
                    self._write_or_warn()
            finally:
                self._is_busy = False

    def _take(self, recorded: Recorded) -> None:
        if recorded.number is None:
            recorded.number, self._next = self._next, self._next + 1
        self._operations.pop(recorded.number, None)
        written = _encode(recorded, self._rank, self._world_size, self._free_track(recorded))
        self._operations[recorded.number] = written
        self._lost += recorded.lost
        recorded.lost = 0
        self._drop_oldest()

    def _write_or_warn(self) -> None:
        try:
            self._write()
        except OSError as error:
            if not self._has_failed:
                logger.warning("the trace %s cannot be written: %s; the save or load goes on", self._path, error)
            self._has_failed = True

    def _free_track(self, recorded: Recorded) -> int:
        begin, end = _extent(recorded)
        taken = {one.track for one in self._operations.values() if one.begin < end and begin < one.end}
        return next(track for track in range(len(taken) + 1) if track not in taken)

    def _drop_oldest(self) -> None:
        count = sum(one.count for one in self._operations.values())
        while count > MOST_EVENTS and len(self._operations) > 1:
            oldest = min(self._operations)
            count -= self._operations.pop(oldest).count
            self._dropped += 1

    def _write(self) -> None:
        operations = [self._operations[number] for number in sorted(self._operations)]
        lanes = {tid: lane for one in operations for tid, lane in one.lanes.items()}
        head = json.dumps({"displayTimeUnit": "ms", "otherData": self._about()})
        events = b",\n".join([*map(str.encode, self._names(lanes)), *(one.text for one in operations)])
        text = b"".join((head[:-1].encode(), b', "traceEvents": [\n', events, b"\n]}\n"))
        os.makedirs(self._path.parent, exist_ok=True)
        replace_file(self._path, text)

    def _about(self) -> dict[str, Any]:
        notes = []
        if self._dropped:
            notes.append(f"the oldest {self._dropped} operations were dropped: a file keeps {MOST_EVENTS} events")
        if self._lost:
            notes.append(f"{self._lost} spans of workers found no room")
        return {
            "dcpring_trace": FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "parent": os.getppid(),
            "clock": "CLOCK_MONOTONIC put on the wall clock: microseconds since 1970; each operation has its offset",
            "dropped_operations": self._dropped,
            "lost_spans": self._lost,
            "notes": notes,
        }

    def _names(self, lanes: dict[int, str]) -> list[str]:
        of_process = {"process_name": {"name": f"rank {self._rank} ({socket.gethostname()})"}}
        of_process |= {"process_sort_index": {"sort_index": self._rank}}  # type: ignore[dict-item]
        events = [{"ph": "M", "pid": self._rank, "name": name, "args": args} for name, args in of_process.items()]
        for tid, lane in sorted(lanes.items()):
            of_thread = {"thread_name": {"name": lane}, "thread_sort_index": {"sort_index": tid}}
            events += [
                {"ph": "M", "pid": self._rank, "tid": tid, "name": name, "args": args}
                for name, args in of_thread.items()
            ]
        return [json.dumps(event) for event in events]


# ---- events ----


def _extent(recorded: Recorded) -> tuple[int, int]:
    """From the first to the last of its times, microseconds; an empty one still takes its place."""
    spans = recorded.all_spans()
    begin = min((span.begin for span in spans), default=0)
    end = max((span.end for span in spans), default=0)
    return _micros(begin, recorded), _micros(end, recorded) + 1


def _micros(ns: int, recorded: Recorded) -> int:
    return (ns + recorded.clock_offset) // 1000


def _tid(track: int, lane: str) -> int:
    """Lanes in the order in which they are shown."""
    words = lane.split()
    if words[0] == "sync":
        return track * _TIDS_PER_TRACK + 3 + int(words[1])
    if words[0] != "worker":
        return track * _TIDS_PER_TRACK + (1 if lane == "main" else 2)
    slot = 1 + int(words[3]) if len(words) > 2 else 0
    return track * _TIDS_PER_TRACK + 16 + int(words[1]) * _TIDS_PER_WORKER + slot


def _encode(recorded: Recorded, rank: int, world_size: int, track: int) -> _Written:
    begin, end = _extent(recorded)
    written = _Written(begin, end, track, {})
    lines = [_whole(recorded, rank, world_size, _tid_of(written, "main"))]
    # A span that holds others comes before them where both begin at the same time.
    for span in sorted(recorded.all_spans(), key=lambda span: (span.begin, -span.end)):
        event = {"name": span.name, "cat": span.kind, "ph": "X", "pid": rank, "tid": _tid_of(written, span.lane)}
        event |= _times(span.begin, span.end, recorded)
        lines.append(json.dumps(event | {"args": {"operation": recorded.number, **span.about}}))
    lines += _work_lines(recorded, rank, written)
    written.text, written.count = ",\n".join(lines).encode(), len(lines)
    return written


def _tid_of(written: _Written, lane: str) -> int:
    tid = _tid(written.track, lane)
    written.lanes[tid] = lane if written.track == 0 else f"{lane} ({written.track + 1})"
    return tid


def _times(begin: int, end: int, recorded: Recorded) -> dict[str, int]:
    start = _micros(begin, recorded)
    return {"ts": start, "dur": _micros(end, recorded) - start}


def _whole(recorded: Recorded, rank: int, world_size: int, tid: int) -> str:
    on_main = [span for span in recorded.all_spans() if span.lane == "main"]
    begin = min((span.begin for span in on_main), default=0)
    end = max((span.end for span in on_main), default=0)
    args = {
        "operation": recorded.number,
        "id": recorded.identity,
        "kind": recorded.kind,
        "checkpoint": recorded.checkpoint,
        "world_size": world_size,
        "coordinator": recorded.is_coordinator,
        "alone": recorded.is_alone,
        "clock_offset_ns": recorded.clock_offset,
        **({"failed": recorded.failure} if recorded.failure else {}),
    }
    name = f"{recorded.kind} {os.path.basename(recorded.checkpoint.rstrip('/'))}"
    event = {"name": name, "cat": "operation", "ph": "X", "pid": rank, "tid": tid}
    return json.dumps(event | _times(begin, end, recorded) | {"args": args})


def _work_lines(recorded: Recorded, rank: int, written: _Written) -> Iterable[str]:
    names: dict[str, str] = {}
    for step, begin, end, offset, size, crc, file, worker, slot in recorded.work:
        kind = STEPS[step]
        tid = _tid_of(written, _lane_of(kind, worker, slot))
        start = _micros(begin, recorded)
        quoted = names.get(file) or names.setdefault(file, json.dumps(file))
        summed = f', "crc_us": {crc // 1000}' if crc else ""
        yield (
            f'{{"name": "{kind}", "cat": "io", "ph": "X", "pid": {rank}, "tid": {tid}, "ts": {start}, '
            f'"dur": {_micros(end, recorded) - start}, "args": {{"operation": {recorded.number}, "file": {quoted}, '
            f'"offset": {offset}, "bytes": {size}{summed}}}}}'
        )


def _lane_of(kind: str, worker: int, slot: int) -> str:
    """Who did it: DCP's thread, a worker, or the disk, for one of a worker's buffers or one of several syncs."""
    if kind in ("allocate", "set up"):
        return "main"
    if kind == "fsync":
        return f"sync {slot}"
    return f"worker {worker}" if kind not in ("write", "read") or slot == NO_SLOT else f"worker {worker} io {slot}"


# ---- which file ----

_MOST_FILES = 16
"""Files whose operations are kept, so that more can be added: those that were used last."""

_files: dict[Path, TraceFile] = {}
_files_lock = threading.Lock()


def trace_file(path: str, in_background: bool = False) -> TraceFile:
    """This rank's: "t.json" is "t.3.json" on rank 3 of several; "t.3.background.json" in DCP's background process."""
    from dcpring.base import groups  # which needs torch: `dcpring trace` reads traces without

    rank, world_size = groups.rank_in(), groups.world_size()
    own = Path(path).absolute()
    middle = (f".{rank}" if world_size > 1 else "") + (_SAVED_IN_BACKGROUND if in_background else "")
    own = own.with_name(f"{own.stem}{middle}{own.suffix}")
    with _files_lock:
        known = _files.pop(own, None)
        if known is None or (known._rank, known._world_size) != (rank, world_size):
            known = TraceFile(own, rank, world_size)
        _files[own] = known
        if len(_files) > _MOST_FILES:
            del _files[next(iter(_files))]
        return known
