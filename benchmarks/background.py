"""What a training thread keeps of its speed while dcp.async_save writes 20,000 small tensors behind it, in one process.

    python benchmarks/background.py                # 20000 x 4 KiB, 3 rounds, stock and dcpring in turns: a minute
    python benchmarks/background.py --tensors 500 --rounds 1

The "training" multiplies matrices of 64 x 64: short calls that need the interpreter's lock again and again. Counted
are those between the return of async_save and the end of the save, as a share of what the same loop does undisturbed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _program import scratch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from dcpring import RingSavePlanner, RingWriter

WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "stock": lambda path: {"storage_writer": FileSystemWriter(path), "planner": DefaultSavePlanner()},
    "dcpring": lambda path: {"storage_writer": RingWriter(path), "planner": RingSavePlanner()},
}


def train_while(goes_on: Callable[[], bool]) -> tuple[float, float]:
    """Seconds, and products a second."""
    matrix, count, start = torch.rand(64, 64), 0, time.perf_counter()
    while goes_on():
        matrix @ matrix
        count += 1
    seconds = time.perf_counter() - start
    return seconds, count / seconds


def measure(state: dict[str, Any], way: str, folder: Path) -> tuple[float, float, float]:
    """Seconds until async_save returns, seconds of writing after that, and the share of its speed training keeps."""
    end = time.perf_counter() + 1
    _, undisturbed = train_while(lambda: time.perf_counter() < end)
    start = time.perf_counter()
    future = dcp.async_save(state, **WAYS[way](folder / way))
    stall = time.perf_counter() - start
    seconds, rate = train_while(lambda: not future.done())
    future.result()
    shutil.rmtree(folder / way)
    return stall, seconds, rate / undisturbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    state = {"model": {f"layer.{i}": torch.rand(1024) for i in range(options.tensors)}}
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with scratch(options.folder) as folder:
        print(_machine.describe(folder))
        for _ in range(options.rounds):
            for way, results in found.items():
                results.append(measure(state, way, folder))
    for way, results in found.items():
        stall, seconds, share = (median(column) for column in zip(*results, strict=True))
        print(f"{way:8} stall {stall:.2f} s, then {share:.0%} of the speed for {seconds:.2f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
