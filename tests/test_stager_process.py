"""RingStager with async_save in a process: what it maps, and what happens when it dies."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import time
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _background import ending_process, process
from _distributed import run
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcpring import (
    Rearrange,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingStager,
    RingWriter,
    rearranged,
)
from dcpring.move.sending import Staged
from dcpring.move.staging import StagingBuffer
from dcpring.store import stager as stager_module
from dcpring.torchside.composed import Composed
from dcpring.torchside.groups import default_store

TENSORS = 3000
"""Where stock's shared staging has a descriptor for each: "received 0 items of ancdata"."""


class Looking(RingWriter):
    """Notes what the process in the background has mapped."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dcpring" in line]
        first, _, last = lines[0].split()[0].partition("-")
        address = planner.lookup_object(plan.items[0].index).data_ptr()
        is_mapped = int(first, 16) <= address < int(last, 16)
        Path(f"{self.path}.{os.getpid()}").write_text(f"{len(lines)} {is_mapped}")
        time.sleep(0.2 * self.rank)
        return super().write_data(plan, planner)


def _state(value: float) -> dict[str, Any]:
    return {"model": {f"{n}.{dist.get_rank()}": torch.full((8,), value + n) for n in range(TENSORS)}}


def _assert_holds(path: str, value: float) -> None:
    loaded, wanted = _state(-1), _state(value)
    dcp.load(loaded, storage_reader=RingReader(path))
    assert all(torch.equal(tensor, wanted["model"][key]) for key, tensor in loaded["model"].items())


def _save(state: Any, path: str, **options: Any) -> Any:
    options.setdefault("storage_writer", RingWriter(path))
    return dcp.async_save(
        state, planner=RingSavePlanner(), async_checkpointer_type=AsyncCheckpointerType.PROCESS, **options
    )


def _saves(path: str) -> None:
    """Two under way at once, from when there is no process; then one that the writer stages."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    ended: list[tuple[int, bool]] = []
    with ending_process(), RingStager(buffers=2) as stager:
        responses = []
        for n in (1, 2):
            state, metadata = _state(n), Path(f"{path}{n}", ".metadata")
            response = _save(state, f"{path}{n}", async_stager=stager, storage_writer=Looking(f"{path}{n}"))
            response.upload_completion.add_done_callback(lambda _, n=n, at=metadata: ended.append((n, at.exists())))
            stager.synchronize()
            for tensor in state["model"].values():
                tensor.zero_()
            responses.append(response)
        for n, response in enumerate(responses, 1):
            response.upload_completion.result()
            dist.barrier()
            _assert_holds(f"{path}{n}", n)
            dist.barrier()
        assert stager.allocations == 2
        assert ended == [(1, True), (2, True)]
        assert Path(f"{path}1.{process().pid}").read_text() == "1 True", "one mapping, in which the tensors lie"
        _save(_state(3), path, storage_writer=Looking(path)).result()  # the writer stages
        dist.barrier()
        _assert_holds(path, 3)
        dist.barrier()
        assert Path(f"{path}.{process().pid}").read_text().endswith(" True")


def test_the_process_maps_what_was_staged(tmp_path: Path) -> None:
    run(2, _saves, str(tmp_path / "checkpoint"))


def _trusts(path: str) -> None:
    base = torch.nn.Parameter(torch.randn(1 << 16), requires_grad=False)
    with ending_process(), RingStager(unchanged="trust") as stager:
        for n in range(4):
            state = {f"base {dist.get_rank()}": base, f"x {dist.get_rank()}": torch.full((3,), float(n))}
            _save({"model": state}, path, async_stager=stager).upload_completion.result()
            dist.barrier()
            loaded = {"model": {key: torch.empty_like(value) for key, value in state.items()}}
            dcp.load(loaded, storage_reader=RingReader(path))
            assert all(torch.equal(loaded["model"][key], value) for key, value in state.items())
            dist.barrier()
            if n == 1:
                base.data.neg_()
        assert stager.allocations == 1


def test_a_process_gets_what_was_not_copied_again(tmp_path: Path) -> None:
    run(2, _trusts, str(tmp_path / "checkpoint"))


def _of_all_kinds(value: float) -> dict[str, Any]:
    """DTensors behind other tensors, so that none begins where the memory does, and what is made of views."""
    mesh = init_device_mesh("cpu", (2,))
    whole, scalar = torch.full((6, 5), value, dtype=torch.float32), torch.tensor(value)
    state: dict[str, Any] = {
        "first": torch.full((3,), value),
        "scalar": scalar,
        "empty": torch.empty(0, 2),
    }
    state |= {f"rows {n}": distribute_tensor(whole + n, mesh, [Shard(0)]) for n in range(3)}
    state |= {"columns": distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_(), "turned": whole.t()}
    state |= {"same": distribute_tensor(whole, mesh, [Replicate()])}
    fused = {"fused": distribute_tensor(torch.arange(40.0).view(8, 5) + value, mesh, [Shard(0)])}
    return {**state, **rearranged(fused, [Rearrange("fused", "{p}", "(p o) i -> i o", {"p": ["a", "b"]})])}


def _saves_all_kinds(path: str) -> None:
    with ending_process(), RingStager() as stager:
        for n in (1, 2):
            options = {"async_stager": stager} if n == 1 else {}
            response = _save(_of_all_kinds(n), path, **options)
            (response.upload_completion if options else response).result()
            dist.barrier()
            loaded, wanted = _of_all_kinds(-1), _of_all_kinds(n)
            dcp.load(loaded, storage_reader=RingReader(path), planner=RingLoadPlanner())
            for name, value in wanted.items():
                found = [each.full_tensor() if isinstance(each, DTensor) else each for each in (loaded[name], value)]
                parts = [each.held if isinstance(each, Composed) else [((), each)] for each in found]
                assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*parts, strict=True)), name
            dist.barrier()


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    run(2, _saves_all_kinds, str(tmp_path / "checkpoint"))


def test_many_tensors_are_sent_as_columns() -> None:
    """What a pipe is given does not grow by what torch needs for each tensor, and whatever else is there comes too."""
    shared = {f"layer.{n}.weight": torch.full((4, 3), float(n)) for n in range(500)}
    state = {
        "model": {**shared, "tied": shared["layer.0.weight"], "grad": torch.ones(2, requires_grad=True)},
        "list": [torch.arange(5), {"inner": torch.tensor(1.5, dtype=torch.bfloat16)}, "text"],
        "turned": torch.randn(3, 4).t(),
        "empty": torch.empty(0, 2),
        "sparse": torch.eye(3).to_sparse(),
        "flag": True,
    }
    staged = StagingBuffer(is_shared=True).stage(state)
    sent = bytes(ForkingPickler.dumps(staged))
    plainly = bytes(ForkingPickler.dumps(dict(staged)))
    assert len(sent) < 60 * 500 < len(plainly)
    received = ForkingPickler.loads(sent)
    assert type(received) is dict
    assert _described(received) == _described(staged)
    assert received["model"]["tied"].data_ptr() == received["model"]["layer.0.weight"].data_ptr()
    assert type(pickle.loads(pickle.dumps(Staged(a=1)))) is dict
    staged["model"]["layer.3.weight"][0] = 7
    assert float(received["model"]["layer.3.weight"][0, 0]) == 7, "the same memory"


def test_quantized_tensors_are_sent_with_their_quantizers() -> None:
    x = torch.randn(4, 6)
    state = {
        "tensor": torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
        "parameter": torch.nn.Parameter(torch.quantize_per_tensor(x, 0.1, 3, torch.qint8), requires_grad=False),
        "tuple": ({"tensor": torch.quantize_per_tensor(x, 0.2, 3, torch.quint8)},),
        "channels": [torch.quantize_per_channel(x, torch.rand(4) + 1, torch.arange(4), 0, torch.qint8)],
    }
    received = ForkingPickler.loads(bytes(ForkingPickler.dumps(StagingBuffer(is_shared=True).stage(state))))
    for sent, got in (
        (state["tensor"], received["tensor"]),
        (state["parameter"], received["parameter"]),
        (state["tuple"][0]["tensor"], received["tuple"][0]["tensor"]),
        (state["channels"][0], received["channels"][0]),
    ):
        assert type(got) is type(sent)
        assert got.qscheme() == sent.qscheme() and torch.equal(got, sent)
        assert got.untyped_storage().is_shared()


def _described(value: Any) -> Any:
    """A tree in which tensors are what can be compared."""
    if isinstance(value, dict):
        return [(key, _described(part)) for key, part in value.items()]
    if isinstance(value, list):
        return [_described(part) for part in value]
    if isinstance(value, torch.Tensor):
        values = value.to_dense() if value.is_sparse else value
        strides = None if value.is_sparse else value.stride()
        return value.dtype, value.shape, strides, value.requires_grad, values.tolist()
    return value


STARTS = 500.0
"""Seconds for some processes to start, one after the other, which takes a busy machine its time."""


def _deaths(path: str) -> list[str]:
    """It dies on rank 1, which comes to the next save after rank 0."""
    errors: list[str] = []
    with ending_process(), RingStager() as stager:
        _save(_state(1), path, async_stager=stager).upload_completion.result()
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(process().pid, signal.SIGKILL)
            process().join()
            dist.barrier()
        for n in (2, 3):
            try:
                response = _save(_state(n), path, async_stager=stager)
                if dist.get_rank() == 0 and n == 2:
                    dist.barrier()
                response.upload_completion.result()
            except Exception as error:
                errors.append(str(error))
        dist.barrier()
        _assert_holds(path, 3)
        dist.barrier()
    return errors


def test_another_process_is_started_for_one_that_has_died(tmp_path: Path) -> None:
    """A save that ranks begin with other processes than they can go on with fails on all; the next one works."""
    first, second = run(2, _deaths, str(tmp_path), timeout=STARTS)
    assert len(first) == len(second) == 1
    assert "the process of rank 1 that saves in the background has died, of signal 9" in second[0]


class Ahead:
    """Keeps the last rank a save behind the first, until another process is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store, self._is_late = default_store(), dist.get_rank() == dist.get_world_size() - 1
        self._said = 0
        if dist.get_rank() == 0:
            agree = stager_module.agree

            def say(*args: str) -> str:
                word = agree(*args)
                self.say(word)
                return word

            monkeypatch.setattr(stager_module, "agree", say)

    def say(self, word: str) -> None:
        self._said += 1
        self._store.set(f"said/{self._said}", word)

    def wait(self, n: int) -> None:
        """Before the n-th save."""
        while self._is_late and not process().is_alive() and not self._store.check([f"said/{n + 1}"]):
            if self._store.check([f"said/{n}"]) and self._store.get(f"said/{n}") != b"go":
                return
            time.sleep(0.005)


def _falls_behind(path: str) -> list[int]:
    """The process of the last rank dies, and the first rank has begun another save whenever the last begins one."""
    failed: list[int] = []
    with ending_process(), RingStager() as stager, pytest.MonkeyPatch.context() as monkeypatch:
        ahead = Ahead(monkeypatch)
        _save(_state(1), path, async_stager=stager).upload_completion.result()
        dist.barrier()
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(process().pid, signal.SIGKILL)
            process().join()
        for n in (2, 3, 4):
            ahead.wait(n)
            try:
                _save(_state(n), path, async_stager=stager).upload_completion.result()
            except Exception:
                failed.append(n)
        ahead.say("go")
        dist.barrier()
        _assert_holds(path, 4)
        dist.barrier()
    return failed


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_a_save_apart_start_another_process(tmp_path: Path, world_size: int) -> None:
    """The save that fails ends the processes of all that took part, so that each says so before its next one."""
    assert run(world_size, _falls_behind, str(tmp_path), timeout=STARTS) == [[2]] * world_size


def _death_alone(path: str) -> None:
    with ending_process(), RingStager() as stager:
        for n in (1, 2):
            _save(_state(n), path, async_stager=stager).upload_completion.result()
            _assert_holds(path, n)
            os.kill(process().pid, signal.SIGKILL)
            process().join()


def test_who_begins_a_save_finds_the_process_of_a_failed_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """He has heard of the failure before torch's thread has come to end that process; and it is ended once."""
    ended: list[int] = []
    monkeypatch.setattr(stager_module, "background_process_failure", lambda: "")
    monkeypatch.setattr(stager_module, "end_background_process", lambda: ended.append(1))
    future: Future[None] = Future()
    sent = stager_module._SentSave(future)
    sent.look()
    assert not ended
    future.set_exception(ConnectionResetError())
    sent.look()  # by the next save
    assert ended == [1]
    sent.look(future)  # by the thread
    assert ended == [1]


def _starts_slowly(path: str) -> int:
    made: list[int] = []
    start = executor._AsyncCheckpointProcess.__init__

    def slow(process: Any, *args: Any, **options: Any) -> None:
        made.append(1)
        time.sleep(1)
        start(process, *args, **options)

    with ending_process(), RingStager(buffers=2) as stager, pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor._AsyncCheckpointProcess, "__init__", slow)
        patch.setattr(stager_module, "_UNASKED_SECONDS", 0.1)
        responses = [_save(_state(n), f"{path}{n}", async_stager=stager) for n in (1, 2, 3)]
        for n, response in enumerate(responses, 1):
            response.upload_completion.result()
            _assert_holds(f"{path}{n}", n)
        assert stager.allocations == 2
    return len(made)


def test_a_process_that_is_slow_to_start_is_started_once(tmp_path: Path) -> None:
    """Its first save had not asked for its copy by the time that the next ones began."""
    assert run(1, _starts_slowly, str(tmp_path / "checkpoint"), timeout=STARTS) == [1]


def test_a_process_that_has_died_before_a_save_costs_no_save(tmp_path: Path) -> None:
    run(1, _death_alone, str(tmp_path))
