"""A row of a table, by name: what it says of an object, or of a chunk of a tensor."""

from __future__ import annotations

from typing import NamedTuple

from dcpring import _C

BYTES_ROW, TENSOR_ROW, SHARD_ROW, NAME_ROW = range(4)
"""Kinds of rows, as the core numbers them."""

Kept = int | tuple[int, int, int]
"""What a rank writes of its table: a row, or of one that is cut its number, the first row of elements, how many."""


class Row(NamedTuple):
    """A row.

    Attributes:
        key: what it is of.
        kind: ``BYTES_ROW`` and its like.
        size: of the tensor.
        offsets, lengths: of the chunk.
        properties: which of the table's properties.
        flags: of a plain tensor.
    """

    key: str
    kind: int
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    properties: int
    flags: int


def row_of(table: _C.Table, kept: Kept) -> Row:
    """The row, or the part of it that is written."""
    if isinstance(kept, int):
        return Row._make(table.row(kept))
    number, start, count = kept
    row = Row._make(table.row(number))
    return row._replace(offsets=(row.offsets[0] + start, *row.offsets[1:]), lengths=(count, *row.lengths[1:]))
