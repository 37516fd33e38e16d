"""Memory that tensors are read into, window after window, without being given back and cleared in between."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

ALIGNMENT = 64
"""Of each tensor, in bytes."""


class Buffer:
    """Room for the tensors of one window; what was taken is gone with ``clear``."""

    def __init__(self, size: int) -> None:
        self._memory = _memory(size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, memoryview]:
        """A tensor, and its memory. One for which there is no room gets its own."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype), self._memory[:0]
        begin, end = self._used, self._used + size
        if end > len(self._memory):
            memory = _memory(size)
            return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape), memory
        self._used = end + -size % ALIGNMENT
        return self._bytes[begin:end].view(dtype).view(shape), self._memory[begin:end]


def _memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
