"""CRC-32s of records that have only one over all their bytes, as stock and ``torch.save`` write them, read in parts."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from typing import Any

from dcpring import _C


class RunningCrcs:
    """Sums up what is read of a record from its beginning on, part after part; used by one thread at a time.

    Parts that leave a gap or come in another order are not summed up: a slice of such a record cannot be checked.
    """

    def __init__(self) -> None:
        self._reached: dict[Hashable, tuple[int, int]] = {}
        self._damaged: set[Hashable] = set()

    def add(self, record: Hashable, start: int, data: Any, size: int, expected: int) -> bool:
        """Takes the next part of a record.

        Args:
            record: which.
            start: of the part in the record, in bytes.
            data: the part, as a buffer.
            size: of the record, in bytes.
            expected: its CRC-32; 0: it was written without one.

        Returns: False when the record is known to be damaged, of which its last part tells.
        """
        reached, crc = self._reached.pop(record, (0, 0))
        if start == 0:
            reached, crc = 0, 0
        if reached == start and expected:
            reached, crc = start + len(data), _C.crc32(data, crc)
            if reached < size:
                self._reached[record] = reached, crc
            elif crc != expected:
                self._damaged.add(record)
        return record not in self._damaged


def buffer_at(pointer: int, size: int) -> Any:
    """So many bytes of memory as a buffer, without a copy; whoever owns them must be kept alive."""
    return memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B") if size else b""
