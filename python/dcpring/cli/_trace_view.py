"""What ``dcpring trace`` prints of a save or load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcpring.base.text import ranks, spans
from dcpring.cli._output import Output
from dcpring.report import format_bytes
from dcpring.tools.trace.critical import CRC, LATE, OTHER, Analysis, RankTimes, Step
from dcpring.tools.trace.read import Operation

_SHORT = 0.01
"""Steps that take less than this part of the whole are not in the one line."""

_MOST_WAITS = 10

_COLUMNS = ("fill", "read", "use", CRC, "write", "fsync", OTHER)
"""What ranks' times in data are shown as; the rest counts as other."""


def show(number: int, one: Analysis, out: Output) -> None:
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
    staged = max(one.times(), key=lambda row: row.staging)
    if staged.staging:
        out.text(
            f"before it the state was staged, while training waits: {_seconds(staged.staging)} s on rank {staged.rank}"
        )
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


def as_json(number: int, one: Analysis) -> dict[str, Any]:
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
