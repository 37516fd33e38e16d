"""Lightning's Trainer on CPUs: one rank that trains a small model and saves it in one of the ways that there are."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from _sharded import by_fsdp1, by_fsdp2, make_layers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import dcpring
from dcpring import PerRank
from dcpring.data import ElasticLoader, ElasticSampler
from dcpring.integrations.lightning import RingCheckpoint, RingCheckpointIO


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1, 1, 33)  # one like the other: Lightning begins an epoch's data again at a resume


class Numbered(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((33,), float(index))


class FSDP1(FSDPStrategy):
    """Lightning refuses the class itself on CPUs."""


class Model(lightning.LightningModule):
    def __init__(self, die_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = make_layers()
        self.die_at = die_at
        self.given: dict[int, list[int]] = {}
        self.validated: list[int] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            by_fsdp2(self.layers, self.device_mesh["data_parallel"])
        elif isinstance(self.trainer.strategy, FSDP1):
            self.layers = by_fsdp1(self.layers)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.die_at and self.trainer.global_step == self.die_at:
            raise RuntimeError("as asked for")
        self.given.setdefault(self.current_epoch, []).extend(batch[:, 0].int().tolist())
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.validated.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=["stock", "install", "io", "async io", "callback"], default="stock")
    parser.add_argument("--strategy", choices=["ddp", "fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=0, help="of numbered samples, by an ElasticLoader")
    parser.add_argument("--per-rank", choices=["lightning", "own"], help="whose sampler a loader with a state has")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--resume", default=None)
    options = parser.parse_args()
    if options.way == "install":
        dcpring.install()
    plugins: list[Any] = []
    if "io" in options.way.split():
        plugins = [RingCheckpointIO()]
    if options.way == "async io":
        plugins = [AsyncCheckpointIO(RingCheckpointIO())]
    loader: Any = DataLoader(Samples(), batch_size=2)
    validation, components = None, {}
    if options.epochs:  # before there is a process group
        loader = ElasticLoader(DataLoader(Numbered(), batch_size=2, sampler=ElasticSampler(48)))
        validation, components = DataLoader(Samples(), batch_size=48), {"data": loader}
    world = int(os.environ["WORLD_SIZE"])
    if options.per_rank:
        own = StatefulDistributedSampler(Numbered(), world, int(os.environ["RANK"]))
        loader = StatefulDataLoader(
            Numbered(), 2, options.per_rank == "lightning", own if options.per_rank == "own" else None
        )
        components = {"data": PerRank(loader)}
    callback: Any = ModelCheckpoint(
        options.folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True
    )
    if options.way == "callback":
        callback = RingCheckpoint(options.folder, every_n_steps=3, components=components)
    strategies: dict[str, Any] = {
        "ddp": "ddp",
        "fsdp1": FSDP1(state_dict_type="sharded"),
        "fsdp2": ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategies[options.strategy],
        plugins=plugins,
        callbacks=[callback],
        max_steps=-1 if options.epochs else options.steps,
        max_epochs=options.epochs or None,
        num_sanity_val_steps=0,
        use_distributed_sampler=options.per_rank != "own",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.folder,
    )
    model = Model(options.die_at)
    with contextlib.suppress(RuntimeError) if options.die_at else contextlib.nullcontext():
        trainer.fit(model, loader, validation, ckpt_path=options.resume, weights_only=False)
    if options.epochs or options.per_rank:
        seen = {"given": model.given, "validated": model.validated}
        (options.folder / f"seen-by-{trainer.global_rank}-of-{world}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
