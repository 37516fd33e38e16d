"""transformers' Trainer with FSDP2 on CPUs: one rank that trains a small Llama, and resumes where it is told to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from accelerate_program import take_cpus_for_devices
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 128
        return {"input_ids": tokens, "labels": tokens}


class MakesFolder(TrainerCallback):
    """As the page of accelerate has it: else ranks find different folders of the best step, or none."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        os.makedirs(f"{args.output_dir}/checkpoint-{state.global_step}", exist_ok=True)


def sharded() -> dict[str, Any]:
    """What a Trainer of a Llama takes for FSDP2 on CPUs; made anew, as TrainingArguments changes what it is given."""
    return {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--best", action="store_true", help="ends with the best model that there was")
    options = parser.parse_args()
    if options.install:
        import dcpring

        dcpring.install()
    take_cpus_for_devices()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True} if options.best else {}
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=4,
        save_steps=2,
        save_total_limit=3,
        **sharded(),
        **best,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[MakesFolder()] if options.best else None,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if options.best:
        rank = torch.distributed.get_rank()
        (options.folder / f"best-of-{rank}").write_text(trainer.state.best_model_checkpoint)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
