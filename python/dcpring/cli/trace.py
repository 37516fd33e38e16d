"""``dcpring trace``: why a save or a load took as long as it did, from the traces of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcpring._critical import CRC, LATE, OTHER, Analysis, RankTimes, Step
from dcpring._stored import ranks, spans
from dcpring._trace_read import Operation, read_operations
from dcpring.cli._output import Output
from dcpring.cli._parser import Commands, add_json, positive
from dcpring.errors import CheckpointError
from dcpring.report import format_bytes

_SHORT = 0.01
"""Steps that take less than this part of the whole are not in the one line."""

_MOST_WAITS = 10

_COLUMNS = ("fill", "read", "use", CRC, "write", "fsync", OTHER)
"""What ranks' times in data are shown as; the rest counts as other."""

_DESCRIPTION = """\
Reads the traces that RingWriter(trace="t.json"), RingReader(trace=...) or the environment variable DCPRING_TRACE have
made, and tells of each save and load: its critical path (what had to be over before the next could begin, through all
ranks), who waited for whom, what each rank's time went into, and the file that took longest. Give the traces of all
ranks: what a rank did whose trace is missing shows as waiting of the others.

"write" and "read" are times in which a rank had nothing to do but wait for the disk. The traces themselves can be
looked at in ui.perfetto.dev or chrome://tracing."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "trace",
        run,
        "why a save or a load took so long",
        _DESCRIPTION,
        [
            ("dcpring trace trace/t.*.json", "what each save and load waited for"),
            ("dcpring trace trace/t.0.json trace/t.1.json --json", "the same, for scripts"),
            ("dcpring trace trace/t.*.json --output timeline.svg", "draws the timeline too"),
        ],
    )
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path, help="the traces of all ranks of a run")
    parser.add_argument("--operation", metavar="N", type=positive, help="only the Nth save or load")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="draw the timeline of it, or of the last one, to a .png or .svg; needs dcpring[plot]",
    )
    add_json(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    if args.output is not None and args.output.suffix.lower() not in (".png", ".svg"):
        raise CheckpointError(f"--output {args.output}: the timeline is drawn as .png or .svg; choose one of them")
    operations, notes = read_operations(args.traces)
    if not operations:
        raise CheckpointError(f"there is no save or load in {args.traces[0]}")
    chosen = _chosen(operations, args.operation)
    analyses = {number: Analysis(operations[number - 1]) for number in chosen}
    if args.output is not None:
        from dcpring import _timeline

        _timeline.draw(args.output, analyses[chosen[-1]])
    if args.json:
        out.json({"operations": [_as_json(number, one) for number, one in analyses.items()], "notes": notes})
    else:
        for number, one in analyses.items():
            _print(number, one, out)
    for note in notes:
        out.note(note)
    if args.output is not None:
        out.note(f"the timeline of operation {chosen[-1]} is in {args.output}")
    return 0


def _chosen(operations: Sequence[Operation], number: int | None) -> list[int]:
    if number is None:
        return list(range(1, len(operations) + 1))
    if number > len(operations):
        raise CheckpointError(f"--operation {number}: there are only {len(operations)} in these traces")
    return [number]


# ---- text ----


def _print(number: int, one: Analysis, out: Output) -> None:
    operation = one.operation
    count = ranks(len(operation.parts))
    took = _seconds(operation.end - operation.begin)
    out.text(f"operation {number}: {operation.kind} {operation.checkpoint}: {took} s, {count}", style="bold")
    for rank, text in _failures(operation).items():
        out.text(f"failed on rank {rank}: {text}", style="bold red")
    if operation.missing:
        out.text(f"the traces of {spans(operation.missing)} of {operation.world_size} are missing", style="yellow")
    for rank, micros in one.moved.items():
        out.text(f"the clock of rank {rank} contradicts the coordinator's: its times are moved by {_seconds(micros)} s")
    out.text(f"critical path: {_sentence(one)}")
    out.text()
    _print_path(one, out)
    _print_waits(one, out)
    _print_ranks(one, out)
    slowest = one.slowest_file()
    if slowest is not None:
        speed = _speed(slowest.bytes, slowest.took)
        parts = _of_which(slowest.parts)
        out.text(
            f"slowest file: {slowest.name} of rank {slowest.rank}: {format_bytes(slowest.bytes)} in "
            f"{_seconds(slowest.took)} s, {speed} GB/s{', ' if parts else ''}{parts}"
        )
    out.text()


def _sentence(one: Analysis) -> str:
    whole = max(1, one.operation.end - one.operation.begin)
    texts, short = [], [step for step in one.path if step.took < _SHORT * whole]
    for step in one.path:
        if step.took >= _SHORT * whole:
            parts = _of_which(step.parts)
            name = f"{step.name} (exchange)" if step.is_exchange else step.name
            texts.append(f"rank {step.rank} {name} {_seconds(step.took)} s{' of which ' if parts else ''}{parts}")
    rest = f" (and {_seconds(sum(step.took for step in short))} s in shorter steps)" if short else ""
    return " -> ".join(texts) + rest


def _of_which(parts: dict[str, int]) -> str:
    """Those that matter, the longest first."""
    whole = max(1, sum(parts.values()))
    named = sorted(((took, name) for name, took in parts.items() if name != OTHER and took >= 0.05 * whole))[::-1]
    return ", ".join(f"{name} {_seconds(took)} s" for took, name in named)


def _print_path(one: Analysis, out: Output) -> None:
    whole = max(1, one.operation.end - one.operation.begin)
    rows = [
        (
            f"rank {step.rank}",
            f"{step.name} (exchange)" if step.is_exchange else step.name,
            _seconds(step.begin - one.operation.begin),
            _seconds(step.took),
            f"{100 * step.took / whole:.1f} %",
            _of_which(step.parts),
        )
        for step in one.path
    ]
    out.table(("rank", "step", "from s", "s", "of all", "of which"), rows, right=(2, 3, 4), title="the critical path")
    out.text()


def _print_waits(one: Analysis, out: Output) -> None:
    whole = one.operation.end - one.operation.begin
    waited = [wait for wait in one.waited() if wait.took >= _SHORT * whole]
    if not waited:
        return
    rows = [(f"rank {w.rank}", f"rank {w.by}", w.name, _seconds(w.took)) for w in waited[:_MOST_WAITS]]
    more = f" (the longest {_MOST_WAITS} of {len(waited)})" if len(waited) > _MOST_WAITS else ""
    out.table(("waited", "for", "which was at", "s"), rows, right=(3,), title=f"who waited for whom{more}")
    out.text()


def _print_ranks(one: Analysis, out: Output) -> None:
    times = one.times()
    kinds = [name for name in _COLUMNS if name == OTHER or any(row.data.get(name) for row in times)]
    staged, late = any(row.staging for row in times), any(row.late for row in times)
    commits = one.operation.kind == "save"
    header = ["rank", *["staging"] * staged, *[LATE] * late, "plan", "wait", *kinds, *["commit"] * commits, "GB/s"]
    rows = []
    for row in times:
        data = _folded(row, kinds)
        cells = [*[row.staging] * staged, *[row.late] * late, row.plan, row.wait, *data, *[row.commit] * commits]
        rows.append([f"rank {row.rank}", *map(_seconds, cells), _speed(row.bytes, row.moving)])
    out.table(header, rows, right=range(1, len(header)), title="seconds by rank")


def _folded(row: RankTimes, kinds: Sequence[str]) -> list[int]:
    """The times in these parts; what is in none of them counts as other."""
    return [
        sum(took for name, took in row.data.items() if name == kind or (kind == OTHER and name not in kinds))
        for kind in kinds
    ]


def _failures(operation: Operation) -> dict[int, str]:
    return {rank: part.failed for rank, part in sorted(operation.parts.items()) if part.failed}


def _seconds(micros: int) -> str:
    return f"{micros / 1e6:.3f}"


def _speed(count: int, micros: int) -> str:
    return f"{count / micros / 1e3:.2f}" if count and micros else "-"


# ---- JSON ----


def _as_json(number: int, one: Analysis) -> dict[str, Any]:
    operation, slowest = one.operation, one.slowest_file()
    return {
        "number": number,
        "kind": operation.kind,
        "checkpoint": operation.checkpoint,
        "begin": operation.begin / 1e6,
        "seconds": (operation.end - operation.begin) / 1e6,
        "world_size": operation.world_size,
        "missing_ranks": operation.missing,
        "failed": {str(rank): text for rank, text in _failures(operation).items()},
        "moved_clocks": {str(rank): micros / 1e6 for rank, micros in one.moved.items()},
        "critical_path": [_step_as_json(step, one) for step in one.path],
        "waits": [{"rank": w.rank, "for": w.by, "step": w.name, "seconds": w.took / 1e6} for w in one.waited()],
        "ranks": [_rank_as_json(row) for row in one.times()],
        "slowest_file": slowest
        and {
            "rank": slowest.rank,
            "file": slowest.name,
            "seconds": slowest.took / 1e6,
            "bytes": slowest.bytes,
            "parts": _parts_as_json(slowest.parts),
        },
    }


def _step_as_json(step: Step, one: Analysis) -> dict[str, Any]:
    whole = max(1, one.operation.end - one.operation.begin)
    return {
        "rank": step.rank,
        "step": step.name,
        "exchange": step.is_exchange,
        "begin": (step.begin - one.operation.begin) / 1e6,
        "seconds": step.took / 1e6,
        "percent": 100 * step.took / whole,
        "parts": _parts_as_json(step.parts),
    }


def _rank_as_json(row: RankTimes) -> dict[str, Any]:
    names = ("staging", "late", "plan", "wait", "commit", "moving")
    times = {name: getattr(row, name) / 1e6 for name in names}
    return {"rank": row.rank, "bytes": row.bytes, "seconds": times | {"data": _parts_as_json(row.data)}}


def _parts_as_json(parts: dict[str, int]) -> dict[str, float]:
    return {name: took / 1e6 for name, took in parts.items()}
