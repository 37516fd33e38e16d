"""A conversion of which one system call fails: the target is the old one or the new one, and nothing else is left."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from fault._support import fault, leaks_descriptors, open_descriptors

from dcpring import _C, CheckpointError, convert

TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("x", {"files": 2}),
    ("x.pt", {}),
    ("x.safetensors", {}),
    ("x", {"to": "safetensors", "shard_bytes": 6 << 20}),
]


def content(path: Path) -> Any:
    """What is there, whatever the format."""
    convert(path, path.parent / "read.pt", overwrite=True)
    loaded = torch.load(path.parent / "read.pt", weights_only=True)
    (path.parent / "read.pt").unlink()
    return {key: float(tensor.sum()) for key, tensor in loaded.items()}


@pytest.mark.slow(but=["dcp", "torch"])
@pytest.mark.parametrize(("name", "options"), TARGETS, ids=["dcp", "torch", "safetensors", "shards"])
def test_each_call_fails_once(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    sums = {}
    for source, value in (("old.pt", 1.0), ("new.pt", 2.0)):
        torch.save({"a": torch.full((1 << 20,), value), "b": torch.full((3, 1 << 20), value)}, tmp_path / source)
        sums[source] = content(tmp_path / source)
    target = tmp_path / name
    convert(tmp_path / "old.pt", target, **options)
    _C.arm_fault(None, 0, errno.EIO, False)
    convert(tmp_path / "new.pt", target, overwrite=True, **options)
    calls = _C.disarm_fault()
    assert content(target) == sums["new.pt"]
    before, failures = open_descriptors(), 0
    for nth in (1, 2, *range(3, calls + 1, max(1, calls // 12))):  # the first ones open the source: all of them fail
        convert(tmp_path / "old.pt", target, overwrite=True, **options)
        failed = False
        with fault(None, nth):
            try:
                convert(tmp_path / "new.pt", target, overwrite=True, **options)
            except (OSError, CheckpointError):
                failed = True
        failures += failed
        found = content(target)
        assert found == sums["new.pt"] or (failed and found == sums["old.pt"])
        assert not [path.name for path in tmp_path.rglob("*.tmp*")]
    assert failures > 2  # not of every call: a wait that fails is waited for again
    assert not leaks_descriptors(before)
