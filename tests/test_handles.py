"""``_C.Tensors`` over time, and of sizes that no file can have: what Python may do between two calls of the core."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpring import _C

OPTIONS = ("auto", 2, 8, 4 << 20, 2, True, 1, None)
KEY = bytes(_C.DIGEST_KEY_BYTES)


@contextlib.contextmanager
def _writer(folder: Path) -> Iterator[_C.FileWriter]:
    file = _C.FileWriter(str(folder), "f", 0, OPTIONS)
    try:
        yield file
    finally:
        file.close()


def _written(handles: _C.Tensors, folder: Path) -> bytes:
    with _writer(folder) as file:
        storage = _C.StorageIndex(1)
        file.write_tensors(handles, storage)
        file.finish()
    offset, size = storage.get(0)[4:6]  # type: ignore[index]
    data = Path(folder, "f").read_bytes()[offset : offset + size]
    Path(folder, "f").unlink()
    return data


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "longer": lambda tensor: tensor.untyped_storage().resize_(1 << 24),
    "other memory": lambda tensor: tensor.set_(torch.arange(1000.0)),  # type: ignore[call-overload]
    "other data": lambda tensor: setattr(tensor, "data", torch.arange(1000.0)),
    "another shape": lambda tensor: tensor.resize_(10, 2, 2, 2, 2, 2, 2),
    "another dtype": lambda tensor: setattr(tensor, "data", torch.arange(500)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_is_what_the_tensor_is_by_then(change: str, tmp_path: Path) -> None:
    tensor = torch.zeros(1000)
    handles = _C.Tensors([tensor])
    CHANGES[change](tensor)
    assert _written(handles, tmp_path) == tensor.numpy().tobytes()
    assert handles.crcs() == [_C.crc32(tensor.numpy().tobytes())]


def _uses(folder: Path, handles: _C.Tensors, other: _C.Tensors) -> dict[str, Callable[[], Any]]:
    def write() -> None:
        with _writer(folder) as file:
            file.write_tensors(handles, _C.StorageIndex(1))

    def digest() -> None:
        with _writer(folder) as file:
            file.write_tensors(handles, _C.StorageIndex(1), None, None, KEY)

    memory = bytearray(4096)
    return {
        "write": write,
        "digest": digest,
        "copy": lambda: _C.copy_tensors(handles, other, b"\1", 1),
        "copy into": lambda: _C.copy_tensors(other, handles, b"\1", 1),
        "compare": lambda: _C.compare(handles, other, 0.0, 0.0),
        "sample": lambda: _C.samples(handles, KEY),
        "stripes": lambda: _C.fill_stripes([(0, 4096, 0)], [(0, (1000,), (0,))], handles, memory, 1),
    }


@pytest.mark.parametrize("use", _uses(Path(), _C.Tensors([]), _C.Tensors([])))
def test_what_has_no_memory_any_more_is_an_error(use: str, tmp_path: Path) -> None:
    """FSDP frees storages between steps; the addresses that were seen before are another's by then."""
    tensor = torch.ones(1000)
    handles, other = _C.Tensors([tensor]), _C.Tensors([torch.ones(1000)])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"plain|memory"):
        _uses(tmp_path, handles, other)[use]()
    assert handles.kinds() == b"\2" and handles.shared() == [] and handles.crcs() == [None]


def test_large_memory_that_is_gone(tmp_path: Path) -> None:
    """Which the allocator gives back to the kernel at once: to read it ends the process."""
    program = f"""
import torch
from dcpring import _C
tensor = torch.ones(50_000_000)
handles = _C.Tensors([tensor])
tensor.untyped_storage().resize_(0)
file = _C.FileWriter({str(tmp_path)!r}, "f", 0, {OPTIONS})
try:
    file.write_tensors(handles, _C.StorageIndex(1))
except ValueError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "tensor 0 is not plain CPU memory\n", ran.stderr


@pytest.mark.parametrize("count", [3, 4, 5])
def test_sizes_that_no_file_can_have(count: int, tmp_path: Path) -> None:
    """Four tensors of 2**62 bytes end where a file of 64-bit offsets begins again."""
    handles = _C.Tensors([torch.ones(1).expand(1 << 60) for _ in range(count)])
    with _writer(tmp_path) as file, pytest.raises(ValueError, match="too large") as caught:
        file.write_tensors(handles, _C.StorageIndex(count))
    assert caught.value.item == 1  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())
