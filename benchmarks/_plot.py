"""The picture for the README: seconds of a whole save and cold load, shorter bars are better.

Of the peers it shows the faster ways; the table has all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import matplotlib
from _contestants import DISK, NULL, OURS, STOCK
from _measure import LOAD_COLD, SAVE
from _peers import RunaiInPlace, Safetensors, TorchMmap, TorchSave
from _report import Measured, long_name, processes
from _shapes import ShapeSet
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")

INK, FAINT = "#22262e", "#666666"
BARS = {
    STOCK: ("#b8bcc4", "PyTorch's storage"),
    OURS: ("#1f6feb", "dcpring"),
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
    """One panel above the other, for each number of processes and phase: it can be read on a telephone."""
    panels = [(procs, phase) for procs in measured.procs() for phase in (SAVE, LOAD_COLD)]
    figure = Figure(figsize=(5.4, 0.8 + 1.75 * len(panels)), dpi=160, layout="constrained")
    handles = {}
    for axes, (procs, phase) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_panel(axes, measured, shapes, procs, phase)
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2, frameon=False, fontsize=9.5)
    about = f"{machine['cores']} cores, {machine['cpu']}, {machine['file_system']}, torch {machine['torch']}"
    figure.supxlabel(f"seconds; {about}; medians", fontsize=7.5, color=FAINT)
    figure.savefig(path)


def _draw_panel(axes: Axes, measured: Measured, shapes: ShapeSet, procs: int, phase: str) -> None:
    keys = [shape.key for shape in shapes.shapes if measured.get(shape.key, procs, phase, OURS)]
    names = [name for name in BARS if any(measured.get(key, procs, phase, name) for key in keys)]
    for index, name in enumerate(names):
        _draw_bars(axes, name, index - (len(names) - 1) / 2, 0.84 / max(1, len(names)), [
            _seconds(measured, key, procs, phase, name) for key in keys
        ])  # fmt: skip
    for name in LINES:
        _draw_lines(axes, name, [_seconds(measured, key, procs, phase, name) for key in keys])
    axes.set_yticks(range(len(keys)), [shapes.get(key).title for key in keys], fontsize=10)
    axes.set_title(f"{long_name(phase)}, {processes(procs)}", fontsize=11, loc="left")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _seconds(measured: Measured, shape: str, procs: int, phase: str, name: str) -> float:
    """0, which draws nothing, where the contestant took no part."""
    return measured.row(shape, procs, phase, name).seconds if measured.get(shape, procs, phase, name) else 0.0


def _draw_bars(axes: Axes, name: str, offset: float, height: float, lengths: list[float]) -> None:
    color, label = BARS[name]
    places = [place + offset * height for place in range(len(lengths))]
    bars = axes.barh(places, lengths, height * 0.94, color=color, label=label)
    texts = [(f"{length:.0f}" if length >= 10 else f"{length:.2g}") if length else "" for length in lengths]
    axes.bar_label(bars, texts, fontsize=9, padding=3, zorder=4)


def _draw_lines(axes: Axes, name: str, lengths: list[float]) -> None:
    style, label = LINES[name]
    there = [(place, length) for place, length in enumerate(lengths) if length]
    if there:
        low, high = [place - 0.46 for place, _ in there], [place + 0.46 for place, _ in there]
        limits = [length for _, length in there]
        axes.vlines(limits, low, high, colors=INK, linestyles=style, label=label, linewidth=1.3, zorder=3)
