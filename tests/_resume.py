"""What the tests of Checkpointer share: a model that is awkward to shard, the ways to shard it, and what is in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _versions import clear_sharding_cache
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dcpring import CheckpointError
from dcpring.resume.trees import leaves

WORLDS = {"single": 1, "ddp": 2, "fsdp": 4, "fsdp-3": 3, "hsdp": 4, "tp-fsdp": 4, "fsdp1": 2}
"""The ways to spread a model, and the ranks that each takes."""


class Net(nn.Module):
    """Rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.embedding(tokens)))) * self.scale


def spread(layout: str, seed: int) -> nn.Module:
    """A Net with the weights that ``seed`` makes, over all ranks."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    clear_sharding_cache()
    torch.manual_seed(seed)
    model = Net()
    if layout == "single":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if layout == "tp-fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        tokens = torch.arange(5).roll(step)
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def whole(state: Any) -> dict[str, Any]:
    """All leaves of a state, each as a whole. Collective."""
    return {path: _whole(value) for path, value in leaves(state)}


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a model and its optimizer hold, by the names of the bare model. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        options = StateDictOptions(full_state_dict=True)
        return whole(
            {
                "model": get_model_state_dict(model, options=options),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=options)["state"],
            }
        )
    return whole(
        {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer)["state"],
        }
    )


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the CheckpointError that a call raises; the test fails if it raises none."""
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no error was raised")
