"""Crashes: the quick part of explore.py, and whether it finds faults that are planted."""

from __future__ import annotations

import io
import math
import os
import posix
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from crash.explore import look_at
from crash.model import PAGE, QUICK, Crashes, File, Run, Snapshot, Store, Sync, replayed, tree_of, understand
from crash.recording import NotRecorded, Recorder, read_log
from crash.scenarios import (
    Checkpoints,
    Conversions,
    KeepsLittle,
    Saves,
    Scenario,
    StockSaves,
    kept_state_of,
    quick,
)
from fault._support import quiet
from torch.distributed.checkpoint import FileSystemWriter

from dcpring import _C, RingWriter
from dcpring.move.pending import Pending
from dcpring.resume.retention import Steps
from dcpring.store import layout

SEED = 1
SCENARIOS = quick(SEED)


# ---- what must hold ----


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name for scenario in SCENARIOS])
def test_every_state_is_an_old_or_a_new_checkpoint(tmp_path: Path, scenario: Scenario) -> None:
    with quiet():
        outcome = look_at(scenario, tmp_path / "work", QUICK, SEED, again_most=5)
    assert not outcome.problems, f"{outcome}\nseed {SEED}"
    assert outcome.versions >= {scenario.initial, scenario.versions}
    assert outcome.again >= 3


# ---- faults that are planted must be found ----


def problems_of(scenario: Scenario, folder: Path, change: Callable[[Run], None] = lambda run: None) -> list[str]:
    with quiet():
        return look_at(scenario, folder / "work", QUICK, SEED, again_most=0, change=change).problems


def rename_of(run: Run, version: int) -> Any:
    """The commit of a version."""
    return [naming for naming in run.namings if naming.text.endswith(".metadata")][version - 1]


def _is_of_data(run: Run, sync: Sync) -> bool:
    return isinstance(sync.node, File) and sync.end < rename_of(run, 2).begin and not sync.is_full


def _is_of_metadata(run: Run, sync: Sync) -> bool:
    return isinstance(sync.node, File) and sync.is_full


def _is_before_the_commit(run: Run, sync: Sync) -> bool:
    """Of the directory that the files are in."""
    first, second = rename_of(run, 1), rename_of(run, 2)
    ((folder, _), *_) = second.slots
    return sync.node is folder and first.end < sync.begin < second.begin and not _is_after(run, first, sync)


def _is_after(run: Run, commit: Any, sync: Sync) -> bool:
    """The first of the directory after a commit."""
    return sync is min((one for one in run.syncs if one.node is sync.node and one.begin > commit.end), key=_begin_of)


def _begin_of(sync: Sync) -> float:
    return sync.begin


def _is_after_the_commit(run: Run, sync: Sync) -> bool:
    return not isinstance(sync.node, File) and sync.begin > rename_of(run, 2).end


SYNCS = (_is_of_data, _is_of_metadata, _is_before_the_commit, _is_after_the_commit)


@pytest.mark.parametrize("is_left_out", SYNCS, ids=[sync.__name__.strip("_") for sync in SYNCS])
def test_every_sync_of_a_save_is_needed(tmp_path: Path, is_left_out: Callable[[Run, Sync], bool]) -> None:
    def leave_out(run: Run) -> None:
        doomed = [sync for sync in run.syncs if is_left_out(run, sync)]
        assert doomed
        run.syncs = [sync for sync in run.syncs if sync not in doomed]

    assert problems_of(Saves("save"), tmp_path, leave_out)


def test_data_that_is_synced_after_the_commit_is_found(tmp_path: Path) -> None:
    def postpone(run: Run) -> None:
        first, commit = rename_of(run, 1), rename_of(run, 2)
        (late,) = [sync for sync in run.syncs if _is_of_data(run, sync) and sync.begin > first.end]
        late.begin, late.end = commit.end + 1, commit.end + 2

    assert problems_of(Saves("save"), tmp_path, postpone)


def _links(run: Run) -> list[Any]:
    return [naming for naming in run.namings if naming.text.startswith("link ")]


def test_links_are_durable_before_the_commit(tmp_path: Path) -> None:
    def leave_out(run: Run) -> None:
        (link,) = _links(run)
        between = [sync for sync in run.syncs if link.end < sync.begin < rename_of(run, 2).begin]
        doomed = [sync for sync in between if not isinstance(sync.node, File)]
        assert doomed
        run.syncs = [sync for sync in run.syncs if sync not in doomed]

    assert problems_of(Saves("save", writer=KeepsLittle, states=kept_state_of), tmp_path, leave_out)


def test_what_was_never_synced_is_when_it_is_linked(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    before = Snapshot(root)
    with quiet(), Recorder(root, tmp_path / "log"):
        for number, syncs in enumerate((False, True, True), 1):
            writer = KeepsLittle(root / "checkpoint", sync_files=syncs)
            dcp.save(kept_state_of(number), storage_writer=writer, no_dist=True)
    run = understand(before, read_log(tmp_path / "log"))
    first, second = _links(run)
    (file,) = first.slots.values()
    assert list(second.slots.values()) == [file]
    (sync,) = [one for one in run.syncs if one.node is file]  # the third save has no need to
    assert sync.is_full and first.end < sync.begin and sync.end < rename_of(run, 2).begin


class RemovesEarly(RingWriter):
    """Removes the old checkpoint's data before the new one is committed."""

    def _commit(self, *arguments: Any) -> None:
        layout.remove_superseded(
            Path(self.path), layout.superseded_files(Path(self.path), os.listdir(self.path)), set(arguments[0])
        )
        super()._commit(*arguments)


class CommitsInPlace(RingWriter):
    """Writes the metadata over the old, as a file of its own that is synced."""

    def _commit(self, sizes: dict[str, int], data: bytes, table: Any) -> None:
        superseded = layout.superseded_files(Path(self.path), os.listdir(self.path))
        with open(Path(self.path, ".metadata"), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        _C.sync_directory(str(self.path))
        layout.remove_superseded(Path(self.path), superseded, set(sizes))


@pytest.mark.parametrize("writer", (RemovesEarly, CommitsInPlace))
def test_writers_with_faults_are_found_out(tmp_path: Path, writer: type) -> None:
    assert problems_of(Saves("save", writer=writer), tmp_path)


def test_a_save_without_sync_is_found_out(tmp_path: Path) -> None:
    assert problems_of(Saves("save", {"sync_files": False}), tmp_path)


@pytest.mark.parametrize("call", ("write_file", "replace", "rename_file"))
def test_calls_that_do_not_sync_are_found_out(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(_C, call)

    def without_sync(*arguments: Any) -> None:
        real(*arguments[:-1], None if call == "write_file" else False)

    scenario = Conversions("convert", "target.pt") if call == "replace" else Saves("save")
    monkeypatch.setattr(_C, call, without_sync)
    assert problems_of(scenario, tmp_path)


def test_names_that_are_not_synced_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pending, "sync_names", lambda self: None)
    assert problems_of(Saves("save"), tmp_path)


def test_a_checkpointer_that_removes_too_early_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of which files are gone is not a step any more, also after a crash."""
    real = Steps._remove_doomed
    scenario = Checkpoints("checkpointer", [1, 2], keep_last=1)

    monkeypatch.setattr(Steps, "_remove_doomed", lambda self, sync: real(self, False))
    assert any("does not load" in problem for problem in problems_of(scenario, tmp_path))


def test_the_faults_of_stock_are_found(tmp_path: Path) -> None:
    """Its data take the place of the old while the old metadata is there."""
    scenario = StockSaves("stock", writer=lambda path: FileSystemWriter(path, overwrite=True))
    assert problems_of(scenario, tmp_path)


# ---- the recording ----


def _everything_that_python_does(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "text").write_text("text")
    with open(root / "a" / "text", "a") as stream:
        stream.write("more" * 3000)
    with open(root / "a" / "text", "r+b", buffering=0) as raw:
        raw.seek(7)
        raw.write(b"inside")
        raw.truncate(9000)
    with (root / "x").open("xb") as stream, pytest.raises(FileExistsError):
        stream.write(bytes(5000))
        stream.flush()
        os.fsync(stream)
        (root / "x").open("x")
    fd = os.open(root / "a" / "raw", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 10000)
    os.write(fd, b"one")
    os.pwrite(fd, b"two", 6000)
    os.ftruncate(fd, 9000)
    os.fdatasync(fd)
    os.close(fd)
    with os.fdopen(os.open(root / "opened", os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
        stream.write("through a descriptor")
    os.truncate(root / "x", 100)
    (root / "old.txt").write_text("shorter")
    (root / "x").rename(root / "a" / "y")
    os.replace(root / "a" / "y", root / "old.txt")
    (root / "a" / "text").unlink()
    (root / "a" / "b").rmdir()
    here = os.open(root / "a", os.O_RDONLY)
    os.mkdir("c", dir_fd=here)
    os.rename("c", "d", src_dir_fd=here, dst_dir_fd=here)
    os.close(here)
    (root / "tree" / "below").mkdir(parents=True)
    (root / "tree" / "below" / "file").write_bytes(bytes(10))
    shutil.rmtree(root / "tree")
    os.sync()


def test_what_python_does_is_recorded(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "old.txt").write_text("there before")
    before = Snapshot(root)
    with Recorder(root, tmp_path / "log"):
        _everything_that_python_does(root)
        (tmp_path / "elsewhere").write_text("is no part of it")
    run, store = understand(before, read_log(tmp_path / "log")), Store(tmp_path / "store")
    assert replayed(run, store) == tree_of(root, store)
    assert {Path(path).name for path in replayed(run, store)} == {"a", "raw", "d", "old.txt", "opened"}
    assert len(run.syncs) == 3


@pytest.mark.parametrize(
    "call",
    (
        lambda root: posix.rename(root / "file", root / "other"),
        lambda root: posix.unlink(root / "file"),
        lambda root: posix.mkdir(root / "new"),
        lambda root: posix.open(root / "file", os.O_WRONLY),
        lambda root: os.link(root / "file", root / "link"),
        lambda root: io.FileIO(root / "file", "w"),
    ),
)
def test_what_cannot_be_recorded_is_refused(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("x")
    with pytest.raises(NotRecorded, match="is not noted"), Recorder(root, tmp_path / "log"), pytest.raises(NotRecorded):
        call(root)
    assert (root / "file").read_text() == "x"


# ---- the rules ----


def states_of(folder: Path, work: Callable[[Path], None], loses: bool = True) -> set[tuple[tuple[str, Any], ...]]:
    """What a crash at the end may leave, as pairs of paths and contents."""
    root = folder / "root"
    root.mkdir()
    (root / "old").write_bytes(b"o" * 10)
    before = Snapshot(root)
    with Recorder(root, folder / "log"):
        work(root)
    store = Store(folder / "store")
    crashes = Crashes(understand(before, read_log(folder / "log")), store, QUICK, random.Random(0), loses)
    return {
        tuple((path, digest and store.content(digest)) for path, digest in sorted(state.tree.items()))
        for state in crashes.at(math.inf)
    }


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


OLD = ("old", b"o" * 10)


def test_names_without_a_sync_are_there_or_not(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        (root / "d").mkdir()
        (root / "old").rename(root / "new")

    new = ("new", OLD[1])
    assert states_of(tmp_path, work) == {(OLD,), (("d", None), OLD), (new,), (("d", None), new)}


def test_names_with_a_sync_are_there(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        (root / "d").mkdir()
        synced(root)
        (root / "d" / "e").mkdir()
        (root / "old").unlink()

    both = (("d", None), ("d/e", None))
    assert states_of(tmp_path, work) == {both, both[:1], (*both, OLD), (*both[:1], OLD)}


def test_a_sync_of_a_file_says_nothing_of_its_name(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        (root / "new").write_bytes(b"n")
        synced(root / "new")

    assert states_of(tmp_path, work) == {(("new", b"n"), OLD), (OLD,)}


def test_contents_without_a_sync_are_torn(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        with open(root / "old", "r+b") as stream:
            stream.write(b"n" * (2 * PAGE))

    found = {dict(state)["old"] for state in states_of(tmp_path, work)}
    first, second = b"n" * PAGE, b"n" * PAGE
    kept = b"o" * 10
    assert {kept, first + second, kept + bytes(2 * PAGE - 10), kept + bytes(PAGE - 10) + second, first} <= found
    assert any(b"\xa5" in content for content in found)
    assert all(content[:10] in (kept, first[:10]) for content in found if content)


def test_fdatasync_keeps_what_was_written_but_no_cut(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        fd = os.open(root / "old", os.O_WRONLY)
        os.pwrite(fd, b"n" * PAGE, 0)
        os.ftruncate(fd, 100)
        os.fdatasync(fd)
        os.close(fd)

    assert states_of(tmp_path, work) == {(("old", b"n" * 100),), (("old", b"n" * PAGE),)}


def test_a_process_that_dies_loses_nothing(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        (root / "new").write_bytes(b"n")
        (root / "old").unlink()

    assert states_of(tmp_path, work, loses=False) == {(("new", b"n"),)}


def test_a_sync_covers_what_was_over_when_it_began(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    before = Snapshot(root)
    with Recorder(root, tmp_path / "log"):
        (root / "d").mkdir()
        synced(root)
    run = understand(before, read_log(tmp_path / "log"))
    crashes = Crashes(run, Store(tmp_path / "store"), QUICK, random.Random(0))
    assert [list(state.tree) for state in crashes.at(math.inf)] == [["d"]]
    run.namings[0].end = run.syncs[0].begin + 1
    assert sorted(list(state.tree) for state in crashes.at(math.inf)) == [[], ["d"]]
