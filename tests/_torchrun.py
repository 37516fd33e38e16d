"""Runs a program on several ranks as ``torchrun`` does, each forked from a process that has loaded torch."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import _prepared


@dataclass(frozen=True)
class Rank:
    """How a rank has ended: -N if signal N has ended it."""

    status: int
    out: str
    err: str


def run(script: Path, world: int, *arguments: object, timeout: float, **environment: str) -> list[Rank]:
    """What became of each rank. The current directory is the script's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [str(script), *map(str, arguments)]
    with contextlib.ExitStack() as cleaning:
        ranks = []
        for rank in range(world):
            used = cleaning.enter_context(_prepared.files())
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            program = _prepared.Program(command, used.streams, script.parent, os.environ | place | own | environment)
            cleaning.callback(program.kill)
            ranks.append((program, used))
        return [Rank(program.wait(timeout), used.out, used.err) for program, used in ranks]
