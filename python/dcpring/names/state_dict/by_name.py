"""Optimizer states by name, as a ``Checkpointer`` saves and loads them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcpring.names.first_step import load_own_state_dict
from dcpring.names.state_dict.optimizers import named, optimizer_names
from dcpring.names.state_dict.request import Request, requested
from dcpring.names.state_dict.set_optimizers import take_over
from dcpring.torchside.optim import GROUPS, PARAMS, STATE


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP1 has put parameters of the model together, and keeps parts of that."""
    return bool(FSDP.fsdp_modules(model))


def named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[Tensor, list[str]]]]:
    """For each group of an optimizer its parameters, each with its names; a flat one (FSDP1) for each that is in it."""
    request = Request(model, None)
    slots = iter(optimizer_names(request, optimizer))
    return [[(param, names) for param in group[PARAMS] for names in next(slots)] for group in optimizer.param_groups]


@torch.no_grad()
def named_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbered: dict[str, Any]
) -> dict[str, Any]:
    """A state dict in which parameters are numbered, with their names."""
    with requested(model, None) as request:
        return named(request, optimizer, numbered)


@torch.no_grad()
def load_named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives an optimizer a complete state, by names, with its groups in its own order, as its own state dict has it."""
    with requested(model, None) as request:
        if request.info.fsdp_modules and state[STATE]:
            take_over(request, optimizer, state)
            return
        numbers = {slots[0][0]: number for number, slots in enumerate(optimizer_names(request, optimizer))}
        by_number = {numbers.get(name, name): value for name, value in state[STATE].items()}
        count = itertools.count()
        groups = [
            {**group, PARAMS: [next(count) for _ in own[PARAMS]]}
            for group, own in zip(state[GROUPS], optimizer.param_groups, strict=True)
        ]
        load_own_state_dict(optimizer, {**state, STATE: by_number, GROUPS: groups})
