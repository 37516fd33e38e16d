"""async_save on several ranks, of which one fails or goes before its save has begun."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _background import check_saved, ending_process
from _distributed import run
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcpring import CheckpointError, RingReader, RingSavePlanner, RingStager, RingWriter
from dcpring.move import staging

WAIT = 60.0
"""Seconds after which something that has to happen has not."""


def _save(state: dict[str, Any], path: str, stager: RingStager | None, **options: Any) -> Any:
    """The Future of a save, without a stager one that the writer copies for."""
    options.setdefault("storage_writer", RingWriter(path))
    saved: Any = dcp.async_save(state, async_stager=stager, **options)
    return saved if stager is None else saved.upload_completion


def _copies_on_some(path: str, has_stager: bool, kind: AsyncCheckpointerType) -> None:
    """The second rank has what cannot be copied; then what can."""
    rank, stager = dist.get_rank(), RingStager() if has_stager else None
    state: dict[str, Any] = {"model": {f"w{rank}": torch.ones(3)}, "value": threading.Lock() if rank else 2}
    with ending_process():
        saved = _save(state, path, stager, async_checkpointer_type=kind)
        with pytest.raises(CheckpointException, match="cannot copy 'value': TypeError") as caught:
            saved.result(WAIT)
        assert list(caught.value.failures) == [1]
        assert not Path(path, ".metadata").exists()
        dist.barrier()
        _save({**state, "value": 2}, path, stager, async_checkpointer_type=kind).result(WAIT)
    dist.barrier()
    loaded = {"value": 0}
    dcp.load(loaded, storage_reader=RingReader(path))
    assert loaded["value"] == 2
    if stager is not None:
        stager.close()


@pytest.mark.parametrize("has_stager", [True, False])
@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_what_one_rank_cannot_copy_is_an_error_on_all(
    tmp_path: Path, has_stager: bool, kind: AsyncCheckpointerType
) -> None:
    """It was raised before DCP's collectives, in which the others waited for that rank."""
    run(2, _copies_on_some, str(tmp_path / "checkpoint"), has_stager, kind)


@contextlib.contextmanager
def _without_group(path: str) -> Iterator[None]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    yield
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world_size)
    dist.barrier()


def _default_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, False, False))


def _ends_group(path: str, makes_stager: Any, makes_writer: Any, makes_planner: Any) -> None:
    """The group goes while DCP's thread has not begun."""
    may_begin, save = threading.Event(), saver.save

    def held(*args: Any, **options: Any) -> Any:
        may_begin.wait(WAIT)
        return save(*args, **options)

    stager, rank = makes_stager() if makes_stager is not None else None, dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "save", held)
        saved = dcp.async_save(
            {"model": {f"w{rank}": torch.ones(3)}},
            storage_writer=makes_writer(path),
            planner=makes_planner(),
            async_stager=stager,
        )
        with _without_group(path):
            may_begin.set()
            errors = CheckpointError, CheckpointException
            with pytest.raises(errors, match=f"rank {rank}: the process group of 2 ranks was destroyed"):
                getattr(saved, "upload_completion", saved).result(WAIT)
    assert not Path(path, ".metadata").exists()


@pytest.mark.parametrize(
    "makes_stager, makes_writer, makes_planner",
    [
        (RingStager, RingWriter, RingSavePlanner),
        (None, RingWriter, DefaultSavePlanner),
        (_default_stager, RingWriter, DefaultSavePlanner),
        (_default_stager, FileSystemWriter, RingSavePlanner),
    ],
)
def test_a_group_that_is_destroyed_before_the_save_has_begun(
    tmp_path: Path, makes_stager: Any, makes_writer: Any, makes_planner: Any
) -> None:
    """DCP saves without a group what each rank has, as if it were alone: the last one's metadata won."""
    run(2, _ends_group, str(tmp_path / "checkpoint"), makes_stager, makes_writer, makes_planner)


def _copies_until_group_has_gone(path: str) -> None:
    """RingStager with stock's writer: the group goes while the state is copied."""
    may_copy, copy = threading.Event(), staging._C.copy_tensors

    def held(*args: Any) -> Any:
        may_copy.wait(WAIT)
        return copy(*args)

    with RingStager() as stager, pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging._C, "copy_tensors", held)
        saved = _save({"w": torch.ones(3)}, path, stager, storage_writer=FileSystemWriter(path))
        with _without_group(path):
            may_copy.set()
            with pytest.raises(CheckpointError, match="the process group of 2 ranks was destroyed"):
                saved.result(WAIT)
    assert not Path(path, ".metadata").exists()


def test_a_group_that_is_destroyed_while_the_state_is_copied(tmp_path: Path) -> None:
    run(2, _copies_until_group_has_gone, str(tmp_path / "checkpoint"))


def _saves_alone(path: str) -> None:
    """What was made in a group saves without one: by itself, and after the group."""
    rank = dist.get_rank()
    state, own = {"w": torch.full((3,), float(rank))}, f"{path}.{rank}"
    stager, planner = RingStager(), RingSavePlanner()
    writers = {name: RingWriter(f"{own}.{name}") for name in ("told", "stager", "writer", "blocking")}
    if rank == 0:
        _save(state, "", stager, storage_writer=writers["told"], planner=planner, no_dist=True).result(WAIT)
    dist.barrier()
    with _without_group(path):
        _save(state, "", stager, storage_writer=writers["stager"], planner=planner).result(WAIT)
        _save(state, "", None, storage_writer=writers["writer"], planner=planner).result(WAIT)
        dcp.save(state, storage_writer=writers["blocking"], planner=planner)
        stager.close()
        for name in list(writers)[rank:]:
            loaded = {"w": torch.zeros(3)}
            dcp.load(loaded, storage_reader=RingReader(f"{own}.{name}"))
            assert torch.equal(loaded["w"], state["w"])


def test_saves_of_one_rank(tmp_path: Path) -> None:
    run(2, _saves_alone, str(tmp_path / "checkpoint"))


# ---- two at a time ----


def _overtakes(path: str, way: str) -> None:
    """On the first rank DCP's thread begins late, when the calling thread is at what comes next."""
    rank, save = dist.get_rank(), saver.save
    main = threading.current_thread()

    def late(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not main and rank == 0:
            time.sleep(0.5)
        return save(*args, **options)

    state = {"model": {f"w{rank}": torch.full((1000,), float(rank))}}
    with pytest.MonkeyPatch.context() as patch, RingStager() as stager, RingStager() as other:
        dcp.save(state, storage_writer=RingWriter(f"{path}0"), planner=RingSavePlanner())
        patch.setattr(saver, "save", late)
        first = _save(state, f"{path}1", None if way == "the writer stages" else stager, planner=RingSavePlanner())
        if way == "a load":
            dcp.load({"model": {f"w{rank}": torch.zeros(1000)}}, storage_reader=RingReader(f"{path}0"))
            _save(state, f"{path}2", stager).result(WAIT)
        elif way == "another stager":
            _save(state, f"{path}2", other).result(WAIT)
        elif way == "stock's writer":
            dcp.save(state, storage_writer=FileSystemWriter(f"{path}2"), planner=RingSavePlanner())
        else:
            dcp.save(state, storage_writer=RingWriter(f"{path}2"))
        first.result(WAIT)
    for number in (1, 2):
        check_saved(f"{path}{number}", state)


@pytest.mark.parametrize("way", ["a blocking save", "the writer stages", "stock's writer", "another stager", "a load"])
def test_saves_and_loads_of_a_group_wait_for_each_other(tmp_path: Path, way: str) -> None:
    """Their collectives met each other's, and all ranks waited until the group's timeout."""
    run(2, _overtakes, str(tmp_path / "checkpoint"), way, timeout=60)
