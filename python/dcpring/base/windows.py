"""What is too large to be handled at once, cut: lists of items into windows of bounded bytes, tensors into boxes.

Where windows are read, the next one may be while one is worked on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""


def windows(
    items: Iterable[T], size_of: Callable[[T], int], limit: int | None, most: int | None = None
) -> Iterator[list[T]]:
    """Runs of items of at most ``limit`` bytes (or one item), and ``most`` items; one of all when there is no limit."""
    window: list[T] = []
    used = 0
    for item in items:
        size = 0 if limit is None else size_of(item)
        if window and ((limit is not None and used + size > limit) or len(window) == most):
            yield window
            window, used = [], 0
        window.append(item)
        used += size
    if window:
        yield window


def read_ahead(
    name: str, batches: Iterable[T], *reads: Callable[[T], Any]
) -> Generator[tuple[T, list[Any]], None, None]:
    """Each batch with what every one of the reads gives of it, while the next batch is being read.

    Close it where not all batches are asked for.

    Args:
        name: of the threads, of which each read has one.
    """
    pools = [ThreadPoolExecutor(1, name) for _ in reads]
    waiting: list[tuple[T, list[Future[Any]]]] = []
    try:
        for batch in batches:
            waiting.append((batch, [pool.submit(read, batch) for pool, read in zip(pools, reads, strict=True)]))
            if len(waiting) > 1:
                first, found = waiting.pop(0)
                yield first, [each.result() for each in found]
        for first, found in waiting:
            yield first, [each.result() for each in found]
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.shutdown()


def common_box(a: Box, b: Box) -> Box | None:
    """What lies in both of two boxes; None where nothing does."""
    begins = tuple(map(max, a[0], b[0]))
    ends = map(min, map(operator.add, *a), map(operator.add, *b))
    lengths = tuple(map(operator.sub, ends, begins))
    return (begins, lengths) if all(length > 0 for length in lengths) else None


def split_box(lengths: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that make up a box, cut along the outermost axes, in row-major order."""
    if math.prod(lengths) <= max(limit, 1) or not lengths:
        yield (0,) * len(lengths), lengths
        return
    inner = math.prod(lengths[1:])
    rows = limit // inner
    if rows == 0:
        for row in range(lengths[0]):
            for offsets, sizes in split_box(lengths[1:], limit):
                yield (row, *offsets), (1, *sizes)
        return
    for start in range(0, lengths[0], rows):
        yield (start, *(0,) * (len(lengths) - 1)), (min(rows, lengths[0] - start), *lengths[1:])
