"""Saves from an accelerator and loads to one: every kind of tensor, late work, and bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _kinds import assert_same_bits, everything, load, poisoned, save
from device._support import (
    KIND,
    MiB,
    brought,
    devices,
    extra_bytes,
    is_pinned,
    keep_busy,
    moved,
    other_stream,
    pinned_bytes,
    set_late,
    spread,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter
from dcpring.move import device
from dcpring.move.device import DEFAULT_PIECE_BYTES
from dcpring.plan import replicas
from dcpring.torchside import accelerators

SAVE_PLANNERS = [DefaultSavePlanner, RingSavePlanner]
LOAD_PLANNERS = [DefaultLoadPlanner, RingLoadPlanner]


# ---- saving ----


@pytest.mark.parametrize("planner", SAVE_PLANNERS)
@pytest.mark.parametrize("piece_bytes", [4096, DEFAULT_PIECE_BYTES])
def test_every_kind_is_saved(tmp_path: Path, planner: Any, piece_bytes: int) -> None:
    saved = {key: tensor for key, tensor in everything().items() if tensor.nbytes < 200 * piece_bytes}
    writer = RingWriter(tmp_path, per_thread_copy_ahead=piece_bytes)
    dcp.save(spread(saved), storage_writer=writer, planner=planner())
    for reader in ("ring", "stock"):
        loaded = {key: poisoned(tensor) for key, tensor in saved.items()}
        load(loaded, tmp_path, reader)
        assert_same_bits(loaded, saved)


def test_a_file_is_the_same_wherever_its_tensors_lay(tmp_path: Path) -> None:
    saved = {key: tensor for key, tensor in everything().items() if tensor.nbytes < 100_000}
    save(saved, tmp_path / "host")
    save({key: moved(tensor) for key, tensor in saved.items()}, tmp_path / "device")
    (host,), (device,) = (list((tmp_path / name).glob("*.distcp")) for name in ("host", "device"))
    assert host.read_bytes() == device.read_bytes()


def test_conjugate_and_negative_views_are_not_their_bases(tmp_path: Path) -> None:
    z = torch.randn(300, dtype=torch.complex64)
    base = moved(z)
    save({"z": base, "conj": base.conj(), "imag": base.imag, "neg": base.conj().imag}, tmp_path)
    loaded = {"z": torch.zeros_like(z), "conj": torch.zeros_like(z), "imag": torch.zeros(300), "neg": torch.zeros(300)}
    load(loaded, tmp_path)
    assert_same_bits(loaded, {"z": z, "conj": z.conj(), "imag": z.imag, "neg": -z.imag})


def test_a_save_comes_behind_what_is_under_way_on_the_current_stream(tmp_path: Path) -> None:
    state = {str(device): torch.zeros(3 * MiB, device=device) for device in devices()}
    for tensor in state.values():
        set_late(tensor, 7.0)
    save(state, tmp_path)
    loaded = {key: torch.zeros(3 * MiB) for key in state}
    load(loaded, tmp_path)
    assert all(bool((tensor == 7).all()) for tensor in loaded.values())


def test_a_save_on_a_side_stream_comes_behind_its_work(tmp_path: Path) -> None:
    (device, *_) = devices()
    tensor = torch.zeros(MiB, device=device)
    with other_stream(device):
        set_late(tensor, 3.0)
        save({"x": tensor}, tmp_path)
    loaded = {"x": torch.zeros(MiB)}
    load(loaded, tmp_path)
    assert bool((loaded["x"] == 3).all())


@pytest.mark.parametrize("view", ["contiguous", "transposed", "expanded", "conj"])
def test_memory_of_a_save_is_bounded(tmp_path: Path, view: str) -> None:
    """Two pieces on the host; on the device one that is being copied, and one that its allocator still keeps back."""
    tensor = torch.randn(4096, 8192, device=devices()[0])  # 128 MiB
    views = {
        **{"contiguous": tensor, "transposed": tensor.t(), "expanded": tensor[:1].expand(2048, 8192)},
        "conj": torch.view_as_complex(tensor.view(4096, 4096, 2)).conj(),
    }
    accelerators.active.give_back_pinned()
    before = pinned_bytes()
    taken = extra_bytes(lambda: save({"x": views[view]}, tmp_path))
    assert taken <= (0 if view == "contiguous" else 4 * DEFAULT_PIECE_BYTES)
    assert pinned_bytes() - before <= 2 * DEFAULT_PIECE_BYTES


# ---- loading ----


@pytest.mark.parametrize("planner", LOAD_PLANNERS)
@pytest.mark.parametrize("kind", ["ring", "stock"])
@pytest.mark.parametrize("window", [1 << 13, 32 * MiB])
def test_every_kind_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Any, kind: str, window: int
) -> None:
    monkeypatch.setattr(device, "HOST_BYTES", window)
    saved = {key: tensor for key, tensor in everything().items() if tensor.nbytes < 50 * window}
    save(saved, tmp_path, kind)
    loaded = spread({key: poisoned(tensor) for key, tensor in saved.items()})
    dcp.load(loaded, storage_reader=RingReader(tmp_path), planner=planner())
    assert_same_bits(brought(loaded), saved)


def test_a_load_into_views_and_other_dtypes(tmp_path: Path) -> None:
    z = torch.randn(40, 30, dtype=torch.complex64)
    saved = {name: torch.randn(40, 30) for name in ("t", "columns", "cast", "cast.t")} | {"conj": z}
    save(saved, tmp_path)
    targets = {
        **{"t": torch.zeros(30, 40).t(), "columns": torch.zeros(40, 50)[:, 7:37], "conj": torch.zeros_like(z).conj()},
        **{"cast": torch.zeros(40, 30, dtype=torch.float64), "cast.t": torch.zeros(30, 40, dtype=torch.bfloat16).t()},
    }
    wanted = {key: tensor.to(targets[key].dtype) for key, tensor in saved.items()}
    loaded = spread(targets)
    load(loaded, tmp_path, casts="any")
    assert_same_bits(brought(loaded), wanted)


def test_a_load_comes_between_what_was_and_what_will_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several windows, behind work that changes the targets, and seen by what follows on the same stream."""
    monkeypatch.setattr(device, "HOST_BYTES", 2 * MiB)
    saved = {str(n): torch.full((MiB,), float(n)) for n in range(8)}
    save(saved, tmp_path)
    loaded = spread({key: torch.zeros(MiB) for key in saved})
    for tensor in loaded.values():
        set_late(tensor, -1.0)
    load(loaded, tmp_path)
    after = {key: tensor * 2 for key, tensor in loaded.items()}
    assert_same_bits(brought(after), {key: tensor * 2 for key, tensor in saved.items()})


def test_memory_of_a_load_is_bounded(tmp_path: Path) -> None:
    saved = {"x": torch.randn(4096, 8192), "y": torch.randn(4096, 2048)}  # 160 MiB
    save(saved, tmp_path)
    loaded = {key: torch.zeros(tensor.shape[::-1], device=devices()[0]).t() for key, tensor in saved.items()}
    accelerators.active.give_back_pinned()
    before = pinned_bytes()
    assert extra_bytes(lambda: load(loaded, tmp_path)) <= 64 * MiB
    assert pinned_bytes() - before <= 32 * MiB
    assert_same_bits(brought(loaded), saved)


def test_many_small_tensors_cross_together(tmp_path: Path) -> None:
    """Behind work that changes them, and seen by what follows; with a piece's memory on the device for them."""
    saved = {str(n): torch.full((1 + n % 1500,), float(n)) for n in range(4000)}
    there = {key: torch.zeros_like(tensor, device=devices()[0]) for key, tensor in saved.items()}
    keep_busy(devices()[0])
    for tensor, values in zip(there.values(), saved.values(), strict=True):
        tensor.fill_(float(values[0]))
    assert extra_bytes(lambda: save(there, tmp_path)) <= DEFAULT_PIECE_BYTES
    set_late(there["7"], -1.0)
    assert extra_bytes(lambda: load(there, tmp_path)) <= DEFAULT_PIECE_BYTES
    assert_same_bits(brought({key: tensor * 2 for key, tensor in there.items()}), {k: t * 2 for k, t in saved.items()})


# ---- fingerprints of replicas ----


def test_fingerprints_are_those_of_the_cpu() -> None:
    tensors = [t.detach() for t in everything().values() if t.nbytes <= replicas.MAX_BYTES]
    there = [moved(tensor, index) for index, tensor in enumerate(tensors)]
    late = torch.zeros(50, device=devices()[-1])
    set_late(late, 1.0)
    assert replicas.fingerprints([*there, late]) == replicas.fingerprints([*tensors, torch.ones(50)])


def test_the_accelerator_is_what_it_is_said_to_be() -> None:
    """What the other tests take for granted: these tensors are there, and pinned memory is pinned."""
    assert all(tensor.device.type == KIND for tensor in spread({"x": torch.ones(2), "y": torch.ones(2)}).values())
    assert KIND == "cpu" or is_pinned(accelerators.active.pinned(100))
