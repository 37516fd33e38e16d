"""Several hosts: errors that name them, and disks that are not shared. Ranks of this machine are told other hosts."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _resume import error_of
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import Checkpointer, PerRank, Replicated, RingReader, RingSavePlanner, RingWriter, Sharded
from dcpring.base import groups, whose
from dcpring.base.whose import about_ranks


class Counter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def on_hosts(hosts: Sequence[str]) -> Any:
    """Each rank is on the host of its place."""
    return mock.patch("dcpring.base.groups.host_id", lambda: f"{hosts[dist.get_rank()]}/boot")


# ---- texts ----


@pytest.mark.parametrize(
    ("text", "members", "about"),
    (
        ("rank 1: no space", range(3), " (rank 1 on host b)"),
        ("ranks 0-2 differ", range(3), " (rank 0 on host a, ranks 1-2 on host b)"),
        ("ranks 0, 2: no", range(3), " (rank 0 on host a, rank 2 on host b)"),
        ("there is nothing on 3 ranks", range(3), ""),
        ("rank 7 of another job", range(3), ""),
        ("rank 1: no space (rank 1 on host b)", range(3), ""),
        (
            "rank 0: no",
            [2, 1],
            " (rank 0 on host b) (ranks are those of the process group, which has the global ranks 2, 1 in this order)",
        ),
    ),
)
def test_what_is_said_of_ranks(text: str, members: Sequence[int], about: str) -> None:
    hosts = {0: "a", 1: "b", 2: "b"}
    with mock.patch.object(whose, "host_names", lambda ranks: {rank: hosts[rank] for rank in ranks}):
        assert about_ranks(text, list(members)) == about


def failing(folder: Path, hosts: Sequence[str]) -> list[str]:
    """What ranks read whose save fails on rank 1, in its storage, its planner, and in a Checkpointer."""
    rank, found = dist.get_rank(), []
    write_data = RingWriter.write_data

    def no_space(self: RingWriter, *args: Any) -> Any:
        with mock.patch.object(
            self, "_write_files", side_effect=OSError(28, "No space left on device", "/same/everywhere")
        ):
            return write_data(self, *args)

    with on_hosts(hosts):
        with mock.patch.object(RingWriter, "write_data", no_space) if rank == 1 else mock.MagicMock():
            found.append(_text_of(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=RingWriter(folder / "a"))))
        planner = RingSavePlanner(check_replicas="error")
        values = {"w": torch.full((3,), rank)}
        found.append(_text_of(lambda: dcp.save(values, checkpoint_id=folder / "b", planner=planner)))
        with Checkpointer(folder / "c", {"n": Replicated(Counter(rank))}) as checkpointer:
            found.append(error_of(checkpointer.save, 1))
        found.append(_text_of(lambda: dcp.load({"w": torch.ones(3)}, storage_reader=RingReader(folder / "none"))))
    return found


def _text_of(call: Any) -> str:
    with pytest.raises(CheckpointException) as caught:
        call()
    return str(caught.value)


def test_errors_name_the_host_where_there_are_several(tmp_path: Path) -> None:
    for stored, planned, resumed, loaded in _distributed.run(3, failing, tmp_path, ["a", "b", "b"]):
        assert "(RANK 1)" in stored and "No space left" in stored and "on host b" in stored
        assert "rank 0 on host a" in planned
        assert "ranks 1-2 on host b" in resumed
        assert "on host a" in loaded and "on host b" in loaded, loaded


def test_errors_name_no_host_where_there_is_one(tmp_path: Path) -> None:
    for texts in _distributed.run(3, failing, tmp_path, ["a"] * 3):
        assert not any("on host" in text for text in texts)


# ---- what ranks tell each other ----


class Stage(torch.nn.Module):
    """Some layers of a model."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(layer): torch.nn.Linear(1, 1) for layer in layers})


def stages(folder: Path) -> tuple[int, str]:
    """The bytes that arrive at a rank in a load, of which each has a part of the layers; with too few, the error."""
    layers, rank, world = 128, dist.get_rank(), dist.get_world_size()
    with Checkpointer(folder, {"model": Stage(range(rank, layers, world))}) as checkpointer:
        checkpointer.save(1)
    arrived = 0
    gather, common_bits = groups.gather, groups.common_bits

    def counted(group: Any, data: bytes, *others: Any) -> list[bytes]:
        nonlocal arrived
        found = gather(group, data, *others)
        arrived += sum(map(len, found))
        return found

    def counted_bits(group: Any, data: bytes, *others: Any) -> bytes:
        nonlocal arrived
        arrived += len(data)
        return common_bits(group, data, *others)

    with (
        mock.patch.object(groups, "gather", counted),
        mock.patch.object(groups, "common_bits", counted_bits),
        Checkpointer(folder, {"model": Stage(range(rank, layers, world))}) as checkpointer,
    ):
        arrived = 0
        checkpointer.load()
    with Checkpointer(folder, {"model": Stage(range(3 if rank else 0, layers, 2))}) as checkpointer:
        return arrived, error_of(checkpointer.load)


def test_stages_do_not_tell_each_other_all_keys_of_others(tmp_path: Path) -> None:
    """Each rank told all ranks the names of what it has no place for."""
    for arrived, text in _distributed.run(4, stages, tmp_path):
        assert arrived < 4 * 2500, "words of four ranks, without names"
        assert "'model.layers.1.bias', 'model.layers.1.weight' are in the checkpoint, but not here" in text


# ---- disks that are not shared ----


def with_own_disks(folder: Path, hosts: Sequence[str], blocking: bool) -> tuple[list[str], list[str], list[str]]:
    """Saves where each host has a directory of its own: what is said, what errors are, what is left on the disk."""
    rank, said, errors = dist.get_rank(), Listener(), []
    disk = folder / hosts[rank]
    for missing in range(2):
        (disk / f"step-{missing}").mkdir(parents=True, exist_ok=True)
    if rank == dist.get_world_size() - 1:
        (disk / "step-0" / "mine.txt").touch()
    state = {"w": Sharded(Weights()), "n": PerRank(Counter(rank))}
    with on_hosts(hosts), said, mock.patch("dcpring.resume.retention._MOMENT_SECONDS", 0.2):
        with Checkpointer(disk, state, keep_last=2) as checkpointer:
            for step in range(1, 6):
                checkpointer.save(step, blocking).wait()
        with Checkpointer(disk, state) as checkpointer:
            errors += [error_of(checkpointer.load), error_of(checkpointer.load, 5)]
            errors.append(error_of(checkpointer.load, missing_ok=True))
    dist.barrier()
    names = sorted(f"{path.relative_to(disk)}" for path in disk.glob("**/*"))
    return said.texts, errors, [name for name in names if "/" not in name or name.endswith(".txt")]


class Weights(Counter):
    def __init__(self) -> None:
        self.tensors = {"w": torch.full((100,), 1.0 + dist.get_rank()), f"own_{dist.get_rank()}": torch.ones(3)}

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor for name, tensor in self.tensors.items() if name != "w"}


class Listener(logging.Handler):
    """What dcpring warns of, in a ``with``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Listener:
        logging.getLogger("dcpring").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("dcpring").removeHandler(self)


@pytest.mark.parametrize("blocking", (True, False))
def test_each_host_has_a_disk_of_its_own(tmp_path: Path, blocking: bool) -> None:
    """The others' disks filled up, nothing was said, and a resume asked whether the save had been interrupted."""
    results = _distributed.run(4, with_own_disks, tmp_path, ["a", "a", "b", "b"], blocking)
    (text, *others), _, _ = results[0]
    assert not others and all(not said for said, _, _ in results[1:])
    assert "the hosts see different directories" in text and "is not there on host b (ranks 2-3)" in text
    for _, errors, _ in results:
        assert errors == results[0][1]
        for error in errors:
            assert "step-5 is a checkpoint for ranks 0-1, but not for ranks 2-3" in error
            assert error.endswith("(ranks 0-1 on host a, ranks 2-3 on host b)")
    assert [names for _, _, names in results[:2]] == [["step-4", "step-5"]] * 2
    assert [names for _, _, names in results[2:]] == [["step-0", "step-0/mine.txt", "step-4", "step-5"]] * 2


def test_all_hosts_have_one_disk(tmp_path: Path) -> None:
    for said, errors, _ in _distributed.run(4, with_one_disk, tmp_path, ["a", "a", "b", "b"]):
        assert not said and errors == [5]


def with_one_disk(folder: Path, hosts: Sequence[str]) -> tuple[list[str], list[int | None], list[int]]:
    state, said = {"n": PerRank(Counter(dist.get_rank()))}, Listener()
    with on_hosts(hosts), said, Checkpointer(folder, state, keep_last=2) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step)
        return said.texts, [checkpointer.load().step], checkpointer.steps()


def rank_0_on_another_host(folder: Path) -> str:
    """It is on a host whose disk is empty, and must not begin anew."""
    disk, other = folder / "a", folder / "b"
    with Checkpointer(disk, {"n": PerRank(Counter(dist.get_rank()))}) as checkpointer:
        checkpointer.save(3)
    with Checkpointer(disk if dist.get_rank() else other, {"n": PerRank(Counter())}) as checkpointer:
        return error_of(checkpointer.load, missing_ok=True)


def test_a_resume_on_an_empty_disk_does_not_begin_anew(tmp_path: Path) -> None:
    for text in _distributed.run(2, rank_0_on_another_host, tmp_path):
        assert "step-3 is a checkpoint for rank 1, but not for rank 0" in text


# ---- a network that is cut ----


def test_a_network_that_is_cut_keeps_nobody_for_longer_than_the_timeout(tmp_path: Path) -> None:
    """All ranks hung, for 30 minutes; those that were cut off waited for the store's answer as well."""
    command = [sys.executable, str(Path(__file__).with_name("_cut.py")), str(tmp_path)]
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command, to make networks with")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    found = json.loads(done.stdout)
    if "skip" in found:
        pytest.skip(found["skip"])
    (near, _), (far, _) = found
    assert "step-2: rank 1 did not answer for 5 s" in near and near.endswith("(rank 1 on host node1)")
    assert "the other ranks cannot be reached, and the store of the process group does not answer either" in far


class SilentStore:
    """A store whose network is cut."""

    def __init__(self) -> None:
        self.asked, self.is_back = 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.is_back.wait()
        return False


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SilentStore()
    monkeypatch.setattr(groups, "_store", lambda: store)
    monkeypatch.setattr(groups, "_ANSWER_SECONDS", 0.05)
    assert [groups.find_note("x"), groups.find_note("y"), groups.leave_note("x", "mine")] == ["", "", "mine"]
    assert store.asked == 1
    store.is_back.set()
    while any(thread.is_alive() for thread in groups._unanswered):
        time.sleep(0.01)
    groups.find_note("z")
    assert store.asked == 2, "it is asked again, once it has answered"
