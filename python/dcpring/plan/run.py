"""One save or load on one rank: what its storage and its planner both have to do with.

The storage makes a run when DCP first asks it for something, and owns it. DCP passes ``storage_meta`` on to the
planner, which finds the run there; with storage that is not dcpring's, the planner makes one of its own. Nothing of a
run is pickled. DCP makes all calls of one on one thread.
"""

from __future__ import annotations

import copyreg
import functools
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from dcpring import _C
from dcpring.base.files import new_tag
from dcpring.format.model_files import Files
from dcpring.format.quantised import Quantised
from dcpring.names.key_map import KeyMap, KeyTable
from dcpring.options import IOStats
from dcpring.report import LoadReport, Metrics, PlanReport
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

    def next(self, events: Events, key_map: KeyMap | None) -> Any:
        """One of the same kind, which begins where this one was made."""
        return type(self)(events, key_map=key_map)

    def watch(self) -> _C.Watch | None:
        """What sees the core at work, where anybody wants to know."""
        counter, room = self.meter.counter, self.events.room
        return _C.Watch(counter, room) if counter is not None or room else None


AnyRun = TypeVar("AnyRun", bound=Run)


class RunsByThread(Generic[AnyRun]):
    """The saves of a writer, or the loads of a reader, which several threads may be at: one for each thread.

    DCP makes all calls of one save or load on one thread, and gives nothing else to tell them apart by. A thread that
    is at nothing sees the one that any thread was at last, as if there were one thread only.

    Args:
        first: what is there before anything begins.
    """

    def __init__(self, first: AnyRun) -> None:
        self._last = first
        self._of_thread: WeakKeyDictionary[threading.Thread, AnyRun] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return RunsByThread, (self._last,)

    def copied(self) -> RunsByThread[AnyRun]:
        """For a copy of the writer or reader, which begins where the calling thread is."""
        return RunsByThread(self.current.next(Events(), None))

    @property
    def current(self) -> AnyRun:
        return self._of_thread.get(threading.current_thread(), self._last)

    def put(self, name: str, value: Any) -> None:
        """Sets an attribute of the current one."""
        self._last = self.current
        setattr(self._last, name, value)

    def begin(self, events: Events, key_map: KeyMap | None) -> AnyRun:
        """The calling thread begins one. Another that it has begun and not ended is abandoned."""
        thread = threading.current_thread()
        before = self._of_thread.get(thread)
        if before is not None:
            before.events.abandon()
        known = self._last if before is None or before.events.started else before  # reset() alone comes before a begin
        self._last = self._of_thread[thread] = known.next(events, key_map)
        return self._last

    def end(self) -> None:
        """Nothing more is called for the current one in the calling thread."""
        self._of_thread.pop(threading.current_thread(), None)


def of_run(name: str) -> Any:
    """An attribute of a writer or reader, in whose ``_runs`` each save or load has its own."""
    return property(lambda owner: getattr(owner._runs.current, name), lambda owner, value: owner._runs.put(name, value))


@dataclass(eq=False)
class Save(Run):
    """One save on one rank: all that its writer and its planner know of it.

    A RingWriter makes it when DCP begins a save, and a planner finds it in ``storage_meta``. With another storage the
    planner makes its own. It refers to no tensor of the state, so that one which nobody ends holds no memory.

    Attributes:
        path, save_id, rank, use_collectives, stats: as a storage writer of DCP's has them.
        is_first: this rank has made the directory, so that nothing of an earlier save is there.
        tag: for the names of the first files that this rank writes.
        group_id, world_size: with ``use_collectives=False``, what all ranks call the save, and how many they are.
        table: what the rank has told the coordinator of its state; None before that. ``digest`` is the table's.
        cuts: parts of tensors that this rank writes, by key and offset: the chunk, the part's first row in it, and its
            rows.
        key_table: the names that the planner has changed; None where it has no key map, and the storage's is applied
            when it commits, to the names of all ranks.
        report: what RingSavePlanner has planned.
        plans: those of all ranks, on the coordinator.
        claim: the right to commit (``store.layout.Claim``); None before the plans are made.
        pending: what is written and becomes durable while the metadata is written, where no other rank is waited for.
        model, one_saver: RingHFWriter's layout of all files, and its lock.
    """

    path: Any = ""
    save_id: str = ""
    rank: int | None = None
    use_collectives: bool = True
    stats: IOStats | None = None
    is_first: bool = False
    tag: str = ""
    group_id: str = ""
    world_size: int = 0
    table: _C.Table | None = None
    digest: str = ""
    cuts: dict[tuple[str, torch.Size | None], tuple[MetadataIndex, int, int]] = field(default_factory=dict)
    key_table: KeyTable | None = None
    report: PlanReport = field(default_factory=PlanReport)
    plans: list[SavePlan] = field(default_factory=list)
    claim: Any = None
    pending: Any = None
    model: Any = None
    one_saver: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Save, path=self.path, save_id=self.save_id), ()

    def next(self, events: Events, key_map: KeyMap | None) -> Save:
        """A save that begins where this one was made, by the same writer."""
        save = Save(events, key_map=key_map, path=self.path, save_id=self.save_id, rank=self.rank)
        save.use_collectives, save.stats = self.use_collectives, self.stats
        return save

    def take_tag(self) -> str:
        """What tells files from all others of the same number; never the same twice."""
        tag, self.tag = self.tag or new_tag(), ""
        return tag

    def timed_report(self) -> PlanReport:
        """The report, with how long the phases took that are over."""
        names = _REPORTED | ({} if self.events.is_coordinator else {_trace.SCATTER_PLANS: "coordinate"})
        seconds = self.report.seconds = {}
        for phase, taken in self.events.seconds().items():
            if phase in names:
                seconds[names[phase]] = seconds.get(names[phase], 0.0) + taken
        return self.report

    def note_written(self, stats: Mapping[int, IOStats]) -> None:
        """Files are written: what each rank's ``write_data`` did goes into the report, if that has these ranks."""
        if len(stats) == len(self.report.ranks):
            for rank, one in zip(self.report.ranks, stats.values(), strict=True):
                rank.files, rank.write_seconds = one.files, one.seconds

    def committed(self, size: int, ranks: int, stats: Mapping[int, IOStats]) -> Metrics:
        """What the save came to, once the checkpoint is the one that is there.

        Args:
            size: bytes of all its files.
            ranks: how many ranks have written.
            stats: of ``write_data``, by rank, of those that have told.
        """
        self.plans = []
        self.note_written(stats)
        self.events.end()
        if self.report.ranks and logger.isEnabledFor(logging.DEBUG):
            logger.debug("saved: %s", self.timed_report().summary())
        slowest = max(stats, key=lambda rank: stats[rank].seconds, default=None)
        longest = 0.0 if slowest is None else stats[slowest].seconds
        linked = sum(one.linked_bytes for one in stats.values())
        written = max(0, size - linked)
        return Metrics("save", str(self.path), written, self.age_seconds, ranks, slowest, longest, linked)


@dataclass(eq=False)
class Load(Run):
    """One load on one rank: all that its reader and its planner know of it.

    A RingReader makes it when DCP asks for the metadata, and a planner finds it in the metadata's ``storage_meta``.
    With another storage the planner makes its own.

    Attributes:
        path, load_id, rank, use_collectives, stats, storage_data: as a storage reader of DCP's has them;
            ``storage_data`` is None until somebody asks for it.
        metadata: of the checkpoint, as DCP has it; None before the reader is set up.
        stored: the metadata under the checkpoint's own names, where the reader has a key map.
        goes_by_stored: whether the plan's items have these names.
        files: the safetensors whose headers the metadata was made of; None for a checkpoint of DCP's.
        quantised: the tensors in them that are made of others.
        source: the id of the save that the metadata is of, and where it was read; None where it does not say, and where
            each rank has metadata of its own.
        problem: why there is no metadata, where DCP would not say.
        report: what RingLoadPlanner has planned.
        reported_rank: this process in the report.
    """

    path: Any = ""
    load_id: str = ""
    rank: int | None = None
    use_collectives: bool = True
    stats: IOStats | None = None
    storage_data: dict[MetadataIndex, Any] | None = None
    metadata: Metadata | None = None
    stored: Metadata | None = None
    goes_by_stored: bool = False
    files: Files | None = None
    quantised: list[Quantised] = field(default_factory=list)
    source: tuple[str, str] | None = None
    problem: str = ""
    report: LoadReport = field(default_factory=LoadReport)
    reported_rank: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: getattr(self, name) for name in ("path", "load_id", "rank", "use_collectives", "stats")}
        return functools.partial(Load, **kept), ()

    def next(self, events: Events, key_map: KeyMap | None) -> Load:
        """A load that begins where this one was made, by the same reader."""
        load = Load(events, key_map=key_map, path=self.path, load_id=self.load_id, rank=self.rank)
        load.use_collectives, load.stats = self.use_collectives, self.stats
        return load

    @property
    def made_of(self) -> frozenset[str]:
        """Names in the checkpoint of what others are made of, as scales: nobody need ask for them."""
        return frozenset(each.scale_name for each in self.quantised)

    def note_read(self, stats: IOStats) -> None:
        """This rank has read."""
        for each in self.report.ranks:
            if each.rank == self.reported_rank:
                each.read_bytes, each.sent_bytes = stats.bytes, stats.sent_bytes
                each.received_bytes = stats.received_bytes


# ---- from the storage to the planner ----


class RunMeta(StorageMeta):
    """DCP's StorageMeta with the save or load of the storage that gives it. Pickled or copied it is a plain one.

    It does not keep that alive, as a load keeps the metadata, and so this.
    """

    run: weakref.ref[Run]

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name != "run"}
        return copyreg.__newobj__, (StorageMeta,), state  # type: ignore[attr-defined]


def with_run(about: StorageMeta | None, run: Run) -> RunMeta:
    """What a storage gives its planner."""
    meta = RunMeta()
    vars(meta).update(vars(about or meta), run=weakref.ref(run))
    return meta


def run_of(about: StorageMeta | None, kind: type[AnyRun]) -> AnyRun:
    """The storage's save or load; a new one where the storage is not dcpring's, or that one is over."""
    run = about.run() if isinstance(about, RunMeta) else None
    return run if isinstance(run, kind) and not run.events.is_over else kind()
