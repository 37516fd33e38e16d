"""JSON that nobody would write, wherever it is read: an error in words, and from a command one line and status 2."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _cli import run
from fault._support import failure
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import Checkpointer, CorruptCheckpointError, RingReader, RingWriter
from dcpring.base import strict_json

DEEP = b"[" * 200_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(path, key_map={"a": "b"}), no_dist=True)
    return path


def deep_trailer(path: Path) -> None:
    """Of ``.metadata``, with a right CRC."""
    data = (path / ".metadata").read_bytes()
    note_bytes, _, magic = struct.unpack("<II8s", data[-16:])
    body = data[: -16 - note_bytes] + DEEP
    (path / ".metadata").write_bytes(body + struct.pack("<II8s", len(DEEP), zlib.crc32(body), magic))


def test_nested_too_deeply() -> None:
    for text in (DEEP, b'{"a":' * 200_000, DEEP.decode()):
        with pytest.raises(ValueError, match="nested too deeply"):
            strict_json.loads(text)


def test_metadata(checkpoint: Path) -> None:
    """It was a RecursionError of 40 lines, and status 1: the verdict that a checkpoint is damaged."""
    deep_trailer(checkpoint)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"b": torch.zeros(2)}, storage_reader=RingReader(checkpoint), no_dist=True)
    assert "nested too deeply" in str(failure(caught.value))
    with pytest.raises(CorruptCheckpointError, match="nested too deeply"):
        RingReader(checkpoint)._read_metadata(checkpoint / ".metadata", False)
    for command in (("ls", checkpoint), ("convert", checkpoint, checkpoint.parent / "x.pt"), ("keys", checkpoint)):
        result = run(*command)
        assert result.status == 2
        assert "nested too deeply" in result.err
        assert len(result.err.splitlines()) == 1
    result = run("verify", checkpoint)
    assert result.status == 1
    assert "nested too deeply" in result.out + result.err


def test_key_map(checkpoint: Path) -> None:
    (checkpoint / ".dcpring.json").write_bytes(DEEP)
    result = run("keys", checkpoint)
    assert "nested too deeply" in result.err + result.out
    assert "Traceback" not in result.err
    assert result.status in (0, 2)


def test_what_steps_were_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"model": nn.Linear(2, 2)}) as checkpointer:
        checkpointer.save(1)
        (tmp_path / ".dcpring-left.json").write_bytes(DEEP)
        with pytest.raises(CorruptCheckpointError, match="nested too deeply"):
            checkpointer.latest()


@pytest.mark.parametrize("error", (RecursionError("maximum\nrecursion depth"), KeyError("x"), AssertionError()))
def test_what_escapes_a_command_is_no_verdict(checkpoint: Path, error: Exception, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("dcpring.cli.ls._show", fail)
    result = run("ls", checkpoint)
    assert result.status == 2
    assert result.err.startswith(f"dcpring: {type(error).__name__}: ")
    assert len(result.err.splitlines()) == 1
