"""Saves of little data, again and again, as a training makes them: what is left when the disk has little to do.

    python benchmarks/small_saves.py                     # 15 rounds, 1 and 4 processes: some minutes
    python benchmarks/small_saves.py --before DIRECTORY  # with another build of dcpring beside this one
    python benchmarks/small_saves.py --quick             # one round: does everything work?

A tiny state, 80 MiB in one process, and 16 MiB on each of 4. Stock, dcpring, and what neither can do without take turns
in every round: planning (dcp.save with dcpring's planner and a storage that does nothing) and the disk (files of the
same sizes written at once with O_DIRECT from buffers that are there, their syncs, and one more file with its syncs, as
metadata and commit need them). All saves are synced; each overwrites the checkpoint that it made in the round before.

``--before`` runs the same rounds with the build in that directory, in processes of its own that take turns with
these round by round.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
import torch.distributed.checkpoint as dcp
from _contestants import DISK, OURS, STOCK, NullWriter
from _group import Group, run_group
from _measure import Meter, Reading, merge_spans
from _program import scratch
from _report import print_table
from _targets import Target, print_targets
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.tensor import Shard, distribute_tensor

from dcpring import RingSavePlanner, RingWriter

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
PLANNING, BEFORE = "planning", "before"
WAYS = (STOCK, BEFORE, OURS, PLANNING, DISK)
BEYOND_SECONDS = 0.005
BLOCK_BYTES = 4 * MIB


@dataclass(frozen=True)
class Size:
    """``tensors`` of ``bytes`` each on every rank, saved so often in each round."""

    key: str
    title: str
    procs: int
    tensors: int
    bytes: int
    repeats: int = 1


SIZES = (
    Size("tiny", "4 x 1 KiB, 1 process", 1, 4, 1 << 10, repeats=10),
    Size("80 MiB", "80 MiB, 1 process", 1, 20, 4 * MIB),
    Size("16 MiB a rank", "16 MiB a rank, 4 processes", 4, 8, 2 * MIB),
)


@dataclass(frozen=True)
class SmallSave:
    """Seconds from the first rank's start to the last one's end, and CPU seconds of all ranks."""

    size: str
    way: str
    round: int
    seconds: float
    cpu_seconds: float


# ---- in each rank ----


def state_of(group: Group, size: Size) -> dict[str, Any]:
    values = [torch.rand(size.bytes * group.procs // 4) for _ in range(size.tensors)]
    if group.mesh is not None:
        values = [distribute_tensor(value, group.mesh, [Shard(0)]) for value in values]
    return {"model": {f"layers.{number}.weight": value for number, value in enumerate(values)}, "step": 1}


class Disk:
    """One rank's part of the bare minimum: its file, from memory that is there, and for the first rank the metadata."""

    def __init__(self, group: Group, folder: Path, size: Size) -> None:
        self._group = group
        self._folder = folder
        self._bytes = size.tensors * size.bytes
        self._blocks = [mmap.mmap(-1, min(BLOCK_BYTES, max(4096, self._bytes))) for _ in range(4)]
        for block in self._blocks:
            block.write(os.urandom(4096) * (len(block) // 4096))
        self._pool = ThreadPoolExecutor(4)

    def save(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"new.{self._group.rank}"
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        rounded = -(-self._bytes // 4096) * 4096
        os.posix_fallocate(fd, 0, rounded)
        starts = range(0, rounded, BLOCK_BYTES)
        list(self._pool.map(lambda at: self._write(fd, at, min(BLOCK_BYTES, rounded - at)), starts))
        os.fdatasync(fd)
        os.close(fd)
        self._group.barrier()
        if self._group.rank == 0:
            self._commit()
        self._group.barrier()
        file.rename(self._folder / f"data.{self._group.rank}")

    def _write(self, fd: int, at: int, size: int) -> None:
        os.pwrite(fd, memoryview(self._blocks[at // BLOCK_BYTES % 4])[:size], at)

    def _commit(self) -> None:
        with open(self._folder / "metadata.tmp", "wb") as stream:
            stream.write(bytes(2000))
            stream.flush()
            os.fsync(stream)
        (self._folder / "metadata.tmp").rename(self._folder / "metadata")
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def saves_of(group: Group, folder: Path, size: Size) -> dict[str, Callable[[], Any]]:
    state, disk = state_of(group, size), Disk(group, folder / DISK, size)

    def save(writer: Any, planner: Any) -> None:
        dcp.save(state, storage_writer=writer, planner=planner)

    return {
        STOCK: lambda: save(FileSystemWriter(folder / STOCK), DefaultSavePlanner()),
        OURS: lambda: save(RingWriter(folder / OURS), RingSavePlanner()),
        PLANNING: lambda: save(PlanningOnly(), RingSavePlanner()),
        DISK: disk.save,
    }


class PlanningOnly(NullWriter):
    """The items of a compact plan are not looked at: that a storage does, and not the planning."""

    def storage_meta(self) -> None:
        return None


def measure(group: Group, save: Callable[[], Any]) -> tuple[float, float]:
    group.barrier()
    if group.rank == 0:
        os.sync()
    group.barrier()
    with Meter() as meter:
        save()
    readings: list[Reading] = group.gather(meter.reading())
    whole = merge_spans([reading.whole for reading in readings])
    return whole.end - whole.begin, whole.cpu_seconds


def run_rank(group: Group, folder: Path, size: Size, ways: Sequence[str], rounds: int, turns: Path | None) -> Any:
    """All rounds of one size. ``turns``: two pipes, by which builds take turns round by round."""
    saves = saves_of(group, folder, size)
    for way in ways:
        for _ in range(2):  # what is done once, and a checkpoint to be overwritten
            measure(group, saves[way])
    found = []
    for number in range(rounds):
        _await_turn(group, turns)
        for repeat in range(number * size.repeats, (number + 1) * size.repeats):
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                found.append(SmallSave(size.key, way, repeat, *measure(group, saves[way])))
        _end_turn(group, turns)
    return found


def _await_turn(group: Group, turns: Path | None) -> None:
    if turns is not None and group.rank == 0:
        with open(turns / "begin", "rb") as pipe:
            pipe.read()
    group.barrier()


def _end_turn(group: Group, turns: Path | None) -> None:
    group.barrier()
    if turns is not None and group.rank == 0:
        with open(turns / "end", "wb"):
            pass


# ---- the rounds ----


def run(sizes: Sequence[Size], rounds: int, folder: Path, before: Path | None) -> list[SmallSave]:
    found = []
    ways = [way for way in WAYS if way != BEFORE]
    for size in sizes:
        print(f"{size.title}: {rounds} rounds", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            if before is None:
                found += run_group(size.procs, run_rank, Path(scratch), size, ways, rounds, None)
            else:
                found += _with_before(size, ways, rounds, Path(scratch), before)
    return found


def _with_before(size: Size, ways: Sequence[str], rounds: int, scratch: Path, before: Path) -> list[SmallSave]:
    turns = {name: scratch / name for name in ("now", BEFORE)}
    for folder in turns.values():
        folder.mkdir()
        os.mkfifo(folder / "begin")
        os.mkfifo(folder / "end")
    programs = []
    for name, only in (("now", ways), (BEFORE, [OURS])):
        environment = os.environ | ({"PYTHONPATH": str(before)} if name == BEFORE else {})
        command = [sys.executable, __file__, "--part", size.key, "--rounds", str(rounds), "--ways", *only]
        command += ["--turns", str(turns[name]), "--dir", str(turns[name])]
        programs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    for number in range(rounds):
        for name in ("now", BEFORE) if number % 2 == 0 else (BEFORE, "now"):
            with open(turns[name] / "begin", "wb"):
                pass
            with open(turns[name] / "end", "rb") as pipe:
                pipe.read()
    found = []
    for name, program in zip(turns, programs, strict=True):
        samples = [SmallSave(**one) for one in json.loads(program.communicate()[0])]
        found += [SmallSave(**(asdict(one) | {"way": BEFORE})) if name == BEFORE else one for one in samples]
    return found


# ---- results ----


def seconds_of(found: Sequence[SmallSave], size: str, way: str) -> list[float]:
    return [one.seconds for one in sorted(found, key=lambda one: one.round) if (one.size, one.way) == (size, way)]


def cpu_of(found: Sequence[SmallSave], size: str, way: str) -> float:
    return median(one.cpu_seconds for one in found if (one.size, one.way) == (size, way))


def print_results(found: Sequence[SmallSave], sizes: Sequence[Size]) -> None:
    lines = []
    for size in sizes:
        for way in WAYS:
            if seconds := seconds_of(found, size.key, way):
                cells = (median(seconds), min(seconds), max(seconds), cpu_of(found, size.key, way))
                lines.append([size.title, way, *(f"{1000 * cell:.1f}" for cell in cells)])
    print_table("small saves, milliseconds", ["", "", "median", "least", "most", "CPU"], lines)


def targets(found: Sequence[SmallSave], sizes: Sequence[Size]) -> list[Target]:
    targets = []
    for size in sizes:
        ours, stock, planning, disk = (seconds_of(found, size.key, way) for way in (OURS, STOCK, PLANNING, DISK))
        beyond = [a - b - c for a, b, c in zip(ours, planning, disk, strict=True)]
        targets.append(Target(f"{size.title}: seconds beyond planning and the disk", BEYOND_SECONDS, False, beyond))
        ratio = [a / b for a, b in zip(ours, stock, strict=True)]
        targets.append(Target(f"{size.title}: time, of stock's", 1.0, False, ratio))
    return targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="where another build's package dcpring is")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the checkpoints go (default: here)")
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.name}/small_saves.json; with --quick: none")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        (size,) = (size for size in SIZES if size.key == options.part)
        found = run_group(size.procs, run_rank, options.dir, size, options.ways, options.rounds, options.turns)
        print(json.dumps([asdict(one) for one in found]))
        return
    rounds = 1 if options.quick else options.rounds
    with scratch(options.dir) as folder:
        machine, load = _machine.describe(folder), os.getloadavg()[0]
        found = run(SIZES, rounds, folder, options.before)
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in machine.items()))
    print(f"load average before: {load:.1f}; rounds: {rounds}")
    print_results(found, SIZES)
    print_targets(targets(found, SIZES))
    if options.quick and options.json is None:
        return
    path = options.json or RESULTS / "small_saves.json"
    about = {"machine": machine, "load_before": load, "rounds": rounds}
    path.write_text(json.dumps(about | {"samples": [asdict(one) for one in found]}, indent=1) + "\n")
    from _small_saves_plot import draw

    draw(path.with_suffix(".png"), found, SIZES, machine)


if __name__ == "__main__":
    main()
