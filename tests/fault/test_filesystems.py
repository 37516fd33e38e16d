"""Saving and loading on the file systems that people have."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from fault._support import (
    MIB,
    equal,
    failure,
    fault,
    load,
    mounted,
    mounted_on,
    save,
    small_state,
    stock_load,
)
from torch.distributed.checkpoint.api import CheckpointException

STATE = small_state(1)


def tmpfs(folder: Path) -> AbstractContextManager[Path]:
    return mounted_on(folder / "tmpfs", "-t", "tmpfs", "tmpfs")


def ramfs(folder: Path) -> AbstractContextManager[Path]:
    return mounted_on(folder / "ramfs", "-t", "ramfs", "ramfs")


def ext4(folder: Path) -> AbstractContextManager[Path]:
    return mounted(folder / "ext4", "ext4", 64 * MIB, "-q")


def ext4_with_1k_blocks(folder: Path) -> AbstractContextManager[Path]:
    return mounted(folder / "ext4-1k", "ext4", 64 * MIB, "-q", "-b", "1024")


def xfs(folder: Path) -> AbstractContextManager[Path]:
    return mounted(folder / "xfs", "xfs", 320 * MIB, "-q")


def btrfs(folder: Path) -> AbstractContextManager[Path]:
    return mounted(folder / "btrfs", "btrfs", 128 * MIB, "-q")


@contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    for name in ("lower", "upper", "work"):
        (folder / name).mkdir()
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    with mounted_on(folder / "merged", "-t", "overlay", "overlay", "-o", options) as where:
        yield where


def kernel_has(kind: str) -> bool:
    """Asks for the module where it is not there yet."""
    if modprobe := shutil.which("modprobe", path="/usr/sbin:/sbin:/usr/bin:/bin"):
        subprocess.run([modprobe, "-q", kind], capture_output=True, check=False)
    return any(line.split()[-1] == kind for line in Path("/proc/filesystems").read_text().splitlines())


def missing(kind: str, tool: str | None) -> str:
    """What this machine lacks for a test; only what is no part of a plain Debian may be missing."""
    if tool is not None and shutil.which(tool) is None:
        return f"{tool} is not installed"
    return "" if kernel_has(kind) else f"the kernel has no {kind}"


def if_available(make: Callable[[Path], AbstractContextManager[Path]], tool: str | None, kind: str) -> object:
    reason = missing(kind, tool)
    return pytest.param(make, marks=pytest.mark.skipif(bool(reason), reason=reason), id=kind)


FILE_SYSTEMS = [
    tmpfs,
    ext4,
    ext4_with_1k_blocks,
    if_available(xfs, "mkfs.xfs", "xfs"),
    if_available(btrfs, "mkfs.btrfs", "btrfs"),
    if_available(overlay, None, "overlay"),
    ramfs,
]


@pytest.fixture(scope="module", params=FILE_SYSTEMS)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mounts")
    with request.param(folder) as path:
        yield path


@pytest.mark.parametrize("engine", ("uring", "threads"))
@pytest.mark.parametrize("direct", ("auto", False))
def test_saves_and_loads(where: Path, engine: str, direct: str | bool) -> None:
    path = where / f"{engine}-{direct}"
    other = small_state(2)
    for state in (other, STATE):
        writer = save(state, path, engine=engine, direct=direct, block_size_bytes=MIB)
        assert writer.stats is not None
        assert writer.stats.engine == engine
        assert equal(load(state, path, engine=engine, direct=direct), state)
    assert equal(stock_load(STATE, path), STATE)
    shutil.rmtree(path)


def test_direct_is_used_or_refused(where: Path) -> None:
    """direct=True does direct I/O or says that it cannot; "auto" does without."""
    path = where / "direct"
    auto = save(STATE, path)
    assert auto.stats is not None
    try:
        writer = save(STATE, path, direct=True)
    except CheckpointException as caught:
        error = failure(caught)
        assert not auto.stats.direct
        assert isinstance(error, OSError)
        assert "O_DIRECT" in str(error)
        assert str(path) in str(error)
        assert 'direct="auto"' in str(error)
        with pytest.raises(CheckpointException, match="O_DIRECT"):
            load(STATE, path, direct=True)
    else:
        assert writer.stats is not None
        assert writer.stats.direct
    assert equal(load(STATE, path), STATE)
    shutil.rmtree(path)


@pytest.mark.parametrize("can_link", (True, False))
def test_unchanged_tensors_are_linked_cloned_or_written(where: Path, can_link: bool) -> None:
    frozen = torch.nn.Parameter(torch.randn(700, 500), requires_grad=False)
    clones = where.name in ("xfs.mnt", "btrfs.mnt")
    for step in range(3):
        state = {"frozen": frozen, "step": torch.tensor(step)}
        with nullcontext() if can_link else fault("link", err=errno.EMLINK, sticky=True):
            writer = save(state, where / f"step-{step}", unchanged="link")
        assert writer.stats is not None
        assert writer.stats.linked_files == (step > 0 and (can_link or clones))
        assert equal(stock_load(state, where / f"step-{step}"), state)
    shutil.rmtree(where / "step-0")
    assert equal(stock_load(state, where / "step-2"), state)
    for step in (1, 2):
        shutil.rmtree(where / f"step-{step}")


def test_disks_do_direct_io(tmp_path: Path) -> None:
    """Else nothing in this suite tests it."""
    with ext4(tmp_path) as disk:
        for folder in (disk / "checkpoint", tmp_path / "checkpoint"):
            writer = save(STATE, folder)
            assert writer.stats is not None
            assert writer.stats.direct, folder


def test_memory_has_no_direct_io(tmp_path: Path) -> None:
    with ramfs(tmp_path) as memory, pytest.raises(CheckpointException, match="O_DIRECT"):
        save(STATE, memory / "checkpoint", direct=True)


def test_read_only(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk:
        save(STATE, disk / "checkpoint")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert equal(load(STATE, disk / "checkpoint"), STATE)
        with pytest.raises(CheckpointException) as caught:
            save(STATE, disk / "checkpoint")
        assert "Read-only file system" in str(caught.value)
        assert str(disk / "checkpoint") in str(caught.value)
