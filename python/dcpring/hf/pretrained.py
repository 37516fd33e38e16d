"""``dcpring.load_pretrained`` and ``save_pretrained_weights``: a model's weights, and a directory of safetensors.

A load goes in three steps:

1. Names are compared, on all ranks, before anything is changed.
2. What is on ``meta`` gets memory, and what the files do not have its first values.
3. Each rank reads its slices into the model's own memory.

The ranks' words go through a process group of their own: what fails on one is raised on all.
"""

from __future__ import annotations

import glob
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from dcpring.base.groups import has_group
from dcpring.base.memory import memory_key
from dcpring.base.ranks import Operation, Ranks
from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, KeyMismatchError, naming
from dcpring.format.model_files import find_named
from dcpring.format.quantised import FLOAT8, FLOAT8_SCALE
from dcpring.hf.conversions import conversion_of_load, tied_names
from dcpring.hf.exports import Export
from dcpring.hf.reader import check_exists
from dcpring.hf.rearrange import Rearrange, rearranged_by, unused_text
from dcpring.names.diff import KeyDescription, KeyDiff, diff_described
from dcpring.names.key_map import KeyMap, KeyMapLike, rename_metadata
from dcpring.names.policy import LoadPolicy, Missing, Unexpected, describe_metadata, describe_state_dict, match_names
from dcpring.names.state_dict.interface import get_model_state_dict, set_model_state_dict
from dcpring.names.wrapping import model_keys
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.plan.sharing import Share
from dcpring.store.once_reader import OnceReader
from dcpring.torchside import dcp, modules
from dcpring.torchside.composed import Composed
from dcpring.torchside.tensors import is_whole, local_tensor

__all__ = ["load_pretrained", "save_pretrained_weights"]

logger = logging.getLogger("dcpring")

Initialize = Callable[[nn.Module], Any]

_RESET = operator.methodcaller("reset_parameters")

_INITIALIZE = "pass initialize=, a function that gives a module its first values, sharded as it is"


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    key_map: KeyMapLike = None,
    rearrange: Sequence[Rearrange] | None = None,
    missing: Missing = "error",
    allow_missing: str | Sequence[str] = (),
    unexpected: Unexpected = "log",
    initialize: Initialize | None = None,
    process_group: dist.ProcessGroup | None = None,
    share: Share = "auto",
    name: str | None = None,
    variant: str | None = None,
    reader_options: Mapping[str, Any] | None = None,
) -> KeyDiff:
    """Loads a model's weights from a directory of safetensors, or a checkpoint of DCP: each rank reads its slices.

    The model may be on ``meta``, in whole or in part, sharded (FSDP2, tensor parallelism, HSDP), compiled, and wrapped
    in whatever ways; parameters that are one tensor under several names stay one. Where ``parallelize_module`` has made
    several of one, each is read from what is stored of any that the model's ``all_tied_weights_keys`` ties it to. All
    ranks of the process group call it; without a process group it is for this process alone.

    Args:
        model: whose parameters and buffers are loaded in place.
        path: as for ``RingHFReader``, or the directory of a checkpoint that holds a model alone.
        device: where tensors go that are on ``meta``; None: where the model's others are, or where its mesh is. With
            FSDP2's ``CPUOffloadPolicy`` that is "cpu".
        key_map: from the names in the files to the model's (see docs/keys.md).
        rearrange: how tensors that are fused, stacked or transposed in one of both are cut (see ``rearranged``). Each
            rule has to match a name on some rank. With a ``key_map``, stored names are those that it has made. Of a
            model of transformers, both are what ``from_pretrained`` does, where they are None.
        missing: tensors of the model that the files do not have: "error", "warn" or "allow". Of tied ones one is
            enough.
        allow_missing: shell patterns (``fnmatch``) of those that may be missing in any case, such as a new head. What
            a model of transformers declares to be missing (``_keys_to_ignore_on_load_missing``), or does not save, may.
        unexpected: what the files have and the model does not: "log" (at INFO), "warn", "error" or "ignore".
        initialize: gives a module its first values; called, before the load, for each module with tensors on ``meta``
            that are in no file, because they may be missing, or are buffers that no ``state_dict()`` has. None: the
            model's own ``_init_weights`` (transformers; that of the part that the module is in, where the parts of a
            model have each their own), else the module's ``reset_parameters``.
        process_group: the ranks; None for all.
        share: how the ranks of a host share what they read, as for ``RingLoadPlanner``.
        name, variant: which of several models in a directory of safetensors, as for ``RingHFWriter``.
        reader_options: for ``RingReader``. ``dequantize`` is float32 here if not given, which is then cast to the
            model's dtypes, unless the model has float8 or uint8 tensors of its own.

    Returns:
        What was missing and unexpected all the same, and what was cast.

    Raises:
        KeyMismatchError: what does not fit; the message lists it. Nothing has been changed. Where ranks differ in it,
            each raises a CheckpointError with what all of them say.
        CheckpointError: values of tensors on ``meta`` are neither in the files, nor can they be made; float8 without
            scales is wanted in another dtype; a rule does not fit, or matches nothing.
        CorruptCheckpointError, OSError: as for ``RingHFReader``.
    """
    _check_module(model, "load_pretrained", "dcp.load and RingHFReader load a state dict")
    policy = LoadPolicy(missing, allow_missing, unexpected)
    ranks = Ranks(process_group)
    try:
        with ranks.operation("load_pretrained") as joint:
            check_exists(path)
            path = find_named(Path(path), name, variant) if name or variant else path
            reader = OnceReader(path, **{"dequantize": _made_of_codes(model), **(reader_options or {})})
            reader.joint = joint
            state = get_model_state_dict(model)
            known = conversion_of_load(model, state, reader.read_metadata().state_dict_metadata)
            policy = replace(policy, allow_missing=[*policy.allow_missing, *map(glob.escape, known.may_miss)])
            rules = known.rules if rearrange is None else rearrange
            stored_as, unused = rearranged_by(state, rules)
            _refuse_unused(joint, unused, state)
            target = _Target(model, rules, stored_as)
            names = known.key_map(target.state) if key_map is None else key_map
            diff = _load(joint, target, reader, policy, names, device, initialize, share)
            if key_map is None and rearrange is None:
                known.note()
            return diff
    finally:
        ranks.close()


def save_pretrained_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMapLike = None,
    rearrange: Sequence[Rearrange] | None = None,
    config: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Saves a model's weights as the directory of safetensors that ``from_pretrained`` loads, in place by all ranks.

    The names are those of the model without any wrapper. Tied tensors are written once. Files that are no weights stay;
    a tokenizer is saved by its own ``save_pretrained``, on one rank.

    Args:
        model: sharded, compiled and wrapped in whatever ways; all ranks of the process group call this.
        path: of the directory, made if missing.
        key_map: from the model's names to those in the files.
        rearrange: as for ``load_pretrained``; the same rules.
        config: write the configuration of a model of transformers as well, as its ``save_pretrained`` does, with the
            dtype that the files have.
        process_group: the ranks; None for all.
        options: for ``RingHFWriter``, such as ``dtype=torch.bfloat16``, ``name`` or ``max_shard_bytes``.

    Raises:
        CheckpointError: a rule does not fit, or matches nothing; on all ranks.
        CheckpointError, OSError: within DCP's ``CheckpointException``, as ``RingHFWriter`` raises them.
    """
    _check_module(model, "save_pretrained_weights", "dcp.save and RingHFWriter save a state dict")
    group = process_group if process_group is not None or not has_group() else dist.group.WORLD
    ranks = Ranks(process_group)
    try:
        with ranks.operation("save_pretrained_weights") as joint:
            state = get_model_state_dict(model)
            export = Export.of(model, state, path, key_map=key_map, rearrange=rearrange, **options)
            _refuse_unused(joint, export.unused, state)
        dcp.save(export.tensors, export.writer, RingSavePlanner(), group)
        if config:
            what = f"the weights are in {path}, but the configuration cannot be written"
            with ranks.operation("save_pretrained_weights, config") as joint, joint.doing(what):
                if joint.rank == 0:
                    export.finish()
    finally:
        ranks.close()


def _check_module(model: Any, call: str, others: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call} takes a module, and this is a {type(model).__name__}; {others}")


def _refuse_unused(joint: Operation, unused: Sequence[str], names: Iterable[str]) -> None:
    """Raises CheckpointError on all ranks where a rule matches nothing on any of them: a model may be in stages."""
    nowhere = set.intersection(*map(set, joint.gather("rules that match nothing", unused)))
    if nowhere:
        raise CheckpointError(unused_text([rule for rule in unused if rule in nowhere], names))


class _Target(NamedTuple):
    """What is loaded.

    Attributes:
        rules: by which the model's tensors are rearranged.
        state: the model's, as it is stored; before it has memory.
    """

    model: nn.Module
    rules: Sequence[Rearrange]
    state: dict[str, Any]

    def copies(self, stored: Collection[str]) -> dict[str, str]:
        """By the names of tensors that are not stored, what is stored of others that the model ties them to."""
        there = {name for names in _slots(self.model) if not set(names).isdisjoint(stored) for name in names}
        others = tied_names(self.model)
        wanted = _wanted(self.state, stored)
        found = {name: next((other for other in others(name) if other in stored), None) for name in wanted}
        return {name: first for name, first in found.items() if first and name not in stored and name not in there}

    def given(self, stored: Collection[str]) -> set[str]:
        """Names of the model's tensors of which everything is stored."""
        missing = [name for name in self.state if name not in stored]
        return _own_names(self.state, stored) - _own_names(self.state, missing)


def _wanted(state: Mapping[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """The tensors of a state; of what else modules keep in their state dicts only what is stored."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor) or name in stored}


def _own_names(state: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Of tensors as they are stored the model's names."""
    own: set[str] = set()
    for name in names:
        value = state.get(name)
        own.update(value.made_of if isinstance(value, Composed) else (name,))
    return own


def _load(
    joint: Operation,
    target: _Target,
    reader: OnceReader,
    policy: LoadPolicy,
    key_map: KeyMapLike,
    device: str | torch.device | None,
    initialize: Initialize | None,
    share: Share,
) -> KeyDiff:
    model = target.model
    metadata = reader.read_metadata()
    if key_map is not None:
        names = match_names(KeyMap(key_map), list(target.state), list(metadata.state_dict_metadata))
        metadata = rename_metadata(metadata, names, storage=False)
        key_map = key_map if any(old != new for old, new in names.items()) else None
    stored = {name: entry for name, entry in describe_metadata(metadata).items() if name not in reader.made_of}
    copies = target.copies(stored)
    stored |= {name: stored[first] for name, first in copies.items()}
    given = target.given(stored)
    diff = _compare(target, stored, given, policy, str(reader.path), joint.rank)
    unscaled = [item.key for item in diff.dtypes if item.stored.dtype in FLOAT8]
    if unscaled and reader.dequantize is not None:
        raise CheckpointError(
            f"{reader.path} has {some_keys(unscaled)} in float8, and no {FLOAT8_SCALE!r} of theirs, without which a "
            "cast gives other values; where they were not scaled pass reader_options={'dequantize': None}"
        )
    bare = list(_bare_modules(model, given, initialize))
    renamed = _one_of_each(copies)
    loads = max(joint.gather("checked", len(renamed)))
    modules.give_memory(model, torch.device(device) if device is not None else _device_of(model))
    with torch.no_grad():
        for module, make in bare:
            with naming(lambda: f"cannot give a {type(module).__name__} its first values", _INITIALIZE):  # noqa: B023
                make(module)
    own = _wanted(get_model_state_dict(model), stored)
    state, _ = rearranged_by(own, target.rules)
    options: dict[str, Any] = {"key_map": key_map, "missing": "allow", "unexpected": "ignore", "share": share}

    def load(group: dist.ProcessGroup | None) -> None:
        dcp.load(state, reader, RingLoadPlanner(process_group=group, **options), group)
        for names in [*renamed, *[{}] * (loads - len(renamed))]:
            again = {first: state[name] for first, name in names.items()}
            dcp.load(again, reader, RingLoadPlanner(process_group=group, **options), group)

    joint.run_dcp("reading", f"cannot load {reader.path}", load)
    own.update((name, value) for name, value in state.items() if name in own and not isinstance(value, Composed))
    if not _is_in_place(model, own):
        set_model_state_dict(model, own, options=StateDictOptions(strict=False))
    reader.tell(joint.rank)
    return diff


def _one_of_each(copies: Mapping[str, str]) -> list[dict[str, str]]:
    """Copies by the names of what is stored, as many of these as some of it has: one load fills one of each."""
    found: list[dict[str, str]] = []
    for name, first in copies.items():
        into = next((each for each in found if first not in each), None)
        if into is None:
            found.append(into := {})
        into[first] = name
    return found


def _made_of_codes(model: nn.Module) -> torch.dtype | None:
    """What is made of quantised tensors: float32, which is rounded once; nothing for a model that has such itself."""
    own = {one.dtype for module in model.modules() for _, one in modules.tensors(module)}
    return torch.float32 if own.isdisjoint((torch.uint8, *FLOAT8)) else None


def _compare(
    target: _Target, stored: Mapping[str, KeyDescription], given: set[str], policy: LoadPolicy, path: str, rank: int
) -> KeyDiff:
    """How the model differs from what is stored.

    Args:
        given: names of the model's tensors that are stored.
        rank: this one.

    Raises:
        KeyMismatchError: in a way that the policy does not allow; the same on all ranks that have the same names.
    """
    diff = diff_described(describe_state_dict(_wanted(target.state, stored)), stored)
    tied = {name for names in _slots(target.model) if not given.isdisjoint(names) for name in names}
    diff.missing = [item for item in diff.missing if item.key not in tied]
    fatal = KeyDiff(
        [item for item in diff.missing if policy.missing == "error" and not policy.may_miss(item.key)],
        diff.unexpected if policy.unexpected == "error" else [],
        diff.shapes,
    )
    if fatal:
        shown = replace(fatal, unexpected=diff.unexpected, dtypes=diff.dtypes)
        raise KeyMismatchError(f"{path} does not fit the model:\n{shown}")
    if diff.missing and policy.missing == "warn":
        logger.warning("rank %d: %s does not have:\n%s", rank, path, KeyDiff(diff.missing))
    policy.report([item.key for item in diff.unexpected], rank)
    return diff


def _slots(model: nn.Module) -> Iterator[list[str]]:
    """The names that each of the model's tensors has."""
    for slots in model_keys(model).slots.values():
        yield from slots


# ---- what is on meta ----


def _bare_modules(
    model: nn.Module, stored: set[str], given: Initialize | None
) -> Iterator[tuple[nn.Module, Initialize]]:
    """Modules with tensors on meta that are not stored, and what gives them their first values.

    Raises:
        CheckpointError: nothing does.
    """
    keys = model_keys(model).slots
    filled = {id(one) for one, slots in keys.items() if any(not stored.isdisjoint(names) for names in slots)}
    methods: dict[str, Initialize | None] = {"": None}  # by path, of the module or the next one around it
    for path, module in model.named_modules():
        own = getattr(module, "_init_weights", None)
        methods[path] = own = own if callable(own) else methods[path.rpartition(".")[0]]
        bare = [name for name, one in modules.tensors(module) if one.is_meta and id(one) not in filled]
        make = given or own or (_RESET if hasattr(module, "reset_parameters") else None)
        if bare and make is None:
            raise CheckpointError(
                f"{some_keys(f'{path}.{name}'.lstrip('.') for name in bare)} of the model are on meta, and nothing is "
                "stored for them: pass initialize=, a function that gives a module its first values"
            )
        if bare and make is not None:
            yield module, make


def _device_of(model: nn.Module) -> torch.device:
    """Where tensors that are on meta belong: on the devices of their mesh, or where the others are."""
    tensors = [one for module in model.modules() for _, one in modules.tensors(module)]
    meshes = [one.device_mesh.device_type for one in tensors if isinstance(one, DTensor)]
    others = [one.device for one in tensors if not one.is_meta]
    default = torch.get_default_device()
    found = [*map(torch.device, meshes), *others, default]
    return next((device for device in found if device.type != "meta"), torch.device("cpu"))


# ---- in place ----


def _is_in_place(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a state dict is the model's own memory, so that what was read into it is in the model."""
    own = {_memory_of(one) for module in model.modules() for _, one in modules.tensors(module)} - {None}
    return all(_memory_of(value) in own for value in state.values())


def _memory_of(value: Any) -> Any:
    local = local_tensor(value) if isinstance(value, DTensor) else value
    return memory_key(local) if isinstance(local, Tensor) and is_whole(local) else None
