"""Saves in the background: what they have saved, and the process of DCP's that makes some."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dcpring import RingReader


def check_saved(path: str, state: dict[str, dict[str, Tensor]]) -> None:
    """All ranks load a checkpoint of theirs: each has its own tensors in it."""
    loaded = {name: {key: torch.zeros_like(tensor) for key, tensor in part.items()} for name, part in state.items()}
    dcp.load(loaded, storage_reader=RingReader(path))
    for name, part in state.items():
        for key, tensor in part.items():
            assert torch.equal(loaded[name][key], tensor)


def process() -> Any:
    from torch.distributed.checkpoint import _async_process_executor as executor

    return executor._CHECKPOINT_PROCESS._save_process  # type: ignore[union-attr]


@contextlib.contextmanager
def ending_process() -> Iterator[None]:
    """What is saved here may start it; it is gone afterwards."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):
            executor._CHECKPOINT_PROCESS.__del__()  # type: ignore[union-attr]
        executor._CHECKPOINT_PROCESS = None
