"""Private names of ``torch.distributed.checkpoint``: items and chunks, names of nested keys, stored places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from dcpring.torchside.versions import function, optional, required

_DCP = "torch.distributed.checkpoint"

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
else:
    StorageInfo = required(f"{_DCP}.filesystem", "_StorageInfo")
"""Where an item is stored; checkpoints of stock hold it, so its name and fields are part of the format."""

MEMORY_FORMATS = required(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING")
"""How the pickle of TensorProperties names memory formats: an enumeration."""

create_write_items: Callable[[str, Any], list[WriteItem]] = function(f"{_DCP}.planner_helpers", "_create_write_items")
"""What stock writes of a value on this rank: its name, the value."""

create_chunk_list: Callable[[Any], list[ChunkStorageMetadata]] = function(
    f"{_DCP}.planner_helpers", "_create_chunk_list"
)
"""What stock fills of a value on this rank."""

init_state_dict: Callable[[dict[str, Any]], Any] = function(f"{_DCP}.planner_helpers", "_init_state_dict")
"""Gives memory to the meta tensors of a state dict, in place."""

flatten_sharded_tensors: Callable[[dict[str, Any]], dict[str, Any]] = function(
    f"{_DCP}._sharded_tensor_utils", "_flatten_sharded_tensors"
)
"""Opens ShardedTensors of ShardedTensors."""

flatten_state_dict: Callable[[Any], tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]] = function(
    f"{_DCP}._nested_dict", "flatten_state_dict"
)
"""A nested state dict as one level, and the path that each name stands for."""

set_element: Callable[[Any, tuple[str | int, ...], Any], None] = function(f"{_DCP}._traverse", "set_element")
"""Sets what a path stands for in a nested state dict."""

_traverse_as_2_3 = optional(f"{_DCP}._traverse", "traverse_state_dict_v_2_3")


def names_as_2_3(state_dict: Any) -> set[str]:
    """The names that torch 2.3 would have given: it flattened in another way. Empty where this torch has forgotten."""
    names: set[str] = set()
    if _traverse_as_2_3 is not None:
        _traverse_as_2_3(state_dict, lambda path, _: names.add(".".join(map(str, path))))
    return names


def plans_for_itself(value: Any) -> bool:
    """Whether a value says by itself what is written of it; a tensor that does is not what it looks like."""
    return hasattr(value, "__create_write_items__")


def keep_plans_apart(planner: DefaultSavePlanner, key: str) -> None:
    """Stock keeps plans by the planner's class, so that two planners would get each other's: keeps them by ``key``."""
    planner._cached_plans_key = key


def attributes_of(info: StorageInfo) -> Mapping[str, Any]:
    """The fields of a StorageInfo, and what else it holds. A field that is None is left out when it is pickled."""
    return vars(info)
