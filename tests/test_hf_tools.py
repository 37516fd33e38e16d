"""ls, verify, diff, keys and convert take safetensors as they take checkpoints of DCP."""

from __future__ import annotations

import json
import os
from pathlib import Path

import _cli
import _distributed
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _hf import KINDS, PLACED, Tied, save_shards, tensors, with_crcs, write
from safetensors.torch import save_file, save_model

from dcpring import CheckpointError, CorruptCheckpointError, RingWriter, convert, diff_checkpoints, diff_keys, verify
from dcpring.format.safetensors import read_header
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
    assert len(report.notes) == 1 and "without checksums" in report.notes[0]
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
        where = read_header(path).tensors[name].end - 2
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
