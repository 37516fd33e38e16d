"""States of which every value follows from a version, however it is spread over ranks: what was committed is known."""

from __future__ import annotations

import functools
import random
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool, torch.complex64)
NEVER_SAVED = "what was loaded was never saved"
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)], 5: [(5,)]}


@dataclass(frozen=True)
class Value:
    """A key, and how its value is spread.

    Attributes:
        kind: "tensor" (the same on all ranks), "sharded", "own" (one for each rank that saves), or "object".
        placements: of a sharded one, for each dimension of the mesh; -1 replicates.
        is_strided: the tensor's memory is not contiguous.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    placements: tuple[int, ...] = ()
    is_strided: bool = False


@dataclass(frozen=True)
class Spec:
    """A state.

    Attributes:
        world_size: ranks that hold it; ``owners``: ranks that had values of their own when it was saved.
    """

    world_size: int
    mesh: tuple[int, ...]
    values: tuple[Value, ...]
    owners: int

    @property
    def nbytes(self) -> int:
        """Of all tensors, once each."""
        return sum(map(nbytes_of, self.values))

    def __str__(self) -> str:
        kinds = Counter(value.kind for value in self.values)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"{listed}, {self.nbytes} bytes, on {self.world_size} ranks as {self.mesh}"


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def nbytes_of(value: Value) -> int:
    return 0 if value.kind == "object" else _count(value.shape) * value.dtype.itemsize


def random_spec(chance: random.Random, world_size: int, most_bytes: int = 12 << 20) -> Spec:
    mesh = chance.choice(MESHES[world_size])
    values: list[Value] = []
    room = most_bytes
    for number in range(chance.choice((1, 3, 8, 40))):
        kind = chance.choices(("tensor", "sharded", "own", "object"), (3, 5 if world_size > 1 else 0, 2, 1))[0]
        dtype = chance.choice(DTYPES)
        shape = _random_shape(chance, kind, room // dtype.itemsize // 2)
        room -= _count(shape) * dtype.itemsize
        value = Value(f"part{number % 3}.{kind}.{number}", kind, shape, dtype, is_strided=chance.random() < 0.2)
        values.append(_placed(chance, value, mesh))
    return Spec(world_size, mesh, tuple(values), world_size)


def _random_shape(chance: random.Random, kind: str, most: int) -> tuple[int, ...]:
    if kind == "object":
        return ()
    dimensions = chance.choice((1, 1, 2, 2, 3) if kind == "sharded" else (0, 1, 1, 2, 2, 3))
    largest = chance.choice((3, 17, 130, 1100, 5000))
    shape = tuple(chance.randint(0 if chance.random() < 0.05 else 1, largest) for _ in range(dimensions))
    while _count(shape) > max(1, most):
        shape = tuple(max(1, size // 2) for size in shape)
    return shape


def _placed(chance: random.Random, value: Value, mesh: tuple[int, ...]) -> Value:
    if value.kind != "sharded":
        return value
    choices = [-1, *range(len(value.shape)), *range(len(value.shape))]
    return replace(value, placements=tuple(chance.choice(choices) for _ in mesh))


def respread(chance: random.Random, spec: Spec, world_size: int) -> Spec:
    """The same values on other ranks, spread in another way."""
    mesh = chance.choice(MESHES[world_size])
    values = [_placed(chance, value, mesh) for value in spec.values]
    return Spec(world_size, mesh, tuple(chance.sample(values, len(values))), spec.owners)


# ---- values ----


def whole(value: Value, version: int, owner: int = 0) -> Any:
    """The value of a version, all of it."""
    seed = zlib.crc32(f"{value.name} {version} {owner}".encode())
    if value.kind == "object":
        return {"version": version, "list": [seed % 97, 0.5 * version], "text": f"text {seed}"}
    made = torch.Generator().manual_seed(seed)
    if value.dtype == torch.bool:
        return torch.randint(0, 2, value.shape, generator=made, dtype=torch.uint8).to(torch.bool)
    count = _count(value.shape) * value.dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=made, dtype=torch.uint8)
    return raw.view(value.dtype).view(value.shape) if count else torch.empty(value.shape, dtype=value.dtype)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at every other place of a larger memory."""
    room = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    room[..., 1] = tensor
    return room[..., 1]


@functools.lru_cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def _spread(value: Value, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    placements = [Replicate() if at < 0 else Shard(at) for at in value.placements]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def make(spec: Spec, version: int | None, rank: int) -> dict[str, Any]:
    """What a rank holds of a version; None: the same, but of other values, to load into."""
    mesh = _mesh(spec.mesh) if dist.is_initialized() else None
    state: dict[str, Any] = {}
    for value in spec.values:
        owner = rank % spec.owners if value.kind == "own" else 0
        made = whole(value, -1 if version is None else version, owner)
        if value.is_strided and isinstance(made, torch.Tensor):
            made = _strided(made)
        if value.kind == "sharded" and mesh is not None:
            made = _spread(value, made.contiguous(), mesh)
        state[f"{value.name}.{owner}" if value.kind == "own" else value.name] = made
    nested: dict[str, Any] = {}
    for name, made in state.items():
        head, _, rest = name.partition(".")
        nested.setdefault(head, {})[rest] = made
    return nested


def version_of(state: dict[str, Any], spec: Spec, versions: list[int], rank: int) -> int:
    """Which version this is, bit for bit.

    Raises:
        AssertionError: it is none of them, or a mixture.
    """
    wrong = {}
    for version in versions:
        expected = make(spec, version, rank)
        wrong[version] = [
            f"{head}.{name}"
            for head in expected
            for name in expected[head]
            if not same(state[head][name], expected[head][name])
        ]
        if not wrong[version]:
            return version
    described = "; ".join(f"not version {version}: {names[:4]}" for version, names in wrong.items())
    raise AssertionError(f"{NEVER_SAVED}: {described}")


def spoil(state: dict[str, Any]) -> None:
    """Training goes on."""
    for part in state.values():
        for value in part.values():
            if isinstance(value, torch.Tensor):
                (value.to_local() if isinstance(value, DTensor) else value).zero_()


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if isinstance(a, DTensor):
        a, b = a.to_local(), b.to_local()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.clone(memory_format=torch.contiguous_format).reshape(-1) for x in (a, b))  # also of one strided element
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True
