"""One save at a time into a directory: who comes second gets an error that says who is at it.

It is the lock of a file (``flock``) in the directory, which also holds between hosts where the file system has such
locks. Where it has none, nothing is locked. A process that is killed loses the lock; the file is taken over then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import threading
import weakref
from pathlib import Path

from dcpring.base.files import with_cure
from dcpring.errors import CheckpointError

LOCK_NAME = ".dcpring.lock"

_held: dict[str, weakref.ref[OneSaver]] = {}
"""What this process holds, by the path of the directory."""


class OneSaver:
    """Holds the lock of a directory from here on, until ``release``, or until nothing refers to this.

    DCP does not tell its storage that a save has failed on another rank. A save that was begun in this thread before,
    or in one that has ended, is over, and its lock is taken over.

    Raises:
        CheckpointError: another save into the directory is under way.
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._path = str(directory.absolute() / LOCK_NAME)
        self._thread = threading.current_thread()
        before = _held.get(self._path, lambda: None)()
        if before is not None and (before._thread is self._thread or not before._thread.is_alive()):
            before.release()
        self._release = weakref.finalize(self, _unlock, self._path, _lock(self._path, directory), os.getpid())
        self._release.atexit = False
        _held[self._path] = weakref.ref(self)

    def release(self) -> None:
        self._release()

    def __enter__(self) -> OneSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(path: str, directory: Path) -> int | None:
    """The descriptor that has the lock; None where there are no locks."""
    with with_cure(directory):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise CheckpointError(
                f"another save into {directory} is under way, by {who or 'another process'}; wait until it is over, or "
                "save into another directory"
            ) from None
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    if not _is_called(path, descriptor):  # who had it has removed it since it was opened
        os.close(descriptor)
        return _lock(path, directory)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _is_called(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unlock(path: str, descriptor: int | None, process: int) -> None:
    """Gives the lock back; not in a process that was forked from the one that has it."""
    if descriptor is None or process != os.getpid():
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # which others, that were forked, have open too
    os.close(descriptor)
