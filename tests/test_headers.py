"""Headers of safetensors are read by one rank of each host, and handed on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import _logs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _hf import MIB, tensors, write
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

import dcpring
from dcpring import RingHFReader, RingLoadPlanner
from dcpring.base import shared_memory
from dcpring.format import model_files
from dcpring.store import headers


@contextlib.contextmanager
def counted(hosts: list[str] | None = None) -> Any:
    """The headers that this rank reads meanwhile; ranks are on the hosts given."""
    found: list[str] = []
    read = model_files.read_header

    def noted(path: Path) -> Any:
        found.append(path.name)
        return read(path)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(model_files, "read_header", noted))
        if hosts is not None:
            stack.enter_context(mock.patch("dcpring.base.groups.host_id", lambda: hosts[dist.get_rank()]))
        yield found


def load(path: str, reader: Any = None, **options: Any) -> None:
    given = tensors()
    state = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    dcp.load(state, storage_reader=reader or RingHFReader(path), planner=RingLoadPlanner(), **options)
    assert all(torch.equal(state[name], given[name]) for name in given)


# ---- who reads ----


def count(path: str, hosts: list[str] | None) -> int:
    with counted(hosts) as found:
        load(path)
        load(path)
    return len(found)


@pytest.mark.parametrize(
    "kind, hosts, readers",
    (
        ("index", None, [0]),
        ("links", None, [0]),
        ("ours", None, [0]),
        ("index", ["a", "b", "b", "a"], [0, 1]),
        ("index", ["a", "b", "c", "d"], [0, 1, 2, 3]),
        ("one file", None, [0, 1, 2, 3]),  # there is less to read than to say
    ),
)
def test_one_rank_of_each_host_reads(tmp_path: Path, kind: str, hosts: list[str] | None, readers: list[int]) -> None:
    path = write(tmp_path / "model", kind)
    files = 2 * len(list(path.glob("*.safetensors")))
    expected = [files if rank in readers else 0 for rank in range(4)]
    assert _distributed.run(4, count, str(path), hosts) == expected


def load_part(path: str) -> int:
    group = dist.new_group([0, 2])
    with counted() as found:
        if dist.get_rank() in (0, 2):
            load(path, process_group=group)
    return len(found)


def test_the_ranks_of_a_group(tmp_path: Path) -> None:
    assert _distributed.run(3, load_part, str(write(tmp_path / "model", "index"))) == [3, 0, 0]


def load_alone(path: str) -> int:
    with counted() as found, mock.patch.object(headers, "MEET_SECONDS", 1000.0):
        if dist.get_rank() == 1:
            load(path, no_dist=True)
            RingHFReader(path).read_metadata()
    return len(found)


def test_one_that_loads_alone_waits_for_nobody(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model", "index"))
    assert _distributed.run(2, load_alone, path, timeout=60) == [0, 6]


def load_model(path: str) -> int:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 64))
    with counted() as found:
        dcpring.load_pretrained(model, path)
    assert all(bool((parameter == 3).all()) for parameter in model.parameters())
    return len(found)


def test_load_pretrained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3)
    dcpring.save_pretrained_weights(model, tmp_path, max_shard_bytes=1000)
    assert _distributed.run(3, load_model, str(tmp_path)) == [4, 0, 0]


def load_quantised(path: str) -> int:
    state = {"x.weight": torch.zeros(300, 260)}
    with counted() as found:
        dcp.load(state, storage_reader=dcpring.RingQuantizedHFReader(path), planner=RingLoadPlanner())
    assert bool((state["x.weight"] == 6).all())
    return len(found)


def test_quantised(tmp_path: Path) -> None:
    codes, scales = torch.full((300, 260), 2.0).to(torch.float8_e4m3fn), torch.full((3, 3), 3.0)
    save_file({"x.weight": codes}, tmp_path / "a.safetensors")
    save_file({"x.weight_scale_inv": scales}, tmp_path / "b.safetensors")
    index = model_files.make_index({"x.weight": "a.safetensors", "x.weight_scale_inv": "b.safetensors"}, MIB)
    (tmp_path / model_files.INDEX_NAME).write_bytes(index)
    assert _distributed.run(2, load_quantised, str(tmp_path)) == [2, 0]


# ---- what fails ----


def cannot_map(path: str, who: int) -> tuple[int, list[str]]:
    def refuse(*_: Any) -> Any:
        raise OSError("other containers")

    broken = mock.patch.object(shared_memory, "open_word" if who else "create", refuse)
    with counted() as found, broken if dist.get_rank() == who else contextlib.nullcontext(), _logs.logged() as texts:
        load(path)
    return len(found), texts


@pytest.mark.parametrize("who, expected", ((1, [3, 3, 0]), (0, [3, 3, 3])))
def test_memory_that_cannot_be_shared(tmp_path: Path, who: int, expected: list[int]) -> None:
    """On a rank that cannot map it; and on the one that cannot make it."""
    got = _distributed.run(3, cannot_map, str(write(tmp_path / "model", "index")), who)
    assert [number for number, _ in got] == expected


def with_another_reader(path: str) -> list[str]:
    with mock.patch.object(headers, "MEET_SECONDS", 0.2), _logs.logged() as texts:
        load(path, HuggingFaceStorageReader(path) if dist.get_rank() == 1 else None)
        load(path)
    return texts


def test_not_all_come(tmp_path: Path) -> None:
    """To a load that one rank makes with another reader; to the next one all do."""
    first, other = _distributed.run(2, with_another_reader, str(write(tmp_path / "model", "index")))
    assert len(first) == 1 and "1 of 2 ranks came" in first[0] and not other


def without_a_store(path: str) -> int:
    with mock.patch("dcpring.base.groups.default_store", lambda: None), counted() as found:
        load(path)
    return len(found)


def test_a_group_without_a_store(tmp_path: Path) -> None:
    """As MPI's."""
    assert _distributed.run(2, without_a_store, str(write(tmp_path / "model", "index"))) == [3, 3]


def fail(path: str, who: int) -> tuple[str, bool]:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    broken = mock.patch.object(model_files, "read_header", refuse)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with broken if dist.get_rank() == who else contextlib.nullcontext(), pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=RingHFReader(path), planner=RingLoadPlanner())
    return str(caught.value), any(bool(tensor.any()) for tensor in state.values())


def test_the_one_that_reads_fails(tmp_path: Path) -> None:
    (text, is_changed), other = _distributed.run(2, fail, str(write(tmp_path / "model", "index")), 0)
    assert "Permission denied" in text and not is_changed
    assert other == (text, False)


def interrupted(path: str) -> str:
    def refuse(*_: Any) -> Any:
        raise KeyboardInterrupt

    broken = mock.patch.object(model_files, "read_header", refuse)
    with broken if dist.get_rank() == 0 else contextlib.nullcontext():
        try:
            with headers.meeting(dist.group.WORLD) as joint:
                assert joint is not None
                headers.read_once(joint, lambda: headers.read_headers(Path(path), None, 128))
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ctrl_c_where_headers_are_read(tmp_path: Path) -> None:
    got = _distributed.run(2, interrupted, str(write(tmp_path / "model", "index")))
    assert got[0] == "KeyboardInterrupt: " and "rank 0: KeyboardInterrupt" in got[1]


# ---- the metadata of DCP ----


def metadata_reads(folder: Path, hosts: list[str], call: str) -> tuple[int, bool]:
    """How often this rank reads a file of metadata, and whether what it loads is right."""
    rank, reads = dist.get_rank(), 0
    read = headers.read_regular

    def noted(path: Path) -> bytes:
        nonlocal reads
        reads += path.name == ".metadata"
        return read(path)

    tensor = torch.arange(1000.0)
    torch.manual_seed(0)  # the model is the same on all ranks, whatever else these processes have run
    model = nn.Linear(3, 4)
    with (
        mock.patch("dcpring.base.groups.host_id", lambda: hosts[rank]),
        mock.patch.object(headers, "read_regular", noted),
        mock.patch("dcpring.store.reader.read_regular", noted),
        mock.patch.object(headers, "SHARED_BYTES", 1 << 30 if call == "small" else 1),
        mock.patch("dcpring.store.reader.SHARED_BYTES", 1 << 30 if call == "small" else 1),
        mock.patch.object(headers, "SENT_BYTES", 1 << 30 if call == "middling" else 1),
        mock.patch.object(headers, "MEET_SECONDS", 60.0),
    ):
        if call == "Checkpointer":
            with dcpring.Checkpointer(folder, {"model": model}) as checkpointer:
                checkpointer.save(1)
                reads, saved = 0, model.weight.detach().clone()
                nn.init.zeros_(model.weight)
                checkpointer.load()
            return reads, torch.equal(model.weight, saved)
        dcp.save({"t": tensor}, storage_writer=dcpring.RingWriter(folder), planner=dcpring.RingSavePlanner())
        dist.barrier()
        reads, state = 0, {"t": torch.zeros(1000)}
        dcp.load(state, storage_reader=dcpring.RingReader(folder), planner=RingLoadPlanner())
        return reads, torch.equal(state["t"], tensor)


@pytest.mark.parametrize("call", ("dcp", "Checkpointer", "small", "middling"))
@pytest.mark.parametrize("hosts", (["a"] * 4, ["a", "b", "b", "a"], ["a", "b", "c", "d"]))
def test_one_rank_reads_large_metadata(tmp_path: Path, hosts: list[str], call: str) -> None:
    """Every rank did: 200 MiB from one server for each of a thousand. What is not so large one of each host reads."""
    results = _distributed.run(4, metadata_reads, tmp_path / "c", hosts, call)
    assert all(good for _, good in results)
    first_of_hosts = [int(host not in hosts[:rank]) for rank, host in enumerate(hosts)]
    wanted = {"small": [1] * 4, "middling": first_of_hosts}
    assert [reads for reads, _ in results] == wanted.get(call, [1, 0, 0, 0])


def damaged_metadata(folder: Path) -> str:
    dcp.save({"t": torch.ones(3)}, storage_writer=dcpring.RingWriter(folder), planner=dcpring.RingSavePlanner())
    if dist.get_rank() == 0:
        (folder / ".metadata").write_bytes(b"no pickle" * 100)
    dist.barrier()
    with (
        mock.patch.object(headers, "SHARED_BYTES", 1),
        mock.patch("dcpring.store.reader.SHARED_BYTES", 1),
        pytest.raises(CheckpointException) as caught,
    ):
        dcp.load({"t": torch.ones(3)}, storage_reader=dcpring.RingReader(folder), planner=RingLoadPlanner())
    return str(caught.value)


def test_large_metadata_that_is_damaged(tmp_path: Path) -> None:
    texts = _distributed.run(2, damaged_metadata, tmp_path / "c")
    assert (texts[0] == texts[1] and "CorruptCheckpointError" in texts[0]) or ".metadata" in texts[0]
