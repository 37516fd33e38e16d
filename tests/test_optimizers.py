"""Optimizers through a Checkpointer: a save changes nothing, and what is loaded goes on as what was saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _optimizers import ALL, Container, Net, Plain, Recorded, Wrapper, equal, seen_by_training, train
from _resume import error_of
from test_first_step import Hooked
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import Optimizer

from dcpring import Checkpointer, PerRank, Replicated, Sharded
from dcpring.resume.param_groups import match_groups

pytestmark = pytest.mark.filterwarnings("ignore:sparse")


def parts(model: nn.Module, optimizer: Optimizer, strict: bool = True) -> dict[str, Any]:
    return {"model": model, "optimizer": Sharded(optimizer, strict=strict)}


def make(name: str, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = Net(seed)
    return model, ALL[name](model)


def held_state(optimizer: Optimizer) -> list[Any]:
    """All state and options, without the parameters themselves."""
    inside = [optimizer, *getattr(optimizer, "optimizers", [])]
    return [
        ([one.state.get(p, {}) for group in one.param_groups for p in group["params"]], options_of(one))
        for one in inside
    ]


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def goes_on(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """What comes of some more training."""
    torch.manual_seed(11)
    train(model, optimizer, 3)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("steps", (0, 2), ids=("fresh", "trained"))
@pytest.mark.parametrize("name", ALL)
def test_a_save_changes_nothing_and_a_load_goes_on(tmp_path: Path, name: str, steps: int) -> None:
    model, optimizer = make(name)
    train(model, optimizer, steps)
    before = seen_by_training(model, optimizer)
    with Hooked(optimizer) as hooks, Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2, blocking=False)
        checkpointer.wait()
        assert hooks.calls == 0
    after = seen_by_training(model, optimizer)
    assert [part for part in before if not equal(before[part], after[part])] == []
    saved = copy.deepcopy(held_state(optimizer))
    expected = goes_on(model, optimizer)

    for others_steps in (0, 1):
        other, other_optimizer = make(name, seed=1)
        train(other, other_optimizer, others_steps)
        torch.manual_seed(5)
        with Checkpointer(tmp_path, parts(other, other_optimizer)) as checkpointer:
            for step in (2, 1):
                assert checkpointer.load(step).names("skipped") == []
        if name == "Caching" and others_steps and not steps:
            continue  # it has an option that the checkpoint does not
        assert equal(held_state(other_optimizer), saved)
        if name != "Noisy":
            assert equal(goes_on(other, other_optimizer), expected)


def test_a_container_is_asked_in_its_own_form(tmp_path: Path) -> None:
    """Its state dict takes a step as long as there is no state; saved so, it is loaded as one without."""
    model, optimizer = make("Container")
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(0)
        train(model, optimizer)
        checkpointer.save(1)
        state: dict[str, Any] = {"optimizer": {name: torch.zeros(()) for name in ("state.first.bias.step",)}}
        dcp.load(state, checkpoint_id=str(checkpointer.path(1)), no_dist=True)
        assert state["optimizer"]["state.first.bias.step"] == 2
        checkpointer.load(0)
        assert not any(one.state for one in optimizer.optimizers)  # type: ignore[attr-defined]
        # Its flat names are those of torchtitan, which other optimizers read.
        other = torch.optim.AdamW(model.parameters())
        with Checkpointer(tmp_path, parts(model, other)) as second:
            second.load(1)
    assert other.state[model.first.bias]["step"] == 2
    assert other.param_groups[0]["weight_decay"] == 0.5


def test_a_fresh_optimizer_is_saved_as_it_is(tmp_path: Path) -> None:
    model, optimizer = make("AdamW")
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(0)
        metadata = dcp.FileSystemReader(checkpointer.path(0)).read_metadata()
        assert not [key for key in metadata.state_dict_metadata if key.startswith("optimizer.state")]
        assert "optimizer.param_groups.0.lr" in metadata.state_dict_metadata


# ---- groups ----


def grouped(model: nn.Module, *groups: tuple[list[str], float], make: Any = torch.optim.AdamW) -> Optimizer:
    named = dict(model.named_parameters())
    return make([{"params": [named[name] for name in names], "lr": rate} for names, rate in groups], lr=9.0)


FW, FB, SW, SB = "first.weight", "first.bias", "second.weight", "second.bias"


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.SGD), ids=("AdamW", "SGD"))
@pytest.mark.parametrize("steps", (0, 2))
@pytest.mark.parametrize(
    "there",
    (
        [([FB, FW], 5.0), ([SW, SB], 6.0)],
        [([SW, SB], 5.0), ([FW, FB], 6.0)],
        [([SB, SW], 5.0), ([FB, FW], 6.0)],
    ),
)
def test_groups_in_another_order(tmp_path: Path, there: Any, steps: int, kind: Any) -> None:
    """The order is nobody's business: members tell which group is which."""
    model = Net()
    optimizer = grouped(model, ([FW, FB], 0.1), ([SW, SB], 0.2), make=kind)
    train(model, optimizer, steps)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    expected = goes_on(model, optimizer)
    other = Net(1)
    reordered = grouped(other, *there, make=kind)
    with Checkpointer(tmp_path, parts(other, reordered)) as checkpointer:
        checkpointer.load()
    rates = {id(p): group["lr"] for group in reordered.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in other.parameters()] == [0.1, 0.1, 0.2, 0.2]
    assert equal(goes_on(other, reordered), expected)


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.SGD), ids=("AdamW", "SGD"))
@pytest.mark.parametrize("steps", (0, 2), ids=("fresh", "trained"))
@pytest.mark.parametrize(
    ("there", "message"),
    (
        ([([FW, FB, SW], 5.0), ([SB], 6.0)], "'second.weight' (in group 1 there, 0 here)"),
        ([([FW, SW], 5.0), ([FB, SB], 6.0)], "in other groups than they were saved in"),
        ([([FW, FB, SW, SB], 5.0)], "2 parameter groups in the checkpoint, 1 here; parameters are in other groups"),
        ([([FW, FB], 5.0), ([SW], 5.0), ([SB], 6.0)], "2 parameter groups in the checkpoint, 3 here"),
    ),
)
def test_a_parameter_in_another_group(tmp_path: Path, there: Any, message: str, steps: int, kind: Any) -> None:
    model = Net()
    optimizer = grouped(model, ([FW, FB], 0.1), ([SW, SB], 0.2), make=kind)
    train(model, optimizer, steps)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    other = Net(1)
    moved = grouped(other, *there, make=kind)
    before = seen_by_training(other, moved)
    for strict in (True, False):
        with Checkpointer(tmp_path, parts(other, moved, strict=strict)) as checkpointer:
            text = error_of(checkpointer.load)
        assert message in text
        assert "nothing was changed" in text and "exclude=['optimizer']" in text
    assert equal(before, seen_by_training(other, moved))


@pytest.mark.parametrize("own_form", (True, False), ids=("own form", "flat"))
def test_a_parameter_in_another_group_of_a_container(tmp_path: Path, own_form: bool) -> None:
    """Options of flat names are those of parameters: those of one group must have been the same."""
    model, optimizer = make("Container")
    optimizer.optimizers[1].param_groups[0]["lr"] = 0.7  # type: ignore[attr-defined]
    train(model, optimizer)
    before = copy.deepcopy(held_state(optimizer))
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    other = Container(model, first=3) if own_form else torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, parts(model, other)) as checkpointer:
        message = error_of(checkpointer.load)
    assert (
        "nothing was changed" in message and "parameters of one group were saved in groups with different lr" in message
    )
    assert equal(held_state(optimizer), before)
    optimizer.optimizers[1].param_groups[0]["lr"] = 0.1  # type: ignore[attr-defined]
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(2)
    with Checkpointer(tmp_path, parts(model, other)) as checkpointer:
        assert checkpointer.load().components["optimizer"].action == "loaded"


def test_matching_groups() -> None:
    own = [[["a", "tied"]], [["b"], ["c"]], [], [["d"]], []]
    assert match_groups(own, [["c", "b"], ["d"], [], ["tied"], []]) == ([3, 0, 2, 1, 4], [])
    assert match_groups([[["a"]], [["new"]]], [["a", "gone"]]) == ([0, None], [])
    assert match_groups([[["a"]], []], [["a"]])[1] == ["0 groups without parameters in the checkpoint, 1 here"]
    many = [[[f"p{index}"] for index in range(0, 20, 2)], [[f"p{index}"] for index in range(1, 20, 2)]]
    _, (problem,) = match_groups(many, [[f"p{index}" for index in range(10)], [f"p{index}" for index in range(10, 20)]])
    assert problem.endswith("and 6 more")


def test_a_parameter_that_is_new(tmp_path: Path) -> None:
    """Not even an optimizer without state is loaded without it, unless that is allowed."""
    model = Net()
    with Checkpointer(
        tmp_path, parts(model, grouped(model, ([FW, FB, SW], 0.1), make=torch.optim.SGD))
    ) as checkpointer:
        checkpointer.save(1)
    optimizer = grouped(model, ([FW, FB, SW], 5.0), ([SB], 6.0), make=torch.optim.SGD)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        assert "in no parameter group of the checkpoint: 'second.bias'" in error_of(checkpointer.load)
    with Checkpointer(tmp_path, parts(model, optimizer, strict=False)) as checkpointer:
        checkpointer.load()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 6.0]


def save_with_stock(folder: Path, model: nn.Module, optimizer: Optimizer, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=str(folder / "step-1"), no_dist=True)


@pytest.mark.parametrize("flat", (False, True), ids=("nested", "flat"))
def test_groups_of_stocks_checkpoints(tmp_path: Path, flat: bool) -> None:
    model = Net()
    optimizer = grouped(model, ([FW, FB], 0.1), ([SW, SB], 0.2))
    train(model, optimizer)
    save_with_stock(tmp_path, model, optimizer, flat)
    expected = goes_on(model, optimizer)
    other = Net(1)
    moved = grouped(other, ([FW, FB, SW], 5.0), ([SB], 6.0))
    with Checkpointer(tmp_path, parts(other, moved)) as checkpointer:
        text = error_of(checkpointer.load)
    assert ("saved in groups with different lr" if flat else "in other groups than they were saved in") in text
    assert "nothing was changed" in text
    reordered = grouped(other, ([SW, SB], 5.0), ([FB, FW], 6.0))
    with Checkpointer(tmp_path, parts(other, reordered)) as checkpointer:
        checkpointer.load()
    assert equal(goes_on(other, reordered), expected)


def test_names_of_parameters_in_groups(tmp_path: Path) -> None:
    model, other = Net(), Net(1)
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    train(model, optimizer)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    for named in (list(other.named_parameters())[::-1], list(other.parameters())):
        again = torch.optim.AdamW(named)
        with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
            checkpointer.load()
        assert again.param_groups[0].get("param_names") in (
            None,
            [name for name, _ in list(other.named_parameters())[::-1]],
        )
    assert equal(goes_on(other, again), goes_on(model, optimizer))


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    def both(model: Net) -> dict[str, Any]:
        first = torch.optim.AdamW(model.first.parameters(), lr=0.1)
        return {"model": model, "first": first, "second": torch.optim.SGD(model.second.parameters(), 0.2, momentum=0.5)}

    model, other = Net(), Net(1)
    one, two = both(model), both(other)
    for name in ("first", "second"):
        train(model, one[name])
    with Checkpointer(tmp_path, one) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, two) as checkpointer:
        checkpointer.load()
    assert equal(held_state(two["first"]), held_state(one["first"]))
    assert equal(held_state(two["second"]), held_state(one["second"]))


def test_tied_parameters(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            shared = nn.Linear(4, 4)
            self.add_module(first, shared)
            self.add_module(second, shared)
            self.used = shared

        def forward(self, data: Tensor) -> Tensor:
            return self.used(data)

    model, other = Tied("embedding", "head"), Tied("head", "embedding")
    optimizer, again = (torch.optim.AdamW(one.parameters()) for one in (model, other))
    train(model, optimizer)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
        checkpointer.load()
    assert equal(held_state(again), held_state(optimizer))


def test_frozen_parameters(tmp_path: Path) -> None:
    """One that was frozen after it was trained keeps the state that it has; one that always was has none."""
    model, optimizer = make("AdamW")
    model.first.weight.requires_grad_(False)
    train(model, optimizer)
    model.second.weight.requires_grad_(False)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    other, again = make("AdamW", seed=1)
    other.first.weight.requires_grad_(False)
    other.second.weight.requires_grad_(False)
    with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
        checkpointer.load()
    assert equal(held_state(again), held_state(optimizer))


# ---- what the state consists of ----


def test_options_decide_on_the_state(tmp_path: Path) -> None:
    """Options are as they were saved, and so is the state that comes with them."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    train(model, optimizer)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    for trained in (0, 1):
        other = Net(1)
        again = torch.optim.Adam(other.parameters(), amsgrad=False)
        train(other, again, trained)
        with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
            checkpointer.load()
        assert equal(held_state(again), held_state(optimizer))
    other = Net(1)
    adamw = torch.optim.AdamW(other.parameters(), amsgrad=False)
    with Checkpointer(tmp_path, parts(other, adamw)) as checkpointer:
        text = error_of(checkpointer.load)
    assert "'optimizer.state.first.bias.max_exp_avg_sq'" in text and "in the checkpoint, but not here" in text


@pytest.mark.parametrize(("saved", "here"), (("AdamW", "SGD"), ("SGD with momentum", "LBFGS"), ("AdamW", "RMSprop")))
def test_another_class_of_optimizer(tmp_path: Path, saved: str, here: str) -> None:
    model, optimizer = make(saved)
    train(model, optimizer)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    other, another = make(here, seed=1)
    before = seen_by_training(other, another)
    with Checkpointer(tmp_path, parts(other, another)) as checkpointer:
        assert "nothing was changed" in error_of(checkpointer.load)
    assert equal(before, seen_by_training(other, another))


def test_state_of_a_stock_checkpoint_that_nobody_can_make_first(tmp_path: Path) -> None:
    model, optimizer = make("LBFGS")
    train(model, optimizer)
    save_with_stock(tmp_path, model, optimizer, flat=False)
    other, again = make("LBFGS", seed=1)
    with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
        checkpointer.load()
    assert equal(held_state(again), held_state(optimizer))
    assert equal(goes_on(other, again), goes_on(model, optimizer))


class Nested(Plain):
    """Keeps dicts by numbers, tuples and lists in its state, and something that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                state["factors"] = {0: torch.full((2,), float(number)), 1: [parameter.clone(), torch.ones(3)]}
                state["pair"], state["none"] = (1, 2), None


def test_state_of_any_structure(tmp_path: Path) -> None:
    model, other = Net(), Net(1)
    optimizer, again = Nested(model.parameters()), Nested(other.parameters())
    train(model, optimizer)
    optimizer.state["shared"] = {"count": torch.ones(2)}
    again.state["shared"] = {"count": torch.zeros(2)}
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
        checkpointer.load()
    assert equal(held_state(again), held_state(optimizer))
    assert equal(again.state["shared"], optimizer.state["shared"])


# ---- what the report says ----


def test_casts_are_told(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_in(model, optimizer, torch.float32)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    other = Net(1).bfloat16()
    again = torch.optim.AdamW(other.parameters())
    with Checkpointer(tmp_path, parts(other, again)) as checkpointer:
        text = str(checkpointer.load())
    assert "model: loaded, as saved, but 5 tensors cast from float32 to bfloat16, which rounds" in text
    assert "optimizer: loaded, as saved, but 8 tensors cast from float32 to bfloat16, which rounds" in text


def train_in(model: nn.Module, optimizer: Optimizer, dtype: torch.dtype) -> None:
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()


def test_optimizers_that_cast_their_state_are_told_of(tmp_path: Path) -> None:
    """torch casts state to the type of the parameter when it is taken over."""
    model = Net().bfloat16()
    optimizer = Plain(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["precise"] = torch.rand(parameter.shape)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
        text = str(checkpointer.load())
    assert "optimizer: loaded, as saved, but 4 tensors cast from float32 to bfloat16" in text


class Written(Plain):
    """Keeps texts in its state, which torch's load_state_dict makes something else of."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"text": "abc", "texts": ["a", "b"], "number": 2}


def test_what_a_load_does_not_bring_back_is_told(tmp_path: Path) -> None:
    model = Net()
    optimizer = Written(model.parameters())
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(0)
        optimizer.step()
        optimizer.param_groups[0]["mine"] = 1
        text = str(checkpointer.load(0))
        assert "optimizer: loaded, as saved, but options of groups that are not in the checkpoint stay: 'mine'" in text
        optimizer.step()
        checkpointer.save(1)
        text = str(checkpointer.load())
    assert "Written has made something else of 'first.bias.text', 'first.bias.texts'" in text
    assert "number" not in text


# ---- what cannot be ----


class Holder(Optimizer):
    """Has torch's own state_dict, which does not know of the optimizer that it holds (as SAM's)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups


def test_an_optimizer_whose_state_dict_leaves_another_out(tmp_path: Path) -> None:
    model = Net()
    holder = Holder(model.parameters())
    for components in (parts(model, holder), {"optimizer": holder}, {"optimizer": Sharded(holder)}):
        with pytest.raises(TypeError, match=r"Holder.*base_optimizer, a SGD.*a component of its own"):
            Checkpointer(tmp_path, components)
    Checkpointer(tmp_path, parts(model, holder.base_optimizer)).close()


def test_wrappers_are_named_by_what_they_wrap(tmp_path: Path) -> None:
    model, optimizer = make("Wrapper")
    train(model, optimizer)
    with Checkpointer(tmp_path, parts(model, optimizer)) as checkpointer:
        checkpointer.save(1)
    other = Net(1)
    plain = torch.optim.AdamW(other.parameters())
    with Checkpointer(tmp_path, parts(other, plain)) as checkpointer:
        checkpointer.load()
    assert equal(held_state(plain), held_state(optimizer.optimizer))  # type: ignore[attr-defined]
    for made in (Wrapper(Container(other)), Recorded(other.parameters())):
        with Checkpointer(tmp_path / "own", parts(other, made)) as checkpointer:
            checkpointer.save(1)
            checkpointer.load()


class ByNumber:
    """Has a dict with numbers for keys, which DCP makes texts of."""

    def __init__(self) -> None:
        self.state = {0: {"weight": torch.zeros(2), "count": 0}, 10: {"weight": torch.zeros(2), "count": 0}}

    def state_dict(self) -> dict[str, Any]:
        return {"by number": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["by number"]


def test_numbers_for_keys_come_back_as_numbers(tmp_path: Path) -> None:
    holder = ByNumber()
    holder.state[10] = {"weight": torch.ones(2), "count": 7}
    with Checkpointer(tmp_path, {"it": Sharded(holder)}) as checkpointer:
        checkpointer.save(1)
    again = ByNumber()
    with Checkpointer(tmp_path, {"it": Sharded(again)}) as checkpointer:
        checkpointer.load()
    assert equal(again.state, holder.state)


def test_generators_are_as_they_were_after_a_save(tmp_path: Path) -> None:
    """A loader that is asked for its state makes an iterator, which draws a seed."""

    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"seed": float(torch.rand(()))}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    before = torch.get_rng_state()
    with Checkpointer(tmp_path, {"it": Replicated(Drawing()), "mine": PerRank(Drawing())}) as checkpointer:
        checkpointer.save(1)
    assert torch.equal(torch.get_rng_state(), before)
