"""Boxes of a tensor's elements: whether they make it up, without comparing any two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dcpring import _C
from dcpring.base.windows import Box
from dcpring.format.metadata import MOST_DIMENSIONS


def wrong_boxes(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Why boxes do not make up a tensor; "" where they do. Of more dimensions than the core knows elements are counted.

    Sizes and offsets are from 0 to 2^63 - 1.
    """
    for offsets, lengths in boxes:
        if not len(offsets) == len(lengths) == len(shape):
            return "a chunk has another number of dimensions than its tensor"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offsets, lengths, shape, strict=True)):
            return f"a chunk lies outside of its tensor of shape {list(shape)}"
    held, whole = sum(math.prod(lengths) for _, lengths in boxes), math.prod(shape)
    if held != whole:
        return f"its chunks {'overlap' if held > whole else 'leave a gap'}: they hold {held} of {whole} elements"
    if len(shape) > MOST_DIMENSIONS or _C.tiles(shape, list(boxes)):
        return ""
    return "its chunks overlap, and leave a gap"
