"""Which data files a load opens: those of what is wanted, once; counted in the core's table of system calls."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import data_files, drop_cache, leaks_descriptors, open_descriptors, run_python
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import _C, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.sources.contents import open_contents

FILES = 40
TENSOR = 1 << 18
"""Elements: 1 MiB."""

each_planner = pytest.mark.parametrize("planner", (None, RingLoadPlanner), ids=("stock", "ring"))


def make_state(count: int = FILES) -> dict[str, torch.Tensor]:
    return {f"t{number:03d}": torch.full((TENSOR,), number, dtype=torch.float32) for number in range(count)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a file for each tensor."""
    path = tmp_path_factory.mktemp("files") / "checkpoint"
    writer = RingWriter(path, single_file_per_rank=False)
    dcp.save(make_state(), storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    assert len(data_files(path)) == FILES
    return path


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many files the core opens, afterwards."""
    opened: list[int] = []
    _C.arm_fault("open_below", 0, 0, False)
    try:
        yield opened
    finally:
        opened.append(_C.disarm_fault())


def load(path: Path, wanted: dict[str, torch.Tensor], planner: Any, **options: Any) -> None:
    reader = RingReader(path, **options)
    dcp.load(wanted, storage_reader=reader, planner=planner and planner(), no_dist=True)


def blank(names: tuple[str, ...], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(TENSOR, dtype=dtype) for name in names}


@each_planner
@pytest.mark.parametrize("direct", (False, True))
def test_only_files_of_what_is_wanted(path: Path, planner: Any, direct: bool) -> None:
    """Each once, and once more where it is read directly."""
    wanted = blank(("t005", "t017", "t030"))
    drop_cache(path)
    before = open_descriptors()
    with counting() as opened:
        load(path, wanted, planner, direct=direct)
    assert opened == [6 if direct else 3]
    assert all(tensor[0] == int(name[1:]) for name, tensor in wanted.items())
    assert not leaks_descriptors(before)


@each_planner
def test_windows_through_host_copies_open_nothing_again(path: Path, planner: Any) -> None:
    """Other dtypes come in windows of 32 MiB, of which each looked at all files."""
    wanted = blank(tuple(make_state()), torch.float64)
    with counting() as opened:
        load(path, wanted, planner, casts="any", direct=False)
    assert opened == [FILES]
    assert all(tensor[0] == int(name[1:]) for name, tensor in wanted.items())


@each_planner
def test_a_file_that_is_not_needed_may_be_gone(path: Path, tmp_path: Path, planner: Any) -> None:
    wanted = blank(("t005",))
    needed = {record.place.file for record in open_contents(path).entries["t005"].records}
    other = next(path / name for name in data_files(path) - needed)
    aside = other.rename(tmp_path / "aside")
    try:
        load(path, wanted, planner)
        with pytest.raises(CheckpointException, match=other.name):
            load(path, blank(tuple(make_state())), planner)
    finally:
        aside.rename(other)
    assert wanted["t005"][0] == 5


def test_reading_a_checkpoint_in_parts_opens_each_file_once(path: Path) -> None:
    contents = open_contents(path)
    with counting() as opened:
        for key in ("t003", "t004"):
            for start in range(0, TENSOR, TENSOR // 4):
                part = contents.read(key, (start,), (TENSOR // 4,))
                assert part[0] == int(key[1:])
    assert opened[0] <= 4


FEW = """
import resource, sys, torch
import torch.distributed.checkpoint as dcp
from pathlib import Path
from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

path = Path(sys.argv[1])
state = {f"t{n}": torch.full((1000,), float(n)) for n in range(700)}
dcp.save(state, storage_writer=RingWriter(path, single_file_per_rank=False), planner=RingSavePlanner(), no_dist=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for planner in (None, RingLoadPlanner()):
    loaded = {key: torch.zeros(1000) for key in state}
    dcp.load(loaded, storage_reader=RingReader(path), planner=planner, no_dist=True)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
print("loaded")
"""


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    assert run_python(FEW, str(tmp_path / "checkpoint")) == "loaded\n"


HARDLY_ANY = """
import os, resource, sys, torch
import torch.distributed.checkpoint as dcp
from pathlib import Path
from dcpring import RingLoadPlanner, RingReader, verify

path = Path(sys.argv[1])
state = {f"t{n}": torch.full((1000,), float(n)) for n in range(300)}
loads = [(None, {}), (RingLoadPlanner(), {}), (None, {"engine": "threads"}), (None, {"engine": "uring"})]
dcp.save(state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=1), no_dist=True)
dcp.load({key: torch.zeros(1000) for key in state}, storage_reader=RingReader(path), no_dist=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for planner, options in loads:
    loaded = {key: torch.zeros(1000) for key in state}
    dcp.load(loaded, storage_reader=RingReader(path, **options), planner=planner, no_dist=True)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
verify(path)
print("loaded")
"""


@pytest.mark.parametrize("limit", (40, 100))
def test_where_hardly_any_file_may_be_open(tmp_path: Path, limit: int) -> None:
    assert run_python(HARDLY_ANY, str(tmp_path / "checkpoint"), str(limit)) == "loaded\n"


@each_planner
def test_many_files_are_opened_once(tmp_path: Path, planner: Any) -> None:
    """Those of stock's writer, too, which are looked into first to find the tensors."""
    state = {f"t{number}": torch.full((100,), float(number)) for number in range(300)}
    dcp.save(state, storage_writer=RingWriter(tmp_path / "ours", single_file_per_rank=False), no_dist=True)
    stock = dcp.FileSystemWriter(tmp_path / "stock", single_file_per_rank=False, thread_count=1)
    dcp.save(state, storage_writer=stock, no_dist=True)
    for path in (tmp_path / "ours", tmp_path / "stock"):
        drop_cache(path)
        wanted = {key: torch.zeros(100) for key in state}
        with counting() as opened:
            load(path, wanted, planner, direct=False)
        assert opened == [300]
        assert all(torch.equal(wanted[key], state[key]) for key in state)


@each_planner
def test_the_limit_of_open_files_is_named(path: Path, planner: Any) -> None:
    _C.arm_fault("open_below", 2, errno.EMFILE, True)
    try:
        with pytest.raises(CheckpointException) as caught:
            load(path, blank(("t001", "t002")), planner)
    finally:
        _C.disarm_fault()
    (error, _), *_ = caught.value.failures.values()
    assert isinstance(error, OSError) and error.errno == errno.EMFILE
    assert "ulimit -n" in str(error) and "'t00" in str(error)
