"""``dcpring report``: the numbers, the page, and what a stranger's names can do in it: nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import _cli
import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from dcpring import RingWriter
from dcpring.base.text import visible
from dcpring.tools.inspect import page

WRITERS: dict[str, Any] = {"stock": FileSystemWriter, "ring": RingWriter}

BROWSER = shutil.which("chromium")


def _save_uneven(path: str, writer: str) -> None:
    """Rank 1 holds three times as much as rank 0."""
    rank = dist.get_rank()
    count = 1000 * (1 + 2 * rank)
    dcp.save({f"model.{rank}": torch.ones(count), f"c{rank}": torch.ones(10)}, storage_writer=WRITERS[writer](path))


def _data(path: Path) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    return json.loads(text)


@pytest.mark.parametrize("writer", WRITERS)
def test_numbers(tmp_path: Path, writer: str) -> None:
    checkpoint = tmp_path / "c"
    _distributed.run(2, _save_uneven, str(checkpoint), writer)
    result = _cli.run("report", checkpoint, "--json")
    document = json.loads(result.out)
    assert result.status == 0
    assert set(document) == {"checkpoint", "output", "imbalance", "ranks", "components", "files", "largest"}
    assert document["ranks"] == [{"rank": 0, "bytes": 4040}, {"rank": 1, "bytes": 12040}]
    assert document["imbalance"] == pytest.approx(12040 / 8040)
    assert document["components"] == {"model": 16000, "c0": 40, "c1": 40}
    assert [file["components"] for file in document["files"]] == [{"model": 4000, "c0": 40}, {"model": 12000, "c1": 40}]
    assert document["largest"][0] == {"key": "model.1", "bytes": 12000, "chunks": 1, "ranks": [1]}
    assert document["output"] is None and os.listdir(tmp_path) == ["c"]
    said = _cli.run("report", checkpoint, "--output", tmp_path / "page.html")
    assert said.status == 0 and "in 2 files by 2 ranks, the largest share 1.50 times the mean" in said.out
    shown = _data(tmp_path / "page.html")
    assert shown["items"][:2] == [
        ["model.1", "float32", [3000], 12000, 1, [1]],
        ["model.0", "float32", [1000], 4000, 1, [0]],
    ]
    assert shown["bytes"] == 16080 and shown["dtypes"] == [["float32", 16080]] and shown["others"] == [0, 0]
    assert [file[1:3] + file[4:] for file in shown["files"]] == [
        [0, "ok", 4040, [["model", 4000], ["c0", 40]]],
        [1, "ok", 12040, [["model", 12000], ["c1", 40]]],
    ]


EVIL = {
    "</script><script>document.title='broken'</script>": 1,
    "<img src=x onerror=alert(1)>": torch.ones(3),
    "\ud800\u202e": torch.ones(2),
    "a&amp;b.\u2028": torch.ones(4),
    "": torch.ones(1),
    "o" * 3000: torch.ones(1),
    **{f"layers.{number}.w": torch.ones(number + 1, dtype=torch.bfloat16) for number in range(40)},
}


def _saved(tmp_path: Path) -> Path:
    dcp.save(dict(EVIL), storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    assert _cli.run("report", tmp_path / "c", "-o", tmp_path / "page.html").status == 0
    return tmp_path / "page.html"


def test_names_are_data(tmp_path: Path) -> None:
    made = _saved(tmp_path)
    text = made.read_text(encoding="utf-8")
    assert text.count("<script") == 2 and "<img" not in text and "http" not in text.replace("http-equiv", "")
    assert {item[0] for item in _data(made)["items"]} == set(map(visible, EVIL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "page.html"]


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_in_a_browser(tmp_path: Path) -> None:
    """The page's own script runs, no name of the checkpoint does."""
    made = _saved(tmp_path)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=2000", "--window-size=390,800", "--dump-dom", made.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    dom = done.stdout
    assert "<title>broken</title>" not in dom and "46 keys" in dom
    assert dom.count("<tr>") > 46 and 'aria-label="layers ' in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom


def test_many_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest are named, the rest is one block."""
    monkeypatch.setattr(page, "MOST_KEYS", 10)
    shown = _data(_saved(tmp_path))
    assert len(shown["items"]) == 10 and shown["others"][0] == len(EVIL) - 10 and shown["keys"] == len(EVIL)
    assert sum(item[3] for item in shown["items"]) + shown["others"][1] == shown["bytes"]


def test_missing_files(tmp_path: Path) -> None:
    _distributed.run(2, _save_uneven, str(tmp_path / "c"), "stock")
    (tmp_path / "c" / "__1_0.distcp").unlink()
    result = _cli.run("report", tmp_path / "c", "-o", tmp_path / "page.html")
    assert result.status == 0 and "1 file missing or too short" in result.out
    assert [file[2] for file in _data(tmp_path / "page.html")["files"]] == ["ok", "missing"]


def test_the_default_name(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "step-100"), no_dist=True)
    done = _cli.run_apart("report", "step-100/", cwd=tmp_path)
    assert done.status == 0 and done.out.startswith("step-100.html: 8 B in 1 file by 1 rank"), done.err
    assert sorted(os.listdir(tmp_path)) == ["step-100", "step-100.html"]


def test_what_cannot_be_made(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "c"), no_dist=True)
    result = _cli.run("report", tmp_path / "c", "-o", tmp_path / "no" / "page.html")
    assert result.status == 2 and "No such file or directory" in result.err and not result.out
    assert _cli.run("report", tmp_path, "-o", tmp_path / "x.html").status == 2
    assert os.listdir(tmp_path) == ["c"]
