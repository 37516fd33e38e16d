"""Attributes of an object that several threads use at a time, of which each has its own.

DCP makes all calls of one save, or load, on one thread, and keeps what it is at in attributes of the storage: a writer
that two threads save with would mix their saves up.

    class Writer(FileSystemWriter):
        path: Any = Own()                  # which the base class sets

        def begin(self):
            of_threads(self).begin()       # from now on this thread sees what it sets itself ...

        def finish(self):
            of_threads(self).end()         # ... until now, and again what any thread has set last
"""

from __future__ import annotations

import threading
from typing import Any


class OfThreads:
    """The values of an object's ``Own`` attributes, as each thread has them. A copy of it has those of its maker."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.last: dict[str, Any] = values or {}
        self._thread = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return OfThreads, (dict(self.seen),)

    @property
    def own(self) -> dict[str, Any] | None:
        """Those of the calling thread, if it is at something."""
        own: dict[str, Any] | None = getattr(self._thread, "own", None)
        return own

    @property
    def seen(self) -> dict[str, Any]:
        """Those of the calling thread, or what any has set last."""
        return self.last if self.own is None else self.own

    def begin(self, is_early: bool = False) -> dict[str, Any] | None:
        """The calling thread begins something. Gives what it had of something else, which has not come to its end.

        Args:
            is_early: what it begins will call this again.
        """
        before, was_early = self.own, getattr(self._thread, "is_early", False)
        self._thread.is_early = is_early
        if was_early and not is_early:
            return None
        self._thread.own = dict(self.last)
        return before

    def end(self) -> None:
        """The calling thread is through with it."""
        self._thread.own, self._thread.is_early = None, False


def of_threads(owner: Any) -> OfThreads:
    """The values of its ``Own`` attributes."""
    found: OfThreads | None = owner.__dict__.get("_of_threads")
    return owner.__dict__.setdefault("_of_threads", OfThreads()) if found is None else found


class Own:
    """An attribute of which each thread that is at something has its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        try:
            return of_threads(owner).seen[self._name]
        except KeyError:
            raise AttributeError(f"{type(owner).__qualname__!r} object has no attribute {self._name!r}") from None

    def __set__(self, owner: Any, value: Any) -> None:
        values = of_threads(owner)
        values.last[self._name] = value
        if values.own is not None:
            values.own[self._name] = value
