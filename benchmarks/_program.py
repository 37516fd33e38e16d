"""What the programs here have in common: their options, the folder they work in, and where their results go."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


class Program(argparse.ArgumentParser):
    """The options of a program.

    Args:
        name: of its results.
        about: its docstring.
        rounds: if nothing else is said; with ``--quick`` it is one.
        kinds: of results.
    """

    def __init__(self, name: str, about: str | None, rounds: int, kinds: Sequence[str] = ("json",)) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._name, self._rounds, self._kinds = name, rounds, kinds
        self.add_argument("--rounds", type=int, help=f"default: {rounds}; with --quick: 1")
        self.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
        self.add_argument("--dir", type=Path, default=Path.cwd(), help="where files go: a disk (default: here)")
        for kind in kinds:
            default = f"{RESULTS.name}/{name}.{kind}"
            self.add_argument(f"--{kind}", type=Path, help=f"default: {default}; with --quick: none")

    def given(self) -> argparse.Namespace:
        given = self.parse_args()
        given.rounds = given.rounds or (1 if given.quick else self._rounds)
        for kind in () if given.quick else self._kinds:
            setattr(given, kind, getattr(given, kind) or RESULTS / f"{self._name}.{kind}")
        return given


def print_machine(machine: dict[str, str | int]) -> None:
    print(", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in machine.items()))
    print(f"load average before: {os.getloadavg()[0]:.1f}; what else runs on the machine shows in every number")


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder in this one, for as long as it is needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


def write(path: Path | None, **results: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1, default=asdict) + "\n")
        print(f"\nwritten: {path}")


def draw(path: Path | None, module: str, *what: Any) -> None:
    if path is None:
        return
    try:
        plot = importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (pip install matplotlib)")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plot.draw(path, *what)
    print(f"drawn: {path}")
