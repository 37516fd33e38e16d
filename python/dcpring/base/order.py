"""The order of saves in the background, and of all other saves and loads of one process group.

Two saves at the same time would mix up the collectives of their group, as ranks come to them at different times. So a
save in the background takes a turn in the thread that calls ``async_save``, which makes the same calls on all ranks.
Its own thread begins the turn before the first collective, and waits there for the turns before it. Every other save or
load of the group waits for the last turn (``wait_for_turn``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dcpring.base.groups import has_group, rank_in, world_size
from dcpring.errors import CheckpointError
from dcpring.torchside.groups import group_inside_dcp

_of_thread = threading.local()
"""``turn``: the one that the calling thread has begun."""


class Turn:
    """The place of one save in the background among the saves of its process group.

    The thread that saves calls ``begin``, and the turn is over when ``end`` is called, or when that thread has ended:
    DCP's own ``async_save`` makes a thread for each save, and tells nobody when the save is over.

    Args:
        before: the turn that has to be over before this one begins.
        ranks: those that save together, and need their process group when this begins; 1: none is needed.
    """

    def __init__(self, before: Turn | None, ranks: int) -> None:
        self._before = None if before is None or before.is_over else before
        self._saver: threading.Thread | None = None
        self._has_ended = False
        self._copy: weakref.ref[object] | None = None
        self._expires: float | None = None
        self._rank, self._ranks = rank_in(), ranks

    def begin(self) -> None:
        """Returns when the turns before this one are over. Called by the thread that saves, as often as it likes.

        Raises:
            CheckpointError: the process group has been destroyed meanwhile.
        """
        if self._saver is threading.current_thread():
            return
        self._saver, _of_thread.turn = threading.current_thread(), self
        before, self._before = self._before, None
        if before is not None:
            wait_until(lambda: before.is_over)
        _require_group(self._rank, self._ranks)

    def end(self) -> None:
        """The save is over."""
        self._has_ended = True

    def expect(self, copy: object, seconds: float) -> None:
        """The thread that saves has so many seconds to begin, and cannot any more when nobody has the copy.

        ``async_save`` may have failed after it had asked for the copy, and its error may be kept.
        """
        self._copy, self._expires = weakref.ref(copy), time.monotonic() + seconds

    @property
    def is_saved(self) -> bool:
        """Whether the save was made, has failed, or cannot be made any more."""
        saver = self._saver
        if saver is None:
            return self._has_ended or (self._copy is not None and self._copy() is None and self._saver is None)
        return self._has_ended or saver is threading.current_thread() or not saver.is_alive()

    @property
    def is_over(self) -> bool:
        """Whether nobody saves the copy, now or later."""
        has_expired = self._saver is None and self._expires is not None and time.monotonic() > self._expires
        return has_expired or self.is_saved


class Queue:
    """Turns that no process group has: of saves without other ranks, and of those that another process makes."""


_last: WeakKeyDictionary[dist.ProcessGroup | Queue, Turn] = WeakKeyDictionary()
_lock = threading.Lock()

ALONE = Queue()
"""Saves of this process alone."""


def take_turn(queue: dist.ProcessGroup | Queue, ranks: int = 1) -> Turn:
    """The next turn of a process group, or of a queue. All ranks of a group call this in the same order."""
    with _lock:
        turn = _last[queue] = Turn(_last.get(queue), ranks)
    return turn


def is_over(queue: dist.ProcessGroup | Queue) -> bool:
    """Whether all turns that were taken are over."""
    last = _last.get(queue)
    return last is None or last.is_over


def wait_for_turn() -> None:
    """Called where a save or a load begins, before its collectives: returns when the turns of its group are over.

    In a thread that has begun a turn this has been waited for.
    """
    if _turn_here() is None:
        group = group_inside_dcp() if _last else None
        if group is not None:
            wait_until(lambda: is_over(group))


def require_group(rank: int, ranks: int) -> None:
    """Refuses to save alone, in a thread beside the main one, what was made to be saved together with other ranks.

    Without a process group DCP saves as if this process were alone: each rank would, over the others' files. A turn
    that the thread has begun was taken by the save itself, and knows better.

    Args:
        rank: of this process, when the writer or planner was made.
        ranks: there were then.

    Raises:
        CheckpointError: the process group has been destroyed since.
    """
    if _turn_here() is None and threading.current_thread() is not threading.main_thread():
        _require_group(rank, ranks)


def _require_group(rank: int, ranks: int) -> None:
    if ranks > 1 and not has_group():
        raise CheckpointError(
            f"rank {rank}: the process group of {ranks} ranks was destroyed before this save in the background had "
            "begun; ask for its result before that (or, for a rank that saves alone, make the writer and the planner "
            "without a process group)"
        )


def ranks_now() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return rank_in(), world_size()


def _turn_here() -> Turn | None:
    turn: Turn | None = getattr(_of_thread, "turn", None)
    return None if turn is None or turn._has_ended else turn


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
