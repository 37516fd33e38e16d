"""From samples to medians: the table of all contestants, the resharded loads, and the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from _contestants import DISK, NULL, STOCK
from _measure import PHASES, SAVE, Sample
from _reshard import ReshardSample
from _shapes import GIB, MIB, ShapeSet


@dataclass(frozen=True)
class Row:
    """Medians of one contestant in one phase; memory is the most that any round needed, per rank.

    `of_disk` compares `write_data` or `read_data` with the disk's limit, `times_stock` the whole save or load with
    stock's; both are medians of the ratios within a round.
    """

    shape: str
    procs: int
    phase: str
    who: str
    seconds: float
    data_seconds: float
    gib_per_second: float
    cpu_seconds_per_gib: float
    peak_mib: float | None
    data_peak_mib: float | None
    times_stock: float | None
    of_disk: float | None
    fsync: str
    engine: str


class Measured:
    """The samples by shape, process count, phase and contestant, each list in the order of the rounds."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.by_key: dict[tuple[str, int, str, str], list[Sample]] = {}
        for sample in samples:
            self.by_key.setdefault((sample.shape, sample.procs, sample.phase, sample.who), []).append(sample)

    def get(self, shape: str, procs: int, phase: str, who: str) -> list[Sample]:
        return self.by_key.get((shape, procs, phase, who), [])

    def procs(self) -> list[int]:
        return sorted({key[1] for key in self.by_key})

    def names(self) -> set[str]:
        return {key[3] for key in self.by_key}

    def rows(self, shape: str, procs: int, phase: str) -> list[Row]:
        return [self.row(*key) for key in self.by_key if key[:3] == (shape, procs, phase)]

    def row(self, shape: str, procs: int, phase: str, who: str) -> Row:
        samples = self.get(shape, procs, phase, who)
        stock, disk = self.get(shape, procs, phase, STOCK), self.get(shape, procs, phase, DISK)
        gib = samples[0].tensor_bytes / GIB
        return Row(
            shape=shape,
            procs=procs,
            phase=phase,
            who=who,
            seconds=median(s.seconds for s in samples),
            data_seconds=median(s.data_seconds for s in samples),
            gib_per_second=median(gib / s.seconds for s in samples),
            cpu_seconds_per_gib=median(s.cpu_seconds / gib for s in samples),
            peak_mib=most_mib(s.peak_bytes for s in samples),
            data_peak_mib=most_mib(s.data_peak_bytes for s in samples),
            times_stock=median_or_none(ratios(seconds(stock), seconds(samples))),
            of_disk=median_or_none(ratios(seconds(disk), data_seconds(samples))) if who != NULL else None,
            fsync=samples[0].fsync,
            engine=samples[-1].engine,
        )


def seconds(samples: Iterable[Sample]) -> list[float]:
    return [sample.seconds for sample in samples]


def data_seconds(samples: Iterable[Sample]) -> list[float]:
    return [sample.data_seconds for sample in samples]


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round; nothing if one side was not measured."""
    if not numerators or not denominators:
        return []
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def median_or_none(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def most_mib(sizes: Iterable[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return max(known) / MIB if known else None


def print_rows(measured: Measured, shapes: ShapeSet) -> None:
    for shape in shapes.shapes:
        for procs in measured.procs():
            for phase in PHASES:
                block = measured.rows(shape.key, procs, phase)
                if block:
                    _print_block(f"{shape.title}, {processes(procs)}, {long_name(phase)}", block)


def processes(procs: int) -> str:
    return "1 process" if procs == 1 else f"{procs} processes"


def long_name(phase: str) -> str:
    return "save, durable" if phase == SAVE else phase


HEADS = ("", "seconds", "data s", "GiB/s", "CPU s/GiB", "peak MiB", "vs stock", "of disk")


def _print_block(title: str, block: Sequence[Row]) -> None:
    if block[0].phase == SAVE:
        print_table(title, (*HEADS, "fsync"), [(*_cells(row), row.fsync) for row in block])
    else:
        print_table(title, HEADS, [_cells(row) for row in block])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.who} ({row.engine})" if row.engine else row.who,
        f"{row.seconds:.3f}",
        f"{row.data_seconds:.3f}",
        f"{row.gib_per_second:.2f}",
        f"{row.cpu_seconds_per_gib:.2f}",
        _number(row.peak_mib, "{:.0f}"),
        _number(row.times_stock, "{:.2f}x"),
        _number(row.of_disk, "{:.2f}"),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def print_table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
    print(f"\n{title}")
    for first, *others in (heads, *lines):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        print(f"  {'  '.join(cells)}".rstrip())


def print_reshard(samples: Sequence[ReshardSample]) -> None:
    if not samples:
        return
    lines = []
    for who, placement in dict.fromkeys((s.who, s.placement) for s in samples):
        part = [s for s in samples if (s.who, s.placement) == (who, placement)]
        reported = most_mib(s.reported_bytes for s in part)
        lines.append(
            (
                f"{who}, {placement}",
                f"{part[0].needed_bytes / MIB:.0f}",
                f"{max(s.disk_read_bytes for s in part) / MIB:.1f}",
                _number(reported, "{:.1f}"),
                f"{median(s.seconds for s in part):.3f}",
            )
        )
    print_table(
        f"one rank's part of a tensor of {samples[0].whole_bytes / MIB:.0f} MiB saved whole, load cold",
        ("", "needed MiB", "read from disk MiB", "read by its own count MiB", "read_data s"),
        lines,
    )


def as_json(measured: Measured, reshard: Sequence[ReshardSample]) -> dict[str, Any]:
    return {
        "medians": [asdict(measured.row(*key)) for key in measured.by_key],
        "samples": [asdict(sample) for samples in measured.by_key.values() for sample in samples],
        "reshard": [asdict(sample) for sample in reshard],
    }
