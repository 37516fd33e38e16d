"""Masks: a byte for each of many things, 1 for those that are chosen and 0 for the rest."""

from __future__ import annotations

from collections.abc import Iterable

_IS_ZERO = bytes([1, *[0] * 255])


def mask_of(count: int, chosen: Iterable[int]) -> bytes:
    """Of ``count`` things, those with these numbers."""
    mask = bytearray(count)
    for number in chosen:
        mask[number] = 1
    return bytes(mask)


def zeros(marks: bytes) -> bytes:
    """Those whose mark is 0."""
    return marks.translate(_IS_ZERO)


def both(a: bytes, b: bytes) -> bytes:
    """What is in both of two masks."""
    return (int.from_bytes(a) & int.from_bytes(b)).to_bytes(len(a))
