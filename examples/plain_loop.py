"""A loop of one's own: FSDP2, tensor parallelism, activation checkpointing and torch.compile, as in torch's tutorials.

    torchrun --nproc-per-node 4 examples/plain_loop.py ckpt --kill-at 10  # saves every 4 steps; all ranks are killed
    torchrun --nproc-per-node 4 examples/plain_loop.py ckpt               # goes on, with the losses it would have had
    torchrun --nproc-per-node 2 examples/plain_loop.py ckpt --steps 16    # goes on with other ranks

``--way dcp`` does the same with ``dcp.save`` and ``dcp.load``, as torch's recipe writes it. Losses are printed with all
their digits. Blocks are compiled where there is a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

from dcpring import (
    RNG,
    Checkpointer,
    ElasticLoader,
    ElasticSampler,
    Replicated,
    RingLoadPlanner,
    RingReader,
    RingSavePlanner,
    RingWriter,
)

GLOBAL_BATCH = 12
SAVE_EVERY = 4
warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing changes the model's output in place
gpt.LAYERS, gpt.WIDTH = 2, 128


class Windows(Dataset[Tensor]):
    """Pieces of the source of argparse, one byte longer than the model's context."""

    def __init__(self) -> None:
        self.text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // (gpt.CONTEXT + 1)

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * (gpt.CONTEXT + 1) :][: gpt.CONTEXT + 1].long()


def make_model(mesh: DeviceMesh, is_compiled: bool) -> gpt.GPT:
    """Each block: tensor parallel, compiled, recomputed in the backward pass, sharded."""
    torch.manual_seed(0)
    model = gpt.GPT()
    spread = {"output_layouts": Shard(1)}  # between the layers each rank has a part of the text
    outside = {
        "token": RowwiseParallel(input_layouts=Replicate(), **spread),
        "position": RowwiseParallel(input_layouts=Replicate(), **spread),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inside = {
        "attention_norm": SequenceParallel(),
        "qkv": ColwiseParallel(input_layouts=Shard(1)),
        "projection": RowwiseParallel(**spread),
        "feed_norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(**spread),
    }
    parallelize_module(model, mesh["tp"], outside)
    for number, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tp"], inside)
        if is_compiled:
            block.compile()
        model.blocks[number] = block = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


class Training:
    def __init__(self, tp: int, is_compiled: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
        self.dp = mesh["dp"]
        self.model = make_model(mesh, is_compiled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / 10))
        data = Windows()
        sampler = ElasticSampler(len(data), rank=self.dp.get_local_rank(), world_size=self.dp.size())
        self.loader = ElasticLoader(DataLoader(data, GLOBAL_BATCH // self.dp.size(), sampler=sampler))
        self.progress = {"step": 0}

    def train(self, save: Callable[[int], object], steps: int, kill_at: int) -> None:
        for batch in self.loader:
            loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.progress["step"] = step = self.progress["step"] + 1
            mean = loss.detach() / self.dp.size()
            dist.all_reduce(mean, group=self.dp.get_group())
            say(f"step {step} loss {mean.item()!r}")
            if step % SAVE_EVERY == 0:
                save(step)
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step >= steps:
                return


# ---- with Checkpointer ----


def run_with_checkpointer(training: Training, folder: Path, steps: int, kill_at: int) -> None:
    """Saves beside training; all that can be different on other ranks is dealt with."""
    components = {
        "model": training.model,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "data": training.loader,
        "rng": RNG(),
        "progress": Replicated(training.progress),
    }
    with Checkpointer(folder, components, keep_last=2) as checkpointer:
        say(checkpointer.load(missing_ok=True))
        training.train(lambda step: checkpointer.save(step, blocking=False), steps, kill_at)


# ---- with dcp.save and dcp.load ----


class AppState(Stateful):
    """As in torch's recipe."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.training.scheduler.state_dict(),
            "data": self.training.loader.state_dict(),
            "progress": dict(self.training.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        training = self.training
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        training.scheduler.load_state_dict(state["scheduler"])
        training.loader.load_state_dict(state["data"])
        training.progress.update(state["progress"])


def run_with_dcp(training: Training, folder: Path, steps: int, kill_at: int) -> None:
    """Torch's calls, with dcpring's storage and planners."""
    app = AppState(training)

    def save(step: int) -> None:
        path = folder / f"step-{step}"
        dcp.save({"app": app}, storage_writer=RingWriter(path), planner=RingSavePlanner())

    # A folder is a checkpoint once it has its .metadata: a save that was interrupted does not count.
    saved = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata")]
    if saved:
        path = folder / f"step-{max(saved)}"
        dcp.load({"app": app}, storage_reader=RingReader(path), planner=RingLoadPlanner())
        say(f"{path}: loaded")
    training.train(save, steps, kill_at)


WAYS = {"checkpointer": run_with_checkpointer, "dcp": run_with_dcp}


def say(what: object) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints go, and are looked for")
    parser.add_argument("--way", choices=WAYS, default="checkpointer")
    parser.add_argument("--steps", type=int, default=12, help="the step after which to end (default: %(default)s)")
    parser.add_argument("--kill-at", type=int, default=0, help="the step after which all ranks are killed")
    parser.add_argument("--tp", type=int, default=2, help="ranks of a tensor-parallel group (default: %(default)s)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=bool(shutil.which("g++")))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(arguments.tp, arguments.compile)
    WAYS[arguments.way](training, arguments.folder, arguments.steps, arguments.kill_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
