"""Some rounds of the soak test, those that have found something, and faults of dcpring that must be found."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fault._support import quiet
from soak import bugs, conversions, processes, resumes, saves
from soak.faults import Fault
from soak.play import KINDS, play
from soak.states import Spec, Value
from soak.story import Story

ROUNDS = (("saves", 1), ("resumes", 1), ("conversions", 1))

FOUND: tuple[tuple[str, int], ...] = (
    ("conversions", 4023380903),
    ("saves", 876676855),
    ("saves", 1862727352),
    ("saves", 3578930683),
)
"""Rounds that failed once, by kind and seed."""


@pytest.mark.parametrize(("kind", "seed"), ROUNDS)
def test_a_round(tmp_path: Path, kind: str, seed: int) -> None:
    with quiet():
        play(seed, tmp_path, kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [*FOUND, *((kind, seed) for kind in KINDS for seed in range(2, 12))])
def test_more_rounds(tmp_path: Path, kind: str, seed: int) -> None:
    with quiet():
        play(seed, tmp_path, kind)


@pytest.mark.slow(but=["conversions"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_round_is_played_again_by_its_seed(tmp_path: Path, kind: str) -> None:
    def what_happened() -> str:
        with quiet():
            return re.sub(r"^ +[0-9.]+ s: ", "", str(play(1, tmp_path, kind)), flags=re.MULTILINE)

    first = what_happened()
    assert len(first.splitlines()) > 3
    assert what_happened() == first


# ---- faults of dcpring must be found ----

ONE = Spec(1, (1,), (Value("part0.tensor.0", "tensor", (5000,)),), 1)
TWO = Spec(2, (2,), (Value("part0.sharded.0", "sharded", (5000,), placements=(0,)), *ONE.values), 2)
OURS = saves.Step(1, "all", True, True)
NEXT = replace(OURS, version=2)
FAILS = Fault("save", "call", (0,), "rename", 1, errno.EIO)


def saved(folder: Path, spec: Spec, *more: Callable[[saves.Round], object]) -> None:
    made = saves.Round(random.Random(1), folder / "checkpoint", Story(), spec, False)
    made.save([OURS] if spec.world_size > 1 else [replace(OURS, how="here", version=n) for n in (1, 2, 3, 4)])
    for do in more:
        do(made)


def reads_nothing(folder: Path) -> None:
    saved(folder, TWO, lambda made: made.load_by(TWO, OURS))


def trusts_the_disk(folder: Path) -> None:
    saved(folder, ONE, lambda made: [made.flip() for _ in range(5)])


def removes_early(folder: Path) -> None:
    saved(folder, TWO, lambda made: made.save_badly(replace(NEXT, fault=FAILS), 1.0), lambda made: made.load())


def hears_of_nothing(folder: Path) -> None:
    saved(folder, TWO, lambda made: made.save_badly(replace(NEXT, fault=FAILS), 1.0))


def resumes_without_the_optimizer(folder: Path) -> None:
    made = resumes.Round(random.Random(1), folder, Story())
    for _ in range(2):
        made.run(resumes.Leg("single", (False,), {}, None, 1))


def converts_in_place(folder: Path) -> None:
    made = conversions.Round(random.Random(1), folder, Story(), False)
    source = made.make(1)
    made.convert(source, folder / "target.pt", {})
    made.convert_badly(source, folder / "target.pt", {}, FAILS, [1], 1.0)


PLANTED: tuple[tuple[Callable[[int], None], Callable[[Path], None], str], ...] = (
    (bugs.reads_nothing, reads_nothing, "was never saved"),
    (bugs.trusts_the_disk, trusts_the_disk, "a flipped bit was loaded"),
    (bugs.keeps_a_descriptor, lambda folder: saved(folder, ONE), "descriptors grow"),
    (bugs.leaves_a_file, lambda folder: saved(folder, ONE), "a save has left ['left']"),
    (bugs.leaves_a_temporary_file, lambda folder: saved(folder, ONE), "temporary files are left"),
    (bugs.never_returns, lambda folder: saved(folder, TWO), "soak/bugs.py"),
    (bugs.removes_early, removes_early, "a load failed"),
    (bugs.hears_of_nothing, hears_of_nothing, "some ranks succeeded, and others failed"),
    (bugs.dies, lambda folder: saved(folder, TWO), "a save failed"),
    (bugs.resumes_without_the_optimizer, resumes_without_the_optimizer, "a leg failed"),
    (bugs.converts_in_place, converts_in_place, "version 0 is there, not one of [1]"),
)


@pytest.mark.parametrize(("bug", "do", "found"), PLANTED, ids=[bug.__name__ for bug, _, _ in PLANTED])
def test_faults_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[int], None],
    do: Callable[[Path], None],
    found: str,
) -> None:
    with quiet():
        monkeypatch.setattr(processes, "PLANTED", (bug,))
        if bug is bugs.never_returns:
            monkeypatch.setattr(processes, "LIMIT_SECONDS", 10)
        with pytest.raises(AssertionError) as caught:
            do(tmp_path)
    assert found in str(caught.value)
