"""The demo and the benchmark, as small as they get: each checks its own results and says so by its exit code."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcpring import demo

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    "DCPRING_SANITIZED" in os.environ,
    reason="they fork processes that have threads, in which AddressSanitizer's allocator may be locked",
)


def run(*command: str | Path) -> str:
    arguments = [sys.executable, "-W", "ignore", *map(str, command)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_demo(tmp_path: Path) -> None:
    out = run("examples/demo.py", "--steps", "1", "--after", "2", "--rounds", "1", "--dir", tmp_path)
    assert "RingWriter" in out
    assert not list(tmp_path.rglob("*.distcp"))


def test_demo_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small one: what it measures is compared, and of the damage each says what it does."""
    monkeypatch.setattr(demo, "LARGE", 2)
    monkeypatch.setattr(demo, "SMALL", 10)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    demo.main(str(tmp_path))
    out = capsys.readouterr().out
    assert "A state of 32 MiB in 12 tensors" in out
    assert "PyTorch: loads, and says nothing" in out
    assert re.search(r"dcpring: dcpring/__0_0\S+: 'model.layer\d.weight' .* are damaged", out)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_benchmark(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out = run(
        "benchmarks/save_load.py", "--quick", "--procs", "1", "--shapes", "small", "--dir", tmp_path, "--json", report
    )
    assert "dcpring" in out
    assert report.stat().st_size > 0


def test_planning_benchmark(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out = run("benchmarks/planning.py", "--quick", "--dir", tmp_path, "--json", report, "--png", tmp_path / "plot.png")
    assert "FSDP" in out
    results = json.loads(report.read_text())
    assert {entry["who"] for entry in results["medians"]} == {"stock", "dcpring"}
    assert results["growth"]["stock, cpu_seconds"] is not None


@pytest.mark.slow
def test_small_tensors_benchmark(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out = run("benchmarks/small_tensors.py", "--quick", "--dir", tmp_path, "--json", report)
    assert "dcpring storage and planners" in out
    assert report.stat().st_size > 0


@pytest.mark.slow
def test_background_benchmark(tmp_path: Path) -> None:
    out = run("benchmarks/background.py", "--tensors", "200", "--rounds", "1", "--folder", tmp_path)
    assert "stock" in out and "of the speed" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_staging_benchmark(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    out = run("benchmarks/staging.py", "--quick", "--dir", tmp_path, "--json", report, "--png", picture)
    rows = {row["way"]: row for row in json.loads(report.read_text())["rows"]}
    assert "RingStager" in out and rows["RingStager"]["descriptors"] == 1
    assert picture.stat().st_size > 0


def test_stripes_benchmark() -> None:
    out = run("benchmarks/stripes.py", "--ranks", "4", "--tensors", "20", "--rounds", "1")
    assert "rows" in out and "columns" in out


def test_quantised_benchmark(tmp_path: Path) -> None:
    out = run("benchmarks/quantised.py", "--quick", "--dir", tmp_path)
    assert "MXFP4" in out and "stock" in out
    assert not list(tmp_path.iterdir())


def test_anatomy(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    out = run("benchmarks/anatomy.py", "--path", "--json", report)
    assert "-> move/save/saving.py" in out
    found = json.loads(report.read_text())
    for call in ("save", "load"):
        numbers = found["calls"][call]
        assert numbers["distinct lines"] > numbers["changes of module"] >= numbers["modules"] > 5
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "python" / "dcpring").rglob("*.py"))
    assert sum(room["all"] for room in found["lines"].values()) == found["all lines"] == lines


def test_hsdp_example(tmp_path: Path) -> None:
    out = run("examples/hsdp.py", "--dir", tmp_path)
    assert "WRONG" not in out
    for writers in ("auto", "balanced", "split", "first_replica"):
        assert f"writers={writers!r}" in out
    assert out.count("refused") == 2
