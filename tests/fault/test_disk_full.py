"""A full disk, for real: a small file system in a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import (
    MIB,
    StateDict,
    data_files,
    equal,
    failure,
    fault,
    load,
    mounted,
    needed_files,
    save,
    tensor_state,
)
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import RingWriter

OLD = tensor_state(1, mib=4)
NEW = tensor_state(2, mib=4)
HUGE = tensor_state(3, mib=20)

MODES: list[dict[str, Any]] = [
    {"engine": "uring", "direct": True},
    {"engine": "uring", "direct": False, "workers": 3},
    {"engine": "threads", "direct": True, "workers": 3, "queue_depth": 8, "block_size_bytes": MIB},
    {"engine": "threads", "direct": False},
]
each_mode = pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(str(value) for value in o.values()))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """40 MiB; nothing is reserved for root."""
    with mounted(tmp_path_factory.mktemp("images") / "disk", "ext4", 40 * MIB, "-q", "-m", "0") as where:
        yield where


@pytest.fixture
def path(disk: Path) -> Iterator[Path]:
    path = disk / "checkpoint"
    save(OLD, path)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def free_bytes(path: Path) -> int:
    os.sync()
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class FilledBeforeCommit(RingWriter):
    """Someone else takes the last of the space while data are written."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        path = Path(self.path)
        with open(path.parent / "filler", "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, free_bytes(path) - 32 * 1024)
        super().finish(*args, **kwargs)


def fails_with_no_space(state: StateDict, path: Path, options: dict[str, Any]) -> OSError:
    before, files = free_bytes(path), data_files(path)
    with pytest.raises(CheckpointException) as caught:
        save(state, path, **options)
    error = failure(caught.value)
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert "No space left on device" in str(error)
    assert "free space" in str(error)
    assert data_files(path) == files
    assert free_bytes(path) >= before - 64 * 1024, "the space of the failed save is not freed"
    assert equal(load(OLD, path), OLD)
    return error


@each_mode
def test_full_at_preallocation(path: Path, options: dict[str, Any]) -> None:
    error = fails_with_no_space(HUGE, path, options)
    assert "fallocate" in str(error)
    assert f"{path}/__0_0." in str(error)
    save(NEW, path, **options)
    assert equal(load(NEW, path), NEW)


@each_mode
def test_full_in_the_middle_of_the_file(path: Path, options: dict[str, Any]) -> None:
    """Where a file system cannot preallocate; a buffered write's failure may come as late as the sync."""
    with fault("fallocate", 1, errno.EOPNOTSUPP, True):
        error = fails_with_no_space(HUGE, path, options)
    assert f"{path}/__0_0." in str(error)
    assert any(call in str(error) for call in ("write", "fdatasync", "ftruncate"))
    save(NEW, path, **options)
    assert equal(load(NEW, path), NEW)


def test_full_when_metadata_is_written(path: Path) -> None:
    many = {f"tensor.{number}": torch.zeros(1) for number in range(3000)}
    try:
        with pytest.raises(CheckpointException) as caught:
            dcp.save(many, storage_writer=FilledBeforeCommit(path), no_dist=True)
        error = failure(caught.value)
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC
        assert f"{path}/.metadata" in str(error)
        assert not [file for file in path.iterdir() if file.name.endswith(".tmp")]
        assert equal(load(OLD, path), OLD)
    finally:
        (path.parent / "filler").unlink(missing_ok=True)
    save(NEW, path)
    assert equal(load(NEW, path), NEW)
    assert {entry.name for entry in path.iterdir()} == needed_files(path)


def test_many_failures_do_not_fill_the_disk(path: Path) -> None:
    before = free_bytes(path)
    for _ in range(5):
        fails_with_no_space(HUGE, path, {})
    assert free_bytes(path) >= before - 64 * 1024
