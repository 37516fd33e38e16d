"""What a Checkpointer takes an object for; of what trainers put before torch's, the error names what to give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dcpring import PerRank, Replicated, Sharded
from dcpring.resume.optimizers import OptimizerState
from dcpring.resume.recognise import as_component
from dcpring.resume.schedules import LRSchedules


class PassesOn:
    """As accelerate's scheduler."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.optimizers = [scheduler.optimizer]
        self.split_batches = False

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


class StepsAll:
    """As torchtitan's container of schedulers."""

    def __init__(self, schedulers: list[LRScheduler]) -> None:
        self.schedulers = schedulers

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.last_epoch = state["last_epoch"]


class Loader:
    def __init__(self, **attributes: Any) -> None:
        self.dataset = [1, 2, 3]
        self.at = 0
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Owner:
    """Holds optimizers, and is none."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers


def setting() -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1))


def test_schedulers_of_trainers_name_what_to_give() -> None:
    model, optimizer, scheduler = setting()
    with pytest.raises(TypeError, match=re.escape("it holds a LambdaLR as .scheduler, which is recognised: give that")):
        as_component("s", PassesOn(scheduler), [model])
    container = StepsAll([scheduler, LambdaLR(optimizer, lambda step: 1.0)])
    with pytest.raises(TypeError, match=re.escape("it holds several LambdaLRs in .schedulers")):
        as_component("s", container, [model])
    assert type(as_component("s", container.schedulers, [model])) is LRSchedules


def test_other_loaders_are_asked_for() -> None:
    for loader in (Loader(), Loader(dp_rank=1, dp_world_size=4)):
        with pytest.raises(TypeError, match=r"ElasticLoader\(loader\), or PerRank"):
            as_component("d", loader, [])


def test_the_cure_names_what_is_inside_of_lists_too() -> None:
    model, optimizer, _ = setting()
    with pytest.raises(TypeError, match=re.escape("it holds a AdamW as .optimizers[0], which is recognised")):
        as_component("o", Owner([optimizer]), [model])


@pytest.mark.parametrize("kind", [Sharded, Replicated, PerRank])
def test_what_is_said_wins(kind: Any) -> None:
    model, optimizer, scheduler = setting()
    for value in (PassesOn(scheduler), StepsAll([scheduler]), Loader(dp_rank=0, dp_world_size=1), scheduler):
        said = kind(value)
        assert as_component("x", said, [model]) is said
    if kind is not Sharded:
        for value in (model, optimizer):
            assert as_component("x", kind(value), [model]).stateful is value


def test_sharded_of_an_optimizer_that_no_model_owns_is_its_own_state() -> None:
    model, optimizer, _ = setting()
    said = Sharded(optimizer)
    assert as_component("o", said, [nn.Linear(2, 2)]) is said
    assert type(as_component("o", said, [model])) is OptimizerState
    with pytest.raises(TypeError, match="no model among the components has its parameters"):
        as_component("o", optimizer, [])
