"""Checkpointer: folders and retention, saves in the background, and loads that fail as a whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from _resume import adamw, error_of, everything, same, spread, train
from fault._support import fault, flip_bit, storage_of
from torch import nn

from dcpring import (
    RNG,
    Checkpointer,
    CheckpointError,
    CorruptCheckpointError,
    ElasticLoader,
    ElasticSampler,
    PerRank,
    Replicated,
    RingWriter,
    Sharded,
)
from dcpring.format.manifest import MANIFEST_KEY
from dcpring.move.staging import StagingBuffer

# ---- one process ----


class Counter:
    """A component of the kind that scripts have: a step, and whatever a test wants to go wrong."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.gate: threading.Event | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Stepper(Counter):
    """Passes on what a scheduler does, as accelerate's does."""

    def __init__(self) -> None:
        super().__init__()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)


def small(folder: Path, counter: Counter, **options: Any) -> Checkpointer:
    return Checkpointer(folder, {"counter": Replicated(counter)}, **options)


def test_steps_and_latest(tmp_path: Path) -> None:
    counter = Counter()
    with small(tmp_path / "made" / "here", counter) as checkpointer:
        assert (checkpointer.steps(), checkpointer.latest()) == ([], None)
        for step in (10, 2, 30):
            counter.value = step
            assert checkpointer.save(step)
        (checkpointer.folder / "step-40").mkdir()
        (checkpointer.folder / "step-07").mkdir()
        (checkpointer.folder / "step-50").write_text("no folder")
        assert (checkpointer.steps(), checkpointer.latest()) == ([2, 10, 30], 30)
        assert checkpointer.load(2).step == 2
        assert counter.value == 2
        assert checkpointer.load().step == 30
        assert counter.value == 30
        assert "there are steps [2, 10, 30]" in error_of(checkpointer.load, 40)


def test_without_a_checkpoint(tmp_path: Path) -> None:
    counter = Counter(5)
    with small(tmp_path / "none", counter) as checkpointer:
        assert "no checkpoint" in error_of(checkpointer.load)
        report = checkpointer.load(missing_ok=True)
    assert (report.step, counter.value, str(report)) == (None, 5, "no checkpoint to load")


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    ((1, None, [6]), (2, None, [5, 6]), (None, None, [1, 2, 3, 4, 5, 6]), (1, 3, [3, 6]), (2, 2, [2, 4, 5, 6])),
)
@pytest.mark.parametrize("blocking", (True, False))
def test_retention(
    tmp_path: Path, keep_last: int | None, keep_every: int | None, kept: list[int], blocking: bool
) -> None:
    with small(tmp_path, Counter(), keep_last=keep_last, keep_every=keep_every) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, blocking)
        checkpointer.wait()
        assert checkpointer.steps() == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"step-{step}" for step in kept]


def test_the_last_good_one_stays_when_the_next_fails(tmp_path: Path) -> None:
    with small(tmp_path, Counter(), keep_last=1) as checkpointer:
        checkpointer.save(1)
        with fault("fdatasync"):
            assert "cannot save" in error_of(checkpointer.save, 2)
        assert checkpointer.steps() == [1]
        checkpointer.save(3)
        assert checkpointer.steps() == [3]
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"], "the failed save left something"


def test_going_on_from_an_older_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of the abandoned branch stay, but are said to be there; what was just saved is never removed."""
    with small(tmp_path, Counter(), keep_last=1) as checkpointer:
        checkpointer.save(10)
        with caplog.at_level(logging.WARNING, logger="dcpring"):
            checkpointer.save(5)
        assert checkpointer.steps() == [5, 10]
        assert "step-5 is older than step 10, which latest() still gives" in caplog.text


def test_leftovers_go_and_other_files_stay(tmp_path: Path) -> None:
    with small(tmp_path, Counter()) as checkpointer:
        checkpointer.save(1)
        crashed, mine = tmp_path / "step-2", tmp_path / "step-3"
        crashed.mkdir()
        (crashed / "__0_0.0123456789abcdef.distcp").write_bytes(b"partial")
        (crashed / ".metadata.0123456789abcdef.tmp").write_bytes(b"partial")
        mine.mkdir()
        (mine / "notes.txt").write_text("mine")
        (tmp_path / ".step-0.removed").mkdir()
        (tmp_path / ".step-0.removed" / "rest").write_text("of a removal that was interrupted")
        checkpointer.save(4)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]
        assert (mine / "notes.txt").read_text() == "mine"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    counter = Counter(1)
    with small(tmp_path, counter) as checkpointer:
        checkpointer.save(1)
        counter.value = 2
        checkpointer.save(1)
        counter.value = 3
        checkpointer.load()
        assert counter.value == 2


@pytest.mark.parametrize(
    ("components", "options", "error", "message"),
    (
        ({"c": Replicated(Counter())}, {"keep_last": 0}, ValueError, "keep_last=0"),
        ({"c": Replicated(Counter())}, {"keep_last": True}, ValueError, "keep_last=True"),
        ({"c": Replicated(Counter())}, {"keep_every": -1}, ValueError, "keep_every=-1"),
        ({"c": Replicated(Counter())}, {"busy": "fail"}, ValueError, "busy='fail'"),
        ({"c": Replicated(Counter())}, {"planner_options": {"share": "some"}}, ValueError, "share='some'"),
        ({"c": Replicated(Counter())}, {"planner_options": {"writers": 0}}, ValueError, "writers=0"),
        ({"c": Replicated(Counter())}, {"planner_options": {"key_map": {}}}, TypeError, "'key_map'.* takes writers"),
        ({}, {}, ValueError, "nothing to save"),
        ({"a.b": Replicated(Counter())}, {}, ValueError, "'a.b'"),
        ({"dcpring": Replicated(Counter())}, {}, ValueError, "'dcpring'"),
        ({"c": Counter()}, {}, TypeError, "component 'c' is a Counter: say how it reshards"),
        ({"c": {"step": 1}}, {}, TypeError, "component 'c' is a dict: say how it reshards"),
        ({"c": 3}, {}, TypeError, "component 'c' is a int: a component has state_dict"),
        ({"o": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, {}, TypeError, "no model among the components"),
        (
            {"l": torch.utils.data.DataLoader([1, 2])},
            {},
            TypeError,
            r"component 'l' is a DataLoader: make the loader with sampler=ElasticSampler",
        ),
        ({"s": Stepper()}, {}, TypeError, "component 's' is a Stepper: it holds a StepLR as .scheduler, .* give that"),
    ),
)
def test_bad_arguments(tmp_path: Path, components: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path, components, **options)


@pytest.mark.parametrize("step", (-1, 1.5, True, "3"))
def test_bad_steps(tmp_path: Path, step: Any) -> None:
    with small(tmp_path, Counter()) as checkpointer, pytest.raises(ValueError, match="step="):
        checkpointer.save(step)


def test_numbers_of_other_classes_than_int(tmp_path: Path) -> None:
    with small(tmp_path, Counter(), keep_last=np.int32(2)) as checkpointer:
        for step in np.arange(3):
            checkpointer.save(step)
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.load(np.int64(1)).step == 1
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1", "step-2"]


def test_closed(tmp_path: Path) -> None:
    checkpointer = small(tmp_path, Counter())
    checkpointer.close()
    checkpointer.close()
    for call in (checkpointer.load, checkpointer.wait, lambda: checkpointer.save(1)):
        with pytest.raises(ValueError, match="closed"):
            call()


# ---- in the background ----


class Gate:
    """Holds the writer's thread until it is opened, or for good measure some seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        original = RingWriter.write_data

        def write_data(writer: RingWriter, *args: Any) -> Any:
            assert self.opened.wait(60)
            return original(writer, *args)

        monkeypatch.setattr(RingWriter, "write_data", write_data)


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    model = spread("single", 0)
    optimizer = adamw(model)
    train(model, optimizer)
    counter = Counter(1)
    parts = {"model": model, "optimizer": optimizer, "counter": Replicated(counter)}
    with Checkpointer(tmp_path, parts) as checkpointer:
        saved = everything(model, optimizer)
        checkpointer.save(1, blocking=False)
        assert checkpointer.steps() == []
        train(model, optimizer)
        counter.value = 2
        gate.opened.set()
        checkpointer.wait()
        assert not same(everything(model, optimizer), saved)
        checkpointer.load()
    assert same(everything(model, optimizer), saved)
    assert counter.value == 1


def test_a_busy_save_is_skipped_or_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with small(tmp_path, Counter(), busy="skip") as checkpointer:
        assert checkpointer.save(1, blocking=False)
        assert not checkpointer.save(2, blocking=False)
        gate.opened.set()
        checkpointer.wait()
        assert checkpointer.save(3, blocking=False)
        assert checkpointer.save(4), "a save that blocks waits"
        assert checkpointer.steps() == [1, 3, 4]
    gate.opened.clear()
    with small(tmp_path, Counter()) as checkpointer:
        checkpointer.save(5, blocking=False)
        timer = threading.Timer(0.3, gate.opened.set)
        started = time.monotonic()
        timer.start()
        assert checkpointer.save(6, blocking=False)
        assert time.monotonic() - started > 0.25
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3, 4, 5, 6]


def test_a_handle_tells_what_becomes_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with small(tmp_path, Counter(), busy="skip") as checkpointer:
        first = checkpointer.save(1, blocking=False)
        skipped = checkpointer.save(2, blocking=False)
        assert first and not skipped
        assert not first.done() and skipped.done()
        skipped.wait()
        gate.opened.set()
        first.wait()
        assert first.done() and checkpointer.steps() == [1]
        second = checkpointer.save(3)
        assert second and second.done()
        monkeypatch.setattr(RingWriter, "write_data", mock.Mock(side_effect=OSError(28, "No space left on device")))
        failing = checkpointer.save(4, blocking=False)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left on device"):
                failing.wait()
        assert failing.done()
        checkpointer.wait()
        first.wait()


def test_with_async_staging_a_save_returns_before_the_copy_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors may change when ``synchronize`` returns; what is no tensor at once."""
    may_copy = threading.Event()
    fill = StagingBuffer.fill

    def slow_fill(buffer: StagingBuffer, opened: Any) -> Any:
        assert may_copy.wait(60)
        return fill(buffer, opened)

    monkeypatch.setattr(StagingBuffer, "fill", slow_fill)
    model = spread("single", 0)
    optimizer = adamw(model)
    train(model, optimizer)
    counter = Counter(1)
    with Checkpointer(
        tmp_path, {"model": model, "optimizer": optimizer, "counter": Replicated(counter)}
    ) as checkpointer:
        saved = everything(model, optimizer)
        handle = checkpointer.save(1, blocking=False, async_staging=True)
        counter.value = 2
        assert handle and not handle.staged() and not handle.done()
        threading.Timer(0.1, may_copy.set).start()
        checkpointer.synchronize()
        assert handle.staged()
        train(model, optimizer)
        handle.wait_staged()
        handle.wait()
        assert handle.done() and not same(everything(model, optimizer), saved)
        checkpointer.synchronize()
        assert checkpointer.save(2, blocking=False).staged(), "the copy is made before it returns"
        checkpointer.wait()
        assert checkpointer.save(3).staged()
        checkpointer.load(1)
    assert same(everything(model, optimizer), saved)
    assert counter.value == 1


def _failing_copies(path: str) -> str:
    counter = Counter(1)
    with Checkpointer(path, {"model": torch.nn.Linear(3, 3), "counter": Replicated(counter)}) as checkpointer:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(StagingBuffer, "fill", mock.Mock(side_effect=MemoryError("no room for a copy")))
            handle = checkpointer.save(1, blocking=False, async_staging=True)
            handle.wait_staged()
            message = error_of(handle.wait)
        checkpointer.save(2, blocking=False, async_staging=True).wait()
        assert checkpointer.steps() == [2]
    return message


def test_a_copy_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    for message in _distributed.run(2, _failing_copies, str(tmp_path)):
        assert "rank 1" in message and "copying the state" in message and "no room for a copy" in message


@pytest.mark.parametrize("call", ("save", "load", "wait", "close"))
def test_an_error_in_the_background_comes_with_the_next_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    checkpointer = small(tmp_path, Counter())
    checkpointer.save(1)
    with fault("fdatasync"):
        checkpointer.save(2, blocking=False)
        assert checkpointer._background is not None
        deadline = time.monotonic() + 60
        while not checkpointer._background.is_done and time.monotonic() < deadline:
            time.sleep(0.01)
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1 and "in the background has failed" in logged[0] and os.strerror(5) in logged[0]
    message = error_of(getattr(checkpointer, call), *([3] if call == "save" else []))
    assert f"cannot save {tmp_path / 'step-2'}" in message
    assert os.strerror(5) in message
    if call != "close":
        assert checkpointer.steps() == [1]
        assert checkpointer.save(3), "the error is told once"
        checkpointer.close()


class Blob:
    """Tensors of some MiB."""

    def __init__(self, mib: int) -> None:
        self.tensors = {f"t{i}": torch.randn(mib * (1 << 18) // 8) for i in range(8)}

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def test_the_stall_is_one_copy_into_one_buffer(tmp_path: Path) -> None:
    blob = Blob(256)
    stalls, copies = [], []
    place = {name: torch.empty_like(tensor).zero_() for name, tensor in blob.tensors.items()}
    with Checkpointer(tmp_path, {"blob": Sharded(blob)}, keep_last=1) as checkpointer:
        for step in range(6):
            checkpointer.wait()
            begin = time.perf_counter()
            for name, tensor in blob.tensors.items():
                place[name].copy_(tensor)
            middle = time.perf_counter()
            checkpointer.save(step, blocking=False)
            stalls.append(time.perf_counter() - middle)
            copies.append(middle - begin)
        checkpointer.wait()
        assert checkpointer._staging.allocations == 1
        assert checkpointer._staging.size_bytes == sum(tensor.nbytes for tensor in blob.tensors.values())
    # The first save takes the memory. Of the others, one at least has the machine for itself.
    assert min(stalls[1:]) < 2 * sorted(copies)[2] + 0.02, (stalls, copies)


# ---- several ranks ----


def train_state(seed: int, folder: Path, **extra: Any) -> tuple[dict[str, Any], Checkpointer]:
    """A whole training state, over all ranks."""
    model = spread("fsdp" if dist.get_world_size() > 1 else "single", seed)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    loader = ElasticLoader(torch.utils.data.DataLoader(range(100), batch_size=4, sampler=ElasticSampler(100)))
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "dataloader": loader,
        "rng": RNG(),
        "counter": Counter(seed),
        "mine": Counter(dist.get_rank()),
        **extra,
    }
    wrapped = {**parts, "counter": Replicated(parts["counter"]), "mine": PerRank(parts["mine"])}
    return parts, Checkpointer(folder, {name: part for name, part in wrapped.items() if part is not None})


def contents(parts: dict[str, Any]) -> dict[str, Any]:
    """All that a training state holds, and the optimizer's own tensors. Collective."""
    optimizer = parts["optimizer"]
    return {
        "fresh": not optimizer.state,
        **({} if not optimizer.state else everything(parts["model"], optimizer)),
        "scheduler": dict(parts["lr_scheduler"].state_dict()),
        "lr": optimizer.param_groups[0]["lr"],
        "loader": parts["dataloader"].state_dict(),
        "counter": parts["counter"].value,
        "mine": parts["mine"].value,
        "random": torch.get_rng_state(),
        "weights": [value.clone() for value in _locals(parts["model"])],
    }


def _locals(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(value, "to_local", lambda value=value: value)().detach() for value in model.state_dict().values()]


def unchanged(before: dict[str, Any], parts: dict[str, Any]) -> bool:
    after = contents(parts)
    weights = zip(before.pop("weights"), after.pop("weights"), strict=True)
    return same(before, after) and all(torch.equal(a, b) for a, b in weights)


def save_whole_state(folder: Path) -> dict[str, Any]:
    parts, checkpointer = train_state(1, folder)
    train(parts["model"], parts["optimizer"])
    parts["lr_scheduler"].step()
    next(iter(parts["dataloader"]))
    with checkpointer:
        checkpointer.save(7, blocking=False)
        checkpointer.wait()
    found = contents(parts)
    found.pop("weights")
    return found


def refused_loads(folder: Path) -> dict[str, str]:
    """Every way in which a load on other ranks is refused; nothing may change by it, nor hang."""
    messages: dict[str, str] = {}

    def refuse(name: str, checkpointer: Checkpointer, parts: dict[str, Any], **options: Any) -> None:
        before = contents(parts)
        with checkpointer:
            messages[name] = error_of(checkpointer.load, **options)
        assert unchanged(before, parts), name

    parts, checkpointer = train_state(2, folder)
    refuse("per rank", checkpointer, parts)
    parts, checkpointer = train_state(2, folder)
    refuse("unknown", checkpointer, parts, exclude=["modle"])
    parts, checkpointer = train_state(2, folder)
    refuse("unknown choice", checkpointer, parts, components=["weights"])
    parts, checkpointer = train_state(2, folder, rng=None)
    refuse("removed", checkpointer, parts, exclude=["mine"])
    parts, checkpointer = train_state(2, folder, ema=Replicated(Counter()))
    refuse("added", checkpointer, parts, exclude=["mine"])
    parts, checkpointer = train_state(2, folder)
    parts["model"].register_buffer("extra", torch.zeros(1))
    refuse("missing key", checkpointer, parts, exclude=["mine"])
    parts, checkpointer = train_state(2, folder)
    del parts["model"].steps
    refuse("unexpected key", checkpointer, parts, exclude=["mine"])
    parts, checkpointer = train_state(2, folder)
    parts["model"].steps = torch.zeros(5)
    refuse("shape", checkpointer, parts, exclude=["mine"])
    parts, checkpointer = train_state(2, folder)
    parts["model"].steps = torch.zeros(2, dtype=torch.int64)
    refuse("dtype", checkpointer, parts, exclude=["mine"])
    parts, checkpointer = train_state(2, folder)
    parts["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    messages["groups"] = error_of(checkpointer.load, components=["lr_scheduler"])
    checkpointer.close()
    return messages


def load_the_rest(folder: Path) -> tuple[str, bool, int]:
    parts, checkpointer = train_state(2, folder)
    with checkpointer:
        report = checkpointer.load(exclude=["mine"])
        assert report.names("skipped") == ["mine"]
        assert set(report.names("resharded")) == {"model", "optimizer", "dataloader", "rng"}
    steps = [value["step"].item() for value in parts["optimizer"].state.values()]
    return str(report), steps == [2.0] * len(steps), parts["mine"].value


def test_loads_on_other_ranks_are_refused_as_a_whole(tmp_path: Path) -> None:
    _distributed.run(4, save_whole_state, tmp_path)
    per_rank = _distributed.run(2, refused_loads, tmp_path)
    assert per_rank[0] == per_rank[1], "all ranks get the same report"
    found = per_rank[0]
    assert "(saved by 4 ranks) on 2 ranks; nothing was changed" in found["per rank"]
    assert "model (sharded): loads, from mesh (4) to mesh (2)" in found["per rank"]
    assert "mine (per_rank): it belongs to ranks, and was saved by 4 ranks, not 2" in found["per rank"]
    assert found["per rank"].endswith("exclude=['mine']")
    assert "there is no component 'modle'; there are counter, dataloader" in found["unknown"]
    assert "there is no component 'weights'" in found["unknown choice"]
    assert "rng: in the checkpoint, but not in this Checkpointer" in found["removed"]
    assert "exclude=['rng']" in found["removed"]
    assert "ema: in this Checkpointer, but not in the checkpoint" in found["added"]
    assert "'model.extra' is not in the checkpoint" in found["missing key"]
    assert "'model.steps' is in the checkpoint, but not here" in found["unexpected key"]
    assert "'model.steps' has shape [2] in the checkpoint, [5] here" in found["shape"]
    assert "'model.steps': the checkpoint has torch.float32, the state dict torch.int64" in found["dtype"]
    assert "saved with 1 parameter groups, here the optimizer has 2" in found["groups"]
    for report, good, mine in _distributed.run(2, load_the_rest, tmp_path):
        assert good
        assert mine in (0, 1), "what was left out has its own value"
        assert "mine: skipped, left out" in report


def load_on_the_same(folder: Path, saved: list[dict[str, Any]]) -> bool:
    parts, checkpointer = train_state(3, folder)
    with checkpointer:
        report = checkpointer.load()
        assert report.names("loaded") == list(parts)
        assert report.saved_world_size == report.world_size == dist.get_world_size()
    found = contents(parts)
    found.pop("weights")
    return same(found, saved[dist.get_rank()])


def test_the_same_ranks_go_on_exactly(tmp_path: Path) -> None:
    saved = _distributed.run(4, save_whole_state, tmp_path)
    assert _distributed.run(4, load_on_the_same, tmp_path, saved) == [True] * 4


def there_and_back(folder: Path) -> tuple[int, bool]:
    mine = save_whole_state(folder)
    return hash("dcpring"), load_on_the_same(folder, [mine] * dist.get_world_size())


def test_ranks_whose_sets_have_other_orders(tmp_path: Path) -> None:
    hashes, good = zip(*_distributed.run(2, there_and_back, tmp_path, are_new=True), strict=True)
    assert len(set(hashes)) == 2 and good == (True, True)


NEVER = 1 << 30


class Raising(Counter):
    def __init__(self, at: str, rank: int) -> None:
        super().__init__(4)
        self.at = at if dist.get_rank() == rank else ""

    def state_dict(self) -> dict[str, Any]:
        if self.at == "save":
            raise RuntimeError("the disk of my dreams is full")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.at == "load":
            raise RuntimeError("I do not want it")
        super().load_state_dict(state)


def failing_saves(folder: Path, blocking: bool) -> dict[str, str]:
    messages = {}
    rank = dist.get_rank()
    parts, checkpointer = train_state(1, folder)
    with checkpointer:
        checkpointer.save(1)
    for name, extra in (
        ("raises", Replicated(Raising("save", rank=1))),
        ("differs", Replicated({"same": 1, "seed": 3 + (rank == 1)})),
        ("unloadable", Replicated({"thing": Counter()})),
        ("sharded", Replicated({"weight": next(iter(parts["model"].parameters()))})),
        ("generator", PerRank(Counter(rank), rank=0, world_size=1)),
        ("worlds", PerRank(Counter(rank), rank=rank, world_size=rank + 4)),
    ):
        parts, checkpointer = train_state(1, folder, extra=extra)
        fresh = not parts["optimizer"].state
        with checkpointer:
            messages[name] = error_of(checkpointer.save, 2, blocking)
            assert fresh and not parts["optimizer"].state
    with train_state(1, folder)[1] as checkpointer:
        messages["steps"] = error_of(checkpointer.save, 2 + (rank == 3), blocking)
    with train_state(1, folder, **({"more": Replicated({})} if rank else {}))[1] as checkpointer:
        messages["parts"] = error_of(checkpointer.save, 2, blocking)
        messages["load"] = error_of(checkpointer.load, 1 + rank)
        messages["choice"] = error_of(checkpointer.load, components=["rng" if rank else "mine"])
    nth = 1 if rank == 2 else NEVER
    with train_state(1, folder)[1] as checkpointer, fault("fdatasync", nth):
        if blocking:
            messages["disk"] = error_of(checkpointer.save, 2)
        else:
            checkpointer.save(2, blocking=False)
            messages["disk"] = error_of(checkpointer.wait)
    with train_state(1, folder)[1] as checkpointer:
        assert checkpointer.steps() == [1]
        checkpointer.load()
    return messages


@pytest.mark.parametrize("blocking", (True, False), ids=("blocking", "background"))
def test_a_save_fails_on_all_ranks_or_none(tmp_path: Path, blocking: bool) -> None:
    per_rank = _distributed.run(4, failing_saves, tmp_path, blocking)
    assert all(found == per_rank[0] for found in per_rank)
    found = per_rank[0]
    assert found["raises"].endswith("component 'extra': rank 1: RuntimeError: the disk of my dreams is full")
    assert "component 'extra': rank 1 differ from rank 0" in found["differs"]
    assert "('seed' is not the same)" in found["differs"]
    assert "'thing' is no plain data" in found["unloadable"] and "A load would refuse it" in found["unloadable"]
    assert "test_checkpointer.Counter" in found["unloadable"]
    assert "'weight' is a DTensor" in found["sharded"]
    assert "ranks 1-3 differ from the first process that has the same PerRank rank" in found["generator"]
    assert "different world sizes: [4, 5, 6, 7]" in found["worlds"]
    assert "rank 2: OSError: [Errno 5]" in found["disk"]
    assert "rank 0 saves step 2 of model, " in found["steps"]
    assert "but rank 3: step 3 of model, " in found["steps"]
    assert (
        "but ranks 1-3: step 2 of model, optimizer, lr_scheduler, dataloader, rng, counter, mine, more"
        in found["parts"]
    )
    assert "ranks chose different components" in found["choice"]
    assert "ranks asked for different steps: ['1', '2', '3', '4']" in found["load"]


def failing_take_over(folder: Path) -> str:
    with train_state(1, folder, extra=Replicated(Raising("load", rank=1)))[1] as checkpointer:
        checkpointer.save(1)
        return error_of(checkpointer.load)


def test_a_component_that_refuses_its_state(tmp_path: Path) -> None:
    for message in _distributed.run(2, failing_take_over, tmp_path):
        assert message.endswith("component 'extra': rank 1: RuntimeError: I do not want it")


def corrupt_loads(folder: Path, keys: list[str]) -> list[tuple[str, str, bool]]:
    found = []
    for key in keys:
        parts, checkpointer = train_state(2, folder)
        before = contents(parts)
        info = storage_of(checkpointer.path(7), key)
        damaged = checkpointer.path(7) / info.relative_path
        dist.barrier()
        if dist.get_rank() == 0:
            flip_bit(damaged, info.offset + info.length // 2)
        dist.barrier()
        with checkpointer:
            try:
                checkpointer.load()
            except CheckpointError as error:
                rest = [name for name in before if name in ("scheduler", "loader", "counter", "mine")]
                assert all(contents(parts)[name] == before[name] for name in rest)
                found.append((str(error), type(error).__name__, unchanged(before, parts)))
        if dist.get_rank() == 0:
            flip_bit(damaged, info.offset + info.length // 2)
        dist.barrier()
    return found


def test_a_corrupt_component(tmp_path: Path) -> None:
    _distributed.run(2, save_whole_state, tmp_path)
    small = ["counter.value", "rng.rank_1.cpu", "dataloader.epoch", "optimizer.param_groups.0.lr", MANIFEST_KEY]
    keys = [*small, "optimizer.state.up.bias.exp_avg", "model.up.bias"]
    results = _distributed.run(2, corrupt_loads, tmp_path, keys)
    assert [len(found) for found in results] == [len(keys)] * 2
    for found in results:
        for key, (message, kind, intact) in zip(keys, found, strict=True):
            assert kind == CorruptCheckpointError.__name__
            assert key in message
            # What is read in place comes last: only models and optimizers can have changed, and the message says so.
            assert intact or key not in small
            assert ("reading model, optimizer; the components listed may have changed" in message) == (key not in small)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"world_size": 0}, "contradicts itself"),
        ({"version": 99}, "version 99"),
        ({"components": {"counter": {}}}, "contradicts itself"),
        ({"surplus": 1}, "is damaged"),
    ),
)
def test_a_manifest_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    import torch.distributed.checkpoint as dcp

    manifest = {"step": 1, "world_size": 1, "version": 1, "components": {"counter": {"kind": "replicated"}}}
    state = {"counter": {"value": 1}, MANIFEST_KEY: json.dumps({**manifest, **change})}
    dcp.save(state, storage_writer=RingWriter(tmp_path / "step-1"), no_dist=True)
    with small(tmp_path, Counter()) as checkpointer:
        assert message in error_of(checkpointer.load)


@pytest.mark.parametrize("entry", [torch.ones(2), 5])
def test_an_entry_of_others_that_is_called_as_the_manifest(tmp_path: Path, entry: Any) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"counter": {"value": 7}, MANIFEST_KEY: entry}
    dcp.save(state, storage_writer=RingWriter(tmp_path / "step-1"), no_dist=True)
    counter = Counter()
    with small(tmp_path, counter) as checkpointer:
        assert checkpointer.load(exclude=[MANIFEST_KEY]).step == 1
    assert counter.value == 7


def in_a_part_of_the_ranks(folder: Path) -> list[int]:
    """Ranks 1 to 3 save and load together; rank 0 has nothing to do with it."""
    group = dist.new_group([1, 2, 3])
    rank = dist.get_rank()
    if rank == 0:
        with pytest.raises(ValueError, match="rank 0 is no member"):
            Checkpointer(folder, {"mine": PerRank(Counter())}, process_group=group)
        return []
    mine = Counter(rank)
    for step in (1, 2):
        with Checkpointer(folder, {"mine": PerRank(mine)}, process_group=group) as checkpointer:
            checkpointer.save(step, blocking=step == 1)
            checkpointer.wait()
            mine.value = -1
            report = checkpointer.load()
            assert (report.step, report.saved_world_size) == (step, 3)
    return [mine.value, *Checkpointer(folder, {"mine": PerRank(mine)}, process_group=group).steps()]


def test_a_part_of_the_ranks(tmp_path: Path) -> None:
    assert _distributed.run(4, in_a_part_of_the_ranks, tmp_path) == [[], [1, 1, 2], [2, 1, 2], [3, 1, 2]]


# ---- what it leaves alone ----


def test_warnings_are_neither_given_nor_filtered(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        during: list[Any] = []

        class Looking(Counter):
            def load_state_dict(self, state: dict[str, Any]) -> None:
                during.extend(warnings.filters)
                super().load_state_dict(state)

        with small(tmp_path, Looking()) as checkpointer:
            assert list(warnings.filters) == before
            checkpointer.save(1)
            checkpointer.save(2, blocking=False)
            assert checkpointer.load().step == 2
        assert list(warnings.filters) == during == before
