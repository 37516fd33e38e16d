"""Reads traces of saves and loads, and tells where their time went: a table of phases by rank.

A trace may come from anywhere: everything that is used of it is checked first. Times are microseconds since 1970.

Each rank's clock is its own, so ranks are compared by how long each took for a phase, never by when it was at it: in a
phase that all ranks have, the others wait for the slowest; in a phase of the coordinator, all others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dcpring.base import strict_json
from dcpring.errors import CheckpointError
from dcpring.watch.trace_file import FORMAT

MOST_BYTES = 1 << 27
"""Of a trace; dcpring's own have some 20 MB at most."""

_LATEST = 1 << 53
_MOST_RANKS = 1 << 20
_SHOWN = ("phase", "staging")
_WAITS = ("gather", "scatter")
"""How the names of phases begin in which a rank only waits for others."""


class TraceEvent(NamedTuple):
    """From when to when a rank was at something.

    Attributes:
        kind: see ``watch.trace_file.Span``; "io": what the core's workers do.
        file, bytes: of an io span.
        failed: with what; "" if it has not.
    """

    name: str
    kind: str
    begin: int
    end: int
    file: str = ""
    bytes: int = 0
    failed: str = ""


@dataclass
class RankTrace:
    """What one rank did in a save or a load.

    Attributes:
        identity: the same on all ranks.
        failed: with what; "" if it has not.
        spans: all but io, by their beginnings.
        io: what the core's workers did, by their beginnings.
    """

    rank: int
    identity: str
    kind: str
    checkpoint: str
    is_coordinator: bool
    begin: int
    end: int
    failed: str = ""
    spans: list[TraceEvent] = field(default_factory=list)
    io: list[TraceEvent] = field(default_factory=list)


@dataclass
class TracedOperation:
    """A save or a load of a run.

    Attributes:
        kind: "save" or "load".
        parts: by rank; those whose traces were given, and that took part.
        given: the ranks whose traces were given.
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
        """Ranks without a trace, the first thousand of them. A rank that reads for itself alone needs none."""
        known = self.given | self.parts.keys()
        absent = (rank for rank in range(self.world_size) if rank not in known)
        return [rank for rank, _ in zip(absent, range(1000), strict=False)]


# ---- where the time went ----


class Phase(NamedTuple):
    """A row of the table: how long each rank was in a phase.

    Attributes:
        took: microseconds, by rank.
        slowest: the rank that took longest.
        waited: microseconds, by rank, that the phase kept each other rank waiting for the slowest.
        parts: microseconds of the slowest rank in each of the core's steps ("fsync", "fill", ...), the longest first.
            Steps go on at the same time, so these do not add up.
    """

    name: str
    took: dict[int, int]
    slowest: int
    waited: dict[int, int]
    parts: dict[str, int]


def phases(operation: TracedOperation) -> list[Phase]:
    """The phases in which a rank worked, in the coordinator's order, then those that only others have.

    Staging, which precedes a background save and holds up training, counts as one.
    """
    took: dict[str, dict[int, int]] = {}
    for rank, part in sorted(operation.parts.items(), key=lambda item: (not item[1].is_coordinator, item[0])):
        for span in part.spans:
            if span.kind in _SHOWN and not span.name.startswith(_WAITS):
                of_ranks = took.setdefault(span.name if span.kind == "phase" else span.kind, {})
                of_ranks[rank] = of_ranks.get(rank, 0) + span.end - span.begin
    return [_phase(operation, name, of_ranks) for name, of_ranks in took.items()]


def _phase(operation: TracedOperation, name: str, took: dict[int, int]) -> Phase:
    slowest = max(took, key=lambda rank: (took[rank], -rank))
    waited = {rank: took[slowest] - took.get(rank, 0) for rank in operation.parts if rank != slowest}
    within = [(s.begin, s.end) for s in operation.parts[slowest].spans if s.kind == "phase" and s.name == name]
    parts: dict[str, list[tuple[int, int]]] = {}
    for span in operation.parts[slowest].io:
        if any(begin <= span.begin < end for begin, end in within):
            parts.setdefault(span.name, []).append((span.begin, span.end))
    lengths = {step: _length(times) for step, times in parts.items()}
    return Phase(name, took, slowest, waited, dict(sorted(lengths.items(), key=lambda item: -item[1])))


def _length(times: Iterable[tuple[int, int]]) -> int:
    """Of all these times together; what goes on at the same time counts once."""
    total, until = 0, 0
    for begin, end in sorted(times):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def slowest_file(operation: TracedOperation) -> tuple[int, str, int, int] | None:
    """The file that took longest from its first block to its last sync: rank, name, microseconds, bytes moved."""
    files: dict[tuple[int, str], list[TraceEvent]] = {}
    for rank, part in operation.parts.items():
        for span in part.io:
            if span.file:
                files.setdefault((rank, span.file), []).append(span)
    found = [(max(s.end for s in spans) - spans[0].begin, key, spans) for key, spans in files.items()]
    if not found:
        return None
    took, (rank, name), spans = max(found, key=lambda one: (one[0], one[1]))
    return rank, name, took, sum(span.bytes for span in spans if span.name in ("write", "read"))


# ---- a run ----


@dataclass
class _Trace:
    """A file."""

    path: Path
    rank: int
    world_size: int
    notes: list[str]
    parts: list[RankTrace] = field(default_factory=list)


def read_operations(paths: Sequence[Path]) -> tuple[list[TracedOperation], list[str]]:
    """The operations of a run, or of several, in their order, and what the traces say is not in them.

    Raises:
        CheckpointError: a file is no trace of dcpring, or damaged.
        OSError: one cannot be read.
    """
    traces = [_read(path) for path in dict.fromkeys(paths)]
    given = frozenset(trace.rank for trace in traces)
    operations: list[TracedOperation] = []
    by_identity: dict[str, TracedOperation] = {}
    for part, world_size in [(part, trace.world_size) for trace in traces for part in trace.parts]:
        operation = by_identity.get(part.identity)
        if operation is None or part.rank in operation.parts:
            operation = TracedOperation(part.kind, part.checkpoint, part.identity, world_size, given=given)
            operations.append(operation)
            by_identity.setdefault(part.identity, operation)
        operation.parts[part.rank] = part
    operations = sorted(_join_strays(operations), key=lambda operation: operation.begin)
    return operations, [f"{trace.path}: {note}" for trace in traces for note in trace.notes]


def _join_strays(operations: list[TracedOperation]) -> list[TracedOperation]:
    """A rank that fails before the plans are scattered never learns the operation's identity: it is found by time."""
    joined: list[TracedOperation] = []
    for operation in sorted(operations, key=lambda operation: -len(operation.parts)):
        home = next((other for other in joined if _fits(operation, other)), None)
        if home is None or operation.world_size == 1:
            joined.append(operation)
        else:
            home.parts |= operation.parts
    return joined


def _fits(stray: TracedOperation, other: TracedOperation) -> bool:
    same = (stray.kind, stray.checkpoint) == (other.kind, other.checkpoint) and not stray.parts.keys() & other.parts
    return same and len(stray.parts) == 1 and stray.begin < other.end and other.begin < stray.end


# ---- a file ----


def _read(path: Path) -> _Trace:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{path} has more than {MOST_BYTES >> 20} MiB: it is no trace of dcpring's")
    try:
        document = strict_json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no trace: it is not JSON ({_short(error)})") from error
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(about, dict) or "dcpring_trace" not in about:
        raise CheckpointError(f"{path} is no trace of dcpring's: RingWriter(trace=...) and RingReader write them")
    if about["dcpring_trace"] != FORMAT:
        raise CheckpointError(f"{path} was written by another version of dcpring; take that to read it")
    try:
        return _trace(path, about, _typed(document, "traceEvents", list))
    except _Bad as error:
        raise CheckpointError(f"{path} is damaged, or no trace of dcpring's: {error}") from error


class _Bad(ValueError):
    """What is wrong with a trace."""


def _trace(path: Path, about: dict[str, Any], events: list[Any]) -> _Trace:
    notes = [note for note in _typed(about, "notes", list) if isinstance(note, str)]
    rank = _number(about, "rank", _MOST_RANKS)
    trace = _Trace(path, rank, _number(about, "world_size", _MOST_RANKS), notes)
    if rank >= trace.world_size:
        raise _Bad(f"it is of rank {rank} of {trace.world_size}")
    if not all(isinstance(event, dict) for event in events):
        raise _Bad("an event is no object")
    complete = [(event, _span(event), _typed(event, "args", dict)) for event in events if event.get("ph") == "X"]
    parts = {_operation_of(args): _part(rank, span, args) for _, span, args in complete if span.kind == "operation"}
    for _, span, args in complete:
        if span.kind != "operation":
            part = parts.get(_operation_of(args))
            if part is None:
                raise _Bad(f"an event is of operation {_operation_of(args)}, which is not there")
            (part.io if span.kind == "io" else part.spans).append(span)
    for part in parts.values():
        part.spans.sort(key=lambda span: (span.begin, -span.end))
        part.io.sort(key=lambda span: span.begin)
    trace.parts = [parts[number] for number in sorted(parts)]
    return trace


def _part(rank: int, span: TraceEvent, args: dict[str, Any]) -> RankTrace:
    kind, is_coordinator = _typed(args, "kind", str), _typed(args, "coordinator", bool)
    if kind not in ("save", "load"):
        raise _Bad(f"an operation is a {kind!r}")
    texts = _typed(args, "id", str), kind, _typed(args, "checkpoint", str)
    return RankTrace(rank, *texts, is_coordinator, span.begin, span.end, span.failed)


def _span(event: dict[str, Any]) -> TraceEvent:
    args, begin = _typed(event, "args", dict), _number(event, "ts", _LATEST)
    return TraceEvent(
        name=_typed(event, "name", str),
        kind=_typed(event, "cat", str),
        begin=begin,
        end=begin + _number(event, "dur", _LATEST),
        file=_typed(args, "file", str, ""),
        bytes=_number(args, "bytes", 1 << 63, 0),
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


def _operation_of(args: dict[str, Any]) -> int:
    return _number(args, "operation", _LATEST)


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 70 else "too large"
    return text.split("\n", 1)[0][:100]
