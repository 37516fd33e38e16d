"""Tensors that stand for parts of a larger one, in the way of torch's CheckpointableTensor (since 2.14).

The tests use the protocol where torch has it. Where it has not, and for kinds that no torch has yet, ``known`` teaches
stock's planner_helpers what such a torch would know, and nothing else in the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner, planner_helpers, utils
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

HAS_PROTOCOL = importlib.util.find_spec("torch.distributed.checkpoint.protocol") is not None

CHECKPOINTABLE, FUTURE, SUBCLASS = "checkpointable", "future", "subclass"
KINDS = (CHECKPOINTABLE, FUTURE, SUBCLASS)

Part = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""global offsets, local offsets, sizes"""


class FutureTensor(Tensor):
    """A subclass that this dcpring knows nothing of."""


def make(kind: str, local: Tensor, shape: Sequence[int], parts: Sequence[Part]) -> Tensor:
    """A tensor that stands for parts of one of another shape."""
    made: Any = local.as_subclass(FutureTensor) if kind == SUBCLASS else local
    if kind == CHECKPOINTABLE:
        made.global_shape = tuple(shape)
        made.global_offsets = tuple(tuple(part[0]) for part in parts)
        made.local_offsets = tuple(tuple(part[1]) for part in parts)
        made.local_sizes = tuple(tuple(part[2]) for part in parts)
    else:
        made.parts_of = (tuple(shape), tuple(parts))
    return made


def _told(value: Any) -> tuple[Sequence[int], Sequence[Part]] | None:
    if hasattr(value, "parts_of"):
        found: tuple[Sequence[int], Sequence[Part]] = value.parts_of
        return found
    names = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    if HAS_PROTOCOL or not isinstance(value, Tensor) or not all(hasattr(value, name) for name in names):
        return None
    told: Any = value
    return told.global_shape, list(zip(told.global_offsets, told.local_offsets, told.local_sizes, strict=True))


def _chunks(parts: Sequence[Part]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(part[0]), torch.Size(part[2])) for part in parts]


def _items(name: str, value: Tensor, shape: Sequence[int], parts: Sequence[Part]) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(value)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets, number),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(shape)),
        )
        for number, chunk in enumerate(_chunks(parts))
    ]


def _shard(value: Tensor, parts: Sequence[Part], index: MetadataIndex) -> Tensor:
    for offsets, local, sizes in parts:
        if torch.Size(offsets) == index.offset:
            box = tuple(slice(start, start + size) for start, size in zip(local, sizes, strict=True))
            return value.as_subclass(Tensor)[box] if type(value) is FutureTensor else value[box]
    raise ValueError(f"no shard at {index}")


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Meanwhile torch's planner_helpers know these kinds."""
    make_items, make_chunks, find = (
        planner_helpers._create_write_items,
        planner_helpers._create_chunk_list,
        utils.find_tensor_shard,
    )

    def write_items(fqn: str, object: Any) -> list[WriteItem]:
        told = _told(object)
        return make_items(fqn, object) if told is None else _items(fqn, object, *told)

    def chunk_list(tensor: Any) -> list[ChunkStorageMetadata]:
        told = _told(tensor)
        return make_chunks(tensor) if told is None else _chunks(told[1])

    def find_shard(tensor: Any, index: MetadataIndex) -> Tensor:
        told = _told(tensor)
        return find(tensor, index) if told is None else _shard(tensor, told[1], index)

    with (
        mock.patch.object(planner_helpers, "_create_write_items", write_items),
        mock.patch.object(default_planner, "_create_write_items", write_items),
        mock.patch.object(planner_helpers, "_create_chunk_list", chunk_list),
        mock.patch.object(utils, "find_tensor_shard", find_shard),
    ):
        yield
