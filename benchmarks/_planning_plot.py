"""The picture of benchmarks/planning.py: CPU seconds and bytes on the coordinator against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from _contestants import OURS, STOCK
from _growth import Growth, growths
from _planners import PlanSample
from _shapes import MIB
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

FAINT = "#666666"
LINES = {STOCK: ("#8d939e", "stock DCP (DefaultSavePlanner)"), OURS: ("#1f6feb", "dcpring (RingSavePlanner)")}
PANELS = (
    ("cpu_seconds", "CPU seconds, from the gathered bytes to the bytes to scatter", 1.0),
    ("gathered_bytes", "MiB gathered", MIB),
    ("peak_bytes", "memory, MiB, the gathered bytes included", MIB),
)


def draw(path: Path, samples: Sequence[PlanSample], machine: dict[str, str | int]) -> None:
    found = growths(samples)
    all_ranks = sorted({sample.ranks for sample in samples})
    figure = Figure(figsize=(13, 4.4), dpi=130, layout="constrained")
    axes_row = figure.subplots(1, len(PANELS))
    for axes, (quantity, title, unit) in zip(axes_row, PANELS, strict=True):
        for who in LINES:
            _draw_growth(axes, found[who, quantity], who, all_ranks, unit)
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_xticks(all_ranks, [str(ranks) for ranks in all_ranks], fontsize=7)
        axes.minorticks_off()
        axes.set_title(title, fontsize=9, loc="left")
        axes.grid(which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes_row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel(
        f"FSDP, {samples[0].tensors} tensors; one core of {machine['cpu']}, torch {machine['torch']}; medians",
        fontsize=8,
        color=FAINT,
    )
    figure.savefig(path)


def _draw_growth(axes: Axes, growth: Growth, who: str, all_ranks: Sequence[int], unit: float) -> None:
    color, label = LINES[who]
    if not growth.points:
        return
    values = [value / unit for value in growth.points.values()]
    axes.plot(list(growth.points), values, "o-", color=color, label=label, markersize=4)
    last = max(growth.points)
    beyond = [ranks for ranks in all_ranks if ranks >= last]
    if growth.law is not None and len(beyond) > 1:
        fitted = [growth.law(ranks) / unit for ranks in beyond]
        axes.plot(beyond, fitted, ":", color=color, label=f"{label}: fitted, not measured")
