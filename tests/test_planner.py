"""RingSavePlanner and RingLoadPlanner in several processes: who writes what, who reads what, and what goes wrong."""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _logs import logged
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcpring.move.load.peers
import dcpring.move.load.records
import dcpring.plan.load_planner
from dcpring import _C, CheckpointError, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.format.metadata import join_metadata, split_metadata
from dcpring.plan.cache import _caches
from dcpring.plan.items import ReadItems, _make_item

STRATEGIES = ("balanced", "split", "first_replica", 2, "auto")


def hsdp_state(seed: int) -> dict[str, Any]:
    """Of an HSDP 2x2 job: sharded over two ranks, replicated twice; a plain tensor and an object on all four."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def sharded(*size: int) -> Any:
        return distribute_tensor(torch.randn(size), mesh, [Replicate(), Shard(0)], src_data_rank=None)

    model: dict[str, Any] = {f"layers.{n}.weight": sharded(64, 32) for n in range(8)}
    model["norm.bias"] = sharded(7)  # uneven
    model["scale"] = sharded(1)  # fewer rows than ranks
    return {"model": model, "embedding": torch.randn(4096, 16), "step": seed, "betas": [0.9, {"x": torch.ones(2)}]}


def flat(state: dict[str, Any]) -> list[Any]:
    model = [value.to_local() for value in state["model"].values()]
    return [*model, state["embedding"], state["betas"][1]["x"]]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["step"] == right["step"] and all(map(torch.equal, flat(left), flat(right)))


def round_trip(path: str, writers: Any, ring_storage: bool) -> tuple[bool, bool, int, str]:
    state = hsdp_state(1)
    writer = RingWriter(path) if ring_storage else dcp.FileSystemWriter(path)
    planner = RingSavePlanner(writers=writers, split_bytes=4096)
    metadata = dcp.save(state, storage_writer=writer, planner=planner)
    stored, as_ours = dcp.FileSystemReader(path).read_metadata(), RingReader(path).read_metadata()
    assert (metadata.state_dict_metadata, metadata.planner_data) == (as_ours.state_dict_metadata, stored.planner_data)
    assert stored.state_dict_metadata.keys() == as_ours.state_dict_metadata.keys()
    if metadata.storage_data is not None:  # stock's writer up to torch 2.12 gives what it had before it wrote
        assert metadata.storage_data == stored.storage_data, "on every rank"
    loaded, by_stock = hsdp_state(2), hsdp_state(2)
    dcp.load(loaded, storage_reader=RingReader(path), planner=RingLoadPlanner())
    dcp.load(by_stock, storage_reader=dcp.FileSystemReader(path))
    return same(loaded, state), same(by_stock, state), planner.report().ranks[0].items, str(planner.report())


@pytest.mark.parametrize("ring_storage", (True, False), ids=("ring", "stock"))
@pytest.mark.parametrize("writers", STRATEGIES)
def test_hsdp_round_trip(tmp_path: Path, writers: Any, ring_storage: bool) -> None:
    results = _distributed.run(4, round_trip, str(tmp_path), writers, ring_storage)
    assert [result[:2] for result in results] == [(True, True)] * 4
    sizes = {name: (tmp_path / name).stat().st_size for name in os.listdir(tmp_path) if name.endswith(".distcp")}
    writing = {int(re.match(r"__(\d+)_", name)[1]) for name, size in sizes.items() if size}  # type: ignore[index]
    assert writing == ({0, 1} if writers in ("first_replica", 2) else {0, 1, 2, 3})
    if ring_storage:
        assert len(sizes) == len(writing), "ranks that write nothing make no file"
    assert "replicas removed" in results[0][3]
    if writers == "split":
        assert max(sizes.values()) < 1.2 * sum(sizes.values()) / 4
    if writers == "balanced":
        assert max(sizes.values()) < 1.1 * 4096 * 16 * 4, "the embedding alone is the largest"


def what_is_written(path: str, planner: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The chunks that this rank writes."""
    written: list[tuple[str, tuple[int, ...]]] = []

    class Watching(RingWriter):
        def write_data(self, plan: SavePlan, planner: Any) -> Any:
            written.extend((item.index.fqn, tuple(item.index.offset or ())) for item in plan.items)
            return super().write_data(plan, planner)

    dcp.save(hsdp_state(1), storage_writer=Watching(path), planner=planner)
    return sorted(written)


def written_twice(path: str) -> tuple[Any, Any, Any]:
    first = what_is_written(path, RingSavePlanner(writers="split", split_bytes=4096))
    second = what_is_written(path, RingSavePlanner(writers="split", split_bytes=4096))
    return first, second, what_is_written(path, dcp.DefaultSavePlanner())


def test_every_chunk_once_and_the_same_from_save_to_save(tmp_path: Path) -> None:
    results = _distributed.run(4, written_twice, str(tmp_path))
    assert all(first == second for first, second, _ in results)
    ours = [chunk for first, _, _ in results for chunk in first]
    assert len(ours) == len(set(ours))
    stock = {chunk for _, _, theirs in results for chunk in theirs}
    assert stock <= set(ours) and {name for name, _ in stock} == {name for name, _ in ours}


def tied(path: str, writers: Any) -> tuple[bool, int]:
    torch.manual_seed(0)
    shared = torch.randn(1 << 12, 16)
    state = {"embedding": shared, "output": shared, **{f"more{n}": torch.randn(1 << 10, 16) for n in range(5)}}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(writers=writers, split_bytes=4096))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path))
    return all(torch.equal(loaded[name], state[name]) for name in state), sum(t.nbytes for t in state.values())


@pytest.mark.parametrize("writers", ("balanced", "split"))
def test_tied_tensors_are_written_once(tmp_path: Path, writers: str) -> None:
    """Whichever rank writes them."""
    results = _distributed.run(3, tied, str(tmp_path), writers)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert all(good for good, _ in results) and written < results[0][1] - (1 << 12) * 16 * 4 + 50_000


def items_made(path: str, writers: Any) -> tuple[int, int, bool]:
    """How many of DCP's items a save and a load make."""
    state = hsdp_state(1)
    with mock.patch("dcpring.plan.items._make_item", side_effect=_make_item) as made:
        planner = RingSavePlanner(writers=writers, split_bytes=4096)
        dcp.save(state, storage_writer=RingWriter(path), planner=planner)
    loaded = hsdp_state(2)
    with mock.patch.object(ReadItems, "make", autospec=True, side_effect=ReadItems.make) as read:
        dcp.load(loaded, storage_reader=RingReader(path), planner=RingLoadPlanner())
    return made.call_count, read.call_count, same(loaded, state)


@pytest.mark.parametrize("writers", ("balanced", "split"))
def test_items_are_made_for_loaded_objects_alone(tmp_path: Path, writers: str) -> None:
    """Not for DTensors, nor for what is cut, nor for what lies beside one of the two objects. A save makes none."""
    results = _distributed.run(4, items_made, str(tmp_path), writers)
    assert not any(saved for saved, _, _ in results) and [read for _, read, _ in results] == [2] * 4
    assert all(good for _, _, good in results)


# ---- errors ----


def failure_of(function: Any) -> str:
    try:
        function()
    except BaseException as error:
        return str(error)
    return ""


def mixed(path: str, ring_ranks: list[int]) -> str:
    planner = RingSavePlanner() if dist.get_rank() in ring_ranks else dcp.DefaultSavePlanner()
    return failure_of(lambda: dcp.save(hsdp_state(1), storage_writer=RingWriter(path), planner=planner))


@pytest.mark.parametrize("ring_ranks", ([0, 1, 2], [1, 2, 3], [3]))
def test_mixed_planners(tmp_path: Path, ring_ranks: list[int]) -> None:
    for message in _distributed.run(4, mixed, str(tmp_path), ring_ranks):
        assert "pass planner=RingSavePlanner() on all ranks" in message


def impossible(path: str, writers: Any) -> str:
    planner = RingSavePlanner(writers=writers)
    return failure_of(lambda: dcp.save(hsdp_state(1), storage_writer=RingWriter(path), planner=planner))


@pytest.mark.parametrize("writers", (1, "per_node"))
def test_a_limit_that_leaves_a_shard_out(tmp_path: Path, writers: Any) -> None:
    for message in _distributed.run(4, impossible, str(tmp_path), writers):
        assert "is not possible here" in message and "model.layers.0.weight" in message and "lowest holder" in message
    assert not (tmp_path / ".metadata").exists()


def disagreeing(path: str, kind: str) -> str:
    rank = dist.get_rank()
    state: dict[str, Any] = {"good": torch.ones(3), "bad": torch.ones(4)}
    if rank == 1:
        state["bad"] = {"shape": torch.ones(5), "dtype": torch.ones(4).double(), "object": "text"}[kind]
    return failure_of(lambda: dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner()))


@pytest.mark.parametrize("kind", ("shape", "dtype", "object"))
def test_ranks_that_disagree(tmp_path: Path, kind: str) -> None:
    for message in _distributed.run(2, disagreeing, str(tmp_path), kind):
        assert "'bad' is" in message and "on rank 1" in message and "ranks must agree" in message


# ---- replicas ----


def differing_replicas(path: str, check: Any) -> tuple[str, list[str], str]:
    rank = dist.get_rank()
    with logged() as records:
        state = {
            "object": {"lr": 0.1 * (rank == 2)},
            "small": torch.full((8,), float(rank == 1)),
            "large": torch.full((1 << 16,), rank == 1, dtype=torch.float64),
            "large, same": torch.ones(300, 300).bfloat16(),
            "same": torch.ones(8),
        }
        planner = RingSavePlanner(check_replicas=check)
        error = failure_of(lambda: dcp.save(state, storage_writer=RingWriter(path), planner=planner))
        warned = [text for text in records if "different bytes" in text]
        dcp.save(
            {"same": state["same"], "nested": [1, "a", None, {"b": (2.5, b"x")}]},
            checkpoint_id=path + "-2",
            storage_writer=RingWriter(path + "-2"),
            planner=RingSavePlanner(check_replicas="error"),
        )
        return error, warned, ""


@pytest.mark.parametrize("check", ("warn", "error", "off"))
def test_replicas_that_differ(tmp_path: Path, check: str) -> None:
    results = _distributed.run(3, differing_replicas, str(tmp_path / "checkpoint"), check)
    text = results[0][0] if check == "error" else "".join(results[0][1])
    if check == "off":
        assert not text and not results[0][0]
        return
    assert "'object.lr' (rank 0 differs from 2)" in text and "'small' (rank 0 differs from 1)" in text
    assert "'large' (rank 0 differs from 1)" in text
    assert "same'" not in text
    assert all(bool(error) == (check == "error") for error, _, _ in results)


# ---- caching ----


def cached_saves(path: str) -> list[tuple[int, int, int]]:
    planner = RingSavePlanner(enable_plan_caching=True, check_replicas="off")
    found = []
    state: dict[str, Any] = {"a": torch.ones(4), "b": torch.ones(8), "step": 1}

    def save(one: RingSavePlanner) -> None:
        dcp.save(state, storage_writer=RingWriter(path), planner=one)
        loaded = {"a": torch.zeros(4, dtype=state["a"].dtype), "b": torch.zeros(8), "step": 0}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(path))
        assert torch.equal(loaded["a"], state["a"]) and loaded["step"] == state["step"]
        metadata = dcp.FileSystemReader(path).read_metadata()
        assert metadata.state_dict_metadata["a"].properties.dtype == state["a"].dtype
        found.append((one.report().cached, one.report().gathered_bytes, one.report().scattered_bytes))

    save(planner)
    state["step"] = 2
    save(planner)
    save(pickle.loads(pickle.dumps(planner)))
    state["a"] = torch.ones(4, dtype=torch.bfloat16)
    save(planner)
    if dist.get_rank() == 1:
        _caches.clear()
    save(planner)
    save(RingSavePlanner(enable_plan_caching=True, check_replicas="off"))
    return found


def test_plan_caching(tmp_path: Path) -> None:
    """Nothing is sent while nothing changes; a change of dtype, a lost cache and another planner are noticed."""
    reports = _distributed.run(2, cached_saves, str(tmp_path))[0]
    assert [cached for cached, _, _ in reports] == [0, 2, 2, 0, 1, 0]
    assert [gathered == 0 for _, gathered, _ in reports] == [False, True, True, False, False, False]
    assert [scattered == 0 for _, _, scattered in reports] == [False, True, True, False, False, False]


def cached_after_a_failure(path: str) -> list[str]:
    planner = RingSavePlanner(enable_plan_caching=True, check_replicas="off")

    class Full(RingWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            raise OSError(28, "no room")

    def save(state: Any, writer: Any) -> str:
        return failure_of(lambda: dcp.save(state, storage_writer=writer(path), planner=planner))

    one, other = {"a": torch.ones(4)}, {"a": torch.ones(5)}
    return [save(one, RingWriter), save(other, Full), save(one, RingWriter), save(one, RingWriter)]


def test_caching_after_a_save_that_failed(tmp_path: Path) -> None:
    for results in _distributed.run(2, cached_after_a_failure, str(tmp_path)):
        assert "no room" in results[1] and results[0] == results[2] == results[3] == ""


def coordinator_without_cache(path: str) -> tuple[str, str]:
    planner = RingSavePlanner(enable_plan_caching=True, check_replicas="off")
    state = {"a": torch.ones(4)}

    def save() -> None:
        dcp.save(state, storage_writer=RingWriter(path), planner=planner)

    save()
    if dist.get_rank() == 0:
        _caches.clear()
    return failure_of(save), failure_of(save)


def test_a_coordinator_that_lost_its_cache(tmp_path: Path) -> None:
    for first, second in _distributed.run(2, coordinator_without_cache, str(tmp_path)):
        assert "no longer has it" in first and second == ""


# ---- subclasses ----


class HalfPlanner(RingSavePlanner):
    """DCP's own example: the local plan says another dtype, and resolve_data makes it so."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)


def save_halves(path: str) -> bool:
    state = {"a": torch.randn(16, 4), "b": torch.randn(3), "step": 1}
    if dist.get_rank():
        dist.barrier()
    torch.manual_seed(0)
    state = {"a": torch.randn(16, 4), "b": torch.randn(3), "step": 1}
    if not dist.get_rank():
        dist.barrier()
    dcp.save(state, storage_writer=RingWriter(path), planner=HalfPlanner(writers="balanced"))
    loaded: dict[str, Any] = {"a": torch.zeros(16, 4).half(), "b": torch.zeros(3).half(), "step": 0}
    dcp.load(loaded, storage_reader=RingReader(path), planner=RingLoadPlanner())
    return torch.equal(loaded["a"], state["a"].half()) and torch.equal(loaded["b"], state["b"].half())  # type: ignore[attr-defined]


def test_a_subclass_that_changes_its_items(tmp_path: Path) -> None:
    assert _distributed.run(2, save_halves, str(tmp_path)) == [True, True]


# ---- loading ----


def hand_on(path: str, share: Any, hosts: str, device_dtype: Any) -> tuple[bool, int, int, int, str]:
    state = hsdp_state(1)
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    loaded = hsdp_state(2)
    if device_dtype is not None:
        loaded["embedding"] = loaded["embedding"].to(device_dtype)
    reader = RingReader(path)
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
    with mock.patch("dcpring.plan.load_planner.host_id", lambda: hosts[dist.get_rank()]):
        dcp.load(loaded, storage_reader=reader, planner=planner)
    assert reader.stats is not None
    state["embedding"] = state["embedding"].to(loaded["embedding"].dtype)
    stats = reader.stats
    return same(loaded, state), stats.bytes, stats.sent_bytes, stats.received_bytes, str(planner.report())


@pytest.mark.parametrize(
    ("share", "hosts", "times"),
    (
        ("off", "aaaa", 4),
        ("auto", "aaaa", 4),
        ("host", "aaaa", 1),
        ("host", "aabb", 2),
        ("all", "aaaa", 1),
        ("all", "aabb", 1),
        ("all", "abcd", 1),
        ("host", "abcd", 4),
    ),
)
def test_each_byte_is_read_once(tmp_path: Path, share: str, hosts: str, times: int) -> None:
    results = _distributed.run(4, hand_on, str(tmp_path), share, hosts, None)
    assert all(good for good, *_ in results)
    read, sent, received = (sum(result[at] for result in results) for at in (1, 2, 3))
    embedding, sharded = 4096 * 16 * 4, (8 * 64 * 32 + 7 + 1) * 4
    # Sharded tensors have two holders: on one host in "aaaa", on two in "aabb" and "abcd".
    copies = {"off": 2, "auto": 2, "host": 1 if hosts == "aaaa" else 2, "all": 1}[share]
    unique = times * embedding + copies * sharded
    assert unique <= read <= unique + 200_000, "gaps between records and objects come on top"
    nested = 2 * 4  # a tensor in a list, on all four
    assert sent == received == 4 * embedding + 2 * sharded + 4 * nested - (unique + times * nested)
    assert "from others'" in results[0][4]


def test_handing_on_what_is_converted(tmp_path: Path) -> None:
    """A cast is each rank's own: it reads the tensor itself."""
    for share, dtype in (
        ("host", torch.bfloat16),
        ("all", torch.bfloat16),
        ("host", torch.float64),
        ("all", torch.float64),
    ):
        results = _distributed.run(4, hand_on, str(tmp_path / f"{share}{dtype}"), share, "aabb", dtype)
        assert all(good for good, *_ in results)


def cast_on_one_rank(path: str, share: Any) -> bool:
    torch.manual_seed(0)
    state = {"a": torch.randn(1000).bfloat16(), "b": torch.randn(4000), "sparse": torch.eye(3).to_sparse()}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(check_replicas="off"))
    loaded = {"a": torch.zeros(1000), "b": torch.zeros(4000), "sparse": torch.zeros(3, 3).to_sparse()}
    if dist.get_rank():
        loaded["a"] = loaded["a"].bfloat16()
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
    dcp.load(loaded, storage_reader=RingReader(path), planner=planner)
    return all(torch.equal(loaded[key].to_dense().float(), state[key].to_dense().float()) for key in state)


@pytest.mark.parametrize("share", ("host", "all"))
def test_handing_on_next_to_casts_and_sparse_tensors(tmp_path: Path, share: str) -> None:
    assert _distributed.run(3, cast_on_one_rank, str(tmp_path), share) == [True] * 3


def early_failure(path: str, share: Any, where: str) -> str:
    state = {"a": torch.randn(1 << 12), "object": {1, 2}}
    torch.manual_seed(0)
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(check_replicas="off"))
    if dist.get_rank() == 1 and where == "objects":
        dcpring.move.load.records.Records.read_objects = lambda *_: (_ for _ in ()).throw(OSError(5, "boom"))  # type: ignore[method-assign]
    if where == "memory":
        os.memfd_create = lambda *_: (_ for _ in ()).throw(OSError(24, "boom"))
    if dist.get_rank() == 1 and where == "map":
        dcpring.base.shared_memory.mmap.mmap = lambda *_: (_ for _ in ()).throw(ValueError("too small"))  # type: ignore[assignment]
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
    return failure_of(lambda: dcp.load(state, storage_reader=RingReader(path), planner=planner))


@pytest.mark.parametrize(
    ("share", "where"), (("host", "objects"), ("all", "objects"), ("host", "memory"), ("host", "map"))
)
def test_a_rank_that_fails_early_leaves_nobody_waiting(tmp_path: Path, share: str, where: str) -> None:
    try:
        results = _distributed.run(2, early_failure, str(tmp_path), share, where, timeout=60)
    finally:
        _distributed.close()  # what was replaced in these processes goes with them
    if where in ("map", "memory"):
        assert results == ["", ""], "every rank reads for itself"
    else:
        assert all("boom" in message for message in results)


def failing_reader(path: str, share: str, hosts: str) -> str:
    state = {"a": torch.randn(1 << 16), "b": torch.randn(1 << 16)}
    torch.manual_seed(0)
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(check_replicas="off"))

    class Failing(RingReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == 1:
                with open(next(Path(path).glob("__1_*.distcp")), "r+b") as file:
                    file.seek(70_000)
                    file.write(b"damage")
            dist.barrier()
            return super().read_data(plan, planner)

    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)  # type: ignore[arg-type]
    with mock.patch("dcpring.plan.load_planner.host_id", lambda: hosts[dist.get_rank()]):
        return failure_of(lambda: dcp.load(state, storage_reader=Failing(path), planner=planner))


@pytest.mark.parametrize(("share", "hosts"), (("host", "aaa"), ("all", "abc")))
def test_a_reader_that_fails_leaves_nobody_waiting(tmp_path: Path, share: str, hosts: str) -> None:
    for message in _distributed.run(3, failing_reader, str(tmp_path), share, hosts, timeout=60):
        assert "a rank has failed that shares what it reads: rank 1: " in message
        assert "'b' (rank 1): bytes" in message and "are damaged (CRC-32 is" in message


def wrong_group(path: str) -> str:
    state = {"a": torch.ones(4)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    group = dist.new_group([0, 1])
    other = group if dist.get_rank() < 2 else dist.group.WORLD
    planner = RingLoadPlanner(process_group=other, share="host")
    return failure_of(lambda: dcp.load(state, storage_reader=RingReader(path), planner=planner))


def test_another_group_than_the_loads(tmp_path: Path) -> None:
    for message in _distributed.run(3, wrong_group, str(tmp_path)):
        assert "is not that of the load" in message


def reads_by_locality(path: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (4,))
    state = {str(n): distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)], src_data_rank=None) for n in range(4)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    planner = RingLoadPlanner()
    dcp.load(state, storage_reader=RingReader(path), planner=planner)
    own = next(rank for rank in planner.report().ranks if rank.rank == dist.get_rank())
    return own.own_bytes, own.other_bytes


def test_the_same_layout_reads_what_it_wrote(tmp_path: Path) -> None:
    assert _distributed.run(4, reads_by_locality, str(tmp_path)) == [(4 * 16 * 8 * 4, 0)] * 4


def reads_by_locality_in_a_subgroup(path: str) -> tuple[int, int]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return 0, 0
    mesh = DeviceMesh.from_group(group, "cpu")
    state = {"a": distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)], src_data_rank=None)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(), process_group=group)
    planner = RingLoadPlanner(process_group=group)
    dcp.load(state, storage_reader=RingReader(path), planner=planner, process_group=group)
    own = next(rank for rank in planner.report().ranks if rank.rank == dist.get_rank(group))
    return own.own_bytes, own.other_bytes


def test_own_files_in_a_subgroup(tmp_path: Path) -> None:
    assert _distributed.run(3, reads_by_locality_in_a_subgroup, str(tmp_path)) == [(0, 0)] + [(32 * 8 * 4, 0)] * 2


def loads_its_own(path: str, writer: Any) -> list[list[str]]:
    """What is said of a load in which rank 0 names another checkpoint than the others, of copies, and of one rank's."""
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    state = {"a": distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None)}
    for name in "first", "second":
        dcp.save(state, storage_writer=writer(f"{path}/{name}"))
    dcp.save(state, storage_writer=writer(f"{path}/apart"), use_collectives=False)
    shutil.copytree(f"{path}/first", f"{path}/of-{rank}")
    said = []
    for name in ("second" if rank else "first", f"of-{rank}", "apart"):
        with logged() as records:
            dcp.load(state, storage_reader=RingReader(f"{path}/{name}"), planner=RingLoadPlanner())
        said.append([text for text in records if "different checkpoints" in text])
    return said


@pytest.mark.parametrize("writer", [RingWriter, dcp.FileSystemWriter])
def test_ranks_that_load_different_checkpoints(tmp_path: Path, writer: Any) -> None:
    on_0, *others = _distributed.run(3, loads_its_own, str(tmp_path), writer)
    assert others == [[[], [], []]] * 2 and on_0[1:] == [[], []]
    text = re.sub(r"\(save \w{8}\)", "(save)", on_0[0][0])
    assert f"{tmp_path}/first (save) on rank 0, {tmp_path}/second (save) on ranks 1-2" in text


# ---- one process ----


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    wanted = {"a": torch.zeros(2), **{f"new{n}": torch.zeros(2) for n in range(12)}}
    message = failure_of(lambda: dcp.load(wanted, storage_reader=RingReader(tmp_path), planner=RingLoadPlanner()))
    assert "missing" in message and all(f"'new{n}'" in message for n in range(12))
    partial = RingLoadPlanner(allow_partial_load=True)
    dcp.load(wanted, storage_reader=RingReader(tmp_path), planner=partial)
    assert torch.equal(wanted["a"], torch.ones(2))


NAMES = ("lone \ud800 surrogate", "new\nline", "nul\0", "a/b", "..", "", ".a..b.", "x" * 70_000, "\u00e9\U0001f600")


@pytest.mark.parametrize("saved_by_stock", (False, True), ids=("ring", "stock"))
def test_names_of_any_kind(tmp_path: Path, saved_by_stock: bool) -> None:
    numbers = {name: n for n, name in enumerate(NAMES)}
    saved = {"m": {name: torch.full((3,), float(n)) for name, n in numbers.items()}, "step": numbers}
    if saved_by_stock:
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    else:
        dcp.save(saved, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    for reader, planner in ((RingReader, RingLoadPlanner), (dcp.FileSystemReader, dcp.DefaultLoadPlanner)):
        loaded: dict[str, Any] = {"m": {name: torch.zeros(3) for name in NAMES}, "step": dict.fromkeys(NAMES, -1)}
        dcp.load(loaded, storage_reader=reader(tmp_path), planner=planner())
        assert loaded["step"] == saved["step"]
        assert all(map(torch.equal, loaded["m"].values(), saved["m"].values()))
    with pytest.raises(dcp.api.CheckpointException, match=r"missing from the checkpoint \(1\):\n  '\\udfff'"):
        dcp.load({"\udfff": 1}, storage_reader=RingReader(tmp_path), planner=RingLoadPlanner())


def test_another_shape(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2, 3)}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    wanted = {"a": torch.zeros(3, 2)}
    message = failure_of(lambda: dcp.load(wanted, storage_reader=RingReader(tmp_path), planner=RingLoadPlanner()))
    assert "'a': the state dict has [3, 2] torch.float32, the checkpoint [2, 3] torch.float32" in message


@pytest.mark.parametrize(
    "arguments", ({"writers": 0}, {"writers": "all"}, {"writers": True}, {"check_replicas": 1}, {"split_bytes": 0})
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        RingSavePlanner(**arguments)
    with pytest.raises(ValueError, match="share"):
        RingLoadPlanner(share="none")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("magic", "writers"), ((0x6969, "first_replica"), (0x65735546, "first_replica"), (0xEF53, "balanced"))
)
def test_auto_goes_by_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, magic: int, writers: str
) -> None:
    monkeypatch.setattr("dcpring._C.file_system", lambda path: magic)
    planner = RingSavePlanner()
    with caplog.at_level(logging.DEBUG, "dcpring"):
        dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path / "new" / "deep"), planner=planner)
    report = planner.report()
    assert report.writers == writers and str(tmp_path) in report.reason
    assert any(f"writers={writers}" in record.message and str(tmp_path) in record.message for record in caplog.records)


def test_file_systems_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _C.file_system("/proc") == _C.file_system("/proc/nothing/here") == 0x9FA0
    assert (
        _C.file_system(str(tmp_path)) == _C.file_system("new/deep") == _C.file_system("new/") == _C.file_system("new")
    )
    with pytest.raises(OSError, match="statfs"):
        _C.file_system("/proc/version/below a file")


def test_what_dcp_save_returns_after_another_save(tmp_path: Path) -> None:
    """In another process the file stands for it, so it can only be looked at while the file is there."""
    saved = dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    sent = pickle.dumps(saved)
    assert len(sent) < 1000 and list(pickle.loads(sent).state_dict_metadata) == ["a"]
    dcp.save({"b": torch.ones(2)}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    assert list(saved.state_dict_metadata) == ["a"], "in this process it is the save's own"
    with pytest.raises(CheckpointError, match="another save has replaced it"):
        _ = pickle.loads(sent).state_dict_metadata


def test_tables_of_another_version_are_passed_over(tmp_path: Path) -> None:
    """The pickle beside them says the same."""
    dcp.save({"a": torch.ones(2)}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    file = tmp_path / ".metadata"
    parts = split_metadata(file.read_bytes(), file)
    assert parts.trailer is not None
    tables = bytes(parts.tables).replace(b"DRP\x01", b"DRP\x02")
    file.write_bytes(join_metadata(bytes(parts.pickled), parts.trailer, tables))
    loaded = {"a": torch.zeros(2)}
    dcp.load(loaded, storage_reader=RingReader(tmp_path), planner=RingLoadPlanner())
    assert torch.equal(loaded["a"], torch.ones(2))


def test_the_report_has_every_phase(tmp_path: Path) -> None:
    planner = RingSavePlanner()
    dcp.save({"a": torch.ones(2), "b": {"c": 1}}, storage_writer=RingWriter(tmp_path), planner=planner)
    report = planner.report()
    assert list(report.seconds) == ["local plan", "gather", "plan", "scatter", "write", "commit"]
    assert (report.ranks[0].items, report.ranks[0].bytes, report.ranks[0].files) == (2, 8, 1)
    assert "rank" in str(report) and report.imbalance == 1.0


def test_methods_that_are_set_on_a_planner_are_asked(tmp_path: Path) -> None:
    """As unittest.mock does it, instead of by a subclass."""
    saves, loads = RingSavePlanner(), RingLoadPlanner()
    looked, loaded = saves.lookup_object, loads.load_bytes
    with mock.patch.object(saves, "lookup_object", side_effect=lambda index: looked(index) * 2):
        dcp.save({"a": 3, "b": torch.ones(1)}, storage_writer=RingWriter(tmp_path), planner=saves, no_dist=True)
    state = {"a": 0, "b": torch.zeros(1)}
    with mock.patch.object(loads, "load_bytes", side_effect=loaded) as asked:
        dcp.load(state, storage_reader=RingReader(tmp_path), planner=loads, no_dist=True)
    assert asked.call_count == 1 and state == {"a": 6, "b": torch.full((1,), 2.0)}
