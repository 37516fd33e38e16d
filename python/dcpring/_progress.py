"""Showing how far work is: a bar on standard error, drawn by a thread of the core's that never needs the GIL.

Whoever works counts bytes in a slot of ``_C.Slots``, the core's workers by themselves through a ``_C.Watch``; the bar
reads them. A bar is drawn on a terminal only, in colours unless NO_COLOR or TERM=dumb ask for none.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator

from dcpring import _C

_SLOT = 0
"""The only one of a bar of one process."""


def make_watch(counter: memoryview | None, room: int = 0) -> _C.Watch | None:
    """A watch that counts bytes in a counter and keeps so many spans; None where there is nothing for it to do."""
    return None if counter is None and not room else _C.Watch(counter, room)


def is_terminal() -> bool:
    """Whether standard error is one, and can move its cursor."""
    try:
        return sys.stderr is not None and sys.stderr.isatty() and os.isatty(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by what has no descriptor
        return False


def draw(slots: _C.Slots, label: str) -> _C.Bar:
    """Draws the slots on standard error, which must be a terminal, until they have ended or the bar is closed."""
    flags = 0
    if (sys.stderr.encoding or "").lower().replace("-", "") == "utf8":
        flags |= _C.BAR_UNICODE
    if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        flags |= _C.BAR_COLOUR
    sys.stderr.flush()
    return _C.Bar(slots, label, os.dup(sys.stderr.fileno()), flags)


class Bar:
    """Work of this process that may have a bar.

    Attributes:
        watch: for core calls that do the work.
    """

    def __init__(self, slots: _C.Slots, counter: memoryview) -> None:
        self._slots = slots
        self.watch = _C.Watch(counter, 0)

    def advance(self, count: int) -> None:
        """Counts bytes of work that no core call does."""
        self.watch.add(count)


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, enabled: bool | None = None) -> Iterator[Bar]:
    """A bar while the body runs, and a line with bytes and time after it.

    Args:
        label: what is being done; of the program's own words.
        total: bytes that it will be.
        enabled: draw it, if standard error is a terminal; None: yes.
    """
    memory = mmap.mmap(-1, _C.Slots.size(1))
    slots = _C.Slots(memory, 1)
    where = slots.join(_SLOT)
    slots.begin(_SLOT, total)
    drawn = draw(slots, label) if enabled is not False and is_terminal() else None
    failed = True
    try:
        yield Bar(slots, memoryview(memory)[where : where + 8])
        failed = False
    finally:
        slots.end(_SLOT, failed)
        if drawn is not None:
            drawn.close()
