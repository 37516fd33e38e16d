"""Kinds of components, each with its own rule: schedules, generators, states of ranks; and others' checkpoints."""

from __future__ import annotations

import logging
import pickle
import random
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import _distributed
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _resume import adamw, error_of, everything, same, spread, train
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim import lr_scheduler

from dcpring import RNG, Checkpointer, CheckpointError, Elastic, PerRank, Replicated, Sharded
from dcpring.resume.trees import decode, digest, encode

# ---- learning rate schedules ----

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step] * len(o.param_groups)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda step: 0.9] * len(o.param_groups)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 8)], [3]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}


def test_no_scheduler_is_forgotten() -> None:
    public = {name for name in dir(lr_scheduler) if isinstance(getattr(lr_scheduler, name), type)}
    schedulers = {name for name in public if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    assert schedulers - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys()


def sgd(groups: int = 2, tensor_lr: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(groups))
    rate: Any = torch.tensor(0.2) if tensor_lr else 0.2
    return model, torch.optim.SGD([{"params": part.parameters(), "lr": rate} for part in model], momentum=0.9)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """Trains, and returns all rates on the way."""
    rates = []
    for step in range(steps):
        sum(part(torch.ones(1, 2)).sum() for part in model).backward()
        optimizer.step()
        optimizer.zero_grad()
        metric = [float(step // 3)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
        scheduler.step(*metric)
        rates += [float(group["lr"]) for group in optimizer.param_groups]
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("with_optimizer", (True, False), ids=("with-optimizer", "without"))
def test_schedules_go_on(tmp_path: Path, name: str, with_optimizer: bool) -> None:
    model, optimizer = sgd(tensor_lr=name == "CosineAnnealingLR")
    scheduler = SCHEDULERS[name](optimizer)
    advance(model, optimizer, scheduler, 5)
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer, "schedule": scheduler}) as checkpointer:
        checkpointer.save(5)
    expected = advance(model, optimizer, scheduler, 7)
    model, optimizer = sgd(tensor_lr=name == "CosineAnnealingLR")
    scheduler = SCHEDULERS[name](optimizer)
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer, "schedule": scheduler}) as checkpointer:
        checkpointer.load(exclude=[] if with_optimizer else ["optimizer"])
    assert advance(model, optimizer, scheduler, 7) == expected


@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - {"ReduceLROnPlateau"}))
def test_a_schedule_of_which_only_the_position_was_saved(tmp_path: Path, name: str) -> None:
    """torchtitan saves no more of its schedulers."""
    _, optimizer = sgd()
    scheduler = SCHEDULERS[name](optimizer)
    expected = [advance(*sgd_with(name), steps=5)[-1], 0]
    dcp.save({"schedule": {"last_epoch": 5}}, checkpoint_id=str(tmp_path / "step-5"), no_dist=True)
    with Checkpointer(tmp_path, {"schedule": scheduler}) as checkpointer:
        report = checkpointer.load().components["schedule"]
        assert (report.action, report.detail) == ("loaded", "stepped from its start to the position that was saved")
        assert optimizer.param_groups[-1]["lr"] == expected[0]
        assert "needs a scheduler that has not been stepped" in error_of(checkpointer.load)
    plateau = SCHEDULERS["ReduceLROnPlateau"](optimizer)
    with Checkpointer(tmp_path, {"schedule": plateau}) as checkpointer:
        assert "ReduceLROnPlateau, which follows a metric, needs more" in error_of(checkpointer.load)


def sgd_with(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer = sgd()
    return model, optimizer, SCHEDULERS[name](optimizer)


def refused_schedule(folder: Path, groups: int, make: Any) -> str:
    _, optimizer = sgd(groups)
    schedule = make(optimizer)
    with Checkpointer(folder, {"schedule": schedule}) as checkpointer:
        before = dict(schedule.state_dict())
        message = error_of(checkpointer.load)
        assert schedule.state_dict() == before
    return message


def test_schedules_that_do_not_fit(tmp_path: Path) -> None:
    _, optimizer = sgd()
    scheduler = SCHEDULERS["StepLR"](optimizer)
    with Checkpointer(tmp_path / "ours", {"schedule": scheduler}) as checkpointer:
        checkpointer.save(1)
    state = {"schedule": scheduler.state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "stock" / "step-1"), no_dist=True)
    for folder in (tmp_path / "ours", tmp_path / "stock"):
        message = refused_schedule(folder, 3, SCHEDULERS["StepLR"])
        assert "saved with 2 parameter groups, here the optimizer has 3" in message
        message = refused_schedule(folder, 2, SCHEDULERS["OneCycleLR"])
        assert "saved from a StepLR" in message or "not saved from a OneCycleLR: its state lacks" in message


# ---- optimizers ----


def test_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    """It is saved and loaded as such: DCP would have counted a step."""
    model = spread("single", 1)
    optimizer = adamw(model)
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1, blocking=False)
        checkpointer.wait()
        assert not optimizer.state
        train(model, optimizer)
        checkpointer.load(0)
        assert not optimizer.state
    train(model, optimizer)
    other = spread("single", 1)
    other_optimizer = adamw(other)
    train(other, other_optimizer)
    assert same(everything(model, optimizer), everything(other, other_optimizer))


def test_gradients_survive_a_save_and_a_load(tmp_path: Path) -> None:
    model = spread("single", 1)
    optimizer = adamw(model)
    train(model, optimizer)
    saved = everything(model, optimizer)
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    model = spread("single", 2)
    optimizer = adamw(model)
    model(torch.arange(5)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.load()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert same(everything(model, optimizer), saved)


class Branches(nn.Module):
    """One of two parts is used; the other never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)


def test_parameters_without_state(tmp_path: Path) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    model.used(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    other = Branches()
    other_optimizer = torch.optim.AdamW(other.parameters())
    with Checkpointer(tmp_path, {"model": other, "optimizer": other_optimizer}) as checkpointer:
        report = checkpointer.load()
    assert "2 parameters had no state yet" in report.components["optimizer"].detail
    assert {id(parameter) for parameter in other_optimizer.state} == {id(p) for p in other.used.parameters()}


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = sgd()
    advance(model, optimizer, SCHEDULERS["StepLR"](optimizer), 1)
    optimizer.param_groups[1]["momentum"] = 0.5
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    adam = torch.optim.AdamW([{"params": part.parameters()} for part in model])
    with Checkpointer(tmp_path, {"model": model, "optimizer": adam}) as checkpointer:
        message = error_of(checkpointer.load)
        assert "'optimizer.state.0.bias.exp_avg', 'optimizer.state.0.bias.exp_avg_sq'" in message
    one_group = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path, {"model": model, "optimizer": one_group}) as checkpointer:
        assert "2 parameter groups in the checkpoint, 1 here" in error_of(checkpointer.load)
    assert not adam.state and not one_group.state


def test_not_strict(tmp_path: Path) -> None:
    small, large = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    before = large.bias.detach().clone()
    for first, second in ((small, large), (large, small)):
        with Checkpointer(tmp_path, {"model": first}) as checkpointer:
            checkpointer.save(1)
        with Checkpointer(tmp_path, {"model": second}) as checkpointer:
            assert "Sharded(..., strict=False)" in error_of(checkpointer.load)
        with Checkpointer(tmp_path, {"model": Sharded(second, strict=False)}) as checkpointer:
            detail = checkpointer.load().components["model"].detail
        assert ("'model.bias' is not in the checkpoint, left as it was" in detail) == (second is large)
    assert torch.equal(small.weight, large.weight)
    assert torch.equal(large.bias, before)


# ---- states of ranks ----


class Cursor:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "empty": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["empty"] == {}
        self.value = state["value"]


def merged(states: list[Any], old_world: int, new_world: int, rank: int) -> dict[str, Any]:
    """Lists of work, dealt out anew."""
    work = [item for state in states for item in state["value"]]
    assert len(states) == old_world
    return {"value": work[rank::new_world], "empty": {}}


def save_work(folder: Path, work: list[int]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = {
        "work": PerRank(Cursor(work[rank::world]), reshard=merged),
        "pairs": PerRank(Cursor(rank // 2), rank=rank // 2, world_size=-(-world // 2)),
        "generator": torch.Generator().manual_seed(rank),
    }
    with Checkpointer(folder, parts) as checkpointer:
        checkpointer.save(1)


def load_work(folder: Path) -> tuple[list[int], str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    cursor, pair = Cursor(None), Cursor(None)
    generator = torch.Generator().manual_seed(99)
    parts = {
        "work": PerRank(cursor, reshard=merged),
        "pairs": PerRank(pair, rank=rank % 2, world_size=2),
        "generator": generator,
    }
    with Checkpointer(folder, parts) as checkpointer:
        message = error_of(checkpointer.load) if world != 4 else ""
        report = checkpointer.load(exclude=["generator"] if world != 4 else [])
    assert pair.value == rank % 2
    expected = torch.Generator().manual_seed(rank) if world == 4 else torch.Generator().manual_seed(99)
    assert torch.equal(generator.get_state(), expected.get_state())
    assert (report.components["work"].action == "resharded") == (world != 4)
    return cursor.value, message


def test_states_of_ranks(tmp_path: Path) -> None:
    work = list(range(50))
    _distributed.run(4, save_work, tmp_path, work)
    for world in (4, 2, 3):
        results = _distributed.run(world, load_work, tmp_path)
        assert sorted(item for value, _ in results for item in value) == work
        for _, message in results:
            assert ("generator (per_rank): it belongs to ranks" in message) == (world != 4)


def bad_hook(folder: Path) -> str:
    def raising(*_: Any) -> Any:
        raise KeyError("no such cursor")

    cursor = Cursor("mine")
    parts = {"work": PerRank(cursor, reshard=raising), "counter": Replicated({"step": 5})}
    with Checkpointer(folder, parts) as checkpointer:
        message = error_of(checkpointer.load, components=["work"])
    assert cursor.value == "mine"
    return message


def test_a_hook_that_raises(tmp_path: Path) -> None:
    _distributed.run(4, save_work, tmp_path, [1])
    for message in _distributed.run(2, bad_hook, tmp_path):
        assert "work (per_rank): ranks 0-1: KeyError: 'no such cursor'" in message
        assert "nothing was changed" in message


def test_another_kind_than_was_saved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"it": PerRank(Cursor(1))}) as checkpointer:
        checkpointer.save(1)
    for wrapped in (Replicated(Cursor(2)), Elastic(Cursor(2)), Sharded(Cursor(2))):
        with Checkpointer(tmp_path, {"it": wrapped}) as checkpointer:
            assert "saved as per_rank" in error_of(checkpointer.load) or "pass Elastic" in error_of(checkpointer.load)
    for rank, world in ((None, 2), (2, 2), (0, None), (0, 0)):
        with pytest.raises(ValueError, match="rank"):
            PerRank(Cursor(1), rank=rank, world_size=world)


def elastic_disagreement(folder: Path) -> str:
    with Checkpointer(folder, {"it": Elastic(Cursor(dist.get_rank() // 2))}) as checkpointer:
        return error_of(checkpointer.save, 1)


def test_elastic_progress_that_differs(tmp_path: Path) -> None:
    for message in _distributed.run(4, elastic_disagreement, tmp_path):
        assert "the progress of ranks 2-3 is not that of rank 0 ('value' is not the same)" in message


# ---- generators ----


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()]


def save_generators(folder: Path) -> list[Any]:
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    random.seed(rank)
    np.random.seed(rank)
    draw()
    with Checkpointer(folder, {"rng": RNG(seed=1234)}) as checkpointer:
        checkpointer.save(1)
    return draw()


def load_generators(folder: Path) -> tuple[list[Any], str, list[Any]]:
    rng = RNG()
    with Checkpointer(folder, {"rng": rng}) as checkpointer:
        report = checkpointer.load(1)
        drawn = draw()
        checkpointer.load(1)
        assert draw() == drawn
        checkpointer.save(2)
        checkpointer.load(2)
    assert rng.seed == 1234
    return drawn, report.components["rng"].detail, rng.derived


def test_generators(tmp_path: Path) -> None:
    expected = _distributed.run(4, save_generators, tmp_path)
    results = _distributed.run(4, load_generators, tmp_path)
    assert [drawn for drawn, _, _ in results] == expected
    assert all(derived == [] and detail == "as saved" for _, detail, derived in results)
    results = _distributed.run(2, load_generators, tmp_path)
    for drawn, detail, derived in results:
        assert detail == "from 4 ranks to 2, new seeds derived from the one that was saved"
        assert derived == [{"from": 4, "to": 2}]
        assert drawn not in expected
    assert results[0][0] != results[1][0]


def test_a_load_in_a_script_that_has_not_come_to_numpy_yet(tmp_path: Path) -> None:
    np.random.seed(4)
    with Checkpointer(tmp_path, {"rng": RNG()}) as checkpointer:
        checkpointer.save(1)
    expected = np.random.rand()
    script = (
        "import sys; from dcpring import RNG, Checkpointer\n"
        f"with Checkpointer({str(tmp_path)!r}, {{'rng': RNG()}}) as checkpointer: checkpointer.load()\n"
        "import numpy; print(numpy.random.rand())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(found.stdout) == expected


class Device:
    """An accelerator's module, as far as generators go."""

    def __init__(self) -> None:
        self.state = torch.zeros(4, dtype=torch.uint8)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with, or without, an accelerator that works or is only built for."""
    machine: dict[str, Any] = {"kind": None, "works": True, "module": Device()}
    kind = lambda *_: None if machine["kind"] is None else torch.device(machine["kind"])  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: machine["works"])
    monkeypatch.setattr(torch, "get_device_module", lambda device: machine["module"])
    return machine


def test_generators_of_accelerators(tmp_path: Path, accelerator: dict[str, Any]) -> None:
    def detail(step: int) -> str:
        with Checkpointer(tmp_path, {"rng": RNG()}) as checkpointer:
            return checkpointer.load(step).components["rng"].detail

    def save(step: int) -> None:
        with Checkpointer(tmp_path, {"rng": RNG()}) as checkpointer:
            checkpointer.save(step)

    save(1)
    accelerator["kind"] = "cuda"
    accelerator["module"].state += 7
    save(2)
    accelerator["module"].state += 1
    assert detail(1) == "as saved, but the checkpoint has no state of a cuda generator, which goes on as it is"
    assert detail(2) == "as saved"
    assert accelerator["module"].state.tolist() == [7] * 4
    accelerator["kind"] = "xpu"
    assert "that of a cuda generator is left out, as there is none here" in detail(2)
    # A build for an accelerator on a machine that has none: nobody asks it anything.
    accelerator |= {"kind": "cuda", "works": False, "module": None}
    assert "that of a cuda generator is left out" in detail(2)
    assert detail(1) == "as saved"


def test_generators_are_set_last(tmp_path: Path) -> None:
    """Whatever else a load does, and draws for it."""

    class Drawing(Cursor):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            torch.rand(3)

    parts = {"rng": RNG(), "it": PerRank(Drawing(1))}
    with Checkpointer(tmp_path, parts) as checkpointer:
        checkpointer.save(1)
        expected = draw()
        checkpointer.load()
    assert draw() == expected


# ---- whether it was taken over ----


class Deaf(Cursor):
    """Takes nothing over, or only some of it."""

    def __init__(self, value: Any, hears: bool = False) -> None:
        super().__init__(value)
        self.hears = hears

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "same": 1, "weight": torch.tensor([self.value, float("nan")])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"] if self.hears else self.value


@pytest.mark.parametrize("kind", (Replicated, Sharded))
def test_what_is_not_taken_over_is_told(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, {"it": kind(Deaf(1.0))}) as checkpointer:
        checkpointer.save(1)
    for hears in (False, True):
        caplog.clear()
        with Checkpointer(tmp_path, {"it": kind(Deaf(2.0, hears))}) as checkpointer:
            detail = checkpointer.load().components["it"].detail
        expected = "" if hears else ", but its state_dict() has something else in 'value', 'weight' afterwards"
        assert detail == f"as saved{expected}"
        assert ("component 'it' was loaded, but its state_dict()" in caplog.text) == (not hears)


def test_keys_that_look_alike_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cursor = Cursor({0: torch.ones(2), "0": torch.zeros(2), "a": {"b": 1}, "a.b": 2})
    expected = dict(cursor.value)
    with Checkpointer(tmp_path, {"it": Replicated(cursor)}) as checkpointer:
        checkpointer.save(1)
        cursor.value = {}
        assert checkpointer.load().components["it"].detail == "as saved"
    assert digest(cursor.value) == digest(expected) and "something else" not in caplog.text


def remarks_of_ranks(folder: Path) -> str:
    deaf = Deaf(1.0)
    with Checkpointer(folder, {"it": Replicated(deaf)}) as checkpointer:
        checkpointer.save(1)
        deaf.value, deaf.hears = 5.0, dist.get_rank() == 0
        return str(checkpointer.load())


def test_the_report_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    first, second = _distributed.run(2, remarks_of_ranks, tmp_path)
    assert first == second
    assert "it: loaded, as saved, but rank 1: its state_dict() has something else in 'value', 'weight'" in first


def test_what_cannot_be_asked_is_handed_over(tmp_path: Path) -> None:
    """To ask a loader for its state is to begin to load: so nobody knows whether it has taken it."""
    parts = {"mine": PerRank(Deaf(1.0)), "progress": Elastic(Deaf(1.0)), "generator": torch.Generator(), "rng": RNG()}
    with Checkpointer(tmp_path, parts) as checkpointer:
        checkpointer.save(1)
        report = checkpointer.load()
    details = {name: part.detail for name, part in report.components.items()}
    assert details == {
        "mine": "handed over as saved",
        "progress": "handed over as saved",
        "generator": "as saved",
        "rng": "as saved",
    }


def test_nothing_is_said_of_keys_that_are_all_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A load reads twice; what one read leaves to the other is nothing unexpected."""
    model = spread("single", 1)
    parts = {"model": model, "optimizer": adamw(model), "state": Replicated({"step": 1}), "more": Replicated({"a": 1})}
    with Checkpointer(tmp_path, parts) as checkpointer:
        checkpointer.save(1)
        with caplog.at_level(logging.INFO, logger="dcpring"):
            checkpointer.load()
            checkpointer.load(exclude=["more"])
    said = [record.getMessage() for record in caplog.records if record.name == "dcpring"]
    assert [text for text in said if not text.startswith("loaded ")] == []


# ---- states as trees ----

TREES: list[Any] = [
    {"a": 1, "b": {"c": [1, 2, {"d": 3}]}},
    {},
    {"empty": {}, "list": [], "nested": [{}, [], [{}]]},
    {1: "int key", "2": {3.0: None}},
    Counter({30: 1, 80: 1}),
    {"milestones": Counter({30: 1}), "order": OrderedDict([("z", 1), ("a", 2)])},
    {"tuple": (1, {"a": 2}), "marked": ("dcpring.object", {"a": 1})},
    {"tensors": [torch.arange(3), {"deep": torch.ones(2, dtype=torch.bfloat16)}], "scalar": torch.tensor(3)},
    {"rank_0": 1, "rank_1": {"a": 2}},
    {"bytes": b"\x00\xff", "complex": 1j, "inf": float("inf"), "none": None, "bool": True},
    torch.arange(4),
    "a string",
]


class Tree:
    def __init__(self, tree: Any = None) -> None:
        self.tree = tree

    def state_dict(self) -> Any:
        return self.tree

    def load_state_dict(self, tree: Any) -> None:
        self.tree = tree


def test_states_come_back_exactly(tmp_path: Path) -> None:
    parts = {f"tree{index}": Replicated(Tree(tree)) for index, tree in enumerate(TREES)}
    ranks = {f"rank{index}": PerRank(Tree(tree)) for index, tree in enumerate(TREES)}
    with Checkpointer(tmp_path, {**parts, **ranks}) as checkpointer:
        checkpointer.save(1, blocking=False)
        for part in (*parts.values(), *ranks.values()):
            part.stateful.tree = None
        checkpointer.load()
    for index, tree in enumerate(TREES):
        for part in (parts[f"tree{index}"], ranks[f"rank{index}"]):
            assert digest(part.stateful.tree) == digest(tree), tree
            assert type(part.stateful.tree) is type(tree)
    assert all(digest(decode(encode(tree))) == digest(tree) for tree in TREES)


def test_digests_tell_states_apart() -> None:
    trees = [*TREES, {"a": 1, "b": {"c": [1, 2, {"d": 4}]}}, [], None, 1, 1.0, True, "1", torch.arange(4).float()]
    assert len({digest(tree) for tree in trees}) == len(trees)


def test_a_dict_is_loaded_in_place(tmp_path: Path) -> None:
    state: dict[str, Any] = {"step": 3, "gone": 1}
    with Checkpointer(tmp_path, {"state": Replicated(state)}) as checkpointer:
        checkpointer.save(3)
        state.update(step=9, extra=2)
        checkpointer.load()
    assert state == {"step": 3, "gone": 1}


# ---- checkpoints of other programs ----


def save_like_torchtitan(folder: Path) -> None:
    model = spread("fsdp", 4)
    optimizer = adamw(model)
    train(model, optimizer)
    expected = everything(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": SCHEDULERS["LambdaLR"](optimizer).state_dict(),
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "losses": [1.5, 1.25]},
        "dataloader": {f"dp_rank_{dist.get_rank()}": b"\x80\x04K\x03.", "world_size": dist.get_world_size()},
    }
    dcp.save(state, checkpoint_id=str(folder / "step-7"))
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def load_like_torchtitan(folder: Path) -> tuple[bool, Any, str, str]:
    model = spread("fsdp-3", 5)
    optimizer = adamw(model)
    train_state = Tree()
    loader = Tree()
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    parts = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "train_state": Replicated(train_state),
        "dataloader": PerRank(loader),
    }
    with Checkpointer(folder, parts) as checkpointer:
        assert checkpointer.steps() == [7]
        message = error_of(checkpointer.load)
    parts["dataloader"] = PerRank(loader, reshard=lambda states, old, new, rank: sum(states) + 10 * old + rank)
    with Checkpointer(folder, parts) as checkpointer:
        report = checkpointer.load()
    good = same(everything(model, optimizer), torch.load(folder / "expected.pt"))
    assert loader.tree == 12 + 40 + dist.get_rank()
    return good, train_state.tree, message, str(report)


def test_torchtitan_layout(tmp_path: Path) -> None:
    _distributed.run(4, save_like_torchtitan, tmp_path)
    for good, train_state, message, report in _distributed.run(3, load_like_torchtitan, tmp_path):
        assert good
        assert train_state == {"step": torch.tensor(7), "losses": [1.5, 1.25]}
        assert "(saved by at least 4 ranks, without a manifest) on 3 ranks" in message
        assert "dataloader (per_rank): it belongs to ranks, and was saved by 4 ranks, not 3" in message
        assert "saved by an unknown number of ranks, loaded by 3 ranks" in report


class TitanLoader:
    """torchtitan's: its rank is in its state, in which a pickle lies; it passes over what is not for it."""

    def __init__(self, rank: int, world: int) -> None:
        self.key, self.world, self.position = f"dp_rank_{rank}", world, 0

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps({"position": self.position}), "world_size": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.key in state:
            assert state["world_size"] == self.world
            self.position = pickle.loads(state[self.key])["position"]


def titans_loaders(folder: Path) -> tuple[list[int], str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    loader = TitanLoader(rank, world)
    loader.position = 17 + rank
    dcp.save({"dataloader": loader}, checkpoint_id=str(folder / "step-1"))
    with Checkpointer(folder, {"dataloader": PerRank(loader)}) as checkpointer:
        for step in (1, 2):
            loader.position = 0
            detail = checkpointer.load().components["dataloader"].detail
            found.append(loader.position)
            checkpointer.save(step + 1)
    return found, detail


def test_a_loader_that_has_its_rank_in_its_state(tmp_path: Path) -> None:
    """From torchtitan's checkpoint it gets back all that it gave, and from ours, too."""
    results = _distributed.run(2, titans_loaders, tmp_path)
    assert results == [([17, 17], "handed over as saved"), ([18, 18], "handed over as saved")]
    script = TitanLoader(0, 1)
    script.state_dict = lambda: {"dp_rank_0": ATTACK, "world_size": 1}  # type: ignore[method-assign]
    dcp.save({"dataloader": script}, checkpoint_id=str(tmp_path / "bad" / "step-1"), no_dist=True)
    with Checkpointer(tmp_path / "bad", {"dataloader": PerRank(TitanLoader(0, 1))}) as checkpointer:
        assert "refers to posix.system" in error_of(checkpointer.load)


ATTACK = b"\x80\x02cposix\nsystem\n(S'touch /tmp/dcpring-was-here'\ntR."


def test_a_pickle_inside_that_runs_code(tmp_path: Path) -> None:
    dcp.save({"loader": {"dp_rank_0": ATTACK}}, checkpoint_id=str(tmp_path / "step-1"), no_dist=True)
    with Checkpointer(tmp_path, {"loader": PerRank(Tree())}) as checkpointer:
        assert "refers to posix.system" in error_of(checkpointer.load)


def test_stock_checkpoints_lie_by_component(tmp_path: Path) -> None:
    model = spread("single", 4)
    optimizer = adamw(model)
    train(model, optimizer)
    expected = everything(model, optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 9,
        "epoch": {"number": 2},
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "step-9"), no_dist=True)
    model = spread("single", 5)
    optimizer = adamw(model)
    step, epoch = Tree(), {"number": 0}
    parts = {"model": model, "optimizer": optimizer, "step": Replicated(step), "epoch": Replicated(epoch)}
    with Checkpointer(tmp_path, parts) as checkpointer:
        checkpointer.load()
    assert same(everything(model, optimizer), expected)
    assert (step.tree, epoch) == (9, {"number": 2})
    with Checkpointer(tmp_path, {"model": model}) as checkpointer:
        with pytest.raises(CheckpointError, match="epoch: in the checkpoint, but not in this Checkpointer"):
            checkpointer.load()
        assert checkpointer.load(components=["model"]).names("skipped") == ["optimizer", "step", "epoch"]
