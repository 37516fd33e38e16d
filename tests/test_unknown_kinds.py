"""Never guess: tensors of a kind that dcpring does not know, and a torch that is newer than those it was tested with.

The data are whole, on the way there and back, through the planners, Checkpointer and the storage.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _parts import CHECKPOINTABLE, FUTURE, HAS_PROTOCOL, KINDS, FutureTensor, known, make
from _versions import needs
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcpring import (
    Checkpointer,
    CheckpointError,
    Replicated,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
    Sharded,
)
from dcpring.move.staging import StagingBuffer
from dcpring.plan import table as plans
from dcpring.plan.flatten import flatten
from dcpring.torchside import tensors, versions

ROWS, COLUMNS = 11, 6


def _whole(seed: float = 1.0) -> Tensor:
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) * seed


def _part(kind: str, rank: int, world: int, seed: float = 1.0, *, filled: bool = True) -> Tensor:
    """Every ``world``-th band of two rows, one behind the other with a row of padding between and a column at the end.

    So each rank holds several shards, none of which begins where its tensor does.
    """
    bands = [(start, min(2, ROWS - start)) for start in range(0, ROWS, 2)][rank::world]
    local = torch.full((3 * len(bands) + 1, COLUMNS + 1), -7.0)
    parts = []
    for number, (start, rows) in enumerate(bands):
        at = 3 * number + 1
        if filled:
            local[at : at + rows, :COLUMNS] = _whole(seed)[start : start + rows]
        parts.append(((start, 0), (at, 0), (rows, COLUMNS)))
    return make(kind, local, (ROWS, COLUMNS), parts)


def _check(kind: str, rank: int, world: int, loaded: Tensor, seed: float = 1.0) -> None:
    expected = _part(kind, rank, world, seed)
    assert torch.equal(loaded.as_subclass(Tensor), expected.as_subclass(Tensor))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def _newer_torch() -> Iterator[None]:
    with mock.patch.object(versions, "tested", False):
        yield


def _load(state: dict[str, Any], path: Path | str, planner: Any = RingLoadPlanner, reader: Any = RingReader) -> None:
    dcp.load(state, storage_reader=reader(path), planner=planner and planner())


def _ring_and_stock(path: Path) -> Iterator[tuple[Any, Any, str]]:
    for writer in (RingWriter, dcp.FileSystemWriter):
        for planner in (RingSavePlanner, None):
            yield writer, planner, f"{path}/{writer.__name__}-{planner is None}"


# ---- one rank ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("newer", [False, True], ids=["tested", "newer"])
def test_parts_are_stored_as_parts(tmp_path: Path, kind: str, newer: bool) -> None:
    with known(), _newer_torch() if newer else contextlib.nullcontext():
        for writer, planner, path in _ring_and_stock(tmp_path):
            state = {"m": {"w": _part(kind, 0, 1), "other": torch.ones(3), "step": 4}}
            dcp.save(state, storage_writer=writer(path), planner=planner and planner())
            entry = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["m.w"]
            assert list(entry.size) == [ROWS, COLUMNS] and len(entry.chunks) == 6
            for reader in (RingReader, dcp.FileSystemReader):
                whole: dict[str, Any] = {"m": {"w": torch.zeros(ROWS, COLUMNS)}}
                _load(whole, path, reader=reader)
                assert torch.equal(whole["m"]["w"], _whole())
                again = {"w": _part(kind, 0, 1, filled=False), "other": torch.zeros(3), "step": 0}
                _load({"m": again}, path, reader=reader)
                _check(kind, 0, 1, again["w"])  # type: ignore[arg-type]
                assert again["step"] == 4 and torch.equal(again["other"], torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_whole_loads_into_parts(tmp_path: Path, kind: str) -> None:
    dcp.save({"w": _whole()}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    with known():
        state: dict[str, Any] = {"w": _part(kind, 0, 1, filled=False)}
        _load(state, tmp_path)
    _check(kind, 0, 1, state["w"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_that_counts_is_that_of_the_whole(tmp_path: Path, kind: str) -> None:
    dcp.save({"w": torch.zeros(ROWS + 1, COLUMNS)}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    with known(), pytest.raises(CheckpointException, match=rf"\[{ROWS}, {COLUMNS}\]") as caught:
        _load({"w": _part(kind, 0, 1, filled=False)}, tmp_path)
    assert f"[{ROWS + 1}, {COLUMNS}]" in str(caught.value)


def test_attributes_that_mean_nothing_to_stock_change_nothing(tmp_path: Path) -> None:
    """Megatron's parameters have some."""
    weight: Any = nn.Parameter(_whole())
    weight.tensor_model_parallel = True
    assert tensors.is_plain(weight)
    planner = RingSavePlanner(writers="split", split_bytes=1)
    dcp.save({"w": weight}, storage_writer=RingWriter(tmp_path), planner=planner)
    state: dict[str, Any] = {"w": torch.zeros(ROWS, COLUMNS)}
    _load(state, tmp_path)
    assert torch.equal(state["w"], _whole())


@pytest.mark.parametrize("kind", [CHECKPOINTABLE, FUTURE])
def test_ties_are_not_made_of_parts(kind: str) -> None:
    """All parts of a tensor have its memory, and are not the same."""
    with known():
        flat = flatten({"w": _part(kind, 0, 1), "v": _part(kind, 0, 1), "u": _whole()})
        flat.values["t"] = flat.values["u"]
        flat.codes.append(flat.codes[0])
        table = plans.make_table(flat)
        names = table.names()
        assert names.count("w") == names.count("v") == 6
        assert [(names[a], names[b]) for a, b in plans.tied_rows(flat, table)] == [("t", "u")]


@pytest.mark.parametrize("kind", KINDS)
def test_staging_keeps_what_a_tensor_stands_for(kind: str) -> None:
    with known():
        state = {"a": [{"w": _part(kind, 0, 1)}], "plain": torch.ones(2)}
        staged = StagingBuffer().stage(state)
        copied = staged["a"][0]["w"]
        assert copied is not state["a"][0]["w"] and torch.equal(copied, state["a"][0]["w"])
        flat, was = flatten(staged), flatten(state)
        assert plans.make_table(flat).encode() == plans.make_table(was).encode()
        assert copied.data_ptr() != state["a"][0]["w"].data_ptr()


def test_async_save_keeps_what_a_tensor_stands_for(tmp_path: Path) -> None:
    with known(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for save in range(2):
            state = {"w": _part(CHECKPOINTABLE, 0, 1, save + 2)}
            future: Any = dcp.async_save(state, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
            future.result()
            whole: dict[str, Any] = {"w": torch.zeros(ROWS, COLUMNS)}
            _load(whole, tmp_path)
            assert torch.equal(whole["w"], _whole(save + 2))


def test_parts_in_replicated_state_are_refused(tmp_path: Path) -> None:
    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return {"w": _part(CHECKPOINTABLE, 0, 1)}

        def load_state_dict(self, state: Any) -> None: ...

    said = r"'w' is a Tensor of which each rank has a part; .*Sharded"
    with (
        known(),
        Checkpointer(tmp_path, {"x": Replicated(Holder())}) as saver,
        pytest.raises(CheckpointError, match=said),
    ):
        saver.save(1)


def test_what_stock_refuses_is_refused() -> None:
    with known():
        bad = _part(CHECKPOINTABLE, 0, 1)
        bad.global_offsets = bad.global_offsets[1:]  # type: ignore[attr-defined]
        with pytest.raises(ValueError):
            plans.make_table(flatten({"w": bad}))


def test_a_strange_kind_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    versions.say_once.cache_clear()
    with known(), caplog.at_level(logging.INFO, "dcpring"):
        for _ in range(2):
            plans.make_table(flatten({"w": _part("subclass", 0, 1), "v": _part("subclass", 0, 1)}))
    said = [record.getMessage() for record in caplog.records if "planned by torch's own" in record.getMessage()]
    assert said == [f"tensors of the kind {FutureTensor.__module__}.FutureTensor are planned by torch's own functions"]


# ---- several ranks ----


def _save_parts(kind: str, path: str, newer: bool) -> None:
    rank, world = _rank(), _world()
    with known(), _newer_torch() if newer else contextlib.nullcontext():
        for writer, planner, at in _ring_and_stock(Path(path)):
            planned = planner and planner(check_replicas="error")
            state = {"m": {"w": _part(kind, rank, world), "bias": torch.ones(2)}}
            dcp.save(state, storage_writer=writer(at), planner=planned)


def _load_parts(kind: str, path: str, newer: bool, share: str) -> None:
    rank, world = _rank(), _world()
    with known(), _newer_torch() if newer else contextlib.nullcontext():
        for _, _, at in _ring_and_stock(Path(path)):
            state: dict[str, Any] = {"m": {"w": _part(kind, rank, world, filled=False), "bias": torch.zeros(2)}}
            planner = RingLoadPlanner(process_group=dist.group.WORLD, share=share)  # type: ignore[arg-type]
            dcp.load(state, storage_reader=RingReader(at), planner=planner)
            _check(kind, rank, world, state["m"]["w"])
            assert torch.equal(state["m"]["bias"], torch.ones(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("newer", [False, True], ids=["tested", "newer"])
def test_parts_of_several_ranks(tmp_path: Path, kind: str, newer: bool) -> None:
    """Saved by two ranks, loaded by three, two and one."""
    _distributed.run(2, _save_parts, kind, str(tmp_path), newer)
    for world, share in ((3, "off"), (2, "host")):
        _distributed.run(world, _load_parts, kind, str(tmp_path), newer, share)
    for _, _, path in _ring_and_stock(tmp_path):
        whole: dict[str, Any] = {"m": {"w": torch.zeros(ROWS, COLUMNS)}}
        _load(whole, path)
        assert torch.equal(whole["m"]["w"], _whole())


class _Parts:
    """What a Checkpointer saves: its state is made of parts."""

    def __init__(self, kind: str, seed: float = 0.0) -> None:
        self.weight = _part(kind, _rank(), _world(), seed)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["w"] is self.weight


def _checkpointer(kind: str, path: str, newer: bool) -> None:
    rank, world = _rank(), _world()
    with known(), _newer_torch() if newer else contextlib.nullcontext():
        with Checkpointer(path, {"m": Sharded(_Parts(kind, 3.0)), "n": Replicated({"step": 5})}) as saver:
            for step in (1, 2):
                saver.save(step, blocking=step == 2)
        for step in (1, 2):
            loaded, counts = _Parts(kind), {"step": 0}
            with Checkpointer(path, {"m": Sharded(loaded), "n": Replicated(counts)}) as loader:
                loader.load(step)
            _check(kind, rank, world, loaded.weight, 3.0)
            assert counts == {"step": 5}


@pytest.mark.parametrize("kind", [CHECKPOINTABLE, FUTURE])
@pytest.mark.parametrize("newer", [False, True], ids=["tested", "newer"])
def test_parts_in_a_checkpointer(tmp_path: Path, kind: str, newer: bool) -> None:
    _distributed.run(2, _checkpointer, kind, str(tmp_path), newer)


# ---- a newer torch ----


def _everything() -> dict[str, Any]:
    tied = torch.arange(5.0)
    model: dict[str, Any] = {
        "plain": torch.arange(12.0).reshape(3, 4),
        "parameter": nn.Parameter(torch.arange(3.0)),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "half": torch.arange(4).to(torch.bfloat16),
        "tied": tied,
        "tied too": tied,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "complex": torch.view_as_complex(torch.arange(4.0).reshape(2, 2)).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "lists": [{"x": torch.ones(2)}, 3, [1, "a"]],
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,))
        model["sharded"] = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
        model["replicated"] = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    return {"model": model, "step": 7, "name": "a", "none": None}


def _blank(value: Any) -> Any:
    if isinstance(value, DTensor):
        return DTensor.from_local(
            torch.full_like(value.to_local(), -1),
            value.device_mesh,
            value.placements,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, dict):
        return {key: _blank(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_blank(part) for part in value]
    if isinstance(value, Tensor):
        return value.clone() if value.layout != torch.strided else torch.full_like(value, -1)
    return 0


def _same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            _same(one, other)
    elif isinstance(a, DTensor):
        assert torch.equal(a.to_local(), b.to_local())
    elif isinstance(a, Tensor):
        assert torch.equal(a.to_dense(), b.to_dense())
    else:
        assert a == b


def _round_trip(path: str, newer_at_save: bool, newer_at_load: bool) -> None:
    state = _everything()
    with _newer_torch() if newer_at_save else contextlib.nullcontext():
        planner = RingSavePlanner(writers="balanced", check_replicas="error")
        dcp.save(state, storage_writer=RingWriter(path), planner=planner)
    for reader in (RingReader, dcp.FileSystemReader):
        loaded = _blank(state)
        with _newer_torch() if newer_at_load else contextlib.nullcontext():
            dcp.load(loaded, storage_reader=reader(path), planner=RingLoadPlanner())
        _same(loaded, state)


@pytest.mark.parametrize("at_save, at_load", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("world", [1, 2])
def test_all_kinds_pass_through_a_newer_torch(tmp_path: Path, world: int, at_save: bool, at_load: bool) -> None:
    if world == 1:
        _round_trip(str(tmp_path), at_save, at_load)
    else:
        _distributed.run(world, _round_trip, str(tmp_path), at_save, at_load)


def _differing(path: str) -> None:
    with _newer_torch():
        planner = RingSavePlanner(check_replicas="error")
        dcp.save({"w": torch.full((3,), float(_rank()))}, storage_writer=RingWriter(path), planner=planner)


def test_replicas_are_compared_with_a_newer_torch(tmp_path: Path) -> None:
    with pytest.raises(_distributed.RankFailure, match=r"'w' \(rank 0 differs from 1\)"):
        _distributed.run(2, _differing, str(tmp_path))


def test_a_newer_torch_plans_what_stock_plans() -> None:
    state = _everything()
    with _newer_torch():
        ring = RingSavePlanner()
        ring.set_up_planner(state, is_coordinator=True)
        plan = ring.create_local_plan()
    stock = dcp.DefaultSavePlanner()
    stock.set_up_planner(state, is_coordinator=True)
    assert repr(list(plan.items)) == repr(list(stock.create_local_plan().items))


def test_a_newer_torch_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    versions.say_once.cache_clear()
    with _newer_torch(), caplog.at_level(logging.INFO, "dcpring"):
        for name in ("a", "b"):
            _round_trip(f"{tmp_path}/{name}", True, True)
    said = [record for record in caplog.records if "has been tested with" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    text = said[0].getMessage()
    assert text.startswith(f"torch {torch.__version__} is not one that dcpring has been tested with (2.9 to 2.15)")
    assert "which takes longer" in text


def test_this_torch_is_one_that_was_tested() -> None:
    assert versions.tested and versions.knows_torch()


def test_a_known_torch_asks_stock_for_nothing(tmp_path: Path) -> None:
    """The fast path stays fast: no item is made for plain tensors."""
    state = {f"w{number}": torch.ones(2) for number in range(50)}
    state |= {f"p{number}": nn.Parameter(torch.ones(2)) for number in range(50)}

    def refuse(*_: Any) -> Any:
        raise AssertionError("asked stock")

    with contextlib.ExitStack() as stack:
        for where, name in (
            (tensors, "create_write_items"),
            (plans, "create_write_items"),
            (plans, "create_chunk_list"),
        ):
            stack.enter_context(mock.patch.object(where, name, refuse))
        dcp.save({"m": state}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
        _load({"m": state}, tmp_path)


# ---- stock's protocol ----


@needs(HAS_PROTOCOL, "CheckpointableTensor")
def test_the_protocol_is_torchs() -> None:
    from torch.distributed.checkpoint import CheckpointableTensor

    assert isinstance(_part(CHECKPOINTABLE, 0, 1), CheckpointableTensor)


@needs(HAS_PROTOCOL, "CheckpointableTensor")
def test_stock_and_ring_plan_alike() -> None:
    state = {"w": _part(CHECKPOINTABLE, 0, 1), "v": nn.Parameter(torch.ones(2))}
    made = []
    for planner in (RingSavePlanner(), dcp.DefaultSavePlanner()):
        planner.set_up_planner(state, is_coordinator=True)
        made.append([(item.index, item.type, item.tensor_data) for item in planner.create_local_plan().items])
    assert made[0] == made[1]


@needs(HAS_PROTOCOL, "CheckpointableTensor")
def test_meta_parts_get_memory(tmp_path: Path) -> None:
    dcp.save({"w": _whole()}, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    code = _part(CHECKPOINTABLE, 0, 1)
    meta: Any = torch.empty_like(code, device="meta")
    meta.__dict__.update(code.__dict__)
    state: dict[str, Any] = {"w": meta}
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        _load(state, tmp_path)
    boxes = zip(state["w"].global_offsets, state["w"].local_offsets, state["w"].local_sizes, strict=True)
    for (start, _), (at, _), (rows, columns) in boxes:
        assert torch.equal(state["w"][at : at + rows, :columns], _whole()[start : start + rows])
