"""A picture of a checkpoint: which rank wrote what into which file, how even that is, and the largest tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpring.report import count, format_bytes, imbalance
from dcpring.tools.inspect.inventory import DataFile, Inventory, Listed, Sum, total
from dcpring.tools.picture import drawable, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's, which people tell apart whatever colours they see."""

_OTHER_COLOUR, _PADDING_COLOUR = "#777777", "#dddddd"
_OTHER = "other components"
_MOST_TENSORS = 12
_MOST_LABELLED = 48
_NAME_CHARACTERS = 44


@dataclass
class Shares:
    """Who wrote how much.

    Attributes:
        files: the data files that keys lie in, and those that nothing refers to.
        ranks: by rank, the bytes of elements and objects that it wrote; files whose name tells no rank count for none.
        components: their bytes, the largest first; what several keys share counts once.
        largest: the largest tensors and objects.
        total: of all keys.
    """

    files: list[DataFile]
    ranks: dict[int, int] = field(default_factory=dict)
    components: Counter[str] = field(default_factory=Counter)
    largest: list[Listed] = field(default_factory=list)
    total: Sum = field(default_factory=Sum)

    @property
    def imbalance(self) -> float:
        """The largest rank's bytes over the mean of the ranks that wrote. 1.0 is even."""
        return imbalance(self.ranks.values())


def shares_of(inventory: Inventory) -> Shares:
    """Reads nothing but the sizes of the files."""
    items = list(inventory.items())
    shares = Shares(inventory.files(items), total=total(items))
    for file in shares.files:
        shares.components.update(file.components)
        if file.rank is not None and file.records:
            shares.ranks[file.rank] = shares.ranks.get(file.rank, 0) + file.bytes
    shares.ranks = dict(sorted(shares.ranks.items()))
    shares.components = Counter(dict(shares.components.most_common()))
    shares.largest = sorted(items, key=lambda item: -item.entry.nbytes)[:_MOST_TENSORS]
    return shares


def draw(path: Path, inventory: Inventory, shares: Shares) -> None:
    """Raises what ``drawing`` raises."""
    used = [file for file in shares.files if file.records]
    height = 9.0 if len(used) > _MOST_LABELLED else max(5.2, 2.0 + 0.24 * len(used))
    with drawing(path, 14, height) as figure:
        figure.suptitle(_title(inventory, shares, used), fontsize=10)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_files(left, used, _shown_components(shares))
        _draw_largest(right, shares, _shown_components(shares))
        if used:
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)


def _title(inventory: Inventory, shares: Shares, used: Sequence[DataFile]) -> str:
    missing = sum(file.state in ("missing", "short") for file in used)
    padding = sum(file.size or 0 for file in used) - sum(file.bytes for file in used if file.size)
    ranks = count(len(shares.ranks), "rank")
    even = f"; the largest wrote {shares.imbalance:.2f} times the mean" if len(shares.ranks) > 1 else ""
    step = "" if inventory.manifest is None else f", step {inventory.manifest.step}"
    facts = [
        f"{shares.total.keys:,} keys, {format_bytes(sum(file.bytes for file in used))}",
        count(len(used), "file"),
        *([f"{format_bytes(padding)} of padding"] if padding > 0 else []),
        *([f"{count(missing, 'file')} missing or too short"] if missing else []),
    ]
    return f"{drawable(str(inventory.directory), 80)} ({inventory.origin}{step})\n{', '.join(facts)}; {ranks}{even}"


def _shown_components(shares: Shares) -> dict[str, str]:
    """The colour of each component that has one of its own."""
    most = len(_COLOURS)
    names = list(shares.components)
    shown = names if len(names) <= most else names[:most]
    return dict(zip(shown, _COLOURS, strict=False))


# ---- files ----


def _draw_files(axes: Axes, files: Sequence[DataFile], colours: dict[str, str]) -> None:
    axes.set_title("What lies in which file")
    if not files:
        axes.text(0.5, 0.5, "no files", ha="center", va="center", transform=axes.transAxes)
        return
    unit, name = _unit(max(max(file.bytes, file.size or 0, file.needed) for file in files))
    begins = [0.0] * len(files)
    for label, colour, lengths in _layers(files, colours):
        if any(lengths):
            ends = [begin + length / unit for begin, length in zip(begins, lengths, strict=True)]
            _draw_layer(axes, begins, ends, label, colour)
            begins = ends
    for number, file in enumerate(files):
        if file.state in ("missing", "short"):
            end = max(file.needed, file.bytes) / unit
            axes.barh(number, end, 0.9, facecolor="none", edgecolor="red", hatch="////", linewidth=0.8)
            if len(files) <= _MOST_LABELLED:
                box = {"facecolor": "white", "edgecolor": "none"}
                axes.text(end / 2, number, file.state, ha="center", va="center", color="red", weight="bold", bbox=box)
    _draw_mean(axes, files, unit)
    _label_files(axes, files)
    axes.set_xlabel(name)
    axes.set_xlim(left=0)


def _layers(files: Sequence[DataFile], colours: dict[str, str]) -> list[tuple[str, str, list[int]]]:
    """What the bars are made of, from the left: label, colour, and the bytes in each file."""
    there = [file.state == "ok" for file in files]
    layers = [
        (
            drawable(name, _NAME_CHARACTERS) or "(no name)",
            colour,
            [file.components[name] * good for file, good in zip(files, there, strict=True)],
        )
        for name, colour in colours.items()
    ]
    other = [
        good * (file.bytes - sum(file.components[name] for name in colours))
        for file, good in zip(files, there, strict=True)
    ]
    padding = [good * max((file.size or 0) - file.bytes, 0) for file, good in zip(files, there, strict=True)]
    return [*layers, (_OTHER, _OTHER_COLOUR, other), ("padding and heads of records", _PADDING_COLOUR, padding)]


def _draw_layer(axes: Axes, begins: Sequence[float], ends: Sequence[float], label: str, colour: str) -> None:
    """A part of every bar; of very many bars as one area."""
    rows = range(len(begins))
    # A leading underscore would keep it out of the legend.
    label = f" {label}" if label.startswith("_") else label
    if len(rows) <= _MOST_LABELLED:
        widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        axes.barh(rows, widths, 0.8, left=begins, color=colour, label=label)
        return
    edges = [edge for row in rows for edge in (row - 0.5, row + 0.5)]
    lefts = [begin for begin in begins for _ in range(2)]
    rights = [end for end in ends for _ in range(2)]
    axes.fill_betweenx(edges, lefts, rights, color=colour, linewidth=0, label=label)


def _draw_mean(axes: Axes, files: Sequence[DataFile], unit: float) -> None:
    if len(files) > 1:
        mean = sum(file.bytes for file in files) / len(files) / unit
        axes.axvline(mean, color="black", linestyle="--", linewidth=1, label="mean of the files")


def _label_files(axes: Axes, files: Sequence[DataFile]) -> None:
    axes.set_ylim(len(files) - 0.4, -0.6)
    if len(files) <= _MOST_LABELLED:
        axes.set_yticks(range(len(files)), [_file_label(file) for file in files])
        return
    step = -(-len(files) // 24)
    shown = range(0, len(files), step)
    axes.set_yticks(shown, [_file_label(files[number]) for number in shown])


def _file_label(file: DataFile) -> str:
    name = file.name.removesuffix(".distcp")
    parts = name.split(".")
    short = parts[0] if len(parts) == 2 and len(parts[1]) == 16 else name  # without the tag
    return drawable(short, 28) if file.rank is None else f"rank {file.rank}  {drawable(short, 28)}"


def _unit(largest: float) -> tuple[float, str]:
    """A unit of bytes for an axis."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while power < len(units) - 1 and largest >= 4 * 1024 ** (power + 1):
        power += 1
    return float(1024**power), units[power]


# ---- tensors ----


def _draw_largest(axes: Axes, shares: Shares, colours: dict[str, str]) -> None:
    axes.set_title(f"The {len(shares.largest)} largest of {shares.total.keys:,} tensors and objects")
    if not shares.largest:
        axes.set_axis_off()
        return
    sizes = [item.entry.nbytes for item in shares.largest]
    unit, name = _unit(max(sizes))
    rows = range(len(sizes))
    axes.barh(
        rows,
        [size / unit for size in sizes],
        0.5,
        color=[colours.get(item.component, _OTHER_COLOUR) for item in shares.largest],
    )
    for row, item in enumerate(shares.largest):
        chunks = len(item.entry.records)
        kind = "object" if item.entry.shape is None else f"{_shape(item)} {str(item.entry.dtype)[6:]}"
        text = f"{drawable(item.entry.key, 60)}   {kind}, {format_bytes(item.entry.nbytes)}"
        axes.text(0, row - 0.3, f"{text} in {chunks} chunks" if chunks > 1 else text, fontsize="small", va="bottom")
    axes.set_yticks([])
    axes.set_ylim(len(sizes) - 0.4, -1)
    axes.set_xlabel(name)
    axes.spines[["top", "right"]].set_visible(False)


def _shape(item: Listed) -> str:
    shape: Any = item.entry.shape
    return drawable(str(list(shape)), 32)
