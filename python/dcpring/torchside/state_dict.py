"""Private names behind ``torch.distributed.checkpoint.state_dict``, which ``dcpring.state_dict`` mirrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from dcpring.torchside.versions import function, optional, required

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_UTILS = "torch.distributed._state_dict_utils"

StateDictInfo = required(_STATE_DICT, "_StateDictInfo")
"""StateDictOptions with what stock's helpers want to know besides."""

IncompatibleKeys = required("torch.nn.modules.module", "_IncompatibleKeys")
"""What ``load_state_dict`` returns."""

state_dict_fn: Callable[[Any, str], Callable[..., Any]] = function(_STATE_DICT, "_state_dict_fn")
maybe_full_or_cpu: Callable[[dict[str, Any], Any], dict[str, Any]] = function(
    _STATE_DICT, "_maybe_full_or_cpu_state_dict"
)
_flatten_optim: Callable[[dict[str, Any]], dict[str, Any]] = function(_STATE_DICT, "_flatten_optim_state_dict")

broadcast: Callable[..., None] = function(_UTILS, "_broadcast_state_dict")
distribute: Callable[..., None] = function(_UTILS, "_distribute_state_dict")
flatten: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]] = function(_UTILS, "_flatten_state_dict")
unflatten: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = function(_UTILS, "_unflatten_state_dict")


def flatten_optim(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as one level. Nested state (Shampoo's) is opened first: stock does so since torch 2.10."""
    opened = {name: dict(_leaves(parts)) for name, parts in state["state"].items()}
    return _flatten_optim({**state, "state": opened})


def _leaves(parts: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in parts.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_stocks_fsdp_group = optional(_STATE_DICT, "_get_fsdp_process_group")
_HYBRID = {kind for kind in ShardingStrategy if "HYBRID" in kind.name}


def fsdp_group(model: nn.Module, info: Any) -> dist.ProcessGroup | None:
    """The ranks that an FSDP1 model's optimizer state is spread over; None for all. Stock has this since torch 2.13."""
    if _stocks_fsdp_group is not None:
        group: dist.ProcessGroup | None = _stocks_fsdp_group(model, info)
        return group
    modules = [model] if isinstance(model, FullyShardedDataParallel) else info.fsdp_modules
    if not modules or modules[0].sharding_strategy in _HYBRID:
        return None
    found: Any = modules[0].process_group
    return None if isinstance(found, tuple) else found
