"""RingHFWriter: directories of safetensors, written in place by all ranks, read by the safetensors package."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import pickle
import re
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import _hf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _distributed import RankFailure, run
from _hf import stored_in
from fault._support import fault, leaks_descriptors, open_descriptors
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcpring import _C, CheckpointError, RingHFReader, RingHFWriter, RingLoadPlanner, RingSavePlanner
from dcpring.base.joint import Joint
from dcpring.format.safetensors import NAMES
from dcpring.hf import stripes
from dcpring.hf.file_plan import Assignment, Common, FileLayout, Holdings, Laid
from dcpring.move import host_memory
from dcpring.move.pending import Pending

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (3001, 257),
    "rows": (1024, 1024),
    "few": (3, 700_001),
    "one": (1, 9),
    "cube": (12, 80, 200),
    "vector": (1_000_003,),
    "empty": (0, 4),
    "scalar": (),
}
DTYPES = {"rows": torch.bfloat16, "vector": torch.int32, "cube": torch.float64}
MESHES: list[tuple[tuple[int, ...], str]] = [
    ((4,), "0"),
    ((4,), "1"),
    ((2, 2), "r0"),
    ((2, 2), "01"),
    ((2, 2), "11"),
    ((2, 2), "1r"),
    ((3,), "0"),
    ((3,), "1"),
]


def value(key: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(key.encode()))
    made = torch.randn(SHAPES[key], generator=generator) * 100
    return made.to(DTYPES.get(key, torch.float32))


def state(mesh_shape: tuple[int, ...], layout: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", mesh_shape)
    made: dict[str, Tensor] = {}
    for key, shape in SHAPES.items():
        axes = layout[: len(mesh_shape)]
        places = [Replicate() if axis == "r" or int(axis) >= len(shape) else Shard(int(axis)) for axis in axes]
        made[key] = distribute_tensor(value(key), mesh, places)
    return made


def read(path: Path) -> dict[str, Tensor]:
    """All of a directory, by the safetensors package, as transformers finds it."""
    model, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if model.exists():
        return load_file(model)
    listed = json.loads(index.read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for name in sorted(set(listed.values())):
        part = load_file(path / name)
        assert {key for key, file in listed.items() if file == name} == part.keys()
        found |= part
    return found


def check_crcs(path: Path) -> None:
    """Every block's CRC in the headers is that of its bytes."""
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as header:
            notes, names = header.metadata(), set(header.keys())
        noted = json.loads(notes["dcpring.crcs"])
        assert noted.pop("__metadata__") == "" and notes["dcpring.crc32"]
        assert noted.keys() == names
        data, places = file.read_bytes(), stored_in(file)
        for name in names:
            block, stored = 1 << 20, places[name]
            cuts = [stored.begin, *range((stored.begin // block + 1) * block, stored.end, block), stored.end]
            sums = [zlib.crc32(data[a:b]) for a, b in itertools.pairwise(cuts) if a < b]
            assert noted[name] == b"".join(one.to_bytes(4, "little") for one in sums).hex(), name


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape, key
        assert torch.equal(
            found[key].contiguous().flatten().view(torch.uint8), tensor.contiguous().flatten().view(torch.uint8)
        ), key


def whole() -> dict[str, Tensor]:
    return {key: value(key) for key in SHAPES}


def save_jobs(jobs: list[tuple[str, tuple[int, ...], str, bool, dict[str, Any]]], hosts: list[str] | None) -> list[int]:
    written = []
    for path, mesh_shape, layout, is_stock, options in jobs:
        planner = DefaultSavePlanner() if is_stock else RingSavePlanner()
        writer = RingHFWriter(path, **options)
        with mock.patch("dcpring.hf.writer.host_id", lambda: "" if hosts is None else hosts[dist.get_rank()]):
            dcp.save(state(mesh_shape, layout), storage_writer=writer, planner=planner)
        assert writer.stats is not None
        written.append(writer.stats.bytes)
    return written


@pytest.mark.parametrize("world", [3, 4])
def test_any_mesh_makes_the_whole_tensors(tmp_path: Path, world: int) -> None:
    chosen = [(mesh, layout) for mesh, layout in MESHES if torch.Size(mesh).numel() == world]
    jobs = [
        (str(tmp_path / f"{number}-{is_stock}"), mesh, layout, is_stock, options)
        for number, (mesh, layout) in enumerate(chosen)
        for is_stock, options in ((False, {}), (True, {"max_shard_bytes": 4 << 20}))
    ]
    written = run(world, save_jobs, jobs, None)
    for number, (path, *_) in enumerate(jobs):
        same(read(Path(path)), whole())
        check_crcs(Path(path))
        files = [file for file in Path(path).iterdir() if file.suffix == ".safetensors"]
        heads = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
        assert sum(rank[number] for rank in written) == sum(file.stat().st_size for file in files) - heads


def load_back(path: str, reader: str) -> bool:
    for mesh, layout in (((4,), "0"), ((4,), "1"), ((2, 2), "r1")):
        wanted = state(mesh, layout)
        loaded = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
        storage = RingHFReader(path) if reader == "ring" else HuggingFaceStorageReader(path)
        planner = RingLoadPlanner() if reader == "ring" else DefaultLoadPlanner()
        if reader == "stock":  # it cannot load tensors of no dimensions, nor empty ones
            loaded = {key: tensor for key, tensor in loaded.items() if key not in ("scalar", "empty")}
        dcp.load(loaded, storage_reader=storage, planner=planner)
        assert all(torch.equal(loaded[key].to_local(), wanted[key].to_local()) for key in loaded)  # type: ignore[attr-defined]
    return True


@pytest.mark.parametrize("reader", ["ring", "stock"])
def test_loads_into_other_shards(tmp_path: Path, reader: str) -> None:
    run(4, save_jobs, [(str(tmp_path), (2, 2), "10", False, {"max_shard_bytes": 8 << 20})], None)
    assert run(4, load_back, str(tmp_path), reader) == [True] * 4


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    values = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 19)}
    save(tmp_path, values)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-(3 << 20)] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"'a'.*CRC-32"):
        dcp.load(values, storage_reader=RingHFReader(tmp_path), planner=RingLoadPlanner(), no_dist=True)


@pytest.mark.parametrize("hosts", [["a", "a", "b", "b"], ["a", "b", "c", "d"], ["a", "b", "a", "b"]])
def test_ranks_of_several_hosts(tmp_path: Path, hosts: list[str]) -> None:
    jobs = [(str(tmp_path / layout), mesh, layout, False, {}) for mesh, layout in MESHES[:4]]
    run(4, save_jobs, jobs, hosts)
    for path, *_ in jobs:
        same(read(Path(path)), whole())
        check_crcs(Path(path))


def no_shared_memory(path: str) -> None:
    with mock.patch.object(host_memory.shared_memory, "open_word", side_effect=OSError("other containers")):
        dcp.save(state((2,), "1"), storage_writer=RingHFWriter(path), planner=RingSavePlanner())


def test_ranks_that_cannot_share_memory(tmp_path: Path) -> None:
    run(2, no_shared_memory, str(tmp_path))
    same(read(tmp_path), whole())


def cast_jobs(path: str) -> None:
    dtype = {"rows": torch.float32, "few": torch.float16, "*": torch.bfloat16}
    writer = RingHFWriter(path, dtype=dtype, key_map={"few": "model.few"})
    dcp.save(state((2,), "1"), storage_writer=writer, planner=RingSavePlanner())


def test_casts_and_other_names(tmp_path: Path) -> None:
    run(2, cast_jobs, str(tmp_path))
    wanted = {
        key: tensor if key == "vector" else tensor.to({"rows": torch.float32}.get(key, torch.bfloat16))
        for key, tensor in whole().items()
        if key != "few"
    }
    same(read(tmp_path), wanted | {"model.few": value("few").to(torch.bfloat16)})


# ---- one process ----


def save(path: Path, values: dict[str, Any], planner: Any = None, **options: Any) -> None:
    writer = RingHFWriter(path, **options)
    dcp.save(values, storage_writer=writer, planner=planner or RingSavePlanner(), no_dist=True)


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(30, 7)
    save(tmp_path, {"embed": weight, "other": torch.ones(3), "head": weight, "view": weight[:3]})
    same(read(tmp_path), {"embed": weight, "other": torch.ones(3), "view": weight[:3]})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["head"] == "embed" and file.metadata()["format"] == "pt"
    save(tmp_path, {"embed": weight, "head": weight}, DefaultSavePlanner())
    same(read(tmp_path), {"embed": weight, "head": weight})


def tie_on_all_ranks(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(60.0).view(6, 10), mesh, [Shard(0)])
    dcp.save({"a": weight, "b": weight}, storage_writer=RingHFWriter(path), planner=RingSavePlanner())


def test_tied_shards_are_written_once(tmp_path: Path) -> None:
    run(2, tie_on_all_ranks, str(tmp_path))
    same(read(tmp_path), {"a": torch.arange(60.0).view(6, 10)})


def test_every_dtype(tmp_path: Path) -> None:
    values = {}
    for number, dtype in enumerate(NAMES):
        raw = torch.randint(0, 2, (6, 8 * dtype.itemsize), dtype=torch.uint8)
        values[f"{number}.{dtype}"] = raw.view(dtype) if dtype != torch.bool else raw[:, :8].bool()
    save(tmp_path, values)
    places = stored_in(tmp_path / "model.safetensors")
    for name, tensor in values.items():
        stored = places[name]
        data = (tmp_path / "model.safetensors").read_bytes()[stored.begin : stored.end]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
        assert data == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name


class Doubling(DefaultSavePlanner):
    """Makes each tensor when it is asked for it, and knows how many bytes of them are there at a time."""

    alive = most = 0

    def resolve_data(self, write_item: Any) -> Any:
        made = super().resolve_data(write_item) * 2
        self.alive += made.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._gone, made.nbytes)
        return made

    def _gone(self, size: int) -> None:
        self.alive -= size


def test_a_planner_that_makes_tensors_makes_few_at_a_time(tmp_path: Path) -> None:
    values = {f"{number}": torch.full((1 << 20,), float(number)) for number in range(50)}
    planner = Doubling()
    save(tmp_path, values, planner)
    same(read(tmp_path), {name: 2 * tensor for name, tensor in values.items()})
    assert planner.most <= 80 << 20


def test_files_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and all are under way when the first is waited for."""
    state = {f"w{n}": torch.full((1 << 10,), float(n)) for n in range(5)}
    waits, wait = [], Pending.wait

    def waiting(pending: Pending, events: Any) -> None:
        waits.append((pending.syncs is not None, len(pending.synced)))
        wait(pending, events)

    monkeypatch.setattr(Pending, "wait", waiting)
    _C.arm_fault("fsync", 1 << 30, 0, False)  # which only counts
    writer = RingHFWriter(tmp_path, max_shard_bytes=1 << 12)
    dcp.save(state, storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    syncs = _C.disarm_fault()
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert waits[-1] == (True, 5 + 2) and not any(is_synced for is_synced, _ in waits[:-1])
    assert syncs <= 5 + 2 + 1 + 5, "the files, two indices, the directory above, and the steps of the commit"


def test_names_that_are_notes_are_never_left_out(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    save(tmp_path, {"a": weight, "format": weight, "b": weight})
    same(read(tmp_path), {"a": weight, "format": weight})


def test_views_are_written_as_what_they_stand_for(tmp_path: Path) -> None:
    complex_ = torch.randn(40, 30, dtype=torch.complex64)
    values = {"t": torch.randn(50, 60).t(), "conj": complex_.conj(), "imag": complex_.imag, "neg": complex_.conj().imag}
    save(tmp_path, values)
    same(read(tmp_path), {name: tensor.resolve_conj().resolve_neg() for name, tensor in values.items()})


@pytest.mark.parametrize("planner", [RingSavePlanner, DefaultSavePlanner])
def test_objects_are_refused_before_anything_is_written(tmp_path: Path, planner: Any) -> None:
    save(tmp_path, {"a": torch.ones(3)})
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointException, match=r"'?step'?.*leave them out of the state dict"):
        save(tmp_path, {"a": torch.zeros(3), "step": 7}, planner())
    assert sorted(os.listdir(tmp_path)) == before
    same(read(tmp_path), {"a": torch.ones(3)})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"c": torch.ones(3, dtype=torch.complex128)}, "safetensors has no dtype for these: c"),
        ({"__metadata__": torch.ones(3)}, "key_map"),
        ({"s": torch.eye(3).to_sparse()}, "'s' in safetensors: it is of layout"),
        ({"m": torch.empty(3, device="meta")}, "'m' in safetensors: it is on the meta device"),
    ],
)
def test_what_safetensors_cannot_hold(tmp_path: Path, values: dict[str, Tensor], words: str) -> None:
    with pytest.raises(CheckpointException, match=re.escape(words)):
        save(tmp_path, values)
    assert not list(tmp_path.glob("*"))


def test_a_file_for_each_tensor_as_told(tmp_path: Path) -> None:
    values = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    save(tmp_path, values, fqn_to_index_mapping={"a": 2, "b": 1, "c": 2})
    listed = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert listed["weight_map"] == {
        name: f"model-0000{number}-of-00002.safetensors" for name, number in (("a", 2), ("b", 1), ("c", 2))
    }
    assert listed["metadata"]["total_size"] == 48
    same(read(tmp_path), values)
    with pytest.raises(CheckpointException, match="fqn_to_index_mapping names no file for 'c'"):
        save(tmp_path, values, fqn_to_index_mapping={"a": 1, "b": 1})
    with pytest.raises(CheckpointException, match="no number from 1 on for 'b'"):
        save(tmp_path, values, fqn_to_index_mapping={"a": 1, "b": 0, "c": 2})


def test_one_after_the_other(tmp_path: Path) -> None:
    """Any number of files after any other; what is no part of the model stays, what was a part of the old one goes."""
    for name in ("config.json", "tokenizer.safetensors", "model.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "model-00007-of-00009.safetensors").write_text("stale")
    mine = {"config.json", "tokenizer.safetensors", "model.txt"}
    for number, limit in enumerate((5 << 30, 100, 200, 100, 5 << 30, 5 << 30)):
        values = {name: torch.full((20,), float(number)) for name in "abcd"}
        save(tmp_path, values, max_shard_bytes=limit)
        same(read(tmp_path), values)
        files = 1 if limit > 1000 else 1 + 320 // (limit // 80 * 80)
        assert len(set(os.listdir(tmp_path)) - mine) == files


@pytest.mark.parametrize("limit", (5 << 30, 100))
def test_what_the_old_index_names_goes(tmp_path: Path, limit: int) -> None:
    """In folders too; and nothing else: no other index's files, and none that no index could have."""
    path = _hf.write(tmp_path / "model", "folders")
    there = ("first/b.safetensors", "first/second/notes.txt", "config.json", "fp16.safetensors", "own.safetensors")
    for name in there:
        (path / name).write_text("mine")
    (tmp_path / "outside.safetensors").write_text("mine")
    index = json.loads((path / _hf.INDEX).read_text())
    listed = ("config.json", "fp16.safetensors", "gone.safetensors", "own.safetensors")
    index["weight_map"] |= dict(zip("cdef", listed, strict=True))
    (path / _hf.INDEX).write_text(json.dumps(index))
    (path / "model.fp16.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "fp16.safetensors"}}))
    values = {name: torch.ones(20) for name in "abcd"}
    save(path, values, max_shard_bytes=limit)
    same(read(path), values)
    kept = {name for name in there if name != "own.safetensors"} | {"model.fp16.safetensors.index.json"}
    new = {name for name in os.listdir(path) if name.startswith("model") and "fp16" not in name}
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == kept | new
    assert len(new) == (1 if limit > 1000 else 5)


@pytest.mark.parametrize("listed", ("../outside.safetensors", "folder/a.safetensors"))
def test_an_old_index_that_leads_elsewhere(tmp_path: Path, listed: str) -> None:
    path, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    path.mkdir()
    (path / "folder").symlink_to(tmp_path)
    for file in (outside, tmp_path / "a.safetensors"):
        file.write_text("mine")
    (path / _hf.INDEX).write_text(json.dumps({"weight_map": {"a": listed}}))
    save(path, {"a": torch.ones(3)})
    assert outside.exists() and (tmp_path / "a.safetensors").exists()
    assert set(os.listdir(path)) == {"model.safetensors", "folder"}


def test_nothing_at_all(tmp_path: Path) -> None:
    save(tmp_path, {})
    assert read(tmp_path) == {}


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(1 << 20)})
    with (
        mock.patch.object(stripes.StripeSaving, "write", side_effect=OSError(5, "broken")),
        pytest.raises(CheckpointException, match="broken"),
    ):
        save(tmp_path, {"a": torch.zeros(1 << 20)})
    assert os.listdir(tmp_path) == ["model.safetensors"]
    same(read(tmp_path), {"a": torch.ones(1 << 20)})


def test_leftovers_go_at_the_next_save(tmp_path: Path) -> None:
    left = tmp_path / ".model-00001-of-00002.safetensors.0123456789abcdef.tmp"
    left.write_text("left")
    save(tmp_path, {"a": torch.ones(3)})
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("limit", [5 << 30, 3 << 20])
def test_each_call_fails_once(tmp_path: Path, limit: int) -> None:
    """Whatever fails, the old model or the new one is there, and the next save leaves nothing else."""
    old, new = ({"a": torch.full((1 << 20,), n), "b": torch.full((5, 300_000), n)} for n in (1.0, 2.0))
    save(tmp_path, old)
    _C.arm_fault(None, 0, errno.EIO, False)
    save(tmp_path, new, max_shard_bytes=limit)
    calls = _C.disarm_fault()
    before, failures = open_descriptors(), 0
    for nth in range(1, calls + 1, max(1, calls // 25)):
        save(tmp_path, old)
        failed = False
        with fault(None, nth):
            try:
                save(tmp_path, new, max_shard_bytes=limit)
            except CheckpointException:
                failed = True
        failures += failed
        found = read(tmp_path)
        same(found, new if found["a"][0] == 2 else old)
        assert failed or found["a"][0] == 2
    assert failures > 3 and not leaks_descriptors(before)
    save(tmp_path, old)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("call", ["fsync", "rename", "link"])
@pytest.mark.parametrize("sticky", [False, True])
def test_a_commit_of_several_files_fails_at_each_call(tmp_path: Path, call: str, sticky: bool) -> None:
    """Where a name is changed and cannot be synced, what it leads to stays."""
    old, new = ({name: torch.full((1 << 18,), n) for name in "abc"} for n in (1.0, 2.0))
    save(tmp_path, old)
    for nth in range(1, 12):
        save(tmp_path, old, max_shard_bytes=1 << 20)
        with fault(call, nth, sticky=sticky), contextlib.suppress(CheckpointException):
            save(tmp_path, new, max_shard_bytes=1 << 20)
        found = read(tmp_path)
        same(found, new if found["a"][0] == 2 else old)


def test_a_disk_without_room_for_all_files_keeps_none(tmp_path: Path) -> None:
    values = {name: torch.ones(1 << 18) for name in "abc"}
    with fault("fallocate", 3, errno.ENOSPC), pytest.raises(CheckpointException, match="No space left"):
        save(tmp_path, values, max_shard_bytes=1 << 20)
    assert not os.listdir(tmp_path)


def test_a_key_map_of_both_is_applied_once(tmp_path: Path) -> None:
    key_map = {"a": "b", "b": "c"}
    save(tmp_path, {"a": torch.zeros(2), "b": torch.ones(2)}, RingSavePlanner(key_map=key_map), key_map=key_map)
    same(read(tmp_path), {"b": torch.zeros(2), "c": torch.ones(2)})


def tie_of_few_rows(path: str) -> None:
    """The last rank has none of them."""
    mesh = init_device_mesh("cpu", (3,))
    weight = distribute_tensor(torch.arange(20.0).view(2, 10), mesh, [Shard(0)])
    dcp.save({"a": weight, "b": weight}, storage_writer=RingHFWriter(path), planner=RingSavePlanner())


def test_tied_shards_of_which_a_rank_has_none(tmp_path: Path) -> None:
    run(3, tie_of_few_rows, str(tmp_path))
    same(read(tmp_path), {"a": torch.arange(20.0).view(2, 10)})


@contextlib.contextmanager
def before_rounds(rank: int, act: Callable[[int], object]) -> Iterator[list[int]]:
    """Rounds are of 1 MiB; ``act`` gets the number of each, from one on, before ``rank`` gives what it has for it."""
    real, numbers = stripes.StripeSaving.patches, list[int]()

    def patches(self: Any, *args: Any) -> Any:
        numbers.append(len(numbers) + 1)
        if dist.get_rank() == rank:
            act(numbers[-1])
        return real(self, *args)

    with (
        mock.patch.object(stripes.StripeSaving, "patches", patches),
        mock.patch("dcpring.hf.file_plan.ROUND_BYTES", 1 << 20),
    ):
        yield numbers


def break_down(number: int, since: int = 1) -> None:
    if number >= since:
        raise OSError(5, "this disk is gone")


def fail_on_one(path: str, rank: int) -> str:
    with before_rounds(rank, break_down):
        try:
            dcp.save(state((3,), "1"), storage_writer=RingHFWriter(path), planner=RingSavePlanner())
        except CheckpointException as error:
            return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_leaves_nobody_waiting(tmp_path: Path, rank: int) -> None:
    found = run(3, fail_on_one, str(tmp_path), rank, timeout=40)
    assert all(f"rank {rank}" in text and "this disk is gone" in text for text in found)
    assert not list(tmp_path.glob("*"))


def fail_while_others_write(path: str) -> str:
    """On rank 1, in a later round, while rank 0 still writes what was put together before."""
    with before_rounds(1, functools.partial(break_down, since=5)):
        if dist.get_rank() == 0:
            _C.arm_fault("pwrite", 1, 0, True, 200)
        try:
            dcp.save(state((2,), "1"), storage_writer=RingHFWriter(path, engine="threads"), planner=RingSavePlanner())
        except CheckpointException as error:
            return "; ".join(f"{cause}" for cause, _ in error.failures.values())
        finally:
            _C.disarm_fault()
    return ""


def test_a_rank_that_fails_while_others_write(tmp_path: Path) -> None:
    for text in run(2, fail_while_others_write, str(tmp_path), timeout=60):
        assert "this disk is gone" in text and "in use" not in text


def killed_between_rounds(path: str) -> str:
    """Rank 1 is; rank 0 waits for it at the barrier."""
    begun = time.monotonic()
    with (
        before_rounds(1, lambda number: number == 5 and os.kill(os.getpid(), 9)),
        pytest.raises(Exception, match=r"cannot be reached|onnection"),
    ):
        dcp.save(state((2,), "1"), storage_writer=RingHFWriter(path), planner=RingSavePlanner())
    assert time.monotonic() - begun < 15
    raise OSError("the others were not waited for")


def test_a_rank_that_is_killed_between_rounds(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="the others were not waited for"):
        run(2, killed_between_rounds, str(tmp_path), timeout=60)


def late_in_a_round(path: str) -> None:
    """The others go on by the process group, and come back to a barrier."""
    words = []

    def settle(self: Any, label: str, is_last: bool = False) -> None:
        words.append(label)
        real_settle(self, label, is_last)

    real_settle = Joint.settle
    with (
        before_rounds(1, lambda number: time.sleep(0.3 if number in (2, 4) else 0)) as numbers,
        mock.patch.object(Joint, "settle", settle),
        mock.patch.object(host_memory, "_PATIENCE_MS", 50),
    ):
        dcp.save(state((2,), "1"), storage_writer=RingHFWriter(path), planner=RingSavePlanner())
    assert 0 < sum(word.startswith("round") for word in words) < len(numbers) - 2, words


def test_a_rank_that_is_late(tmp_path: Path) -> None:
    run(2, late_in_a_round, str(tmp_path))
    same(read(tmp_path), whole())


def fail_before_it_comes(path: str) -> tuple[str, float]:
    begun = time.monotonic()
    on_one = mock.patch("dcpring.hf.stripes.items_of", side_effect=OSError(5, "nothing to be had"))
    with on_one if dist.get_rank() == 1 else contextlib.nullcontext():
        try:
            dcp.save(state((2,), "1"), storage_writer=RingHFWriter(path), planner=RingSavePlanner())
        except CheckpointException as error:
            return str(error), time.monotonic() - begun
    return "", 0.0


def test_a_rank_that_fails_before_it_comes(tmp_path: Path) -> None:
    for text, seconds in run(2, fail_before_it_comes, str(tmp_path), timeout=90):
        assert "nothing to be had" in text and seconds < 30
    assert not list(tmp_path.glob("*"))


def without_collectives(path: str) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=RingHFWriter(path), use_collectives=False)


def test_without_collectives(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="use_collectives=False"):
        run(2, without_collectives, str(tmp_path))


def async_saves(path: str) -> None:
    values = state((2,), "1")
    for kind in dcp.state_dict_saver.AsyncCheckpointerType:
        folder = f"{path}/{kind.value}"
        writer, planner = RingHFWriter(folder), RingSavePlanner()
        dcp.async_save(values, storage_writer=writer, planner=planner, async_checkpointer_type=kind).result()


@pytest.mark.slow
def test_async_saves(tmp_path: Path) -> None:
    run(2, async_saves, str(tmp_path))
    for folder in tmp_path.iterdir():
        same(read(folder), whole())


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        RingHFWriter(tmp_path, max_shard_bytes=0)
    for option in ({"file_names": "torch"}, {"unchanged": "link"}, {"overwrite": False}):  # RingWriter's
        with pytest.raises(TypeError, match=f"RingHFWriter.*{next(iter(option))}"):
            RingHFWriter(tmp_path, **option)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="floating-point dtype"):
        RingHFWriter(tmp_path, dtype=torch.int8)
    for dtype in ("bfloat16", {"*": None}):
        with pytest.raises(ValueError, match="floating-point dtype"):
            RingHFWriter(tmp_path, dtype=dtype)  # type: ignore[arg-type]
    assert CheckpointError


def told_bytes(ranks: int) -> int:
    """What a rank is told of 1600 stripes of which every rank has some columns."""
    shape, size = torch.Size((4096, 4096)), 2 * 4096 * 4096
    wide = 4096 // ranks
    chunks = [(torch.Size((0, rank * wide)), torch.Size((4096, wide))) for rank in range(ranks)]
    data = [TensorWriteData(ChunkStorageMetadata(*chunk), TensorProperties(torch.bfloat16), shape) for chunk in chunks]
    plans = [
        [
            WriteItem(MetadataIndex(str(name), one.chunk.offsets), WriteItemType.SHARD, tensor_data=one)
            for name in range(50)
        ]
        for one in data
    ]
    tensors = [Laid(str(name), str(name), torch.bfloat16, shape, size, 4096 + name * size) for name in range(50)]
    layout = FileLayout("model", 4096, tensors)
    by_rank, rounds = Holdings(plans).share(layout, 4 << 20)
    assert sum(part.writes_bytes for part in by_rank) == 50 * size
    packed = Common([layout], [rounds], ["host"] * ranks, "token", frozenset(), 4 << 20).packed()
    return max(len(pickle.dumps(Assignment(packed, [part]))) for part in by_rank)


def test_what_a_rank_is_told_does_not_grow_with_their_number() -> None:
    assert told_bytes(256) < 2 * told_bytes(4) < 60_000
