"""What a load wants: DCP's items, each with the record that it is stored in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from dcpring.errors import CorruptCheckpointError
from dcpring.format.metadata import Placed, placed_of
from dcpring.torchside.dcp import StorageInfo


class Wanted(NamedTuple):
    """What is loaded of one record.

    Attributes:
        item: DCP's, by which the planner knows it.
        place: where the record is stored.
        stored: its sizes and dtype; None for an object, and where the metadata does not tell.
    """

    item: ReadItem
    place: Placed
    stored: tuple[tuple[int, ...], torch.dtype] | None


def wanted_by_items(
    items: Sequence[ReadItem], metadata: Metadata, storage_data: Mapping[MetadataIndex, StorageInfo], path: str
) -> dict[int, Wanted]:
    """What DCP's items want of a checkpoint, by their positions."""
    wanted: dict[int, Wanted] = {}
    for position, item in enumerate(items):
        index = item.storage_index
        info = storage_data.get(index)
        if info is None:
            raise not_stored(index.fqn, index.offset, path)
        wanted[position] = Wanted(item, placed_of(info, index.fqn, path), _stored_as(index, metadata))
    return wanted


def not_stored(key: str, offset: Sequence[int] | None, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the metadata lists {key!r} at offset {offset}, but not where it is stored", path)


def _stored_as(index: MetadataIndex, metadata: Metadata) -> tuple[tuple[int, ...], torch.dtype] | None:
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    chunks = entry.chunks
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return chunks[index.index].sizes, entry.properties.dtype
    for chunk in chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk.sizes, entry.properties.dtype
    return None
