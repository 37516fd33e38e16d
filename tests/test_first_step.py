"""Who asks an optimizer for its state changes nothing of the training, whatever the optimizer is and does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _optimizers import (
    ALL,
    TORCHS,
    WITHOUT_A_FIRST_STEP,
    Caching,
    Container,
    Net,
    Plain,
    Recorded,
    Wrapper,
    equal,
    seen_by_training,
    train,
)
from torch import nn
from torch.distributed.checkpoint import state_dict as stock
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dcpring
from dcpring.names import first_step
from dcpring.state_dict import StateDictOptions

pytestmark = pytest.mark.filterwarnings("ignore:sparse")


def test_no_optimizer_of_torch_is_forgotten() -> None:
    classes = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    optimizers = {name for name, value in classes.items() if issubclass(value, Optimizer) and value is not Optimizer}
    assert optimizers == TORCHS.keys()


class Hooked:
    """Counts the calls of hooks, which a step would make."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.calls = 0
        if "_optimizer_step_pre_hooks" in vars(optimizer):
            optimizer.register_step_pre_hook(self._count)
            optimizer.register_step_post_hook(self._count)
        self.handles = [register_optimizer_step_pre_hook(self._count), register_optimizer_step_post_hook(self._count)]

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def __enter__(self) -> Hooked:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


OWN_FORM = {"Container", "Container of a wrapper", "Recorded"}


@pytest.mark.parametrize("steps", (0, 2), ids=("fresh", "trained"))
@pytest.mark.parametrize("name", ALL)
def test_asking_changes_nothing(name: str, steps: int) -> None:
    model = Net()
    optimizer = ALL[name](model)
    train(model, optimizer, steps)
    before = seen_by_training(model, optimizer)
    fails = name in OWN_FORM or (not steps and name in WITHOUT_A_FIRST_STEP)
    with Hooked(optimizer) as hooks:
        for options in (None, StateDictOptions(flatten_optimizer_state_dict=True)):
            try:
                dcpring.get_optimizer_state_dict(model, optimizer, options=options)
                assert not fails
            except (RuntimeError, NotImplementedError):
                assert fails or (name == "LBFGS" and options is not None)  # stock flattens no lists
        assert hooks.calls == 0
    after = seen_by_training(model, optimizer)
    assert [part for part in before if not equal(before[part], after[part])] == []


@pytest.mark.parametrize("name", sorted(ALL.keys() - WITHOUT_A_FIRST_STEP - OWN_FORM - {"Noisy", "Plain"}))
def test_what_a_fresh_optimizer_gives_is_what_stock_does(name: str) -> None:
    model, other = Net(), Net()
    ours = dcpring.get_optimizer_state_dict(model, ALL[name](model))
    theirs = stock.get_optimizer_state_dict(other, ALL[name](other))
    assert {key: set(value) for key, value in ours["state"].items()} == {
        key: set(value) for key, value in theirs["state"].items()
    }
    assert [set(group) for group in ours["param_groups"]] == [set(group) for group in theirs["param_groups"]]
    for key, state in theirs["state"].items():
        for part, value in state.items():
            there = ours["state"][key][part]
            assert type(there) is type(value)
            assert equal(there, value), (key, part)


@pytest.mark.parametrize("name", sorted(ALL.keys() - WITHOUT_A_FIRST_STEP - OWN_FORM))
def test_setting_takes_no_step(name: str) -> None:
    model = Net()
    optimizer = ALL[name](model)
    train(model, optimizer)
    state = dcpring.get_optimizer_state_dict(model, optimizer)
    fresh = ALL[name](model)
    before = seen_by_training(model, fresh)
    with Hooked(fresh) as hooks:
        dcpring.set_optimizer_state_dict(model, fresh, state)
        assert hooks.calls == 0
    after = seen_by_training(model, fresh)
    for part in ("values", "versions", "gradients", "requires_grad", "random"):
        assert equal(before[part], after[part]), part
    assert equal(dcpring.get_optimizer_state_dict(model, fresh), state)


def test_portions_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter for itself gives what all together do; an optimizer with attributes of its own gets all."""
    model = Net()
    for make in (ALL["AdamW"], ALL["Caching"], ALL["SGD with momentum"]):
        whole = first_step.first_step(make(model))
        with monkeypatch.context() as patch:
            patch.setattr(first_step, "_COPIED_BYTES", 1)
            portions = first_step.first_step(make(model))
            one = first_step.first_step(make(model), [model.second.weight])
        assert list(portions.states) == list(whole.states)
        assert all(equal(portions.states[parameter], whole.states[parameter]) for parameter in whole.states)
        assert portions.options == whole.options
        assert list(one.states) == [model.second.weight]
    assert whole.options == [{}]
    assert first_step.first_step(Caching(model.parameters())).options == [{"k": 1}]


class Sneaky(Plain):
    """Has its parameters where no copy is made of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.look = lambda: list(model.parameters())

    def step(self, closure: Any = None) -> None:
        for parameter in self.look():
            parameter.data.mul_(0.5)
            parameter.detach().add_(1)


def test_what_changes_its_parameters_all_the_same_is_told() -> None:
    model = Net()
    with pytest.raises(RuntimeError, match="Sneaky changed its parameters when it was asked for its state"):
        dcpring.get_optimizer_state_dict(model, Sneaky(model))


def test_what_cannot_be_copied() -> None:
    model = Net()
    optimizer = Plain(model.parameters())
    optimizer.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"Plain has no state yet, and none could be made on copies.*cannot pickle"):
        dcpring.get_optimizer_state_dict(model, optimizer)
    train(model, optimizer)
    assert dcpring.get_optimizer_state_dict(model, optimizer)["state"]


def test_a_scheduler_does_not_see_a_step() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = StepLR(optimizer, 1)
    dcpring.get_optimizer_state_dict(model, optimizer)
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.last_epoch == 0


def test_attributes_of_parameters_are_seen() -> None:
    class ByMark(Plain):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if getattr(parameter, "is_large", False):
                        self.state[parameter]["large"] = torch.ones(1)

    model = Net()
    model.first.weight.is_large = True  # type: ignore[assignment]
    state = dcpring.get_optimizer_state_dict(model, ByMark(model.parameters()))["state"]
    assert list(state) == ["first.weight"]


def test_state_dicts_of_their_own_form() -> None:
    model = Net()
    container = Container(model)
    for optimizer in (container, Wrapper(container)):
        with pytest.raises(RuntimeError, match=r"has a state dict of its own form, with 'state.first.weight.step'"):
            dcpring.get_optimizer_state_dict(model, optimizer)
    assert first_step.is_fresh(container)
    assert set(first_step.own_state_dict(container)) == set(Container(Net()).state_dict())
    assert first_step.own_state_dict(recorded := Recorded(model.parameters()))["note"] == 1
    assert first_step.is_fresh(recorded)


def test_state_under_a_name_of_its_own() -> None:
    """Torch keeps what does not belong to a parameter as it is."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    optimizer.state["shared"] = {"calls": 7}
    state = dcpring.get_optimizer_state_dict(model, optimizer)
    assert state["state"]["shared"] == {"calls": 7}


def test_names_of_parameters_stay_those_of_the_optimizer() -> None:
    """Saved in another order, they would name the wrong parameters."""
    model = Net()
    forward, backward = (torch.optim.AdamW(list(model.named_parameters())[::way]) for way in (1, -1))
    train(model, forward)
    dcpring.set_optimizer_state_dict(model, backward, dcpring.get_optimizer_state_dict(model, forward))
    assert backward.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()][::-1]
    for parameter in model.parameters():
        assert equal(backward.state[parameter], forward.state[parameter])


def test_parameters_of_one_group_that_were_saved_in_two() -> None:
    model = Net()
    pairs = [list(model.first.parameters()), list(model.second.parameters())]
    optimizer = torch.optim.SGD([{"params": pair, "lr": rate} for pair, rate in zip(pairs, (0.1, 0.2), strict=True)])
    state = dcpring.get_optimizer_state_dict(model, optimizer)
    mixed = torch.optim.SGD([{"params": [*pairs[0], pairs[1][0]]}, {"params": [pairs[1][1]]}], lr=0.5)
    with pytest.raises(RuntimeError, match=r"one group \(first.weight, ...\) were saved in 2 with different lr"):
        dcpring.set_optimizer_state_dict(model, mixed, state)
    assert [group["lr"] for group in mixed.param_groups] == [0.5, 0.5]
    dcpring.set_optimizer_state_dict(model, mixed, state, options=StateDictOptions(strict=False))
    assert [group["lr"] for group in mixed.param_groups] == [0.2, 0.2]


def test_incomplete_state_is_filled_up_with_that_of_a_first_step() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = dcpring.get_optimizer_state_dict(model, optimizer)
    for parts in state["state"].values():
        del parts["exp_avg_sq"]
    fresh = torch.optim.AdamW(model.parameters())
    dcpring.set_optimizer_state_dict(model, fresh, state, options=StateDictOptions(strict=False))
    train(model, fresh, 1)
    assert fresh.state[model.first.weight]["step"] == 3
