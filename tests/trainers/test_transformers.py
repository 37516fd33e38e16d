"""transformers with dcpring: its Trainer with ``install()``, and a model from the files of ``save_pretrained``."""

from __future__ import annotations

from pathlib import Path

import _ranks
import pytest
from test_accelerate import assert_equal, is_ours

_ranks.load_before("transformers_program")


def train(folder: Path, world: int, *options: object) -> None:
    _ranks.run("transformers_program.py", world, folder, *options)


def test_checkpoints_are_the_same(tmp_path: Path) -> None:
    train(tmp_path / "ring", 2, "--install")
    train(tmp_path / "stock", 2)
    assert_equal(tmp_path / "ring" / "checkpoint-4", tmp_path / "stock" / "checkpoint-4")
    assert is_ours(tmp_path / "ring" / "checkpoint-4")


def test_resume_from_checkpoint_goes_on_as_with_stock(tmp_path: Path) -> None:
    train(tmp_path / "whole", 2, "--install")
    half = tmp_path / "whole" / "checkpoint-2"
    train(tmp_path / "on 2", 2, "--install", "--resume", half)
    assert_equal(tmp_path / "on 2" / "checkpoint-4", tmp_path / "whole" / "checkpoint-4")
    train(tmp_path / "on 3", 3, "--install", "--resume", half)
    train(tmp_path / "stock", 3, "--resume", half)
    assert_equal(tmp_path / "on 3" / "checkpoint-4", tmp_path / "stock" / "checkpoint-4")
    assert is_ours(tmp_path / "on 3" / "checkpoint-4")


def test_all_ranks_end_with_the_best_model(tmp_path: Path) -> None:
    said = _ranks.run("transformers_program.py", 2, tmp_path, "--install", "--best")
    best = {(tmp_path / f"best-of-{rank}").read_text() for rank in range(2)}
    assert best == {str(tmp_path / "checkpoint-4")} and "different checkpoints" not in said


@pytest.mark.parametrize("kind", ("llama", "tied", "mixtral", "qwen", "deepseek", "gpt-oss"))
def test_load_pretrained_on_meta(tmp_path: Path, kind: str) -> None:
    _ranks.run("pretrained_program.py", 2, tmp_path, kind)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1


def test_the_example_of_pretrained_weights(tmp_path: Path) -> None:
    """From a directory into FSDP2 on 4 ranks, a step, and back: the example compares with ``from_pretrained``."""
    _ranks.run("../../examples/huggingface.py", 4, tmp_path)
    assert {path.name for path in (tmp_path / "trained").iterdir()} == {"config.json", "model.safetensors"}
