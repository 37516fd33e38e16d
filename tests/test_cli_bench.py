"""dcpring bench: it measures what it says, advises what can be used, and leaves nothing behind."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import _cli
import pytest
from fault._support import MIB, fault, mounted, mounted_on, run_python

import dcpring
from dcpring.cli import bench
from dcpring.cli._output import Output
from dcpring.options import IOOptions
from dcpring.tools.machine import bench as _bench
from dcpring.tools.machine.bench import Direction, Report, Result, Transfer, engines_here, ways

QUICK = ("--quick", "--size", "4M")
DIRECTIONS: tuple[Direction, ...] = ("save", "load")


def use(call: str, path: Path) -> Any:
    """Makes the writer or reader that was advised."""
    return eval(call, {"RingWriter": dcpring.RingWriter, "RingReader": dcpring.RingReader, "path": str(path)})


# ---- measuring ----


def test_measures_and_advises(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = _cli.run("bench", tmp_path, *QUICK)
    assert result.status == 0 and not result.err
    assert "save, synced" in result.out and "load, cold" in result.out
    assert "3 rounds of 4.0 MiB" in result.out
    calls = [line.strip() for line in result.out.splitlines() if line.startswith("  Ring")]
    assert [call.partition("(")[0] for call in calls] == ["RingWriter", "RingReader"]
    for call in calls:
        use(call, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_json(tmp_path: Path) -> None:
    document = json.loads(_cli.run("bench", tmp_path, *QUICK, "--json").out)
    assert document["size_bytes"] == 4 * MIB and document["rounds"] == 3 and document["cold"] is True
    tried = {(r["engine"], r["direct"], r["block_size_bytes"], r["queue_depth"]) for r in document["results"]}
    assert len(tried) == len(document["results"]) == 5
    assert ("uring", True, 4 * MIB, 8) in tried and ("threads", True, 4 * MIB, 8) in tried
    assert ("uring", False, 4 * MIB, 8) in tried
    for one in document["results"]:
        for direction in DIRECTIONS:
            numbers = one[direction]
            low, middle, high = (numbers[f"{name}bytes_per_second"] for name in ("lowest_", "", "highest_"))
            assert 0 < low <= middle <= high
            assert numbers["cpu_seconds_per_gib"] >= 0
    for direction in DIRECTIONS:
        use(document["best"][direction]["use"], tmp_path)


def test_engines(tmp_path: Path) -> None:
    report = _bench.measure(tmp_path, size=MIB, quick=True, engines=["threads"])
    assert {result.options.engine for result in report.results} == {"threads"}
    assert report.usual.engine == engines_here()[0]
    is_usual = report.usual.engine == "threads"
    assert ('engine="threads"' in report.call("save")) != is_usual


def test_a_size_that_the_time_allows(tmp_path: Path) -> None:
    size = _bench._fitting_size(tmp_path, pair_seconds=0.1, count=5, quick=True)
    assert size % _bench.SMALLEST_BYTES == 0
    assert size == pytest.approx(_bench.PART_BYTES * _bench._QUICK_SECONDS / 0.1 / 15, rel=0.1)
    assert _bench._fitting_size(tmp_path, pair_seconds=100, count=30, quick=False) == _bench.SMALLEST_BYTES
    assert _bench._fitting_size(tmp_path, pair_seconds=1e-3, count=5, quick=True) == _bench.LARGEST_BYTES


def test_the_grid() -> None:
    full = ways(["uring", "threads"], direct=True, quick=False)
    assert len(full) == len(set(full)) and len(full) > 20
    assert {options.workers for options in full} == {1, 2, 4}
    for direct in (True, False):
        grid = ways(["uring", "threads"], direct=direct, quick=True)
        assert IOOptions(engine="uring", direct=direct) in grid and IOOptions(engine="threads", direct=direct) in grid
        assert direct or not any(options.direct for options in grid)


# ---- advice ----

USUAL = IOOptions(engine="uring", direct=True)
SMALL = IOOptions(engine="uring", direct=True, block_size_bytes=MIB)
OTHER = IOOptions(engine="threads", direct=False, queue_depth=16, block_size_bytes=8 * MIB)


def report(rates: dict[IOOptions, tuple[float, float, float]], cold: bool = True) -> Report:
    """Rates in GB/s, of saves; loads are all alike."""
    results = []
    for options, rounds in rates.items():
        result = Result(options, MIB)
        result.transfers["save"] = [Transfer(MIB / (rate * 1e9), 0.1) for rate in rounds]
        result.transfers["load"] = [Transfer(1.0, 0.1) for _ in rounds]
        results.append(result)
    return Report(Path("."), MIB, 3, cold, USUAL, results)


@pytest.mark.parametrize(
    ("rates", "call"),
    [
        ({USUAL: (1.0, 1.1, 1.2), SMALL: (1.15, 1.3, 1.4)}, "RingWriter(path)"),
        ({USUAL: (2.0, 2.0, 2.0), SMALL: (2.05, 2.05, 2.05)}, "RingWriter(path)"),
        ({USUAL: (1.0, 1.1, 1.2), SMALL: (1.3, 1.4, 1.5)}, "RingWriter(path, block_size_bytes=1 << 20)"),
        (
            {USUAL: (1.0, 1.1, 1.2), SMALL: (1.3, 1.4, 1.5), OTHER: (1.45, 1.6, 1.7)},
            "RingWriter(path, block_size_bytes=1 << 20)",
        ),
        (
            {USUAL: (1.0, 1.1, 1.2), SMALL: (1.3, 1.4, 1.5), OTHER: (1.9, 2.0, 2.0)},
            'RingWriter(path, engine="threads", direct=False, queue_depth=16, block_size_bytes=8 << 20)',
        ),
        ({USUAL: (0.5, 2.0, 2.1), SMALL: (1.0, 1.1, 1.2)}, "RingWriter(path)"),
    ],
)
def test_the_fewest_options_that_are_as_fast(
    tmp_path: Path, rates: dict[IOOptions, tuple[float, float, float]], call: str
) -> None:
    made = report(rates)
    assert made.call("save") == call and made.call("load") == "RingReader(path)"
    use(call, tmp_path)


def test_numbers() -> None:
    result = report({USUAL: (1.0, 4.0, 2.0)}).results[0]
    assert result.rate("save") == pytest.approx(2e9)
    assert result.rates("save") == pytest.approx([1e9, 2e9, 4e9])
    assert result.cpu_seconds_per_gib("save") == pytest.approx(0.1 * 1024)


def test_the_fastest_ways_come_first() -> None:
    rates = {IOOptions(engine="uring", direct=True, queue_depth=depth): (float(depth),) * 3 for depth in range(8, 40)}
    text = io.StringIO()
    bench._show(report(rates), Output(text, text))
    saves = text.getvalue().partition("load, cold")[0]
    assert saves.count("uring ") == 32
    assert saves.index(" 39 ") < saves.index(" 38 ") < saves.index(" 8 ")


# ---- places ----


def test_memory_is_not_cold(tmp_path: Path) -> None:
    for kind in ("tmpfs", "ramfs"):
        with mounted_on(tmp_path / kind, "-t", kind, kind) as memory:
            result = _cli.run("bench", memory, *QUICK)
            assert result.status == 0 and "load, from the page cache" in result.out
            assert "loads are not cold" in result.out and not list(memory.iterdir())
    assert "direct" not in result.out, "ramfs has none"


def test_io_uring_refused(tmp_path: Path) -> None:
    with fault("uring_init", 1, errno.EPERM, sticky=True):
        document = json.loads(_cli.run("bench", tmp_path, *QUICK, "--json").out)
        refused = _cli.run("bench", tmp_path, *QUICK, "--engines", "threads,uring")
    assert {result["engine"] for result in document["results"]} == {"threads"}
    assert document["best"]["save"]["use"].count("engine=") == 0, "threads are what auto takes here"
    assert refused.status == 2 and "dcpring doctor says why" in refused.err and not refused.out


def test_too_little_space(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ext4", 40 * MIB, "-q", "-m", "0") as disk:
        result = _cli.run("bench", disk, "--quick", "--size", "64M")
        assert result.status == 2 and "pass a smaller --size" in result.err and str(disk) in result.err
        assert _cli.run("bench", disk, *QUICK).status == 0
        assert {path.name for path in disk.iterdir()} == {"lost+found"}


@pytest.mark.parametrize(
    ("call", "err", "says"),
    [("fallocate", errno.ENOSPC, "free space"), ("fdatasync", errno.EIO, "dmesg"), ("statfs", errno.EIO, "dmesg")],
)
def test_the_storage_fails(tmp_path: Path, call: str, err: int, says: str) -> None:
    with fault(call, 1, err, sticky=True):
        result = _cli.run("bench", tmp_path, *QUICK)
    assert result.status == 2 and os.strerror(err) in result.err and says in result.err
    assert not result.out and not list(tmp_path.iterdir())


def test_read_only_and_missing(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ext4", 40 * MIB, "-q") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        result = _cli.run("bench", disk, *QUICK)
    assert result.status == 2 and "read-only" in result.err
    result = _cli.run("bench", tmp_path / "nothing", *QUICK)
    assert result.status == 2 and "is no directory" in result.err


UNWRITABLE = """
import sys
from dcpring.cli import main
sys.stderr = sys.stdout
sys.exit(0 if main(["bench", sys.argv[1], "--quick", "--size", "4M"]) == 2 else 1)
"""


def test_unwritable(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    out = run_python(UNWRITABLE, str(tmp_path), without=("dac_override",))
    tmp_path.chmod(0o755)
    assert "Permission denied" in out and "check the permissions" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--size", "5"), "below 1 MiB"),
        (("--size", "many"), "is no size"),
        (("--engines", "threads,disk"), "'disk' is no engine"),
    ],
)
def test_wrong_arguments(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    result = _cli.run("bench", tmp_path, *args)
    assert result.status == 2 and says in result.err and not result.out
    assert not list(tmp_path.iterdir())


# ---- interrupted, in pipes and terminals ----


def test_interrupted(tmp_path: Path) -> None:
    def is_writing(_: int) -> bool:
        return any(path.stat().st_size > MIB for path in tmp_path.glob(".dcpring-bench-*/file"))

    result = _cli.interrupted("bench", tmp_path, "--quick", "--size", "512M", when=is_writing)
    assert result.status == 130 and "interrupted" in result.err
    assert not list(tmp_path.iterdir())


def test_in_a_pipe(tmp_path: Path) -> None:
    result = _cli.run_apart("bench", tmp_path, *QUICK, FORCE_COLOR="1")
    assert result.status == 0 and "\x1b" not in result.out and not result.err


def test_in_a_terminal(tmp_path: Path) -> None:
    result = _cli.run_in_terminal("bench", tmp_path, "--quick", "--size", "64M", "--engines", "threads")
    assert result.status == 0 and "GB/s" in result.out and "measuring" in result.plain
    assert not list(tmp_path.iterdir())
