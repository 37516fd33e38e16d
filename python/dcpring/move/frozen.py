"""Tensors that a buffer need not copy again: they are not trained, and it has them as they are.

What is not trained is taken for unchanged where its memory is the same, autograd has counted no change of it, and some
hundred of its bytes are those of the copy. The count alone would not do: writes through ``.data`` and by NumPy, by
collectives, and by the ``_foreach`` functions to DTensors, are not in it. Whoever writes a copy to a file asks by
``sign_of_content`` what it is a copy of, so that a change is one for the writer, too, that only the buffer has seen.

What is known of copies belongs to their memory: it is noted when a buffer has copied a state, and forgotten before the
buffer is written to again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.memory import is_dense, is_lazy_view
from dcpring.format.ledger import key_of, new_seed
from dcpring.torchside.storage import WeakReference, weak_reference
from dcpring.torchside.tensors import is_frozen, version

LEAST_BYTES = 64 << 10
"""Of a tensor: a smaller one is copied in about the time that it takes to find out."""


class Sign(NamedTuple):
    """What differs between two moments if a tensor is not the same, or was changed in between as autograd counts it.

    Attributes:
        storage: which cannot be taken for another one, but is not kept alive.
        address: of the tensor in it.
        layout: dtype, shape and strides.
        versions: of the tensor, and of the DTensor that it is the local part of.
    """

    storage: WeakReference
    address: int
    layout: tuple[Any, ...]
    versions: tuple[int, ...]


class Copied(NamedTuple):
    """What is known of a copy: the sign of the tensor when it was copied, and the version of the copy since."""

    sign: Sign
    version: int


_copies: dict[WeakReference, dict[int, Copied]] = {}
"""Copies of tensors with signs, by the memory of a buffer, and by address."""


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
    layout = tensor.dtype, tuple(tensor.shape), tensor.stride()
    return Sign(weak_reference(tensor.untyped_storage()), tensor.data_ptr(), layout, versions)


def note_copies(signs: Mapping[int, Sign], copies: Sequence[Tensor]) -> None:
    """A buffer has copied tensors with these signs; each copy has the number of its sign."""
    for number, sign in signs.items():
        copy = copies[number]
        of_storage = _copies.setdefault(weak_reference(copy.untyped_storage()), {})
        of_storage[copy.data_ptr()] = Copied(sign, version(copy))


def take_copied(signs: Mapping[int, Sign], copies: Sequence[Tensor]) -> list[int]:
    """Which of the tensors with signs have been copied as they are, by number. Of all copies nothing is known then."""
    forget_expired(_copies, lambda storage: storage)
    if not _copies:
        return []
    by_storage = {storage: _copies.pop(storage, {}) for storage in {_storage_of(copy) for copy in copies}}
    return [
        number
        for number, sign in signs.items()
        if _known_of(by_storage[_storage_of(copies[number])], copies[number]) == sign
    ]


def _storage_of(copy: Tensor) -> WeakReference:
    return weak_reference(copy.untyped_storage())


def _known_of(copied: Mapping[int, Copied], copy: Tensor) -> Sign | None:
    """The sign of what a tensor is a copy of, if nobody has written to the copy."""
    known = copied.get(copy.data_ptr())
    return known.sign if known is not None and known.version == version(copy) else None


def sign_of_content(tensor: Tensor, whole: Tensor) -> Sign | None:
    """The sign of a tensor, or of that which it is a buffer's copy of; None where changes of it are not counted.

    Args:
        whole: the DTensor that it is a part of, or the tensor.
    """
    copied = _copies.get(_storage_of(tensor))
    if copied is not None:
        return _known_of(copied, tensor)
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


def equal_samples(tensors: list[Tensor], copies: list[Tensor]) -> Iterator[bool]:
    """Whether each tensor in host memory, and its copy, look alike."""
    key = key_of(new_seed())
    one, other = (memoryview(_C.samples(_C.Tensors(some), key)).cast("Q") for some in (tensors, copies))
    return (a == b for a, b in zip(one, other, strict=True))
