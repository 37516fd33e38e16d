"""Runs a trainer's program on several ranks, each forked from a process that has loaded the trainer."""

from __future__ import annotations

from pathlib import Path

import _prepared
import _torchrun

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300.0


def load_before(*modules: str) -> None:
    """Modules that the process loads from which ranks are forked: to load a trainer takes 10 s of CPU."""
    _prepared.CONTEXT.set_forkserver_preload([*_prepared.LOADED, *modules])


def run(program: str, world: int, *arguments: object, **environment: str) -> str:
    """Runs a program of this folder, which must succeed; returns what its ranks wrote to stderr."""
    ranks = _torchrun.run(HERE / program, world, *arguments, timeout=TIMEOUT_SECONDS, **environment)
    failed = [f"rank {number} of {program}: {rank.err[-4000:]}" for number, rank in enumerate(ranks) if rank.status]
    assert not failed, "\n".join(failed)
    return "".join(rank.err for rank in ranks)
