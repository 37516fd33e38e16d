"""Save plans in compact form: what ``create_local_plan`` makes, what ranks send, and the items as DCP knows them.

A plan's rows live in C (``_C.Table``). DCP's ``WriteItem`` objects are made from them only when someone looks: stock
storage does, ``RingWriter`` does not. Whoever changes items has his way: the plan goes by these then.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring.base.memory import same_memory
from dcpring.errors import CheckpointError
from dcpring.format.properties import OwnProperties, RowProperties, encode_properties, varint
from dcpring.names.diff import check_state_dict
from dcpring.plan.placements import Part, parts_of, tensor_at
from dcpring.plan.strategy import Choice
from dcpring.report import RankReport
from dcpring.torchside import versions
from dcpring.torchside.dcp import (
    HAS_STRIDES,
    create_chunk_list,
    create_write_items,
    flatten_sharded_tensors,
    flatten_state_dict,
    plans_for_itself,
    properties_of,
)
from dcpring.torchside.tensors import (
    PLAIN_TYPES,
    ShardedTensor,
    StridedShard,
    are_plain,
    global_size,
    is_plain,
    local_tensor,
)

BYTES_ROW, TENSOR_ROW, SHARD_ROW, NAME_ROW = range(4)
"""Types of rows, as the core numbers them."""

HASHED, DIVISIBLE = 1, 2
"""Flags of rows, as the core numbers them."""

_REQUIRES_GRAD, _PINNED, _ROW_FLAGS_SHIFT, _WITH_STRIDES = 1, 2, 2, 16
"""How ``_C.make_table`` takes the flags of a plain tensor."""

Path = tuple[str | int, ...]
Chunk = tuple[Sequence[int], Sequence[int], Sequence[int], TensorProperties]
"""size, offsets, lengths, properties"""
Row = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], bytes, int, int, int]
"""type, size, offsets, lengths, properties, bytes of the dtype in these, item bytes, flags"""

# ---- flattening ----


@dataclass
class Flat:
    """A nested state dict as one level: names, values and the paths that the names stand for."""

    values: dict[str, Any] = field(default_factory=dict)
    mappings: dict[str, Path] = field(default_factory=dict)
    codes: list[bytes] = field(default_factory=list)
    """The paths as the core has them: see ``_path_code``."""


def flatten(state_dict: Mapping[str, Any]) -> Flat:
    """As DCP's ``flatten_state_dict``: mappings are opened, and lists that hold tensors or mappings."""
    flat = Flat()
    try:
        if not versions.knows_torch():
            return _flattened_by_stock(state_dict)
        for key, value in state_dict.items():
            _flatten_value(flat, str(key), (str(key),), value)
    except RecursionError:
        check_state_dict(state_dict)
        raise
    return flat


def _flattened_by_stock(state_dict: Mapping[str, Any]) -> Flat:
    values, mappings = flatten_state_dict(state_dict)
    return Flat(values, mappings, [path_code(mappings, name) for name in values])


def _flatten_value(flat: Flat, name: str, path: Path, value: Any) -> None:
    if isinstance(value, Mapping):
        _flatten_mapping(flat, name, path, value)
    elif isinstance(value, list) and not is_terminal(value):
        for index, entry in enumerate(value):
            _flatten_value(flat, f"{name}.{index}", (*path, index), entry)
    else:
        _add_leaf(flat, name, path, value, _path_code(path))


def _flatten_mapping(flat: Flat, name: str, path: Path, mapping: Mapping[Any, Any]) -> None:
    code = _path_code((*path, ""))  # the same for all leaves of this mapping
    for key, value in mapping.items():
        child = f"{name}.{key}"
        if type(value) in PLAIN_TYPES:
            _add_leaf(flat, child, (*path, str(key)), value, code)
        else:
            _flatten_value(flat, child, (*path, str(key)), value)


def _add_leaf(flat: Flat, name: str, path: Path, value: Any, code: bytes) -> None:
    if name in flat.values:
        raise ValueError(f"duplicated flatten key {name}")
    flat.values[name] = value
    flat.mappings[name] = path
    flat.codes.append(code)


def is_terminal(values: list[Any]) -> bool:
    """Whether a list, with the lists in it, holds no tensor and no mapping."""
    seen = {id(values)}
    waiting = [values]
    while waiting:
        for entry in waiting.pop():
            if isinstance(entry, (Mapping, Tensor)):
                return False
            if isinstance(entry, list) and id(entry) not in seen:  # a few lists can hold each other very often
                seen.add(id(entry))
                waiting.append(entry)
    return True


def _path_code(path: Path) -> bytes:
    """The number of parts; for all but the last twice their length, plus 1 for an int; then 1 for an int last."""
    code = bytearray(varint(len(path)))
    for part in path[:-1]:
        code += varint(len(str(part).encode(errors="surrogatepass")) << 1 | isinstance(part, int))
    code += varint(int(isinstance(path[-1], int)))
    return bytes(code)


def path_code(mappings: Mapping[str, Path], name: str) -> bytes:
    """A name's path as the core has it; empty where it has none."""
    path = mappings.get(name)
    if path is None:
        return b""
    if ".".join(map(str, path)) != name:
        raise CheckpointError(
            f"the key {name!r} has the path {path} in the planner's mappings, which is not what it is made of; "
            "a planner that renames keys must do so before set_up_planner, or with key_map="
        )
    return _path_code(path)


def open_sharded_tensors(flat: Flat) -> Flat:
    """As DCP does it: opens ShardedTensors of ShardedTensors."""
    if not any(issubclass(kind, ShardedTensor) for kind in set(map(type, flat.values.values()))):
        return flat
    codes = dict(zip(flat.values, flat.codes, strict=True))
    values = flatten_sharded_tensors(flat.values)
    return Flat(values, flat.mappings, [codes.get(name, b"") for name in values])


# ---- rows ----

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that are objects to any version of torch."""


def _row_of_item(item: WriteItem) -> Row | None:
    """A row for a WriteItem that someone else made; None for an object."""
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        return None
    if item.index.offset is not None and item.index.offset != data.chunk.offsets:
        raise CheckpointError(
            f"{item.index.fqn!r}: its write item has the index {item.index.offset}, but its chunk starts at "
            f"{data.chunk.offsets}; nothing could find it on load"
        )
    kind = TENSOR_ROW if item.type == WriteItemType.TENSOR else SHARD_ROW
    return _row(kind, data.size, data.chunk.offsets, data.chunk.sizes, data.properties, 0)


def _row(
    kind: int,
    size: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    properties: TensorProperties,
    flags: int,
) -> Row:
    encoded, dtype_bytes = encode_properties(properties, lengths)
    item_bytes = properties.dtype.itemsize
    return kind, tuple(size), tuple(offsets), tuple(lengths), encoded, dtype_bytes, item_bytes, flags


def _row_of_tensor(tensor: Tensor) -> Row:
    """A tensor whose dtype or layout the core does not know."""
    zeros = (0,) * tensor.dim()
    return _row(TENSOR_ROW, tensor.size(), zeros, tensor.size(), properties_of(tensor), 0)


def describes_itself(value: Any) -> bool:
    """Whether a value is a tensor, of any kind; all others are pickled."""
    return isinstance(value, Tensor) or plans_for_itself(value)


class Describer:
    """Describes the values of one state dict as rows.

    Args:
        rows_of: describes what is neither a plain tensor nor a DTensor of plain tensors, by what stock says of it: a
            save's rows are those that it writes, a load's those that it fills; None for an object.
    """

    def __init__(self, rows_of: RowsOf) -> None:
        self._rows_of = rows_of

    def value(self, name: str, value: Any) -> Any:
        """A value that is no plain tensor, as ``_C.make_table`` takes it: a row, rows, None or ..."""
        if type(value) in _ATOMS:
            return None
        if isinstance(value, DTensor):
            return self._dtensor(name, value)
        return self._by_stock(name, value)

    def _by_stock(self, name: str, value: Any) -> Any:
        rows = self._rows_of(name, value)
        if rows is None:
            return None
        if isinstance(value, Tensor) and not isinstance(value, (DTensor, ShardedTensor)) and versions.tested:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            versions.say_once(logging.INFO, f"tensors of the kind {kind} are planned by torch's own functions")
        return rows[0] if len(rows) == 1 else rows or ...

    def _dtensor(self, name: str, value: DTensor) -> Any:
        local = local_tensor(value)
        strided = any(isinstance(placement, StridedShard) for placement in value.placements)
        partial = any(placement.is_partial() for placement in value.placements)
        if type(value) is not DTensor or partial or plans_for_itself(local) or not (versions.tested or strided):
            return self._by_stock(name, value)
        parts = parts_of(name, value)
        if not parts:
            return ...
        if not is_plain(local):
            return self._checked(name, value, parts)
        flags = DIVISIBLE if local.layout == torch.strided else 0
        properties = properties_of(value.to_local())
        rows = [_row(SHARD_ROW, value.shape, part.offsets, part.lengths, properties, flags) for part in parts]
        return rows if len(rows) > 1 else rows[0]

    def _checked(self, name: str, value: DTensor, parts: tuple[Part, ...]) -> list[Row]:
        """The rows that stock makes of a DTensor of another kind of tensors, if they are what it holds."""
        rows = self._rows_of(name, value) or []
        if [(row[2], row[3]) for row in rows] != [(part.offsets, part.lengths) for part in parts]:
            raise CheckpointError(
                f"{name!r} with the placements {value.placements} holds several chunks on a rank, or another than DCP "
                f"says, which cannot be cut out of a {type(local_tensor(value)).__name__}; redistribute it to Shard or "
                "Replicate first"
            )
        return rows


RowsOf = Callable[[str, Any], list[Row] | None]


def rows_to_write(name: str, value: Any) -> list[Row] | None:
    """What stock writes of a value; None for an object."""
    rows: list[Row] = []
    for item in create_write_items(name, value):
        row = _row_of_item(item)
        if row is None:
            return None
        rows.append(row)
    return rows


def rows_to_fill(_: str, value: Any) -> list[Row] | None:
    """What stock fills of a value; None for an object."""
    try:
        chunks = create_chunk_list(value)
    except ValueError:
        if isinstance(value, Tensor):
            raise
        return None
    properties = TensorProperties(dtype=value.dtype) if hasattr(value, "dtype") else TensorProperties()
    size = global_size(value)
    return [_row(SHARD_ROW, size, chunk.offsets, chunk.sizes, properties, 0) for chunk in chunks]


def rows_of_stored(metadata: Metadata) -> _C.Table:
    """The chunks of a checkpoint whose metadata has no tables."""
    chunks = [
        [(stored.size, chunk.offsets, chunk.sizes, stored.properties) for chunk in stored.chunks]
        if isinstance(stored, TensorStorageMetadata)
        else None
        for stored in metadata.state_dict_metadata.values()
    ]
    return table_of_chunks(list(metadata.state_dict_metadata), None, chunks)


def table_of_chunks(names: list[str], codes: list[bytes] | None, chunks: Sequence[Sequence[Chunk] | None]) -> _C.Table:
    """The rows of keys.

    Args:
        names: of the keys.
        codes: their paths, as ``path_code`` gives them.
        chunks: of each key; None for an object.
    """
    values = [None if rows is None else [_row(SHARD_ROW, *row, flags=0) for row in rows] or ... for rows in chunks]
    return _table(names, codes, values, bytes(len(names)))


def _table(names: list[str], codes: list[bytes] | None, values: list[Any], flags: bytes) -> _C.Table:
    try:
        return _C.make_table(names, codes, values, flags, _row_of_tensor)
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the key {error.object!r} cannot be written as UTF-8; rename it") from error


def make_table(
    flat: Flat,
    rows_of: RowsOf = rows_to_write,
    hashed: Callable[[Any], bool] | None = None,
) -> _C.Table:
    """The rows of a flat state dict. ``hashed`` says of a value whether its fingerprint will be sent along."""
    describer = Describer(rows_of)
    names, originals = list(flat.values), list(flat.values.values())
    plain = are_plain(originals)
    values = [
        value if is_tensor else describer.value(name, value)
        for (name, value), is_tensor in zip(flat.values.items(), plain, strict=True)
    ]
    flags = _flags(originals, plain)
    if hashed is not None:
        _mark_hashed(originals, values, flags, hashed)
    codes = flat.codes if flat.mappings else None
    return _table(names, codes, values, bytes(flags))


def _flags(values: list[Any], plain: list[bool]) -> bytearray:
    divisible = DIVISIBLE << _ROW_FLAGS_SHIFT | (_WITH_STRIDES if HAS_STRIDES else 0)
    flags = bytearray(divisible if is_tensor else 0 for is_tensor in plain)
    can_pin = torch.accelerator.is_available()
    for index, value in enumerate(values):
        if flags[index]:
            flags[index] |= (_REQUIRES_GRAD if value.requires_grad else 0) | (
                _PINNED if can_pin and value.is_pinned() else 0
            )
    return flags


def _mark_hashed(originals: list[Any], values: list[Any], flags: bytearray, hashed: Callable[[Any], bool]) -> None:
    for index, (original, value) in enumerate(zip(originals, values, strict=True)):
        if value is ... or not hashed(original):
            continue
        if not isinstance(value, tuple | list):
            flags[index] |= HASHED << _ROW_FLAGS_SHIFT
        elif isinstance(original, Tensor):
            values[index] = _hashed_row(value) if isinstance(value, tuple) else list(map(_hashed_row, value))


def _hashed_row(row: Any) -> Any:
    return *row[:-1], row[-1] | HASHED


def table_of_items(items: Sequence[WriteItem], mappings: Mapping[str, Path] | None) -> _C.Table:
    """The rows of items that a subclass has made or changed."""
    rows: dict[str, list[Row] | None] = {}
    for item in items:
        row, name = _row_of_item(item), item.index.fqn
        if row is None or name not in rows:
            rows[name] = None if row is None else [row]
        else:
            known = rows[name]
            rows[name] = [row] if known is None else [*known, row]
    names = list(rows)
    codes = None if mappings is None else [path_code(mappings, name) for name in names]
    if sum(len(part) if part else 1 for part in rows.values()) != len(items):
        raise CheckpointError("a plan names an object twice, or an object and a tensor alike; give each its own key")
    values: list[Any] = [rows[name] for name in names]
    return _C.make_table(names, codes, values, bytes(len(names)), _row_of_tensor)


def tied_rows(flat: Flat, table: _C.Table) -> tuple[tuple[int, int], ...]:
    """Pairs of rows of whole tensors that are the same memory, the later first."""
    tensors = enumerate(memory_of_rows(table, flat.values))
    known = {row: tensor for row, tensor in tensors if tensor is not None and _has_memory(tensor)}
    return tuple(same_memory(known).items())


def memory_of_rows(table: _C.Table, values: Mapping[str, Any]) -> list[Tensor | None]:
    """The plain tensor, or the view of one, that each row of a flat state dict stands for; None where there is none."""
    names = table.names()
    memory: list[Any] = [values[name] for name in names]
    plain = are_plain(memory)
    if all(plain):
        return memory
    scattered = has_scattered(names)
    return [value if plain[row] else memory_of_row(table, row, value, scattered) for row, value in enumerate(memory)]


def has_scattered(names: Sequence[str]) -> bool:
    """Whether any name of a table has several rows, as a DTensor in several chunks has."""
    return len(set(names)) < len(names)


def memory_of_row(table: _C.Table, row: int, value: Any, scattered: bool = True) -> Tensor | None:
    """The same for one row, with ``scattered`` of its table."""
    local = memory_of(value)
    if scattered and local is not None and isinstance(value, DTensor):
        name, _, _, offsets, _, _, _ = table.row(row)
        return tensor_at(name, value, offsets)
    return local


def memory_of(value: Any) -> Tensor | None:
    """The plain tensor of which a value is made on this rank; None where there is none."""
    local = local_tensor(value) if type(value) is DTensor else value
    return local if is_plain(local) else None


def part_of(values: Mapping[str, Any], index: MetadataIndex) -> Tensor | None:
    """The view that an index stands for, where it is one of several parts of a DTensor on this rank; else None."""
    value = values.get(index.fqn)
    if not isinstance(value, DTensor) or memory_of(value) is None or len(parts_of(index.fqn, value)) < 2:
        return None
    return tensor_at(index.fqn, value, index.offset)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


# ---- items ----

Kept = int | tuple[int, int, int]
"""What a rank writes: a row of its plan, or (row, first row of the chunk, rows) along dimension 0."""


class Items(MutableSequence[WriteItem]):
    """The WriteItems of a compact plan, made when they are looked at; to DCP and its planners a list.

    Args:
        table: the rows, or their encoded form, or what gives that.
        answer: the core's answer that says which of them are to be written, None for all.
    """

    def __init__(self, table: _C.Table | bytes | Callable[[], bytes], answer: bytes | None = None) -> None:
        self._table = table
        self._answer = answer

    @functools.cached_property
    def table(self) -> _C.Table:
        encoded = self._table() if callable(self._table) else self._table
        return _C.decode_table(encoded) if isinstance(encoded, bytes) else encoded

    @functools.cached_property
    def kept(self) -> list[Kept]:
        if self._answer is None:
            return [row for row, kind in enumerate(self.table.types()) if kind != NAME_ROW]
        try:
            return _C.read_answer(self._answer, len(self.table))
        except ValueError as error:
            raise CheckpointError(str(error)) from error

    @property
    def untouched(self) -> bool:
        """Nobody has looked at the items, so none was changed."""
        return "made" not in self.__dict__

    @functools.cached_property
    def made(self) -> list[WriteItem]:
        return self._remade()

    def _remade(self) -> list[WriteItem]:
        properties = OwnProperties(self.table.properties())
        return [_make_item(self.table, kept, properties) for kept in self.kept]

    def make(self, position: int) -> WriteItem:
        """One item, which is not kept."""
        return _make_item(self.table, self.kept[position], self._properties)

    def describe(self, items: Sequence[WriteItem]) -> bool:
        """Whether items are those that the rows stand for: nobody has changed any, or their order."""
        return (items is self and self.untouched) or list(items) == self._remade()

    @functools.cached_property
    def _properties(self) -> RowProperties:
        return RowProperties(self.table.properties())

    def __len__(self) -> int:
        return len(self.kept if self.untouched else self.made)

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        return self.made[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.made[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self.made[index]

    def insert(self, index: int, value: WriteItem) -> None:
        self.made.insert(index, value)

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self.made)

    def __add__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*self, *other]

    def __radd__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*other, *self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.made,)


def _make_item(table: _C.Table, kept: Kept, properties: RowProperties) -> WriteItem:
    row = kept if isinstance(kept, int) else kept[0]
    name, kind, size, offsets, lengths, number, _ = table.row(row)
    if kind == BYTES_ROW:
        return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    if not isinstance(kept, int):
        kind = SHARD_ROW
        offsets = (offsets[0] + kept[1], *offsets[1:])
        lengths = (kept[2], *lengths[1:])
    place = torch.Size(offsets)
    return WriteItem(
        index=MetadataIndex(name, place),
        type=WriteItemType.TENSOR if kind == TENSOR_ROW else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(place, torch.Size(lengths)),
            properties=properties.of(number, lengths),
            size=torch.Size(size),
        ),
    )


class SentItems(Sequence[WriteItem]):
    """Stands for the items of a compact plan where only a Ring planner can make them."""

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            "a rank sent a compact plan of dcpring.RingSavePlanner, but the coordinator plans with another planner: "
            "pass planner=RingSavePlanner() on all ranks, or on none; or a subclass looks at the items in finish_plan "
            "before super().finish_plan has made them"
        )

    def __len__(self) -> int:
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __iter__(self) -> Iterator[WriteItem]:
        self._refuse()


# ---- plans ----


@dataclass(frozen=True)
class LocalMessage:
    """What a rank sends to the coordinator.

    Attributes:
        rank: of the default process group.
        host: the same string on all ranks of a machine.
        layout: the encoded table, None when it is that of the last save.
        digest: tells layouts, with their ties, from each other.
        fingerprints: a uint32 for each row that is hashed.
        flattened: whether the rows have paths.
        ties: pairs of rows that are the same memory, the later first.
    """

    rank: int
    host: str
    layout: bytes | None
    digest: str
    fingerprints: bytes
    flattened: bool
    ties: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Unsealed:
    """Sent in the place of a LocalMessage that could not be made.

    DCP pickles a plan outside of where it catches errors: one that is raised there leaves the other ranks waiting.
    """

    why: str


@dataclass(frozen=True)
class Answer:
    """What the coordinator sends back.

    Attributes:
        to: the rank that it is for, as in the LocalMessage.
        kept: the core's answer, None when it is that of the last save.
        choice: the strategy, and why.
        rank: the rank's part of the report.
    """

    to: int
    kept: bytes | None
    choice: Choice
    rank: RankReport


Piece = tuple[MetadataIndex, int, int]
"""The chunk that a part was cut from, the part's first row in it, and its rows."""

Pieces = Mapping[tuple[str, torch.Size | None], Piece]
"""Parts of tensors, by key and offset."""


@dataclass(frozen=True)
class ByItems:
    """What the coordinator sends back with the items themselves, where someone has changed them.

    Attributes:
        choice: why the plan goes by items.
        rank: the rank's part of the report.
        pieces: those of the items that were cut from the chunks that ranks hold.
    """

    choice: Choice
    rank: RankReport
    pieces: Pieces


Message = LocalMessage | Unsealed | Answer | ByItems


class Gathering:
    """The plans that come in at a planner that coordinates.

    Plans are unpickled by DCP, which says nothing of the planner that they are for, in the thread that has planned.

    Args:
        layout_of: gives the encoded table of a message, also of one that comes without.
    """

    def __init__(self, layout_of: Callable[[LocalMessage | Unsealed], bytes]) -> None:
        self.layout_of = layout_of
        self.messages: list[LocalMessage | Unsealed] = []
        _of_thread.gathering = weakref.ref(self)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.gathering: Callable[[], Gathering | None] = lambda: None


_of_thread = _OfThread()


def fields_of(plan: Any, base: type) -> dict[str, Any]:
    """The fields of a plan that are stock's, whichever this torch has."""
    return {each.name: getattr(plan, each.name) for each in fields(base)}


def rebuilt(cls: type, values: dict[str, Any]) -> Any:
    """A plan that another process has sent."""
    return cls(**values)


def _received(values: dict[str, Any]) -> RingPlan:
    """A save plan that another process has sent; the items of one that is to be coordinated can be looked at."""
    message, gathering = values["message"], _of_thread.gathering()
    if isinstance(message, LocalMessage | Unsealed) and gathering is not None:
        gathering.messages.append(message)
        items = Items(functools.partial(gathering.layout_of, message))
        values = {**values, "items": items, "described": items}
    return RingPlan(**values)


@dataclass(frozen=True)
class RingPlan(SavePlan):
    """A SavePlan whose items stay in C: a message is sent instead of them.

    Attributes:
        message: what was sent, or will be if nobody changes the items.
        seal: makes the message from the items as they are when they are sent; None for a plan that was.
        values: those of this rank's state dict, by key, while the plan has not been sent.
        described: the items that the message stands for.
    """

    message: Message | None = None
    seal: Callable[[RingPlan], Message] | None = field(default=None, repr=False, compare=False)
    values: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    described: Items | None = field(default=None, repr=False, compare=False)

    @property
    def is_changed(self) -> bool:
        """Whether the items are others than those that create_local_plan, or create_global_plan, has made."""
        return self.described is not None and not self.described.describe(self.items)

    def sealed(self) -> Message:
        """The message, from the items as they are now."""
        if isinstance(self.message, Unsealed):
            raise CheckpointError(self.message.why)
        if self.seal is not None:
            return self.seal(self)
        if self.message is None:
            raise CheckpointError("this plan was not made by RingSavePlanner.create_local_plan")
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        items: Any = SentItems()
        try:
            message = self._sent_back() if self.seal is None else self.sealed()
            if message is None or isinstance(message, ByItems):
                items = list(self.items)
        except Exception as error:
            message = Unsealed(f"its plan cannot be described: {type(error).__name__}: {error}")
        return _received, ({**fields_of(self, SavePlan), "items": items, "message": message},)

    def _sent_back(self) -> Message | None:
        """The message of a plan that has come from a rank already: none where a subclass has planned by itself."""
        return None if isinstance(self.message, LocalMessage) and self.described is not None else self.message
