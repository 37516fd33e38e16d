"""RingHFWriter: a DCP storage writer of safetensors files as model hubs lay them out.

The header of each file follows from the global plan, so every rank writes its bytes straight into the final files, once
(``hf.file_plan``, ``hf.stripes``). Files are written where nobody looks for them. The coordinator then adds the
headers, with the CRCs that all ranks have summed, and commits (``hf.commit``): what the directory meant before stays
good until then. Other files in it, as a model's config, are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.arguments import checks_names
from dcpring.base.files import new_tag
from dcpring.base.groups import host_id, world_size
from dcpring.base.memory import same_memory
from dcpring.base.text import some_keys
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError
from dcpring.format import safetensors
from dcpring.format.model_files import DEFAULT_SHARD_BYTES, ModelFileNames
from dcpring.hf.commit import Unfinished, check_others, commit_model, discard, remove_unfinished
from dcpring.hf.file_plan import Assignment, Common, FileLayout, Holdings, Laid, SavedTensor
from dcpring.hf.stripes import StripeSaving, Sums, crcs_by_tensor, stay_away
from dcpring.move.pending import Pending
from dcpring.move.save.results import Results
from dcpring.names.key_map import KeyMapLike
from dcpring.options import IO_NAMES, IOArguments, IOStats
from dcpring.plan.messages import RingPlan
from dcpring.plan.run import of_run
from dcpring.plan.table import check_sizes
from dcpring.store.one_saver import OneSaver
from dcpring.store.writer import RingWriter
from dcpring.torchside.groups import group_of_caller
from dcpring.torchside.tensors import local_tensor
from dcpring.torchside.versions import say_once
from dcpring.watch import events as _trace
from dcpring.watch.metrics import MetricsFunction
from dcpring.watch.progress import ProgressOption

__all__ = ["RingHFWriter"]

logger = logging.getLogger("dcpring")


class _ToldByRank(NamedTuple):
    """What a rank tells the coordinator besides its items.

    Attributes:
        host: the same string on all ranks of a machine.
        ties: names of tensors that are the same memory as another's, by the later.
    """

    host: str
    ties: dict[str, str]


class StripeResults(Results):
    """What a rank reports of its stripes; there are no WriteResults.

    Attributes:
        sums: CRCs.
    """

    def __init__(self, sums: Sums, stats: IOStats) -> None:
        super().__init__(None, [], stats)
        self.sums = sums

    def __reduce__(self) -> tuple[Any, ...]:
        return StripeResults, (self.sums, self.stats)


class RingHFWriter(RingWriter, HuggingFaceStorageWriter):
    """Writes a directory of safetensors that ``from_pretrained`` loads, from any sharding, in place::

        dcp.save(get_model_state_dict(model), storage_writer=RingHFWriter("out"), planner=RingSavePlanner())

    Takes the arguments of ``HuggingFaceStorageWriter``. Whatever these say, the result is what that writes with
    consolidation: ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``; every byte is written once, by the rank that holds it or one beside. The model
    that is there stays good until the new one is complete and durable. Files that are no part of it stay.

    The header holds a CRC-32 of each tensor's every 1 MiB block, and one of itself: ``dcpring verify`` and loads check
    them.

    Tied tensors are written once with RingSavePlanner, as transformers does: the header notes the other names. Stock's
    planner writes them under each name.

    Args:
        path: directory of the model, made if missing.
        fqn_to_index_mapping: the file of each tensor, from 1 on; None: in the order of the state dict, as
            ``max_shard_bytes`` has it.
        thread_count: as ``workers`` (see ``io``), where that is not given.
        save_distributed, enable_consolidation, thread_count_consolidation: taken for ``HuggingFaceStorageWriter``'s
            sake, without effect.
        name: what the files are called, "model" if None: "diffusion_pytorch_model" for diffusers, "adapter_model" for
            PEFT. Where a directory holds models of other names only, a save without it is an error.
        variant: of several in a directory, as transformers has it: "fp16" for ``model.fp16.safetensors``.
        max_shard_bytes: no file holds more bytes of tensors, unless one tensor has more.
        dtype: what floating-point tensors are cast to, each as ``Tensor.to`` does, if it has their values; or such
            dtypes by patterns of names in the file ("*.norm.weight"), of which the first that fits counts. None: as
            they are.
        key_map: as for ``RingWriter``, from the state dict's names to those in the files.
        sync_files: make everything durable before the save ends.
        progress, metrics, trace: as for ``RingWriter``.
        io: as for ``RingWriter``.

    Raises:
        CheckpointError: something is no tensor, or none that safetensors can hold; with ``use_collectives=False``; the
            directory holds models of other names only; another save into it is under way.
        OSError: with errno and path.
    """

    _model: Any = of_run("model")
    _saver: Any = of_run("one_saver")

    @checks_names(*IO_NAMES)
    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        name: str | None = None,
        variant: str | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        key_map: KeyMapLike = None,
        sync_files: bool = True,
        progress: ProgressOption = False,
        metrics: MetricsFunction | None = None,
        trace: str | os.PathLike[str] | None = None,
        **io: Unpack[IOArguments],
    ) -> None:
        if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes!r}: must be an int from 1")
        RingWriter.__init__(
            self,
            path,
            thread_count=thread_count,
            sync_files=sync_files,
            key_map=key_map,
            progress=progress,
            metrics=metrics,
            trace=trace,
            objects="allow",
            **io,
        )
        if save_distributed and not enable_consolidation:
            say_once(
                logging.INFO,
                "RingHFWriter(save_distributed=True): no shards of ranks are written, but the whole tensors at once, "
                "as enable_consolidation=True would make of them",
            )
        self.fqn_to_index_mapping = None if fqn_to_index_mapping is None else dict(fqn_to_index_mapping)
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        self.names = ModelFileNames.checked(name, variant)
        self._is_named = name is not None
        self.max_shard_bytes = max_shard_bytes
        self.dtype = _checked_dtype(dtype)
        self._model = None
        self._saver = None

    # ---- planning ----

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise CheckpointError("RingHFWriter cannot save with use_collectives=False: all ranks write the same files")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def _prepare(self, plan: SavePlan) -> SavePlan:
        _C.make_directory(str(self.path), self.sync_files, False)  # its own name is synced with the data
        ties: dict[str, str] = {}
        if not isinstance(plan, RingPlan):
            check_sizes(plan.items)
        elif plan.values is not None:
            _refuse_objects(name for name, value in plan.values.items() if not isinstance(value, Tensor))
            ties = _ties(plan.values)
        return dataclasses.replace(plan, storage_data=_ToldByRank(host_id(), ties))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._save.events.step(_trace.GLOBAL_PLAN):
            self._model = self._saver = None
            if not self._is_named:
                check_others(self._directory, self.names)
            self._saver = OneSaver(self._directory)
            with self._releasing(), self._save.events.span(_trace.CLEAN_UP):
                remove_unfinished(self._directory, self.names)
            with self._releasing():
                self._save.plans = self._assign(plans)
            plans = self._save.events.name_in(self._save.plans)
            self._save.events.begin(_trace.SCATTER_PLANS)
        return plans

    def _assign(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lays the files out, makes them, and says who writes what."""
        told = [_local_of(plan) for plan in plans]
        held = Holdings([plan.items for plan in plans])
        ties = _agreed_ties(told, held)
        found = held.tensors()
        _refuse_objects(name for name, tensor in found.items() if tensor is None)
        self._model = model = self._lay_out({name: tensor for name, tensor in found.items() if tensor}, ties)
        block_bytes = self.options.block_size_bytes
        by_file, rounds = zip(*(held.share(layout, block_bytes) for layout in model.layouts), strict=True)
        self._create(model)
        hosts = [one.host for one in told]
        packed = Common(model.layouts, list(rounds), hosts, new_tag(), frozenset(ties), block_bytes).packed()
        return [
            dataclasses.replace(plan, storage_data=Assignment(packed, parts))
            for plan, *parts in zip(plans, *by_file, strict=True)
        ]

    @contextlib.contextmanager
    def _releasing(self, is_last: bool = False) -> Iterator[None]:
        """Others may save into the directory after a failure, or after what is the last of this save."""
        try:
            yield
        except BaseException:
            is_last = True
            raise
        finally:
            if is_last and self._saver is not None:
                self._saver.release()
                self._saver = None

    def _lay_out(self, tensors: Mapping[str, SavedTensor], ties: Mapping[str, str]) -> _PlannedModel:
        stored = {name: name for name in tensors}
        if self.key_map is not None and self._save.key_table is None:  # else the planner has done it
            stored = self.key_map.rename(tensors)
        chosen = {name: self._dtype_of(stored[name], tensor.dtype) for name, tensor in tensors.items()}
        safetensors.check_entries({stored[name]: dtype for name, dtype in chosen.items()}, _CURES)
        kept = {name: tensor for name, tensor in tensors.items() if name not in ties}
        groups = self._by_mapping(kept) if self.fqn_to_index_mapping is not None else self._by_size(kept, chosen)
        unfinished = Unfinished.of(self.names, len(groups))
        model = _PlannedModel(unfinished, [], [], {}, {stored[second]: stored[first] for second, first in ties.items()})
        for (hidden, name), group in zip(unfinished.files.items(), groups, strict=True):
            # Larger elements first: every tensor is then aligned to its own.
            ordered = sorted(group, key=lambda each: -chosen[each].itemsize)
            laid = [_laid(each, kept[each].shape, stored[each], chosen[each]) for each in ordered]
            self._place(hidden, laid, model)
            model.files.update((each.stored, name) for each in laid)
        return model

    def _dtype_of(self, name: str, stored: torch.dtype) -> torch.dtype:
        if self.dtype is None or not stored.is_floating_point:
            return stored
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return next((dtype for pattern, dtype in self.dtype.items() if fnmatch.fnmatchcase(name, pattern)), stored)

    def dtype_in_files(self, state: Mapping[str, Any]) -> torch.dtype | None:
        """The dtype of a model's files, as transformers has it: that of the first tensor that is floating-point."""
        dtypes = {name: getattr(value, "dtype", None) for name, value in state.items()}
        first = next((name for name, dtype in dtypes.items() if dtype is not None and dtype.is_floating_point), None)
        if first is None:
            return None
        stored = first if self.key_map is None else self.key_map.rename([first])[first]
        return self._dtype_of(stored, state[first].dtype)

    def _by_size(self, tensors: Mapping[str, SavedTensor], dtypes: Mapping[str, torch.dtype]) -> list[list[str]]:
        def size_of(name: str) -> int:
            return math.prod(tensors[name].shape) * dtypes[name].itemsize

        return list(windows(tensors, size_of, self.max_shard_bytes)) or [[]]

    def _by_mapping(self, tensors: Mapping[str, SavedTensor]) -> list[list[str]]:
        assert self.fqn_to_index_mapping is not None
        missing = [name for name in tensors if name not in self.fqn_to_index_mapping]
        if missing:
            raise CheckpointError(
                f"fqn_to_index_mapping names no file for {some_keys(missing)}; give one for each tensor"
            )
        indices = {name: self.fqn_to_index_mapping[name] for name in tensors}
        wrong = [name for name, index in indices.items() if not isinstance(index, int) or index < 1]
        if wrong:
            raise CheckpointError(f"fqn_to_index_mapping has no number from 1 on for {some_keys(wrong)}")
        groups: list[list[str]] = [[] for _ in range(max(indices.values(), default=1))]
        for name, index in indices.items():
            groups[index - 1].append(name)
        return groups

    def _place(self, name: str, tensors: list[Laid], model: _PlannedModel) -> None:
        """Adds a file. Its header has room for as many CRCs as the tensors can have, wherever they begin."""
        entries = safetensors.header_entries(((each.stored, each.dtype, each.shape) for each in tensors), _CURES)
        bare_bytes = len(self._header(entries, model, dict.fromkeys((each.stored for each in tensors), ""), 1))
        digits = 8 * sum(each.most_crcs for each in tensors) if self.options.checksum else 0
        at = head_bytes = -(-(bare_bytes + digits) // _C.ALIGNMENT_BYTES) * _C.ALIGNMENT_BYTES
        laid = []
        for each in tensors:
            laid.append(each._replace(begin=at))
            at += each.size_bytes
        model.layouts.append(FileLayout(name, head_bytes, laid))
        model.entries.append(entries)

    def _header(self, entries: bytes, model: _PlannedModel, crcs: Mapping[str, str], alignment: int) -> bytes:
        notes = safetensors.header_notes({"format": "pt"}, model.ties, crcs if self.options.checksum else None)
        return safetensors.join_header(entries, notes, alignment, _CURES)

    def _create(self, model: _PlannedModel) -> None:
        """Makes the files, with all their bytes allocated; none, where a disk has no room for all."""
        options = dataclasses.replace(self.options, direct=False).for_core(False)
        try:
            model.unfinished.make_folder(self._directory)
            for layout in model.layouts:
                file = _C.StripeFile(str(self.path), layout.name, layout.size_bytes, 0, options)
                file.finish(None, None)
                file.close()
        except BaseException:
            discard(self._directory, model.unfinished.files)
            raise

    # ---- writing ----

    def _write_files(self, plan: SavePlan, planner: SavePlanner, stats: IOStats) -> Any:
        part = plan.storage_data
        if not isinstance(part, Assignment):
            raise CheckpointError("RingHFWriter needs what its prepare_global_plan puts into each plan's storage_data")
        group = group_of_caller()
        is_synced = self.sync_files and world_size() > 1  # else the syncs of the headers are those of the data, too
        pending = Pending(str(self.path), self._save.watch(), is_synced)
        try:
            saving = StripeSaving(plan, planner, part, str(self.path), self._save, self.options, pending, stats, group)
        except BaseException:
            stay_away(part, group)
            raise
        try:
            with self._releasing():
                sums = saving.write()
                pending.wait(self._save.events)
        except BaseException:
            discard(self._directory, [layout.name for layout in part.common.files])
            raise
        return StripeResults(sums, stats)

    # ---- the commit ----

    def _finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Commits: from the last rename on, the new model is the one that is there."""
        model = self._model
        if model is None:
            raise CheckpointError("finish before prepare_global_plan")
        with self._releasing(is_last=True):
            indices = self._finish_files(model, results)
            commit_model(self._directory, model.unfinished, indices, self.sync_files)
        self._model = None
        self._tell(sum(layout.size_bytes for layout in model.layouts), results)

    def _finish_files(self, model: _PlannedModel, results: list[Any]) -> list[str]:
        """Adds headers, and indices, whose names are returned; all is durable then."""
        pending = Pending(str(self.path), None, self.sync_files)
        try:
            crcs = crcs_by_tensor(model.layouts, [part.sums for part in results]) if self.options.checksum else None
            for number, (layout, entries) in enumerate(zip(model.layouts, model.entries, strict=True)):
                header = self._header(entries, model, {} if crcs is None else crcs[number], layout.head_bytes)
                self._write_header(layout, header, pending)
            total = sum(laid.size_bytes for layout in model.layouts for laid in layout.tensors)
            for index in model.unfinished.indices(model.files, total):
                pending.write(*index)
            if pending.syncs is not None:
                pending.syncs.above(str(self.path))
            pending.wait(self._save.events)
        except BaseException:
            discard(self._directory, [*model.unfinished.files, *pending.names])
            raise
        return pending.names

    def _write_header(self, layout: FileLayout, header: bytes, pending: Pending) -> None:
        assert len(header) == layout.head_bytes
        options = dataclasses.replace(self.options, direct=False).for_core(self.sync_files, exact=True)
        file = _C.StripeFile(str(self.path), layout.name, 0, 0, options)
        try:
            file.write_at(0, header)
            file.finish(layout.size_bytes, pending.syncs)
            pending.synced.append(layout.name)
        finally:
            file.close()


class _PlannedModel(NamedTuple):
    """What is being saved.

    Attributes:
        unfinished: the files, and what they are called.
        layouts: of each.
        entries: what its header says of its tensors.
        files: the file of each tensor, by the names in them.
        ties: names in the files whose tensors are under another.
    """

    unfinished: Unfinished
    layouts: list[FileLayout]
    entries: list[bytes]
    files: dict[str, str]
    ties: dict[str, str]


_CURES = safetensors.Cures(
    leave_out="leave them out of the state dict (dcp.save with a dcpring.RingWriter takes anything)",
    cast="cast them, or give RingHFWriter(dtype=...) for floats",
    rename="rename it with RingHFWriter(key_map=...)",
    split="give RingHFWriter a smaller max_shard_bytes",
)


def _laid(name: str, shape: tuple[int, ...], stored: str, dtype: torch.dtype) -> Laid:
    """A tensor in a file, whose place is not known yet."""
    return Laid(name, stored, dtype, shape, math.prod(shape) * dtype.itemsize, 0)


def _checked_dtype(dtype: Any) -> torch.dtype | dict[str, torch.dtype] | None:
    given = list(dtype.values()) if isinstance(dtype, Mapping) else [dtype]
    for one in given if dtype is not None else ():
        if not isinstance(one, torch.dtype) or not one.is_floating_point:
            raise ValueError(f"dtype={dtype!r}: must be a floating-point dtype, or such dtypes by patterns of names")
    return dtype if dtype is None or isinstance(dtype, torch.dtype) else dict(dtype)


def _refuse_objects(names: Iterable[str]) -> None:
    safetensors.check_entries(dict.fromkeys(names), _CURES)


def _local_of(plan: SavePlan) -> _ToldByRank:
    told = plan.storage_data
    return told if isinstance(told, _ToldByRank) else _ToldByRank(new_tag(), {})


def _ties(values: Mapping[str, Any]) -> dict[str, str]:
    """Names of tensors that are another's memory, with the first name that it has."""
    names = list(values)
    locals_ = {
        index: local_tensor(value) if isinstance(value, DTensor) else value
        for index, value in enumerate(values.values())
        if isinstance(value, Tensor)
    }
    plain = {index: tensor for index, tensor in locals_.items() if type(tensor) in (Tensor, torch.nn.Parameter)}
    same = same_memory({index: tensor for index, tensor in plain.items() if tensor.layout == torch.strided})
    return {
        names[second]: names[first]
        for second, first in same.items()
        if values[names[second]].shape == values[names[first]].shape and names[second] not in safetensors.NOT_TIED
    }


def _agreed_ties(told: Sequence[_ToldByRank], held: Holdings) -> dict[str, str]:
    """Ties that hold on every rank that writes anything of the second name."""
    found = {second: first for one in told for second, first in one.ties.items()}
    return {
        second: first
        for second, first in found.items()
        if all(told[rank].ties.get(second) == first for rank in held.holders(second))
    }
