"""Running the command line: in this process, in one of its own with pipes, in a terminal, and interrupted."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _prepared

from dcpring.cli import main

PROGRAM = (sys.executable, "-m", "dcpring")
TIMEOUT_SECONDS = 120.0

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Result:
    """What a run gave. In a terminal everything is in ``out``."""

    status: int
    out: str
    err: str = ""

    @property
    def plain(self) -> str:
        """The output without colours."""
        return _ESCAPES.sub("", self.out)


def run(*args: object) -> Result:
    """In this process, as in a pipe: the fastest."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as exit:  # argparse's, for --help and wrong arguments
            status = exit.code if isinstance(exit.code, int) else 2
    return Result(status, out.getvalue(), err.getvalue())


def run_piped(*args: object, **environment: str) -> Result:
    """In a process of its own, in pipes."""
    done = subprocess.run(
        [*PROGRAM, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=os.environ | environment,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def run_apart(*args: object, cwd: Path | None = None, **environment: str) -> Result:
    """In a process of its own, which has loaded torch already; its output goes into files."""
    done = _prepared.run(["-m", "dcpring", *map(str, args)], cwd, os.environ | environment)
    return Result(done.returncode, done.stdout, done.stderr)


def run_in_terminal(*args: object, columns: int = 100, **environment: str) -> Result:
    """In a process of its own, on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"} | environment
    program = _prepared.Program(["-m", "dcpring", *map(str, args)], (theirs, theirs, theirs), env=env)
    os.close(theirs)
    chunks: list[bytes] = []
    until = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < until:
        if not select.select([ours], [], [], 0.1)[0]:
            continue
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            chunk = b""
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    return Result(program.wait(), b"".join(chunks).decode(errors="replace").replace("\r\n", "\n"))


def interrupted(
    *args: object, when: Callable[[int], bool], by: signal.Signals = signal.SIGINT, **environment: str
) -> Result:
    """In a process of its own, which gets SIGINT (Ctrl-C) as soon as ``when`` holds of it; fails if it never does."""
    with _prepared.files() as files:
        program = _prepared.Program(["-m", "dcpring", *map(str, args)], files.streams, env=os.environ | environment)
        until = time.monotonic() + TIMEOUT_SECONDS
        while not when(program.pid):
            assert program.status() is None, f"it ended before it could be interrupted: {files.out} {files.err}"
            assert time.monotonic() < until, "the moment to interrupt it never came"
            time.sleep(0.001)
        os.kill(program.pid, by)
        return Result(program.wait(), files.out, files.err)


def has_open(process: int, path: Path) -> bool:
    """Whether a process has a file open."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) == str(path):
                    return True
    return False


def files_in(directory: Path) -> dict[str, int]:
    """All files below a directory, hidden ones too, and their sizes."""
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}
