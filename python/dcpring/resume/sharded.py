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
from dcpring.resume.components import Component, ComponentPlan, Member, some_are
from dcpring.resume.manifest import Stored
from dcpring.torchside.dcp import flatten_state_dict
from dcpring.torchside.tensors import ShardedTensor, global_size, is_whole, local_tensor


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
        self._nested: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}

    def note(self, state: Any, member: Member) -> Any:
        return meshes(state)

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        return dict(state)

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        found: list[Any] = []
        for note in notes:
            found += [mesh for mesh in note if mesh not in found]
        return {"meshes": found}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        state = dict(self.state())
        plan = self.plan_for(name, stored, state)
        self.describe(plan, stored, name, state)
        return plan

    def plan_for(self, name: str, stored: Stored, state: dict[str, Any]) -> ComponentPlan:
        """What is to be read into a state, and what is not there."""
        plan = ComponentPlan(problems=self._kind_problems(name, stored))
        self._nested = {name: state}
        if name in stored.flat:
            self._nested = state
        flat, self._paths = flatten_state_dict(self._nested)
        there = set(stored.metadata.state_dict_metadata)
        for key, value in flat.items():
            if key in there:
                self.add(plan, key, value, stored)
        plan.unexpected = set(stored.keys.get(name, ())) - set(plan.target) - set(plan.in_place)
        self.note_missing(plan, {key for key in flat if key not in there})
        return plan

    def add(self, plan: ComponentPlan, key: str, value: Any, stored: Stored) -> None:
        """Plans to read a key into a value: a tensor, or what an object takes the place of."""
        plan.problems += _misfits(key, value, stored)
        if isinstance(value, Tensor | ShardedTensor):
            plan.in_place[key] = value
        else:
            plan.target[key] = None

    def note_missing(self, plan: ComponentPlan, missing: set[str]) -> None:
        if missing and self.strict:
            plan.problems.append(f"{some_are(missing)} not in the checkpoint; Sharded(..., strict=False) lets them be")
        elif missing:
            plan.notes.append(f"{some_are(missing)} not in the checkpoint, left as it was")

    def describe(self, plan: ComponentPlan, stored: Stored, name: str, own: Any) -> None:
        """Says how the state comes back, from which meshes and in which types."""
        saved, here = stored.entry(name).get("meshes"), meshes(own)
        if saved is None:
            plan.change = f"onto {mesh_text(here)}; the checkpoint does not say from which mesh"
            plan.resharded = True
        elif saved != here:
            plan.change = f"from {mesh_text(saved)} to {mesh_text(here)}"
            plan.resharded = True
        pairs = ((stored.tensor(key)[0], value.dtype) for key, value in plan.in_place.items() if stored.is_tensor(key))
        plan.notes += cast_notes(pairs)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        for key, value in target.items():
            _set_at(self._nested, self._paths[key], value)
        return self._nested if name in stored.flat else self._nested[name]

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        super().apply(state, before)
        self._given = state

    def forget(self) -> None:
        super().forget()
        self._nested = {}


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

    def state(self) -> Any:
        return get_model_state_dict(self.stateful)

    def note(self, state: Any, member: Member) -> Any:
        return {"meshes": super().note(state, member), "names": digest_of_names(state)}

    def detail(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any] | None:
        """Where ranks have different layers, fingerprints of the parameters that are whole on this one."""
        first = first_with([note["names"] for note in notes])
        if len(first) == 1:
            return None
        if member.rank not in first.values():
            return {}
        parameters = self._held(state, self.stateful.parameters())
        names = [key for key in state if key in parameters and is_whole(state[key]) and is_hashed(state[key])]
        found = memoryview(fingerprints([state[name] for name in names])).cast("I")
        return {"fingerprints": dict(zip(names, found, strict=True))}

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        by_name: dict[str, dict[int, int]] = {}
        for rank, note in enumerate(notes):
            for name, value in note.get("fingerprints", {}).items():
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

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        return super().entry([note["meshes"] for note in notes])

    def frozen(self, state: Any) -> set[str]:
        """Parameters without a gradient. A state dict has the same memory, but does not say what requires one."""
        return self._held(state, (p for p in self.stateful.parameters() if not p.requires_grad))

    def _held(self, state: Any, parameters: Iterable[Tensor]) -> set[str]:
        """The keys of a state dict whose memory is that of parameters."""
        memory = {_address(parameter) for parameter in parameters} - {0}
        return {key for key, value in state.items() if isinstance(value, Tensor) and _address(value) in memory}

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        # It raises itself if anything is not taken over.
        set_model_state_dict(self.stateful, state, options=StateDictOptions(strict=self.strict))
