"""Memory that the ranks of a host share, made together with all ranks of the group."""

from __future__ import annotations

import os

from dcpring.base import shared_memory
from dcpring.base.joint import Joint


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
