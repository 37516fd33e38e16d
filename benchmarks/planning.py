"""Save planning on the coordinator, stock DCP's and dcpring's, on the same synthetic plans of up to 4096 ranks.

    python benchmarks/planning.py                # all jobs, 3 rounds: about 20 minutes
    python benchmarks/planning.py --quick        # small jobs, one round: does everything work?

Measured is all that the coordinator does from the bytes that gather_object has brought to the bytes that it scatters,
and the Metadata. dcpring makes the Metadata's Python objects when someone looks: what that costs is a column of its
own, and ratios are given without and with it. Every sample has a process of its own; the contestants take turns. Stock
takes part in the larger jobs as long as its time and memory, estimated from smaller ones, allow.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import _machine
from _contestants import OURS, STOCK
from _growth import laws_as_json
from _layouts import ADAMW, FSDP, HSDP, REPLICATED, TP_FSDP, Job
from _planners import PlanSample, measure, write_gathered
from _planning_report import Planned, medians_as_json, print_growth, print_job, targets
from _program import Program, draw, print_machine, scratch, write
from _targets import print_targets, targets_as_json

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


def main() -> None:
    program = Program("planning", __doc__, 3, ("json", "png"))
    program.add_argument(
        "--stock-seconds", type=float, default=40.0, help="CPU seconds that a sample of stock may take"
    )
    given = program.given()
    jobs = QUICK if given.quick else FULL
    machine = _machine.describe(given.dir)
    print_machine(machine)
    with scratch(given.dir) as folder:
        samples = run(jobs, given.rounds, given.stock_seconds, folder)
    planned = Planned(samples)
    growth = [sample for sample in samples if any(_is_of(sample, job) for job in jobs.growth)]
    for job in jobs.jobs:
        print_job(planned, job)
    print_growth(growth)
    found = targets(planned, jobs.jobs, jobs.growth)
    print_targets(found, given.quick)
    write(
        given.json,
        machine=machine,
        conditions={"rounds": given.rounds, "quick": given.quick},
        targets=targets_as_json(found),
        medians=medians_as_json(planned, [*jobs.jobs, *jobs.growth]),
        growth=laws_as_json(growth),
        samples=samples,
    )
    draw(given.png, "_planning_plot", growth, machine)


if __name__ == "__main__":
    main()
