"""torchtitan's own trainer on CPUs: one rank of a small Llama 3, with one checkpoint manager or the other.

What the trainer takes for granted of an accelerator (memory counters, a device's number) is given to ``torch.cpu``
here; everything from the configuration to the checkpoints is torchtitan's.
"""

from __future__ import annotations

import argparse
import os
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._utils
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset


def make_cpus_pass_for_devices() -> None:
    """What torchtitan asks of ``torch.cuda``, answered by ``torch.cpu``."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.device_count = lambda: 64
    cpu.set_device = lambda device: None
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None


make_cpus_pass_for_devices()

from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as titan_distributed  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from dcpring.integrations.torchtitan import ElasticDataLoader, RingCheckpointManager  # noqa: E402

titan_distributed.set_pg_timeouts = lambda timeout, parallel_dims: None  # gloo cannot change it later


class NoTokens(BaseTokenizer):
    """The samples are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Numbered(Dataset[Any]):
    """Sample i is the tokens i, i + 1, ...; which samples were used is written down."""

    def __init__(self, size: int, seq_len: int, log: Path | None) -> None:
        self.size, self.seq_len, self.log = size, seq_len, log

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if self.log:
            with self.log.open("a") as file:
                print(index, file=file)
        tokens = (torch.arange(self.seq_len + 1) + index) % 2048
        return {"input": tokens[:-1], "positions": torch.arange(self.seq_len)}, tokens[1:]


class Loader(ElasticDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(ElasticDataLoader.Config):
        size: int = 64
        log: str = ""

    def samples(self, config: Any, *, seq_len: int, **_: Any) -> Dataset[Any]:
        return Numbered(config.size, seq_len, Path(config.log) if config.log else None)


def take_microbatches(schedule: Any) -> None:
    """Has a schedule's ``step`` take a batch in parts, as torchtitan gives it, and torch from 2.14 on takes it."""
    run = schedule._step_microbatches

    def step(*, arg_mbs: Any, kwarg_mbs: list[Any], target_mbs: Any, **rest: Any) -> Any:
        schedule._split_inputs = lambda args, kwargs: (arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs)
        schedule._step_microbatches = lambda args, kwargs, target, *more, **given: run(
            args, kwargs, target_mbs, *more, **given
        )
        return type(schedule).step(schedule, **rest)

    schedule.step = step


def training(options: argparse.Namespace) -> Trainer.Config:
    manager = RingCheckpointManager if options.manager == "ring" else CheckpointManager
    spec = model_registry("debugmodel")
    spec = replace(spec, model=replace(spec.model, layers=spec.model.layers[:2]))
    for layer in spec.model.layers:  # torchtitan's own choices of attention need a compiler or an accelerator
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        dump_folder=options.folder,
        model_spec=spec,
        tokenizer=NoTokens.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=options.batch, seq_len=32, steps=options.steps, disable_cuda_graphs=True
        ),
        dataloader=Loader.Config(size=options.samples, log=options.used),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=options.replicate,
            tensor_parallel_degree=options.tensor_parallel,
            pipeline_parallel_degree=options.pipeline_parallel,
            pipeline_parallel_schedule=options.schedule,
            spmd_backend="partial_dtensor",  # the one for torch 2.13
        ),
        checkpoint=manager.Config(
            enable=True,
            interval=options.interval,
            async_mode=options.async_mode,
            keep_latest_k=0,
            last_save_model_only=options.last_in_hf,
            last_save_in_hf=options.last_in_hf,
            create_seed_checkpoint=options.seed_checkpoint,
        ),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--manager", choices=["ring", "stock"], default="ring")
    parser.add_argument("--async-mode", default="disabled")
    parser.add_argument("--used", default="")
    for name, default in (("steps", 4), ("interval", 2), ("batch", 2), ("samples", 64)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--last-in-hf", action="store_true")
    parser.add_argument("--seed-checkpoint", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    init_logger()
    torch.manual_seed(0)
    trainer = training(options).build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    if options.pipeline_parallel > 1:
        take_microbatches(trainer.pp_schedule)
    if options.async_mode == "async_with_pinned_mem":
        trainer.checkpointer.stager = DefaultStager(StagingOptions(False, False, True, False))  # nothing can be pinned
    if options.seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
