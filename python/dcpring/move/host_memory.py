"""Memory that the ranks of a host share, made together with all ranks of the group."""

from __future__ import annotations

import os

from dcpring import _C
from dcpring.base import shared_memory
from dcpring.base.joint import Joint

BARRIER_BYTES = _C.ALIGNMENT_BYTES
"""What a barrier takes of shared memory."""

_WORD_BYTES = 4
_PATIENCE_MS = 1000


def share(joint: Joint, rank: int, leader: int, size: int) -> tuple[memoryview, str]:
    """The memory of this rank's host; none on all ranks, and why, where one of them cannot map it.

    Args:
        joint: an operation of all ranks.
        rank: this one, in the group.
        leader: the rank of this host that makes the memory.
        size: in bytes; 0: this host needs none.
    """
    descriptor, word, problem, memory = -1, "", "", memoryview(b"")
    try:
        try:
            if size and rank == leader:
                descriptor, word = shared_memory.create(size)
        except OSError as error:
            problem = str(error)
        word = joint.gather("memory", word)[leader]
        try:
            if size and not problem:
                memory = memoryview(shared_memory.open_word(word, size))
        except (OSError, ValueError) as error:
            problem = str(error)
        problems = [text for text in joint.gather("mapped", problem) if text]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return (memoryview(b""), problems[0]) if problems else (memory, "")


class Barrier:
    """Where the ranks of a host wait for each other, in memory that they share: quickly, as long as nobody is late.

    Args:
        memory: ``BARRIER_BYTES``, which were zero.
        size: how many ranks there are.
    """

    def __init__(self, memory: memoryview, size: int) -> None:
        self._words, self._size, self._target = memory, size, 0

    def wait(self) -> bool:
        """Whether all have come; if not, then on no rank, and they are to meet by the process group this time."""
        if not self._words:
            return False
        self._target += self._size
        if _C.barrier_wait(self._words, self._target, _PATIENCE_MS):
            return True
        self._words, self._target = self._words[_WORD_BYTES:], 0
        return False

    def end(self) -> None:
        """Nobody is to wait for this rank."""
        if self._words:
            _C.barrier_end(self._words)
