"""Which kind of component an object is, by its type; what could be several is asked for, not guessed."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dcpring.components import Component, Elastic, ModelState, OptimizerState, PerRank, Sharded
from dcpring.data import ElasticLoader
from dcpring.schedules import LRSchedule


def as_component(name: str, value: Any, models: Sequence[nn.Module]) -> Component:
    """The component that an object is by its type. What could be of several kinds is asked for.

    Args:
        name: for the message.
        value: what the user gave.
        models: those among the components, one of which owns an optimizer's parameters.

    Raises:
        TypeError: the kind cannot be told.
    """
    if isinstance(value, Component):
        inner = value.object
        if type(value) is Sharded and isinstance(inner, nn.Module):
            return ModelState(inner, value.strict)
        if type(value) is Sharded and isinstance(inner, Optimizer):
            return OptimizerState(inner, _owner_of(name, inner, models), value.strict)
        return value
    if isinstance(value, nn.Module):
        return ModelState(value)
    if isinstance(value, Optimizer):
        return OptimizerState(value, _owner_of(name, value, models))
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return LRSchedule(value)
    if isinstance(value, torch.Generator):
        return PerRank(value)
    if isinstance(value, ElasticLoader):
        return Elastic(value)
    has_state = isinstance(value, Stateful | MutableMapping)
    cure = (
        "say how it reshards: Sharded(...) if its tensors are spread over ranks, Replicated(...) if it is the same on "
        "all, PerRank(...) if it belongs to a rank, Elastic(...) if it is global progress"
        if has_state
        else "a component has state_dict() and load_state_dict(), or is a dict"
    )
    raise TypeError(f"component {name!r} is a {type(value).__name__}: {cure}")


def model_of(value: Any) -> nn.Module | None:
    inner = value.object if type(value) is Sharded else value
    return inner if isinstance(inner, nn.Module) else None


def _owner_of(name: str, optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if own <= {id(parameter) for parameter in model.parameters()}:
            return model
    raise TypeError(
        f"component {name!r} is an optimizer, but no model among the components has its parameters; add the model, "
        "made and wrapped before the optimizer"
    )
