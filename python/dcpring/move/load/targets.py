"""The tensors that are filled: whether the core may write to their memory, and whether what is stored may go there."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpring.errors import CheckpointError, PlanError
from dcpring.move.load.explain import Explainer
from dcpring.names.policy import Casts
from dcpring.plan.placements import check_chunk

logger = logging.getLogger("dcpring")

NOT_PLAIN = torch.empty(0)
"""Stands in for tensors that the core must not look at."""


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether writing to the tensor's memory, element by element, is the same as copying into the tensor."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def bump_versions(tensors: list[Tensor]) -> None:
    """Tells autograd that the tensors were changed, as copy_ would have."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def check_chunks(items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Items of DTensors must be filled into what this rank holds of them."""
    values = getattr(planner, "state_dict", None) or {}
    for item in items:
        offset, name = item.dest_index.offset, item.dest_index.fqn
        if item.type == LoadItemType.TENSOR and offset is not None:
            check_chunk(name, values.get(name), offset, item.dest_offsets, item.lengths, "RingLoadPlanner")


def check_target(position: int, target: Tensor, stored: torch.dtype, casts: Casts, explain: Explainer) -> None:
    """Whether what is stored with this dtype may be filled into the planner's tensor."""
    item = explain.item(position)
    if target.size() != item.lengths:
        raise PlanError(
            f"{explain.name(position)}: the checkpoint has shape {list(item.lengths)} here, the state dict "
            f"{list(target.size())}; load into tensors of the shape that was saved (req {item.storage_index} "
            f"mismatch sizes {target.size()} vs {item.lengths})"
        )
    if target.dtype == stored:
        return
    what = f"{explain.name(position)}: the checkpoint has {stored}, the state dict {target.dtype}"
    if casts == "never":
        raise CheckpointError(f'{what}, and casts="never"')
    if casts != "any" and not torch.can_cast(stored, target.dtype):
        raise CheckpointError(
            f"{what}, and that cast would lose data; load into a {stored} tensor and convert it, or pass "
            'RingReader(..., casts="any")'
        )
    logger.info("%s is cast from %s to %s", explain.name(position), stored, target.dtype)
