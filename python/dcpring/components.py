"""Components of a training state, and how each kind is saved and comes back on another number of ranks.

A component belongs to a Checkpointer, which runs it in steps that all ranks take together:

save:  ``state`` (this rank's), ``note`` (what all ranks see of it), ``disagreements``, ``to_save``, ``done``
load:  ``plan`` (what is needed against what is there), then the read, ``prepare`` (checks what was read), ``apply``

Nothing is changed before ``apply``, except that the tensors of a ``Sharded`` component are read in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcpring import _dcp, _tree
from dcpring._stored import PER_RANK, Stored, rank_key, unpickled
from dcpring._text import ranks, spans
from dcpring.errors import CheckpointError
from dcpring.torchside.dcp import flatten_state_dict, set_element
from dcpring.torchside.tensors import ShardedTensor, global_size

__all__ = ["Component", "Elastic", "PerRank", "Place", "Plan", "Replicated", "Sharded"]

_SHOWN = 4
"""Keys that a message names before it only counts the rest."""


@dataclass(frozen=True)
class Place:
    """A rank among those that save or load."""

    rank: int
    world_size: int


@dataclass
class Plan:
    """What one rank wants of a component, and whether it is there.

    Attributes:
        target: by key, the tensors to fill, and None for objects.
        problems: why it cannot be loaded; empty if it can.
        change: "as saved", or how it reshards.
        resharded: whether it comes back on other ranks or another mesh than it was saved on.
        unexpected: keys of the checkpoint that this rank has no place for.
    """

    target: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    change: str = "as saved"
    resharded: bool = False
    unexpected: set[str] = field(default_factory=set)


class Component:
    """What all kinds share. Use ``Sharded``, ``Replicated``, ``PerRank``, ``Elastic`` or what is built on them.

    Attributes:
        kind: as the manifest names it.
        in_place: whether a load writes into the object's own tensors.
        object: what is saved and loaded: it has ``state_dict()`` and ``load_state_dict()``.
    """

    kind: ClassVar[str]
    in_place: ClassVar[bool] = False

    def __init__(self, object: Any) -> None:
        self.object = object

    @property
    def type_name(self) -> str:
        return type(self.object).__name__

    # ---- save ----

    def state(self) -> Any:
        return self.object.state_dict()

    def note(self, state: Any, place: Place) -> Any:
        raise NotImplementedError

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        """Why what the ranks have cannot be one checkpoint."""
        return []

    def to_save(self, state: Any, notes: Sequence[Any], place: Place) -> dict[str, Any]:
        """What this rank hands to DCP below the component's name; below "" for all of it; empty if nothing."""
        raise NotImplementedError

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        """What the manifest says besides kind and type."""
        return {}

    def done(self) -> None:
        """After a save, however it went: the state is not needed any more."""

    # ---- load ----

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        raise NotImplementedError

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        """What ``apply`` takes, out of what was read. Changes nothing; raises CheckpointError if it does not fit."""
        raise NotImplementedError

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        """Takes the state over.

        Args:
            state: what ``prepare`` gave.
            before: the components that this load has applied already.
        """
        self.object.load_state_dict(state)

    def undo(self) -> None:
        """After a load that failed before it changed anything: forgets what ``plan`` had to set up."""

    def _kind_problems(self, name: str, stored: Stored, accepted: Iterable[str] = ()) -> list[str]:
        saved = stored.entry(name).get("kind", self.kind)
        if saved in (self.kind, *accepted):
            return []
        return [f"saved as {saved}, here it is {self.kind}; wrap it as it was saved, or leave it out"]


# ---- sharded ----


class Sharded(Component):
    """State whose tensors are spread over ranks (DTensor, ShardedTensor), or whole on each: DCP reshards it.

    Args:
        object: has ``state_dict()`` and ``load_state_dict()``; models and optimizers need no wrapping.
        strict: every key must be in the checkpoint and the other way round. If not, what is missing keeps its value,
            and the load's report says so.
    """

    kind = "sharded"
    in_place = True

    def __init__(self, object: Any, strict: bool = True) -> None:
        super().__init__(object)
        self.strict = strict
        self._nested: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}

    def note(self, state: Any, place: Place) -> Any:
        return meshes(state)

    def to_save(self, state: Any, notes: Sequence[Any], place: Place) -> dict[str, Any]:
        return dict(state)

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        found: list[Any] = []
        for note in notes:
            found += [mesh for mesh in note if mesh not in found]
        return {"meshes": found}

    def state_to_load(self, name: str, stored: Stored) -> dict[str, Any]:
        return dict(self.state())

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        plan = Plan(problems=self._kind_problems(name, stored))
        self._nested = {name: self.state_to_load(name, stored)}
        own_meshes = meshes(self._nested)
        if name in stored.flat:
            self._nested = self._nested[name]
        flat, self._paths = flatten_state_dict(self._nested)
        there = set(stored.metadata.state_dict_metadata)
        missing = self.missing(name, stored, {key for key in flat if key not in there}, plan)
        if missing and self.strict:
            plan.problems.append(f"{some_are(missing)} not in the checkpoint; Sharded(..., strict=False) lets them be")
        for key, value in flat.items():
            if key in there:
                plan.target[key] = value
                plan.problems += _misfits(key, value, stored)
        plan.unexpected = set(stored.keys.get(name, ())) - set(plan.target)
        _describe(plan, stored.entry(name).get("meshes"), own_meshes)
        if missing:
            plan.change += f"; {some_are(missing)} not in the checkpoint, left as it was"
        return plan

    def missing(self, name: str, stored: Stored, keys: set[str], plan: Plan) -> set[str]:
        """Those of the keys without which the load would not be whole."""
        return keys

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        for key, value in target.items():
            if not isinstance(value, Tensor | ShardedTensor):
                set_element(self._nested, self._paths[key], value)
        return self._nested if name in stored.flat else self._nested[name]


def _describe(plan: Plan, saved: list[Any] | None, own: list[Any]) -> None:
    if saved is None:
        plan.change = f"onto {mesh_text(own)}; the checkpoint does not say from which mesh"
        plan.resharded = True
    elif saved != own:
        plan.change = f"from {mesh_text(saved)} to {mesh_text(own)}"
        plan.resharded = True


def meshes(state: Any) -> list[dict[str, Any]]:
    """The device meshes that a state's tensors are spread over, each once; empty if every rank has all of it."""
    found: list[dict[str, Any]] = []
    for _, value in _tree.leaves(state):
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


def some(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more


def some_are(keys: Iterable[str]) -> str:
    names = set(keys)
    return f"{some(names)} {'is' if len(names) == 1 else 'are'}"


class ModelState(Sharded):
    """An ``nn.Module``, whatever wraps it: names are those of the bare model."""

    object: nn.Module

    def state(self) -> Any:
        return _dcp.get_model_state_dict(self.object)

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        _dcp.set_model_state_dict(self.object, state, options=_dcp.StateDictOptions(strict=self.strict))


class OptimizerState(Sharded):
    """A ``torch.optim.Optimizer``, with its parameters named as its model names them.

    DCP fills tensors that exist, so an optimizer that has never stepped is given some, and loses them again where
    nothing was loaded into them.

    Args:
        object: the optimizer.
        model: whose parameters it has.
        strict: see ``Sharded``.
    """

    object: Optimizer

    def __init__(self, object: Optimizer, model: nn.Module, strict: bool = True) -> None:
        super().__init__(object, strict)
        self.model = model
        self._was_fresh = False
        self._saved_fresh = False
        self._stateless: set[str] = set()

    def state(self) -> Any:
        return self._state_dict(flat=False)

    def _state_dict(self, flat: bool) -> dict[str, Any]:
        self._was_fresh |= not self.object.state
        options = _dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
        with _gradients_aside(self.object):
            return dict(_dcp.get_optimizer_state_dict(self.model, self.object, options=options))

    def note(self, state: Any, place: Place) -> Any:
        return {"meshes": meshes(state), "param_groups": len(self.object.param_groups), "fresh": self._was_fresh}

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        return {**notes[0], **super().entry([note["meshes"] for note in notes])}

    def done(self) -> None:
        if self._was_fresh:
            self.object.state.clear()
        self._was_fresh = False

    undo = done

    def state_to_load(self, name: str, stored: Stored) -> dict[str, Any]:
        self._saved_fresh = stored.entry(name).get("fresh", False)
        paths = [stored.paths[key] for key in stored.keys.get(name, ())]
        if any(str(path[1]).startswith("param_groups.") for path in paths if len(path) > 1):
            return self._state_dict(flat=True)
        state = self._state_dict(flat=False)
        for path in paths:
            # What a group holds besides parameters is what was saved: schedulers and versions of torch add to it.
            if len(path) == 4 and path[1] == "param_groups" and int(path[2]) < len(state["param_groups"]):
                state["param_groups"][int(path[2])].setdefault(path[3], None)
        return state

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        plan = super().plan(name, stored, place)
        paths = [stored.paths[key] for key in stored.keys.get(name, ())]
        groups = {path[2] for path in paths if len(path) > 2 and path[1] == "param_groups"}
        own = len(self.object.param_groups)
        if groups and len(groups) != own:
            plan.problems = [f"{len(groups)} parameter groups in the checkpoint, {own} here"]
        if self._stateless:
            plan.change += f"; {len(self._stateless)} parameters had no state yet"
        options = f"{name}.param_groups."
        plan.unexpected = {key for key in plan.unexpected if not key.startswith(options)}
        return plan

    def missing(self, name: str, stored: Stored, keys: set[str], plan: Plan) -> set[str]:
        """Options of a group keep their values, and a parameter that had never had a gradient has no state."""
        states = {key: self._paths[key] for key in keys if key.startswith(f"{name}.state.")}
        known = {_owner(stored.paths[key]) for key in stored.keys.get(name, ()) if key.startswith(f"{name}.state.")}
        absent = {key for key, path in states.items() if known and _owner(path) not in known}
        self._stateless = {_owner(states[key]) for key in absent}
        return states.keys() - absent

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        state = super().prepare(name, stored, target, place)
        for owner in self._stateless:
            state.get("state", {}).pop(owner, None)
        return state

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        options = _dcp.StateDictOptions(strict=False)
        _dcp.set_optimizer_state_dict(self.model, self.object, state, options=options)
        if self._saved_fresh:
            self.object.state.clear()
        self._was_fresh = False


def _owner(path: tuple[str | int, ...]) -> str:
    """The parameter that a state belongs to, by its path; flattened names hold it between "state." and the last dot."""
    return str(path[2]) if len(path) > 2 else str(path[1]).removeprefix("state.").rpartition(".")[0]


@contextlib.contextmanager
def _gradients_aside(optimizer: Optimizer) -> Iterator[None]:
    """DCP gives an optimizer state by a step without gradients, unless some are there; then it would leave it empty."""
    if optimizer.state:
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


# ---- replicated, and elastic ----


class Replicated(Component):
    """State that is the same on all ranks: step counters, configuration, learning rate schedules. Saved once.

    Ranks whose states differ at a save are an error that names them.

    Args:
        object: has ``state_dict()`` and ``load_state_dict()``, or is a mutable mapping.
    """

    kind = "replicated"

    def state(self) -> Any:
        return dict(self.object) if isinstance(self.object, MutableMapping) else self.object.state_dict()

    def note(self, state: Any, place: Place) -> Any:
        return _tree.digest(state)

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        others = [rank for rank, note in enumerate(notes) if note != notes[0]]
        if not others:
            return []
        return [f"{spans(others)} differ from rank 0; what belongs to a rank is PerRank"]

    def to_save(self, state: Any, notes: Sequence[Any], place: Place) -> dict[str, Any]:
        return {"": _tree.encode(state)} if place.rank == 0 else {}

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        problems = self._kind_problems(name, stored)
        if stored.rank_keys(name) and not problems:
            problems = [f"it holds states of {ranks(len(stored.rank_keys(name)))}; wrap it in PerRank() or Elastic()"]
        return Plan(stored.blank(stored.keys.get(name, [])), problems)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        return stored.rebuilt(target, depth=1)

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if isinstance(self.object, MutableMapping):
            self.object.clear()
            self.object.update(state)
        else:
            self.object.load_state_dict(state)


class Elastic(Component):
    """Global progress that any number of ranks can go on from, such as that of an ``ElasticLoader``. Saved once.

    Args:
        object: has ``state_dict()`` and ``load_state_dict()``. Where it has ``combine_state_dicts(states)``, that makes
            one state of all ranks' at a save, or raises; else they must be equal. Where it has
            ``check_state_dict(state)``, that raises if the state does not fit, and changes nothing.
        merge: ``merge(states, old_world)`` makes global progress of the states that ranks had of their own in a
            checkpoint that has such; ``states`` is in the order of ranks.
    """

    kind = "elastic"

    def __init__(self, object: Any, merge: Callable[[list[Any], int], Any] | None = None) -> None:
        super().__init__(object)
        self.merge = merge

    def note(self, state: Any, place: Place) -> Any:
        return state

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        try:
            self._combined(notes)
        except CheckpointError as error:
            return [str(error)]
        return []

    def _combined(self, states: Sequence[Any]) -> Any:
        combine = getattr(self.object, "combine_state_dicts", None)
        if combine is not None:
            return combine(list(states))
        first = _tree.digest(states[0])
        others = [rank for rank, state in enumerate(states) if _tree.digest(state) != first]
        if others:
            raise CheckpointError(f"the progress of {spans(others)} is not that of rank 0")
        return states[0]

    def to_save(self, state: Any, notes: Sequence[Any], place: Place) -> dict[str, Any]:
        return {"": _tree.encode(self._combined(notes))} if place.rank == 0 else {}

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        by_rank = stored.rank_keys(name)
        problems = self._kind_problems(name, stored, accepted=[PerRank.kind] if by_rank else [])
        if not by_rank:
            return Plan(stored.blank(stored.keys.get(name, [])), problems, *_from_to(stored, place))
        keys, found = _keys_of_ranks(name, stored, by_rank)
        if self.merge is None:
            found.append(f"it holds states of {ranks(len(by_rank))} of their own; pass Elastic(..., merge=)")
        change = f"merged from the states of {ranks(len(by_rank))}"
        return Plan(stored.blank(keys), problems + found, change, True)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        by_rank = stored.rank_keys(name)
        if by_rank and self.merge is not None:
            state = self.merge(_states_of_ranks(stored, by_rank, target), len(by_rank))
        else:
            state = stored.rebuilt(target, depth=1)
        check = getattr(self.object, "check_state_dict", None)
        if check is not None:
            check(state)
        return state


def _from_to(stored: Stored, place: Place) -> tuple[str, bool]:
    old = stored.world_size
    if old is None or old == place.world_size:
        return "as saved", False
    return f"from {ranks(old)} to {place.world_size}", True


# ---- per rank ----


class PerRank(Component):
    """State that belongs to a rank, such as a foreign data loader's cursor. Every rank's is saved.

    Args:
        object: has ``state_dict()`` and ``load_state_dict()``, or is a ``torch.Generator``.
        reshard: ``reshard(states, old_world, new_world, rank)`` gives the state of one of the new ranks out of those
            of all old ones, in order. Without it, another number of ranks is an error.
        rank: this process's, where several share one state (data-parallel rank under tensor parallelism); those must
            have equal states. Default: its own.
        world_size: the number of such ranks.
    """

    kind = PER_RANK

    def __init__(
        self,
        object: Any,
        reshard: Callable[[list[Any], int, int, int], Any] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(object)
        if (rank is None) != (world_size is None):
            raise ValueError("PerRank takes rank and world_size together, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: the rank must be from 0 to world_size - 1")
        self.reshard = reshard
        self._own_place = Place(rank, world_size) if rank is not None and world_size is not None else None

    def place(self, place: Place) -> Place:
        """This process among those that have a state of their own."""
        return self._own_place or place

    def state(self) -> Any:
        is_generator = isinstance(self.object, torch.Generator)
        return {"state": self.object.get_state()} if is_generator else self.object.state_dict()

    def note(self, state: Any, place: Place) -> Any:
        own = self.place(place)
        return own.rank, own.world_size, _tree.digest(state) if own != place else ""

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

    def to_save(self, state: Any, notes: Sequence[Any], place: Place) -> dict[str, Any]:
        own = self.place(place).rank
        writer = next(index for index, note in enumerate(notes) if note[0] == own)
        return {rank_key(own): _tree.encode(state)} if writer == place.rank else {}

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        return {"world_size": notes[0][1]}

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        own, by_rank = self.place(place), stored.rank_keys(name)
        problems = self._kind_problems(name, stored)
        keys, found = _keys_of_ranks(name, stored, by_rank)
        problems += found
        old = len(by_rank)
        if old == own.world_size or problems:
            return Plan(stored.blank(by_rank.get(own.rank, [])), problems)
        if self.reshard is None:
            problems.append(
                f"it belongs to ranks, and was saved by {ranks(old)}, not {own.world_size}; "
                "pass PerRank(..., reshard=), or leave it out"
            )
        return Plan(stored.blank(keys), problems, f"from {ranks(old)} to {own.world_size}", True)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        own, by_rank = self.place(place), stored.rank_keys(name)
        if len(by_rank) == own.world_size:
            return _states_of_ranks(stored, {own.rank: by_rank[own.rank]}, target)[0]
        assert self.reshard is not None
        states = _states_of_ranks(stored, by_rank, target)
        return self.reshard(states, len(by_rank), own.world_size, own.rank)

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if isinstance(self.object, torch.Generator):
            self.object.set_state(state["state"])
        else:
            self.object.load_state_dict(state)


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
