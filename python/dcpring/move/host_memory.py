"""Memory that the ranks of a host share, made together with all ranks of the group, and rounds that all go through."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.base.joint import Joint

_BARRIER_BYTES = _C.ALIGNMENT_BYTES
_WORD_BYTES = 4
_PATIENCE_MS = 1000


@contextlib.contextmanager
def offered(joint: Joint, rank: int, leader: int, size: int, data: bytes = b"") -> Iterator[tuple[memoryview, str]]:
    """The memory that a rank offers to its host, or why this rank cannot map it; within, others may be mapping it.

    Args:
        joint: an operation of all ranks.
        rank: this one, in the group.
        leader: the rank of this host that makes the memory.
        size: in bytes, as the leader has it; 0: it makes none.
        data: what the leader puts into it.
    """
    descriptor, word, problem, memory = -1, "", "", memoryview(b"")
    try:
        try:
            if size and rank == leader:
                descriptor, word = shared_memory.create(size)
                memory = memoryview(shared_memory.open_word(word))
                memory[: len(data)] = data
        except (OSError, ValueError) as error:
            word, problem = "", str(error)
        word = joint.gather("memory", word)[leader]
        try:
            if word and rank != leader:
                memory = memoryview(shared_memory.open_word(word))
        except (OSError, ValueError) as error:
            problem = str(error)
        yield memory, problem
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def share(joint: Joint, rank: int, leader: int, size: int) -> tuple[memoryview, str]:
    """The memory that is ``offered``; none on all ranks, and why, where one of them cannot map it."""
    with offered(joint, rank, leader, size) as (memory, problem):
        problems = [text for text in joint.gather("mapped", problem) if text]
    return (memoryview(b""), problems[0]) if problems else (memory, "")


class Rounds:
    """Rounds that all ranks go through together: the memory of each, and where all wait for each other.

    Ranks of one host wait at a barrier in its memory: quickly, as long as nobody is late. Where one is, or there are
    several hosts, all meet by the process group.

    Args:
        joint: an operation of all ranks.
        ranks: of the operation.
        count: of rooms; they are used in turn.
        room_bytes: of each.
        memory: ``Rounds.size_of(count, room_bytes)`` bytes; what this host shares, or a rank has for itself.
        is_one_host: all these ranks have this memory.
    """

    def __init__(
        self, joint: Joint, ranks: int, count: int, room_bytes: int, memory: memoryview, *, is_one_host: bool
    ) -> None:
        self._joint, self._ranks = joint, ranks
        self._words, self._target = memory[: _BARRIER_BYTES if is_one_host else 0], 0
        self._rooms = [memory[_BARRIER_BYTES + at * room_bytes :][:room_bytes] for at in range(count)]

    @staticmethod
    def size_of(count: int, room_bytes: int) -> int:
        return _BARRIER_BYTES + count * room_bytes

    def room(self, number: int) -> memoryview:
        """The memory of a round. It is free once all have come to the end of the last round that had it."""
        return self._rooms[number % len(self._rooms)]

    def meet(self, number: int) -> None:
        """Waits for all to have come to a place in a round. Raises what a rank has failed with."""
        if not self._have_come():
            self._joint.settle(f"round {number + 1}")

    def _have_come(self) -> bool:
        """Whether all are at the barrier; if not, then on no rank."""
        return bool(self._words) and self.come(_PATIENCE_MS)

    def come(self, patience_ms: int) -> bool:
        """Comes to the barrier. Whether all have; if not, one is late or has left, and that is so on all ranks."""
        self._target += self._ranks
        if _C.barrier_wait(self._words, self._target, patience_ms):
            return True
        self._words, self._target = self._words[_WORD_BYTES:], 0
        return False

    def leave(self) -> None:
        """Nobody is to wait for this rank at a barrier."""
        if self._words:
            _C.barrier_end(self._words)
