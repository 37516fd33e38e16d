"""What saves and loads let go of goes at once: with the collector off, no tensor and no open file is left behind."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcpring import (
    Checkpointer,
    RingHFReader,
    RingHFWriter,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    Sharded,
    empty_cache,
)
from dcpring.sources.contents import open_contents
from dcpring.tools.inspect.verify import verify

State = dict[str, torch.Tensor]


class Holder:
    """Something with a state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        pass


def _checkpointer(folder: Path, state: State) -> None:
    with Checkpointer(folder / "steps", {"holder": Sharded(Holder(state))}) as checkpointer:
        if checkpointer.latest() is None:
            checkpointer.save(1)
        else:
            checkpointer.load()


WORK: dict[str, Callable[[Path, State], Any]] = {
    "save": lambda at, state: dcp.save(state, storage_writer=RingWriter(at / "ours"), planner=RingSavePlanner()),
    "save, stock's planner": lambda at, state: dcp.save(state, storage_writer=RingWriter(at / "ours")),
    "save, stock's storage": lambda at, state: dcp.save(
        state, storage_writer=FileSystemWriter(at / "stock"), planner=RingSavePlanner()
    ),
    "save, safetensors": lambda at, state: dcp.save(
        state, storage_writer=RingHFWriter(at / "model"), planner=RingSavePlanner()
    ),
    "load": lambda at, state: dcp.load(state, storage_reader=RingReader(at / "ours"), planner=RingLoadPlanner()),
    "load, stock's planner": lambda at, state: dcp.load(state, storage_reader=RingReader(at / "ours")),
    "load, stock's files": lambda at, state: dcp.load(
        state, storage_reader=RingReader(at / "stock"), planner=RingLoadPlanner()
    ),
    "load, stock's storage": lambda at, state: dcp.load(
        state, storage_reader=FileSystemReader(at / "ours"), planner=RingLoadPlanner()
    ),
    "load, safetensors": lambda at, state: dcp.load(
        state, storage_reader=RingHFReader(at / "model"), planner=RingLoadPlanner()
    ),
    "Checkpointer, save": _checkpointer,
    "Checkpointer, load": _checkpointer,
    "contents": lambda at, state: open_contents(at / "ours").read("plain"),
    "verify": lambda at, state: verify(at / "ours"),
}


FLATTENED_BY_TORCH = ("save, stock's planner", "load, stock's planner", "Checkpointer, save", "Checkpointer, load")


def _torch_waits(folder: Path) -> bool:
    """Whether torch's own way to flatten a state dict leaves it to the collector, as 2.9's does."""
    state = _state(0.0)
    tensor = weakref.ref(state["plain"])
    dcp.save(state, storage_writer=FileSystemWriter(folder / "torch"))
    del state
    return tensor() is not None


def _state(fill: float) -> State:
    return {
        "plain": torch.full((1000,), fill),
        "transposed": torch.full((3, 4), fill).t(),
        "cast": torch.full((10,), fill).to(torch.bfloat16 if fill else torch.float32),
    }


def _open_files() -> int:
    empty_cache()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for name in ("save", "save, stock's storage", "save, safetensors"):
        WORK[name](folder, _state(1.0))
    return folder


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", WORK)
@pytest.mark.usefixtures("collector_off")
def test_nothing_waits_for_the_collector(saved: Path, name: str) -> None:
    if name in FLATTENED_BY_TORCH and _torch_waits(saved):
        pytest.skip("this torch leaves what it has flattened to the collector")
    if name == "Checkpointer, load":
        _checkpointer(saved, _state(1.0))
    before, state = _open_files(), _state(0.0)
    tensors = [weakref.ref(tensor) for tensor in state.values()]
    WORK[name](saved, state)
    del state
    assert [tensor() for tensor in tensors] == [None] * 3
    assert _open_files() == before
