"""What trainers save and load, each in its own way and with dcpring, in turns within one process.

    torchrun --nproc-per-node 2 benchmarks/trainers.py accelerate      # 67 M parameters and AdamW, 805 MB
    torchrun --nproc-per-node 2 benchmarks/trainers.py plain --tiny    # 10 parameters of 1 KiB and AdamW
    python benchmarks/trainers.py lightning                            # one process, without a process group

accelerate, fabric, transformers, torchtitan and lightning are what make test-trainers installs. Of these, all but the
last two use dcpring by install(); torchtitan by RingCheckpointManager, lightning (DDP, one device) by RingCheckpointIO.
plain is a loop that names storage and planners, stateful one that gives dcp.save an object with a state_dict() and has
install(), and checkpointer one that has a Checkpointer in the place of that.

Every save is synced: stock's writer does so, a file of TorchCheckpointIO is synced here. Each goes to a new folder.
Loads are cold where the page cache can be dropped, those of --tiny warm. Seconds are those of the slowest rank; CPU
seconds are summed over the ranks. Medians.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _disk import make_cold
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

import dcpring

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "trainers"))
STOCK, OURS = "stock", "dcpring"
IS_FIRST = os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Size:
    layers: int
    width: int

    def network(self) -> torch.nn.Sequential:
        return torch.nn.Sequential(*[torch.nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers)])


@dataclass(frozen=True)
class Trainer:
    """How it saves to a path and loads from it, in one way or the other; dcpring's may be that it is installed."""

    save: Callable[[str, Path], Any]
    load: Callable[[str, Path], Any]
    by_install: bool = False

    def ready_for(self, way: str) -> contextlib.AbstractContextManager[Any]:
        return dcpring.install() if self.by_install and way == OURS else contextlib.nullcontext()


def accelerate(size: Size, folder: Path) -> Trainer:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate_program import take_cpus_for_devices

    take_cpus_for_devices()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="size_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = size.network()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(torch.ones(1, size.width)).square().mean())
    optimizer.step()
    return Trainer(
        lambda way, path: accelerator.save_state(str(path)), lambda way, path: accelerator.load_state(str(path)), True
    )


def transformers(size: Size, folder: Path) -> Trainer:
    import transformers_program as program
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    program.take_cpus_for_devices()
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **program.sharded(),
    )
    trainer = TransformersTrainer(LlamaForCausalLM(config), arguments, train_dataset=program.Tokens())
    trainer.train()

    def save(way: str, path: Path) -> None:
        trainer._get_output_dir = lambda trial: str(path)
        trainer._save_checkpoint(trainer.model_wrapped, None)

    def load(way: str, path: Path) -> None:
        trainer._load_from_checkpoint(str(path / "checkpoint-1"), trainer.model_wrapped)
        trainer._load_optimizer_and_scheduler(str(path / "checkpoint-1"))

    return Trainer(save, load, True)


def fabric(size: Size, folder: Path) -> Trainer:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    world = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(
        lambda net, mesh: fully_shard(net, mesh=mesh["data_parallel"]),
        data_parallel_size=world,
        tensor_parallel_size=1,
    )
    runs = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    runs.launch()
    net = runs.setup_module(size.network())
    optimizer = runs.setup_optimizers(torch.optim.AdamW(net.parameters()))
    runs.backward(net(torch.ones(1, size.width)).square().mean())
    optimizer.step()
    state = {"model": net, "optimizer": optimizer, "step": 1}
    return Trainer(lambda way, path: runs.save(path, state), lambda way, path: runs.load(path, state), True)


def torchtitan(size: Size, folder: Path) -> Trainer:
    """Its own small Llama, whatever the size; the manager is one, whose class changes."""
    import titan_program as program

    given = sys.argv
    sys.argv = ["", str(folder / "titan"), "--steps", "1", "--interval", "1"]
    options = program.arguments()
    sys.argv = given
    trainer = program.training(options).build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    trainer.train()
    manager = trainer.checkpointer
    managers = {STOCK: program.CheckpointManager, OURS: program.RingCheckpointManager}

    def save(way: str, path: Path) -> None:
        manager.__class__, manager.folder = managers[way], str(path)
        manager.save(1)

    def load(way: str, path: Path) -> None:
        manager.__class__, manager.folder = managers[way], str(path)
        manager.load(1)

    return Trainer(save, load)


def lightning(size: Size, folder: Path) -> Trainer:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    from dcpring.integrations.lightning import RingCheckpointIO

    net = size.network()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, size.width)).square().mean().backward()
    optimizer.step()
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    ways = {STOCK: TorchCheckpointIO(), OURS: RingCheckpointIO()}

    def save(way: str, path: Path) -> None:
        ways[way].save_checkpoint(checkpoint, path)
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    return Trainer(save, lambda way, path: ways[way].load_checkpoint(path))


class App:
    """FSDP2 and the stateful object of torch's recipe."""

    def __init__(self, size: Size) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.net = size.network()
        for layer in self.net:
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(fully_shard(self.net).parameters())
        self.progress = {"step": 1, "epoch": 0.5, "name": "run"}
        self.net(torch.ones(1, size.width)).square().mean().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.progress = state["progress"]


def plain(size: Size, folder: Path) -> Trainer:
    app = App(size)

    def save(way: str, path: Path) -> None:
        if way == STOCK:
            dcp.save(app.state_dict(), storage_writer=dcp.FileSystemWriter(path))
        else:
            dcp.save(app.state_dict(), storage_writer=dcpring.RingWriter(path), planner=dcpring.RingSavePlanner())

    def load(way: str, path: Path) -> None:
        state = app.state_dict()
        if way == STOCK:
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        else:
            dcp.load(state, storage_reader=dcpring.RingReader(path), planner=dcpring.RingLoadPlanner())
        app.load_state_dict(state)

    return Trainer(save, load)


def stateful(size: Size, folder: Path) -> Trainer:
    app = App(size)
    return Trainer(
        lambda way, path: dcp.save({"app": app}, checkpoint_id=path),
        lambda way, path: dcp.load({"app": app}, checkpoint_id=path),
        True,
    )


def checkpointer(size: Size, folder: Path) -> Trainer:
    app = App(size)
    components = {"model": app.net, "optimizer": app.optimizer, "progress": dcpring.Replicated(Progress(app))}
    ours, step = dcpring.Checkpointer(folder / "steps", components, keep_last=1), 0

    def save(way: str, path: Path) -> None:
        nonlocal step
        if way == STOCK:
            dcp.save({"app": app}, checkpoint_id=path)
        else:
            step += 1
            ours.save(step)

    def load(way: str, path: Path) -> None:
        if way == STOCK:
            dcp.load({"app": app}, checkpoint_id=path)
        else:
            ours.load()

    return Trainer(save, load)


class Progress:
    def __init__(self, app: App) -> None:
        self._app = app

    def state_dict(self) -> dict[str, Any]:
        return self._app.progress

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._app.progress = state


TRAINERS = (accelerate, transformers, fabric, torchtitan, lightning, plain, stateful, checkpointer)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds and CPU seconds, over all ranks."""
    if dist.is_initialized():
        dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    work()
    found = torch.tensor([time.perf_counter() - start, time.process_time() - cpu_start], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found[0], dist.ReduceOp.MAX)
        dist.all_reduce(found[1])
    return float(found[0]), float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=[make.__name__ for make in TRAINERS])
    parser.add_argument("--tiny", action="store_true", help="10 layers of 1 KiB and 30 rounds, warm, if not said else")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where files go: a disk (default: here)")
    given = parser.parse_args()
    size = Size(given.layers or 10, 16) if given.tiny else Size(given.layers or 16, 2048)
    rounds = given.rounds or (30 if given.tiny else 3)
    folder = given.dir / f"trainers-{os.environ.get('MASTER_PORT', os.getpid())}"  # the same on all ranks
    folder.mkdir(exist_ok=True)
    trainer = next(make for make in TRAINERS if make.__name__ == given.trainer)(size, folder)
    logging.disable(logging.INFO)
    found: dict[str, list[tuple[float, ...]]] = {STOCK: [], OURS: []}
    for number in range(rounds + 2 * given.tiny):
        for way in (STOCK, OURS) if number % 2 else (OURS, STOCK):
            path = folder / f"{way}-{number}"
            with trainer.ready_for(way):
                saved = timed(lambda way=way, path=path: trainer.save(way, path))
                if IS_FIRST and not given.tiny:
                    make_cold(folder)
                found[way].append((*saved, *timed(lambda way=way, path=path: trainer.load(way, path))))
            if IS_FIRST and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if IS_FIRST:
        print(given.trainer, size, _machine.describe(folder))
        for way, results in found.items():
            columns = [1000 * median(column[-rounds:]) for column in zip(*results, strict=True)]
            print("{:8} save {:.1f} ms ({:.1f} CPU ms), load {:.1f} ms ({:.1f} CPU ms)".format(way, *columns))
        shutil.rmtree(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
