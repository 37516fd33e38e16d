"""Between accelerators and host memory: pieces through two reusable pinned buffers, copies overlapped with file I/O.

The one who iterates works on a piece in one buffer while the next piece is being copied into the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT_PIECE_BYTES = 16 << 20


@dataclass
class Piece:
    """Host copies of some tensors, valid until the next piece is asked for.

    Either whole tensors (``part_offset`` 0 and shapes as on the device), or one contiguous part of one tensor.

    Attributes:
        indices: which tensors.
        tensors: their copies; a part is one-dimensional.
        part_offset: bytes of the tensor before the part.
        whole: False for a part.
    """

    indices: list[int]
    tensors: list[Tensor]
    part_offset: int = 0
    whole: bool = True


class _Side:
    """One pinned buffer and the copy that is under way into it."""

    def __init__(self, size: int, device: torch.device) -> None:
        pin = device.type != "cpu"
        self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        self.event = torch.Event(device) if pin else None
        self.sources: list[Tensor] = []


class Downloader:
    """Copies tensors of one device to the host, piece by piece.

    On a CPU "device" it does the same with plain copies: the twin that tests run everywhere.
    """

    def __init__(self, device: torch.device, piece_bytes: int = DEFAULT_PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = max(piece_bytes, 64)
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    def pieces(self, tensors: list[Tensor]) -> Iterator[Piece]:
        sides = [_Side(self._piece_bytes, self._device) for _ in range(2)]
        pending: tuple[_Side, Piece] | None = None
        for turn, (piece, sources) in enumerate(self._cut(tensors)):
            side = sides[turn % 2]
            self._start(side, piece, sources)
            if pending is not None:
                yield self._arrived(*pending)
            pending = (side, piece)
        if pending is not None:
            yield self._arrived(*pending)

    def _cut(self, tensors: list[Tensor]) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Pieces with their device sources; small tensors share a piece, large ones come in parts."""
        piece, sources, used = Piece([], []), list[Tensor](), 0
        for index, tensor in enumerate(tensors):
            size = _padded(tensor.nbytes)
            if piece.indices and used + size > self._piece_bytes:
                yield piece, sources
                piece, sources, used = Piece([], []), [], 0
            if tensor.nbytes > self._piece_bytes:
                yield from self._cut_large(index, tensor)
                continue
            piece.indices.append(index)
            sources.append(tensor)
            used += size
        if piece.indices:
            yield piece, sources

    def _cut_large(self, index: int, tensor: Tensor) -> Iterator[tuple[Piece, list[Tensor]]]:
        flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        step = self._piece_bytes // tensor.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            yield Piece([index], [], start * tensor.element_size(), whole=False), [part]

    def _start(self, side: _Side, piece: Piece, sources: list[Tensor]) -> None:
        side.sources = sources
        at = 0
        for source in sources:
            host = side.buffer[at : at + source.nbytes].view(source.dtype).view(source.shape)
            piece.tensors.append(host)
            at += _padded(source.nbytes)
        if self._stream is None:
            self._copy(piece, sources)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            self._copy(piece, sources)
        assert side.event is not None
        side.event.record(self._stream)

    @staticmethod
    def _copy(piece: Piece, sources: list[Tensor]) -> None:
        for host, source in zip(piece.tensors, sources, strict=True):
            host.copy_(source, non_blocking=True)

    @staticmethod
    def _arrived(side: _Side, piece: Piece) -> Piece:
        if side.event is not None:
            side.event.synchronize()
        side.sources = []
        return piece


def _padded(size: int) -> int:
    """Copies in a buffer start where any dtype may."""
    return (size + 63) // 64 * 64
