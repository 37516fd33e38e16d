"""Ranks as processes that may be killed: started anew for each step of a round, watched, and ended in bounded time.

They are forked from a process that has loaded torch, so starting them costs milliseconds. A rank that does not answer
in time is asked for its stack, and then killed: that is a failure of the round.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import _prepared

from dcpring import empty_cache

PATIENCE = float(os.environ.get("SOAK_PATIENCE", "1"))
"""More than 1 on a machine that has other work."""

GROUP_SECONDS = 40 * PATIENCE
"""How long a collective may wait for a rank that is gone."""

LIMIT_SECONDS = 150 * PATIENCE
"""No step of a round takes longer than this, whatever goes wrong in it."""

SETTLE_SECONDS = 5 * PATIENCE
"""How long what is ending in a rank may take until it is gone."""

PLANTED: tuple[Callable[[int], None], ...] = ()
"""What each rank calls first, with its number: faults in dcpring, of a test that this program finds them."""


class Hang(AssertionError):
    """Ranks did not answer in time; with their stacks."""


@dataclass
class Answer:
    """What became of a rank.

    Attributes:
        value: what its function has returned.
        error: what it has raised, as text with the traceback; "" if nothing.
        is_dead: it ended without an answer.
        seconds: from the start until it had answered.
    """

    value: Any = None
    error: str = ""
    is_dead: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and not self.is_dead


@dataclass
class Rank:
    """What a function that runs in a rank is given."""

    rank: int
    world_size: int
    _pipe: Connection = field(repr=False)

    def begun(self) -> None:
        """Tells that what may be disturbed begins now."""
        self._pipe.send(("begun", None))


@dataclass
class Disturbance:
    """A signal to some ranks, some time after they have all begun.

    Attributes:
        ranks: who gets it.
        number: of the signal.
        delay: seconds.
    """

    ranks: list[int]
    number: int
    delay: float


def run(
    world_size: int, function: Callable[..., Any], *args: Any, disturbance: Disturbance | None = None
) -> list[Answer]:
    """Calls ``function(Rank, *args)`` in the ranks of a gloo group."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        with _started(world_size, functools.partial(_call, PLANTED, function), args, folder) as ranks:
            answers = _Watch(ranks, folder, disturbance).answers()
        left = [entry.name for entry in (folder / "tmp").iterdir() if not entry.name.startswith("torchinductor_")]
        assert not left or not all(answer.ok for answer in answers), f"temporary files are left: {left}"
        return answers


def _call(planted: tuple[Callable[[int], None], ...], function: Callable[..., Any], rank: Rank, *args: Any) -> Any:
    for plant in planted:
        plant(rank.rank)
    return function(rank, *args)


def _started_one(function: Any, args: Any, rank: int, world_size: int, folder: Path) -> tuple[Any, Connection]:
    pipe, theirs = _prepared.CONTEXT.Pipe()
    process = _prepared.start(_serve, theirs, function, args, rank, world_size, folder)
    theirs.close()
    return process, pipe


@contextlib.contextmanager
def _started(world_size: int, function: Any, args: Any, folder: Path) -> Iterator[list[tuple[Any, Connection]]]:
    ranks = [_started_one(function, args, rank, world_size, folder) for rank in range(world_size)]
    try:
        yield ranks
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


class _Watch:
    def __init__(self, ranks: list[tuple[Any, Connection]], folder: Path, disturbance: Disturbance | None) -> None:
        self._ranks = ranks
        self._folder = folder
        self._disturbance = disturbance
        self._begun: set[int] = set()
        self._at = float("inf")
        self._answers: dict[int, Answer] = {}

    def answers(self) -> list[Answer]:
        started = time.monotonic()
        deadline = started + LIMIT_SECONDS
        waiting = {pipe: number for number, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            now = time.monotonic()
            if now >= deadline:
                raise Hang(self._stacks(list(waiting.values())))
            if now >= self._at:
                self._disturb()
            for pipe in wait_for(list(waiting), min(deadline, self._at) - now):
                assert isinstance(pipe, Connection)
                if self._hear(waiting[pipe], pipe):
                    self._answers[waiting.pop(pipe)].seconds = time.monotonic() - started
        return [self._answers[number] for number in range(len(self._ranks))]

    def _hear(self, number: int, pipe: Connection) -> bool:
        """Whether that was the rank's last word."""
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self._answers[number] = Answer(is_dead=True)
            return True
        if what == "begun":
            self._begun.add(number)
            if self._disturbance is not None and len(self._begun) == len(self._ranks):
                self._at = time.monotonic() + self._disturbance.delay
            return False
        self._answers[number] = Answer(value=value) if what == "returned" else Answer(error=value)
        return True

    def _disturb(self) -> None:
        assert self._disturbance is not None
        for number in self._disturbance.ranks:
            process = self._ranks[number][0]
            if number not in self._answers and process.is_alive():
                os.kill(process.pid, self._disturbance.number)
        self._at = float("inf")

    def _stacks(self, numbers: list[int]) -> str:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[number][0].pid, signal.SIGUSR1)
        time.sleep(2)
        stacks = [f"rank {number}:\n{_text(self._folder / f'stack-{number}')}" for number in numbers]
        others = [f"rank {number}: {answer.error or 'ok'}" for number, answer in self._answers.items()]
        return "\n".join([f"no answer within {LIMIT_SECONDS:.0f} s", *others, *stacks])


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "no stack"


def _serve(pipe: Connection, function: Any, args: Any, rank: int, world_size: int, folder: Path) -> None:
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            answer = ("returned", _in_group(pipe, function, args, rank, world_size, folder))
        except BaseException:  # CheckpointException and KeyboardInterrupt are no Exceptions
            answer = ("raised", traceback.format_exc())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(answer)
        pipe.close()
        stack.flush()
        os._exit(0)  # threads that wait for ranks which are gone would hold it up


def _in_group(pipe: Connection, function: Any, args: Any, rank: int, world_size: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    tempfile.tempdir = str(folder / "tmp")
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
    return function(Rank(rank, world_size, pipe), *args)


def resources(before: dict[str, int] | None = None) -> dict[str, int]:
    """What this process holds that it must not hold more and more of; waits for what is ending since ``before``."""
    end = time.monotonic() + SETTLE_SECONDS
    held = _resources()
    while before is not None and any(held[name] > before[name] for name in held) and time.monotonic() < end:
        time.sleep(0.05)
        held = _resources()
    return held


def _resources() -> dict[str, int]:
    gc.collect()
    empty_cache()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "mappings of memory files": sum("memfd" in line for line in open("/proc/self/maps")),
    }
