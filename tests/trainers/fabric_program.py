"""Lightning's Fabric on CPUs: one rank that trains a small model in its own loop and saves it by Fabric's calls."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from _sharded import ON_CPU, by_fsdp1, by_fsdp2, make_layers
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

import dcpring
from dcpring.integrations.lightning import RingCheckpointIO


class FSDP1(FSDPStrategy):
    """Lightning refuses the class itself on CPUs."""


def wrapped(layers: torch.nn.Sequential) -> torch.nn.Module:
    """The strategy leaves alone what is wrapped."""
    return FullyShardedDataParallel(by_fsdp1(layers), **ON_CPU)


def shard(layers: torch.nn.Sequential, mesh: Any) -> torch.nn.Module:
    return by_fsdp2(layers, mesh["data_parallel"])


def strategy_of(name: str, world: int) -> Any:
    if name == "fsdp1":
        return FSDP1(state_dict_type="sharded")
    if name == "fsdp2":
        return ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    return DDPStrategy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=["stock", "install", "io"], default="stock")
    parser.add_argument("--strategy", choices=["ddp", "fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--resume", type=Path, default=None)
    options = parser.parse_args()
    if options.way == "install":
        dcpring.install()
    world = int(os.environ["WORLD_SIZE"])
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=world,
        strategy=strategy_of(options.strategy, world),
        plugins=[RingCheckpointIO()] if options.way == "io" else None,
    )
    fabric.launch()
    torch.manual_seed(0)
    layers = make_layers()
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
