"""Traces of saves and loads: what is in them, where they go, and what becomes of them when something fails."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import _cli
import _distributed
import _traces
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.profiler import ProfilerActivity, profile

from dcpring import _C, Checkpointer, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.options import IOOptions
from dcpring.plan.run import _REPORTED, Save
from dcpring.tools.traces import RankTrace, read_operations
from dcpring.watch import trace_file as _trace_file
from dcpring.watch.events import Events

SAVE = ["local plan", "gather plans", "global plan", "scatter plans", "write", "gather results", "commit", "clean-up"]
LOAD = ["read metadata", "local plan", "gather plans", "global plan", "scatter plans", "read"]


def _state(value: float = 1.0) -> dict[str, Any]:
    return {"large": torch.full((3 << 20,), value), "small": torch.full((7,), value), "object": "text"}


def _events(path: Path) -> list[dict[str, Any]]:
    """Of a file that must be as Perfetto and Chrome expect it."""
    document = json.loads(path.read_text())
    events: list[dict[str, Any]] = document["traceEvents"]
    named = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in ("X", "M") and type(event["pid"]) is int and type(event["name"]) is str
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert type(event["tid"]) is int and event["tid"] in named and type(event["cat"]) is str
            assert type(event["ts"]) is int and type(event["dur"]) is int and event["dur"] >= 0
            assert abs(event["ts"] / 1e6 - time.time()) < 3600
    _assert_lanes_nest(events)
    return [event for event in events if event["ph"] == "X"]


def _assert_lanes_nest(events: list[dict[str, Any]]) -> None:
    """Two spans of a lane lie side by side, or one in the other."""
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        around: list[int] = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1] <= event["ts"]:
                around.pop()
            assert not around or event["ts"] + event["dur"] <= around[-1], f"{event} reaches out of what it is in"
            around.append(event["ts"] + event["dur"])


def _phases(part: RankTrace) -> list[str]:
    return [span.name for span in part.spans if span.kind == "phase"]


def _parts(*paths: Path, rank: int = 0) -> list[RankTrace]:
    return [operation.parts[rank] for operation in read_operations(paths)[0]]


@pytest.mark.parametrize("planned", [True, False], ids=["ring planners", "stock planners"])
def test_all_that_a_save_and_a_load_do(tmp_path: Path, planned: bool) -> None:
    trace = tmp_path / "deep" / "t.json"
    options = {"trace": trace, "block_size_bytes": 1 << 20}
    saver, loader = (RingSavePlanner(), RingLoadPlanner()) if planned else (None, None)
    dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c", **options), planner=saver)
    loaded = _state(0.0)
    dcp.load(loaded, storage_reader=RingReader(tmp_path / "c", **options), planner=loader)
    assert loaded["large"][0] == 1.0
    summed = [event for event in _events(trace) if event["args"].get("crc_us")]
    assert {event["name"] for event in summed} == {"fill", "use"}
    save, load = _parts(trace)
    assert _phases(save) == SAVE and _phases(load) == LOAD
    assert not save.failed and not load.failed and save.is_coordinator
    for part, moved in ((save, "write"), (load, "read")):
        phase = next(span for span in part.spans if span.name == moved)
        inside = [span for span in part.io if span.name != "fsync"]  # these go on while the metadata is made
        assert inside and all(phase.begin <= span.begin <= span.end <= phase.end for span in inside)
        size = sum(span.bytes for span in part.io if span.name == moved)
        assert 12 << 20 < size < 13 << 20
    assert {"allocate", "set up", "fill", "write", "fsync"} == {span.name for span in save.io}
    assert {"read", "use"} == {span.name for span in load.io}
    assert {span.file for span in save.io if span.name != "fsync"} == {span.file for span in load.io}
    synced = {span.file for span in save.io if span.name == "fsync"}
    assert {span.file for span in load.io} < synced and any(".metadata" in name for name in synced)
    assert {"sync", "clean-up"} <= {span.name for span in save.spans}
    assert {"read tensors", "read objects"} <= {span.name for span in load.spans}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_lanes_of_transfers_nest(tmp_path: Path, engine: str, direct: bool) -> None:
    """Also where loads read through the page cache."""
    options = {"trace": tmp_path / "t.json", "engine": engine, "direct": direct}
    options |= {"block_size_bytes": 1 << 20, "workers": 3, "queue_depth": 9}
    for one_file in (True, False):
        writer = RingWriter(tmp_path / f"c{one_file}", single_file_per_rank=one_file, **options)  # type: ignore[arg-type]
        dcp.save(_state(), storage_writer=writer)
        dcp.load(_state(0.0), storage_reader=RingReader(tmp_path / f"c{one_file}", **options))  # type: ignore[arg-type]
    _events(tmp_path / "t.json")
    assert len(_parts(tmp_path / "t.json")) == 4


def test_the_report_and_the_trace_are_measured_once(tmp_path: Path) -> None:
    planner = RingSavePlanner()
    dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / "t.json"), planner=planner)
    by_name: dict[str, float] = defaultdict(float)
    for span in _parts(tmp_path / "t.json")[0].spans:
        if span.kind == "phase":
            by_name[_REPORTED[span.name]] += (span.end - span.begin) / 1e6
    assert planner.report().seconds == pytest.approx(dict(by_name), abs=1e-5)


def test_the_environment_and_the_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPRING_TRACE", str(tmp_path / "t.json"))
    with Checkpointer(tmp_path / "c", {"model": torch.nn.Linear(100, 100)}) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2, blocking=False)
        checkpointer.wait()
        checkpointer.load()
    _events(tmp_path / "t.json")
    parts = _parts(tmp_path / "t.json")
    saves = [part for part in parts if part.kind == "save"]
    assert [Path(part.checkpoint).name for part in saves] == ["step-1", "step-2"]
    assert any(part.kind == "load" for part in parts)
    staged = [[span for span in part.spans if span.kind == "staging"] for part in saves]
    assert not staged[0] and len(staged[1]) == 1
    assert staged[1][0].end <= saves[1].begin and staged[1][0].end > staged[1][0].begin
    monkeypatch.setenv("DCPRING_TRACE", str(tmp_path / "other.json"))
    dcp.save(_state(), storage_writer=RingWriter(tmp_path / "d", trace=tmp_path / "own.json"))
    assert (tmp_path / "own.json").exists() and not (tmp_path / "other.json").exists()


def test_async_save_is_staged(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "c", trace=tmp_path / "t.json")
    for _ in range(2):
        dcp.async_save(_state(), storage_writer=writer).result()  # type: ignore[union-attr]
    _events(tmp_path / "t.json")
    for part in _parts(tmp_path / "t.json"):
        assert len([span for span in part.spans if span.kind == "staging"]) == 1
    said = _cli.run("trace", tmp_path / "t.json").out
    assert len(re.findall(r"^staging +\d\.\d{3} ", said, re.MULTILINE)) == 2


def test_a_copy_in_another_process_goes_on_with_what_was_staged(tmp_path: Path) -> None:
    """DCP's background process gets a pickled writer: its trace has a name of its own, or both would write one."""
    writer = RingWriter(tmp_path / "c", trace=tmp_path / "t.json")
    staged = writer.stage(_state())
    copy = pickle.loads(pickle.dumps(writer))
    dcp.save(_state(), storage_writer=writer)
    dcp.save(staged, storage_writer=copy)
    assert not [span for span in _parts(tmp_path / "t.json")[0].spans if span.kind == "staging"]
    assert [span for span in _parts(tmp_path / "t.background.json")[0].spans if span.kind == "staging"]


def test_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCPRING_TRACE", raising=False)
    writer = RingWriter(tmp_path / "c")
    dcp.save(_state(), storage_writer=writer)
    assert writer._save.watch() is None
    assert not list(tmp_path.glob("*.json"))


def test_metadata_that_is_read_for_other_reasons_is_no_load(tmp_path: Path) -> None:
    dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c"))
    reader = RingReader(tmp_path / "c", trace=tmp_path / "t.json")
    for _ in range(2):
        reader.read_metadata()
    dcp.load(_state(0.0), storage_reader=reader)
    reader.read_metadata()
    del reader
    assert [_phases(part) for part in _parts(tmp_path / "t.json")] == [LOAD]


# ---- what fails ----


def test_a_save_that_fails_is_written_and_says_with_what(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "c", trace=tmp_path / "t.json")
    _C.arm_fault("fdatasync", 1, 28, False)
    try:
        with pytest.raises(CheckpointException):
            dcp.save(_state(), storage_writer=writer)
    finally:
        _C.disarm_fault()
    (failed,) = _parts(tmp_path / "t.json")
    assert "commit: " in failed.failed and "No space left" in failed.failed and "fdatasync" in failed.failed
    assert next(span for span in failed.spans if span.name == "commit").failed
    dcp.save(_state(), storage_writer=writer)
    _events(tmp_path / "t.json")
    assert [bool(part.failed) for part in _parts(tmp_path / "t.json")] == [True, False]


def test_a_plan_that_fails(tmp_path: Path) -> None:
    dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c"))
    for planner in (RingLoadPlanner(), None):
        reader = RingReader(tmp_path / "c", trace=tmp_path / "t.json")
        with pytest.raises(CheckpointException):
            dcp.load({"absent": torch.zeros(2)}, storage_reader=reader, planner=planner)
        del reader
        gc.collect()  # the exception's traceback refers to it
    ours, stock = _parts(tmp_path / "t.json")
    assert "local plan: " in ours.failed and "absent" in ours.failed
    # Stock's planner does not tell: that is known when the reader is gone.
    assert "local plan: its end was not seen" in stock.failed


def test_metadata_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException):
        dcp.load(_state(), storage_reader=RingReader(tmp_path / "c", trace=tmp_path / "t.json"))
    (part,) = _parts(tmp_path / "t.json")
    assert "read metadata: FileNotFoundError" in part.failed


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="dcpring"):
        dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / "file" / "t.json"))
    told = [record.getMessage() for record in caplog.records if "trace" in record.getMessage()]
    assert len(told) == 1 and str(tmp_path / "file" / "t.json") in told[0] and "goes on" in told[0]
    assert (tmp_path / "c" / ".metadata").exists()


# ---- bounds ----


def test_the_oldest_operations_are_dropped_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace_file, "MOST_EVENTS", 100)
    for step in range(6):
        dcp.save(_state(), storage_writer=RingWriter(tmp_path / f"c{step}", trace=tmp_path / "t.json"))
    events = _events(tmp_path / "t.json")
    operations, notes = read_operations([tmp_path / "t.json"])
    assert len(events) <= 100 and 1 <= len(operations) < 6
    assert [Path(one.checkpoint).name for one in operations] == [f"c{step}" for step in range(6 - len(operations), 6)]
    assert [_phases(one.parts[0]) for one in operations] == [SAVE] * len(operations)
    assert len(notes) == 1 and f"oldest {6 - len(operations)} operations were dropped" in notes[0]


def test_spans_without_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcpring.watch.events._MOST_WORK", 5)
    writer = RingWriter(tmp_path / "c", trace=tmp_path / "t.json", block_size_bytes=1 << 20)
    dcp.save(_state(), storage_writer=writer)
    assert len(_parts(tmp_path / "t.json")[0].io) == 5
    assert "spans of workers found no room" in read_operations([tmp_path / "t.json"])[1][0]


def test_a_trace_for_each_step_does_not_pile_up(tmp_path: Path) -> None:
    for step in range(20):
        dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c", trace=tmp_path / f"{step}.json"))
    assert len(_trace_file._files) <= _trace_file._MOST_FILES
    assert all(_phases(_parts(tmp_path / f"{step}.json")[0]) == SAVE for step in range(20))


# ---- several ranks ----


def test_ranks_write_a_trace_each_and_agree_on_what_it_is_of(tmp_path: Path) -> None:
    _distributed.run(3, _traces.save_traced, str(tmp_path))
    _distributed.run(3, _traces.load_traced, str(tmp_path))
    paths = [tmp_path / f"t.{rank}.json" for rank in range(3)]
    assert sorted(tmp_path.glob("t*")) == paths
    for rank, path in enumerate(paths):
        assert {event["pid"] for event in _events(path)} == {rank}
        names = [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "process_name"]
        assert len(names) == 1 and names[0].startswith(f"rank {rank} (")
    save, load = read_operations(paths)[0]
    for operation in (save, load):
        assert sorted(operation.parts) == [0, 1, 2] and not operation.missing
        assert len({part.identity for part in operation.parts.values()}) == 1
        assert [part.is_coordinator for _, part in sorted(operation.parts.items())] == [True, False, False]
    assert _phases(save.parts[0]) == SAVE
    assert _phases(save.parts[1]) == ["local plan", "scatter plans", "write"]
    names = {span.name for span in load.parts[1].spans}
    assert {"peer sharing, round 1", "wait for all"} <= names


def test_what_failed_on_one_rank_is_seen_in_the_traces_of_all(tmp_path: Path) -> None:
    raised = _distributed.run(2, _traces.save_traced, str(tmp_path), 1, 0, 28)
    assert all("No space left" in text for text in raised)
    operation = read_operations([tmp_path / "t.0.json", tmp_path / "t.1.json"])[0][0]
    assert "No space left" in operation.parts[1].failed
    assert "gather results: its end was not seen" in operation.parts[0].failed


# ---- torch.profiler ----


@pytest.mark.parametrize("traced", [True, False])
def test_the_profiler_sees_the_same(tmp_path: Path, traced: bool) -> None:
    trace = tmp_path / "t.json" if traced else None
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        dcp.save(_state(), storage_writer=RingWriter(tmp_path / "c", trace=trace), planner=RingSavePlanner())
        dcp.load(_state(0.0), storage_reader=RingReader(tmp_path / "c", trace=trace), planner=RingLoadPlanner())
    seen = [event.name.removeprefix("dcpring: ") for event in profiled.events() if event.name.startswith("dcpring: ")]
    assert set(SAVE) | set(LOAD) <= set(seen)
    summaries = [name for name in seen if "GiB" in name]
    assert any("CRC s" in name and name.startswith("file __0_0.") for name in summaries)
    assert any("fsync s" in name and name.startswith("syncs") for name in summaries)
    assert (tmp_path / "t.json").exists() == traced


def test_a_watch_is_only_made_for_somebody() -> None:
    run = Save()
    assert run.watch() is None and IOOptions().for_core(True)[-1] is None
    run.meter.counter = memoryview(bytearray(8))
    assert isinstance(run.watch(), _C.Watch)
    run = Save()
    run.events.room = 5
    assert isinstance(run.watch(), _C.Watch)


def test_an_operation_given_up_in_the_middle_of_another(tmp_path: Path) -> None:
    """The collector may run at any time, and find a writer that was dropped in the middle of a save."""
    trace = _trace_file.TraceFile(tmp_path / "t.json", 0, 1)
    first, own, given_up = (Events("save", name) for name in ("first", "own", "given up"))
    trace.put(first)

    class Collecting:
        """Looking at the first operation makes the collector run."""

        def __init__(self, written: Any) -> None:
            self._written = written

        def __getattr__(self, name: str) -> Any:
            if given_up.number is None and not trace._waiting:
                trace.put(given_up)
            return getattr(self._written, name)

    trace._operations[0] = Collecting(trace._operations[0])  # type: ignore[assignment]
    trace.put(own)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["args"]["checkpoint"] for event in events if event.get("cat") == "operation"]
    assert names == ["first", "own", "given up"]
