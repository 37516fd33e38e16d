"""What happens in a round, and what must hold in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from soak.processes import Answer


class Story:
    """The steps of a round, for people, each with the seconds since the round began."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lines: list[str] = []

    def tell(self, text: str) -> None:
        self._lines.append(f"  {time.monotonic() - self._started:6.1f} s: {text}")

    def __str__(self) -> str:
        return "\n".join(self._lines)


class Failed(AssertionError):
    """What a round has found."""


def require(holds: bool, what: str, answers: Sequence[Answer] = ()) -> None:
    if not holds:
        texts = [f"rank {n}: {'died' if a.is_dead else a.error or 'ok'}" for n, a in enumerate(answers)]
        raise Failed("\n".join([what, *texts]))


def require_no_growth(held: list[dict[str, int]]) -> None:
    """Of steps that are all alike: from the second on nothing more is held; the first loads what is loaded late."""
    for name in held[-1] if len(held) > 2 else ():
        require(held[-1][name] <= held[1][name], f"{name} grow: {[each[name] for each in held]}")


def flip(file: Path, at: int, bit: int) -> None:
    """Flips a bit; a second call flips it back."""
    with open(file, "r+b") as stream:
        stream.seek(at)
        value = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([value ^ 1 << bit]))
