"""dcpring.convert: every format to every other, bit by bit, read back by those whose formats they are."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _distributed
import _kinds
import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import (
    _C,
    Checkpointer,
    CheckpointError,
    CorruptCheckpointError,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    UntrustedCheckpointError,
    convert,
)
from dcpring.format.safetensors import DTYPES, NAMES
from dcpring.format.zip import ZipStream
from dcpring.sources.contents import open_contents
from dcpring.sources.dcp import share_out
from dcpring.sources.stream import WINDOW_BYTES, SourceItem

MIB = 1 << 20
SUFFIX = {"dcp": "", "torch": ".pt", "safetensors": ".safetensors"}
WRITTEN_ONLY = ("F8_E8M0", "F4")
"""What the safetensors package writes and does not read, as of 0.8."""


def all_tensors(format: str) -> dict[str, Tensor]:
    """Every dtype and shape that a format can hold, and one tensor that is larger than a window."""
    tensors = _kinds.of_all_dtypes() | _kinds.of_all_shapes()
    tensors["larger than a window"] = _kinds.random(torch.bfloat16, 3, 1031, 7001)
    assert tensors["larger than a window"].nbytes > WINDOW_BYTES
    if format == "safetensors":
        known = {dtype for dtype, called in NAMES.items() if called not in WRITTEN_ONLY}
        return {name: tensor for name, tensor in tensors.items() if tensor.dtype in known}
    return tensors


def write(format: str, tensors: dict[str, Tensor], path: Path) -> Path:
    """By the format's own program."""
    if format == "dcp":
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(path), no_dist=True)
    elif format == "ring":
        dcp.save(dict(tensors), storage_writer=RingWriter(path), planner=RingSavePlanner(), no_dist=True)
    elif format == "torch":
        torch.save(tensors, path)
    else:
        save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, path)
    return path


def can_be_copied(tensor: Tensor) -> bool:
    """Stock's reader copies what it has read, which torch 2.9 cannot with float4."""
    try:
        tensor.new_empty(1).copy_(tensor.new_empty(1))
    except NotImplementedError:
        return False
    return True


def read(format: str, path: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    if format == "safetensors":
        return load_file(path)
    if format == "torch":
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        mapped = torch.load(path, weights_only=True, mmap=True)
        loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
        _kinds.assert_same_bits(mapped, loaded)
        return loaded
    readers = list(_kinds.READERS) if all(map(can_be_copied, like.values())) else ["ring"]
    found = [{name: _kinds.poisoned(tensor) for name, tensor in like.items()} for _ in readers]
    for state, reader in zip(found, readers, strict=True):
        _kinds.load(state, path, reader)
    _kinds.assert_same_bits(found[0], found[-1])
    return found[0]


@pytest.mark.parametrize("goal", SUFFIX)
@pytest.mark.parametrize("origin", [*SUFFIX, "ring"])
def test_every_format_to_every_other(tmp_path: Path, origin: str, goal: str) -> None:
    narrow = "safetensors" if "safetensors" in (origin, goal) else "dcp"
    tensors = all_tensors(narrow)
    source = write(origin, tensors, tmp_path / f"source{SUFFIX.get(origin, '')}")
    target = tmp_path / f"target{SUFFIX[goal]}"
    report = convert(source, target)
    _kinds.assert_same_bits(read(goal, target, tensors), tensors)
    assert (report.source_format, report.target_format) == ("dcp" if origin == "ring" else origin, goal)
    assert (report.tensors, report.objects, report.left_out, report.cast) == (len(tensors), 0, 0, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name]), (
        "nothing is left over"
    )


@pytest.mark.parametrize("called", WRITTEN_ONLY)
def test_what_safetensors_writes_and_does_not_read(tmp_path: Path, called: str) -> None:
    if called not in DTYPES:
        assert not hasattr(torch, {"F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2"}[called])
        return
    tensors = {"w": _kinds.random(DTYPES[called], 3, 8), "v": _kinds.random(DTYPES[called], 5)}
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "dcp")
    _kinds.assert_same_bits(read("dcp", tmp_path / "dcp", tensors), tensors)
    convert(tmp_path / "dcp", tmp_path / "b.safetensors")
    ours, theirs = (
        safetensors.deserialize((tmp_path / name).read_bytes()) for name in ("b.safetensors", "a.safetensors")
    )
    assert sorted(ours, key=str) == sorted(theirs, key=str)


def test_four_bits_of_no_dimensions(tmp_path: Path) -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        assert "F4" not in DTYPES
        return
    torch.save({"s": _kinds.random(dtype)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'s': safetensors cannot hold a torch\.float4_e2m1fn_x2 of no dim"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


# ---- nested state dicts, objects, ties ----


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "name": "a b",
        "pairs": [(1, torch.ones(2)), {"x": torch.zeros(1)}],
        "tuple": (torch.full((3,), 2.0), "y"),
        "nothing": None,
        "empty": {},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def with_str_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): with_str_keys(entry) for key, entry in value.items()}
    return [with_str_keys(entry) for entry in value] if isinstance(value, list) else value


def test_a_nested_state_survives_the_way_through_dcp(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), with_str_keys(state))


def test_torch_to_torch_keeps_keys_that_are_no_str(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    assert report.objects > 0


def test_what_format_utils_writes_and_reads(tmp_path: Path) -> None:
    state = training_state()
    del state["tuple"], state["pairs"], state["empty"]
    torch.save(state, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours.pt")
    dcp_to_torch_save(tmp_path / "theirs", tmp_path / "theirs.pt")
    expected = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert same(torch.load(tmp_path / "ours.pt", weights_only=True), expected)
    convert(tmp_path / "a.pt", tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "back.pt")
    assert same(torch.load(tmp_path / "back.pt", weights_only=True), expected)


@pytest.mark.parametrize("origin", ["ring", "torch"])
def test_tied_tensors_stay_tied(tmp_path: Path, origin: str) -> None:
    shared = torch.randn(700, 700)
    tensors = {"a": shared, "b": torch.ones(3), "c": shared}
    source = write(origin, tensors, tmp_path / "source.pt")
    convert(source, tmp_path / "ckpt")
    records = [open_contents(tmp_path / "ckpt")[name].records[0].place for name in tensors]
    assert records[0] == records[2] != records[1]
    report = convert(source, tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["c"].data_ptr() != loaded["b"].data_ptr()
    assert report.tied == 1 and report.bytes == shared.nbytes + 12
    report = convert(source, tmp_path / "c.safetensors")
    _kinds.assert_same_bits(load_file(tmp_path / "c.safetensors"), {"a": shared, "b": tensors["b"]})
    assert report.tied == 1 and report.bytes == shared.nbytes + 12
    with safe_open(tmp_path / "c.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "c": "a", "dcpring.tied": '["c"]'}
    convert(tmp_path / "c.safetensors", tmp_path / "d.pt")
    loaded = torch.load(tmp_path / "d.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["c"].data_ptr()
    _kinds.assert_same_bits(loaded, tensors)
    convert(source, tmp_path / "only.pt", only="c")  # the name that was written first is left out
    _kinds.assert_same_bits(torch.load(tmp_path / "only.pt", weights_only=True), {"c": shared})


def test_tensors_that_only_torch_save_understands(tmp_path: Path) -> None:
    flat = torch.arange(3.0 * MIB)
    state = {
        "sparse": torch.eye(5).to_sparse(),
        "csr": torch.eye(5).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "w": torch.ones(2),
        "empty": torch.zeros(0, 3),
        "large": flat[MIB:],
        "turned": flat[: 2 * MIB].view(1024, 2048).t(),
        "half": torch.arange(5).half(),
    }
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    report = convert(tmp_path / "ckpt", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    for key, value in state.items():
        same = loaded[key].dequantize() if value.is_quantized else loaded[key].to_dense()
        assert torch.equal(same, value.dequantize() if value.is_quantized else value.to_dense()), key
    assert loaded["quantized"].is_quantized and loaded["csr"].layout == torch.sparse_csr
    assert (report.tensors, report.objects) == (5, 4)
    _kinds.save({"sparse": state["sparse"]}, tmp_path / "ring")
    convert(tmp_path / "ring", tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", weights_only=True)["sparse"].is_sparse


def test_parts_of_one_large_storage(tmp_path: Path) -> None:
    flat = torch.randn(12 * MIB)
    views = {"a": flat[: 4 * MIB].view(2048, 2048), "b": flat[4 * MIB :], "t": flat.view(3072, 4096).t()}
    torch.save(views, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    _kinds.assert_same_bits(load_file(tmp_path / "b.safetensors"), views)


def test_nothing_in_it(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", weights_only=True) == {}


# ---- sharded checkpoints, and numbers of files ----

WHOLE = {"rows": (4097, 1030), "columns": (257, 999)}


def _save_sharded(path: str, ring: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    whole = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    state = {
        "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
        "step": 3,
    }
    dcp.save(state, storage_writer=(RingWriter if ring else FileSystemWriter)(path))


@pytest.mark.parametrize("ring", [True, False])
def test_a_sharded_checkpoint(tmp_path: Path, ring: bool) -> None:
    _distributed.run(3, _save_sharded, str(tmp_path / "sharded"), ring)
    torch.manual_seed(3)
    expected = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    convert(tmp_path / "sharded", tmp_path / "a.safetensors", only=["rows", "columns"])
    _kinds.assert_same_bits(load_file(tmp_path / "a.safetensors"), expected)
    report = convert(tmp_path / "sharded", tmp_path / "same")
    assert len(report.files) == 3
    convert(tmp_path / "sharded", tmp_path / "seven", files=7)
    for name in ("same", "seven"):
        _kinds.assert_same_bits(read("dcp", tmp_path / name, expected), expected)


def _save_alone(path: str) -> None:
    rank = dist.get_rank()
    dcp.save({f"rank{rank}": torch.full((4,), float(rank))}, storage_writer=RingWriter(path), use_collectives=False)


def test_the_part_of_one_rank(tmp_path: Path) -> None:
    _distributed.run(2, _save_alone, str(tmp_path / "ckpt"))
    with pytest.raises(CheckpointError, match="name one of its ranks"):
        convert(tmp_path / "ckpt", tmp_path / "a.pt")
    convert(tmp_path / "ckpt", tmp_path / "a.pt", rank=1)
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["rank1"], torch.ones(4))


def _item(number: int, shape: tuple[int, ...]) -> SourceItem:
    return SourceItem(str(number), str(number), (str(number),), shape, torch.float32, torch.float32)


@pytest.mark.parametrize("files", [1, 2, 3, 8])
def test_files_get_the_same_number_of_bytes(files: int) -> None:
    items = [_item(0, (300_001, 33)), *(_item(number, (1000, 7)) for number in range(1, 500)), _item(501, (9, 500_000))]
    shares = share_out(items, files)
    sizes = [sum(piece.nbytes for piece in share) for share in shares]
    assert sum(sizes) == sum(item.nbytes for item in items)
    assert max(sizes) - min(sizes) < 3 * MIB
    for item in items:
        rows = [range(p.offsets[0], p.offsets[0] + p.lengths[0]) for share in shares for p in share if p.item is item]
        assert [row for part in rows for row in part] == list(range(item.shape[0]))  # type: ignore[index]


def test_an_even_checkpoint_is_what_both_readers_read(tmp_path: Path) -> None:
    tensors = {
        "big": _kinds.random(torch.float32, 5000, 2003),
        "small": torch.ones(5),
        "wide": _kinds.random(torch.int8, 1, 5 * MIB),
    }
    torch.save(tensors, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "ckpt", files=4)
    sizes = [(tmp_path / "ckpt" / name).stat().st_size for name in report.files]
    assert len(sizes) == 4 and max(sizes) - min(sizes) < 5 * MIB
    _kinds.assert_same_bits(read("dcp", tmp_path / "ckpt", tensors), tensors)
    into = {name: _kinds.poisoned(tensor) for name, tensor in tensors.items()}
    dcp.load(into, storage_reader=RingReader(tmp_path / "ckpt"), planner=RingLoadPlanner(), no_dist=True)
    _kinds.assert_same_bits(into, tensors)
    contents = open_contents(tmp_path / "ckpt")
    assert contents.writer == "dcpring" and len(contents["big"].records) > 1
    assert all(record.place.crcs for entry in contents.values() for record in entry.records)


def test_a_checkpointer_resumes_from_what_was_converted(tmp_path: Path) -> None:
    def training(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, resumed = training(1), training(2)
    Checkpointer(tmp_path / "a", saved).save(5)
    convert(tmp_path / "a" / "step-5", tmp_path / "b.pt")
    convert(tmp_path / "b.pt", tmp_path / "c" / "step-5", files=2)
    Checkpointer(tmp_path / "c", resumed).load()
    assert same(dict(resumed["model"].state_dict()), dict(saved["model"].state_dict()))
    assert same(resumed["optimizer"].state_dict(), saved["optimizer"].state_dict())


# ---- names, choices, casts ----


def test_names_are_chosen_and_changed(tmp_path: Path) -> None:
    state = {"model": {"_orig_mod.a": torch.ones(2), "b": torch.zeros(3)}, "opt": {"lr": 0.5}}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors", only="model.*", key_map={"prefixes": {"model.": ""}})
    assert sorted(load_file(tmp_path / "b.safetensors")) == ["_orig_mod.a", "b"]
    convert(tmp_path / "a.pt", tmp_path / "c.pt", key_map="normalize")
    assert same(
        torch.load(tmp_path / "c.pt", weights_only=True),
        {"model": {"a": torch.ones(2), "b": torch.zeros(3)}, "opt": {"lr": 0.5}},
    )
    convert(tmp_path / "b.safetensors", tmp_path / "ckpt", key_map={"prefixes": {"": "model."}})
    into = {"model": {"_orig_mod.a": torch.zeros(2), "b": torch.ones(3)}}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "ckpt"), no_dist=True)
    assert same(into["model"], state["model"])
    with pytest.raises(CheckpointError, match=r"a\.pt matches 'modl"):
        convert(tmp_path / "a.pt", tmp_path / "d.pt", only=["model.*", "modl.*"])
    with pytest.raises(CheckpointError, match="would call both"):
        convert(tmp_path / "a.pt", tmp_path / "d.pt", key_map={"model.b": "model._orig_mod.a"})
    with pytest.raises(CheckpointError, match="cannot be both a value and something that holds others"):
        torch.save({"x": torch.ones(1), "y": {"z": 1}}, tmp_path / "e.pt")
        convert(tmp_path / "e.pt", tmp_path / "ckpt2")
        convert(tmp_path / "ckpt2", tmp_path / "f.pt", key_map={"x": "y"})
    assert not (tmp_path / "d.pt").exists() and not (tmp_path / "f.pt").exists()


@pytest.mark.parametrize("goal", SUFFIX)
def test_floats_are_cast_as_torch_does(tmp_path: Path, goal: str) -> None:
    tensors = {
        "f32": torch.randn(3000, 4001),  # larger than a window, before and after
        "f64": torch.tensor([1e30, float("nan"), -float("inf"), -0.0, 1 / 3], dtype=torch.float64),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "half": torch.randn(3).half(),
        "int": torch.arange(5),
        "complex": torch.randn(2, dtype=torch.complex64),
        "scalar": torch.tensor(1.5),
    }
    torch.save(tensors, tmp_path / "a.pt")
    for name, dtype in (("bf16", torch.bfloat16), ("torch.float64", torch.float64)):
        target = tmp_path / f"b{SUFFIX[goal]}"
        report = convert(tmp_path / "a.pt", target, dtype=name, overwrite=True)
        expected = {key: t.to(dtype) if t.is_floating_point() else t for key, t in tensors.items()}
        _kinds.assert_same_bits(read(goal, target, expected), expected)
        assert report.cast == sum(a.dtype != b.dtype for a, b in zip(tensors.values(), expected.values(), strict=True))
    with pytest.raises(ValueError, match="no floating-point dtype"):
        convert(tmp_path / "a.pt", tmp_path / "c.pt", dtype="int64")


def test_a_cast_that_torch_cannot_do(tmp_path: Path) -> None:
    torch.save({"w": _kinds.random(torch.float4_e2m1fn_x2, 4)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'w' is of torch\.float4_e2m1fn_x2, which torch cannot cast"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", dtype="float32")


# ---- safetensors ----


def test_shards_as_hubs_have_them(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.w": torch.randn(250, 1000) for number in range(5)} | {"huge": torch.randn(3 * MIB)}
    torch.save(tensors, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "hub", to="safetensors", shard_bytes=2_000_000)
    names = [f"model-{number:05}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert list(report.files) == names
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert index["metadata"].pop("dcpring.crc32")
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    loaded = {name: load_file(tmp_path / "hub" / file)[name] for name, file in index["weight_map"].items()}
    _kinds.assert_same_bits({name: loaded[name] for name in tensors}, tensors)
    sizes = [(tmp_path / "hub" / name).stat().st_size for name in names]
    assert all(size < 2_010_000 for size in sizes[:3]) and sizes[3] > 12 * MIB
    for source in ("hub", "hub/model.safetensors.index.json"):
        convert(tmp_path / source, tmp_path / "b.pt", overwrite=True)
        _kinds.assert_same_bits(torch.load(tmp_path / "b.pt", weights_only=True), tensors)
    convert(tmp_path / "a.pt", tmp_path / "one", to="safetensors")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]


def test_shards_that_are_links_as_in_a_hubs_cache(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(700), "b": torch.randn(900)}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "blobs", to="safetensors", shard_bytes=3000)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..", "blobs", path.name))
    convert(tmp_path / "snapshot", tmp_path / "b.pt")
    _kinds.assert_same_bits(torch.load(tmp_path / "b.pt", weights_only=True), tensors)


def test_what_safetensors_lacks(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"objects: optimizer\.param_groups\.0\.lr, .* and \d+ more; .*--only"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    torch.save({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"no dtype for these: z \(torch.complex128\)"):
        convert(tmp_path / "c.pt", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_notes_are_kept(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"license": "x"})
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "license": "x"}


def safetensors_of(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), where: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(where)}


HOSTILE: dict[str, bytes] = {
    "cut off": safetensors_of({"a": entry()}, bytes(7)),
    "more data": safetensors_of({"a": entry()}, bytes(9)),
    "overlap": safetensors_of({"a": entry(), "b": entry(where=(4, 12))}, bytes(12)),
    "the same bytes": safetensors_of({"a": entry(), "b": entry()}, bytes(8)),
    "gap": safetensors_of({"a": entry(where=(4, 12))}, bytes(12)),
    "backwards": safetensors_of({"a": entry(shape=(-2,), where=(8, 0))}, bytes(8)),
    "huge shape": safetensors_of({"a": entry(shape=(1 << 40, 1 << 40))}, bytes(8)),
    "no ints": safetensors_of({"a": entry(shape=(2.0,))}, bytes(8)),
    "true is no int": safetensors_of({"a": entry(dtype="U8", shape=(True,), where=(0, 1))}, bytes(1)),
    "dtype": safetensors_of({"a": entry(dtype="F31")}, bytes(8)),
    "unhashable dtype": safetensors_of({"a": entry(dtype=["F32"])}, bytes(8)),
    "two of a name": safetensors_of(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
    ),
    "no object": safetensors_of(b"{}[]"),
    "a list": safetensors_of({"a": [1]}),
    "deep": safetensors_of(b'{"a":' + b"[" * 100_000),
    "huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    "header beyond the end": (100).to_bytes(8, "little") + b"{}",
    "notes": safetensors_of({"__metadata__": {"a": 1}}),
    "no utf-8": safetensors_of(b'{"\xff":1}'),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_safetensors(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        convert(path, tmp_path / "b.pt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_shape_of_very_many_sizes_is_refused_at_once(tmp_path: Path) -> None:
    """Their product alone would take minutes."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_of({"a": entry(shape=((1 << 61) - 1,) * 400_000)}, bytes(8)))
    start = time.process_time()
    with pytest.raises(CorruptCheckpointError, match="400000 dimensions"):
        convert(path, tmp_path / "b.pt")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "..", "", 3])
def test_an_index_that_leads_elsewhere(tmp_path: Path, file: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CorruptCheckpointError, match=r"no file beside it|no index"):
        convert(tmp_path, tmp_path / "b.pt")


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match=r"'b' is not in 'x\.safetensors'"):
        convert(path, tmp_path / "b.pt")
    path.write_text(json.dumps({"weight_map": {"a": "y.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match=r"y\.safetensors is not there, which it lists"):
        convert(path, tmp_path / "b.pt")
    for text in ("[]", "{}", '{"weight_map":', '{"weight_map": 3}'):
        path.write_text(text)
        with pytest.raises(CorruptCheckpointError, match="no index of safetensors files"):
            convert(path, tmp_path / "b.pt")


# ---- files of torch.save that lie ----


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_no_code_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.ones(2), "evil": Evil()}, tmp_path / "a.pt")
    with pytest.raises(UntrustedCheckpointError, match=r"could run code: it refers to .*print.*pass trusted=True"):
        convert(tmp_path / "a.pt", tmp_path / "b")
    dcp.save({"evil": Evil()}, storage_writer=FileSystemWriter(tmp_path / "ckpt"), no_dist=True)
    with pytest.raises(UntrustedCheckpointError):
        convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert "code ran" not in capsys.readouterr().out
    convert(tmp_path / "a.pt", tmp_path / "b.pt", trusted=True)
    assert "code ran" in capsys.readouterr().out


def archive_of(tmp_path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A file of torch.save, taken apart, changed, and put together again."""
    torch.save({"a": torch.arange(600.0), "b": torch.ones(3)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        entries = {info.filename.removeprefix("good/"): archive.read(info) for info in archive.infolist()}
    entries = {name: data for name, data in entries.items() if not name.startswith(".")}
    change(entries)
    path = tmp_path / "bad.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"bad/{name}", data)
    return path


def _replaced(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(entries: dict[str, bytes]) -> None:
        assert old in entries[name]
        entries[name] = entries[name].replace(old, new)

    return change


CHANGES: dict[str, Callable[[dict[str, bytes]], None]] = {
    "reaches beyond": _replaced("data.pkl", b"M\x58\x02\x85", b"M\x59\x02\x85"),  # the shape (600,)
    "short data": lambda entries: entries.update({"data/0": entries["data/0"][:-4]}),
    "no data": lambda entries: entries.pop("data/0") and None,
    "no pickle": lambda entries: entries.pop("data.pkl") and None,
    "half a pickle": lambda entries: entries.update({"data.pkl": entries["data.pkl"][:60]}),
    "byte order": lambda entries: entries.update({"byteorder": b"middle"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_hostile_files_of_torch_save(tmp_path: Path, what: str) -> None:
    path = archive_of(tmp_path, CHANGES[what])
    with pytest.raises(CheckpointError, match=r"bad\.pt"):
        convert(path, tmp_path / "out.pt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.pt", "good.pt"]


def test_an_archive_that_zipfile_wrote_is_read(tmp_path: Path) -> None:
    """The changes above are what is refused, not the way they are made."""
    convert(archive_of(tmp_path, lambda entries: None), tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["a"], torch.arange(600.0))


def test_compressed_data_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(600)}, tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as bad,
    ):
        for info in good.infolist():
            bad.writestr(info.filename, good.read(info))
    for trusted in (False, True):
        with pytest.raises(CheckpointError, match=r"a\.pt: its entry 'good/data\.pkl' is compressed"):
            convert(tmp_path / "a.pt", tmp_path / "b.pt", trusted=trusted)


@pytest.mark.parametrize("size", [0, 1, 30, 500, -1])
def test_files_that_are_cut_off(tmp_path: Path, size: int) -> None:
    torch.save({"a": torch.zeros(600)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"b\.pt"):
        convert(tmp_path / "b.pt", tmp_path / "c.pt")


def test_a_list_that_holds_another_very_often(tmp_path: Path) -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    torch.save({"o": value, "a": torch.ones(2)}, tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "b").objects == 1


def test_a_dict_that_holds_another_very_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpring.sources.torch_file._MOST_LEAVES", 1000)
    value: dict[str, Any] = {"a": 1}
    for _ in range(60):
        value = {"a": value, "b": value}
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="holds more than 1,000 values"):
        convert(tmp_path / "a.pt", tmp_path / "b")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "x", tmp_path / "y")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        convert(tmp_path, tmp_path / "y")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a dict"):
        convert(tmp_path / "list.pt", tmp_path / "y")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="must be loaded and saved again"):
        convert(tmp_path / "old.pt", tmp_path / "y")
    circle: dict[str, Any] = {}
    circle["x"] = circle
    torch.save(circle, tmp_path / "circle.pt")
    with pytest.raises(CheckpointError, match="holds itself"):
        convert(tmp_path / "circle.pt", tmp_path / "y")
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    with pytest.raises(CheckpointError, match=r"two of its values would be called 'a\.b'"):
        convert(tmp_path / "twice.pt", tmp_path / "y")


# ---- damage, and what is there before ----


@pytest.mark.parametrize("shape", [(5,), (3, 3 * MIB), "view"])
def test_a_damaged_file_of_torch_save(tmp_path: Path, shape: Any) -> None:
    """In a tensor of one window, of several, and in one that is a part of its storage."""
    storage = torch.randn((400, 300) if shape == "view" else shape)
    torch.save({"broken": storage[:, 10:20] if shape == "view" else storage, "x": torch.ones(1)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(_kinds.raw(storage)) + storage.nbytes - 3] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="'broken': its CRC-32 does not match"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_damage_in_what_is_no_plain_tensor(tmp_path: Path) -> None:
    """In the pickle that says what there is, and in the values of a sparse tensor."""
    sparse = torch.tensor([0.0, 7.25, 0.0, 9.5]).to_sparse()
    torch.save({"step": 123456789, "sparse": sparse, "x": torch.ones(1)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for found in ((123456789).to_bytes(4, "little"), _kinds.raw(sparse.values())):
        data = bytearray(whole)
        data[data.index(found)] ^= 1
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="its CRC-32 does not match"):
            convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


def test_entries_of_a_zip_file_that_overlap(tmp_path: Path) -> None:
    """They would make a small file take long to be checked."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data/0", bytes(1 << 16))
        inside = copy.copy(archive.infolist()[0])
        inside.filename, inside.header_offset = "a/data/1", 80  # zeros, which make a local header
        archive.filelist.append(inside)
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt")


@pytest.mark.parametrize("goal", [*SUFFIX, "shards"])
def test_damage_in_the_middle_leaves_the_target_as_it_was(tmp_path: Path, goal: str) -> None:
    options: dict[str, Any] = {"overwrite": True}
    if goal == "shards":
        options |= {"to": "safetensors", "shard_bytes": 20 * MIB}
    tensors = {f"t{number}": torch.randn(5 * MIB // 4) for number in range(20)}
    dcp.save(dict(tensors), storage_writer=RingWriter(tmp_path / "source"), no_dist=True)
    target = tmp_path / f"target{SUFFIX.get(goal, '')}"
    convert(tmp_path / "source", target, **options, only="t1")
    before = _bytes_of(target)
    contents = open_contents(tmp_path / "source")
    place = contents["t17"].records[0].place
    with (tmp_path / "source" / place.file).open("r+b") as file:
        file.seek(place.payload_offset + 99)
        file.write(b"\xa5\x5a\xa5\x5a")
    with pytest.raises(CorruptCheckpointError, match=r"'t17'.*CRC-32"):
        convert(tmp_path / "source", target, **options)
    assert _bytes_of(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", target.name]


def _bytes_of(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {str(file): file.read_bytes() for file in files}


def test_overwriting(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "b.pt")
    for name in ("x", "x.pt", "x.safetensors"):
        convert(tmp_path / "a.pt", tmp_path / name)
        with pytest.raises(CheckpointError, match=r"exists already; .*--overwrite"):
            convert(tmp_path / "b.pt", tmp_path / name)
        convert(tmp_path / "b.pt", tmp_path / name, overwrite=True)
        convert(tmp_path / name, tmp_path / "back.pt", overwrite=True)
        assert torch.equal(torch.load(tmp_path / "back.pt", weights_only=True)["a"], torch.zeros(2))
    assert len(list((tmp_path / "x").iterdir())) == 2
    convert(tmp_path / "x", tmp_path / "x", overwrite=True, dtype="float64")  # onto itself
    assert open_contents(tmp_path / "x")["a"].dtype == "float64"
    with pytest.raises(CheckpointError, match="is a directory, and a file is to be written"):
        convert(tmp_path / "a.pt", tmp_path / "x", to="torch", overwrite=True)
    with pytest.raises(CheckpointError, match="is a file, and a directory is to be written"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", to="dcp", overwrite=True)
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "a.pt", tmp_path / "empty")
    (tmp_path / "x" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"also holds 'notes\.txt'"):
        convert(tmp_path / "a.pt", tmp_path / "x", overwrite=True)
    (tmp_path / "link").symlink_to("x.pt")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        convert(tmp_path / "a.pt", tmp_path / "link", to="torch", overwrite=True)
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_arguments_that_contradict_each_other(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("x.pt", {"files": 3}),
        ("x", {"files": 0}),
        ("x.safetensors", {"shard_bytes": 5}),
        ("x", {"shard_bytes": 0}),
        ("x", {"to": "pickle"}),
        ("x.pt", {"to": "dcp", "shard_bytes": 7}),
    ]
    for name, options in wrong:
        with pytest.raises(ValueError, match="="):
            convert(tmp_path / "a.pt", tmp_path / name, **options)
    with pytest.raises(CheckpointError, match="ranks are parts of a DCP checkpoint"):
        convert(tmp_path / "a.pt", tmp_path / "x", rank=0)


# ---- large archives ----


def test_a_zip_of_more_than_4_gib(tmp_path: Path) -> None:
    """The zip's own numbers: offsets and sizes beyond 32 bits, and more entries than 16 bits count. Data are holes."""
    sizes = [(5 << 30) + 3, 10, (4 << 30) - 1, 7]
    made = ZipStream()
    path = tmp_path / "a.zip"
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            file.write(made.begin(f"archive/data/{number}", size))
            assert file.tell() % 64 == 0
            file.seek(size, os.SEEK_CUR)
            file.write(made.end(zlib.crc32(bytes(size)) if size < MIB else 1))
        for number in range(70_000):
            file.write(made.small(f"archive/s{number}", b"x"))
        file.write(made.small("archive/version", b"3\n"))
        file.write(made.directory())
        assert file.tell() == made.position
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        assert [info.file_size for info in infos[:4]] == sizes and len(infos) == 70_005
        assert archive.read("archive/data/1") == bytes(10) and archive.read("archive/data/3") == bytes(7)
        assert archive.read("archive/s69999") == b"x"
    theirs = torch._C.PyTorchFileReader(str(path))
    assert theirs.get_record("data/3") == bytes(7) and theirs.get_record("s69999") == b"x"


# ---- memory ----

MEASURE = """
import sys
import torch.distributed.checkpoint
import dcpring
if len(sys.argv) > 1:
    dcpring.convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3] if len(sys.argv) > 3 else None)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def peak_bytes(*args: object) -> int:
    """Of a fresh process: pages of mapped files count, too. (ru_maxrss is the parent's, if that is larger.)"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, *map(str, args)], capture_output=True, check=True
    )
    return int(done.stdout) * 1024


def make_model(path: Path, mib: int) -> Path:
    """Tensors of 4 to 48 MiB, as a file of torch.save."""
    sizes = [4, 16, 48, 12, 16]
    tensors: dict[str, Tensor] = {}
    while (left := mib - sum(tensor.nbytes for tensor in tensors.values()) // MIB) > 0:
        size = min(sizes[len(tensors) % len(sizes)], left)
        tensors[f"layer.{len(tensors)}"] = torch.full((size * MIB // 4096, 1024), float(len(tensors)))
    torch.save(tensors, path)
    return path


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    idle = peak_bytes()
    make_model(tmp_path / "a.pt", 512)
    plain = peak_bytes(tmp_path / "a.pt", tmp_path / "ckpt") - idle
    (tmp_path / "a.pt").unlink()
    cast = peak_bytes(tmp_path / "ckpt", tmp_path / "b.safetensors", "bfloat16") - idle
    sanitizer = 64 * MIB if "DCPRING_SANITIZED" in os.environ else 0
    assert 64 * MIB < plain < 200 * MIB + sanitizer
    assert plain < cast < 260 * MIB + sanitizer


@pytest.mark.slow
@pytest.mark.parametrize("goal", SUFFIX)
@pytest.mark.parametrize("origin", SUFFIX)
def test_4_gib_in_512_mib_of_memory(tmp_path: Path, origin: str, goal: str) -> None:
    source = make_model(tmp_path / "a.pt", 4096)
    if origin != "torch":
        convert(source, tmp_path / f"b{SUFFIX[origin]}")
        source.unlink()
        source = tmp_path / f"b{SUFFIX[origin]}"
    assert peak_bytes(source, tmp_path / f"c{SUFFIX[goal]}") < 512 * MIB


# ---- anything at all ----


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(len(changed))
        kind = chance.randrange(4)
        if kind == 0:
            del changed[at : at + chance.choice([1, 2, 8])]
        elif kind == 1:
            changed[at:at] = chance.randbytes(chance.choice([1, 4]))
        else:
            changed[at] = chance.choice([0, 1, 127, 255, changed[at] ^ 1 << chance.randrange(8)])
    return bytes(changed)


def _mutate_pickle(source: Path, chance: random.Random) -> None:
    with zipfile.ZipFile(source) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(source, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, mutated(data, chance) if name.endswith("data.pkl") else data)


def _mutate_head(source: Path, chance: random.Random) -> None:
    data = source.read_bytes()
    source.write_bytes(mutated(data[:300], chance) + data[300:])


def _mutate_metadata(source: Path, chance: random.Random) -> None:
    (source / ".metadata").write_bytes(mutated((source / ".metadata").read_bytes(), chance))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("origin", "mutate"),
    [("torch", _mutate_pickle), ("torch", _mutate_head), ("dcp", _mutate_metadata), ("safetensors", _mutate_head)],
)
def test_garbled_sources_are_refused_or_converted(tmp_path: Path, origin: str, mutate: Any) -> None:
    tensors = {"a": torch.randn(20, 3), "b": torch.ones(7, dtype=torch.int8), "t": torch.randn(4, 5).t()}
    good = write(origin, tensors, tmp_path / f"good{SUFFIX[origin]}")
    source, chance, refused = tmp_path / f"bad{SUFFIX[origin]}", random.Random(7), 0
    for number in range(100):
        copy = shutil.copytree if good.is_dir() else shutil.copy
        copy(good, source)
        mutate(source, chance)
        target = tmp_path / f"target{list(SUFFIX.values())[number % 3]}"
        try:
            convert(source, target, overwrite=True)
        except (CheckpointError, OSError, MemoryError):
            refused += 1
        shutil.rmtree(source) if source.is_dir() else source.unlink()
        assert not [path.name for path in tmp_path.iterdir() if ".tmp" in path.name]
    assert refused > 30


# ---- durable files ----

FOUR_FILES: dict[str, Any] = {"ckpt": {"files": 4}, "model": {"to": "safetensors", "shard_bytes": 4000}}


@pytest.mark.parametrize("target", ["ckpt", "model"])
def test_files_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """None waits for the disk before the next is written; all are durable before the commit."""
    torch.save({str(n): torch.randn(1000) for n in range(4)}, tmp_path / "a.pt")
    syncs: list[Any] = []
    real = _C.FileWriter

    class Noting:
        def __init__(self, *arguments: Any) -> None:
            self._file = real(*arguments)

        def finish(self, given: Any = None) -> None:
            syncs.append(given)
            self._file.finish(given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr(_C, "FileWriter", Noting)
    convert(tmp_path / "a.pt", tmp_path / target, **FOUR_FILES[target])
    assert len(syncs) == 4 and type(syncs[0]) is _C.Syncs and set(map(id, syncs)) == {id(syncs[0])}


@pytest.mark.parametrize("target", ["ckpt", "model"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_file_that_cannot_be_made_durable(tmp_path: Path, target: str, nth: int) -> None:
    torch.save({str(n): torch.randn(1000) for n in range(4)}, tmp_path / "a.pt")
    _C.arm_fault("fsync", nth, errno.EIO, False)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            convert(tmp_path / "a.pt", tmp_path / target, **FOUR_FILES[target])
    finally:
        _C.disarm_fault()
    assert os.listdir(tmp_path) == ["a.pt"]
