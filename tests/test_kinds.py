"""Every kind of value: saved by ours and read by stock, the reverse, and both by ours; bit for bit."""

from __future__ import annotations

import collections
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import (
    DTYPES,
    IO,
    KNOWN_DTYPES,
    PAIRS,
    assert_same_bits,
    everything,
    failure,
    io_of,
    load,
    poisoned,
    random,
    raw,
    record,
    save,
    stored,
)
from _versions import stock_plans
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcpring import CheckpointError, RingHFWriter, RingLoadPlanner, RingReader, RingSavePlanner, RingStager, RingWriter


@pytest.mark.parametrize("options", IO, ids=lambda o: f"{o['engine']}-{'direct' if o['direct'] else 'buffered'}")
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_every_kind_comes_back_bit_by_bit(tmp_path: Path, writer: str, reader: str, options: dict[str, Any]) -> None:
    saved = everything()
    made = save(saved, tmp_path, writer, **io_of(writer, options))
    loaded: dict[str, Any] = {key: poisoned(tensor) for key, tensor in saved.items()}
    read = load(loaded, tmp_path, reader, **io_of(reader, options))
    assert_same_bits(loaded, saved)
    for side in (made, read):
        if isinstance(side, RingReader | RingWriter):
            assert side.stats is not None
            assert side.stats.engine == options["engine"]
            if side is made or options["direct"] is False:
                assert side.stats.direct is options["direct"]


@pytest.mark.parametrize("checksum", [True, False])
def test_small_blocks_and_many_workers(tmp_path: Path, checksum: bool) -> None:
    saved = everything()
    options = {"block_size_bytes": 1 << 20, "queue_depth": 3, "workers": 5, "checksum": checksum}
    save(saved, tmp_path, **options)
    for reader in ("ring", "stock"):
        loaded = {key: poisoned(tensor) for key, tensor in saved.items()}
        load(loaded, tmp_path, reader, **io_of(reader, options))
        assert_same_bits(loaded, saved)


@pytest.mark.parametrize("checksum", [True, False])
def test_records_are_archives_that_torch_and_zip_read(tmp_path: Path, checksum: bool) -> None:
    saved = everything()
    save(saved, tmp_path / "c", checksum=checksum)
    for key, info in stored(tmp_path / "c").items():
        data = record(tmp_path / "c", info)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert not checksum or archive.testzip() is None, key
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        assert (tensor.dtype, tensor.shape) == (saved[key].dtype, saved[key].shape), key
        assert raw(tensor) == raw(saved[key]), key
        file = tmp_path / "record.pt"
        file.write_bytes(data)
        assert raw(torch.load(file, weights_only=True, mmap=True)) == raw(saved[key]), key
    tested = subprocess.run([sys.executable, "-m", "zipfile", "-t", file], capture_output=True, text=True)
    assert tested.returncode == 0
    assert not checksum or tested.stdout == "Done testing\n"


def test_a_record_holds_one_contiguous_tensor_and_no_more(tmp_path: Path) -> None:
    """A view of a large storage must not drag the storage along."""
    base = torch.randn(1 << 20)
    save({"view": base[5:9]}, tmp_path)
    assert stored(tmp_path)["view"].length < 4096
    tensor = torch.load(io.BytesIO(record(tmp_path, stored(tmp_path)["view"])), weights_only=True)
    assert tensor.untyped_storage().nbytes() == 16


def test_payloads_are_aligned(tmp_path: Path) -> None:
    saved = everything() | {f"exactly.{n}": random(torch.uint8, (1 << 20) + n) for n in (-1, 0, 1)}
    save(saved, tmp_path)
    sizes = collections.Counter[bool]()
    for key, info in stored(tmp_path).items():
        data, payload = record(tmp_path, info), raw(saved[key])
        at = info.__dict__["ring"][2]
        assert data[at - info.offset :][: len(payload)] == payload, key
        large = len(payload) >= 1 << 20
        assert at % (4096 if large else 64) == 0, key
        sizes[large] += 1
    assert sizes[True] >= 6 and sizes[False] >= 60


def test_files_are_no_longer_than_their_records(tmp_path: Path) -> None:
    writer = save(everything(), tmp_path)
    infos = stored(tmp_path).values()
    (file,) = tmp_path.glob("*.distcp")
    assert file.stat().st_size == max(info.offset + info.length for info in infos) == writer.stats.bytes


def test_all_of_torchs_savable_dtypes_are_tried() -> None:
    """A dtype that a new torch brings must be added to the list."""
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left = {str(dtype) for dtype in known - set(KNOWN_DTYPES)}
    quantized = {"torch.quint8", "torch.qint8", "torch.qint32", "torch.quint4x2", "torch.quint2x4"}
    unsavable = {f"torch.{name}" for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "bcomplex32")}
    odd = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    assert not left - quantized - unsavable - odd


# ---- what only torch.save can take ----


class Named(Tensor):
    """A subclass in Python only."""


class Wrapper(Tensor):
    """A wrapper: its own storage is empty, the data is in another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrapped, (args, kwargs or {}))
        result = func(*args, **kwargs)
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
        return Wrapper(result) if keeps else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapper, (self.inner,)


def _matrix() -> Tensor:
    return torch.arange(24.0).reshape(4, 6)


def _quantized() -> dict[str, Tensor]:
    x = _matrix()
    return {
        "quint8": torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
        "qint32": torch.quantize_per_tensor(x, 0.01, 0, torch.qint32),
        "per channel": torch.quantize_per_channel(x, torch.ones(4), torch.zeros(4, dtype=torch.long), 0, torch.qint8),
        "view": torch.quantize_per_tensor(x, 0.5, 1, torch.qint8)[1:3],
    }


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_quantized(tmp_path: Path, writer: str, reader: str) -> None:
    saved = _quantized()
    save(saved, tmp_path, writer)
    loaded = {key: tensor.clone() for key, tensor in saved.items()}
    for tensor in loaded.values():
        tensor.copy_(torch.zeros(tensor.shape))
    load(loaded, tmp_path, reader)
    for key, tensor in saved.items():
        assert torch.equal(loaded[key].int_repr(), tensor.int_repr()), key
        assert loaded[key].qscheme() == tensor.qscheme(), key


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_subclasses(tmp_path: Path, writer: str, reader: str) -> None:
    saved = {"named": _matrix().as_subclass(Named), "wrapper": Wrapper(_matrix()), "plain": _matrix()}
    save(saved, tmp_path, writer)
    loaded = {key: torch.zeros(4, 6) for key in saved}
    if reader == "ring":
        load(loaded, tmp_path, reader, safe_globals=[Named, Wrapper])
    else:
        with torch.serialization.safe_globals([Named, Wrapper]):
            load(loaded, tmp_path, reader)
    for key in saved:
        assert torch.equal(loaded[key], _matrix()), key


def test_a_subclass_that_is_not_allowed_is_named(tmp_path: Path) -> None:
    save({"x": _matrix().as_subclass(Named), "plain": _matrix()}, tmp_path)
    loaded = {"x": torch.zeros(4, 6), "plain": torch.zeros(4, 6)}
    text = failure(lambda: load(loaded, tmp_path))
    assert "UntrustedCheckpointError" in text and "'x'" in text and "Named" in text and "safe_globals" in text
    load(loaded, tmp_path, trusted=True)
    assert torch.equal(loaded["x"], _matrix())


def test_a_subclass_as_destination(tmp_path: Path) -> None:
    save({"named": _matrix(), "wrapper": _matrix(), "parameter": _matrix()}, tmp_path)
    wrapped = torch.zeros(4, 6)
    loaded = {
        "named": torch.zeros(4, 6).as_subclass(Named),
        "wrapper": Wrapper(wrapped),
        "parameter": torch.nn.Parameter(torch.zeros(4, 6)),
    }
    load(loaded, tmp_path)
    assert torch.equal(loaded["named"].as_subclass(Tensor), _matrix())
    assert torch.equal(wrapped, _matrix())
    assert torch.equal(loaded["parameter"], _matrix())


def _odd() -> dict[str, Tensor]:
    x = _matrix() * (_matrix() % 3 == 0)
    return {
        "coo": x.to_sparse(),
        "csr": x.to_sparse_csr(),
        "csc": x.to_sparse_csc(),
        "bsr": x.to_sparse_bsr((2, 2)),
        "mkldnn": x.to_mkldnn(),
        "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        "bits8": x.to(torch.uint8).view(torch.bits8),
        "meta": x.to("meta"),
        "uninitialized": torch.nn.UninitializedParameter(),
        "zerotensor": torch._efficientzerotensor((3, 4)),
    }


@pytest.mark.parametrize("key", sorted(_odd()))
def test_what_stock_takes_is_not_refused(tmp_path: Path, key: str) -> None:
    """Of what torch.save and DCP's planner can take, ours saves as much as stock or more; both read it back."""
    value = _odd()[key]

    def attempt(writer: str) -> str:
        return failure(lambda: save({"x": value}, tmp_path / writer, writer))

    stock, ours = attempt("stock"), attempt("ring")
    if not stock:
        assert not ours
    if ours:
        assert not list((tmp_path / "ring").glob("__*")), "the partial file must go"
        return
    loaded = {"x": value.clone()}
    loaded["x"].values().zero_() if value.layout != torch.sparse_coo else loaded["x"].zero_()
    load(loaded, tmp_path / "ring")
    assert torch.equal(loaded["x"].to_dense(), value.to_dense())


@pytest.mark.parametrize("key", ["coo", "csr", "csc", "bsr"])
def test_sparse_is_saved_though_stock_cannot(tmp_path: Path, key: str) -> None:
    """Up to torch 2.14 it is stock's storage that cannot, since 2.15 stock's planner, as they have no strides."""
    value = _odd()[key]
    planner = None if stock_plans(value) else RingSavePlanner()
    dcp.save({"x": value, "dense": torch.ones(3)}, storage_writer=RingWriter(tmp_path), planner=planner)
    loaded = {"x": value * 0, "dense": torch.zeros(3)}
    read = load(loaded, tmp_path)
    assert torch.equal(loaded["x"].to_dense(), value.to_dense())
    assert torch.equal(loaded["dense"], torch.ones(3))
    assert read.stats.items == 2
    assert torch.equal(torch.load(io.BytesIO(record(tmp_path, stored(tmp_path)["x"]))).to_dense(), value.to_dense())


def test_records_that_stock_wrote_without_crcs(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save({"x": _matrix()}, tmp_path, "stock")
    finally:
        torch.serialization.set_crc32_options(True)
    loaded = {"x": torch.zeros(4, 6)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["x"], _matrix())


def test_meta_is_refused_by_name(tmp_path: Path) -> None:
    text = failure(lambda: save({"good": _matrix(), "layer.weight": _odd()["meta"]}, tmp_path))
    assert "CheckpointError" in text and "'layer.weight'" in text and "meta" in text


def _resized(tensor: Tensor, size_bytes: int) -> Tensor:
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


FREED: dict[str, Callable[[], Tensor]] = {
    "all": lambda: _resized(_matrix(), 0),
    "a byte": lambda: _resized(_matrix(), 95),
    "of a transposed one": lambda: _resized(_matrix().t(), 95),
    "of rows behind": lambda: _resized(_matrix()[2:], 48),
    "of a conjugate view": lambda: _resized(torch.ones(4, 6, dtype=torch.complex64).conj(), 100),
}


@pytest.mark.parametrize("kind", FREED)
def test_freed_memory_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """torch crashes where it is read or written, or takes what lies behind it."""
    made = FREED[kind]
    text = failure(lambda: save({"good": _matrix(), "layer.weight": made()}, tmp_path))
    assert "CheckpointError: cannot save 'layer.weight': its memory was given back" in text
    with pytest.raises(CheckpointError, match=r"cannot copy 'layer': .* its memory was given back"):
        RingStager().stage({"layer": made()}).result()
    save({"layer": torch.zeros(made().shape, dtype=made().dtype)}, tmp_path)
    for planner in (RingLoadPlanner(), DefaultLoadPlanner()):
        state = {"layer": made()}
        text = failure(lambda: dcp.load(state, storage_reader=RingReader(tmp_path), planner=planner))  # noqa: B023
        assert "'layer'" in text and "its memory was given back" in text


def test_memory_that_is_longer_or_shorter_than_it_was_is_taken_where_it_suffices(tmp_path: Path) -> None:
    state = {"cut": _resized(_matrix()[1:2], 48), "grown": _resized(_matrix(), 1000), "0": _resized(_matrix()[:0], 0)}
    save(state, tmp_path)
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    load(loaded, tmp_path)
    assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.parametrize("layout", (torch.strided, torch.jagged))
def test_what_torch_cannot_describe_is_refused_by_name(tmp_path: Path, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    state = {"good": _matrix(), "layer.weight": nested}
    for writer in (RingWriter, RingHFWriter):
        text = failure(lambda: dcp.save(state, storage_writer=writer(tmp_path), planner=RingSavePlanner()))  # noqa: B023
        assert "PlanError: cannot plan 'layer.weight', a " in text and "save its parts" in text
        if layout == torch.jagged:  # else stock's planner raises, before a writer is asked
            text = failure(lambda: dcp.save(state, storage_writer=writer(tmp_path)))  # noqa: B023
            assert "PlanError: cannot save 'layer.weight', whose shape is [2, j" in text and "save its parts" in text
    staged = RingStager().stage(state).result()["layer.weight"]
    assert all(map(torch.equal, staged.unbind(), nested.unbind()))


def test_what_torch_cannot_copy_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"cannot copy 'layer\.weight': NotImplementedError: .*not implemented"):
        RingStager().stage({"layer": {"weight": torch.zeros(4, dtype=torch.uint8).view(torch.uint1)}}).result()


# ---- containers and objects ----


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value


def _nested() -> dict[str, Any]:
    return {
        "model": {"layers": [{"w": torch.randn(3, 4)}, {"w": torch.randn(4, 3).t()}], "n": 3},
        "optim": {
            "state": {0: {"step": torch.tensor(7.0), "m": torch.randn(3)}},
            "groups": [{"lr": 1e-3, "b": (1, 2)}],
        },
        "text": "one\ntwo ✓",
        "none": None,
        "set": {1, 2},
        "bytes": b"\0\1" * 3000,
        "deep": {"a": {"b": {"c": [1, [2, [3, {"d": 4.5}]]]}}},
        "ordered": collections.OrderedDict(x=1, y=[True, None]),
        "empty dict": {},
        "empty list": [],
        "big object": list(range(300_000)),
    }


def _zeroed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, _zeroed(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return [_zeroed(inner) for inner in value]
    return type(value)() if value is not None else 1


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_nested_containers_and_objects(tmp_path: Path, writer: str, reader: str) -> None:
    saved = _nested()
    save(saved, tmp_path, writer)
    loaded = _zeroed(saved)
    loaded["big object"] = [0]
    load(loaded, tmp_path, reader)
    assert _same(loaded, saved)


def test_custom_classes_need_permission(tmp_path: Path) -> None:
    save({"x": Custom(5)}, tmp_path)
    loaded = {"x": Custom(0)}
    text = failure(lambda: load(loaded, tmp_path))
    assert "UntrustedCheckpointError" in text and "'x'" in text and "Custom" in text
    assert loaded["x"] == Custom(0)
    load(loaded, tmp_path, trusted=True)
    assert loaded["x"] == Custom(5)
    loaded = {"x": Custom(0)}
    load(loaded, tmp_path, safe_globals=[Custom])
    assert loaded["x"] == Custom(5)
    loaded = {"x": Custom(0)}
    load(loaded, tmp_path, "stock")
    assert loaded["x"] == Custom(5)


def test_an_object_that_cannot_be_pickled_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    text = failure(lambda: save({"good": torch.ones(3), "config": {"bad": lambda: None}}, tmp_path))
    assert "CheckpointError: cannot save 'config.bad'" in text and "pickle" in text
    assert not list(tmp_path.glob("*.distcp")) and not list(tmp_path.glob(".metadata*"))


def test_many_small_tensors(tmp_path: Path) -> None:
    saved = {f"t{i}": random(DTYPES[i % len(DTYPES)], i % 17, i % 5) for i in range(3000)}
    save(saved, tmp_path)
    for reader in ("ring", "stock"):
        loaded = {key: poisoned(tensor) for key, tensor in saved.items()}
        load(loaded, tmp_path, reader)
        assert_same_bits(loaded, saved)


def test_one_tensor_over_64_dimensions_is_left_to_torch(tmp_path: Path) -> None:
    value = torch.randn(3).reshape([1] * 70 + [3])
    save({"x": value}, tmp_path)
    loaded = {"x": torch.zeros_like(value)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["x"], value)


@pytest.mark.slow
def test_a_record_over_4_gib(tmp_path: Path) -> None:
    size = (4 << 30) + (100 << 20) + 3
    free_memory = 1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    if free_memory < 2.2 * size or shutil.disk_usage(tmp_path).free < 1.1 * size:
        pytest.skip(f"needs {2.2 * size / 2**30:.0f} GiB of memory and {1.1 * size / 2**30:.0f} GiB of disk")
    saved = torch.empty(size, dtype=torch.uint8)
    saved.copy_(torch.arange(256, dtype=torch.uint8).repeat(size // 256 + 1)[:size])
    saved[4 << 30 :] = 77
    save({"x": saved, "after": torch.ones(3)}, tmp_path)
    for reader in ("ring", "stock"):
        loaded = {"x": torch.zeros(size, dtype=torch.uint8), "after": torch.zeros(3)}
        load(loaded, tmp_path, reader)
        assert torch.equal(loaded["x"], saved) and torch.equal(loaded["after"], torch.ones(3))
        del loaded
    piece = {"x": torch.zeros(1000, dtype=torch.uint8)}
    dcp.load(piece, storage_reader=RingReader(tmp_path), planner=_Tail(size))
    assert torch.equal(piece["x"], saved[-1000:])


class _Tail(dcp.DefaultLoadPlanner):
    """Loads the last elements of "x" instead of the first."""

    def __init__(self, size: int) -> None:
        super().__init__(allow_partial_load=True)
        self._size = size

    def create_local_plan(self) -> Any:
        index = next(index for index in self.metadata.storage_data if index.fqn == "x")
        return dcp.LoadPlan(
            [
                dcp.planner.ReadItem(
                    dcp.planner.LoadItemType.TENSOR,
                    index,
                    torch.Size([0]),
                    index,
                    torch.Size([self._size - 1000]),
                    torch.Size([1000]),
                )
            ]
        )


def test_errors_are_checkpoint_errors() -> None:
    with pytest.raises(ValueError, match="TORCH_SAVE"):
        RingWriter("x", serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS)
    with pytest.raises(CheckpointError, match="set_up_storage_reader"):
        RingReader("x").read_data(dcp.LoadPlan([]), dcp.DefaultLoadPlanner())
