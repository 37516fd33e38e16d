"""Boxes of a tensor's elements: whether they make it up, without comparing any two of them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Sequence


def wrong_boxes(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Whether boxes (offsets, lengths) make up a tensor; "" where they do."""
    for offsets, lengths in boxes:
        if not len(offsets) == len(lengths) == len(shape):
            return "a chunk has another number of dimensions than its tensor"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offsets, lengths, shape, strict=True)):
            return f"a chunk lies outside of its tensor of shape {list(shape)}"
    if sum(_measure(offsets, lengths) for offsets, lengths in boxes) == _measure((0,) * len(shape), shape):
        return ""
    held, whole = sum(math.prod(lengths) for _, lengths in boxes), math.prod(shape)
    if held == whole:
        return "its chunks overlap, and leave a gap"
    return f"its chunks {'overlap' if held > whole else 'leave a gap'}: they hold {held} of {whole} elements"


@functools.lru_cache(maxsize=1 << 16)
def _weight(dimension: int, x: int) -> int:
    return random.Random(f"{dimension} {x}").getrandbits(61)


def _measure(offsets: Iterable[int], lengths: Iterable[int]) -> int:
    """A volume in which every coordinate has a random weight: those of boxes add up to that of a box they tile.

    And only then, but for a chance of 2^-55 or so: no two boxes need to be compared.
    """
    product = 1
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        product *= _weight(dimension, offset + length) - _weight(dimension, offset)
    return product
