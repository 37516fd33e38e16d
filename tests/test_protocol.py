"""The save protocol: the checkpoint that is there stays good until the new one is complete, and rubbish goes away."""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fault._support import (
    MIB,
    StateDict,
    blank,
    data_files,
    equal,
    failure,
    fault,
    load,
    needed_files,
    save,
    small_state,
    stock_load,
    tensor_state,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import _C, Checkpointer, Replicated, RingReader, RingWriter
from dcpring.base.files import new_tag
from dcpring.format.metadata import load_metadata, read_trailer
from dcpring.store import layout

OLD, NEW = small_state(1), small_state(2)


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def failed_save(path: Path, *where: Any, state: StateDict = NEW, **options: Any) -> BaseException:
    """Saves with a fault, which must make it fail."""
    with pytest.raises(CheckpointException) as caught, fault(*where):
        save(state, path, **options)
    return failure(caught.value)


# ---- one process ----


@pytest.mark.parametrize("call", ("open_below", "fallocate", "map", "ftruncate", "fdatasync"))
def test_failure_while_writing_data(tmp_path: Path, call: str) -> None:
    save(OLD, tmp_path)
    before = names(tmp_path)
    error = failed_save(tmp_path, call)
    assert isinstance(error, OSError)
    assert "__0_0." in str(error.filename)
    assert str(tmp_path) in str(error)
    assert names(tmp_path) == before
    assert equal(load(OLD, tmp_path), OLD)
    save(NEW, tmp_path)
    assert equal(load(NEW, tmp_path), NEW)
    assert names(tmp_path) == needed_files(tmp_path)


def calls_of_a_save(path: Path, call: str) -> int:
    save(OLD, path, engine="uring")
    _C.arm_fault(call, 0, 0, False)
    save(OLD, path, engine="uring")
    return _C.disarm_fault()


@pytest.mark.parametrize(("call", "from_last", "left"), (("pwrite", 0, 1), ("fsync", 1, 1), ("rename", 0, 2)))
def test_failure_before_the_rename(tmp_path: Path, call: str, from_last: int, left: int) -> None:
    """What is there stays; one rank alone also removes its data, if it fails before the rename."""
    nth = calls_of_a_save(tmp_path, call) - from_last
    error = failed_save(tmp_path, call, nth, errno.EIO, engine="uring")
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert call == "fsync" or ".metadata.tmp" in str(error) or "rename" in str(error)  # names are synced beside it
    assert equal(load(OLD, tmp_path), OLD)
    assert len(data_files(tmp_path)) == left
    save(NEW, tmp_path)
    assert equal(load(NEW, tmp_path), NEW)
    assert names(tmp_path) == needed_files(tmp_path)


def test_failure_after_the_rename(tmp_path: Path) -> None:
    """The new checkpoint is there, perhaps not durably: the error says so, and the old one's files are kept."""
    error = failed_save(tmp_path, "fsync", calls_of_a_save(tmp_path, "fsync"), errno.EIO, engine="uring")
    assert "after the rename that committed" in str(error)
    assert equal(load(NEW, tmp_path), NEW)
    assert len(data_files(tmp_path)) == 2
    save(OLD, tmp_path)
    assert equal(load(OLD, tmp_path), OLD)
    assert names(tmp_path) == needed_files(tmp_path)


def test_failure_to_remove_what_is_superseded_is_no_failure(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    with fault("unlink", 1, errno.EIO, True):
        save(NEW, tmp_path)
    assert equal(load(NEW, tmp_path), NEW)
    assert len(data_files(tmp_path)) == 2
    save(OLD, tmp_path)
    assert names(tmp_path) == needed_files(tmp_path)


def test_failure_to_clean_up_does_not_hide_why_the_save_failed(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    error = failed_save(tmp_path, None, 10, errno.EDQUOT, True)
    assert isinstance(error, OSError)
    assert error.errno in (errno.EDQUOT, errno.ENOMEM)  # by the call that happens to be the tenth
    assert "unlink" not in str(error)
    assert equal(load(OLD, tmp_path), OLD)


def test_every_save_writes_files_of_its_own(tmp_path: Path) -> None:
    seen: set[str] = set()
    for number in range(5):
        save(small_state(number), tmp_path)
        files = data_files(tmp_path)
        assert len(files) == 1
        assert not files & seen
        seen |= files


def test_keep_superseded(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    (first,) = data_files(tmp_path)
    reader = RingReader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)

    save(NEW, tmp_path, keep_superseded=True)
    assert first in data_files(tmp_path)
    assert equal(load(NEW, tmp_path), NEW)

    state = blank(OLD)  # a reader that had begun before goes on
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    assert torch.equal(state["large"], OLD["large"])

    save(OLD, tmp_path, keep_superseded=True)
    assert first not in data_files(tmp_path)
    assert len(data_files(tmp_path)) == 2
    save(NEW, tmp_path)
    assert names(tmp_path) == needed_files(tmp_path)


def test_unrelated_files_are_left_alone(tmp_path: Path) -> None:
    unrelated = {
        "README.md",
        "model.distcp",
        "__0_0.distcp",
        "__1_7.distcp",
        "__0_0.zz.distcp",
        ".metadata.bak",
        "__x_",
    }
    for name in unrelated:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__0_0.0123456789abcdef.distcp").write_bytes(b"mine")
    for state in (OLD, NEW, OLD):
        save(state, tmp_path)
    assert names(tmp_path) == needed_files(tmp_path) | unrelated | {"folder"}
    assert all((tmp_path / name).read_bytes() == b"mine" for name in unrelated)
    assert (tmp_path / "folder" / "__0_0.0123456789abcdef.distcp").exists()


def test_overwriting_a_stock_checkpoint(tmp_path: Path) -> None:
    dcp.save(OLD, storage_writer=FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    stock = data_files(tmp_path)
    (tmp_path / "__9_0.distcp").write_bytes(b"of nobody's checkpoint")
    failed_save(tmp_path, "fdatasync")
    assert data_files(tmp_path) == stock | {"__9_0.distcp"}
    assert equal(stock_load(OLD, tmp_path), OLD)
    failed_save(tmp_path, "rename")
    assert equal(stock_load(OLD, tmp_path), OLD)
    save(NEW, tmp_path)
    assert equal(stock_load(NEW, tmp_path), NEW)
    assert names(tmp_path) == needed_files(tmp_path) | {"__9_0.distcp"}


def test_a_stock_checkpoint_over_ours_and_back(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    dcp.save(NEW, storage_writer=FileSystemWriter(tmp_path, overwrite=True), no_dist=True)
    assert equal(load(NEW, tmp_path), NEW)
    save(OLD, tmp_path)
    assert equal(load(OLD, tmp_path), OLD)
    assert names(tmp_path) == needed_files(tmp_path)


def test_overwrite_false(tmp_path: Path) -> None:
    save(OLD, tmp_path / "here", overwrite=False)
    with pytest.raises(CheckpointException) as caught:
        save(NEW, tmp_path / "here", overwrite=False)
    assert isinstance(failure(caught.value), RuntimeError)
    assert str(tmp_path / "here") in str(caught.value)
    assert equal(load(OLD, tmp_path / "here"), OLD)
    assert names(tmp_path / "here") == needed_files(tmp_path / "here")


@pytest.mark.parametrize("kind", ("file", "symlink", "hard link"))
def test_a_stale_tmp_file(tmp_path: Path, kind: str) -> None:
    """What a crash has left, or what someone has put there: it is replaced, never written through."""
    save(OLD, tmp_path)
    tmp = tmp_path / ".metadata.tmp"
    other = tmp_path / "other"
    other.write_bytes(b"not to be touched")
    if kind == "file":
        tmp.write_bytes(b"x" * 100_000)
    elif kind == "symlink":
        tmp.symlink_to("other")
    else:
        tmp.hardlink_to(other)
    assert equal(load(OLD, tmp_path), OLD)
    save(NEW, tmp_path)
    assert equal(load(NEW, tmp_path), NEW)
    assert other.read_bytes() == b"not to be touched"
    assert not tmp.exists()
    assert not (tmp_path / ".metadata").is_symlink()


def test_one_file_per_item(tmp_path: Path) -> None:
    save(OLD, tmp_path, single_file_per_rank=False)
    before = names(tmp_path)
    assert len(data_files(tmp_path)) > 5
    with pytest.raises(CheckpointException) as caught, fault("fdatasync", 4):
        save(NEW, tmp_path, single_file_per_rank=False)
    assert "__0_" in str(failure(caught.value))  # the fourth to be synced, as several are at a time
    assert names(tmp_path) == before, "files before the failing one are partial too"
    assert equal(load(OLD, tmp_path), OLD)
    save(NEW, tmp_path, single_file_per_rank=False)
    assert equal(stock_load(NEW, tmp_path), NEW)
    assert not data_files(tmp_path) & before
    save(OLD, tmp_path)
    assert len(data_files(tmp_path)) == 1


def test_nothing_to_write(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    save({}, tmp_path)
    assert names(tmp_path) == {".metadata"}
    assert load({}, tmp_path) == {}


class FailingPlanner(DefaultSavePlanner):
    """Fails at an item, in the middle of a file."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "half":
            raise RuntimeError("cannot resolve half")
        return super().resolve_data(write_item)


class NotBytesPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.getvalue() if isinstance(data, io.BytesIO) else data


@pytest.mark.parametrize("planner", (FailingPlanner, NotBytesPlanner))
def test_failing_planner(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    save(OLD, tmp_path)
    before = names(tmp_path)
    with pytest.raises(CheckpointException):
        dcp.save(NEW, storage_writer=RingWriter(tmp_path), planner=planner(), no_dist=True)
    assert names(tmp_path) == before
    assert equal(load(OLD, tmp_path), OLD)


def test_plan_caching_with_failures_in_between(tmp_path: Path) -> None:
    """A cached plan carries what the first save has put in it; every save still is one of its own."""
    calls = (None, "fdatasync", None, "rename", "fallocate", None, None)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    writer = RingWriter(tmp_path)
    current: StateDict = {}
    seen: set[str] = set()
    for number, call in enumerate(calls):
        state = small_state(number)
        if call is None:
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
            current = state
            assert names(tmp_path) == needed_files(tmp_path)
            assert not data_files(tmp_path) & seen
        else:
            with pytest.raises(CheckpointException), fault(call):
                dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        seen |= data_files(tmp_path)
        assert equal(load(current, tmp_path), current)
        assert equal(stock_load(current, tmp_path), current)


def test_metadata_that_cannot_be_read_keeps_its_files(tmp_path: Path) -> None:
    """Whether they are needed cannot be known until a new checkpoint is committed."""
    save(OLD, tmp_path)
    (old,) = data_files(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(whole[:-100])
    failed_save(tmp_path, "rename")
    assert old in data_files(tmp_path)
    (tmp_path / ".metadata").write_bytes(whole)
    assert equal(load(OLD, tmp_path), OLD)


def test_a_relative_path_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer, reader, resetting = RingWriter("a/b"), RingReader(Path("a/b")), RingWriter("none")
    checkpointer = Checkpointer("steps", {"state": Replicated(OLD)})
    resetting.reset("c")
    monkeypatch.chdir("/")
    checkpointer.save(1)
    checkpointer.close()
    assert checkpointer.path(1) == tmp_path / "steps" / "step-1" and checkpointer.steps() == [1]
    dcp.save(OLD, storage_writer=writer, no_dist=True)
    dcp.save(OLD, storage_writer=resetting, no_dist=True)
    for path in (tmp_path / "a" / "b", tmp_path / "c"):
        assert equal(load(OLD, path), OLD)
    loaded = blank(OLD)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert equal(loaded, OLD)


# ---- several processes ----


def _rank_state(seed: int) -> StateDict:
    """Every rank has a key of its own."""
    return {f"rank{dist.get_rank()}": tensor_state(seed * 10 + dist.get_rank(), mib=1, count=1)["weight.0"]}


def _save_on_ranks(path: Path, seed: int, **options: Any) -> str:
    """ "" or the failure's text, which every rank must see."""
    try:
        dcp.save(_rank_state(seed), storage_writer=RingWriter(path, **options))
    except CheckpointException as error:
        return str(error)
    return ""


def _loads_as(path: Path, seed: int, reader: type = RingReader) -> bool:
    state = blank(_rank_state(seed))
    dcp.load(state, storage_reader=reader(path))
    return equal(state, _rank_state(seed))


def _failing_rank(path: Path, failing: int, call: str) -> dict[str, Any]:
    rank = dist.get_rank()
    assert _save_on_ranks(path, 1) == ""
    before = data_files(path)
    dist.barrier()
    if rank == failing:
        _C.arm_fault(call, 1, errno.ENOSPC, False)
    message = _save_on_ranks(path, 2)
    _C.disarm_fault()
    dist.barrier()
    left = data_files(path) - before
    old_loads = _loads_as(path, 1)
    dist.barrier()
    again = _save_on_ranks(path, 3)
    new_loads = _loads_as(path, 3) and _loads_as(path, 3, FileSystemReader)
    dist.barrier()
    clean = names(path) == needed_files(path)
    return {"message": message, "left": left, "old": old_loads, "again": again, "new": new_loads, "clean": clean}


@pytest.mark.parametrize(
    ("world_size", "failing", "call"), ((2, 1, "fdatasync"), (2, 0, "fallocate"), (4, 2, "uring_result"))
)
def test_one_failing_rank_fails_all(tmp_path: Path, world_size: int, failing: int, call: str) -> None:
    for rank, seen in enumerate(_distributed.run(world_size, _failing_rank, tmp_path, failing, call)):
        assert f"(RANK {failing})" in seen["message"], f"rank {rank} did not hear of it"
        assert "[Errno 28] No space left on device" in seen["message"]
        assert f"{tmp_path}/__{failing}_0." in seen["message"]
        others = {r for r in range(world_size) if r != failing}
        assert {int(name.split("_")[2]) for name in seen["left"]} == others, "the failing rank's is to be gone"
        assert seen["old"]
        assert seen["again"] == ""
        assert seen["new"]
        assert seen["clean"], "what the others had written is to be gone after the next save"


def _failing_commit(path: Path) -> tuple[str, bool]:
    assert _save_on_ranks(path, 1) == ""
    dist.barrier()
    if dist.get_rank() == 0:
        _C.arm_fault("rename", 1, errno.EIO, False)
    message = _save_on_ranks(path, 2)
    _C.disarm_fault()
    dist.barrier()
    return message, _loads_as(path, 1)


def test_failing_commit_fails_all(tmp_path: Path) -> None:
    for message, old in _distributed.run(2, _failing_commit, tmp_path):
        assert "rename failed" in message
        assert str(tmp_path) in message
        assert old


def _caching_on_ranks(path: Path) -> None:
    """As the name says; the failing rank changes from save to save."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    current = 0
    for number in range(6):
        if number % 2 == 1 and dist.get_rank() == number // 2 % 2:
            _C.arm_fault("fdatasync", 1, errno.EIO, False)
        try:
            dcp.save(_rank_state(number), storage_writer=RingWriter(path), planner=planner)
            current = number
        except CheckpointException:
            assert number % 2 == 1
        finally:
            _C.disarm_fault()
        dist.barrier()
        assert current == number - number % 2
        assert _loads_as(path, current)
        dist.barrier()


def test_plan_caching_on_ranks(tmp_path: Path) -> None:
    _distributed.run(2, _caching_on_ranks, tmp_path)


# ---- metadata of each rank (use_collectives=False), and the two kinds in turn ----


def _save_locally(path: Path, seed: int) -> str:
    try:
        dcp.save(_rank_state(seed), storage_writer=RingWriter(path), use_collectives=False)
    except OSError as error:
        dist.barrier()  # the others are in the one that ends DCP's save
        return str(error)
    return ""


def _load_failure(path: Path, seed: int) -> str:
    state = blank(_rank_state(seed))
    try:
        dcp.load(state, storage_reader=RingReader(path))
    except CheckpointException as error:
        return str(error)
    return "" if equal(state, _rank_state(seed)) else "loaded wrongly"


def _both_kinds(path: Path) -> None:
    rank = dist.get_rank()
    assert _save_locally(path, 1) == ""
    dist.barrier()
    assert _load_failure(path, 1) == ""
    dist.barrier()
    assert _save_locally(path, 2) == ""
    dist.barrier()
    assert len(data_files(path)) == 2
    assert _load_failure(path, 2) == ""
    dist.barrier()
    assert _save_on_ranks(path, 3) == ""
    dist.barrier()
    assert names(path) == needed_files(path), "the ranks' own metadata is superseded"
    assert _load_failure(path, 3) == ""
    dist.barrier()
    assert _save_locally(path, 4) == ""
    dist.barrier()
    assert _load_failure(path, 4) == "", f"rank {rank}: the global metadata is stale"
    dist.barrier()
    assert _save_on_ranks(path, 5) == ""
    dist.barrier()
    assert names(path) == needed_files(path)
    assert _load_failure(path, 5) == ""


def test_both_kinds_of_metadata_in_turn(tmp_path: Path) -> None:
    _distributed.run(2, _both_kinds, tmp_path)


def _interrupted_locally(path: Path) -> tuple[str, str, str, str]:
    rank = dist.get_rank()
    assert _save_locally(path, 1) == ""
    dist.barrier()
    if rank == 1:
        _C.arm_fault("rename", 1, errno.EIO, False)
    saved = _save_locally(path, 2)
    _C.disarm_fault()
    dist.barrier()
    loaded = _load_failure(path, 2)
    dist.barrier()
    again = _save_locally(path, 3)
    dist.barrier()
    return saved, loaded, again, _load_failure(path, 3)


def test_interrupted_local_saves_are_no_checkpoint(tmp_path: Path) -> None:
    """Rank 0 has committed and rank 1 has not: neither the old nor the new is there, and the load says so."""
    results = _distributed.run(2, _interrupted_locally, tmp_path)
    assert results[0][0] == ""
    assert "rename failed" in results[1][0]
    for _, loaded, again, after in results:
        assert "not of one save" in loaded
        assert "differ" in loaded
        assert again == ""
        assert after == "", "a save that all ranks have done is a checkpoint again"


def _missing_local(path: Path) -> str:
    rank = dist.get_rank()
    if rank == 0:
        assert _save_locally(path, 1) == ""
    else:
        dist.barrier()  # the one that ends DCP's save
    return _load_failure(path, 1)


def test_a_missing_rank_is_no_checkpoint(tmp_path: Path) -> None:
    for message in _distributed.run(2, _missing_local, tmp_path):
        assert "ranks 1 have none" in message


def _in_subgroups(path: Path) -> list[str]:
    """Ranks 1 and 2, then 0 and 2 of three save and load; rank 2 has saved more often than the others."""
    found = []
    for turn, members in enumerate(([1, 2], [0, 2], [1, 2], [0, 2])):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            folder = path / "-".join(map(str, members))
            for seed in (2 * turn, 2 * turn + 1):
                state = {f"own {dist.get_rank(group)}": torch.full((50,), float(seed))}
                dcp.save(state, storage_writer=RingWriter(folder), process_group=group, use_collectives=False)
            loaded = blank(state)
            dcp.load(loaded, storage_reader=RingReader(folder), process_group=group)
            assert equal(loaded, state)
            trailer = read_trailer(folder / f"__{dist.get_rank(group)}.metadata")
            assert trailer is not None
            found.append(f"{trailer.world_size}")
            (path / f"id-{turn}-{dist.get_rank()}").write_text(trailer.group_id)
        dist.barrier()
    return found


def test_local_saves_of_a_subgroup(tmp_path: Path) -> None:
    """What is complete is told by the ranks that have saved, not by all that there are."""
    assert _distributed.run(3, _in_subgroups, tmp_path) == [["2"] * 2, ["2"] * 2, ["2"] * 4]
    ids = {
        name: (tmp_path / f"id-{name}").read_text() for name in ("0-1", "0-2", "1-0", "1-2", "2-1", "2-2", "3-0", "3-2")
    }
    assert ids["0-1"] == ids["0-2"] != ids["2-1"] == ids["2-2"] and ids["1-0"] == ids["1-2"] != ids["3-0"]


def _half_of_a_subgroup(path: Path) -> str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        dcp.save({"a": torch.ones(3)}, storage_writer=RingWriter(path), process_group=group, use_collectives=False)
    if dist.get_rank() == 2:
        dist.barrier(group)  # the one that ends DCP's save
    dist.barrier()
    try:
        dcp.load({"a": torch.zeros(3)}, storage_reader=RingReader(path), no_dist=True)
    except CheckpointException as error:
        return str(error)
    return ""


def test_half_of_a_subgroup_is_no_checkpoint(tmp_path: Path) -> None:
    for message in _distributed.run(3, _half_of_a_subgroup, tmp_path):
        assert "not of one save of 2 ranks: ranks 1 have none" in message


def test_local_save_over_a_global_one_that_stock_wrote(tmp_path: Path) -> None:
    """Neither has dcpring's trailer to tell which is newer from; the later one must load."""
    dcp.save(OLD, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    dcp.save(NEW, storage_writer=RingWriter(tmp_path), no_dist=True, use_collectives=False)
    assert equal(load(NEW, tmp_path), NEW)
    dcp.save(OLD, storage_writer=FileSystemWriter(tmp_path, overwrite=True), no_dist=True)
    assert equal(load(OLD, tmp_path), OLD)


def save_locally_here(state: StateDict, path: Path) -> None:
    dcp.save(state, storage_writer=RingWriter(path), no_dist=True, use_collectives=False)


def save_by_stock(state: StateDict, path: Path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path, overwrite=True), no_dist=True)


def save_without_removing(state: StateDict, path: Path) -> None:
    """As after a crash between the commit and the removal of what is superseded."""
    with fault("unlink", 1, errno.EIO, True):
        save(state, path)


@pytest.mark.parametrize("save_globally", (save_by_stock, save_without_removing))
def test_a_damaged_global_save_does_not_bring_back_an_older_local_one(tmp_path: Path, save_globally: Any) -> None:
    """DCP turns to the rank's own metadata whenever the global one fails to load."""
    save_locally_here(OLD, tmp_path)
    save_globally(NEW, tmp_path)
    assert (tmp_path / "__0.metadata").exists()
    assert equal(load(NEW, tmp_path), NEW)
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:-200])
    with pytest.raises(CheckpointException) as caught:
        load(OLD, tmp_path)
    assert "damaged" in str(caught.value)
    assert "older" in str(caught.value)
    (tmp_path / ".metadata").unlink()
    assert equal(load(OLD, tmp_path), OLD)


def _interrupted_over_global(path: Path) -> tuple[str, str, bool]:
    rank = dist.get_rank()
    assert _save_on_ranks(path, 1) == ""
    dist.barrier()
    if rank == 1:
        _C.arm_fault("rename", 1, errno.EIO, False)
    saved = _save_locally(path, 2)
    _C.disarm_fault()
    dist.barrier()
    loaded = _load_failure(path, 2)
    dist.barrier()
    (path / f"__{rank}.metadata").unlink(missing_ok=True)
    dist.barrier()
    return saved, loaded, _loads_as(path, 1)


def test_an_interrupted_local_save_leaves_the_global_one_whole(tmp_path: Path) -> None:
    """Which of the two is wanted the user must say, by removing the other's metadata."""
    for _, loaded, old in _distributed.run(2, _interrupted_over_global, tmp_path):
        assert "remove" in loaded
        assert f"{tmp_path}/.metadata" in loaded
        assert old


class RemovedBeforeCommit(RingWriter):
    """Another save to the same directory takes this one's files for rubbish."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        save(OLD, Path(self.path))
        super().finish(*args, **kwargs)


def test_two_saves_at_once_do_not_commit_what_is_not_there(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(NEW, storage_writer=RemovedBeforeCommit(tmp_path), no_dist=True)
    assert "another save to the same directory" in str(failure(caught.value))
    assert equal(load(OLD, tmp_path), OLD)


class FolderRemoved(RingWriter):
    def finish(self, *args: Any, **kwargs: Any) -> None:
        shutil.rmtree(self.path)
        super().finish(*args, **kwargs)


def test_a_folder_that_is_removed_while_it_is_saved_to(tmp_path: Path) -> None:
    """It was an error of the listing of that folder."""
    with pytest.raises(CheckpointException) as caught:
        dcp.save(NEW, storage_writer=FolderRemoved(tmp_path / "folder"), no_dist=True)
    assert "was removed before the save could be committed" in str(failure(caught.value))


# ---- torch's names ----


@pytest.mark.parametrize("single", (True, False))
def test_files_are_called_as_torchs(tmp_path: Path, single: bool) -> None:
    dcp.save(NEW, storage_writer=FileSystemWriter(tmp_path / "torch", single_file_per_rank=single), no_dist=True)
    save(NEW, tmp_path / "ours", file_names="torch", single_file_per_rank=single)
    assert names(tmp_path / "ours") == names(tmp_path / "torch")
    assert equal(load(NEW, tmp_path / "ours"), NEW) and equal(stock_load(NEW, tmp_path / "ours"), NEW)
    save(OLD, tmp_path / "ours")
    assert equal(load(OLD, tmp_path / "ours"), OLD)
    assert names(tmp_path / "ours") == needed_files(tmp_path / "ours")


def test_torchs_names_are_not_for_a_save_over_a_checkpoint(tmp_path: Path) -> None:
    for number, saved in enumerate((save, save_by_torch, functools.partial(save, file_names="torch"))):
        path = tmp_path / str(number)
        saved(OLD, path)
        before = names(path)
        with pytest.raises(CheckpointException) as caught:
            save(NEW, path, file_names="torch")
        assert 'leave file_names at "unique"' in str(failure(caught.value))
        assert names(path) == before and equal(load(OLD, path), OLD)


def save_by_torch(state: StateDict, path: Path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def test_torchs_names_replace_what_a_failed_save_has_left(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"mine")
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "__0_0.distcp").hardlink_to(elsewhere)
    (path / "__7_0.distcp").write_bytes(b"of another rank")
    save(NEW, path, file_names="torch")
    assert equal(load(NEW, path), NEW)
    assert elsewhere.read_bytes() == b"mine"
    assert names(path) == {".metadata", "__0_0.distcp", "__7_0.distcp"}


def test_a_failed_save_by_torchs_names_leaves_nothing(tmp_path: Path) -> None:
    failed_save(tmp_path, "fdatasync", file_names="torch")
    assert names(tmp_path) == set()
    save(NEW, tmp_path, file_names="torch")
    assert equal(load(NEW, tmp_path), NEW)


def test_a_file_by_torchs_name_that_is_removed_before_the_commit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(NEW, storage_writer=FolderRemoved(tmp_path / "folder", file_names="torch"), no_dist=True)
    assert "was removed before the save could be committed" in str(failure(caught.value))


def _save_by_torchs_names(path: Path) -> None:
    for collectives in (True, False):
        folder = path / str(collectives)
        for name, writer in ("torch", FileSystemWriter), ("ours", functools.partial(RingWriter, file_names="torch")):
            dcp.save(_rank_state(3), storage_writer=writer(folder / name), use_collectives=collectives)
            dist.barrier()
        assert names(folder / "ours") == names(folder / "torch")
        state = blank(_rank_state(3))
        dcp.load(state, storage_reader=FileSystemReader(folder / "ours")) if collectives else None
        assert not collectives or equal(state, _rank_state(3))


def test_files_of_ranks_are_called_as_torchs(tmp_path: Path) -> None:
    _distributed.run(2, _save_by_torchs_names, tmp_path)


def test_options_of_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='must be "unique" or "torch"'):
        RingWriter(tmp_path, file_names="stock")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='needs file_names="unique"'):
        RingWriter(tmp_path, file_names="torch", unchanged="link")


# ---- names ----


def test_names_that_are_ours() -> None:
    tag = new_tag()
    name = layout.data_file_name(3, 14, tag)
    assert name == f"__3_14.{tag}.distcp"
    assert tag != new_tag()


def test_metadata_refers_to_files_that_are_there(tmp_path: Path) -> None:
    save(OLD, tmp_path, block_size_bytes=MIB)
    metadata, trailer = load_metadata(tmp_path / ".metadata")
    assert trailer is not None
    assert set(trailer.files) == data_files(tmp_path)
    for info in metadata.storage_data.values():
        assert info.offset + info.length <= os.path.getsize(tmp_path / info.relative_path)
