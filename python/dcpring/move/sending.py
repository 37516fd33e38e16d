"""A copy of a state on its way to another process, which maps its memory.

torch sends tensors one by one, some 70 microseconds each. Here those that are plain memory go as columns, with each
storage once; whatever else a state has goes as torch sends it. A storage that other processes cannot map, as pinned
memory, is copied to one that they can. torch would move it there, and it would be pinned no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from dcpring.move.arena import shared_bytes
from dcpring.torchside.tensors import PLAIN_TYPES, frozen_parameter, is_frozen


class Staged(dict[Any, Any]):
    """A copy of a state dict: to everything but DCP's ``async_save`` and a pipe between processes a dict like others.

    The first thing that DCP does when it saves a state is to ask for its items, in the thread that saves; or it sends
    it to the process that saves.

    Attributes:
        begin: is called then, in that thread.
    """

    begin: Callable[[], None] | None = None

    def items(self) -> Any:
        if self.begin is not None:
            self.begin()
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _send(staged: Staged) -> tuple[Any, ...]:
    if staged.begin is not None:
        staged.begin()
    sent = _Sent()
    rest = sent.without(dict(staged))
    return _received, (rest, sent.parents, sent.keys, sent.storages, sent.columns)


class _Quantized:
    """A tensor that arrives with its quantizer, which torch leaves out where it sends tensors between processes."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, arguments, *state = self._tensor.__reduce_ex__(protocol)
        return make, tuple(map(_with_quantizer, arguments)), *state  # of a parameter there is the tensor in it


def _with_quantizer(value: Any) -> Any:
    return _Quantized(value) if isinstance(value, Tensor) and value.is_quantized else value


class _Sent:
    """What is taken out of a tree.

    Attributes:
        parents, keys: where each tensor was, in what is left of the tree.
        storages: each once.
        columns: by tensor its storage's number, dtype, offset, shape and strides in elements, whether it requires a
            gradient, and whether it is a parameter that requires none.
    """

    def __init__(self) -> None:
        self.parents: list[Any] = []
        self.keys: list[Any] = []
        self.storages: list[torch.UntypedStorage] = []
        self.columns: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
        self._numbers: dict[int, int] = {}

    def without(self, value: Any) -> Any:
        """The tree with None in the place of what is sent by columns."""
        if type(value) is tuple:
            return tuple(map(self.without, value))
        if type(value) not in (dict, list):
            return _with_quantizer(value)
        made = value.copy()
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if type(part) in PLAIN_TYPES and self._takes(part):
                self.parents.append(made)
                self.keys.append(key)
                made[key] = None
            else:
                made[key] = self.without(part)
        return made

    def _takes(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_cpu or tensor.__dict__:
            return False
        storage = tensor.untyped_storage()
        if tensor.is_neg() or tensor.is_conj() or not tensor.is_leaf:
            return False
        number = self._numbers.get(storage.data_ptr(), -1)
        if number == -1:
            number = self._numbers[storage.data_ptr()] = len(self.storages)
            self.storages.append(storage if storage.is_shared() else _shared(storage))
        layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        about = *layout, tensor.requires_grad, is_frozen(tensor)
        for column, entry in zip(self.columns, (number, *about), strict=True):
            column.append(entry)
        return True


def _shared(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copied = shared_bytes(storage.nbytes())
    return copied.copy_(torch.empty(0, dtype=torch.uint8).set_(storage)).untyped_storage()


def _received(
    tree: Any,
    parents: list[Any],
    keys: list[Any],
    storages: list[torch.UntypedStorage],
    columns: tuple[list[Any], ...],
) -> Any:
    for parent, key, tensor in zip(parents, keys, _mapped(storages, columns), strict=True):
        parent[key] = tensor
    return tree


def _mapped(storages: list[torch.UntypedStorage], columns: tuple[list[Any], ...]) -> Iterator[Tensor]:
    wholes: dict[tuple[int, torch.dtype], Tensor] = {}
    for number, dtype, offset, shape, strides, needs_gradient, stays in zip(*columns, strict=True):
        whole = wholes.get((number, dtype))
        if whole is None:
            whole = wholes[number, dtype] = torch.empty(0, dtype=dtype).set_(storages[number])
        tensor = whole.as_strided(shape, strides, offset).requires_grad_(needs_gradient)
        yield frozen_parameter(tensor) if stays else tensor


ForkingPickler.register(Staged, _send)
