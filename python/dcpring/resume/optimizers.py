"""Optimizers as components: with their parameters named as the model names them, or in a form of their own.

What a parameter's state consists of is what was saved; how its tensors are spread over ranks is what the optimizer has,
or would have after its first step. Nothing here takes a step. The options and members of groups are objects, so they
are read, and compared, before anything is changed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcpring.base.text import some, some_keys
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
from dcpring.resume import backend, trees
from dcpring.resume.components import Component, Place, Plan, Sharded, cast_notes
from dcpring.resume.manifest import Stored
from dcpring.resume.schedules import SCHEDULED
from dcpring.torchside.dcp import flatten_state_dict, set_element
from dcpring.torchside.tensors import ShardedTensor

__all__ = ["OptimizerState", "match_groups"]

_STATE, _GROUPS, _PARAMS, _PARAM_NAMES = "state", "param_groups", "params", "param_names"
_NOWHERE = object()

Path = tuple[str | int, ...]
Names = list[str]
"""All names of a parameter; several if it is tied."""


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
                owner = str(rest.pop(0)) if head == _STATE and rest else ""
            if head == _GROUPS and not text:
                saved.groups.append(key)
            elif owner not in owners:
                saved.foreign.add(key)
            elif head == _GROUPS:
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


# ---- groups ----


def match_groups(own: Sequence[Sequence[Names]], saved: Sequence[Sequence[str]]) -> tuple[list[int | None], list[str]]:
    """Which of the saved groups each group is, by the names of their parameters, in whatever order; and what is wrong.

    Parameters that only one side has are passed over. Groups without parameters are paired in their order.

    Args:
        own: for each group the names of each parameter.
        saved: for each group the names of its parameters.
    """
    group_of = {name: index for index, names in enumerate(saved) for name in names}
    found = [[next((group_of[name] for name in names if name in group_of), None) for names in group] for group in own]
    # The largest common parts are groups that stayed; what is in none of them has moved.
    pairs = Counter((here, there) for here, group in enumerate(found) for there in group if there is not None)
    matched: dict[int, int] = {}
    for (here, there), _ in pairs.most_common():
        if here not in matched and there not in matched.values():
            matched[here] = there
    moved = [
        f"{names[0]!r} (in group {there} there, {here} here)"
        for here, group in enumerate(own)
        for names, there in zip(group, found[here], strict=True)
        if there is not None and matched.get(here) != there
    ]
    problems = []
    if moved:
        sizes = "" if len(own) == len(saved) else f"{len(saved)} parameter groups in the checkpoint, {len(own)} here; "
        problems.append(f"{sizes}parameters are in other groups than they were saved in: {some(moved, 4)}")
    empty = [index for index, group in enumerate(own) if not group]
    empty_there = [index for index, names in enumerate(saved) if not names]
    if empty and len(empty) != len(empty_there):
        problems.append(f"{len(empty_there)} groups without parameters in the checkpoint, {len(empty)} here")
    matched |= dict(zip(empty, empty_there, strict=False))
    return [matched.get(index) for index in range(len(own))], problems


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group holds besides its parameters; the names that torch keeps of these are the optimizer's own."""
    return {name: value for name, value in group.items() if name not in (_PARAMS, _PARAM_NAMES)}


# ---- the component ----


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
        return raw if self._has_own_form else {**raw, **backend.named_optimizer_state(self.model, self.stateful, raw)}

    def _ask(self) -> dict[str, Any]:
        """The optimizer's own state dict."""
        raw = own_state_dict(self.stateful)
        self._has_own_form = not backend.is_numbered(raw, self.stateful)
        if self._has_own_form and backend.has_flat_parameters(self.model):
            raise CheckpointError(
                f"{type(self.stateful).__name__} gives a state dict of its own form, which does not know the parts of "
                "FSDP1's parameters; use FSDP2 (fully_shard)"
            )
        return raw

    def note(self, state: Any, place: Place) -> Any:
        groups = len(self.stateful.param_groups)
        return {"meshes": super().note(state, place), "param_groups": groups, "fresh": is_fresh(self.stateful)}

    def entry(self, notes: Sequence[Any]) -> dict[str, Any]:
        fresh = all(note["fresh"] for note in notes)
        return {**notes[0], **super().entry([note["meshes"] for note in notes]), "fresh": fresh}

    # ---- load: what is needed ----

    def plan(self, name: str, stored: Stored, place: Place) -> Plan:
        self.forget()
        self._saved_fresh = bool(stored.entry(name).get("fresh", False))
        raw = self._ask()
        if self._has_own_form:
            plan = self.plan_for(name, stored, raw)
            self._saved = self._saved_options(name, stored)
            self.describe(plan, stored, name, raw)
            return plan
        slots = [slot for group in backend.named_parameters(self.model, self.stateful) for slot in group]
        others = [str(key) for key in raw[_STATE] if not isinstance(key, int)]
        plan = self.plan_for(name, stored, _besides(raw))
        keys = [key for key in stored.keys.get(name, ()) if key not in plan.target.keys() | plan.in_place.keys()]
        self._saved = _Saved.of(keys, stored.paths, {alias for _, names in slots for alias in names} | set(others))
        plan.target |= stored.blank(self._keys_of_groups())
        plan.unexpected = set(self._saved.foreign)
        if not self._saved_fresh:
            raw, is_known = self._with_first_step(slots, raw)
            self._current = backend.named_optimizer_state(self.model, self.stateful, raw)[_STATE]
            slots += [(torch.empty(0), [other]) for other in others]
            self._plan_state(name, stored, slots, is_known, plan)
        self.describe(plan, stored, name, self._current)
        return plan

    def _inner_groups(self) -> list[list[Names]]:
        """The groups of the optimizers that one holds, or its own, as the names of their parameters."""
        inside = [one for _, one in held(self.stateful)] or [self.stateful]
        slots = [group for one in inside for group in backend.named_parameters(self.model, one)]
        return [[names for _, names in group] for group in slots]

    def _saved_options(self, name: str, stored: Stored) -> _Saved:
        """What a form of its own has of groups, where it has torchtitan's names for them."""
        keys = [key for key in stored.keys.get(name, ()) if _is_flat_option(stored.paths[key])]
        groups = self._inner_groups() if keys else []
        return _Saved.of(keys, stored.paths, {alias for group in groups for names in group for alias in names})

    def _keys_of_groups(self) -> list[str]:
        return [*self._saved.groups, *(key for options in self._saved.options.values() for key in options.values())]

    def _plan_state(
        self, name: str, stored: Stored, slots: list[tuple[Tensor, Names]], is_known: bool, plan: Plan
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
            missing |= {f"{name}.{_STATE}.{names[0]}.{part}" for part in lacking}
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
        return {**raw, _STATE: {**raw[_STATE], **added}}, True

    def _plan_parameter(
        self, owner: str, saved: str, parameter: Tensor, stored: Stored, plan: Plan, saved_type: str
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

    def _made(self, key: str, parameter: Tensor, stored: Stored, plan: Plan) -> Any:
        """What to read into where the optimizer has nothing: spread as the parameter is, or whole."""
        if not stored.is_tensor(key):
            return None
        dtype, size = stored.tensor(key)
        if size == parameter.shape and not backend.has_flat_parameters(self.model):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if size.numel() > 1 and (isinstance(parameter, DTensor) or backend.has_flat_parameters(self.model)):
            plan.problems.append(f"how {key!r} is spread over ranks cannot be told before the optimizer's first step")
        return torch.empty(size, dtype=dtype, device=parameter.device if size.numel() > 1 else "cpu")

    # ---- load: what was read ----

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], place: Place) -> Any:
        if self._has_own_form:
            self._flat_options(self._inner_groups() if self._saved.options else [], target)
            return super().prepare(name, stored, target, place)
        slots = backend.named_parameters(self.model, self.stateful)
        groups = [[names for _, names in group] for group in slots]
        options = self._flat_options(groups, target) if self._saved.is_flat else self._options(groups, stored, target)
        own = [_options(group) for group in self.stateful.param_groups]
        kept = {name for here, there in zip(own, options, strict=True) if there for name in here.keys() - there.keys()}
        self._kept = kept - self.stateful.defaults.keys() - set(SCHEDULED)
        return {
            **super().prepare(name, stored, {key: target[key] for key in target if key in self._paths}, place),
            _STATE: {} if self._saved_fresh else self._read_state(target),
            _GROUPS: [
                {**here, **there, **_own_names(group), _PARAMS: [names[0] for names in members]}
                for group, here, there, members in zip(self.stateful.param_groups, own, options, groups, strict=True)
            ],
        }

    def _options(self, groups: list[list[Names]], stored: Stored, target: dict[str, Any]) -> list[dict[str, Any]]:
        """The options of each group, out of the saved one that it is. A group that is new has none."""
        keys = self._saved.groups
        saved = stored.rebuilt({key: target[key] for key in keys}, depth=2) if keys else []
        members = [group.get(_PARAMS, []) for group in saved]
        matched, problems = match_groups(groups, members)
        known = {name for names in members for name in names}
        added = [names[0] for group in groups for names in group if not known & set(names)]
        if added and keys and self.strict:
            problems.append(f"in no parameter group of the checkpoint: {some_keys(added)}")
        if problems:
            raise CheckpointError("; ".join(problems))
        return [{} if index is None else _options(saved[index]) for index in matched]

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
                mixed = [key for key in first if not backend.same_value(first[key], other.get(key))]
                if mixed:
                    raise CheckpointError(
                        f"parameters of one group were saved in groups with different {', '.join(mixed)}: "
                        f"{saved[0][0]!r} and {name!r}"
                    )
            found.append(_options({key: target.get(at) for key, at in saved[0][1].items()}) if saved else {})
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
            backend.load_named_optimizer_state(self.model, self.stateful, state)
            self._given = state[_STATE]
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
        slots = [slot for group in backend.named_parameters(self.model, self.stateful) for slot in group]
        for parameter, names in slots if not backend.has_flat_parameters(self.model) else ():
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


def _besides(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a class, or a hook, puts into a state dict besides what torch does."""
    return {name: value for name, value in raw.items() if name not in (_STATE, _GROUPS)}


def _is_flat_option(path: Path) -> bool:
    return len(path) == 2 and str(path[1]).startswith(f"{_GROUPS}.")


def _own_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name == _PARAM_NAMES}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | ShardedTensor)
