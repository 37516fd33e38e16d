"""Subclasses of RingSavePlanner that make plans of their own, item by item: what torch documents, and its relatives."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _logs import logged
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcpring
from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.torchside import versions

NAMES = [f"layer{number}" for number in range(8)]


def ddp_state(seed: int = 0) -> dict[str, Any]:
    """The same on all ranks."""
    made = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(64, 4, generator=made) for name in NAMES}
    return {"model": tensors, "epoch": seed, "optimizer": [{"lr": 0.5}, torch.randn(3, generator=made)]}


def blank(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: blank(value) for name, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    if isinstance(state, DTensor):
        local = torch.full_like(state.to_local(), -1)
        return DTensor.from_local(
            local, state.device_mesh, state.placements, shape=state.size(), stride=state.stride(), run_check=False
        )
    return torch.full_like(state, -1) if isinstance(state, torch.Tensor) else None


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, DTensor):
        return torch.equal(left.to_local(), right.to_local())
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


# ---- planners ----


class DDPLoadBalancingPlanner(RingSavePlanner):
    """As in the documentation of torch.distributed.checkpoint.SavePlanner, but for the class below it."""

    # This uses the default local plan behavior of having all non-sharded writes in rank 0
    # This sample doesn't handle ShardedTensors
    def create_global_plan(self, all_plans):  # type: ignore[no-untyped-def]
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None] for items in zip(*zip_longest(*iters), strict=True)
        ]
        all_plans = [replace(plan, items=items) for plan, items in zip(all_plans, items_per_rank, strict=True)]
        return super().create_global_plan(all_plans)


def to_the_last(plans: list[SavePlan]) -> list[SavePlan]:
    """All items that any rank writes go to the last rank."""
    items = [item for plan in plans for item in plan.items]
    last = {(item.index.fqn, item.index.offset): item for item in items}
    return [replace(plan, items=[]) for plan in plans[:-1]] + [replace(plans[-1], items=list(last.values()))]


class Before(RingSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return super().create_global_plan(to_the_last(all_plans))


class After(RingSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return to_the_last(plans), metadata


class AlsoAfter(Before):
    """Changes them twice."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return [replace(plan, items=plan.items[::-1]) for plan in plans], metadata


class Own(RingSavePlanner):
    """Never calls RingSavePlanner's."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

        self.global_plan, self.metadata = create_default_global_save_plan(to_the_last(all_plans))
        return self.global_plan, self.metadata


class InPlace(RingSavePlanner):
    """Changes the lists themselves."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        for plan in all_plans[:-1]:
            plan.items.clear()
        return super().create_global_plan(all_plans)


class PlainAfter(RingSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return [SavePlan(plan.items, plan.storage_data) for plan in to_the_last(plans)], metadata


class ExtraData(RingSavePlanner):
    """As torch documents it: each rank contributes to the metadata."""

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=f"of rank {dist.get_rank()}")

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        global_plan, metadata = super().create_global_plan(all_plans)
        merged_data = [plan.planner_data for plan in global_plan]
        return global_plan, replace(metadata, planner_data=merged_data)


class ExtraDataToTheLast(ExtraData, Before):
    pass


# ---- saving ----


def said(records: list[str]) -> int:
    return sum("is planned item by item" in text for text in records)


def writer_of(path: str, ring_storage: bool, **options: Any) -> Any:
    """A writer that notes the names that this rank writes, in ``written``."""
    base: Any = RingWriter if ring_storage else dcp.FileSystemWriter

    class Noting(base):  # type: ignore[misc]
        def write_data(self, plan: SavePlan, planner: Any) -> Any:
            self.written = [item.index.fqn for item in plan.items]
            return super().write_data(plan, planner)

    return Noting(path, **options)


def load(path: str, state: Any) -> list[Any]:
    """What is loaded by ours, and by stock."""
    ours, stock = blank(state), blank(state)
    dcp.load(ours, storage_reader=RingReader(path), planner=RingLoadPlanner())
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path))
    return [ours, stock]


def save_and_load(path: str, planner: Any, state: Any, ring_storage: bool = True) -> list[str]:
    """The names that this rank has written; what is loaded has been compared."""
    writer = writer_of(path, ring_storage)
    dcp.save(state, storage_writer=writer, planner=planner)
    assert all(same(loaded, state) for loaded in load(path, state))
    written: list[str] = writer.written
    return written


def balanced(path: str, ring_storage: bool) -> tuple[list[str], list[int], list[str]]:
    versions.say_once.cache_clear()  # this process has run other tests
    with logged(logging.INFO) as records:
        planner = DDPLoadBalancingPlanner()
        written = save_and_load(path, planner, ddp_state(), ring_storage)
        counts = [said(records)]
        assert save_and_load(path, planner, ddp_state(1), ring_storage) == written
        assert save_and_load(path, DDPLoadBalancingPlanner(), ddp_state(2), ring_storage) == written
    stored = dcp.FileSystemReader(path).read_metadata()
    assert stored.planner_data["model.layer3"] == ("model", "layer3")
    report = planner.report()
    assert "writers=items (DDPLoadBalancingPlanner overrides how plans are made" in str(report)
    assert report.ranks[0].items == len(written)
    return written, [*counts, said(records)], sorted(stored.state_dict_metadata)


@pytest.mark.parametrize("ring_storage", (True, False), ids=("ring", "stock"))
@pytest.mark.parametrize("world", (2, 4))
def test_the_example_of_torch(tmp_path: Path, world: int, ring_storage: bool) -> None:
    results = _distributed.run(world, balanced, str(tmp_path), ring_storage)
    names = results[0][2]
    assert len(names) == len(NAMES) + 3
    in_order = [*(f"model.{name}" for name in NAMES), "epoch", "optimizer.0.lr", "optimizer.1"]
    assert [written for written, _, _ in results] == [in_order[rank::world] for rank in range(world)]
    assert [counts for _, counts, _ in results] == [[1, 1]] * world, "once"


MAKERS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (Before, After, AlsoAfter, Own, InPlace, PlainAfter)
}


def all_to_the_last(path: str, maker: str, ring_storage: bool) -> list[list[str]]:
    options: list[dict[str, Any]] = [{}, {"flatten_state_dict": False}, {"dedup_save_to_lowest_rank": True}]
    written = []
    for number, more in enumerate(options):
        state = ddp_state(number) if more.get("flatten_state_dict", True) else ddp_state(number)["model"]
        written.append(save_and_load(f"{path}-{number}", MAKERS[maker](**more), state, ring_storage))
    return written


@pytest.mark.parametrize("ring_storage", (True, False), ids=("ring", "stock"))
@pytest.mark.parametrize("maker", MAKERS)
def test_wherever_items_are_changed(tmp_path: Path, maker: str, ring_storage: bool) -> None:
    first, last = _distributed.run(2, all_to_the_last, str(tmp_path / "checkpoint"), maker, ring_storage)
    assert first == [[], [], []]
    assert [len(set(written)) for written in last] == [len(NAMES) + 3, len(NAMES), len(NAMES) + 3]


# ---- what is no item ----


def extra_data_and_items(path: str) -> list[str]:
    planner = ExtraDataToTheLast(flatten_state_dict=False)
    return save_and_load(path, planner, ddp_state()["model"])


def test_data_of_planners_comes_back_with_changed_items(tmp_path: Path) -> None:
    assert [len(written) for written in _distributed.run(2, extra_data_and_items, str(tmp_path))] == [0, len(NAMES)]
    stored = dcp.FileSystemReader(tmp_path).read_metadata()
    assert stored.planner_data == ["of rank 0", "of rank 1"]


# ---- sharded, cut, renamed, cached ----


def mesh_state(seed: int) -> dict[str, Any]:
    """Sharded over two ranks, replicated twice; one DTensor in several chunks, and keys of one rank alone."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twice = [Replicate(), Shard(0)]
    state = {f"w{n}": distribute_tensor(torch.randn(6, 4), mesh, twice, src_data_rank=None) for n in range(3)}
    strided = dcpring.torchside.tensors.StridedShard(0, split_factor=2)
    state["packed"] = distribute_tensor(torch.randn(16, 2), mesh, [Replicate(), strided], src_data_rank=None)
    more = {f"rank{dist.get_rank()}": torch.randn(3), "bias": torch.randn(5)}
    return {"model": {**state, **more}, "step": seed}


class UpTwo(RingSavePlanner):
    """What ranks 0 and 1 were to write is written by their replicas, ranks 2 and 3."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        for low, high in ((0, 2), (1, 3)):
            shared = [item for item in plans[low].items if "rank" not in item.index.fqn]
            own = [item for item in plans[low].items if "rank" in item.index.fqn]
            plans[high] = replace(plans[high], items=plans[high].items + shared)
            plans[low] = replace(plans[low], items=own)
        return plans, metadata


class UpTwoBefore(RingSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        own = [[item for item in plan.items if "rank" in item.index.fqn] for plan in all_plans]
        return super().create_global_plan(
            [replace(plan, items=own[rank]) if rank < 2 else plan for rank, plan in enumerate(all_plans)]
        )


class CloneUpTwo(UpTwo):
    """With a ``resolve_data`` of its own too, so that nothing is known of what it can hand out."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.clone()


def from_replicas(path: str, kind: str, writers: Any, ring_storage: bool) -> list[str]:
    planner: Any = {"after": UpTwo, "before": UpTwoBefore, "clone": CloneUpTwo}[kind](writers=writers, split_bytes=8)
    writer = writer_of(path, ring_storage)
    state = mesh_state(3)
    dcp.save(state, storage_writer=writer, planner=planner)
    loaded = blank(state)
    dcp.load(loaded, storage_reader=RingReader(path), planner=RingLoadPlanner())
    assert same(loaded, state)
    by_stock = {"model": {name: value for name, value in blank(state["model"]).items() if name != "packed"}}
    dcp.load(by_stock, storage_reader=dcp.FileSystemReader(path))
    assert same(by_stock["model"], {name: state["model"][name] for name in by_stock["model"]})
    stored = dcp.FileSystemReader(path).read_metadata()
    assert stored.planner_data["model.rank1"] == ("model", "rank1"), "also of names that the coordinator has not"
    written: list[str] = writer.written
    return written


@pytest.mark.parametrize("ring_storage", (True, False), ids=("ring", "stock"))
@pytest.mark.parametrize(
    ("kind", "writers"), (("before", "auto"), ("after", "balanced"), ("after", "split"), ("clone", "split"))
)
def test_shards_and_parts_of_tensors(tmp_path: Path, kind: str, writers: str, ring_storage: bool) -> None:
    results = _distributed.run(4, from_replicas, str(tmp_path), kind, writers, ring_storage)
    assert results[:2] == [["model.rank0"], ["model.rank1"]]
    counts = Counter(name for written in results for name in written)
    assert counts["step"] == 1 and counts["model.w0"] == 2, "nothing is cut"


def renamed(path: str, where: str) -> int:
    names = {"prefixes": {"model.": "net."}}
    planner = DDPLoadBalancingPlanner(key_map=names if where == "planner" else None)
    writer = writer_of(path, True, key_map=names if where == "storage" else None)
    state = ddp_state()
    dcp.save(state, storage_writer=writer, planner=planner)
    renamed_state = {"net": state["model"], "epoch": 0}
    for loaded in load(path, renamed_state):
        assert same(loaded, renamed_state)
    return len(writer.written)


@pytest.mark.parametrize("where", ("planner", "storage"))
def test_key_maps(tmp_path: Path, where: str) -> None:
    assert sorted(_distributed.run(2, renamed, str(tmp_path), where)) == [5, 6]
    assert dcp.FileSystemReader(tmp_path).read_metadata().planner_data["net.layer1"] == ("net.layer1",)


def in_the_background(path: str) -> list[int]:
    """Saves of two planners at once, in a thread and with a group each."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    kinds: list[Any] = [DDPLoadBalancingPlanner, Before]
    writers = [writer_of(f"{path}-{number}", True) for number in range(2)]
    futures = [
        dcp.async_save(ddp_state(n), storage_writer=writers[n], planner=kinds[n](), process_group=groups[n])
        for n in range(2)
    ]
    for future in futures:
        future.result()
    for number in range(2):
        assert all(same(loaded, ddp_state(number)) for loaded in load(f"{path}-{number}", ddp_state(number)))
    return [len(writer.written) for writer in writers]


def test_two_saves_at_once(tmp_path: Path) -> None:
    assert _distributed.run(2, in_the_background, str(tmp_path / "checkpoint")) == [[6, 0], [5, 11]]


# ---- what cannot be taken ----


def failure_of(path: str, planner: Any, state: Any) -> str:
    try:
        dcp.save(state, storage_writer=RingWriter(path), planner=planner)
    except BaseException as error:
        return str(error)
    return ""


class Twice(RingSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return super().create_global_plan([replace(plan, items=[*plan.items] * 2) for plan in all_plans])


def refused(path: str, kind: str) -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (2,))
    state: Any = {"w": distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)], src_data_rank=None), "step": 1}
    if kind == "twice":
        state = {"step": 1, "a": torch.ones(2)}
    text = failure_of(path, (Twice if kind == "twice" else DDPLoadBalancingPlanner)(), state)
    return text, failure_of(path, RingSavePlanner(), ddp_state()) == ""


@pytest.mark.parametrize("kind", ("lost", "twice"))
def test_what_cannot_be_is_an_error_on_all_ranks(tmp_path: Path, kind: str) -> None:
    for text, works_again in _distributed.run(2, refused, str(tmp_path), kind):
        assert ("not in md" if kind == "twice" else "Failed to validate global plan") in text and works_again


class ChangingWriter(RingWriter):
    """A storage writer that drops an item: the planner goes by its tables, and must not believe that it is there."""

    def __init__(self, path: str, where: str) -> None:
        super().__init__(path)
        self.where = where

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        return replace(plan, items=list(plan.items)[1:]) if self.where == "local" else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        return [replace(plan, items=list(plan.items)[1:]) for plan in plans] if self.where == "global" else plans


class AroundPlanner(dcp.DefaultSavePlanner):
    """No subclass, but around one of ours, whose items it wants to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RingSavePlanner()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self.inner.create_global_plan(to_the_last(all_plans))


def changed_outside(path: str, where: str) -> str:
    try:
        if where == "around":
            dcp.save(ddp_state(), storage_writer=RingWriter(path), planner=AroundPlanner())
        else:
            dcp.save(ddp_state(), storage_writer=ChangingWriter(path, where), planner=RingSavePlanner())
    except BaseException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ("local", "global", "around"))
def test_items_that_others_change_are_refused_on_all_ranks(tmp_path: Path, where: str) -> None:
    expected = "overrides create_global_plan" if where == "around" else "the storage writer has changed the items"
    for text in _distributed.run(2, changed_outside, str(tmp_path), where):
        assert expected in text


# ---- one process ----


class OneHalf(RingSavePlanner):
    """Stores one tensor of many as another dtype."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.index.fqn == "layer1" and item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found.half() if write_item.index.fqn == "layer1" else found


def test_items_share_nothing_that_can_be_changed(tmp_path: Path) -> None:
    state = ddp_state()["model"]
    dcp.save(state, storage_writer=RingWriter(tmp_path), planner=OneHalf(), no_dist=True)
    stored: Any = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert [name for name in NAMES if stored[name].properties.dtype == torch.float16] == ["layer1"]
    loaded = blank(state)
    dcp.load(loaded, storage_reader=RingReader(tmp_path), planner=RingLoadPlanner(), no_dist=True)
    assert same(loaded, {**state, "layer1": state["layer1"].half().float()})


@pytest.mark.parametrize("maker", MAKERS)
def test_one_process(tmp_path: Path, maker: str) -> None:
    for number, options in enumerate(({}, {"enable_plan_caching": True}, {"flatten_state_dict": False})):
        path, state = str(tmp_path / str(number)), ddp_state(number)
        state = state if options.get("flatten_state_dict", True) else state["model"]
        dcp.save(state, storage_writer=RingWriter(path), planner=MAKERS[maker](**options), no_dist=True)
        for reader in (RingReader(path), dcp.FileSystemReader(path)):
            loaded = blank(state)
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            assert same(loaded, state)
