"""The tensors that a load fills: whether what is stored may be filled into them, and whether the core may do it."""

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


def bump_versions(tensors: Iterable[Tensor]) -> None:
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
    """Checks tensors before something is filled into them, and logs the casts.

    Args:
        casts: which casts are allowed.
        explain: names positions in errors.
    """

    def __init__(self, casts: Casts, explain: Explainer) -> None:
        self._casts, self._explain = casts, explain
        self._cast: dict[tuple[torch.dtype, torch.dtype], list[int]] = defaultdict(list)

    def check(self, position: int, target: Tensor, stored: torch.dtype, lengths: tuple[int, ...]) -> None:
        """Whether a box of these lengths, stored with this dtype, may be filled into the tensor."""
        if target.size() != lengths:
            raise PlanError(
                f"{self._explain.name(position)}: the checkpoint has shape {list(lengths)} here, the state dict "
                f"{list(target.size())}; load into tensors of the shape that was saved (req "
                f"{self._explain.item(position).storage_index} mismatch sizes {target.size()} vs {torch.Size(lengths)})"
            )
        if target.dtype != stored:
            self._check_cast(position, target.dtype, stored)
        if is_freed(target):
            raise self._mismatch(position, f" cannot be loaded into its tensor in the state dict: {FREED}")
        if target.layout == torch.strided and _is_expanded(target):
            strides = f"strides {list(target.stride())}, as expand() makes them"
            raise self._mismatch(
                position,
                f": more than one element of the written-to tensor refers to a single memory location ({strides}); "
                "load into its clone()",
            )

    def check_plain(self, position: int, target: Tensor) -> None:
        """Whether a plain tensor can be copied into it."""
        if target.layout != torch.strided:
            raise self._mismatch(
                position,
                f": the checkpoint has {torch.strided}, the state dict {target.layout}, into which it cannot be "
                f"copied; load into a {torch.strided} tensor and convert it",
            )

    def _mismatch(self, position: int, problem: str) -> KeyMismatchError:
        return KeyMismatchError(self._explain.name(position) + problem)

    def _check_cast(self, position: int, wanted: torch.dtype, stored: torch.dtype) -> None:
        refused = refused_cast(self._casts, stored, wanted)
        if refused:
            raise CheckpointError(f"{self._explain.name(position)}: {refused}")
        self._cast[stored, wanted].append(position)

    def log_casts(self) -> None:
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
