"""The picture for the README: seconds of a whole save and load, shorter bars are better.

Of the peers it shows the faster ways; the table has all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import matplotlib
from _contestants import DISK, NULL, OURS, STOCK
from _measure import PHASES
from _peers import RunaiInPlace, Safetensors, TorchMmap, TorchSave
from _report import Measured, long_name, processes
from _shapes import ShapeSet
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

INK, FAINT = "#22262e", "#666666"
BARS = {
    STOCK: ("#b8bcc4", "stock DCP (FileSystemWriter, -Reader)"),
    OURS: ("#1f6feb", "dcpring (RingWriter, RingReader)"),
    TorchSave.name: ("#a78bba", "torch.save, torch.load"),
    TorchMmap.name: ("#cbb8d6", "torch.load, mmap"),
    Safetensors.name: ("#7fb685", "safetensors"),
    RunaiInPlace.name: ("#e0a458", "runai-model-streamer"),
}
LINES: dict[str, tuple[Literal["--", ":"], str]] = {
    DISK: ("--", "the disk's own limit"),
    NULL: (":", "DCP's planning alone"),
}


def draw(path: Path, measured: Measured, shapes: ShapeSet, machine: dict[str, str | int]) -> None:
    all_procs = measured.procs()
    figure = Figure(figsize=(13, 1.2 + 3.3 * len(all_procs)), dpi=130, layout="constrained")
    grid = figure.subplots(len(all_procs), len(PHASES), squeeze=False)
    handles = {}
    for axes_row, procs in zip(grid, all_procs, strict=True):
        for axes, phase in zip(axes_row, PHASES, strict=True):
            _draw_panel(axes, measured, shapes, procs, phase)
            handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=min(5, len(handles)), frameon=False
    )
    figure.supxlabel(
        f"{machine['cores']} cores, {machine['cpu']}, {machine['file_system']}, {machine['kernel']}, "
        f"torch {machine['torch']}; medians, whole dcp.save and dcp.load",
        fontsize=8,
        color=FAINT,
    )
    figure.savefig(path)


def _draw_panel(axes: Axes, measured: Measured, shapes: ShapeSet, procs: int, phase: str) -> None:
    keys = [shape.key for shape in shapes.shapes if measured.get(shape.key, procs, phase, OURS)]
    names = [name for name in BARS if any(measured.get(key, procs, phase, name) for key in keys)]
    for index, name in enumerate(names):
        _draw_bars(axes, name, index - (len(names) - 1) / 2, 0.8 / max(1, len(names)), [
            _seconds(measured, key, procs, phase, name) for key in keys
        ])  # fmt: skip
    for name in LINES:
        _draw_lines(axes, name, [_seconds(measured, key, procs, phase, name) for key in keys])
    axes.set_xticks(range(len(keys)), [shapes.get(key).title for key in keys], fontsize=8)
    axes.set_title(f"{long_name(phase)} - {processes(procs)}", fontsize=10, loc="left")
    axes.set_ylabel("seconds", fontsize=8)
    axes.margins(y=0.15)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _seconds(measured: Measured, shape: str, procs: int, phase: str, name: str) -> float:
    """0, which draws nothing, where the contestant took no part."""
    return measured.row(shape, procs, phase, name).seconds if measured.get(shape, procs, phase, name) else 0.0


def _draw_bars(axes: Axes, name: str, offset: float, width: float, heights: list[float]) -> None:
    color, label = BARS[name]
    places = [place + offset * width for place in range(len(heights))]
    bars = axes.bar(places, heights, width * 0.94, color=color, label=label)
    texts = [(f"{height:.0f}" if height >= 10 else f"{height:.2g}") if height else "" for height in heights]
    backing = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
    axes.bar_label(bars, texts, fontsize=6.5, padding=2, bbox=backing, zorder=4)


def _draw_lines(axes: Axes, name: str, heights: list[float]) -> None:
    style, label = LINES[name]
    there = [(place, height) for place, height in enumerate(heights) if height]
    if there:
        left, right = [place - 0.44 for place, _ in there], [place + 0.44 for place, _ in there]
        limits = [height for _, height in there]
        axes.hlines(limits, left, right, colors=INK, linestyles=style, label=label, linewidth=1.3, zorder=3)
