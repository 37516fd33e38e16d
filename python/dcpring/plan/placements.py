"""Which parts of a global tensor a rank holds: the placements of a DTensor as boxes.

A ``Shard`` is one box. A ``_StridedShard`` cuts a dimension into pieces and takes its share of each: FSDP2 over tensor
parallelism makes one box of it, packed weights (gate and up in one) several, which lie side by side in the local
tensor. DCP knows one box for each rank, the first one's offsets with the local tensor's shape, and so takes other rows
for the rank's. What counts here is what ``full_tensor()`` gives.

Everything is arithmetic on sizes; results are kept, as the tensors of a model share few layouts.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcpring.errors import CheckpointError
from dcpring.torchside.dcp import plans_for_itself
from dcpring.torchside.tensors import CUTS_AS_ONE, StridedShard, local_tensor, narrowed, order_of_cuts


class Part(NamedTuple):
    """A box of a global tensor, and where it lies in the local one."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    local_offsets: tuple[int, ...]


class _Step(NamedTuple):
    """A cut of one dimension: into ``pieces``, and each into ``shares``, of which one stays."""

    pieces: int
    shares: int
    mine: int


class _Run(NamedTuple):
    """Rows of a dimension that follow each other, there and in the local tensor."""

    start: int
    length: int


def is_replicated(value: DTensor) -> bool:
    """Whether several ranks hold the same elements."""
    dims = zip(value.placements, value.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in dims)


def parts_of(name: str, value: DTensor) -> tuple[Part, ...]:
    """The boxes that make up this rank's local tensor; none where the rank is not in the mesh.

    Raises:
        CheckpointError: a placement is not known, or the local tensor is not what the placements say.
    """
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    try:
        cuts = tuple(map(_cut_of, value.placements))
        shape, parts = _layout(tuple(value.shape), mesh.shape, tuple(coordinate), cuts, *order_of_cuts(value))
    except ValueError as error:
        raise CheckpointError(
            f"{name!r} has the placements {value.placements}: {error}; redistribute it to Shard or Replicate first"
        ) from error
    local = local_tensor(value).shape
    if tuple(local) != shape and (local.numel() or math.prod(shape)):
        raise CheckpointError(
            f"{name!r}: this rank's part has shape {list(local)}, but with the placements {value.placements} on a mesh "
            f"of {list(value.device_mesh.shape)} it would be {list(shape)}; which rows it holds cannot be told. "
            "Redistribute it to Shard or Replicate first"
        )
    return parts


def tensor_at(name: str, value: DTensor, offsets: Sequence[int] | None) -> Tensor:
    """The local tensor of a DTensor, or a view of its part at these offsets, where it has several."""
    local = local_tensor(value)
    parts = parts_of(name, value)
    if len(parts) < 2:
        return local
    for part in parts:
        if offsets is not None and part.offsets == tuple(offsets):
            return narrowed(local.detach(), part.local_offsets, part.lengths)
    raise CheckpointError(f"{name!r} has no chunk at {offsets} on this rank, only {', '.join(map(_text, parts))}")


def check_chunk(
    name: str, value: Any, start: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], cure: str
) -> None:
    """Refuses what a planner takes for rows of a DTensor that this rank holds, where it holds others.

    Args:
        name: the key.
        value: of the state dict; anything but a DTensor of plain tensors is left alone.
        start: where the rank's part begins, as the planner has it.
        offsets, lengths: of the rows in that part.
        cure: the planner that knows better.
    """
    if not isinstance(value, DTensor) or plans_for_itself(local_tensor(value)) or 0 in lengths:
        return
    parts = parts_of(name, value)
    for part in parts:
        if part.offsets == tuple(start) and all(map(operator.ge, part.lengths, map(operator.add, offsets, lengths))):
            return
    held = ", ".join(map(_text, parts)) or "nothing"
    raise CheckpointError(
        f"{name!r}: the planner takes this rank's part for {_text(Part(tuple(start), tuple(lengths), ()))}, but with "
        f"the placements {value.placements} it holds {held}; pass planner={cure}()"
    )


def _text(part: Part) -> str:
    return f"{list(part.lengths)} from {list(part.offsets)} on"


# ---- the arithmetic ----


_Cut = tuple[int, int] | None
"""What a mesh dimension does: the tensor's dimension that it cuts, and into how many pieces before; None: nothing."""


def _cut_of(placement: Placement) -> _Cut:
    kind = type(placement)
    if kind is Replicate:
        return None
    if kind is Shard:
        return placement.dim, 1  # type: ignore[attr-defined]
    if kind is StridedShard:
        return placement.dim, int(placement.split_factor)  # type: ignore[attr-defined]
    raise ValueError(f"dcpring does not know what {placement!r} does")


@functools.lru_cache(maxsize=4096)
def _layout(
    size: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[_Cut, ...],
    order: Any,
    encoded: bool,
) -> tuple[tuple[int, ...], tuple[Part, ...]]:
    """The shape of the local tensor, and its parts.

    Args:
        size: of the global tensor.
        mesh: sizes of the mesh's dimensions.
        coordinate: the rank's in the mesh.
        cuts: by mesh dimension.
        order: DTensorSpec's ``shard_order``: dimensions of the tensor, and the mesh dimensions that cut them in turn.
        encoded: whether strided shards stand for such an order, where they can.
    """
    dims = []
    for length, steps in zip(size, _steps(len(size), mesh, cuts, order, encoded), strict=True):
        dims.append(_runs(length, [_Step(factor, mesh[m], coordinate[m]) for m, factor in steps]))
    shape = tuple(sum(run.length for run in runs) for runs in dims)
    if 0 in shape:  # offsets as DCP has them for a shard without rows: behind the end
        offsets = tuple(runs[0].start if runs else length for runs, length in zip(dims, size, strict=True))
        return shape, (Part(offsets, shape, (0,) * len(shape)),)
    boxes = itertools.product(*map(_placed, dims))
    return shape, tuple(Part(*(tuple(run[field] for run in box) for field in range(3))) for box in boxes)


def _placed(runs: list[_Run]) -> list[tuple[int, int, int]]:
    """Each run as start, length, and where it lies in the local tensor."""
    ends = itertools.accumulate(run.length for run in runs)
    return [(run.start, run.length, end - run.length) for run, end in zip(runs, ends, strict=True)]


def _runs(length: int, steps: list[_Step]) -> list[_Run]:
    """The rows of a dimension that are left after all cuts."""
    runs = [_Run(0, length)] if length else []
    for step in steps:
        if step.pieces > 1 and CUTS_AS_ONE and sum(run.length for run in runs) % (step.pieces * step.shares):
            raise ValueError("torch 2.9 cuts what does not come out even in another way than later versions")
        pieces = (_share(runs, step.pieces, piece) for piece in range(step.pieces))
        runs = _joined(run for piece in pieces for run in _share(piece, step.shares, step.mine))
    return runs


def _share(runs: list[_Run], count: int, index: int) -> list[_Run]:
    """The ``index``-th of ``count`` shares, as ``torch.chunk`` cuts: rounded up, so that the last ones may be empty."""
    if count == 1:
        return runs
    size = sum(run.length for run in runs)
    each = -(-size // count)
    begin, end = min(size, each * index), min(size, each * (index + 1))
    cut, at = [], 0
    for run in runs:
        first, last = max(begin, at), min(end, at + run.length)
        if first < last:
            cut.append(_Run(run.start + first - at, last - first))
        at += run.length
    return cut


def _joined(runs: Any) -> list[_Run]:
    joined: list[_Run] = []
    for run in runs:
        if joined and joined[-1].start + joined[-1].length == run.start:
            run = _Run(joined[-1].start, joined.pop().length + run.length)
        joined.append(run)
    return joined


def _steps(
    ndim: int, mesh: Sequence[int], cuts: Sequence[_Cut], order: Any, encoded: bool
) -> list[list[tuple[int, int]]]:
    """For each dimension the mesh dimensions that cut it and their factors, the first cut first."""
    steps: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    for mesh_dim, cut in enumerate(cuts):
        if cut is not None:
            steps[cut[0]].append((mesh_dim, cut[1]))
    if any(cut is not None and cut[1] > 1 for cut in cuts):
        decoded = [_decoded(cuts_of_dim, mesh) for cuts_of_dim in steps] if encoded else [None]
        return steps if None in decoded else decoded  # type: ignore[return-value]
    for tensor_dim, mesh_dims in order or ():
        steps[tensor_dim] = [(mesh_dim, 1) for mesh_dim in mesh_dims]
    return steps


def _decoded(cuts: list[tuple[int, int]], mesh: Sequence[int]) -> list[tuple[int, int]] | None:
    """The order of plain cuts that strided ones stand for, each once there are ``factor`` pieces; None: for none."""
    order: list[tuple[int, int]] = []
    for mesh_dim, factor in reversed(cuts):
        pieces = list(itertools.accumulate((mesh[m] for m, _ in order), operator.mul, initial=1))
        if factor not in pieces:
            return None
        order.insert(pieces.index(factor), (mesh_dim, 1))
    return order
