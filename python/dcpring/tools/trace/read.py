"""Reading traces: the operations of a run, each with what its ranks did.

Traces come from anywhere: everything that is used of one is checked first. Times are microseconds since 1970.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dcpring.errors import CheckpointError
from dcpring.watch.trace_file import FORMAT

MOST_BYTES = 1 << 27
"""Of a trace; dcpring's own have some 20 MB at most."""

_LATEST = 1 << 53
_MOST_RANKS = 1 << 20
_KINDS = frozenset(("phase", "core", "wait", "step", "staging", "io"))
_AS_OTHERS = re.compile(r" \(\d+\)$")


class Span(NamedTuple):
    """Of a trace.

    Attributes:
        lane: "main", "staging", "sync 0", "worker 0" or "worker 0 io 2".
        kind: see ``watch.trace_file.Span``; "io": what the core's workers do.
        file: of an io span.
        bytes: likewise.
        crc: microseconds of it that went into CRC-32.
        failed: with what, "" if it has not.
    """

    lane: str
    name: str
    kind: str
    begin: int
    end: int
    file: str = ""
    bytes: int = 0
    crc: int = 0
    failed: str = ""


@dataclass
class RankTrace:
    """What one rank did in an operation.

    Attributes:
        trace: the file that says so.
        is_alone: ranks do not wait for each other before the end (``use_collectives=False``).
        failed: with what, "" if it has not.
        spans: but for those of the whole operation, and io; by their beginnings.
        io: by their beginnings.
    """

    rank: int
    host: str
    trace: Path
    identity: str
    kind: str
    checkpoint: str
    is_coordinator: bool
    is_alone: bool
    begin: int
    end: int
    failed: str = ""
    spans: list[Span] = field(default_factory=list)
    io: list[Span] = field(default_factory=list)


@dataclass
class Operation:
    """A save or a load of a run.

    Attributes:
        kind: "save" or "load".
        checkpoint: its path.
        world_size: ranks of the run.
        parts: by rank; those whose traces were given, and that took part.
        given: ranks whose traces were given.
    """

    kind: str
    checkpoint: str
    identity: str
    world_size: int
    parts: dict[int, RankTrace] = field(default_factory=dict)
    given: frozenset[int] = frozenset()

    @property
    def begin(self) -> int:
        return min(part.begin for part in self.parts.values())

    @property
    def end(self) -> int:
        return max(part.end for part in self.parts.values())

    @property
    def missing(self) -> list[int]:
        """Ranks without a trace, the first thousand of them. One without a part in it may read for itself alone."""
        known = self.given | self.parts.keys()
        absent = (rank for rank in range(self.world_size) if rank not in known)
        return [rank for rank, _ in zip(absent, range(1000), strict=False)]


@dataclass
class Trace:
    """A file.

    Attributes:
        process, parent: their ids.
        notes: what it says is not in it.
        parts: of the operations in it.
    """

    path: Path
    rank: int
    world_size: int
    host: str
    process: int
    parent: int
    notes: list[str]
    parts: list[RankTrace] = field(default_factory=list)

    def is_of_same_run(self, other: Trace) -> bool:
        if {part.identity for part in self.parts} & {part.identity for part in other.parts}:
            return True
        if self.world_size != other.world_size:
            return False
        if self.rank == other.rank:  # of one process, or of DCP's process in the background and its parent
            return self.host == other.host and (self.process == other.process or self._is_child(other))
        return self.world_size > 1 and self._begin < other._end and other._begin < self._end

    def _is_child(self, other: Trace) -> bool:
        return self.parent == other.process or other.parent == self.process

    @property
    def _begin(self) -> int:
        return min((part.begin for part in self.parts), default=0)

    @property
    def _end(self) -> int:
        return max((part.end for part in self.parts), default=0)


def read_operations(paths: Sequence[Path]) -> tuple[list[Operation], list[str]]:
    """The operations of a run, in their order, and what else there is to say.

    Raises:
        CheckpointError: a file is no trace of dcpring, or damaged; or they are not of one run.
        OSError: one cannot be read.
    """
    traces = [read_trace(path) for path in dict.fromkeys(paths)]
    _refuse_mixed(traces)
    given = frozenset(trace.rank for trace in traces)
    operations: list[Operation] = []
    by_identity: dict[str, Operation] = {}
    for part, world_size in [(part, trace.world_size) for trace in traces for part in trace.parts]:
        operation = by_identity.get(part.identity)
        if operation is None or part.rank in operation.parts:
            operation = Operation(part.kind, part.checkpoint, part.identity, world_size, given=given)
            operations.append(operation)
            by_identity.setdefault(part.identity, operation)
        operation.parts[part.rank] = part
    operations = sorted(_join_strays(operations), key=lambda operation: operation.begin)
    return operations, [f"{trace.path}: {note}" for trace in traces for note in trace.notes]


def _join_strays(operations: list[Operation]) -> list[Operation]:
    """Before the plans are scattered the ranks do not know the coordinator's name for it; time and place must do."""
    joined: list[Operation] = []
    for operation in sorted(operations, key=lambda operation: -len(operation.parts)):
        home = next((other for other in joined if _fits(operation, other)), None)
        if home is None or operation.world_size == 1:
            joined.append(operation)
        else:
            home.parts |= operation.parts
    return joined


def _fits(stray: Operation, other: Operation) -> bool:
    same = (stray.kind, stray.checkpoint) == (other.kind, other.checkpoint) and not stray.parts.keys() & other.parts
    return same and len(stray.parts) == 1 and stray.begin < other.end and other.begin < stray.end


def _refuse_mixed(traces: Sequence[Trace]) -> None:
    run, rest = list(traces[:1]), list(traces[1:])
    for _ in range(len(traces)):
        found = [trace for trace in rest if any(trace.is_of_same_run(one) for one in run)]
        run += found
        rest = [trace for trace in rest if trace not in found]
    if rest:
        raise CheckpointError(
            f"{rest[0].path} is of another run than {run[0].path}: they have no save or load in common. "
            "Give the traces of one run"
        )


# ---- a file ----


def read_trace(path: Path) -> Trace:
    """See ``read_operations``."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{path} has more than {MOST_BYTES >> 20} MiB: it is no trace of dcpring's")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no trace: it is not JSON ({_short(error)})") from error
    try:
        return _Checked(path, document).trace()
    except _Bad as error:
        raise CheckpointError(f"{path} is damaged, or no trace of dcpring's: {error}") from error


class _Bad(ValueError):
    """What is wrong with a trace."""


class _Checked:
    """A trace being read."""

    def __init__(self, path: Path, document: Any) -> None:
        about = document.get("otherData") if isinstance(document, dict) else None
        if not isinstance(about, dict) or "dcpring_trace" not in about:
            raise CheckpointError(f"{path} is no trace of dcpring's: RingWriter(trace=...) and RingReader write them")
        if about["dcpring_trace"] != FORMAT:
            raise CheckpointError(f"{path} was written by another version of dcpring; take that to read it")
        self._about = about
        self._events = _typed(document, "traceEvents", list)
        self._path = path
        self._lanes: dict[int, str] = {}

    def trace(self) -> Trace:
        about = self._about
        notes = [note for note in _typed(about, "notes", list) if isinstance(note, str)]
        trace = Trace(
            path=self._path,
            rank=_number(about, "rank", _MOST_RANKS),
            world_size=_number(about, "world_size", _MOST_RANKS),
            host=_typed(about, "host", str),
            process=_number(about, "process", _LATEST),
            parent=_number(about, "parent", _LATEST),
            notes=notes,
        )
        if trace.rank >= trace.world_size:
            raise _Bad(f"it is of rank {trace.rank} of {trace.world_size}")
        events = self._complete_events()
        wholes = {_operation_of(event): event for event in events if event["cat"] == "operation"}
        parts = {number: self._part(trace, event) for number, event in wholes.items()}
        for event in events:
            if event["cat"] in _KINDS:
                part = parts.get(_operation_of(event))
                if part is None:
                    raise _Bad(f"an event of operation {_operation_of(event)}, which is not there")
                (part.io if event["cat"] == "io" else part.spans).append(self._span(event))
        for part in parts.values():
            part.spans.sort(key=lambda span: (span.begin, -span.end))
            part.io.sort(key=lambda span: span.begin)
        trace.parts = [parts[number] for number in sorted(parts)]
        return trace

    def _complete_events(self) -> list[dict[str, Any]]:
        events = []
        for event in self._events:
            if not isinstance(event, dict):
                raise _Bad("an event is no object")
            if event.get("ph") == "X":
                _typed(event, "cat", str)
                events.append(event)
            elif event.get("ph") == "M" and event.get("name") == "thread_name":
                name = _typed(_typed(event, "args", dict), "name", str)
                self._lanes[_number(event, "tid", _LATEST)] = _AS_OTHERS.sub("", name)
        return events

    def _part(self, trace: Trace, event: dict[str, Any]) -> RankTrace:
        args, span = event["args"], self._span(event)
        kind = _typed(args, "kind", str)
        if kind not in ("save", "load"):
            raise _Bad(f"an operation is a {kind!r}")
        return RankTrace(
            rank=trace.rank,
            host=trace.host,
            trace=self._path,
            identity=_typed(args, "id", str),
            kind=kind,
            checkpoint=_typed(args, "checkpoint", str),
            is_coordinator=_typed(args, "coordinator", bool),
            is_alone=_typed(args, "alone", bool),
            begin=span.begin,
            end=span.end,
            failed=span.failed,
        )

    def _span(self, event: dict[str, Any]) -> Span:
        args = _typed(event, "args", dict)
        begin = _number(event, "ts", _LATEST)
        return Span(
            lane=self._lanes.get(_number(event, "tid", _LATEST), "?"),
            name=_typed(event, "name", str),
            kind=event["cat"],
            begin=begin,
            end=begin + _number(event, "dur", _LATEST),
            file=_typed(args, "file", str, ""),
            bytes=_number(args, "bytes", 1 << 63, 0),
            crc=_number(args, "crc_us", _LATEST, 0),
            failed=_typed(args, "failed", str, ""),
        )


_MISSING: Any = object()


def _typed(holder: dict[str, Any], name: str, kind: type, default: Any = _MISSING) -> Any:
    value = holder.get(name, default)
    if type(value) is not kind:
        raise _Bad(f"{name!r} is {'missing' if value is _MISSING else f'no {kind.__name__}'}")
    return value


def _number(holder: dict[str, Any], name: str, most: int, default: int = -1) -> int:
    value = _typed(holder, name, int, _MISSING if default < 0 else default)
    if not 0 <= value <= most:
        raise _Bad(f"{name!r} is {_short(value)}")
    return int(value)


def _operation_of(event: dict[str, Any]) -> int:
    return _number(_typed(event, "args", dict), "operation", _LATEST)


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 70 else "too large"
    return text.split("\n", 1)[0][:100]
