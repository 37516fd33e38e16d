"""Paths that are no UTF-8, as on old file systems, and very long ones: everything works there, and errors name them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import data_files, equal, failure, flip_bit, load, save, small_state
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import (
    _C,
    Checkpointer,
    CorruptCheckpointError,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    convert,
    diff_checkpoints,
    verify,
)

STATE = small_state(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Latin-1: ``caf\\xe9``."""
    return Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9", b"step\xff")))


@pytest.mark.parametrize("planners", ((None, None), (RingSavePlanner, RingLoadPlanner)), ids=("stock", "ring"))
def test_save_and_load(path: Path, planners: tuple[Any, Any]) -> None:
    saver, loader = planners
    for state in (small_state(2), STATE):
        save(state, path, planner=saver and saver())
    loaded = load(STATE, path)
    assert equal(loaded, STATE)
    dcp.load(loaded, storage_reader=RingReader(path), planner=loader and loader(), no_dist=True)
    assert equal(loaded, STATE)
    dcp.load(loaded, storage_reader=FileSystemReader(path), no_dist=True)
    assert equal(loaded, STATE)
    assert len(data_files(path)) == 1


def test_what_stock_saved(path: Path) -> None:
    dcp.save(STATE, storage_writer=FileSystemWriter(path), no_dist=True)
    assert equal(load(STATE, path), STATE)


def test_tools(path: Path) -> None:
    save(STATE, path)
    assert verify(path).ok
    target = path.with_name(os.fsdecode(b"t\xe9.pt"))
    tensors = {key: value for key, value in STATE.items() if isinstance(value, torch.Tensor)}
    save(tensors, path)
    convert(path, target)
    back = path.with_name(os.fsdecode(b"b\xe9"))
    convert(target, back)
    assert not diff_checkpoints(path, back)
    convert(path, path.with_name(os.fsdecode(b"s\xe9.safetensors")))


@pytest.mark.parametrize("command", ("ls", "verify", "doctor"))
def test_commands(path: Path, command: str) -> None:
    """What is printed shows the bytes, and never fails."""
    save(STATE, path)
    result = _cli.run(command, path)
    assert result.status == 0, result.err
    (path / ".metadata").unlink()
    result = _cli.run("ls", path)
    assert result.status == 2
    assert "step" in result.err
    result.err.encode()


def test_checkpointer(path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    checkpointer = Checkpointer(path, {"model": model})
    checkpointer.save(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.nn.init.zeros_(model.weight)
    checkpointer.load()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_errors_name_the_path(path: Path) -> None:
    save(STATE, path)
    file = next(path / name for name in data_files(path))
    flip_bit(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointException) as caught:
        load(STATE, path)
    error = failure(caught.value)
    assert isinstance(error, CorruptCheckpointError) and error.path == str(file)
    file.unlink()
    with pytest.raises(CheckpointException) as caught:
        load(STATE, path)
    error = failure(caught.value)
    assert isinstance(error, OSError) and error.filename == str(file) and error.errno == errno.ENOENT
    assert repr(str(file)) in str(error)
    str(error).encode()  # it can be printed


def test_a_long_path_is_not_cut(tmp_path: Path) -> None:
    """3000 bytes, made and entered step by step."""
    path = tmp_path
    while len(str(path)) < 3000:
        path /= "d" * 200
    with pytest.raises(OSError) as caught:
        _C.FileWriter(str(path), "file", 0, ("threads", 0, 2, 1 << 20, 1, True, False, None))
    assert caught.value.filename == str(path)
    save(STATE, path)
    assert equal(load(STATE, path), STATE)
    file = next(path / name for name in data_files(path))
    file.unlink()
    with pytest.raises(CheckpointException) as caught_load:
        load(STATE, path)
    error = failure(caught_load.value)
    assert isinstance(error, OSError) and error.filename == str(file)


def test_names_that_no_file_can_have() -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ValueError):
            _C.Input(".", [name])
        with pytest.raises(ValueError):
            _C.remove_files(".", [name])
        with pytest.raises(ValueError):
            _C.make_directory(name, False)
    for bad in (3, None):
        with pytest.raises(TypeError):
            _C.make_directory(bad, False)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            _C.Input(".", [bad])  # type: ignore[list-item]
