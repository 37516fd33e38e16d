"""Ranks, keys and other lists, in words that are short enough for a message."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with control characters, and those that reorder text, as escapes."""
    if text.isascii() and text.isprintable():  # nearly all are, and this takes a tenth of the time
        return text
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def some(words: Sequence[str], most: int) -> str:
    """The first of them, as "a, b and 3 more"."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def some_keys(keys: Iterable[str], most: int = 4) -> str:
    """The first of all different keys in order, quoted, as "'a', 'b' and 3 more"."""
    return some([repr(key) for key in sorted(set(keys))], most)


def ranges(found: Iterable[int], comma: str = ", ") -> str:
    """Ascending numbers as "0-3, 7"."""
    runs: list[list[int]] = []
    for _, run in itertools.groupby(enumerate(found), key=lambda pair: pair[1] - pair[0]):
        runs.append([number for _, number in run])
    return comma.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def spans(found: Iterable[int]) -> str:
    """Ranks as "rank 2" or "ranks 0-3, 7"."""
    ordered = sorted(set(found))
    return f"rank{'s' if len(ordered) != 1 else ''} {ranges(ordered)}"


def ranks(count: int) -> str:
    """A number of ranks, as "1 rank" or "4 ranks"."""
    return f"{count} rank{'s' if count != 1 else ''}"
