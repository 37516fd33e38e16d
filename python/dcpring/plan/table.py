"""Rows of a plan: what a rank holds, or wants, as a table of C (``_C.Table``), one row for each object or chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from dcpring import _C
from dcpring.base.memory import same_memory
from dcpring.errors import CheckpointError, PlanError, naming
from dcpring.format.properties import encode_properties
from dcpring.plan.flatten import Flat, Path, path_code
from dcpring.plan.placements import Part, parts_of, tensor_at
from dcpring.plan.rows import SHARD_ROW, TENSOR_ROW, row_of
from dcpring.torchside import versions
from dcpring.torchside.composed import Composed, properties_of_dtype
from dcpring.torchside.dcp import HAS_STRIDES, create_chunk_list, create_write_items, plans_for_itself, properties_of
from dcpring.torchside.tensors import ShardedTensor, StridedShard, are_plain, global_size, is_plain, local_tensor

HASHED, DIVISIBLE = 1, 2
"""Flags of rows, as the core numbers them."""

_REQUIRES_GRAD, _PINNED, _ROW_FLAGS_SHIFT, _WITH_STRIDES = 1, 2, 2, 16
"""How ``_C.make_table`` takes the flags of a plain tensor."""

Chunk = tuple[Sequence[int], Sequence[int], Sequence[int], TensorProperties]
"""size, offsets, lengths, properties"""
Row = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], bytes, int, int, int]
"""type, size, offsets, lengths, properties, bytes of the dtype in these, item bytes, flags"""

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
    return kind, _ints(size), _ints(offsets), _ints(lengths), encoded, dtype_bytes, item_bytes, flags


def _ints(sizes: Sequence[int]) -> tuple[int, ...]:
    """Plain numbers: a symbol that has none, as of a ragged dimension, raises here."""
    return tuple(map(int, sizes))


def _row_of_tensor(name: str, tensor: Tensor) -> Row:
    """A tensor whose dtype or layout the core does not know."""
    with _planning(name, tensor):
        size = tuple(map(int, tensor.size()))
        return _row(TENSOR_ROW, size, (0,) * len(size), size, properties_of(tensor), 0)


RAGGED_CURE = "a nested tensor has no shape to be stored: save its parts (unbind()), or its values() and offsets()"


def _planning(name: str, value: Any) -> AbstractContextManager[None]:
    """Where torch is asked for a value's size and dtype, which not all kinds of tensors have."""
    # Subclasses may refuse to be asked.
    is_nested = type(value).__name__ == "NestedTensor" or (type(value) in (Tensor, Parameter) and value.is_nested)
    cure = RAGGED_CURE if is_nested else ""
    return naming(lambda: f"cannot plan {name!r}, a {type(value).__qualname__}", cure, PlanError)


def check_sizes(items: Iterable[WriteItem]) -> None:
    """Whether what another planner has planned has numbers for sizes; stock takes ragged ones, and then raises.

    Raises:
        PlanError: with the name.
    """
    for item in items:
        data = item.tensor_data
        if data is not None and not all(isinstance(size, int) for size in data.size):
            raise PlanError(f"cannot save {item.index.fqn!r}, whose shape is {list(data.size)}; {RAGGED_CURE}")


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
        if isinstance(value, Composed):
            properties, size = properties_of_dtype(value.dtype), value.shape
            rows = [_row(SHARD_ROW, size, part.offsets, part.tensor.shape, properties, 0) for part in value.held]
            return rows[0] if len(rows) == 1 else rows or ...
        return self._by_stock(name, value)

    def _by_stock(self, name: str, value: Any) -> Any:
        with _planning(name, value):
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
        if any(placement.is_partial() for placement in value.placements):
            return self._refused_sum(name, value)
        if type(value) is not DTensor or plans_for_itself(local) or not (versions.tested or strided):
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

    def _refused_sum(self, name: str, value: DTensor) -> Any:
        self._by_stock(name, value)  # raises, since torch 2.10; before, it took one rank's part for the sum
        raise CheckpointError(
            f"{name!r} has the placements {value.placements}: Partial, of which each rank holds a part of the sum. "
            "Redistribute it to Shard or Replicate first"
        )

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
    return _C.make_table(names, codes, values, bytes(len(names)), _row_of_tensor)


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
    return _C.make_table(names, codes, values, bytes(flags), _row_of_tensor)


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
    if isinstance(value, Composed):
        return value.at(row_of(table, row).offsets) if value.held else None
    local = memory_of(value)
    if scattered and local is not None and isinstance(value, DTensor):
        described = row_of(table, row)
        return tensor_at(described.key, value, described.offsets)
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
