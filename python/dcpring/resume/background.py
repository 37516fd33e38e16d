"""Saves of a Checkpointer in the background: a thread each, which writes a copy over a process group of its own.

The calling thread starts it, and hears how the save went with its next call. A failure is logged at once, and printed
at the end of the program if there is no next call (``base.untold.BackgroundTask``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from dcpring.base.joint import failure_of
from dcpring.base.ranks import Operation, Ranks
from dcpring.base.untold import BackgroundTask


class SaveHandle:
    """What becomes of one ``Checkpointer.save``: true if it was taken, false if it was skipped.

    ``staged``, ``wait_staged`` and ``done`` are this rank's own. ``wait`` is collective: all ranks call it.
    """

    def __init__(
        self,
        taken: bool,
        written: Future[None] | None = None,
        settle: Callable[[Future[None]], None] | None = None,
        copied: Future[None] | None = None,
    ) -> None:
        self._taken, self._written, self._settle, self._copied = taken, written, settle, copied

    def __bool__(self) -> bool:
        return self._taken

    def staged(self) -> bool:
        """Whether the state may change: it has been copied or written, or the save has failed or was skipped."""
        return self._copied is None or self._copied.done()

    def wait_staged(self) -> None:
        """Returns when the state may change. It is ``wait`` that raises what went wrong."""
        if self._copied is not None:
            wait_for_copy(self._copied)

    def done(self) -> bool:
        """Whether this rank is through with it: it is committed, it has failed, or it was skipped."""
        return self._written is None or self._written.done()

    def wait(self) -> None:
        """Returns when it is committed and durable, at once if it was skipped.

        Raises:
            CheckpointError: the save has failed, whether or not another call has raised that before.
        """
        if self._written is not None and self._settle is not None:
            self._settle(self._written)


def wait_for_copy(copied: Future[None]) -> None:
    """Returns when a copy is complete, or has failed."""
    futures.wait([copied])


class BackgroundSaves:
    """Saves of one Checkpointer, one at a time, each in a thread of its own.

    Args:
        ranks: that save; all of them make this, at the same time.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks.twin()
        self._pending: BackgroundTask | None = None

    @property
    def is_pending(self) -> bool:
        """A save was started, and nobody has asked how it went."""
        return self._pending is not None

    @property
    def is_done(self) -> bool:
        """No save is being written."""
        return self._pending is None or self._pending.done()

    def start(self, work: Callable[[Operation], None], after: Callable[[], None]) -> Future[None]:
        """Has ``work`` done as an operation of all ranks, and then ``after``."""

        def run() -> None:
            with self._ranks.operation("save in the background") as joint:
                work(joint)
            after()

        task = BackgroundTask("the next call will raise this")
        task.start("dcpring-save", run)
        self._pending = task
        return task

    def awaits(self, written: Future[None]) -> bool:
        """Nobody has asked yet how this save went."""
        return self._pending is written

    def settle(self) -> None:
        """Returns when no save is being written. Raises what went wrong with the last one, once."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except BaseException:
            if not pending.done():  # Ctrl-C has ended the wait, not the save
                self._pending = pending
            raise

    def abandon(self, error: BaseException) -> None:
        """Ends a save that was started, if it was, as not all ranks have started it; returns once it has ended."""
        text = f"rank {self._ranks.rank}: {failure_of(error).text}"
        if self._pending is not None:
            self._pending.is_quiet = True
        with self._ranks.ended(text), contextlib.suppress(Exception):
            self.settle()

    def close(self) -> None:
        """Gives back the group; nothing may be pending."""
        self._ranks.close()
