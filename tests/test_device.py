"""Accelerator tensors: the paths through host copies, on CPU tensors everywhere, on a device where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _kinds import DTYPES, assert_same_bits, everything, load, of_all_views, poisoned, random, raw, save, stored
from test_slices import _load_boxes
from torch import Tensor

from dcpring import _C, _load, _save, writer
from dcpring._device import Downloader, Piece
from dcpring._windows import split_box

CPU = torch.device("cpu")
accelerator = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator in this machine")


def _downloaded(tensors: list[Tensor], piece_bytes: int, device: torch.device = CPU) -> list[bytes]:
    """Puts the pieces together again, checking that they come in order."""
    parts: dict[int, list[bytes]] = {}
    last = -1
    for piece in Downloader(device, piece_bytes).pieces(tensors):
        assert piece.indices == sorted(piece.indices) and piece.indices[0] >= last
        assert sum(t.nbytes for t in piece.tensors) <= max(piece_bytes, 64)
        _check_piece(piece, tensors)
        for index, host in zip(piece.indices, piece.tensors, strict=True):
            assert host.device == CPU and host.is_contiguous() and host.dtype == tensors[index].dtype
            assert piece.part_offset == sum(map(len, parts.get(index, [])))
            parts.setdefault(index, []).append(raw(host))
        last = piece.indices[-1]
    return [b"".join(parts[index]) for index in range(len(tensors))]


def _check_piece(piece: Piece, tensors: list[Tensor]) -> None:
    if piece.whole:
        assert piece.part_offset == 0
        assert [host.shape for host in piece.tensors] == [tensors[index].shape for index in piece.indices]
    else:
        assert len(piece.indices) == 1 and piece.tensors[0].dim() == 1


@pytest.mark.parametrize("piece_bytes", [64, 100, 1000, 4096, 100_000, 16 << 20])
def test_downloader_delivers_every_kind_in_order(piece_bytes: int) -> None:
    tensors = [t.detach() for key, t in everything().items() if piece_bytes >= 1000 or t.nbytes < 20_000]
    assert _downloaded(tensors, piece_bytes) == [raw(tensor) for tensor in tensors]


def test_downloader_with_nothing_or_empties() -> None:
    assert list(Downloader(CPU).pieces([])) == []
    empties = [torch.empty(0), torch.empty(3, 0, dtype=torch.int64), torch.tensor(True)]
    assert _downloaded(empties * 50, 64) == [raw(tensor) for tensor in empties * 50]


def test_downloader_works_ahead_by_one_piece_in_two_buffers() -> None:
    tensors = [torch.full((16,), float(n)) for n in range(8)]
    pieces = Downloader(CPU, 64).pieces(tensors)
    first = next(pieces)
    tensors[1].fill_(-1)
    tensors[2].fill_(-2)
    assert first.tensors[0].tolist() == [0.0] * 16
    second = next(pieces)
    assert second.tensors[0].tolist() == [1.0] * 16, "it is copied while the first is worked on"
    kept = second.tensors[0]
    third = next(pieces)
    assert third.tensors[0].tolist() == [-2.0] * 16, "it is not copied before the first is done with"
    assert third.tensors[0].data_ptr() == first.tensors[0].data_ptr() != kept.data_ptr()
    assert kept.tolist() == [3.0] * 16, "its buffer is in use again once the next piece was asked for"


# ---- the writer's device path ----


@pytest.fixture(params=[64, 1000, 70_000, 10_000_000])
def _all_on_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Plain CPU tensors are taken for a device's; yields the writer's options."""
    original = _save.handles_and_kinds

    def kinds(tensors: list[Tensor]) -> tuple[_C.Tensors, bytes]:
        untouched = list(tensors)
        handles, found = original(tensors)
        tensors[:] = untouched
        return handles, bytes(_save._DEVICE if kind == _save._PLAIN else kind for kind in found)

    monkeypatch.setattr(_save, "handles_and_kinds", kinds)
    yield {"per_thread_copy_ahead": request.param}


@pytest.mark.parametrize("checksum", [True, False])
def test_saving_through_host_buffers(tmp_path: Path, _all_on_a_device: dict[str, Any], checksum: bool) -> None:
    tiny = _all_on_a_device["per_thread_copy_ahead"] <= 1000
    saved = {key: t for key, t in everything().items() if not tiny or t.nbytes < 30_000}
    made = save(saved, tmp_path, checksum=checksum, **_all_on_a_device)
    assert made.stats.tensor_bytes == sum(tensor.nbytes for tensor in saved.values())
    for reader in ("ring", "stock"):
        loaded = {key: poisoned(tensor) for key, tensor in saved.items()}
        load(loaded, tmp_path, reader)
        assert_same_bits(loaded, saved)


def test_the_same_file_with_and_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    saved = {key: tensor for key, tensor in everything().items() if not tensor.requires_grad}
    save(saved, tmp_path / "plain")
    original = _save.handles_and_kinds

    def kinds(tensors: list[Tensor]) -> tuple[_C.Tensors, bytes]:
        handles, found = original(tensors)
        return handles, bytes(max(kind, _save._DEVICE) for kind in found)

    monkeypatch.setattr(_save, "handles_and_kinds", kinds)
    save(saved, tmp_path / "device", per_thread_copy_ahead=50_000)
    (plain,), (device,) = (list((tmp_path / name).glob("*.distcp")) for name in ("plain", "device"))
    assert plain.read_bytes() == device.read_bytes()
    for key, info in stored(tmp_path / "plain").items():
        assert info.__dict__["ring"] == stored(tmp_path / "device")[key].__dict__["ring"], key


def test_parts_must_come_in_order(tmp_path: Path) -> None:
    options = writer.IOOptions().for_core(True)
    for wrong in ([(4, 0), (4, 32)], [(4, 16)], [(8, 0), (5, 32)]):
        file = _C.FileWriter(str(tmp_path), "file", 0, options)
        with pytest.raises((ValueError, OSError)):
            for count, at in wrong:
                file.write_part([torch.ones(count)], (10,), at)
            file.finish()
        file.close()
        assert not (tmp_path / "file").exists()


# ---- the reader's host path ----


@pytest.mark.parametrize("window", [1 << 12, 1 << 16, 1 << 20])
@pytest.mark.parametrize("kind", ["ring", "stock"])
def test_loading_through_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, window: int) -> None:
    """Casts go through host copies, large ones in several pieces."""
    monkeypatch.setattr(_load, "_WINDOW_BYTES", window)
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
    monkeypatch.setattr(_load, "_WINDOW_BYTES", 5000)
    monkeypatch.setattr(_load, "_is_plain_memory", lambda tensor: False)
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


# ---- with a device ----


def _device() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


def _on_device() -> dict[str, Tensor]:
    """Everything, on the device, with its strides; without what a device does not take."""
    moved: dict[str, Tensor] = {}
    for key, tensor in everything().items():
        if key in of_all_views():
            continue
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        moved[key] = storage.to(_device()).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    z = random(torch.complex64, 12, 10).to(_device())
    moved |= {"conj": z.conj(), "neg": z.conj().imag, "conj.t": z.conj().t()[2:]}
    moved["large"] = torch.randn(9_000_001, device=_device())
    moved["large.t"] = torch.randn(3000, 2000, device=_device()).t()
    return moved


@accelerator
@pytest.mark.parametrize("copy_ahead", [1000, 1 << 20, 10_000_000])
def test_saving_from_a_device(tmp_path: Path, copy_ahead: int) -> None:
    saved = {k: t for k, t in _on_device().items() if copy_ahead > 1000 or t.nbytes < 100_000}
    save(saved, tmp_path, per_thread_copy_ahead=copy_ahead)
    for reader in ("ring", "stock"):
        loaded = {key: poisoned(tensor) for key, tensor in saved.items()}
        load(loaded, tmp_path, reader)
        assert_same_bits(loaded, {key: tensor.cpu() for key, tensor in saved.items()})


@accelerator
@pytest.mark.parametrize("kind", ["ring", "stock"])
def test_loading_onto_a_device(tmp_path: Path, kind: str) -> None:
    saved = {key: tensor.cpu() for key, tensor in _on_device().items()}
    save(saved, tmp_path, kind)
    loaded = {key: poisoned(t).to(_device()) for key, t in saved.items()}
    load(loaded, tmp_path)
    assert_same_bits({key: tensor.cpu() for key, tensor in loaded.items()}, saved)
    across = torch.zeros(3000, 2000, device=_device()).t()
    load({"large.t": across}, tmp_path)
    assert torch.equal(across.cpu(), saved["large.t"])


@accelerator
def test_what_is_computed_on_the_device_is_waited_for(tmp_path: Path) -> None:
    """The copy is ordered behind kernels that are still running on the current stream."""
    a = torch.randn(4000, 4000, device=_device()) / 64
    b = a
    for _ in range(20):
        b = b @ a
    save({"b": b}, tmp_path)
    loaded = {"b": torch.zeros(4000, 4000)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["b"], b.cpu())


@accelerator
def test_mixed_devices(tmp_path: Path) -> None:
    saved = {"cpu": torch.randn(1000), "device": torch.randn(1000, device=_device()), "object": [1, 2]}
    save(saved, tmp_path)
    loaded: dict[str, Any] = {"cpu": torch.zeros(1000, device=_device()), "device": torch.zeros(1000), "object": []}
    load(loaded, tmp_path)
    assert torch.equal(loaded["cpu"].cpu(), saved["cpu"]) and torch.equal(loaded["device"], saved["device"].cpu())  # type: ignore


def test_no_dtype_is_left_out() -> None:
    """Of those that are tested all but what this torch's shim may not know are plain to the core."""
    kinds = _C.Tensors([torch.empty(3, dtype=dtype) for dtype in DTYPES]).kinds()
    unknown = {str(dtype) for dtype, kind in zip(DTYPES, kinds, strict=True) if kind != 0}
    assert unknown <= {"torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2", "torch.complex32"}, unknown
