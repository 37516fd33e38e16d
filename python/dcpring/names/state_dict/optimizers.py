"""State dicts of optimizers, with parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcpring.names.first_step import (
    first_step,
    is_fresh,
    own_state_dict,
    parameters_of,
)
from dcpring.names.state_dict.request import Request
from dcpring.torchside import state_dict as stock
from dcpring.torchside.optim import GROUPS, PARAMS, STATE


def optimizer_names(request: Request, optimizer: torch.optim.Optimizer) -> list[list[list[str]]]:
    """For each parameter, numbered as in ``optimizer.state_dict()``, its slots (see ``ModelKeys``)."""
    slots = []
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group[PARAMS]):
            found = request.keys.slots.get(param)
            if found is None:
                raise RuntimeError(
                    f"parameter {index} of group {number} of {type(optimizer).__name__} (shape {list(param.shape)}) is "
                    "not in the model; make the optimizer from the parameters of this model, after wrapping it"
                )
            slots.append(found)
    return slots


def _numbered(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own state dict, with parameters by number. The optimizer is not changed.

    One that has no state is given what its first step would make, as there has to be something to load into.

    Raises:
        NoFirstStep: there is no state, and none can be made on copies of the parameters.
        RuntimeError: its class has a form of its own for the state dict.
    """
    raw = own_state_dict(optimizer)
    if not is_numbered(raw, optimizer) or raw.keys() - {STATE, GROUPS}:
        raise RuntimeError(
            f"{type(optimizer).__name__} has a state dict of its own form, with {_some_of(raw)}: call its state_dict() "
            "and load_state_dict(); a Checkpointer does"
        )
    if not is_fresh(optimizer):
        return raw
    made = first_step(optimizer)
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
    return {
        **raw,
        STATE: {numbers[parameter]: state for parameter, state in made.states.items()},
        GROUPS: [{**new, **group} for new, group in zip(made.options, raw[GROUPS], strict=True)],
    }


def is_numbered(raw: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state dict has what ``torch.optim.Optimizer`` makes, with its parameters by number."""
    if not raw.keys() >= {STATE, GROUPS} or len(raw[GROUPS]) != len(optimizer.param_groups):
        return False
    numbers = iter(range(sum(len(group[PARAMS]) for group in optimizer.param_groups)))
    pairs = zip(raw[GROUPS], optimizer.param_groups, strict=True)
    return all(group.get(PARAMS) == [next(numbers) for _ in own[PARAMS]] for group, own in pairs)


def _some_of(raw: Mapping[str, Any]) -> str:
    names = [repr(name) for name in raw]
    return ", ".join(names[:2]) + (" and so on" if len(names) > 2 else "") if names else "no keys"


def _named_by_fsdp(request: Request, optimizer: torch.optim.Optimizer, raw: dict[str, Any]) -> dict[str, Any]:
    """FSDP1 names by raw names; its own clean-up knows nothing of compiled modules inside it."""
    with request.info.fsdp_context():
        named = FSDP.optim_state_dict(
            request.model, optimizer, raw, group=stock.fsdp_group(request.model, request.info)
        )
    if not named:
        return {}
    state = named[STATE]
    return {
        STATE: dict(zip(request.keys.canonical(list(state)), state.values(), strict=True)),
        GROUPS: [{**group, PARAMS: request.keys.canonical(group[PARAMS])} for group in named[GROUPS]],
    }


def named(request: Request, optimizer: torch.optim.Optimizer, raw: dict[str, Any]) -> dict[str, Any]:
    """A state dict in which parameters are numbered, with their names."""
    if request.info.fsdp_modules:
        return _named_by_fsdp(request, optimizer, raw)
    names = [slots[0][0] for slots in optimizer_names(request, optimizer)]
    return {
        STATE: {names[key] if isinstance(key, int) else key: value for key, value in raw[STATE].items()},
        GROUPS: [{**group, PARAMS: [names[index] for index in group[PARAMS]]} for group in raw[GROUPS]],
    }


@torch.no_grad()
def get_optimizers(request: Request, optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, Any]:
    state: dict[str, Any] = {STATE: {}, GROUPS: []}
    for optimizer in optimizers:
        if found := named(request, optimizer, _numbered(optimizer)):
            state[STATE].update(found[STATE])
            state[GROUPS].extend(found[GROUPS])
    if request.info.flatten_optimizer_state_dict:
        state = stock.flatten_optim(state)
    result: dict[str, Any] = stock.maybe_full_or_cpu(state, request.info)
    return result
