"""A raise at every step, on every rank: all ranks raise it, in bounded time, and the next call works.

The steps are lines of dcpring, as they ran. A first run without a fault records them; then each is made to raise, one
at a time. What is left out is the mechanism itself (``resume.ranks``, ``base.joint``, ``base.groups``), and
what DCP pickles outside of where it catches errors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

import dcpring
from dcpring import (
    RNG,
    Checkpointer,
    CheckpointError,
    PerRank,
    Replicated,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
)
from dcpring.base import groups, ranks
from dcpring.base.joint import Joint
from dcpring.move.load import peers
from dcpring.torchside.dcp import drops_metadata_errors

PACKAGE = str(Path(dcpring.__file__).parent) + os.sep
MECHANISM = ("base/ranks.py", "base/joint.py", "base/groups.py", "base/untold.py", "torchside/groups.py")
"""What carries an error to other ranks, or from a thread to whoever waits for it: nothing is beneath it."""

PICKLING = ("_object_to_tensor", "_tensor_to_object")
"""Functions of torch.distributed in which DCP catches nothing."""

BOUND_SECONDS = 30.0


class Fault(RuntimeError):
    """What a step raises."""


class Step(NamedTuple):
    """A line, when it runs for the first time.

    Attributes:
        is_entry: of a function: its first line.
        when: -1: no other rank is waiting yet, or the thread has not come to what can fail; 1: all ranks have told each
            other that they are done; 0: between these.
        has_met: all ranks have come to share.
    """

    file: str
    line: int
    function: str
    thread: str
    is_entry: bool
    when: int
    has_met: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


class Tracer:
    """Records steps, and raises at one of them.

    Args:
        at: where.
        kind: what is raised.
    """

    def __init__(self, at: Step | None = None, kind: type[BaseException] = Fault) -> None:
        self._at = None if at is None else (at.file, at.line, at.thread)
        self._kind = kind
        self._seen: set[tuple[str, int, str]] = set()
        self.when = {"main": -1, "background": -1}
        self.has_met = False
        self.steps: list[Step] = []
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.removeprefix(PACKAGE) in MECHANISM or _is_pickled(frame):
            return None
        is_entry = True

        def local(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal is_entry
            if event == "line":
                self._line(frame, is_entry)
                is_entry = False
            return local

        return local

    def _line(self, frame: FrameType, is_entry: bool) -> None:
        file = frame.f_code.co_filename.removeprefix(PACKAGE)
        thread = _thread()
        key = file, frame.f_lineno, thread
        if key in self._seen:
            return
        self._seen.add(key)
        self.steps.append(Step(*key[:2], frame.f_code.co_name, thread, is_entry, self.when[thread], self.has_met))
        if key == self._at:
            self.has_raised = True
            raise self._kind(f"boom at {file}:{frame.f_lineno}")

    def begin(self) -> None:
        """Others wait from here on."""
        self.when[_thread()] = max(self.when[_thread()], 0)

    def begin_call(self) -> None:
        """The same. What ran since they were done with an earlier call was between the two, and is nobody's step."""
        thread = _thread()
        if self.when[thread] == 1:
            self.steps = [step for step in self.steps if (step.thread, step.when) != (thread, 1)]
        self.when[thread] = 0

    def end(self, label: str) -> None:
        self.when[_thread()] = int(label == "end")

    @contextlib.contextmanager
    def on(self) -> Iterator[Tracer]:
        threading.settrace(self)  # type: ignore[arg-type]
        sys.settrace(self)
        try:
            yield self
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


def _thread() -> str:
    return "background" if threading.current_thread().name.startswith("dcpring-save") else "main"


def _is_pickled(frame: FrameType | None) -> bool:
    """Whether DCP pickles or unpickles this, where it catches nothing. What is caught there by dcpring counts."""
    while frame is not None:
        if frame.f_code.co_name == "sealed":
            return False
        if frame.f_code.co_name in PICKLING:
            return True
        frame = frame.f_back
    return False


# ---- what is done ----


class Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Training:
    """A training state, and what is called with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Linear(30, 20)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.counter = Counter(dist.get_rank())
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "step": Replicated({"step": 3}),
            "mine": PerRank(self.counter),
            "rng": RNG(),
        }
        self.checkpointer = self.make()
        self.checkpointer.save(1)
        self.path = str(folder / "plain")

    def make(self) -> Checkpointer:
        return Checkpointer(self.folder, self.parts, keep_last=2, planner_options={"share": "host"})

    # ---- the calls ----

    def constructor(self) -> None:
        self.make().close()

    def save(self) -> None:
        self.checkpointer.save(1)

    def background(self) -> None:
        self.checkpointer.save(1, blocking=False)
        self.checkpointer.wait()

    def load(self) -> None:
        self.counter.value = -1
        self.checkpointer.load()
        assert self.counter.value == dist.get_rank()

    def dcp_save(self) -> None:
        state = {"a": torch.arange(1000.0), "b": {"c": 3, "d": torch.ones(7)}}
        dcp.save(state, storage_writer=RingWriter(self.path), planner=RingSavePlanner())

    def dcp_load(self) -> None:
        state: dict[str, Any] = {"a": torch.zeros(1000), "b": {"c": 0, "d": torch.zeros(7)}}
        planner = RingLoadPlanner(process_group=dist.group.WORLD, share="host")
        dcp.load(state, storage_reader=RingReader(self.path), planner=planner)
        assert torch.equal(state["a"], torch.arange(1000.0)) and state["b"]["c"] == 3


CALLS = ("constructor", "save", "background", "load", "dcp_save", "dcp_load")


# ---- the test ----


class Outcome(NamedTuple):
    error: str
    seconds: float
    has_raised: bool


def attempt(call: Callable[[], None], tracer: Tracer | None) -> Outcome:
    began, error = time.monotonic(), ""
    try:
        with tracer.on() if tracer else contextlib.nullcontext():
            call()
    except (CheckpointError, CheckpointException, Fault, KeyboardInterrupt) as caught:
        error = str(caught) or type(caught).__name__
    return Outcome(error, time.monotonic() - began, tracer is not None and tracer.has_raised)


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def record(call: Callable[[], None]) -> list[Step]:
    """The steps of a call on this rank."""
    tracer = Tracer()

    def begins(original: Any, begin: Callable[[], None]) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            begin()
            return original(*args, **kwargs)

        return noted

    def ends(settle: Any) -> Any:
        def noted(joint: Any, label: str, is_last: bool = False) -> None:
            settle(joint, label, is_last)
            tracer.end(label)

        return noted

    def met(wait: Any) -> Any:
        def noted(*args: Any) -> bool:
            have_all_come: bool = wait(*args)
            tracer.has_met = tracer.has_met or have_all_come
            return have_all_come

        return noted

    operation, wrapper, settle = ranks.Operation.__init__, _DistWrapper.__init__, Joint.settle
    with (
        mock.patch.object(ranks.Operation, "__init__", begins(operation, tracer.begin_call)),
        mock.patch.object(_DistWrapper, "__init__", begins(wrapper, tracer.begin)),
        mock.patch.object(Joint, "settle", ends(settle)),
        mock.patch.object(groups.Meeting, "wait", met(groups.Meeting.wait)),
        mock.patch.object(peers, "MEET_SECONDS", 60.0),
    ):
        outcome = attempt(call, tracer)
    assert not outcome.error, outcome.error
    return [step for step in tracer.steps if step.when >= 0]


def problem(step: Step, rank: int, found: list[Outcome]) -> str:
    """What is wrong with the outcome of a fault; "" if nothing is."""
    failed = [bool(outcome.error) for outcome in found]
    where = f"{step} on rank {rank}: {[outcome.error[-300:] for outcome in found]}"
    if max(outcome.seconds for outcome in found) > BOUND_SECONDS:
        return f"took {max(outcome.seconds for outcome in found):.0f} s: {where}"
    if not found[rank].has_raised:
        return ""  # another run, other lines
    if all(failed):
        said = all(f"boom at {step.file}:{step.line}" in outcome.error for outcome in found)
        said = said or (drops_metadata_errors and step.function == "read_metadata")
        return "" if said else f"without the cause: {where}"
    if any(failed) and not (step.when == 1 and failed[rank]):
        return f"only some ranks raised: {where}"
    return ""


def every_step(folder: Path, name: str, every_line: bool, log: Path) -> tuple[int, list[str]]:
    """Raises at the steps of a call; how many, and what was wrong."""
    torch.manual_seed(0)
    training = Training(folder)
    training.dcp_save()
    call = getattr(training, name)
    call()
    per_rank = gathered([step for step in record(call) if every_line or step.is_entry])
    assert name not in ("load", "dcp_load") or all(any(step.has_met for step in steps) for steps in per_rank)
    every = 1 if every_line else len(per_rank)  # each function on one of the ranks
    todo = [(rank, step) for rank, steps in enumerate(per_rank) for step in steps[rank % every :: every]]
    problems: list[str] = []
    raised = 0
    for number, (rank, step) in enumerate(todo):
        if dist.get_rank() == 0:
            log.write_text(f"{number} of {len(todo)}: {step} on rank {rank}")
        peers.MEET_SECONDS = 10.0 if step.has_met else 0.2  # who raises before does not come
        found = gathered(attempt(call, Tracer(step) if rank == dist.get_rank() else None))
        raised += found[rank].has_raised
        wrong = problem(step, rank, found)
        if wrong:
            problems.append(wrong)
        if wrong or number % 10 == 0:
            after = gathered(attempt(call, None))
            problems += [f"and then {outcome.error}: {step} on rank {rank}" for outcome in after if outcome.error]
    training.checkpointer.close()
    if raised < 0.9 * len(todo):
        problems.append(f"of {len(todo)} steps only {raised} were met again")
    return len(todo), problems


def _run(folder: Path, name: str, every_line: bool, seconds: float) -> None:
    log = folder / "log"
    try:
        results = _distributed.run(2, every_step, folder, name, every_line, log, timeout=seconds)
    except _distributed.RankFailure as failure:
        raise AssertionError(f"at step {log.read_text() if log.exists() else 'none'}\n{failure}") from None
    finally:
        _distributed.close()  # what was patched in these processes goes with them
    count, problems = results[0]
    assert count > 10
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", CALLS)
def test_a_raise_in_any_function(tmp_path: Path, name: str) -> None:
    _run(tmp_path, name, False, 600)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_raise_in_any_line(tmp_path: Path, name: str) -> None:
    _run(tmp_path, name, True, 3600)
