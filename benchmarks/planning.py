"""Save planning on the coordinator, stock DCP's and dcpring's, on the same synthetic plans of up to 4096 ranks.

    python benchmarks/planning.py                # all jobs, 3 rounds: about 20 minutes
    python benchmarks/planning.py --quick        # small jobs, one round: does everything work?

Measured is all that the coordinator does from the bytes that gather_object has brought to the bytes that it scatters,
and the Metadata. dcpring makes the Metadata's Python objects when someone looks: what that costs is a column of its
own, and ratios are given without and with it. Every sample has a process of its own; the contestants take turns. Stock
takes part in the larger jobs as long as its time and memory, estimated from smaller ones, allow.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import _machine
from _contestants import OURS, STOCK
from _growth import laws_as_json
from _layouts import ADAMW, FSDP, HSDP, REPLICATED, TP_FSDP, Job
from _planners import PlanSample, measure, write_gathered
from _planning_report import Planned, medians_as_json, print_growth, print_job, targets
from _targets import print_targets

RESULTS = Path(__file__).parent / "results"
OF_MEMORY = 0.4

Result = TypeVar("Result")


@dataclass(frozen=True)
class JobSet:
    """`growth` is one layout with more and more ranks."""

    jobs: tuple[Job, ...]
    growth: tuple[Job, ...]


FULL = JobSet(
    jobs=(
        Job(FSDP, 1000, 256),
        Job(FSDP, 4000, 64),
        Job(REPLICATED, 1000, 256),
        Job(HSDP, 1000, 128),
        Job(TP_FSDP, 1000, 128),
        Job(ADAMW, 1000, 128),
    ),
    growth=tuple(Job(FSDP, 2000, 2**power) for power in range(4, 13)),
)
QUICK = JobSet(
    jobs=(Job(TP_FSDP, 60, 16), Job(REPLICATED, 60, 16), Job(HSDP, 60, 16), Job(ADAMW, 60, 16)),
    growth=tuple(Job(FSDP, 40, ranks) for ranks in (4, 8, 16)),
)


class WrongPlan(Exception):
    """The contestants' checkpoints do not hold the same tensors."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default: 3; with --quick: 1")
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.name}/planning.json; with --quick: none")
    parser.add_argument("--png", type=Path, help=f"default: {RESULTS.name}/planning.png; with --quick: none")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="for what is gathered, 300 MiB (default: here)")
    parser.add_argument("--stock-seconds", type=float, default=40.0, help="CPU seconds that a sample of stock may take")
    parser.add_argument("--quick", action="store_true", help="small jobs: a smoke test, not a measurement")
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else 3
    if not arguments.quick:
        arguments.json = arguments.json or RESULTS / "planning.json"
        arguments.png = arguments.png or RESULTS / "planning.png"
    return arguments


# ---- running ----


def run(jobs: JobSet, rounds: int, stock_seconds: float, directory: Path) -> list[PlanSample]:
    samples: list[PlanSample] = []
    for job in (*jobs.jobs, *jobs.growth):
        contestants = [STOCK, OURS] if _stock_can(job, samples, stock_seconds) else [OURS]
        samples += _run_job(job, contestants, rounds, directory)
        contents = {sample.content for sample in samples if _is_of(sample, job) and sample.content}
        if len(contents) > 1:
            raise WrongPlan(f"{job.title}: the contestants' checkpoints do not hold the same tensors")
    return samples


def _stock_can(job: Job, samples: Sequence[PlanSample], seconds: float) -> bool:
    """Whether stock's time and memory, in proportion to its largest job so far, allow this one."""
    before = [sample for sample in samples if sample.who == STOCK]
    if not before:
        return True
    largest = max(before, key=lambda sample: sample.items)
    larger = job.items / largest.items
    memory = (largest.peak_bytes or 0) * larger
    return largest.cpu_seconds * larger <= seconds and memory <= OF_MEMORY * _machine.available_bytes()


def _run_job(job: Job, contestants: Sequence[str], rounds: int, directory: Path) -> Iterator[PlanSample]:
    files = {who: directory / f"{who}.pickle" for who in contestants}
    for who, path in files.items():
        _in_fresh_process(write_gathered, path, job, who)
    for number in range(rounds):
        print(f"{job.title}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for who in contestants if number % 2 == 0 else contestants[::-1]:
            yield _in_fresh_process(measure, files[who], job, who, number)
    for path in files.values():
        path.unlink()


def _in_fresh_process(call: Callable[..., Result], *args: Any) -> Result:
    """Forked from this process, which has imported everything and done nothing: no heap from before hides a peak."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(call, *args).result()


def _is_of(sample: PlanSample, job: Job) -> bool:
    return (sample.layout, sample.tensors, sample.ranks) == (job.layout.key, job.tensor_count, job.ranks)


# ---- results ----


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nwritten: {path}")


def draw_picture(path: Path, growth: Sequence[PlanSample], machine: dict[str, str | int]) -> None:
    try:
        from _planning_plot import draw
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (pip install matplotlib)")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path, growth, machine)
    print(f"drawn: {path}")


def main() -> None:
    arguments = parse_arguments()
    jobs = QUICK if arguments.quick else FULL
    machine = _machine.describe(arguments.dir)
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in machine.items()))
    print(f"load average before: {os.getloadavg()[0]:.1f}; rounds: {arguments.rounds}")
    with tempfile.TemporaryDirectory(prefix="planning-", dir=arguments.dir) as scratch:
        samples = run(jobs, arguments.rounds, arguments.stock_seconds, Path(scratch))
    planned = Planned(samples)
    growth = [sample for sample in samples if any(_is_of(sample, job) for job in jobs.growth)]
    for job in jobs.jobs:
        print_job(planned, job)
    print_growth(growth)
    found = targets(planned, jobs.jobs, jobs.growth)
    print_targets(found)
    if arguments.quick:
        print("  (--quick: these sizes say that it works, not how fast)")
    if arguments.json:
        content = {
            "machine": machine,
            "conditions": {"rounds": arguments.rounds, "quick": arguments.quick},
            "targets": [{**asdict(target), "verdict": target.verdict} for target in found],
            "medians": medians_as_json(planned, [*jobs.jobs, *jobs.growth]),
            "growth": laws_as_json(growth),
            "samples": [asdict(sample) for sample in samples],
        }
        write_json(arguments.json, content)
    if arguments.png:
        draw_picture(arguments.png, growth, machine)


if __name__ == "__main__":
    main()
