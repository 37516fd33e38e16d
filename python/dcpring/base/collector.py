"""The collector of cyclic garbage: when it pauses, and what counts as old."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

_MANY_OBJECTS = 10_000


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection in a loop that makes many small objects, which all stay: it would run for nothing.

    The collector is the whole process's, so this is for loops that end soon, in the main thread: nothing that reads,
    writes or waits belongs into it, but for a command's, which has its process to itself. In other threads it does
    nothing.
    """
    pauses = gc.isenabled() and _in_main_thread()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def as_old(load: Callable[[], Any]) -> Any:
    """Runs ``load`` without collections; what it makes counts as old, as if it had survived those left out.

    Young garbage is collected before, so that none of it grows old with the rest. A thread beside training leaves all
    that alone, and so does a load that makes few objects: where a program has frozen what it has loaded, to look
    whether it has takes 30 ms.
    """
    if not _in_main_thread():
        return load()
    gc.collect(1)
    with collection_paused():
        result = load()
        if gc.get_count()[0] >= _MANY_OBJECTS and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
    return result
