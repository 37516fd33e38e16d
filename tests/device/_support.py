"""The accelerator that these tests run on, work on it that is late, and what its memory was used for.

Where torch finds none that is the simulated one (tests/_twin.py). DCPRING_TEST_DEVICE names another one:
"privateuseone" is the twin, and "cpu" the CPU, which only shows that the tests themselves work.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

TWIN = "privateuseone"

_twin: Any = importlib.import_module("_twin") if hasattr(torch._C, "_acc") else None
"""Devices are made in Python since torch 2.10."""


def _kind() -> str:
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return TWIN if _twin is not None else ""


KIND = os.environ.get("DCPRING_TEST_DEVICE") or _kind()
"""By torch's name; "" where there is none."""

IS_TWIN = KIND == TWIN

MiB = 1 << 20


def devices() -> list[torch.device]:
    if IS_TWIN:
        return [torch.device(KIND, index) for index in range(2)]
    return [torch.device(KIND, index) for index in range(torch.accelerator.device_count() if KIND != "cpu" else 1)]


def moved(tensor: Tensor, index: int = 0) -> Tensor:
    """The same on a device: its strides, offset and the memory beside it too."""
    if IS_TWIN:
        there: Tensor = _twin.twin_in_use().tensor(tensor, index % 2)
        return there
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    there = memory.to(devices()[index % len(devices())], copy=True).untyped_storage()
    look = (tensor.storage_offset(), tensor.size(), tensor.stride())
    made = torch.empty(0, dtype=tensor.dtype, device=there.device).set_(there, *look)  # type: ignore[call-overload]
    made = torch._conj(made) if tensor.is_conj() else made
    made = torch._neg_view(made) if tensor.is_neg() else made
    return made.requires_grad_(tensor.requires_grad)


def spread(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Moved to all devices in turn."""
    return {key: moved(tensor, index) for index, (key, tensor) in enumerate(tensors.items())}


def brought(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().cpu() for key, tensor in tensors.items()}


# ---- what is late ----


def keep_busy(device: torch.device) -> None:
    """Gives the current stream of the device some tenths of a second of work. All of a twin's work is late."""
    if IS_TWIN:
        return
    if device.type != "cpu":
        matrix = torch.randn(4096, 4096, device=device)
        for _ in range(100):
            matrix = torch.tanh(matrix @ matrix)


def set_late(tensor: Tensor, value: float) -> None:
    """Fills a tensor when the work before it is done, which it is not yet."""
    if IS_TWIN:
        _twin.twin_in_use().write(tensor, value)
        return
    keep_busy(tensor.device)
    with torch.no_grad():
        tensor.fill_(value)


@contextlib.contextmanager
def other_stream(device: torch.device) -> Iterator[None]:
    """A stream of the device that nobody waits for is its current one."""
    if IS_TWIN:
        with _twin.twin_in_use().stream(device):
            yield
        return
    with torch.Stream(device) if device.type != "cpu" else contextlib.nullcontext():
        yield


# ---- memory ----


def extra_bytes(work: Callable[[], Any]) -> int:
    """What tensors on the first device take at most while the work is done, beside those that are there."""
    if KIND == "cpu":
        work()
        return 0
    if IS_TWIN:
        return int(_twin.twin_in_use().extra_bytes(work))
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    work()
    return int(torch.accelerator.max_memory_allocated() - before)


def pinned_bytes() -> int:
    """Of host memory that torch holds, in use or kept; known of CUDA and ROCm only, and of what a twin has not pinned
    where it was."""
    if IS_TWIN:
        twin = _twin.twin_in_use()
        return int(twin.pinned_bytes - twin.pinned_in_place)
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)) if KIND == "cuda" else 0


def is_pinned(tensor: Tensor) -> bool:
    return bool(_twin.twin_in_use().is_pinned(tensor)) if IS_TWIN else KIND == "cpu" or tensor.is_pinned()
