"""transformers with dcpring: its Trainer with ``install()``, and a model from the files of ``save_pretrained``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import _checkpoints
import _ranks
import pytest
import torch
from test_accelerate import assert_equal, is_ours
from transformers import Trainer, TrainingArguments
from transformers_program import Dies

import dcpring
from dcpring.integrations.transformers import RingCheckpoint

_ranks.load_before("transformers_program")


def train(folder: Path, world: int, *options: object) -> str:
    return _ranks.run("transformers_program.py", world, folder, *options)


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


def test_what_a_killed_save_has_left_is_passed_over(tmp_path: Path) -> None:
    """By the five lines of the page: the newest folder has no state of the Trainer."""
    train(tmp_path / "whole", 2, "--install")
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "cut" / "checkpoint-2")
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "cut" / "checkpoint-9")
    (tmp_path / "cut" / "checkpoint-9" / "trainer_state.json").unlink()
    train(tmp_path / "cut", 2, "--install", "--resume", "newest")
    assert_equal(tmp_path / "cut" / "checkpoint-4", tmp_path / "whole" / "checkpoint-4")
    assert not (tmp_path / "cut" / "checkpoint-9").exists()


def test_all_ranks_end_with_the_best_model(tmp_path: Path) -> None:
    said = _ranks.run("transformers_program.py", 2, tmp_path, "--install", "--best")
    best = {(tmp_path / f"best-of-{rank}").read_text() for rank in range(2)}
    assert best == {str(tmp_path / "checkpoint-4")} and "different checkpoints" not in said


def trainer_state(step: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(dcpring.load(step)["trainer"]["json"])
    return state


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_callback_goes_on_as_if_nothing_had_been(tmp_path: Path, strategy: str) -> None:
    """To the bit on as many ranks, with the dropout's random numbers, the history and the states of callbacks."""
    ring = ("--ring", strategy, "--steps", 6)
    train(tmp_path / "whole", 2, *ring)
    train(tmp_path / "cut", 2, *ring, "--die-at", 5)
    steps = tmp_path / "cut" / "ckpt"
    assert {path.name for path in steps.iterdir()} == {"step-2", "step-4"}
    said = train(tmp_path / "cut", 2, *ring)
    assert "missing keys" not in said
    whole, cut = tmp_path / "whole" / "ckpt" / "step-6", steps / "step-6"
    for learnt in ("model.*", "optimizer.*", "scheduler.*", "rng.*"):
        _checkpoints.assert_equal(whole, cut, learnt)
    states = trainer_state(whole), trainer_state(cut)
    assert [state["stateful_callbacks"]["Counts"]["attributes"] for state in states] == [{"steps": 6}] * 2
    losses = [[line["loss"] for line in state["log_history"] if "loss" in line] for state in states]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    train(tmp_path / "cut", 3, *ring[:2], "--steps", 8)
    assert dcpring.verify(steps / "step-8").ok and trainer_state(steps / "step-8")["global_step"] == 8


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}


def trainer_of_squares(folder: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    settings = TrainingArguments(str(folder), max_steps=4, **quiet, **arguments)
    samples = [{"inputs": torch.full((4,), float(n))} for n in range(32)]
    return Trainer(Squares(), settings, train_dataset=samples, callbacks=list(callbacks))


def test_the_callback_trains_by_its_own_call(tmp_path: Path) -> None:
    """It has to give the Trainer its place: the Trainer's own call would begin again, beside checkpoints."""
    saving = RingCheckpoint(tmp_path / "ckpt", every_n_steps=2, keep_last=1)
    trainer = trainer_of_squares(tmp_path, saving, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"call RingCheckpoint.train\(trainer\)"):
        trainer.train()
    assert saving.train(trainer).global_step == 4 and saving.report is None
    assert [path.name for path in (tmp_path / "ckpt").glob("step-*")] == ["step-4"]
    again = trainer_of_squares(tmp_path)
    assert saving.train(again).global_step == 4
    assert saving.report is not None and saving.report.step == 4 and saving.checkpointer is None
    assert all(map(torch.equal, trainer.model.state_dict().values(), again.model.state_dict().values()))


def test_the_callback_closes_its_checkpointer_when_training_fails(tmp_path: Path) -> None:
    saving = RingCheckpoint(tmp_path / "ckpt", every_n_steps=1)
    with pytest.raises(RuntimeError, match="as asked for"):
        saving.train(trainer_of_squares(tmp_path, Dies(3)))
    assert saving.checkpointer is None and dcpring.verify(tmp_path / "ckpt" / "step-2").ok


def test_the_callback_refuses_what_it_could_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of_squares(tmp_path)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    with pytest.raises(ValueError, match="does not resume DeepSpeed"):
        RingCheckpoint(tmp_path / "ckpt", every_n_steps=1).train(trainer)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("kind", ("llama", "tied", "mixtral", "qwen", "deepseek", "gpt-oss"))
def test_load_pretrained_on_meta(tmp_path: Path, kind: str) -> None:
    _ranks.run("pretrained_program.py", 2, tmp_path, kind)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1


def test_the_example_of_pretrained_weights(tmp_path: Path) -> None:
    """From a directory into FSDP2 on 4 ranks, a step, and back: the example compares with ``from_pretrained``."""
    _ranks.run("../../examples/huggingface.py", 4, tmp_path)
    assert {path.name for path in (tmp_path / "trained").iterdir()} == {"config.json", "model.safetensors"}
