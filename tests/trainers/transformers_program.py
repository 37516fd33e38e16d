"""transformers' Trainer with FSDP2 on CPUs: one rank that trains a small Llama, and resumes where it is told to."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate_program import take_cpus_for_devices
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint


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


class Counts(TrainerCallback, ExportableState):
    """A callback with a state: of steps, wherever they were taken."""

    def __init__(self) -> None:
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


class Dies(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("as asked for")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--resume", default=None, help="a folder; newest: the last that is whole, as the page has it")
    parser.add_argument("--best", action="store_true", help="ends with the best model that there was")
    parser.add_argument("--ring", choices=["fsdp", "ddp"], help="saves by RingCheckpoint")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--die-at", type=int, default=0)
    options = parser.parse_args()
    if options.install:
        import dcpring

        dcpring.install()
    if options.ring != "ddp":
        take_cpus_for_devices()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        attention_dropout=0.1,
    )  # fmt: skip
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True} if options.best else {}
    kind = sharded()
    if options.ring:
        kind |= {"save_strategy": "no", "restore_callback_states_from_checkpoint": True, "logging_steps": 1}
    if options.ring == "ddp":
        kind |= {"fsdp": False, "fsdp_config": None}
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        save_steps=2,
        save_total_limit=3,
        **kind,
        **best,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[MakesFolder()] if options.best else [Counts(), Dies(options.die_at)],
    )
    if options.ring:
        from dcpring.integrations.transformers import RingCheckpoint

        with contextlib.suppress(RuntimeError) if options.die_at else contextlib.nullcontext():
            RingCheckpoint(options.folder / "ckpt", every_n_steps=2).train(trainer)
        (options.folder / "history").write_text(json.dumps(trainer.state.log_history))
    elif options.resume == "newest":
        with arguments.main_process_first(local=False):
            for folder in Path(arguments.output_dir).glob("checkpoint-*"):
                if not (folder / "trainer_state.json").exists():
                    shutil.rmtree(folder)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
    else:
        trainer.train(resume_from_checkpoint=options.resume)
    if options.best:
        rank = torch.distributed.get_rank()
        (options.folder / f"best-of-{rank}").write_text(trainer.state.best_model_checkpoint)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
