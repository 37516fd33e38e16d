"""A directory of one's own inside one that is a person's: whatever happens in it, nothing stays behind."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from dcpring import _C


@contextlib.contextmanager
def private_directory(where: Path, purpose: str) -> Iterator[Path]:
    """A new directory in ``where``, which is removed with all that is in it, also on failure and Ctrl-C.

    Args:
        where: a directory.
        purpose: becomes part of its name.

    Raises:
        OSError: it cannot be made, or removed.
    """
    path = where / f".dcpring-{purpose}-{secrets.token_hex(8)}"
    try:
        _C.make_directory(str(path), False)
        yield path
    finally:
        with _undisturbed():
            if path.exists():
                shutil.rmtree(path)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C, of someone who cannot wait, does not stop the tidying."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
