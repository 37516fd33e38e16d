"""Numbers of ranks in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator


def numbers(found: Iterable[int]) -> str:
    """Ascending numbers as "0-3, 7"."""
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in _runs(found))


def _runs(found: Iterable[int]) -> Iterator[list[int]]:
    for _, run in itertools.groupby(enumerate(found), key=lambda pair: pair[1] - pair[0]):
        yield [number for _, number in run]


def spans(found: Iterable[int]) -> str:
    """Ranks as "rank 2" or "ranks 0-3, 7"."""
    ordered = sorted(set(found))
    return f"rank{'s' if len(ordered) != 1 else ''} {numbers(ordered)}"


def ranks(count: int) -> str:
    """A number of ranks, as "1 rank" or "4 ranks"."""
    return f"{count} rank{'s' if count != 1 else ''}"
