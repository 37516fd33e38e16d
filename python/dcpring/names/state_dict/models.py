"""A model's state dict, made and loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dcpring.errors import KeyMismatchError
from dcpring.names.diff import describe_names
from dcpring.names.state_dict.request import Request
from dcpring.names.wrapping import ModelKeys, cleared_names, plain_tensor
from dcpring.torchside import state_dict as stock
from dcpring.torchside.groups import device_of
from dcpring.torchside.modules import copy_metadata
from dcpring.torchside.state_dict import IncompatibleKeys


@torch.no_grad()
def get_model(request: Request) -> dict[str, Any]:
    info = request.info
    with info.fsdp_context(), cleared_names(request.keys.view.cleared):
        raw = stock.state_dict_fn(request.model, "state_dict")()
    names = request.keys.canonical(list(raw))
    state: dict[str, Any] = OrderedDict(zip(names, map(plain_tensor, raw.values()), strict=True))
    if info.ignore_frozen_params:
        for name in _frozen(request.keys):
            state.pop(name, None)
    result: dict[str, Any] = stock.maybe_full_or_cpu(state, info)
    if isinstance(result, OrderedDict):
        copy_metadata(raw, result)
    return result


def _frozen(keys: ModelKeys) -> Iterator[str]:
    for tensor, slots in keys.slots.items():
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            yield from (name for slot in slots for name in slot)


def _accept_names(request: Request, state: dict[str, Any]) -> dict[str, Any]:
    """Gives raw names (stock keeps some) their canonical ones, and tied tensors the value that one of them has."""
    expected = set(request.keys.names)
    strange = [name for name in state if name not in expected]
    renamed = dict(zip(strange, request.keys.canonical(strange), strict=True))
    taken = {name: renamed.get(name, name) for name in state}
    accepted = {name if name not in state else old: state[old] for old, name in taken.items()}
    for slots in request.keys.slots.values():
        for names in slots:
            present = [name for name in names if name in accepted]
            if present and len(present) < len(names):
                accepted |= {name: accepted[present[-1]] for name in names if name not in accepted}
    return accepted


def _local_targets(request: Request) -> dict[str, Any]:
    """What full tensors are to be cut to on this rank, by canonical name."""
    if request.info.fsdp_modules:  # FSDP1 cuts them itself
        return {name: entry.tensor for entry, name in zip(request.keys.entries, request.keys.names, strict=True)}
    with cleared_names(request.keys.view.cleared):
        raw = stock.state_dict_fn(request.model, "state_dict")()
    return dict(zip(request.keys.canonical(list(raw)), raw.values(), strict=True))


def _spread(request: Request, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The tensors of a full state dict as this rank holds them, and whether they replace those of a meta model."""
    info = request.info
    local = _local_targets(request)
    devices = {value.device for value in local.values() if isinstance(value, Tensor) and value.dim() > 0}
    assign = torch.device("meta") in devices
    devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise ValueError(
            f"Multiple devices found: full_state_dict=True needs a model on one, not on {sorted(map(str, devices))}"
        )
    device = devices.pop() if devices else device_of()
    if info.broadcast_from_rank0:
        stock.broadcast(state, local, device=device, strict=info.strict, cpu_offload=info.cpu_offload)
    else:
        stock.distribute(state, local, device=device)
    return {**state, **local} if request.has_everything else local, assign


def check_not_empty(request: Request, state: Mapping[str, Any]) -> None:
    info = request.info
    may_be_empty = (
        info.ignore_frozen_params
        or (info.cpu_offload and info.full_state_dict)
        or not info.strict
        or info.broadcast_from_rank0
        or not request.keys.names
    )
    if not state and not may_be_empty:
        raise RuntimeError(
            "The option indicates that model state_dict is required to save or load, but model state_dict is empty. To "
            "save or load nothing, pass StateDictOptions(strict=False)"
        )


@torch.no_grad()
def set_model(request: Request, given: Mapping[Any, Any]) -> IncompatibleKeys:
    info = request.info
    if any(isinstance(name, nn.Module) for name in given):
        raise TypeError("a dict by submodules is not taken; put the names of the submodules in front of the keys")
    state = dict(given)
    if not state and not info.broadcast_from_rank0:
        return IncompatibleKeys([], [])
    state = _accept_names(request, state)
    assign = False
    if info.full_state_dict:
        state, assign = _spread(request, state)
    raw: dict[str, Any] = OrderedDict(zip(request.keys.raw(list(state)), state.values(), strict=True))
    copy_metadata(given, raw)
    with info.fsdp_context(), cleared_names(request.keys.view.cleared):
        result = stock.state_dict_fn(request.model, "load_state_dict")(state_dict=raw, strict=False, assign=assign)
    optional = set(_frozen(request.keys)) if info.ignore_frozen_params else set()
    missing = [name for name in _names_of_missing(request.keys, result.missing_keys) if name not in optional]
    unexpected = request.keys.canonical(result.unexpected_keys)
    if info.strict and (missing or unexpected):
        raise _mismatch(missing, unexpected)
    return IncompatibleKeys(missing, unexpected)


def _names_of_missing(keys: ModelKeys, missing: list[str]) -> list[str]:
    """Modules report what they miss by its path, whatever their hooks have made of the names before."""
    by_path = {entry.path: name for entry, name in zip(keys.entries, keys.names, strict=True)}
    others = [name for name in missing if name not in by_path]
    by_path.update(zip(others, keys.canonical(others), strict=True))
    return [by_path[name] for name in missing]


def _mismatch(missing: list[str], unexpected: list[str]) -> KeyMismatchError:
    words = [
        "{} key(s) in state_dict: {}.".format(what, ", ".join(map('"{}"'.format, names)))
        for what, names in (("Missing", missing), ("Unexpected", unexpected))
        if names
    ]
    described = describe_names(missing, unexpected)
    return KeyMismatchError("\n".join(["the state dict does not fit the model:", described, *words]))
