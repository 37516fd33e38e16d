"""The default random number generators of a process: torch's, Python's, and NumPy's where it is imported."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def python_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    return {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}


def set_python_state(state: dict[str, Any]) -> None:
    random.setstate((state["version"], tuple(state["numbers"].tolist()), state["gauss"]))


def numpy_state() -> dict[str, Any]:
    name, numbers, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
    return {
        "name": name,
        "numbers": torch.tensor(numbers.tolist()),
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def set_numpy_state(state: dict[str, Any]) -> None:
    numbers = state["numbers"].tolist()
    sys.modules["numpy"].random.set_state(
        (state["name"], numbers, state["position"], state["has_gauss"], state["gauss"])
    )


def accelerator() -> torch.device | None:
    """The current accelerator, if there is one that works."""
    found = torch.accelerator.current_accelerator()
    return found if found is not None and torch.accelerator.is_available() else None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on from where they are now."""
    device = accelerator()
    module = torch.get_device_module(device) if device is not None else None
    on_device = module.get_rng_state() if module is not None else None
    on_cpu, in_python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    in_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        random.setstate(in_python)
        if numpy is not None:
            numpy.random.set_state(in_numpy)
        if module is not None:
            module.set_rng_state(on_device)
