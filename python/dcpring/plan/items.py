"""The WriteItems of a compact plan, as DCP knows them: made from its table only when somebody looks.

Stock storage does, ``RingWriter`` does not. Whoever changes items has his way: the plan goes by these then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, NoReturn, overload

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.format.properties import OwnProperties, RowProperties
from dcpring.plan.rows import Kept, row_of
from dcpring.plan.table import BYTES_ROW, NAME_ROW, TENSOR_ROW


class Items(MutableSequence[WriteItem]):
    """The WriteItems of a compact plan, made when they are looked at; to DCP and its planners a list.

    Args:
        table: the rows, or their encoded form, or what gives that.
        reply: the core's reply that says which of them are to be written, None for all.
    """

    def __init__(self, table: _C.Table | bytes | Callable[[], bytes], reply: bytes | None = None) -> None:
        self._table = table
        self._reply = reply

    @functools.cached_property
    def table(self) -> _C.Table:
        encoded = self._table() if callable(self._table) else self._table
        return _C.decode_table(encoded) if isinstance(encoded, bytes) else encoded

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
