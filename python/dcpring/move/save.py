"""One rank's write_data: what each item is, in which order it is written, and where it ended up.

Tensors that lie plainly in CPU memory go to the core as they are, those of an accelerator through pinned copies, and
what only ``torch.save`` understands as the bytes it makes. A ``Source`` says what the items are: one takes them from
DCP's WriteItems, one from a compact plan, without making any.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcpring import _C
from dcpring.base.memory import NOTHING, is_lazy_view, same_memory
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, PlanError
from dcpring.format.ledger import NO_PLAN, Place, identity_of, plan_of
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
    def plan(self) -> bytes:
        """What tells the plan from others, 16 bytes; zeros where only its items do."""
        ...

    def identity(self, position: int) -> bytes:
        """What tells a tensor's item from others (``format.ledger``), whatever plan it is in."""
        ...

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

    def plan(self) -> bytes:
        return NO_PLAN

    def identity(self, position: int) -> bytes:
        data = self._items[position].tensor_data
        assert data is not None
        chunk = data.chunk
        return identity_of(self.name(position), chunk.offsets, chunk.sizes, str(data.properties.dtype))

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

    def plan(self) -> bytes:
        return plan_of(*self._items.encoded())

    def identity(self, position: int) -> bytes:
        table = self._items.table
        name, _, _, offsets, lengths, properties, _ = table.row(self._rows[position])
        if position in self._cut:
            _, start, rows = self._items.kept[position]  # type: ignore[misc]
            offsets, lengths = (offsets[0] + start, *offsets[1:]), (rows, *lengths[1:])
        return identity_of(name, offsets, lengths, self._dtypes[properties])

    @functools.cached_property
    def _dtypes(self) -> list[str]:
        """By the number of the properties."""
        return [encoded.partition(b"\0")[0].decode() for encoded in self._items.table.properties()]

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


class Looked(NamedTuple):
    """Tensors that are to be written.

    Attributes:
        positions: of their items.
        tensors: as they were planned.
        handles, kinds: as of ``handles_and_kinds``.
    """

    positions: list[int]
    tensors: list[Tensor]
    handles: _C.Tensors
    kinds: bytes


class Saving:
    """One rank's items being written, to one file or more: in each tensors first, then what has to be pickled.

    Attributes:
        source: the items.
        storage: where they are, by position.
        digests: of tensors that are expected to stay as they are, by position.
    """

    def __init__(
        self,
        items: Any,
        planner: SavePlanner,
        *,
        path: str,
        options: Any,
        transforms: Any,
        piece_bytes: int,
        stats: IOStats,
        judge: Judge | None,
    ) -> None:
        self.source = source_of(items, planner)
        self.storage = _C.StorageIndex(len(items))
        self._items = items
        self._path = path
        self._options = options
        self._transforms = transforms
        self._downloader = Downloader(piece_bytes)
        self._window_bytes = WINDOW_BYTES if makes_tensors(planner) else None
        self._stats = stats
        self._judge = judge
        self._descriptors: dict[int, list[str]] = {}
        self.digests: dict[int, bytes] = {}
        self._digest_key: bytes | None = None
        self._looked: Looked | None = None
        self._name = ""
        self._written: list[int] = []

    def planned_bytes(self) -> int:
        return sum(map(self.source.planned_bytes, self.source.tensors))

    @property
    def knows_tensors(self) -> bool:
        """Whether tensors are in memory before they are written, and are stored as they are."""
        return not self._transforms.extensions and self._window_bytes is None

    def take_over(self, name: str, places: Mapping[int, Place], digests: Mapping[int, bytes]) -> None:
        """Notes a file that an earlier save has written, with what is in it."""
        self.storage.put([(name, *place[1:]) for place in places.values()], list(places))
        self.digests.update(digests)
        linked = sum(place[5] for place in places.values())
        self._stats.tensor_bytes += linked
        self._stats.linked_bytes += linked
        self._stats.linked_files += 1

    def write(
        self,
        name: str,
        tensors: list[int],
        objects: list[int],
        digest_key: bytes | None = None,
        syncs: _C.Syncs | None = None,
    ) -> None:
        """Writes a file with what is at these positions. It is durable once these syncs were waited for. With a key
        digests are made of its tensors: plain ones.
        """
        self._name, self._digest_key = name, digest_key
        file = _C.FileWriter(self._path, name, self._size_hint(tensors), self._options)
        try:
            if self._judge is not None and self._judge.objects == "error":  # before anything large is written
                self._write_pickled(file, objects, self._object_bytes)
                objects = []
            for window in windows(tensors, self.source.planned_bytes, self._window_bytes):
                self._write_tensors(file, window)
            self._write_pickled(file, objects, self._object_bytes)
            file.finish(syncs)
            self._note_stats(file)
        except (OSError, ValueError) as error:
            key = self._key_of(error)
            if key is None:
                raise
            raise CheckpointError(f"cannot save {key!r}: {error}") from error
        finally:
            file.close()

    def results(self, ledger: bytes) -> Any:
        """DCP's WriteResults; of a compact plan, in compact form."""
        if isinstance(self.source, TableSource) and not self._transforms.extensions:
            return Results(self.storage.encode(), self._stats, self._items, ledger)
        return ResultList(_results_of(self._items, self.storage, self._descriptors), self._stats, ledger)

    def _size_hint(self, tensors: list[int]) -> int:
        """Bytes that the file will need, rounded up; the file is cut to its real length in the end."""
        sizes = list(map(self.source.planned_bytes, tensors))
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
        return self.source.name(self._written[item]) if item is not None and item < len(self._written) else None

    # ---- tensors ----

    def _write_tensors(self, file: _C.FileWriter, positions: list[int]) -> None:
        if self._transforms.extensions:
            self._write_pickled_tensors(file, positions)
            return
        looked = self.look(positions)
        self._looked = None
        in_memory = {index: looked.tensors[index] for index, kind in enumerate(looked.kinds) if kind != _OTHER}
        if same := same_memory(in_memory):
            self._write_once(file, positions, looked.tensors, same)
        else:
            self._write_distinct(file, positions, looked.tensors, looked.handles, looked.kinds)

    def look(self, positions: list[int]) -> Looked:
        """The tensors at these positions, which are kept in case that they are written next."""
        if self._looked is None or self._looked.positions != positions:
            self._looked = None
            tensors = self._checked(positions, self.source.resolve(positions))
            self._looked = Looked(positions, tensors, *handles_and_kinds(tensors))
        return self._looked

    def _write_once(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], same: dict[int, int]
    ) -> None:
        """Writes tied tensors once, for all their names."""
        kept = [index for index in range(len(tensors)) if index not in same]
        distinct = [tensors[index] for index in kept]
        self._write_distinct(file, [positions[index] for index in kept], distinct, *handles_and_kinds(distinct))
        for index, first_index in same.items():
            if positions[first_index] in self.digests:
                self.digests[positions[index]] = self.digests[positions[first_index]]
        first = [place_at(self.storage, positions[index])[2:] for index in same.values()]
        self._note_tensors([positions[index] for index in same], [tensors[index] for index in same], first)

    def _write_distinct(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], handles: _C.Tensors, kinds: Any
    ) -> None:
        if not any(kinds):
            self._write_plain(file, positions, tensors, handles)
            return
        in_memory = [index for index, kind in enumerate(kinds) if kind in (PLAIN, _LAZY)]
        for window in windows(in_memory, lambda i: tensors[i].nbytes if kinds[i] == _LAZY else 0, WINDOW_BYTES):
            made = [tensors[i].resolve_conj().resolve_neg() for i in window]
            self._write_plain(file, [positions[i] for i in window], made)
            made.clear()  # before the next are made
        on_device = [index for index, kind in enumerate(kinds) if kind == _DEVICE]
        for device in dict.fromkeys(tensors[i].device for i in on_device):
            chosen = [i for i in on_device if tensors[i].device == device]
            self._write_from_device(file, [positions[i] for i in chosen], [tensors[i].detach() for i in chosen])
        other = [positions[index] for index, kind in enumerate(kinds) if kind == _OTHER]
        self._write_pickled_tensors(file, other)

    def _checked(self, positions: Sequence[int], tensors: list[Any]) -> list[Tensor]:
        for position, tensor in zip(positions, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise PlanError(
                    f"cannot save {self.source.name(position)!r}: Data must be torch.Tensor for non-BYTE_IO write "
                    f"items, and it is a {type(tensor)}"
                )
            if tensor.is_meta:
                raise CheckpointError(
                    f"cannot save {self.source.name(position)!r}: it is on the meta device and has no data"
                )
        return tensors

    def _write_plain(
        self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor], handles: _C.Tensors | None = None
    ) -> None:
        self._written = positions
        handles = _C.Tensors(tensors) if handles is None else handles
        if self._digest_key is None:
            rows = file.write_tensors(handles)
        else:
            both = file.write_digested(handles, self._digest_key)
            rows = [row for row, _ in both]
            self.digests.update(zip(positions, (made for _, made in both), strict=True))
        self._note_tensors(positions, tensors, rows)

    def _note_tensors(self, positions: list[int], tensors: list[Tensor], rows: Iterable[Any]) -> None:
        """Of tensors that lie in the file: offsets, lengths and CRCs, as the core has given them."""
        as_planned, name = self.source.as_planned, self._name
        entries = [
            (name, TENSOR if as_planned(position, tensor) else OPAQUE, *row)
            for position, tensor, row in zip(positions, tensors, rows, strict=True)
        ]
        self.storage.put(entries, positions)
        self._stats.tensor_bytes += sum(entry[5] for entry in entries)

    def _write_from_device(self, file: _C.FileWriter, positions: list[int], tensors: list[Tensor]) -> None:
        file.overlap()
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
            self._note_tensors(positions, [tensor], [row])

    # ---- what is pickled ----

    def _object_bytes(self, position: int) -> io.BytesIO:
        data = self.source.resolve([position])[0]
        if isinstance(data, io.BytesIO):
            return data
        raise PlanError(
            f"cannot save {self.source.name(position)!r}: Data must be io.BytesIO for BYTE_IO write items, and the "
            f"planner gave a {type(data)}"
        )

    def _tensor_bytes(self, position: int) -> io.BytesIO:
        tensor = self._checked([position], self.source.resolve([position]))[0].detach().cpu()
        if tensor.layout == torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        out = io.BytesIO()
        torch.save(tensor, out)
        return out

    def _write_pickled_tensors(self, file: _C.FileWriter, positions: list[int]) -> None:
        self._stats.tensor_bytes += self._write_pickled(file, positions, self._tensor_bytes)

    def _write_pickled(
        self, file: _C.FileWriter, positions: Iterable[int], pickled: Callable[[int], io.BytesIO]
    ) -> int:
        """Writes items as whole byte strings, a bounded number of bytes at a time; how many they are."""
        written = 0
        made = ((position, self._judged(position, pickled(position))) for position in positions)
        for window in windows(made, lambda pair: pair[1].getbuffer().nbytes, WINDOW_BYTES):
            self._written = [position for position, _ in window]
            rows = file.write_bytes([data.getbuffer() for _, data in window])
            self.storage.put([(self._name, BYTES, *row) for row in rows], self._written)
            written += sum(row[3] for row in rows)
            window.clear()  # before the next is made
        return written

    def _judged(self, position: int, data: io.BytesIO) -> io.BytesIO:
        """What is written: looked at, and transformed."""
        if self._judge is not None:
            self._judge.look(self.source.name(position), data)
        if not self._transforms.extensions:
            return data
        out = io.BytesIO()
        stream, descriptors = self._transforms.transform_save_stream(self.source.item(position), out)
        stream.write(data.getbuffer())
        stream.close()
        self._descriptors[position] = descriptors
        return out


PLAIN, _DEVICE, _OTHER, _LAZY = 0, 1, 2, 3


def handles_and_kinds(tensors: list[Tensor]) -> tuple[_C.Tensors, bytes]:
    """The tensors for the core, and how each can be taken: as it lies in memory, through a copy from its device, only
    by torch.save, or once it has been made what it stands for: a conjugate or negative view in CPU memory.
    """
    strange = {index: _OTHER for index, tensor in enumerate(tensors) if type(tensor) not in PLAIN_TYPES}
    for index, tensor in enumerate(tensors):
        if is_lazy_view(tensor) and tensor.device.type == "cpu" and index not in strange:
            strange[index] = _LAZY
    if not strange:
        handles = _C.Tensors(tensors)
        return handles, handles.kinds()
    handles = _C.Tensors([NOTHING if index in strange else tensor for index, tensor in enumerate(tensors)])
    kinds = bytearray(handles.kinds())
    for index, kind in strange.items():
        kinds[index] = kind
    return handles, bytes(kinds)


# ---- results ----


class ResultList(list[WriteResult]):
    """WriteResults with what the coordinator wants to know of the rank besides.

    Attributes:
        stats: of the rank's ``write_data``.
        ledger: what a later save of the rank wants to know, encoded; empty if there is to be none.
    """

    def __init__(self, results: Iterable[WriteResult], stats: IOStats, ledger: bytes = b"") -> None:
        super().__init__(results)
        self.stats = stats
        self.ledger = ledger

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultList, (list(self), self.stats, self.ledger)


class Results(Sequence[WriteResult]):
    """What a rank reports of a compact plan: DCP's WriteResults, made when they are looked at.

    Attributes:
        packed: the encoded storage index of its items, in order.
        stats, ledger: as of a ``ResultList``.
    """

    def __init__(self, packed: bytes, stats: IOStats, items: Items | None = None, ledger: bytes = b"") -> None:
        self.packed = packed
        self.stats = stats
        self.ledger = ledger
        self._items = items

    def of(self, items: Any) -> list[WriteResult]:
        """The results, given the items they are for."""
        return list(_results_of(items, _C.decode_storage_index(self.packed), {}))

    def __len__(self) -> int:
        return len(_C.decode_storage_index(self.packed))

    def __getitem__(self, index: Any) -> Any:
        if self._items is None:
            raise CheckpointError(
                "a rank sent its write results in compact form: only dcpring.RingWriter can take them"
            )
        return self.of(self._items)[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self.packed, self.stats, None, self.ledger)


def place_at(storage: _C.StorageIndex, index: int) -> tuple[Any, ...]:
    place = storage.get(index)
    if place is None:
        raise CheckpointError("a rank reported an item as not stored")
    return place


def _results_of(
    items: Iterable[WriteItem], storage: _C.StorageIndex, descriptors: Mapping[int, list[str]]
) -> Iterator[WriteResult]:
    for position, item in enumerate(items):
        placed = Placed(*place_at(storage, position))._replace(descriptors=descriptors.get(position))
        yield WriteResult(index=item.index, size_in_bytes=placed.length, storage_data=storage_info(placed))
