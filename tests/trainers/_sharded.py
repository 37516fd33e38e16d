"""What Lightning's programs shard: a small stack of layers, by FSDP1 or FSDP2, on CPUs."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

ON_CPU = {"device_id": torch.device("cpu"), "use_orig_params": True}
"""FSDP1 takes CPUs where it is told so, which Lightning's strategies do not do."""


def make_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(33, 33) for _ in range(3)])


def by_fsdp1(layers: torch.nn.Sequential) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[FullyShardedDataParallel(layer, **ON_CPU) for layer in layers])


def by_fsdp2(layers: torch.nn.Sequential, mesh: DeviceMesh) -> torch.nn.Module:
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)
