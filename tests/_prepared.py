"""Processes that are forked from one which has loaded torch: to start one takes milliseconds, not seconds of CPU.

The process that they are forked from is that of multiprocessing's ``forkserver``. It loads the modules in ``LOADED``
and calls nothing in them, so it has one thread when it forks, and no thread pool, group or CUDA context is inherited.
Its environment is that of the moment when the first process was started. What it has loaded, and the seed of its hashes
of strings, all its children share; a test for which that matters starts a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO, Any

CONTEXT = multiprocessing.get_context("forkserver")
LOADED = (
    *("pytest", "numpy", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
    *("dcpring.resume.checkpointer", "dcpring.cli._app"),
)
CONTEXT.set_forkserver_preload(list(LOADED))

TIMEOUT_SECONDS = 120.0


def start(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that calls ``function(*args)``, which is one of a module's top level."""
    process = CONTEXT.Process(target=_begin, args=(function, args))  # no daemon: those may not have children
    process.start()
    return process


def _begin(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()  # to look through all that is loaded takes a quarter of a second each time
    function(*args)


class Program:
    """A Python program in a process of its own.

    Args:
        arguments: as those of the interpreter: ``-c CODE``, ``-m MODULE`` or a script, and what these are given.
        streams: the descriptors of its input, output and error output; None: that is closed.
        cwd: None: that of this process.
        env: None: that of this process.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        streams: tuple[int | None, int | None, int | None],
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        descriptors = [None if number is None else _Descriptor(number) for number in streams]
        where, environment = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        self._process = start(_execute, list(arguments), descriptors, where, environment)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def status(self) -> int | None:
        """None while it runs; -N if signal N has ended it."""
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> int:
        """Its status at the end, which must come in time."""
        self._process.join(timeout)
        status = self.status()
        if status is None:
            self.kill()
            raise AssertionError(f"the program has not ended after {timeout:.0f} s")
        return status

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@dataclass
class Files:
    """What a program reads and writes: nothing, and two temporary files."""

    streams: tuple[int, int, int]
    _out: IO[str]
    _err: IO[str]

    @property
    def out(self) -> str:
        return _text(self._out)

    @property
    def err(self) -> str:
        return _text(self._err)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@contextlib.contextmanager
def files() -> Iterator[Files]:
    with open(os.devnull) as none, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        yield Files((none.fileno(), out.fileno(), err.fileno()), out, err)


def run(
    arguments: Sequence[str],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs a program as ``subprocess.run`` does, with nothing to read."""
    with files() as used:
        program = Program(arguments, used.streams, cwd, env)
        try:
            status = program.wait(timeout)
        except AssertionError as error:
            error.add_note(used.out + used.err)
            raise
        return subprocess.CompletedProcess(list(arguments), status, used.out, used.err)


# ---- in the process ----


class _Descriptor:
    """A descriptor that is given to the process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


def _execute(arguments: list[str], streams: list[int | None], cwd: str, environment: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout, sys.stderr = (_taken_over(number, stream) for number, stream in enumerate(streams))
    status = _status_of(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            status = status or 120
    os._exit(status)


def _taken_over(number: int, stream: int | None) -> Any:
    """A stream as an interpreter makes it that finds it open or closed."""
    if stream is None:
        os.close(number)
        return None
    os.dup2(stream, number)
    os.close(stream)
    encoding = os.environ.get("PYTHONIOENCODING")
    if number == 0:
        return os.fdopen(0, encoding=encoding, closefd=False)
    is_line = number == 2 or os.isatty(number)
    errors = "backslashreplace" if number == 2 else None
    return os.fdopen(number, "w", 1 if is_line else -1, encoding, errors, closefd=False)


def _status_of(arguments: list[str]) -> int:
    try:
        _interpret(arguments)
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return (exit.code or 0) & 0xFF
        print(exit.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _interpret(arguments: list[str]) -> None:
    if arguments[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        arguments = arguments[2:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
