"""Lightning's Fabric on CPUs: one rank that trains a small model in its own loop and saves it by Fabric's calls."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import dcpring
from dcpring.integrations.lightning import RingCheckpointIO


class FSDP1(FSDPStrategy):
    """Lightning refuses the class itself on CPUs."""


def wrapped(model: torch.nn.Sequential) -> torch.nn.Module:
    """FSDP1 takes CPUs where it is told so; the strategy does not say it, and leaves alone what is wrapped."""
    how = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(
        torch.nn.Sequential(*[FullyShardedDataParallel(layer, **how) for layer in model]), **how
    )


def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def strategy_of(name: str) -> Any:
    if name == "fsdp1":
        return FSDP1(state_dict_type="sharded")
    return ModelParallelStrategy(shard) if name == "fsdp2" else DDPStrategy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=["stock", "install", "io"], default="stock")
    parser.add_argument("--strategy", choices=["ddp", "fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--resume", type=Path, default=None)
    options = parser.parse_args()
    if options.way == "install":
        dcpring.install()
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy_of(options.strategy),
        plugins=[RingCheckpointIO()] if options.way == "io" else None,
    )
    fabric.launch()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(33, 33) for _ in range(3)])
    model = fabric.setup_module(wrapped(layers) if options.strategy == "fsdp1" else layers)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if options.resume is not None:
        fabric.load(options.resume, state)
    while state["step"] < 6:
        fabric.backward(model(torch.linspace(-1, 1, 33)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] in (3, 6):
            fabric.save(options.folder / f"step-{state['step']}", state)


if __name__ == "__main__":
    main()
