"""What state an optimizer's first step would make, found out on copies, and what its own ``state_dict()`` gives.

Optimizers make their state in their first step. A state dict that is to be loaded into needs it before that, and DCP
takes a step with gradients of zero to get it: the parameters, counters, hooks and generators see that step. Here a
twin of the optimizer takes it, whose parameters are copies. What refers to a parameter in the optimizer's attributes
refers to the copy in the twin; an optimizer that cannot be copied so is an error, before anything has been done.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dcpring.base import random_states
from dcpring.torchside import optim
from dcpring.torchside.optim import GROUPS, PARAMS, STATE
from dcpring.torchside.state_dict import state_dict_fn
from dcpring.torchside.tensors import version

_COPIED_BYTES = 64 << 20
"""Parameters that are copied at a time, where the optimizer treats each for itself."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, types.FunctionType)


class NoFirstStep(RuntimeError):
    """An optimizer whose state cannot be made on copies of its parameters. Nothing has been changed."""


@dataclass
class FirstStep:
    """What a first step makes.

    Attributes:
        states: by parameter; of those that get one.
        options: for each group, those that the step adds to it.
    """

    states: dict[Tensor, Any] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)


# ---- what an optimizer is ----


def wrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of one that only passes on what it is asked (accelerate's, Lightning's)."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer) and value is not optimizer]
    for value in inside:
        if value.param_groups is optimizer.param_groups and value.state is optimizer.state:
            return wrapped(value)
    return optimizer


def held(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """The optimizers among an optimizer's attributes, and in lists, tuples and dicts there, with their names."""
    found: dict[int, tuple[str, Optimizer]] = {}
    for name, value in vars(optimizer).items():
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        for one in inside:
            if isinstance(one, Optimizer) and one is not optimizer:
                found.setdefault(id(one), (name, one))
    return list(found.values())


def has_own_contract(optimizer: Optimizer) -> bool:
    """Whether its class has a ``state_dict()`` of its own."""
    return type(optimizer).state_dict is not Optimizer.state_dict


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether neither it nor, where it holds others, any of those has state: its first step is yet to come."""
    others = [other for _, other in held(optimizer)]
    return not any(optimizer.state.values()) and all(map(is_fresh, others))


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group[PARAMS]


# ---- asking ----


def own_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` gives, without a step.

    A class with a ``state_dict()`` of its own may take a step in it (torchtitan's container does, as long as one of
    its optimizers has no state): then a twin is asked, whose optimizers without state are twins too.

    Raises:
        NoFirstStep: it cannot be asked on copies.
    """
    plain: Callable[[], dict[str, Any]] = state_dict_fn(optimizer, "state_dict")
    inner = wrapped(optimizer)
    if not has_own_contract(inner):
        return plain()
    if inner is not optimizer:
        return own_state_dict(inner)
    others = [other for _, other in held(optimizer)]
    if not any(map(is_fresh, others or [optimizer])):
        return plain()
    with _on_copies(optimizer, [optimizer, *others]) as copies:
        twin = _twin_of_holder(optimizer, copies) if others else _twin(optimizer, optimizer.param_groups, copies)
        return dict(twin.state_dict())


def load_own_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(state)``, also where DCP has put a function of its own in that one's place."""
    load: Callable[..., None] = state_dict_fn(optimizer, "load_state_dict")
    if isinstance(load, functools.partial):
        load.func(optimizer, state)
    else:
        load(state)


def _twin_of_holder(optimizer: Optimizer, copies: dict[int, Tensor]) -> Optimizer:
    """A twin of an optimizer that holds others, with twins of those that have no state; the rest is shared."""
    twins = {id(other): _twin(other, other.param_groups, copies) for _, other in held(optimizer) if is_fresh(other)}

    def replaced(value: Any) -> Any:
        if isinstance(value, Optimizer):
            return twins.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(replaced, value))
        if type(value) is dict:
            return {name: replaced(one) for name, one in value.items()}
        return value

    attributes = {name: replaced(value) for name, value in vars(optimizer).items()}
    groups = [{**group, PARAMS: _copies_of(group, copies)} for group in optimizer.param_groups]
    return _made(optimizer, attributes, groups)


# ---- the step ----


def first_step(
    optimizer: Optimizer,
    parameters: Iterable[Tensor] | None = None,
    keep: Callable[[dict[str, Any]], Any] = lambda state: state,
) -> FirstStep:
    """The state that the first step makes, with gradients and a rate of zero. The optimizer is not touched.

    Args:
        optimizer: any.
        parameters: only their state; default: that of all.
        keep: what to keep of a parameter's state, where it is not all wanted: copies are made, and given back, of
            64 MiB of parameters at a time.

    Raises:
        NoFirstStep: the optimizer cannot be copied, or the step fails: it wants a closure, say.
    """
    optimizer = wrapped(optimizer)
    wanted = {id(parameter) for parameter in parameters_of(optimizer) if parameters is None}
    wanted |= {id(parameter) for parameter in parameters or ()}
    made = FirstStep(options=[{} for _ in optimizer.param_groups])
    for portion in _portions(optimizer, wanted):
        groups = list(portion.values())
        with _on_copies(optimizer, [optimizer], groups) as copies:
            twin = _twin(optimizer, groups, copies)
            for parameter in parameters_of(twin):
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            for group in twin.param_groups:  # as in DCP: what is made of the parameters is made of what they are
                if "lr" in group:
                    group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
            optim.plain_step(type(twin))(twin)
            for (index, before), after in zip(portion.items(), twin.param_groups, strict=True):
                made.options[index].update({name: after[name] for name in after.keys() - before.keys()})
                for parameter in before[PARAMS]:
                    state = twin.state.get(copies[id(parameter)])
                    if state and id(parameter) in wanted:
                        made.states[parameter] = keep(state)
    return made


Portion = dict[int, dict[str, Any]]
"""Groups by their number, with some of their parameters."""


def _portions(optimizer: Optimizer, wanted: set[int]) -> Iterator[Portion]:
    """The groups, with some of the parameters that are wanted at a time.

    An optimizer that has more attributes than torch's may look at all of its parameters together, and gets them.
    """
    if not all(_is_plain(value) for name, value in vars(optimizer).items() if name not in _left_out(optimizer)):
        yield dict(enumerate(optimizer.param_groups))
        return
    portion: Portion = {}
    size = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group[PARAMS]:
            if id(parameter) not in wanted:
                continue
            if portion and size + parameter.nbytes > _COPIED_BYTES:
                yield portion
                portion, size = {}, 0
            portion.setdefault(index, {**group, PARAMS: []})[PARAMS].append(parameter)
            size += parameter.nbytes
    if portion:
        yield portion


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(name) and _is_plain(one) for name, one in value.items())
    return isinstance(value, _ATOMS)


# ---- twins ----


def _left_out(optimizer: Optimizer) -> set[str]:
    """What a twin does not take from an optimizer: state, groups, hooks, and methods that somebody has wrapped."""
    return {STATE, GROUPS, "step", "state_dict", "load_state_dict", *optim.hook_names(optimizer)}


def _made(optimizer: Optimizer, attributes: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class with these attributes, without state and hooks."""
    twin: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in attributes.items() if name not in _left_out(optimizer)}
    blank: dict[str, Any] = {name: OrderedDict() for name in optim.hook_names(optimizer)}
    vars(twin).update({**own, **blank, STATE: defaultdict(dict), GROUPS: groups})
    return twin


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]], copies: dict[int, Tensor]) -> Optimizer:
    """An optimizer like another, over copies of the parameters in ``groups``, with nothing in common with it."""
    twin = _made(optimizer, {}, [])
    own = {name: value for name, value in vars(optimizer).items() if name not in _left_out(optimizer)}
    options = [{name: value for name, value in group.items() if name != PARAMS} for group in groups]
    memo: dict[int, Any] = {id(optimizer): twin, **copies}
    _share_what_cannot_be_copied([own, options], memo)
    own, options = copy.deepcopy((own, options), memo)
    vars(twin).update(own)
    vars(twin)[GROUPS] = [
        {**option, PARAMS: _copies_of(group, copies)} for option, group in zip(options, groups, strict=True)
    ]
    return twin


def _copies_of(group: dict[str, Any], copies: dict[int, Tensor]) -> list[Tensor]:
    return [copies[id(parameter)] for parameter in group[PARAMS]]


def _share_what_cannot_be_copied(value: Any, memo: dict[int, Any]) -> None:
    """Notes for a deep copy what stands for itself: process groups and meshes. Generators get clones."""
    if isinstance(value, torch.Generator):
        memo[id(value)] = value.clone_state()
    elif isinstance(value, dist.ProcessGroup | DeviceMesh | torch.Stream):
        memo[id(value)] = value
    elif isinstance(value, dict):
        for one in value.values():
            _share_what_cannot_be_copied(one, memo)
    elif isinstance(value, list | tuple | set):
        for one in value:
            _share_what_cannot_be_copied(one, memo)


@contextlib.contextmanager
def _on_copies(
    optimizer: Optimizer, optimizers: list[Optimizer], groups: list[dict[str, Any]] | None = None
) -> Iterator[dict[int, Tensor]]:
    """Gives copies of the parameters, by the ids of those, and looks that nothing was done to the originals.

    Args:
        optimizer: for the message.
        optimizers: all of whose parameters are copied.
        groups: or only the parameters of these.
    """
    originals = [parameter for one in optimizers for group in groups or one.param_groups for parameter in group[PARAMS]]
    before = [version(parameter) for parameter in originals]
    try:
        with random_states.kept(), optim.no_global_hooks():
            yield {id(parameter): _copied(parameter) for parameter in originals}
    except Exception as error:
        raise NoFirstStep(
            f"{type(optimizer).__name__} has no state yet, and none could be made on copies of its parameters "
            f"({type(error).__name__}: {error}); do this after its first step"
        ) from error
    finally:
        if [version(parameter) for parameter in originals] != before:
            raise RuntimeError(
                f"{type(optimizer).__name__} changed its parameters when it was asked for its state: they are not "
                "what they were; load a checkpoint, or begin anew"
            )


def _copied(parameter: Tensor) -> Tensor:
    """A copy with the attributes that optimizers look at. FSDP1 keeps a module's machinery in them, which is left."""
    data = parameter.detach().clone()
    made = nn.Parameter(data, parameter.requires_grad) if isinstance(parameter, nn.Parameter) else data
    if made is data:
        made.requires_grad_(parameter.requires_grad)
    for name, value in vars(parameter).items():
        if _is_plain(value) and name not in vars(made):
            vars(made)[name] = value
    return made
