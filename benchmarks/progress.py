"""What showing progress costs a save and a load.

    python benchmarks/progress.py             # 20000 x 4 KiB and 8 x 128 MiB, 15 rounds: a few minutes
    python benchmarks/progress.py --quick     # small: does everything work?

Saves and loads with a bar on a pseudo-terminal (which another process reads, as a terminal's program would), with a
function that is told, and without, in turns; ratios are taken within a round, of wall time and of CPU time with all
threads. Loads are from the page cache, where a cost shows best.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _measure import LOAD_WARM, SAVE, Meter
from _program import Program, scratch, write
from _report import print_table
from _shapes import KIB

from dcpring import RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

NONE, BAR, FUNCTION = "without", "bar", "function"
WAYS: dict[str, Any] = {NONE: False, BAR: True, FUNCTION: lambda progress: None}


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Standard error is a pseudo-terminal within this."""
    ours, theirs = pty.openpty()
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(ours)
    before = sys.stderr
    try:
        with open(theirs, "w", encoding="utf-8") as sys.stderr:
            yield
    finally:
        sys.stderr = before
        reader.wait()


def measure(path: Path, state: dict[str, Any], way: str) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of a save and of a load."""
    result = {}
    writer = RingWriter(path, progress=WAYS[way])
    gc.collect()
    with Meter() as meter:
        dcp.save(state, storage_writer=writer, planner=RingSavePlanner(), no_dist=True)
    result[SAVE] = (meter.reading().whole.end - meter.reading().whole.begin, meter.reading().whole.cpu_seconds)
    reader = RingReader(path, progress=WAYS[way])
    gc.collect()
    with Meter() as meter:
        dcp.load(state, storage_reader=reader, planner=RingLoadPlanner(), no_dist=True)
    result[LOAD_WARM] = (meter.reading().whole.end - meter.reading().whole.begin, meter.reading().whole.cpu_seconds)
    return result


def compare(folder: Path, count: int, size_bytes: int, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    state = {"model": {f"layer.{i}.weight": torch.randn(size_bytes // 4) for i in range(count)}}
    taken: list[dict[str, dict[str, tuple[float, float]]]] = []
    for number in range(rounds + 1):  # the first one warms up
        ways = list(WAYS)
        random.Random(number).shuffle(ways)
        one = {}
        for way in ways:
            with terminal():
                one[way] = measure(folder / "ckpt", state, way)
        taken += [one] if number else []
    return [
        {
            "tensors": f"{count} x {size_bytes // KIB} KiB",
            "phase": phase,
            "way": way,
            "seconds": median(one[way][phase][0] for one in taken),
            "cpu_seconds": median(one[way][phase][1] for one in taken),
            "wall_ratio": median(one[way][phase][0] / one[NONE][phase][0] for one in taken),
            "cpu_ratio": median(one[way][phase][1] / one[NONE][phase][1] for one in taken),
        }
        for phase in (SAVE, LOAD_WARM)
        for way in WAYS
    ]


def main() -> None:
    given = Program("progress", __doc__, 15).given()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    shapes = [(200, 4 * KIB), (2, 1024 * KIB)] if given.quick else [(20000, 4 * KIB), (8, 128 * 1024 * KIB)]
    with scratch(given.dir) as folder:
        rows = [row for shape in shapes for row in compare(folder, *shape, given.rounds)]
    cells = [
        [
            *(str(row[name]) for name in ("tensors", "phase", "way")),
            f"{row['seconds']:.3f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['wall_ratio']:.3f}",
            f"{row['cpu_ratio']:.3f}",
        ]
        for row in rows
    ]
    heads = ["tensors", "phase", "progress", "s", "CPU s", "wall / without", "CPU / without"]
    print_table("What progress costs", heads, cells)
    write(given.json, machine=_machine.describe(given.dir), rows=rows)


if __name__ == "__main__":
    main()
