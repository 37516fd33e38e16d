"""Peer sharing: what several ranks read of a checkpoint is read once, and a rank that fails leaves nobody waiting."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _logs import logged
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dcpring import RingHFWriter, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.base import groups as base_groups
from dcpring.move.load import peers
from dcpring.plan import sharing
from dcpring.plan.pieces import PIECE_BYTES, Piece, common_bytes, covering, cut, take
from dcpring.plan.sharing import ROUND_BYTES, Needs, hops, plan_sharing, units_table
from dcpring.torchside.groups import default_store

PATIENCE_SECONDS = 60.0
"""How long ranks wait for each other where all come, on however busy a machine."""


# ---- pieces ----


def pieces_for(shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], at: int) -> list[Piece]:
    box = covering(shape, offsets, lengths, 4)
    whole = Piece(0, shape, 4, 0, 0, box, (0,), box == (offsets, lengths))
    return list(cut(whole, at))


@pytest.mark.parametrize("piece_bytes", (64, 1 << 10, 4 << 20))
@pytest.mark.parametrize("gap", (0, 40, 1 << 17))
def test_pieces_make_up_what_is_wanted(monkeypatch: pytest.MonkeyPatch, piece_bytes: int, gap: int) -> None:
    monkeypatch.setattr("dcpring.plan.pieces.PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("dcpring._C.SLICE_GAP_BYTES", gap)
    chance = random.Random(piece_bytes + gap)
    for _ in range(200):
        shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 4)))
        lengths = tuple(chance.randint(1, size) for size in shape)
        offsets = tuple(chance.randint(0, size - length) for size, length in zip(shape, lengths, strict=True))
        record = torch.randn(shape)
        payload = record.reshape(-1).view(torch.uint8)
        wanted = torch.full(lengths, torch.nan)
        used = 0
        for piece in pieces_for(shape, offsets, lengths, 64 * chance.randint(0, 100)):
            sizes, low, size = piece.as_bytes()
            memory = payload.view(sizes)[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))].reshape(-1)
            assert memory.numel() == piece.size_bytes <= max(piece_bytes, 4)
            take(piece, memory.clone(), offsets, lengths, wanted)
            used += common_bytes(piece, offsets, lengths)
        assert torch.equal(wanted, record[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))])
        assert used == wanted.nbytes


def test_a_range_is_cut_where_the_files_blocks_are() -> None:
    pieces = pieces_for((5000, 1000), (0, 0), (5000, 1000), 1_000_064)
    places = [(1_000_064 + low, 1_000_064 + high) for low, high in (piece.byte_range for piece in pieces)]
    assert [low % PIECE_BYTES for low, _ in places[1:]] == [0] * (len(places) - 1)
    assert [high for _, high in places[:-1]] == [low for low, _ in places[1:]]


def test_memory_is_bounded_whatever_the_size() -> None:
    """A tensor of 64 GiB that 8 ranks need goes through the same memory, in turns."""
    pieces = pieces_for((1 << 17, 1 << 17), (0, 0), (1 << 17, 1 << 17), 64)
    table = units_table([str(piece) for piece in pieces], [piece.size_bytes for piece in pieces])
    sharing = plan_sharing([Needs(rank, 8, "host", "host", table) for rank in range(8)])
    assert max(part.room for part in sharing) <= ROUND_BYTES + PIECE_BYTES
    for number in (0, 7, sharing[0].rounds - 2):
        read = [
            sum(unit.size for unit in sharing[0].units if (unit.round, unit.reader) == (number, rank))
            for rank in range(8)
        ]
        assert max(read) - min(read) <= PIECE_BYTES, "all read at the same time"


# ---- slices that interleave ----

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "columns": ((4,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns, twice": ((2, 2), [Replicate(), Shard(1)]),
    "last of three": ((4,), [Shard(2)]),
    "middle of three": ((4,), [Shard(1)]),
}


def interleaved(path: str, name: str, share: Any, hosts: str) -> tuple[bool, int, int, int]:
    shape, placements = LAYOUTS[name]
    size = (600, 2048) if "three" not in name else (50, 24, 1024)
    mesh = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    full = torch.randn(size)
    everywhere = [Replicate()] * len(shape)
    saved = {"w": distribute_tensor(full, mesh, everywhere, src_data_rank=None), "b": torch.arange(10.0)}
    dcp.save(saved, storage_writer=RingWriter(path), planner=RingSavePlanner(writers="balanced"))
    loaded = {"w": distribute_tensor(torch.zeros(size), mesh, placements, src_data_rank=None), "b": torch.zeros(10)}
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
    reader = RingReader(path)
    with (
        mock.patch("dcpring.plan.load_planner.host_id", lambda: hosts[dist.get_rank()]),
        mock.patch.object(peers, "MEET_SECONDS", PATIENCE_SECONDS),
    ):
        dcp.load(loaded, storage_reader=reader, planner=planner)
    expected = distribute_tensor(full, mesh, placements, src_data_rank=None)
    assert isinstance(loaded["w"], DTensor) and reader.stats is not None
    good = torch.equal(loaded["w"].to_local(), expected.to_local()) and torch.equal(loaded["b"], torch.arange(10.0))
    return good, reader.stats.bytes, reader.stats.sent_bytes, reader.stats.received_bytes


@pytest.mark.parametrize(
    ("name", "share", "hosts", "times"),
    (
        ("columns", "auto", "aaaa", 1),
        ("columns", "host", "aaaa", 1),
        ("columns", "host", "aabb", 2),
        ("columns", "all", "aabb", 1),
        ("columns", "off", "aaaa", 4),
        ("rows and columns", "auto", "aaaa", 1),
        ("columns, twice", "auto", "aaaa", 1),
        ("last of three", "auto", "aaaa", 1),
        ("middle of three", "auto", "aaaa", 1),
    ),
)
def test_slices_that_interleave_are_read_once(tmp_path: Path, name: str, share: str, hosts: str, times: int) -> None:
    results = _distributed.run(4, interleaved, str(tmp_path), name, share, hosts)
    assert all(good for good, *_ in results)
    read, sent, received = (sum(result[at] for result in results) for at in (1, 2, 3))
    size = (600 * 2048 if "three" not in name else 50 * 24 * 1024) * 4
    assert times * size <= read < times * size + 100_000
    assert sent == received
    if share in ("auto", "host") and hosts == "aaaa":  # a piece may end within a row
        assert received > (size // 2 if name in ("rows and columns", "columns, twice") else 3 * size // 4) - 8192


def tied(path: str, kind: str, share: Any) -> tuple[bool, int]:
    """Two tensors are saved as one, and loaded into two: rows of one, all of the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(2_000_000.0).view(2000, 1000)
    writer = RingHFWriter(path) if kind == "safetensors" else RingWriter(path)
    dcp.save({"a": full, "b": full, "c": full[0]}, storage_writer=writer, planner=RingSavePlanner())
    placed = distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)], src_data_rank=None)
    loaded = {"a": torch.zeros_like(full), "b": placed, "c": torch.zeros(1000)}
    reader = RingReader(path)
    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
    dcp.load(loaded, storage_reader=reader, planner=planner)
    assert reader.stats is not None and planner.report().share == share
    good = torch.equal(placed.full_tensor(), full) and torch.equal(loaded["c"], full[0])
    return good and torch.equal(loaded["a"], full), reader.stats.bytes


@pytest.mark.parametrize("kind", ("dcp", "safetensors"))
def test_tied_tensors_are_read_once(tmp_path: Path, kind: str) -> None:
    results = _distributed.run(2, tied, str(tmp_path), kind, "host")
    assert all(good for good, _ in results)
    assert sum(read for _, read in results) < 2.1 * 8_000_000  # once whole, and rows by who wants these alone


def through_the_cache(path: str) -> list[bool]:
    """Whether rows and columns were read directly, by one planner after the other."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    full = torch.randn(600, 2048)
    dcp.save({"w": full}, storage_writer=RingWriter(path), planner=RingSavePlanner(writers="first_replica"))
    direct = []
    for axis in (0, 1):
        for planner in (RingLoadPlanner(), dcp.DefaultLoadPlanner()):
            loaded = {"w": distribute_tensor(torch.zeros(600, 2048), mesh, [Shard(axis)], src_data_rank=None)}
            reader = RingReader(path)
            dcp.load(loaded, storage_reader=reader, planner=planner)
            assert torch.equal(loaded["w"].full_tensor(), full) and reader.stats is not None
            direct.append(reader.stats.direct)
    return direct


def test_columns_are_read_through_the_page_cache(tmp_path: Path) -> None:
    for found in _distributed.run(2, through_the_cache, str(tmp_path)):
        assert found == [True, True, False, False]


# ---- ranks that fail, or are late ----


def state(fill: float) -> dict[str, Any]:
    return {"a": torch.full((1 << 16,), fill), "b": torch.full((300, 300), 2 * fill), "object": {1, 2}}


def is_loaded(found: dict[str, Any]) -> bool:
    return bool((found["a"] == 1).all() and (found["b"] == 2).all() and found["object"] == {1, 2})


def load(
    path: str,
    planner: type[RingLoadPlanner] = RingLoadPlanner,
    reader: type[RingReader] = RingReader,
    patience: float = PATIENCE_SECONDS,
) -> Any:
    """What a load that hands on raises on this rank; how long it took; whether bytes were handed on."""
    found = {**state(0), "object": None}
    began = time.monotonic()
    error = ""
    one = reader(path)
    try:
        with mock.patch.object(peers, "MEET_SECONDS", patience):
            dcp.load(found, storage_reader=one, planner=planner(process_group=dist.group.WORLD, share="host"))
    except (CheckpointException, KeyboardInterrupt) as caught:
        error = str(caught) or type(caught).__name__
    else:
        assert is_loaded(found)
    stats = one.stats
    return error, time.monotonic() - began, bool(stats and (stats.sent_bytes or stats.received_bytes))


def save_state(path: str) -> None:
    dcp.save(state(1), storage_writer=RingWriter(path), planner=RingSavePlanner(check_replicas="off"))


def raising(where: str) -> tuple[type[RingLoadPlanner], type[RingReader]]:
    """A planner and a reader of which one raises, on rank 1."""

    def fail(place: str) -> None:
        if place == where and dist.get_rank() == 1:
            raise RuntimeError(f"boom {place}")

    class Planner(RingLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            fail("before finish_plan")
            plan = super().finish_plan(new_plan)
            fail("after finish_plan")
            return plan

    class Reader(RingReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            fail("before read_data")
            future = super().read_data(plan, planner)
            fail("after read_data")
            return future

        def _read(self, *given: Any) -> None:
            fail("before the exchange")
            super()._read(*given)

    return Planner, Reader


def failing_places(path: str) -> dict[str, list[Any]]:
    save_state(path)
    found = {}
    for where in (
        "before finish_plan",
        "after finish_plan",
        "before the exchange",
        "before read_data",
        "after read_data",
    ):
        found[where] = [load(path, *raising(where), patience=0.5), load(path)]
    return found


def test_a_rank_that_fails_before_it_comes_leaves_nobody_waiting(tmp_path: Path) -> None:
    for found in _distributed.run(3, failing_places, str(tmp_path), timeout=90):
        for where, ((error, seconds, _), (after, _, handed_on)) in found.items():
            assert f"boom {where}" in error and seconds < 30
            assert after == "" and handed_on, "the next load is as if nothing had been"


def a_wrapped_planner(path: str) -> Any:
    """On rank 1 a planner stands before dcpring's, which the storage does not know."""
    save_state(path)

    class Foreign(dcp.LoadPlanner):
        def __init__(self, **options: Any) -> None:
            self._inner = RingLoadPlanner(**options)

        def __getattribute__(self, name: str) -> Any:
            inner = object.__getattribute__(self, "_inner")
            return inner if name == "_inner" else getattr(inner, name)

    planner: Any = Foreign if dist.get_rank() == 1 else RingLoadPlanner
    return load(path, planner, patience=0.5), load(path)


def test_a_planner_that_the_storage_does_not_know(tmp_path: Path) -> None:
    for (error, _, handed_on), (after, _, again) in _distributed.run(3, a_wrapped_planner, str(tmp_path)):
        assert (error, handed_on, after, again) == ("", False, "", True)


def late(path: str) -> tuple[Any, Any, list[str]]:
    save_state(path)

    class Late(RingReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == 1:
                time.sleep(1.5)
            return super().read_data(plan, planner)

    with logged() as said:
        first = load(path, reader=Late, patience=0.3)
        return first, load(path, reader=Late), [text for text in said if "reads for itself" in text]


def test_a_slow_rank_costs_only_the_sharing(tmp_path: Path) -> None:
    for (error, _, handed_on), (after, _, waited), said in _distributed.run(3, late, str(tmp_path)):
        assert (error, handed_on, after, waited) == ("", False, "", True)
        assert len(said) == 1 and "not all have come" in said[0]


def one_is_killed(path: str, where: str) -> Any:
    save_state(path)
    dist.barrier()
    with mock.patch.object(sharing, "ROUND_BYTES", 1 << 16):
        if dist.get_rank() == 1:
            kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            target, name = {
                "before": (RingReader, "read_data"),
                "waiting": (base_groups.Meeting, "settle"),
                "reading": (peers.PeerSharing, "_begin"),
                "taking": (peers.PeerSharing, "_fill"),
            }[where]
            setattr(target, name, kill)
        return load(path, patience=1.0 if where in ("before", "waiting") else PATIENCE_SECONDS)[1]


@pytest.mark.parametrize("where", ("before", "waiting", "reading", "taking"))
def test_a_rank_that_is_killed(tmp_path: Path, where: str) -> None:
    with pytest.raises(_distributed.RankFailure) as caught:
        _distributed.run(3, one_is_killed, str(tmp_path), where, timeout=60, grace=20)
    assert caught.value.tracebacks.pop(1) == "died, exit code -9\n"
    for text in caught.value.tracebacks.values():
        assert "no answer" not in text


def interrupted(path: str, where: str) -> tuple[Any, Any]:
    """Ctrl-C on rank 1: in a read, while the others are waited for, and in a gather."""
    save_state(path)
    dist.barrier()

    def press(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **kwargs)

        return call

    target, name = {
        "reading": (peers.PeerSharing, "_begin"),
        "gathering": (base_groups, "_all_gather"),
        "meeting": (base_groups.Meeting, "wait"),
    }[where]
    on = [mock.patch.object(target, name, press(getattr(target, name)))] if dist.get_rank() == 1 else []
    for patch in on:
        patch.start()
    try:
        first = load(path, patience=1.0 if where == "meeting" else PATIENCE_SECONDS)
    finally:
        for patch in on:
            patch.stop()
    return first, load(path)


@pytest.mark.parametrize("where", ("reading", "gathering", "meeting"))
def test_ctrl_c_on_one_rank(tmp_path: Path, where: str) -> None:
    for (error, seconds, _), (after, _, handed_on) in _distributed.run(
        3, interrupted, str(tmp_path), where, timeout=60
    ):
        assert "KeyboardInterrupt" in error and seconds < 30
        assert (after, handed_on) == ("", True)


# ---- stores, threads ----


def keys_left(path: str) -> list[int]:
    save_state(path)
    found = []
    for _ in range(4):
        assert load(path)[0] == ""
        dist.barrier()
        found.append(default_store().num_keys())
        dist.barrier()
    return found


def test_nothing_is_left_in_the_store(tmp_path: Path) -> None:
    for found in _distributed.run(3, keys_left, str(tmp_path)):
        assert len(set(found)) == 1


def without_a_store(path: str) -> Any:
    save_state(path)
    with mock.patch.object(base_groups, "_store", lambda: None):
        return load(path)


def test_without_a_store_every_rank_reads_for_itself(tmp_path: Path) -> None:
    for error, _, handed_on in _distributed.run(2, without_a_store, str(tmp_path)):
        assert (error, handed_on) == ("", False)


def at_the_same_time(path: str) -> list[bool]:
    """Two loads in two threads, each over a group of its own."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    save_state(path)
    found: dict[int, bool] = {}

    def work(number: int) -> None:
        for _ in range(5):
            got = {**state(0), "object": None}
            reader = RingReader(path)
            planner = RingLoadPlanner(process_group=groups[number], share="host")
            dcp.load(got, storage_reader=reader, planner=planner, process_group=groups[number])
            assert reader.stats is not None
            shared = reader.stats.sent_bytes + reader.stats.received_bytes > 0
            found[number] = found.get(number, True) and shared and is_loaded(got)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def test_several_loads_at_the_same_time(tmp_path: Path) -> None:
    assert _distributed.run(3, at_the_same_time, str(tmp_path)) == [[True, True]] * 3


# ---- between hosts ----


@pytest.mark.parametrize("count", (1, 2, 3, 5, 8, 13))
def test_a_tree_brings_a_unit_to_each_host_once(count: int) -> None:
    carriers = random.Random(count).sample(range(100), count)
    has, levels = {carriers[0]}, (count - 1).bit_length()
    for level in range(levels):
        now = [(rank, hop) for rank in carriers for hop in hops(carriers, rank) if hop.level == level]
        pairs = {(rank, hop.peer) for rank, hop in now if hop.is_sent}
        told = {(hop.peer, rank) for rank, hop in now if not hop.is_sent}
        assert pairs == told, "what one sends another receives, on the same level"
        assert {sender for sender, _ in pairs} <= has and not has & {receiver for _, receiver in pairs}
        has |= {receiver for _, receiver in pairs}
    assert has == set(carriers)
    assert hops(carriers, -1) == []


def needs_of(hosts: str, share: Any, holders: list[list[int]]) -> list[Needs]:
    """Each unit is of 3 MiB, and needed by some ranks."""
    tables = [[f"u{at}" for at, ranks in enumerate(holders) if rank in ranks] for rank in range(len(hosts))]
    return [
        Needs(rank, len(hosts), host, share, units_table(tables[rank], [3 << 20] * len(tables[rank])))
        for rank, host in enumerate(hosts)
    ]


def test_what_each_rank_is_told() -> None:
    everyone, holders = list(range(8)), [[1, 2], [0, 4], [3]]
    found = plan_sharing(needs_of("aaaabbbb", "all", [everyone] * 30 + holders))
    assert all(part.is_far and part.ranks_here == 4 for part in found)
    assert [part.leader for part in found] == [0] * 4 + [4] * 4
    by_rank = [{(unit.round, unit.offset): unit for unit in part.units} for part in found]
    for units in by_rank:
        for place, unit in units.items():
            assert all(by_rank[rank][place].reader == unit.reader for ranks in unit.holders for rank in ranks)
            carriers = unit.carriers()
            assert carriers[0] == unit.reader and len(carriers) == len(unit.holders)
            assert carriers == by_rank[unit.reader][place].carriers()
    carried = [rank for unit in found[0].units for rank in unit.carriers()]
    assert min(map(carried.count, everyone)) > 0, "all take their turn"
    assert [len(part.units) for part in found] == [31, 31, 31, 30, 31, 30, 30, 30]
    near = plan_sharing(needs_of("aaaabbbb", "host", [everyone] * 30 + holders))
    assert not any(part.is_far for part in near)
    assert all(len(unit.holders) == 1 for part in near for unit in part.units)


def test_what_is_told_grows_with_ranks_not_with_their_square() -> None:
    """Each row had a tuple of all ranks that need it: 68 MiB for 256 ranks and 500 tensors."""
    names = [f"layers.{at}.weight" for at in range(100)]
    table = units_table(names, [1 << 20] * 100)
    sizes = []
    for world in (64, 256):
        needs = [Needs(rank, world, f"host{rank // 8}", "all", table) for rank in range(world)]
        sizes.append(sum(len(pickle.dumps(part)) for part in plan_sharing(needs)) / world)
    assert sizes[1] < sizes[0] + 256 * 8, "a set of ranks, once"


def between_hosts(path: str, hosts: str, share: Any) -> tuple[bool, int, int, int]:
    """What goes through the process group, and how often all ranks meet."""
    rank, sent, met = dist.get_rank(), 0, 0
    state = {f"t{at}": torch.full((1 << 20,), float(at)) for at in range(32)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    loaded = {name: torch.zeros(1 << 20) for name in state}
    batch, gather = dist.batch_isend_irecv, base_groups.gather

    def counted(operations: list[Any]) -> Any:
        nonlocal sent
        sent += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch(operations)

    def gathered(*args: Any) -> Any:
        nonlocal met
        met += 1
        return gather(*args)

    planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
    with (
        mock.patch("dcpring.plan.load_planner.host_id", lambda: hosts[rank]),
        mock.patch.object(peers, "MEET_SECONDS", PATIENCE_SECONDS),
        mock.patch.object(dist, "batch_isend_irecv", counted),
        mock.patch.object(base_groups, "gather", gathered),
    ):
        dcp.load(loaded, storage_reader=(reader := RingReader(path)), planner=planner)
    assert reader.stats is not None
    return all(torch.equal(loaded[name], state[name]) for name in state), sent, met, reader.stats.bytes


@pytest.mark.parametrize(("hosts", "share"), (("aabb", "all"), ("aabbccd", "all"), ("aabb", "host"), ("abc", "all")))
def test_each_byte_goes_once_to_each_host(tmp_path: Path, hosts: str, share: str) -> None:
    """It went to each rank of other hosts; and with share="host" all ranks of all hosts met for each 32 MiB."""
    results = _distributed.run(len(hosts), between_hosts, str(tmp_path), hosts, share)
    size, others = 32 << 22, len(set(hosts)) - 1
    assert all(good for good, *_ in results)
    assert sum(sent for _, sent, _, _ in results) == (size * others if share == "all" else 0)
    assert sum(read for *_, read in results) < size * (1 if share == "all" else 1 + others) + (1 << 20)
    if share == "host":
        assert {met for _, _, met, _ in results} == {3}, "memory, mapped, received"


def one_is_late_to_a_round(path: str) -> tuple[bool, int]:
    """A rank of one host sleeps in the middle: its host's ranks read what is left, the other host's go on."""
    rank = dist.get_rank()
    state = {f"t{at}": torch.full((1 << 20,), float(at)) for at in range(48)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    loaded = {name: torch.zeros(1 << 20) for name in state}
    fill, wait, filled = peers.PeerSharing._fill, base_groups.Meeting.wait, 0

    def late(self: peers.PeerSharing, now: Any) -> None:
        nonlocal filled
        fill(self, now)
        filled += 1
        if rank == 1 and filled == 2:
            peers.MEET_SECONDS = PATIENCE_SECONDS
            time.sleep(2)

    with (
        mock.patch("dcpring.plan.load_planner.host_id", lambda: "aabb"[rank]),
        mock.patch.object(peers, "MEET_SECONDS", 0.5 if rank == 0 else PATIENCE_SECONDS),
        mock.patch.object(base_groups.Meeting, "wait", lambda self, _: wait(self, PATIENCE_SECONDS)),
        mock.patch.object(peers.PeerSharing, "_fill", late),
    ):
        planner = RingLoadPlanner(process_group=dist.group.WORLD, share="host")
        dcp.load(loaded, storage_reader=RingReader(path), planner=planner)
    return all(torch.equal(loaded[name], state[name]) for name in state), filled


def test_a_rank_that_is_late_to_a_round_costs_its_host_the_sharing(tmp_path: Path) -> None:
    results = _distributed.run(4, one_is_late_to_a_round, str(tmp_path))
    assert all(good for good, _ in results)
    assert results[0] == results[1] and results[0][1] < results[2][1] == results[3][1] == 6
