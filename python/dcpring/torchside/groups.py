"""Private names of process groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dcpring.torchside.versions import function

default_store: Callable[[], dist.Store] = function("torch.distributed.distributed_c10d", "_get_default_store")
"""The key-value store of the default process group."""


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must lie for a group, None for all ranks, to send them: the CPU where it can."""
    devices = [torch.device(device.type) for device in (group or dist.group.WORLD)._device_types]  # type: ignore[union-attr]
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]
