"""Parts of a checkpoint's tensors, and its objects, read without a state dict: as a load reads them.

``contents`` opens checkpoints, and calls this where something of them is to be read; only then is torch imported.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpring import _C
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.move.load import loader
from dcpring.move.load.task import Origin, Rules, Task
from dcpring.move.load.wanted import Stored, Wanted, wanted_by_item
from dcpring.plan.pieces import overlap_of
from dcpring.plan.run import Load
from dcpring.torchside.tensors import narrowed

if TYPE_CHECKING:
    from dcpring.sources.contents import Contents


def dtype_of(name: str | None) -> torch.dtype:
    """The dtype that an entry names. CheckpointError where this torch has none of that name."""
    found = getattr(torch, name or "", None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name}; read the checkpoint with a newer one")
    return found


def empty(key: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a part of a tensor."""
    try:
        return torch.empty(size, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{key!r}: no tensor of {list(size)} {dtype} can be made") from error


def read_into(contents: Contents, parts: Sequence[tuple[str, Sequence[int], Tensor]]) -> None:
    """See ``Contents.read_into``."""
    items: list[ReadItem] = []
    wanted: list[Wanted] = []
    for number, (key, start, part) in enumerate(parts):
        entry, size = contents[key], tuple(part.shape)
        dtype = None if entry.dtype is None else dtype_of(entry.dtype)
        overlaps = ((record, overlap_of(record.offsets, record.lengths, start, size)) for record in entry.records)
        # A chunk that is listed twice is read once.
        found = {overlap[1:]: (record, overlap) for record, overlap in overlaps if overlap}
        if not _C.tiles(size, list(found)):
            where = f"of shape {list(entry.shape or ())} at {list(start)}"
            raise CorruptCheckpointError(f"{key!r}: its chunks do not make up the tensor {where}", str(contents.path))
        for record, (in_record, in_part, lengths) in found.values():
            item = ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(key, index=number),
                torch.Size(in_part),
                MetadataIndex(key),
                torch.Size(in_record),
                torch.Size(lengths),
            )
            stored: Stored = None if dtype is None else (record.lengths, dtype)
            items.append(item)
            wanted.append(wanted_by_item(item, record.place, stored))
    _load(contents, _Into([part for _, _, part in parts]), items, wanted)


def read_objects(contents: Contents, keys: Sequence[str]) -> list[io.BytesIO]:
    """See ``Contents.read_objects``."""
    into = _Into([])
    nothing = torch.Size(())
    indices = [MetadataIndex(key, index=number) for number, key in enumerate(keys)]
    items = [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing) for index in indices]
    places = [contents[key].records[0].place for key in keys]
    wanted = [wanted_by_item(item, place, None) for item, place in zip(items, places, strict=True)]
    _load(contents, into, items, wanted)
    return [into.objects[number] for number in range(len(keys))]


def _load(contents: Contents, into: _Into, items: list[ReadItem], wanted: list[Wanted]) -> None:
    origin = Origin(str(contents.directory), inputs=contents.inputs, sums=contents.sums)
    transforms = FileSystemReader(contents.directory).transforms
    rules = Rules(contents.options, contents.trusted, transforms=transforms)
    task = Task(into, items.__getitem__, origin, rules, contents.stats, Load())
    loader.load(task, dict(enumerate(wanted)))


class _Into(LoadPlanner):
    """Loads into tensors, which items tell by their number, and keeps objects."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.objects: dict[int, io.BytesIO] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...
    def create_local_plan(self) -> Any: ...
    def create_global_plan(self, global_plan: Any) -> Any: ...
    def finish_plan(self, central_plan: Any) -> Any: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.index or 0] = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._tensors[read_item.dest_index.index or 0]
        return narrowed(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
