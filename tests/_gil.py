"""Looks whether the core makes system calls while its caller holds the GIL, and every other thread waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_held: list[str] = []
"""System calls of the core that this process has made with the GIL held."""
_watching: list[bool] = []


@contextlib.contextmanager
def free_for_others() -> Iterator[None]:
    """Raises AssertionError where what is done within makes such calls, by whatever thread of this process."""
    if not _watching:
        from dcpring import _C

        _C.watch_gil(_held)
        assert _held == ["close"], "calls with the GIL are not seen"
        _watching.append(True)
    _held.clear()
    yield
    assert not _held, f"system calls that were made with the GIL held: {sorted(set(_held))}"
