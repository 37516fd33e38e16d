"""A picture of what ``dcpring bench`` measured: a bar for each way of doing I/O, for saves and for loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dcpring.tools.machine.bench import Direction, Report, Result
from dcpring.tools.picture import drawable, drawing


def draw(report: Report, path: Path) -> None:
    """Raises what ``drawing`` raises."""
    directions: tuple[Direction, ...] = ("save", "load")
    cold = "cold" if report.cold else "from the page cache"
    with drawing(path, 14, 1.6 + 0.26 * len(report.results)) as figure:
        for axes, direction in zip(figure.subplots(1, 2), directions, strict=True):
            _bars(axes, report, direction)
        where = drawable(str(report.directory.resolve()))
        figure.suptitle(f"{where}: median of {report.rounds}, {report.size_bytes >> 20} MiB; loads {cold}")


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
