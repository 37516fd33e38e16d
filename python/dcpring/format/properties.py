"""``TensorProperties`` as they stand in tables, and as pickles that the core puts into a larger one.

docs/format.md has the bytes; csrc/py/table.c makes the same ones for strided tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.torchside.dcp import HAS_STRIDES, contiguous_strides, make_properties, pickled, strides_of

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)

_CONTIGUOUS, _STRIDED = 1, 2
"""What follows the flags in encoded properties where strides are known: those of the row's lengths, or a list."""


def encode_properties(properties: TensorProperties, lengths: Sequence[int] | None = None) -> tuple[bytes, int]:
    """``TensorProperties`` of a row of these lengths as bytes, and how many of them are the dtype's."""
    head, dtype_bytes = _encoded_head(properties.dtype, properties.layout)
    form = _FORMATS.index(properties.memory_format)
    flags = bytes((properties.requires_grad, form, properties.pin_memory))
    return head + flags + _encode_strides(strides_of(properties), lengths), dtype_bytes


@functools.cache
def _encoded_head(dtype: torch.dtype, layout: torch.layout) -> tuple[bytes, int]:
    name = str(dtype).encode()
    return name + b"\0" + str(layout).encode() + b"\0", len(name)


def _encode_strides(strides: Sequence[int] | None, lengths: Sequence[int] | None) -> bytes:
    if strides is None:
        return b""
    if lengths is not None and tuple(strides) == contiguous_strides(tuple(lengths)):
        return bytes((_CONTIGUOUS,))
    return bytes((_STRIDED,)) + b"".join(map(varint, strides))


def decode_properties(encoded: bytes, lengths: Sequence[int] = ()) -> TensorProperties:
    """The reverse; refuses what is no dtype or layout of torch."""
    try:
        dtype_name, layout_name, flags = encoded.split(b"\0", 2)
        dtype = getattr(torch, dtype_name.decode().removeprefix("torch."))
        layout = getattr(torch, layout_name.decode().removeprefix("torch."))
        requires_grad, form, pinned, *strides = flags
        if not isinstance(dtype, torch.dtype) or not isinstance(layout, torch.layout):
            raise ValueError(f"{dtype}, {layout}")
        decoded = _decode_strides(bytes(strides), lengths)
        return make_properties(dtype, layout, bool(requires_grad), _FORMATS[form], bool(pinned), decoded)
    except (ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"a compact plan describes a tensor as {encoded!r}, which this torch lacks") from error


def _decode_strides(encoded: bytes, lengths: Sequence[int]) -> tuple[int, ...] | None:
    if not encoded:
        return None
    if encoded[0] == _CONTIGUOUS:
        return contiguous_strides(tuple(lengths))
    strides, value, shift = list[int](), 0, 0
    for byte in encoded[1:]:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            strides.append(value)
            value = shift = 0
    if encoded[0] != _STRIDED or shift:
        raise ValueError(f"strides {encoded!r}")
    return tuple(strides)


def dtypes_of(table: _C.Table) -> list[torch.dtype]:
    """The dtype in each of a table's properties, by their number."""
    return [decode_properties(encoded).dtype for encoded in table.properties()]


class RowProperties:
    """The TensorProperties of the rows of a table. Rows that have the same share them."""

    def __init__(self, encoded: list[bytes]) -> None:
        self._encoded = encoded
        self._made: dict[tuple[int, tuple[int, ...]], TensorProperties] = {}

    def of(self, number: int, lengths: tuple[int, ...]) -> TensorProperties:
        """Those with a number, of a row of these lengths."""
        key = number, lengths if HAS_STRIDES else ()
        if key not in self._made:
            self._made[key] = decode_properties(self._encoded[number], lengths)
        return self._made[key]


def pickled_fragment(value: Any) -> bytes:
    """A pickle of plain values without header, end and memo, for the core to put into a larger one."""
    return pickled(value, 3, fast=True)[2:-1]


_BYTES = [bytes([value]) for value in range(128)]


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the last byte is below 128."""
    if value < 128:
        return _BYTES[value]
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
