"""``dcpring trace``: where the time of a save or a load went, and who waited for whom, from the traces of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpring.base.text import ranks, spans
from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_json, positive
from dcpring.errors import CheckpointError
from dcpring.report import format_bytes

if TYPE_CHECKING:
    from dcpring.tools.traces import Phase, TracedOperation

_DESCRIPTION = """\
Reads the traces that RingWriter(trace="t.json"), RingReader(trace=...) or the environment variable DCPRING_TRACE have
made, and prints a table for each save and load: the seconds of each phase on each rank (of more than 8 ranks: the
least, the median and the most), the slowest rank, how long the others waited for it together, and what the slowest was
at. Give the traces of all ranks.

"fill" copies tensors into blocks, "use" copies blocks into tensors, "write" and "read" are the disk's, "allocate"
preallocates a file, "set up" makes buffers; they go on at the same time. The traces themselves can be looked at in
ui.perfetto.dev or chrome://tracing."""

_MOST_COLUMNS = 8
"""Ranks that get a column each."""

_MOST_PARTS = 3


def add(commands: Commands) -> None:
    parser = commands.add(
        "trace",
        run,
        "where the time of a save or a load went",
        _DESCRIPTION,
        [
            ("dcpring trace trace/t.*.json", "each phase of each save and load, by rank"),
            ("dcpring trace trace/t.0.json trace/t.1.json --json", "the same, for scripts"),
        ],
        differs="",
    )
    parser.add_argument(
        "traces", metavar="TRACE", nargs="+", type=Path, help="traces of all ranks of a run, or their folder"
    )
    parser.add_argument("--operation", metavar="N", type=positive, help="only the Nth save or load")
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    from dcpring.tools.traces import read_operations

    operations, notes = read_operations([path for given in args.traces for path in _files(given)])
    if not operations:
        raise CheckpointError(f"there is no save or load in {args.traces[0]}")
    chosen = {number: operations[number - 1] for number in _chosen(operations, args.operation)}
    if args.json:
        out.json({"operations": [_as_json(number, one) for number, one in chosen.items()], "notes": notes})
    else:
        for number, one in chosen.items():
            _show(number, one, out)
    for note in notes:
        out.note(note)
    return 0


def _files(given: Path) -> list[Path]:
    """The trace, or those in the folder."""
    if not given.is_dir():
        return [given]
    found = sorted(given.glob("*.json"))
    if not found:
        raise CheckpointError(f"there are no traces (*.json) in {given}")
    return found


def _chosen(operations: Sequence[TracedOperation], number: int | None) -> Sequence[int]:
    if number is None:
        return range(1, len(operations) + 1)
    if number > len(operations):
        raise CheckpointError(f"--operation {number}: there are only {len(operations)} in these traces")
    return [number]


def _show(number: int, one: TracedOperation, out: Output) -> None:
    from dcpring.tools.traces import phases, slowest_file

    took = f"{_seconds(one.end - one.begin)} s, {ranks(len(one.parts))}"
    out.text(f"operation {number}: {one.kind} {one.checkpoint}: {took}", style="bold")
    for rank, text in _failures(one).items():
        out.text(f"failed on rank {rank}: {text}", style="bold red")
    if one.missing:
        out.text(f"the traces of {spans(one.missing)} of {one.world_size} are missing", style="yellow")
    known = sorted(one.parts)
    are_many = len(known) > _MOST_COLUMNS
    columns = ["least", "median", "most"] if are_many else [f"rank {rank}" for rank in known]
    rows = [_row(phase, known, are_many) for phase in phases(one)]
    header = ["phase", *columns, "slowest", "others waited", "of which"]
    out.table(header, rows, right=range(1, len(header) - 1), title="seconds by phase and rank")
    slowest = slowest_file(one)
    if slowest is not None:
        rank, name, micros, moved = slowest
        speed = f", {moved / micros / 1e3:.2f} GB/s" if moved and micros else ""
        out.text(f"slowest file: {name} of rank {rank}: {format_bytes(moved)} in {_seconds(micros)} s{speed}")
    out.text()


def _row(phase: Phase, known: Sequence[int], are_many: bool) -> list[str]:
    times = [phase.took[rank] for rank in known if rank in phase.took]
    cells = [_seconds(phase.took[rank]) if rank in phase.took else "-" for rank in known]
    if are_many:
        ordered = sorted(times)
        cells = [_seconds(micros) for micros in (ordered[0], ordered[len(ordered) // 2], ordered[-1])]
    parts = ", ".join(f"{name} {_seconds(took)} s" for name, took in list(phase.parts.items())[:_MOST_PARTS])
    return [phase.name, *cells, f"rank {phase.slowest}", _seconds(sum(phase.waited.values())), parts]


def _failures(operation: TracedOperation) -> dict[int, str]:
    return {rank: part.failed for rank, part in sorted(operation.parts.items()) if part.failed}


def _seconds(micros: int) -> str:
    return f"{micros / 1e6:.3f}"


def _as_json(number: int, one: TracedOperation) -> dict[str, Any]:
    from dcpring.tools.traces import phases, slowest_file

    slowest = slowest_file(one)
    names = ("rank", "file", "seconds", "bytes")
    return {
        "number": number,
        "kind": one.kind,
        "checkpoint": one.checkpoint,
        "begin": one.begin / 1e6,
        "seconds": (one.end - one.begin) / 1e6,
        "world_size": one.world_size,
        "missing_ranks": one.missing,
        "failed": {str(rank): text for rank, text in _failures(one).items()},
        "phases": [_phase_as_json(phase) for phase in phases(one)],
        "slowest_file": slowest and dict(zip(names, (*slowest[:2], slowest[2] / 1e6, slowest[3]), strict=True)),
    }


def _phase_as_json(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "slowest": phase.slowest,
        "seconds": {str(rank): micros / 1e6 for rank, micros in sorted(phase.took.items())},
        "waited": {str(rank): micros / 1e6 for rank, micros in sorted(phase.waited.items()) if micros},
        "parts": {name: micros / 1e6 for name, micros in phase.parts.items()},
    }
