"""Records with one CRC over all their bytes, as stock writes them, that are read in parts."""

from __future__ import annotations

import itertools
import re
import zlib
from pathlib import Path

import _distributed
import _kinds
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import CorruptCheckpointError, RingReader, convert, diff_checkpoints
from dcpring.move.crc import RunningCrcs, buffer_at
from dcpring.plan.pieces import range_of_box
from dcpring.sources.contents import open_contents

ROWS, COLUMNS = 10, 1 << 20
"""Of a float32 tensor that is larger than a window."""
DAMAGE = pytest.mark.parametrize("row", [0, ROWS - 1])


@pytest.fixture(scope="module")
def tensor() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def save_damaged(path: Path, tensor: Tensor, row: int | None) -> Path:
    """As stock saves it, with one bit that is another in a row."""
    dcp.save({"small": torch.ones(3), "big": tensor}, storage_writer=FileSystemWriter(path), no_dist=True)
    if row is not None:
        (file,) = path.glob("*.distcp")
        with file.open("r+b") as out:
            out.seek(file.read_bytes().index(_kinds.raw(tensor[row])) + 4 * COLUMNS - 2)
            byte = out.read(1)[0]
            out.seek(-1, 1)
            out.write(bytes([byte ^ 1]))
    return path


# ---- sums ----


def test_parts_in_order_are_summed_up() -> None:
    data = bytes(range(200))
    sums = RunningCrcs()
    cuts = [0, 1, 77, 200]
    for expected, good in ((zlib.crc32(data), True), (zlib.crc32(data) ^ 1, False), (0, True)):
        told = [sums.add("r", a, data[a:b], 200, expected) for a, b in itertools.pairwise(cuts)]
        assert told == [True, True, good]
        if not good:  # whatever is read of it again
            assert not sums.add("r", 77, data[77:], 200, expected)
            sums = RunningCrcs()


def test_other_parts_are_not_summed_up() -> None:
    data = bytes(range(200))
    wrong = zlib.crc32(data) ^ 1
    for parts in ([(0, 50), (60, 200)], [(50, 200)], [(0, 50), (0, 60), (50, 200)], [(100, 200), (0, 100)]):
        sums = RunningCrcs()
        assert all(sums.add("r", a, data[a:b], 200, wrong) for a, b in parts), parts
    sums = RunningCrcs()  # two at a time; one of them from the beginning again
    assert sums.add("r", 0, data[:50], 200, wrong) and sums.add("s", 0, data[:9], 200, zlib.crc32(data))
    assert sums.add("r", 0, data[:70], 200, wrong) and sums.add("s", 9, data[9:], 200, zlib.crc32(data))
    assert not sums.add("r", 70, data[70:], 200, wrong)


def test_the_range_of_a_box() -> None:
    for sizes in ((4, 3, 2), (1, 3, 1), (5,), (2, 1, 2)):
        numbers = torch.arange(torch.Size(sizes).numel()).view(sizes)
        slices = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in sizes]
        for box in itertools.product(*slices):
            found = numbers[tuple(slice(*pair) for pair in box)].flatten()
            follows = torch.equal(found, torch.arange(len(found)) + found[0])
            bounds = range_of_box(sizes, tuple(a for a, _ in box), tuple(b - a for a, b in box))
            assert bounds == ((int(found[0]), int(found[-1]) + 1) if follows else None), (sizes, box)
    assert range_of_box((), (), ()) == (0, 1)


def test_memory_without_a_copy() -> None:
    data = torch.arange(5, dtype=torch.int16)
    buffer = buffer_at(data.data_ptr(), data.nbytes)
    data[4] = 7
    assert bytes(buffer) == _kinds.raw(data)
    assert len(buffer_at(0, 0)) == 0


# ---- what stock wrote, in parts ----


@DAMAGE
def test_a_load_that_casts(tmp_path: Path, tensor: Tensor, row: int) -> None:
    state = {"big": torch.zeros(ROWS, COLUMNS, dtype=torch.float64)}
    dcp.load(state, storage_reader=RingReader(save_damaged(tmp_path / "good", tensor, None)), no_dist=True)
    assert torch.equal(state["big"], tensor.double())
    reader = RingReader(save_damaged(tmp_path / "bad", tensor, row))
    error = _kinds.failure(lambda: dcp.load(state, storage_reader=reader, no_dist=True))
    assert re.match(r"CorruptCheckpointError: .*distcp: 'big' \(rank 0\): bytes \d+ to \d+ of the file, all of ", error)
    assert "already overwritten in the state dict: 'big'" in error


@DAMAGE
@pytest.mark.parametrize("goal", ["a.pt", "a.safetensors", "a"])
def test_conversion(tmp_path: Path, tensor: Tensor, row: int, goal: str) -> None:
    source = save_damaged(tmp_path / "source", tensor, row)
    with pytest.raises(CorruptCheckpointError, match=r"'big'.*all of this value, are damaged \(CRC-32") as caught:
        convert(source, tmp_path / goal)
    assert str(source) in str(caught.value)
    assert not (tmp_path / goal).exists()


@DAMAGE
def test_comparison(tmp_path: Path, tensor: Tensor, row: int) -> None:
    good = save_damaged(tmp_path / "good", tensor, None)
    bad = save_damaged(tmp_path / "bad", tensor, row)
    assert not diff_checkpoints(good, good)
    for found in (diff_checkpoints(bad, bad), diff_checkpoints(good, bad)):
        assert [one.key for one in found.tensors] == ["big"]
        assert "CRC-32" in found.tensors[0].problem


def test_rows_one_after_the_other(tmp_path: Path, tensor: Tensor) -> None:
    contents = open_contents(save_damaged(tmp_path, tensor, 2))
    for row in (5, *range(ROWS - 1)):  # a slice alone has no CRC
        contents.read("big", (row, 0), (1, COLUMNS))
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        contents.read("big", (ROWS - 1, 0), (1, COLUMNS))


def _save_columns(path: str, tensor: Tensor) -> None:
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"big": distribute_tensor(tensor, mesh, [Shard(1)])}, storage_writer=FileSystemWriter(path))


def test_shards_of_columns(tmp_path: Path, tensor: Tensor) -> None:
    """The windows are rows, of which each of the two records has a half."""
    _distributed.run(2, _save_columns, str(tmp_path / "source"), tensor)
    convert(tmp_path / "source", tmp_path / "good.pt")
    assert torch.equal(torch.load(tmp_path / "good.pt", weights_only=True)["big"], tensor)
    for file in (tmp_path / "source").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=rf"{file.name}.*'big'.*all of this value, are damaged"):
            convert(tmp_path / "source", tmp_path / "bad.pt")
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
