"""Parts of tensors: where their elements lie in a file, and in memory. Nothing is read here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring.base import windows
from dcpring.format.quantised import DTYPES, Quantised
from dcpring.move import device
from dcpring.move.crc import RunningCrcs, buffer_at
from dcpring.plan.pieces import range_of_box
from dcpring.torchside.tensors import narrowed


class Payload(NamedTuple):
    """A plain tensor in a file, as the core reads it."""

    file: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes | None
    whole_crc: int | None
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored(self) -> tuple[Payload, ...]:
        """What is read of files for it."""
        return (self,)

    def for_core(self) -> tuple[Any, ...]:
        """What the core knows of it, before offsets and lengths."""
        return self.file, self.payload_offset, self.payload_bytes, self.crcs, self.whole_crc, self.sizes


class Coded(NamedTuple):
    """A tensor that is made of others in files.

    Attributes:
        form: how.
        codes: it is made of.
        scales: of them, each with the box of all scales that it is.
        sizes, dtype: its own.
        is_shared: ranks of this host may read the same.
    """

    form: Quantised
    codes: Payload
    scales: tuple[tuple[windows.Box, Payload], ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    is_shared: bool

    @property
    def stored(self) -> tuple[Payload, ...]:
        """What is read of files for it."""
        return self.codes, *(payload for _, payload in self.scales)

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.stored[-1].dtype

    def made_for(self, target: Tensor) -> Coded:
        """The same, rounded once where the target has another dtype: torch makes ``dtype``, and casts that."""
        is_lossless = self.dtype == torch.float32 and target.dtype in DTYPES
        return self._replace(dtype=target.dtype) if is_lossless else self


class Box(NamedTuple):
    """A part of a tensor, and the memory that it goes into.

    Attributes:
        position: of what is wanted.
        payload: the tensor.
        offsets, lengths: in the tensor.
    """

    position: int
    payload: Payload | Coded
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    memory: Tensor


def read_bytes(payload: Payload | Coded, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """What is read of files for a box of it."""
    if isinstance(payload, Payload):
        return math.prod(lengths) * payload.dtype.itemsize
    (_, codes), (_, scales) = payload.form.boxes(offsets, lengths)
    return math.prod(codes) + math.prod(scales) * payload.scale_dtype.itemsize


def ends_of(position: int, payload: Payload | Coded) -> list[tuple[int, int, int]]:
    """The position, the file, and where in the file that ends which the payload is read from."""
    return [(position, one.file, one.payload_offset + one.payload_bytes) for one in payload.stored]


def payload_of(box: Box) -> Payload:
    assert isinstance(box.payload, Payload)
    return box.payload


def host_bytes(box: Box) -> int:
    """What a host copy of it takes in an Uploader's window."""
    return device.padded(math.prod(box.lengths) * box.payload.dtype.itemsize)


def parts_of(box: Box, most_elements: int) -> Iterator[Box]:
    for offsets, lengths in windows.split_box(box.lengths, most_elements):
        start = tuple(a + b for a, b in zip(box.offsets, offsets, strict=True))
        yield box._replace(offsets=start, lengths=lengths, memory=narrowed(box.memory, offsets, lengths))


class CodedBox(NamedTuple):
    """A box of what is made of codes.

    Attributes:
        coded: what it is of.
        codes, scales: what it is made of, in these codes, and in all scales.
    """

    box: Box
    coded: Coded
    codes: windows.Box
    scales: windows.Box

    @property
    def scale_bytes(self) -> int:
        return math.prod(self.scales[1]) * self.coded.scale_dtype.itemsize


def coded_boxes(box: Box) -> Iterator[CodedBox]:
    """A coded box, in parts of which the scales fit a window."""
    assert isinstance(box.payload, Coded)
    whole = CodedBox(box, box.payload, *box.payload.form.boxes(box.offsets, box.lengths))
    elements, size = math.prod(box.lengths), whole.scale_bytes
    if size > device.HOST_BYTES:
        for part in parts_of(box, elements * device.HOST_BYTES // size):
            yield CodedBox(part, box.payload, *box.payload.form.boxes(part.offsets, part.lengths))
    elif elements:
        yield whole


def sum_up(sums: RunningCrcs, file: str, box: Box) -> bool:
    """Takes what was read of a box; False: its record is damaged."""
    payload = payload_of(box)
    if payload.whole_crc is None or box.lengths == payload.sizes:
        return True
    bounds = range_of_box(payload.sizes, box.offsets, box.lengths)
    if bounds is None:
        return True
    data = box.memory.contiguous()
    part = buffer_at(data.data_ptr(), data.nbytes)
    record = file, payload.payload_offset
    return sums.add(record, bounds[0] * data.itemsize, part, payload.payload_bytes, payload.whole_crc)
