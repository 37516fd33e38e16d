"""Small files: a FIFO in the place of one that is read is refused, not waited for; one is replaced at once or not."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from dcpring import _C
from dcpring.errors import CorruptCheckpointError

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}


@contextlib.contextmanager
def with_cure(path: Path) -> Iterator[None]:
    """What Python's own calls raise ends as the errors of the core do: with what to do about it, and with the path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (cure := _C.cure(error.errno)):
            error.strerror = f"{error.strerror}; {cure}"
            error.args = (error.errno, error.strerror)  # what other ranks get
        error.filename = error.filename or str(path)
        raise


def names_in(directory: Path) -> list[str]:
    """What a directory holds.

    Raises:
        OSError: it cannot be listed.
    """
    with with_cure(directory):
        return os.listdir(directory)


def special_kind(mode: int) -> str:
    """What lies in the place of a regular file; "" where it is one."""
    if stat.S_ISREG(mode):
        return ""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a file to read it.

    Raises:
        CorruptCheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    with with_cure(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if kind := special_kind(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCheckpointError(f"{kind}, not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """All of a file. Raises as ``open_regular``."""
    with open_regular(path) as file, with_cure(path):
        return file.read()


def new_tag() -> str:
    """What tells a file from all others that were ever written under its name."""
    return secrets.token_hex(8)


def unfinished_name(name: str, tag: str = "") -> str:
    """Where a file is written before it is renamed; without a tag a new one is drawn."""
    return f"{name}.{tag or new_tag()}.tmp"


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file beside, hidden, and renames it: whoever looks sees the old one or the new one. It is not synced.

    Raises:
        OSError: it cannot be written.
    """
    _C.commit(str(path.absolute().parent), f".{unfinished_name(path.name)}", path.name, data, False)


@contextlib.contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX, must: bool = False) -> Iterator[None]:
    """Holds the lock of a file or directory, as far as there are any; ``must``: OSError where there are not, or when
    somebody else holds it."""
    with contextlib.ExitStack() as held:
        with contextlib.nullcontext() if must else contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, kind | (fcntl.LOCK_NB if must else 0))
        yield
