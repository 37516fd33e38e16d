"""What the items of a plan are, by position: from DCP's WriteItems, or from a compact plan, without making any."""

from __future__ import annotations

import abc
import functools
import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from dcpring.base.windows import Box
from dcpring.errors import PlanError
from dcpring.format.ledger import NO_PLAN, identity_of, plan_of
from dcpring.format.metadata import OPAQUE, TENSOR
from dcpring.move.objects import archive_of
from dcpring.plan.items import Items
from dcpring.plan.placements import check_chunk
from dcpring.plan.rows import BYTES_ROW, row_of
from dcpring.plan.save_planner import RingSavePlanner, makes_tensors
from dcpring.plan.table import has_scattered, memory_of_row
from dcpring.torchside.tensors import are_plain


def items_of(items: Any, planner: SavePlanner) -> PlanItems:
    if isinstance(items, Items) and not makes_tensors(planner):
        return TableItems(items, planner)
    made = list(items)
    if not makes_tensors(planner) and not isinstance(planner, RingSavePlanner):
        _check_chunks(made, planner)
    return GivenItems(made, planner)


def _check_chunks(items: list[WriteItem], planner: SavePlanner) -> None:
    """Items of DTensors must be what the planner will hand out for them: this rank's part of each."""
    values = getattr(planner, "state_dict", None) or {}
    for item in items:
        if item.type == WriteItemType.SHARD and item.tensor_data is not None:
            name, lengths = item.index.fqn, item.tensor_data.chunk.sizes
            offsets = item.tensor_data.chunk.offsets
            check_chunk(name, values.get(name), offsets, (0,) * len(lengths), lengths, "RingSavePlanner")


class PlanItems(abc.ABC):
    """The items of a plan, by position.

    Attributes:
        names: the key of each.
        sizes: bytes of each tensor as it was planned; 0 for objects.
        objects, tensors: the positions of each.
    """

    def __init__(self, names: list[str], sizes: list[int], objects: list[int]) -> None:
        self.names, self.sizes, self.objects = names, sizes, objects
        without = set(objects)
        self.tensors = [position for position in range(len(names)) if position not in without]

    def plan(self) -> bytes:
        """What tells the plan from others, 16 bytes; zeros where only its items do."""
        return NO_PLAN

    @abc.abstractmethod
    def identity(self, position: int) -> bytes:
        """What tells a tensor's item from others (``format.ledger``), whatever plan it is in."""

    @abc.abstractmethod
    def box(self, position: int) -> Box:
        """What a tensor's item is of its tensor."""

    @abc.abstractmethod
    def item(self, position: int) -> WriteItem:
        """DCP's item."""

    @abc.abstractmethod
    def resolve(self, positions: Sequence[int]) -> list[Any]:
        """The tensors at these positions."""

    @abc.abstractmethod
    def archive(self, position: int) -> bytes:
        """An object as ``torch.save`` writes it."""

    def kinds_of(self, positions: Sequence[int], tensors: Sequence[Tensor]) -> bytes | None:
        """What each tensor is stored as, for the storage index: opaque where the metadata's shape and dtype do not
        describe it, as a planner's ``resolve_data`` may change both; None: all as they were planned.
        """
        return None


class GivenItems(PlanItems):
    """WriteItems, which the planner resolves one by one."""

    def __init__(self, items: list[WriteItem], planner: SavePlanner) -> None:
        objects = [at for at, item in enumerate(items) if item.type == WriteItemType.BYTE_IO]
        super().__init__([item.index.fqn for item in items], [planned_bytes(item) for item in items], objects)
        self._items = items
        self._planner = planner

    def identity(self, position: int) -> bytes:
        data = self._items[position].tensor_data
        assert data is not None
        return identity_of(self.names[position], *self.box(position), str(data.properties.dtype))

    def box(self, position: int) -> Box:
        data = self._items[position].tensor_data
        assert data is not None
        return tuple(data.chunk.offsets), tuple(data.chunk.sizes)

    def item(self, position: int) -> WriteItem:
        return self._items[position]

    def resolve(self, positions: Sequence[int]) -> list[Any]:
        return [self._planner.resolve_data(self._items[position]) for position in positions]

    def archive(self, position: int) -> bytes:
        data: Any = self._planner.resolve_data(self._items[position])
        if isinstance(data, io.BytesIO):
            return data.getvalue()
        raise PlanError(
            f"cannot save {self.names[position]!r}: Data must be io.BytesIO for BYTE_IO write items, and the planner "
            f"gave a {type(data)}"
        )

    def kinds_of(self, positions: Sequence[int], tensors: Sequence[Tensor]) -> bytes | None:
        planned = [self._is_planned(*pair) for pair in zip(positions, tensors, strict=True)]
        return None if all(planned) else bytes(TENSOR if one else OPAQUE for one in planned)

    def _is_planned(self, position: int, tensor: Tensor) -> bool:
        data = self._items[position].tensor_data
        return data is not None and tensor.dtype == data.properties.dtype and tensor.size() == data.chunk.sizes


def planned_bytes(item: WriteItem) -> int:
    """Of the tensor as it was planned; 0 for objects."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


class TableItems(PlanItems):
    """A compact plan, whose planner hands out what is in the state dict: plain tensors need no item."""

    def __init__(self, items: Items, planner: SavePlanner) -> None:
        self._items = items
        self._planner = planner
        self._state_dict: dict[str, Any] = planner.state_dict  # type: ignore[attr-defined]
        self._rows = rows = [kept if isinstance(kept, int) else kept[0] for kept in items.kept]
        names, types, sizes = items.table.names(), items.table.types(), items.table.sizes()
        objects = [position for position, row in enumerate(rows) if types[row] == BYTES_ROW]
        super().__init__([names[row] for row in rows], [sizes[row] for row in rows], objects)
        self._scattered = has_scattered(names)
        self._cut = {position for position, kept in enumerate(items.kept) if not isinstance(kept, int)}
        for position in self._cut:
            whole, part = row_of(items.table, rows[position]), row_of(items.table, items.kept[position])
            self.sizes[position] = self.sizes[position] // whole.lengths[0] * part.lengths[0]

    def plan(self) -> bytes:
        return plan_of(*self._items.encoded())

    def identity(self, position: int) -> bytes:
        row = row_of(self._items.table, self._items.kept[position])
        return identity_of(row.key, row.offsets, row.lengths, self._dtypes[row.properties])

    def box(self, position: int) -> Box:
        row = row_of(self._items.table, self._items.kept[position])
        return row.offsets, row.lengths

    @functools.cached_property
    def _dtypes(self) -> list[str]:
        """By the number of the properties."""
        return [encoded.partition(b"\0")[0].decode() for encoded in self._items.table.properties()]

    def item(self, position: int) -> WriteItem:
        return self._items.make(position)

    def resolve(self, positions: Sequence[int]) -> list[Any]:
        names, state_dict = self.names, self._state_dict
        values = [state_dict[names[position]] for position in positions]
        for index, (value, plain) in enumerate(zip(values, are_plain(values), strict=True)):
            if not plain or (self._cut and positions[index] in self._cut):
                values[index] = self._resolve_one(positions[index], value)
        return values

    def archive(self, position: int) -> bytes:
        return archive_of(self._state_dict[self.names[position]])

    def _resolve_one(self, position: int, value: Any) -> Any:
        """Of a DTensor its part on this rank; of what is cut the part that this rank writes; else what stock has."""
        tensor = memory_of_row(self._items.table, self._rows[position], value, self._scattered)
        if tensor is None:
            return self._planner.resolve_data(self.item(position))
        if position in self._cut:
            _, start, rows = self._items.kept[position]  # type: ignore[misc]
            return tensor.detach().narrow(0, start, rows)
        return tensor
