"""Errors about files: the file first, what is wrong with it, where, and the cure."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import failure, save, stored
from fault._support import flip_bit

from dcpring import CorruptCheckpointError, RingHFReader, RingReader, RingSavePlanner, RingWriter, verify

MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    state = {"a": torch.ones(1000), "b": torch.arange(MIB, dtype=torch.float32)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(), no_dist=True)
    return path


def refusal(path: Path) -> str:
    return failure(lambda: dcp.load({"b": torch.zeros(MIB)}, storage_reader=RingReader(path), no_dist=True))


def test_damaged_bytes(checkpoint: Path) -> None:
    """The offset was taken for the tensor's, and the cure was verify's alone."""
    place = stored(checkpoint)["b"]
    file = checkpoint / place.relative_path
    begin = place.ring[2]
    at = begin + 2 * MIB + 5
    flip_bit(file, at)
    text = refusal(checkpoint)
    first, last = at // MIB * MIB, (at // MIB + 1) * MIB
    assert text.startswith(f"CorruptCheckpointError: {file}: 'b' (rank 0): bytes {first} to {last} of the file, ")
    assert f"{first - begin} to {last - begin} of this value, are damaged (CRC-32 is " in text
    assert "when they were written); load another checkpoint" in text


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _outside(file: Path) -> None:
    moved = file.parent.parent / "outside"
    shutil.move(file, moved)
    file.symlink_to(moved)


@pytest.mark.parametrize(
    ("change", "said"), ((_fifo, "a FIFO"), (_outside, "a symbolic link that leads out of the checkpoint"))
)
def test_what_is_no_file(checkpoint: Path, change: Callable[[Path], None], said: str) -> None:
    """A link was an "Invalid cross-device link", and a FIFO "missing"."""
    change(next(checkpoint.glob("*.distcp")))
    text = refusal(checkpoint)
    assert said in text and "cross-device" not in text
    assert said in verify(checkpoint).problems[0].what
    result = _cli.run("ls", checkpoint, "--files")
    assert said in result.out and "missing" not in result.out + result.err
    assert f"({said})" in result.err


def test_a_metadata_file_that_is_none(checkpoint: Path) -> None:
    _fifo(checkpoint / ".metadata")
    result = _cli.run("ls", checkpoint)
    assert result.status == 2 and f"{checkpoint}/.metadata: a FIFO, not a regular file" in result.err


def test_a_damaged_header(tmp_path: Path) -> None:
    file = tmp_path / "b.safetensors"
    file.write_bytes((8).to_bytes(8, "little") + b'{"a": 1}')
    with pytest.raises(CorruptCheckpointError) as caught:
        RingHFReader(file).read_metadata()
    assert str(caught.value).startswith(f"{file}: the header is damaged (")


class Called:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


@pytest.mark.parametrize("command", (("ls",), ("verify",), ("keys",), ("convert", "target.pt")))
def test_a_command_is_told_of_its_option(checkpoint: Path, command: tuple[str, ...]) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Called()))
    name, *others = command
    result = _cli.run(name, checkpoint, *(checkpoint.parent / other for other in others))
    assert result.status == 2
    assert "If you trust it, pass --trusted." in result.err
    assert "RingReader" not in result.err and result.err.count("--trusted") == 1


def test_verify_of_small_records(tmp_path: Path) -> None:
    """It said 0.00 GB/s."""
    save({str(number): torch.ones(2) for number in range(100)}, tmp_path)
    assert verify(tmp_path).summary().endswith(" records/s")
    save({"a": torch.ones(MIB)}, tmp_path)
    assert verify(tmp_path).summary().endswith(" GB/s")
