"""RingWriter: DCP's storage writer on the C core."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence, Set
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
from dcpring.base.files import names_in, new_tag
from dcpring.base.groups import agree_among, world_size
from dcpring.base.order import ranks_now, require_group, wait_for_turn
from dcpring.base.pickling import pickles
from dcpring.errors import CheckpointError
from dcpring.format.archive import refused_text
from dcpring.format.lazy import LazyMetadata
from dcpring.format.metadata import (
    METADATA_NAME,
    Trailer,
    id_of,
    join_metadata,
    metadata_id,
)
from dcpring.format.unpickler import Safe, checked_globals
from dcpring.move.device import DEFAULT_PIECE_BYTES
from dcpring.move.objects import Judge, ObjectPolicy, refusals
from dcpring.move.pending import Pending
from dcpring.move.save.items import PlanItems
from dcpring.move.save.results import Results, note_places, results_by_rank
from dcpring.move.save.saving import Saving
from dcpring.move.staging import Copying, Devices, StagingBuffer
from dcpring.move.unchanged import LEAST_KEPT_BYTES, Keeping
from dcpring.names.key_map import (
    KeyMap,
    KeyMapLike,
    KeyTable,
    rename_metadata,
    rename_results,
)
from dcpring.options import IO_NAMES, MAX_WORKERS, IOArguments, IOOptions, IOStats
from dcpring.plan.messages import RingPlan
from dcpring.plan.run import RunsByThread, Save, of_run, with_run
from dcpring.plan.table import check_sizes, describes_itself
from dcpring.store import layout
from dcpring.store.earlier import Earlier, find_earlier, frozen_of, link_files
from dcpring.store.stager import RingStager, TorchSave, renew_background_process
from dcpring.torchside.dcp import calling_async_save
from dcpring.torchside.groups import members_of_caller
from dcpring.torchside.versions import say_once
from dcpring.watch import events as _trace
from dcpring.watch.events import Events
from dcpring.watch.metrics import MetricsFunction, checked_metrics, tell
from dcpring.watch.progress import ProgressOption, checked_progress, start_meter

__all__ = ["RingWriter"]

logger = logging.getLogger("dcpring")

Unchanged = Literal["write", "link", "trust"]
FileNames = Literal["unique", "torch"]


def check_unchanged(value: object) -> None:
    if value not in ("write", "link", "trust"):
        raise ValueError(f'unchanged={value!r}: must be "write", "link" or "trust"')


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
    path: Any = of_run("path")
    save_id: Any = of_run("save_id")
    rank: Any = of_run("rank")
    use_collectives: Any = of_run("use_collectives")
    stats: Any = of_run("stats")

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
        self._runs = RunsByThread(Save())
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
        self._ranks = ranks_now()
        self._stager = None
        if cache_staged_state_dict:
            self._stager = RingStager(unchanged="trust" if unchanged == "trust" else "copy")

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
        state = {**self.__dict__, "_stager": None, "_runs": self._runs.copied()}
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
        return None if self.use_collectives else self.rank or 0

    @property
    def _metadata_name(self) -> str:
        own = self._own_rank_only
        return METADATA_NAME if own is None else layout.rank_metadata_name(own)

    def stage(self, state_dict: Any) -> Any:
        """A copy of the state for ``async_save`` without a stager, complete when this returns.

        Its memory goes when the save is over. It is shared for a save in a process, which copies nothing more. With
        ``cache_staged_state_dict`` the writer keeps it for its next save.
        """
        call = calling_async_save()
        renew_background_process(call)
        self.per_thread_copy_ahead = 0  # the copy lies in host memory
        with _trace.Staging.timed() as staging:
            if self._stager is None:
                is_sent = call is not None and call.is_sent
                copying = Copying.of(StagingBuffer(is_shared=is_sent), state_dict, Devices(), None)
            else:
                copying = self._stager.begin_copy(state_dict, Devices())
            copied = copying.fill()
        self._tracer.note_staged(staging)
        if call is None:
            return copied
        save = TorchSave(call)
        copying.turn = save.turn
        return save.staged(copied)

    def note_staged(self, staging: _trace.Staging) -> None:
        """Called by Checkpointer, which copies the state itself: when it did that for the next save."""
        self._tracer.note_staged(staging)

    def note_frozen(self, keys: Set[str]) -> None:
        """Called by Checkpointer, which knows the model: tensors under these keys are not trained."""
        self._frozen = keys

    # ---- the saves of this writer ----

    @property
    def _save(self) -> Save:
        """The save that the calling thread is at; between saves the one that any thread was at last."""
        return self._runs.current

    def _begin_save(self) -> None:
        self._runs.begin(self._tracer.start("save", self.path), self.key_map).events.begin(_trace.LOCAL_PLAN)
        drawn = uuid.uuid4()  # the only random number of a save: its other names are made of it
        self._save.tag = drawn.hex[16:]
        self.save_id = str(drawn)  # DCP gives a writer a new one only with another checkpoint_id

    # ---- the protocol of a save: what DCP calls, in this order; the planner's part is in plan.save_planner ----

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next save goes to this directory; None: to that of the last one."""
        self._runs.begin(Events(), self.key_map)
        super().reset(layout.local_path(checkpoint_id) if checkpoint_id else None)

    def storage_meta(self) -> Any:
        """Begins a save, which the planner finds in what this gives."""
        wait_for_turn()
        self._begin_save()
        return with_run(super().storage_meta(), self._save)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Says which part this rank has in the save."""
        require_group(*self._ranks)
        if self._save.events.is_sure or not self._save.events.started:  # nobody has asked for storage_meta()
            self._begin_save()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        save = self._save
        if self.progress:
            save.meter = start_meter(self.progress, "save", str(self.path), is_coordinator)
        save.events.set_up(is_coordinator, not self.use_collectives)
        if not self.use_collectives:
            members = members_of_caller()
            save.group_id, save.world_size = agree_among(members, f"dcpring/{self.path}", new_tag()), len(members)
            save.events.identity = save.group_id or save.events.identity

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the directory, and refuses what cannot be saved."""
        with self._save.events.step():
            plan = self._prepare(plan)
            self._save.events.wait_for_plans()
        return plan

    def _prepare(self, plan: SavePlan) -> SavePlan:
        # Its own name is synced with the data.
        self._save.is_first = _C.make_directory(str(self.path), self.sync_files, False)
        if not self.overwrite and (self._directory / METADATA_NAME).exists():
            raise RuntimeError(
                f"Checkpoint already exists and self.overwrite=False. It is in {self.path}; choose another directory"
            )
        if self.file_names == "torch":
            layout.refuse_checkpoint(self._directory, self._own_rank_only)
        if not isinstance(plan, RingPlan):
            check_sizes(plan.items)
        elif self.objects == "error" and plan.values is not None:
            objects = ((key, value) for key, value in plan.values.items() if not describes_itself(value))
            refused = refusals(objects, Safe(self.safe_globals))
            if refused:
                raise CheckpointError(f"cannot save {refused_text(refused, save='RingWriter')}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: removes what failed saves have left, and claims the directory."""
        save = self._save
        with save.events.step(_trace.GLOBAL_PLAN):
            with save.events.span(_trace.CLEAN_UP):
                there = [] if save.is_first else layout.remove_leftovers(self._directory, self._own_rank_only)
                self._claim(there)
            save.plans = save.events.name_in(super().prepare_global_plan(plans))
            save.events.begin(_trace.SCATTER_PLANS)
        return save.plans

    def _claim(self, there: list[str]) -> layout.Claim:
        """From here on this save may commit, to a directory with these names in it."""
        tag = uuid.UUID(self.save_id).hex[:16]
        self._save.claim = claim = layout.Claim(self._directory, self._own_rank_only, tag, there)
        return claim

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the plan's items to new files; nothing that exists is touched."""
        save = self._save
        with save.events.step(_trace.WRITE):
            save.events.take_name(plan)
            started = time.perf_counter()
            self.stats = stats = IOStats(items=len(plan.items))
            with save.meter:
                results = self._write_files(plan, planner, stats)
            stats.seconds = time.perf_counter() - started
            save.note_written({0: stats})
            save.events.wait_for_results()
        if save.events.is_over:
            self._runs.end()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_files(self, plan: SavePlan, planner: SavePlanner, stats: IOStats) -> Any:
        save, path = self._save, str(self.path)
        watch, rank = save.watch(), self._plan_rank(plan)
        saving = Saving(
            plan.items,
            planner,
            path=path,
            options=self.options.for_core(self.sync_files, watch),
            transforms=self.transforms,
            piece_bytes=self.per_thread_copy_ahead or DEFAULT_PIECE_BYTES,
            stats=stats,
            judge=None if self.objects == "allow" else Judge(self.objects, Safe(self.safe_globals), stats.refused),
        )
        save.meter.begin(saving.planned_bytes)
        tag = save.take_tag() if self.file_names == "unique" else None
        pending = Pending(path, watch, self.sync_files, "" if save.claim is None else save.claim.name)
        new_name = pending.namer(lambda number: layout.data_file_name(rank, number, tag))
        keeping, earlier = self._compared(saving, planner, rank)
        with pending.removed_on_failure():
            if keeping is not None and earlier is not None:
                with save.events.span("link"):
                    link_files(keeping, earlier, self._directory, pending, new_name)
                if watch is not None:
                    watch.add(stats.linked_bytes)
            for some, objects, key in self._files(saving.items, keeping):
                name = new_name()
                if tag is None:
                    _C.remove_files(path, [name])
                with save.events.core(watch, f"file {name}", [name]):
                    saving.write(name, some, objects, key, pending.syncs)
                pending.synced.append(name)
            pending.sync_names()
        is_alone = world_size() == 1 or not self.use_collectives
        if is_alone and type(self).finish is RingWriter.finish:
            save.pending = pending  # no other rank is waited for: data and metadata become durable together
        else:
            pending.wait(save.events)
        stats.files = len(pending.names) - stats.linked_files
        return saving.results(b"" if keeping is None else keeping.ledger())

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
        with self._save.events.span("compare"):
            number = rank if self.use_collectives else 0
            earlier = find_earlier(self._directory, self.unchanged_from, self._metadata_name, number)
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
        return int(match[1]) if match and self.use_collectives else self.rank or 0

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On the coordinator: commits. From the rename of the new metadata on the new checkpoint is the one there."""
        with self._save.events.step(_trace.COMMIT):
            self._finish(metadata, results)
            self._save.events.finish()
        self._runs.end()

    def _finish(self, metadata: Metadata, results: list[Any]) -> None:
        save, told = self._save, [part for part in results if isinstance(part, Results)]
        metadata.version = getattr(dcp_filesystem, "CURRENT_DCP_VERSION", "1.0.0")
        metadata.storage_meta = super().storage_meta()
        placed, table = results, save.key_table
        if self.key_map is not None and table is None:
            names = self.key_map.rename(metadata.state_dict_metadata)
            placed = rename_results(results_by_rank(results, save.plans), names)
            metadata, table = rename_metadata(metadata, names), self.key_map.used(names)
        sizes, pickled, tables = note_places(metadata, placed, save.plans)
        ledgers = [part.ledger if isinstance(part, Results) else b"" for part in results]
        trailer = self._trailer(sorted(sizes), metadata)
        data = join_metadata(pickled, trailer, tables, ledgers if any(ledgers) else [])
        self._commit(sizes, data, table)
        if isinstance(metadata, LazyMetadata) and self.use_collectives:
            metadata.note_committed(self._directory / METADATA_NAME, id_of(data))
        refused = {key: name for part in told for key, name in part.stats.refused.items()}
        if refused:
            logger.warning("%s holds %s", self.path, refused_text(refused, save="RingWriter"))
        self._tell(sum(sizes.values()), results)

    def _trailer(self, files: list[str], metadata: Metadata) -> Trailer:
        trailer = Trailer(files=files, save_id=self.save_id, version=metadata.version or "")
        if not self.use_collectives:
            trailer.group_id, trailer.world_size = self._save.group_id, self._save.world_size
            trailer.superseded_id = metadata_id(self._directory / METADATA_NAME)
        return trailer

    def _commit(self, sizes: dict[str, int], data: bytes, table: KeyTable | None) -> None:
        save, path = self._save, str(self.path)
        claim = save.claim or self._claim(names_in(self._directory))  # nobody has called prepare_global_plan
        superseded = claim.superseded(self.keep_superseded)
        pending = save.pending or Pending(path, None, self.sync_files, claim.name)
        save.pending, table_name = None, ""
        try:
            with pending.removed_on_failure():
                layout.check_data_files(self._directory, sizes, self.rank or 0)
                if table is not None:
                    whose = self._own_rank_only
                    table_name = layout.commit_table(claim.metadata, self.save_id, table, whose, self.sync_files)
                pending.write(claim.name, data, is_there=True)
            pending.wait(save.events)
            with pending.removed_on_failure():
                claim.check()
            _C.rename_file(path, claim.name, claim.metadata.name, self.sync_files)
        except FileNotFoundError:
            raise claim.lost() from None
        save.events.begin(_trace.CLEAN_UP)
        layout.remove_superseded(self._directory, superseded, [*sizes, table_name])

    def _tell(self, size: int, results: list[Any]) -> None:
        """Tells of a checkpoint that is committed: the report, the user's function and the log."""
        ranks = range(len(results)) if self.use_collectives else [self.rank or 0]
        parts = zip(ranks, results, strict=False)
        stats = {rank: part.stats for rank, part in parts if isinstance(part, Results)}
        tell(self._save.committed(size, len(results), stats), self.metrics, is_logged=True)
