"""torchtitan's trainer with ``RingCheckpointManager``: the same as with its own manager, to the bit."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import _checkpoints
import _ranks
import pytest
from _checkpoints import is_ours

import dcpring

_ranks.load_before("titan_program")


def train(folder: Path, world: int, *options: object) -> str:
    return _ranks.run("titan_program.py", world, folder, *options)


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoint" / f"step-{step}"


def files(step: Path) -> list[str]:
    return sorted(path.name for path in step.iterdir())


def assert_equal(left: Path, right: Path) -> None:
    _checkpoints.assert_equal(left, right)
    assert dcpring.verify(left).ok and dcpring.verify(right).ok


MESHES = {
    "FSDP": (2, ()),
    "TP x FSDP": (4, ("--tensor-parallel", 2)),
    "HSDP": (4, ("--replicate", 2)),
    "PP x FSDP": (4, ("--pipeline-parallel", 2)),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_it_saves_what_torchtitan_saves(tmp_path: Path, mesh: str) -> None:
    world, options = MESHES[mesh]
    for manager in ("ring", "stock"):
        train(tmp_path / manager, world, "--manager", manager, *options)
    for step in (2, 4):
        assert_equal(checkpoint(tmp_path / "ring", step), checkpoint(tmp_path / "stock", step))
    assert is_ours(checkpoint(tmp_path / "ring", 4)) and not is_ours(checkpoint(tmp_path / "stock", 4))


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_async_modes_write_our_files(tmp_path: Path, mode: str) -> None:
    train(tmp_path / "ring", 2, "--async-mode", mode)
    train(tmp_path / "stock", 2, "--manager", "stock")
    assert_equal(checkpoint(tmp_path / "ring", 2), checkpoint(tmp_path / "stock", 2))
    assert is_ours(checkpoint(tmp_path / "ring", 2))


@pytest.mark.parametrize("saved, resumed", [("ring", "ring"), ("ring", "stock"), ("stock", "ring")])
def test_a_resume_goes_on_as_if_it_had_not_stopped(tmp_path: Path, saved: str, resumed: str) -> None:
    train(tmp_path / "whole", 2, "--manager", saved)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(checkpoint(tmp_path / "resumed", 4))
    train(tmp_path / "resumed", 2, "--manager", resumed)
    assert_equal(checkpoint(tmp_path / "whole", 4), checkpoint(tmp_path / "resumed", 4))


def test_a_pipeline_goes_on_without_one(tmp_path: Path) -> None:
    """Each rank has two parts of the model; then two ranks shard all of it."""
    pipeline = ("--pipeline-parallel", 2, "--schedule", "Interleaved1F1B")
    train(tmp_path / "ring", 4, *pipeline, "--steps", 2)
    shutil.copytree(tmp_path / "ring", tmp_path / "stock")
    for manager in ("ring", "stock"):
        train(tmp_path / manager, 2, "--manager", manager)
    assert is_ours(checkpoint(tmp_path / "ring", 2))
    assert_equal(checkpoint(tmp_path / "ring", 4), checkpoint(tmp_path / "stock", 4))


def test_on_other_numbers_of_ranks_each_sample_is_used_once(tmp_path: Path) -> None:
    used = tmp_path / "used"
    begin = ("--samples", 24, "--batch", 2, "--used", used)
    train(tmp_path, 2, *begin, "--steps", 3, "--interval", 3)
    assert len(used.read_text().split()) == 12
    train(tmp_path, 3, *begin, "--steps", 5, "--interval", 5)
    counted = Counter(map(int, used.read_text().split()))
    assert counted == Counter(range(24))
    assert dcpring.verify(checkpoint(tmp_path, 5)).ok


def test_the_hugging_face_export_goes_torchtitans_way(tmp_path: Path) -> None:
    train(tmp_path, 2, "--last-in-hf")
    assert any(name.endswith(".safetensors") for name in files(checkpoint(tmp_path, 4)))
    assert is_ours(checkpoint(tmp_path, 2))


def test_a_seed_checkpoint_starts_any_mesh(tmp_path: Path) -> None:
    train(tmp_path / "one", 1, "--seed-checkpoint")
    assert is_ours(checkpoint(tmp_path / "one", 0))
    shutil.copytree(tmp_path / "one", tmp_path / "stock")
    train(tmp_path / "one", 2)
    train(tmp_path / "stock", 2, "--manager", "stock")
    assert_equal(checkpoint(tmp_path / "one", 4), checkpoint(tmp_path / "stock", 4))
