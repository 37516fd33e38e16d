"""How fast a whole checkpoint is checked, and what else reads all of it.

    python benchmarks/verify.py                # 16 x 128 MiB and 20000 x 4 KiB, 5 rounds: about 5 minutes
    python benchmarks/verify.py --quick        # small sizes, one round: does everything work?

Each checkpoint, once written by dcpring and once by stock DCP, is read cold by

- the disk's own limit: the same number of bytes in 4 MiB blocks, O_DIRECT, 16 in flight;
- dcpring.verify, all of it and with quick=True;
- cat to /dev/null, which looks at nothing;
- stock's dcp.load, which checks no CRC of a tensor.

The ways take turns, and ratios are taken within a round.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _disk import cache_drop_method, limit_tool, make_cold, read_limit, sync_file, write_limit
from _measure import Meter, Span
from _program import Program, scratch, write
from _report import print_table, ratios
from _shapes import FULL, LARGE, QUICK, SMALL, ShapeSet
from _targets import OF_DISK, Target, print_targets, targets_as_json
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import dcpring
from dcpring import RingSavePlanner, RingWriter

DISK, VERIFY, QUICKLY, CAT, LOAD = "the disk's limit", "dcpring verify", "dcpring verify --quick", "cat", "dcp.load"
WRITERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dcpring": lambda path: {"storage_writer": RingWriter(path), "planner": RingSavePlanner()},
    "stock": lambda path: {"storage_writer": FileSystemWriter(path)},
}


@dataclass(frozen=True)
class VerifySample:
    """Wall and CPU seconds of one way to read a whole checkpoint."""

    shape: str
    writer: str
    who: str
    round: int
    file_bytes: int
    seconds: float
    cpu_seconds: float


class Checkpoint:
    """One that is read, with a file as large for the disk's limit."""

    def __init__(self, shape: str, writer: str, state: dict[str, Any], folder: Path) -> None:
        self.shape, self.writer = shape, writer
        self.path = folder / f"{shape}-{writer}"
        dcp.save(state, no_dist=True, **WRITERS[writer](self.path))
        self.files = sorted(self.path.glob("*.distcp"))
        for file in self.files:
            sync_file(file)
        self.size = sum(file.stat().st_size for file in self.files)
        self._like = state
        self._limit = folder / f"{shape}-{writer}.limit"
        write_limit(self._limit, self.size)

    def ways(self) -> dict[str, Callable[[], Span]]:
        return {
            DISK: lambda: read_limit(self._limit, self.size).whole,
            VERIFY: lambda: self._measured(lambda: self._verify(quick=False)),
            QUICKLY: lambda: self._measured(lambda: self._verify(quick=True)),
            CAT: lambda: self._measured(self._cat),
            LOAD: self._load,
        }

    def _measured(self, action: Callable[[], None]) -> Span:
        with Meter() as meter:
            action()
        return meter.reading().whole

    def _verify(self, quick: bool) -> None:
        report = dcpring.verify(self.path, quick=quick)
        if not report.ok:
            raise SystemExit(f"a checkpoint that was just written is damaged:\n{report}")

    def _cat(self) -> None:
        subprocess.run(["cat", *self.files], stdout=subprocess.DEVNULL, check=True)

    def _load(self) -> Span:
        state = {"model": {name: torch.empty_like(value) for name, value in self._like["model"].items()}}
        return self._measured(lambda: dcp.load(state, storage_reader=FileSystemReader(self.path), no_dist=True))


def run(shapes: ShapeSet, rounds: int, folder: Path) -> list[VerifySample]:
    samples = []
    for key in (LARGE, SMALL):
        shape = shapes.get(key)
        state = {"model": {f"layers.{n}.weight": torch.rand(shape.size_bytes // 4) for n in range(shape.count)}}
        checkpoints = [Checkpoint(key, writer, state, folder) for writer in WRITERS]
        for checkpoint in checkpoints:
            checkpoint.ways()[VERIFY]()  # what is done only once per process is not to count
        for number in range(rounds):
            for checkpoint in checkpoints:
                print(
                    f"{shape.title}, {checkpoint.writer}: round {number + 1} of {rounds}", file=sys.stderr, flush=True
                )
                samples += _run_round(checkpoint, number)
    return samples


def _run_round(checkpoint: Checkpoint, number: int) -> list[VerifySample]:
    samples = []
    ways = list(checkpoint.ways().items())
    for who, way in ways if number % 2 == 0 else ways[::-1]:
        make_cold(checkpoint.path.parent)
        span = way()
        seconds = span.end - span.begin
        where = (checkpoint.shape, checkpoint.writer, who, number, checkpoint.size)
        samples.append(VerifySample(*where, seconds, span.cpu_seconds))
    return samples


# ---- results ----


def of(samples: Sequence[VerifySample], shape: str, writer: str, who: str) -> list[VerifySample]:
    return [sample for sample in samples if (sample.shape, sample.writer, sample.who) == (shape, writer, who)]


def seconds(samples: Sequence[VerifySample]) -> list[float]:
    return [sample.seconds for sample in samples]


def print_samples(samples: Sequence[VerifySample], shapes: ShapeSet) -> None:
    for shape in (LARGE, SMALL):
        for writer in WRITERS:
            limit = seconds(of(samples, shape, writer, DISK))
            lines = []
            for who in (DISK, VERIFY, QUICKLY, CAT, LOAD):
                found = of(samples, shape, writer, who)
                speed = found[0].file_bytes / median(seconds(found)) / 1e9
                cpu = median(sample.cpu_seconds for sample in found)
                share = median(ratios(limit, seconds(found)))
                lines.append(
                    (who, f"{median(seconds(found)):.3f}", f"{cpu:.3f}", f"{speed:.2f}", f"{share:.2f}")
                    if who != QUICKLY
                    else (who, f"{median(seconds(found)):.3f}", f"{cpu:.3f}", "", "")
                )
            title = f"{shapes.get(shape).title}, written by {writer}, cold"
            print_table(title, ("", "s", "CPU s", "GB/s", "of the disk's limit"), lines)


def targets(samples: Sequence[VerifySample], shapes: ShapeSet) -> list[Target]:
    found = []
    for writer in WRITERS:
        disk, ours = (seconds(of(samples, LARGE, writer, who)) for who in (DISK, VERIFY))
        name = f"verify, {shapes.get(LARGE).title}, written by {writer}: of the disk's limit"
        found.append(Target(name, OF_DISK, True, ratios(disk, ours)))
    return found


def main() -> None:
    given = Program("verify", __doc__, 5).given()
    shapes = QUICK if given.quick else FULL
    machine = _machine.describe(given.dir)
    with scratch(given.dir) as folder:
        samples = run(shapes, given.rounds, folder)
    print_samples(samples, shapes)
    found = targets(samples, shapes)
    print_targets(found, given.quick)
    conditions = {"rounds": given.rounds, "cold": cache_drop_method(), "limit": limit_tool()}
    write(given.json, machine=machine, conditions=conditions, targets=targets_as_json(found), samples=samples)


if __name__ == "__main__":
    main()
