"""One save or load on one rank: what its storage and its planner both have to do with.

The storage makes a run when DCP first asks it for something, and owns it. DCP passes ``storage_meta`` on to the
planner, which finds the run there; with storage that is not dcpring's, the planner makes one of its own. Nothing of a
run is pickled. DCP makes all calls of one on one thread.
"""

from __future__ import annotations

import copyreg
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from dcpring import _C
from dcpring.base.files import new_tag
from dcpring.names.key_map import KeyMap, KeyTable
from dcpring.options import IOStats
from dcpring.report import LoadReport, PlanReport, RankReport
from dcpring.watch import events as _trace
from dcpring.watch.events import Events
from dcpring.watch.progress import Meter

logger = logging.getLogger("dcpring")

_REPORTED = {
    **{_trace.LOCAL_PLAN: "local plan", _trace.GATHER_PLANS: "gather", _trace.GLOBAL_PLAN: "plan"},
    **{_trace.SCATTER_PLANS: "scatter", _trace.WRITE: "write"},
    **dict.fromkeys((_trace.GATHER_RESULTS, _trace.COMMIT, _trace.CLEAN_UP), "commit"),
}
"""The names of phases in a PlanReport."""


@dataclass(eq=False)
class Run:
    """What saves and loads have in common.

    Attributes:
        events: what it does, and when.
        meter: counts the bytes that are written or read.
        key_map: the storage's.
    """

    events: Events = field(default_factory=Events)
    meter: Meter = field(default_factory=Meter)
    key_map: KeyMap | None = None

    def __post_init__(self) -> None:
        if self.events.is_recorded:
            weakref.finalize(self, self.events.abandon)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @property
    def age_seconds(self) -> float:
        """How long ago it began."""
        return (time.monotonic_ns() - self.events.started) / 1e9

    def watch(self) -> _C.Watch | None:
        """What sees the core at work, where anybody wants to know."""
        counter, room = self.meter.counter, self.events.room
        return _C.Watch(counter, room) if counter is not None or room else None


@dataclass(eq=False)
class SaveRun(Run):
    """One save.

    Attributes:
        key_table: the names that the planner has changed, None where it has no key map: the storage's is applied when
            it commits, to the names of all ranks.
        plans: those of all ranks, on the coordinator.
        report: what RingSavePlanner has planned.
        group_id: with ``use_collectives=False``, what all ranks call the save.
        world_size: how many they are then.
        there: names in the directory when the save began, and ``before`` the state of its metadata.
        claim: the file that is to become the metadata.
        pending: what is written and becomes durable while the metadata is written, where no other rank is waited for.
        is_first: this rank has made the directory for it: nothing of an earlier save is there.
        tag: for the names of the first files that it writes.
    """

    key_table: KeyTable | None = None
    plans: list[SavePlan] = field(default_factory=list)
    report: PlanReport = field(default_factory=PlanReport)
    group_id: str = ""
    world_size: int = 0
    there: list[str] = field(default_factory=list)
    before: tuple[int, ...] | None = None
    claim: str = ""
    pending: Any = None
    is_first: bool = False
    tag: str = ""

    def take_tag(self) -> str:
        """What tells files from all others of the same number; never the same twice."""
        tag, self.tag = self.tag or new_tag(), ""
        return tag

    def written(self, stats: IOStats) -> None:
        """This rank's files are written."""
        if len(self.report.ranks) == 1:
            _note_io(self.report.ranks[0], stats)

    def committed(self, stats: Sequence[IOStats]) -> None:
        """The checkpoint is the one that is there; on the coordinator, with what each rank's ``write_data`` did."""
        self.plans = []
        if self.report.ranks and len(stats) == len(self.report.ranks):
            self.events.end()
            for rank, one in zip(self.report.ranks, stats, strict=True):
                _note_io(rank, one)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("saved: %s", self.timed_report().summary())

    def timed_report(self) -> PlanReport:
        """The report, with how long the phases took that are over."""
        names = _REPORTED | ({} if self.events.is_coordinator else {_trace.SCATTER_PLANS: "coordinate"})
        seconds = self.report.seconds = {}
        for phase, taken in self.events.seconds().items():
            if phase in names:
                seconds[names[phase]] = seconds.get(names[phase], 0.0) + taken
        return self.report


def _note_io(rank: RankReport, stats: IOStats) -> None:
    rank.files, rank.write_seconds = stats.files, stats.seconds


@dataclass(eq=False)
class LoadRun(Run):
    """One load.

    Attributes:
        stored: the metadata under the checkpoint's own names, where the storage has a key map.
        goes_by_stored: whether the plan's items have these names.
        made_of: of the checkpoint's names those that others are made of: nobody need ask for them.
        source: the id of the save that the metadata is of, and where it was read; None where it does not say, and where
            each rank has metadata of its own.
        report: what RingLoadPlanner has planned.
        rank: of this process in the report.
    """

    stored: Metadata | None = None
    goes_by_stored: bool = False
    made_of: frozenset[str] = frozenset()
    source: tuple[str, str] | None = None
    report: LoadReport = field(default_factory=LoadReport)
    rank: int | None = None

    def read(self, stats: IOStats) -> None:
        """This rank has read."""
        for each in self.report.ranks:
            if each.rank == self.rank:
                each.read_bytes, each.sent_bytes = stats.bytes, stats.sent_bytes
                each.received_bytes = stats.received_bytes


# ---- from the storage to the planner ----


class RunMeta(StorageMeta):
    """DCP's StorageMeta with the run of the storage that gives it. Pickled or copied it is a plain one."""

    run: Run

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "run"}
        return copyreg.__newobj__, (StorageMeta,), state  # type: ignore[attr-defined]


def with_run(about: StorageMeta | None, run: Run) -> RunMeta:
    """What a storage gives its planner."""
    meta = RunMeta()
    vars(meta).update(vars(about or meta), run=run)
    return meta


AnyRun = TypeVar("AnyRun", bound=Run)


def run_of(about: StorageMeta | None, kind: type[AnyRun]) -> AnyRun:
    """The storage's run; a new one where the storage is not dcpring's, or that run is over."""
    run = getattr(about, "run", None)
    return run if isinstance(run, kind) and not run.events.is_over else kind()
