"""accelerate with FSDP2, Lightning's CheckpointIO and a loop of one's own: their way and dcpring's, in turns.

    torchrun --nproc-per-node 2 benchmarks/trainers.py       # 67 M parameters and AdamW, 805 MB; needs accelerate
    torchrun --nproc-per-node 2 benchmarks/trainers.py plain # the same by dcp.save and dcp.load of a loop of one's own
    python benchmarks/trainers.py                            # the same on one, by a CheckpointIO; needs Lightning

Every save is synced: stock's writer does so, a file of TorchCheckpointIO is synced here. Loads are cold where the page
cache can be dropped. Seconds are those of the slowest rank; CPU seconds are summed over the ranks. Medians of 3 rounds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _disk import make_cold
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import dcpring

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "trainers"))
ROUNDS, LAYERS, WIDTH = 3, 16, 2048
IS_FIRST = os.environ.get("RANK", "0") == "0"


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


def by_accelerate() -> tuple[Callable[[str, Path], Any], Callable[[str, Path], Any]]:
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
    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(torch.ones(1, WIDTH)).square().mean())
    optimizer.step()

    def installed(way: str) -> contextlib.AbstractContextManager[Any]:
        return dcpring.install() if way == "dcpring" else contextlib.nullcontext()

    def save(way: str, path: Path) -> None:
        with installed(way):
            accelerator.save_state(str(path))

    def load(way: str, path: Path) -> None:
        with installed(way):
            accelerator.load_state(str(path))

    return save, load


def by_a_loop() -> tuple[Callable[[str, Path], Any], Callable[[str, Path], Any]]:
    """FSDP2 and the state dicts of torch's recipe."""
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in net:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(net).parameters())
    net(torch.ones(1, WIDTH)).square().mean().backward()
    optimizer.step()

    def state_of() -> dict[str, Any]:
        model, optim = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": optim}

    def save(way: str, path: Path) -> None:
        if way == "stock":
            dcp.save(state_of(), storage_writer=dcp.FileSystemWriter(path))
        else:
            dcp.save(state_of(), storage_writer=dcpring.RingWriter(path), planner=dcpring.RingSavePlanner())

    def load(way: str, path: Path) -> None:
        state = state_of()
        if way == "stock":
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        else:
            dcp.load(state, storage_reader=dcpring.RingReader(path), planner=dcpring.RingLoadPlanner())
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return save, load


def by_lightning() -> tuple[Callable[[str, Path], Any], Callable[[str, Path], Any]]:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    from dcpring.integrations.lightning import RingCheckpointIO

    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, WIDTH)).square().mean().backward()
    optimizer.step()
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()], "global_step": 1}
    ways = {"stock": TorchCheckpointIO(), "dcpring": RingCheckpointIO()}

    def save(way: str, path: Path) -> None:
        ways[way].save_checkpoint(checkpoint, path)
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    return save, lambda way, path: ways[way].load_checkpoint(path)


def main() -> None:
    ways = {(): by_accelerate, ("plain",): by_a_loop}
    save, load = ways[tuple(sys.argv[1:])]() if "RANK" in os.environ else by_lightning()
    names: list[Any] = [tempfile.mkdtemp(dir=Path.cwd()) if IS_FIRST else None]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    folder = Path(names[0])
    found: dict[str, list[tuple[float, ...]]] = {"stock": [], "dcpring": []}
    for number in range(ROUNDS):
        for way, results in found.items():
            path = folder / f"{way}-{number}"
            saved = timed(lambda way=way, path=path: save(way, path))
            if IS_FIRST:
                make_cold(folder)
            results.append((*saved, *timed(lambda way=way, path=path: load(way, path))))
            if IS_FIRST:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    if IS_FIRST:
        print(_machine.describe(folder))
        for way, results in found.items():
            columns = [median(column) for column in zip(*results, strict=True)]
            print("{:8} save {:.2f} s ({:.2f} CPU s), load {:.2f} s ({:.2f} CPU s)".format(way, *columns))
        shutil.rmtree(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
