"""The picture of benchmarks/small_saves.py: seconds of one save, round by round, each way in its own colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import matplotlib
from _contestants import DISK, OURS, STOCK
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from small_saves import Size, SmallSave

matplotlib.use("Agg")

FAINT = "#666666"
BARS = {
    STOCK: ("#b8bcc4", "stock DCP"),
    "before": ("#9cc2f7", "dcpring, setting up anew"),
    OURS: ("#1f6feb", "dcpring"),
    "planning": ("#e0a458", "planning alone"),
    DISK: ("#7fb685", "the disk alone"),
}


def draw(path: Path, found: Sequence[SmallSave], sizes: Sequence[Size], machine: dict[str, str | int]) -> None:
    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes)), sizes, strict=True):
        ways = [way for way in BARS if any((one.size, one.way) == (size.key, way) for one in found)]
        for place, way in enumerate(ways):
            color, label = BARS[way]
            rounds = [1000 * one.seconds for one in found if (one.size, one.way) == (size.key, way)]
            bar = axes.bar([place], [median(rounds)], 0.8, color=color, label=label)
            axes.plot([place] * len(rounds), rounds, "o", color="#22262e", alpha=0.25, markersize=2.5)
            axes.bar_label(bar, [f"{median(rounds):.3g}"], fontsize=8, padding=2)
        axes.set_ylim(0, 1.6 * max(median(1000 * one.seconds for one in found if (one.size, one.way) == (size.key, way))
                                   for way in ways))  # fmt: skip
        axes.set_xticks([])
        axes.set_title(size.title, fontsize=10, loc="left")
        axes.set_ylabel("milliseconds", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
    figure.supxlabel(
        f"{machine['cores']} cores, {machine['cpu']}, {machine['file_system']}, {machine['kernel']}, "
        f"torch {machine['torch']}; bars: medians, dots: single saves, as far as they fit; all synced",
        fontsize=8,
        color=FAINT,
    )
    figure.savefig(path)
