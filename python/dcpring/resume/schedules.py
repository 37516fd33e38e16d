"""Learning rate schedules as components: all of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dcpring.errors import CheckpointError
from dcpring.resume import trees
from dcpring.resume.components import Component, ComponentPlan, Member, Several, each_once
from dcpring.resume.manifest import Stored
from dcpring.resume.whole import Replicated
from dcpring.torchside.optim import inner_schedulers

__all__ = ["LRSchedule", "LRSchedules"]

SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum")
"""Options of a parameter group that schedulers write."""

_CURE = (
    "step it alike on all ranks, and give stages of a pipeline the same parameter groups in the same order, empty ones "
    "where they have no such parameter"
)

_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs")
"""Attributes of schedulers with a value for each parameter group."""


class LRSchedule(Replicated):
    """A scheduler of ``torch.optim.lr_scheduler``, which is recognised without this wrapper unless it is rescaled.

    Another class of scheduler than was saved, or another number of parameter groups, is an error. One of which only
    ``last_epoch`` was saved (by torchtitan) is stepped from its start to there.

    Args:
        scheduler: any of torch's.
        rescale: for schedules that count steps, on another number of steps per epoch. The schedule is then the one
            that the scheduler was made with now, advanced to the position that was saved times ``rescale``: a number
            (new steps per old step), or "world_size" for old ranks / new ranks, which is right where every rank keeps
            its batch size. None: the schedule and its position are as saved, in steps.
    """

    stateful: LRScheduler
    cure = _CURE

    def __init__(self, scheduler: LRScheduler, rescale: float | Literal["world_size"] | None = None) -> None:
        super().__init__(scheduler)
        if rescale is not None and rescale != "world_size" and not (isinstance(rescale, int | float) and rescale > 0):
            raise ValueError(f'rescale={rescale!r}: must be a positive number, "world_size" or None')
        if rescale is not None and any(isinstance(each, ReduceLROnPlateau) for each in _schedulers(scheduler)):
            raise ValueError("rescale: ReduceLROnPlateau follows a metric, not a number of steps; leave rescale out")
        self.rescale = rescale
        self._options: list[dict[str, Any]] = []
        self._steps: int | None = None
        self._has_position_only = False

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        plan = super().plan(name, stored, member)
        self._options = [_scheduled(group) for group in self.stateful.optimizer.param_groups]
        self._has_position_only = {stored.paths[key][1:] for key in stored.keys.get(name, ())} == {("last_epoch",)}
        if self._has_position_only:
            plan.change = "stepped from its start to the position that was saved"
            self._check_is_new("the checkpoint has its position only, which", plan)
        elif (saved := stored.entry(name).get("type", self.type_name)) != self.type_name:
            plan.problems.append(f"saved from a {saved}, here it is a {self.type_name}")
        if self.rescale is None:
            return plan
        self._check_is_new("rescale", plan)
        if stored.world_size is None and self.rescale == "world_size":
            plan.problems.append('rescale="world_size", but the checkpoint does not say its world size; give a number')
        plan.change, plan.resharded = f"rescaled by {self._ratio(stored, member)}", True
        return plan

    def _check_is_new(self, what: str, plan: ComponentPlan) -> None:
        if any(isinstance(each, ReduceLROnPlateau) for each in _schedulers(self.stateful)):
            plan.problems.append(f"{what} is not enough for ReduceLROnPlateau, which follows a metric")
        elif _position(self.stateful.state_dict()) != 0:
            plan.problems.append(f"{what} needs a scheduler that has not been stepped; make a new one")

    def _ratio(self, stored: Stored, member: Member) -> Fraction:
        if self.rescale == "world_size":
            return Fraction(stored.world_size or member.world_size, member.world_size)
        return Fraction(self.rescale or 1).limit_denominator(1 << 20)

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        state = super().prepare(name, stored, target, member)
        own = self.stateful.state_dict()
        self._steps = None
        if self._has_position_only:
            self._steps = round(_position(state) * self._ratio(stored, member))
            return state
        if not isinstance(state, dict) or _settings(state) != _settings(own):
            raise CheckpointError(f"it was not saved from a {self.type_name}: {_difference(state, own)}")
        groups = len(self.stateful.optimizer.param_groups)
        saved = next((len(state[key]) for key in _PER_GROUP if isinstance(state.get(key), list)), groups)
        if saved != groups:
            raise CheckpointError(f"saved with {saved} parameter groups, here the optimizer has {groups}")
        if self.rescale is not None:
            self._steps = round(_position(state) * self._ratio(stored, member))
        return state

    def apply(self, state: Any, before: Sequence[Component]) -> None:
        if self._steps is not None:
            self._replay(self._steps)
            return
        super().apply(state, before)
        if not any(_has_groups_of(component.stateful, self.stateful.optimizer) for component in before):
            rates = self.stateful.get_last_lr()
            for group, rate in zip(self.stateful.optimizer.param_groups, rates, strict=True):
                _assign(group, "lr", rate)

    def _replay(self, steps: int) -> None:
        """From the start: what a schedule does to its optimizer depends on all steps before."""
        for group, options in zip(self.stateful.optimizer.param_groups, self._options, strict=True):
            for name, value in options.items():
                _assign(group, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer does not step along
            for _ in range(steps):
                self.stateful.step()


class LRSchedules(Several, Replicated):
    """Schedulers that go alike, one for each of several optimizers. The state of one is saved, and loaded into all.

    Args:
        each: at least one.
    """

    stateful: list[LRScheduler]
    cure = _CURE

    def __init__(self, each: Sequence[LRSchedule]) -> None:
        super().__init__([one.stateful for one in each])
        self.each = list(each)

    def state(self) -> Any:
        states = [one.state() for one in self.each]
        others = [index for index, state in enumerate(states) if trees.digest(state) != trees.digest(states[0])]
        if others:
            raise CheckpointError(
                f"schedulers 0 and {others[0]} of the list are not in the same state; such ones are components each"
            )
        return states[0]

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        plans = [one.plan(name, stored, member) for one in self.each]
        return replace(plans[0], problems=each_once(plan.problems for plan in plans))

    def prepare(self, name: str, stored: Stored, target: dict[str, Any], member: Member) -> Any:
        return [one.prepare(name, stored, copy.deepcopy(target), member) for one in self.each]


def _has_groups_of(loaded: Any, optimizer: Optimizer) -> bool:
    """Whether a component is the optimizer of a scheduler, which may be wrapped, or among several."""
    inside = loaded if isinstance(loaded, list) else [loaded]
    return any(isinstance(one, Optimizer) and one.param_groups is optimizer.param_groups for one in inside)


def _schedulers(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for child in inner_schedulers(scheduler):
        yield from _schedulers(child)


def _position(state: dict[str, Any]) -> int:
    """Steps taken; a ChainedScheduler counts none itself."""
    return int(state["last_epoch"]) if "last_epoch" in state else _position(state["_schedulers"][0])


def _settings(state: dict[str, Any]) -> set[str]:
    """What a kind of scheduler is told by; private attributes come and go with versions of torch."""
    return {name for name in state if not name.startswith("_")} - {"verbose"}


def _difference(state: Any, own: dict[str, Any]) -> str:
    if not isinstance(state, dict):
        return f"its state is a {type(state).__name__}"
    missing, extra = sorted(_settings(own) - _settings(state)), sorted(_settings(state) - _settings(own))
    return f"its state lacks {missing} and has {extra}"


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: group[name] for name in SCHEDULED if name in group}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in chosen.items()}


def _assign(group: dict[str, Any], name: str, value: Any) -> None:
    """A rate that is a tensor may be in use by a compiled step: its value changes, not the object."""
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value.item() if isinstance(value, torch.Tensor) else value)
    else:
        group[name] = value
