"""What was saved of optimizers, taken over by those that are there: by name, in their own order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcpring.errors import KeyMismatchError
from dcpring.names.first_step import (
    NoFirstStep,
    first_step,
    is_fresh,
    load_own_state_dict,
)
from dcpring.names.state_dict.loaded import LoadedState
from dcpring.names.state_dict.optimizers import get_optimizers, optimizer_names
from dcpring.names.state_dict.request import Request, listed
from dcpring.torchside import state_dict as stock
from dcpring.torchside.optim import GROUPS, PARAM_NAMES, PARAMS, STATE

logger = logging.getLogger("dcpring")


class _Names(list[Any]):
    """A list that finds its members by hash: ``Optimizer.load_state_dict`` asks for each piece of state in turn."""

    def __init__(self, names: Iterable[Any]) -> None:
        super().__init__(names)
        self._members = frozenset(self)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return list(self)


class _OwnGroup(NamedTuple):
    """A parameter group on its way into the optimizer: ``names`` as they will be, ``sources`` as they were saved."""

    options: dict[str, Any]
    names: list[str]
    sources: list[str]


def _pick(names: list[str], loaded: LoadedState, options: Iterable[str]) -> str:
    """Which of the names of tied parameters was saved; the first when none was."""
    if len(names) == 1:
        return names[0]
    return next((name for name in names if loaded.has(name, options)), names[0])


def _expected_state(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, dict[str, Any]] | None:
    """The state that each parameter has, or the names of what it will have; None where that cannot be known."""
    if not is_fresh(optimizer):
        return optimizer.state
    try:
        return first_step(optimizer, keep=dict.fromkeys).states
    except NoFirstStep as error:
        logger.debug("what %s needs is not checked: %s", type(optimizer).__name__, error)
        return None


def _split(request: Request, optimizer: torch.optim.Optimizer, loaded: LoadedState) -> dict[str, Any]:
    """What of the loaded state is this optimizer's, in its order."""
    state: dict[str, Any] = {}
    groups: list[_OwnGroup] = []
    missing: list[str] = []
    incomplete: dict[Tensor, str] = {}
    slots = iter(optimizer_names(request, optimizer))
    expected = _expected_state(optimizer)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != PARAMS}
        groups.append(_OwnGroup(options, [], []))
        for param in group[PARAMS]:
            for names in next(slots):
                source = _pick(names, loaded, options)
                groups[-1].names.append(names[0])
                groups[-1].sources.append(source)
                if not param.requires_grad:
                    continue
                current = None if expected is None else expected.get(param) or {}
                found, absent = loaded.state(source, current)
                missing += absent
                if found is not None and (found or not current):
                    state[names[0]] = found
                    incomplete |= {param: names[0]} if absent else {}
    taken = _empty_groups(groups, loaded)
    strict = request.info.strict
    result = [_with_options(group, loaded, taken.get(index), missing, strict) for index, group in enumerate(groups)]
    if missing and strict:
        cures = f"{_cure_of_groups(missing, loaded)}to load the rest, pass StateDictOptions(strict=False)"
        raise KeyMismatchError(
            f"the optimizer's state dict lacks {len(missing)} keys that {type(optimizer).__name__} needs:\n"
            f"{listed(missing)}\n{_words_of_stock(missing)}{cures}"
        )
    if incomplete:
        own = first_step(optimizer, incomplete).states if is_fresh(optimizer) else optimizer.state
        state |= {name: {**own[param], **state[name]} for param, name in incomplete.items()}
    return {STATE: state, GROUPS: result}


def _words_of_stock(missing: list[str]) -> str:
    """What stock says of the first parameter without a state: programs look for it."""
    states = [key.removeprefix(f"{STATE}.") for key in missing if key.startswith(f"{STATE}.")]
    return f"Missing optimizer state for parameter '{states[0]}' in checkpoint. " if states else ""


def _cure_of_groups(missing: list[str], loaded: LoadedState) -> str:
    """What to do where the state of parameters is there, but they are in no group."""
    if not loaded.nested or not any(key.startswith(f"{GROUPS}.") for key in missing):
        return ""
    return (
        "if stages of a pipeline have saved it, the groups are those of one stage: give "
        "StateDictOptions(flatten_optimizer_state_dict=True) to all calls, the one before the save first; "
    )


def _empty_groups(groups: list[_OwnGroup], loaded: LoadedState) -> dict[int, int]:
    """Which saved group without parameters goes to which of the optimizer's: the first to the first, and so on."""
    empty = [index for index, group in enumerate(groups) if not group.names]
    saved = [index for index, group in enumerate(loaded.groups) if not group[PARAMS]]
    if not empty or not loaded.nested:
        return {}
    if len(empty) != len(saved):
        raise ValueError(
            "There are param groups that have zero parameters. In such a case, DSD only support exactly one param "
            f"group with zero parameters. The optimizer has {len(empty)}, the state dict {len(saved)}: which belongs "
            "to which cannot be told unless there are as many"
        )
    return dict(zip(empty, saved, strict=True))


def _with_options(
    group: _OwnGroup, loaded: LoadedState, empty: int | None, missing: list[str], strict: bool
) -> dict[str, Any]:
    """The group as it was saved: its learning rate and so on. Names of parameters stay those of this optimizer."""
    own_names = {name: value for name, value in group.options.items() if name == PARAM_NAMES}
    if loaded.nested:
        numbers = {loaded.group_of(name) for name in group.sources} - {None}
        numbers |= {empty} - {None}
        found = [loaded.groups[number] for number in sorted(n for n in numbers if n is not None)]
        options = {name: value for saved in found for name, value in saved.items() if name != PARAMS}
        _refuse_mixed(group, found, strict)
        missing += [f"{GROUPS}.{name}" for name in group.sources if loaded.group_of(name) is None]
        return {**(options or group.options), **own_names, PARAMS: group.names}
    options = dict(group.options)
    for option in [name for name in group.options if name != PARAM_NAMES and group.sources]:
        there, options[option] = loaded.option(group.sources[0], option)
        if not there:
            missing.append(f"{GROUPS}.{group.sources[0]}.{option}")
            options[option] = group.options[option]
        for name in group.sources[1:]:
            there, value = loaded.option(name, option)
            if there and not same_value(value, options[option]):
                raise RuntimeError(
                    "All the parameters in the same parameter group should have the same saved param_group value. But "
                    f"{group.sources[0]}.{option} is {options[option]} while other(s) is {value}: that of {name}. Give "
                    "the optimizer the groups that were saved"
                )
    return {**options, PARAMS: group.names}


def same_value(a: Any, b: Any) -> bool:
    """Whether two options of groups are equal; tensors by their elements."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(torch.equal(a, b))
    return bool(a == b)


def _refuse_mixed(group: _OwnGroup, saved: list[dict[str, Any]], strict: bool) -> None:
    for name in {name for one in saved[1:] for name in one} - {PARAMS, PARAM_NAMES}:
        if all(same_value(one.get(name), saved[0].get(name)) for one in saved[1:]):
            continue
        text = f"the parameters of one group ({group.names[0]}, ...) were saved in {len(saved)} with different {name}"
        if strict:
            raise RuntimeError(f"{text}; give the optimizer the groups that were saved")
        logger.warning("%s; that of the last is taken", text)


def _to_fsdp(request: Request, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    names = list(state[STATE])
    raw = {
        STATE: dict(zip(request.keys.raw(names), state[STATE].values(), strict=True)),
        GROUPS: [{**group, PARAMS: request.keys.raw(group[PARAMS])} for group in state[GROUPS]],
    }
    with request.info.fsdp_context():
        result: dict[str, Any] = FSDP.optim_state_dict_to_load(
            request.model, optimizer, raw, group=stock.fsdp_group(request.model, request.info)
        )
    return result


def _only_device(state: dict[str, Any]) -> torch.device:
    devices = {value.device for value in state.values() if isinstance(value, Tensor) and value.dim() > 0}
    if len(devices) > 1:
        raise ValueError(
            f"Device mismatch: full_state_dict=True needs an optimizer on one, not on {sorted(map(str, devices))}"
        )
    return devices.pop() if devices else torch.device("cpu")


def _spread_optimizer(request: Request, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Full tensors as this rank holds them. Stock mixes up flattened and nested names here; these are all nested."""
    plain = request.with_options(full_state_dict=False, cpu_offload=False, flatten_optimizer_state_dict=False)
    local, local_paths = stock.flatten(get_optimizers(plain, (optimizer,)))
    full, paths = stock.flatten(state)
    device = _only_device(local)
    if request.info.broadcast_from_rank0:
        stock.broadcast(full, local, device=device)
    else:
        stock.distribute(full, local, device=device)
    local |= {key: value for key, value in full.items() if key not in local}
    result: dict[str, Any] = stock.unflatten(local, {**paths, **local_paths})
    result.setdefault(STATE, {})
    for group in result[GROUPS]:
        group.setdefault(PARAMS, [])
    return result


@torch.no_grad()
def set_optimizers(request: Request, optimizers: tuple[torch.optim.Optimizer, ...], given: Mapping[str, Any]) -> None:
    info = request.info
    if not given and request.has_everything and not (info.cpu_offload and info.full_state_dict):
        raise RuntimeError(
            "The option indicates that model state_dict is required to save, or load but optim state_dict is empty. "
            f"{dict(given)}"
        )
    loaded = LoadedState(given)
    for optimizer in optimizers:
        state: dict[str, Any] = {}
        if given:
            state = dict(given) if loaded.by_number else _split(request, optimizer, loaded)
        take_over(request, optimizer, state, by_number=loaded.by_number)


def take_over(
    request: Request, optimizer: torch.optim.Optimizer, state: dict[str, Any], by_number: bool = False
) -> None:
    """Gives an optimizer the state that is its own: in the order of its groups, with parameters by name."""
    if request.info.fsdp_modules:
        state = _to_fsdp(request, optimizer, state) if state and not by_number else state
    elif request.info.full_state_dict:
        state = _spread_optimizer(request, optimizer, state)
    if state:
        state[GROUPS] = [{**group, PARAMS: _Names(group[PARAMS])} for group in state[GROUPS]]
    load_own_state_dict(optimizer, state)
