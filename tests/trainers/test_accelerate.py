"""accelerate with ``dcpring.install()``: ``save_state`` and ``load_state`` of FSDP2, to the bit."""

from __future__ import annotations

from pathlib import Path

import _checkpoints
import _ranks
import torch
from safetensors.torch import load_file

import dcpring

_ranks.load_before("accelerate_program")

PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def train(folder: Path, world: int, *options: object) -> None:
    _ranks.run("accelerate_program.py", world, folder, *options)


def is_ours(state: Path) -> bool:
    return all(_checkpoints.is_ours(state / part) for part in PARTS)


def assert_equal(left: Path, right: Path) -> None:
    for part in PARTS:
        _checkpoints.assert_equal(left / part, right / part)


def test_save_state_is_the_same(tmp_path: Path) -> None:
    train(tmp_path / "ring", 2, "--install")
    train(tmp_path / "stock", 2)
    for step in ("2", "4"):
        assert_equal(tmp_path / "ring" / step, tmp_path / "stock" / step)
    assert is_ours(tmp_path / "ring" / "4") and not is_ours(tmp_path / "stock" / "4")


def test_load_state_resumes_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    train(tmp_path / "whole", 2, "--install")
    train(tmp_path / "on 3", 3, "--install", "--resume", tmp_path / "whole" / "2")
    train(tmp_path / "stock", 3, "--resume", tmp_path / "whole" / "2")
    assert_equal(tmp_path / "on 3" / "4", tmp_path / "stock" / "4")
    assert is_ours(tmp_path / "on 3" / "4")


def test_merge_fsdp_weights_reads_ours(tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    train(tmp_path, 2, "--install", "--steps", 1)
    merge_fsdp_weights(str(tmp_path / "1" / PARTS[0]), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    without_model = dcpring.KeyTable(prefixes={"model.": ""})
    dcpring.convert(tmp_path / "1" / PARTS[0], tmp_path / "converted.safetensors", key_map=without_model)
    converted = load_file(tmp_path / "converted.safetensors")
    assert merged.keys() == converted.keys() and len(merged) == 8
    assert all(torch.equal(merged[key], converted[key]) for key in merged)
