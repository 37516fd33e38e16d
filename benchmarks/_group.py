"""The processes that measure together: one, without torch.distributed, or several, over gloo."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Group:
    def __init__(self, rank: int, procs: int) -> None:
        self.rank, self.procs = rank, procs
        self.mesh: DeviceMesh | None = init_device_mesh("cpu", (procs,)) if procs > 1 else None

    def barrier(self) -> None:
        if self.mesh is not None:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.procs
        dist.all_gather_object(values, value)
        return values

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


def run_group(procs: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `work(group, *arguments)` in `procs` fresh processes; gives what it returned on the first rank."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as rendezvous:
        shared = (procs, f"{rendezvous}/store", sender, work, arguments)
        ranks = [context.Process(target=_rank_main, args=(rank, *shared)) for rank in range(procs)]
        for process in ranks:
            process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            raise RuntimeError(f"the run with {procs} process(es) failed; the error is above") from None
        finally:
            for process in ranks:
                process.join(timeout=10)
                process.kill()


def _rank_main(
    rank: int, procs: int, store: str, sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    if procs > 1:
        torch.set_num_threads(1)  # as torchrun sets it
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=procs)
    result = work(Group(rank, procs), *arguments)
    if rank == 0:
        sender.send(result)
    if procs > 1:
        dist.destroy_process_group()
