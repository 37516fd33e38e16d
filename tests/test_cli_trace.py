"""``dcpring trace``: the critical path of saves that were made up, so that it is known, and of real ones."""

from __future__ import annotations

import json
import os
import random
import sys
import time
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
from dcpring.tools.trace.critical import Analysis
from dcpring.tools.trace.read import read_operations

PNG = b"\x89PNG\r\n\x1a\n"


def _analysed(folder: Path, traces: list[dict[str, Any]]) -> Analysis:
    operations, _ = read_operations(write(folder, traces))
    assert len(operations) == 1
    return Analysis(operations[0])


def _path(analysis: Analysis, at_least: float = 0.005) -> list[tuple[int, str, float]]:
    return [(step.rank, step.name, round(step.took / 1e6, 3)) for step in analysis.path if step.took >= at_least * 1e6]


# ---- the analysis ----


def test_a_slow_sync_on_one_rank(tmp_path: Path) -> None:
    analysis = _analysed(tmp_path, slow_sync())
    assert _path(analysis) == [
        (1, "local plan", 0.2),
        (0, "global plan", 0.1),
        (3, "write", 2.1),
        (0, "commit", 0.05),
    ]
    written = next(step for step in analysis.path if step.name == "write")
    assert {name: took / 1e6 for name, took in written.parts.items()} == {"fsync": 1.4, "write": 0.7}
    waited = {(w.rank, w.by, w.name): round(w.took / 1e6, 3) for w in analysis.waited()}
    assert waited[0, 3, "write"] == waited[1, 3, "write"] == waited[2, 3, "write"] == 1.6
    assert waited[0, 1, "local plan"] == waited[3, 1, "local plan"] == 0.15
    assert waited[3, 0, "commit"] == 0.05 and (3, 3, "write") not in waited
    slowest = analysis.slowest_file()
    assert slowest is not None and (slowest.rank, slowest.name, slowest.took) == (3, "__3_0", 2_100_000)


@pytest.mark.parametrize("shift", [-0.2, -0.05, 0.05, 0.2])
def test_a_clock_that_is_wrong_does_not_change_the_path(tmp_path: Path, shift: float) -> None:
    analysis = _analysed(tmp_path, slow_sync(shift))
    assert analysis.moved == {3: round(-shift * 1e6)}
    steps = [(1, "local plan", 0.2), (0, "global plan", 0.1), (3, "write", 2.1), (0, "commit", 0.05)]
    assert _path(analysis) == steps
    told = _cli.run("trace", *sorted(tmp_path.glob("t.*"))).out
    assert f"the clock of rank 3 contradicts the coordinator's: its times are moved by {-shift:.3f} s" in told


def test_the_path_and_each_rank_make_up_the_whole(tmp_path: Path) -> None:
    analysis = _analysed(tmp_path, slow_sync())
    whole = analysis.operation.end - analysis.operation.begin
    assert sum(step.took for step in analysis.path) == whole
    for before, after in zip(analysis.path, analysis.path[1:], strict=False):
        assert before.end == after.begin
    for row in analysis.times():
        assert row.plan + row.wait + row.late + row.commit + sum(row.data.values()) == whole


def test_a_rank_that_comes_late_is_what_the_others_wait_for(tmp_path: Path) -> None:
    traces = [
        made(0, [("local plan", 0, 0.1), ("gather plans", 0.1, 1.0), ("global plan", 1.0, 1.1), ("write", 1.1, 1.2)]),
        made(1, [("local plan", 0.9, 1.0), ("scatter plans", 1.0, 1.1), ("write", 1.1, 1.2)]),
    ]
    analysis = _analysed(tmp_path, traces)
    assert _path(analysis)[:3] == [(1, "not begun", 0.9), (1, "local plan", 0.1), (0, "global plan", 0.1)]
    assert tuple(analysis.waited()[0]) == (0, 1, "not begun", 800_000)
    assert analysis.operation.missing == [2, 3]


def test_rounds_of_a_load(tmp_path: Path) -> None:
    """Rank 1 is late in the first round, rank 0 in the second; then rank 1 reads the longest."""
    plan = [("read metadata", 0.0, 0.1), ("local plan", 0.1, 0.2)]
    zero = [*plan, ("gather plans", 0.2, 0.2), ("global plan", 0.2, 0.2), ("scatter plans", 0.2, 0.2)]
    traces = [
        made(
            0,
            [*zero, ("read", 0.2, 1.2)],
            kind="load",
            waits=[("wait for all", 0.3, 0.5), ("wait for all", 0.9, 0.9)],
        ),
        made(
            1,
            [*plan, ("scatter plans", 0.2, 0.2), ("read", 0.2, 1.5)],
            kind="load",
            waits=[("wait for all", 0.5, 0.5), ("wait for all", 0.6, 0.9)],
        ),
    ]
    analysis = _analysed(tmp_path, traces)
    reads = [(rank, took) for rank, name, took in _path(analysis) if name == "read"]
    assert reads == [(1, 0.3), (0, 0.4), (1, 0.6)]


def test_times_at_once_count_once(tmp_path: Path) -> None:
    """While a worker fills a block, transfers go on beside it; only what is left over is waiting for the disk."""
    io = [("fill", 0.0, 0.4), ("fill", 0.2, 0.6), ("write", 0.1, 0.9), ("fsync", 0.8, 1.0)]
    analysis = _analysed(tmp_path, [made(0, [("write", 0.0, 1.1)], io, world_size=1)])
    (step,) = analysis.path
    assert {name: took / 1e6 for name, took in step.parts.items()} == {
        "fill": 0.6,
        "write": 0.2,
        "fsync": 0.2,
        "other": 0.1,
    }


def test_a_rank_that_failed_before_it_knew_the_name_is_found_by_time_and_place(tmp_path: Path) -> None:
    traces = slow_sync()
    traces[2] = made(2, [("local plan", 0.0, 0.1)], identity="its own", failed="local plan: ValueError: no")
    analysis = _analysed(tmp_path, traces)
    assert sorted(analysis.operation.parts) == [0, 1, 2, 3]
    assert "failed on rank 2: local plan: ValueError: no" in _cli.run("trace", *sorted(tmp_path.glob("t.*"))).out


# ---- the command ----


def test_text_and_json_and_pictures(tmp_path: Path) -> None:
    paths = write(tmp_path, slow_sync())
    result = _cli.run("trace", *paths)
    assert result.status == 0 and not result.err
    assert (
        "critical path: rank 1 local plan 0.200 s -> rank 0 global plan 0.100 s -> "
        "rank 3 write 2.100 s of which fsync 1.400 s, write 0.700 s -> rank 0 commit 0.050 s\n"
    ) in result.out
    lines = [line.split() for line in result.out.splitlines()]
    assert ["rank", "3", "write", "0.300", "2.100", "85.7", "%", "fsync", "1.400", "s,", "write", "0.700", "s"] in lines
    assert ["rank", "0", "rank", "3", "write", "1.600"] in lines
    assert "slowest file: __3_0 of rank 3" in result.out
    picture = tmp_path / "timeline.png"
    document = json.loads(_cli.run("trace", *paths, "--json", "--output", picture).out)
    (operation,) = document["operations"]
    assert operation["begin"] == START / 1e6 and operation["seconds"] == 2.45 and operation["world_size"] == 4
    steps = [(step["rank"], step["step"]) for step in operation["critical_path"] if step["seconds"]]
    assert steps == [(1, "local plan"), (0, "global plan"), (3, "write"), (0, "commit")]
    assert sum(step["percent"] for step in operation["critical_path"]) == pytest.approx(100)
    assert [row["rank"] for row in operation["ranks"]] == [0, 1, 2, 3]
    assert picture.read_bytes().startswith(PNG)
    drawn = tmp_path / "timeline.svg"
    assert _cli.run("trace", *paths, "--output", drawn).status == 0
    assert drawn.read_text().lstrip().startswith("<?xml")
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name or path.name.startswith(".")]


def test_a_real_save_of_three_ranks_one_of_which_has_a_slow_sync(tmp_path: Path) -> None:
    _distributed.run(3, _traces.save_traced, str(tmp_path), 2, 2000)
    _distributed.run(3, _traces.load_traced, str(tmp_path))
    paths = [tmp_path / f"t.{rank}.json" for rank in range(3)]
    operations = json.loads(_cli.run("trace", *paths, "--json").out)["operations"]
    assert [one["kind"] for one in operations] == ["save", "load"]
    path = operations[0]["critical_path"]
    longest = max(path, key=lambda step: step["seconds"])
    assert (longest["rank"], longest["step"]) == (2, "write") and 2.0 <= longest["parts"]["fsync"] < 2.5
    assert [step["rank"] for step in path if step["step"] in ("global plan", "commit")] == [0, 0]
    assert operations[0]["slowest_file"]["rank"] == 2
    waited = {(w["rank"], w["for"]): w["seconds"] for w in operations[0]["waits"] if w["step"] == "write"}
    assert waited[0, 2] > 1.5 and waited[1, 2] > 1.5
    assert "operation 2: load" in _cli.run("trace", *paths, "--operation", 2).out
    assert "operation 1: save" not in _cli.run("trace", *paths, "--operation", 2).out
    partly = _cli.run("trace", *paths[:2], "--operation", 1)
    assert "the traces of rank 2 of 3 are missing" in partly.out
    _distributed.run(3, _traces.load_alone, str(tmp_path), 1)
    result = _cli.run("trace", tmp_path)  # the folder
    assert result.out.count("operation ") == 3 and "1 rank" in result.out and "missing" not in result.out


def test_a_folder_without_traces(tmp_path: Path) -> None:
    result = _cli.run("trace", tmp_path)
    assert result.status == 2 and "there are no traces (*.json) in" in result.err


def test_in_a_terminal(tmp_path: Path) -> None:
    result = _cli.run_in_terminal("trace", *write(tmp_path, slow_sync()), "--output", tmp_path / "t.svg", columns=120)
    assert result.status == 0 and "rank 3 write 2.100 s" in result.plain and "│" in result.plain
    assert "the timeline of operation 1 is in" in result.plain.replace("\n", " ")


def test_a_strangers_text_is_escaped(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07$_{\n<script>"
    trace = made(0, [(evil, 0.0, 0.5), ("write", 0.5, 1.0)], world_size=1, failed=evil)
    trace["traceEvents"][2]["args"]["checkpoint"] = evil
    paths = write(tmp_path, [trace])
    result = _cli.run("trace", *paths, "--output", tmp_path / "t.svg")
    assert result.status == 0 and r"\x1b]0;title\x07" in result.out and "\x1b" not in result.out + result.err
    assert "<script>" not in (tmp_path / "t.svg").read_text()


@pytest.mark.parametrize("lane", ["worker ²", f"worker {'9' * 5000}", "worker \ud800", "$x^$"])
def test_a_strangers_lanes_can_be_drawn(tmp_path: Path, lane: str) -> None:
    trace = made(0, [("write", 0.0, 1.0)], [("write", 0.1, 0.2)], world_size=1)
    for event in trace["traceEvents"]:
        if event["name"] == "thread_name" and event["args"]["name"] != "main":
            event["args"]["name"] = lane
    assert _cli.run("trace", *write(tmp_path, [trace]), "--output", tmp_path / "t.png").status == 0


# ---- what goes wrong ----


def test_traces_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    state = {"a": torch.ones(10)}
    for name in ("one", "two"):
        dcp.save(state, storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / f"{name}.json"))
    later = json.loads((tmp_path / "two.json").read_text())
    later["otherData"]["process"] += 1
    for event in later["traceEvents"]:
        if "ts" in event:
            event["ts"] += 3_600_000_000
    paths = write(tmp_path, [json.loads((tmp_path / "one.json").read_text()), later])
    result = _cli.run("trace", *paths)
    assert result.status == 2 and "t.1.json is of another run than" in result.err and not result.out
    stale = slow_sync()
    stale[3] = made(3, [("write", 900.0, 901.0)], identity="of yesterday")
    result = _cli.run("trace", *write(tmp_path, stale))
    assert result.status == 2 and "t.3.json is of another run than" in result.err


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


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(tmp_path, slow_sync())
    assert _cli.run("trace").status == 2
    assert "there are only 1" in _cli.run("trace", *paths, "--operation", 2).err
    assert ".png, .svg or .pdf" in _cli.run("trace", *paths, "--output", tmp_path / "t.gif").err
    result = _cli.run("trace", *paths, "--output", tmp_path / "absent" / "t.png")
    assert result.status == 2 and "absent" in result.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = _cli.run("trace", *paths, "--output", tmp_path / "t.png")
    assert result.status == 2 and "pip install 'dcpring[plot]'" in result.err and not (tmp_path / "t.png").exists()
    assert _cli.run("trace", *paths).status == 0


def test_interrupted_leaves_the_picture_that_was_there(tmp_path: Path) -> None:
    """Ctrl-C while it draws: the target is replaced as a whole or not at all."""
    phases = [("write", 0.0, 100.0)]
    io = [("write", i, i + 0.9) for i in range(50)]
    paths = write(tmp_path, [made(rank, phases, io, world_size=60) for rank in range(60)])
    picture = tmp_path / "t.png"
    picture.write_bytes(b"what was there")
    last = paths[-1].read_bytes()
    paths[-1].unlink()
    os.mkfifo(paths[-1])
    before = set(tmp_path.iterdir())
    result = _cli.interrupted("trace", *paths, "--output", picture, when=lambda _: _has_read(paths[-1], last))
    assert result.status == 130 and "interrupted" in result.err
    assert picture.read_bytes() == b"what was there" and set(tmp_path.iterdir()) == before


def _has_read(pipe: Path, data: bytes) -> bool:
    """Whether a process wants to read the pipe; it gets the data then, and some time to begin with what it does next.

    Importing matplotlib and drawing this take well over a second.
    """
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads yet
        return False
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    time.sleep(0.3)
    return True


def test_reader_and_writer_traces_can_be_given_together(tmp_path: Path) -> None:
    """A save and a load of one process may have gone to two files."""
    state = {"a": torch.ones(10)}
    dcp.save(state, storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / "s.json"))
    dcp.load(state, storage_reader=RingReader(tmp_path / "c", trace=tmp_path / "l.json"))
    result = _cli.run("trace", tmp_path / "s.json", tmp_path / "l.json")
    assert result.status == 0 and "operation 1: save" in result.out and "operation 2: load" in result.out
