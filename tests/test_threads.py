"""One writer, or one reader, in several threads at a time; and what belongs to one process says so."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcpring import (
    Checkpointer,
    RingHFWriter,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingStager,
    RingWriter,
)

COUNT = 4
WAIT = 60.0


def _meeting(planner: type[Any], method: str) -> type[Any]:
    """A planner that goes on when those of all threads have come as far."""
    barrier = threading.Barrier(COUNT)

    def meet(self: Any, *args: Any, **options: Any) -> Any:
        barrier.wait(WAIT)
        return getattr(super(Meeting, self), method)(*args, **options)

    Meeting: Any = type("Meeting", (planner,), {method: meet})
    return Meeting


def _state(number: int) -> dict[str, Any]:
    return {f"t{number}": torch.full((3000,), float(number)), "number": torch.tensor([number])}


@pytest.mark.parametrize("method", ["create_local_plan", "create_global_plan", "finish_plan"])
@pytest.mark.parametrize("planner", [RingSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("kind", [RingWriter, RingHFWriter])
def test_one_writer_saves_in_several_threads(tmp_path: Path, kind: Any, planner: Any, method: str) -> None:
    """Each its own state, where it was told to, whatever the others are at."""
    writer, meeting = kind(tmp_path / "none"), _meeting(planner, method)

    def save(number: int) -> None:
        path = str(tmp_path / str(number))
        dcp.save(_state(number), checkpoint_id=path, storage_writer=writer, planner=meeting(), no_dist=True)

    for _ in range(2):
        with ThreadPoolExecutor(COUNT) as threads:
            list(threads.map(save, range(COUNT)))
        for number in range(COUNT):
            loaded = {key: torch.zeros_like(value) for key, value in _state(number).items()}
            dcp.load(loaded, storage_reader=RingReader(tmp_path / str(number)), no_dist=True)
            assert all(torch.equal(value, loaded[key]) for key, value in _state(number).items())
    assert not (tmp_path / "none").exists() and writer.stats is not None


def test_what_a_thread_has_set_last_is_what_others_see(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "0")
    dcp.save(_state(0), storage_writer=writer, no_dist=True)
    with ThreadPoolExecutor(1) as thread:
        args = {"checkpoint_id": str(tmp_path / "1"), "storage_writer": writer, "no_dist": True}
        thread.submit(dcp.save, _state(1), **args).result()
        writer.reset(tmp_path / "2")
        thread.submit(dcp.save, _state(2), storage_writer=writer, no_dist=True).result()
    assert str(writer.path) == str(tmp_path / "2")
    dcp.save(_state(3), storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True)
    assert [sorted(path.name for path in tmp_path.iterdir())] == [["0", "1", "2"]]
    assert "t3" in RingReader(tmp_path / "2").read_metadata().state_dict_metadata


@pytest.mark.parametrize("planner", [RingLoadPlanner, DefaultLoadPlanner])
def test_one_reader_loads_in_several_threads(tmp_path: Path, planner: Any) -> None:
    for number in range(COUNT):
        dcp.save(_state(number), storage_writer=RingWriter(tmp_path / str(number)), no_dist=True)
    reader, meeting = RingReader(tmp_path / "none"), _meeting(planner, "finish_plan")

    def loads(number: int) -> bool:
        loaded = {key: torch.zeros_like(value) for key, value in _state(number).items()}
        path = str(tmp_path / str(number))
        dcp.load(loaded, checkpoint_id=path, storage_reader=reader, planner=meeting(), no_dist=True)
        return all(torch.equal(value, loaded[key]) for key, value in _state(number).items())

    with ThreadPoolExecutor(COUNT) as threads:
        assert all(threads.map(loads, range(COUNT)))


def test_a_load_may_go_from_thread_to_thread(tmp_path: Path) -> None:
    dcp.save(_state(1), storage_writer=RingWriter(tmp_path), no_dist=True)
    reader, planner = RingReader(tmp_path), DefaultLoadPlanner()
    loaded = {key: torch.zeros_like(value) for key, value in _state(1).items()}

    def begin() -> Any:
        metadata = reader.read_metadata()
        planner.set_up_planner(loaded, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        return reader.prepare_local_plan(planner.create_local_plan())

    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(begin).result()
    reader.read_data(plan, planner).wait()
    assert all(torch.equal(value, loaded[key]) for key, value in _state(1).items())


def test_what_belongs_to_one_process_is_neither_pickled_nor_copied(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with RingStager() as stager, Checkpointer(tmp_path, {"model": model}) as checkpointer:
        for one, name in ((stager, "RingStager"), (checkpointer, f"Checkpointer of {tmp_path}")):
            for way in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=f"{name} can neither be pickled nor copied"):
                    way(one)  # type: ignore[operator]
