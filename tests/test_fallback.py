"""``Checkpointer.load(fallback=True)``: where a step is damaged, all ranks take the newest before it that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
from _kinds import stored
from fault._support import flip_bit
from torch import nn
from torch.distributed.fsdp import fully_shard

from dcpring import Checkpointer, CheckpointError, CorruptCheckpointError, Replicated

STEPS = (1, 2, 3)


class Parts:
    """What is trained: of each step its values can be told."""

    def __init__(self, sharded: bool = False) -> None:
        self.model = nn.Linear(64, 64, bias=False)
        if sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = {"step": 0}
        self.components = {"model": self.model, "optimizer": self.optimizer, "state": Replicated(self.state)}

    def set(self, number: int) -> None:
        self.state["step"] = number
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(number))
                self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(number))

    @property
    def numbers(self) -> set[float]:
        """One number, where all that there is comes from one step."""
        found = {float(self.state["step"])}
        for parameter in self.model.parameters():
            for tensor in (parameter, self.optimizer.state[parameter]["momentum_buffer"]):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                found |= set(local.flatten().tolist())
        return found


def flip(path: Path, key: str) -> None:
    place = stored(path)[key]
    flip_bit(path / place.relative_path, place.offset + place.length // 2)


def data_file(path: Path) -> Path:
    return next(path.glob("*.distcp"))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "metadata": lambda path: os.truncate(path / ".metadata", 100),
    "an object": lambda path: flip(path, "dcpring"),
    "a tensor": lambda path: flip(path, "optimizer.state.weight.momentum_buffer"),
    "a file that is cut": lambda path: os.truncate(data_file(path), 10),
    "a file that is gone": lambda path: data_file(path).unlink(),
}


def saved(folder: Path) -> None:
    parts = Parts()
    with Checkpointer(folder, parts.components) as checkpointer:
        for step in STEPS:
            parts.set(step)
            checkpointer.save(step)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_step_is_passed_over(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    DAMAGE[kind](tmp_path / "step-3")
    parts = Parts()
    parts.set(9)
    with Checkpointer(tmp_path, parts.components) as checkpointer:
        with pytest.raises(CheckpointError):
            checkpointer.load()
        with caplog.at_level(logging.WARNING, "dcpring"):
            report = checkpointer.load(fallback=True)
        assert report.step == 2 and list(report.passed_over) == [3]
        assert parts.numbers == {2.0}
        assert f"{tmp_path}/step-3" in report.passed_over[3]
        assert "passed over: step 3, damaged: " in str(report)
        assert "step 3 is damaged, and passed over" in caplog.text
        parts.set(4)
        checkpointer.save(3)
        checkpointer.load()
        assert parts.numbers == {4.0}


def test_what_was_overwritten_is_loaded_anew(tmp_path: Path) -> None:
    """Damage that is found late: the model has step 3's weights then."""
    saved(tmp_path)
    DAMAGE["a tensor"](tmp_path / "step-3")
    parts = Parts()
    parts.set(9)
    with Checkpointer(tmp_path, parts.components) as checkpointer:
        with pytest.raises(CorruptCheckpointError, match="may have changed in part"):
            checkpointer.load()
        assert checkpointer.load(fallback=True).passed_over.keys() == {3}
        assert parts.numbers == {2.0}


def test_none_is_left(tmp_path: Path) -> None:
    saved(tmp_path)
    for step in STEPS:
        DAMAGE["metadata"](tmp_path / f"step-{step}")
    with Checkpointer(tmp_path, Parts().components) as checkpointer:
        with pytest.raises(CorruptCheckpointError, match=r"no step .* loaded; step 3 is damaged: (?s:.*)step 1 is"):
            checkpointer.load(fallback=True, missing_ok=True)
        with pytest.raises(CorruptCheckpointError, match=r"no step in .* can be loaded; step 1 is damaged"):
            checkpointer.load(1, fallback=True)


def test_only_damage_is_passed_over(tmp_path: Path) -> None:
    """A checkpoint with other components is no damaged one."""
    saved(tmp_path)
    with Checkpointer(tmp_path, {"model": nn.Linear(64, 64, bias=False)}) as checkpointer:
        with pytest.raises(CheckpointError, match="with other components") as caught:
            checkpointer.load(fallback=True)
        assert "step-3" in str(caught.value)
        DAMAGE["metadata"](tmp_path / "step-3")
        with pytest.raises(CheckpointError, match=r"(?s)with other components.*step 3 is damaged: ") as caught:
            checkpointer.load(fallback=True)
    with Checkpointer(tmp_path / "none", {"model": nn.Linear(64, 64, bias=False)}) as checkpointer:
        assert checkpointer.load(missing_ok=True, fallback=True).step is None


def _on_ranks(folder: str, kind: str) -> list[Any]:
    path, rank = Path(folder), dist.get_rank()
    parts = Parts(sharded=True)
    with Checkpointer(path, parts.components, planner_options={"share": "off"}) as checkpointer:
        for step in STEPS:
            parts.set(step)
            checkpointer.save(step)
        if rank == 0:
            (last,) = (path / "step-3").glob("__1_0.*.distcp")
            if kind == "damaged":
                flip_bit(last, last.stat().st_size // 3)
            elif kind == "gone":
                last.unlink()
        dist.barrier()
        parts.set(9)
        report = checkpointer.load(fallback=True)
        numbers = parts.numbers
        parts.set(5)
        checkpointer.save(5, blocking=False)
        checkpointer.wait()
        checkpointer.load()
        return [report.step, report.passed_over, numbers, parts.numbers]


@pytest.mark.parametrize("kind", ("damaged", "gone"))
def test_all_ranks_take_the_same_step(tmp_path: Path, kind: str) -> None:
    """One rank alone reads what is damaged."""
    found = _distributed.run(3, _on_ranks, str(tmp_path), kind)
    assert all(each == found[0] for each in found)
    step, passed, numbers, after = found[0]
    assert step == 2 and list(passed) == [3] and "rank 1" in passed[3]
    assert numbers == {2.0} and after == {5.0}


def _differing(folder: str) -> str:
    parts = Parts()
    with Checkpointer(folder, parts.components) as checkpointer:
        parts.set(1)
        checkpointer.save(1)
        try:
            checkpointer.load(fallback=dist.get_rank() == 0)
        except CheckpointError as error:
            return str(error)
    return ""


def test_ranks_that_differ_about_it(tmp_path: Path) -> None:
    for said in _distributed.run(2, _differing, str(tmp_path)):
        assert "fallback=True" in said and "fallback=False" in said
