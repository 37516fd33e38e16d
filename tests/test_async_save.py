"""dcpring.async_save: order, errors, memory, and what happens at the end of a program."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _background import check_saved
from _distributed import run
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcpring import (
    AsyncSaveResponse,
    CheckpointError,
    RingReader,
    RingSavePlanner,
    RingStager,
    RingWriter,
    async_save,
)
from dcpring.base import untold
from dcpring.move import staging

WAIT = 60.0
"""Seconds after which something that has to happen has not."""


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), float(value))}, "step": int(value)}


def _assert_holds(path: Path | str, value: float) -> None:
    loaded: dict[str, Any] = {"model": {"w": torch.zeros(1000)}, "step": -1}
    dcp.load(loaded, storage_reader=RingReader(path), no_dist=not dist.is_initialized())
    assert loaded["step"] == int(value) and bool((loaded["model"]["w"] == value).all())


class Held(RingWriter):
    """Writes when it is let go."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.is_writing, self.go = threading.Event(), threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.is_writing.set()
        assert self.go.wait(WAIT)
        return super().write_data(plan, planner)


class Failing(RingWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError("the disk is gone")


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# ---- without a process group ----


@pytest.mark.parametrize("writer", [RingWriter, FileSystemWriter])
@pytest.mark.parametrize("planner", [DefaultSavePlanner, RingSavePlanner])
def test_it_saves_what_the_state_was(tmp_path: Path, writer: Any, planner: Any) -> None:
    state, made = _state(0), planner()
    with RingStager() as stager:
        for n in (1, 2, 3):
            state["model"]["w"].fill_(n)
            state["step"] = n
            path = tmp_path / str(n)
            response = async_save(state, storage_writer=writer(path), planner=made, stager=stager)
            state["step"] = -1
            response.staging_completion.result(WAIT)
            state["model"]["w"].fill_(-1)
            assert isinstance(response.result(WAIT), Metadata)
            assert response.upload_completion.done()
        assert stager.allocations == 1, "a planner that is used again keeps no buffer"
    for n in (1, 2, 3):
        _assert_holds(tmp_path / str(n), n)


class Counter:
    """A Stateful."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.full((1000,), 5.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_directory_is_enough(tmp_path: Path) -> None:
    async_save({"model": Counter(), "step": 5}, checkpoint_id=tmp_path).result(WAIT)
    _assert_holds(tmp_path, 5)


def test_a_writer_saves_to_one_directory_after_the_other(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "0")
    for n in (1, 2):
        async_save(_state(n), checkpoint_id=tmp_path / str(n), storage_writer=writer).result(WAIT)
    for n in (1, 2):
        _assert_holds(tmp_path / str(n), n)
    assert not (tmp_path / "0" / ".metadata").exists()


def test_it_needs_to_know_where_to() -> None:
    with pytest.raises(ValueError, match="needs a checkpoint_id or a storage_writer"):
        async_save(_state(1))


def test_saves_are_made_in_the_order_of_the_calls(tmp_path: Path) -> None:
    first, second = Held(tmp_path / "1"), Held(tmp_path / "2")
    responses = [async_save(_state(n), storage_writer=writer) for n, writer in ((1, first), (2, second))]
    second.go.set()
    assert first.is_writing.wait(WAIT)
    responses[1].staging_completion.result(WAIT)
    time.sleep(0.2)  # a save that did not wait would have begun
    assert not second.is_writing.is_set()
    first.go.set()
    for response in responses:
        response.result(WAIT)


def test_a_save_waits_for_the_buffer_of_the_one_before(tmp_path: Path) -> None:
    first = Held(tmp_path / "1")
    with RingStager() as stager:
        responses = [async_save(_state(1), storage_writer=first, stager=stager)]
        assert first.is_writing.wait(WAIT)
        other = threading.Thread(
            target=lambda: responses.append(async_save(_state(2), checkpoint_id=tmp_path / "2", stager=stager))
        )
        other.start()
        time.sleep(0.2)
        assert other.is_alive()
        first.go.set()
        other.join(WAIT)
        for response in responses:
            response.result(WAIT)
        assert stager.allocations == 1
    _assert_holds(tmp_path / "1", 1)
    _assert_holds(tmp_path / "2", 2)


def test_a_failure_is_raised_and_logged_and_the_next_save_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []
    with RingStager() as stager:
        for _ in range(2):
            response = async_save(_state(1), storage_writer=Failing(tmp_path), stager=stager)
            with pytest.raises(CheckpointException, match="the disk is gone"):
                response.result(WAIT)
            kept.append(response)
        async_save(_state(2), checkpoint_id=tmp_path, stager=stager).result(WAIT)
        assert stager.allocations == 1, "an error that is kept keeps no buffer"
    assert [record.levelno for record in caplog.records if "has failed, and asking" in record.message] == [
        logging.ERROR,
        logging.ERROR,
    ]
    _assert_holds(tmp_path, 2)


def test_a_failure_that_is_kept_keeps_no_state(tmp_path: Path) -> None:
    state = _state(1)
    dropped = weakref.ref(state["model"]["w"])
    error = async_save(state, storage_writer=Failing(tmp_path)).exception(WAIT)
    del state
    gc.collect()
    assert isinstance(error, CheckpointException) and dropped() is None


def test_what_cannot_be_copied_is_an_error_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("there is none")

    with RingStager() as stager:
        response = async_save({"lock": threading.Lock()}, checkpoint_id=tmp_path, stager=stager)
        with pytest.raises(CheckpointException, match="cannot copy 'lock'"):
            response.result(WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(staging._C, "copy_tensors", fail)
            response = async_save(_state(1), checkpoint_id=tmp_path, stager=stager)
            with pytest.raises(MemoryError, match="there is none"):
                stager.synchronize()
            with pytest.raises(MemoryError, match="there is none"):
                response.staging_completion.result(WAIT)
            with pytest.raises(CheckpointException, match="cannot copy the state: MemoryError: there is none"):
                response.result(WAIT)
        async_save(_state(2), checkpoint_id=tmp_path, stager=stager).result(WAIT)
    _assert_holds(tmp_path, 2)


def test_without_a_thread_it_is_saved_before_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        response = async_save(_state(1), storage_writer=FileSystemWriter(tmp_path / "1"))
        assert response.done()
    response.result()
    async_save(_state(2), checkpoint_id=tmp_path / "2").result(WAIT)
    _assert_holds(tmp_path / "1", 1)
    _assert_holds(tmp_path / "2", 2)


def test_a_response_that_is_dropped(tmp_path: Path) -> None:
    """The save goes on, and of a failure is heard."""
    untold._untold.clear()
    writer, failing = Held(tmp_path), Failing(tmp_path / "failing")
    async_save(_state(1), storage_writer=writer)
    async_save(_state(2), storage_writer=failing)
    gc.collect()
    writer.go.set()
    for thread in threading.enumerate():
        if thread.name == "dcpring-save":
            thread.join(WAIT)
    _assert_holds(tmp_path, 1)
    assert ["the disk is gone" in text for _, text in untold._untold.values()] == [True]
    untold._untold.clear()


# ---- the end of a program ----

ENDS = {"": 120, "response.upload_completion.exception()": 0, "response.add_done_callback(ask)": 0}
"""What a program does whose save fails, and its exit status."""

FAILING = """
import sys
import torch
from dcpring import async_save

def ask(future):
    future.exception()

open(sys.argv[1], "w").close()  # where the directory should be
response = async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1])
exec(sys.argv[2])
"""


@pytest.mark.parametrize("body", ENDS)
def test_a_save_that_failed_and_nobody_asked(tmp_path: Path, body: str) -> None:
    """It is logged at once, and said at the end."""
    command = [sys.executable, "-c", FAILING, str(tmp_path / "checkpoint"), body]
    ended = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert ended.returncode == ENDS[body], ended.stderr
    assert "a save in the background has failed, and asking for its result raises this: rank 0: NotADir" in ended.stderr
    assert ("and no call has raised it:\nTraceback" in ended.stderr) == (not body)


ENDING = """
import sys, time
import torch
from dcpring import RingWriter, async_save

class Slow(RingWriter):
    def write_data(self, plan, planner):
        time.sleep(1)
        return super().write_data(plan, planner)

for n in (1, 2):
    state = {"model": {"w": torch.full((1000,), float(n))}, "step": n}
    async_save(state, storage_writer=Slow(sys.argv[n])).staging_completion.result()
"""


def test_a_program_that_ends_before_its_saves(tmp_path: Path) -> None:
    paths = [str(tmp_path / "1"), str(tmp_path / "2")]
    subprocess.run([sys.executable, "-c", ENDING, *paths], timeout=300, check=True)
    for n, path in enumerate(paths, 1):
        _assert_holds(path, n)


# ---- several ranks ----


def _copies_on_some(path: str) -> None:
    """The second rank has what cannot be copied; then what can."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"w": {str(rank): torch.ones(3)}, "value": threading.Lock() if rank else 2}
    with RingStager() as stager:
        response = async_save(state, checkpoint_id=path, stager=stager)
        with pytest.raises(CheckpointException, match="cannot copy 'value': TypeError") as caught:
            response.result(WAIT)
        assert list(caught.value.failures) == [1]
        async_save({**state, "value": 2}, checkpoint_id=path, stager=stager).result(WAIT)
    dist.barrier()
    loaded = {"value": 0}
    dcp.load(loaded, storage_reader=RingReader(path))
    assert loaded["value"] == 2


def test_what_one_rank_cannot_copy_is_an_error_on_all(tmp_path: Path) -> None:
    run(2, _copies_on_some, str(tmp_path / "checkpoint"))


def _overtakes(path: str, way: str) -> None:
    """On the first rank the thread is late, when the calling one is at what comes next."""
    rank, fill = dist.get_rank(), staging.Copying.fill

    def late(copying: Any) -> Any:
        if rank == 0:
            time.sleep(0.5)
        return fill(copying)

    state = {"model": {f"w{rank}": torch.full((1000,), float(rank))}}
    with pytest.MonkeyPatch.context() as patch, RingStager() as stager:
        dcp.save(state, storage_writer=RingWriter(f"{path}0"), planner=RingSavePlanner())
        patch.setattr(staging.Copying, "fill", late)
        first = async_save(state, checkpoint_id=f"{path}1")
        if way == "a load":
            dcp.load({"model": {f"w{rank}": torch.zeros(1000)}}, storage_reader=RingReader(f"{path}0"))
            async_save(state, checkpoint_id=f"{path}2").result(WAIT)
        elif way == "torch's async_save":
            response: Any = dcp.async_save(state, storage_writer=RingWriter(f"{path}2"), async_stager=stager)
            response.upload_completion.result(WAIT)
        else:
            dcp.save(state, storage_writer=RingWriter(f"{path}2"))
        first.result(WAIT)
    for number in (1, 2):
        check_saved(f"{path}{number}", state)


@pytest.mark.parametrize("way", ["a blocking save", "torch's async_save", "a load"])
def test_saves_and_loads_of_a_group_wait_for_each_other(tmp_path: Path, way: str) -> None:
    run(2, _overtakes, str(tmp_path / "checkpoint"), way, timeout=60)


class Waiting(RingWriter):
    """Writes when the save of the other group has come to its end."""

    other: AsyncSaveResponse

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.other.result(WAIT)
        return super().write_data(plan, planner)


def _two_groups(path: str) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    state = {"model": {f"w{dist.get_rank()}": torch.ones(1000)}}
    held, quick = Waiting(f"{path}0"), RingWriter(f"{path}1")
    may_begin: Future[None] = Future()
    begin = held.set_up_storage_writer

    def wait(*args: Any, **options: Any) -> None:
        may_begin.result(WAIT)
        begin(*args, **options)

    held.set_up_storage_writer = wait  # type: ignore[method-assign]
    first = async_save(state, storage_writer=held, process_group=groups[0])
    held.other = async_save(state, storage_writer=quick, process_group=groups[1])
    may_begin.set_result(None)
    first.result(WAIT)


def test_saves_of_two_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    run(2, _two_groups, str(tmp_path / "checkpoint"), timeout=60)


def _ends_group(path: str) -> None:
    """The group goes while the state is copied."""
    may_copy, copy = threading.Event(), staging._C.copy_tensors

    def held(*args: Any) -> Any:
        may_copy.wait(WAIT)
        return copy(*args)

    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging._C, "copy_tensors", held)
        response = async_save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(path))
        dist.destroy_process_group()
        may_copy.set()
        with pytest.raises(CheckpointError, match=f"rank {rank}: the process group of 2 ranks was destroyed"):
            response.result(WAIT)
    assert not Path(path, ".metadata").exists()
    alone = f"{path}.{rank}"
    async_save({"w": torch.ones(3)}, checkpoint_id=alone).result(WAIT)
    assert Path(alone, ".metadata").exists()
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    dist.barrier()


def test_a_group_that_is_destroyed_before_the_save_has_begun(tmp_path: Path) -> None:
    run(2, _ends_group, str(tmp_path / "checkpoint"))


def _alone(path: str) -> None:
    if dist.get_rank() == 1:
        async_save(_state(1), checkpoint_id=path, no_dist=True).result(WAIT)
    dist.barrier()
    _assert_holds(path, 1)
    dist.barrier()


def test_one_rank_saves_alone(tmp_path: Path) -> None:
    run(2, _alone, str(tmp_path / "checkpoint"))
