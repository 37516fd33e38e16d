"""What a save or a load took its time for: its critical path through the ranks, and who waited for whom.

Each rank's part of an operation is a row of segments without gaps. A segment is work, or a wait that other ranks end:
the coordinator waits for the plans and the results of all, the others for its plan, and all for all in hand-on rounds.
The path is followed backwards from the end: through work to its beginning, and from a wait to the rank that came last.
The same walk over one wait tells whom that was for.

Clocks of hosts differ a little. Where a rank's says that it was scattered a plan before there was one, or that its
results were gathered before they were there, all its times are moved until they do not. Times are microseconds since
1970.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dcpring.tools.trace.read import Operation, RankTrace, Span
from dcpring.watch.phases import (
    CLEAN_UP,
    COMMIT,
    GATHER_PLANS,
    GATHER_RESULTS,
    GLOBAL_PLAN,
    LOCAL_PLAN,
    READ,
    READ_METADATA,
    SCATTER_PLANS,
    WRITE,
)

LATE = "not begun"
"""Before a rank's first phase, when another has begun already."""

OTHERS = "wait for the end"
"""After a rank's last phase. Its own trace does not tell when DCP's last collective is over."""

_BETWEEN = "other"

PLANNING = (READ_METADATA, LOCAL_PLAN, GLOBAL_PLAN)
COMMITTING = (COMMIT, CLEAN_UP)

PARTS = ("fsync", "sync", "allocate", "set up", "fill", "use", "write", "read")
"""What moving data consists of. Where several go on at the same time it counts as the first of them: a transfer only
where no worker was at work, and so had to wait for it."""

CRC, OTHER = "CRC", "other"


class Segment(NamedTuple):
    """What a rank was at.

    Attributes:
        waits: for whom.
        turn: the how-manieth wait of this name.
    """

    name: str
    begin: int
    end: int
    waits: Literal["", "coordinator", "all"] = ""
    turn: int = 0


@dataclass(frozen=True)
class Step:
    """A part of the critical path.

    Attributes:
        name: of the phase.
        parts: microseconds of it in each of PARTS, CRC (of fill or use, and not in these) and OTHER; {} where no data
            was moved.
        is_exchange: it is what was left of a wait after the last rank had come: communication.
    """

    rank: int
    name: str
    begin: int
    end: int
    parts: dict[str, int] = field(default_factory=dict)
    is_exchange: bool = False

    @property
    def took(self) -> int:
        return self.end - self.begin


class Waited(NamedTuple):
    """A rank was kept waiting by what another was at: microseconds."""

    rank: int
    by: int
    name: str
    took: int


@dataclass(frozen=True)
class FileTime:
    """The file that took longest."""

    rank: int
    name: str
    took: int
    bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class RankTimes:
    """What one rank's time went into: microseconds. All but staging, which came before, make up the operation.

    Attributes:
        data: its parts of moving data, as in ``Step``.
        bytes: read from, or written to, files.
        moving: in which that was done: what GB/s refers to.
    """

    rank: int
    plan: int
    wait: int
    late: int
    commit: int
    data: dict[str, int]
    bytes: int
    moving: int
    staging: int


class Analysis:
    """An operation, looked at.

    Attributes:
        operation: with the times of all ranks by one clock.
        moved: by how much a rank's times were moved for that, by rank.
        rows: by rank, all that it was at.
        path: the critical path, from the beginning; its steps follow each other.
    """

    def __init__(self, operation: Operation) -> None:
        self.moved = _clock_errors(operation)
        self.operation = _by_one_clock(operation, self.moved)
        self.rows = {rank: self._row(part) for rank, part in sorted(self.operation.parts.items())}
        self.path = self._critical_path()

    # ---- segments ----

    def _row(self, part: RankTrace) -> list[Segment]:
        begin, end = self.operation.begin, self.operation.end
        row = [Segment(LATE, begin, part.begin)] if part.begin > begin else []
        turns: dict[str, int] = defaultdict(int)
        for name, start, stop in _leaves(part):
            at = row[-1].end if row else begin
            if start > at:
                row.append(Segment(_BETWEEN, at, start))
            at = max(at, start)
            row.append(Segment(name, at, max(at, stop), self._waits(part, name), turns[name]))
            turns[name] += 1
        at = row[-1].end if row else begin
        if at < end:
            row.append(Segment(OTHERS, at, end, "all"))
        return row

    def _waits(self, part: RankTrace, name: str) -> Literal["", "coordinator", "all"]:
        if len(self.operation.parts) == 1 or part.is_alone:
            return ""
        if name in (GATHER_PLANS, GATHER_RESULTS):
            return "all" if part.is_coordinator else ""
        if name == SCATTER_PLANS:
            return "" if part.is_coordinator else "coordinator"
        return "all" if name == _ALL else ""

    def _arrival(self, rank: int, wait: Segment) -> int | None:
        """The place in a rank's row of what follows its part in a wait; None where it has not come so far."""
        row = self.rows[rank]
        if wait.name in (OTHERS, GATHER_RESULTS):
            found = [place for place, segment in enumerate(row) if segment.name in (OTHERS, wait.name)]
            has_come = wait.name == OTHERS or row[-1].name == WRITE
            return found[0] if found else len(row) if has_come else None
        names = (GATHER_PLANS, SCATTER_PLANS) if wait.name == GATHER_PLANS else (wait.name,)
        turn = 0 if wait.waits == "coordinator" else wait.turn
        found = [place for place, segment in enumerate(row) if segment.name in names]
        return found[turn] if turn < len(found) else None

    def _last_to_come(self, rank: int, wait: Segment) -> tuple[int, int] | None:
        """The rank that ended a wait of this one, and its segment before that; None: nobody came after this rank."""
        ranks: Iterable[int] = self.rows
        if wait.waits == "coordinator":
            ranks = [other for other, part in self.operation.parts.items() if part.is_coordinator]
        latest, last = wait.begin, None
        for other in ranks:
            place = self._arrival(other, wait)
            if other != rank and place and self.rows[other][place - 1].end > latest:
                latest, last = self.rows[other][place - 1].end, (other, place - 1)
        return last

    # ---- walks ----

    def _walk(self, rank: int, place: int, until: int) -> list[Step]:
        """Backwards from the end of a segment to a time; the steps in the order in which they were done."""
        steps: list[Step] = []
        at, seen = self.rows[rank][place].end, set()
        while place >= 0 and at > until and (rank, place) not in seen:
            seen.add((rank, place))
            segment = self.rows[rank][place]
            last = self._last_to_come(rank, segment) if segment.waits else None
            if last is None:
                begin = max(until, min(at, segment.begin))
                place -= 1
                next_rank = rank
            else:
                next_rank, place = last
                begin = max(until, min(at, self.rows[next_rank][place].end))
            if begin < at:
                steps.append(self._step(rank, segment, begin, at))
            rank, at = next_rank, begin
        return steps[::-1]

    def _step(self, rank: int, segment: Segment, begin: int, end: int) -> Step:
        part = self.operation.parts[rank]
        parts = time_in_parts(part, begin, end) if segment.name in (WRITE, READ) else {}
        return Step(rank, segment.name, begin, end, parts, bool(segment.waits))

    def _critical_path(self) -> list[Step]:
        """Ends where a save is committed, whatever the clocks of others say; else with the last rank."""
        own = {rank: [segment for segment in row if segment.name != OTHERS] for rank, row in self.rows.items()}
        committed = [rank for rank, row in own.items() if any(s.name == COMMIT for s in row)]
        last = max(committed or own, key=lambda rank: own[rank][-1].end if own[rank] else 0)
        return self._walk(last, len(own[last]) - 1, self.operation.begin)

    def waited(self) -> list[Waited]:
        """Who kept whom waiting, with what; the longest first."""
        total: dict[tuple[int, int, str], int] = defaultdict(int)
        for rank, row in self.rows.items():
            for place, segment in enumerate(row):
                if segment.waits:
                    for step in self._walk(rank, place, segment.begin):
                        if step.rank != rank and not step.is_exchange:
                            total[rank, step.rank, step.name] += step.took
        return sorted((Waited(*who, took) for who, took in total.items()), key=lambda one: -one.took)

    # ---- sums ----

    def times(self) -> list[RankTimes]:
        return [self._times(rank, row) for rank, row in self.rows.items()]

    def _times(self, rank: int, row: list[Segment]) -> RankTimes:
        part = self.operation.parts[rank]
        data: dict[str, int] = defaultdict(int)
        moving = 0
        for segment in row:
            if segment.name in (WRITE, READ):
                moving += segment.end - segment.begin
                for name, took in time_in_parts(part, segment.begin, segment.end).items():
                    data[name] += took
        known = (*PLANNING, *COMMITTING, WRITE, READ, LATE)
        data[OTHER] += sum(_took(segment) for segment in row if not segment.waits and segment.name not in known)
        return RankTimes(
            rank=rank,
            plan=sum(_took(segment) for segment in row if segment.name in PLANNING),
            wait=sum(_took(segment) for segment in row if segment.waits),
            late=sum(_took(segment) for segment in row if segment.name == LATE),
            commit=sum(_took(segment) for segment in row if segment.name in COMMITTING),
            data=dict(data),
            bytes=sum(span.bytes for span in part.io if span.name in ("write", "read")),
            moving=moving,
            staging=sum(span.end - span.begin for span in part.spans if span.kind == "staging"),
        )

    def slowest_file(self) -> FileTime | None:
        files: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for rank, part in self.operation.parts.items():
            for span in part.io:
                files[rank, span.file].append(span)
        found = None
        for (rank, name), spans in files.items():
            begin, end = min(span.begin for span in spans), max(span.end for span in spans)
            if found is None or end - begin > found.took:
                count = sum(span.bytes for span in spans if span.name in ("write", "read"))
                found = FileTime(rank, name, end - begin, count, _in_parts(spans, begin, end))
        return found


_ALL = "wait for all"
"""The waits of hand-on rounds."""


# ---- clocks ----


def _clock_errors(operation: Operation) -> dict[int, int]:
    """What to add to the times of ranks that contradict the coordinator's."""
    leaders = [part for part in operation.parts.values() if part.is_coordinator and not part.is_alone]
    errors: dict[int, int] = {}
    for part in operation.parts.values() if len(leaders) == 1 else ():
        least, most = _clock_bounds(leaders[0], part)
        error = max(least, min(most, 0))
        if error and part is not leaders[0]:
            errors[part.rank] = error
    return errors


def _clock_bounds(leader: RankTrace, part: RankTrace) -> tuple[int, int]:
    """The least and the most that can be added to a rank's times: nothing is received before it is sent."""
    theirs, own = _phases_by_name(leader), _phases_by_name(part)
    least, most = [], []
    if GLOBAL_PLAN in theirs and SCATTER_PLANS in own:
        least.append(theirs[GLOBAL_PLAN].end - own[SCATTER_PLANS].end)
    for sent, gathered in ((LOCAL_PLAN, GATHER_PLANS), (WRITE, GATHER_RESULTS)):
        if sent in own and gathered in theirs and not theirs[gathered].failed:
            most.append(theirs[gathered].end - own[sent].end)
    return max(least, default=-(1 << 62)), min(most, default=1 << 62)


def _phases_by_name(part: RankTrace) -> dict[str, Span]:
    return {span.name: span for span in part.spans if span.kind == "phase"}


def _by_one_clock(operation: Operation, errors: dict[int, int]) -> Operation:
    parts = {rank: _moved(part, errors[rank]) if rank in errors else part for rank, part in operation.parts.items()}
    return replace(operation, parts=parts)


def _moved(part: RankTrace, error: int) -> RankTrace:
    spans, io = (
        [span._replace(begin=span.begin + error, end=span.end + error) for span in spans]
        for spans in (part.spans, part.io)
    )
    return replace(part, begin=part.begin + error, end=part.end + error, spans=spans, io=io)


# ---- phases and what they consist of ----


def _took(segment: Segment) -> int:
    return segment.end - segment.begin


def _leaves(part: RankTrace) -> list[tuple[str, int, int]]:
    """The phases, cut where they wait."""
    leaves: list[tuple[str, int, int]] = []
    waits = [span for span in part.spans if span.kind == "wait"]
    phases = [span for span in part.spans if span.kind == "phase"]
    for phase in sorted(phases, key=lambda span: (span.begin, span.end)):
        at = phase.begin
        for wait in waits:
            if at <= wait.begin and wait.end <= phase.end:
                leaves += [(phase.name, at, wait.begin), (_ALL, wait.begin, wait.end)]
                at = wait.end
        leaves.append((phase.name, at, phase.end))
    return leaves


def time_in_parts(part: RankTrace, begin: int, end: int) -> dict[str, int]:
    """What a rank's time in a phase that moves data went into; see ``Step.parts``."""
    steps = [span for span in part.spans if span.kind == "step"]
    return _in_parts([*part.io, *steps], begin, end)


def _in_parts(spans: Sequence[Span], begin: int, end: int) -> dict[str, int]:
    inside = [span for span in spans if span.begin < end and span.end > begin and span.name in PARTS]
    edges = sorted(
        edge
        for span in inside
        for edge in ((max(begin, span.begin), 1, span.name), (min(end, span.end), -1, span.name))
    )
    took: dict[str, int] = defaultdict(int)
    going: dict[str, int] = defaultdict(int)
    at = begin
    for time, change, name in edges:
        if time > at:
            took[next((part for part in PARTS if going[part]), OTHER)] += time - at
            at = time
        going[name] += change
    took[OTHER] += end - at
    return _without_crc(inside, {name: took[name] for name in (*PARTS, OTHER) if took[name]})


def _without_crc(spans: Sequence[Span], took: dict[str, int]) -> dict[str, int]:
    """CRCs are computed in the middle of other work: they get their share of its time."""
    for name in ("fill", "use"):
        whole = sum(span.end - span.begin for span in spans if span.name == name)
        crc = sum(span.crc for span in spans if span.name == name)
        share = took.get(name, 0) * min(crc, whole) // whole if whole else 0
        if share:
            took[name] -= share
            took[CRC] = took.get(CRC, 0) + share
    return took
