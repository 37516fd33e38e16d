"""``dcpring trace``: phases by rank of saves that were made up, so that they are known, and of real ones."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import _cli
import _distributed
import _traces
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _traces import START, made, slow_sync, write

from dcpring import RingReader, RingWriter
from dcpring.tools.traces import TracedOperation, phases, read_operations, slowest_file


def _read(folder: Path, traces: list[dict[str, Any]]) -> TracedOperation:
    operations, _ = read_operations(write(folder, traces))
    assert len(operations) == 1
    return operations[0]


# ---- where the time went ----


@pytest.mark.parametrize("shift", [-0.2, 0.0, 0.2])
def test_a_slow_sync_on_one_rank(tmp_path: Path, shift: float) -> None:
    """A clock that is wrong changes nothing: only times of one rank are subtracted from each other."""
    operation = _read(tmp_path, slow_sync(shift))
    found = {phase.name: phase for phase in phases(operation)}
    assert list(found) == ["local plan", "global plan", "write", "commit"]
    assert [(name, phase.slowest) for name, phase in found.items()] == [
        ("local plan", 1),
        ("global plan", 0),
        ("write", 3),
        ("commit", 0),
    ]
    written = found["write"]
    assert written.took == {0: 500_000, 1: 500_000, 2: 500_000, 3: 2_100_000}
    assert written.waited == {0: 1_600_000, 1: 1_600_000, 2: 1_600_000}
    assert written.parts == {"fsync": 1_400_000, "write": 700_000} and list(written.parts) == ["fsync", "write"]
    assert found["commit"].waited == {1: 50_000, 2: 50_000, 3: 50_000}
    assert found["local plan"].waited == {0: 150_000, 2: 150_000, 3: 150_000}
    assert slowest_file(operation) == (3, "__3_0", 2_100_000, 1 << 30)


def test_times_at_once_count_once(tmp_path: Path) -> None:
    io = [("fill", 0.0, 0.4), ("fill", 0.2, 0.6), ("write", 0.1, 0.9), ("fsync", 0.8, 1.0)]
    (phase,) = phases(_read(tmp_path, [made(0, [("write", 0.0, 1.1)], io, world_size=1)]))
    assert phase.parts == {"write": 800_000, "fill": 600_000, "fsync": 200_000}


def test_many_ranks_fold(tmp_path: Path) -> None:
    traces = [made(rank, [("write", 0.0, 0.1 * (rank + 1))], world_size=20) for rank in range(20)]
    out = _cli.run("trace", *write(tmp_path, traces)).out
    assert ["write", "0.100", "1.100", "2.000", "rank", "19"] in [line.split()[:6] for line in out.splitlines()]
    assert "least" in out and "median" in out and "rank 3" not in out


def test_a_rank_that_failed_before_it_knew_the_name_is_found_by_time_and_place(tmp_path: Path) -> None:
    traces = slow_sync()
    traces[2] = made(2, [("local plan", 0.0, 0.1)], identity="its own", failed="local plan: ValueError: no")
    assert sorted(_read(tmp_path, traces).parts) == [0, 1, 2, 3]
    assert "failed on rank 2: local plan: ValueError: no" in _cli.run("trace", *sorted(tmp_path.glob("t.*"))).out


# ---- the command ----


def test_text_and_json(tmp_path: Path) -> None:
    paths = write(tmp_path, slow_sync())
    result = _cli.run("trace", *paths)
    assert result.status == 0 and not result.err
    lines = [line.split() for line in result.out.splitlines()]
    row = ["write", "0.500", "0.500", "0.500", "2.100", "rank", "3", "4.800"]
    assert [*row, "fsync", "1.400", "s,", "write", "0.700", "s"] in lines
    assert ["commit", "0.050", "-", "-", "-", "rank", "0", "0.150"] in lines
    assert "slowest file: __3_0 of rank 3: 1.0 GiB in 2.100 s, 0.51 GB/s" in result.out
    (operation,) = json.loads(_cli.run("trace", *paths, "--json").out)["operations"]
    assert operation["begin"] == START / 1e6 and operation["seconds"] == 2.45 and operation["world_size"] == 4
    written = next(phase for phase in operation["phases"] if phase["phase"] == "write")
    assert written["slowest"] == 3 and written["seconds"]["3"] == 2.1 and written["waited"]["0"] == 1.6
    assert operation["slowest_file"] == {"rank": 3, "file": "__3_0", "seconds": 2.1, "bytes": 1 << 30}


def test_a_real_save_of_three_ranks_one_of_which_has_a_slow_sync(tmp_path: Path) -> None:
    _distributed.run(3, _traces.save_traced, str(tmp_path), 2, 2000)
    _distributed.run(3, _traces.load_traced, str(tmp_path))
    paths = [tmp_path / f"t.{rank}.json" for rank in range(3)]
    operations = json.loads(_cli.run("trace", *paths, "--json").out)["operations"]
    assert [one["kind"] for one in operations] == ["save", "load"]
    found = {phase["phase"]: phase for phase in operations[0]["phases"]}
    assert found["write"]["slowest"] == 2 and found["write"]["parts"]["fsync"] >= 2.0
    assert found["write"]["waited"]["0"] > 1.0 and found["write"]["waited"]["1"] > 1.0
    assert found["global plan"]["slowest"] == found["commit"]["slowest"] == 0
    assert operations[0]["slowest_file"]["rank"] == 2
    assert "operation 2: load" in _cli.run("trace", *paths, "--operation", 2).out
    assert "operation 1: save" not in _cli.run("trace", *paths, "--operation", 2).out
    partly = _cli.run("trace", *paths[:2], "--operation", 1)
    assert "the traces of rank 2 of 3 are missing" in partly.out
    _distributed.run(3, _traces.load_alone, str(tmp_path), 1)
    result = _cli.run("trace", tmp_path)  # the folder
    assert result.out.count("operation ") == 3 and "1 rank" in result.out and "missing" not in result.out


def test_traces_are_read_without_torch(tmp_path: Path) -> None:
    paths = [str(path) for path in write(tmp_path, slow_sync())]
    code = f"import sys; from dcpring.cli import main; main(['trace', *{paths!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_folder_without_traces(tmp_path: Path) -> None:
    result = _cli.run("trace", tmp_path)
    assert result.status == 2 and "there are no traces (*.json) in" in result.err


def test_in_a_terminal(tmp_path: Path) -> None:
    result = _cli.run_in_terminal("trace", *write(tmp_path, slow_sync()), columns=120)
    assert result.status == 0 and "fsync 1.400 s" in result.plain


def test_a_strangers_text_is_escaped(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07$_{\n<script>"
    trace = made(0, [(evil, 0.0, 0.5), ("write", 0.5, 1.0)], world_size=1, failed=evil)
    trace["traceEvents"][2]["args"]["checkpoint"] = evil
    result = _cli.run("trace", *write(tmp_path, [trace]))
    assert result.status == 0 and r"\x1b]0;title\x07" in result.out and "\x1b" not in result.out + result.err


# ---- what goes wrong ----


def test_traces_of_two_runs_follow_each_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        dcp.save({"a": torch.ones(10)}, storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / f"{name}.json"))
    out = _cli.run("trace", tmp_path / "two.json", tmp_path / "one.json").out
    assert out.count("operation ") == 2 and "missing" not in out


def test_what_is_no_trace(tmp_path: Path) -> None:
    cases: dict[str, tuple[str, str]] = {
        "empty": ("", "not JSON"),
        "half": (json.dumps(slow_sync()[0])[:-40], "not JSON"),
        "deep": ("[" * 100_000, "not JSON"),
        "other": ('{"traceEvents": []}', "no trace of dcpring's"),
        "list": ("[]", "no trace of dcpring's"),
        "newer": ('{"otherData": {"dcpring_trace": 99}}', "another version"),
        "no events": ('{"otherData": {"dcpring_trace": 1}}', "'traceEvents' is missing"),
    }
    for name, (text, problem) in cases.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        result = _cli.run("trace", path)
        assert result.status == 2 and problem in result.err and str(path) in result.err and not result.out, name
    assert _cli.run("trace", tmp_path / "absent.json").status == 2
    assert _cli.run("trace", tmp_path).status == 2
    nothing = made(0, [("write", 0.0, 1.0)], world_size=1)
    nothing["traceEvents"] = []
    result = _cli.run("trace", *write(tmp_path, [nothing]))
    assert result.status == 2 and "there is no save or load" in result.err


def test_damaged_traces_end_in_messages(tmp_path: Path) -> None:
    """Any value of a trace replaced by any other: an answer, or a message; nothing else."""
    draw = random.Random(5)
    odd: list[Any] = [None, -1, 1e300, float("nan"), 1 << 90, "text", [], {}, True, "\ud800", -(1 << 70), 3]
    statuses = set()
    for _ in range(400):
        traces = slow_sync()
        victim: Any = traces[draw.randrange(4)]
        while True:
            keys = list(victim) if isinstance(victim, dict) else list(range(len(victim)))
            key = draw.choice(keys)
            if isinstance(victim[key], dict | list) and victim[key] and draw.random() < 0.9:
                victim = victim[key]
                continue
            victim[key] = draw.choice(odd)
            break
        result = _cli.run("trace", *write(tmp_path, traces))
        statuses.add(result.status)
        assert result.status in (0, 2) and "Traceback" not in result.err
    assert statuses == {0, 2}


def test_arguments(tmp_path: Path) -> None:
    paths = write(tmp_path, slow_sync())
    assert _cli.run("trace").status == 2
    assert "there are only 1" in _cli.run("trace", *paths, "--operation", 2).err


def test_reader_and_writer_traces_can_be_given_together(tmp_path: Path) -> None:
    """A save and a load of one process may have gone to two files."""
    state = {"a": torch.ones(10)}
    dcp.save(state, storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / "s.json"))
    dcp.load(state, storage_reader=RingReader(tmp_path / "c", trace=tmp_path / "l.json"))
    result = _cli.run("trace", tmp_path / "s.json", tmp_path / "l.json")
    assert result.status == 0 and "operation 1: save" in result.out and "operation 2: load" in result.out
