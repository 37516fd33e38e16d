"""``dcpring ls``: on everybody's checkpoints, broken and hostile ones, in pipes and on terminals."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import _cli
import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import Checkpointer, RingSavePlanner, RingWriter

WRITERS: dict[str, Any] = {
    "stock": lambda path: {"storage_writer": FileSystemWriter(path)},
    "ring": lambda path: {"storage_writer": RingWriter(path), "planner": RingSavePlanner()},
}


def _state() -> dict[str, Any]:
    layers = {f"layers.{i}.{name}.weight": torch.randn(8, 4) for i in range(12) for name in ("up", "down")}
    return {"model": layers | {"layers.3.extra": torch.ones(3)}, "step": 7}


def _save_sharded(path: str, writer: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(64.0).view(16, 4)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.ones(5)}, **WRITERS[writer](path))


def _save_alone(path: str) -> None:
    rank = dist.get_rank()
    dcp.save({"w": torch.full((4,), float(rank))}, storage_writer=RingWriter(path), use_collectives=False)


@pytest.mark.parametrize("writer", WRITERS)
def test_keys_and_totals(tmp_path: Path, writer: str) -> None:
    dcp.save(_state(), no_dist=True, **WRITERS[writer](tmp_path))
    result = _cli.run("ls", tmp_path)
    lines = result.out.splitlines()
    assert result.status == 0 and not result.err and len(lines) == 2 + 26 + 3
    (line,) = (line for line in lines if line.startswith("model.layers.3.up.weight "))
    assert line.split()[1:7] == ["[8,", "4]", "float32", "128", "B", "1"]
    assert lines[-1].startswith("26 keys: 25 tensors, 1 object, ") and "in 26 chunks; 1 file of " in lines[-1]
    assert f"by {'stock' if writer == 'stock' else 'dcpring'}" in lines[-2]


@pytest.mark.parametrize("writer", WRITERS)
def test_json(tmp_path: Path, writer: str) -> None:
    _distributed.run(2, _save_sharded, str(tmp_path), writer)
    document = json.loads(_cli.run("ls", tmp_path, "--json").out)
    assert set(document) == {
        *("checkpoint", "writer", "format", "step", "world_size", "problem", "totals", "components", "files", "keys")
    }
    keys = {entry["key"]: entry for entry in document["keys"]}
    files = [file["file"] for file in document["files"]]
    assert keys["w"] == {
        "key": "w",
        "kind": "tensor",
        "shape": [16, 4],
        "dtype": "float32",
        "bytes": 256,
        "chunks": 2,
        "ranks": [0, 1],
        "files": sorted(files),
        "saved_by_rank": None,
        "refused": None,
    }
    totals = document["totals"]
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert (totals["keys"], totals["tensors"], totals["bytes"], totals["chunks"]) == (2, 2, 276, 3)
    assert (totals["files"], totals["file_bytes"], totals["ranks"]) == (2, sum(sizes), 2)
    assert document["components"]["w"] == {
        **{"keys": 1, "tensors": 1, "objects": 0, "bytes": 256, "chunks": 2, "kind": None, "type": None}
    }
    assert {file["rank"]: file["records"] for file in document["files"]} in ({0: 2, 1: 1}, {0: 1, 1: 2})
    assert all(file["state"] == "ok" and file["needed"] <= file["size"] for file in document["files"])
    assert "keys" not in json.loads(_cli.run("ls", tmp_path, "--json", "--files").out)


def test_choosing_keys(tmp_path: Path) -> None:
    dcp.save(_state(), no_dist=True, **WRITERS["stock"](tmp_path))

    def chosen(*patterns: str) -> set[str]:
        args = [part for pattern in patterns for part in ("--keys", pattern)]
        return {entry["key"] for entry in json.loads(_cli.run("ls", tmp_path, "--json", *args).out)["keys"]}

    assert chosen("step") == {"step"}
    assert chosen("model.layers.1") == {"model.layers.1.up.weight", "model.layers.1.down.weight"}
    assert chosen("*.1?.up.*", "st*") == {"model.layers.10.up.weight", "model.layers.11.up.weight", "step"}
    result = _cli.run("ls", tmp_path, "--keys", "step", "--keys", "[xyz]")
    assert result.status == 2 and "matches '[xyz]'" in result.err and not result.out


def test_depth_folds_layers_that_are_alike(tmp_path: Path) -> None:
    dcp.save(_state(), no_dist=True, **WRITERS["ring"](tmp_path))
    top = _cli.run("ls", tmp_path, "--depth", "1").out.splitlines()
    assert [line.split()[1] for line in top[:2]] == ["model", "step"] and "25 keys" in top[0]
    folded = _cli.run("ls", tmp_path, "--depth", "9").out
    assert "0-2,4-11 (11 x)" in folded and "11 x 128 B" in folded
    (extra,) = (line for line in folded.splitlines() if "extra" in line)
    assert "[3]" in extra and "12 B" in extra
    assert _cli.run("ls", tmp_path, "--depth", "0").status == 2


def test_files_that_are_missing_short_or_left_over(tmp_path: Path) -> None:
    _distributed.run(3, _save_sharded, str(tmp_path), "ring")
    files = sorted(tmp_path.glob("*.distcp"))
    files[0].unlink()
    with files[1].open("r+b") as file:
        file.truncate(10)
    (tmp_path / "__7_0.0123456789abcdef.distcp").write_bytes(b"x" * 100)
    (tmp_path / ".metadata.0123456789abcdef.tmp").write_bytes(b"x")
    result = _cli.run("ls", tmp_path, "--files")
    rows = [line.split() for line in result.out.splitlines()]
    states = {row[0]: row[-1] for row in rows if row and row[0].endswith((".distcp", ".tmp"))}
    assert states.pop(files[2].name).endswith("%")
    assert states == {
        files[0].name: "missing",
        files[1].name: "short",
        "__7_0.0123456789abcdef.distcp": "leftover",
        ".metadata.0123456789abcdef.tmp": "leftover",
    }
    assert result.status == 0
    assert f"1 data file missing: {files[0].name}" in result.err
    assert f"1 data file too short: {files[1].name}" in result.err


def test_files_that_other_checkpoints_share(tmp_path: Path) -> None:
    frozen = torch.nn.Parameter(torch.randn(600, 1000), requires_grad=False)
    for step in range(3):
        writer = RingWriter(tmp_path / f"step-{step}", unchanged="link")
        dcp.save({"frozen": frozen, "step": torch.tensor(step)}, storage_writer=writer, no_dist=True)

    def look() -> dict[str, Any]:
        return json.loads(_cli.run("ls", tmp_path / "step-2", "--json", "--files").out)

    document = look()
    files = {file["links"]: file for file in document["files"]}
    assert files.keys() == {1, 3}
    blocks = 512 * (tmp_path / "step-2" / files[3]["file"]).stat().st_blocks
    assert files[3]["disk_bytes"] == files[3]["shared_bytes"] == document["totals"]["shared_bytes"] == blocks
    assert files[1]["shared_bytes"] == 0 and blocks >= frozen.nbytes
    text = _cli.run("ls", tmp_path / "step-2", "--files").out
    (line,) = (line for line in text.splitlines() if line.startswith(files[3]["file"]))
    assert line.count("2.3 MiB") == 3
    assert "of which other checkpoints share 2.3 MiB" in text
    for step in range(2):
        shutil.rmtree(tmp_path / f"step-{step}")
    assert look()["totals"]["shared_bytes"] == 0
    assert "share" not in _cli.run("ls", tmp_path / "step-2").out


def test_rank_local_metadata(tmp_path: Path) -> None:
    _distributed.run(2, _save_alone, str(tmp_path))
    document = json.loads(_cli.run("ls", tmp_path, "--json").out)
    assert [(entry["key"], entry["saved_by_rank"]) for entry in document["keys"]] == [("w", 0), ("w", 1)]
    one = json.loads(_cli.run("ls", tmp_path, "--json", "--rank", "1").out)
    assert [entry["saved_by_rank"] for entry in one["keys"]] == [1]
    assert [file["state"] for file in one["files"]] == ["ok"], "the other rank's file is no leftover"
    assert "(rank 0)" in _cli.run("ls", tmp_path, "--depth", "1").out


def test_the_step_is_what_the_path_calls_one(tmp_path: Path) -> None:
    for name, step in (("checkpoint-12", 12), ("run-2026", None)):
        dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / name), no_dist=True)
        assert json.loads(_cli.run("ls", tmp_path / name, "--json").out)["step"] == step
        assert ("step 12" in _cli.run("ls", tmp_path / name).out) == (step is not None)


def test_what_a_checkpointer_noted(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    Checkpointer(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}).save(5)
    result = _cli.run("ls", tmp_path / "step-5")
    assert "step 5, 1 rank saved" in result.out and not result.err
    document = json.loads(_cli.run("ls", tmp_path / "step-5", "--json").out)
    assert (document["step"], document["world_size"]) == (5, 1)
    assert (document["components"]["model"]["kind"], document["components"]["model"]["type"]) == ("sharded", "Linear")


def test_a_manifest_that_is_none(tmp_path: Path) -> None:
    for number, value in enumerate(("{", '{"step": 1, "world_size": 1, "components": [3]}', {"a": 1}, {1: slice(3)})):
        path = tmp_path / str(number)
        dcp.save({"dcpring": value, "a": torch.ones(2)}, no_dist=True, storage_writer=FileSystemWriter(path))
        result = _cli.run("ls", path)
        assert result.status == 0 and result.out.count("\n") >= 4, result


def test_damaged_metadata(tmp_path: Path) -> None:
    dcp.save(_state(), no_dist=True, **WRITERS["ring"](tmp_path))
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[100] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    result = _cli.run("ls", tmp_path)
    assert result.status == 2 and "damaged" in result.err and not result.out


def _write(path: Path, tensors: dict[str, tuple[Any, Any, list[tuple[Any, Any]]]]) -> None:
    """A stock metadata file that says whatever is wanted."""
    metadata = Metadata({}, {}, {})
    for key, (shape, dtype, boxes) in tensors.items():
        chunks = []
        for offsets, lengths in boxes:
            chunk = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
            chunk.offsets, chunk.sizes = offsets, lengths
            chunks.append(chunk)
            metadata.storage_data[MetadataIndex(key, torch.Size(offsets))] = _StorageInfo("__0_0.distcp", 0, 10)
        entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(()), chunks)
        entry.size = shape
        entry.properties.dtype = dtype
        metadata.state_dict_metadata[key] = entry
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("shape", "dtype", "boxes"),
    [
        (("a", "b"), torch.float32, []),
        ((-1, 4), torch.float32, []),
        ((1 << 40, 1 << 40), torch.float32, []),
        ((2,), "float32", []),
        ((2.5,), torch.float32, []),
        ((4,), torch.float32, [((0, 0), (4,))]),
        ((4,), torch.float32, [((0,), ("x",))]),
    ],
)
def test_what_no_tensor_can_be(tmp_path: Path, shape: Any, dtype: Any, boxes: Any) -> None:
    _write(tmp_path / "c", {"k": (shape, dtype, boxes)})
    result = _cli.run("ls", tmp_path / "c")
    assert result.status == 2 and "contradicts itself" in result.err, result


def test_hostile_but_possible(tmp_path: Path) -> None:
    """Huge, many-dimensional and deep; nothing of it takes long, or memory."""
    huge, flat, row = ((1 << 60,), torch.uint8), ((1,) * 64, torch.int8), ((1 << 20,), torch.int8)
    tensors: dict[str, Any] = {
        "huge": (*huge, [((0,), (1 << 60,))]),
        "dims": (*flat, [((0,) * 64, (1,) * 64)]),
        ".".join(["deep"] * 20_000): ((1,), torch.int8, [((0,), (1,))]),
        **{".".join(["a"] * depth): ((1,), torch.int8, [((0,), (1,))]) for depth in range(1, 200)},
        "": ((1,), torch.int8, [((0,), (1,))]),
        "x\x1b[31m.\ud800.\u202e": ((1,), torch.int8, [((0,), (1,))]),
        "chunks": (*row, [((at,), (1,)) for at in range(1 << 17)]),
    }
    _write(tmp_path / "c", tensors)
    for args in ((), ("--depth", "100"), ("--files",), ("--json",)):
        began = time.monotonic()
        result = _cli.run("ls", tmp_path / "c", *args)
        assert result.status == 0 and time.monotonic() - began < (60 if "DCPRING_SANITIZED" in os.environ else 20), args
        assert not set(result.out) & {"\x1b", "\u202e"}
        assert len(result.out) < 3_000_000
    document = json.loads(result.out)
    assert document["totals"]["chunks"] == (1 << 17) + 204 and document["totals"]["bytes"] > 1 << 60


def test_in_a_terminal(tmp_path: Path) -> None:
    dcp.save(_state(), no_dist=True, **WRITERS["ring"](tmp_path))
    result = _cli.run_in_terminal("ls", tmp_path)
    assert result.status == 0 and "\x1b[" in result.out
    assert "├─ model.layers" in result.plain and "0-2,4-11 (11 x)" in result.plain and "└─ step" in result.plain
    assert all(len(line) <= 100 for line in result.plain.splitlines()[1:])
    plain = _cli.run_in_terminal("ls", tmp_path, NO_COLOR="1")
    assert "\x1b[3" not in plain.out and "├─ model.layers" in plain.plain


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    import subprocess

    dcp.save({f"k{i}": torch.ones(1) for i in range(3000)}, no_dist=True, **WRITERS["ring"](tmp_path))
    command = f"{' '.join(_cli.PROGRAM)} ls {tmp_path} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("key ") and not done.stderr
