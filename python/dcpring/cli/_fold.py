"""Rows whose names differ in numbers only, as one row: what fits a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from dcpring.base.text import ranges

_NUMBER = re.compile(r"(?<![^.])\d{1,18}(?![^.])")
"""A part of a name that is a number."""

_SPAN = "\0"


def folded(rows: Iterable[tuple[str, ...]], names: int) -> Iterator[tuple[str, ...]]:
    """Rows with the numbers in names as spans ("layers.0-31.weight"), and one more cell: how many each stands for.

    Args:
        rows: that become one where they are the same but for these numbers.
        names: how many of the first cells are names.
    """
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for row in rows:
        numbers = [int(number) for cell in row[:names] for number in _NUMBER.findall(cell)]
        groups.setdefault((*(_NUMBER.sub(_SPAN, cell) for cell in row[:names]), *row[names:]), []).append(numbers)
    for cells, members in groups.items():
        spans = iter([ranges(sorted(set(column)), ",") for column in zip(*members, strict=True)])
        shown = [re.sub(_SPAN, lambda _, spans=spans: next(spans), cell) for cell in cells[:names]]  # type: ignore[misc]
        yield (*shown, *cells[names:], f"{len(members):,}")
