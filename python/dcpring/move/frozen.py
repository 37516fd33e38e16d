"""Tensors that a buffer need not copy again: they are not trained, and it has them as they are.

What is not trained is taken for unchanged where its memory is the same, autograd has counted no change of it, and some
hundred of its bytes are those of the copy. The count alone would not do: writes through ``.data`` and by NumPy, by
collectives, and by the ``_foreach`` functions to DTensors, are not in it. Whoever writes a copy to a file asks by
``sign_of_content`` what it is a copy of, so that a change is one for the writer, too, that only the buffer has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.memory import is_dense, is_lazy_view
from dcpring.base.samples import SAMPLE_BYTES, SAMPLE_SHAPE
from dcpring.format.ledger import key_of, new_seed
from dcpring.move.device import on_accelerator, pinned_memory
from dcpring.torchside.storage import WeakReference, weak_reference
from dcpring.torchside.tensors import is_frozen, version

LEAST_BYTES = 64 << 10
"""Of a tensor: a smaller one is copied in about the time that it takes to find out."""


class Sign(NamedTuple):
    """What differs between two moments if a tensor is not the same, or was changed in between as autograd counts it.

    Attributes:
        storage: which cannot be taken for another one, but is not kept alive.
        address: of the tensor in it.
        versions: of the tensor, and of the DTensor that it is the local part of.
    """

    storage: WeakReference
    address: int
    versions: tuple[int, ...]


class Held(NamedTuple):
    """What is known of a tensor that was copied.

    Attributes:
        sign: its, when it was copied.
        version: of the copy, which somebody may have written to.
    """

    sign: Sign
    version: int


def signs_of(sources: Iterable[tuple[Tensor, Tensor]], known: Collection[Tensor]) -> dict[int, Sign]:
    """The signs of what is not trained, by number: parameters that require no gradient, and what is known not to be.

    Args:
        sources: tensors, each with the DTensor that it is a part of, or itself.
        known: tensors or DTensors of the state that are not trained, whatever they look like.
    """
    ids = set(map(id, known))
    signs: dict[int, Sign] = {}
    for number, (tensor, whole) in enumerate(sources):
        is_known = id(whole) in ids and not whole.requires_grad
        if (is_known or is_frozen(whole)) and _is_worth_it(tensor) and _can_be_told(tensor):
            signs[number] = _sign_of(tensor, whole)
    return signs


def _sign_of(tensor: Tensor, whole: Tensor) -> Sign:
    versions = tuple(version(one) for one in ((tensor,) if whole is tensor else (tensor, whole)))
    return Sign(weak_reference(tensor.untyped_storage()), tensor.data_ptr(), versions)


_copied: dict[WeakReference, dict[int, Held]] = {}
"""What the memory of buffers has of tensors with signs, by address."""


def note_copies(held: Mapping[int, Held], copies: list[Tensor]) -> None:
    """A buffer has copied a state: all that its memory holds of tensors with signs, by number."""
    forget_expired(_copied, lambda storage: storage)
    for storage in {weak_reference(copy.untyped_storage()) for copy in copies}:
        _copied.pop(storage, None)
    for number, one in held.items():
        of_storage = _copied.setdefault(weak_reference(copies[number].untyped_storage()), {})
        of_storage[copies[number].data_ptr()] = one


def sign_of_content(tensor: Tensor, whole: Tensor) -> Sign | None:
    """The sign of a tensor, or of that which it is a buffer's copy of; None where changes of it are not counted.

    Args:
        whole: the DTensor that it is a part of, or the tensor.
    """
    copied = _copied.get(weak_reference(tensor.untyped_storage()))
    if copied is not None:
        held = copied.get(tensor.data_ptr())
        return held.sign if held is not None and held.version == version(tensor) else None
    return None if tensor.is_inference() else _sign_of(tensor, whole)


Key = TypeVar("Key")


def forget_expired(known: dict[Key, Any], storage_of: Callable[[Key], WeakReference]) -> None:
    """Removes what is about memory that is gone."""
    for key in [key for key in list(known) if storage_of(key).expired()]:
        known.pop(key, None)


def _is_worth_it(tensor: Tensor) -> bool:
    """Sparse tensors do not say how many bytes they have."""
    return tensor.layout == torch.strided and tensor.nbytes >= LEAST_BYTES


def _can_be_told(tensor: Tensor) -> bool:
    """Changes of tensors that are made in inference mode are not counted."""
    return (
        not tensor.is_quantized
        and not tensor.is_inference()
        and tensor.data_ptr() != 0
        and not is_lazy_view(tensor)
        and is_dense(tensor)
    )


def same_signs(signs: Mapping[int, Sign], held: Mapping[int, Held], copies: list[Tensor]) -> list[int]:
    """Of the tensors with signs those that seem to be as they were copied."""
    return [number for number, sign in signs.items() if held.get(number) == (sign, version(copies[number]))]


def samples_of_devices(tensors: list[Tensor]) -> list[Tensor]:
    """A tensor for each: itself if it lies in host memory, else room for ``sample_view`` of it."""
    elsewhere = [on_accelerator(tensor) for tensor in tensors]
    rows = iter(pinned_memory(SAMPLE_BYTES * sum(elsewhere)).split(SAMPLE_BYTES) if any(elsewhere) else ())
    return [
        next(rows).view(SAMPLE_SHAPE) if is_elsewhere else tensor
        for tensor, is_elsewhere in zip(tensors, elsewhere, strict=True)
    ]


def with_equal_samples(numbers: list[int], tensors: list[Tensor], copies: list[Tensor]) -> set[int]:
    """Those of the numbers whose tensors and copies look alike."""
    key = key_of(new_seed())
    one, other = (memoryview(_C.samples(_C.Tensors(some), key)).cast("Q") for some in (tensors, copies))
    return set(compress(numbers, (a == b for a, b in zip(one, other, strict=True))))
