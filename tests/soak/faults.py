"""What goes wrong in a step of a round: chosen in the program, and planted in the ranks."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fault._support import mounted
from soak.processes import Answer, Disturbance
from soak.story import require
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcpring import _C, RingLoadPlanner, RingReader, RingSavePlanner, RingWriter

MIB = 1 << 20
DISK_BYTES = 384 * MIB
"""Room for all sources that a round of conversions keeps, its target, and a copy to look at."""

_STORAGE_OF_SAVES = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
_STORAGE_OF_LOADS = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
_OF_PLANNERS = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
METHODS = {
    "save": (*_STORAGE_OF_SAVES, *_OF_PLANNERS, "lookup_object"),
    "load": (*_STORAGE_OF_LOADS, *_OF_PLANNERS, "resolve_tensor"),
}
_CLASSES = {
    "save": (RingWriter, RingSavePlanner, DefaultSavePlanner),
    "load": (RingReader, RingLoadPlanner, DefaultLoadPlanner),
}
_OPENING = ("open_dir", "open_below", "fstat", "close", "map", "uring_init", "uring_submit", "uring_result")
CALLS = {
    "save": (*_OPENING, "pwrite", "fallocate", "ftruncate", "fdatasync", "fsync", "rename", "unlink", "mkdir"),
    "load": (*_OPENING, "pread"),
}


class Planted(Exception):
    """What a rank raises on purpose."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one step.

    Attributes:
        step: "save" or "load".
        kind: "raise" (a method of storage or planner), "call" (a system call fails), "slow", "limit" (files cannot
            grow), "full" (the disk), "kill" or "interrupt".
        ranks: where.
        place: of "raise" the method, of "call" the system call.
        number: of "call" which call, from 1; of "limit" and "full" the bytes that there is room for.
        errno: of "call".
        share: of "kill" and "interrupt", when: of the time that the step takes without them.
        delay_ms: before each system call.
    """

    step: str
    kind: str
    ranks: tuple[int, ...]
    place: str = ""
    number: int = 1
    errno: int = 0
    share: float = 0.0
    delay_ms: int = 0

    def disturbance(self, seconds: float) -> Disturbance | None:
        """The signal, for a step that takes so long without it."""
        signals = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
        if self.kind not in signals:
            return None
        return Disturbance(list(self.ranks), signals[self.kind], self.share * (seconds + 0.1 * self.delay_ms))

    @contextmanager
    def planted(self, rank: int) -> Iterator[None]:
        """In a rank: it goes wrong meanwhile."""
        with ExitStack() as planted:
            if rank not in self.ranks:
                pass
            elif self.kind == "raise":
                for cls in _CLASSES[self.step]:
                    if self.place in vars(cls):
                        planted.enter_context(mock.patch.object(cls, self.place, _raises(self.place, rank)))
            elif self.kind == "limit":
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.number, limits[1]))
                planted.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
            elif self.kind == "call" or self.delay_ms:
                _C.arm_fault(self.place or None, self.number, self.errno, bool(self.delay_ms), self.delay_ms)
                planted.callback(_C.disarm_fault)
            yield

    @contextmanager
    def around(self, path: Path) -> Iterator[None]:
        """In the program: what is wrong with the disk."""
        if self.kind != "full":
            yield
            return
        filler = path.parent / "filler"
        with open(filler, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, max(1, shutil.disk_usage(path.parent).free - self.number))
        try:
            yield
        finally:
            filler.unlink()

    def judge(self, answers: Sequence[Answer]) -> None:
        """Whether the ranks have answered as they must."""
        failed = [answer for answer in answers if not answer.ok]
        dead = {number for number, answer in enumerate(answers) if answer.is_dead}
        require(dead <= (set(self.ranks) if self.kind == "kill" else set()), f"ranks {sorted(dead)} died", answers)
        if self.kind == "slow":
            require(not failed, "being slow is no failure", answers)
        if self.kind in ("raise", "call", "limit", "full"):
            require(len(failed) in (0, len(answers)), "some ranks succeeded, and others failed", answers)


def _raises(place: str, rank: int) -> Any:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        raise Planted(f"{place} of rank {rank}")

    return method


def random_fault(chance: random.Random, step: str, world_size: int, nbytes: int, is_small_disk: bool) -> Fault:
    """A fault for a step of so many bytes."""
    ranks = tuple(range(world_size)) if chance.random() < 0.25 else (chance.randrange(world_size),)
    kinds = ["raise", "call", "slow", "kill", "kill", "interrupt"]
    kinds += (["full"] * 3 if is_small_disk else ["limit"]) if step == "save" else []
    kind = chance.choice(kinds)
    delay_ms = chance.choice((5, 20)) if kind == "slow" or chance.random() < 0.3 else 0
    if kind == "raise":
        return Fault(step, kind, ranks, chance.choice(METHODS[step]))
    if kind == "call":
        code = chance.choice((errno.EIO, errno.ENOSPC, errno.EINTR, errno.ENOMEM))
        return Fault(step, kind, ranks, chance.choice(CALLS[step]), chance.randint(1, 4), code)
    if kind == "limit":
        return Fault(step, kind, ranks, number=chance.randint(1 << 16, max(1 << 17, nbytes // world_size)))
    if kind == "full":
        return Fault(step, kind, (), number=chance.randint(1 << 14, max(1 << 15, nbytes)))
    return Fault(step, kind, ranks, share=chance.uniform(0, 1.2), delay_ms=delay_ms)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system that is easily filled; None where there cannot be one."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            where = stack.enter_context(mounted(folder / "image", "ext4", DISK_BYTES, "-q", "-m", "0"))
        except AssertionError:  # no loop devices here
            where = None
        yield where
