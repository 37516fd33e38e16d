"""The picture of benchmarks/huggingface.py: seconds of a save and of a cold load, each way in its own colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")

FAINT = "#666666"
COLORS = {
    "stock, consolidated by rank 0": "#b8bcc4",
    "stock, consolidated by every rank": "#8d939e",
    "HuggingFaceStorageReader": "#b8bcc4",
    "safe_open, slices": "#e0a458",
    "fastsafetensors": "#c9a0dc",
    "runai_model_streamer": "#d98880",
    "RingWriter (.distcp)": "#7fb685",
    "RingHFWriter": "#1f6feb",
    "RingHFReader": "#1f6feb",
    'RingHFReader, share="host"': "#9cc2f7",
}


def draw(path: Path, results: Sequence[Mapping], saves: Sequence[str], machine: Mapping[str, str | int]) -> None:
    """Two panels for each layout: what saves, and what loads.

    Args:
        results: of each layout ``mib``, ``procs``, ``axis``, and by way its medians.
        saves: the ways that save.
    """
    figure = Figure(figsize=(3.4 * len(results), 6), dpi=130, layout="constrained")
    for column, result in enumerate(results):
        for row, what in enumerate(("save", "load, cold")):
            axes = figure.add_subplot(2, len(results), row * len(results) + column + 1)
            ways = [way for way in result["medians"] if (way in saves) == (row == 0)]
            seconds = [result["medians"][way]["s"] for way in ways]
            bars = axes.barh(range(len(ways)), seconds, 0.8, color=[COLORS[way] for way in ways])
            axes.bar_label(bars, [f"{one:.2f}" for one in seconds], fontsize=7, padding=2)
            axes.set_yticks(range(len(ways)), ways if column == 0 else [""] * len(ways), fontsize=7)
            axes.invert_yaxis()
            axes.set_xlim(0, 1.2 * max(seconds))
            axes.tick_params(axis="x", labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{what}: {result['procs']} ranks, Shard({result['axis']})", fontsize=9, loc="left")
    figure.supxlabel(
        f"seconds, medians; {results[0]['mib']} MiB of bfloat16; {machine['cores']} cores, {machine['cpu']}, "
        f"{machine['file_system']}, {machine['kernel']}, torch {machine['torch']}; saves synced",
        fontsize=8,
        color=FAINT,
    )
    figure.savefig(path)
