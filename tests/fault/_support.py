"""What the tests of faults share: small checkpoints, how they are compared, faults, and damage."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _prepared
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import _C, RingHFWriter, RingReader, RingSavePlanner, RingWriter
from dcpring.format.metadata import load_metadata

StateDict = dict[str, Any]
MIB = 1 << 20


# ---- state dicts ----


def small_state(seed: int) -> StateDict:
    """A few MiB of everything: tensors of some blocks and of some bytes, strided, 0-dim, empty, and objects."""
    made = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(400_001, generator=made),
        "matrix": torch.randn(300, 200, generator=made).t(),
        "half": torch.randn(1000, generator=made).to(torch.bfloat16),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "optimizer": {"lr": 0.1 * seed, "betas": [0.9, 0.95]},
        "name": f"state {seed}",
    }


def tensor_state(seed: int, mib: int = 3, count: int = 2) -> StateDict:
    made = torch.Generator().manual_seed(seed)
    size = (mib * MIB // 4,)
    return {f"weight.{i}": torch.randint(0, 1 << 30, size, generator=made, dtype=torch.int32) for i in range(count)}


def blank(state: StateDict) -> StateDict:
    """A state dict of the same shapes, to load into."""
    return {key: _blank_value(value) for key, value in state.items()}


def _blank_value(value: Any) -> Any:
    if isinstance(value, dict):
        return blank(value)
    return torch.full_like(value, 77) if isinstance(value, torch.Tensor) else None


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return equal(a, b)
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def equal(a: StateDict, b: StateDict) -> bool:
    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)


# ---- saving and loading in this process ----


def save(state: StateDict, path: Path, planner: Any = None, **options: Any) -> RingWriter:
    writer = RingWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return writer


def load(like: StateDict, path: Path, **options: Any) -> StateDict:
    """The checkpoint in ``path``, into a new state dict of the shapes of ``like``."""
    state = blank(like)
    dcp.load(state, storage_reader=RingReader(path, **options), no_dist=True)
    return state


def stock_load(like: StateDict, path: Path) -> StateDict:
    state = blank(like)
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def save_model(state: StateDict, path: Path, **options: Any) -> None:
    """As safetensors."""
    dcp.save(state, storage_writer=RingHFWriter(path, **options), planner=RingSavePlanner(), no_dist=True)


def load_model(like: StateDict, path: Path) -> StateDict:
    return {name: tensor for file in model_files(path) - {INDEX} for name, tensor in load_file(path / file).items()}


def model_files(path: Path) -> set[str]:
    """What the model in ``path`` consists of, as loaders look for it."""
    if (path / "model.safetensors").exists():
        return {"model.safetensors"}
    return {INDEX, *json.loads((path / INDEX).read_text())["weight_map"].values()}


INDEX = "model.safetensors.index.json"


def failure(caught: CheckpointException, rank: int = 0) -> BaseException:
    """What one rank raised inside DCP's exception."""
    return caught.failures[rank][0]


def data_files(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if entry.name.endswith(".distcp")}


def needed_files(path: Path) -> set[str]:
    """What the checkpoint in ``path`` consists of."""
    metadata, _ = load_metadata(path / ".metadata")
    assert metadata.storage_data is not None
    return {".metadata", *(info.relative_path for info in metadata.storage_data.values())}


def storage_of(path: Path, key: str) -> Any:
    """The ``_StorageInfo`` of a key's first chunk."""
    metadata, _ = load_metadata(path / ".metadata")
    assert metadata.storage_data is not None
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


# ---- faults ----


@contextmanager
def fault(call: str | None, nth: int = 1, err: int = errno.EIO, sticky: bool = False) -> Iterator[None]:
    """The nth system call of that name (None: of any) fails; err 0 shortens a transfer instead."""
    _C.arm_fault(call, nth, err, sticky)
    try:
        yield
    finally:
        _C.disarm_fault()


@contextmanager
def quiet() -> Iterator[None]:
    """Pytest has DCP log every step; where there are thousands of saves or loads, that takes longer than they do."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def open_descriptors() -> int:
    _C.release_kept()  # their rings have descriptors
    return len(os.listdir("/proc/self/fd"))


def leaks_descriptors(before: int) -> bool:
    """Whether more are open than before; those that wait for the garbage collector do not count."""
    if open_descriptors() > before:
        gc.collect()
    return open_descriptors() > before


def flip_bit(file: Path, offset: int, bit: int = 0) -> None:
    """Flips a bit; a second call flips it back."""
    with open(file, "r+b") as stream:
        stream.seek(offset)
        value = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([value ^ 1 << bit]))


def drop_cache(path: Path) -> None:
    """Has the files of a checkpoint read from the disk the next time."""
    for name in data_files(path):
        with open(path / name, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- other processes ----


def python_command(script: str, *arguments: str, without: tuple[str, ...] = ()) -> list[str]:
    """How to run a script that may import what tests may.

    Args:
        without: capabilities that root gives up for it; an ordinary user has none.
    """
    drop = ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in without)]
    prefix = drop if without and os.geteuid() == 0 else []
    return [*prefix, sys.executable, "-W", "ignore", "-c", script, *arguments]


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])}


def run_python(
    script: str, *arguments: str, without: tuple[str, ...] = (), is_new: bool = False, timeout: float = 120
) -> str:
    """What a script prints; it must succeed.

    Args:
        without: capabilities that it gives up.
        is_new: it runs in a new interpreter, which ends as one; with capabilities to give up, it always does.
    """
    if without or is_new:
        command = python_command(script, *arguments, without=without)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout, env=python_environment()
        )
    else:
        done = _prepared.run(["-W", "ignore", "-c", script, *arguments], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def need_root(why: str) -> None:
    """Skips a test that an ordinary user cannot run."""
    import pytest  # not for the scripts that tests run

    if os.geteuid() != 0:
        pytest.skip(f"needs root: {why}")


# ---- mounted images ----


@contextmanager
def mounted(image: Path, kind: str, size_bytes: int, *mkfs_options: str) -> Iterator[Path]:
    """A new file system in a file, mounted through a loop device."""
    need_root("it mounts a file system")
    with open(image, "wb") as stream:
        stream.truncate(size_bytes)
    _command(f"mkfs.{kind}", *mkfs_options, str(image))
    with mounted_on(image.with_suffix(".mnt"), "-o", "loop", str(image)) as where:
        yield where
    image.unlink()


@contextmanager
def mounted_on(where: Path, *mount_arguments: str) -> Iterator[Path]:
    need_root("it mounts a file system")
    where.mkdir()
    _command("mount", *mount_arguments, str(where))
    try:
        yield where
    finally:
        _command("umount", str(where))
        where.rmdir()


def _command(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr or done.stdout}"
