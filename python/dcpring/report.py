"""What a save's plan did, and what it cost: ``RingSavePlanner.report()``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

__all__ = ["LoadReport", "Metrics", "PlanReport", "RankReport", "ReadReport"]

_WIDEST_COLUMN = 200
"""Longer texts are not cut, but nothing else is moved for them: one long name must not make every row as long."""

_STEP = re.compile(r"(?<![A-Za-z])(?:step[-_=]|global_?step[-_=]?|checkpoint-)(\d{1,18})(?!\w|\.\d)")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def step_of(path: str) -> int | None:
    """The step of a training that a path names, the last of several; other numbers are none."""
    found = _STEP.findall(path)
    return int(found[-1]) if found else None


def count(number: int, what: str) -> str:
    """As "1 file" or "2,000 files"."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def imbalance(loads: Iterable[int]) -> float:
    """The largest load over the mean of those that are not 0. 1.0 is even."""
    some = [load for load in loads if load]
    return max(some) * len(some) / sum(some) if some else 1.0


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] | None = None) -> str:
    """Columns of plain text; those of ``right``, or else all but the first, are aligned to the right."""
    to_right = set(range(1, len(header)) if right is None else right)
    cells = [tuple(header), *map(tuple, rows)]
    widths = [min(max(map(len, column)), _WIDEST_COLUMN) for column in zip(*cells, strict=True)]
    line = "  ".join(f"{{:{'>' if number in to_right else '<'}{width}}}" for number, width in enumerate(widths))
    lines = [line.format(*row).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


@dataclass(frozen=True)
class Metrics:
    """A save or a load in numbers, for ``RingWriter(metrics=)`` and ``RingReader(metrics=)``.

    Attributes:
        operation: "save", of all ranks, or "load", of one.
        path: the checkpoint's directory.
        step: that its path names, as "step-100", "global_step100" or "checkpoint-100"; None where it names none.
        bytes: written to files, or read from them.
        seconds: from the beginning to the end, that of other ranks included: a save is committed and durable then.
        ranks: that took part in the save, with and without bytes to write; 1 for a load.
        slowest_rank: which was longest at writing or reading; of a load the rank whose numbers these are. None where
            ranks have not said.
        slowest_seconds: that it was at writing or reading.
        linked_bytes: of tensors that had not changed, and that a save with ``unchanged="link"`` has not written.
    """

    operation: Literal["save", "load"]
    path: str
    bytes: int
    seconds: float
    ranks: int = 1
    slowest_rank: int | None = None
    slowest_seconds: float = 0.0
    linked_bytes: int = 0

    @property
    def step(self) -> int | None:
        return step_of(self.path)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Flat, for a log of JSON or a data base; the line of the log has these as ``extra``."""
        rank = 0 if self.slowest_rank is None or self.operation == "save" else self.slowest_rank
        speed = self.bytes_per_second
        return asdict(self) | {"step": self.step, "bytes_per_second": speed, "rank": rank, "host": os.uname().nodename}

    def __str__(self) -> str:
        """The line that is logged."""
        step = "" if self.step is None else f"step {self.step}, "
        speed = f"{self.bytes_per_second / 1e9:.2f} GB/s"
        line = f"{step}{format_bytes(self.bytes)} in {self.seconds:.3f} s ({speed})"
        if self.operation == "load":
            return f"loaded {self.path}: {line} by rank {self.slowest_rank or 0}"
        ranks = f"{self.ranks} rank{'s' if self.ranks != 1 else ''}"
        slowest = (
            "" if self.slowest_rank is None else f", slowest rank {self.slowest_rank}: {self.slowest_seconds:.3f} s"
        )
        linked = f", {format_bytes(self.linked_bytes)} linked" if self.linked_bytes else ""
        return f"saved {self.path}: {line} by {ranks}{slowest}{linked}"


@dataclass
class RankReport:
    """One rank's part of a save.

    Attributes:
        rank: in the process group of the save.
        items: tensors, shards, parts of these, and objects that it writes.
        bytes: of tensors that it writes.
        replicas_removed: what it holds and another rank writes.
        replica_bytes: the bytes of these.
        files: written; None until they are, or where the storage does not tell.
        write_seconds: in ``write_data``; likewise.
    """

    rank: int
    items: int = 0
    bytes: int = 0
    replicas_removed: int = 0
    replica_bytes: int = 0
    files: int | None = None
    write_seconds: float | None = None


@dataclass
class PlanReport:
    """A save's plan. ``print`` it.

    Attributes:
        writers: the strategy that was used.
        reason: why, where it was chosen automatically.
        ranks: all ranks on the coordinator, elsewhere only this one.
        seconds: wall time by phase: "local plan", "gather", "plan", "scatter", "write", "commit". Waiting for slower
            ranks is part of the phases that communicate. On other ranks than the coordinator, "gather" to "scatter"
            are one phase, "coordinate".
        gathered_bytes: that the coordinator got as plans. 0 elsewhere.
        scattered_bytes: that it sent back.
        cached: ranks whose plan was that of the last save, and was not sent.
    """

    writers: str = ""
    reason: str = ""
    ranks: list[RankReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    gathered_bytes: int = 0
    scattered_bytes: int = 0
    cached: int = 0

    @property
    def imbalance(self) -> float:
        """The largest rank's bytes over the mean of the ranks that write. 1.0 is even."""
        return imbalance(rank.bytes for rank in self.ranks)

    def __str__(self) -> str:
        header = ("rank", "items", "bytes", "files", "replicas removed", "their bytes", "write s")
        rows = [
            (
                str(rank.rank),
                str(rank.items),
                format_bytes(rank.bytes),
                "-" if rank.files is None else str(rank.files),
                str(rank.replicas_removed),
                format_bytes(rank.replica_bytes),
                "-" if rank.write_seconds is None else f"{rank.write_seconds:.3f}",
            )
            for rank in self.ranks
        ]
        return f"{format_table(header, rows)}\n{self.summary()}" if rows else self.summary()

    def summary(self) -> str:
        """One line, as it is logged."""
        if not self.ranks:
            return "this process has planned no save; one that runs in a process of its own logs its report there"
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.seconds.items())
        reason = f" ({self.reason})" if self.reason else ""
        total = sum(rank.bytes for rank in self.ranks)
        writing = sum(rank.items > 0 for rank in self.ranks)
        cached = f", {self.cached} plans unchanged" if self.cached else ""
        return (
            f"writers={self.writers}{reason}: {format_bytes(total)} in {sum(rank.items for rank in self.ranks)} items "
            f"by {writing} of {len(self.ranks)} ranks, largest {self.imbalance:.2f} of the mean; "
            f"{format_bytes(self.gathered_bytes)} gathered, {format_bytes(self.scattered_bytes)} scattered{cached}; "
            f"{phases}"
        )


@dataclass
class ReadReport:
    """One rank's part of a load. All counts are of tensors' bytes but for ``read_bytes``.

    Attributes:
        rank: in the process group of the load.
        own_bytes: wanted from files that a rank of this number wrote.
        other_bytes: wanted from files that others wrote.
        read_bytes: that it read from files; None before, on other ranks, and where the storage does not tell.
        sent_bytes: that it read and shared with others; likewise.
        received_bytes: that others read for it; likewise.
    """

    rank: int
    own_bytes: int = 0
    other_bytes: int = 0
    read_bytes: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None


@dataclass
class LoadReport:
    """A load's plan. ``print`` it.

    Attributes:
        share: how ranks share what several of them need: "host", "all" or "off".
        ranks: all ranks on the coordinator, elsewhere only this one; empty for storage that does not tell.
    """

    share: str = "off"
    ranks: list[ReadReport] = field(default_factory=list)

    def __str__(self) -> str:
        header = ("rank", "from own files", "from others'", "read", "sent", "received")
        rows = [
            (
                str(rank.rank),
                *map(format_bytes, (rank.own_bytes, rank.other_bytes)),
                *(_known(count) for count in (rank.read_bytes, rank.sent_bytes, rank.received_bytes)),
            )
            for rank in self.ranks
        ]
        return f"{format_table(header, rows)}\n{self.summary()}"

    def summary(self) -> str:
        """One line, as it is logged."""
        own, other = sum(rank.own_bytes for rank in self.ranks), sum(rank.other_bytes for rank in self.ranks)
        return (
            f"share={self.share}: {format_bytes(own + other)} wanted by {len(self.ranks)} ranks, "
            f"{format_bytes(other)} of them from files that others wrote"
        )


def _known(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)
