"""Components of a training state, and how each kind is saved and comes back on another number of ranks.

A component belongs to a Checkpointer, which runs it in steps that all ranks take together:

save:  ``state`` (this rank's), ``note`` (what all ranks see of it), ``detail``, ``disagreements``, ``to_save``
load:  ``plan`` (what is needed against what is there), a read of ``Plan.target``, ``prepare`` (checks what was read),
       a read of ``Plan.in_place``, ``apply``, ``remarks`` (what did not come out as it was saved)

A save changes nothing. A load changes nothing before its second read, which is of tensors into tensors that are there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dcpring.base import random_states
from dcpring.base.text import ranks, some_keys, spans
from dcpring.errors import CheckpointError
from dcpring.names.parts import ModelParts
from dcpring.resume import backend, trees
from dcpring.resume.manifest import PER_RANK, Stored, rank_key, unpickled
from dcpring.torchside.dcp import flatten_state_dict
from dcpring.torchside.tensors import ShardedTensor, global_size, is_whole, local_tensor

__all__ = ["Component", "ComponentPlan", "Elastic", "Member", "PerRank", "Replicated", "Sharded"]

AS_SAVED, HANDED_OVER = "as saved", "handed over as saved"
"""How a component comes back on the same ranks: taken over, or nobody knows what the object has made of it."""


@dataclass(frozen=True)
class Member:
    """A rank among those that save or load."""

    rank: int
    world_size: int


@dataclass
class ComponentPlan:
    """What one rank wants of a component, and whether it is there.

    Attributes:
        target: by key, tensors to fill that are nobody's yet, and None for objects.
        in_place: by key, the object's own tensors, which are filled when all else has been found to be good.
        problems: why it cannot be loaded; empty if it can.
        change: "as saved", or how it reshards.
        resharded: whether it comes back on other ranks or another mesh than it was saved on.
        notes: what will not be as it was saved.
        unexpected: keys of the checkpoint that this rank has no place for.
    """

    target: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    change: str = AS_SAVED
    resharded: bool = False
    unexpected: set[str] = field(default_factory=set)
    in_place: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """How it comes back, in words."""
        return f"{self.change}, but {'; '.join(self.notes)}" if self.notes else self.change

    def without_targets(self) -> ComponentPlan:
        """What other ranks are told."""
        return replace(self, target={}, in_place={})


class Component:
    """What all kinds share. Use ``Sharded``, ``Replicated``, ``PerRank``, ``Elastic`` or what is built on them.

    Attributes:
        kind: as the manifest names it.
        is_whole: whether a rank's state is no part of anything, but plain data that has to come back exactly.
        goes_last: taken over after all others, as they might change it.
        stateful: what is saved and loaded: it has ``state_dict()`` and ``load_state_dict()``.
    """

    kind: ClassVar[str]
    is_whole: ClassVar[bool] = True
    goes_last: ClassVar[bool] = False

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful

    @property
    def type_name(self) -> str:
        return type(self.stateful).__name__

    # ---- save ----

    def state(self) -> Any:
        return self.stateful.state_dict()

    def note(self, state: Any, member: Member) -> Any:
        raise NotImplementedError

    def detail(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any] | None:
        """What this rank adds to its note, a dict, now that it knows all notes; None, on all ranks, for nothing."""
        return None

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        """Why what the ranks have cannot be one checkpoint."""
        return []

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        """What this rank hands to DCP below the component's name; below "" for all of it; empty if nothing."""
        raise NotImplementedError

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        """What the manifest says besides kind and type."""
        return {}

    def frozen(self, state: Any) -> set[str]:
        """Keys of tensors of a state that are expected to stay as they are."""
        return set()

    # ---- load ----

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        raise NotImplementedError

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        """What ``apply`` takes, out of what was read. Changes nothing; raises CheckpointError if it does not fit."""
        raise NotImplementedError

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        """Takes the state over.

        Args:
            state: what ``prepare`` gave.
            before: the components that this load has applied already.
        """
        self.stateful.load_state_dict(state)

    def remarks(self) -> list[str]:
        """What is known not to be as it was saved, once the state has been taken over; for the report."""
        return []

    def forget(self) -> None:
        """After a load, however it went: what was set up for it is not needed any more."""

    def _differences(self, given: Any) -> list[str]:
        """A remark if the object's ``state_dict()`` does not have what it was given; more it may have."""
        names = _differing(given, self.state())
        return [f"its state_dict() has something else in {some_keys(names)} afterwards"] if names else []

    def _kind_problems(self, name: str, stored: Stored, accepted: Iterable[str] = ()) -> list[str]:
        saved = stored.entry(name).get("kind", self.kind)
        if saved in (self.kind, *accepted):
            return []
        return [f"saved as {saved}, here it is {self.kind}; wrap it as it was saved, or leave it out"]


# ---- sharded ----


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
        self._given: Any = None
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

    def remarks(self) -> list[str]:
        return [] if self._given is None else self._differences(self._given)

    def forget(self) -> None:
        self._nested, self._given = {}, None


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
        f"{count} tensor{'s' if count > 1 else ''} cast from {before} to {after}".replace("torch.", "")
        for (before, after), count in casts.items()
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
    if not torch.can_cast(entry.properties.dtype, value.dtype):
        return [f"{key!r} is {entry.properties.dtype} in the checkpoint, {value.dtype} here: the cast loses data"]
    return []


def _differing(given: Any, taken: Any) -> list[str]:
    """What of a state is not in another one, by name."""
    if not isinstance(given, Mapping | list | tuple):
        return [] if _same(given, taken) else ["it"]
    found = dict(trees.leaves(taken))
    return [path for path, value in trees.leaves(given) if path not in found or not _same(value, found[path])]


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, or nobody can tell; of what is spread over ranks, this rank's part."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        a, b = local_tensor(a), local_tensor(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # Mostly it is the same memory, or at least there is no NaN.
        return a.data_ptr() == b.data_ptr() or torch.equal(a, b) or trees.digest(a) == trees.digest(b)
    return isinstance(a, ShardedTensor) or trees.digest(a) == trees.digest(b)


def digest_of_names(names: Iterable[Any]) -> str:
    """Of names, or lists of them, in one go: there may be many."""
    return hashlib.blake2b(repr(list(names)).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def first_with(noted: Sequence[Any]) -> dict[Any, int]:
    """The first rank of those that have noted the same, by what that is."""
    return {note: rank for rank, note in reversed(list(enumerate(noted)))}


def some_are(keys: Iterable[str]) -> str:
    names = set(keys)
    return f"{some_keys(names)} {'is' if len(names) == 1 else 'are'}"


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
        return backend.get_model_state_dict(self.stateful)

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
        names = [key for key in state if key in parameters and is_whole(state[key]) and backend.is_hashed(state[key])]
        found = memoryview(backend.fingerprints([state[name] for name in names])).cast("I")
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
        backend.set_model_state_dict(self.stateful, state, options=backend.StateDictOptions(strict=self.strict))


# ---- replicated, and elastic ----


class Replicated(Component):
    """State that is the same on all ranks: step counters, configuration, learning rate schedules. Saved once.

    Ranks whose states differ at a save are an error that names them.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``, or is a mutable mapping.
    """

    kind = "replicated"
    cure: ClassVar[str] = "what belongs to a rank is PerRank"

    def __init__(self, stateful: Any) -> None:
        super().__init__(stateful)
        self._given: Any = None

    def state(self) -> Any:
        return dict(self.stateful) if isinstance(self.stateful, MutableMapping) else self.stateful.state_dict()

    def note(self, state: Any, member: Member) -> Any:
        return trees.digest(state)

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        others = [rank for rank, note in enumerate(notes) if note != notes[0]]
        if not others:
            return []
        return [f"{spans(others)} differ from rank 0; {self.cure}"]

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        return {"": trees.encode(state)} if member.rank == 0 else {}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        problems = self._kind_problems(name, stored)
        if stored.rank_keys(name) and not problems:
            problems = [f"it holds states of {ranks(len(stored.rank_keys(name)))}; wrap it in PerRank() or Elastic()"]
        return ComponentPlan(stored.blank(stored.keys.get(name, [])), problems)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        return stored.rebuilt(target, depth=1)

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if isinstance(self.stateful, MutableMapping):
            self.stateful.clear()
            self.stateful.update(state)
        else:
            self.stateful.load_state_dict(state)
        self._given = state

    def remarks(self) -> list[str]:
        return [] if self._given is None else self._differences(self._given)

    def forget(self) -> None:
        self._given = None


class Elastic(Component):
    """Global progress that any number of ranks can go on from, such as that of an ``ElasticLoader``. Saved once.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``. Where it has ``combine_state_dicts(states)``, that
            makes one state of all ranks' at a save, or raises; else they must be equal. Where it has
            ``check_state_dict(state)``, that raises if the state does not fit, and changes nothing.
        merge: ``merge(states, old_world)`` makes global progress of the states that ranks had of their own in a
            checkpoint that has such; ``states`` is in the order of ranks.
    """

    kind = "elastic"

    def __init__(self, stateful: Any, merge: Callable[[list[Any], int], Any] | None = None) -> None:
        super().__init__(stateful)
        self.merge = merge
        self._given: Any = None

    def note(self, state: Any, member: Member) -> Any:
        return state

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        try:
            self._combined(notes)
        except CheckpointError as error:
            return [str(error)]
        return []

    def _combined(self, states: Sequence[Any]) -> Any:
        combine = getattr(self.stateful, "combine_state_dicts", None)
        if combine is not None:
            return combine(list(states))
        first = trees.digest(states[0])
        others = [rank for rank, state in enumerate(states) if trees.digest(state) != first]
        if others:
            raise CheckpointError(f"the progress of {spans(others)} is not that of rank 0")
        return states[0]

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        return {"": trees.encode(self._combined(notes))} if member.rank == 0 else {}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        by_rank = stored.rank_keys(name)
        problems = self._kind_problems(name, stored, accepted=[PerRank.kind] if by_rank else [])
        if not by_rank:
            return ComponentPlan(stored.blank(stored.keys.get(name, [])), problems, *self._from_to(stored, member))
        keys, found = _keys_of_ranks(name, stored, by_rank)
        if self.merge is None:
            found.append(f"it holds states of {ranks(len(by_rank))} of their own; pass Elastic(..., merge=)")
        change = f"merged from the states of {ranks(len(by_rank))}"
        return ComponentPlan(stored.blank(keys), problems + found, change, True)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        by_rank = stored.rank_keys(name)
        if by_rank and self.merge is not None:
            state = self.merge(_states_of_ranks(stored, by_rank, target), len(by_rank))
        else:
            state = stored.rebuilt(target, depth=1)
        check = getattr(self.stateful, "check_state_dict", None)
        if check is not None:
            check(state)
        return state

    def _from_to(self, stored: Stored, member: Member) -> tuple[str, bool]:
        old = stored.world_size
        if old is None or old == member.world_size:
            return AS_SAVED if self._is_own else HANDED_OVER, False
        return f"from {ranks(old)} to {member.world_size}", True

    @property
    def _is_own(self) -> bool:
        """Whether it can be asked for its state after a load; a loader of another kind begins to load by that."""
        return hasattr(self.stateful, "check_state_dict")

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        super().apply(state, before)
        self._given = state if self._is_own else None

    def remarks(self) -> list[str]:
        return [] if self._given is None else self._differences(self._given)

    def forget(self) -> None:
        self._given = None


# ---- per rank ----


class PerRank(Component):
    """State that belongs to a rank, such as a foreign data loader's cursor. Every rank's is saved.

    Args:
        stateful: has ``state_dict()`` and ``load_state_dict()``, or is a ``torch.Generator``.
        reshard: ``reshard(states, old_world, new_world, rank)`` gives the state of one of the new ranks out of those
            of all old ones, in order. Without it, another number of ranks is an error.
        rank: this process's, where several share one state (data-parallel rank under tensor parallelism); those must
            have equal states. Default: its own.
        world_size: the number of such ranks.
    """

    kind = PER_RANK

    def __init__(
        self,
        stateful: Any,
        reshard: Callable[[list[Any], int, int, int], Any] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(stateful)
        self._has_rank_in_its_state = False
        if (rank is None) != (world_size is None):
            raise ValueError("PerRank takes rank and world_size together, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: the rank must be from 0 to world_size - 1")
        self.reshard = reshard
        self._own_member = Member(rank, world_size) if rank is not None and world_size is not None else None

    def member(self, member: Member) -> Member:
        """This process among those that have a state of their own."""
        return self._own_member or member

    def state(self) -> Any:
        is_generator = isinstance(self.stateful, torch.Generator)
        return {"state": self.stateful.get_state()} if is_generator else self.stateful.state_dict()

    def note(self, state: Any, member: Member) -> Any:
        own = self.member(member)
        return own.rank, own.world_size, trees.digest(state) if own != member else ""

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        worlds = {world for _, world, _ in notes}
        if len(worlds) > 1:
            return [f"ranks were given different world sizes: {sorted(worlds)}"]
        absent = set(range(max(worlds))) - {rank for rank, _, _ in notes}
        if absent:
            return [f"no process has the state of {spans(absent)}"]
        first = {rank: digest for rank, _, digest in reversed(notes)}
        different = [index for index, (rank, _, digest) in enumerate(notes) if digest != first[rank]]
        if different:
            return [f"{spans(different)} differ from the first process that has the same PerRank rank"]
        return []

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        own = self.member(member).rank
        writer = next(index for index, note in enumerate(notes) if note[0] == own)
        return {rank_key(own): trees.encode(state)} if writer == member.rank else {}

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        return {"world_size": notes[0][1]}

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        own, by_rank = self.member(member), stored.rank_keys(name)
        problems = self._kind_problems(name, stored)
        keys, found = _keys_of_ranks(name, stored, by_rank)
        problems += found
        old = len(by_rank)
        change = AS_SAVED if self._is_known else HANDED_OVER
        if old == own.world_size or problems:
            own_keys = by_rank.get(own.rank, [])
            self._has_rank_in_its_state = not problems and self._gives(own_keys, stored)
            if self._has_rank_in_its_state:
                own_keys = own_keys + [key for key in stored.keys[name] if key not in set(keys)]
            return ComponentPlan(stored.blank(own_keys), problems, change)
        if self.reshard is None:
            problems.append(
                f"it belongs to ranks, and was saved by {ranks(old)}, not {own.world_size}; "
                "pass PerRank(..., reshard=), or leave it out"
            )
        return ComponentPlan(stored.blank(keys), problems, f"from {ranks(old)} to {own.world_size}", True)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        own, by_rank = self.member(member), stored.rank_keys(name)
        if self._has_rank_in_its_state:
            _states_of_ranks(stored, {own.rank: by_rank[own.rank]}, target)  # it unpickles that itself: plain data only
            return stored.rebuilt(target, depth=1)
        if len(by_rank) == own.world_size:
            return _states_of_ranks(stored, {own.rank: by_rank[own.rank]}, target)[0]
        assert self.reshard is not None
        states = _states_of_ranks(stored, by_rank, target)
        return self.reshard(states, len(by_rank), own.world_size, own.rank)

    @property
    def _is_known(self) -> bool:
        """Whether what is handed over is taken over; a loader cannot be asked, as it begins to load by that."""
        return isinstance(self.stateful, torch.Generator)

    def _gives(self, keys: Sequence[str], stored: Stored) -> bool:
        """Whether the object puts its rank into its state dict itself, as torchtitan's loader does ("dp_rank_3").

        What it saved is then the whole of what lies below the component.
        """
        names = {str(stored.paths[key][1]) for key in keys}
        if stored.manifest is not None or not names or isinstance(self.stateful, torch.Generator):
            return False
        with random_states.kept():
            own = self.stateful.state_dict()
        return isinstance(own, Mapping) and names <= own.keys()

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if isinstance(self.stateful, torch.Generator):
            self.stateful.set_state(state["state"])
        else:
            self.stateful.load_state_dict(state)


def _keys_of_ranks(name: str, stored: Stored, by_rank: dict[int, list[str]]) -> tuple[list[str], list[str]]:
    """All keys of a component that belong to ranks, and why they are not all there."""
    expected = stored.entry(name).get("world_size", len(by_rank))
    absent = set(range(max(expected, len(by_rank)))) - by_rank.keys()
    if not by_rank or absent:
        return [], [
            f"the checkpoint has no state of {spans(absent)} in it" if absent else "it holds no state of any rank"
        ]
    return [key for keys in by_rank.values() for key in keys], []


def _states_of_ranks(stored: Stored, by_rank: dict[int, list[str]], target: dict[str, Any]) -> list[Any]:
    states = [stored.rebuilt({key: target[key] for key in by_rank[rank]}, depth=2) for rank in sorted(by_rank)]
    if stored.manifest is not None:
        return states
    return [unpickled(state, stored.reader) if isinstance(state, bytes) else state for state in states]
