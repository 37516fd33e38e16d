"""RingLoadPlanner: DCP's load planner with its work done in C.

What a rank wants and what the checkpoint holds are tables (``_plan``); the core matches them. DCP's ``ReadItem``
objects are only made for storage that asks for them, and nothing is sent to the coordinator but what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import _version as dcp_version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as dcp_flatten
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict
from torch.distributed.tensor import DTensor

from dcpring import _C
from dcpring._lazy import Chunks, LazyMetadata
from dcpring._metadata import collection_paused
from dcpring._plan import BYTES_ROW, PLAIN_TYPES, Flat, flatten, make_table, rows_of_stored, rows_to_fill

__all__ = ["RingLoadPlanner"]

_NAMED_KEYS = 10
"""Missing keys that an error names."""


class ReadItems(Sequence[ReadItem]):
    """DCP's ReadItems of a match, made when they are looked at."""

    def __init__(self, match: _C.Match, wanted: _C.Table, stored: _C.Table) -> None:
        self.match = match
        self.wanted = wanted
        self.stored = stored

    @functools.cached_property
    def _first_rows(self) -> dict[str, int]:
        """Where the rows of each stored name start: the index of a chunk counts from there."""
        first: dict[str, int] = {}
        for row, name in enumerate(self.stored.names()):
            first.setdefault(name, row)
        return first

    def make(self, position: int) -> ReadItem:
        wanted, stored, dest_offsets, storage_offsets, lengths = self.match.get(position)
        name, _, _, dest, _, _, _ = self.wanted.row(wanted)
        _, kind, _, place, _, _, _ = self.stored.row(stored)
        if kind == BYTES_ROW:
            zero = torch.Size((0,))
            index = MetadataIndex(name)
            return ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, dest),
            dest_offsets=torch.Size(dest_offsets),
            storage_index=MetadataIndex(name, place, stored - self._first_rows[name]),
            storage_offsets=torch.Size(storage_offsets),
            lengths=torch.Size(lengths),
        )

    def __len__(self) -> int:
        return len(self.match)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        return self._made[index]

    def __iter__(self) -> Iterator[ReadItem]:
        return iter(self._made)

    @functools.cached_property
    def _made(self) -> list[ReadItem]:
        return [self.make(position) for position in range(len(self))]


@dataclass
class RingLoadPlan(LoadPlan):
    """A LoadPlan whose items stay in C, and on their rank: pickled, it is empty."""

    chunks: Chunks | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return RingLoadPlan, ([], self.storage_data, self.planner_data)


class RingLoadPlanner(DefaultLoadPlanner):
    """Plans a load in C: ``dcp.load(state_dict, storage_reader=..., planner=RingLoadPlanner())``.

    Takes the arguments of ``DefaultLoadPlanner`` and works wherever that does, with any storage.

    Args:
        flatten_state_dict, flatten_sharded_tensors, allow_partial_load: see ``DefaultLoadPlanner``.

    Raises (from the load, inside DCP's ``CheckpointException``):
        RuntimeError: keys are missing in the checkpoint; all are counted, and the first ones named.
        ValueError: a tensor has another shape in the checkpoint, or the checkpoint does not hold all of it.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._own_plan: RingLoadPlan | None = None

    # ---- what DCP calls, in this order ----

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._own_plan = None
        with collection_paused():
            flat = self._flat(state_dict)
            if any(isinstance(value, Tensor) and value.is_meta for value in flat.values.values()):
                _init_state_dict(state_dict)
                flat = self._flat(state_dict)
        kinds = set(map(type, flat.values.values()))
        if self.flatten_sharded_tensors and any(issubclass(kind, ShardedTensor) for kind in kinds):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat.values, flat.mappings
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        with collection_paused():
            chunks = _chunks_of(self.metadata)
            codes = [b""] * len(self.state_dict)
            wanted = make_table(Flat(self.state_dict, {}, codes), rows_of=rows_to_fill)
            match = _C.Match(wanted, chunks.table)
            missing = match.missing()
            if missing and self._is_of_version_2_3(chunks):
                return super().create_local_plan()
            if missing and not self.allow_partial_load:
                raise RuntimeError(_missing(missing))
            items: Any = ReadItems(match, wanted, chunks.table)
            self._own_plan = RingLoadPlan(items, chunks=chunks)
        return self._own_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if self._own_plan is None or not isinstance(new_plan, RingLoadPlan):
            return new_plan
        self._own_plan.storage_data = new_plan.storage_data
        return self._own_plan

    # ---- for RingReader ----

    def targets(self, wanted: _C.Table) -> list[Tensor | None]:
        """What each wanted row is filled into; None for what only ``resolve_tensor`` can tell."""
        values = [self.state_dict[name] for name in wanted.names()]
        if set(map(type, values)) <= set(PLAIN_TYPES):
            return values
        return [_memory_of(value) for value in values]

    # ---- helpers ----

    def _flat(self, state_dict: STATE_DICT_TYPE) -> Flat:
        if self.flatten_state_dict:
            return flatten(state_dict)
        return Flat(values=dict(state_dict))

    def _is_of_version_2_3(self, chunks: Chunks) -> bool:
        """Whether the keys are those of torch 2.3, which flattened in another way. DCP's planner reads these."""
        if not self.flatten_state_dict:
            return False
        dcp_version._derived_version = "2_3"
        try:
            old, _ = dcp_flatten(self.original_state_dict)
        finally:
            dcp_version._derived_version = None
        stored = set(chunks.table.names())
        return bool((old.keys() - self.state_dict.keys()) & stored)


def _chunks_of(metadata: Metadata) -> Chunks:
    chunks = metadata.chunks if isinstance(metadata, LazyMetadata) else None
    return chunks or Chunks(rows_of_stored(metadata), False)


def _memory_of(value: Any) -> Tensor | None:
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, DTensor) and type(value._local_tensor) in PLAIN_TYPES:
        return value._local_tensor
    return None


def _missing(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_KEYS])
    more = f" and {len(names) - _NAMED_KEYS} more" if len(names) > _NAMED_KEYS else ""
    return (
        f"Missing key in checkpoint state_dict: {shown}{more}. "
        "Pass allow_partial_load=True to leave what is missing as it is"
    )
