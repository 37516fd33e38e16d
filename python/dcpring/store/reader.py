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
from dcpring.base.own import Own, of_threads
from dcpring.base.text import ranges
from dcpring.base.whose import here
from dcpring.errors import CheckpointError
from dcpring.format.lazy import LazyMetadata, StoredChunks, has_known_tables
from dcpring.format.metadata import (
    METADATA_NAME,
    Trailer,
    metadata_id,
    read_trailer,
    split_metadata,
    unpickle_metadata,
)
from dcpring.format.model_files import Files, is_model, may_be_several
from dcpring.format.quantised import BLOCK_SIZE, DTYPES, Quantised
from dcpring.format.unpickler import Trust, checked_globals
from dcpring.move.load import loader
from dcpring.move.load.handon import exchange_of
from dcpring.move.load.task import Origin, Rules, Task
from dcpring.move.load.wanted import CompactPlan, wanted_by_items
from dcpring.names.key_map import KeyMap, KeyMapLike, rename_metadata
from dcpring.names.policy import Casts, LoadPolicy, Unexpected, checked_casts
from dcpring.options import IO_NAMES, IOArguments, IOOptions, IOStats
from dcpring.plan.items import ReadItems
from dcpring.plan.load_planner import RingLoadPlan, RingLoadPlanner, makes_tensors
from dcpring.plan.run import LoadRun, with_run
from dcpring.report import Metrics
from dcpring.store import layout
from dcpring.store.headers import SHARED_BYTES, Headers, bytes_once, meeting, read_headers, read_once
from dcpring.torchside.dcp import drops_metadata_errors
from dcpring.torchside.groups import group_inside_dcp
from dcpring.watch import events as _trace
from dcpring.watch.metrics import MetricsFunction, checked_metrics, tell
from dcpring.watch.progress import ProgressOption, checked_progress, start_meter

__all__ = ["RingReader"]

logger = logging.getLogger("dcpring")


class _Load:
    """The load that a reader is at.

    Attributes:
        run: what its planner knows of it, too.
        metadata: of the checkpoint, as DCP has it.
        storage_data: where items are stored; None until somebody asks.
        files: of safetensors, of whose headers the metadata was made; None for a checkpoint of DCP's.
        quantised: its tensors that are made of others.
        problem: why there is no metadata, where DCP would not say.
    """

    def __init__(self) -> None:
        self.run = LoadRun()
        self.run.events.set_up(False)
        self.metadata: Metadata | None = None
        self.storage_data: dict[MetadataIndex, Any] | None = None
        self.files: Files | None = None
        self.quantised: list[Quantised] = []
        self.problem = ""

    def __reduce__(self) -> tuple[type[_Load], tuple[()]]:
        return _Load, ()


class _Renamed:
    """A checkpoint's metadata under other names, for planners that are not dcpring's."""

    def __init__(self, metadata: Metadata, key_map: KeyMap) -> None:
        self._metadata = metadata
        self._key_map = key_map

    def load(self) -> Metadata:
        return rename_metadata(self._metadata, self._key_map.rename(self._metadata.state_dict_metadata))


class _Unreadable:
    """Stands in for metadata that could not be read, with torch before 2.13, which goes on until it is used."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def load(self) -> Metadata:
        raise AssertionError(self._problem)


class RingReader(FileSystemReader):
    """Reads DCP checkpoints through io_uring: ``dcp.load(state_dict, storage_reader=RingReader(path))``.

    Takes the arguments of ``FileSystemReader`` and reads what RingWriter and the stock writer wrote, and directories of
    safetensors (see ``RingHFReader``). Only the bytes
    that the plan needs are read, each once per rank; every 1 MiB block that is read whole is checked against its
    CRC-32. No code from the checkpoint is run.

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

    path: Any = Own()
    load_id: Any = Own()
    rank: Any = Own()
    use_collectives: Any = Own()
    stats: Any = Own()
    _load: Any = Own()

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
        self._load = _Load()
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
        self.stats = None

    def __repr__(self) -> str:
        policy = {"unexpected": self.policy.unexpected, "casts": self.policy.casts}
        given = {"trusted": self.trusted, "safe_globals": self.safe_globals, "dequantize": self.dequantize}
        return shown(self, str(self.path), **given, **policy, **self.options.changed())

    @property
    def _events(self) -> _trace.Events:
        return self._load.run.events

    @property
    def made_of(self) -> frozenset[str]:
        """Names in the files, read last, of what others are made of: scales of quantised tensors."""
        return frozenset(each.scale_name for each in self._load.quantised)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads ``.metadata``, or with ``rank=`` that of one rank (saved with ``use_collectives=False``)."""
        wait_for_turn()
        if kwargs.get("rank") is None:  # with a rank DCP asks once it has failed to get the metadata of all ranks
            self._abandon(of_threads(self).begin())
            self._load = _Load()
        if not drops_metadata_errors:
            return self._metadata_of(kwargs.get("rank"))
        load, rank = self._load, kwargs.get("rank")
        try:
            metadata = self._metadata_of(rank)
            load.problem = ""
        except Exception as error:
            if rank is None:
                load.problem = f"metadata is None; global metadata read failed: {error}"
                raise
            load.problem = f"{load.problem or 'metadata is None'}; rank local metadata read failed: {error}"
            metadata = LazyMetadata(source=_Unreadable(load.problem))
        return metadata

    def _metadata_of(self, rank: int | None) -> Metadata:
        if rank is None or self._events.is_sure:
            self._load.run = LoadRun(self._tracer.start("load", self.path), key_map=self.key_map)
        with self._events.step(_trace.READ_METADATA):
            return self._read_for_planner(rank)

    def _read_for_planner(self, rank: int | None) -> Metadata:
        metadata = self._find_metadata(rank)
        self._load.run.made_of = self.made_of
        about = with_run(metadata.storage_meta, self._load.run)
        about.load_id = self.load_id
        if rank is None and about.save_id:
            self._load.run.source = about.save_id, os.fspath(self.path)
        if self.key_map is not None:
            self._load.run.stored = metadata
            metadata = LazyMetadata(source=_Renamed(metadata, self.key_map), version=getattr(metadata, "version", None))
        metadata.storage_meta = about
        self._events.begin(_trace.LOCAL_PLAN)
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
            path = directory / METADATA_NAME
        else:
            _refuse_superseded(directory, rank)
            refuse_mixed(directory, rank)
            path = directory / layout.rank_metadata_name(rank)
        return self._read_metadata(path, rank is None)

    def _is_model(self, path: Path) -> bool:
        """Whether a path leads to safetensors, and not to a checkpoint of DCP's."""
        return is_model(path)

    def _read_headers(self, path: Path, is_shared: bool) -> Headers:
        read = functools.partial(read_headers, path, self.dequantize, self.block_size)
        with self._operation(is_shared) as joint:
            return read() if joint is None else read_once(joint, read)

    def _operation(self, is_shared: bool) -> contextlib.AbstractContextManager[Joint | None]:
        """Of all ranks that load, to read headers or metadata once; None where every rank is to do so."""
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

    @staticmethod
    def _abandon(before: dict[str, Any] | None) -> None:
        """Nothing more will be heard of a load of this thread."""
        if before is not None:
            before["_load"].run.events.abandon()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._abandon(of_threads(self).begin(is_early=True))
        self._load = _Load()
        super().reset(layout.local_path(checkpoint_id) if checkpoint_id else None)

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,
        rank: Any = None,
        use_collectives: bool = True,
        **kwargs: Any,
    ) -> None:
        if self._load.problem:
            raise AssertionError(self._load.problem)
        self._load.run.meter = start_meter(self.progress, "load", str(self.path), is_coordinator)
        self._load.metadata, self._load.storage_data = metadata, None
        self.rank = rank
        self.use_collectives = use_collectives
        self._events.set_up(is_coordinator, not use_collectives)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        with self._events.step():
            plan = super().prepare_local_plan(plan)
            self._events.wait_for_plans()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        with self._events.step(_trace.GLOBAL_PLAN):
            plans = self._events.name_in(super().prepare_global_plan(plans))
            self._events.begin(_trace.SCATTER_PLANS)
        return plans

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

    def _tell(self, metrics: Metrics) -> None:
        tell(metrics, self.metrics, is_logged=self._events.is_coordinator)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the plan's items into the planner's tensors; all that can be checked is checked before the first."""
        with self._events.step(_trace.READ):
            self._events.take_name(plan)
            self._read_data(plan, planner)
            self._events.finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        started = time.perf_counter()
        self.stats = stats = IOStats(items=len(plan.items))
        load = self._load
        if load.metadata is None:
            raise CheckpointError("read_data before set_up_storage_reader")
        files = load.files
        origin = Origin(
            str(self.path if files is None else files.directory),
            links=None if files is None else files.links,
            quantised={each.place: each for each in load.quantised},
        )
        rules = Rules(self.options, self.trusted, self.safe_globals, self.policy.casts, self.transforms)
        item = plan.items.make if isinstance(plan.items, ReadItems) else plan.items.__getitem__
        task = Task(planner, item, origin, rules, stats, load.run, self._rank())
        if not isinstance(planner, RingLoadPlanner):
            self.policy.report_unexpected(planner, load.metadata, self._rank(), load.run.made_of)
        with load.run.meter, contextlib.nullcontext() if files is None else files.unchanged():
            self._read(task, plan)
        stats.seconds = time.perf_counter() - started
        load.run.read(stats)
        took, rank = load.run.age_seconds, self._rank()
        self._tell(Metrics("load", str(self.path), stats.bytes, took, 1, rank, stats.seconds))

    def _read(self, task: Task, plan: LoadPlan) -> None:
        planner = task.planner
        chunks = plan.chunks if isinstance(plan, RingLoadPlan) else None
        if chunks is not None and chunks.storage is not None and not makes_tensors(planner):
            assert isinstance(plan, RingLoadPlan) and isinstance(planner, RingLoadPlanner)
            exchange = exchange_of(plan, planner.process_group)
            try:
                compact = CompactPlan(plan.items, chunks, planner)  # type: ignore[arg-type]
                loader.load(task, compact.rest(task.origin.path), compact, exchange)
            except BaseException as error:
                if exchange is not None:
                    exchange.fail(error)
                raise
            return
        run = self._load.run
        metadata = run.stored if run.goes_by_stored else self._load.metadata
        assert metadata is not None
        storage_data = metadata.storage_data if run.goes_by_stored else self.storage_data
        loader.load(task, wanted_by_items(plan.items, metadata, storage_data, str(self.path)))

    def _rank(self) -> int:
        if self.rank is not None:
            return self.rank
        return rank_in()


def _trailers(directory: Path) -> dict[int, Trailer]:
    files = layout.rank_metadata_files(directory) if directory.is_dir() else {}
    trailers = ((rank, read_trailer(path)) for rank, path in files.items())
    return {rank: trailer for rank, trailer in trailers if trailer is not None}


def refuse_stale(directory: Path) -> None:
    """A global metadata file that a later save with ``use_collectives=False`` has superseded is not loaded."""
    path = directory / METADATA_NAME
    if not path.exists():
        return
    trailers = _trailers(directory)
    if not trailers:
        return
    own_id = metadata_id(path)
    newer = sorted(rank for rank, trailer in trailers.items() if trailer.superseded_id == own_id)
    if newer:
        raise CheckpointError(
            f"{path} is older than the metadata that ranks {ranges(newer)} saved with use_collectives=False; "
            f"remove {path} to load theirs, or their __*.metadata to load it"
        )


def _refuse_superseded(directory: Path, rank: int) -> None:
    """DCP turns to rank-local metadata whenever the global one fails to load: it may be that of an older save."""
    path = directory / METADATA_NAME
    if not path.exists():
        return
    own = _trailers(directory).get(rank)
    if own is not None and own.superseded_id != metadata_id(path):
        raise CheckpointError(
            f"the metadata of rank {rank} in {directory} is older than {path}, which cannot be loaded; "
            f"remove {path} to load what is older"
        )


def refuse_mixed(directory: Path, rank: int) -> None:
    """Rank-local metadata of different saves do not make a checkpoint."""
    trailers = _trailers(directory)
    own = trailers.get(rank)
    if own is None:
        return
    missing = [r for r in range(own.world_size) if r not in trailers]
    mixed = [r for r, t in trailers.items() if r < own.world_size and _save_of(t) != _save_of(own)]
    if missing or mixed:
        problem = f"ranks {ranges(missing)} have none" if missing else f"ranks {ranges(sorted(mixed))} differ"
        raise CheckpointError(
            f"the rank-local metadata in {directory} are not of one save of {own.world_size} ranks: {problem}; "
            "a save with use_collectives=False was interrupted. Load an earlier checkpoint"
        )


def _save_of(trailer: Trailer) -> tuple[int, str]:
    return trailer.world_size, trailer.group_id
