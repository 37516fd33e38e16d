"""The copy of a state that a background save writes: it is what would have been written, and training may go on."""

from __future__ import annotations

import argparse
import gc
import os
import threading
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import _twin
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import assert_same_bits, everything, random, raw
from _twin import TYPE, Twin, twin
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dcpring import (
    Checkpointer,
    CheckpointError,
    PerRank,
    Replicated,
    RingSavePlanner,
    RingStager,
    RingWriter,
    Sharded,
    diff_checkpoints,
)
from dcpring.base.memory import memory_key
from dcpring.move import arena, staging
from dcpring.move.arena import packed
from dcpring.move.device import Room
from dcpring.move.staging import Devices, SideStreams, StagingBuffer
from dcpring.plan import table as plans
from dcpring.plan.flatten import flatten, is_terminal
from dcpring.torchside import accelerators
from dcpring.torchside.dcp import HAS_STRIDES

__all__ = ["twin"]

PLANNERS = [DefaultSavePlanner, RingSavePlanner]
MiB = 1 << 20
Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    weights: Tensor
    history: list[float] = field(default_factory=list)


class Lazy(Mapping[str, Any]):
    """A mapping that is nothing else."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Wrapped(Tensor):
    """A subclass of which the core knows nothing."""


class Listed(list[Any]):
    pass


pytestmark = pytest.mark.usefixtures("group_of_one")


def _strange() -> dict[str, Any]:
    w, z = random(torch.float32, 40, 30), random(torch.complex64, 12, 5)
    shared = [1, [2, 3]]
    return {
        "plain": everything(),
        "ordered": OrderedDict(a=w, nested=OrderedDict(b=w[3:], c=OrderedDict())),
        "mappings": {
            **{"user": UserDict(u=random(torch.int64, 9)), "proxy": types.MappingProxyType({"p": w * 2})},
            **{"default": defaultdict(list, d=torch.ones(3)), "lazy": Lazy(l=torch.zeros(2), n=1), "empty": {}},
        },
        "lists": [
            *([w.clone(), 1], [[torch.ones(2)], {"deep": torch.ones(1)}], Listed([torch.ones(2), 2]), Listed([1, 2])),
            *([], [[], ()], [None, "text"], [OrderedDict()]),
        ],
        "objects": {
            **{"tuple": (w, w[2:], "x"), "point": Point(torch.ones(2), 3), "record": Record(w, [1.0]), "set": {1, 2}},
            **{
                "namespace": argparse.Namespace(t=w.t()),
                "bytes": b"\0\1",
                "none": None,
                "not a leaf": (_not_a_leaf(),),
            },
            **{"shared": (shared, shared), "parameter": (torch.nn.Parameter(w.clone()),), "dtype": torch.float16},
        },
        "ties": {
            "a": w,
            "b": w,
            "view": w.view(40, 30),
            "data": w.detach(),
            "part": w[:20],
            "t": w.t(),
            "flat": w.view(-1),
        },
        "lazy": {"z": z, "conj": z.conj(), "again": z.conj(), "imag": z.imag, "neg": z.conj().imag},
        "mixed": {"parameter": torch.nn.Parameter(w), "its data": w, "expanded": w[:1].expand(7, 30)},
        "others": {
            **{"sparse": torch.eye(5).to_sparse(), "wrapped": torch.ones(3).as_subclass(Wrapped), "not": _not_a_leaf()},
            **{"quantized": torch.quantize_per_tensor(torch.randn(6), 0.1, 1, torch.qint8), "0d": torch.tensor(2.0)},
            **{"ordered": OrderedDict(leaf=torch.nn.Parameter(w[:2].clone()) * 2), 7: torch.ones(2)},
        },
        "step": 3,
    }


def _not_a_leaf() -> Tensor:
    return torch.ones(3, requires_grad=True) * 2


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized


def _moved(twin: Twin, value: Any, devices: int, memo: dict[Any, Tensor] | None = None) -> Any:
    """The state with the plain tensors of its mappings and lists on so many devices, tied where they were."""
    memo = {} if memo is None else memo
    if _is_plain(value):
        key = memory_key(value)
        memo.setdefault(key, twin.tensor(value.detach(), len(memo) % devices))
        return memo[key].detach().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping) and not isinstance(value, Tensor):
        return {key: _moved(twin, part, devices, memo) for key, part in value.items()}
    if isinstance(value, list) and not is_terminal(value):
        return [_moved(twin, part, devices, memo) for part in value]
    return value


def _files(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.glob("*.distcp")))


def _described(metadata: Any) -> dict[str, Any]:
    """All but the strides of torch 2.15: a copy has no gaps."""
    for stored in metadata.state_dict_metadata.values():
        if hasattr(getattr(stored, "properties", None), "strides"):
            stored.properties.strides = None
    return metadata.state_dict_metadata


def _assert_saved_alike(path: Path, first: Any, second: Any, planner: Any) -> None:
    """The same bytes in the same places, and the same metadata."""
    for name, state in (("first", first), ("second", second)):
        dcp.save(state, storage_writer=RingWriter(path / name), planner=planner())
    one, two = (FileSystemReader(path / name).read_metadata() for name in ("first", "second"))
    assert _described(one) == _described(two)
    places = [{i: (s.offset, s.length) for i, s in md.storage_data.items()} for md in (one, two)]
    assert places[0] == places[1]
    assert _files(path / "first") == _files(path / "second")


# ---- what it is a copy of ----


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_staged_state_is_saved_as_the_state_is(tmp_path: Path, planner: Any) -> None:
    state = _strange()
    _assert_saved_alike(tmp_path, state, StagingBuffer().stage(state), planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_staged_state_of_a_device_is_saved_as_the_state_is(tmp_path: Path, twin: Twin, planner: Any) -> None:
    state = _moved(twin, _strange(), 1)
    before = twin.allocated[:]
    staged = StagingBuffer().stage(state)
    assert not twin.under_way
    assert twin.allocated == before, "nothing is copied on a device"
    _assert_saved_alike(tmp_path, state, staged, planner)


def test_a_staged_state_of_two_devices_is_as_large(tmp_path: Path, twin: Twin) -> None:
    """Devices are saved one after the other, so the order is another one."""
    state = _moved(twin, _strange(), 2)
    for name, one in (("first", StagingBuffer().stage(state)), ("second", state)):
        dcp.save(one, storage_writer=RingWriter(tmp_path / name), planner=RingSavePlanner())
    assert _records(tmp_path / "first") == _records(tmp_path / "second")
    assert not diff_checkpoints(tmp_path / "first", tmp_path / "second", trusted=True)


def _records(path: Path) -> tuple[int, int]:
    """How many are stored, and the bytes of tensors in them."""
    places = {
        (s.offset, s.__dict__.get("ring", [0] * 4)[3])
        for s in FileSystemReader(path).read_metadata().storage_data.values()
    }
    return len(places), sum(size for _, size in places)


def test_ties_stay(tmp_path: Path) -> None:
    """The issue's: tied before, untied after. Those that the planner sees; views of other shapes are saved twice."""
    state = _strange()
    flat, staged = flatten(state), flatten(StagingBuffer().stage(state))
    assert list(flat.values) == list(staged.values) and flat.codes == staged.codes
    tables = [plans.make_table(one) for one in (flat, staged)]
    ties = [set(plans.tied_rows(one, table)) for one, table in zip((flat, staged), tables, strict=True)]
    assert ties[0] == ties[1] and len(ties[0]) >= 6
    if HAS_STRIDES:  # what has gaps is copied without, and torch 2.15 notes that
        found = [(table.names(), table.types(), table.sizes(), table.flags()) for table in tables]
        assert found[0] == found[1]
    else:
        assert tables[0].encode() == tables[1].encode()


def test_what_is_tied_takes_memory_once() -> None:
    w = torch.randn(1 << 16)
    buffer = StagingBuffer()
    staged = buffer.stage({"a": w, "b": OrderedDict(w=w), "c": [w.view(-1)], "p": torch.nn.Parameter(w)})
    assert buffer.size_bytes == w.nbytes
    assert len({t.data_ptr() for t in (staged["a"], staged["b"]["w"], staged["c"][0], staged["p"])}) == 1
    assert staged["p"].requires_grad and not staged["a"].requires_grad
    assert staged["a"] is not staged["b"]["w"]


def test_all_tensors_below_mappings_lie_in_the_buffer() -> None:
    """An OrderedDict below the top was counted for the buffer, and then copied deeply beside it."""
    state = {
        "ema": OrderedDict(w=torch.ones(1 << 12)),
        "lazy": Lazy(l=torch.ones(1 << 12), deep=[Lazy(x=torch.ones(3))]),
    }
    buffer = StagingBuffer()
    staged = buffer.stage(state)
    assert buffer.size_bytes == 2 * (1 << 14) + 64
    start = buffer._arena._mapping.blocks[0].storage.data_ptr()
    for tensor in (staged["ema"]["w"], staged["lazy"]["l"], staged["lazy"]["deep"][0]["x"]):
        assert start <= tensor.data_ptr() < start + buffer.size_bytes


def test_training_may_change_everything_afterwards() -> None:
    state = _strange()
    staged = flatten(StagingBuffer().stage(state)).values
    plain = {key: tensor for key, tensor in flatten(state).values.items() if _is_plain(tensor)}
    expected = {key: raw(tensor) for key, tensor in plain.items()}
    with torch.no_grad():
        for tensor in plain.values():
            if not tensor.is_inference():
                torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0).zero_()
    assert any(raw(tensor) != expected[key] for key, tensor in plain.items())
    assert {key: raw(staged[key]) for key in expected} == expected
    state["objects"]["record"].history.append(2.0)
    state["objects"]["shared"][0].append(4)
    assert staged["objects.record"].history == [1.0] and staged["objects.shared"][0] == [1, [2, 3]]
    assert staged["objects.shared"][0] is staged["objects.shared"][1]
    assert raw(staged["objects.tuple"][0][2:]) == raw(staged["objects.tuple"][1])


def test_memory_order_is_kept_where_there_are_no_gaps() -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    staged = StagingBuffer().stage({"t": torch.randn(3, 4).t(), "i": images, "gaps": torch.randn(6, 6)[:, ::2]})
    assert staged["t"].stride() == (1, 4) and staged["i"].stride() == images.stride()
    assert staged["gaps"].is_contiguous()


def test_sparse_layouts_that_not_every_torch_plans() -> None:
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), torch.randn(3))
    staged = StagingBuffer().stage({"csr": csr})["csr"]
    assert staged.layout == torch.sparse_csr and torch.equal(staged.values(), csr.values())
    assert staged.values().data_ptr() != csr.values().data_ptr()


def test_attributes_of_a_plain_tensor_that_is_a_shard_are_kept(tmp_path: Path) -> None:
    """DCP's CheckpointableTensor of torch 2.14: they say which part of which tensor it is."""
    says = {
        **{"global_shape": (8, 4), "global_offsets": ((0, 0), (6, 0)), "local_offsets": ((0, 0), (3, 0))},
        **{"local_sizes": ((2, 4), (2, 4))},
    }
    tensor, other = torch.randn(5, 4), torch.nn.Parameter(torch.randn(5, 4))
    tied = tensor.detach()
    for one in (tensor, other):
        one.__dict__.update(says)
    state = {"tensor": tensor, "tied": tied, "below": [OrderedDict(other=other)]}
    staged = StagingBuffer().stage(state)
    for one in (staged["tensor"], staged["below"][0]["other"]):
        assert vars(one) == says
    assert vars(staged["tied"]) == {}
    _assert_saved_alike(tmp_path, state, staged, DefaultSavePlanner)


def test_a_state_that_contains_itself_is_refused_with_its_key() -> None:
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state["a"]
    with pytest.raises(Exception, match="'a"):
        StagingBuffer().stage(state)


@pytest.mark.parametrize("nested", [torch.quantize_per_channel, threading.Lock])
def test_what_cannot_be_copied_is_refused_by_name(nested: Any) -> None:
    scales, zeros = torch.ones(2), torch.zeros(2)  # of which torch makes no copies
    bad = nested(torch.ones(2, 2), scales, zeros, 0, torch.quint8) if nested is not threading.Lock else nested()
    with pytest.raises(CheckpointError, match=r"cannot copy 'model\.parts\.1\.bad': "):
        StagingBuffer().stage({"model": {"parts": [torch.ones(1), {"good": torch.ones(2), "bad": bad}]}})


def test_tensors_without_data_stay_what_they_are() -> None:
    staged = StagingBuffer().stage({"m": torch.empty(3, device="meta"), "e": torch.empty(0), "e2": torch.empty(2, 0)})
    assert staged["m"].is_meta and staged["e2"].shape == (2, 0)


# ---- shards ----


def _dtensor(local: Tensor, *placements: Any, mesh: str = "cuda") -> DTensor:
    """On the mesh of an accelerator that this machine need not have."""
    on = DeviceMesh(mesh, torch.arange(1).view([1] * len(placements)), _init_backend=False)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return DTensor(local, DTensorSpec(on, placements, tensor_meta=meta), requires_grad=local.requires_grad)


def _dtensors(where: Any) -> dict[str, Any]:
    w = where(torch.randn(6, 4))
    return {
        **{"shard": _dtensor(w, Shard(0)), "tied": _dtensor(w, Shard(0)), "plain": w, "rep": _dtensor(w, Replicate())},
        **{
            "grad": _dtensor(where(torch.randn(3)).requires_grad_(), Shard(0)),
            "t": _dtensor(where(torch.ones(3, 2)).t(), Shard(1)),
        },
        "2d": OrderedDict(x=_dtensor(where(torch.randn(2, 2)), Shard(0), Replicate())),
        "list": [_dtensor(where(torch.ones(2)), Shard(0)), 1],
    }


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_dtensor_is_staged_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Any) -> None:
    """``DTensor.from_local`` moves what it gets to the mesh's device: a second model there."""
    state = _dtensors(lambda tensor: tensor)
    moves = []
    to = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: moves.append(args) or to(self, *args, **kwargs))
    staged = StagingBuffer().stage(state)
    assert not moves
    shard = staged["shard"]
    assert isinstance(shard, DTensor) and shard._local_tensor.device.type == "cpu"
    assert (shard.device_mesh, shard.placements, shard.shape) == (
        state["shard"].device_mesh,
        state["shard"].placements,
        state["shard"].shape,
    )
    assert torch.equal(shard.to_local(), state["shard"].to_local())
    assert shard._local_tensor.data_ptr() == staged["tied"]._local_tensor.data_ptr() == staged["plain"].data_ptr()
    assert staged["grad"].requires_grad and not shard.requires_grad
    _assert_saved_alike(tmp_path, state, staged, planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_dtensor_of_a_device_is_staged_on_the_host(tmp_path: Path, twin: Twin, planner: Any) -> None:
    state = _dtensors(lambda tensor: twin.tensor(tensor, 1))
    twin.write(state["plain"], torch.ones(6, 4))
    before = twin.allocated[:]
    staged = StagingBuffer().stage(state)
    assert twin.allocated == before and not twin.under_way
    assert staged["shard"]._local_tensor.device.type == staged["list"][0]._local_tensor.device.type == "cpu"
    assert torch.equal(staged["shard"]._local_tensor, torch.ones(6, 4))
    _assert_saved_alike(tmp_path, state, staged, planner)


def test_a_partial_dtensor_stays_one() -> None:
    staged = StagingBuffer().stage({"p": _dtensor(torch.ones(3), Partial())})
    assert staged["p"].placements == (Partial(),)


def _sharded(local: Tensor) -> ShardedTensor:
    """Its metadata says that all lies on an accelerator."""
    shard = LocalShard.from_tensor_and_offsets(torch.ones(local.shape), [0, 0], 0)
    made = init_from_local_shards([shard], *local.shape)
    for metadata in (*made.metadata().shards_metadata, shard.metadata):
        metadata.placement._device = torch.device("cuda", 0)  # type: ignore[union-attr]
    made._local_shards[0].tensor = local
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_sharded_tensor_is_staged_on_the_host(tmp_path: Path, twin: Twin, planner: Any) -> None:
    """Whether or not it needs a gradient, and is pinned; what ShardedTensor offers to make one refuses both."""
    state = {
        "s": _sharded(twin.tensor(torch.randn(4, 3))),
        "t": _sharded(twin.tensor(torch.randn(4, 3).requires_grad_())),
    }
    staged = StagingBuffer().stage(state)
    for key, tensor in state.items():
        assert isinstance(staged[key], ShardedTensor) and staged[key].metadata() == tensor.metadata()
        assert staged[key].local_shards()[0].tensor.device.type == "cpu"
        assert staged[key].local_shards()[0].tensor.data_ptr() != tensor.local_shards()[0].tensor.data_ptr()
    _assert_saved_alike(tmp_path, state, staged, planner)


# ---- what is waited for ----


def test_what_is_written_on_any_stream_is_there(twin: Twin) -> None:
    """On the current stream of each device, and on others that nobody has made them wait for."""
    state = {str(n): twin.tensor(torch.zeros(100), n % 2) for n in range(8)}
    sides = [twin.stream(torch.device(TYPE, device)) for device in range(2)]
    for n, tensor in enumerate(state.values()):
        twin.write(tensor, torch.full((100,), float(n)), sides[n % 2] if n < 4 else None)
    staged = StagingBuffer().stage(state)
    for tensor in state.values():
        twin.write(tensor, torch.full((100,), -1.0))
    assert [float(staged[key][7]) for key in state] == list(range(8))
    for device in range(2):
        twin.synchronize(torch.device(TYPE, device))
    assert [float(staged[key][7]) for key in state] == list(range(8)), "training may write again"


def test_devices_are_copied_behind_the_current_stream_and_not_waited_for(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [twin.tensor(torch.zeros(100), n % 2) for n in range(4)]
    for n, tensor in enumerate(tensors):
        twin.write(tensor, torch.full((100,), float(n)))

    def refuse(device: torch.device) -> None:
        raise AssertionError(f"all streams of {device} are waited for")

    monkeypatch.setattr(twin, "synchronize", refuse)
    with RingStager() as stager:
        future = stager.stage({str(n): tensor for n, tensor in enumerate(tensors)})
        stager.synchronize()
        for tensor in tensors:
            twin.write(tensor, torch.full((100,), -1.0))
        staged = future.result(60.0)
        assert [float(staged[str(n)][7]) for n in range(4)] == [0, 1, 2, 3]
        assert staged["0"].device.type == "cpu" != TYPE
        del staged, future


@pytest.mark.parametrize("kind", ["plain", "subclass", "DTensor"])
def test_what_another_thread_copies_is_behind_the_callers_stream(twin: Twin, kind: str) -> None:
    """Whose current streams and device are not that thread's: all it does is on the stream for copies."""
    tensor = twin.tensor(torch.zeros(1000), 1)
    value = {
        "plain": lambda: tensor,
        "subclass": lambda: tensor.as_subclass(Wrapped),
        "DTensor": lambda: _dtensor(tensor, Shard(0)),
    }[kind]()
    with RingStager() as stager, twin.stream(torch.device(TYPE, 1)):
        twin.write(tensor, torch.full((1000,), 5.0))
        future = stager.stage({"x": value})
        stager.synchronize()
        staged = future.result(60.0)["x"]
        staged = staged.to_local() if isinstance(staged, DTensor) else staged.as_subclass(Tensor)
        assert staged.device.type == "cpu" and bool((staged == 5).all())


def test_copies_of_a_device_go_on_one_stream_of_it(tmp_path: Path, twin: Twin) -> None:
    """torch hands out 32 in turn: those that others use, as FSDP's, would soon be among them."""
    state = {str(n): twin.tensor(torch.full((1000,), float(n)), n % 2) for n in range(4)}
    before = len(twin.streams)
    with RingStager() as stager:
        for _ in range(5):
            stager.stage(state).result(60.0)
            stager.synchronize()
            dcp.save(state, storage_writer=RingWriter(tmp_path))
    assert len(twin.streams) == before + 2


@pytest.mark.parametrize("can_pin", [True, False])
def test_no_other_device_gets_a_context(tmp_path: Path, twin: Twin, can_pin: bool) -> None:
    """Each rank would take some hundred MiB of the first one's memory."""
    twin.pins = can_pin
    with twin.on_device(torch.device(TYPE, 1)):
        state = {f"{n}": twin.tensor(torch.full((size,), 1.0), 1) for n, size in enumerate((3, 4, 100_000))}
        state["subclass"] = twin.tensor(torch.ones(3), 1).as_subclass(Wrapped)
        twin.contexts.clear()
        stager = RingStager()
        stager.stage(state).result(60.0)
        stager.close()
        components = {"model": Sharded(_Holds({key: state[key] for key in "012"}))}
        with Checkpointer(tmp_path, components) as checkpointer:
            checkpointer.save(1, blocking=False, async_staging=True)
            checkpointer.wait()
    assert twin.contexts <= {1}


def test_memory_is_pinned_in_stretches_that_no_copy_leaves(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may hold up training while it pins."""
    monkeypatch.setattr(arena, "_PIN_BYTES", 1 << 16)
    sizes = [70_000, 5000, 5000, 5000, *([1] * 300), 9, 0, 16_000]
    state = {str(n): twin.tensor(torch.full((size,), float(n)), n % 2) for n, size in enumerate(sizes)}
    state["host"] = torch.ones(9)
    buffer = StagingBuffer(is_shared=True)
    for _ in range(2):
        staged = buffer.stage(state)
        assert all(torch.equal(staged[key], twin.values(t) if key != "host" else t) for key, t in state.items())
        assert all(twin.is_pinned(staged[str(n)]) for n, size in enumerate(sizes) if size)
    largest, *others = sorted(twin.pinned_stretches, reverse=True)
    assert largest == 280_000 and len(others) == 3 and max(others) <= 1 << 16
    smaller = {key: state[key] for key in ("1", "host")}
    del staged
    buffer.stage(smaller)
    assert len(twin.pinned_stretches) == 4
    buffer.release()
    assert not twin.pinned_bytes


@pytest.mark.parametrize("devices", [Devices, SideStreams])
def test_small_tensors_cross_the_link_together(twin: Twin, devices: type[Devices]) -> None:
    """Again and again, with another stream each time, and with what training writes before and after each copy."""
    sizes = [100, 70_000, 3, 1, 12_345, 64, 0, 500] * 6
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
    state = {f"small.{n}": twin.tensor(torch.zeros(size, dtype=dtypes[n % 4])) for n, size in enumerate(sizes)}
    state |= {"large": twin.tensor(torch.zeros(100_000)), "cpu": torch.ones(50), "other": twin.tensor(torch.ones(9), 1)}
    buffer = StagingBuffer()
    allocated = twin.allocated[0]
    for turn in range(3):
        for tensor in state.values():
            if tensor.device.type == TYPE:
                twin.write(tensor, turn)
        opened = buffer.open(state, devices(), None)
        crossed = twin.crossings
        staged = buffer.fill(opened)
        assert twin.crossings - crossed == 4, "the small ones in two blocks, the large one, what is alone on its device"
        for tensor in state.values():
            if tensor.device.type == TYPE:
                twin.write(tensor, 77)
        for key, tensor in staged.items():
            assert key == "cpu" or bool((tensor == torch.full_like(tensor, turn)).all()), (turn, key)
        del staged, opened, tensor
    assert twin.allocated[0] <= allocated + 8 * MiB
    buffer.release()
    assert twin.allocated[0] == allocated


def test_what_is_not_copied_again_keeps_its_copy_between_others(twin: Twin) -> None:
    frozen = torch.nn.Parameter(twin.tensor(torch.ones(20_000)), requires_grad=False)
    state = {"a": twin.tensor(torch.ones(20_000)), "frozen": frozen, "b": twin.tensor(torch.ones(20_000))}
    buffer = StagingBuffer()
    buffer.stage(state, [])
    for key in ("a", "b"):
        twin.write(state[key], 2.0)
    crossed = twin.crossings
    staged = buffer.stage(state, [])
    assert [float(staged[key].sum()) for key in state] == [40_000, 20_000, 40_000]
    assert twin.crossings - crossed == 3, "a sample of the frozen one"


def test_small_tensors_that_cannot_be_copied_together_are_named(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {str(n): twin.tensor(torch.ones(10)) for n in range(4)}}

    def failing(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(Room, "to_host", failing)
    with pytest.raises(CheckpointError, match=r"cannot copy 'model.0', or one of 3 small tensors that go with it: .*"):
        StagingBuffer().stage(state)
    assert not twin.under_way


def test_devices_without_a_tensor_of_the_state_are_left_alone() -> None:
    with _twin.active(Twin("needed only")) as made:
        beside = made.tensor(torch.zeros(3), 0)
        made.write(beside, torch.ones(3))
        StagingBuffer().stage({"x": made.tensor(torch.ones(3), 1), "cpu": torch.ones(2)})
        assert made.streams[0].under_way == 1


def test_objects_with_tensors_of_a_device(twin: Twin) -> None:
    """They are copied where they are, as they are pickled with their device; which is waited for too."""
    w = twin.tensor(torch.zeros(50), 1)
    twin.write(w, torch.ones(50))
    staged = StagingBuffer().stage({"object": (w, {"same": w}), "step": 1})
    twin.write(w, torch.zeros(50))
    copied = staged["object"][0]
    assert copied.device == w.device and copied is staged["object"][1]["same"]
    assert torch.equal(_twin._memory(copied), torch.ones(50))


def test_views_that_must_be_computed_first(twin: Twin) -> None:
    z = random(torch.complex64, 2000, 700)
    views = {"conj": z.conj(), "t": z.conj().t(), "neg": z.conj().imag, "part": z[::3], "wide": z[:1].expand(900, 700)}
    moved = {key: twin.tensor(view) for key, view in views.items()}
    before = twin.allocated[0]
    assert_same_bits(StagingBuffer().stage(moved), views)
    assert twin.most_allocated[0] - before <= 16 * MiB, "no copy of a whole tensor is made on the device"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_nothing_under_way(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    state = {str(n): twin.tensor(torch.full((100,), float(n)), n % 2) for n in range(8)}
    buffer = StagingBuffer()
    original, calls = staging.copy_one, []

    def failing(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise error
        return original(*args)

    monkeypatch.setattr(staging, "copy_one", failing)
    raised = CheckpointError if error is RuntimeError else error
    with pytest.raises(raised, match="cannot copy '4': RuntimeError" if raised is CheckpointError else None):
        buffer.stage(state)
    assert not twin.under_way
    staged = buffer.stage(state)
    assert [float(staged[key][0]) for key in state] == list(range(8))
    assert buffer.allocations == 1


# ---- its memory ----


def test_memory_is_taken_again_only_for_what_does_not_fit() -> None:
    buffer = StagingBuffer()
    for size in (1000, 1000, 500):
        buffer.stage({"a": torch.ones(size), "b": torch.ones(3)})
    assert (buffer.allocations, buffer.size_bytes) == (1, 4032 + 64)
    staged = buffer.stage({"a": torch.ones(1001)})
    assert buffer.allocations == 1 and torch.equal(staged["a"], torch.ones(1001))
    buffer.stage({"a": torch.ones(3000)})
    assert (buffer.allocations, buffer.size_bytes) == (2, 12032)
    buffer.release()
    assert buffer.size_bytes == 0


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_LARGEST_BLOCK", 1 << 16)
    monkeypatch.setattr(arena, "_SMALLEST_BLOCK", 1 << 10)


@pytest.mark.usefixtures("_small_blocks")
def test_pinned_memory_is_little_more_than_the_state_and_given_back(twin: Twin) -> None:
    """torch rounds each piece of it up to a power of two, and keeps what is freed."""
    sizes = [70_000, 33_000, 16_385, 16_384, *([3000] * 40), *([10] * 50)]
    state = {str(n): twin.tensor(torch.ones(size), n % 2) for n, size in enumerate(sizes)}
    buffer = StagingBuffer()
    for _ in range(3):
        staged = buffer.stage(state)
    assert buffer.allocations == 1
    needed = sum(tensor.nbytes for tensor in state.values())
    assert buffer.size_bytes == twin.pinned_bytes
    assert needed <= twin.pinned_bytes <= 1.1 * needed
    larger = {**state, "more": twin.tensor(torch.ones(100_000))}
    del staged
    buffer.stage(larger)
    assert buffer.allocations == 2
    assert twin.most_pinned == twin.pinned_bytes <= 1.1 * (needed + 400_000), "never two at a time"
    buffer.release()
    assert twin.pinned_bytes == buffer.size_bytes == 0


@pytest.mark.usefixtures("_small_blocks")
def test_only_what_lies_on_a_device_takes_pinned_memory(twin: Twin) -> None:
    buffer = StagingBuffer()
    buffer.stage({"cpu": torch.ones(100_000), "device": twin.tensor(torch.ones(256))})
    assert twin.pinned_bytes == 1024 and buffer.size_bytes == 400_000 + 1024


@pytest.mark.parametrize("can_pin", [True, False])
def test_pinned_memory_stays_so_when_a_copy_of_it_is_sent(twin: Twin, can_pin: bool) -> None:
    """torch would move it to shared memory, for good. Where shared memory can be pinned, nothing is copied again."""
    twin.pins = can_pin
    buffer = StagingBuffer(is_shared=True)
    for n in range(2):
        state = {"model": {str(k): twin.tensor(torch.full((3,), float(n + k))) for k in range(500)}}
        state["model"]["cpu"] = torch.full((3,), float(n))
        staged = buffer.stage(state)
        sent = bytes(ForkingPickler.dumps(staged))
        assert len(sent) < 60 * 500, "as columns"
        assert all(twin.is_pinned(tensor) == (key != "cpu") for key, tensor in staged["model"].items())
        received = ForkingPickler.loads(sent)
        assert all(torch.equal(received["model"][str(k)], torch.full((3,), float(n + k))) for k in range(500))
        staged["model"]["7"].fill_(-1)
        assert (received["model"]["7"][0] == -1) == can_pin, "it is the same memory"
        del received, staged
    assert buffer.allocations == (1 if can_pin else 2)


def test_shared_memory_is_pinned_for_what_lies_on_a_device_and_as_long_as_it_is_there(twin: Twin) -> None:
    sizes = [7, 100_000, 3000]
    state = {str(n): twin.tensor(torch.ones(size)) for n, size in enumerate(sizes)} | {"cpu": torch.ones(5000)}
    needed = sum(-(-4 * size // 64) * 64 for size in sizes)
    buffer = StagingBuffer(is_shared=True)
    for _ in range(3):
        buffer.stage(state)
        assert twin.pinned_bytes == needed
    buffer.stage({"cpu": torch.ones(100), "device": twin.tensor(torch.ones(105_024))})
    assert twin.pinned_bytes == twin.most_pinned == 420_096 and buffer.allocations == 1, "more of the same mapping"
    child = os.fork()
    if not child:
        del buffer
        gc.collect()
        os._exit(twin.pinned_bytes != 420_096)
    assert os.waitpid(child, 0)[1] == 0, "a child unpins nothing"
    staged = buffer.stage(state)
    buffer.release()
    assert twin.pinned_bytes == 0 and float(staged["1"].sum()) == 100_000
    buffer.stage(state)
    assert twin.pinned_bytes == needed
    del buffer
    gc.collect()
    assert twin.pinned_bytes == 0


def test_memory_that_could_not_be_pinned_again_is_pinned_later(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise RuntimeError("too much is locked")

    buffer = StagingBuffer(is_shared=True)
    host, small, large = torch.ones(1000), twin.tensor(torch.ones(16)), twin.tensor(torch.ones(320))
    buffer.stage({"host": host, "device": small})
    with monkeypatch.context() as patched:
        patched.setattr(twin, "pin", refuse)
        assert torch.equal(buffer.stage({"device": large})["device"], torch.ones(320))
        assert twin.pinned_bytes == 0
    buffer.stage({"host": host, "device": small})
    assert twin.pinned_bytes == 64 and buffer.allocations == 1
    buffer.release()
    assert twin.pinned_bytes == 0


def test_memory_that_has_moved_is_noticed() -> None:
    """Ordinary memory is moved by torch where it is to be shared."""
    state, buffer = {"w": torch.ones(1000)}, StagingBuffer()
    place = buffer.stage(state)["w"].share_memory_().data_ptr()
    state["w"].fill_(2)
    staged = buffer.stage(state)["w"]
    assert torch.equal(staged, state["w"]) and staged.data_ptr() == place


@pytest.mark.parametrize("is_shared", [False, True])
def test_where_memory_cannot_be_pinned_it_is_ordinary(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_shared: bool
) -> None:
    def refuse(*_: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(twin, "pin" if is_shared else "pinned", refuse)
    tensor = twin.tensor(torch.ones(1000))
    staged = StagingBuffer(is_shared=is_shared).stage({"x": tensor})
    assert torch.equal(staged["x"], torch.ones(1000))
    assert "pinned" in caplog.text and "out of memory" in caplog.text and "more" not in caplog.text


def test_giving_back_what_torch_cannot_keep_is_no_error() -> None:
    accelerators.Accelerators().give_back_pinned()  # of this machine, which may have no accelerator


def test_blocks_fit_and_leave_little_over() -> None:
    generator = torch.Generator().manual_seed(0)
    MiB_sizes = ([65_000], [1], [], [1024] * 65, [512, 513, 1], [2048, 3], [1500, 1500, 700, *[1] * 900], [3] * 1000)
    cases = [[size * MiB for size in sizes] for sizes in MiB_sizes]
    for _ in range(40):
        count = int(torch.randint(1, 400, (), generator=generator))
        cases.append([int(2**x) * 64 for x in torch.rand(count, generator=generator) * 22])
    for sizes in cases:
        placed, blocks = packed(sizes)
        assert all(block & (block - 1) == 0 for block in blocks)
        _assert_apart(sizes, placed, blocks)
        assert sum(blocks) < 2 * sum(sizes) + MiB
        if max(sizes, default=0) * 16 <= min(sum(sizes), 1 << 30):
            assert sum(blocks) <= 1.1 * sum(sizes) + MiB
    assert sum(packed([32 * MiB] * 2080)[1]) == 65 << 30, "a state of 65 GiB"


def _assert_apart(sizes: list[int], placed: list[tuple[int, int]], blocks: list[int]) -> None:
    ends = dict.fromkeys(range(len(blocks)), 0)
    for (number, start), size in sorted(zip(placed, sizes, strict=True)):
        assert start >= ends[number] and start + size <= blocks[number]
        ends[number] = start + size


# ---- with a Checkpointer ----


class _Holds:
    """A component with a state of its own."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_background_save_is_a_blocking_one(tmp_path: Path, twin: Twin, where: str) -> None:
    state = {"ordered": OrderedDict(a=torch.randn(9)), "list": [torch.ones(2), 3], "tuple": (torch.ones(2), 1)}
    w = torch.randn(30, 20)
    tensors = {
        "w": w,
        "tied": w,
        "deep": OrderedDict(x=w[2:], y=w.t(), conj=torch.randn(3, dtype=torch.complex64).conj()),
    }
    if where == "device":
        tensors = _moved(twin, tensors, 1)
    components = {
        "model": Sharded(_Holds(tensors)),
        "counts": Replicated(_Holds(state)),
        "mine": PerRank(_Holds(state)),
    }
    for name, blocking in (("first", True), ("second", False)):
        with Checkpointer(tmp_path / name, components) as checkpointer:
            checkpointer.save(1, blocking=blocking)
            checkpointer.wait()
    first, second = tmp_path / "first" / "step-1", tmp_path / "second" / "step-1"
    difference = diff_checkpoints(first, second)
    assert not difference.keys and not difference.tensors and not difference.objects, difference
    assert _records(first) == _records(second)
