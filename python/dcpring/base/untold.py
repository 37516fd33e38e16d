"""Saves in the background that have failed, and of which no caller has heard.

Each is logged at ERROR at once. What nobody has asked for by then is said when the program ends, and the program's exit
status is not 0. What is kept of an error is its text: its traceback would keep the model, the copy and a thread.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TextIO, cast

from torch.distributed.checkpoint.api import CheckpointException

from dcpring.base.joint import described, failure_of

logger = logging.getLogger("dcpring")

_numbers = itertools.count()

_untold: dict[int, tuple[int, str]] = {}
"""The process, and the error with its traceback."""


def note_failure(error: BaseException, cure: str) -> int:
    """Logs that a save in the background has failed, and gives a number for ``has_heard``.

    Args:
        cure: which call raises the error.
    """
    number = next(_numbers)
    _untold[number] = os.getpid(), "".join(traceback.format_exception(error))
    logger.error("a save in the background has failed, and %s: %s", cure, _text_of(error))
    return number


def has_heard(number: int) -> None:
    """A caller has been told of a failure."""
    _untold.pop(number, None)


def _text_of(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return described({rank: failure_of(cause) for rank, (cause, _) in error.failures.items()})
    return failure_of(error).text


def without_frames(error: BaseException) -> BaseException:
    """The same error, for whoever keeps it: its traceback, and those of what it came of, are text now, in notes.

    The frames of a traceback have the state, and the functions that they ran what these were made with.
    """
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        links += [link.__cause__, link.__context__]
        if isinstance(link, CheckpointException):  # whose text has the tracebacks of these
            for cause, _ in link.failures.values():
                seen.add(id(cause.with_traceback(None)))
                links += [cause.__cause__, cause.__context__]
        if link.__traceback__ is not None:
            link.add_note("Traceback of the thread that saved:\n" + "".join(traceback.format_tb(link.__traceback__)))
            link.__traceback__ = None
    return error


class BackgroundTask(Future[Any]):
    """What becomes of work that a thread of its own does, such as a save in the background.

    A failure is logged at once. Whoever asks for the result, or for the exception, hears of it.

    Args:
        cure: which call raises the error.

    Attributes:
        is_quiet: nobody needs to hear of a failure, as its cause is being raised elsewhere.
    """

    def __init__(self, cure: str = "asking for its result raises this") -> None:
        super().__init__()
        self.is_quiet = False
        self._cure = cure
        self._number = -1

    def start(self, name: str, work: Callable[[], Any]) -> None:
        """Has the work done by a thread of that name. The program ends when the thread has ended.

        Raises:
            RuntimeError: no thread can be started.
        """
        threading.Thread(target=self.run, args=(work,), name=name).start()

    def run(self, work: Callable[[], Any]) -> None:
        """Does the work in the calling thread."""
        try:
            result = work()
        except BaseException as error:
            del work
            self.set_exception(error)
        else:
            del work
            self.set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        try:
            if exception is not None:
                if not self.is_quiet:
                    self._number = note_failure(exception, self._cure)
                without_frames(exception)
        finally:  # whoever waits hears of it, whatever an exception's own methods raise
            super().set_exception(exception)

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self._has_told()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._has_told()

    def _has_told(self) -> None:
        if self.done():
            has_heard(self._number)


# ---- at the end of the program ----


class _FailingStream:
    """Standard error, whose last flush fails: Python then ends with status 120, as it does when output was lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save in the background has failed")


def _tell_at_exit() -> None:
    """Says what nobody has heard. Python has waited for the threads that write by then."""
    untold = [text for process, text in _untold.values() if process == os.getpid()]
    if not untold or sys.stderr is None:
        return
    for text in untold:
        print("a save in the background has failed, and no call has raised it:", file=sys.stderr)
        print(text, end="", file=sys.stderr, flush=True)
    sys.stderr = cast(TextIO, _FailingStream(sys.stderr))


atexit.register(_tell_at_exit)
