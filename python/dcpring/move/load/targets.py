"""The tensors that are filled: whether the core may write to their memory, and whether what is stored may go there."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpring.base import groups
from dcpring.base.casts import described, loss
from dcpring.base.memory import FREED, is_freed
from dcpring.base.text import some_keys
from dcpring.errors import CheckpointError, KeyMismatchError, PlanError
from dcpring.move.load.explain import Explainer
from dcpring.names.policy import Casts, refused_cast
from dcpring.plan.placements import check_chunk

logger = logging.getLogger("dcpring")


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


class Targets:
    """Checks the planner's tensors before something is filled into them, and tells of the casts.

    Args:
        casts: which are allowed.
        explain: has the words.
    """

    def __init__(self, casts: Casts, explain: Explainer) -> None:
        self._casts, self._explain = casts, explain
        self._cast: dict[tuple[torch.dtype, torch.dtype], list[int]] = defaultdict(list)

    def check(self, position: int, target: Tensor, stored: torch.dtype) -> None:
        """Whether what is stored with this dtype may be filled into the tensor."""
        item, name = self._explain.item(position), self._explain.name
        if target.size() != item.lengths:
            raise PlanError(
                f"{name(position)}: the checkpoint has shape {list(item.lengths)} here, the state dict "
                f"{list(target.size())}; load into tensors of the shape that was saved (req {item.storage_index} "
                f"mismatch sizes {target.size()} vs {item.lengths})"
            )
        if target.dtype != stored:
            self._check_cast(position, target.dtype, stored)
        if is_freed(target):
            raise KeyMismatchError(f"{name(position)} cannot be loaded into its tensor in the state dict: {FREED}")
        if target.layout == torch.strided and _is_expanded(target):
            raise KeyMismatchError(
                f"{name(position)}: more than one element of the written-to tensor refers to a single memory location "
                f"(strides {list(target.stride())}, as expand() makes them); load into its clone()"
            )

    def check_plain(self, position: int, target: Tensor) -> None:
        """Whether a plain tensor can be copied into it."""
        if target.layout != torch.strided:
            raise KeyMismatchError(
                f"{self._explain.name(position)}: the checkpoint has {torch.strided}, the state dict {target.layout}, "
                f"into which it cannot be copied; load into a {torch.strided} tensor and convert it"
            )

    def _check_cast(self, position: int, wanted: torch.dtype, stored: torch.dtype) -> None:
        refused = refused_cast(self._casts, stored, wanted)
        if refused:
            raise CheckpointError(f"{self._explain.name(position)}: {refused}")
        self._cast[stored, wanted].append(position)

    def tell(self) -> None:
        """Logs which casts there were: those that may have changed values in one warning.

        Of a job only the first rank to come warns of each pair of dtypes; the others log what they cast at DEBUG.
        """
        load = f"load {groups.times_begun(self._explain.path)} of {self._explain.path}"
        told: dict[int, list[str]] = defaultdict(list)
        for dtypes, positions in self._cast.items():
            keys = some_keys(dict.fromkeys(self._explain.item(at).dest_index.fqn for at in positions), 5)
            level = logging.WARNING if loss(*dtypes) else logging.INFO
            if not groups.is_first(f"{load}: {dtypes}"):
                level = logging.DEBUG
            told[level].append(f"{described(*dtypes)}: {keys}")
        for level, casts in told.items():
            logger.log(level, "%s", "; ".join(casts))


def _is_expanded(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size(), strict=True)
    )
