"""The timeline of a save or a load as a picture: a band of lanes for each rank, its critical path on top."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dcpring.errors import CheckpointError
from dcpring.tools.picture import drawable, drawing
from dcpring.tools.trace.critical import COMMITTING, LATE, OTHER, PLANNING, Analysis, Segment
from dcpring.tools.trace.read import RankTrace, Span
from dcpring.watch.phases import GATHER_PLANS, GATHER_RESULTS, READ, SCATTER_PLANS, WRITE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT = "#22262e", "#8a9099"

# Okabe and Ito's colours, which colour-blind people tell apart; waiting is the palest.
_COLOURS = {
    "plan": "#56B4E9",
    "wait": "#E4E6EA",
    "write or read phase": "#B9BEC7",
    "staging": "#999999",
    "fill or use": "#009E73",
    "write or read": "#0072B2",
    "fsync": "#D55E00",
    "commit": "#CC79A7",
    "failed": "#000000",
}
_OF_PHASE = (
    {name: "plan" for name in PLANNING}
    | {name: "commit" for name in COMMITTING}
    | dict.fromkeys((GATHER_PLANS, SCATTER_PLANS, GATHER_RESULTS), "wait")
    | dict.fromkeys((WRITE, READ), "write or read phase")
)
_OF_WORK = {"fill": "fill or use", "use": "fill or use", "write": "write or read", "read": "write or read"}
_OF_WORK |= {"fsync": "fsync", "sync": "fsync"}

_PIXELS = 2000
"""Spans closer than a pixel are drawn as one: neither PNG nor SVG grows with the number of blocks."""

_MOST_LANES = 160
"""With more, a rank's lanes but for the first are drawn as one."""

_MOST_RANKS = 256


class _Lane(NamedTuple):
    """A row of the picture: bars by colour, of (begin, length) in seconds."""

    rank: int
    name: str
    bars: dict[str, list[tuple[float, float]]]


def draw(path: Path, analysis: Analysis) -> None:
    """Raises CheckpointError if there are too many ranks, and what ``drawing`` raises."""
    parts = analysis.operation.parts
    if len(parts) > _MOST_RANKS:
        raise CheckpointError(f"a timeline of {len(parts)} ranks would be too tall; give the traces of up to 256")
    lanes = _lanes(analysis)
    with drawing(path, 13, min(160.0, 2.2 + 0.17 * len(lanes) + 0.12 * len(parts))) as figure:
        _fill(figure, analysis, lanes)


# ---- lanes ----


def _lanes(analysis: Analysis) -> list[_Lane]:
    parts = analysis.operation.parts
    full = sum(len({span.lane for span in part.io}) for part in parts.values()) <= _MOST_LANES
    return [lane for _, part in sorted(parts.items()) for lane in _lanes_of(part, analysis, full)]


def _lanes_of(part: RankTrace, analysis: Analysis, full: bool) -> list[_Lane]:
    scale = _Scale(analysis)
    row = [_as_span(segment) for segment in analysis.rows[part.rank] if segment.name != LATE]
    failed = [("failed", span) for span in part.spans if span.kind == "phase" and span.failed]
    lanes = [_lane(part, "main", [*((_of_phase(span), span) for span in row), *failed], scale)]
    calls = [*part.spans, *(span for span in part.io if span.lane == "main")]
    details = [(_OF_WORK[span.name], span) for span in calls if span.kind in ("step", "io") and span.name in _OF_WORK]
    if details:
        lanes[0].bars.update(_bars(details, scale))
    staging = [span for span in part.spans if span.kind == "staging"]
    if staging:
        lanes.append(_lane(part, "staging", (("staging", span) for span in staging), scale))
    work: dict[str, list[Span]] = defaultdict(list)
    for span in part.io:
        if span.lane != "main":
            work[span.lane if full else "workers"].append(span)
    for name in sorted(work, key=_lane_order):
        lanes.append(_lane(part, name, ((_OF_WORK[s.name], s) for s in work[name] if s.name in _OF_WORK), scale))
    return lanes


def _lane_order(lane: str) -> list[int]:
    return [int(number) for number in re.findall(r"\b[0-9]{1,18}\b", lane)]


def _as_span(segment: Segment) -> Span:
    return Span("main", segment.name, "wait" if segment.waits else "phase", segment.begin, segment.end)


def _of_phase(span: Span) -> str:
    return "wait" if span.kind == "wait" else _OF_PHASE.get(span.name, "plan")


class _Scale:
    """Microseconds to seconds since the beginning of the operation."""

    def __init__(self, analysis: Analysis) -> None:
        self.begin = analysis.operation.begin
        self.pixel = (analysis.operation.end - self.begin) / 1e6 / _PIXELS

    def seconds(self, micros: int) -> float:
        return (micros - self.begin) / 1e6


def _lane(part: RankTrace, name: str, spans: Iterable[tuple[str, Span]], scale: _Scale) -> _Lane:
    return _Lane(part.rank, name, _bars(spans, scale))


def _bars(spans: Iterable[tuple[str, Span]], scale: _Scale) -> dict[str, list[tuple[float, float]]]:
    by_colour: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, span in sorted(spans, key=lambda pair: pair[1].begin):
        begin, end = scale.seconds(span.begin), scale.seconds(span.end)
        bars = by_colour[kind]
        if bars and begin <= bars[-1][0] + bars[-1][1] + scale.pixel:
            bars[-1] = (bars[-1][0], max(end, bars[-1][0] + bars[-1][1]) - bars[-1][0])
        else:
            bars.append((begin, max(end - begin, scale.pixel)))
    return by_colour


# ---- the picture ----


def _fill(figure: Figure, analysis: Analysis, lanes: list[_Lane]) -> None:
    axes = figure.subplots()
    places, top = {}, 0.0
    for index, lane in enumerate(lanes):
        top += 0.7 if index and lanes[index - 1].rank != lane.rank else 0.0
        places[index] = top
        top += 1.0
    for index, lane in enumerate(lanes):
        for kind in (kind for kind in _COLOURS if kind in lane.bars):
            axes.broken_barh(lane.bars[kind], (places[index] + 0.06, 0.88), color=_COLOURS[kind], linewidth=0)
    main = {lane.rank: places[index] + 0.5 for index, lane in enumerate(lanes) if lane.name == "main"}
    _mark_path(axes, analysis, main)
    _label(axes, analysis, lanes, places)
    axes.set_ylim(top + 0.4, -0.6)
    shown = [kind for kind in _COLOURS if any(kind in lane.bars for lane in lanes)]
    _legend(figure, shown)


def _mark_path(axes: Axes, analysis: Analysis, main: dict[int, float]) -> None:
    """A line through the main lanes of the ranks that the others waited for."""
    scale = _Scale(analysis)
    points = []
    for step in analysis.path:
        height = main[step.rank] - 0.3
        points += [(scale.seconds(step.begin), height), (scale.seconds(step.end), height)]
    if points:
        across, down = zip(*points, strict=True)
        axes.plot(across, down, color="white", linewidth=4, solid_joinstyle="round")
        axes.plot(across, down, color=_INK, linewidth=1.8, solid_joinstyle="round")
    for step in analysis.path:
        if step.took >= 0.12 * (analysis.operation.end - analysis.operation.begin):
            middle = (scale.seconds(step.begin) + scale.seconds(step.end)) / 2
            name = "not begun yet" if step.name == LATE else step.name
            longest = max(step.parts, key=lambda part: step.parts[part], default=OTHER)
            text = f"{drawable(name)} {step.took / 1e6:.2f} s"
            if longest != OTHER:
                text += f", of which {longest} {step.parts[longest] / 1e6:.2f} s"
            axes.annotate(
                text, (middle, main[step.rank]), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8,
                color=_INK, bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"},
            )  # fmt: skip


def _label(axes: Axes, analysis: Analysis, lanes: list[_Lane], places: dict[int, float]) -> None:
    operation = analysis.operation
    names = [f"rank {lane.rank}  main" if lane.name == "main" else drawable(lane.name, 24) for lane in lanes]
    axes.set_yticks([places[index] + 0.5 for index in places], names, fontsize=7)
    for text, lane in zip(axes.get_yticklabels(), lanes, strict=True):
        text.set_color(_INK if lane.name == "main" else _FAINT)
        text.set_fontweight("bold" if lane.name == "main" else "normal")
    seconds = (operation.end - operation.begin) / 1e6
    title = f"{operation.kind} {drawable(operation.checkpoint)}: {seconds:.3f} s"
    axes.set_title(title, fontsize=11, loc="left", color=_INK)
    axes.set_xlabel("seconds", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.01)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Figure, shown: list[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[kind], label=kind) for kind in shown]
    path = Line2D([], [], color=_INK, linewidth=1.8, label="critical path")
    figure.legend(
        handles=[*handles, path], loc="outside lower center", ncols=min(10, len(handles) + 1), frameon=False, fontsize=8
    )
