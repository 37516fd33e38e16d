"""Tensors that are made of parts that lie anywhere: DCP saves and fills the parts, and takes them for one tensor.

DCP asks a tensor that has ``__create_write_items__`` and its like what there is of it (torch's ``_Checkpointable``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcpring.errors import CheckpointError

_AS_ONE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("detach", "alias", "clone", "_to_copy", "_pin_memory", "empty_like", "zeros_like", "copy_")
)
"""What is done to each part."""


class HeldPart(NamedTuple):
    """A part that this rank holds.

    Attributes:
        offsets: in the whole.
        tensor: its values; a view of what they are saved from and loaded into.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


class Composed(Tensor):
    """A tensor of which this rank holds some parts, none of them necessarily. It can be saved, loaded and copied.

    Attributes:
        held: the parts; they do not overlap.
        made_of: what the tensors are called that it is made of, on all ranks.
    """

    held: list[HeldPart]
    made_of: tuple[str, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        held: Sequence[HeldPart],
        dtype: torch.dtype,
        device: torch.device,
        made_of: Sequence[str] = (),
    ) -> Composed:
        made: Composed = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.held, made.made_of = list(held), tuple(made_of)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Composed({list(self.shape)}, {self.dtype}, {len(self.held)} parts)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Composed, (tuple(self.shape), self.held, self.dtype, self.device, self.made_of)

    def __deepcopy__(self, memo: Any) -> Composed:
        return self.clone()  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _AS_ONE:
            raise CheckpointError(
                f"{func} of a tensor that is made of parts of others: it can only be saved, loaded and copied"
            )
        first, *others = args
        if func is torch.ops.aten.copy_.default and not isinstance(others[0], Composed):
            raise CheckpointError("only another tensor that is made of the same parts can be copied into one")
        made = []
        for number, part in enumerate(first.held):
            rest = [other.held[number].tensor if isinstance(other, Composed) else other for other in others]
            made.append(HeldPart(part.offsets, func(part.tensor, *rest, **(kwargs or {}))))
        if func is torch.ops.aten.copy_.default:
            return first
        options = kwargs or {}
        dtype, device = options.get("dtype") or first.dtype, options.get("device") or first.device
        return Composed(first.shape, made, dtype, device, first.made_of)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Composed:
        """One like it of other tensors, in the order of the parts."""
        held = [part._replace(tensor=tensor) for part, tensor in zip(self.held, tensors, strict=True)]
        return Composed(self.shape, held, self.dtype, self.device, self.made_of)

    def joined(self, other: Composed) -> Composed:
        """One with the parts of both."""
        made_of = (*self.made_of, *other.made_of)
        return Composed(self.shape, [*self.held, *other.held], self.dtype, self.device, made_of)

    # ---- what DCP asks for ----

    def at(self, offsets: Sequence[int] | None) -> Tensor:
        """The part that begins there. Raises ValueError if there is none."""
        for part in self.held:
            if offsets is not None and part.offsets == tuple(offsets):
                return part.tensor
        raise ValueError(f"there is no part at {offsets} on this rank")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = properties_of_dtype(self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(part.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(part), properties=properties, size=self.shape),
            )
            for part in self.held
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part) for part in self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.at(index.offset)


@functools.cache
def properties_of_dtype(dtype: torch.dtype) -> TensorProperties:
    """What is stored of a tensor besides its elements."""
    return TensorProperties.create_from_tensor(torch.empty(0, dtype=dtype))


def _chunk(part: HeldPart) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.size())
