"""Files where somebody else may have put something else: a FIFO in their place is refused, not waited for."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from dcpring.errors import CorruptCheckpointError


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a file to read it.

    Raises:
        CorruptCheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCheckpointError("not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """All of a file. Raises as ``open_regular``."""
    with open_regular(path) as file:
        return file.read()
