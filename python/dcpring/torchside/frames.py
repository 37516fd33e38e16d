"""The functions of torch's that are calling, and their local variables: what DCP does not tell its plugins."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["callers", "local"]


def callers() -> Iterator[tuple[str, str, FrameType]]:
    """The functions that are calling, the last first: the module, the name, and the frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__")), frame.f_code.co_name, frame
        frame = frame.f_back


def local(frame: FrameType, name: str) -> Any:
    """A local variable of a function that is calling; None if it has none of that name.

    Up to Python 3.12 a frame keeps what ``f_locals`` gives until it goes itself: what its function has deleted since,
    and, where a traceback keeps the frame, what ``traceback.clear_frames`` is to let go of. So that is emptied.
    """
    found = frame.f_locals
    value = found.get(name)
    if type(found) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # else it is the module's or class's own
        found.clear()
    return value
