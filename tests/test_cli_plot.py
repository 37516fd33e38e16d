"""``dcpring plot``: the numbers, the picture, and what is left behind when it cannot be made."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import _cli
import _distributed
import _prepared
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcpring import RingWriter

WRITERS: dict[str, Any] = {"stock": FileSystemWriter, "ring": RingWriter}
PNG = b"\x89PNG\r\n\x1a\n"


def _save_uneven(path: str, writer: str) -> None:
    """Rank 1 holds three times as much as rank 0."""
    rank = dist.get_rank()
    count = 1000 * (1 + 2 * rank)
    dcp.save({f"model.{rank}": torch.ones(count), f"c{rank}": torch.ones(10)}, storage_writer=WRITERS[writer](path))


@pytest.mark.parametrize("writer", WRITERS)
def test_numbers(tmp_path: Path, writer: str) -> None:
    _distributed.run(2, _save_uneven, str(tmp_path), writer)
    result = _cli.run("plot", tmp_path, "--json")
    document = json.loads(result.out)
    assert result.status == 0
    assert set(document) == {"checkpoint", "output", "imbalance", "ranks", "components", "files", "largest"}
    assert document["ranks"] == [{"rank": 0, "bytes": 4040}, {"rank": 1, "bytes": 12040}]
    assert document["imbalance"] == pytest.approx(12040 / 8040)
    assert document["components"] == {"model": 16000, "c0": 40, "c1": 40}
    assert [file["components"] for file in document["files"]] == [{"model": 4000, "c0": 40}, {"model": 12000, "c1": 40}]
    assert document["largest"][0] == {"key": "model.1", "bytes": 12000, "chunks": 1, "ranks": [1]}
    assert document["output"] is None and len(_cli.files_in(tmp_path)) == 3


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
def test_pictures(tmp_path: Path, suffix: str) -> None:
    names = {"model": torch.ones(9), "a$b^{_c": torch.ones(9), "_hidden": torch.ones(9), "": torch.ones(9)}
    state = names | {f"c{i}.\x1b\ud800": torch.ones(i + 1) for i in range(12)} | {"o" * 3000: 1}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    target = tmp_path / f"out{suffix}"
    target.write_bytes(b"old")
    result = _cli.run("plot", tmp_path / "c", "--output", target)
    assert result.status == 0 and result.out.startswith(f"{target}: ") and not result.err
    data = target.read_bytes()
    assert data.startswith(PNG) if suffix.lower() == ".png" else b"</svg>" in data[-20:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", target.name]
    assert _cli.run("plot", tmp_path / "c", "-o", target).status == 0 and target.read_bytes() == data, "always the same"


def _many_ranks(path: Path, ranks: int) -> None:
    """A metadata file of many ranks, most of whose files are missing."""
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    keys = {f"c{rank % 9}.{rank}": _StorageInfo(f"__{rank}_0.distcp", 0, 1000 + rank) for rank in range(ranks)}
    metadata = Metadata(
        {key: BytesStorageMetadata() for key in keys}, {}, {MetadataIndex(key): info for key, info in keys.items()}
    )
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for rank in range(0, ranks, 2):
        (path / f"__{rank}_0.distcp").write_bytes(b"x" * (1200 + rank))


@pytest.mark.parametrize("ranks", [0, 1, 20, 1000])
def test_many_ranks_and_missing_files(tmp_path: Path, ranks: int) -> None:
    _many_ranks(tmp_path / "c", ranks)
    result = _cli.run("plot", tmp_path / "c", "-o", tmp_path / "p.png")
    assert result.status == 0 and (tmp_path / "p.png").read_bytes().startswith(PNG)
    assert f"{ranks // 2} files missing" in result.out or ranks < 2
    width, height = (int.from_bytes((tmp_path / "p.png").read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert width == 1680 and 500 < height < 1800


def test_the_default_name(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "step-100"), no_dist=True)
    done = _cli.run_apart("plot", "step-100/", cwd=tmp_path)
    assert done.status == 0 and done.out.startswith("step-100.png: 8 B in 1 file by 1 rank"), done.err
    assert sorted(os.listdir(tmp_path)) == ["step-100", "step-100.png"]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "c"), no_dist=True)
    for name, problem in (("x.gif", "must end with .png, .svg or .pdf"), ("no/dir.png", "cannot be written")):
        result = _cli.run("plot", tmp_path / "c", "-o", tmp_path / name)
        assert result.status == 2 and problem in result.err and not result.out
    assert _cli.run("plot", tmp_path, "-o", tmp_path / "x.png").status == 2
    assert os.listdir(tmp_path) == ["c"]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "c"), no_dist=True)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = _cli.run("plot", tmp_path / "c", "-o", tmp_path / "x.png")
    assert result.status == 2 and "pip install 'dcpring[plot]'" in result.err
    assert _cli.run("plot", tmp_path / "c", "--json").status == 0, "numbers need no matplotlib"


LIMITED = """
import resource, sys
from dcpring.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main())
"""


def test_a_full_disk_leaves_the_old_picture(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "c"), no_dist=True)
    (tmp_path / "x.png").write_bytes(b"old")
    done = _prepared.run(["-c", LIMITED, "plot", str(tmp_path / "c"), "-o", str(tmp_path / "x.png")])
    assert done.returncode == 2 and "File too large" in done.stderr, done
    assert sorted(os.listdir(tmp_path)) == ["c", "x.png"] and (tmp_path / "x.png").read_bytes() == b"old"


def test_interrupted(tmp_path: Path) -> None:
    """While a picture of very many ranks is being made."""
    _many_ranks(tmp_path / "c", 1000)
    (tmp_path / "x.png").write_bytes(b"old")
    before = _cli.files_in(tmp_path)

    def drawing(process: int) -> bool:
        return "matplotlib/_path" in Path(f"/proc/{process}/maps").read_text()

    result = _cli.interrupted("plot", tmp_path / "c", "-o", tmp_path / "x.png", when=drawing)
    assert result.status == 130 and _cli.files_in(tmp_path) == before
