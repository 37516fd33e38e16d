"""What the tests of all trainers ask of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import dcpring


def is_ours(checkpoint: Path) -> bool:
    """Our data files have a tag in their names."""
    return all(file.name.count(".") == 2 for file in checkpoint.glob("*.distcp"))


def assert_equal(left: Path, right: Path, only: str = "*") -> None:
    difference = dcpring.diff_checkpoints(left, right, only=[only])
    assert not difference, difference
