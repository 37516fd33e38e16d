"""Learning rate schedules as components: all of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dcpring.errors import CheckpointError
from dcpring.resume.components import Component, ComponentPlan, Member, Remarks, each_once, no_remarks
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
    """A scheduler of ``torch.optim.lr_scheduler``, which is recognised without this wrapper.

    Another class of scheduler than was saved, or another number of parameter groups, is an error. One of which only
    ``last_epoch`` was saved (by torchtitan) is stepped from its start to there.

    Args:
        scheduler: any of torch's.
    """

    stateful: LRScheduler
    cure = _CURE

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler)

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        plan = super().plan(name, stored, member)
        if {stored.paths[key][1:] for key in stored.keys.get(name, ())} == {("last_epoch",)}:
            plan.change = "stepped from its start to the position that was saved"
            plan.problems += self._problems_of_replay()
            options = [_scheduled(group) for group in self.stateful.optimizer.param_groups]
            plan.rebuild = lambda read: _Replay(_position(stored.rebuilt(read, depth=1)), options)
        else:
            if (saved := stored.entry(name).get("type", self.type_name)) != self.type_name:
                plan.problems.append(f"saved from a {saved}, here it is a {self.type_name}")
            plan.rebuild = lambda read: self._checked(stored.rebuilt(read, depth=1))
        return plan

    def _problems_of_replay(self) -> list[str]:
        if any(isinstance(each, ReduceLROnPlateau) for each in _schedulers(self.stateful)):
            return ["the checkpoint has its position only; ReduceLROnPlateau, which follows a metric, needs more"]
        if _position(self.stateful.state_dict()) != 0:
            return ["the checkpoint has its position only, which needs a scheduler that has not been stepped; make one"]
        return []

    def _checked(self, state: Any) -> Any:
        """A state that was read. Raises CheckpointError if it is not one of such a scheduler."""
        own = self.stateful.state_dict()
        if not isinstance(state, dict) or _settings(state) != _settings(own):
            raise CheckpointError(f"it was not saved from a {self.type_name}: {_difference(state, own)}")
        groups = len(self.stateful.optimizer.param_groups)
        saved = next((len(state[key]) for key in _PER_GROUP if isinstance(state.get(key), list)), groups)
        if saved != groups:
            raise CheckpointError(f"saved with {saved} parameter groups, here the optimizer has {groups}")
        return state

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        if isinstance(ready, _Replay):
            ready.run(self.stateful)
            return no_remarks
        remarks = super().take(ready, before)
        if not any(_has_groups_of(component.stateful, self.stateful.optimizer) for component in before):
            rates = self.stateful.get_last_lr()
            for group, rate in zip(self.stateful.optimizer.param_groups, rates, strict=True):
                _assign(group, "lr", rate)
        return remarks


class _Replay(NamedTuple):
    """A schedule that is stepped from its start: what it does to its optimizer depends on all steps before.

    Attributes:
        steps: to where.
        options: of the optimizer's groups at the start.
    """

    steps: int
    options: list[dict[str, Any]]

    def run(self, scheduler: LRScheduler) -> None:
        for group, options in zip(scheduler.optimizer.param_groups, self.options, strict=True):
            for name, value in options.items():
                _assign(group, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer does not step along
            for _ in range(self.steps):
                scheduler.step()


class LRSchedules(Replicated):
    """Schedulers that go alike, one for each of several optimizers. The state of one is saved, and loaded into all.

    Args:
        each: at least one.
    """

    cure = _CURE

    def __init__(self, each: Sequence[LRSchedule]) -> None:
        super().__init__([one.stateful for one in each])
        self.each = list(each)

    @property
    def type_name(self) -> str:
        return self.each[0].type_name

    def collect(self, member: Member) -> tuple[Any, Any]:
        found = [one.collect(member) for one in self.each]
        others = [index for index, (_, digest) in enumerate(found) if digest != found[0][1]]
        if others:
            raise CheckpointError(
                f"schedulers 0 and {others[0]} of the list are not in the same state; such ones are components each"
            )
        return found[0]

    def plan(self, name: str, stored: Stored, member: Member) -> ComponentPlan:
        plans = [one.plan(name, stored, member) for one in self.each]
        problems = each_once(plan.problems for plan in plans)
        return replace(
            plans[0], problems=problems, rebuild=lambda read: [plan.prepare(copy.deepcopy(read)) for plan in plans]
        )

    def take(self, ready: Any, before: Sequence[Component]) -> Remarks:
        remarks = [one.take(own, before) for one, own in zip(self.each, ready, strict=True)]
        return lambda: each_once(one() for one in remarks)


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
