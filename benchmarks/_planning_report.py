"""The tables and targets of benchmarks/planning.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from _contestants import OURS, STOCK
from _growth import growths
from _layouts import LAYOUTS, Job
from _planners import STEPS, PlanSample
from _report import print_table, ratios
from _shapes import GIB, MIB
from _targets import Target

TIMES_STOCK = 15.0
BYTES_PER_ITEM = 40.0
MOST_CPU_SECONDS, MOST_MEMORY_GIB, OF_JOB = 20.0, 4.0, (2000, 1024)


class Planned:
    """The samples by job and contestant, each list in the order of the rounds."""

    def __init__(self, samples: Sequence[PlanSample]) -> None:
        self.samples = list(samples)

    def get(self, job: Job, who: str) -> list[PlanSample]:
        key = (job.layout.key, job.tensor_count, job.ranks, who)
        return [s for s in self.samples if (s.layout, s.tensors, s.ranks, s.who) == key]

    def times_stock(self, job: Job, cost: Callable[[PlanSample], float | None]) -> list[float]:
        """Stock's cost over ours, round by round; nothing where either was not measured."""
        costs = [[cost(sample) for sample in self.get(job, who)] for who in (STOCK, OURS)]
        known = [[value for value in values if value is not None] for values in costs]
        return ratios(*known) if known[0] and len(known[0]) == len(known[1]) else []


def cpu(sample: PlanSample) -> float:
    return sample.cpu_seconds


def cpu_with_objects(sample: PlanSample) -> float | None:
    if sample.materialise_seconds is None:
        return None
    return sample.cpu_seconds + sample.materialise_seconds


def cpu_with_all(sample: PlanSample) -> float | None:
    """And with the pickle of the metadata."""
    with_objects = cpu_with_objects(sample)
    return None if with_objects is None else with_objects + sample.metadata_pickle_seconds


# ---- tables ----


def print_job(planned: Planned, job: Job) -> None:
    present = [who for who in (STOCK, OURS) if planned.get(job, who)]
    heads = ("", "CPU s", *STEPS, "+ objects", "+ metadata pickle", "vs stock", "with objects", "and pickle")
    print_table(f"{job.title}: CPU seconds of the coordinator", heads, [_times(planned, job, who) for who in present])
    heads = ("", "wall s", "gathered MiB", "B/item", "scattered MiB", "B/item", "peak MiB", "balance", "strategy")
    print_table(f"{job.title}: bytes, memory", heads, [_bytes(planned.get(job, who)) for who in present])


def _times(planned: Planned, job: Job, who: str) -> tuple[str, ...]:
    samples = planned.get(job, who)
    kinds = (cpu, cpu_with_objects, cpu_with_all)
    return (
        who,
        _median(samples, cpu),
        *(_median(samples, lambda sample, step=step: sample.steps[step]) for step in STEPS),  # type: ignore[misc]
        _median(samples, lambda sample: sample.materialise_seconds),
        _median(samples, lambda sample: sample.metadata_pickle_seconds),
        *("" if who == STOCK else _ratio(planned.times_stock(job, kind)) for kind in kinds),
    )


def _bytes(samples: Sequence[PlanSample]) -> tuple[str, ...]:
    first = samples[0]
    return (
        first.who,
        _median(samples, lambda sample: sample.seconds),
        f"{first.gathered_bytes / MIB:.2f}",
        f"{first.gathered_bytes / first.items:.1f}",
        f"{first.scattered_bytes / MIB:.2f}",
        f"{first.scattered_bytes / first.items:.2f}",
        _median(samples, lambda sample: None if sample.peak_bytes is None else sample.peak_bytes / MIB, "{:.0f}"),
        f"{first.balance:.3f}",
        first.strategy,
    )


def _median(samples: Sequence[PlanSample], value: Callable[[PlanSample], float | None], form: str = "{:.3f}") -> str:
    known = [found for found in map(value, samples) if found is not None]
    return form.format(median(known)) if known else "-"


def _ratio(values: Sequence[float]) -> str:
    return f"{median(values):.1f}x" if values else "-"


def print_growth(samples: Sequence[PlanSample]) -> None:
    """By ranks; "~" marks what is fitted and was not measured."""
    found = growths(samples)
    heads = ["ranks"]
    for quantity in ("CPU s", "gathered MiB", "peak MiB"):
        heads += [f"{quantity}, {STOCK}", OURS, "ratio"]
    units = {"cpu_seconds": 1.0, "gathered_bytes": MIB, "peak_bytes": MIB}
    lines = []
    for ranks in sorted({sample.ranks for sample in samples}):
        line = [str(ranks)]
        for quantity, unit in units.items():
            (stock, fitted), (ours, _) = (found[who, quantity].at(ranks) for who in (STOCK, OURS))
            mark = "~" if fitted else ""
            line += [
                "-" if stock is None else f"{mark}{stock / unit:.2f}",
                "-" if ours is None else f"{ours / unit:.2f}",
            ]
            line.append("-" if not stock or not ours else f"{mark}{stock / ours:.1f}x")
        lines.append(line)
    print_table(f"FSDP, {samples[0].tensors} tensors, by ranks (~: fitted, not measured)", heads, lines)
    for (who, quantity), growth in found.items():
        if growth.law is not None:
            law = growth.law
            print(f"  {who}, {quantity}: ranks ** {law.exponent:.2f} (within {law.worst:.0%} of what was measured)")


# ---- targets ----


def targets(planned: Planned, jobs: Sequence[Job], growth: Sequence[Job]) -> list[Target]:
    return [
        *_times_targets(planned, jobs),
        *_bytes_targets(planned, [*jobs, *growth]),
        *_scale_targets(planned, growth),
    ]


def _times_targets(planned: Planned, jobs: Sequence[Job]) -> Iterator[Target]:
    for job in jobs:
        yield Target(f"{job.title}: CPU, of stock's", TIMES_STOCK, True, planned.times_stock(job, cpu))
        with_objects = planned.times_stock(job, cpu_with_objects)
        yield Target(f"{job.title}: the same, Metadata as objects", TIMES_STOCK, True, with_objects)


def _bytes_targets(planned: Planned, jobs: Sequence[Job]) -> Iterator[Target]:
    found = [sample.gathered_bytes / sample.items for job in jobs for sample in planned.get(job, OURS)]
    yield Target("bytes gathered per item, the worst job", BYTES_PER_ITEM, False, [max(found)] if found else [])


def _scale_targets(planned: Planned, growth: Sequence[Job]) -> Iterator[Target]:
    samples = [s for job in growth if (job.tensor_count, job.ranks) == OF_JOB for s in planned.get(job, OURS)]
    title = "{} x {}".format(*OF_JOB)
    yield Target(f"{title}: CPU seconds", MOST_CPU_SECONDS, False, [sample.cpu_seconds for sample in samples])
    memory = [sample.peak_bytes / GIB for sample in samples if sample.peak_bytes is not None]
    yield Target(f"{title}: memory, GiB", MOST_MEMORY_GIB, False, memory)


# ---- results ----


def medians_as_json(planned: Planned, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One entry for each job and contestant; numbers are medians over the rounds."""
    return [
        _merged(planned.get(job, who))
        | {"times_stock": _median_of(planned.times_stock(job, cpu)) if who == OURS else None}
        | {"times_stock_with_objects": _median_of(planned.times_stock(job, cpu_with_objects)) if who == OURS else None}
        for job in jobs
        for who in (STOCK, OURS)
        if planned.get(job, who)
    ]


def _merged(samples: Sequence[PlanSample]) -> dict[str, Any]:
    merged: dict[str, Any] = {"title": Job(LAYOUTS[samples[0].layout], samples[0].tensors, samples[0].ranks).title}
    for field in fields(PlanSample):
        values = [getattr(sample, field.name) for sample in samples]
        numeric = all(isinstance(value, (int, float)) for value in values)
        merged[field.name] = median(values) if numeric else values[0]
    merged["steps"] = {step: median(sample.steps[step] for sample in samples) for step in STEPS}
    del merged["round"], merged["content"]
    return merged


def _median_of(values: Sequence[float]) -> float | None:
    return median(values) if values else None
