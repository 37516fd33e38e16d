"""The saves that DCP makes in threads of its own, and the order of those of one process group.

Two at the same time would mix up the collectives of a group, as ranks come to them at different times. So a save that
``async_save`` begins joins the line of its group when its state is copied, in the thread that calls, which makes the
same calls on all ranks. DCP's thread waits for those before it, and so does each other save, and each load, of the
group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcpring.base.untold import WatchedFuture
from dcpring.torchside.dcp import save_of_thread
from dcpring.torchside.groups import group_inside_dcp


class BackgroundSave:
    """What is known of the save that a copy is made for.

    Args:
        patience: seconds in which somebody is expected to save the copy.
        before: the save that has to be over before this one begins.

    Attributes:
        copied: done when the copy is.
    """

    def __init__(self, patience: float, before: BackgroundSave | None = None) -> None:
        self.copied: Future[None] = Future()
        self._before = None if before is None or before.is_over else before
        self._savers: list[threading.Thread] = []
        self._has_failed = self._is_given_up = self._is_by_hand = False
        self._until = time.monotonic() + patience

    def failed(self, error: BaseException | None = None) -> None:
        """Nobody has got a copy. The error is for whoever waits for it, as DCP's thread does; None: nobody will."""
        self._has_failed = True
        if error is None:
            self._is_given_up = True
            self.copied.set_result(None)
        else:
            self.copied.set_exception(error)

    def saved_by(self, thread: threading.Thread) -> None:
        """A thread that is saving the copy, and has finished that when it ends."""
        if thread not in self._savers:
            self._savers.append(thread)

    def by_hand(self) -> None:
        """Somebody else has the copy, for as long as he likes."""
        self._is_by_hand = True

    def begin(self) -> None:
        """The calling thread saves the copy, when those before it are over."""
        self.saved_by(threading.current_thread())
        if self._before is not None:
            wait_until(lambda: self._before is None or self._before.is_over)
            self._before = None

    @property
    def is_over(self) -> bool:
        """Whether nobody saves the copy, now or later."""
        return self._is_saved if self._savers else self._is_given_up or self.is_nobodys

    @property
    def needs_no_copy(self) -> bool:
        """Whether the copy may change, whoever refers to it."""
        return self._has_failed or (self._is_saved and not self._is_by_hand)

    @property
    def is_nobodys(self) -> bool:
        """Whether no thread of DCP's is going to save it, so that nothing tells its end."""
        return self._is_by_hand or (not self._savers and time.monotonic() > self._until)

    @property
    def _is_saved(self) -> bool:
        return bool(self._savers) and not any(map(_is_at_work, list(self._savers)))


def _is_at_work(thread: threading.Thread) -> bool:
    """A thread that asks this itself has come back from what it did before."""
    return thread.is_alive() and thread is not threading.current_thread()


class Line:
    """Saves that begin one after the other, in the order of their copies, which is the same on all ranks."""

    def __init__(self) -> None:
        self._last = BackgroundSave(0)

    def join(self, patience: float) -> BackgroundSave:
        """The next one."""
        self._last = BackgroundSave(patience, self._last)
        return self._last

    @property
    def is_over(self) -> bool:
        """Whether the last one is."""
        return self._last.is_over


_lines: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()


def line_of(group: dist.ProcessGroup) -> Line:
    """That of all saves in this process that have collectives in the group."""
    return _lines.setdefault(group, Line())


def wait_for_turn() -> None:
    """Called where DCP begins a save or a load, before its collectives: returns when those before it are over.

    In a thread that DCP has made for a save, what becomes of that save is watched from now on.
    """
    is_main = threading.current_thread() is threading.main_thread()
    here = None if is_main else save_of_thread()
    if here is None:
        group = group_inside_dcp() if _lines else None
        if group is not None and (line := _lines.get(group)) is not None:
            wait_until(lambda: line.is_over)
        return
    if here.future is not None:
        WatchedFuture.watch(here.future)
    save = getattr(here.staged, "save", None)
    if isinstance(save, BackgroundSave):
        save.begin()


def wait_until(is_so: Callable[[], bool]) -> None:
    for pause in pauses():
        if is_so():
            return
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """How long to sleep before each next look."""
    pause = 0.001
    while True:
        yield pause
        pause = min(1.3 * pause, 0.05)
