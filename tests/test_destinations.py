"""What is loaded into: any strides, other dtypes, wrong shapes, and tensors whose memory is not their value."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _kinds import failure, io_of, load, random, raw, save
from torch import Tensor

SHAPE = (6, 4, 10, 8)
Maker = Callable[[], tuple[Tensor, Tensor]]


def _whole(shape: tuple[int, ...], view: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Maker:
    def make() -> tuple[Tensor, Tensor]:
        base = torch.full(shape, 99, dtype=dtype)
        return base, view(base)

    return make


STRIDED: dict[str, Maker] = {
    "contiguous": _whole(SHAPE, lambda t: t),
    "transposed": _whole((8, 10, 4, 6), lambda t: t.permute(3, 2, 1, 0)),
    "permuted": _whole((4, 6, 8, 10), lambda t: t.permute(1, 0, 3, 2)),
    "channels_last": _whole((6, 10, 8, 4), lambda t: t.permute(0, 3, 1, 2)),
    "rows of a larger one": _whole((9, 4, 10, 8), lambda t: t[2:8]),
    "columns of a larger one": _whole((6, 4, 10, 13), lambda t: t[..., 3:11]),
    "every other": _whole((12, 4, 20, 16), lambda t: t[::2, :, 1::2, ::2]),
    "inner box": _whole((8, 6, 12, 10), lambda t: t[1:7, 1:5, 1:11, 1:9]),
    "transposed inner box": _whole((10, 12, 6, 8), lambda t: t[1:9, 1:11, 1:5, 1:7].permute(3, 2, 1, 0)),
}


def _outside(base: Tensor, view: Tensor) -> Tensor:
    """Which elements of the base are not in the view."""
    mask = torch.ones_like(base, dtype=torch.bool)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return mask


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_strided_destinations(tmp_path: Path, writer: str, engine: str) -> None:
    saved = {key: random(torch.float32, *SHAPE) for key in STRIDED}
    save(saved, tmp_path, writer, **io_of(writer, {"engine": engine}))
    made = {key: make() for key, make in STRIDED.items()}
    load({key: view for key, (_, view) in made.items()}, tmp_path, engine=engine)
    for key, (base, view) in made.items():
        assert raw(view) == raw(saved[key]), key
        assert (base[_outside(base, view)] == 99).all(), f"{key}: memory beside the destination was written to"


@pytest.mark.parametrize("block", [1 << 20, 4 << 20])
def test_large_strided_destinations(tmp_path: Path, block: int) -> None:
    """Rows and elements that straddle blocks."""
    saved = {
        "odd rows": random(torch.float64, 1003, 999),
        "complex": random(torch.complex128, 501, 333),
        "bytes": random(torch.uint8, 1999, 3001),
    }
    save(saved, tmp_path, block_size_bytes=block)
    bases = {key: torch.full((t.shape[1] + 7, t.shape[0] + 5), 99, dtype=t.dtype) for key, t in saved.items()}
    views = {key: base[3:-4, 2:-3].t() for key, base in bases.items()}
    load(dict(views), tmp_path, block_size_bytes=block)
    for key, base in bases.items():
        assert raw(views[key]) == raw(saved[key]), key
        assert (base[_outside(base, views[key])] == 99).all(), key


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float16),
    (torch.float32, torch.complex64),
    (torch.int32, torch.int64),
    (torch.int64, torch.int8),
    (torch.int64, torch.float32),
    (torch.bool, torch.uint8),
    (torch.float32, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_other_dtypes_are_cast_as_stock_does_and_logged(
    tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {f"k{i}": (torch.randn(40, 30) * 50).to(source) for i, (source, _) in enumerate(CASTS)}
    save(saved, tmp_path, writer)
    ours = {f"k{i}": torch.zeros(30, 40, dtype=target).t() for i, (_, target) in enumerate(CASTS)}
    stock = {key: torch.zeros_like(tensor) for key, tensor in ours.items()}
    with caplog.at_level(logging.INFO, "dcpring"):
        load(ours, tmp_path, casts="any")
    load(stock, tmp_path, "stock")
    for i, (source, target) in enumerate(CASTS):
        assert raw(ours[f"k{i}"]) == raw(stock[f"k{i}"]), (source, target)
        assert any(f"'k{i}'" in m and str(source) in m and str(target) in m for m in caplog.messages)


@pytest.mark.parametrize("writer", ["ring", "stock"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.uint8),
        (torch.complex64, torch.float32),
        (torch.int32, torch.bool),
        (torch.float16, torch.bool),
    ],
)
def test_lossy_casts_are_errors(tmp_path: Path, writer: str, source: torch.dtype, target: torch.dtype) -> None:
    save({"good": torch.ones(3), "layer.bad": torch.ones(4, dtype=source)}, tmp_path, writer)
    loaded = {"good": torch.zeros(3), "layer.bad": torch.zeros(4, dtype=target)}
    text = failure(lambda: load(loaded, tmp_path))
    assert "CheckpointError" in text and "'layer.bad'" in text and str(source) in text and str(target) in text
    assert not loaded["good"].any() and not loaded["layer.bad"].any(), "checks come before the first byte"


@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_wrong_shapes_are_errors(tmp_path: Path, writer: str) -> None:
    save({"good": torch.ones(3), "bad": torch.ones(4, 5)}, tmp_path, writer)
    for shape in ((5, 4), (4,), (4, 6), (20,), (4, 5, 1), ()):
        loaded = {"good": torch.zeros(3), "bad": torch.zeros(shape)}
        text = failure(lambda loaded=loaded: load(loaded, tmp_path))  # type: ignore[misc]
        assert "bad" in text and "4, 5" in text, (shape, text)
        assert not loaded["good"].any() and not loaded["bad"].any()


@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_conjugate_and_negative_destinations(tmp_path: Path, writer: str) -> None:
    saved = {"conj": torch.randn(5, 7, dtype=torch.complex64), "neg": torch.randn(5, 7), "both": torch.randn(70, 50)}
    save(saved, tmp_path, writer)
    memory = {key: torch.zeros(tensor.shape, dtype=torch.complex64) for key, tensor in saved.items()}
    loaded = {
        "conj": memory["conj"].conj(),
        "neg": memory["neg"].conj().imag,
        "both": torch.zeros(50, 70, dtype=torch.complex64).conj().imag.t(),
    }
    assert loaded["conj"].is_conj() and loaded["neg"].is_neg() and loaded["both"].is_neg()
    load(loaded, tmp_path)
    for key, tensor in saved.items():
        assert torch.equal(loaded[key], tensor), key
    assert torch.equal(memory["conj"], saved["conj"].conj())
    assert torch.equal(memory["neg"].imag, -saved["neg"]) and not memory["neg"].real.any()


def _overlapping() -> dict[str, Tensor]:
    return {
        "expanded": torch.zeros(1, 6).expand(4, 6),
        "windows": torch.zeros(12).unfold(0, 6, 2)[:4],
        "as_strided": torch.as_strided(torch.zeros(30), (4, 6), (2, 3)),
    }


@pytest.mark.parametrize("key", sorted(_overlapping()))
def test_overlapping_destinations(tmp_path: Path, key: str) -> None:
    """Where elements share memory there is no right result: an error, as with stock, or never a wrong order."""
    saved = torch.randn(4, 6)
    save({"x": saved}, tmp_path)
    ours, stock = {"x": _overlapping()[key]}, {"x": _overlapping()[key]}
    text = failure(lambda: load(ours, tmp_path))
    reference = failure(lambda: load(stock, tmp_path, "stock"))
    assert bool(text) == bool(reference)
    if key == "expanded":
        assert "single memory location" in text
    if not text:
        assert torch.equal(ours["x"], stock["x"])


def test_expanded_along_a_dimension_of_one_is_plain(tmp_path: Path) -> None:
    saved = torch.randn(1, 6)
    save({"x": saved}, tmp_path)
    loaded = {"x": torch.zeros(6).expand(1, 6)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["x"], saved)


def test_two_keys_of_one_tensor(tmp_path: Path) -> None:
    """Tied weights: both keys are saved, and both are read into the same memory."""
    tied = torch.randn(300, 500)
    save({"a": tied, "b": tied}, tmp_path)
    memory = torch.zeros(300, 500)
    load({"a": memory, "b": memory}, tmp_path)
    assert torch.equal(memory, tied)


def test_autograd_sees_the_change(tmp_path: Path) -> None:
    saved = {"straight": torch.randn(3), "cast": torch.randn(3)}
    save(saved, tmp_path)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    loaded["cast"] = torch.zeros(3, dtype=torch.float64)
    weight = torch.ones(3, requires_grad=True)
    product = weight * loaded["straight"]
    versions = {key: tensor._version for key, tensor in loaded.items()}
    load(loaded, tmp_path)
    for key, tensor in loaded.items():
        assert tensor._version > versions[key], key
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_destinations_that_require_grad(tmp_path: Path) -> None:
    saved = {"leaf": torch.randn(3), "parameter": torch.randn(4, 4), "inference": torch.randn(2)}
    save(saved, tmp_path)
    with torch.inference_mode():
        inference = torch.zeros(2)
    loaded: dict[str, Any] = {
        "leaf": torch.zeros(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(4, 4)),
        "inference": inference,
    }
    load(loaded, tmp_path)
    for key, tensor in saved.items():
        assert torch.equal(loaded[key], tensor), key
    assert loaded["leaf"].requires_grad and loaded["leaf"].is_leaf and loaded["leaf"].grad_fn is None


@pytest.mark.parametrize("writer", ["ring", "stock"])
def test_meta_destinations_are_left_alone_as_stock_does(tmp_path: Path, writer: str) -> None:
    save({"real": torch.ones(3), "meta": torch.ones(4)}, tmp_path, writer)
    results = []
    for reader in ("ring", "stock"):
        loaded = {"real": torch.zeros(3), "meta": torch.zeros(4, device="meta")}
        results.append(bool(failure(lambda loaded=loaded, reader=reader: load(loaded, tmp_path, reader))))  # type: ignore[misc]
        assert loaded["meta"].is_meta
        if not results[-1]:
            assert torch.equal(loaded["real"], torch.ones(3))
    assert results[0] == results[1]


def test_missing_keys_are_named(tmp_path: Path) -> None:
    save({"there": torch.ones(3)}, tmp_path)
    loaded = {"there": torch.zeros(3), "absent.key": torch.zeros(3)}
    assert "absent.key" in failure(lambda: load(loaded, tmp_path))
    assert not loaded["there"].any()
