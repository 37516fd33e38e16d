"""The state dicts that are saved and loaded, and the check that a load brought back every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POISON_BYTE = 0xA5


@dataclass(frozen=True)
class Shape:
    """`count` float32 tensors of `size_bytes` each; or, with `width`, a transformer of `count` layers with AdamW."""

    key: str
    title: str
    count: int
    size_bytes: int = 0
    width: int = 0


@dataclass(frozen=True)
class ShapeSet:
    """What a run measures: the shapes, and the size of the tensor of the resharded loads."""

    shapes: tuple[Shape, ...]
    reshard_bytes: int

    def get(self, key: str) -> Shape:
        return next(shape for shape in self.shapes if shape.key == key)


LARGE, MEDIUM, SMALL, MODEL = "large", "medium", "small", "model"
KEYS = (LARGE, MEDIUM, SMALL, MODEL)

FULL = ShapeSet(
    shapes=(
        Shape(LARGE, "16 x 128 MiB", 16, 128 * MIB),
        Shape(MEDIUM, "2000 x 1 MiB", 2000, MIB),
        Shape(SMALL, "20000 x 4 KiB", 20000, 4 * KIB),
        Shape(MODEL, "100 M model", 12, width=768),
    ),
    reshard_bytes=512 * MIB,
)
QUICK = ShapeSet(
    shapes=(
        Shape(LARGE, "4 x 8 MiB", 4, 8 * MIB),
        Shape(MEDIUM, "32 x 1 MiB", 32, MIB),
        Shape(SMALL, "200 x 4 KiB", 200, 4 * KIB),
        Shape(MODEL, "small model", 2, width=64),
    ),
    reshard_bytes=16 * MIB,
)


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(26 * width, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)


def build_state(shape: Shape, mesh: DeviceMesh | None) -> dict[str, Any]:
    """The state dict of `shape`; with a mesh every tensor is sharded by rows over its ranks."""
    torch.manual_seed(mesh.get_rank() if mesh else 0)
    if shape.width:
        return _model_state(shape, mesh)
    return {f"layer{i:05d}.weight": _random_rows(shape.size_bytes, mesh) for i in range(shape.count)}


def _random_rows(size_bytes: int, mesh: DeviceMesh | None) -> torch.Tensor:
    columns = min(1024, size_bytes // 16)
    rows = size_bytes // (4 * columns)
    if mesh is None:
        return random_floats(rows, columns)
    return DTensor.from_local(random_floats(rows // mesh.size(), columns), mesh, [Shard(0)], run_check=False)


def random_floats(rows: int, columns: int) -> torch.Tensor:
    """Random bits, which no compression or caching of zeros can favour."""
    return torch.empty(rows, columns // 2, dtype=torch.int64).random_().view(torch.float32)


def _model_state(shape: Shape, mesh: DeviceMesh | None) -> dict[str, Any]:
    model = Transformer(shape.count, shape.width)
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for name, tensor in named_tensors(optimizer_state):
        if not name.endswith("step"):
            raw_bytes(tensor).random_()
    return {"model": model_state, "optimizer": optimizer_state}


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: map_leaves(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(value, change) for value in tree)
    return change(tree)


def named_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from named_leaves(value, f"{prefix}.{key}" if prefix else str(key))


def named_tensors(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, leaf) for name, leaf in named_leaves(tree) if isinstance(leaf, torch.Tensor))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor).reshape(-1).view(torch.uint8)


def local_bytes(tree: Any) -> int:
    return sum(local_part(tensor).nbytes for _, tensor in named_tensors(tree))


def empty_like(state: Any) -> Any:
    """A state dict to load into: tensors of its own, and None for all else."""
    return map_leaves(state, lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else None)


def poison(state: Any) -> None:
    """Overwrites every tensor, so that what a load leaves out is found by `difference`."""
    for _, tensor in named_tensors(state):
        raw_bytes(tensor).fill_(POISON_BYTE)


def difference(expected: Any, loaded: Any) -> str | None:
    """The name of the first leaf that is not the same, tensors byte for byte; None if all are."""
    found = dict(named_leaves(loaded))
    for name, leaf in named_leaves(expected):
        if name not in found or not _same(leaf, found[name]):
            return name
    return None


def _same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(expected == found)
    return isinstance(found, torch.Tensor) and torch.equal(raw_bytes(expected), raw_bytes(found))
