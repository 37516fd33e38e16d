"""What is asked of torch about accelerators: streams, events, pinned memory. It does no copies.

All of dcpring asks ``active``, so that tests can put a simulated accelerator in its place (tests/_twin.py).
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


class Accelerators:
    """Those of this process, as torch has them."""

    def stream(self, device: torch.device) -> torch.Stream:
        """A stream of the device, other than the one that is current there."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream of the device on which this thread's work goes, whether or not the device is the current one."""
        return torch.accelerator.current_stream(device)

    def event(self, device: torch.device) -> torch.Event:
        return torch.Event(device)

    def synchronize(self, device: torch.device) -> None:
        """Waits for all work that any thread has given to the device, on any of its streams."""
        torch.accelerator.synchronize(device)

    def pinned(self, size: int) -> Tensor:
        """Bytes of host memory that the accelerators can copy to and from by themselves.

        torch takes the next power of two, and keeps what is freed for the next who asks for pinned memory.
        """
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back_pinned(self) -> None:
        """Gives the pinned memory that torch keeps, and nobody uses, back to the system, where this torch can."""
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            with contextlib.suppress(RuntimeError):  # of accelerators for which torch keeps none
                empty()


active = Accelerators()
