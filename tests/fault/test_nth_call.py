"""The Nth system call fails, for every N: a save or a load ends in a clear error or in the right data."""

from __future__ import annotations

import errno
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from crash.recording import Call, Recorder, number_of, read_log
from fault._support import (
    MIB,
    StateDict,
    blank,
    drop_cache,
    equal,
    failure,
    fault,
    leaks_descriptors,
    load,
    needed_files,
    open_descriptors,
    quiet,
    save,
    small_state,
    tensor_state,
)
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import _C, CheckpointError, RingHFWriter, RingLoadPlanner, RingReader, RingSavePlanner

SHORTEN = 0
FAULTS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "EAGAIN": errno.EAGAIN, "short": SHORTEN}
BOTH_ENGINES = ("uring", "threads")

pytestmark = pytest.mark.usefixtures("_quiet")
OFTEN = (
    "direct-uring-EIO",
    "direct-uring-EINTR",
    "direct-uring-short",
    "buffered-threads-EIO",
    "buffered-threads-short",
)
"""What is run without --slow."""

each_fault = pytest.mark.parametrize("err", FAULTS.values(), ids=FAULTS.keys())
each_engine = pytest.mark.parametrize("engine", BOTH_ENGINES)
each_direct = pytest.mark.parametrize("direct", (True, False), ids=("direct", "buffered"))


def options_for(engine: str, direct: bool) -> dict[str, Any]:
    return {"engine": engine, "direct": direct, "workers": 1, "queue_depth": 2, "block_size_bytes": MIB}


def until_exhausted(
    attempt: Callable[[], None], err: int, sticky: bool = False, call: str | None = None
) -> Iterator[tuple[int, BaseException | None]]:
    """Attempts with the first, second, ... call failing (sticky: and all after it), until there are no more to fail."""
    for nth in itertools.count(1):
        caught: BaseException | None = None
        _C.arm_fault(call, nth, err, sticky)
        try:
            attempt()
        except CheckpointException as error:
            caught = failure(error)
        finally:
            counted = _C.disarm_fault()
        yield nth, caught
        if counted < nth:
            assert nth > 10, "so few calls are not a save or a load"
            assert caught is None
            return


@pytest.fixture
def _quiet() -> Iterator[None]:
    with quiet():
        yield


class Overwriting:
    """A checkpoint that is overwritten again and again, and what has to be in it."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self.options = options
        self.states = [small_state(1), small_state(2)]
        self.current = 0
        save(self.states[0], path, **options)

    def attempt(self) -> None:
        try:
            save(self.states[1 - self.current], self.path, **self.options)
        except CheckpointException as error:
            if "after the rename that committed" not in str(failure(error)):
                raise
            self.current = 1 - self.current
            raise
        self.current = 1 - self.current

    def check(self, where: str) -> None:
        assert equal(load(self.states[0], self.path), self.states[self.current]), where

    def check_and_clean_up(self, where: str) -> None:
        """What a failed save has left is removed by the next one."""
        if {entry.name for entry in self.path.iterdir()} != needed_files(self.path):
            self.attempt()
            self.check(where)
        assert {entry.name for entry in self.path.iterdir()} == needed_files(self.path), where


@pytest.mark.slow(but=OFTEN)
@each_fault
@each_engine
@each_direct
def test_every_call_of_a_save(tmp_path: Path, engine: str, direct: bool, err: int) -> None:
    path = tmp_path / "checkpoint"
    overwriting = Overwriting(path, options_for(engine, direct))
    before = open_descriptors()
    for nth, error in until_exhausted(overwriting.attempt, err):
        where = f"call {nth} failed with {err}: {error!r}"
        if error is not None:
            assert isinstance(error, (OSError, CheckpointError)), where
            assert str(path.parent) in str(error), where
        overwriting.check(where)
        overwriting.check_and_clean_up(where)
        assert not leaks_descriptors(before), where


TRANSFERS = {"uring": ("uring_result", "uring_submit", "uring_wait"), "threads": ("pwrite", "pread")}


@pytest.mark.slow(but=["direct-uring-once-EINTR", "direct-uring-often-short", "buffered-threads-once-short"])
@pytest.mark.parametrize("err", (errno.EINTR, errno.EAGAIN, SHORTEN), ids=("EINTR", "EAGAIN", "short"))
@pytest.mark.parametrize("sticky", (False, True), ids=("once", "often"))
@each_engine
@each_direct
def test_interrupted_transfers_go_on(tmp_path: Path, engine: str, direct: bool, sticky: bool, err: int) -> None:
    """No error at all: what is no failure is repeated, and what is short is continued."""
    options, state = options_for(engine, direct), small_state(1)
    for call in TRANSFERS[engine]:
        if sticky and err != SHORTEN:
            continue  # for ever is a failure
        for nth in (1, 2):
            with fault(call, nth, err, sticky):
                save(state, tmp_path, **options)
            drop_cache(tmp_path)
            with fault(call, nth, err, sticky):
                assert equal(load(state, tmp_path, **options), state)


@pytest.mark.parametrize("err", (errno.EINTR, errno.EAGAIN), ids=("EINTR", "EAGAIN"))
@pytest.mark.parametrize(
    ("engine", "call"), (("threads", "pwrite"), ("uring", "uring_result"), ("uring", "uring_submit"))
)
def test_interruptions_without_end_end(tmp_path: Path, engine: str, call: str, err: int) -> None:
    """In an error, within seconds, rather than in a hang."""
    with pytest.raises(CheckpointException) as caught, fault(call, 1, err, True):
        save(small_state(1), tmp_path, engine=engine)
    assert isinstance(failure(caught.value), OSError)
    assert str(tmp_path) in str(failure(caught.value))


def steps_of_a_save(folder: Path, **options: Any) -> dict[str, list[tuple[float, float]]]:
    """When a second save did what matters for what is on the disk after a power failure: begins and ends."""
    root, log, steps = folder / "root", folder / "log", defaultdict(list)
    path = root / "checkpoint"
    save(small_state(1), path, **options)
    with Recorder(root, log):
        save(small_state(2), path, **options)
    notes = read_log(log)
    known = {number_of(root.stat()): "parent", number_of(path.stat()): "directory"}
    for note in notes:
        if note.call == Call.CREATE:
            known[note.inode] = "data" if note.name.endswith(".distcp") else "metadata"
    for note in notes:
        name = note.call.name.lower()
        steps[name if note.call in (Call.RENAME, Call.UNLINK) else f"{name} {known[note.inode]}"].append(
            (note.begin, note.end)
        )
    return steps


def test_order_of_a_durable_save(tmp_path: Path) -> None:
    """Nothing is relied upon before it is on the disk: data, names, metadata, their name. What may go together does."""
    steps = steps_of_a_save(tmp_path, engine="threads", direct=False)
    ((renamed, done),) = steps["rename"]
    names, committed = steps["fsync directory"]
    ((synced, _),) = steps["fdatasync data"]
    written = [end for what in ("write data", "resize data", "allocate data") for _, end in steps[what]]
    assert max(written) <= synced and steps["create data"][0][1] <= names[0]
    assert steps["write metadata"][0][1] <= steps["fsync metadata"][0][0]
    for what in ("fdatasync data", "fsync parent", "fsync metadata"):
        ((_, end),) = steps[what]
        assert end <= renamed
    assert names[1] <= renamed and done <= committed[0] and committed[1] <= steps["unlink"][0][0]


def test_order_of_a_save_without_sync(tmp_path: Path) -> None:
    steps = steps_of_a_save(tmp_path, engine="threads", direct=False, sync_files=False)
    assert not any("sync" in what for what in steps)
    ((renamed, _),) = steps["rename"]
    assert all(end <= renamed for what in ("write data", "resize data", "write metadata") for _, end in steps[what])


@pytest.mark.slow(but=["uring"])
@each_engine
def test_every_call_from_the_nth_on(tmp_path: Path, engine: str) -> None:
    """The disk dies in the middle of a save and comes back after it. Where even waiting fails, memory is given up."""
    path = tmp_path / "checkpoint"
    overwriting = Overwriting(path, options_for(engine, direct=True))
    for nth, error in until_exhausted(overwriting.attempt, errno.EIO, sticky=True):
        where = f"calls from {nth} on failed: {error!r}"
        assert error is None or isinstance(error, OSError), where
        assert error is None or str(path.parent) in str(error), where
        overwriting.check(where)
        overwriting.check_and_clean_up(where)


@pytest.mark.slow(but=["EIO-uring"])
@each_engine
@pytest.mark.parametrize("err", (errno.EIO, SHORTEN), ids=("EIO", "short"))
def test_every_call_with_several_workers(tmp_path: Path, engine: str, err: int) -> None:
    """One worker's failure ends them all."""
    options = {**options_for(engine, direct=True), "workers": 3, "queue_depth": 6}
    overwriting = Overwriting(tmp_path, options)
    overwriting.states = [state | tensor_state(seed, mib=6, count=1) for seed, state in enumerate(overwriting.states)]
    save(overwriting.states[0], tmp_path, **options)
    before = open_descriptors()
    for nth, error in until_exhausted(overwriting.attempt, err):
        where = f"call {nth} failed with {err}: {error!r}"
        assert error is None or str(tmp_path.parent) in str(error), where
        overwriting.check(where)
        overwriting.check_and_clean_up(where)
        assert not leaks_descriptors(before), where


@each_engine
def test_every_call_of_a_first_save(tmp_path: Path, engine: str) -> None:
    """Where no directory is there yet: it is made, and a failure leaves no checkpoint behind."""
    state = small_state(1)
    folders = (tmp_path / str(n) / "checkpoint" for n in itertools.count())
    made: list[Path] = []

    def attempt() -> None:
        made.append(next(folders))
        save(state, made[-1], **options_for(engine, direct=True))

    for nth, error in until_exhausted(attempt, errno.EIO):
        where = f"call {nth} failed: {error!r}"
        if error is None:
            assert equal(load(state, made[-1]), state), where
        else:
            assert isinstance(error, (OSError, CheckpointError)), where
            named = str(getattr(error, "filename", made[-1]))  # one of the directories above it, or what is in it
            assert str(made[-1]).startswith(named) or named.startswith(str(made[-1])), where
            left = [entry.name for entry in made[-1].iterdir()] if made[-1].exists() else []
            assert ".metadata" not in left or "after the rename that committed" in str(error), where


@pytest.mark.slow(but=OFTEN)
@each_fault
@each_engine
@each_direct
def test_every_call_of_a_load(tmp_path: Path, engine: str, direct: bool, err: int) -> None:
    options = options_for(engine, direct)
    state = small_state(1)
    save(state, tmp_path)
    before = open_descriptors()
    loaded: StateDict = {}

    def attempt() -> None:
        loaded.clear()
        loaded.update(blank(state))
        if direct:  # else it would be read through the cache
            drop_cache(tmp_path)
        dcp.load(loaded, storage_reader=RingReader(tmp_path, **options), no_dist=True)

    for nth, error in until_exhausted(attempt, err):
        where = f"call {nth} failed with {err}: {error!r}"
        if error is None:
            assert equal(loaded, state), where
        else:
            assert isinstance(error, (OSError, CheckpointError)), where
            about_all = isinstance(error, OSError) and error.filename == str(tmp_path)
            assert about_all or any(f"'{key}" in str(error) for key in state), where
            assert str(tmp_path) in str(error), where
        assert not leaks_descriptors(before), where


# ---- memory ----


def is_about_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or "memory" in str(error)


def test_every_allocation_of_a_save(tmp_path: Path) -> None:
    """The core's allocations; the plan is compact, so that tables, merging and the pickle are among them."""
    overwriting = Overwriting(tmp_path, options_for("threads", direct=False) | {"planner": RingSavePlanner()})
    before = open_descriptors()
    for nth, error in until_exhausted(overwriting.attempt, errno.ENOMEM, call="malloc"):
        where = f"allocation {nth} failed: {error!r}"
        assert error is None or is_about_memory(error), where
        overwriting.check(where)
        overwriting.check_and_clean_up(where)
        assert not leaks_descriptors(before), where


def test_every_allocation_of_a_model_in_safetensors(tmp_path: Path) -> None:
    state = {"w": torch.randn(400, 300), "b": torch.arange(7), "empty": torch.empty(0, 3)}
    before = open_descriptors()

    def attempt() -> None:
        dcp.save(state, storage_writer=RingHFWriter(tmp_path), planner=RingSavePlanner(), no_dist=True)

    for nth, error in until_exhausted(attempt, errno.ENOMEM, call="malloc"):
        where = f"allocation {nth} failed: {error!r}"
        assert error is None or is_about_memory(error), where
        assert not leaks_descriptors(before), where
    loaded = blank(state)
    dcp.load(loaded, storage_reader=RingReader(tmp_path), planner=RingLoadPlanner(), no_dist=True)
    assert equal(loaded, state)


@each_engine
def test_every_allocation_of_a_load(tmp_path: Path, engine: str) -> None:
    state = small_state(1)
    save(state, tmp_path)
    before = open_descriptors()
    loaded: StateDict = {}

    def attempt() -> None:
        loaded.clear()
        loaded.update(blank(state))
        reader = RingReader(tmp_path, **options_for(engine, direct=False))
        dcp.load(loaded, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)

    for nth, error in until_exhausted(attempt, errno.ENOMEM, call="malloc"):
        where = f"allocation {nth} failed: {error!r}"
        assert equal(loaded, state) if error is None else is_about_memory(error), where
        assert not leaks_descriptors(before), where
