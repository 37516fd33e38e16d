"""One rank's write_data: what each item is, in which order it is written, and where it ended up.

Tensors that lie plainly in CPU memory go to the core as they are, those of an accelerator through pinned copies, and
what only ``torch.save`` understands as the bytes it makes. A ``Source`` says what the items are: one takes them from
DCP's WriteItems, one from a compact plan, without making any.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcpring import _C
from dcpring.base.memory import is_lazy_view, same_memory
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, PlanError
from dcpring.format.metadata import BYTES, OPAQUE, TENSOR, Placed, storage_info
from dcpring.move.device import Downloader, Piece
from dcpring.move.objects import Judge
from dcpring.options import IOStats
from dcpring.plan.items import Items
from dcpring.plan.placements import check_chunk
from dcpring.plan.save_planner import RingSavePlanner, makes_tensors
from dcpring.plan.table import BYTES_ROW, has_scattered, memory_of_row
from dcpring.torchside.tensors import PLAIN_TYPES, are_plain

WINDOW_BYTES = 32 << 20
"""How much a planner that makes new tensors in ``resolve_data`` is asked for at a time."""

_RECORD_BYTES = 1024
"""A record's head and tail, roughly; for the size hint."""


class Source(Protocol):
    """The items of a plan, by position."""

    objects: list[int]
    tensors: list[int]

    def name(self, position: int) -> str: ...
    def planned_bytes(self, position: int) -> int:
        """Of the tensor as it was planned; 0 for objects."""
        ...

    def item(self, position: int) -> WriteItem: ...
    def resolve(self, positions: Sequence[int]) -> list[Any]:
        """The tensors, or the pickled objects, at these positions."""
        ...

    def as_planned(self, position: int, tensor: Tensor) -> bool:
        """Whether the metadata's shape and dtype describe the tensor; a planner's ``resolve_data`` may change both."""
        ...


def source_of(items: Any, planner: SavePlanner) -> Source:
    if isinstance(items, Items) and items.untouched and not makes_tensors(planner):
        return TableSource(items, planner)
    made = list(items)
    if not makes_tensors(planner) and not isinstance(planner, RingSavePlanner):
        _check_chunks(made, planner)
    return ItemSource(made, planner)


def _check_chunks(items: list[WriteItem], planner: SavePlanner) -> None:
    """Items of DTensors must be what the planner will hand out for them: this rank's part of each."""
    values = getattr(planner, "state_dict", None) or {}
    for item in items:
        if item.type == WriteItemType.SHARD and item.tensor_data is not None:
            name, lengths = item.index.fqn, item.tensor_data.chunk.sizes
            offsets = item.tensor_data.chunk.offsets
            check_chunk(name, values.get(name), offsets, (0,) * len(lengths), lengths, "RingSavePlanner")


class ItemSource:
    """WriteItems, which the planner resolves one by one."""

    def __init__(self, items: list[WriteItem], planner: SavePlanner) -> None:
        self._items = items
        self._planner = planner
        self.objects = [i for i, item in enumerate(items) if item.type == WriteItemType.BYTE_IO]
        self.tensors = [i for i, item in enumerate(items) if item.type != WriteItemType.BYTE_IO]

    def name(self, position: int) -> str:
        return self._items[position].index.fqn

    def planned_bytes(self, position: int) -> int:
        data = self._items[position].tensor_data
        return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize

    def item(self, position: int) -> WriteItem:
        return self._items[position]

    def resolve(self, positions: Sequence[int]) -> list[Any]:
        return [self._planner.resolve_data(self._items[position]) for position in positions]

    def as_planned(self, position: int, tensor: Tensor) -> bool:
        data = self._items[position].tensor_data
        return data is not None and tensor.dtype == data.properties.dtype and tensor.size() == data.chunk.sizes


class TableSource:
    """A compact plan of a planner that hands out what is in the state dict: nothing is made for plain tensors."""

    def __init__(self, items: Items, planner: SavePlanner) -> None:
        self._items = items
        self._planner = planner
        self._state_dict: dict[str, Any] = planner.state_dict  # type: ignore[attr-defined]
        self._rows = rows = [kept if isinstance(kept, int) else kept[0] for kept in items.kept]
        names, types, sizes = items.table.names(), items.table.types(), items.table.sizes()
        self._names = [names[row] for row in rows]
        self._scattered = has_scattered(names)
        self._bytes = [sizes[row] for row in rows]
        self._cut = {position for position, kept in enumerate(items.kept) if not isinstance(kept, int)}
        for position in self._cut:
            row, _, length = items.kept[position]  # type: ignore[misc]
            self._bytes[position] = sizes[row] // items.table.row(row)[4][0] * length
        self.objects = [position for position, row in enumerate(rows) if types[row] == BYTES_ROW]
        self.tensors = [position for position, row in enumerate(rows) if types[row] != BYTES_ROW]

    def name(self, position: int) -> str:
        return self._names[position]

    def planned_bytes(self, position: int) -> int:
        return self._bytes[position]

    def item(self, position: int) -> WriteItem:
        return self._items.make(position)

    def resolve(self, positions: Sequence[int]) -> list[Any]:
        names, state_dict = self._names, self._state_dict
        values = [state_dict[names[position]] for position in positions]
        for index, (value, plain) in enumerate(zip(values, are_plain(values), strict=True)):
            if not plain or (self._cut and positions[index] in self._cut):
                values[index] = self._resolve_one(positions[index], value)
        return values

    def _resolve_one(self, position: int, value: Any) -> Any:
        """Of a DTensor its part on this rank; of what is cut the part that this rank writes; else what stock has."""
        tensor = memory_of_row(self._items.table, self._rows[position], value, self._scattered)
        if tensor is None:
            return self._planner.resolve_data(self.item(position))
        if position in self._cut:
            _, start, rows = self._items.kept[position]  # type: ignore[misc]
            return tensor.detach().narrow(0, start, rows)
        return tensor

    def as_planned(self, position: int, tensor: Tensor) -> bool:
        return True


class FileSave:
    """One data file being written: tensors first, then what has to be pickled. ``placed`` is by position."""

    def __init__(
        self,
        *,
        path: str,
        name: str,
        source: Source,
        options: Any,
        transforms: Any,
        downloader: Downloader,
        windowed: bool,
        stats: IOStats,
        judge: Judge | None,
    ) -> None:
        self._path = path
        self._name = name
        self._source = source
        self._options = options
        self._transforms = transforms
        self._downloader = downloader
        self._windowed = windowed
        self._stats = stats
        self._judge = judge
        self._written: list[int] = []
        self.placed: dict[int, Placed] = {}

    def write(self, positions: Sequence[int] | None = None) -> None:
        """Writes the file with these of the source's items, None for all."""
        source = self._source
        chosen = None if positions is None else set(positions)
        tensors = [position for position in source.tensors if chosen is None or position in chosen]
        objects = [position for position in source.objects if chosen is None or position in chosen]
        file = _C.FileWriter(self._path, self._name, self._size_hint(tensors), self._options)
        try:
            if self._judge is not None and self._judge.objects == "error":  # before anything large is written
                self._write_pickled(file, objects, self._object_bytes)
                objects = []
            limit = WINDOW_BYTES if self._windowed else None
            for window in windows(tensors, self._source.planned_bytes, limit):
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

    def _size_hint(self, tensors: list[int]) -> int:
        """Bytes that the file will need, rounded up; the file is cut to its real length in the end."""
        sizes = list(map(self._source.planned_bytes, tensors))
        padding = _C.ALIGNMENT_BYTES * sum(size >= _C.LARGE_PAYLOAD_BYTES for size in sizes)
        return sum(sizes) + padding + _RECORD_BYTES * len(sizes)

    def _note_stats(self, file: _C.FileWriter) -> None:
        written, engine, direct = file.stats()
        self._stats.bytes += written
        self._stats.engine = engine or self._stats.engine
        self._stats.direct |= direct

    def _key_of(self, error: OSError | ValueError) -> str | None:
        """The key that the core's item index stands for."""
        item = getattr(error, "item", None)
        return self._source.name(self._written[item]) if item is not None and item < len(self._written) else None

    # ---- tensors ----

    def _write_tensors(self, file: _C.FileWriter, positions: list[int]) -> None:
        if self._transforms.extensions:
            self._write_pickled(file, positions, self._tensor_bytes)
            return
        tensors = self._checked(positions, self._source.resolve(positions))
        unresolved = tensors[:]
        handles, kinds = handles_and_kinds(tensors)
        in_memory = {index: unresolved[index] for index, kind in enumerate(kinds) if kind != _OTHER}
        if same := same_memory(in_memory):
            self._write_once(file, positions, tensors, same)
        else:
            self._write_distinct(file, positions, tensors, handles, kinds)

    def _write_once(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], same: dict[int, int]
    ) -> None:
        """Writes tied tensors once, for all their names."""
        kept = [index for index in range(len(tensors)) if index not in same]
        distinct = [tensors[index] for index in kept]
        self._write_distinct(file, [positions[index] for index in kept], distinct, *handles_and_kinds(distinct))
        for index, first in same.items():
            kind = TENSOR if self._source.as_planned(positions[index], tensors[index]) else OPAQUE
            placed = self.placed[positions[first]]._replace(kind=kind)
            self.placed[positions[index]] = placed
            self._stats.tensor_bytes += placed.payload_bytes

    def _write_distinct(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], handles: _C.Tensors, kinds: Any
    ) -> None:
        if not any(kinds):
            self._write_plain(file, positions, tensors, handles)
            return
        plain = [index for index, kind in enumerate(kinds) if kind == _PLAIN]
        self._write_plain(file, [positions[i] for i in plain], [tensors[i] for i in plain])
        on_device = [index for index, kind in enumerate(kinds) if kind == _DEVICE]
        for device in dict.fromkeys(tensors[i].device for i in on_device):
            chosen = [i for i in on_device if tensors[i].device == device]
            self._write_from_device(file, [positions[i] for i in chosen], [tensors[i].detach() for i in chosen])
        other = [positions[index] for index, kind in enumerate(kinds) if kind == _OTHER]
        self._write_pickled(file, other, self._tensor_bytes)

    def _checked(self, positions: Sequence[int], tensors: list[Any]) -> list[Tensor]:
        for position, tensor in zip(positions, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise PlanError(
                    f"cannot save {self._source.name(position)!r}: Data must be torch.Tensor for non-BYTE_IO write "
                    f"items, and it is a {type(tensor)}"
                )
            if tensor.is_meta:
                raise CheckpointError(
                    f"cannot save {self._source.name(position)!r}: it is on the meta device and has no data"
                )
        return tensors

    def _write_plain(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], handles: _C.Tensors | None = None
    ) -> None:
        self._written = positions
        rows = file.write_tensors(_C.Tensors(tensors) if handles is None else handles)
        for position, tensor, row in zip(positions, tensors, rows, strict=True):
            kind = TENSOR if self._source.as_planned(position, tensor) else OPAQUE
            self.placed[position] = Placed(self._name, kind, *row)
            self._stats.tensor_bytes += row[3]

    def _write_from_device(self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor]) -> None:
        with contextlib.closing(self._downloader.pieces(tensors)) as pieces:
            for piece in pieces:
                self._write_piece(file, piece, [positions[index] for index in piece.indices], tensors)

    def _write_piece(self, file: _C.FileWriter, piece: Piece, positions: list[int], tensors: list[Tensor]) -> None:
        if piece.whole:
            self._write_plain(file, positions, piece.tensors)
            return
        tensor = tensors[piece.indices[0]]
        self._written = positions
        row = file.write_part(piece.tensors, tuple(tensor.shape), piece.part_offset)
        if piece.part_offset + piece.tensors[0].nbytes == tensor.nbytes:
            kind = TENSOR if self._source.as_planned(positions[0], tensor) else OPAQUE
            self.placed[positions[0]] = Placed(self._name, kind, *row)
            self._stats.tensor_bytes += row[3]

    # ---- what is pickled ----

    def _object_bytes(self, position: int) -> io.BytesIO:
        data = self._source.resolve([position])[0]
        if isinstance(data, io.BytesIO):
            return data
        raise PlanError(
            f"cannot save {self._source.name(position)!r}: Data must be io.BytesIO for BYTE_IO write items, and the "
            f"planner gave a {type(data)}"
        )

    def _tensor_bytes(self, position: int) -> io.BytesIO:
        tensor = self._checked([position], self._source.resolve([position]))[0].detach().cpu()
        if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        out = io.BytesIO()
        torch.save(tensor, out)
        return out

    def _transformed(self, position: int, data: io.BytesIO) -> tuple[io.BytesIO, list[str]]:
        if not self._transforms.extensions:
            return data, []
        out = io.BytesIO()
        stream, descriptors = self._transforms.transform_save_stream(self._source.item(position), out)
        stream.write(data.getbuffer())
        stream.close()
        return out, descriptors

    def _write_pickled(
        self, file: _C.FileWriter, positions: Sequence[int], pickled: Callable[[int], io.BytesIO]
    ) -> None:
        """Writes items as whole byte strings, a bounded number of bytes at a time."""
        batch: list[tuple[int, io.BytesIO, list[str]]] = []
        size = 0
        for position in positions:
            plain = pickled(position)
            if self._judge is not None:
                self._judge.look(self._source.name(position), plain)
            data, descriptors = self._transformed(position, plain)
            batch.append((position, data, descriptors))
            size += data.getbuffer().nbytes
            if size >= WINDOW_BYTES:
                self._write_batch(file, batch)
                batch, size = [], 0
        self._write_batch(file, batch)

    def _write_batch(self, file: _C.FileWriter, batch: list[tuple[int, io.BytesIO, list[str]]]) -> None:
        if not batch:
            return
        self._written = [position for position, _, _ in batch]
        objects = set(self._source.objects)
        rows = file.write_bytes([data.getbuffer() for _, data, _ in batch])
        for (position, _, descriptors), row in zip(batch, rows, strict=True):
            self.placed[position] = Placed(self._name, BYTES, *row, descriptors or None)
            self._stats.tensor_bytes += 0 if position in objects else row[3]


_PLAIN, _DEVICE, _OTHER = 0, 1, 2


def handles_and_kinds(tensors: list[Tensor]) -> tuple[_C.Tensors, bytes]:
    """The tensors for the core, and how each can be taken: as it lies in memory, through a copy from its device, or
    only by torch.save. Conjugate and negative views in CPU memory are resolved, in the list.
    """
    other = [index for index, tensor in enumerate(tensors) if type(tensor) not in PLAIN_TYPES]
    for index, tensor in enumerate(tensors):
        if is_lazy_view(tensor) and tensor.device.type == "cpu":
            tensors[index] = tensor.resolve_conj().resolve_neg()
    if not other:
        handles = _C.Tensors(tensors)
        return handles, handles.kinds()
    known = [tensor if type(tensor) in PLAIN_TYPES else _NOTHING for tensor in tensors]
    handles = _C.Tensors(known)
    kinds = bytearray(handles.kinds())
    for index in other:
        kinds[index] = _OTHER
    return handles, bytes(kinds)


_NOTHING = torch.empty(0)
"""Stands in for tensors that the core must not look at."""


# ---- results ----


class ResultList(list[WriteResult]):
    """WriteResults with what the coordinator wants to know of the rank besides.

    Attributes:
        stats: of the rank's ``write_data``.
    """

    def __init__(self, results: Iterable[WriteResult], stats: IOStats) -> None:
        super().__init__(results)
        self.stats = stats

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultList, (list(self), self.stats)


class Results(Sequence[WriteResult]):
    """What a rank reports of a compact plan: DCP's WriteResults, made when they are looked at.

    Attributes:
        packed: the encoded ``_C.StorageIndex`` of its items, in order.
        stats: of the rank's ``write_data``.
    """

    def __init__(self, packed: bytes, stats: IOStats, items: Items | None = None) -> None:
        self.packed = packed
        self.stats = stats
        self._items = items

    def of(self, items: Any) -> list[WriteResult]:
        """The results, given the items they are for."""
        storage = _C.decode_storage_index(self.packed)
        return [result_of(item, Placed(*place_at(storage, i))) for i, item in enumerate(items)]

    def __len__(self) -> int:
        return len(_C.decode_storage_index(self.packed))

    def __getitem__(self, index: Any) -> Any:
        if self._items is None:
            raise CheckpointError(
                "a rank sent its write results in compact form: only dcpring.RingWriter can take them"
            )
        return self.of(self._items)[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self.packed, self.stats)


def place_at(storage: _C.StorageIndex, index: int) -> tuple[Any, ...]:
    place = storage.get(index)
    if place is None:
        raise CheckpointError("a rank reported an item as not stored")
    return place


def result_of(item: WriteItem, placed: Placed) -> WriteResult:
    info = storage_info(placed)
    return WriteResult(index=item.index, size_in_bytes=placed.length, storage_data=info)
