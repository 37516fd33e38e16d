"""Records scenarios, makes every state that a crash may leave of them, and looks at each.

    python tests/crash/explore.py [--full] [--seed N] [--only NAME]...

Where there are more states than the bounds allow, some are chosen at random: the seed is printed, and with it and the
same program the same states are made.
"""

from __future__ import annotations

import argparse
import logging
import random
import secrets
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from crash import scenarios
from crash.model import FULL, QUICK, Bounds, Crashes, Run, State, Store, Tree
from crash.scenarios import REFUSED, Scenario, Wrong, record

MOST_PROBLEMS = 5


@dataclass
class Outcome:
    """What was found of one scenario.

    Attributes:
        states: that were made; ``distinct`` of them were different, and looked at.
        again: states over which the next save was tried.
        versions: that were found.
        problems: in words.
        seconds: that it took.
    """

    name: str
    states: int = 0
    distinct: int = 0
    again: int = 0
    versions: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        line = f"{self.name}: {self.states} states, {self.distinct} different, {self.again} saved over"
        return "\n".join([f"{line}, {self.seconds:.1f} s", *(f"  WRONG: {problem}" for problem in self.problems)])


class Explorer:
    """Looks at the states of one scenario.

    Args:
        again_most: over how many states to save again.
    """

    def __init__(
        self, scenario: Scenario, run: Run, folder: Path, bounds: Bounds, seed: int | str, again_most: int
    ) -> None:
        self._scenario = scenario
        self._run = run
        self._store = Store(folder / "contents")
        self._folder = folder
        self._chance = random.Random(f"{seed} {scenario.name}")
        self._bounds = bounds
        self._crashes = Crashes(run, self._store, bounds, self._chance, scenario.loses)
        self._found: dict[frozenset[tuple[str, str | None]], set[int] | str] = {}
        self._again_most = again_most
        self._shapes: set[frozenset[str]] = set()
        self.outcome = Outcome(scenario.name)

    def explore(self) -> Outcome:
        started = time.perf_counter()
        for moment in self._crashes.times():
            done, begun = self._marked(moment)
            for state in self._crashes.at(moment):
                self.outcome.states += 1
                self._look(state, done, begun)
                if len(self.outcome.problems) >= MOST_PROBLEMS:
                    break
        self.outcome.distinct = len(self._found)
        self.outcome.versions = {one for found in self._found.values() if isinstance(found, set) for one in found}
        self.outcome.seconds = time.perf_counter() - started
        return self.outcome

    def _marked(self, moment: float) -> tuple[int, int]:
        """The last version that was done, and the last that had begun."""
        done = [int(m.text.split()[1]) for m in self._run.marks if m.text.startswith("done") and m.time <= moment]
        begun = [int(m.text.split()[1]) for m in self._run.marks if m.text.startswith("begin") and m.time < moment]
        return max(done, default=0), max(begun, default=0)

    def _look(self, state: State, done: int, begun: int) -> None:
        key = self._what_matters(state.tree)
        if key not in self._found:
            self._found[key] = self._find(state)
        self._try_again(state)
        found = self._found[key]
        problem = found if isinstance(found, str) else self._problem(found, done, begun)
        if problem:
            names = ", ".join(sorted(state.tree))
            lost = f"; lost: {', '.join(state.lost)}" if state.lost else ""
            when = f"version {done} was saved" + (f", and {begun} being saved" if begun > done else "")
            self.outcome.problems.append(f"{problem}; {when}; there is {names}{lost}")

    def _problem(self, found: set[int], done: int, begun: int) -> str:
        expected = {done or self._scenario.initial, *range(done + 1, begun + 1)}
        for one in found:
            if one == REFUSED and begun <= done:
                return "a load says that a save was interrupted"
            if one != REFUSED and one not in expected:
                return f"version {one} is there"
        return ""

    def _what_matters(self, tree: Tree) -> frozenset[tuple[str, str | None]]:
        """Two states that have this in common load alike: nothing looks at data files that no other file names."""
        if not self._bounds.skips:
            return frozenset(tree.items())
        named = [
            self._store.content(digest)
            for path, digest in tree.items()
            if digest is not None and not path.endswith(".distcp")
        ]

        def is_named(path: str) -> bool:
            name = path.rpartition("/")[2].encode()
            return any(name in content for content in named)

        return frozenset(
            (path, digest)
            for path, digest in tree.items()
            if self._scenario.matters(path) and (not path.endswith(".distcp") or is_named(path))
        )

    def _find(self, state: State) -> set[int] | str:
        where = self._folder / "state"
        self._store.make(state.tree, where)
        try:
            return self._scenario.find(where)
        except Wrong as error:
            return str(error).replace(f"{where}/", "")
        finally:
            shutil.rmtree(where)

    def _try_again(self, state: State) -> None:
        """Of states with the same names one is saved over."""
        shape = frozenset(state.tree)
        if self.outcome.again >= self._again_most or shape in self._shapes:
            return
        where = self._folder / "again"
        self._store.make(state.tree, where, may_change=True)
        try:
            number = self._scenario.versions + 1
            self._scenario.save_as(where, number)
            found, left = self._scenario.find(where), self._scenario.leftovers(where)
            if found != {number} or left:
                self.outcome.problems.append(
                    f"the next save gives {found} and leaves {left}; there was {sorted(shape)}"
                )
        except Exception as error:
            self.outcome.problems.append(f"the next save fails: {error!r}; there was {sorted(shape)}")
        finally:
            shutil.rmtree(where)
        self._shapes.add(shape)
        self.outcome.again += 1


def look_at(
    scenario: Scenario,
    folder: Path,
    bounds: Bounds = QUICK,
    seed: int | str = 0,
    again_most: int = 10,
    change: Callable[[Run], None] = lambda run: None,
) -> Outcome:
    """Records and explores. ``change`` may alter the recording, to plant a fault."""
    run = record(scenario, folder)
    change(run)
    try:
        return Explorer(scenario, run, folder, bounds, seed, again_most).explore()
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all scenarios, and more states of each")
    parser.add_argument("--seed", default=str(secrets.randbelow(1 << 32)), help="what is chosen at random")
    parser.add_argument("--only", action="append", default=[], help="scenarios whose names have this in them")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: below build/")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(f"seed {arguments.seed}", flush=True)
    chosen = (scenarios.every if arguments.full else scenarios.quick)(arguments.seed)
    chosen = [one for one in chosen if not arguments.only or any(text in one.name for text in arguments.only)]
    bounds, again = (FULL, 50) if arguments.full else (QUICK, 10)
    base = arguments.folder or Path(__file__).resolve().parent.parent.parent / "build"
    base.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="crash-", dir=base) as folder:
        for number, scenario in enumerate(chosen):
            outcomes.append(look_at(scenario, Path(folder, str(number)), bounds, arguments.seed, again))
            print(outcomes[-1], flush=True)
    problems = sum(len(outcome.problems) for outcome in outcomes)
    states, distinct = sum(o.states for o in outcomes), sum(o.distinct for o in outcomes)
    print(f"{states} states, {distinct} different, {problems} problems; seed {arguments.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
