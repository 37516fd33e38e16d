"""RingWriter: DCP's storage writer on the C core."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpring import _C, _layout
from dcpring._device import DEFAULT_PIECE_BYTES, Downloader
from dcpring._metadata import (
    BYTES,
    METADATA_NAME,
    RING_VERSION,
    TENSOR,
    Trailer,
    collection_paused,
    dump_metadata,
    metadata_id,
)
from dcpring.errors import CheckpointError
from dcpring.options import Direct, Engine, IOOptions, IOStats, overrides

__all__ = ["RingWriter"]

_WINDOW_BYTES = 32 << 20
"""How much a planner that makes new tensors in ``resolve_data`` is asked for at a time."""

_RECORD_BYTES = 1024
"""A record's head and tail, roughly; for the size hint."""


class RingWriter(FileSystemWriter):
    """Writes DCP checkpoints through io_uring: ``dcp.save(state_dict, storage_writer=RingWriter(path))``.

    Takes the arguments of ``FileSystemWriter`` and works wherever that does: ``dcp.save``, ``dcp.async_save``, any
    planner. The files are ones that stock DCP reads. The old checkpoint in ``path`` stays good until the new one is
    complete and durable.

    Args:
        path: directory of the checkpoint, made if missing.
        single_file_per_rank: one file per rank, else one per item.
        sync_files: make everything durable before the save ends.
        thread_count: as ``workers``, where that is not given.
        per_thread_copy_ahead: bytes copied ahead from an accelerator.
        cache_staged_state_dict: see ``FileSystemWriter``.
        overwrite: replace a checkpoint that is there; else ``RuntimeError``.
        serialization_format: only ``TORCH_SAVE``.
        engine, direct, queue_depth, block_size_bytes, workers, checksum: see ``dcpring.options.IOOptions``.
        keep_superseded: leave the data files of the checkpoint that is replaced, for readers that are still at it;
            the save after this one removes them.

    Attributes:
        stats: ``IOStats`` of this rank's last ``write_data``, None before.

    Raises (from the save, inside DCP's ``CheckpointException``):
        OSError: with errno and path; this rank's partial files are removed.
        CheckpointError: an item cannot be saved.
    """

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
        engine: Engine = "auto",
        direct: Direct = "auto",
        queue_depth: int = 8,
        block_size_bytes: int = 4 << 20,
        workers: int | None = None,
        checksum: bool = True,
        keep_superseded: bool = False,
    ) -> None:
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise ValueError(
                f"serialization_format={serialization_format}: RingWriter writes DCP's TORCH_SAVE format; "
                "for safetensors use torch.distributed.checkpoint.HuggingFaceStorageWriter"
            )
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=_extensions,
        )
        self.options = IOOptions(
            engine=engine,
            direct=direct,
            queue_depth=queue_depth,
            block_size_bytes=block_size_bytes,
            workers=max(2, thread_count) if workers is None else workers,
            checksum=checksum,
        )
        self.keep_superseded = keep_superseded
        self._group_id = ""
        self.stats: IOStats | None = None

    @property
    def _directory(self) -> Path:
        return Path(self.path)

    @property
    def _own_rank_only(self) -> int | None:
        """The rank whose files alone are this writer's business, None with collectives (the coordinator's: all)."""
        return None if self.use_collectives else self.rank

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        _C.make_directory(str(self.path), self.sync_files)
        if not self.overwrite and self._metadata_exists():
            raise RuntimeError(
                f"a checkpoint exists already in {self.path}, and overwrite=False; choose another directory"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _layout.remove_leftovers(self._directory, self._own_rank_only)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the plan's items to new files; nothing that exists is touched."""
        started = time.perf_counter()
        self.stats = IOStats(items=len(plan.items))
        with collection_paused():
            results = self._write_files(plan, planner, self.stats)
        self.stats.seconds = time.perf_counter() - started
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_files(self, plan: SavePlan, planner: SavePlanner, stats: IOStats) -> list[WriteResult]:
        rank, tag = self._plan_rank(plan), _layout.new_tag()
        results: list[WriteResult] = []
        names: list[str] = []
        try:
            for index, items in enumerate(self._buckets(plan.items)):
                names.append(_layout.data_file_name(rank, index, tag))
                results += _FileSave(self, names[-1], planner, stats).write(items)
        except BaseException:
            with contextlib.suppress(OSError):  # the next save removes them
                _C.remove_files(str(self.path), names)
            raise
        if names and self.sync_files:
            _C.sync_directory(str(self.path))
        stats.files = len(names)
        return results

    def _buckets(self, items: list[WriteItem]) -> Iterable[list[WriteItem]]:
        if self.single_file_per_rank:
            return [items] if items else []
        return ([item] for item in items)

    def _plan_rank(self, plan: SavePlan) -> int:
        match = re.fullmatch(r"__(\d+)_", getattr(plan.storage_data, "prefix", ""))
        if match and self.use_collectives:
            return int(match[1])
        return self.rank or 0

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: from the rename of the new metadata on, the new checkpoint is the one that is there."""
        storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.version = getattr(dcp_filesystem, "CURRENT_DCP_VERSION", "1.0.0")
        metadata.storage_data = storage_data
        metadata.storage_meta = self.storage_meta()
        sizes: dict[str, int] = {}
        for info in storage_data.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        data = dump_metadata(metadata, self._trailer(sorted(sizes)))
        superseded = set() if self.keep_superseded else _layout.superseded_files(self._directory, self._own_rank_only)
        _layout.check_data_files(self._directory, sizes, self.rank or 0)
        name = METADATA_NAME if self.use_collectives else _layout.rank_metadata_name(self.rank or 0)
        _C.commit(str(self.path), _layout.unfinished_name(name), name, data, self.sync_files)
        _layout.remove_superseded(self._directory, superseded, set(sizes))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._group_id = "" if self.use_collectives else agree_on_id(str(self.path))

    def _trailer(self, files: list[str]) -> Trailer:
        trailer = Trailer(files=files, save_id=self.save_id)
        if not self.use_collectives:
            trailer.group_id = self._group_id
            trailer.world_size = dist.get_world_size() if _has_group() else 1
            trailer.superseded_id = metadata_id(self._directory / METADATA_NAME)
        return trailer


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


_attempts: Counter[str] = Counter()
"""How often this process has begun a save with ``use_collectives=False`` to each path."""


def agree_on_id(path: str) -> str:
    """The same random id on all ranks for their n-th save to a path, without a collective: the first to ask draws it.

    Returns "" where there is no process group's store to ask.
    """
    if not _has_group():
        return ""
    _attempts[path] += 1
    store = dist.distributed_c10d._get_default_store()
    key = f"dcpring/{path}/{_attempts[path]}"
    return bytes(store.compare_set(key, "", _layout.new_tag())).decode()


class _FileSave:
    """One data file being written: tensors first, then what has to be pickled."""

    def __init__(self, writer: RingWriter, name: str, planner: SavePlanner, stats: IOStats) -> None:
        self._writer = writer
        self._name = name
        self._planner = planner
        self._stats = stats
        self._results: list[WriteResult] = []
        self._keys: list[str] = []

    def write(self, items: list[WriteItem]) -> list[WriteResult]:
        objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        writer = self._writer
        options = writer.options.for_core(writer.sync_files)
        file = _C.FileWriter(str(writer.path), self._name, _size_hint(tensors), options)
        try:
            for window in _windows(tensors, _WINDOW_BYTES if _makes_tensors(self._planner) else None):
                self._write_tensors(file, window)
            self._write_pickled(file, objects, self._object_bytes)
            file.finish()
            self._note_stats(file)
        except (OSError, ValueError) as error:
            key = self._key_of(error)
            if key is None:
                raise
            raise CheckpointError(f"cannot save {key!r}: {error}") from error
        finally:
            file.close()
        return self._results

    def _note_stats(self, file: _C.FileWriter) -> None:
        written, engine, direct = file.stats()
        self._stats.bytes += written
        self._stats.engine = engine or self._stats.engine
        self._stats.direct |= direct

    def _key_of(self, error: OSError | ValueError) -> str | None:
        """The key that the core's item index stands for."""
        item = getattr(error, "item", None)
        return self._keys[item] if item is not None and item < len(self._keys) else None

    # ---- tensors ----

    def _write_tensors(self, file: _C.FileWriter, items: list[WriteItem]) -> None:
        tensors = [self._resolve(item) for item in items]
        if self._writer.transforms.extensions:
            self._write_pickled(file, items, self._tensor_bytes)
            return
        kinds = _kinds(tensors)
        plain = [index for index, kind in enumerate(kinds) if kind == _PLAIN]
        self._write_plain(file, [items[i] for i in plain], [tensors[i] for i in plain])
        on_device = [index for index, kind in enumerate(kinds) if kind == _DEVICE]
        for device in {tensors[i].device for i in on_device}:
            chosen = [i for i in on_device if tensors[i].device == device]
            self._write_from_device(file, [items[i] for i in chosen], [tensors[i] for i in chosen], device)
        other = [items[index] for index, kind in enumerate(kinds) if kind == _OTHER]
        self._write_pickled(file, other, self._tensor_bytes)

    def _resolve(self, item: WriteItem) -> Tensor:
        tensor = self._planner.resolve_data(item)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"cannot save {item.index.fqn!r}: planned as a tensor, but it is a {type(tensor)}")
        if tensor.is_meta:
            raise CheckpointError(f"cannot save {item.index.fqn!r}: it is on the meta device and has no data")
        return tensor.detach() if tensor.requires_grad else tensor

    def _write_plain(self, file: _C.FileWriter, items: list[WriteItem], tensors: list[Tensor]) -> None:
        self._keys = [item.index.fqn for item in items]
        for item, tensor, placed in zip(items, tensors, file.write_tensors(tensors), strict=True):
            self._add(item, placed, TENSOR if _as_planned(item, tensor) else None)

    def _write_from_device(
        self, file: _C.FileWriter, items: list[WriteItem], tensors: list[Tensor], device: torch.device
    ) -> None:
        ahead = self._writer.per_thread_copy_ahead or DEFAULT_PIECE_BYTES
        for piece in Downloader(device, ahead).pieces(tensors):
            chosen = [items[index] for index in piece.indices]
            if piece.whole:
                self._write_plain(file, chosen, piece.tensors)
                continue
            tensor = tensors[piece.indices[0]]
            self._keys = [chosen[0].index.fqn]
            placed = file.write_part(piece.tensors, tuple(tensor.shape), piece.part_offset)
            if piece.part_offset + piece.tensors[0].nbytes == tensor.nbytes:
                self._add(chosen[0], placed, TENSOR if _as_planned(chosen[0], tensor) else None)

    # ---- what is pickled ----

    def _object_bytes(self, item: WriteItem) -> io.BytesIO:
        data = self._planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise CheckpointError(f"cannot save {item.index.fqn!r}: the planner gave a {type(data)}, not a BytesIO")
        return data

    def _tensor_bytes(self, item: WriteItem) -> io.BytesIO:
        tensor = self._resolve(item).cpu()
        if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        out = io.BytesIO()
        torch.save(tensor, out)
        return out

    def _transformed(self, item: WriteItem, data: io.BytesIO) -> tuple[io.BytesIO, list[str]]:
        if not self._writer.transforms.extensions:
            return data, []
        out = io.BytesIO()
        stream, descriptors = self._writer.transforms.transform_save_stream(item, out)
        stream.write(data.getbuffer())
        stream.close()
        return out, descriptors

    def _write_pickled(
        self, file: _C.FileWriter, items: list[WriteItem], pickled: Callable[[WriteItem], io.BytesIO]
    ) -> None:
        """Writes items as whole byte strings, a bounded number of bytes at a time."""
        batch: list[tuple[WriteItem, io.BytesIO, list[str]]] = []
        size = 0
        for item in items:
            data, descriptors = self._transformed(item, pickled(item))
            batch.append((item, data, descriptors))
            size += data.getbuffer().nbytes
            if size >= _WINDOW_BYTES:
                self._write_batch(file, batch)
                batch, size = [], 0
        self._write_batch(file, batch)

    def _write_batch(self, file: _C.FileWriter, batch: list[tuple[WriteItem, io.BytesIO, list[str]]]) -> None:
        if not batch:
            return
        self._keys = [item.index.fqn for item, _, _ in batch]
        placed = file.write_bytes([data.getbuffer() for _, data, _ in batch])
        for (item, _, descriptors), where in zip(batch, placed, strict=True):
            self._add(item, where, BYTES, descriptors)

    def _add(self, item: WriteItem, placed: Any, kind: int | None, descriptors: list[str] | None = None) -> None:
        offset, length, payload_offset, payload_bytes, crcs = placed
        info = _StorageInfo(self._name, offset, length)
        if descriptors:
            info.transform_descriptors = descriptors
        if kind is not None:
            info.__dict__["ring"] = (RING_VERSION, kind, payload_offset, payload_bytes, crcs or None)
        self._results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
        if item.type != WriteItemType.BYTE_IO:
            self._stats.tensor_bytes += payload_bytes


_PLAIN, _DEVICE, _OTHER = 0, 1, 2


def _kinds(tensors: list[Tensor]) -> list[int]:
    """How each tensor can be taken: as it is in memory, through a copy from its device, or only by torch.save."""
    kinds = [_PLAIN if type(t) in (Tensor, torch.nn.Parameter) else _OTHER for t in tensors]
    known = [index for index, kind in enumerate(kinds) if kind == _PLAIN]
    for index, kind in zip(known, _C.tensor_kinds([tensors[i] for i in known]), strict=True):
        kinds[index] = kind
        if kind == _PLAIN and (tensors[index].is_conj() or tensors[index].is_neg()):
            tensors[index] = tensors[index].resolve_conj().resolve_neg()
    return kinds


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether ``resolve_data`` may make new tensors; the default one hands out what is in the state dict."""
    return overrides(planner, DefaultSavePlanner, ("resolve_data", "transform_object", "lookup_object"))


def _as_planned(item: WriteItem, tensor: Tensor) -> bool:
    """Whether the metadata's shape and dtype describe the tensor; a planner's ``resolve_data`` may change both."""
    data = item.tensor_data
    return data is not None and tensor.dtype == data.properties.dtype and tensor.size() == data.chunk.sizes


def _tensor_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None:
        return 0
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _size_hint(items: list[WriteItem]) -> int:
    """Bytes that the file will need, rounded up; the file is cut to its real length in the end."""
    sizes = [_tensor_bytes(item) for item in items]
    padding = _C.ALIGNMENT_BYTES * sum(size >= _C.LARGE_PAYLOAD_BYTES for size in sizes)
    return sum(sizes) + padding + _RECORD_BYTES * len(sizes)


def _windows(items: list[WriteItem], window_bytes: int | None) -> Iterator[list[WriteItem]]:
    window: list[WriteItem] = []
    size = 0
    for item in items:
        window.append(item)
        size += _tensor_bytes(item)
        if window_bytes is not None and size >= window_bytes:
            yield window
            window, size = [], 0
    if window:
        yield window
