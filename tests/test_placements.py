"""DTensors of every placement: the rows that this rank's planners name are the rows that it holds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _distributed import run
from _kinds import failure
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcpring import CheckpointError, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.plan.flatten import flatten
from dcpring.plan.placements import parts_of
from dcpring.plan.table import make_table, rows_to_fill
from dcpring.torchside.tensors import CUTS_AS_ONE

Placements = tuple[Placement, ...]
SIZES = (0, 1, 2, 3, 5, 7, 8, 12, 13, 17)


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world without the others."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def meshes(world: int) -> list[tuple[int, ...]]:
    factors = [n for n in range(1, world + 1) if world % n == 0]
    shapes = itertools.chain.from_iterable(itertools.product(factors, repeat=ndim) for ndim in (1, 2, 3, 4))
    return [shape for shape in shapes if math.prod(shape) == world and shape.count(1) < 2]


def in_order(mesh: Sequence[int], order: Sequence[int], dim: int) -> Placements:
    """A dimension that is cut by all mesh dimensions in this order, as FSDP2 says it."""
    earlier = [[m for m in order[: order.index(mesh_dim)] if m > mesh_dim] for mesh_dim in range(len(mesh))]
    factors = [math.prod(mesh[m] for m in before) for before in earlier]
    return tuple(Shard(dim) if factor == 1 else strided(dim, factor) for factor in factors)


def expected(
    full: Tensor, mesh: Sequence[int], coordinate: Sequence[int], order: Any, placements: Placements
) -> Tensor:
    """What a rank holds of a tensor: cut in an order with ``torch.chunk``, or by the placements from left to right."""
    local = full
    for mesh_dim in range(len(mesh)) if order is None else order:
        placement = placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        factor = getattr(placement, "split_factor", 1) if order is None else 1
        pieces = [shares(piece, mesh[mesh_dim], placement.dim) for piece in shares(local, factor, placement.dim)]
        local = torch.cat([piece[coordinate[mesh_dim]] for piece in pieces], placement.dim)
    return local


def shares(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """As ``torch.chunk``, with the empty ones."""
    each = -(-tensor.size(dim) // count)
    bounds = [min(tensor.size(dim), index * each) for index in range(count + 1)]
    return [tensor.narrow(dim, start, end - start) for start, end in itertools.pairwise(bounds)]


def layouts(seed: int, world: int, count: int) -> list[tuple[tuple[int, ...], Placements, Any, tuple[int, ...]]]:
    """Meshes, placements, the order of cuts that these stand for (None: from left to right), and shapes."""
    rng = random.Random(seed)
    made: list[Any] = []
    while len(made) < count:
        mesh = rng.choice(meshes(world))
        shape = tuple(rng.choice(SIZES) for _ in range(rng.randrange(1, 4)))
        if rng.random() < 0.5:
            order = rng.sample(range(len(mesh)), len(mesh))
            made.append((mesh, in_order(mesh, order, rng.randrange(len(shape))), order, shape))
            continue
        kinds = [rng.choice(("replicate", "shard", "shard", "packed")) for _ in mesh]
        dims = rng.choices(range(len(shape)), k=len(mesh))
        if max(dims.count(dim) for dim in dims) > 1 and "packed" in kinds:
            continue  # of a dimension that is packed and cut again torch has several views
        choices = {"replicate": lambda _: Replicate(), "shard": Shard, "packed": lambda dim: strided(dim, 5)}
        placements = tuple(choices[kind](dim) for kind, dim in zip(kinds, dims, strict=True))
        made.append((mesh, placements, None, shape))
    return made


def dtensor(local: Tensor, mesh: DeviceMesh, placements: Placements, full: Tensor) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def numbered(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


# ---- every layout, rank by rank, without the other ranks ----


def is_taken(value: DTensor) -> bool:
    """Whether the rows of a tensor are known: torch 2.9 cuts what does not come out even in a way of its own."""
    try:
        parts_of("w", value)
    except CheckpointError:
        assert CUTS_AS_ONE, "later versions know all"
        return False
    return True


@pytest.mark.parametrize("world", (4, 6, 8, 12))
def test_every_placement(tmp_path: Path, world: int) -> None:
    """Each rank loads its rows of a whole checkpoint, and saves them as what they are; together they are everything."""
    cases = layouts(world, world, 100)
    wholes = {f"{index}": numbered(*shape) for index, (_, _, _, shape) in enumerate(cases)}
    dcp.save(wholes, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner(), no_dist=True)
    seen = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    for rank in range(world):
        with rank_of(rank, world):
            made = {shape: init_device_mesh("cpu", shape) for shape in {mesh for mesh, _, _, _ in cases}}
            state: dict[str, Any] = {}
            for (name, whole), (mesh, placements, order, _) in zip(wholes.items(), cases, strict=True):
                local = expected(whole, mesh, made[mesh].get_coordinate(), order, placements)
                value = dtensor(torch.full_like(local, -1), made[mesh], placements, whole)
                if is_taken(value):
                    state[name] = value
            wrong = loaded_wrong(state, tmp_path, wholes, cases)
            assert not wrong, f"rank {rank}: {[(cases[int(name)]) for name in wrong]}"
            for name, chunk, tensor in planned(state):
                box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                assert torch.equal(tensor, wholes[name][box]), f"rank {rank}: {cases[int(name)]}"
                seen[name][box] += 1
    for name, (mesh, placements, _, _) in zip(wholes, cases, strict=True):
        if name not in state:
            continue
        pairs = zip(mesh, placements, strict=True)
        copies = math.prod(size for size, placement in pairs if isinstance(placement, Replicate))
        assert (seen[name] == copies).all(), cases[int(name)]


def loaded_wrong(state: dict[str, Any], path: Path, wholes: dict[str, Tensor], cases: list[Any]) -> list[str]:
    """The keys that do not get what the rank should have, once through the tables and once through stock's storage."""
    wrong = set()
    for reader in (RingReader(path), FileSystemReader(path)):
        for value in state.values():
            value._local_tensor.fill_(-1)
        dcp.load(state, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
        for name, value in state.items():
            mesh, placements, order, _ = cases[int(name)]
            want = expected(wholes[name], mesh, value.device_mesh.get_coordinate(), order, placements)
            if not torch.equal(value._local_tensor, want):
                wrong.add(name)
    return sorted(wrong)


def planned(state: dict[str, Any]) -> Iterator[tuple[str, Any, Tensor]]:
    """What a rank would write of each key: the chunks, and what is handed out for them."""
    planner = RingSavePlanner(check_replicas="off")
    planner.set_up_planner(state)
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        if 0 not in item.tensor_data.chunk.sizes:
            yield item.index.fqn, item.tensor_data.chunk, planner.resolve_data(item)


def test_an_order_that_the_placements_do_not_say() -> None:
    """DTensorSpec has the order of cuts besides the placements since torch 2.10."""
    full = numbered(7, 2)
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            local = expected(full, (3, 2), mesh.get_coordinate(), (1, 0), (Shard(0), Shard(0)))
            value = dtensor(local, mesh, (Shard(0), Shard(0)), full)
            if not hasattr(value._spec, "shard_order"):
                continue
            (entry,) = value._spec.shard_order
            value._spec.shard_order = (type(entry)(0, (1, 0)),)
            (part,) = parts_of("w", value)
            assert torch.equal(local, full.narrow(0, part.offsets[0], part.lengths[0]))


def test_ranks_outside_of_the_mesh() -> None:
    with rank_of(3, 4):
        value = DTensor.from_local(torch.empty(0), DeviceMesh("cpu", [0, 1]), [strided(0, 2)], run_check=False)
        assert parts_of("w", value) == ()


# ---- what is refused ----


class Ragged(Shard):
    """A placement of somebody's own."""


@pytest.mark.parametrize(
    ("placements", "rows", "text"),
    (
        ((Ragged(0),), 4, "dcpring does not know what"),
        ((strided(0, 2),), 3, "shape [3, 2], but with the placements"),
        ((Shard(0),), 5, "shape [5, 2], but with the placements"),
    ),
)
def test_layouts_that_cannot_be_told(tmp_path: Path, placements: Placements, rows: int, text: str) -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        state = {"layers.w": dtensor(torch.zeros(rows, 2), mesh, placements, numbered(8, 2))}
        planner = RingSavePlanner()
        planner.set_up_planner(state)
        with pytest.raises(CheckpointError, match=r"'layers\.w'") as caught:
            planner.create_local_plan()
        assert text in str(caught.value)
        with pytest.raises(CheckpointError, match=r"'layers\.w'"):
            make_table(flatten(state), rows_of=rows_to_fill)


def test_partial_tensors_are_refused_as_stock_does() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        planner = RingSavePlanner()
        planner.set_up_planner({"w": DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)})
        with pytest.raises(Exception, match=r"[Pp]artial"):
            planner.create_local_plan()


def test_planners_that_take_other_rows_for_the_ranks(tmp_path: Path) -> None:
    """Stock's planners take the first rows: our storage does not let that pass."""
    full = numbered(8, 2)
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    dcp.save({"w": full}, storage_writer=RingWriter(whole), no_dist=True)
    for rank in range(2):
        with rank_of(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            local = expected(full, (2,), (rank,), None, (strided(0, 2),))
            value = dtensor(local, mesh, (strided(0, 2),), full)
            text = failure(
                lambda value=value: dcp.load(
                    {"w": value}, storage_reader=RingReader(whole), planner=DefaultLoadPlanner(), no_dist=True
                )
            )
            assert "'w': the planner takes this rank's part" in text and "planner=RingLoadPlanner()" in text
            assert torch.equal(value.to_local(), local)
            text = failure(
                lambda value=value: dcp.save(
                    {"w": value}, storage_writer=RingWriter(packed), planner=_Unchecked(), no_dist=True
                )
            )
            assert "'w': the planner takes this rank's part" in text and "planner=RingSavePlanner()" in text


class _Unchecked(DefaultSavePlanner):
    """Stock's planner without its checks of the global plan."""

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


# ---- whole saves and loads ----

CASES: tuple[tuple[tuple[int, ...], Placements], ...] = (
    ((4,), (strided(0, 2),)),
    ((4,), (strided(1, 3),)),
    ((4,), (strided(0, 7),)),
    ((2, 2), (Replicate(), strided(0, 2))),
    ((2, 2), (strided(0, 2), Shard(0))),
    ((2, 2), (strided(0, 2), Replicate())),
    ((2, 2), (strided(0, 3), strided(1, 2))),
    ((2, 2), (Shard(1), strided(0, 2))),
    ((2, 2), (Shard(0), Shard(0))),
    ((1, 2, 2), (Shard(1), strided(0, 2), Shard(0))),
)
SHAPES = ((16, 12), (13, 9), (6, 8, 3), (5, 64))


def _packed() -> dict[str, DTensor]:
    """Tensors of all cases."""
    made = {mesh: init_device_mesh("cpu", mesh) for mesh in {mesh for mesh, _ in CASES}}
    tensors = {
        f"{index}.{shape}": distribute_tensor(numbered(*shape).float(), made[mesh], placements, src_data_rank=None)
        for index, (mesh, placements) in enumerate(CASES)
        for shape in SHAPES
    }
    taken: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(taken, {name for name, tensor in tensors.items() if is_taken(tensor)})
    return {
        name: tensor for name, tensor in tensors.items() if all(name in each for each in taken) and _comes_back(tensor)
    }


def _comes_back(tensor: DTensor) -> bool:
    """Whether torch makes of the tensor what it was made of: 2.9 does not, where FSDP2 and TP cut unevenly."""
    same = torch.equal(_whole(tensor), numbered(*tensor.shape).float())
    assert same or CUTS_AS_ONE, "later versions do"
    return same


def _whole(tensor: DTensor) -> torch.Tensor:
    try:
        return tensor.full_tensor()
    except ValueError:  # torch 2.11 does not take packed placements there
        return numbered(*tensor.shape).float()


def _blank(state: dict[str, DTensor], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        name: dtensor(torch.full_like(value.to_local(), -1, dtype=dtype), value.device_mesh, value.placements, value)
        for name, value in state.items()
    }


def _round_trip(path: str, writers: Any) -> list[str]:
    wrong = []
    state = _packed()
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner(writers=writers))
    dcp.save(state, storage_writer=FileSystemWriter(f"{path}-stock"), planner=RingSavePlanner(writers=writers))
    wholes = {name: _whole(tensor) for name, tensor in state.items()}
    for folder, reader, share in (
        (path, RingReader, "off"),
        (path, RingReader, "host"),
        (path, FileSystemReader, "off"),
        (f"{path}-stock", RingReader, "off"),
    ):
        loaded = _blank(state)
        planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)
        dcp.load(loaded, storage_reader=reader(folder), planner=planner)
        wrong += [
            f"{folder} {reader.__name__} {share}: {name} {tensor.placements}"
            for name, tensor in state.items()
            if not torch.equal(loaded[name].to_local(), tensor.to_local())
        ]
    for folder in (path, f"{path}-stock"):
        plain = {name: torch.zeros(whole.shape) for name, whole in wholes.items()}
        dcp.load(plain, storage_reader=FileSystemReader(folder), no_dist=True)
        wrong += [f"{folder}: {name}" for name, whole in wholes.items() if not torch.equal(plain[name], whole)]
    return wrong


@pytest.mark.parametrize("writers", ("balanced", "split"))
def test_round_trip(tmp_path: Path, writers: Any) -> None:
    assert run(4, _round_trip, str(tmp_path / "checkpoint"), writers) == [[]] * 4


def _casts(path: str) -> bool:
    """Through host copies, where the destination has another dtype."""
    state = _packed()
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    loaded = _blank(state, torch.float64)
    dcp.load(loaded, storage_reader=RingReader(path), planner=RingLoadPlanner())
    return all(torch.equal(loaded[name].to_local(), tensor.to_local().double()) for name, tensor in state.items())


def test_into_another_dtype(tmp_path: Path) -> None:
    assert run(4, _casts, str(tmp_path)) == [True] * 4


def _replicas_differ(path: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    full = numbered(8, 2).float() + mesh.get_coordinate()[0]
    state = {"packed": distribute_tensor(full, mesh, [Replicate(), strided(0, 2)], src_data_rank=None)}
    planner = RingSavePlanner(check_replicas="error")
    return failure(lambda: dcp.save(state, storage_writer=RingWriter(path), planner=planner))


def test_replicas_in_several_chunks_are_compared(tmp_path: Path) -> None:
    assert all("'packed'" in text and "different bytes" in text for text in run(4, _replicas_differ, str(tmp_path)))


def _fsdp_over_tp(path: str) -> list[str]:
    """Rows that do not come out even: FSDP2 cuts what tensor parallelism has left, rank 4 has nothing."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(5, 7)
    for name, parameter in list(module.named_parameters()):
        whole = numbered(*parameter.shape).float()
        module.register_parameter(
            name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
        )
    fully_shard(module, mesh=mesh["dp"])
    state = module.state_dict()
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())
    kept = {name: value.to_local().clone() for name, value in state.items()}
    for value in state.values():
        value.to_local().zero_()
    dcp.load(state, storage_reader=RingReader(path), planner=RingLoadPlanner())
    wrong = [name for name, value in state.items() if not torch.equal(value.to_local(), kept[name])]
    plain = {"weight": torch.zeros(7, 5), "bias": torch.zeros(7)}
    dcp.load(plain, storage_reader=FileSystemReader(path))
    return wrong + [name for name, got in plain.items() if not torch.equal(got, numbered(*got.shape).float())]


def test_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    assert run(6, _fsdp_over_tp, str(tmp_path)) == [[]] * 6
