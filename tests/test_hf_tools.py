"""ls, verify, diff, keys and convert take safetensors as they take checkpoints of DCP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import _cli
import _distributed
import _kinds
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _hf import KINDS, PLACED, Tied, save_shards, stored_in, tensors, with_crcs, write
from safetensors.torch import load_file, save_file, save_model

from dcpring import (
    CheckpointError,
    CorruptCheckpointError,
    RingHFReader,
    RingWriter,
    convert,
    diff_checkpoints,
    diff_keys,
    verify,
)
from dcpring.sources.contents import open_contents


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left."""
    path = tmp_path_factory.mktemp("shards")
    _distributed.run(2, save_shards, str(path))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path: Path, kind: str) -> None:
    expected = tensors()
    if kind.startswith("stock"):  # which writes neither of them well
        del expected["scalar"], expected["empty"]
    path = write(tmp_path / "model", kind, expected)
    listed = json.loads(_cli.run("ls", "--json", path).out)
    assert {one["key"] for one in listed["keys"]} == set(expected)
    assert (listed["writer"], listed["totals"]["tensors"]) == ("safetensors", len(expected))
    data = sum(file["bytes"] for file in listed["files"])
    assert data == sum(tensor.nbytes for tensor in expected.values())
    assert {file["state"] for file in listed["files"]} == {"ok"}
    report = verify(path)
    assert report.ok and report.keys == report.records == len(expected) and report.bytes == data
    assert kind == "ours" or (len(report.notes) == 1 and "without checksums" in report.notes[0])
    assert kind != "ours" or report.notes == []
    assert _cli.run("verify", path).status == 0
    keys = json.loads(_cli.run("keys", "--json", path).out)
    assert {one["key"] for one in keys["keys"]} == set(expected)
    dcp.save(dict(expected), storage_writer=RingWriter(tmp_path / "dcp"), no_dist=True)
    assert not diff_checkpoints(path, tmp_path / "dcp")
    assert _cli.run("diff", path, tmp_path / "dcp").status == 0
    assert not diff_keys(expected, path)
    convert(path, tmp_path / "copy")
    assert not diff_checkpoints(tmp_path / "copy", tmp_path / "dcp")


def test_shards_of_ranks(shards: Path) -> None:
    listed = json.loads(_cli.run("ls", "--json", shards).out)
    assert {one["key"]: one["ranks"] for one in listed["keys"]}["rows"] == [0, 1]
    assert "written by 2 ranks" in _cli.run("ls", shards).out
    assert verify(shards).ok
    found = open_contents(shards)
    for name in PLACED:
        assert torch.equal(found.read(name), tensors()[name])


def test_a_shard_is_missing(shards: Path, tmp_path: Path) -> None:
    (first,) = shards.glob("shard-00001-*")
    os.link(first, tmp_path / first.name)
    os.link(first, tmp_path / first.name.replace("00001", "00003", 1))
    report = verify(tmp_path)
    assert not report.ok and "cannot be put together" in report.problems[0].what
    assert _cli.run("ls", tmp_path).status == 2


def test_verify_by_checksums(tmp_path: Path) -> None:
    given = {"small": torch.randn(9), "large": torch.randn(3 << 18), "none": torch.empty(0)}
    path = tmp_path / "model.safetensors"
    with_crcs(path, given)
    report = verify(tmp_path)
    assert report.ok and not report.notes
    for name in ("small", "large"):
        where = stored_in(path)[name].end - 2
        data = bytearray(path.read_bytes())
        data[where] ^= 4
        path.write_bytes(data)
        found = {problem.key for problem in verify(tmp_path).problems}
        assert found == ({"small"} if name == "small" else {"small", "large"})
        assert verify(tmp_path, quick=True).ok
    with pytest.raises(CorruptCheckpointError, match=r"CRC-32"):
        convert(tmp_path, tmp_path / "dcp")


@pytest.mark.parametrize("change", ("cut off", "missing", "index"))
def test_verify_finds_damage(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "model", "index")
    file = path / "model-00002-of-00003.safetensors"
    if change == "cut off":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "missing":
        file.unlink()
    else:
        (path / "model.safetensors.index.json").write_text("{}")
    report = verify(path)
    assert not report.ok and not report.keys
    where = "model.safetensors.index.json" if change != "cut off" else file.name
    assert report.problems[0].file == where
    assert _cli.run("verify", path).status == 1


def test_tied_names(tmp_path: Path) -> None:
    save_model(Tied(), str(tmp_path / "model.safetensors"))
    listed = json.loads(_cli.run("ls", "--json", tmp_path).out)
    assert len(listed["keys"]) == 2 and listed["files"][0]["records"] == 1
    assert verify(tmp_path).records == 1


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    for command in ("ls", "verify", "keys"):
        result = _cli.run(command, tmp_path)
        assert result.status == 2 and "several models; name one of a.safetensors, b.safetensors" in result.err
        assert _cli.run(command, tmp_path / "a.safetensors").status == 0
    with pytest.raises(CheckpointError, match=r"several models"):
        diff_keys({}, tmp_path)


# ---- converting into a model's folder ----

OTHERS = {"config.json": "{}", "tokenizer.json": '{"a": 1}', "README.md": "a model", "adapter_model.safetensors": "no"}


def folder_of(path: Path, kind: str | None) -> Path:
    """A model's folder with a configuration and a tokenizer, and with weights (None: without)."""
    if kind is None:
        path.mkdir()
    else:
        write(path, kind, {name: tensor + 1 for name, tensor in tensors().items()})
    for name, text in OTHERS.items():
        (path / name).write_text(text)
    return path


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    state = {name: _kinds.poisoned(tensor) for name, tensor in tensors().items()}
    dcp.load(state, storage_reader=RingHFReader(path), no_dist=True)
    return state


@pytest.fixture
def source(tmp_path: Path) -> Path:
    dcp.save(tensors(), storage_writer=RingWriter(tmp_path / "source"), no_dist=True)
    return tmp_path / "source"


@pytest.mark.parametrize("before", (None, "one file", "index"))
@pytest.mark.parametrize("shard_bytes, files", ((None, 1), (1 << 20, 2), (1 << 14, 3)))
def test_into_a_folder(tmp_path: Path, source: Path, before: str | None, shard_bytes: int | None, files: int) -> None:
    path = folder_of(tmp_path / "model", before)
    options: dict[str, Any] = {"to": "safetensors", "shard_bytes": shard_bytes}
    if before is not None:
        names = sorted(file.name for file in path.iterdir())
        with pytest.raises(CheckpointError, match=r"exists already.*--overwrite"):
            convert(source, path, **options)
        assert sorted(file.name for file in path.iterdir()) == names
    report = convert(source, path, **options, overwrite=before is not None)
    _kinds.assert_same_bits(weights_of(path), tensors())
    assert {name: (path / name).read_text() for name in OTHERS} == OTHERS
    index = [] if files == 1 else ["model.safetensors.index.json"]
    assert {file.name for file in path.iterdir()} == {*OTHERS, *report.files, *index}, "nothing is stale"
    assert len(report.files) == files


@pytest.mark.parametrize("before", ("one file", "index"))
@pytest.mark.parametrize("shard_bytes", (None, 1 << 14))
def test_a_failure_leaves_the_model(tmp_path: Path, source: Path, before: str, shard_bytes: int | None) -> None:
    path = folder_of(tmp_path / "model", before)
    names = sorted(file.name for file in path.iterdir())
    (data,) = source.glob("*.distcp")
    place = open_contents(source)["columns"].records[0].place
    with data.open("r+b") as file:
        file.seek(place.payload_offset + 7)
        file.write(b"x")
    with pytest.raises(CorruptCheckpointError, match="'columns'"):
        convert(source, path, to="safetensors", shard_bytes=shard_bytes, overwrite=True)
    assert sorted(file.name for file in path.iterdir()) == names
    _kinds.assert_same_bits(weights_of(path), {name: tensor + 1 for name, tensor in tensors().items()})


def test_what_was_killed_is_removed(tmp_path: Path, source: Path) -> None:
    path = folder_of(tmp_path / "model", None)
    left = path / ".model-00001-of-00003.safetensors.0123456789abcdef.tmp"
    left.write_text("half")
    convert(source, path, to="safetensors")
    assert not left.exists()


def test_a_checkpoint_of_dcp_is_no_models_folder(tmp_path: Path, source: Path) -> None:
    (source / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"also holds 'config\.json'"):
        convert(tmp_path / "a.safetensors", source, to="safetensors", overwrite=True)
    assert (source / ".metadata").exists()


def test_a_models_folder_is_no_checkpoint_of_dcp(tmp_path: Path, source: Path) -> None:
    path = folder_of(tmp_path / "model", "one file")
    with pytest.raises(CheckpointError, match=r"choose another name, or --to safetensors, which replaces the model"):
        convert(source, path, to="dcp", overwrite=True)


def test_exclude(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "x.safetensors"
    report = convert(source, target, exclude=["s*", "e*"], overwrite=True)
    assert set(load_file(target)) == {"rows", "columns", "whole", "one"} and report.left_out == 2
    report = convert(source, target, only=["rows", "one"], exclude="one", overwrite=True)
    assert set(load_file(target)) == {"rows"} and report.left_out == 5
    result = _cli.run("convert", "--overwrite", "--exclude", "rows", "--exclude", "col*", source, target)
    assert result.status == 0 and "2 left out" in result.out and "rows" not in load_file(target)
    result = _cli.run("convert", "--overwrite", "--exclude", "rowz", source, target)
    assert result.status == 2 and "no key of" in result.err and "'rowz'" in result.err
