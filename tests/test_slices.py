"""Resharding: DTensors saved by one mesh and loaded by another, and how many bytes that reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _distributed import run
from _kinds import PAIRS, READERS, WRITERS, load, random, raw, save, stored
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcpring import RingReader

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (64, 48),
    "uneven": (13, 7),
    "vector": (10,),
    "fewer rows than ranks": (3, 5),
    "one row": (1, 9),
    "cube": (12, 8, 20),
    "large": (1024, 640),
    "scalar": (),
}


def _value(key: str) -> Tensor:
    shape = SHAPES[key]
    return (torch.arange(math.prod(shape), dtype=torch.float32) + sum(key.encode())).reshape(shape)


def _placements(key: str, layout: str, mesh_dims: int) -> list[Any]:
    """``layout`` names a dimension to shard along for each mesh dimension, "r" to replicate."""
    dims = len(SHAPES[key])
    return [Replicate() if axis == "r" or int(axis) >= dims else Shard(int(axis)) for axis in layout[:mesh_dims]]


def _state(mesh_shape: tuple[int, ...], layout: str, zero: bool) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", mesh_shape)
    state = {}
    for key in SHAPES:
        value = torch.zeros(SHAPES[key]) if zero else _value(key)
        state[key] = distribute_tensor(value, mesh, _placements(key, layout, len(mesh_shape)))
    return state


def _save_sharded(jobs: list[tuple[str, str, tuple[int, ...], str]]) -> None:
    for path, writer, mesh_shape, layout in jobs:
        dcp.save(_state(mesh_shape, layout, zero=False), storage_writer=WRITERS[writer](path))


def _load_sharded(jobs: list[tuple[str, str, tuple[int, ...], str]]) -> list[str]:
    wrong = []
    for path, reader, mesh_shape, layout in jobs:
        state = _state(mesh_shape, layout, zero=True)
        dcp.load(state, storage_reader=READERS[reader](path))
        for key, tensor in state.items():
            if not torch.equal(tensor.full_tensor(), _value(key)):
                wrong.append(f"{path} on {mesh_shape} as {layout}: {key}")
    return wrong


def _meshes(size: int) -> list[tuple[tuple[int, ...], str]]:
    """Meshes of so many ranks, and what they shard."""
    flat: list[tuple[tuple[int, ...], str]] = [((size,), axis) for axis in ("0", "1", "2", "r")]
    if size == 4:
        flat += [((2, 2), layout) for layout in ("01", "10", "00", "r0", "0r")]
    return flat


@pytest.mark.slow(but=["ring-ring"])
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_from_any_mesh_to_any_other(tmp_path: Path, writer: str, reader: str) -> None:
    """1, 2 and 4 ranks, sharded along any dimension, TP x FSDP in two dimensions, to the same."""
    saves: dict[int, list[Any]] = {
        size: [(str(tmp_path / f"{shape}-{layout}"), writer, shape, layout) for shape, layout in _meshes(size)]
        for size in (1, 4)
    }
    for size, jobs in saves.items():
        run(size, _save_sharded, jobs)
    paths = [job[0] for jobs in saves.values() for job in jobs]
    for size in (4, 2, 1):
        meshes = _meshes(size)
        jobs = [(path, reader, *meshes[(i + j) % len(meshes)]) for i, path in enumerate(paths) for j in range(2)]
        assert run(size, _load_sharded, jobs) == [[]] * size


# ---- how much is read ----

ROWS, COLUMNS = 2048, 3072  # 24 MiB


def _load_quarter(path: str, dim: int) -> tuple[int, int, bool]:
    """Bytes read, bytes needed, and whether the shard is right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    state = {"w": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(dim)])}
    reader = RingReader(path)
    dcp.load(state, storage_reader=reader)
    local = state["w"].to_local()
    assert reader.stats is not None
    assert reader.stats.tensor_bytes == local.nbytes
    return reader.stats.bytes, local.nbytes, torch.equal(local, whole.chunk(4, dim)[dist.get_rank()])


@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_bytes_read_for_a_quarter(tmp_path: Path, writer: str) -> None:
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    save({"w": whole}, tmp_path, writer)
    for read, needed, good in run(4, _load_quarter, str(tmp_path), 0):
        assert good and needed <= read <= 1.1 * needed
    for read, needed, good in run(4, _load_quarter, str(tmp_path), 1):
        assert good and needed <= read <= 1.01 * whole.nbytes


class _Slices(dcp.DefaultLoadPlanner):
    """Loads given boxes (key, offsets, lengths) of what is stored, each into a tensor of its own."""

    def __init__(self, boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]], dtype: torch.dtype) -> None:
        super().__init__()
        self.boxes = boxes
        self.tensors = [torch.zeros(lengths, dtype=dtype) for _, _, lengths in boxes]
        self.committed: list[int] = []

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        index = {index.fqn: index for index in self.metadata.storage_data}
        return LoadPlan(
            [
                ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(str(i)),
                    torch.Size([0] * len(lengths)),
                    index[key],
                    torch.Size(offsets),
                    torch.Size(lengths),
                )
                for i, (key, offsets, lengths) in enumerate(self.boxes)
            ]
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.tensors[int(read_item.dest_index.fqn)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.committed.append(int(read_item.dest_index.fqn))


def _load_boxes(
    path: Path, boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]], **options: Any
) -> tuple[_Slices, Any]:
    planner = _Slices(boxes, torch.int32)
    reader = RingReader(path, **options)
    dcp.load({}, storage_reader=reader, planner=planner)
    assert sorted(planner.committed) == list(range(len(boxes)))
    return planner, reader.stats


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_any_box(tmp_path: Path, writer: str, engine: str) -> None:
    """Boxes at random of tensors of one to five dimensions, small and large, many at a time."""
    saved = {
        "1d": random(torch.int32, 900_001),
        "2d": random(torch.int32, 1201, 777),
        "3d": random(torch.int32, 50, 61, 70),
        "5d": random(torch.int32, 9, 8, 7, 11, 10),
        "small": random(torch.int32, 5, 4),
    }
    save(saved, tmp_path, writer)
    generator = torch.Generator().manual_seed(7)
    boxes = []
    for turn in range(60):
        key = sorted(saved)[turn % len(saved)]
        ends = [sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in saved[key].shape]
        boxes.append((key, tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    planner, _ = _load_boxes(tmp_path, boxes, engine=engine)
    for (key, offsets, lengths), tensor in zip(boxes, planner.tensors, strict=True):
        part = saved[key][tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        assert raw(tensor) == raw(part), (key, offsets, lengths)


def test_each_byte_is_read_once_when_items_share_a_record(tmp_path: Path) -> None:
    saved = random(torch.int32, 2000, 2048)  # 16 MiB
    save({"w": saved, "other": random(torch.int32, 1000, 1000)}, tmp_path)
    size = stored(tmp_path)["w"].length
    columns = [("w", (0, 128 * i), (2000, 128)) for i in range(16)]
    overlapping = [("w", (0, 0), (2000, 2048)), ("w", (100, 5), (1000, 2000)), ("w", (0, 0), (2000, 1))]
    rows = [("w", (100 * i, 0), (100, 2048)) for i in range(20)]
    for boxes in (columns, overlapping, rows, rows[::-1] + columns):
        planner, stats = _load_boxes(tmp_path, boxes)
        assert saved.nbytes <= stats.bytes <= size + (1 << 20)
        for (_, offsets, lengths), tensor in zip(boxes, planner.tensors, strict=True):
            box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            assert torch.equal(tensor, saved[box])


def test_little_is_read_for_little(tmp_path: Path) -> None:
    saved = random(torch.int32, 4096, 1024)  # 16 MiB
    save({"w": saved, "small": torch.ones(3, dtype=torch.int32)}, tmp_path)
    for boxes, at_most in (
        ([("w", (2000, 0), (1, 1024))], 1 << 16),
        ([("w", (0, 0), (1, 1)), ("w", (4095, 1023), (1, 1))], 1 << 17),
        ([("small", (0,), (3,))], 1 << 16),
        ([("w", (1000, 0), (1024, 1024))], int(4.4 * (1 << 20))),
    ):
        planner, stats = _load_boxes(tmp_path, boxes, direct=True)
        assert stats.bytes <= at_most, (boxes, stats)
        for (_, offsets, lengths), tensor in zip(boxes, planner.tensors, strict=True):
            if len(lengths) == 2:
                assert torch.equal(tensor, saved[offsets[0] : offsets[0] + lengths[0], offsets[1] :][:, : lengths[1]])


def test_a_file_in_the_page_cache_is_read_through_it(tmp_path: Path) -> None:
    saved = {"w": random(torch.int32, 1024, 1024)}
    save(saved, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.read_bytes()
    loaded = {"w": torch.zeros(1024, 1024, dtype=torch.int32)}
    stats = load(loaded, tmp_path).stats
    assert stats.cached_bytes == stats.bytes >= saved["w"].nbytes
    assert torch.equal(loaded["w"], saved["w"])


def test_boxes_outside_of_the_stored_chunk_are_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(4, 5, dtype=torch.int32)}, tmp_path)
    for box in (((0, 0), (5, 5)), ((4, 0), (1, 1)), ((2, 3), (1, 3))):
        with pytest.raises(dcp.api.CheckpointException, match="'w'"):
            _load_boxes(tmp_path, [("w", *box)])
