"""``python -m dcpring.demo [DIR]``: in ten seconds, what a save and a load cost here, and what happens to damage.

It saves and loads a state of 256 MiB with PyTorch's storage and planners and with dcpring's, in turns, in a temporary
folder of DIR (the current directory if none is given), and removes it. Nothing is trained. Every save is synced.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

ROUNDS = 3
LARGE, LARGE_BYTES = 15, 16 << 20
SMALL, SMALL_BYTES = 4000, 4 << 10

State = dict[str, dict[str, Tensor]]


def make_state() -> State:
    """15 tensors of 16 MiB and 4000 of 4 KiB."""
    large = {f"layer{number}.weight": torch.randn(LARGE_BYTES // 4) for number in range(LARGE)}
    small = {f"small{number}": torch.randn(SMALL_BYTES // 4) for number in range(SMALL)}
    return {"model": large | small}


def ways(folder: Path) -> dict[str, tuple[Callable[[State], Any], Callable[[State], Any]]]:
    """How each saves and loads."""
    torchs, ours = folder / "pytorch", folder / "dcpring"
    return {
        "PyTorch": (
            lambda state: dcp.save(state, checkpoint_id=torchs),
            lambda state: dcp.load(state, checkpoint_id=torchs),
        ),
        "dcpring": (
            lambda state: dcp.save(state, storage_writer=RingWriter(ours), planner=RingSavePlanner()),
            lambda state: dcp.load(state, storage_reader=RingReader(ours), planner=RingLoadPlanner()),
        ),
    }


def measure(folder: Path, state: State) -> dict[str, dict[str, float]]:
    """Median seconds by operation and by who does it; what is loaded is compared."""
    seconds: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    target = {"model": {name: torch.empty_like(tensor) for name, tensor in state["model"].items()}}
    for _ in range(ROUNDS):
        for who, (save, load) in ways(folder).items():
            for what, call, tree in (("save", save, state), ("load", load, target)):
                begin = time.perf_counter()
                call(tree)
                seconds[what].setdefault(who, []).append(time.perf_counter() - begin)
            assert all(torch.equal(target["model"][name], tensor) for name, tensor in state["model"].items())
    return {what: {who: statistics.median(times) for who, times in by.items()} for what, by in seconds.items()}


def flip_a_bit(folder: Path) -> None:
    """In the middle of the largest file of a checkpoint."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 1]))


def show_damage(folder: Path, state: State) -> None:
    print("\nNow one bit of each checkpoint flips on the disk, and both are loaded:\n")
    for who, (_, load) in ways(folder).items():
        flip_a_bit(folder / who.lower())
        try:
            load(state)
            print(f"  {who}: loads, and says nothing")
        except CheckpointException as error:
            said = str(next(iter(error.failures.values()))[0]).replace(f"{folder}/", "")
            print(f"  {who}: {said}")


def main(directory: str = ".") -> None:
    warnings.filterwarnings("ignore", module="torch")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="dcpring-demo-", dir=directory) as name:
        state = make_state()
        print(
            f"A state of {LARGE * LARGE_BYTES + SMALL * SMALL_BYTES >> 20} MiB in {LARGE + SMALL} tensors, one process,"
        )
        print(f"medians of {ROUNDS} rounds in turns; saves are synced to {Path(directory).resolve()}:\n")
        print(f"  {'':6} {'PyTorch':>9} {'dcpring':>9}")
        for what, by in measure(Path(name), state).items():
            ratio = by["PyTorch"] / by["dcpring"]
            print(f"  {what:6} {by['PyTorch']:7.2f} s {by['dcpring']:7.2f} s   {ratio:.1f} times as fast")
        show_damage(Path(name), state)


if __name__ == "__main__":
    main(*sys.argv[1:])
