"""RingReader: DCP's storage reader on the C core."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dcpring.base.arguments import checks_names, shown
from dcpring.base.files import read_regular
from dcpring.base.groups import rank_in
from dcpring.base.joint import Joint
from dcpring.base.order import wait_for_turn
from dcpring.base.whose import here
from dcpring.errors import CheckpointError
from dcpring.format.lazy import LazyMetadata, StoredChunks
from dcpring.format.metadata import METADATA_NAME, has_known_tables, split_metadata, unpickle_metadata
from dcpring.format.model_files import is_model, may_be_several
from dcpring.format.quantised import BLOCK_SIZE, DTYPES
from dcpring.format.unpickler import Trust, checked_globals
from dcpring.move.load import loader
from dcpring.move.load.peers import sharing_of
from dcpring.move.load.task import Origin, Rules, Task
from dcpring.move.load.wanted import CompactPlan, wanted_by_items
from dcpring.names.key_map import KeyMap, KeyMapLike, rename_metadata
from dcpring.names.policy import Casts, LoadPolicy, Unexpected, checked_casts
from dcpring.options import IO_NAMES, IOArguments, IOOptions, IOStats
from dcpring.plan.items import ReadItems
from dcpring.plan.load_planner import RingLoadPlan, RingLoadPlanner, makes_tensors
from dcpring.plan.run import Load, RunsByThread, of_run, with_run
from dcpring.report import Metrics
from dcpring.store import layout
from dcpring.store.headers import SHARED_BYTES, Headers, bytes_once, meeting, read_headers, read_once
from dcpring.store.rank_metadata import refuse_mixed, refuse_stale, refuse_superseded
from dcpring.torchside.dcp import drops_metadata_errors
from dcpring.torchside.groups import group_inside_dcp
from dcpring.watch import events as _trace
from dcpring.watch.events import Events
from dcpring.watch.metrics import MetricsFunction, checked_metrics, tell
from dcpring.watch.progress import ProgressOption, checked_progress, start_meter

__all__ = ["RingReader"]

logger = logging.getLogger("dcpring")


def _renamed(metadata: Metadata, key_map: KeyMap) -> Metadata:
    """A checkpoint's metadata under other names, for planners that are not dcpring's."""
    return rename_metadata(metadata, key_map.rename(metadata.state_dict_metadata))


def _unreadable(problem: str) -> Metadata:
    raise AssertionError(problem)


class RingReader(FileSystemReader):
    """Reads DCP checkpoints through io_uring: ``dcp.load(state_dict, storage_reader=RingReader(path))``.

    Takes the arguments of ``FileSystemReader`` and reads what RingWriter and the stock writer wrote, and directories of
    safetensors (see ``RingHFReader``). Only the bytes that the plan needs are read, each once per rank; every 1 MiB
    block that is read whole is checked against its CRC-32. No code from the checkpoint is run.

    What is raised reaches the caller of the load inside DCP's ``CheckpointException``.

    Args:
        path: directory of the checkpoint, or of safetensors; a safetensors file, or its index.
        trusted: unpickle metadata and objects whatever they hold. Only for checkpoints you would run as a program.
            "warn" does so too, and logs the name of each class that is more than plain data.
        safe_globals: classes and functions that metadata and objects may refer to besides plain data and tensors.
        key_map: other names for what is in the checkpoint: "normalize", a dict, the path of a JSON table, or a
            function from the checkpoint's names to those of the state dict (see docs/keys.md).
        unexpected: what to do about keys that the state dict does not ask for, on this rank: "log" (at INFO), "warn",
            "error" or "ignore". Needs a planner with a ``state_dict``, as DCP's default one has; RingLoadPlanner has
            an argument of its own.
        casts: what is done where dtypes differ. "round": a cast that rounds, as from float32 to bfloat16, is made and
            logged, at WARNING; one to a dtype that has not all of the values (a smaller integer, a float with a smaller
            exponent, an integer for a float) is an error. "any" makes such casts too, with the warning; "never" makes
            any difference an error.
        dequantize: what is made of quantised tensors of safetensors, FP8 and MXFP4: float32, bfloat16 or float16 (see
            docs/huggingface.md). None: they are loaded as they are stored. What float16 cannot hold is infinity in it.
        progress: True draws one bar for all ranks of the coordinator's host, if its standard error is a terminal; a
            function gets a ``Progress`` about five times a second, from another thread of the coordinator. On all
            ranks alike.
        metrics: a function that gets a ``Metrics`` of each load when it is over on this rank. The coordinator's is
            logged at INFO, as one line.
        trace: path of a trace of all loads, as for ``RingWriter``.
        io: engine, direct, queue_depth, block_size_bytes, workers and checksum, as ``dcpring.options.IOOptions`` has
            them.

    Attributes:
        stats: ``IOStats`` of this rank's last ``read_data``, None before.

    Raises:
        CorruptCheckpointError: bytes are damaged, missing or contradict each other.
        UntrustedCheckpointError: the checkpoint refers to what is not allowed.
        CheckpointError: shapes or dtypes do not fit the state dict.
        OSError: with errno and path.
    """

    path: Any = of_run("path")
    load_id: Any = of_run("load_id")
    rank: Any = of_run("rank")
    use_collectives: Any = of_run("use_collectives")
    stats: Any = of_run("stats")

    @checks_names(*IO_NAMES)
    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        trusted: Trust = False,
        safe_globals: Sequence[Any] = (),
        key_map: KeyMapLike = None,
        unexpected: Unexpected = "log",
        casts: Casts | Literal["safe"] = "round",
        dequantize: torch.dtype | None = None,
        progress: ProgressOption = False,
        trace: str | os.PathLike[str] | None = None,
        metrics: MetricsFunction | None = None,
        **io: Unpack[IOArguments],
    ) -> None:
        if trusted not in (True, False, "warn"):
            raise ValueError(f'trusted={trusted!r}: must be True, False or "warn"')
        if dequantize not in (None, *DTYPES):
            raise ValueError(f"dequantize={dequantize}: must be None or one of {', '.join(map(str, DTYPES))}")
        self._tracer = _trace.Tracer(trace)
        self._runs = RunsByThread(Load())
        # Whatever a subclass inherits from besides.
        FileSystemReader.__init__(self, layout.local_path(path), _extension_registry)
        self.options = IOOptions(**io)
        self.trusted = trusted
        self.safe_globals = checked_globals(safe_globals)
        self.key_map = None if key_map is None else KeyMap(key_map)
        self.policy = LoadPolicy(unexpected=unexpected, casts=checked_casts(casts))
        self.progress = checked_progress(progress)
        self.metrics = checked_metrics(metrics)
        self.dequantize = dequantize
        self.block_size = BLOCK_SIZE

    def __repr__(self) -> str:
        policy = {"unexpected": self.policy.unexpected, "casts": self.policy.casts}
        given = {"trusted": self.trusted, "safe_globals": self.safe_globals, "dequantize": self.dequantize}
        return shown(self, str(self.path), **given, **policy, **self.options.changed())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": self._runs.copied()}

    # ---- the loads of this reader ----

    @property
    def _load(self) -> Load:
        """The load that the calling thread has begun last; in other threads the one that any thread was at last."""
        return self._runs.current

    @property
    def made_of(self) -> frozenset[str]:
        """Names in the files, read last, of what others are made of: scales of quantised tensors."""
        return self._load.made_of

    @property
    def storage_data(self) -> dict[MetadataIndex, Any]:
        """Where items are stored, as the metadata has it."""
        load = self._load
        if load.storage_data is None:
            load.storage_data = {} if load.metadata is None else load.metadata.storage_data
        assert load.storage_data is not None
        return load.storage_data

    @storage_data.setter
    def storage_data(self, value: dict[MetadataIndex, Any]) -> None:
        self._load.storage_data = value

    # ---- the protocol of a load: what DCP calls, in this order; the planner's part is in plan.load_planner ----

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next load is from this directory; None: from that of the last one."""
        self._runs.begin(Events(), self.key_map)
        super().reset(layout.local_path(checkpoint_id) if checkpoint_id else None)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Begins a load, which the planner finds in what this gives: the metadata of all ranks, or that of ``rank=``.

        DCP asks for that of one rank (saved with ``use_collectives=False``) where it has not got that of all.
        """
        wait_for_turn()
        rank, load = kwargs.get("rank"), self._load
        is_next_try = rank is not None and load.events.started and not load.events.is_sure
        if not is_next_try:
            load = self._runs.begin(self._tracer.start("load", self.path), self.key_map)
        try:
            with load.events.step(_trace.READ_METADATA):
                metadata = self._metadata_of(load, rank)
                load.events.begin(_trace.LOCAL_PLAN)
            load.problem = ""
        except Exception as error:
            if not drops_metadata_errors:
                raise
            if rank is None:
                load.problem = f"metadata is None; global metadata read failed: {error}"
                raise
            load.problem = f"{load.problem or 'metadata is None'}; rank local metadata read failed: {error}"
            metadata = LazyMetadata(make=functools.partial(_unreadable, load.problem))
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,
        rank: Any = None,
        use_collectives: bool = True,
        **kwargs: Any,
    ) -> None:
        """Says which part this rank has in the load."""
        load = self._load
        if load.problem:
            raise AssertionError(load.problem)
        load.meter = start_meter(self.progress, "load", str(self.path), is_coordinator)
        load.metadata, load.storage_data = metadata, None
        self.rank, self.use_collectives = rank, use_collectives
        load.events.set_up(is_coordinator, not use_collectives)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing is to be prepared: the planner has matched what is wanted with what is stored."""
        events = self._load.events
        with events.step():
            plan = super().prepare_local_plan(plan)
            events.wait_for_plans()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: the planner has said who reads what several ranks need."""
        events = self._load.events
        with events.step(_trace.GLOBAL_PLAN):
            plans = events.name_in(super().prepare_global_plan(plans))
            events.begin(_trace.SCATTER_PLANS)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items into the planner's tensors; all that can be checked is checked before the first."""
        load = self._load
        with load.events.step(_trace.READ):
            load.events.take_name(plan)
            started = time.perf_counter()
            self.stats = stats = IOStats(items=len(plan.items))
            rank = rank_in() if load.rank is None else load.rank
            self._read(self._task(load, plan, planner, stats, rank), plan)
            stats.seconds = time.perf_counter() - started
            load.note_read(stats)
            self._tell(Metrics("load", str(self.path), stats.bytes, load.age_seconds, 1, rank, stats.seconds))
            load.events.finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _task(self, load: Load, plan: LoadPlan, planner: LoadPlanner, stats: IOStats, rank: int) -> Task:
        """What is to be read, and by which rules."""
        if load.metadata is None:
            raise CheckpointError("read_data before set_up_storage_reader")
        if not isinstance(planner, RingLoadPlanner):
            self.policy.report_unexpected(planner, load.metadata, rank, load.made_of)
        path, links = (self.path, None) if load.files is None else (load.files.directory, load.files.links)
        origin = Origin(str(path), links, {each.place: each for each in load.quantised})
        rules = Rules(self.options, self.trusted, self.safe_globals, self.policy.casts, self.transforms)
        item = plan.items.make if isinstance(plan.items, ReadItems) else plan.items.__getitem__
        return Task(planner, item, origin, rules, stats, load, rank)

    def _read(self, task: Task, plan: LoadPlan) -> None:
        """Reads by a compact plan, of which the core knows all that it reads straight into tensors, or by items."""
        load, planner = task.load, task.planner
        with load.meter, contextlib.nullcontext() if load.files is None else load.files.unchanged():
            if isinstance(plan, RingLoadPlan) and plan.is_compact and not makes_tensors(planner):
                assert isinstance(planner, RingLoadPlanner)
                with sharing_of(plan, planner.process_group) as sharing:
                    compact = CompactPlan(plan, planner)
                    loader.load(task, compact.rest(task.origin.path), compact, sharing)
            else:
                metadata = load.stored if load.goes_by_stored else load.metadata
                assert metadata is not None
                places = metadata.storage_data if load.goes_by_stored else self.storage_data
                loader.load(task, wanted_by_items(plan.items, metadata, places, str(self.path)))

    def _tell(self, metrics: Metrics) -> None:
        tell(metrics, self.metrics, is_logged=self._load.events.is_coordinator)

    # ---- reading metadata ----

    def _metadata_of(self, load: Load, rank: int | None) -> Metadata:
        """The metadata, in which the planner finds the load; under other names where there is a key map."""
        metadata = self._find_metadata(rank)
        about = with_run(metadata.storage_meta, load)
        about.load_id = load.load_id
        if rank is None and about.save_id:
            load.source = about.save_id, os.fspath(self.path)
        if self.key_map is not None:
            load.stored, version = metadata, getattr(metadata, "version", None)
            metadata = LazyMetadata(make=functools.partial(_renamed, metadata, self.key_map), version=version)
        metadata.storage_meta = about
        return metadata

    def _find_metadata(self, rank: int | None) -> Metadata:
        directory, load = Path(self.path), self._load
        load.files, load.quantised = None, []
        if self._is_model(directory):
            found = self._read_headers(directory, rank is None and may_be_several(directory))
            load.files, load.quantised = found.files, found.quantised
            return LazyMetadata(source=found.chunks, storage_meta=StorageMeta(checkpoint_id=self.path))
        if rank is None:
            refuse_stale(directory)
            return self._read_metadata(directory / METADATA_NAME, True)
        refuse_superseded(directory, rank)
        refuse_mixed(directory, rank)
        return self._read_metadata(directory / layout.rank_metadata_name(rank), False)

    def _is_model(self, path: Path) -> bool:
        """Whether a path leads to safetensors, and not to a checkpoint of DCP's."""
        return is_model(path)

    def _read_headers(self, path: Path, is_shared: bool) -> Headers:
        read = functools.partial(read_headers, path, self.dequantize, self.block_size)
        with self._operation(is_shared) as joint:
            return read() if joint is None else read_once(joint, read)

    def _operation(self, is_shared: bool) -> contextlib.AbstractContextManager[Joint | None]:
        """An operation of all ranks that load, to read headers or metadata once; None where every rank is to do so."""
        return meeting(group_inside_dcp() if is_shared else None)

    def _are_to_meet(self, path: Path) -> bool:
        """Whether ranks are to read this metadata once, as far as this one can tell."""
        return os.path.isfile(path) and os.path.getsize(path) >= SHARED_BYTES

    def _read_metadata(self, path: Path, is_for_all: bool) -> Metadata:
        try:
            with self._operation(is_for_all and self._are_to_meet(path)) as joint:
                data = read_regular(path) if joint is None else bytes_once(joint, path)
        except FileNotFoundError:
            what = f"{os.strerror(errno.ENOENT)}: {layout.what_there_is(path.parent, path)}"
            if here():
                what += f" ({here()}; if it is there on others, hosts see different directories)"
            raise FileNotFoundError(errno.ENOENT, what, str(path)) from None
        parts = split_metadata(data, path)
        if parts.trailer is not None and has_known_tables(parts):
            chunks = StoredChunks(parts, path, self.trusted, self.safe_globals)
            about = StorageMeta(checkpoint_id=self.path, save_id=parts.trailer.save_id)
            return LazyMetadata(source=chunks, storage_meta=about, version=parts.trailer.version or None)
        return unpickle_metadata(parts.pickled, path, trusted=self.trusted, safe_globals=self.safe_globals)
