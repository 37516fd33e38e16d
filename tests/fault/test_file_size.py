"""A file that may not be as large as it would be: the error says why, and what to do; what was there stays."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import MIB, equal, failure, load, needed_files, save, tensor_state
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import RingHFWriter, RingSavePlanner, RingWriter

OLD = tensor_state(1, mib=4)
HUGE = tensor_state(3, mib=20)


@contextlib.contextmanager
def limit_of_files(size: int) -> Iterator[None]:
    """RLIMIT_FSIZE; Python ignores the signal that comes with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(state: Any, writer: RingWriter) -> OSError:
    with limit_of_files(16 * MIB), pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    error = failure(caught.value)
    assert isinstance(error, OSError) and error.errno == errno.EFBIG
    return error


@pytest.mark.parametrize("options", [{"engine": "uring"}, {"engine": "threads", "direct": False}], ids=str)
def test_a_file_beyond_the_limit(tmp_path: Path, options: dict[str, Any]) -> None:
    save(OLD, tmp_path)
    error = refused(HUGE, RingWriter(tmp_path, **options))
    assert "ulimit -f" in str(error) and "single_file_per_rank" in str(error)
    assert error.filename.startswith(str(tmp_path))
    assert equal(load(OLD, tmp_path), OLD)
    with limit_of_files(16 * MIB):
        save(OLD, tmp_path)
    assert set(os.listdir(tmp_path)) == needed_files(tmp_path)


def test_a_model_beyond_the_limit(tmp_path: Path) -> None:
    model = {f"w{n}": torch.full((MIB,), float(n)) for n in range(4)}
    assert "max_shard_bytes" in str(refused(model, RingHFWriter(tmp_path)))
    assert not list(tmp_path.iterdir())
    with limit_of_files(16 * MIB):
        writer = RingHFWriter(tmp_path, max_shard_bytes=5 * MIB)
        dcp.save(model, storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    found = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert all(torch.equal(found[name], value) for name, value in model.items())
