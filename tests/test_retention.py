"""Steps of a Checkpointer: what a resume goes on with after training went back, whatever crashes in between."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import _distributed
import pytest
import torch.distributed as dist
from _resume import error_of
from fault._support import fault
from test_checkpointer import Counter, small

from dcpring import Checkpointer, CorruptCheckpointError, Replicated
from dcpring.resume.retention import LEFT_NAME, Fork, Steps, leave, superfluous

# ---- pure functions ----


def forks(entries: dict[int, tuple[int, int]]) -> dict[int, Fork]:
    return {step: Fork(*at) for step, at in entries.items()}


@pytest.mark.parametrize(
    ("left", "base", "step", "expected"),
    (
        ({}, None, 7, {}),  # nobody knows where training comes from
        ({}, 15, 20, {}),
        ({}, 5, 7, {10: (5, 1), 15: (5, 1)}),
        ({}, 5, 20, {10: (5, 1), 15: (5, 1)}),
        ({}, 5, 10, {15: (5, 1)}),
        ({}, 5, 5, {10: (5, 1), 15: (5, 1)}),
        ({}, 10, 5, {10: (5, 1), 15: (5, 1)}),
        ({10: (5, 1), 15: (5, 1)}, 5, 10, {15: (5, 1)}),
        ({10: (5, 1), 15: (5, 1)}, None, 10, {15: (5, 1)}),
        ({15: (10, 1)}, 5, 7, {10: (5, 2), 15: (10, 1)}),
        # Back to the branch that was left: its end, its middle, and one of two that began at the same step.
        ({10: (5, 1), 15: (5, 1)}, 15, 20, {}),
        ({10: (5, 1), 15: (5, 1)}, 10, 20, {15: (10, 1)}),
        ({10: (5, 1), 15: (5, 2)}, 15, 20, {10: (5, 1)}),
        # Back to a branch that began in another that was left.
        ({5: (1, 1), 15: (5, 2)}, 15, 20, {10: (1, 3)}),
        # The step that a branch began at is replaced: it then began at the one before.
        ({15: (10, 1)}, 5, 10, {15: (5, 1)}),
        ({10: (5, 1), 15: (10, 2)}, 5, 10, {15: (5, 2)}),
    ),
)
def test_what_is_left(
    left: dict[int, tuple[int, int]], base: int | None, step: int, expected: dict[int, tuple[int, int]]
) -> None:
    assert leave(forks(left), [1, 5, 10, 15], base, step) == forks(expected)


def test_going_to_and_fro_between_two_branches() -> None:
    left: dict[int, Fork] = {}
    there = [1, 5, 10, 15]
    for base, step, expected in (
        (5, 6, {10, 15}),
        (6, 7, {10, 15}),
        (15, 16, {6, 7}),
        (7, 8, {10, 15, 16}),
        (5, 9, {6, 7, 8, 10, 15, 16}),
        (7, 11, {8, 9, 10, 15, 16}),
    ):
        left = leave(left, there, base, step)
        there.append(step)
        assert left.keys() == expected


class Save(NamedTuple):
    step: int
    parent: Save | None


@pytest.mark.parametrize("seed", range(60))
def test_what_is_not_left_is_what_the_last_save_comes_from(seed: int) -> None:
    """Against a record of what every save came from, with leaps to any step that is there, and steps saved again."""
    pick = random.Random(seed)
    tip = Save(0, None)
    saves = {0: tip}
    left: dict[int, Fork] = {}
    for _ in range(60):
        if pick.random() < 0.4:
            tip = saves[pick.choice(list(saves))]
        step = tip.step + pick.randrange(1, 6)
        left = leave(left, saves, tip.step, step)
        tip = saves[step] = Save(step, tip)
        line: set[int] = set()
        at: Save | None = tip
        while at is not None:
            line |= {at.step} if saves[at.step] is at else set()
            at = at.parent
        assert saves.keys() - left.keys() == line
        assert max(line) == step


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"), ((None, None, []), (1, None, [1, 2, 3]), (2, 2, [1]), (9, None, []))
)
def test_what_goes(keep_last: int | None, keep_every: int | None, expected: list[int]) -> None:
    assert superfluous([1, 2, 3, 4, 5, 6, 9], [5, 6], 4, keep_last, keep_every) == expected


# ---- a training that goes back ----


def train(folder: Path, steps: list[int], back_to: int | None = None, **options: Any) -> Checkpointer:
    with small(folder, Counter(), **options) as checkpointer:
        if back_to is not None:
            assert checkpointer.load(back_to).step == back_to
        for step in steps:
            checkpointer.save(step)
    return checkpointer


@pytest.mark.parametrize("blocking", (True, False))
def test_a_resume_goes_on_with_the_branch_that_was_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    train(tmp_path, [5, 10, 15])
    assert not (tmp_path / LEFT_NAME).exists()
    counter = Counter()
    with small(tmp_path, counter) as checkpointer:
        checkpointer.load(5)
        assert (checkpointer.latest(), checkpointer.steps(left=True)) == (15, []), "a load alone leaves nothing"
        checkpointer.save(7, blocking)
        checkpointer.wait()
        assert checkpointer.latest() == 7
        assert checkpointer.steps() == [5, 7, 10, 15]
        assert checkpointer.steps(left=True) == [10, 15]
        assert checkpointer.steps(left=False) == [5, 7]
        assert "steps 10, 15 in" in caplog.text and "training went back to step 5" in caplog.text
        assert checkpointer.load().step == 7
        checkpointer.save(10, blocking)
        checkpointer.wait()
        assert checkpointer.steps(left=True) == [15], "a step that is saved again is of the new branch"
    with small(tmp_path, counter) as checkpointer:
        assert checkpointer.load().step == 10
        assert checkpointer.load(15).step == 15
        checkpointer.save(20)
        assert checkpointer.latest() == 20
        assert checkpointer.steps(left=True) == [7, 10]
    assert json.loads((tmp_path / LEFT_NAME).read_text()) == {
        "version": 1,
        "left": {"7": [5, 2], "10": [5, 2]},
        "pending": None,
    }


def test_what_is_left_takes_no_part_in_retention(tmp_path: Path) -> None:
    train(tmp_path, [2, 4, 6, 8])
    checkpointer = train(tmp_path, [5, 7, 9], back_to=4, keep_last=2, keep_every=4)
    assert checkpointer.steps(left=False) == [4, 7, 9]
    assert checkpointer.steps(left=True) == [6, 8]


def test_parts_that_are_loaded_from_elsewhere(tmp_path: Path) -> None:
    """To take a component from an older step is not to go back."""
    train(tmp_path, [5, 10])
    with small(tmp_path, Counter()) as checkpointer:
        checkpointer.load()
        checkpointer.load(5, components=["counter"])
        checkpointer.save(12)
        assert checkpointer.steps(left=True) == []


def test_another_training_in_the_same_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing was loaded nobody can say what belongs to what."""
    train(tmp_path, [10])
    assert train(tmp_path, [3]).latest() == 10
    assert "step-3 is older than step 10, which latest() still gives" in caplog.text


def test_a_folder_in_which_all_was_left(tmp_path: Path) -> None:
    train(tmp_path, [5, 10])
    train(tmp_path, [7], back_to=5)
    for step in (5, 7):
        (tmp_path / f"step-{step}" / ".metadata").unlink()
    with small(tmp_path, Counter()) as checkpointer:
        assert checkpointer.latest() is None
        for missing_ok in (False, True):
            assert "were left by a training whose own are gone: steps [10]" in error_of(
                checkpointer.load, missing_ok=missing_ok
            )
        assert checkpointer.load(10).step == 10


# ---- crashes ----


class Killed(BaseException):
    pass


def test_a_crash_at_any_time_leaves_a_note_that_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, [5, 10])

    def killed_in(method: str) -> list[int]:
        def kill(*_: Any) -> None:
            raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Steps, method, kill)
            train(tmp_path, [7], back_to=5)
        return Steps(tmp_path).committed()

    assert killed_in("before") == [5, 10]
    assert Steps(tmp_path).latest() == 10
    with fault("fdatasync"), small(tmp_path, Counter()) as checkpointer:
        checkpointer.load(5)
        assert "cannot save" in error_of(checkpointer.save, 7)
    assert json.loads((tmp_path / LEFT_NAME).read_text())["pending"]["left"] == {"10": [5, 1]}
    assert Steps(tmp_path).latest() == 10, "what would have been left is not"
    assert killed_in("after") == [5, 7, 10]
    assert json.loads((tmp_path / LEFT_NAME).read_text())["pending"]["left"] == {"10": [5, 1]}
    assert Steps(tmp_path).latest() == 7, "the commit of the step is that of what it leaves"
    # The next save makes the note plain, whatever becomes of the step that it was about.
    assert train(tmp_path, [8, 9], back_to=7, keep_last=1).steps(left=True) == [10]
    assert Steps(tmp_path).committed() == [9, 10]
    assert json.loads((tmp_path / LEFT_NAME).read_text())["pending"] is None


def test_a_step_that_is_saved_again_when_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, [5, 10])
    train(tmp_path, [6], back_to=5)
    with fault("fdatasync"), small(tmp_path, Counter()) as checkpointer:
        checkpointer.load()
        assert "cannot save" in error_of(checkpointer.save, 10)
        assert (checkpointer.latest(), checkpointer.steps(left=True)) == (6, [10])
        checkpointer.save(10)
        assert (checkpointer.latest(), checkpointer.steps(left=True)) == (10, [])
    assert not (tmp_path / LEFT_NAME).exists()


LOOP = '{"version": 1, "left": {"5": [5, 1]}, "pending": null}'


@pytest.mark.parametrize(
    "text", ("", "[]", '{"version": 2}', '{"version": 1, "left": {"x": [1, 1]}, "pending": null}', "{", LOOP)
)
def test_a_note_that_is_damaged(tmp_path: Path, text: str) -> None:
    train(tmp_path, [5])
    (tmp_path / LEFT_NAME).write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"what steps were left, is damaged.*remove it"):
        Steps(tmp_path).latest()
    with small(tmp_path, Counter()) as checkpointer:
        assert "remove it" in error_of(checkpointer.load)
        assert "remove it" in error_of(checkpointer.save, 6)


def test_an_unfinished_note_is_removed(tmp_path: Path) -> None:
    train(tmp_path, [5])
    (tmp_path / f"{LEFT_NAME}.0123456789abcdef.tmp").write_text("{")
    train(tmp_path, [6])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-5", "step-6"]


# ---- folders ----


def test_a_folder_that_comes_while_a_step_is_saved_stays(tmp_path: Path) -> None:
    """Another rank, which goes on as soon as a save is committed, may be making the next step's."""
    steps = Steps(tmp_path)
    for crashed in (2, 3):
        steps.path(crashed).mkdir()
    steps.before(3, None)
    steps.path(4).mkdir()
    for _ in range(2):
        steps.remove_superfluous(3, None, None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4"]
    steps.before(5, None)
    steps.remove_superfluous(5, None, None)
    assert not any(tmp_path.iterdir())


def test_of_a_step_that_is_a_link_the_link_goes(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "ckpt", tmp_path / "elsewhere"
    train(folder, [1])
    (folder / "step-1").rename(elsewhere)
    (folder / "step-1").symlink_to(elsewhere)
    train(folder, [2], keep_last=1)
    assert [entry.name for entry in folder.iterdir()] == ["step-2"]
    assert (elsewhere / ".metadata").exists()


def test_a_folder_that_cannot_be_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, folder in (("file", "file"), ("file", "file/below/it"), ("link", "link"), ("link", "link/below")):
        expected = f"{tmp_path / folder} cannot be a folder, as {tmp_path / name} is none"
        assert expected in error_of(small, tmp_path / folder, Counter())
    assert "remote storage" in error_of(small, "gs://bucket/checkpoints", Counter())
    (tmp_path / "here").mkdir()
    small(tmp_path / "here", Counter()).close()
    assert not caplog.text
    monkeypatch.setattr("os.access", lambda path, mode: False)
    message = error_of(small, tmp_path / "here" / "not" / "there", Counter())
    assert f"cannot be made: nothing can be written into {tmp_path / 'here'}" in message
    assert not caplog.text
    # What is there can be loaded from, whoever may write to it.
    small(tmp_path / "here", Counter()).close()
    assert f"nothing can be written into {tmp_path / 'here'}: a save there will fail" in caplog.text
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "here", "link"]


def on_one_rank(folder: Path) -> str:
    return error_of(Checkpointer, folder / ("file" if dist.get_rank() else "good"), {"state": Replicated({})})


def test_a_folder_that_cannot_be_on_one_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in _distributed.run(2, on_one_rank, tmp_path):
        assert "rank 1: " in message and "cannot be a folder" in message


# ---- on several ranks ----


def go_back(folder: Path) -> tuple[int | None, list[int], int | None]:
    state = {"step": 0}
    with Checkpointer(folder, {"state": Replicated(state)}) as checkpointer:
        for step in (1, 2, 3):
            state["step"] = step
            checkpointer.save(step)
        checkpointer.load(1)
        checkpointer.save(4, blocking=False)
        checkpointer.wait()
        dist.barrier()
        return checkpointer.latest(), checkpointer.steps(left=True), checkpointer.load().step


def test_all_ranks_see_the_same(tmp_path: Path) -> None:
    assert _distributed.run(3, go_back, tmp_path) == [(4, [2, 3], 4)] * 3
