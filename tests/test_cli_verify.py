"""``dcpring verify`` as people and scripts run it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _cli
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault._support import MIB, data_files, drop_cache, flip_bit, storage_of
from torch.distributed.checkpoint import FileSystemWriter

from dcpring import RingSavePlanner, RingWriter
from dcpring.sources.contents import open_contents


def options(writer: str, path: Path) -> dict[str, Any]:
    if writer == "stock":
        return {"storage_writer": FileSystemWriter(path)}
    return {"storage_writer": RingWriter(path), "planner": RingSavePlanner()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole")
    state = {"model": {"weight": torch.randn(300, 1000), "bias": torch.randn(1000)}, "step": 7}
    for writer in ("stock", "ring"):
        dcp.save(state, no_dist=True, **options(writer, folder / writer))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=("stock", "ring"))
def damaged(request: pytest.FixtureRequest, whole: Path, tmp_path: Path) -> Path:
    """A bit of model.bias is another."""
    path = Path(shutil.copytree(whole / request.param, tmp_path / "damaged"))
    info = storage_of(path, "model.bias")
    flip_bit(path / info.relative_path, info.offset + 2000)
    return path


def test_whole_ones(whole: Path) -> None:
    result = _cli.run("verify", whole / "ring", whole / "stock")
    assert result.status == 0 and not result.err
    for line, name in zip(result.out.splitlines(), ("ring", "stock"), strict=True):
        assert line.startswith(f"ok   {whole / name}: 1.2 MiB in 3 records of 1 file, ") and line.endswith(" GB/s")


def test_damage_is_status_1(damaged: Path, whole: Path) -> None:
    result = _cli.run("verify", damaged, whole / "ring")
    assert result.status == 1 and not result.err
    (file,) = data_files(damaged)
    assert f"BAD  {damaged}: 1 of 3 keys damaged" in result.out
    (line,) = [line for line in result.out.splitlines() if line.startswith("model.bias")]
    assert file in line and "its checksum does not match" in line
    assert "into a state dict without these keys" in result.out
    assert f"ok   {whole / 'ring'}" in result.out
    quick = _cli.run("verify", "--quick", damaged)
    assert quick.status == 0 and quick.out.endswith("structure and sizes only\n")


def test_json(damaged: Path, whole: Path) -> None:
    result = _cli.run("verify", "--json", damaged, whole / "stock")
    assert result.status == 1 and not result.err
    bad, good = json.loads(result.out)["checkpoints"]
    assert (bad["ok"], bad["checkpoint"], bad["keys"]) == (False, str(damaged), 3)
    (problem,) = bad["problems"]
    info = storage_of(damaged, "model.bias")
    assert (problem["key"], problem["file"]) == ("model.bias", info.relative_path)
    assert info.offset < problem["offset"] <= info.offset + 2000 < problem["offset"] + problem["length"]
    assert good["ok"] and not good["problems"] and good["bytes"] > 1_000_000


def test_what_cannot_be_looked_at_is_status_2(whole: Path, damaged: Path, tmp_path: Path) -> None:
    result = _cli.run("verify", tmp_path / "nothing", damaged, whole / "ring", whole)
    assert result.status == 2 and "does not exist" in result.err and "there are some in it: ring, stock" in result.err
    assert "BAD" in result.out and "ok " in result.out


@pytest.mark.parametrize("writer", ("stock", "ring"))
def test_metadata_that_cannot_be_read(whole: Path, tmp_path: Path, writer: str) -> None:
    path = Path(shutil.copytree(whole / writer, tmp_path / "x"))
    file = path / ".metadata"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)
    damaged = _cli.run("verify", path)
    file.unlink()
    missing = _cli.run("verify", path)
    for result in (damaged, missing):
        assert result.status == 1 and f"BAD  {path}: it cannot be read" in result.out and ".metadata" in result.out
        assert "Load an earlier checkpoint." in result.out


def test_many_problems_are_not_all_shown(tmp_path: Path) -> None:
    dcp.save({f"w{n:03}": torch.ones(3) for n in range(150)}, no_dist=True, **options("ring", tmp_path))
    (file,) = data_files(tmp_path)
    data = bytearray((tmp_path / file).read_bytes())
    for entry in open_contents(tmp_path).values():
        data[entry.records[0].place.payload_offset] ^= 1
    (tmp_path / file).write_bytes(data)
    result = _cli.run("verify", tmp_path)
    assert len(re.findall(r"^ *w\d\d\d ", result.out, re.MULTILINE)) == 100 and "and 50 more (--json" in result.out
    document = json.loads(_cli.run("verify", "--json", tmp_path).out)
    assert len(document["checkpoints"][0]["problems"]) == 150
    (tmp_path / file).unlink()
    result = _cli.run("verify", tmp_path)
    assert result.out.count("its file is missing") == 1 and "w000 and 149 more" in result.out
    assert re.search(rf"{file} +- +- +its file is missing", result.out) and "all others" not in result.out
    document = json.loads(_cli.run("verify", "--json", tmp_path).out)
    assert len(document["checkpoints"][0]["problems"]) == 150


def test_a_strangers_names(tmp_path: Path) -> None:
    dcp.save({"evil\x1b]0;x\x07": torch.ones(3)}, no_dist=True, **options("stock", tmp_path))
    (file,) = data_files(tmp_path)
    (tmp_path / file).unlink()
    result = _cli.run("verify", tmp_path)
    assert r"evil\x1b]0;x\x07" in result.out and "\x1b" not in result.out


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1 GiB: something to wait for."""
    path = tmp_path_factory.mktemp("big")
    state = {f"weight.{n}": torch.full((64 * MIB // 4,), float(n)) for n in range(16)}
    dcp.save(state, no_dist=True, storage_writer=RingWriter(path, sync_files=False))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("damaged", ("stock",), indirect=True)  # a process takes seconds to start
def test_in_a_pipe(damaged: Path, whole: Path) -> None:
    result = _cli.run_apart("verify", whole / "ring", damaged)
    assert result.status == 1 and not result.err and "\x1b" not in result.out


@pytest.mark.parametrize("damaged", ("ring",), indirect=True)
def test_in_a_terminal(damaged: Path, big: Path) -> None:
    drop_cache(big)
    result = _cli.run_in_terminal("verify", big, damaged)
    assert result.status == 1 and "\x1b[" in result.out
    assert "model.bias" in result.plain
    bars = [line for line in result.plain.replace("\r", "\n").splitlines() if line.lstrip().startswith("verify")]
    assert any("1.00G" in line for line in bars)


def test_ctrl_c_ends_it(big: Path) -> None:
    before = _cli.files_in(big)
    (name,) = data_files(big)
    drop_cache(big)
    result = _cli.interrupted("verify", *[big] * 30, when=lambda process: _cli.has_open(process, big / name))
    assert result.status == 130 and "interrupted" in result.err and "Traceback" not in result.err
    assert _cli.files_in(big) == before
