"""Mirrors of ``torch.distributed.checkpoint.state_dict``, with names that do not depend on how a model is wrapped.

The signatures, the options and what comes out are stock's; so is most of the work. What differs:

- Names come from the types of the modules (see ``wrapping``), so every nesting of every wrapper gives the same ones.
- The order of keys is the model's, inputs are never changed, errors list everything that is wrong.
- Tied tensors load from any of their names. Optimizer state loads in time linear in the number of parameters.
- No optimizer takes a step (see ``first_step``).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from dcpring.base.collector import collection_paused
from dcpring.errors import KeyMismatchError
from dcpring.names.diff import describe_names
from dcpring.names.first_step import (
    NoFirstStep,
    first_step,
    is_fresh,
    load_own_state_dict,
    own_state_dict,
    parameters_of,
)
from dcpring.names.wrapping import ModelKeys, cleared_names, model_keys, plain_tensor, raw_module_names
from dcpring.torchside import state_dict as stock
from dcpring.torchside.groups import device_of
from dcpring.torchside.modules import copy_metadata
from dcpring.torchside.state_dict import IncompatibleKeys

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

logger = logging.getLogger("dcpring")

_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_STATE, _GROUPS, _PARAMS, _PARAM_NAMES = "state", "param_groups", "params", "param_names"


class _Request:
    """One call: the model, its names, and the options, as stock's helpers want them (``info``)."""

    def __init__(self, model: nn.Module, options: StateDictOptions | None) -> None:
        options = options or StateDictOptions()
        if options.broadcast_from_rank0 and not options.full_state_dict:
            raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True.")
        self.model = model
        self.keys = model_keys(model, options.dsd_fqn_modifiers)
        fsdp_modules: list[nn.Module] = list(FSDP.fsdp_modules(model))
        self.info = stock.StateDictInfo(**asdict(options), fsdp_modules=fsdp_modules)
        if fsdp_modules:
            self.info.fsdp_context = functools.partial(_fsdp_state_dict_type, model, options)

    def with_options(self, **changes: Any) -> _Request:
        other = object.__new__(_Request)
        other.model, other.keys, other.info = self.model, self.keys, replace(self.info, **changes)
        return other

    @property
    def has_everything(self) -> bool:
        """Whether this rank's dicts are complete: with broadcast_from_rank0 only those of rank 0 are."""
        return not self.info.broadcast_from_rank0 or dist.get_rank() == 0


@contextlib.contextmanager
def _request(model: nn.Module, options: StateDictOptions | None) -> Iterator[_Request]:
    """A call, around all that is done for it: names are many objects, for which garbage is not collected in between.

    Where tensors are gathered or sent, or copied to the host, that is waited for, and the collector is left alone.
    """
    with collection_paused():
        request = _Request(model, options)
        info = request.info
        waits = info.full_state_dict or info.broadcast_from_rank0 or info.cpu_offload or info.fsdp_modules
        if not waits:
            yield request
    if waits:
        yield request


@contextlib.contextmanager
def _fsdp_state_dict_type(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """What stock does for FSDP1, whose ``state_dict()`` depends on a mode of the model."""
    offload = options.cpu_offload
    if options.full_state_dict:
        kind = StateDictType.FULL_STATE_DICT
        config: Any = FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload)
        optim_config: Any = FullOptimStateDictConfig(
            offload_to_cpu=offload, rank0_only=offload or options.broadcast_from_rank0
        )
    else:
        kind = StateDictType.SHARDED_STATE_DICT
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        optim_config = ShardedOptimStateDictConfig(offload_to_cpu=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FSDP.state_dict_type(model, kind, config, optim_config):
            yield


def _as_tuple(optimizers: _Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    found = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    if not found:
        raise RuntimeError(
            "Optimizers are not passed in but optim_only is set to True. Pass those whose state is meant, one at least"
        )
    return found


def _listed(keys: Iterable[str]) -> str:
    return "\n".join(f"  {key}" for key in keys)


# ---- models ----


@torch.no_grad()
def _get_model(request: _Request, submodules: set[nn.Module] | None) -> dict[str, Any]:
    info = request.info
    with info.fsdp_context(), cleared_names(request.keys.view.cleared):
        raw = stock.state_dict_fn(request.model, "state_dict")()
    names = request.keys.canonical(list(raw))
    state: dict[str, Any] = OrderedDict(zip(names, map(plain_tensor, raw.values()), strict=True))
    if submodules:
        state = _only_submodules(request, state, submodules)
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


def _submodule_prefixes(request: _Request, submodules: Iterable[nn.Module]) -> dict[nn.Module, list[str]]:
    """The canonical prefixes of modules, which may be at several places."""
    wanted = set(submodules)
    found: dict[nn.Module, list[str]] = {module: [] for module in wanted}
    for raw, module in raw_module_names(request.model, request.keys.view):
        if module in wanted:
            found[module].append(request.keys.prefix(raw))
    return found


def _only_submodules(request: _Request, state: dict[str, Any], submodules: set[nn.Module]) -> dict[str, Any]:
    warnings.warn(
        "submodules= is deprecated, as in stock DCP; filter the state dict by its keys instead",
        FutureWarning,
        stacklevel=4,
    )
    prefixes = sorted({prefix for found in _submodule_prefixes(request, submodules).values() for prefix in found})
    kept: dict[str, Any] = {}
    for name, value in state.items():
        for prefix in prefixes:
            if name.startswith(prefix):
                kept[name if request.info.keep_submodule_prefixes else name.removeprefix(prefix)] = value
    return kept


def _flat_model_dict(request: _Request, state: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of what was given, with the deprecated form (a dict by submodule) made flat."""
    if not state or not isinstance(next(iter(state)), nn.Module):
        return dict(state)
    warnings.warn(
        "a dict by submodules is deprecated, as in stock DCP; put the prefixes into the keys",
        FutureWarning,
        stacklevel=4,
    )
    prefixes = _submodule_prefixes(request, state)
    return {
        prefix + name: value
        for module, inner in state.items()
        for prefix in prefixes[module]
        for name, value in inner.items()
    }


def _accept_names(request: _Request, state: dict[str, Any]) -> dict[str, Any]:
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


def _local_targets(request: _Request) -> dict[str, Any]:
    """What full tensors are to be cut to on this rank, by canonical name."""
    if request.info.fsdp_modules:  # FSDP1 cuts them itself
        return {name: entry.tensor for entry, name in zip(request.keys.entries, request.keys.names, strict=True)}
    with cleared_names(request.keys.view.cleared):
        raw = stock.state_dict_fn(request.model, "state_dict")()
    return dict(zip(request.keys.canonical(list(raw)), raw.values(), strict=True))


def _spread(request: _Request, state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
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


def _check_not_empty(request: _Request, state: Mapping[str, Any]) -> None:
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
def _set_model(request: _Request, given: Mapping[Any, Any]) -> IncompatibleKeys:
    info = request.info
    state = _flat_model_dict(request, given)
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


# ---- optimizers: saving ----


def _optimizer_names(request: _Request, optimizer: torch.optim.Optimizer) -> list[list[list[str]]]:
    """For each parameter, numbered as in ``optimizer.state_dict()``, its slots (see ``ModelKeys``)."""
    slots = []
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group[_PARAMS]):
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
    if not is_numbered(raw, optimizer) or raw.keys() - {_STATE, _GROUPS}:
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
        _STATE: {numbers[parameter]: state for parameter, state in made.states.items()},
        _GROUPS: [{**new, **group} for new, group in zip(made.options, raw[_GROUPS], strict=True)],
    }


def is_numbered(raw: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state dict has what ``torch.optim.Optimizer`` makes, with its parameters by number."""
    if not raw.keys() >= {_STATE, _GROUPS} or len(raw[_GROUPS]) != len(optimizer.param_groups):
        return False
    numbers = iter(range(sum(len(group[_PARAMS]) for group in optimizer.param_groups)))
    pairs = zip(raw[_GROUPS], optimizer.param_groups, strict=True)
    return all(group.get(_PARAMS) == [next(numbers) for _ in own[_PARAMS]] for group, own in pairs)


def _some_of(raw: Mapping[str, Any]) -> str:
    names = [repr(name) for name in raw]
    return ", ".join(names[:2]) + (" and so on" if len(names) > 2 else "") if names else "no keys"


def _named_by_fsdp(request: _Request, optimizer: torch.optim.Optimizer, raw: dict[str, Any]) -> dict[str, Any]:
    """FSDP1 names by raw names; its own clean-up knows nothing of compiled modules inside it."""
    with request.info.fsdp_context():
        named = FSDP.optim_state_dict(
            request.model, optimizer, raw, group=stock.fsdp_group(request.model, request.info)
        )
    if not named:
        return {}
    state = named[_STATE]
    return {
        _STATE: dict(zip(request.keys.canonical(list(state)), state.values(), strict=True)),
        _GROUPS: [{**group, _PARAMS: request.keys.canonical(group[_PARAMS])} for group in named[_GROUPS]],
    }


def _named(request: _Request, optimizer: torch.optim.Optimizer, raw: dict[str, Any]) -> dict[str, Any]:
    names = [slots[0][0] for slots in _optimizer_names(request, optimizer)]
    return {
        _STATE: {names[key] if isinstance(key, int) else key: value for key, value in raw[_STATE].items()},
        _GROUPS: [{**group, _PARAMS: [names[index] for index in group[_PARAMS]]} for group in raw[_GROUPS]],
    }


@torch.no_grad()
def _get_optimizers(request: _Request, optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, Any]:
    state: dict[str, Any] = {_STATE: {}, _GROUPS: []}
    for optimizer in optimizers:
        raw = _numbered(optimizer)
        named = _named_by_fsdp if request.info.fsdp_modules else _named
        if found := named(request, optimizer, raw):
            state[_STATE].update(found[_STATE])
            state[_GROUPS].extend(found[_GROUPS])
    if request.info.flatten_optimizer_state_dict:
        state = stock.flatten_optim(state)
    result: dict[str, Any] = stock.maybe_full_or_cpu(state, request.info)
    return result


# ---- optimizers: loading ----


class _Loaded:
    """An optimizer state dict that was given, nested or flattened, with a lookup for each thing that is in it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.nested = _STATE in given
        self.groups: list[dict[str, Any]] = list(given.get(_GROUPS, [])) if self.nested else []
        self._group_of = {name: index for index, group in enumerate(self.groups) for name in group[_PARAMS]}
        self._sorted: list[str] | None = None

    @property
    def by_number(self) -> bool:
        """Whether parameters are numbered, as in ``optimizer.state_dict()``: nothing to rename then."""
        if not self.nested:
            return False
        names = [*self._given[_STATE], *(name for group in self.groups for name in group[_PARAMS])]
        return bool(names) and all(isinstance(name, int) for name in names)

    def group_of(self, name: str) -> int | None:
        return self._group_of.get(name)

    def has(self, name: str, options: Iterable[str]) -> bool:
        """Whether the parameter is in there by this name."""
        if self.nested:
            return name in self._group_of or name in self._given[_STATE]
        return any(f"{_GROUPS}.{name}.{option}" in self._given for option in options)

    def option(self, name: str, option: str) -> tuple[bool, Any]:
        key = f"{_GROUPS}.{name}.{option}"
        return key in self._given, self._given.get(key)

    def state(self, name: str, parts: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, list[str]]:
        """The state of a parameter, None when there is none, and the keys that are missing of it.

        Args:
            name: the parameter's.
            parts: what its state should have; None where that is not known.
        """
        if self.nested:
            found = self._given[_STATE].get(name)
            if found is None:
                return None, [f"{_STATE}.{name}"] if parts else []
            return found, [f"{_STATE}.{name}.{part}" for part in parts or () if part not in found]
        if parts is None:
            return self._below(f"{_STATE}.{name}") or None, []
        state: dict[str, Any] = {}
        missing = []
        for part in parts:
            key = f"{_STATE}.{name}.{part}"
            if key in self._given:
                state[part] = self._given[key]
            elif nested := self._below(key):
                state[part] = nested
            else:
                missing.append(key)
        return state, missing

    def _below(self, key: str) -> dict[str, Any]:
        """The nested dict (Shampoo's, say) that was flattened under a key."""
        if self._sorted is None:
            self._sorted = sorted(self._given)
        prefix = key + "."
        found: dict[str, Any] = {}
        for index in range(bisect.bisect_left(self._sorted, prefix), len(self._sorted)):
            if not self._sorted[index].startswith(prefix):
                break
            *path, last = self._sorted[index].removeprefix(prefix).split(".")
            inner = found
            for step in path:
                inner = inner.setdefault(step, {})
            inner[last] = self._given[self._sorted[index]]
        return found


class _Names(list[Any]):
    """A list that finds its members by hash: ``Optimizer.load_state_dict`` asks for each piece of state in turn."""

    def __init__(self, names: Iterable[Any]) -> None:
        super().__init__(names)
        self._members = frozenset(self)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return list(self)


class _Group(NamedTuple):
    """A parameter group on its way into the optimizer: ``names`` as they will be, ``sources`` as they were saved."""

    options: dict[str, Any]
    names: list[str]
    sources: list[str]


def _pick(names: list[str], loaded: _Loaded, options: Iterable[str]) -> str:
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


def _split(request: _Request, optimizer: torch.optim.Optimizer, loaded: _Loaded) -> dict[str, Any]:
    """What of the loaded state is this optimizer's, in its order."""
    state: dict[str, Any] = {}
    groups: list[_Group] = []
    missing: list[str] = []
    incomplete: dict[Tensor, str] = {}
    slots = iter(_optimizer_names(request, optimizer))
    expected = _expected_state(optimizer)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != _PARAMS}
        groups.append(_Group(options, [], []))
        for param in group[_PARAMS]:
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
            f"{_listed(missing)}\n{_words_of_stock(missing)}{cures}"
        )
    if incomplete:
        own = first_step(optimizer, incomplete).states if is_fresh(optimizer) else optimizer.state
        state |= {name: {**own[param], **state[name]} for param, name in incomplete.items()}
    return {_STATE: state, _GROUPS: result}


def _words_of_stock(missing: list[str]) -> str:
    """What stock says of the first parameter without a state: programs look for it."""
    states = [key.removeprefix(f"{_STATE}.") for key in missing if key.startswith(f"{_STATE}.")]
    return f"Missing optimizer state for parameter '{states[0]}' in checkpoint. " if states else ""


def _cure_of_groups(missing: list[str], loaded: _Loaded) -> str:
    """What to do where the state of parameters is there, but they are in no group."""
    if not loaded.nested or not any(key.startswith(f"{_GROUPS}.") for key in missing):
        return ""
    return (
        "if stages of a pipeline have saved it, the groups are those of one stage: give "
        "StateDictOptions(flatten_optimizer_state_dict=True) to all calls, the one before the save first; "
    )


def _empty_groups(groups: list[_Group], loaded: _Loaded) -> dict[int, int]:
    """Which saved group without parameters goes to which of the optimizer's: the first to the first, and so on."""
    empty = [index for index, group in enumerate(groups) if not group.names]
    saved = [index for index, group in enumerate(loaded.groups) if not group[_PARAMS]]
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
    group: _Group, loaded: _Loaded, empty: int | None, missing: list[str], strict: bool
) -> dict[str, Any]:
    """The group as it was saved: its learning rate and so on. Names of parameters stay those of this optimizer."""
    own_names = {name: value for name, value in group.options.items() if name == _PARAM_NAMES}
    if loaded.nested:
        numbers = {loaded.group_of(name) for name in group.sources} - {None}
        numbers |= {empty} - {None}
        found = [loaded.groups[number] for number in sorted(n for n in numbers if n is not None)]
        options = {name: value for saved in found for name, value in saved.items() if name != _PARAMS}
        _refuse_mixed(group, found, strict)
        missing += [f"{_GROUPS}.{name}" for name in group.sources if loaded.group_of(name) is None]
        return {**(options or group.options), **own_names, _PARAMS: group.names}
    options = dict(group.options)
    for option in [name for name in group.options if name != _PARAM_NAMES and group.sources]:
        there, options[option] = loaded.option(group.sources[0], option)
        if not there:
            missing.append(f"{_GROUPS}.{group.sources[0]}.{option}")
            options[option] = group.options[option]
        for name in group.sources[1:]:
            there, value = loaded.option(name, option)
            if there and not same_value(value, options[option]):
                raise RuntimeError(
                    "All the parameters in the same parameter group should have the same saved param_group value. But "
                    f"{group.sources[0]}.{option} is {options[option]} while other(s) is {value}: that of {name}. Give "
                    "the optimizer the groups that were saved"
                )
    return {**options, _PARAMS: group.names}


def same_value(a: Any, b: Any) -> bool:
    """Whether two options of groups are equal; tensors by their elements."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(torch.equal(a, b))
    return bool(a == b)


def _refuse_mixed(group: _Group, saved: list[dict[str, Any]], strict: bool) -> None:
    for name in {name for one in saved[1:] for name in one} - {_PARAMS, _PARAM_NAMES}:
        if all(same_value(one.get(name), saved[0].get(name)) for one in saved[1:]):
            continue
        text = f"the parameters of one group ({group.names[0]}, ...) were saved in {len(saved)} with different {name}"
        if strict:
            raise RuntimeError(f"{text}; give the optimizer the groups that were saved")
        logger.warning("%s; that of the last is taken", text)


def _to_fsdp(request: _Request, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    names = list(state[_STATE])
    raw = {
        _STATE: dict(zip(request.keys.raw(names), state[_STATE].values(), strict=True)),
        _GROUPS: [{**group, _PARAMS: request.keys.raw(group[_PARAMS])} for group in state[_GROUPS]],
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


def _spread_optimizer(request: _Request, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Full tensors as this rank holds them. Stock mixes up flattened and nested names here; these are all nested."""
    plain = request.with_options(full_state_dict=False, cpu_offload=False, flatten_optimizer_state_dict=False)
    local, local_paths = stock.flatten(_get_optimizers(plain, (optimizer,)))
    full, paths = stock.flatten(state)
    device = _only_device(local)
    if request.info.broadcast_from_rank0:
        stock.broadcast(full, local, device=device)
    else:
        stock.distribute(full, local, device=device)
    local |= {key: value for key, value in full.items() if key not in local}
    result: dict[str, Any] = stock.unflatten(local, {**paths, **local_paths})
    result.setdefault(_STATE, {})
    for group in result[_GROUPS]:
        group.setdefault(_PARAMS, [])
    return result


@torch.no_grad()
def _set_optimizers(request: _Request, optimizers: tuple[torch.optim.Optimizer, ...], given: Mapping[str, Any]) -> None:
    info = request.info
    if not given and request.has_everything and not (info.cpu_offload and info.full_state_dict):
        raise RuntimeError(
            "The option indicates that model state_dict is required to save, or load but optim state_dict is empty. "
            f"{dict(given)}"
        )
    loaded = _Loaded(given)
    for optimizer in optimizers:
        state: dict[str, Any] = {}
        if given:
            state = dict(given) if loaded.by_number else _split(request, optimizer, loaded)
        _take_over(request, optimizer, state, by_number=loaded.by_number)


def _take_over(
    request: _Request, optimizer: torch.optim.Optimizer, state: dict[str, Any], by_number: bool = False
) -> None:
    """Gives an optimizer the state that is its own: in the order of its groups, with parameters by name."""
    if request.info.fsdp_modules:
        state = _to_fsdp(request, optimizer, state) if state and not by_number else state
    elif request.info.full_state_dict:
        state = _spread_optimizer(request, optimizer, state)
    if state:
        state[_GROUPS] = [{**group, _PARAMS: _Names(group[_PARAMS])} for group in state[_GROUPS]]
    load_own_state_dict(optimizer, state)


# ---- by name, for a Checkpointer ----


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP1 has put parameters of the model together, and keeps parts of that."""
    return bool(FSDP.fsdp_modules(model))


def named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[tuple[Tensor, list[str]]]]:
    """For each group of an optimizer its parameters, each with its names; a flat one (FSDP1) for each that is in it."""
    request = _Request(model, None)
    slots = iter(_optimizer_names(request, optimizer))
    return [[(param, names) for param in group[_PARAMS] for names in next(slots)] for group in optimizer.param_groups]


@torch.no_grad()
def named_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbered: dict[str, Any]
) -> dict[str, Any]:
    """A state dict in which parameters are numbered, with their names."""
    with _request(model, None) as request:
        return (_named_by_fsdp if request.info.fsdp_modules else _named)(request, optimizer, numbered)


@torch.no_grad()
def load_named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives an optimizer a complete state, by names, with its groups in its own order, as its own state dict has it."""
    with _request(model, None) as request:
        if request.info.fsdp_modules and state[_STATE]:
            _take_over(request, optimizer, state)
            return
        numbers = {slots[0][0]: number for number, slots in enumerate(_optimizer_names(request, optimizer))}
        by_number = {numbers.get(name, name): value for name, value in state[_STATE].items()}
        count = itertools.count()
        groups = [
            {**group, _PARAMS: [next(count) for _ in own[_PARAMS]]}
            for group, own in zip(state[_GROUPS], optimizer.param_groups, strict=True)
        ]
        load_own_state_dict(optimizer, {**state, _STATE: by_number, _GROUPS: groups})


# ---- the interface ----


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state dict under canonical names, in the model's order.

    Args:
        model: wrapped in whatever ways.
        submodules: only what is in these modules; deprecated, as in stock.
        options: stock's; see ``torch.distributed.checkpoint.state_dict.StateDictOptions``.

    Raises:
        ValueError: two tensors would have one name; the message names both.
    """
    with _request(model, options) as request:
        state = _get_model(request, submodules)
        if not submodules:
            _check_not_empty(request, state)
        return state


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Loads a model's state dict: what ``get_model_state_dict``, here or in stock, gave for any wrapping of the model.

    Args:
        model: wrapped in whatever ways.
        model_state_dict: canonical names, or raw ones of this model. It is not changed. One name of tied tensors
            is enough.
        options: stock's; ``ignore_frozen_params`` lets frozen parameters be missing.

    Returns:
        missing_keys and unexpected_keys, both canonical.

    Raises:
        KeyMismatchError: with ``strict``, when keys are missing or unexpected; the message lists them all.
        RuntimeError: shapes do not fit.
    """
    with _request(model, options) as request:
        _check_not_empty(request, model_state_dict)
        return _set_model(request, model_state_dict)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of one or more optimizers, with parameters under their canonical names.

    Args:
        model: the model that the optimizers are for.
        optimizers: one or several.
        submodules: has no effect, as in stock.
        options: stock's; ``flatten_optimizer_state_dict`` gives one level of keys.

    Nothing of the optimizers or the model is changed. One that has no state yet is given in the dict what a step with
    gradients of zero makes, as in stock, so that it can be loaded into; the optimizer itself has none afterwards.

    Raises:
        RuntimeError: an optimizer has a parameter that is not the model's, or its class has a state dict of its own
            form, or it has no state yet and copies of it cannot take a step.
    """
    with _request(model, options) as request:
        return _get_optimizers(request, _as_tuple(optimizers))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads optimizer state, in time linear in the number of parameters.

    The optimizer takes no step for it, where stock's takes one with gradients of zero: what it needs is found out on
    copies of its parameters, 64 MiB at a time.

    Args:
        model: the model that the optimizers are for.
        optimizers: one or several.
        optim_state_dict: what ``get_optimizer_state_dict``, here or in stock, gave, flattened or not. Not changed.
        options: stock's.

    Raises:
        KeyMismatchError: with ``strict``, when state is missing; the message lists all of it.
        RuntimeError: an optimizer has a parameter that is not the model's, or one group was saved as several that
            differ; with ``strict=False`` the options of the last are taken, where they are nested.
    """
    with _request(model, options) as request:
        _set_optimizers(request, _as_tuple(optimizers), optim_state_dict)


def get_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict`` in one call."""
    with _request(model, options) as request:
        state = _get_model(request, submodules)
        if not submodules:
            _check_not_empty(request, state)
        return state, _get_optimizers(request, _as_tuple(optimizers)) if optimizers else {}


def set_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """``set_optimizer_state_dict`` and ``set_model_state_dict`` in one call; an empty model dict is left out."""
    with _request(model, options) as request:
        if optimizers:
            _set_optimizers(request, _as_tuple(optimizers), optim_state_dict)
        return _set_model(request, model_state_dict)
