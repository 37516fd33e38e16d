"""Progress: the bar on a real terminal (a pseudo-terminal), the function that is told, and what they cost."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import fcntl
import gc
import io
import logging
import mmap
import os
import pickle
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault._support import open_descriptors
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from tqdm.std import tqdm

from dcpring import _C, Checkpointer, Progress, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.watch import progress as progress_module
from dcpring.watch.progress import Slots, progress_bar

TENSORS = 16
TENSOR_BYTES = 3 << 20
STATE_BYTES = TENSORS * TENSOR_BYTES
"""Of one rank's state."""
STEP_SECONDS = 0.03
"""How long the slow planners take for a tensor: a save of them all is long enough to be drawn."""
PATIENCE_SECONDS = 30.0
"""How long they hold their last tensor back until what they are watched by has seen enough, on a busy machine."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


# ---- a terminal ----


class Screen:
    """What has been written to a pseudo-terminal."""

    def __init__(self) -> None:
        self.raw = ""

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    @property
    def pictures(self) -> list[str]:
        """All lines that were drawn, one over the other, but for the last."""
        return [line for line in re.split(r"[\r\n]+", self.text) if "%" in line]

    @property
    def percents(self) -> list[int]:
        return [int(match[1]) for match in map(re.compile(r"(\d+)%").search, self.pictures) if match]

    @property
    def is_bare(self) -> bool:
        """Whether nothing of what was drawn is left."""
        return "\n" not in self.raw and self.text.endswith("\r") and not self.text.split("\r")[-2].strip()

    @property
    def last(self) -> str:
        assert self.raw.endswith("\r\n"), self.raw[-200:]
        return self.text.rstrip("\n").split("\n")[-1].split("\r")[-1]


def wait_for(seen: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not seen():
        assert time.monotonic() < until, "what was waited for has not come"
        time.sleep(0.01)


_awaited: list[Callable[[], bool]] = []
"""What the slow planners of rank 0, which draws and tells, wait for before they give the last tensor away."""


@contextlib.contextmanager
def awaiting(seen: Callable[[], bool]) -> Iterator[None]:
    _awaited.append(seen)
    try:
        yield
    finally:
        _awaited.pop()


def step(fqn: str) -> None:
    """What a slow planner does for each tensor."""
    time.sleep(STEP_SECONDS)
    if _awaited and fqn == f"r0.t{TENSORS - 1}" and rank_now() == 0:
        wait_for(_awaited[-1])


@contextlib.contextmanager
def terminal(columns: int = 100, encoding: str = "utf-8") -> Iterator[Screen]:
    """Standard error is a terminal within this. What is on it is known afterwards."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    screen = Screen()
    decoder = codecs.getincrementaldecoder("utf-8")()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while chunk := os.read(ours, 1 << 16):
                screen.raw += decoder.decode(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    before = sys.stderr
    try:
        with open(theirs, "w", encoding=encoding) as sys.stderr, awaiting(lambda: len(screen.pictures) >= 2):
            yield screen
            wait_for(lambda: bar_threads() == 0)  # another rank may end later
    finally:
        sys.stderr = before
        reader.join(20)
        assert not reader.is_alive(), "somebody has kept the terminal open"
        os.close(ours)


def bar_threads() -> int:
    """How many threads of this process draw or tell."""
    return sum(thread.name == "dcpring-progress" for thread in threading.enumerate())


# ---- states and planners ----


def state_of(rank: int) -> dict[str, Any]:
    return {
        f"r{rank}.t{index:02}": torch.full((TENSOR_BYTES,), rank + index, dtype=torch.uint8) for index in range(TENSORS)
    }


class SlowSave(DefaultSavePlanner):
    failing_rank: int | None = None

    def resolve_data(self, write_item: Any) -> Any:
        step(write_item.index.fqn)
        if self.failing_rank == rank_now() and write_item.index.fqn.endswith(f"t{TENSORS - 1}"):
            raise OSError(28, "No space left on device")
        return super().resolve_data(write_item)


class SlowRingSave(RingSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        step(write_item.index.fqn)
        return super().resolve_data(write_item)


class SlowLoad(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        step(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)


class SlowRingLoad(RingLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        step(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)


def rank_now() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def slow_save(path: Any, planner: type[Any] = SlowSave, **options: Any) -> Screen:
    rank = rank_now()
    with terminal() as screen:
        dcp.save(state_of(rank), storage_writer=RingWriter(path, progress=True), planner=planner(), **options)
    return screen


def check_screen(screen: Screen, label: str, ranks: int = 1) -> None:
    """A bar that grew, with all bytes of these ranks, and its last line."""
    assert len(screen.percents) >= 2
    if ranks == 1:  # a rank that begins later makes the whole larger
        assert screen.percents == sorted(screen.percents)
    assert screen.percents[0] < 100
    total = tqdm.format_sizeof(ranks * STATE_BYTES, divisor=1024)
    for line in screen.pictures[-2:]:
        assert line.startswith(f"{label}: ") and f"/{total} [" in line, screen.pictures
    assert re.fullmatch(rf"{label}: 100%\|.*\| {total}/{total} \[\d\d:\d\d<00:00, +[\d.]+[kMG]?B/s\] *", screen.last), (
        screen.last
    )
    assert screen.text.count("\n") == 1


# ---- one process ----


@pytest.mark.parametrize("planner", [SlowSave, SlowRingSave])
def test_save_draws_a_bar(tmp_path: Path, planner: type[Any]) -> None:
    check_screen(slow_save(tmp_path, planner, no_dist=True), "saving")


@pytest.mark.parametrize("planner", [SlowLoad, SlowRingLoad])
def test_load_draws_a_bar(tmp_path: Path, planner: type[Any]) -> None:
    dcp.save(state_of(0), storage_writer=RingWriter(tmp_path), no_dist=True)
    state = {key: torch.zeros_like(value) for key, value in state_of(0).items()}
    with terminal() as screen:
        dcp.load(state, storage_reader=RingReader(tmp_path, progress=True), planner=planner(), no_dist=True)
    check_screen(screen, "loading")
    assert all(torch.equal(value, state[key]) for key, value in state_of(0).items())


def test_what_is_over_at_once_shows_nothing(tmp_path: Path) -> None:
    for _ in range(20):
        with terminal() as screen:
            began = time.monotonic()
            dcp.save({"t": torch.ones(8)}, storage_writer=RingWriter(tmp_path, progress=True), no_dist=True)
            seconds = time.monotonic() - began
        if seconds < 0.1:
            break
    assert seconds < 0.1, "every save of 32 bytes was slow enough for a bar"
    assert screen.raw == ""


def test_nothing_is_written_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "err", "w+") as file:
        monkeypatch.setattr(sys, "stderr", file)
        writer = RingWriter(tmp_path / "c", progress=True)
        dcp.save(state_of(0), storage_writer=writer, planner=SlowSave(), no_dist=True)
        file.seek(0)
        assert file.read() == ""
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        dcp.save({"t": torch.ones(8)}, storage_writer=RingWriter(tmp_path / "c", progress=True), no_dist=True)
    monkeypatch.undo()
    assert RingReader(tmp_path / "c").read_metadata().state_dict_metadata.keys() == {"t"}


def test_a_bar_does_not_outlive_a_failed_save(tmp_path: Path) -> None:
    descriptors = open_descriptors()

    class Failing(SlowSave):
        failing_rank = 0

    with terminal() as screen, pytest.raises(CheckpointException):
        dcp.save(state_of(0), storage_writer=RingWriter(tmp_path, progress=True), planner=Failing(), no_dist=True)
    assert re.match(r"saving: +\d\d%\|.*\d\.?\d*M/48\.0M ", screen.last), screen.last
    assert bar_threads() == 0
    assert open_descriptors() == descriptors


def test_async_save_draws_a_bar(tmp_path: Path) -> None:
    _distributed.run(1, _save_async, tmp_path)


def _save_async(path: Path) -> None:
    with terminal() as screen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.async_save(state_of(0), storage_writer=RingWriter(path, progress=True), planner=SlowSave()).result()
    check_screen(screen, "saving")


def test_a_checkpointer_passes_it_on(tmp_path: Path) -> None:
    seen: list[Progress] = []
    model = torch.nn.Linear(64, 64)
    options = {"progress": seen.append}
    with Checkpointer(tmp_path, {"model": model}, writer_options=options, reader_options=options) as checkpointer:
        checkpointer.save(1)
        checkpointer.load()
    assert [one.operation for one in seen if one.finished] == ["save", "load"]
    assert all(one.done_bytes == one.total_bytes == 4 * 65 * 64 for one in seen if one.finished)


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """As dcp.async_save does with a process of its own."""
    writer = RingWriter(tmp_path, progress=True)
    for _ in range(2):
        copied = pickle.loads(pickle.dumps(writer))
        with terminal() as screen:
            dcp.save(state_of(0), storage_writer=copied, planner=SlowSave(), no_dist=True)
        check_screen(screen, "saving")
        writer = copied


# ---- how it looks ----


def draw(label: str = "verifying", **options: Any) -> Screen:
    total = 4 << 30
    with terminal(**options) as screen, progress_bar(label, total) as bar:
        bar.advance(total // 4)
        wait_for(lambda: len(screen.pictures) >= 1)
        bar.advance(total // 4)
        wait_for(lambda: len(screen.pictures) >= 2)
        bar.advance(total // 2)
    return screen


def test_characters_are_those_of_the_terminal() -> None:
    screen = draw()
    assert "█" in screen.raw
    assert screen.is_bare
    assert "#" in draw(encoding="ascii").raw.encode("ascii").decode()


@pytest.mark.parametrize("columns", [200, 80, 50, 30, 14, 0])
def test_a_line_never_wraps(columns: int) -> None:
    screen = draw(columns=columns, label="prüfe")
    lines = re.split(r"[\r\n]+", screen.text.strip())
    assert len(lines) >= 2
    assert max(map(len, lines)) < (columns or 80)


def test_a_body_that_fails_ends_the_bar() -> None:
    with terminal() as screen, pytest.raises(KeyboardInterrupt), progress_bar("verifying", 4 << 20) as bar:
        bar.advance(1 << 20)
        wait_for(lambda: bool(screen.pictures))
        raise KeyboardInterrupt
    assert screen.pictures and screen.is_bare
    assert bar_threads() == 0


def test_a_bar_may_be_turned_off() -> None:
    with terminal() as screen, progress_bar("verifying", 100, enabled=False) as bar:
        time.sleep(0.3)
        bar.advance(100)
    assert screen.raw == ""


def test_a_label_cannot_steer_the_terminal() -> None:
    screen = draw(label="bad\x1b[2Jname\n")
    assert "\x1b[2J" not in screen.raw
    assert screen.pictures[0].startswith("bad?[2Jname?: ")


# ---- several ranks ----


def _save_on_ranks(path: Path, use_collectives: bool) -> tuple[str, list[Progress]]:
    options = {} if use_collectives else {"use_collectives": False}
    dist.barrier()
    return slow_save(path, **options).raw, []


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_bar_for_all_ranks_of_a_host(tmp_path: Path, ranks: int) -> None:
    first, *others = _distributed.run(ranks, _save_on_ranks, tmp_path, True)
    screen = Screen()
    screen.raw = first[0]
    check_screen(screen, "saving", ranks)
    assert [raw for raw, _ in others] == [""] * (ranks - 1)


def test_one_bar_without_collectives(tmp_path: Path) -> None:
    first, second = _distributed.run(2, _save_on_ranks, tmp_path, False)
    screen = Screen()
    screen.raw = first[0]
    check_screen(screen, "saving", 2)
    assert second[0] == ""


def _load_on_ranks(path: Path, planner: type[Any], share: str) -> tuple[str, list[Progress], bool]:
    full = {key: value for rank in range(2) for key, value in state_of(rank).items()}
    if rank_now() == 0:
        dcp.save(full, storage_writer=RingWriter(path), no_dist=True)
    dist.barrier()
    state = {key: torch.zeros_like(value) for key, value in full.items()}
    arguments = {"share": share} if issubclass(planner, RingLoadPlanner) else {}
    with terminal() as screen:
        dcp.load(state, storage_reader=RingReader(path, progress=True), planner=planner(**arguments))
    return screen.raw, [], all(torch.equal(value, state[key]) for key, value in full.items())


@pytest.mark.parametrize(("planner", "share"), [(SlowLoad, ""), (SlowRingLoad, "off"), (SlowRingLoad, "host")])
def test_one_bar_while_ranks_load(tmp_path: Path, planner: type[Any], share: str) -> None:
    first, second = _distributed.run(2, _load_on_ranks, tmp_path, planner, share)
    screen = Screen()
    screen.raw = first[0]
    check_screen(screen, "loading", 4)  # two ranks load the states of two
    assert second[0] == ""
    assert first[2]
    assert second[2]


def _load_each_alone(path: Path) -> str:
    if rank_now() == 0:
        dcp.save(state_of(0), storage_writer=RingWriter(path), no_dist=True)
    dist.barrier()
    state = {key: torch.zeros_like(value) for key, value in state_of(0).items()}
    reader = RingReader(path, progress=True)
    # Which of the two draws is open: nobody waits for it.
    with terminal() as screen, awaiting(lambda: True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, planner=SlowLoad(), no_dist=True)
        dist.barrier()
    return screen.raw


def test_ranks_that_load_each_for_itself_draw_one_bar(tmp_path: Path) -> None:
    screens = _distributed.run(2, _load_each_alone, tmp_path)
    assert len([raw for raw in screens if "loading" in raw]) == 1


class FailingOnOne(SlowSave):
    failing_rank = 1


def _fail_on_one(path: Path) -> tuple[str, int, int]:
    dist.barrier()
    with terminal() as screen:
        try:
            dcp.save(state_of(rank_now()), storage_writer=RingWriter(path, progress=True), planner=FailingOnOne())
        except CheckpointException as error:
            assert list(error.failures) == [1]
        else:
            raise AssertionError("it did not fail")
    gc.collect()  # the exception has the writer in a cycle
    shared = Path("/proc/self/maps").read_text().count("memfd:dcpring")
    return screen.raw, bar_threads(), shared


def test_the_bar_ends_when_a_rank_fails(tmp_path: Path) -> None:
    first, second = _distributed.run(2, _fail_on_one, tmp_path)
    screen = Screen()
    screen.raw = first[0]
    assert re.match(r"saving: +\d\d%\|.*\d\.?\d*M/96\.0M ", screen.last), screen.last
    assert second[0] == ""
    assert (first[1:], second[1:]) == ((0, 0), (0, 0))


def _save_apart(path: Path) -> tuple[str, list[Progress]]:
    """Rank 1 cannot open what rank 0 has made, as in another container."""
    if rank_now() == 1:
        progress_module.shared_memory = None  # type: ignore[assignment]
    try:
        return _save_on_ranks(path, True)
    finally:
        from dcpring.base import shared_memory

        progress_module.shared_memory = shared_memory


def test_a_rank_that_cannot_share_goes_on_without(tmp_path: Path) -> None:
    first, second = _distributed.run(2, _save_apart, tmp_path)
    screen = Screen()
    screen.raw = first[0]
    check_screen(screen, "saving", 1)
    assert second[0] == ""


def test_a_rank_that_is_gone_ends_the_bar() -> None:
    slots = Slots(mmap.mmap(-1, Slots.bytes(2)))
    slots.join(0)
    slots.begin(0, 100)
    child = os.fork()
    if child == 0:
        slots.join(1)
        slots.begin(1, 100)
        os._exit(0)
    os.waitpid(child, 0)
    assert slots.look() == (0, 200, False)
    slots.end(0, False)
    assert slots.look() == (100, 200, True)


# ---- the function ----


def test_a_function_is_told(tmp_path: Path) -> None:
    seen: list[tuple[Progress, int]] = []

    def note(progress: Progress) -> None:
        seen.append((progress, threading.get_ident()))

    def is_partly_done() -> bool:
        return any(0 < progress.done_bytes < STATE_BYTES for progress, _ in seen)

    began = time.monotonic()
    with awaiting(is_partly_done):
        dcp.save(state_of(0), storage_writer=RingWriter(tmp_path, progress=note), planner=SlowSave(), no_dist=True)
    seconds = time.monotonic() - began
    reports = [progress for progress, _ in seen]
    assert {ident for _, ident in seen}.isdisjoint({threading.get_ident()})
    assert 2 <= len(reports) <= 5 + 6 * seconds
    assert [report.finished for report in reports] == [False] * (len(reports) - 1) + [True]
    assert {(report.operation, report.total_bytes) for report in reports} == {("save", STATE_BYTES)}
    assert [report.done_bytes for report in reports] == sorted(report.done_bytes for report in reports)
    assert is_partly_done()
    last = reports[-1]
    assert last.done_bytes == STATE_BYTES
    assert last.bytes_per_second == pytest.approx(STATE_BYTES / last.seconds)
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.done_bytes = 0  # type: ignore[misc]


def plain_save(path: Path, note: Callable[[Progress], None]) -> None:
    dcp.save(state_of(0), storage_writer=RingWriter(path, progress=note), planner=RingSavePlanner(), no_dist=True)


def test_compact_plans_say_how_much_there_is(tmp_path: Path) -> None:
    seen: list[Progress] = []
    plain_save(tmp_path, seen.append)
    state = {key: value[: TENSOR_BYTES // 2].clone() for key, value in state_of(0).items()}
    full = {key: torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for key in state_of(0)}
    reader = RingReader(tmp_path, progress=seen.append)
    dcp.load(full, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
    assert [one.total_bytes for one in seen if one.finished] == [STATE_BYTES, STATE_BYTES]
    seen.clear()
    del state["r0.t00"]
    few = {"r0.t01": full["r0.t01"]}
    dcp.load(few, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
    assert [one.total_bytes for one in seen if one.finished] == [TENSOR_BYTES]


def test_a_function_that_fails_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Progress] = []

    def fail(progress: Progress) -> None:
        calls.append(progress)
        raise ValueError("no")

    with caplog.at_level(logging.WARNING, "dcpring"), awaiting(lambda: len(calls) > 1):
        dcp.save(state_of(0), storage_writer=RingWriter(tmp_path, progress=fail), planner=SlowSave(), no_dist=True)
    assert calls[-1].finished
    assert len(calls) > 1
    assert [record.message for record in caplog.records if record.name == "dcpring"] == [
        "the function given as progress= failed; the save goes on"
    ]
    assert RingReader(tmp_path).read_metadata().state_dict_metadata.keys() == state_of(0).keys()


def test_a_function_is_told_of_a_failure(tmp_path: Path) -> None:
    seen: list[Progress] = []

    class Failing(SlowSave):
        failing_rank = 0

    with pytest.raises(CheckpointException):
        dcp.save(
            state_of(0), storage_writer=RingWriter(tmp_path, progress=seen.append), planner=Failing(), no_dist=True
        )
    assert [one.finished for one in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].done_bytes < seen[-1].total_bytes == STATE_BYTES
    assert "dcpring-progress" not in {thread.name for thread in threading.enumerate()}


def with_last(seen: list[Progress]) -> list[Progress]:
    """The reports, once the last is there: the other ranks may end after this one."""
    until = time.monotonic() + 10
    while seen and not seen[-1].finished and time.monotonic() < until:
        time.sleep(0.01)
    return seen


def _tell_on_ranks(path: Path) -> list[Progress]:
    seen: list[Progress] = []
    dist.barrier()
    writer = RingWriter(path, progress=seen.append)
    dcp.save(state_of(rank_now()), storage_writer=writer, planner=SlowSave())
    return with_last(seen)


def _tell_of_a_cut_tensor(path: Path) -> list[Progress]:
    seen: list[Progress] = []
    state = {"t": torch.ones(64, 1 << 16)}
    planner = RingSavePlanner(writers="split", split_bytes=1 << 20)
    writer = RingWriter(path, progress=seen.append)
    dcp.save(state, storage_writer=writer, planner=planner)
    assert writer.stats is not None
    assert writer.stats.tensor_bytes == 8 << 20
    return with_last(seen)


def test_a_tensor_that_ranks_share_is_counted_once(tmp_path: Path) -> None:
    first, _ = _distributed.run(2, _tell_of_a_cut_tensor, tmp_path)
    assert first[-1].total_bytes == 16 << 20


def test_the_coordinator_is_told_of_all_ranks(tmp_path: Path) -> None:
    first, second = _distributed.run(2, _tell_on_ranks, tmp_path)
    assert second == []
    assert first[-1].done_bytes == first[-1].total_bytes == 2 * STATE_BYTES
    assert [one.finished for one in first] == [False] * (len(first) - 1) + [True]


# ---- cost ----


def test_a_bar_costs_next_to_no_cpu() -> None:
    slots = Slots(mmap.mmap(-1, Slots.bytes(64)))
    watches = [_C.Watch(slots.join(index), 0) for index in range(64)]
    for index in range(64):
        slots.begin(index, 1000)
    with terminal() as screen:
        settle = progress_module._draw(slots, "saving", stays=True)
        wait_for(lambda: bool(screen.pictures))  # tqdm has been imported
        began, cpu = time.monotonic(), time.process_time()
        for watch in watches[:20]:
            time.sleep(0.1)
            watch.add(500)
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        for index in range(64):
            slots.end(index, False)
        settle()
    assert share < (0.25 if "DCPRING_SANITIZED" in os.environ else 0.05)  # of one core; 0.01 on a quiet machine


def test_a_terminal_that_takes_nothing_holds_up_nobody(tmp_path: Path) -> None:
    """Stopped by Ctrl-S: the save ends all the same, and the bar when the terminal goes on."""
    with terminal() as screen:
        termios.tcflow(sys.stderr.fileno(), termios.TCOOFF)
        meter = progress_module.start_meter(True, "save", "nowhere", True)
        meter.begin(lambda: 100)
        time.sleep(0.3)
        began = time.monotonic()
        meter.end(False)
        assert time.monotonic() - began < 5
        termios.tcflow(sys.stderr.fileno(), termios.TCOON)
        wait_for(lambda: bar_threads() == 0)
    assert screen.last.startswith("saving: 100%")


def test_without_tqdm_there_is_no_bar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    warned = awaiting(lambda: bool(caplog.records))
    with terminal() as screen, warned, caplog.at_level(logging.WARNING, "dcpring"):
        dcp.save(state_of(0), storage_writer=RingWriter(tmp_path, progress=True), planner=SlowSave(), no_dist=True)
    assert screen.raw == ""
    (record,) = [record for record in caplog.records if record.name == "dcpring"]
    assert record.message.startswith("there is no progress bar: ") and "tqdm" in record.message


def test_a_program_ends_with_its_bar(tmp_path: Path) -> None:
    """Though another rank has joined, and never ends."""
    program = (
        "import mmap, os, sys\n"
        "from dcpring.watch.progress import Slots, _draw\n"
        "slots = Slots(mmap.mmap(-1, Slots.bytes(2)))\n"
        "for index in range(2): slots.join(index); slots.begin(index, 100)\n"
        "_draw(slots, 'saving', stays=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


# ---- wrong use ----


@pytest.mark.parametrize("make", [RingWriter, RingReader])
def test_what_is_no_function(make: Any) -> None:
    with pytest.raises(ValueError, match="progress=3: must be True, False or a function"):
        make("nowhere", progress=3)


def test_an_end_between_look_and_wait_is_not_missed() -> None:
    """The thread looks, is at work, and waits; the meter ends meanwhile, and looks too."""
    slots = progress_module._own_slots()
    meter = progress_module.Meter(slots, 0, lambda _: lambda: None)
    meter.begin(lambda: 100)
    assert not slots.look().over
    meter.end(False)
    began = time.monotonic()
    slots.wait(10)
    assert time.monotonic() - began < 9
    assert slots.look() == (100, 100, True)


def test_what_others_put_into_slots_is_only_shown() -> None:
    memory = mmap.mmap(-1, Slots.bytes(3))
    memory[:] = b"\xff" * len(memory)
    slots = Slots(memory)
    assert slots.look().over
    slots.join(1)
    slots.begin(1, 100)
    assert not slots.look().over
