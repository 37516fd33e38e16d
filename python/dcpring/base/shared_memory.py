"""Memory that processes of one host share: one makes it, and tells the others in a word where they find it.

It has no name in any file system, so nothing is left behind. Processes that do not see each other in /proc (in other
containers, or of other users) cannot share: they get an OSError.
"""

from __future__ import annotations

import mmap
import os
import secrets


def create(size: int) -> tuple[int, str]:
    """A descriptor of new memory, for the caller to close when all others have opened it, and the word for it."""
    name = f"dcpring-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor} {name}"


def open_word(word: str) -> mmap.mmap:
    """The memory that a word stands for. OSError or ValueError where it cannot be had."""
    path, _, name = word.partition(" ")
    if not os.readlink(path).startswith(f"/memfd:{name}"):
        raise OSError(f"{path} is another process's: the ranks' process ids differ")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
