"""The items of a compact plan, as DCP knows them: made from its tables only when somebody looks.

Stock storage looks at them, ``RingWriter`` does not. They cannot be changed: the plans of a planner that changes items
have a list of them (``own_items``).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.format.properties import RowProperties
from dcpring.plan.rows import BYTES_ROW, NAME_ROW, TENSOR_ROW, Kept, row_of

Item = TypeVar("Item")


class _Made(Sequence[Item]):
    """Items that are made when they are looked at."""

    @functools.cached_property
    def made(self) -> list[Item]:
        return [self.make(position) for position in range(len(self))]

    @abc.abstractmethod
    def make(self, position: int) -> Item:
        """One item, which is not kept."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return self.made[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.made)


class Items(_Made[WriteItem]):
    """The WriteItems of a compact plan, made when they are looked at.

    Args:
        table: the rows, or their encoded form.
        reply: the core's reply that says which of them are to be written, None for all.
    """

    def __init__(self, table: _C.Table | bytes, reply: bytes | None = None) -> None:
        self._table = table
        self._reply = reply

    @functools.cached_property
    def table(self) -> _C.Table:
        return _C.decode_table(self._table) if isinstance(self._table, bytes) else self._table

    @functools.cached_property
    def kept(self) -> list[Kept]:
        if self._reply is None:
            return [row for row, kind in enumerate(self.table.types()) if kind != NAME_ROW]
        try:
            return _C.read_reply(self._reply, len(self.table))
        except ValueError as error:
            raise CheckpointError(str(error)) from error

    def encoded(self) -> tuple[bytes, bytes]:
        """The encoded table, and the reply; empty for all rows."""
        return self.table.encode(), self._reply or b""

    def make(self, position: int) -> WriteItem:
        return _make_item(self.table, self.kept[position], self._properties)

    @functools.cached_property
    def _properties(self) -> RowProperties:
        return RowProperties(self.table.properties())

    def __len__(self) -> int:
        return len(self.kept)

    def __add__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*self, *other]

    def __radd__(self, other: Iterable[WriteItem]) -> list[WriteItem]:
        return [*other, *self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.made,)


def own_items(table: _C.Table) -> list[WriteItem]:
    """The items of all rows, for a planner that may change them: they share nothing."""
    return [_make_item(table, kept, RowProperties(table.properties())) for kept in Items(table).kept]


def _make_item(table: _C.Table, kept: Kept, properties: RowProperties) -> WriteItem:
    row = row_of(table, kept)
    if row.kind == BYTES_ROW:
        return WriteItem(index=MetadataIndex(row.key), type=WriteItemType.BYTE_IO)
    place = torch.Size(row.offsets)
    return WriteItem(
        index=MetadataIndex(row.key, place),
        type=WriteItemType.TENSOR if isinstance(kept, int) and row.kind == TENSOR_ROW else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(place, torch.Size(row.lengths)),
            properties=properties.of(row.properties, row.lengths),
            size=torch.Size(row.size),
        ),
    )


class ReadItems(_Made[ReadItem]):
    """DCP's ReadItems of a match, made when they are looked at.

    Attributes:
        match: what of the checkpoint's rows goes into what of the wanted ones.
        wanted, stored: these rows, under the checkpoint's names.
    """

    def __init__(self, match: _C.Match, wanted: _C.Table, stored: _C.Table, names: Mapping[str, str]) -> None:
        self.match = match
        self.wanted = wanted
        self.stored = stored
        self._names = names
        self._wanted_row = functools.cache(functools.partial(row_of, wanted))

    @functools.cached_property
    def _first_rows(self) -> dict[str, int]:
        """Where the rows of each stored name start: the index of a chunk counts from there."""
        first: dict[str, int] = {}
        for row, name in enumerate(self.stored.names()):
            first.setdefault(name, row)
        return first

    def make(self, position: int) -> ReadItem:
        wanted, stored, dest_offsets, storage_offsets, lengths = self.match.get(position)
        target, record = self._wanted_row(wanted), row_of(self.stored, stored)
        name, own = target.key, self._names.get(target.key, target.key)
        if record.kind == BYTES_ROW:
            zero = torch.Size((0,))
            return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(own), zero, MetadataIndex(name), zero, zero)
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(own, target.offsets),
            dest_offsets=torch.Size(dest_offsets),
            storage_index=MetadataIndex(name, record.offsets, stored - self._first_rows[name]),
            storage_offsets=torch.Size(storage_offsets),
            lengths=torch.Size(lengths),
        )

    def __len__(self) -> int:
        return len(self.match)


class SentItems(Sequence[WriteItem]):
    """Stands for the items of a compact plan where only a Ring planner can make them."""

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            "a rank sent a compact plan of dcpring.RingSavePlanner, but the coordinator plans with another planner: "
            "pass planner=RingSavePlanner() on all ranks, or on none. A planner that looks at the items of other ranks "
            "must be a subclass of RingSavePlanner that overrides create_global_plan"
        )

    def __len__(self) -> int:
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __iter__(self) -> Iterator[WriteItem]:
        self._refuse()
