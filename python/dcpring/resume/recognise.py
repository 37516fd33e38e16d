"""Which kind of component an object is, by its type.

What could be several kinds is asked for, not guessed; the error names what an object of a trainer holds, where that
would be recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dcpring.names.first_step import has_own_contract, held, wrapped
from dcpring.names.parts import ModelParts
from dcpring.resume.components import Component
from dcpring.resume.data import ElasticLoader
from dcpring.resume.optimizers import OptimizerState, OptimizerStates
from dcpring.resume.schedules import LRSchedule, LRSchedules
from dcpring.resume.sharded import ModelState, Sharded
from dcpring.resume.whole import Elastic, PerRank
from dcpring.torchside.modules import reshard

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
        if type(value) is Sharded and isinstance(inner, list | tuple):
            return _several(name, [Sharded(one, value.strict) for one in inner], models)
        if type(value) is Sharded and isinstance(inner, nn.Module):
            return ModelState(inner, value.strict)
        if type(value) is Sharded and isinstance(inner, Optimizer):
            found = _optimizer(name, inner, models, value.strict)
            return value if found is None else found  # then its own state_dict() is what was asked for
        return value
    if isinstance(value, list | tuple):
        return _several(name, value, models)
    if isinstance(value, nn.Module):
        return ModelState(value)
    if isinstance(value, Optimizer):
        found = _optimizer(name, value, models, strict=True)
        if found is None:
            raise TypeError(
                f"component {name!r} is an optimizer, but no model among the components has its parameters; add the "
                "model, made and wrapped before the optimizer"
            )
        return found
    if isinstance(value, LRScheduler):
        return LRSchedule(value)
    if isinstance(value, torch.Generator):
        return PerRank(value)
    if isinstance(value, ElasticLoader):
        return Elastic(value)
    raise TypeError(f"component {name!r} is a {type(value).__name__}: {_cure(value)}")


def _several(name: str, values: Sequence[Any], models: Sequence[nn.Module]) -> Component:
    """Optimizers or schedulers of a model's parts as one component; the parts themselves have been joined before."""
    each = [as_component(f"{name}[{index}]", value, models) for index, value in enumerate(values)]
    if len(each) == 1:
        return each[0]
    if each and all(type(one) is OptimizerState for one in each):
        return OptimizerStates([one for one in each if isinstance(one, OptimizerState)])
    if each and all(type(one) is LRSchedule for one in each):
        return LRSchedules([one for one in each if isinstance(one, LRSchedule)])
    kinds = ", ".join(dict.fromkeys(type(one.stateful).__name__ for one in each)) or "nothing"
    raise TypeError(
        f"component {name!r} is a list of {kinds}: a list is of the parts of one model, of their optimizers, or of "
        "their LR schedulers; give what else there is a name of its own"
    )


def _recognised_in(value: Any) -> Iterable[tuple[str, Any]]:
    """What is recognised among an object's attributes, and in lists and tuples there, with their places."""
    for at, one in getattr(value, "__dict__", {}).items():
        inside = enumerate(one) if isinstance(one, list | tuple) else [("", one)]
        yield from ((f"{at}[{i}]" if i != "" else at, each) for i, each in inside if isinstance(each, _RECOGNISED))


def _cure(value: Any) -> str:
    """What to do about an object of which it cannot be told how it reshards."""
    inside = list(_recognised_in(value))
    if inside:
        at, one = inside[0]
        if sum(isinstance(other, type(one)) for _, other in inside) > 1 and at.endswith("]"):
            place = at.partition("[")[0]
            return f"it holds several {type(one).__name__}s in .{place}, which are recognised: give that list"
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


def _optimizer(name: str, optimizer: Optimizer, models: Sequence[nn.Module], strict: bool) -> OptimizerState | None:
    """None if no model has its parameters, so that nobody knows their names."""
    others = held(optimizer)
    if others and wrapped(optimizer) is optimizer and not has_own_contract(optimizer):
        at, other = others[0]
        raise TypeError(
            f"component {name!r} is a {type(optimizer).__name__}, whose state_dict() is torch's and leaves out the "
            f"optimizer that it holds ({at}, a {type(other).__name__}): make that a component of its own"
        )
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        reshard(model)
        if own <= {id(parameter) for parameter in model.parameters()}:
            return OptimizerState(optimizer, model, strict)
    return None


def with_joined_parts(value: Any) -> Any:
    """What a user gave, with the parts of a model, in a list, as one model."""
    inner = value.stateful if type(value) is Sharded else value
    if not isinstance(inner, list | tuple) or not inner or not all(isinstance(one, nn.Module) for one in inner):
        return value
    model = inner[0] if len(inner) == 1 else ModelParts(inner)
    return Sharded(model, value.strict) if type(value) is Sharded else model


def model_of(value: Any) -> nn.Module | None:
    inner = value.stateful if type(value) is Sharded else value
    return inner if isinstance(inner, nn.Module) else None
