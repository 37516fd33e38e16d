"""Optimizers as components: with their parameters named as the model names them, or in a form of their own.

What a parameter's state consists of is what was saved; how its tensors are spread over ranks is what the optimizer has,
or would have after its first step. Nothing here takes a step. The options and members of groups are objects, so they
are read, and compared, before anything is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError
from dcpring.names.first_step import (
    NoFirstStep,
    first_step,
    held,
    is_fresh,
    load_own_state_dict,
    own_state_dict,
    parameters_of,
    wrapped,
)
from dcpring.names.state_dict.by_name import (
    has_flat_parameters,
    load_named_optimizer_state,
    named_optimizer_state,
    named_parameters,
)
from dcpring.names.state_dict.optimizers import is_numbered
from dcpring.names.state_dict.set_optimizers import same_value
from dcpring.resume import trees
from dcpring.resume.components import Component, ComponentPlan, Member, Remarks, SaveCheck, differences, each_once
from dcpring.resume.manifest import Stored
from dcpring.resume.param_groups import Names, joined, match_groups, members, options_of
from dcpring.resume.schedules import SCHEDULED
from dcpring.resume.sharded import (
    Sharded,
    TensorsPlan,
    all_meshes,
    cast_notes,
    digest_of_names,
    first_with,
    meshes,
)
from dcpring.torchside.dcp import flatten_state_dict, set_element
from dcpring.torchside.optim import GROUPS, PARAM_NAMES, PARAMS, STATE
from dcpring.torchside.tensors import ShardedTensor

__all__ = ["OptimizerState", "OptimizerStates"]

_MEMBERS, _OWN_GROUPS = "members", "groups"
"""In a rank's note: a digest of which parameters its groups have, and the groups, where they are asked for."""
_NOWHERE = object()

Path = tuple[str | int, ...]


# ---- what was saved ----


@dataclass
class _Saved:
    """The keys of an optimizer in a checkpoint.

    Attributes:
        state: by parameter, each key and its path below that.
        options: by parameter, the keys of its group's options, where groups were flattened.
        groups: the keys of groups that were not.
        foreign: the keys of parameters that this optimizer does not have.
        is_flat: whether names were flattened: paths below a parameter are texts with dots.
    """

    state: dict[str, dict[str, Path]] = field(default_factory=dict)
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)
    is_flat: bool = False

    @staticmethod
    def of(keys: Iterable[str], paths: Mapping[str, Path], owners: set[str]) -> _Saved:
        saved = _Saved()
        for key in keys:
            kind, *rest = paths[key][1:]
            head, _, text = str(kind).partition(".")
            saved.is_flat |= bool(text)
            if text:
                owner = _owner_in(text, owners)
                rest = [text.removeprefix(f"{owner}."), *rest]
            else:
                owner = str(rest.pop(0)) if head == STATE and rest else ""
            if head == GROUPS and not text:
                saved.groups.append(key)
            elif owner not in owners:
                saved.foreign.add(key)
            elif head == GROUPS:
                saved.options.setdefault(owner, {})[str(rest[0])] = key
            else:
                saved.state.setdefault(owner, {})[key] = tuple(rest)
        return saved

    def keys_of_groups(self) -> list[str]:
        return [*self.groups, *(key for options in self.options.values() for key in options.values())]

    def tree(self, owner: str, own: Any) -> Any:
        """The keys of a parameter's state, in the structure that it was saved in.

        Args:
            owner: the parameter's name.
            own: its state here, which tells dots in names from those between them.
        """
        root: dict[str, Any] = {}
        texts = {".".join(map(str, path)): path for path, _ in _leaves(own)} if self.is_flat else {}
        for key, path in self.state[owner].items():
            if self.is_flat:
                text = ".".join(map(str, path))
                path = texts.get(text, tuple(text.split(".")))
            set_element(root, (owner, *path), key)
        return root[owner]


def _owner_in(text: str, owners: set[str]) -> str:
    """The longest of the names that a text begins with."""
    owner = text
    while owner and owner not in owners:
        owner = owner.rpartition(".")[0]
    return owner


def _leaves(state: Any) -> list[tuple[Path, Any]]:
    flat, paths = flatten_state_dict({"": state})
    return [(path[1:], flat[key]) for key, path in paths.items()]


def _mapped(keys: Any, own: Any, value: Callable[[str, Any], Any]) -> Any:
    """A tree of keys as one of values, with the keys of dicts, and the tuples, of what is here.

    Args:
        keys: the tree.
        own: what is here in its place; what is not in the tree is left out.
        value: gives the value for a key and what is here in its place, or ``_NOWHERE``; such a value is left out.
    """
    if isinstance(keys, dict):
        real = {str(part): part for part in own} if isinstance(own, Mapping) else {}
        found = {
            real.get(part, part): _mapped(inner, own[real[part]] if part in real else _NOWHERE, value)
            for part, inner in keys.items()
        }
        return {part: one for part, one in found.items() if one is not _NOWHERE}
    if isinstance(keys, list):
        here = list(own) if isinstance(own, list | tuple) else []
        here += [_NOWHERE] * (len(keys) - len(here))
        return [_mapped(inner, at, value) for inner, at in zip(keys, here, strict=False)]
    return value(keys, own)


# ---- one load ----


class _Ready(NamedTuple):
    """What a load gives an optimizer.

    Attributes:
        state: its state dict.
        has_own_form: whether that is of the form of the optimizer's class.
        is_fresh: whether what was saved had no state.
        kept: the options of groups that the checkpoint does not have.
    """

    state: dict[str, Any]
    has_own_form: bool
    is_fresh: bool
    kept: frozenset[str] = frozenset()


class _OwnFormPlan(TensorsPlan):
    """A plan to load an optimizer whose class gives a state dict of a form of its own."""

    def __init__(self, component: OptimizerState, name: str, stored: Stored, raw: dict[str, Any]) -> None:
        super().__init__(component, name, stored, raw)
        keys = [key for key in stored.keys.get(name, ()) if _is_flat_option(stored.paths[key])]
        self._groups = component.inner_groups() if keys else []
        aliases = {alias for group in self._groups for names in group for alias in names}
        self._saved = _Saved.of(keys, stored.paths, aliases)
        self._is_fresh = _was_fresh(name, stored)
        self.describe(raw)

    def prepare(self, read: dict[str, Any]) -> Any:
        if self._saved.options:
            _flat_options(self._groups, self._saved, read)  # for what it refuses
        return _Ready(super().prepare(read), True, self._is_fresh)


class _NamedPlan(TensorsPlan):
    """A plan to load an optimizer by the names of its parameters.

    Attributes:
        _current: the state that the optimizer has, or will have after its first step, by parameter.
        _owners: under which name each parameter was saved.
    """

    def __init__(self, component: OptimizerState, name: str, stored: Stored, raw: dict[str, Any]) -> None:
        super().__init__(component, name, stored, _besides(raw))
        self._optimizer, self._model, self._type_name = component.stateful, component.model, component.type_name
        self._groups = named_parameters(self._model, self._optimizer)
        slots = [slot for group in self._groups for slot in group]
        others = [str(key) for key in raw[STATE] if not isinstance(key, int)]
        keys = [key for key in stored.keys.get(name, ()) if key not in self.target.keys() | self.in_place.keys()]
        self._saved = _Saved.of(keys, stored.paths, {alias for _, names in slots for alias in names} | set(others))
        self._current: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._is_fresh = _was_fresh(name, stored)
        self.target |= stored.blank(self._saved.keys_of_groups())
        self.unexpected = set(self._saved.foreign)
        if not self._is_fresh:
            raw, is_known = self._with_first_step(slots, raw)
            self._current = named_optimizer_state(self._model, self._optimizer, raw)[STATE]
            self._add_state(slots + [(torch.empty(0), [other]) for other in others], is_known)
        self.describe(self._current)

    def _with_first_step(self, slots: list[tuple[Tensor, Names]], raw: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The state dict with what a first step makes for parameters that have no state, and whether that is known."""
        wanted = [parameter for parameter, _ in slots if not self._optimizer.state.get(parameter)]
        if not wanted:
            return raw, True
        try:
            made = first_step(self._optimizer, wanted).states
        except NoFirstStep:
            return raw, False
        numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(self._optimizer))}
        added = {numbers[id(parameter)]: one for parameter, one in made.items()}
        return {**raw, STATE: {**raw[STATE], **added}}, True

    def _add_state(self, slots: list[tuple[Tensor, Names]], is_known: bool) -> None:
        saved_type = self.stored.entry(self.name).get("type", self._type_name)
        if self._saved.state and not is_known and saved_type != self._type_name:
            self.problems.append(f"saved from a {saved_type}, here it is a {self._type_name}")
        missing: set[str] = set()
        stateless = 0
        for parameter, names in slots:
            own = self._current.get(names[0], {})
            saved = next((alias for alias in names if alias in self._saved.state), None)
            if saved is not None:
                self._owners[names[0]] = saved
                lacking = self._add_parameter(names[0], saved, parameter, saved_type == self._type_name)
            elif self._saved.state:  # it never had a gradient
                lacking, stateless = set(), stateless + bool(own)
                self._current.pop(names[0], None)
            else:
                lacking = set(own)
            missing |= {f"{self.name}.{STATE}.{names[0]}.{part}" for part in lacking}
        if stateless:
            self.notes.append(f"{stateless} parameters had no state yet")
        self.note_missing(missing)

    def _add_parameter(self, owner: str, saved: str, parameter: Tensor, is_same_type: bool) -> set[Any]:
        """Plans the state of one parameter; returns the parts of it that the checkpoint lacks."""
        own = self._current.get(owner, {})
        keys = self._saved.tree(saved, own)
        lacking = {part for part in own if str(part) not in keys} if isinstance(keys, dict) else set()
        # State that the optimizer does not have, as its options are others, comes with the options that were saved.
        grows = not lacking and is_same_type

        def target(key: str, here: Any) -> Any:
            if here is _NOWHERE or _is_tensor(here) != self.stored.is_tensor(key):
                if not grows and here is _NOWHERE:
                    self.unexpected.add(key)
                    return None
                here = self._made(key, parameter) if grows else here
            self.add(key, here)
            return here

        _mapped(keys, own, target)
        return lacking

    def _made(self, key: str, parameter: Tensor) -> Any:
        """What to read into where the optimizer has nothing: spread as the parameter is, or whole."""
        if not self.stored.is_tensor(key):
            return None
        dtype, size = self.stored.tensor(key)
        is_flat = has_flat_parameters(self._model)
        if size == parameter.shape and not is_flat:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if size.numel() > 1 and (isinstance(parameter, DTensor) or is_flat):
            self.problems.append(f"how {key!r} is spread over ranks cannot be told before the optimizer's first step")
        return self.stored.blank([key], parameter.device if size.numel() > 1 else "cpu")[key]

    def prepare(self, read: dict[str, Any]) -> Any:
        groups = [[names for _, names in group] for group in self._groups]
        options = _flat_options(groups, self._saved, read) if self._saved.is_flat else self._options(groups, read)
        own = [options_of(group) for group in self._optimizer.param_groups]
        kept = {name for here, there in zip(own, options, strict=True) if there for name in here.keys() - there.keys()}
        state = {
            **super().prepare(read),
            STATE: {} if self._is_fresh else self._read_state(read),
            GROUPS: [
                {**here, **there, **_own_names(group), PARAMS: [names[0] for names in members]}
                for group, here, there, members in zip(self._optimizer.param_groups, own, options, groups, strict=True)
            ],
        }
        return _Ready(state, False, self._is_fresh, frozenset(kept - self._optimizer.defaults.keys() - set(SCHEDULED)))

    def _options(self, groups: list[list[Names]], read: dict[str, Any]) -> list[dict[str, Any]]:
        """The options of each group, out of the saved group that it is. A new group has none."""
        keys = self._saved.groups
        saved = self.stored.rebuilt({key: read[key] for key in keys}, depth=2) if keys else []
        there = [list(group.get(PARAMS, [])) for group in saved]
        matched, problems = match_groups(groups, there, self._optimizer.param_groups, saved)
        known = {name for names in there for name in names}
        added = [names[0] for group in groups for names in group if not known & set(names)]
        if added and keys and self.is_strict:
            problems.append(f"in no parameter group of the checkpoint: {some_keys(added)}")
        if problems:
            raise CheckpointError("; ".join(problems))
        return [{} if index is None else options_of(saved[index]) for index in matched]

    def _read_state(self, read: dict[str, Any]) -> dict[str, Any]:
        known = {**read, **self.in_place}
        state: dict[str, Any] = {}
        for owner, saved in self._owners.items():
            own = self._current.get(owner, {})
            keys = self._saved.tree(saved, own)
            state[owner] = _mapped(keys, own, lambda key, here: known.get(key, _NOWHERE))
            if isinstance(keys, dict):  # what the checkpoint lacks stays, where that may be
                state[owner] |= {part: value for part, value in own.items() if str(part) not in keys}
        return state


def _was_fresh(name: str, stored: Stored) -> bool:
    """Whether an optimizer was saved before its first step."""
    return bool(stored.entry(name).get("fresh", False))


def _flat_options(groups: list[list[Names]], saved: _Saved, read: dict[str, Any]) -> list[dict[str, Any]]:
    """The options of each group, which were saved for each of its parameters."""
    found = []
    for group in groups:
        known = [(names[0], saved.options[alias]) for names in group for alias in names if alias in saved.options]
        options = [{key: read.get(at) for key, at in keys.items()} for _, keys in known]
        for (name, _), other in zip(known[1:], options[1:], strict=True):
            mixed = [key for key, value in options[0].items() if not same_value(value, other.get(key))]
            if mixed:
                raise CheckpointError(
                    f"parameters of one group were saved in groups with different {', '.join(mixed)}: "
                    f"{known[0][0]!r} and {name!r}"
                )
        found.append(options_of(options[0]) if options else {})
    return found


# ---- the components ----


class OptimizerState(Sharded):
    """A ``torch.optim.Optimizer``.

    One without state is saved and loaded as such. One whose class gives a state dict of a form of its own (torchtitan's
    container) is asked for that, and given it back.

    Args:
        stateful: the optimizer.
        model: whose parameters it has.
        strict: see ``Sharded``.
    """

    stateful: Optimizer

    def __init__(self, stateful: Optimizer, model: nn.Module, strict: bool = True) -> None:
        super().__init__(stateful, strict)
        self.model = model

    @property
    def type_name(self) -> str:
        return type(wrapped(self.stateful)).__name__

    def _asked(self) -> tuple[dict[str, Any], bool]:
        """The optimizer's own state dict, and whether it is of a form of its own."""
        raw = own_state_dict(self.stateful)
        has_own_form = not is_numbered(raw, self.stateful)
        if has_own_form and has_flat_parameters(self.model):
            raise CheckpointError(
                f"{type(self.stateful).__name__} gives a state dict of its own form, which does not know the parts of "
                "FSDP1's parameters; use FSDP2 (fully_shard)"
            )
        return raw, has_own_form

    def inner_groups(self) -> list[list[Names]]:
        """The groups of the optimizers that this one holds, or its own, as the names of their parameters."""
        inside = [one for _, one in held(self.stateful)] or [self.stateful]
        slots = [group for one in inside for group in named_parameters(self.model, one)]
        return [[names for _, names in group] for group in slots]

    def collect(self, member: Member) -> tuple[Any, Any]:
        raw, has_own_form = self._asked()
        state = raw if has_own_form else {**raw, **named_optimizer_state(self.model, self.stateful, raw)}
        return state, _note(state, [self.stateful], is_named=not has_own_form)

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        return _checked_groups(state, notes, member)

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        raw, has_own_form = self._asked()
        return (_OwnFormPlan if has_own_form else _NamedPlan)(self, name, stored, raw)

    def take(self, ready: _Ready, before: Sequence[Component]) -> Remarks:
        if ready.has_own_form:
            self._make_state()
            load_own_state_dict(self.stateful, ready.state)
        else:
            load_named_optimizer_state(self.model, self.stateful, ready.state)
        if ready.is_fresh:
            for optimizer in (self.stateful, *(one for _, one in held(self.stateful))):
                optimizer.state.clear()
        if ready.has_own_form:
            return lambda: differences(self._asked()[0], ready.state)
        return lambda: self._remarks(ready)

    def _make_state(self) -> None:
        """Gives the optimizers that this one holds the state that it would make them take a step for."""
        for _, one in held(self.stateful):
            if is_fresh(one):
                with contextlib.suppress(NoFirstStep):
                    one.state.update(first_step(one).states)

    def _remarks(self, ready: _Ready) -> list[str]:
        """What the optimizer has made of its state: torch's cast it to the type of the parameter."""
        casts: list[tuple[torch.dtype, torch.dtype]] = []
        changed: set[str] = set()
        slots = [slot for group in named_parameters(self.model, self.stateful) for slot in group]
        for parameter, names in slots if not has_flat_parameters(self.model) else ():
            taken = dict(_leaves(self.stateful.state.get(parameter, {})))
            for path, value in _leaves(ready.state[STATE].get(names[0], {})):
                if isinstance(value, Tensor) and isinstance(taken.get(path), Tensor):
                    casts.append((value.dtype, taken[path].dtype))
                elif trees.digest(value) != trees.digest(taken.get(path)):
                    changed.add(".".join(map(str, (names[0], *path))))
        notes = cast_notes(casts)
        if changed:
            notes.append(f"{type(self.stateful).__name__} has made something else of {some_keys(changed)}")
        if ready.kept:
            notes.append(f"options of groups that are not in the checkpoint stay: {some_keys(ready.kept)}")
        return notes


class OptimizerStates(Sharded):
    """Several optimizers that share the parameters of a model among them, saved as one with the groups of all.

    How many there are is not saved: those of a model's parts on a rank, any number of ranks can go on with.

    Args:
        each: at least one.
    """

    def __init__(self, each: Sequence[OptimizerState]) -> None:
        super().__init__([one.stateful for one in each], each[0].strict)
        self.each = list(each)

    @property
    def type_name(self) -> str:
        return self.each[0].type_name

    def collect(self, member: Member) -> tuple[Any, Any]:
        whole: dict[str, Any] = {}
        for one in self.each:
            for name, value in one.collect(member)[0].items():
                if name == STATE and name in whole:
                    whole[name] = {**whole[name], **value}
                elif name == GROUPS and name in whole:
                    whole[name] = [*whole[name], *value]
                elif whole.setdefault(name, value) is not value and trees.digest(whole[name]) != trees.digest(value):
                    raise CheckpointError(f"its optimizers have different values of {name!r}")
        return whole, _note(whole, self.stateful, is_named=isinstance(whole.get(GROUPS), list))

    def check(self, state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
        return _checked_groups(state, notes, member)

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        plans = [one.plan(name, stored, member) for one in self.each]
        return ComponentPlan(
            target={key: value for plan in plans for key, value in plan.target.items()},
            problems=each_once(plan.problems for plan in plans),
            change="; ".join(each_once([plan.change] for plan in plans)),
            resharded=any(plan.resharded for plan in plans),
            unexpected=set.intersection(*(plan.unexpected for plan in plans)),
            in_place={key: value for plan in plans for key, value in plan.in_place.items()},
            notes=each_once(plan.notes for plan in plans),
            rebuild=lambda read: [plan.prepare(read) for plan in plans],
        )

    def take(self, ready: Sequence[_Ready], before: Sequence[Component]) -> Remarks:
        remarks = [one.take(own, before) for one, own in zip(self.each, ready, strict=True)]
        return lambda: each_once(one() for one in remarks)


# ---- parameter groups that differ between ranks ----


def _note(state: Any, optimizers: Sequence[Optimizer], is_named: bool) -> dict[str, Any]:
    noted = {
        "meshes": meshes(state),
        "param_groups": sum(len(one.param_groups) for one in optimizers),
        "fresh": all(map(is_fresh, optimizers)),
    }
    if is_named:
        noted[_MEMBERS] = digest_of_names(members(state[GROUPS]))
    return noted


def _checked_groups(state: Any, notes: Sequence[Any], member: Member) -> SaveCheck:
    """Joins the groups of ranks that have different ones: of each that differs, those of the first rank that has it."""
    first = first_with([note.get(_MEMBERS) for note in notes])
    seen = {rank: note[_OWN_GROUPS] for rank, note in enumerate(notes) if _OWN_GROUPS in note}
    groups, problems = joined(seen)
    entry = {
        "meshes": all_meshes(notes),
        "param_groups": len(groups) or notes[0]["param_groups"],
        "fresh": all(note["fresh"] for note in notes),
    }
    check = SaveCheck({**state, GROUPS: groups} if groups else dict(state), entry, problems)
    if len(first) > 1 and not seen:
        is_first = member.rank in first.values() and _MEMBERS in notes[member.rank]
        check.detail = {_OWN_GROUPS: state[GROUPS]} if is_first else {}
    return check


def _besides(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a class, or a hook, puts into a state dict besides what torch does."""
    return {name: value for name, value in raw.items() if name not in (STATE, GROUPS)}


def _is_flat_option(path: Path) -> bool:
    return len(path) == 2 and str(path[1]).startswith(f"{GROUPS}.")


def _own_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name == PARAM_NAMES}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | ShardedTensor)
