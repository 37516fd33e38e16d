"""What is asked of torch about accelerators: streams, events, pinned memory. It does no copies.

All of dcpring asks ``active``, so that tests can put a simulated accelerator in its place (tests/_twin.py).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


_PORTABLE = 1
"""The runtime's ``cudaHostRegisterPortable``."""


def _check(result: object) -> None:
    """Raises what the runtime has returned, if that is an error."""
    code = int(result)  # type: ignore[call-overload]
    if code:
        raise RuntimeError(f"the accelerator's runtime has returned error {code}")


class Accelerators:
    """Those of this process, as torch has them."""

    def __init__(self) -> None:
        self._copy_streams: dict[torch.device, torch.Stream] = {}
        self._pinned_by: dict[int, int] = {}

    def copy_stream(self, device: torch.device) -> torch.Stream:
        """The stream of the device that copies from it go on: always the same, as torch has 32, handed out in turn.

        Each call gives an object of its own: one can be entered by one thread at a time.
        """
        kept = self._copy_streams.get(device)
        if kept is None:
            kept = self._copy_streams.setdefault(device, self.stream(device))
        return torch.Stream(stream_id=kept.stream_id, device_index=kept.device_index, device_type=kept.device_type)

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """The device is this thread's current one, which is 0 in a thread that has set none.

        Leaving a stream of another device, or pinning memory, makes a context on the current one.
        """
        return torch.accelerator.device_index(device.index)

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

    def can_pin(self) -> bool:
        """Whether memory that is there can be pinned, as torch itself does it for CUDA and ROCm."""
        return torch.cuda.is_available()

    def pin(self, address: int, size: int) -> None:
        """Pins memory that is there, for all of the process's devices. It has to be unpinned before it is unmapped.

        Raises:
            RuntimeError: it cannot be.
        """
        _check(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        self._pinned_by[address] = torch.cuda.current_device()

    def unpin(self, address: int) -> None:
        """Of the memory that was pinned at this address."""
        with torch.cuda.device(self._pinned_by.pop(address)):
            _check(torch.cuda.cudart().cudaHostUnregister(address))

    def give_back_pinned(self) -> None:
        """Gives the pinned memory that torch keeps, and nobody uses, back to the system, where this torch can."""
        empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            with contextlib.suppress(RuntimeError):  # of accelerators for which torch keeps none
                empty()


active = Accelerators()
