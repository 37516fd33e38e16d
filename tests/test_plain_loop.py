"""The example of a loop of one's own: killed and resumed it computes the losses that it would have had."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import _torchrun
import pytest
from _torchrun import Rank

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plain_loop.py"
STEPS, KILLED_AT, SAVE_EVERY = 12, 10, 4
OTHER_RANKS_TOLERANCE = 1e-4
"""Other ranks add up the same gradients in another order."""


def run(folder: Path, world: int, *options: object) -> list[Rank]:
    return _torchrun.run(EXAMPLE, world, folder, "--steps", STEPS, *options, timeout=300, GLOO_SOCKET_IFNAME="lo")


def losses(folder: Path, world: int, *options: object) -> dict[int, str]:
    """By step, with all their digits."""
    ranks = run(folder, world, *options)
    assert all(rank.status == 0 for rank in ranks), [rank.err[-2000:] for rank in ranks]
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", ranks[0].out, re.MULTILINE)}


@pytest.mark.parametrize(
    ("options", "others"),
    [
        pytest.param(["--no-compile"], [4], id="checkpointer"),
        pytest.param(["--no-compile", "--way", "dcp"], [4], id="dcp", marks=pytest.mark.slow),
        # Each rank compiles in each run, for 10 to 25 s of CPU: three runs of two ranks are enough.
        pytest.param(["--compile"], [], id="compiled", marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_after_a_kill(tmp_path: Path, options: list[str], others: list[int]) -> None:
    whole = losses(tmp_path / "whole", 2, *options)
    assert list(whole) == list(range(1, STEPS + 1)) and len(set(whole.values())) == STEPS
    assert all(rank.status for rank in run(tmp_path / "killed", 2, *options, "--kill-at", KILLED_AT))
    for world in others:
        shutil.copytree(tmp_path / "killed", tmp_path / f"on {world}")

    rest = losses(tmp_path / "killed", 2, *options)
    assert min(rest) in (SAVE_EVERY + 1, 2 * SAVE_EVERY + 1), "the second save may have been under way"
    assert rest == {step: whole[step] for step in range(min(rest), STEPS + 1)}

    for world in others:
        elsewhere = losses(tmp_path / f"on {world}", world, *options)
        assert list(elsewhere) == list(rest)
        assert all(abs(float(elsewhere[step]) - float(whole[step])) < OTHER_RANKS_TOLERANCE for step in elsewhere)
