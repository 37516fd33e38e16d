"""What only some versions of torch have: tests that need it say what they need, not which version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor, debug

from dcpring.torchside.versions import release


def clear_sharding_cache() -> None:
    """DTensor remembers meshes of process groups that this process has left."""
    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    dispatcher: Any = DTensor._op_dispatcher
    (clear or dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear)()


def stock_plans(tensor: torch.Tensor) -> bool:
    """Whether stock's planners can save a tensor: since torch 2.15 not if it has no strides."""
    try:
        TensorProperties.create_from_tensor(tensor)
    except (RuntimeError, NotImplementedError):
        return False
    return True


PIPELINES_RUN_ON_GLOO = release(torch.__version__) >= (2, 11)
"""Torch 2.9's schedules end in an abort inside gloo when they send to another stage."""


def needs(there: bool, what: str) -> Any:
    """A mark for tests that need something which torch has or lacks."""
    return pytest.mark.skipif(not there, reason=f"torch {torch.__version__} has no {what}")
