"""What a conversion costs: time, processor, and the most memory, for each pair of formats.

    python benchmarks/convert.py             # 4 GiB, 3 rounds: about 5 minutes, 13 GiB of disk
    python benchmarks/convert.py --quick     # 128 MiB, one round: does everything work?

Each conversion runs in a process of its own, from files that are not in the page cache, and ends when the target is
durable. Seconds are those of the conversion; memory is the most that the process had resident, torch and pages of
mapped files with it (VmHWM: ru_maxrss would be the parent's, if that is larger). Beside dcpring:
torch.distributed.checkpoint.format_utils, and torch.load and safetensors' save_file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _machine
import torch
from _disk import cache_drop_method, make_cold, read_limit, write_limit
from _program import Program, print_machine, scratch, write

from dcpring import convert

GIB, MIB = 1 << 30, 1 << 20
MEMORY_LIMIT_BYTES = 512 * MIB
SUFFIX = {"dcp": "", "torch": ".pt", "safetensors": ".safetensors"}

BEGIN = "import os, resource, sys, time\nsource, target = sys.argv[1:]\n"
END = """
paths = [os.path.join(target, name) for name in os.listdir(target)] if os.path.isdir(target) else [target]
for path in paths:
    os.fsync(os.open(path, os.O_RDONLY))
seconds = time.perf_counter() - began
usage = resource.getrusage(resource.RUSAGE_SELF)
cpu = usage.ru_utime + usage.ru_stime - before
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, cpu, int(peak.split()[1]) * 1024)
"""
CLOCK = "before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]); began = time.perf_counter()\n"
OURS = f"import dcpring\n{CLOCK}dcpring.convert(source, target)"
UTILS = "from torch.distributed.checkpoint import format_utils\n"
THEIRS = {
    ("dcp", "torch"): f"{UTILS}{CLOCK}format_utils.dcp_to_torch_save(source, target)",
    ("torch", "dcp"): f"{UTILS}{CLOCK}format_utils.torch_save_to_dcp(source, target)",
    ("torch", "safetensors"): "import torch, safetensors.torch as s\n"
    f"{CLOCK}s.save_file(torch.load(source, weights_only=True), target)",
    ("safetensors", "torch"): f"import torch, safetensors.torch as s\n{CLOCK}torch.save(s.load_file(source), target)",
}


@dataclass(frozen=True)
class Sample:
    """One conversion."""

    origin: str
    goal: str
    who: str
    round: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def make_sources(directory: Path, size_bytes: int) -> None:
    """Tensors of 2 to 128 MiB, as of a model of 2 billion parameters, in all three formats."""
    shapes = [(4096, 4096), (1024, 4096), (4096, 1024), (14336, 2048), (128, 4096), (8192, 4096)]
    tensors: dict[str, torch.Tensor] = {}
    left = size_bytes // 4
    while left > 0:
        rows, columns = shapes[len(tensors) % len(shapes)]
        rows = min(rows, -(-left // columns))
        tensors[f"layers.{len(tensors)}.weight"] = torch.randn(rows, columns)
        left -= rows * columns
    torch.save(tensors, directory / "source.pt")
    del tensors
    for goal in ("dcp", "safetensors"):
        convert(directory / "source.pt", directory / f"source{SUFFIX[goal]}")


def measure(directory: Path, origin: str, goal: str, who: str, round: int) -> Sample:
    source, target = directory / f"source{SUFFIX[origin]}", directory / f"target{SUFFIX[goal]}"
    program = BEGIN + (OURS if who == "dcpring" else THEIRS[origin, goal]) + END
    make_cold(directory)
    command = [sys.executable, "-W", "ignore", "-c", program, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    seconds, cpu, peak = done.stdout.split()[-3:]
    return Sample(origin, goal, who, round, float(seconds), float(cpu), int(peak))


def run(directory: Path, rounds: int) -> list[Sample]:
    samples = []
    for round in range(rounds):
        for origin in SUFFIX:
            for goal in SUFFIX:
                for who in ["dcpring", "others"] if (origin, goal) in THEIRS else ["dcpring"]:
                    samples.append(measure(directory, origin, goal, who, round))
    return samples


def medians(samples: list[Sample], size_bytes: int) -> list[dict[str, Any]]:
    rows = []
    for key in dict.fromkeys((s.origin, s.goal, s.who) for s in samples):
        chosen = [s for s in samples if (s.origin, s.goal, s.who) == key]
        rows.append(
            {
                "from": key[0],
                "to": key[1],
                "who": key[2],
                "gib_per_second": size_bytes / GIB / median(s.seconds for s in chosen),
                "cpu_seconds_per_gib": median(s.cpu_seconds for s in chosen) / (size_bytes / GIB),
                "peak_mib": max(s.peak_bytes for s in chosen) / MIB,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'from':<12} {'to':<12} {'who':<8} {'GiB/s':>6} {'CPU s/GiB':>10} {'peak MiB':>9}")
    for row in rows:
        numbers = f"{row['gib_per_second']:6.2f} {row['cpu_seconds_per_gib']:10.2f} {row['peak_mib']:9.0f}"
        print(f"{row['from']:<12} {row['to']:<12} {row['who']:<8} {numbers}")
    worst = max(row["peak_mib"] for row in rows if row["who"] == "dcpring")
    print(f"most memory of dcpring: {worst:.0f} MiB; it must stay below {MEMORY_LIMIT_BYTES // MIB}")


def main() -> None:
    given = Program("convert", __doc__, 3).given()
    size_bytes = 128 * MIB if given.quick else 4 * GIB
    machine = _machine.describe(given.dir)
    print_machine(machine)
    with scratch(given.dir) as folder:
        limits = {"write": write_limit(folder / "limit", size_bytes), "read": read_limit(folder / "limit", size_bytes)}
        (folder / "limit").unlink()
        speeds = {
            name: size_bytes / GIB / (reading.whole.end - reading.whole.begin) for name, reading in limits.items()
        }
        make_sources(folder, size_bytes)
        samples = run(folder, given.rounds)
    rows = medians(samples, size_bytes)
    print(
        f"the disk alone: write {speeds['write']:.2f} GiB/s, read {speeds['read']:.2f} GiB/s; "
        f"cold by {cache_drop_method()}"
    )
    print_rows(rows)
    cold, load = cache_drop_method(), os.getloadavg()[0]
    conditions = {"rounds": given.rounds, "bytes": size_bytes, "cold": cold, "load": load}
    write(
        given.json,
        machine=machine,
        conditions=conditions,
        disk_gib_per_second=speeds,
        medians=rows,
        samples=samples,
    )


if __name__ == "__main__":
    main()
