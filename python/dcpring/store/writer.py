"""RingWriter: DCP's storage writer on the C core."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpring import _C
from dcpring.base.arguments import checks_names, shown
from dcpring.base.files import locked, names_in, new_tag, unfinished_name
from dcpring.base.groups import GroupBefore, agree_among, world_size
from dcpring.base.order import BackgroundSave, Line, wait_for_turn
from dcpring.base.own import Own, of_threads
from dcpring.base.pickling import pickles
from dcpring.errors import CheckpointError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.format.metadata import (
    METADATA_NAME,
    Trailer,
    id_of,
    join_metadata,
    metadata_id,
    pickle_metadata,
    read_trailer,
)
from dcpring.format.unpickler import Safe, checked_globals
from dcpring.move.device import DEFAULT_PIECE_BYTES
from dcpring.move.objects import Judge, ObjectPolicy, refusals, refused_text
from dcpring.move.pending import Pending
from dcpring.move.save.items import PlanItems
from dcpring.move.save.results import ResultList, Results
from dcpring.move.save.saving import Saving
from dcpring.move.sending import Staged
from dcpring.move.staging import StagingBuffer
from dcpring.move.unchanged import LEAST_KEPT_BYTES, Keeping
from dcpring.names.key_map import (
    KeyMap,
    KeyMapLike,
    KeyTable,
    dump_tables,
    load_tables,
    rename_metadata,
    rename_results,
)
from dcpring.options import IO_NAMES, MAX_WORKERS, IOArguments, IOOptions, IOStats
from dcpring.plan.messages import RingPlan
from dcpring.plan.run import SaveRun, with_run
from dcpring.plan.table import check_sizes, describes_itself
from dcpring.report import Metrics
from dcpring.store import layout
from dcpring.store.earlier import Earlier, find_earlier, frozen_of, link_files
from dcpring.store.stager import (
    RingStager,
    place_in_line,
    renew_background_process,
    uncopied,
    watch_background_process,
)
from dcpring.torchside.dcp import calling_async_save
from dcpring.torchside.groups import members_of_caller
from dcpring.torchside.versions import say_once
from dcpring.watch import events as _trace
from dcpring.watch.metrics import MetricsFunction, checked_metrics, tell
from dcpring.watch.progress import ProgressOption, checked_progress, start_meter

__all__ = ["RingWriter"]

logger = logging.getLogger("dcpring")

_KEPT_TABLES = 2
Unchanged = Literal["write", "link", "trust"]
FileNames = Literal["unique", "torch"]


def check_unchanged(value: object) -> None:
    if value not in ("write", "link", "trust"):
        raise ValueError(f'unchanged={value!r}: must be "write", "link" or "trust"')


def ends_save(method: Any) -> Any:
    """Of the calls that may be the last of a save on this rank: its thread has nothing of its own then."""

    @functools.wraps(method)
    def call(self: RingWriter, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if method.__name__ == "finish" or not (self._events.is_coordinator or self._events.is_alone):
            of_threads(self).end()
        return result

    return call


class RingWriter(FileSystemWriter):
    """Writes DCP checkpoints through io_uring: ``dcp.save(state_dict, storage_writer=RingWriter(path))``.

    Takes the arguments of ``FileSystemWriter`` and works wherever that does: ``dcp.save``, ``dcp.async_save``, any
    planner. The files are ones that stock DCP reads. The old checkpoint in ``path`` stays good until the new one is
    complete and durable.

    What is raised reaches the caller of the save inside DCP's ``CheckpointException``.

    Args:
        path: directory of the checkpoint, made if missing.
        single_file_per_rank: one file per rank, else one per item.
        sync_files: make everything durable before the save ends.
        thread_count: as ``workers`` (see ``io``), where that is not given.
        per_thread_copy_ahead: bytes copied ahead from an accelerator.
        cache_staged_state_dict: keep the memory of the copy that ``dcp.async_save`` makes by this writer, for the next
            save by it. Writers of their own for each save share memory by ``RingStager``.
        overwrite: replace a checkpoint that is there; else ``RuntimeError``.
        serialization_format: only ``TORCH_SAVE``.
        keep_superseded: leave the data files of the checkpoint that is replaced, for readers that are still at it;
            the save after this one removes them.
        key_map: other names for the keys in the checkpoint: "normalize", a dict, the path of a JSON table, or a
            function from the state dict's names (see docs/keys.md). The table that was used is stored beside the
            checkpoint, in ``.dcpring.json``.
        progress: True draws one bar for all ranks of the coordinator's host, if its standard error is a terminal; a
            function gets a ``Progress`` about five times a second, from another thread of the coordinator. On all
            ranks alike.
        objects: what to do about objects that a load refuses by default, as they are more than plain data (see
            docs/objects.md): "warn" logs their keys and classes, once per save, where the metadata is written; "error"
            fails the save on all ranks, before anything is written where RingSavePlanner plans; "allow" says nothing.
        safe_globals: classes that loads will be given as ``safe_globals``, which need no warning then.
        unchanged: "link": tensors that an earlier checkpoint has, bit for bit, are not written again; their files there
            become files of this one too, by hard links (see docs/resume.md). That they are equal is found by reading
            them in memory; with "trust" parameters that require no gradient are read once, and then but a few bytes of
            each, unless they are seen to have changed; nor are they copied again into a copy that is kept
            (``cache_staged_state_dict``).
            "write", the default, writes everything.
        unchanged_from: the directory of the earlier checkpoint; None: the newest in ``path`` and the directories beside
            it.
        file_names: "unique": data files get names that no other save gives, so that a checkpoint can be saved over;
            "torch": ``__{rank}_{n}.distcp``, for programs that look for these. A checkpoint that is there is then an
            error, and what else has such a name, as from a save that failed, is replaced, as torch does.
        metrics: a function that gets a ``Metrics`` of each save when it is over, on the coordinator, in the thread that
            saves. The same is logged at INFO, as one line.
        trace: path of a trace of all saves with this path, for ``dcpring trace``, ui.perfetto.dev or chrome://tracing.
            With several ranks each writes its own: rank 1 "t.1.json" for "t.json". None: the environment variable
            ``DCPRING_TRACE``. A trace that cannot be written is logged as a warning, and the save goes on.
        io: engine, direct, queue_depth, block_size_bytes, workers and checksum, as ``dcpring.options.IOOptions`` has
            them. Of workers there are at least two, and as many as ``thread_count``, where none are given.

    Attributes:
        stats: ``IOStats`` of this rank's last ``write_data`` in this process, None before.

    Raises:
        OSError: with errno and path; this rank's partial files are removed.
        CheckpointError: an item cannot be saved.
    """

    _least_kept_bytes: ClassVar[int] = LEAST_KEPT_BYTES
    path: Any = Own()
    save_id: Any = Own()
    rank: Any = Own()
    use_collectives: Any = Own()
    stats: Any = Own()
    _run: Any = Own()

    @checks_names(*IO_NAMES)
    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        keep_superseded: bool = False,
        key_map: KeyMapLike = None,
        progress: ProgressOption = False,
        objects: ObjectPolicy = "warn",
        safe_globals: Sequence[Any] = (),
        unchanged: Unchanged = "write",
        unchanged_from: str | os.PathLike[str] | None = None,
        file_names: FileNames = "unique",
        trace: str | os.PathLike[str] | None = None,
        metrics: MetricsFunction | None = None,
        **io: Unpack[IOArguments],
    ) -> None:
        if objects not in ("warn", "error", "allow"):
            raise ValueError(f'objects={objects!r}: must be "warn", "error" or "allow"')
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise ValueError(
                f"serialization_format={serialization_format}: RingWriter writes DCP's TORCH_SAVE format; "
                "for safetensors use dcpring.RingHFWriter"
            )
        FileSystemWriter.__init__(  # a subclass of other writers of torch's, too, is made by this
            self,
            layout.local_path(path),
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=_extensions,
        )
        if io.get("workers") is None:
            io["workers"] = min(max(2, thread_count), MAX_WORKERS)
        self.options = IOOptions(**io)
        self.keep_superseded = keep_superseded
        self.key_map = None if key_map is None else KeyMap(key_map)
        self.progress = checked_progress(progress)
        self.objects: ObjectPolicy = objects
        self.safe_globals = checked_globals(safe_globals)
        check_unchanged(unchanged)
        self.unchanged: Unchanged = unchanged
        self.unchanged_from = None if unchanged_from is None else layout.local_path(unchanged_from)
        if file_names not in ("unique", "torch"):
            raise ValueError(f'file_names={file_names!r}: must be "unique" or "torch"')
        if file_names == "torch" and unchanged != "write":
            raise ValueError(
                f'unchanged={unchanged!r} needs file_names="unique": files that are linked have such names'
            )
        self.file_names: FileNames = file_names
        self._frozen: Set[str] = frozenset()
        self.metrics = checked_metrics(metrics)
        self._tracer = _trace.Tracer(trace)
        self._group = GroupBefore()
        self._is_sent = False  # what this writer has staged is saved by DCP's process
        self._stager = None
        if cache_staged_state_dict:
            self._stager = RingStager(unchanged="trust" if unchanged == "trust" else "copy")
        self._run = SaveRun()
        self.stats = None

    def __repr__(self) -> str:
        names = (
            "single_file_per_rank",
            "sync_files",
            "overwrite",
            "keep_superseded",
            "objects",
            "unchanged",
            "file_names",
        )
        return shown(self, str(self.path), **{name: getattr(self, name) for name in names}, **self.options.changed())

    def __getstate__(self) -> dict[str, Any]:
        """For DCP's process in the background: functions that only watch stay behind if they cannot be pickled."""
        if self._is_sent:
            wait_for_turn()
            watch_background_process()
        state = {**self.__dict__, "_stager": None, "_is_sent": False}
        for name, nothing in (("progress", False), ("metrics", None)):
            if callable(state[name]) and not pickles(state[name]):
                say_once(
                    logging.WARNING,
                    f"{name}= of RingWriter cannot be pickled, and so is not called in the process that saves; give a "
                    "function of a module's top level",
                )
                state[name] = nothing
        return state

    @property
    def _directory(self) -> Path:
        return self.path if isinstance(self.path, Path) else Path(self.path)

    @property
    def _own_rank_only(self) -> int | None:
        """The rank whose files alone are this writer's business, None with collectives (the coordinator's: all)."""
        return None if self.use_collectives else self.rank

    @property
    def _events(self) -> _trace.Events:
        return self._run.events

    def stage(self, state_dict: Any) -> Any:
        """A copy of the state for ``async_save`` without a stager, complete when this returns.

        Its memory goes when the save is over. It is shared for a save in a process, which copies nothing more. With
        ``cache_staged_state_dict`` the writer keeps it for its next save.
        """
        call = calling_async_save()
        self._group, self._is_sent = GroupBefore(), renew_background_process(call)
        save = BackgroundSave(0) if call is None else place_in_line(call, Line())
        self.per_thread_copy_ahead = 0  # the copy lies in host memory
        with _trace.Staging.timed() as staging:
            try:
                if self._stager is None:
                    copied = StagingBuffer(is_shared=self._is_sent).stage(state_dict)
                else:
                    copied = self._stager.stage_now(state_dict, save)
            except Exception as error:
                copied = uncopied(error)
            except BaseException:
                save.failed()
                raise
        save.copied.set_result(None)
        self._tracer.note_staged(staging)
        staged = Staged(copied)
        staged.save = save
        return staged

    def note_staged(self, staging: _trace.Staging) -> None:
        """Called by Checkpointer, which copies the state itself: when it did that for the next save."""
        self._tracer.note_staged(staging)

    def note_frozen(self, keys: Set[str]) -> None:
        """Called by Checkpointer, which knows the model: tensors under these keys are not trained."""
        self._frozen = keys

    def storage_meta(self) -> Any:
        """DCP asks for it first of all but ``reset``, and gives it to the planner."""
        wait_for_turn()
        self._begin_save()
        return with_run(super().storage_meta(), self._run)

    def _begin_save(self) -> None:
        self._abandon(of_threads(self).begin())
        drawn = uuid.uuid4()  # the only random number of a save: its other names are made of it
        self._run = SaveRun(self._tracer.start("save", self.path), key_map=self.key_map, tag=drawn.hex[16:])
        self._events.begin(_trace.LOCAL_PLAN)
        self.save_id = str(drawn)  # DCP gives a writer a new one only with another checkpoint_id

    @staticmethod
    def _abandon(before: dict[str, Any] | None) -> None:
        """Nothing more will be heard of a save of this thread."""
        if before is not None:
            before["_run"].events.abandon()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with self._events.step():
            plan = self._prepare(plan)
            self._events.wait_for_plans()
        return plan

    def _prepare(self, plan: SavePlan) -> SavePlan:
        # Its own name is synced with the data.
        self._run.is_first = _C.make_directory(str(self.path), self.sync_files, False)
        if not self.overwrite and (self._directory / METADATA_NAME).exists():
            raise RuntimeError(
                f"Checkpoint already exists and self.overwrite=False. It is in {self.path}; choose another directory"
            )
        if self.file_names == "torch":
            layout.refuse_checkpoint(self._directory, self._own_rank_only)
        if not isinstance(plan, RingPlan):
            check_sizes(plan.items)
        elif self.objects == "error" and plan.values is not None:
            self._refuse_objects(plan.values)
        return plan

    def _refuse_objects(self, values: Mapping[str, Any]) -> None:
        objects = ((key, value) for key, value in values.items() if not describes_itself(value))
        refused = refusals(objects, Safe(self.safe_globals))
        if refused:
            raise CheckpointError(f"cannot save {refused_text(refused, save='RingWriter')}")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._events.step(_trace.GLOBAL_PLAN):
            with self._events.span(_trace.CLEAN_UP):
                is_new = self._run.is_first  # so nothing of an earlier save is there
                self._claim([] if is_new else layout.remove_leftovers(self._directory, self._own_rank_only))
            self._run.plans = self._events.name_in(super().prepare_global_plan(plans))
            self._events.begin(_trace.SCATTER_PLANS)
        return self._run.plans

    @property
    def _metadata_name(self) -> str:
        return METADATA_NAME if self.use_collectives else layout.rank_metadata_name(self.rank or 0)

    def _claim(self, there: list[str]) -> None:
        """From here on this save may commit, to a directory with these names in it."""
        run, name = self._run, self._metadata_name
        run.there = there
        run.before = layout.state_of(self._directory / name) if name in run.there else None
        run.claim = layout.claim(self._directory, name, uuid.UUID(self.save_id).hex[:16])

    @ends_save
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the plan's items to new files; nothing that exists is touched."""
        with self._events.step(_trace.WRITE):
            self._events.take_name(plan)
            started = time.perf_counter()
            self.stats = stats = IOStats(items=len(plan.items))
            with self._run.meter:
                results = self._write_files(plan, planner, stats)
            stats.seconds = time.perf_counter() - started
            self._run.written(stats)
            self._events.wait_for_results()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_files(self, plan: SavePlan, planner: SavePlanner, stats: IOStats) -> Any:
        watch = self._run.watch()
        saving = Saving(
            plan.items,
            planner,
            path=str(self.path),
            options=self.options.for_core(self.sync_files, watch),
            transforms=self.transforms,
            piece_bytes=self.per_thread_copy_ahead or DEFAULT_PIECE_BYTES,
            stats=stats,
            judge=None if self.objects == "allow" else Judge(self.objects, Safe(self.safe_globals), stats.refused),
        )
        self._run.meter.begin(saving.planned_bytes)
        rank, numbers = self._plan_rank(plan), itertools.count()
        tag = self._run.take_tag() if self.file_names == "unique" else None
        pending = Pending(str(self.path), watch, self.sync_files, self._run.claim)
        keeping, earlier = self._compared(saving, planner, rank)

        def new_name() -> str:
            pending.names.append(layout.data_file_name(rank, next(numbers), tag))
            return pending.names[-1]

        with pending.removed_on_failure():
            if keeping is not None and earlier is not None:
                with self._events.span("link"):
                    link_files(keeping, earlier, self._directory, pending, new_name)
                if watch is not None:
                    watch.add(stats.linked_bytes)
            for some, objects, key in self._files(saving.items, keeping):
                name = new_name()
                if tag is None:
                    _C.remove_files(str(self.path), [name])
                with self._events.core(watch, f"file {name}", [name]):
                    saving.write(name, some, objects, key, pending.syncs)
                pending.synced.append(name)
            pending.sync_names()
        if self._commits_next:
            self._run.pending = pending
        else:
            pending.wait(self._events)
        stats.files = len(pending.names) - stats.linked_files
        return saving.results(b"" if keeping is None else keeping.ledger())

    @property
    def _commits_next(self) -> bool:
        """Whether this rank waits for no other before it commits, so that its data and metadata are synced together."""
        is_alone = world_size() == 1 or not self.use_collectives
        return is_alone and type(self).finish is RingWriter.finish

    def _files(self, items: PlanItems, keeping: Keeping | None) -> Iterable[tuple[list[int], list[int], bytes | None]]:
        """Which items go into each file: tensors, objects, and the key for digests of tensors that are to be kept."""
        tensors, kept, key = items.tensors, list[int](), None
        if keeping is not None:
            least_bytes = self._least_kept_bytes if self.single_file_per_rank else 0
            (tensors, kept), key = keeping.to_write(least_bytes), keeping.key
        if self.single_file_per_rank:
            files = [(tensors, items.objects, None), (kept, [], key)]
            return [file for file in files if file[0] or file[1]]
        objects, alone = set(items.objects), set(kept)
        return [
            ([], [at], None) if at in objects else ([at], [], key if at in alone else None)
            for at in sorted([*tensors, *kept, *items.objects])
        ]

    def _compared(self, saving: Saving, planner: SavePlanner, rank: int) -> tuple[Keeping | None, Earlier | None]:
        """What has not changed since the checkpoint before; None where nobody wants that, or it cannot be told."""
        if self.unchanged == "write" or not saving.knows_tensors:
            return None, None
        name, number = (METADATA_NAME, rank) if self.use_collectives else (layout.rank_metadata_name(rank), 0)
        with self._events.span("compare"):
            earlier = find_earlier(self._directory, self.unchanged_from, name, number)
            wholes = getattr(planner, "state_dict", None) or {}
            keeping = Keeping(
                saving,
                None if earlier is None else earlier.ledger,
                is_frozen=frozen_of(wholes, self._frozen),
                wholes=wholes if self.unchanged == "trust" else None,
                workers=self.options.workers,
                is_durable=self.sync_files,
            )
        return keeping, earlier

    def _plan_rank(self, plan: SavePlan) -> int:
        match = re.fullmatch(r"__(\d+)_", getattr(plan.storage_data, "prefix", ""))
        if match and self.use_collectives:
            return int(match[1])
        return self.rank or 0

    @ends_save
    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Commits: from the rename of the new metadata on, the new checkpoint is the one that is there."""
        with self._events.step(_trace.COMMIT):
            self._finish(metadata, results)
            self._events.finish()

    def _finish(self, metadata: Metadata, results: list[Any]) -> None:
        metadata.version = getattr(dcp_filesystem, "CURRENT_DCP_VERSION", "1.0.0")
        metadata.storage_meta = super().storage_meta()
        refused, ledgers = _refused_in(results), _ledgers_in(results)
        table = self._run.key_table
        if self.key_map is not None and table is None:
            names = self.key_map.rename(metadata.state_dict_metadata)
            made = [list(self._made(rank, part)) for rank, part in enumerate(results)]
            metadata, results = rename_metadata(metadata, names), rename_results(made, names)
            table = self.key_map.used(names)
        chunks = metadata.chunks if isinstance(metadata, LazyMetadata) else None
        if chunks is not None and all(isinstance(part, Results) for part in results):
            sizes, data = self._from_tables(metadata, chunks, results, ledgers)
        else:
            sizes, data = self._from_objects(metadata, results, ledgers)
        self._commit(sizes, data, table)
        if isinstance(metadata, LazyMetadata) and self.use_collectives:
            metadata.note_committed(self._directory / METADATA_NAME, id_of(data))
        if refused:
            logger.warning("%s holds %s", self.path, refused_text(refused, save="RingWriter"))
        self._run.committed([part.stats for part in results if isinstance(part, Results | ResultList)])
        self._tell(sum(sizes.values()), results)

    def _tell(self, size: int, results: list[Any]) -> None:
        ranks = range(len(results)) if self.use_collectives else [self.rank or 0]
        parts = zip(ranks, results, strict=False)
        seconds = {rank: part.stats.seconds for rank, part in parts if isinstance(part, Results | ResultList)}
        slowest = max(seconds, key=lambda rank: seconds[rank], default=None)
        took, longest = self._run.age_seconds, 0.0 if slowest is None else seconds[slowest]
        linked = sum(part.stats.linked_bytes for part in results if isinstance(part, Results | ResultList))
        written = max(0, size - linked)
        metrics = Metrics("save", str(self.path), written, took, len(results), slowest, longest, linked)
        tell(metrics, self.metrics, is_logged=True)

    def _from_tables(
        self, metadata: Metadata, chunks: Chunks, results: list[Results], ledgers: list[bytes]
    ) -> tuple[dict[str, int], bytes]:
        """The sizes of all data files, and the metadata file's bytes."""
        storage = _C.StorageIndex(len(chunks.table))
        for rank, part in enumerate(results):
            storage.merge(_C.decode_storage_index(part.packed), chunks.items[rank])
        chunks.storage = storage
        sizes = storage.file_sizes()
        pickled = chunks.pickled(metadata.storage_meta, metadata.version)
        return sizes, join_metadata(pickled, self._trailer(sorted(sizes), metadata), chunks.index(), ledgers)

    def _from_objects(
        self, metadata: Metadata, results: list[Any], ledgers: list[bytes]
    ) -> tuple[dict[str, int], bytes]:
        storage_data = {
            result.index: result.storage_data for rank, part in enumerate(results) for result in self._made(rank, part)
        }
        metadata.storage_data = storage_data
        sizes: dict[str, int] = {}
        for info in storage_data.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        trailer = self._trailer(sorted(sizes), metadata)
        return sizes, join_metadata(pickle_metadata(metadata), trailer, ledgers=ledgers)

    def _made(self, rank: int, part: Any) -> Iterable[WriteResult]:
        return part.of(self._run.plans[rank].items) if isinstance(part, Results) else part

    def _commit(self, sizes: dict[str, int], data: bytes, table: KeyTable | None) -> None:
        run, own, metadata = self._run, self._own_rank_only, self._directory / self._metadata_name
        if not run.claim:  # nobody has called prepare_global_plan, and data have been written by now
            self._claim(names_in(self._directory))
        superseded = layout.tables(run.there, own)
        if not self.keep_superseded:
            superseded |= layout.superseded_files(self._directory, run.there, own)
        pending = run.pending or Pending(str(self.path), None, self.sync_files, run.claim)
        run.pending = None
        try:
            with pending.removed_on_failure():
                layout.check_data_files(self._directory, sizes, self.rank or 0)
                table_name = self._commit_table(metadata, table)
                pending.write(run.claim, data, is_there=True)
            pending.wait(self._events)
            with pending.removed_on_failure():
                if layout.state_of(metadata) not in (run.before, None):
                    raise layout.overtaken(metadata, "was replaced")
            _C.rename_file(str(self.path), run.claim, metadata.name, self.sync_files)
        except FileNotFoundError:
            raise layout.overtaken(self._directory / run.claim, "was removed") from None
        self._events.begin(_trace.CLEAN_UP)
        layout.remove_superseded(self._directory, superseded, [*sizes, table_name or ""])

    def _commit_table(self, metadata: Path, table: KeyTable | None) -> str | None:
        """Stores the key map before the metadata that it belongs to, with that of the checkpoint that is still there.

        Tables are told apart by the id of the save, so whichever metadata is there after a crash finds its own. Those
        that were added last stay, too: another save may be about to commit.
        """
        if table is None:
            return None
        name = layout.table_name(self._own_rank_only)
        tables: dict[str, KeyTable] = {}
        with locked(self._directory):  # else one of two that write at once would lose the other's
            with contextlib.suppress(OSError, ValueError, CheckpointError):
                kept, current = load_tables(self._directory / name), read_trailer(metadata)
                tables = {
                    save_id: kept[save_id]
                    for at, save_id in enumerate(kept, start=_KEPT_TABLES - len(kept))
                    if at >= 0 or (current is not None and save_id == current.save_id)
                }
            data = dump_tables(tables | {self.save_id: table})
            _C.commit(str(self.path), unfinished_name(name), name, data, self.sync_files)
        return name

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._abandon(of_threads(self).begin(is_early=True))
        super().reset(layout.local_path(checkpoint_id) if checkpoint_id else None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._group.require()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if self._events.is_sure or not self._events.phase:  # nobody has asked for storage_meta()
            self._begin_save()
        self._run.meter = start_meter(self.progress, "save", str(self.path), is_coordinator)
        self._events.set_up(is_coordinator, not self.use_collectives)
        if not self.use_collectives:
            members = members_of_caller()
            self._run.group_id, self._run.world_size = agree_on_id(str(self.path), members), len(members)
        self._events.identity = self._run.group_id or self._events.identity

    def _trailer(self, files: list[str], metadata: Metadata) -> Trailer:
        trailer = Trailer(files=files, save_id=self.save_id, version=metadata.version or "")
        if not self.use_collectives:
            trailer.group_id = self._run.group_id
            trailer.world_size = self._run.world_size
            trailer.superseded_id = metadata_id(self._directory / METADATA_NAME)
        return trailer


def _refused_in(results: list[Any]) -> dict[str, str]:
    """What a load will refuse of what the ranks whose results these are have written, by key."""
    found = [part.stats.refused for part in results if isinstance(part, Results | ResultList)]
    return {key: name for part in found for key, name in part.items()}


def _ledgers_in(results: list[Any]) -> list[bytes]:
    """Those of all ranks, in order; none where no rank has one."""
    found = [part.ledger if isinstance(part, Results | ResultList) else b"" for part in results]
    return found if any(found) else []


def agree_on_id(path: str, members: list[int]) -> str:
    """The same random id on all of these ranks for one save, "" where there is no store to agree by."""
    return agree_among(members, f"dcpring/{path}", new_tag())
