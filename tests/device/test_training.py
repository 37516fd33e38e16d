"""Training on an accelerator: background saves, DTensors, and resuming."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _kinds import everything, raw
from device._support import (
    IS_TWIN,
    KIND,
    MiB,
    devices,
    extra_bytes,
    is_pinned,
    moved,
    other_stream,
    pinned_bytes,
    set_late,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcpring import RNG, Checkpointer, PerRank, Replicated, RingReader, RingWriter, Sharded, diff_checkpoints
from dcpring.move.staging import StagingBuffer
from dcpring.torchside import accelerators


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    backend = "gloo" if KIND == "cpu" or IS_TWIN else f"cpu:gloo,{KIND}:{dist.get_default_backend_for_device(KIND)}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(_group: None) -> DeviceMesh:
    if IS_TWIN:
        pytest.skip("a simulated accelerator has no collectives")
    return init_device_mesh(KIND, (1,))


# ---- staging ----


def test_every_kind_is_staged() -> None:
    saved = everything()
    there = {key: moved(tensor, index) for index, (key, tensor) in enumerate(saved.items())}
    staged = StagingBuffer().stage(there)
    assert all(tensor.device.type == "cpu" for tensor in staged.values())
    wrong = [key for key, tensor in saved.items() if raw(staged[key]) != raw(tensor)]
    assert not wrong, wrong


def test_what_any_stream_of_any_device_still_writes_is_waited_for() -> None:
    state = {str(device): torch.zeros(MiB, device=device) for device in devices()}
    for device, tensor in zip(devices(), state.values(), strict=True):
        with other_stream(device):
            set_late(tensor, 5.0)
    assert all(bool((tensor == 5).all()) for tensor in StagingBuffer().stage(state).values())


def test_training_may_change_everything_afterwards() -> None:
    tensor = torch.full((64 * MiB // 4,), 1.0, device=devices()[0])
    staged = StagingBuffer().stage({"x": tensor})
    tensor.fill_(2.0)
    assert bool((staged["x"] == 1).all())


def test_a_staged_dtensor_takes_nothing_on_the_device(mesh: DeviceMesh) -> None:
    state = {"w": distribute_tensor(torch.randn(4096, 4096), mesh, [Shard(0)])}
    staged: dict[str, Any] = {}
    assert extra_bytes(lambda: staged.update(StagingBuffer().stage(state))) == 0
    assert isinstance(staged["w"], DTensor) and staged["w"]._local_tensor.device.type == "cpu"
    assert staged["w"].placements == (Shard(0),) and staged["w"].device_mesh == mesh
    assert torch.equal(staged["w"]._local_tensor, state["w"].to_local().cpu())


def test_pinned_memory_is_little_more_than_the_state_and_given_back() -> None:
    accelerators.active.give_back_pinned()
    before = pinned_bytes()
    buffer = StagingBuffer()
    state = {str(n): torch.ones(33 * MiB // 4, device=devices()[0]) for n in range(16)}  # 528 MiB
    staged = buffer.stage(state)
    assert is_pinned(staged["0"])
    assert pinned_bytes() - before <= 640 * MiB
    assert buffer.stage(state) and buffer.allocations == 1
    del staged
    buffer.release()
    assert pinned_bytes() <= before


def test_shared_memory_is_pinned_as_it_is() -> None:
    """For CUDA and ROCm; it is sent to a process without being copied, and unpinned before it goes."""
    accelerators.active.give_back_pinned()
    before = pinned_bytes()
    state = {str(n): torch.full((3 * MiB // 4,), float(n), device=devices()[0]) for n in range(8)}
    state |= {f"small.{n}": torch.full((9,), float(n), device=devices()[0]) for n in range(100)}
    for _ in range(2):
        buffer = StagingBuffer(is_shared=True)
        staged = buffer.stage(state)
        assert all(map(is_pinned, staged.values()))
        assert all(torch.equal(staged[key], tensor.cpu()) for key, tensor in state.items())
        if accelerators.active.can_pin():
            assert pinned_bytes() <= before
            received = ForkingPickler.loads(bytes(ForkingPickler.dumps(staged)))
            staged["3"].fill_(-1)
            assert bool((received["3"] == -1).all())
        buffer.release()
        assert KIND == "cpu" or not (accelerators.active.can_pin() and is_pinned(staged["3"]))


# ---- saves and loads of trainings ----


class _Holds:
    """A component with a state of its own."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def test_a_background_save_is_a_blocking_one(tmp_path: Path) -> None:
    w, z = torch.randn(30, 20), torch.randn(3, dtype=torch.complex64)
    w, z = moved(w), moved(z)
    model = {"w": w, "tied": w, "deep": OrderedDict(part=w[2:], t=w.t(), conj=z.conj())}
    components = {
        **{"model": Sharded(_Holds(model)), "counts": Replicated(_Holds({"list": [torch.ones(2), 3]}))},
        "mine": PerRank(_Holds({"tuple": (moved(torch.ones(2)).cpu(), 1)})),
    }
    for name, blocking in (("first", True), ("second", False)):
        with Checkpointer(tmp_path / name, components) as checkpointer:
            checkpointer.save(1, blocking=blocking)
            checkpointer.wait()
    difference = diff_checkpoints(tmp_path / "first" / "step-1", tmp_path / "second" / "step-1")
    assert not difference.keys and not difference.tensors and not difference.objects, difference


class _Training:
    """A small model that FSDP2 shards, AdamW, and random data and dropout of the device."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(256, 16)]
        self.model = torch.nn.Sequential(*layers).to(KIND)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def steps(self, count: int) -> list[Tensor]:
        losses = []
        for _ in range(count):
            loss = self.model(torch.randn(32, 256, device=KIND)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        return losses

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "rng": RNG()}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_training_goes_on_with_exactly_its_losses(tmp_path: Path, mesh: DeviceMesh, blocking: bool) -> None:
    training = _Training(mesh)
    training.steps(3)
    with Checkpointer(tmp_path, training.components()) as checkpointer:
        checkpointer.save(3, blocking=blocking)
        wanted = training.steps(4)  # while it is written, where it is in the background
    resumed = _Training(mesh)
    with Checkpointer(tmp_path, resumed.components()) as checkpointer:
        checkpointer.load()
        assert torch.equal(torch.stack(resumed.steps(4)), torch.stack(wanted))


def test_async_save(tmp_path: Path) -> None:
    state = {"x": torch.zeros(8 * MiB, device=devices()[0])}
    set_late(state["x"], 4.0)
    future: Any = dcp.async_save(state, storage_writer=RingWriter(tmp_path))
    state["x"].fill_(9.0)
    future.result()
    loaded = {"x": torch.zeros(8 * MiB, device=devices()[0])}
    dcp.load(loaded, storage_reader=RingReader(tmp_path))
    assert bool((loaded["x"] == 4).all())
