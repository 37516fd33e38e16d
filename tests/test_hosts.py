"""Several hosts: errors that name them, and disks that are not shared. Ranks of this machine are told other hosts."""

from __future__ import annotations

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

from dcpring import Checkpointer, Replicated, RingReader, RingSavePlanner, RingWriter
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
