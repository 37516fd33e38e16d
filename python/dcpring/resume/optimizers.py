"""Optimizers as components: with their parameters named as the model names them, or in a form of their own.

What a parameter's state consists of is what was saved; how its tensors are spread over ranks is what the optimizer has,
or would have after its first step. Nothing here takes a step. The options and members of groups are objects, so they
are read, and compared, before anything is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from dcpring.resume.components import Component, ComponentPlan, Member, Several, each_once
from dcpring.resume.manifest import Stored
from dcpring.resume.param_groups import Names, joined, match_groups, members, options_of
from dcpring.resume.schedules import SCHEDULED
from dcpring.resume.sharded import Sharded, cast_notes, digest_of_names, first_with
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


# ---- the component ----


class _Grouped(Sharded):
    """What a save does about parameter groups: those of ranks that have different ones are joined."""

    def _note(self, state: Any, optimizers: Sequence[Optimizer], is_named: bool) -> dict[str, Any]:
        noted = {
            "meshes": super().note(state, Member(0, 1)),
            "param_groups": sum(len(one.param_groups) for one in optimizers),
            "fresh": all(map(is_fresh, optimizers)),
        }
        if is_named:
            noted[_MEMBERS] = digest_of_names(members(state[GROUPS]))
        return noted

    def detail(self, state: Any, notes: Sequence[Any], member: Member) -> Any:
        """The groups, if ranks have different ones: of each that differs, those of the first rank that has them."""
        first = first_with([note.get(_MEMBERS) for note in notes])
        if len(first) == 1:
            return None
        return {_OWN_GROUPS: state[GROUPS]} if member.rank in first.values() and _MEMBERS in notes[member.rank] else {}

    def disagreements(self, notes: Sequence[Any]) -> list[str]:
        return _joined(notes)[1]

    def to_save(self, state: Any, notes: Sequence[Any], member: Member) -> dict[str, Any]:
        groups, _ = _joined(notes)
        return {**state, GROUPS: groups} if groups else dict(state)

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        groups, _ = _joined(notes)
        return {
            **super().entry([note["meshes"] for note in notes]),
            "param_groups": len(groups) or notes[0]["param_groups"],
            "fresh": all(note["fresh"] for note in notes),
        }


class OptimizerState(_Grouped):
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
        self._has_own_form = False
        self._saved_fresh = False
        self._saved = _Saved()
        self._current: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._tensors: dict[str, Any] = {}
        self._kept: set[str] = set()

    @property
    def type_name(self) -> str:
        return type(wrapped(self.stateful)).__name__

    # ---- save ----

    def state(self) -> Any:
        raw = self._ask()
        return raw if self._has_own_form else {**raw, **named_optimizer_state(self.model, self.stateful, raw)}

    def _ask(self) -> dict[str, Any]:
        """The optimizer's own state dict."""
        raw = own_state_dict(self.stateful)
        self._has_own_form = not is_numbered(raw, self.stateful)
        if self._has_own_form and has_flat_parameters(self.model):
            raise CheckpointError(
                f"{type(self.stateful).__name__} gives a state dict of its own form, which does not know the parts of "
                "FSDP1's parameters; use FSDP2 (fully_shard)"
            )
        return raw

    def note(self, state: Any, member: Member) -> Any:
        return self._note(state, [self.stateful], is_named=not self._has_own_form)

    # ---- load: what is needed ----

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        self.forget()
        self._saved_fresh = bool(stored.entry(name).get("fresh", False))
        raw = self._ask()
        if self._has_own_form:
            plan = self.plan_for(name, stored, raw)
            self._saved = self._saved_options(name, stored)
            self.describe(plan, stored, name, raw)
            return plan
        slots = [slot for group in named_parameters(self.model, self.stateful) for slot in group]
        others = [str(key) for key in raw[STATE] if not isinstance(key, int)]
        plan = self.plan_for(name, stored, _besides(raw))
        keys = [key for key in stored.keys.get(name, ()) if key not in plan.target.keys() | plan.in_place.keys()]
        self._saved = _Saved.of(keys, stored.paths, {alias for _, names in slots for alias in names} | set(others))
        plan.target |= stored.blank(self._keys_of_groups())
        plan.unexpected = set(self._saved.foreign)
        if not self._saved_fresh:
            raw, is_known = self._with_first_step(slots, raw)
            self._current = named_optimizer_state(self.model, self.stateful, raw)[STATE]
            slots += [(torch.empty(0), [other]) for other in others]
            self._plan_state(name, stored, slots, is_known, plan)
        self.describe(plan, stored, name, self._current)
        return plan

    def _inner_groups(self) -> list[list[Names]]:
        """The groups of the optimizers that one holds, or its own, as the names of their parameters."""
        inside = [one for _, one in held(self.stateful)] or [self.stateful]
        slots = [group for one in inside for group in named_parameters(self.model, one)]
        return [[names for _, names in group] for group in slots]

    def _saved_options(self, name: str, stored: Stored) -> _Saved:
        """What a form of its own has of groups, where it has torchtitan's names for them."""
        keys = [key for key in stored.keys.get(name, ()) if _is_flat_option(stored.paths[key])]
        groups = self._inner_groups() if keys else []
        return _Saved.of(keys, stored.paths, {alias for group in groups for names in group for alias in names})

    def _keys_of_groups(self) -> list[str]:
        return [*self._saved.groups, *(key for options in self._saved.options.values() for key in options.values())]

    def _plan_state(
        self, name: str, stored: Stored, slots: list[tuple[Tensor, Names]], is_known: bool, plan: ComponentPlan
    ) -> None:
        saved_type = stored.entry(name).get("type", self.type_name)
        if self._saved.state and not is_known and saved_type != self.type_name:
            plan.problems.append(f"saved from a {saved_type}, here it is a {self.type_name}")
        missing: set[str] = set()
        stateless = 0
        for parameter, names in slots:
            own = self._current.get(names[0], {})
            saved = next((alias for alias in names if alias in self._saved.state), None)
            if saved is not None:
                self._owners[names[0]] = saved
                lacking = self._plan_parameter(names[0], saved, parameter, stored, plan, saved_type)
            elif self._saved.state:  # it never had a gradient
                lacking, stateless = set(), stateless + bool(own)
                self._current.pop(names[0], None)
            else:
                lacking = set(own)
            missing |= {f"{name}.{STATE}.{names[0]}.{part}" for part in lacking}
        if stateless:
            plan.notes.append(f"{stateless} parameters had no state yet")
        self._tensors = plan.in_place
        self.note_missing(plan, missing)

    def _with_first_step(self, slots: list[tuple[Tensor, Names]], raw: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The state dict with what a first step makes for parameters that have no state, and whether that is known."""
        wanted = [parameter for parameter, _ in slots if not self.stateful.state.get(parameter)]
        if not wanted:
            return raw, True
        try:
            made = first_step(self.stateful, wanted).states
        except NoFirstStep:
            return raw, False
        numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(self.stateful))}
        added = {numbers[id(parameter)]: one for parameter, one in made.items()}
        return {**raw, STATE: {**raw[STATE], **added}}, True

    def _plan_parameter(
        self, owner: str, saved: str, parameter: Tensor, stored: Stored, plan: ComponentPlan, saved_type: str
    ) -> set[Any]:
        """Plans the state of one parameter; returns the parts of it that the checkpoint lacks."""
        own = self._current.get(owner, {})
        keys = self._saved.tree(saved, own)
        lacking = {part for part in own if str(part) not in keys} if isinstance(keys, dict) else set()
        # What is not here, as its options are others, comes with them: if it is an optimizer of the same class.
        grows = not lacking and saved_type == self.type_name

        def target(key: str, here: Any) -> Any:
            if here is _NOWHERE or _is_tensor(here) != stored.is_tensor(key):
                if not grows and here is _NOWHERE:
                    plan.unexpected.add(key)
                    return None
                here = self._made(key, parameter, stored, plan) if grows else here
            self.add(plan, key, here, stored)
            return here

        _mapped(keys, own, target)
        return lacking

    def _made(self, key: str, parameter: Tensor, stored: Stored, plan: ComponentPlan) -> Any:
        """What to read into where the optimizer has nothing: spread as the parameter is, or whole."""
        if not stored.is_tensor(key):
            return None
        dtype, size = stored.tensor(key)
        if size == parameter.shape and not has_flat_parameters(self.model):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if size.numel() > 1 and (isinstance(parameter, DTensor) or has_flat_parameters(self.model)):
            plan.problems.append(f"how {key!r} is spread over ranks cannot be told before the optimizer's first step")
        return stored.blank([key], parameter.device if size.numel() > 1 else "cpu")[key]

    # ---- load: what was read ----

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        if self._has_own_form:
            self._flat_options(self._inner_groups() if self._saved.options else [], target)
            return super().prepare(name, stored, target, member)
        slots = named_parameters(self.model, self.stateful)
        groups = [[names for _, names in group] for group in slots]
        options = self._flat_options(groups, target) if self._saved.is_flat else self._options(groups, stored, target)
        own = [options_of(group) for group in self.stateful.param_groups]
        kept = {name for here, there in zip(own, options, strict=True) if there for name in here.keys() - there.keys()}
        self._kept = kept - self.stateful.defaults.keys() - set(SCHEDULED)
        return {
            **super().prepare(name, stored, {key: target[key] for key in target if key in self._paths}, member),
            STATE: {} if self._saved_fresh else self._read_state(target),
            GROUPS: [
                {**here, **there, **_own_names(group), PARAMS: [names[0] for names in members]}
                for group, here, there, members in zip(self.stateful.param_groups, own, options, groups, strict=True)
            ],
        }

    def _options(self, groups: list[list[Names]], stored: Stored, target: dict[str, Any]) -> list[dict[str, Any]]:
        """The options of each group, out of the saved one that it is. A group that is new has none."""
        keys = self._saved.groups
        saved = stored.rebuilt({key: target[key] for key in keys}, depth=2) if keys else []
        there = [list(group.get(PARAMS, [])) for group in saved]
        matched, problems = match_groups(groups, there, self.stateful.param_groups, saved)
        known = {name for names in there for name in names}
        added = [names[0] for group in groups for names in group if not known & set(names)]
        if added and keys and self.strict:
            problems.append(f"in no parameter group of the checkpoint: {some_keys(added)}")
        if problems:
            raise CheckpointError("; ".join(problems))
        return [{} if index is None else options_of(saved[index]) for index in matched]

    def _flat_options(self, groups: list[list[Names]], target: dict[str, Any]) -> list[dict[str, Any]]:
        """The options of each group, which were saved for each of its parameters."""
        found = []
        for group in groups:
            saved = [
                (names[0], self._saved.options[alias])
                for names in group
                for alias in names
                if alias in self._saved.options
            ]
            for name, keys in saved[1:]:
                first, other = ({key: target.get(at) for key, at in each.items()} for each in (saved[0][1], keys))
                mixed = [key for key in first if not same_value(first[key], other.get(key))]
                if mixed:
                    raise CheckpointError(
                        f"parameters of one group were saved in groups with different {', '.join(mixed)}: "
                        f"{saved[0][0]!r} and {name!r}"
                    )
            found.append(options_of({key: target.get(at) for key, at in saved[0][1].items()}) if saved else {})
        return found

    def _read_state(self, target: dict[str, Any]) -> dict[str, Any]:
        read = {**target, **self._tensors}
        state: dict[str, Any] = {}
        for owner, saved in self._owners.items():
            own = self._current.get(owner, {})
            keys = self._saved.tree(saved, own)
            state[owner] = _mapped(keys, own, lambda key, here: read.get(key, _NOWHERE))
            if isinstance(keys, dict):  # what the checkpoint lacks stays, where that may be
                state[owner] |= {part: value for part, value in own.items() if str(part) not in keys}
        return state

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if self._has_own_form:
            self._make_state()
            load_own_state_dict(self.stateful, state)
            self._given = state
        else:
            load_named_optimizer_state(self.model, self.stateful, state)
            self._given = state[STATE]
        if self._saved_fresh:
            for optimizer in (self.stateful, *(one for _, one in held(self.stateful))):
                optimizer.state.clear()

    def _make_state(self) -> None:
        """Gives the optimizers that one holds the state that it would make them take a step for."""
        for _, one in held(self.stateful):
            if is_fresh(one):
                with contextlib.suppress(NoFirstStep):
                    one.state.update(first_step(one).states)

    def remarks(self) -> list[str]:
        """What the optimizer has made of its state: torch's cast it to the type of the parameter."""
        if self._has_own_form:
            return super().remarks()
        casts: list[tuple[torch.dtype, torch.dtype]] = []
        changed: set[str] = set()
        slots = [slot for group in named_parameters(self.model, self.stateful) for slot in group]
        for parameter, names in slots if not has_flat_parameters(self.model) else ():
            taken = dict(_leaves(self.stateful.state.get(parameter, {})))
            for path, value in _leaves((self._given or {}).get(names[0], {})):
                if isinstance(value, Tensor) and isinstance(taken.get(path), Tensor):
                    casts.append((value.dtype, taken[path].dtype))
                elif trees.digest(value) != trees.digest(taken.get(path)):
                    changed.add(".".join(map(str, (names[0], *path))))
        notes = cast_notes(casts)
        if changed:
            notes.append(f"{type(self.stateful).__name__} has made something else of {some_keys(changed)}")
        if self._kept:
            notes.append(f"options of groups that are not in the checkpoint stay: {some_keys(self._kept)}")
        return notes

    def forget(self) -> None:
        super().forget()
        self._current, self._tensors, self._owners, self._kept = {}, {}, {}, set()


class OptimizerStates(Several, _Grouped):
    """Several optimizers that share the parameters of a model among them, saved as one with the groups of all.

    How many there are is not saved: those of a model's parts on a rank, any number of ranks can go on with.

    Args:
        each: at least one.
    """

    stateful: list[Optimizer]

    def __init__(self, each: Sequence[OptimizerState]) -> None:
        super().__init__([one.stateful for one in each], each[0].strict)
        self.each = list(each)

    def state(self) -> Any:
        whole: dict[str, Any] = {}
        for one in self.each:
            for name, value in one.state().items():
                if name == STATE and name in whole:
                    whole[name] = {**whole[name], **value}
                elif name == GROUPS and name in whole:
                    whole[name] = [*whole[name], *value]
                elif whole.setdefault(name, value) is not value and trees.digest(whole[name]) != trees.digest(value):
                    raise CheckpointError(f"its optimizers have different values of {name!r}")
        return whole

    def note(self, state: Any, member: Member) -> Any:
        return self._note(state, self.stateful, is_named=isinstance(state.get(GROUPS), list))

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
        )


def _joined(notes: Sequence[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups of all ranks where these are not the same, else none; and what is wrong with them."""
    return joined({rank: note[_OWN_GROUPS] for rank, note in enumerate(notes) if _OWN_GROUPS in note})


def _besides(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a class, or a hook, puts into a state dict besides what torch does."""
    return {name: value for name, value in raw.items() if name not in (STATE, GROUPS)}


def _is_flat_option(path: Path) -> bool:
    return len(path) == 2 and str(path[1]).startswith(f"{GROUPS}.")


def _own_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name == PARAM_NAMES}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | ShardedTensor)
