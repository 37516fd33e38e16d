"""What a load wants: boxes of stored tensors, and records, by their positions in the plan. Nothing is read here.

A plan is DCP's list of items, or a compact one (``CompactPlan``) of which most never becomes an object of Python.
"""

from __future__ import annotations

import array
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcpring import _C
from dcpring.base import windows
from dcpring.base.masks import zeros
from dcpring.base.memory import NOTHING, lazy_views
from dcpring.errors import CorruptCheckpointError
from dcpring.format.metadata import Placed, placed_of
from dcpring.format.properties import dtypes_of
from dcpring.format.quantised import DTYPES, Quantised
from dcpring.move import device
from dcpring.plan.items import ReadItems
from dcpring.plan.load_planner import RingLoadPlan, RingLoadPlanner
from dcpring.plan.pieces import range_of_box
from dcpring.plan.rows import BYTES_ROW, row_of
from dcpring.torchside.dcp import StorageInfo
from dcpring.torchside.tensors import narrowed

Ints = tuple[int, ...]

Stored = tuple[Ints, torch.dtype] | None
"""Sizes and dtype of a stored tensor; None for an object, and where the metadata does not tell."""


class Wanted(NamedTuple):
    """What is loaded of one record: an object, or a box of a tensor.

    Attributes:
        place: where the record is stored.
        stored: what the metadata says of the tensor.
        is_object: it is unpickled and given to the planner.
        offsets, lengths: of the box in the stored tensor.
    """

    place: Placed
    stored: Stored
    is_object: bool
    offsets: Ints
    lengths: Ints


def wanted_by_item(item: ReadItem, place: Placed, stored: Stored) -> Wanted:
    return Wanted(place, stored, item.type == LoadItemType.BYTE_IO, item.storage_offsets, item.lengths)


def wanted_by_items(
    items: Sequence[ReadItem], metadata: Metadata, storage_data: Mapping[MetadataIndex, StorageInfo], path: str
) -> dict[int, Wanted]:
    """What DCP's items want of a checkpoint; ``path`` is for errors."""
    wanted: dict[int, Wanted] = {}
    for position, item in enumerate(items):
        index = item.storage_index
        info = storage_data.get(index)
        if info is None:
            raise _not_stored(index.fqn, index.offset, path)
        wanted[position] = wanted_by_item(item, placed_of(info, index.fqn, path), _stored_as(index, metadata))
    return wanted


def _not_stored(key: str, offset: Sequence[int] | None, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the metadata lists {key!r} at offset {offset}, but not where it is stored", path)


def _stored_as(index: MetadataIndex, metadata: Metadata) -> Stored:
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


class CompactPlan:
    """RingLoadPlanner's plan, as RingReader reads it: the core matches rows of two tables, and reads most of them.

    Attributes:
        items: DCP's items, of which one is made when somebody asks for it.
        storage: where the checkpoint's rows are stored.
        tensors: the tensor that each wanted row fills, for the core; stand-ins for what is not plain memory.
        mask: a byte for each position, 1 where the core can read straight into the tensor.
    """

    def __init__(self, plan: RingLoadPlan, planner: RingLoadPlanner) -> None:
        items, chunks = plan.items, plan.chunks
        assert isinstance(items, ReadItems) and chunks is not None and chunks.storage is not None
        self.items, self.storage, self.match = items, chunks.storage, items.match
        self._table = chunks.table
        self._targets = planner.targets(items.wanted)
        memory = [NOTHING if tensor is None else tensor for tensor in self._targets]
        for row in lazy_views(memory):
            memory[row] = NOTHING
        self.tensors = _C.Tensors(memory)
        self.mask = _C.straight(self.match, self.storage, self.tensors)

    def rest(self, path: str) -> dict[int, Wanted]:
        """What the core cannot read straight into its tensor; ``path`` is for errors."""
        rows = array.array("I", self.match.stored_rows())
        dtypes = dtypes_of(self._table)
        wanted: dict[int, Wanted] = {}
        for position in itertools.compress(range(len(self.mask)), zeros(self.mask)):
            place = self.storage.get(rows[position])
            row = row_of(self._table, rows[position])
            if place is None:
                raise _not_stored(row.key, row.offsets, path)
            is_object = row.kind == BYTES_ROW
            stored = None if is_object else (row.lengths, dtypes[row.properties])
            wanted[position] = Wanted(Placed(*place), stored, is_object, *self.match.get(position)[3:])
        return wanted

    def target(self, position: int) -> Tensor | None:
        """The memory that a position fills; None if only the planner's ``resolve_tensor`` knows."""
        row, _, offsets, _, lengths = self.match.get(position)
        tensor = self._targets[row]
        return None if tensor is None else narrowed(tensor.detach(), offsets, lengths)

    def filled(self, positions: Iterable[int]) -> list[Tensor]:
        """The tensors that these positions have filled, each once."""
        rows = array.array("I", self.match.wanted_rows())
        return [
            tensor
            for row in dict.fromkeys(rows[position] for position in positions)
            if (tensor := self._targets[row]) is not None
        ]

    def size_bytes(self, mask: bytes) -> int:
        return sum(itertools.compress(self._sizes, mask))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return self.match.sizes()

    @functools.cached_property
    def interleaved(self) -> bytes:
        """A mask of the positions that have gaps between their rows, which others may want."""
        return self.match.interleaved()


# ---- tensors as they lie in files ----


class Payload(NamedTuple):
    """The elements of a plain tensor in a file, as the core reads them.

    Attributes:
        file: its number among the inputs.
        payload_offset, payload_bytes: where in the file.
        crcs: of the file's blocks, and ``whole_crc`` of all elements; None where there are none.
        sizes, dtype: of the tensor.
        is_shared: whether other ranks of this host may read the same.
    """

    file: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes | None
    whole_crc: int | None
    sizes: Ints
    dtype: torch.dtype
    is_shared: bool = False

    @property
    def stored(self) -> tuple[Payload, ...]:
        """What is read of files for it."""
        return (self,)


class QuantisedPayload(NamedTuple):
    """A tensor that the core computes from codes and scales.

    Attributes:
        form: how.
        codes: the codes.
        scales: the scales, each with the box of all scales that it is.
        sizes, dtype: of what is computed.
    """

    form: Quantised
    codes: Payload
    scales: tuple[tuple[windows.Box, Payload], ...]
    sizes: Ints
    dtype: torch.dtype

    @property
    def stored(self) -> tuple[Payload, ...]:
        """What is read of files for it."""
        return self.codes, *(payload for _, payload in self.scales)

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.scales[-1][1].dtype

    def made_for(self, target: Tensor) -> QuantisedPayload:
        """The same, rounded once where the target has another dtype: torch makes ``dtype``, and casts that."""
        is_lossless = self.dtype == torch.float32 and target.dtype in DTYPES
        return self._replace(dtype=target.dtype) if is_lossless else self


class BoxRead(NamedTuple):
    """A box of a stored tensor, and the memory that it is read into.

    Attributes:
        position: in the plan.
        source: the stored tensor.
        offsets, lengths: of the box in it.
        memory: a tensor of the lengths; for codes, what is computed from them.
        form: how codes are decoded, as the core takes it; empty for all else.
    """

    position: int
    source: Payload | QuantisedPayload
    offsets: Ints
    lengths: Ints
    memory: Tensor
    form: tuple[Any, ...] = ()

    @property
    def for_core(self) -> tuple[Any, ...]:
        return *self.source[:6], self.offsets, self.lengths, *self.form

    @property
    def host_bytes(self) -> int:
        """What a host copy of it takes in an Uploader's window."""
        return device.padded(math.prod(self.lengths) * self.source.dtype.itemsize)

    @property
    def is_for_others(self) -> bool:
        """Whether other ranks may want the same bytes, or some that lie between its rows."""
        source = self.source
        assert isinstance(source, Payload)
        return source.is_shared or range_of_box(source.sizes, self.offsets, self.lengths) is None

    def parts(self, most_elements: int) -> Iterator[BoxRead]:
        """Boxes of so many elements that make it up."""
        if math.prod(self.lengths) <= most_elements:
            yield self
            return
        for offsets, lengths in windows.split_box(self.lengths, most_elements):
            start = tuple(map(operator.add, self.offsets, offsets))
            yield self._replace(offsets=start, lengths=lengths, memory=narrowed(self.memory, offsets, lengths))


def read_bytes(source: Payload | QuantisedPayload, offsets: Ints, lengths: Ints) -> int:
    """What is read of files for a box of it."""
    if isinstance(source, Payload):
        return math.prod(lengths) * source.dtype.itemsize
    (_, codes), (_, scales) = source.form.boxes(offsets, lengths)
    return math.prod(codes) + math.prod(scales) * source.scale_dtype.itemsize


# ---- quantised tensors ----


class Dequantised(NamedTuple):
    """A box of a quantised tensor.

    Attributes:
        source: the tensor.
        codes, scales: the boxes that it is computed from: one of the codes, and one of all scales.
    """

    box: BoxRead
    source: QuantisedPayload
    codes: windows.Box
    scales: windows.Box

    @property
    def scale_bytes(self) -> int:
        return math.prod(self.scales[1]) * self.source.scale_dtype.itemsize


def dequantised(box: BoxRead) -> Iterator[Dequantised]:
    """A box of a quantised tensor, in parts of which the scales fit into a window."""
    source = box.source
    assert isinstance(source, QuantisedPayload)
    whole = Dequantised(box, source, *source.form.boxes(box.offsets, box.lengths))
    elements, size = math.prod(box.lengths), whole.scale_bytes
    if elements:
        for part in box.parts(elements * device.HOST_BYTES // max(size, device.HOST_BYTES)):
            yield Dequantised(part, source, *source.form.boxes(part.offsets, part.lengths))


def reads_of_quantised(parts: Sequence[Dequantised]) -> tuple[list[BoxRead], list[Tensor], list[BoxRead]]:
    """What is read for boxes of quantised tensors.

    Returns: the reads of scales, each once; the memory that they fill; and the reads of codes.
    """
    scales: list[BoxRead] = []
    values: list[Tensor] = []
    codes: list[BoxRead] = []
    numbers: dict[tuple[str, windows.Box], int] = {}
    for box, source, of_codes, of_scales in parts:
        number = numbers.setdefault((source.form.scale_name, of_scales), len(values))
        form = (*source.form.how(box.offsets), number)
        codes.append(BoxRead(box.position, source.codes, *of_codes, box.memory, (form,)))
        if number < len(values):
            continue
        values.append(torch.empty(of_scales[1], dtype=source.scale_dtype))
        for whole, payload in source.scales:
            common = windows.common_box(whole, of_scales)
            if common is not None:
                memory = narrowed(values[-1], _less(common[0], of_scales[0]), common[1])
                scales.append(BoxRead(box.position, payload, _less(common[0], whole[0]), common[1], memory))
    return scales, values, codes


def _less(a: Ints, b: Ints) -> Ints:
    return tuple(map(operator.sub, a, b))
