"""What dcpring has to reach, and whether this run reached it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from _contestants import DISK, NULL, OURS, STOCK
from _measure import LOAD_COLD, LOAD_WARM, SAVE
from _peers import RUNAI
from _report import Measured, data_seconds, most_mib, print_table, ratios, seconds
from _reshard import ReshardSample
from _shapes import GIB, LARGE, MEDIUM, SMALL, ShapeSet

OF_DISK = 0.9
TIMES_NULL = 1.3
TIMES_STOCK_WARM = 3.0
CPU_SECONDS_PER_GIB = 0.6
CPU_OF_STOCK = 1 / 3
MEMORY_MIB = 64.0
READ_OF_NEEDED = 1.1
READ_OF_WHOLE = 1.001


@dataclass(frozen=True)
class Target:
    """`values` holds one number a round, of which the median counts; none where this run did not measure it."""

    name: str
    limit: float
    at_least: bool
    values: list[float]

    @property
    def verdict(self) -> str:
        if not self.values:
            return "not measured"
        found = median(self.values)
        reached = found >= self.limit if self.at_least else found <= self.limit
        return "pass" if reached else "FAIL"

    def cells(self) -> tuple[str, ...]:
        limit = f"{'>=' if self.at_least else '<='} {self.limit:.2f}"
        if not self.values:
            return self.name, limit, "-", "-", self.verdict
        spread = f"{min(self.values):.2f} .. {max(self.values):.2f}"
        return self.name, limit, f"{median(self.values):.2f}", spread, self.verdict


def targets(measured: Measured, reshard: Sequence[ReshardSample], shapes: ShapeSet) -> list[Target]:
    kinds = (_disk_targets, _planning_targets, _warm_targets, _cpu_targets, _memory_targets, _streamer_targets)
    found = [target for procs in measured.procs() for kind in kinds for target in kind(measured, procs, shapes)]
    return found + list(_reshard_targets(reshard))


def print_targets(found: Sequence[Target], is_quick: bool = False) -> None:
    print_table("targets", ("", "target", "found", "rounds", ""), [target.cells() for target in found])
    if is_quick:
        print("  (--quick: these sizes say that it works, not how fast)")


def targets_as_json(found: Sequence[Target]) -> list[dict[str, Any]]:
    return [{**asdict(target), "verdict": target.verdict} for target in found]


def _where(shapes: ShapeSet, shape: str, procs: int) -> str:
    return f"{shapes.get(shape).title}, {procs}p"


def _disk_targets(measured: Measured, procs: int, shapes: ShapeSet) -> Iterator[Target]:
    for phase, method in ((SAVE, "write_data"), (LOAD_COLD, "read_data")):
        for shape in (LARGE, MEDIUM):
            disk, ours = (measured.get(shape, procs, phase, who) for who in (DISK, OURS))
            name = f"{phase}, {_where(shapes, shape, procs)}: {method}, of the disk's limit"
            yield Target(name, OF_DISK, True, ratios(seconds(disk), data_seconds(ours)))


def _planning_targets(measured: Measured, procs: int, shapes: ShapeSet) -> Iterator[Target]:
    for phase in (SAVE, LOAD_COLD):
        ours, null, disk = (seconds(measured.get(SMALL, procs, phase, who)) for who in (OURS, NULL, DISK))
        beyond_disk = [whole - moving for whole, moving in zip(ours, disk, strict=True)]
        name = f"{phase}, {_where(shapes, SMALL, procs)}: time beyond the disk's, of DCP without storage"
        yield Target(name, TIMES_NULL, False, ratios(beyond_disk, null))


def _warm_targets(measured: Measured, procs: int, shapes: ShapeSet) -> Iterator[Target]:
    for shape in (LARGE, MEDIUM):
        stock, ours = (seconds(measured.get(shape, procs, LOAD_WARM, who)) for who in (STOCK, OURS))
        name = f"{LOAD_WARM}, {_where(shapes, shape, procs)}: speed, of stock's"
        yield Target(name, TIMES_STOCK_WARM, True, ratios(stock, ours))


def _cpu_targets(measured: Measured, procs: int, shapes: ShapeSet) -> Iterator[Target]:
    for phase in (SAVE, LOAD_COLD, LOAD_WARM):
        stock, ours = (measured.get(LARGE, procs, phase, who) for who in (STOCK, OURS))
        spent = [s.cpu_seconds / (s.tensor_bytes / GIB) for s in ours]
        of_stock = ratios([s.cpu_seconds for s in ours], [s.cpu_seconds for s in stock])
        where = f"{phase}, {_where(shapes, LARGE, procs)}"
        yield Target(f"{where}: CPU seconds per GiB", CPU_SECONDS_PER_GIB, False, spent)
        yield Target(f"{where}: CPU seconds, of stock's", CPU_OF_STOCK, False, of_stock)


def _memory_targets(measured: Measured, procs: int, shapes: ShapeSet) -> Iterator[Target]:
    for phase, method in ((SAVE, "write_data"), (LOAD_COLD, "read_data"), (LOAD_WARM, "read_data")):
        for shape in (LARGE, MEDIUM, SMALL):
            most = most_mib(s.data_peak_bytes for s in measured.get(shape, procs, phase, OURS))
            name = f"{phase}, {_where(shapes, shape, procs)}: memory of {method}, MiB per rank"
            yield Target(name, MEMORY_MIB, False, [] if most is None else [most])


def _streamer_targets(measured: Measured, procs: int, shapes: ShapeSet) -> Iterator[Target]:
    """Against whichever of the streamer's two ways is the faster one."""
    ways = sorted(name for name in measured.names() if name.startswith(RUNAI))
    for shape in (LARGE, MEDIUM) if procs == 1 else ():
        ours = seconds(measured.get(shape, procs, LOAD_COLD, OURS))
        against = [
            ratios(theirs, ours) for way in ways if (theirs := seconds(measured.get(shape, procs, LOAD_COLD, way)))
        ]
        name = f"{LOAD_COLD}, {_where(shapes, shape, procs)}: speed, of {RUNAI}'s"
        yield Target(name, 1.0, True, min(against, key=median, default=[]))


def _reshard_targets(reshard: Sequence[ReshardSample]) -> Iterator[Target]:
    ours = [sample for sample in reshard if sample.who == OURS]
    rows = [s.disk_read_bytes / s.needed_bytes for s in ours if s.placement == "Shard(0)"]
    columns = [s.disk_read_bytes / s.whole_bytes for s in ours if s.placement == "Shard(1)"]
    yield Target("Shard(0) part of a whole tensor: bytes read, of those needed", READ_OF_NEEDED, False, rows)
    yield Target("Shard(1) part of a whole tensor: bytes read, of the whole", READ_OF_WHOLE, False, columns)
