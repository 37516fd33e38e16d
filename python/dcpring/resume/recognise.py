"""Which kind of component an object is, by its type; what could be several is asked for, not guessed."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dcpring.names.first_step import has_own_contract, held, wrapped
from dcpring.resume.components import Component, Elastic, ModelState, PerRank, Sharded
from dcpring.resume.data import ElasticLoader
from dcpring.resume.optimizers import OptimizerState
from dcpring.resume.schedules import LRSchedule

_RECOGNISED = (nn.Module, Optimizer, LRScheduler, ElasticLoader)


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
        inner = value.stateful
        if type(value) is Sharded and isinstance(inner, nn.Module):
            return ModelState(inner, value.strict)
        if type(value) is Sharded and isinstance(inner, Optimizer):
            return _optimizer(name, inner, models, value.strict)
        return value
    if isinstance(value, nn.Module):
        return ModelState(value)
    if isinstance(value, Optimizer):
        return _optimizer(name, value, models, strict=True)
    if isinstance(value, LRScheduler):
        return LRSchedule(value)
    if isinstance(value, torch.Generator):
        return PerRank(value)
    if isinstance(value, ElasticLoader):
        return Elastic(value)
    raise TypeError(f"component {name!r} is a {type(value).__name__}: {_cure(value)}")


def _cure(value: Any) -> str:
    """What to do about an object of which it cannot be told how it reshards."""
    inside = [(at, one) for at, one in getattr(value, "__dict__", {}).items() if isinstance(one, _RECOGNISED)]
    if inside:
        at, one = inside[0]
        return f"it holds a {type(one).__name__} as .{at}, which is recognised: give that"
    has_state = isinstance(value, Stateful | MutableMapping)
    if hasattr(value, "dataset"):
        own = ", or PerRank(...) where each rank's position is its own" if has_state else ""
        return f"make the loader with sampler=ElasticSampler(...), and give ElasticLoader(loader){own}"
    if has_state:
        return (
            "say how it reshards: Sharded(...) if its tensors are spread over ranks, Replicated(...) if it is the same "
            "on all, PerRank(...) if it belongs to a rank, Elastic(...) if it is global progress"
        )
    return "a component has state_dict() and load_state_dict(), or is a dict"


def _optimizer(name: str, optimizer: Optimizer, models: Sequence[nn.Module], strict: bool) -> OptimizerState:
    others = held(optimizer)
    if others and wrapped(optimizer) is optimizer and not has_own_contract(optimizer):
        at, other = others[0]
        raise TypeError(
            f"component {name!r} is a {type(optimizer).__name__}, whose state_dict() is torch's and leaves out the "
            f"optimizer that it holds ({at}, a {type(other).__name__}): make that a component of its own"
        )
    return OptimizerState(optimizer, _owner_of(name, optimizer, models), strict)


def model_of(value: Any) -> nn.Module | None:
    inner = value.stateful if type(value) is Sharded else value
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
