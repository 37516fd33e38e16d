"""A picture of what ``dcpring bench`` measured: a bar for each way of doing I/O, for saves and for loads."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from dcpring._machine.bench import Direction, Report, Result
from dcpring.errors import CheckpointError

FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Fails before anything is measured where the picture could not be made afterwards."""
    if path.suffix.lower() not in FORMATS:
        raise CheckpointError(f"{path} is no picture's name; it must end with {', '.join(FORMATS)}")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path} cannot be written: it is a directory, or its own is missing or read-only")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CheckpointError("pictures need matplotlib: pip install 'dcpring[plot]'") from error


def draw(report: Report, path: Path) -> None:
    """Writes the picture beside its name, and renames it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.6 + 0.26 * len(report.results)), layout="constrained")
    FigureCanvasAgg(figure)
    sides = figure.subplots(1, 2)
    directions: tuple[Direction, ...] = ("save", "load")
    for axes, direction in zip(sides, directions, strict=True):
        _bars(axes, report, direction)
    cold = "cold" if report.cold else "from the page cache"
    figure.suptitle(
        f"{report.directory.resolve()}: median of {report.rounds}, {report.size_bytes >> 20} MiB; loads {cold}"
    )
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        figure.savefig(unfinished, format=path.suffix[1:].lower(), dpi=120)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _bars(axes: Any, report: Report, direction: Direction) -> None:
    results = sorted(report.results, key=lambda result: result.rate(direction))
    rates = [result.rate(direction) / 1e9 for result in results]
    ends = [result.rates(direction) for result in results]
    errors = [
        [rate - low[0] / 1e9 for rate, low in zip(rates, ends, strict=True)],
        [high[-1] / 1e9 - rate for rate, high in zip(rates, ends, strict=True)],
    ]
    best = report.best(direction)
    colours = ["tab:orange" if result is best else "tab:blue" for result in results]
    axes.barh([_label(result, report) for result in results], rates, xerr=errors, color=colours, ecolor="0.4")
    axes.set_title(f"{direction}: {report.call(direction)}", fontsize="small")
    axes.set_xlabel("GB/s, with the lowest and the highest round")
    axes.margins(y=0.01)


def _label(result: Result, report: Report) -> str:
    options = result.options
    kind = "direct" if options.direct else "cached"
    shape = f"{options.block_size_bytes >> 20} MiB x {options.queue_depth}, {options.workers} workers"
    return f"{options.engine}, {kind}, {shape}{' (default)' if options == report.usual else ''}"
