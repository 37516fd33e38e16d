"""Components whose tensors are spread over ranks, which DCP reshards; models among them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from dcpring.base.casts import described
from dcpring.base.text import some_keys, spans
from dcpring.names.parts import ModelParts
from dcpring.names.policy import refused_cast
from dcpring.names.state_dict.interface import get_model_state_dict, set_model_state_dict
from dcpring.plan.replicas import fingerprints, is_hashed
from dcpring.resume import trees
from dcpring.resume.components import (
    Component,
    ComponentPlan,
    Member,
    Remarks,
    SaveCheck,
    kind_problems,
    no_remarks,
    some_are,
    state_of,
)
from dcpring.resume.manifest import Stored
from dcpring.torchside.dcp import flatten_state_dict
from dcpring.torchside.tensors import ShardedTensor, global_size, is_whole, local_tensor

_FINGERPRINTS = "fingerprints"
"""In a rank's note of its model: those of its parameters by name, where the ranks have different layers."""


class TensorsPlan(ComponentPlan):
    """A plan that reads tensors into those of a state, and puts objects into the state.

    Args:
        component: whose state it is.
        name: the component's.
        stored: the checkpoint.
        state: what the object has, or what it will have; objects in it are replaced.
    """

    def __init__(self, component: Sharded, name: str, stored: Stored, state: dict[str, Any]) -> None:
        super().__init__(problems=kind_problems(component, name, stored))
        self.name, self.stored, self.is_strict = name, stored, component.strict
        self._nested = state if name in stored.flat else {name: state}
        flat, self.paths = flatten_state_dict(self._nested)
        there = stored.metadata.state_dict_metadata.keys()
        for key, value in flat.items():
            if key in there:
                self.add(key, value)
        self.unexpected = set(stored.keys.get(name, ())) - self.target.keys() - self.in_place.keys()
        self.note_missing({key for key in flat if key not in there})

    def add(self, key: str, value: Any) -> None:
        """Plans to read a key into a tensor, or to put an object in the place of a value."""
        self.problems += _misfits(key, value, self.stored)
        if isinstance(value, Tensor | ShardedTensor):
            self.in_place[key] = value
        else:
            self.target[key] = None

    def note_missing(self, missing: set[str]) -> None:
        """Says which keys the checkpoint lacks: a problem where the component is strict."""
        if missing and self.is_strict:
            self.problems.append(f"{some_are(missing)} not in the checkpoint; Sharded(..., strict=False) lets them be")
        elif missing:
            self.notes.append(f"{some_are(missing)} not in the checkpoint, left as it was")

    def describe(self, own: Any) -> None:
        """Says how the state comes back, from which meshes and in which types."""
        saved, here = self.stored.entry(self.name).get("meshes"), meshes(own)
        if saved is None:
            self.change = f"onto {mesh_text(here)}; the checkpoint does not say from which mesh"
            self.resharded = True
        elif saved != here:
            self.change = f"from {mesh_text(saved)} to {mesh_text(here)}"
            self.resharded = True
        tensors = {key: value for key, value in self.in_place.items() if self.stored.is_tensor(key)}
        self.notes += cast_notes((self.stored.tensor(key)[0], value.dtype) for key, value in tensors.items())

    def prepare(self, read: dict[str, Any]) -> Any:
        for key, value in read.items():
            if key in self.paths:
                _set_at(self._nested, self.paths[key], value)
        return self._nested if self.name in self.stored.flat else self._nested[self.name]


class Sharded(Component):
    """State whose tensors are spread over ranks (DTensor, ShardedTensor), or whole on each: DCP reshards it.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``; models and optimizers need no wrapping.
        strict: every key must be in the checkpoint and the other way round. If not, what is missing keeps its value,
            and the load's report says so.
    """

    kind = "sharded"
    is_whole = False

    def __init__(self, stateful: Any, strict: bool = True) -> None:
        super().__init__(stateful)
        self.strict = strict

    def collect(self, member: Member) -> tuple[Any, Any]:
        state = state_of(self.stateful)
        return state, {"meshes": meshes(state)}

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        return SaveCheck(dict(state) or None, {"meshes": all_meshes(notes)})

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        state = dict(self.collect(member)[0])
        plan = TensorsPlan(self, name, stored, state)
        plan.describe(state)
        return plan


def _set_at(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Sets what a path of DCP's stands for: it has texts for keys of dicts, whatever they are."""
    *parents, last = path
    for part in parents:
        tree = tree[_real_key(tree, part)]
    tree[_real_key(tree, last)] = value


def _real_key(tree: Any, part: str | int) -> Any:
    if not isinstance(tree, Mapping) or part in tree:
        return part
    return next(key for key in tree if str(key) == part)


def cast_notes(pairs: Iterable[tuple[torch.dtype, torch.dtype]]) -> list[str]:
    """How many tensors were cast, from what to what."""
    casts = Counter((before, after) for before, after in pairs if before != after)
    return [
        f"{count} tensor{'s' if count > 1 else ''} {described(*dtypes)}".replace("torch.", "")
        for dtypes, count in casts.items()
    ]


def meshes(state: Any) -> list[dict[str, Any]]:
    """The device meshes that a state's tensors are spread over, each once; empty if every rank has all of it."""
    found: list[dict[str, Any]] = []
    for value in trees.leaf_values(state):
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
            described = {"shape": list(mesh.shape), "names": names}
        elif isinstance(value, ShardedTensor):
            described = {"shape": [len(value.metadata().shards_metadata)], "names": None}
        else:
            continue
        if described not in found:
            found.append(described)
    return sorted(found, key=str)


def all_meshes(notes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The meshes that ranks have noted, each once."""
    found: list[dict[str, Any]] = []
    for note in notes:
        found += [mesh for mesh in note["meshes"] if mesh not in found]
    return found


def mesh_text(described: list[dict[str, Any]]) -> str:
    return " and ".join(map(_one_mesh, described)) or "whole tensors"


def _one_mesh(mesh: dict[str, Any]) -> str:
    sizes = [str(size) for size in mesh["shape"]]
    parts = [f"{name}={size}" for name, size in zip(mesh["names"], sizes, strict=True)] if mesh["names"] else sizes
    return f"mesh ({', '.join(parts)})"


def _misfits(key: str, value: Any, stored: Stored) -> list[str]:
    """Why what is stored under a key cannot go where it should."""
    entry = stored.metadata.state_dict_metadata[key]
    is_tensor = isinstance(value, Tensor | ShardedTensor)
    if not isinstance(entry, TensorStorageMetadata):
        return [f"{key!r} is an object in the checkpoint, a tensor here"] if is_tensor else []
    if not is_tensor:
        return [f"{key!r} is a tensor in the checkpoint, a {type(value).__name__} here"]
    if entry.size != (size := global_size(value)):
        return [f"{key!r} has shape {list(entry.size)} in the checkpoint, {list(size)} here"]
    refused = refused_cast(stored.reader.policy.casts, entry.properties.dtype, value.dtype)
    return [f"{key!r}: {refused}"] if refused else []


def digest_of_names(names: Iterable[Any]) -> str:
    """Of names, or lists of them, in one go: there may be many."""
    return hashlib.blake2b(repr(list(names)).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def first_with(noted: Sequence[Any]) -> dict[Any, int]:
    """The first rank of those that have noted the same, by what that is."""
    return {note: rank for rank, note in reversed(list(enumerate(noted)))}


def _address(tensor: Tensor) -> int:
    """Where this rank's part begins in memory; 0 for what has no memory."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.data_ptr() if is_whole(local) and local.layout == torch.strided else 0


class ModelState(Sharded):
    """An ``nn.Module``, whatever wraps it: names are those of the bare model."""

    stateful: nn.Module

    @property
    def type_name(self) -> str:
        return type(self.whole).__name__

    @property
    def whole(self) -> nn.Module:
        """The model itself, where it is not in parts; else one of these, which has all but the layers of the others."""
        return self.stateful.parts[0] if isinstance(self.stateful, ModelParts) else self.stateful

    def collect(self, member: Member) -> tuple[Any, Any]:
        state = get_model_state_dict(self.stateful)
        return state, {"meshes": meshes(state), "names": digest_of_names(state)}

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        check = super().check(state, notes, member)
        first = first_with([note["names"] for note in notes])
        if len(first) > 1 and not any(_FINGERPRINTS in note for note in notes):
            check.detail = self._fingerprints(state) if member.rank in first.values() else {}
        check.problems = _different_layers([note.get(_FINGERPRINTS, {}) for note in notes])
        return check

    def _fingerprints(self, state: Any) -> dict[str, Any]:
        """Fingerprints of the parameters that are whole on this rank, where ranks have different layers."""
        parameters = self._held(state, self.stateful.parameters())
        names = [key for key in state if key in parameters and is_whole(state[key]) and is_hashed(state[key])]
        found = memoryview(fingerprints([state[name] for name in names])).cast("I")
        return {_FINGERPRINTS: dict(zip(names, found, strict=True))}

    def frozen(self, state: Any) -> set[str]:
        """Parameters without a gradient. A state dict has the same memory, but does not say what requires one."""
        return self._held(state, (p for p in self.stateful.parameters() if not p.requires_grad))

    def _held(self, state: Any, parameters: Iterable[Tensor]) -> set[str]:
        """The keys of a state dict whose memory is that of parameters."""
        memory = {_address(parameter) for parameter in parameters} - {0}
        return {key for key, value in state.items() if isinstance(value, Tensor) and _address(value) in memory}

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        set_model_state_dict(self.stateful, ready, options=StateDictOptions(strict=self.strict))
        return no_remarks  # it raises itself if anything is not taken over


def _different_layers(by_rank: Sequence[Mapping[str, int]]) -> list[str]:
    """Why ranks have different tensors of one name, by the fingerprints that ranks have noted."""
    by_name: dict[str, dict[int, int]] = {}
    for rank, noted in enumerate(by_rank):
        for name, value in noted.items():
            by_name.setdefault(name, {})[rank] = value
    by_ranks: dict[str, list[str]] = {}
    for name, found in by_name.items():
        if len(set(found.values())) > 1:
            by_ranks.setdefault(spans(list(found)), []).append(name)
    return [
        f"{who} have different layers, and different tensors that are called {some_keys(names)}; stages of a "
        "pipeline keep the names that their layers have in the whole model: cut them out of it"
        for who, names in by_ranks.items()
    ]
