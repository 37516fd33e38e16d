"""Looking into checkpoints from outside: entries, and parts of them, whoever wrote them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import _distributed
import _kinds
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import CheckpointError, CorruptCheckpointError, RingSavePlanner, RingWriter, verify
from dcpring.sources.contents import open_all, open_contents, rank_of_file

WRITERS: dict[str, Any] = {
    "stock": lambda path: {"storage_writer": FileSystemWriter(path)},
    "ring": lambda path: {"storage_writer": RingWriter(path)},
    "ring with planner": lambda path: {"storage_writer": RingWriter(path), "planner": RingSavePlanner()},
}


@pytest.mark.parametrize("writer", WRITERS)
def test_entries_and_whole_tensors(tmp_path: Path, writer: str) -> None:
    state: dict[str, Any] = {**_kinds.of_all_dtypes(), **_kinds.of_all_shapes()}
    dcp.save({"model": dict(state), "step": 7}, no_dist=True, **WRITERS[writer](tmp_path))
    contents = open_contents(tmp_path)
    assert set(contents) == {f"model.{name}" for name in state} | {"step"}
    for name, tensor in state.items():
        entry = contents[f"model.{name}"]
        assert (entry.shape, f"torch.{entry.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert _kinds.raw(contents.read(f"model.{name}")) == _kinds.raw(tensor)
    assert contents["step"].shape is None
    assert torch.load(contents.read_object("step")) == 7
    assert contents.writer == ("stock" if writer == "stock" else "dcpring")
    for name, size in contents.files.items():
        assert (tmp_path / name).stat().st_size >= size
        assert rank_of_file(name) == 0


def _save_sharded(path: str, writer: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(7 * 10.0).view(7, 10)
    state = {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "columns": distribute_tensor(whole, mesh, [Shard(1)])}
    dcp.save(state, **WRITERS[writer](path))


@pytest.mark.parametrize("writer", WRITERS)
def test_parts_across_chunks(tmp_path: Path, writer: str) -> None:
    _distributed.run(3, _save_sharded, str(tmp_path), writer)
    whole = torch.arange(7 * 10.0).view(7, 10)
    contents = open_contents(tmp_path)
    assert len(contents["rows"].records) == len(contents["columns"].records) == 3
    for key in ("rows", "columns"):
        for offsets, lengths in [((0, 0), (7, 10)), ((1, 2), (5, 7)), ((6, 9), (1, 1)), ((2, 3), (0, 4))]:
            expected = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            assert torch.equal(contents.read(key, offsets, lengths), expected)


def test_a_chunk_that_is_missing(tmp_path: Path) -> None:
    _distributed.run(3, _save_sharded, str(tmp_path), "ring")
    contents = open_contents(tmp_path)
    del contents["rows"].records[1]  # type: ignore[attr-defined]
    with pytest.raises(CorruptCheckpointError, match="'rows': its chunks do not make up the tensor"):
        contents.read("rows")


def _save_alone(path: str) -> None:
    rank = dist.get_rank()
    dcp.save({f"rank{rank}": torch.full((4,), float(rank))}, storage_writer=RingWriter(path), use_collectives=False)


def test_rank_local_metadata(tmp_path: Path) -> None:
    _distributed.run(2, _save_alone, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"use_collectives=False; name one of its ranks, \[0, 1\]"):
        open_contents(tmp_path)
    parts = open_all(tmp_path)
    assert [list(part) for part in parts] == [["rank0"], ["rank1"]]
    assert torch.equal(parts[1].read("rank1"), torch.ones(4))
    assert list(open_contents(tmp_path, rank=1)) == ["rank1"]


def test_damage_is_an_error(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1 << 18)}, storage_writer=RingWriter(tmp_path), no_dist=True)
    contents = open_contents(tmp_path)
    path = tmp_path / next(iter(contents.files))
    data = bytearray(path.read_bytes())
    data[contents["a"].records[0].place.payload_offset + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"'a'.*CRC-32"):
        contents.read("a")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_objects_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"evil": Evil()}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(CheckpointError, match="could run code"):
        open_contents(tmp_path).read_object("evil")
    assert isinstance(open_contents(tmp_path, trusted=True).read_object("evil"), io.BytesIO)


def test_keys_that_are_no_names(tmp_path: Path) -> None:
    dcp.save({"a": 5}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata[7] = metadata.state_dict_metadata.pop("a")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="a key is 7, which is no str"):
        open_contents(tmp_path)


def test_a_tensor_of_more_dimensions_than_the_core_knows(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones((1,) * 70)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert "more than 64 dimensions" in verify(tmp_path).problems[0].what
