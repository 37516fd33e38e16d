"""Runs a trainer's program on several ranks, each forked from a process that has loaded the trainer."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import _prepared

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300.0


def load_before(*modules: str) -> None:
    """Modules that the process loads from which ranks are forked: to load a trainer takes 10 s of CPU."""
    _prepared.CONTEXT.set_forkserver_preload([*_prepared.LOADED, *modules])


def run(program: str, world: int, *arguments: object, **environment: str) -> str:
    """Runs a program of this folder on ``world`` ranks, as ``torchrun`` does; returns what they wrote to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "tests",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        files = _prepared.files()
        used = files.__enter__()
        command = [str(HERE / program), *map(str, arguments)]
        ranks.append((_prepared.Program(command, used.streams, HERE, os.environ | place | environment), used, files))
    try:
        failed = [rank for rank, (program_, _, _) in enumerate(ranks) if program_.wait(TIMEOUT_SECONDS) != 0]
        errors = [used.err for _, used, _ in ranks]
        assert not failed, "\n".join(f"rank {rank} of {program}: {errors[rank][-4000:]}" for rank in failed)
        return "".join(errors)
    finally:
        for program_, _, files in ranks:
            program_.kill()
            files.__exit__(None, None, None)
