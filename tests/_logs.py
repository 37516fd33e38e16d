"""What dcpring logs, in whatever process: pytest's own way knows only the one that it runs in."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of this level, and above, that are logged meanwhile."""
    log, texts = logging.getLogger("dcpring"), list[str]()
    handler, before = logging.Handler(level), log.level
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(min(level, log.getEffectiveLevel()))
    try:
        yield texts
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
