"""Notes everything that is done to the files below a directory: by dcpring's core, and by Python itself.

The core notes its own calls (csrc/core/io/sys_record.h). Those that Python makes are noted by functions that take the
place of ``os.rename``, ``open`` and so on. An audit hook sees the calls that go past these, and fails them: nothing is
done to the directory that is not in the log. Any number of threads and processes can share a log.
"""

from __future__ import annotations

import builtins
import io
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from dcpring import _C


class Call(IntEnum):
    """As in csrc/core/io/sys_record.h; what Python adds follows from 100 on."""

    CREATE = 1
    MKDIR = 2
    WRITE = 3
    SUBMIT = 4
    COMPLETE = 5
    RESIZE = 6
    ALLOCATE = 7
    FDATASYNC = 8
    FSYNC = 9
    RENAME = 10
    EXCHANGE = 11
    UNLINK = 12
    LINK = 13
    SYNC_ALL = 100
    MARK = 101


@dataclass(frozen=True)
class Note:
    """One call, or a mark that a test has set.

    Attributes:
        begin, end: nanoseconds of CLOCK_MONOTONIC.
        inode, directory: as ``number_of``. ``directory`` is where ``name`` is.
        id: of a SUBMIT and its COMPLETE; of a RENAME, the inode of the directory that ``other`` is in, 0 for the same.
    """

    call: Call
    process: int
    begin: int
    end: int
    inode: int = 0
    directory: int = 0
    id: int = 0
    offset: int = 0
    size: int = 0
    name: str = ""
    other: str = ""
    data: bytes = b""


_HEAD = struct.Struct("<IIQQQQQQQIIII")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PATHS_OF_EVENTS = {"open": 1, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.rename": 2}
_PATHS_OF_EVENTS |= {"os.link": 2, "os.symlink": 2}
"""Audit events of calls that change a file system, and how many of their first arguments are paths."""


def number_of(about: os.stat_result) -> int:
    """An inode's number, with that of its device."""
    return (about.st_dev << 44 ^ about.st_ino) & (1 << 64) - 1


def read_log(log: Path) -> list[Note]:
    """What was noted, in the order in which it began."""
    data, notes, at = log.read_bytes(), [], 0
    while at < len(data):
        call, process, begin, end, inode, directory, number, offset, size, *sizes, _ = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = []
        for length in sizes:
            parts.append(data[at : at + length])
            at += length
        name, other = os.fsdecode(parts[0]), os.fsdecode(parts[1])
        notes.append(
            Note(Call(call), process, begin, end, inode, directory, number, offset, size, name, other, parts[2])
        )
    return sorted(notes, key=lambda note: note.begin)


class NotRecorded(AssertionError):
    """Something was done to the directory in a way that cannot be noted."""


class Recorder:
    """Records this process's calls; one at a time.

    Args:
        root: what is done below it is noted. It must be there.
        log: to append to, outside of the root.
    """

    def __init__(self, root: Path, log: Path) -> None:
        self._root = os.path.realpath(root)
        self._log = log
        self._real = {name: getattr(os, name) for name in _Calls.names}
        self._open = builtins.open
        self._fd = -1
        self._missed: list[str] = []
        self._is_noting = threading.local()

    def __enter__(self) -> Recorder:
        global _active
        assert _active is None, "one recording at a time"
        self._fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _add_audit_hook()
        calls = _Calls(self)
        for name in _Calls.names:
            setattr(os, name, getattr(calls, name))
        builtins.open = io.open = calls.open_file  # type: ignore[assignment]
        _C.start_recording(self._fd)
        _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None
        _C.stop_recording()
        for name, function in self._real.items():
            setattr(os, name, function)
        builtins.open = io.open = self._open
        os.close(self._fd)
        if self._missed:
            raise NotRecorded("; ".join(self._missed))

    def mark(self, text: str) -> None:
        """Notes that this point was reached."""
        now = time.monotonic_ns()
        self.note(Call.MARK, now, name=text)

    @contextmanager
    def failing(self, call: str, err: int, nth: int = 1, sticky: bool = False) -> Iterator[None]:
        """The core's nth system call of that name fails, and is not noted; others are."""
        _C.stop_recording()
        _C.arm_fault(call, nth, err, sticky)
        _C.start_recording(self._fd)
        try:
            yield
        finally:
            _C.stop_recording()
            _C.disarm_fault()
            _C.start_recording(self._fd)

    # ---- what the calls below need ----

    def note(self, call: Call, begin: int, **about: Any) -> None:
        name, other = (os.fsencode(about.get(key, "")) for key in ("name", "other"))
        data = bytes(about.get("data", b""))
        numbers = [about.get(key, 0) for key in ("inode", "directory", "id", "offset", "size")]
        head = _HEAD.pack(
            *(call, os.getpid(), begin, time.monotonic_ns(), *numbers, len(name), len(other), len(data), 0)
        )
        note = head + name + other + data
        assert self._real["write"](self._fd, note) == len(note)

    def is_below(self, path: Any, dir_fd: int | None = None) -> bool:
        """Whether a path leads to what is recorded."""
        if isinstance(path, int):
            path = f"/proc/self/fd/{path}"
        above = os.path.dirname(os.fspath(path)) or "."
        if dir_fd is not None:
            above = os.path.join(f"/proc/self/fd/{dir_fd}", above)
        where = os.path.join(os.path.realpath(above), os.path.basename(path))
        return os.path.realpath(where).startswith(f"{self._root}{os.sep}")

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What happens meanwhile on this thread is being noted."""
        outer = getattr(self._is_noting, "value", False)
        self._is_noting.value = True
        try:
            yield
        finally:
            self._is_noting.value = outer

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(self._is_noting, "value", False):
            return
        if event == "open" and (arguments[0] is None or not (arguments[2] or 0) & _WRITING):
            return
        with self.noting():
            paths = arguments[: _PATHS_OF_EVENTS[event]]
            missed = any(self.is_below(os.fsdecode(p) if isinstance(p, bytes) else p) for p in paths)
        if missed:
            self._missed.append(f"{event}{arguments} is not noted")
            raise NotRecorded(self._missed[-1])


_active: Recorder | None = None
_is_hooked = False


def _add_audit_hook() -> None:
    """A hook stays for as long as the process lives."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_audit)
        _is_hooked = True


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None and event in _PATHS_OF_EVENTS:
        _active.audit(event, arguments)


class _Calls:
    """What takes the place of functions of ``os``, and of ``open``."""

    names = (
        *("mkdir", "rmdir", "unlink", "remove", "rename", "replace"),
        *("fsync", "fdatasync", "sync", "truncate", "ftruncate", "open", "write", "pwrite", "writev", "pwritev"),
        *("posix_fallocate", "link", "symlink", "copy_file_range", "sendfile"),
    )

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._real = recorder._real

    # ---- names ----

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._recorder.noting():
            begin = time.monotonic_ns()
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            inode = number_of(os.stat(path, dir_fd=dir_fd))
            self._recorder.note(Call.MKDIR, begin, inode=inode, **_place(path, dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    remove = unlink

    def _remove(self, name: str, path: Any, dir_fd: int | None) -> None:
        with self._recorder.noting():
            place, begin = _place(path, dir_fd), time.monotonic_ns()
            self._real[name](path, dir_fd=dir_fd)
            self._recorder.note(Call.UNLINK, begin, **place)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with self._recorder.noting():
            old, new, begin = _place(src, src_dir_fd), _place(dst, dst_dir_fd), time.monotonic_ns()
            self._real["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self._recorder.note(Call.RENAME, begin, **old, other=new["name"], id=new["directory"])

    replace = rename

    # ---- making durable ----

    def fsync(self, fd: Any) -> None:
        self._sync("fsync", Call.FSYNC, fd)

    def fdatasync(self, fd: Any) -> None:
        self._sync("fdatasync", Call.FDATASYNC, fd)

    def _sync(self, name: str, call: Call, fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        begin = time.monotonic_ns()
        self._real[name](number)
        self._recorder.note(call, begin, inode=number_of(os.fstat(number)))

    def sync(self) -> None:
        begin = time.monotonic_ns()
        self._real["sync"]()
        self._recorder.note(Call.SYNC_ALL, begin)

    # ---- content ----

    def truncate(self, path: Any, length: int) -> None:
        with self._recorder.noting():
            begin = time.monotonic_ns()
            self._real["truncate"](path, length)
            self._recorder.note(Call.RESIZE, begin, inode=number_of(os.stat(path)), size=length)

    def ftruncate(self, fd: int, length: int) -> None:
        self._on_descriptor("ftruncate", Call.RESIZE, fd, (length,), size=length)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        self._on_descriptor("posix_fallocate", Call.ALLOCATE, fd, (offset, length), size=offset + length)

    def write(self, fd: int, data: Any) -> int:
        begin = time.monotonic_ns()
        count = self._real["write"](fd, data)
        if self._recorder.is_below(fd):
            self._note_written(begin, fd, os.lseek(fd, 0, os.SEEK_CUR) - count, data, count)
        return count

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        begin = time.monotonic_ns()
        count = self._real["pwrite"](fd, data, offset)
        if self._recorder.is_below(fd):
            self._note_written(begin, fd, offset, data, count)
        return count

    def _note_written(self, begin: int, fd: int, offset: int, data: Any, count: int) -> None:
        written = memoryview(data).cast("B")[:count]
        self._recorder.note(
            Call.WRITE, begin, inode=number_of(os.fstat(fd)), offset=offset, size=count, data=bytes(written)
        )

    def _on_descriptor(self, name: str, call: Call, fd: int, arguments: tuple[int, ...], **about: int) -> None:
        begin = time.monotonic_ns()
        with self._recorder.noting():
            self._real[name](fd, *arguments)
        if self._recorder.is_below(fd):
            self._recorder.note(call, begin, inode=number_of(os.fstat(fd)), **about)

    def _refused(name: str) -> Callable[..., Any]:  # type: ignore[misc]
        def call(self: _Calls, first: Any, *arguments: Any, **options: Any) -> Any:
            if self._recorder.is_below(first):
                self._recorder._missed.append(f"os.{name} is not noted")
                raise NotRecorded(f"os.{name} is not noted")
            return self._real[name](first, *arguments, **options)

        return call

    writev, pwritev = _refused("writev"), _refused("pwritev")
    link, symlink = _refused("link"), _refused("symlink")
    copy_file_range, sendfile = _refused("copy_file_range"), _refused("sendfile")

    # ---- opening ----

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._recorder.noting():
            if not flags & _WRITING or not self._recorder.is_below(path, dir_fd):
                return self._real["open"](path, flags, mode, dir_fd=dir_fd)
            with self._creating(path, dir_fd, flags & os.O_TRUNC):
                return self._real["open"](path, flags, mode, dir_fd=dir_fd)

    def open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        is_written = any(letter in mode for letter in "wax+")
        if not is_written or opener is not None or not self._recorder.is_below(file):
            return self._recorder._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw_mode = mode.replace("b", "").replace("t", "")
        with self._recorder.noting():
            if isinstance(file, int):
                raw = _File(self._recorder, file, raw_mode, closefd)
            else:
                with self._creating(file, None, "w" in mode):
                    raw = _File(self._recorder, file, raw_mode)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    @contextmanager
    def _creating(self, path: Any, dir_fd: int | None, truncates: Any) -> Iterator[None]:
        place, begin = _place(path, dir_fd), time.monotonic_ns()
        try:
            old = os.stat(path, dir_fd=dir_fd)
        except FileNotFoundError:
            old = None
        yield
        inode = number_of(os.stat(path, dir_fd=dir_fd))
        if old is None:
            self._recorder.note(Call.CREATE, begin, inode=inode, **place)
        elif truncates:
            self._recorder.note(Call.RESIZE, begin, inode=inode, size=0)


class _File(io.FileIO):
    """A file that Python writes, all of whose writes are noted."""

    def __init__(self, recorder: Recorder, file: Any, mode: str, closefd: bool = True) -> None:
        super().__init__(file, mode, closefd)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        begin = time.monotonic_ns()
        count = super().write(data)
        assert count is not None
        self._recorder.note(
            Call.WRITE,
            begin,
            inode=number_of(os.fstat(self.fileno())),
            offset=self.tell() - count,
            size=count,
            data=bytes(memoryview(data).cast("B")[:count]),
        )
        return count

    def truncate(self, size: int | None = None) -> int:
        begin = time.monotonic_ns()
        with self._recorder.noting():
            result = super().truncate(size)
        self._recorder.note(Call.RESIZE, begin, inode=number_of(os.fstat(self.fileno())), size=result)
        return result


def _place(path: Any, dir_fd: int | None) -> dict[str, Any]:
    above, name = os.path.split(os.fspath(path).rstrip("/"))
    directory = os.fstat(dir_fd) if dir_fd is not None and not above else os.stat(above or ".", dir_fd=dir_fd)
    return {"directory": number_of(directory), "name": name}
