"""convert: the shards that HuggingFaceStorageWriter(save_distributed=True) leaves are one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _cli
import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcpring import CheckpointError, CorruptCheckpointError, RingReader, convert


def model() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(10, 8, generator=made),
        "columns": torch.randn(7, 5, generator=made),
        "both": torch.randn(6, 9, 4, generator=made),
        "uneven": torch.randn(1, generator=made).bfloat16(),
        "replicated": torch.randn(3, generator=made),
        "plain": torch.randn(5, generator=made).double(),
        "scalar": torch.tensor(3),
        "large": torch.randn(3000, 4000, generator=made),
    }


PLACED = {
    **{"rows": [Replicate(), Shard(0)], "columns": [Shard(1), Replicate()], "both": [Shard(0), Shard(1)]},
    **{"uneven": [Shard(0), Shard(0)], "replicated": [Replicate(), Replicate()], "large": [Shard(1), Shard(0)]},
}


def save_shards(path: str, mapping: dict[str, int] | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        name: distribute_tensor(tensor, mesh, PLACED[name]) if name in PLACED else tensor
        for name, tensor in model().items()
    }
    writer = dcp.HuggingFaceStorageWriter(path, fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.barrier()


@pytest.mark.parametrize("files", (1, 2))
def test_the_shards_of_all_ranks_are_one_model(tmp_path: Path, files: int) -> None:
    expected = model()
    mapping = {name: 1 + number % 2 for number, name in enumerate(expected)} if files == 2 else None
    _distributed.run(4, save_shards, str(tmp_path / "shards"), mapping)
    report = convert(tmp_path / "shards", tmp_path / "ckpt")
    assert (report.tensors, report.source_format) == (len(expected), "safetensors")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, storage_reader=RingReader(tmp_path / "ckpt"), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    convert(tmp_path / "shards", tmp_path / "one.safetensors", dtype="bf16")
    for name, tensor in load_file(tmp_path / "one.safetensors").items():
        wanted = expected[name]
        assert torch.equal(tensor, wanted.bfloat16() if wanted.is_floating_point() else wanted)
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "the target is no shard"


def shard(path: Path, rank: int, tensors: dict[str, tuple[Tensor, list[int]]], note: Any = None) -> Path:
    """As stock writes one, by hand."""
    path.mkdir(exist_ok=True)
    file = path / f"shard-{rank:05}-model-00001-of-00001.safetensors"
    offsets = {name: {"saved_offsets": where} for name, (_, where) in tensors.items()} if note is None else note
    notes = {"DCP_SHARDING_INFO": offsets if isinstance(offsets, str) else json.dumps(offsets), "DCP_VERSION": "1.0"}
    save_file({name: tensor for name, (tensor, _) in tensors.items()}, file, metadata=notes)
    return file


def test_one_shard_is_no_model(tmp_path: Path) -> None:
    first = shard(tmp_path / "x", 1, {"a": (torch.ones(2, 3), [0, 0])})
    shard(tmp_path / "x", 2, {"a": (torch.ones(2, 3), [2, 0])})
    with pytest.raises(CheckpointError, match=r"one rank's part of each tensor.*name the directory"):
        convert(first, tmp_path / "target")
    result = _cli.run("convert", first, tmp_path / "target")
    assert result.status == 2 and "name the directory" in result.err and not (tmp_path / "target").exists()


def test_a_single_rank_leaves_one_shard(tmp_path: Path) -> None:
    file = shard(tmp_path / "x", 1, {"a": (torch.ones(2, 3), [0, 0])})
    for source in (file, file.parent):
        convert(source, tmp_path / "target.safetensors", overwrite=True)
        assert load_file(tmp_path / "target.safetensors")["a"].shape == (2, 3)


@pytest.mark.parametrize(
    "shards, said",
    (
        ({1: (torch.ones(2), [0]), 3: (torch.ones(2), [4])}, "leave a gap: they hold 4 of 6 elements"),
        ({2: (torch.ones(2), [2])}, "leave a gap"),
        ({1: (torch.ones(3), [0]), 2: (torch.ones(3), [2])}, "overlap"),
        ({1: (torch.ones(2), [0]), 2: (torch.ones(2), [0])}, "overlap"),
        ({1: (torch.ones(2), [0]), 2: (torch.ones(2).half(), [2])}, "float32 and torch.float16"),
        ({1: (torch.ones(2), [0]), 2: (torch.ones(2, 1), [2, 0])}, "different numbers of dimensions"),
    ),
)
def test_shards_that_do_not_fit(tmp_path: Path, shards: dict[int, Any], said: str) -> None:
    for rank, (tensor, where) in shards.items():
        shard(tmp_path / "x", rank, {"a": (tensor, where), "b": (torch.ones(1), [rank - 1])})
    with pytest.raises(CorruptCheckpointError, match=f"'a'.*{said}"):
        convert(tmp_path / "x", tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "note",
    (
        *("{", "[]", "3", '{"a": {}}', '{"a": {"saved_offsets": 3}}', '{"a": {"saved_offsets": [-1]}}'),
        *('{"a": {"saved_offsets": [1.0]}}', '{"a": {"saved_offsets": [0, 0]}}', '{"a": {"saved_offsets": [true]}}'),
        *('{"b": {"saved_offsets": [0]}}', '{"a": {"saved_offsets": [9999999999999999999999]}}', "[" * 100000),
    ),
)
def test_damaged_notes(tmp_path: Path, note: str) -> None:
    file = shard(tmp_path / "x", 1, {"a": (torch.ones(2), [0])}, note)
    with pytest.raises(CorruptCheckpointError, match="DCP_SHARDING_INFO"):
        convert(file, tmp_path / "target")


def test_several_models_are_not_one(tmp_path: Path) -> None:
    shard(tmp_path / "x", 1, {"a": (torch.ones(2), [0])})
    save_file({"a": torch.ones(2)}, tmp_path / "x" / "other.safetensors")
    with pytest.raises(CheckpointError, match="several models"):
        convert(tmp_path / "x", tmp_path / "target")
