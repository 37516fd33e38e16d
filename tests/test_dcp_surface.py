"""Everything that DCP offers on top of a storage: each way to save and load, planners, extensions, tools."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import io
import logging
import os
import pickle
import threading
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _distributed import CACHES, run
from _kinds import PAIRS, READERS, WRITERS, failure, load, record, save, stored
from _logs import logged
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcpring import CheckpointError, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.options import IOArguments, IOOptions


def _state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 500, generator=generator),
        "nested": {"b": torch.randn(7, generator=generator), "list": [torch.randn(2, generator=generator), 5]},
        "step": seed,
    }


def _blank() -> dict[str, Any]:
    return {"w": torch.zeros(300, 500), "nested": {"b": torch.zeros(7), "list": [torch.zeros(2), 0]}, "step": -1}


def _holds(state: dict[str, Any], seed: int) -> bool:
    want = _state(seed)
    return (
        torch.equal(state["w"], want["w"])
        and torch.equal(state["nested"]["b"], want["nested"]["b"])
        and torch.equal(state["nested"]["list"][0], want["nested"]["list"][0])
        and state["nested"]["list"][1] == 5
        and state["step"] == seed
    )


def _loaded(path: Path, reader: str = "ring", **options: Any) -> dict[str, Any]:
    state = _blank()
    load(state, path, reader, **options)
    return state


def _data_files(path: Path) -> set[str]:
    return {file.name for file in path.glob("*.distcp")}


# ---- the classes ----


def test_classes_are_stocks(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path), RingReader(tmp_path)
    assert isinstance(writer, FileSystemWriter) and isinstance(writer, AsyncStager)
    assert isinstance(writer, dcp.StorageWriter)
    assert isinstance(reader, FileSystemReader) and isinstance(reader, dcp.StorageReader)
    assert writer.path == reader.path == writer.checkpoint_id == reader.checkpoint_id == tmp_path
    assert writer.save_id and reader.load_id
    for cls in (RingWriter, RingReader):
        assert cls.validate_checkpoint_id(tmp_path / "x")
        assert not cls.validate_checkpoint_id("s3://bucket/key")


@pytest.mark.parametrize(("ours", "stock"), [(RingWriter, FileSystemWriter), (RingReader, FileSystemReader)])
def test_arguments_are_stocks_and_more(ours: type, stock: type) -> None:
    """A changed name is enough: the same arguments in the same order with the same defaults, then our own."""
    theirs = list(inspect.signature(stock).parameters.values())
    mine = list(inspect.signature(ours).parameters.values())
    assert [(p.name, p.default, p.kind) for p in mine[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    own = mine[len(theirs) :]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own[:-1])
    assert own[-1].kind is inspect.Parameter.VAR_KEYWORD and own[-1].annotation == "Unpack[IOArguments]"


@pytest.mark.parametrize("cls", (RingWriter, RingReader))
def test_options_of_io_are_taken_by_name(cls: type, tmp_path: Path) -> None:
    assert get_type_hints(IOArguments) == get_type_hints(IOOptions)
    assert cls(tmp_path).options == IOOptions()
    given: dict[str, Any] = {"engine": "threads", "direct": False, "queue_depth": 3, "block_size_bytes": 1 << 20}
    given |= {"workers": 5, "checksum": False}
    assert cls(tmp_path, **given).options == IOOptions(**given)
    with pytest.raises(TypeError, match="enigne"):
        cls(tmp_path, enigne="threads")
    with pytest.raises(ValueError, match="queue_depth=0"):
        cls(tmp_path, queue_depth=0)


def test_strings_and_paths(tmp_path: Path) -> None:
    for path in (str(tmp_path / "text"), tmp_path / "deep" / "er" / "path", str(tmp_path / "ünï côde")):
        save(_state(3), path)  # type: ignore[arg-type]
        assert _holds(_loaded(path), 3)  # type: ignore[arg-type]


def test_pickled_writers_and_readers_work(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, workers=3, direct=False, engine="threads", keep_superseded=True)
    dcp.save(_state(1), storage_writer=writer)
    again = pickle.loads(pickle.dumps(writer))
    assert (again.options, again.path, again.save_id) == (writer.options, writer.path, writer.save_id)
    assert again.keep_superseded
    dcp.save(_state(2), storage_writer=again)
    reader = RingReader(tmp_path, checksum=False, safe_globals=[dataclasses.dataclass])
    dcp.load(_blank(), storage_reader=reader)
    other = pickle.loads(pickle.dumps(reader))
    assert (other.options, other.safe_globals) == (reader.options, reader.safe_globals)
    state = _blank()
    dcp.load(state, storage_reader=other)
    assert _holds(state, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "posix"},
        {"direct": "yes"},
        {"queue_depth": 0},
        {"queue_depth": 1 << 20},
        {"workers": 0},
        {"workers": 2.0},
        {"block_size_bytes": 4096},
        {"block_size_bytes": (1 << 20) + 1},
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    for cls in (RingWriter, RingReader):
        with pytest.raises(ValueError, match=name):
            cls(tmp_path, **options)


# ---- ways to save ----


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize(
    "options", [{"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}], ids=str
)
def test_stock_options(tmp_path: Path, writer: str, reader: str, options: dict[str, Any]) -> None:
    save(_state(4), tmp_path, writer, **options)
    assert _holds(_loaded(tmp_path, reader), 4)
    if options == {"single_file_per_rank": False}:
        assert len(_data_files(tmp_path)) == len(stored(tmp_path)) == 5


def test_a_full_directory_is_kept_with_overwrite_false(tmp_path: Path) -> None:
    save(_state(1), tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert "overwrite=False" in failure(lambda: save(_state(2), tmp_path, overwrite=False))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_one_writer_many_saves(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path / "0"), RingReader(tmp_path / "0")
    ids = set()
    for step in (0, 1, 1, 2, 0):
        path = tmp_path / str(step)
        dcp.save(_state(step), checkpoint_id=path, storage_writer=writer)
        assert writer.checkpoint_id == path
        ids.add(writer.save_id)
        state = _blank()
        dcp.load(state, checkpoint_id=path, storage_reader=reader)
        assert _holds(state, step) and reader.checkpoint_id == path
        assert len(_data_files(path)) == 1, "the superseded file must go"
    assert len(ids) == 5
    assert _holds(_loaded(tmp_path / "2", "stock"), 2)


def test_unrelated_files_stay(tmp_path: Path) -> None:
    save(_state(1), tmp_path)
    others = ["notes.txt", "model.safetensors", "__0_0.distcp.bak", "__x_0.distcp", "__0_0.abc.distcp", ".hidden"]
    for name in others:
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__0_0.distcp").write_text("mine")
    for seed in (2, 3):
        save(_state(seed), tmp_path)
    assert all((tmp_path / name).read_text() == name for name in others)
    assert (tmp_path / "folder" / "__0_0.distcp").read_text() == "mine"
    assert _holds(_loaded(tmp_path), 3)


def test_over_a_stock_checkpoint_and_back(tmp_path: Path) -> None:
    save(_state(1), tmp_path, "stock", thread_count=2)
    assert _data_files(tmp_path) == {"__0_0.distcp", "__0_1.distcp"}
    save(_state(2), tmp_path)
    assert len(_data_files(tmp_path)) == 1
    assert _holds(_loaded(tmp_path), 2) and _holds(_loaded(tmp_path, "stock"), 2)
    save(_state(3), tmp_path, "stock")
    assert _holds(_loaded(tmp_path), 3) and _holds(_loaded(tmp_path, "stock"), 3)


def test_an_empty_state_dict(tmp_path: Path) -> None:
    writer = save({}, tmp_path)
    assert not _data_files(tmp_path) and (tmp_path / ".metadata").is_file()
    assert (writer.stats.items, writer.stats.bytes, writer.stats.files) == (0, 0, 0)
    for reader in ("ring", "stock"):
        load({}, tmp_path, reader)
    save({"only empty": torch.empty(0)}, tmp_path)
    load({"only empty": torch.empty(0)}, tmp_path)


def test_stats(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path), RingReader(tmp_path)
    assert writer.stats is None and reader.stats is None
    state = {"a": torch.randn(1000, 1000), "b": torch.randn(10), "c": "text"}
    dcp.save(state, storage_writer=writer)
    dcp.load({"a": torch.zeros(1000, 1000), "b": torch.zeros(10), "c": ""}, storage_reader=reader)
    assert writer.stats is not None and reader.stats is not None
    for stats in (writer.stats, reader.stats):
        assert (stats.items, stats.files, stats.tensor_bytes) == (3, 1, 4_000_040)
        assert stats.bytes >= stats.tensor_bytes and stats.seconds > 0 and stats.engine in ("uring", "threads")
    (file,) = tmp_path.glob("*.distcp")
    assert writer.stats.bytes == file.stat().st_size


def test_async_save_in_a_thread(tmp_path: Path) -> None:
    """What is saved is what was there when async_save returned."""
    writer = RingWriter(tmp_path)
    for seed in (1, 2):
        state = _state(seed)
        future = dcp.async_save(state, storage_writer=writer)
        state["w"].zero_()
        future.result()
        assert _holds(_loaded(tmp_path), seed)
    assert failure(lambda: dcp.async_save({"x": torch.ones(1)}, storage_writer=RingWriter("/proc/none")).result())


def test_from_a_thread_with_an_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.to_thread(save, _state(n), tmp_path / str(n)) for n in range(3)))

    asyncio.run(main())
    assert all(_holds(_loaded(tmp_path / str(n)), n) for n in range(3))


# ---- plan caching ----


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    yield
    for cache in CACHES:
        getattr(SavePlanner, cache).clear()


@pytest.mark.usefixtures("_no_cached_plans")
def test_plan_caching_over_repeated_saves(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "a")
    for seed, name in enumerate(("a", "a", "b", "a", "b", "c")):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(_state(seed), checkpoint_id=tmp_path / name, storage_writer=writer, planner=planner)
        for reader in ("ring", "stock"):
            assert _holds(_loaded(tmp_path / name, reader), seed)
        assert len(_data_files(tmp_path / name)) == 1
    assert _holds(_loaded(tmp_path / "a"), 3) and _holds(_loaded(tmp_path / "b"), 4)


@pytest.mark.usefixtures("_no_cached_plans")
def test_plan_caching_does_not_notice_another_dtype(tmp_path: Path) -> None:
    """DCP keeps the metadata of the first save; the records say what they hold, and that is what is loaded."""
    for dtype in (torch.float32, torch.bfloat16):
        value = torch.randn(40, 50).to(dtype)
        dcp.save(
            {"x": value},
            storage_writer=RingWriter(tmp_path),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        for reader in ("ring", "stock"):
            loaded = {"x": torch.zeros(40, 50, dtype=dtype)}
            load(loaded, tmp_path, reader)
            assert torch.equal(loaded["x"], value)


# ---- planners ----


class CastingPlanner(DefaultSavePlanner):
    """Saves floats as bfloat16, whatever the plan says."""

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.to(torch.bfloat16) if isinstance(data, Tensor) and data.is_floating_point() else data


class PlannedCast(DefaultSavePlanner):
    """Saves floats as bfloat16, and plans it so."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for key, value in self.state_dict.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                self.state_dict[key] = value.to(torch.bfloat16)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.clone().t().contiguous().t() if isinstance(made, Tensor) else made


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize("planner", [CastingPlanner, PlannedCast])
@pytest.mark.parametrize("checksum", [True, False])
def test_planners_that_change_what_is_saved(
    tmp_path: Path, writer: str, reader: str, planner: type[DefaultSavePlanner], checksum: bool
) -> None:
    options = {} if writer == "stock" else {"checksum": checksum}
    saved = {"w": torch.randn(700, 900), "v": torch.randn(5), "n": torch.arange(6), "o": "object"}
    made = WRITERS[writer](tmp_path, **options)
    dcp.save(saved, storage_writer=made, planner=planner())
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 1.1 * 2 * 700 * 900
    loaded = {"w": torch.zeros(700, 900), "v": torch.zeros(5), "n": torch.zeros(6, dtype=torch.int64), "o": ""}
    load(loaded, tmp_path, reader)
    for key in ("w", "v"):
        assert torch.equal(loaded[key], saved[key].bfloat16().float())  # type: ignore[union-attr]
    assert torch.equal(loaded["n"], saved["n"]) and loaded["o"] == "object"  # type: ignore[arg-type]


def test_slices_of_what_a_planner_changed(tmp_path: Path) -> None:
    """No metadata says where the payload of such a record lies."""
    whole = torch.randn(64, 48)
    dcp.save({"w": whole}, storage_writer=RingWriter(tmp_path), planner=CastingPlanner())
    run(2, _load_a_slice, str(tmp_path), whole.bfloat16().float())


def _load_a_slice(path: str, whole: Tensor) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 1):
        state = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(dim)])}
        dcp.load(state, storage_reader=RingReader(path))
        assert torch.equal(state["w"].to_local(), whole.chunk(2, dim)[dist.get_rank()])


class _Windowed(DefaultSavePlanner):
    """Makes new tensors, and counts how many of them are alive at once."""

    alive, most = 0, 0

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor)
        made = data.clone()
        cls = type(self)
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        _Countdown.attach(made)
        return made


class _Countdown:
    def __del__(self) -> None:
        _Windowed.alive -= 1

    @classmethod
    def attach(cls, tensor: Tensor) -> None:
        tensor.countdown = cls()  # type: ignore[attr-defined]


def test_tensors_that_a_planner_makes_do_not_pile_up(tmp_path: Path) -> None:
    saved = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(40)}  # 160 MiB
    dcp.save(saved, storage_writer=RingWriter(tmp_path), planner=_Windowed())
    assert 0 < _Windowed.most <= 20 and _Windowed.alive == 0
    loaded = {key: torch.zeros(1 << 20) for key in saved}
    load(loaded, tmp_path)
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)


class StagingLoadPlanner(DefaultLoadPlanner):
    """Hands out tensors of its own, and copies in commit_tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.resolved = self.committed = 0

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self.resolved += 1
        return torch.zeros_like(super().resolve_tensor(read_item), dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.committed += 1
        super().resolve_tensor(read_item).copy_(tensor * 2)


@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_load_planners_with_tensors_of_their_own(tmp_path: Path, writer: str) -> None:
    saved = {f"t{i}": torch.randn(500, 2000) for i in range(20)}  # 80 MiB: several windows
    save(saved, tmp_path, writer)
    planner = StagingLoadPlanner()
    loaded = {key: torch.zeros(500, 2000) for key in saved}
    dcp.load(loaded, storage_reader=RingReader(tmp_path), planner=planner)
    assert planner.resolved == planner.committed == 20
    assert all(torch.equal(loaded[key], saved[key] * 2) for key in saved)


class PrefixingSavePlanner(DefaultSavePlanner):
    """Saves every key under another name."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._names = {f"model.{item.index.fqn}": item.index.fqn for item in plan.items}
        items = [
            dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=f"model.{item.index.fqn}"))
            for item in plan.items
        ]
        mappings = {f"model.{key}": path for key, path in self.mappings.items()}
        self.plan = dataclasses.replace(plan, items=items, planner_data=mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(dataclasses.replace(index, fqn=self._names[index.fqn]))


class PrefixingLoadPlanner(DefaultLoadPlanner):
    """Loads ``key`` from what was saved as ``model.key``."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        renamed = {key.removeprefix("model."): entry for key, entry in entries.items()}
        original, self.metadata = self.metadata, dataclasses.replace(self.metadata, state_dict_metadata=renamed)
        plan = super().create_local_plan()
        self.metadata = original
        items = [
            dataclasses.replace(
                item, storage_index=dataclasses.replace(item.storage_index, fqn=f"model.{item.storage_index.fqn}")
            )
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_planners_that_rename_keys(tmp_path: Path, writer: str, reader: str) -> None:
    saved = {"w": torch.randn(40, 60), "o": {"n": 3}}
    dcp.save(saved, storage_writer=WRITERS[writer](tmp_path), planner=PrefixingSavePlanner())
    assert all(key.startswith("model.") for key in stored(tmp_path))
    loaded: dict[str, Any] = {"w": torch.zeros(40, 60), "o": {"n": 0}}
    dcp.load(loaded, storage_reader=READERS[reader](tmp_path), planner=PrefixingLoadPlanner())
    assert torch.equal(loaded["w"], saved["w"]) and loaded["o"] == {"n": 3}  # type: ignore[arg-type]


def test_partial_loads(tmp_path: Path) -> None:
    save(_state(1), tmp_path)
    loaded = {"nested": {"b": torch.zeros(7)}, "new": torch.full((2,), 5.0)}
    reader = RingReader(tmp_path)
    dcp.load(loaded, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(loaded["nested"]["b"], _state(1)["nested"]["b"]) and loaded["new"].sum() == 10  # type: ignore
    assert reader.stats is not None and reader.stats.bytes < 70_000


# ---- extensions ----


class Squeeze(StreamTransformExtension):
    """Compresses."""

    @staticmethod
    def registry_name() -> str:
        return "test.squeeze"

    @staticmethod
    def from_descriptor(version: str) -> Squeeze:
        assert version == "1"
        return Squeeze()

    def get_descriptor(self) -> str:
        return "test.squeeze/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Through(output, zlib.compress)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(zlib.decompress(input.read(-1)))


class Invert(Squeeze):
    """Inverts every bit."""

    @staticmethod
    def registry_name() -> str:
        return "test.invert"

    @staticmethod
    def from_descriptor(version: str) -> Invert:
        return Invert()

    def get_descriptor(self) -> str:
        return "test.invert/2"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Through(output, lambda data: bytes(255 - byte for byte in data))  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(255 - byte for byte in input.read(-1)))


class _Through(io.BytesIO):
    """Collects what is written, and passes it on, changed, when it is closed."""

    def __init__(self, output: IO[bytes], change: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._output, self._change = output, change

    def close(self) -> None:
        if not self.closed:
            self._output.write(self._change(self.getvalue()))
            self._output.close()
        super().close()


def _registry() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(Squeeze)
    registry.register(Invert)
    return registry


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize("extensions", [[Squeeze()], [Invert()]], ids=["squeeze", "invert"])
def test_extensions(tmp_path: Path, writer: str, reader: str, extensions: list[StreamTransformExtension]) -> None:
    state = _state(6)
    state["w"] = torch.ones(300, 500).t()[3:]
    save(state, tmp_path, writer, _extensions=extensions)
    (first, *_) = stored(tmp_path).values()
    assert not zipfile.is_zipfile(io.BytesIO(record(tmp_path, first))), "nothing was transformed"
    loaded = _blank() | {"w": torch.zeros(497, 300)}
    load(loaded, tmp_path, reader, _extension_registry=_registry())
    assert torch.equal(loaded["w"], state["w"]) and loaded["step"] == 6
    assert torch.equal(loaded["nested"]["b"], state["nested"]["b"])
    assert extensions[0].registry_name() in failure(lambda: load(loaded, tmp_path, reader))


# ---- tools ----


def test_dcp_to_torch_save(tmp_path: Path) -> None:
    save(_state(7), tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "file.pt")
    assert _holds(torch.load(tmp_path / "file.pt", weights_only=True), 7)


def test_torch_save_to_dcp(tmp_path: Path) -> None:
    torch.save(_state(8), tmp_path / "file.pt")
    torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "c")
    assert _holds(_loaded(tmp_path / "c"), 8)


def test_reading_a_torch_save_file_with_dcp_and_saving_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(30, 4)}, tmp_path / "file.pt")
    state = {"w": torch.zeros(30, 4)}
    reader = BroadcastingTorchSaveReader()  # type: ignore[no-untyped-call]
    run(1, _convert, str(tmp_path / "file.pt"), str(tmp_path / "c"))
    del reader
    load(state, tmp_path / "c")
    assert torch.equal(state["w"], torch.ones(30, 4))


def _convert(source: str, target: str) -> None:
    state = {"w": torch.zeros(30, 4)}
    dcp.load(
        state,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=source,
    )
    dcp.save(state, storage_writer=RingWriter(target))


def test_loading_without_a_state_dict(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    save(_state(9), tmp_path)
    assert _holds(_load_state_dict_from_keys(storage_reader=RingReader(tmp_path)), 9)
    some = _load_state_dict_from_keys({"nested"}, storage_reader=RingReader(tmp_path))
    assert some.keys() == {"nested"}


def test_stateful_objects(tmp_path: Path) -> None:
    model, other = nn.Linear(30, 20), nn.Linear(30, 20)
    save({"model": model}, tmp_path)
    load({"model": other}, tmp_path)
    assert torch.equal(model.weight, other.weight)


# ---- several processes ----


def _trained(seed: int, steps: int, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 40), nn.Linear(40, 3, bias=False))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(5, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _full(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: _full(value) for key, value in state.items()}
    return [_full(value) for value in state] if isinstance(state, list) else state


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _app(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": 3, f"rng.{dist.get_rank()}": torch.get_rng_state()}


def _resume(path: str, reader: str, size: int) -> Any:
    """Loads into a fresh model; returns the whole state, as after training."""
    model, optimizer = _trained(seed=99, steps=1, size=size)
    state = _app(model, optimizer) | {"step": 0}
    state.pop(f"rng.{dist.get_rank()}")
    dcp.load(state, storage_reader=READERS[reader](path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["step"] == 3
    parameters, moments = get_state_dict(model, optimizer)
    return _full({"model": parameters, "optimizer": moments})


def _train_and_save(path: str) -> Any:
    model, optimizer = _trained(seed=1, steps=3, size=4)
    state = _app(model, optimizer)
    want = _full({"model": state["model"], "optimizer": state["optimizer"]})
    rank = dist.get_rank()
    for kind in ("ring", "stock"):
        writer = WRITERS[kind](f"{path}/{kind}")
        dcp.save(state, storage_writer=writer)
        if isinstance(writer, RingWriter):
            assert writer.stats is not None and writer.stats.items > 5
            (mine,) = Path(path, kind).glob(f"__{rank}_0.*.distcp")
            assert mine.stat().st_size == writer.stats.bytes
    for writer_kind, reader_kind in PAIRS:
        assert _equal(_resume(f"{path}/{writer_kind}", reader_kind, 4), want), (writer_kind, reader_kind)
    future = dcp.async_save(state, storage_writer=RingWriter(f"{path}/async"))
    future.result()
    assert _equal(_resume(f"{path}/async", "ring", 4), want)
    _check_plan_caching(f"{path}/cached", state, want)
    return want if rank == 0 else None


def _check_plan_caching(path: str, state: Any, want: Any) -> None:
    writer = RingWriter(path)
    for name in (path, path, f"{path}.other"):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=name, storage_writer=writer, planner=planner)
        assert len(_data_files(Path(name))) == 4
        dist.barrier()
    assert _equal(_resume(path, "ring", 4), want) and _equal(_resume(f"{path}.other", "stock", 4), want)


def _resume_elsewhere(path: str, want: Any) -> None:
    for kind, reader in (*PAIRS, ("cached", "ring"), ("async", "stock")):
        assert _equal(_resume(f"{path}/{kind}", reader, dist.get_world_size()), want), (kind, reader)


def test_fsdp2_and_adamw(tmp_path: Path) -> None:
    """Saved by 4 processes, resumed on 4, 2 and 1."""
    want = run(4, _train_and_save, str(tmp_path))[0]
    for size in (2, 1):
        run(size, _resume_elsewhere, str(tmp_path), want)


def _nothing_to_write(path: str) -> None:
    rank = dist.get_rank()
    replicated = {"x": torch.arange(10.0), "o": {"a": 1}}
    writer = RingWriter(path)
    dcp.save(replicated, storage_writer=writer, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    assert writer.stats is not None
    assert (writer.stats.files, writer.stats.items > 0) == ((1, True) if rank == 0 else (0, False))
    dist.barrier()
    assert [name.split(".")[0] for name in _data_files(Path(path))] == ["__0_0"]
    loaded = {"x": torch.zeros(10), "o": {"a": 0}}
    dcp.load(loaded, storage_reader=RingReader(path))
    assert torch.equal(loaded["x"], replicated["x"]) and loaded["o"] == {"a": 1}  # type: ignore[arg-type]


def _no_dist(path: str) -> None:
    own = f"{path}.{dist.get_rank()}"
    dcp.save(_state(dist.get_rank()), storage_writer=RingWriter(own), no_dist=True)
    state = _blank()
    dcp.load(state, storage_reader=RingReader(own), no_dist=True)
    assert _holds(state, dist.get_rank())
    assert [name.split(".")[0] for name in _data_files(Path(own))] == ["__0_0"]


def _one_file_per_item(path: str) -> None:
    rank = dist.get_rank()
    state = {f"r{rank}.{i}": torch.full((i + 1,), float(rank)) for i in range(3)}
    dcp.save(state, storage_writer=RingWriter(path, single_file_per_rank=False))
    dist.barrier()
    assert len(_data_files(Path(path))) == 6
    for reader in ("ring", "stock"):
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(loaded, storage_reader=READERS[reader](path))
        assert _equal(loaded, state)


def _failing_rank(path: str) -> None:
    """One rank that fails fails all, and the checkpoint that was there stays."""
    rank = dist.get_rank()
    dcp.save(_state(1), storage_writer=RingWriter(path))
    bad = _state(2) | {f"own.{rank}": torch.ones(3) if rank == 0 else (lambda: None)}
    text = failure(lambda: dcp.save(bad, storage_writer=RingWriter(path)))
    assert "<lambda>" in text
    dist.barrier()
    state = _blank()
    dcp.load(state, storage_reader=RingReader(path))
    assert _holds(state, 1)
    dist.barrier()
    dcp.save(_state(3), storage_writer=RingWriter(path))
    dist.barrier()
    assert len(_data_files(Path(path))) <= 2, "what the failed save left must go"
    dcp.load(state, storage_reader=RingReader(path))
    assert _holds(state, 3)


def _two_ranks(path: str) -> None:
    for check in (_nothing_to_write, _no_dist, _one_file_per_item, _failing_rank):
        check(f"{path}/{check.__name__}")
        dist.barrier()


def test_two_ranks(tmp_path: Path) -> None:
    run(2, _two_ranks, str(tmp_path))


# ---- use_collectives=False ----


def _own_state(seed: int) -> dict[str, Any]:
    rank = dist.get_rank()
    return {f"own.{rank}": torch.full((50, 60), float(10 * seed + rank)), "shared": torch.full((5,), float(seed))}


def _load_own(path: str, reader: str = "ring") -> float | str:
    """The seed that was loaded, or why nothing was."""
    state = {key: torch.zeros_like(value) for key, value in _own_state(0).items()}
    with logged(logging.ERROR) as errors:  # torch up to 2.12 does not pass on why there is no metadata
        text = failure(lambda: dcp.load(state, storage_reader=READERS[reader](path)))
    if text:
        return "; ".join([text, *errors])
    seed = float(state["shared"][0])
    assert _equal(state, _own_state(int(seed)))
    return seed


def _save_own(path: str, seed: int, writer: str = "ring", **options: Any) -> None:
    dcp.save(_own_state(seed), storage_writer=WRITERS[writer](path), use_collectives=False, **options)


def _without_collectives(path: str) -> list[Any]:
    rank = dist.get_rank()
    fresh = f"{path}/fresh"
    for seed in (1, 2):
        _save_own(fresh, seed)
        dist.barrier()
        assert _load_own(fresh) == _load_own(fresh, "stock") == seed
        assert not Path(fresh, ".metadata").exists()
        assert {file.name for file in Path(fresh).glob("*.metadata")} == {"__0.metadata", "__1.metadata"}
        assert len(_data_files(Path(fresh))) == 2
        dist.barrier()
    _save_own(f"{path}/stock", 3, "stock")
    dist.barrier()
    assert _load_own(f"{path}/stock") == 3
    one, two = _interrupted(fresh, rank)
    return [one, two, _stale(f"{path}/stale"), _async_own(f"{path}/async")]


def _interrupted(path: str, rank: int) -> tuple[float | str, float | str]:
    """Rank 1 does not get to its save, only to the barrier at its end."""
    _save_own(path, 5) if rank == 0 else dist.barrier()
    dist.barrier()
    mixed = _load_own(path)
    dist.barrier()
    _save_own(path, 5) if rank == 1 else dist.barrier()
    dist.barrier()
    result = mixed, _load_own(path)
    dist.barrier()
    return result


def _stale(path: str) -> tuple[float | str, float | str]:
    """A global metadata file that is older than those of the ranks: it is refused, and DCP takes theirs."""
    dcp.save(_own_state(6), storage_writer=RingWriter(path))
    _save_own(path, 7)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"is older than .* use_collectives=False"):
        RingReader(path).read_metadata()
    fallen_back = _load_own(path)
    dist.barrier()
    dcp.save(_own_state(8), storage_writer=RingWriter(path))
    dist.barrier()
    result = fallen_back, _load_own(path)
    assert not list(Path(path).glob("__*.metadata"))
    dist.barrier()
    return result


def _async_own(path: str) -> float | str:
    future = dcp.async_save(_own_state(9), storage_writer=RingWriter(path), use_collectives=False)
    future.result()
    dist.barrier()
    return _load_own(path)


def test_without_collectives(tmp_path: Path) -> None:
    for mixed, repaired, (fallen_back, global_again), asynchronous in run(2, _without_collectives, str(tmp_path)):
        assert "interrupted" in mixed and "use_collectives=False" in mixed
        assert repaired == 5
        assert fallen_back == 7 and global_again == 8
        assert asynchronous == 9


# ---- async_save in a process ----


def _async_process(path: str) -> None:
    """With stock's planner, then twice with one of ours, which is pickled for each save, and caches."""
    from torch.distributed.checkpoint import _async_process_executor

    ring = RingSavePlanner(enable_plan_caching=True)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    rank = dist.get_rank()
    try:
        for seed, planner in ((1, None), (2, ring), (3, ring)):
            state = _state(seed) | {f"own.{rank}": torch.full((4,), float(rank))}
            future = dcp.async_save(
                state,
                storage_writer=RingWriter(path, engine="uring"),
                planner=planner,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            state["w"].zero_()
            future.result()
            dist.barrier()
            loaded = _blank() | {f"own.{rank}": torch.zeros(4)}
            dcp.load(loaded, storage_reader=RingReader(path))
            assert _holds(loaded, seed) and loaded[f"own.{rank}"].sum() == 4 * rank
            assert len(_data_files(Path(path))) == 2
            dist.barrier()
    finally:
        with contextlib.suppress(AttributeError):
            _async_process_executor._CHECKPOINT_PROCESS.__del__()  # type: ignore[union-attr]
        _async_process_executor._CHECKPOINT_PROCESS = None


def test_async_save_in_a_process(tmp_path: Path) -> None:
    run(2, _async_process, str(tmp_path))


def test_a_save_uses_no_global_lock(tmp_path: Path) -> None:
    """Python goes on while C computes (test_gil.py has the calls that it makes)."""
    state = {"x": torch.ones(64 << 20)}  # 256 MiB
    writer = RingWriter(tmp_path, sync_files=False)
    future = dcp.async_save(state, storage_writer=writer)
    longest, last = 0.0, time.perf_counter()
    while not future.done():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    future.result()
    assert writer.stats is not None and longest < max(0.5, writer.stats.seconds / 2)


# ---- the collector ----


@pytest.mark.parametrize("kind", ("ring", "stock"))
def test_the_collector_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It belongs to the whole process: nothing is switched off while DCP works, or in a thread beside training."""
    path = tmp_path / kind
    stacks: list[list[str]] = []
    for switch in ("disable", "freeze"):
        monkeypatch.setattr(gc, switch, lambda: stacks.append([frame.name for frame in traceback.extract_stack()]))
    planners = {"planner": RingSavePlanner()} if kind == "ring" else {}
    loaders = {"planner": RingLoadPlanner()} if kind == "ring" else {}

    def both() -> None:
        dcp.save(_state(3), storage_writer=RingWriter(path), **planners)
        state = _blank()
        dcp.load(state, storage_reader=RingReader(path), **loaders)
        assert _holds(state, 3)

    both()
    assert not [stack for stack in stacks if {"write_data", "read_data"} & set(stack)]
    stacks.clear()
    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert not stacks


def test_a_collector_that_is_off_stays_off(tmp_path: Path) -> None:
    gc.disable()
    try:
        save(_state(), tmp_path)
        _loaded(tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()
