"""Accelerator tensors: saved and loaded through host copies, on a simulated device (_twin.py) whose work is late."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import _twin
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _distributed import run
from _kinds import DTYPES, assert_same_bits, everything, failure, load, poisoned, random, raw, save, stored
from _twin import Twin, strict_twin, twin
from test_slices import _load_boxes
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import _C, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.base.memory import same_memory
from dcpring.base.windows import split_box
from dcpring.move import device as devices
from dcpring.move.device import DEFAULT_PIECE_BYTES, Downloader, HostCopies, Uploader
from dcpring.move.load import executor
from dcpring.plan import replicas, table
from dcpring.plan.flatten import flatten
from dcpring.plan.items import ReadItems
from dcpring.store import writer

__all__ = ["strict_twin", "twin"]

CPU = torch.device("cpu")
MiB = 1 << 20


def _on(made: Twin, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state spread over the devices."""
    return {key: made.tensor(tensor, index % 2) for index, (key, tensor) in enumerate(state.items())}


def _values(made: Twin, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: made.values(tensor) for key, tensor in state.items()}


# ---- the twin: that it catches what it is for ----


def test_a_download_that_is_not_waited_for_is_not_there() -> None:
    with _twin.active(Twin("needed only")) as made:
        source, host = made.tensor(torch.arange(4.0)), made.pinned(16).view(torch.float32)
        host.copy_(source, non_blocking=True)
        assert host.tolist() != [0, 1, 2, 3]
        made.synchronize(source.device)
        assert host.tolist() == [0, 1, 2, 3]
        ordinary = torch.empty(4).copy_(source, non_blocking=True)
        assert ordinary.tolist() == [0, 1, 2, 3], "a copy to memory that is not pinned waits by itself"


def test_an_upload_that_is_not_waited_for_brings_what_its_buffer_has_next() -> None:
    with _twin.active(Twin("needed only")) as made:
        target, host = made.tensor(torch.zeros(4)), made.pinned(16).view(torch.float32).fill_(1)
        target.copy_(host, non_blocking=True)
        host.fill_(2)
        assert made.values(target).tolist() == [2] * 4


def test_work_on_another_stream_needs_a_wait() -> None:
    for order, waits, seen in (("needed only", False, 0.0), ("needed only", True, 1.0), ("others first", False, 1.0)):
        with _twin.active(Twin(order)) as made:  # type: ignore[arg-type]
            source, host = made.tensor(torch.zeros(4)), made.pinned(16).view(torch.float32)
            made.write(source, torch.ones(4))
            side = made.stream(source.device)
            if waits:
                side.wait_stream(made.current_stream(source.device))
            with side:
                host.copy_(source, non_blocking=True)
            side.synchronize()
            assert host.tolist() == [seen] * 4


def test_memory_that_is_freed_while_another_stream_uses_it_is_overwritten() -> None:
    for order, whole in (("needed only", True), ("others first", False)):
        with _twin.active(Twin(order)) as made:  # type: ignore[arg-type]
            source, host = made.tensor(torch.ones(4)), made.pinned(16).view(torch.float32)
            side = made.stream(source.device)
            side.wait_stream(made.current_stream(source.device))
            with side:
                host.copy_(source, non_blocking=True)
            del source
            side.synchronize()
            assert (host.tolist() == [1] * 4) is whole
            assert made.allocated == [0, 0]


def test_a_conjugate_view_that_is_copied_without_waiting_loses_its_conjugation() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    with _twin.active(Twin("needed only")) as made:
        host = made.pinned(40).view(torch.complex64)
        moved = made.tensor(z.conj())
        host.copy_(moved, non_blocking=True)
        made.synchronize(moved.device)
        assert torch.equal(host, z)
        assert torch.equal(moved.cpu(), z.conj())


# ---- Downloader ----


def _downloaded(tensors: list[Tensor], piece_bytes: int) -> list[bytes]:
    """Puts the pieces together again, checking that they come in order."""
    parts: dict[int, list[bytes]] = {}
    last = -1
    for piece in Downloader(piece_bytes).pieces(tensors):
        assert piece.indices == sorted(piece.indices) and piece.indices[0] >= last
        assert sum(t.nbytes for t in piece.tensors) <= max(piece_bytes, 64)
        _check_piece(piece, tensors)
        for index, host in zip(piece.indices, piece.tensors, strict=True):
            assert host.device == CPU and host.is_contiguous() and host.dtype == tensors[index].dtype
            assert piece.part_offset == sum(map(len, parts.get(index, [])))
            parts.setdefault(index, []).append(raw(host))
        last = piece.indices[-1]
    return [b"".join(parts[index]) for index in range(len(tensors))]


def _check_piece(piece: HostCopies, tensors: list[Tensor]) -> None:
    if piece.whole:
        assert piece.part_offset == 0
        assert [host.shape for host in piece.tensors] == [tensors[index].shape for index in piece.indices]
    else:
        assert len(piece.indices) == 1 and piece.tensors[0].dim() == 1


@pytest.mark.parametrize("piece_bytes", [64, 100, 1000, 4096, 100_000, 16 << 20])
def test_downloader_delivers_every_kind_in_order(strict_twin: Twin, piece_bytes: int) -> None:
    tensors = [t.detach() for t in everything().values() if t.nbytes < 200 * piece_bytes]
    assert _downloaded([strict_twin.tensor(tensor) for tensor in tensors], piece_bytes) == [raw(t) for t in tensors]
    assert not strict_twin.under_way


def test_downloader_with_nothing_or_empties(twin: Twin) -> None:
    assert list(Downloader().pieces([])) == []
    empties = [torch.empty(0), torch.empty(3, 0, dtype=torch.int64), torch.tensor(True)] * 50
    assert _downloaded([twin.tensor(tensor) for tensor in empties], 64) == [raw(tensor) for tensor in empties]


def test_downloader_works_ahead_by_one_piece_in_two_buffers() -> None:
    with _twin.active(Twin("at once")) as made:
        tensors = [made.tensor(torch.full((16,), float(n))) for n in range(8)]
        pieces = Downloader(64).pieces(tensors)
        first = next(pieces)
        made.write(tensors[1], torch.full((16,), -1.0))
        made.write(tensors[2], torch.full((16,), -2.0))
        assert first.tensors[0].tolist() == [0.0] * 16
        second = next(pieces)
        assert second.tensors[0].tolist() == [1.0] * 16, "it is copied while the first is worked on"
        kept = second.tensors[0]
        third = next(pieces)
        assert third.tensors[0].tolist() == [-2.0] * 16, "it is not copied before the first is done with"
        assert third.tensors[0].data_ptr() == first.tensors[0].data_ptr() != kept.data_ptr()
        assert kept.tolist() == [3.0] * 16, "its buffer is in use again once the next piece was asked for"
        pieces.close()


def test_what_is_under_way_on_the_current_stream_is_seen(twin: Twin) -> None:
    tensors = [twin.tensor(torch.zeros(100), device=1) for _ in range(20)]
    wanted = [torch.full((100,), float(n)) for n in range(20)]
    for tensor, value in zip(tensors, wanted, strict=True):
        twin.write(tensor, value)
    assert _downloaded(tensors, 1024) == [raw(value) for value in wanted]


def test_a_side_stream_that_was_made_current_is_waited_for(twin: Twin) -> None:
    device = torch.device(_twin.TYPE, 1)
    tensor = twin.tensor(torch.zeros(100), device=1)
    side = twin.stream(device)
    with side:
        twin.write(tensor, torch.ones(100))
        assert _downloaded([tensor], 1024) == [raw(torch.ones(100))]


def test_views_that_must_be_computed_first(twin: Twin) -> None:
    z = random(torch.complex64, 60, 50)
    views = [z.conj(), z.conj().t(), z.conj().imag, z.conj()[3:9, ::2], z.imag, torch._neg_view(z.real)]
    assert _downloaded([twin.tensor(view) for view in views], 4096) == [raw(view) for view in views]
    assert _downloaded([twin.tensor(view) for view in views], 1 << 20) == [raw(view) for view in views]


@pytest.mark.parametrize(
    "view",
    [".t()", ".conj()", "[:, 5:]", "[::2]", ".permute(1, 0)[7:]", ".expand(3, 1500, 1500)", ".unfold(0, 2, 1)"],
)
def test_large_tensors_take_little_on_the_device(strict_twin: Twin, view: str) -> None:
    base = torch.randn(1500, 1500, dtype=torch.complex64)
    tensor = eval(f"base{view}", {"base": base})
    moved = strict_twin.tensor(tensor)
    before = strict_twin.allocated[0]
    assert _downloaded([moved], MiB) == [raw(tensor)]
    assert strict_twin.most_allocated[0] - before <= 4 * MiB
    assert strict_twin.most_pinned == 2 * MiB


def test_one_downloader_has_two_buffers_whatever_it_copies(twin: Twin) -> None:
    state = _on(twin, {str(n): torch.randn(5000) for n in range(100)})
    downloader = Downloader(10_000_000)
    for device in range(2):
        for _ in range(3):
            tensors = [tensor for tensor in state.values() if tensor.device.index == device]
            assert sum(len(piece.indices) for piece in downloader.pieces(tensors)) == 50
    assert twin.most_pinned == 2 * 8 * MiB, "10 MB are rounded down, as torch would round them up"


def test_an_error_in_the_middle_leaves_nothing_under_way(twin: Twin) -> None:
    tensors = [twin.tensor(torch.full((16,), float(n))) for n in range(8)]
    downloader = Downloader(64)
    with pytest.raises(ValueError), contextlib.closing(downloader.pieces(tensors)) as pieces:
        for _ in pieces:
            raise ValueError
    assert not twin.under_way
    assert [int(piece.tensors[0][0]) for piece in downloader.pieces(tensors)] == list(range(8))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["copy", "record", "wait"])
def test_an_error_between_copies_and_events(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    tensors = [twin.tensor(torch.full((4,), float(n))) for n in range(40)]
    downloader = Downloader(64)
    _fail_at(monkeypatch, step, 6, error)
    with pytest.raises(error):
        list(downloader.pieces(tensors))
    assert not twin.under_way
    got = [float(host[0]) for piece in downloader.pieces(tensors) for host in piece.tensors]
    assert got == list(map(float, range(40)))


def _fail_at(monkeypatch: pytest.MonkeyPatch, step: str, number: int, error: type[BaseException]) -> None:
    """The so-manieth copy, recording or wait raises, once."""
    owner, name = {
        "copy": (devices, "copy_to_host"),
        "record": (_twin.Event, "record"),
        "wait": (_twin.Event, "synchronize"),
    }[step]
    original = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


# ---- saving ----


@pytest.mark.parametrize("copy_ahead", [64, 1000, 70_000, 10_000_000])
@pytest.mark.parametrize("checksum", [True, False])
def test_saving_every_kind(tmp_path: Path, strict_twin: Twin, copy_ahead: int, checksum: bool) -> None:
    saved = {key: t for key, t in everything().items() if t.nbytes < 200 * copy_ahead}
    made = save(_on(strict_twin, saved), tmp_path, checksum=checksum, per_thread_copy_ahead=copy_ahead)
    assert made.stats.tensor_bytes == sum(tensor.nbytes for tensor in saved.values())
    for reader in ("ring", "stock"):
        loaded = {key: poisoned(tensor) for key, tensor in saved.items()}
        load(loaded, tmp_path, reader)
        assert_same_bits(loaded, saved)


@pytest.mark.parametrize("planner", [DefaultSavePlanner, RingSavePlanner])
def test_the_same_file_with_and_without_a_device(tmp_path: Path, twin: Twin, planner: Any) -> None:
    saved = {key: tensor for key, tensor in everything().items() if tensor.nbytes < 100_000}
    moved = {key: twin.tensor(tensor) for key, tensor in saved.items()}
    for folder, state in (("plain", saved), ("device", moved)):
        made = RingWriter(tmp_path / folder, per_thread_copy_ahead=50_000)
        dcp.save(state, storage_writer=made, planner=planner())
    (plain,), (device,) = (list((tmp_path / name).glob("*.distcp")) for name in ("plain", "device"))
    assert plain.read_bytes() == device.read_bytes()
    for key, info in stored(tmp_path / "plain").items():
        assert info.__dict__["ring"] == stored(tmp_path / "device")[key].__dict__["ring"], key


def test_saving_beside_the_cpu_with_objects(tmp_path: Path, twin: Twin) -> None:
    on_device = torch.randn(1000)
    saved = {"cpu": torch.randn(1000), "device": twin.tensor(on_device, 1), "object": [1, 2]}
    twin.write(saved["device"], on_device * 2)  # type: ignore[arg-type]
    save(saved, tmp_path)
    loaded: dict[str, Any] = {"cpu": torch.zeros(1000), "device": torch.zeros(1000), "object": []}
    load(loaded, tmp_path)
    assert torch.equal(loaded["cpu"], saved["cpu"]) and torch.equal(loaded["device"], on_device * 2)  # type: ignore[arg-type]
    assert loaded["object"] == [1, 2]


def test_a_tensor_without_data_is_refused(tmp_path: Path, twin: Twin) -> None:
    text = failure(lambda: save({"m": torch.empty(3, device="meta"), "d": twin.tensor(torch.ones(3))}, tmp_path))
    assert "'m'" in text and "meta device" in text


class _Doubling(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made + made if isinstance(made, Tensor) else made


def test_tensors_that_a_planner_makes_on_the_device(
    tmp_path: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in windows, and die as soon as a window is written."""
    monkeypatch.setattr("dcpring.move.save.saving.WINDOW_BYTES", 10_000)
    plain = {str(n): torch.randn(700) for n in range(30)}
    made = RingWriter(tmp_path, per_thread_copy_ahead=4096)
    dcp.save(_on(twin, plain), storage_writer=made, planner=_Doubling())
    loaded = {key: torch.zeros(700) for key in plain}
    load(loaded, tmp_path, "stock")
    assert all(torch.equal(loaded[key], tensor * 2) for key, tensor in plain.items())


def test_host_memory_of_a_save_is_bounded(tmp_path: Path, strict_twin: Twin) -> None:
    """64 MiB in all: 32 for I/O, 8 for blocks that are carried over, the rest for these copies."""
    state = _on(strict_twin, {str(n): torch.randn(3 * MiB) for n in range(4)})
    before = max(strict_twin.allocated)
    dcp.save(state, storage_writer=RingWriter(tmp_path, single_file_per_rank=False))
    assert strict_twin.most_pinned == 2 * DEFAULT_PIECE_BYTES <= 24 * MiB
    assert max(strict_twin.most_allocated) == before
    assert not strict_twin.under_way


def test_a_failing_write_leaves_nothing_under_way(tmp_path: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _on(twin, {str(n): torch.randn(1000) for n in range(40)})
    original = _C.FileWriter.write_tensors
    calls = []

    class Failing:
        def __init__(self, *args: Any) -> None:
            self._file = _C.FileWriter(*args)

        def write_tensors(self, *given: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise OSError(28, "No space left on device", "x")
            return original(self._file, *given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    fake = type("_C", (), {**{name: getattr(_C, name) for name in dir(_C)}, "FileWriter": Failing})
    monkeypatch.setattr("dcpring.move.save.saving._C", fake)
    assert "No space left" in failure(lambda: save(state, tmp_path, per_thread_copy_ahead=8192))
    assert not twin.under_way


# ---- ties ----


def _lazies(z: Tensor) -> dict[str, Tensor]:
    return {"z": z, "conj": z.conj(), "again": z.conj(), "imag": z.imag, "neg": z.conj().imag, "tied": z}


@pytest.mark.parametrize("planner", [DefaultSavePlanner, RingSavePlanner])
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_lazy_views_are_not_tied_to_their_base(tmp_path: Path, twin: Twin, planner: Any, where: str) -> None:
    """Pointer, shape and strides are the same; the values are not."""
    z = random(torch.complex64, 9)
    state = _lazies(z if where == "cpu" else twin.tensor(z))
    dcp.save({"m": state}, storage_writer=RingWriter(tmp_path), planner=planner())
    loaded = {"m": {key: poisoned(tensor) for key, tensor in _lazies(z).items()}}
    load(loaded, tmp_path, "stock")
    assert_same_bits(loaded["m"], _lazies(z))
    places = {name: info.offset for name, info in stored(tmp_path).items()}
    assert places["m.z"] == places["m.tied"] and places["m.conj"] == places["m.again"], "what is tied is stored once"
    assert len(set(places.values())) == 4


def test_ties_of_planners_know_lazy_views() -> None:
    z = random(torch.complex64, 9)
    values = _lazies(z)
    assert same_memory(dict(enumerate(values.values()))) == {2: 1, 5: 0}
    flat = flatten(values)
    assert set(table.tied_rows(flat, table.make_table(flat))) == {(2, 1), (5, 0)}


def test_tensors_without_pointers_are_not_tied() -> None:
    """Those of some devices have none: all would be the same memory."""

    class NoPointer:
        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def data_ptr(self) -> int:
            return 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

    made: Any = {0: NoPointer(torch.ones(3)), 1: NoPointer(torch.zeros(3))}
    assert same_memory(made) == {}


def test_parts_must_come_in_order(tmp_path: Path) -> None:
    options = writer.IOOptions().for_core(True)
    for wrong in ([(4, 0), (4, 32)], [(4, 16)], [(8, 0), (5, 32)]):
        file = _C.FileWriter(str(tmp_path), "file", 0, options)
        with pytest.raises((ValueError, OSError)):
            for count, at in wrong:
                file.write_part([torch.ones(count)], (10,), at, _C.StorageIndex(1))
            file.finish()
        file.close()
        assert not (tmp_path / "file").exists()


# ---- the reader's host path ----


@pytest.mark.parametrize("window", [1 << 12, 1 << 16, 1 << 20])
@pytest.mark.parametrize("kind", ["ring", "stock"])
def test_loading_through_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, window: int) -> None:
    """Casts go through host copies, large ones in several pieces."""
    monkeypatch.setattr(devices, "HOST_BYTES", window)
    saved = {
        "wide": torch.randn(3, 40_000),
        "tall": torch.randn(20_000, 7),
        "cube": torch.randn(30, 41, 52),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0),
        "conj": torch.randn(200, 300, dtype=torch.complex64),
    }
    save(saved, tmp_path, kind)
    loaded = {key: torch.zeros(t.shape, dtype=torch.float64) for key, t in saved.items() if key != "conj"}
    loaded["conj"] = torch.zeros(200, 300, dtype=torch.complex64).conj()
    loaded["tall"] = torch.zeros(7, 20_000, dtype=torch.float64).t()
    read = load(loaded, tmp_path)
    for key, tensor in saved.items():
        assert torch.equal(loaded[key], tensor.to(loaded[key].dtype)), key
    assert read.stats.tensor_bytes == sum(tensor.nbytes for tensor in loaded.values())


def test_slices_through_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = random(torch.int32, 300, 50, 40)
    save({"w": saved}, tmp_path)
    boxes = [("w", (11, 3, 5), (250, 40, 30)), ("w", (0, 49, 0), (300, 1, 40)), ("w", (299, 0, 39), (1, 50, 1))]
    monkeypatch.setattr(devices, "HOST_BYTES", 5000)
    monkeypatch.setattr(executor, "is_plain_memory", lambda tensor: False)
    planner, _ = _load_boxes(tmp_path, boxes)
    for (_, offsets, lengths), tensor in zip(boxes, planner.tensors, strict=True):
        assert torch.equal(tensor, saved[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))])


def test_split_covers_every_element_once() -> None:
    for lengths in ((), (0,), (7,), (5, 3), (4, 0, 3), (3, 4, 5), (1, 1, 17), (2, 3, 2, 5)):
        for limit in (1, 2, 3, 7, 10, 1000):
            hits = torch.zeros(lengths, dtype=torch.int64)
            for offsets, sizes in split_box(lengths, limit):
                assert torch.Size(sizes).numel() <= limit
                hits[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
            assert (hits == 1).all(), (lengths, limit)


# ---- loading ----


PLANNERS = {"stock": DefaultLoadPlanner, "ring": RingLoadPlanner}


def _load_with(planner: str, state: dict[str, Any], path: Path, **options: Any) -> RingReader:
    reader = RingReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=PLANNERS[planner]())
    return reader


@pytest.mark.parametrize("kind", ["ring", "stock"])
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("window", [1 << 13, 32 << 20])
def test_loading_every_kind(
    tmp_path: Path, strict_twin: Twin, monkeypatch: pytest.MonkeyPatch, kind: str, planner: str, window: int
) -> None:
    monkeypatch.setattr(devices, "HOST_BYTES", window)
    saved = {key: tensor for key, tensor in everything().items() if tensor.nbytes < 50 * window}
    save(saved, tmp_path, kind)
    loaded = _on(strict_twin, {key: poisoned(tensor) for key, tensor in saved.items()})
    read = _load_with(planner, loaded, tmp_path)
    assert_same_bits(_values(strict_twin, loaded), saved)
    assert read.stats is not None and read.stats.tensor_bytes == sum(tensor.nbytes for tensor in saved.values())


def _count_items(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of which items are made, from now on."""
    made: list[int] = []
    make = ReadItems.make
    monkeypatch.setattr(ReadItems, "make", lambda self, position: (made.append(position), make(self, position))[1])
    return made


def test_small_tensors_are_loaded_without_items(
    tmp_path: Path, strict_twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is to be cast has one, for the words of the warning."""
    monkeypatch.setattr(devices, "HOST_BYTES", 1 << 14)
    saved = {f"{n:03}": torch.randn(n % 40, 5) for n in range(300)} | {"big": torch.randn(4000), "cast": torch.ones(3)}
    dcp.save(saved, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner())
    loaded = _on(strict_twin, {key: torch.full(tensor.shape, -1.0) for key, tensor in saved.items()})
    loaded["007"] = strict_twin.tensor(torch.zeros(5, 7).t())
    loaded["cast"] = strict_twin.tensor(torch.zeros(3, dtype=torch.float64))
    made = _count_items(monkeypatch)
    read = _load_with("ring", loaded, tmp_path)
    saved["cast"] = saved["cast"].double()
    assert_same_bits(_values(strict_twin, loaded), saved)
    assert len(set(made)) == 1
    assert strict_twin.most_pinned <= 1 << 14
    assert read.stats is not None and read.stats.tensor_bytes == sum(tensor.nbytes for tensor in saved.values())


def _save_rows(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {f"{n}": distribute_tensor(torch.arange(60.0).view(12, 5) + n, mesh, [Shard(n % 2)]) for n in range(40)}
    dcp.save(state, storage_writer=RingWriter(path), planner=RingSavePlanner())


def _small_ones() -> dict[str, Tensor]:
    """Of every dtype and kind, many to a window."""
    return {f"{n}.{key}": t for n in range(8) for key, t in everything().items() if t.nbytes < 4000}


@pytest.mark.parametrize("planner", ["ring", "stock"])
def test_small_tensors_cross_the_link_together(tmp_path: Path, strict_twin: Twin, planner: str) -> None:
    saved = _small_ones()
    moved = {key: strict_twin.tensor(tensor) for key, tensor in saved.items()}
    allocated, crossed = strict_twin.allocated[0], strict_twin.crossings
    dcp.save(moved, storage_writer=RingWriter(tmp_path), planner=RingSavePlanner() if planner == "ring" else None)
    assert strict_twin.crossings - crossed == 1
    assert strict_twin.allocated[0] == allocated and strict_twin.most_allocated[0] - allocated < 17 * MiB
    loaded = {key: strict_twin.tensor(poisoned(tensor)) for key, tensor in saved.items()}
    lazy = sum(tensor.is_conj() or tensor.is_neg() for tensor in saved.values())
    allocated, crossed = strict_twin.allocated[0], strict_twin.crossings
    _load_with(planner, loaded, tmp_path)
    assert strict_twin.crossings - crossed <= 2 + lazy
    assert strict_twin.allocated[0] == allocated
    assert_same_bits(_values(strict_twin, loaded), saved)


def test_where_the_device_is_full_small_tensors_cross_alone(
    tmp_path: Path, strict_twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _small_ones()
    moved, loaded = (
        {key: strict_twin.tensor(tensor) for key, tensor in some.items()}
        for some in (saved, {key: poisoned(tensor) for key, tensor in saved.items()})
    )

    def full(self: Any, device: torch.device, size_bytes: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(devices.Room, "__init__", full)
    save(moved, tmp_path)
    _load_with("ring", loaded, tmp_path)
    assert strict_twin.crossings > 2 * len(saved)
    assert_same_bits(_values(strict_twin, loaded), saved)


def test_large_tensors_cross_alone(tmp_path: Path, strict_twin: Twin) -> None:
    saved = {str(n): torch.randn(1 << 18) for n in range(6)}
    moved = {key: strict_twin.tensor(tensor) for key, tensor in saved.items()}
    allocated = strict_twin.allocated[0]
    save(moved, tmp_path)
    _load_with("ring", moved, tmp_path)
    assert strict_twin.most_allocated[0] == allocated


def test_small_tensors_that_were_saved_in_parts(
    tmp_path: Path, strict_twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(2, _save_rows, str(tmp_path))
    monkeypatch.setattr(devices, "HOST_BYTES", 1 << 11)
    loaded = _on(strict_twin, {f"{n}": torch.zeros(12, 5) for n in range(40)})
    made = _count_items(monkeypatch)
    _load_with("ring", loaded, tmp_path)
    assert_same_bits(_values(strict_twin, loaded), {f"{n}": torch.arange(60.0).view(12, 5) + n for n in range(40)})
    assert not made


def test_loading_into_strided_and_lazy_tensors_with_casts(tmp_path: Path, twin: Twin) -> None:
    z = torch.randn(40, 30, dtype=torch.complex64)
    saved = {
        **{"t": torch.randn(40, 30), "columns": torch.randn(40, 30), "conj": z, "conj.t": z.clone()},
        **{"neg": torch.randn(40, 30), "cast": torch.randn(40, 30), "cast.t": torch.randn(40, 30)},
    }
    save(saved, tmp_path)
    base = torch.zeros(40, 30, dtype=torch.complex64)
    targets = {
        **{"t": torch.zeros(30, 40).t(), "columns": torch.zeros(40, 50)[:, 7:37], "conj": base.conj()},
        **{"conj.t": torch.zeros(30, 40, dtype=torch.complex64).conj().t(), "neg": base.clone().conj().imag},
        **{"cast": torch.zeros(40, 30, dtype=torch.float64), "cast.t": torch.zeros(30, 40, dtype=torch.float64).t()},
    }
    moved = _on(twin, targets)
    load(moved, tmp_path)
    for key, tensor in saved.items():
        assert torch.equal(twin.values(moved[key]), tensor.to(targets[key].dtype)), key


def test_casts_are_made_on_the_host(tmp_path: Path, strict_twin: Twin) -> None:
    """As on the CPU, bit for bit, and without memory on the device."""
    saved = torch.tensor([1e30, -1.5, float("nan"), 2.5e9, 3.0] * 1000)
    save({"x": saved}, tmp_path)
    loaded = {"x": strict_twin.tensor(torch.zeros(5000, dtype=torch.int16))}
    before = strict_twin.allocated[:]
    load(loaded, tmp_path, casts="any")
    assert strict_twin.most_allocated == before
    assert torch.equal(strict_twin.values(loaded["x"]), saved.to(torch.int16))


def test_a_load_comes_behind_what_is_under_way_on_the_current_stream(tmp_path: Path, twin: Twin) -> None:
    saved = {str(n): torch.randn(300) for n in range(20)}
    save(saved, tmp_path)
    loaded = _on(twin, {key: torch.zeros(300) for key in saved})
    for tensor in loaded.values():
        twin.write(tensor, torch.full((300,), -1.0))
    load(loaded, tmp_path)
    assert_same_bits(_values(twin, loaded), saved)


def test_memory_of_a_load_is_bounded(tmp_path: Path, strict_twin: Twin) -> None:
    saved = {str(n): torch.randn(2000, 1500) for n in range(8)}
    save(saved, tmp_path)
    loaded = _on(strict_twin, {key: torch.zeros(1500, 2000).t() for key in saved})
    before = max(strict_twin.allocated)
    load(loaded, tmp_path)
    assert_same_bits(_values(strict_twin, loaded), saved)
    assert strict_twin.most_pinned <= 32 * MiB
    assert max(strict_twin.most_allocated) - before <= 32 * MiB


def test_a_small_load_takes_little_pinned_memory(tmp_path: Path, twin: Twin) -> None:
    save({"x": torch.ones(1000)}, tmp_path)
    load({"x": twin.tensor(torch.zeros(1000))}, tmp_path)
    assert twin.most_pinned <= 8192


def test_damage_in_the_middle_of_a_load_leaves_nothing_under_way(
    tmp_path: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "HOST_BYTES", 1 << 14)
    saved = {f"{n:02}": torch.randn(700) for n in range(20)}
    save(saved, tmp_path)
    info = stored(tmp_path)["15"]
    path = tmp_path / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.__dict__["ring"][2] + 100] ^= 1
    path.write_bytes(data)
    loaded = _on(twin, {key: torch.zeros(700) for key in saved})
    message = failure(lambda: load(loaded, tmp_path))
    assert "'15'" in message and "already overwritten in the state dict: '00', '01'" in message
    assert not twin.under_way
    assert torch.equal(twin.values(loaded["00"]), saved["00"])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["record", "wait"])
def test_an_error_between_uploads_and_events(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    targets = [twin.tensor(torch.zeros(16), n % 2) for n in range(12)]
    monkeypatch.setattr(devices, "HOST_BYTES", 256)
    _fail_at(monkeypatch, step, 5, error)
    with pytest.raises(error), Uploader(targets, 12 * 64) as uploader:
        for number, target in enumerate(targets):
            uploader.turn(number)
            (host,) = uploader.take(number, [((16,), torch.float32)])
            uploader.send(number, [(target, host.fill_(1))])
    assert not twin.under_way


def test_uploader_uses_four_buffers_in_turn_and_waits_for_each(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [twin.tensor(torch.zeros(16), n % 2) for n in range(10)]
    monkeypatch.setattr(devices, "HOST_BYTES", 256)
    with Uploader(targets, 10 * 64) as uploader:
        assert uploader.window_bytes == 64
        for number, target in enumerate(targets):
            uploader.turn(number)
            (host,) = uploader.take(number, [((16,), torch.float32)])
            uploader.send(number, [(target, host.fill_(number))])
    assert not twin.under_way
    assert twin.most_pinned == 256
    assert [float(twin.values(target)[3]) for target in targets] == list(range(10))


def test_where_memory_cannot_be_pinned_it_is_ordinary(
    tmp_path: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(size: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(twin, "pinned", refuse)
    monkeypatch.setattr(devices, "HOST_BYTES", 1 << 13)
    saved = {str(n): torch.randn(700) for n in range(20)}
    save(_on(twin, saved), tmp_path, per_thread_copy_ahead=4096)
    assert "pinned" in caplog.text and "out of memory" in caplog.text and "more" not in caplog.text
    loaded = _on(twin, {key: torch.zeros(700) for key in saved})
    load(loaded, tmp_path)
    assert_same_bits(_values(twin, loaded), saved)


def test_meta_targets_beside_a_device(tmp_path: Path, twin: Twin) -> None:
    save({"a": torch.ones(3), "m": torch.ones(3)}, tmp_path)
    loaded = {"a": twin.tensor(torch.zeros(3)), "m": torch.zeros(3, dtype=torch.float64, device="meta")}
    failure(lambda: load(loaded, tmp_path))
    assert loaded["m"].is_meta


def test_no_dtype_is_left_out() -> None:
    """Of those that are tested all but what this torch's shim may not know are plain to the core."""
    kinds = _C.Tensors([torch.empty(3, dtype=dtype) for dtype in DTYPES]).kinds()
    unknown = {str(dtype) for dtype, kind in zip(DTYPES, kinds, strict=True) if kind != 0}
    assert unknown <= {"torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2", "torch.complex32"}, unknown


# ---- fingerprints of replicas ----


def test_fingerprints_are_those_of_the_cpu(twin: Twin) -> None:
    tensors = [t.detach() for t in everything().values() if t.nbytes <= replicas.MAX_BYTES]
    moved = [twin.tensor(tensor, n % 2) for n, tensor in enumerate(tensors)]
    late = twin.tensor(torch.zeros(50), 1)
    twin.write(late, torch.ones(50))
    assert replicas.fingerprints([*moved, late]) == replicas.fingerprints([*tensors, torch.ones(50)])


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_fingerprints_take_little_memory_however_many_there_are(
    strict_twin: Twin, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(replicas, "_WINDOW_BYTES", 50_000)
    tensors = [torch.full((100, 20), n) for n in range(200)]
    wanted = replicas.fingerprints(tensors)
    seen: list[int] = []
    original = _C.Tensors

    def watched(tensors: list[Tensor]) -> _C.Tensors:
        seen.append(sum(tensor.nbytes for tensor in tensors))
        return original(tensors)

    fake = type("_C", (), {"Tensors": staticmethod(watched)})
    monkeypatch.setattr(replicas, "_C", fake)
    if where == "device":
        tensors = [strict_twin.tensor(tensor, n % 2) for n, tensor in enumerate(tensors)]
    before = strict_twin.allocated[0]
    assert replicas.fingerprints(tensors) == wanted
    assert max(seen) <= 50_000 and sum(seen) == 200 * 16_000
    assert strict_twin.most_allocated[0] - before <= 50_000
