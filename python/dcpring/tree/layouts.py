"""How the tensors of a tree lie in memory: which of them share memory, and in which order their elements lie.

A layout is ``(base, offset, stride)``: the tensor is a view of the memory of the one that is called ``base``, whose
strides are ``stride`` and which begins ``offset`` bytes behind its first; where ``base`` is empty, it has memory of its
own. Of tensors that are contiguous there, none is noted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dcpring.base.memory import is_dense, is_lazy_view

MemoryLayout = tuple[str, int, tuple[int, ...]]


class _MemorySpan(NamedTuple):
    """The bytes of a storage from a tensor's first to behind its last, gaps between its elements included."""

    begin: int
    end: int
    name: str
    tensor: Tensor


def layouts_of(tensors: Mapping[str, Tensor], keep: Callable[[Tensor], str]) -> dict[str, MemoryLayout]:
    """The layouts of tensors, by their names.

    Args:
        tensors: plain ones.
        keep: saves memory that several have parts of, and none has all of; gives its name.
    """
    found: dict[str, MemoryLayout] = {}
    by_storage: dict[tuple[int, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        by_storage.setdefault((tensor.untyped_storage().data_ptr(), tensor.device), []).append(name)
        if not tensor.is_contiguous() and is_dense(tensor):
            found[name] = "", 0, tensor.stride()
    for names in (names for (memory, _), names in by_storage.items() if memory and len(names) > 1):
        for spans in _overlapping(_span(name, tensors[name]) for name in names if not is_lazy_view(tensors[name])):
            base, begin = _base(spans, keep)
            others = [span for span in spans if base not in ("", span.name)]
            found |= {span.name: (base, span.begin - begin, span.tensor.stride()) for span in others}
    return found


def _span(name: str, tensor: Tensor) -> _MemorySpan:
    begin, elements = int(tensor.storage_offset()), reach(tensor.shape, tensor.stride()) if tensor.numel() else 0
    return _MemorySpan(begin * tensor.itemsize, (begin + elements) * tensor.itemsize, name, tensor)


def _overlapping(spans: Iterable[_MemorySpan]) -> Iterator[list[_MemorySpan]]:
    """Tensors of one storage whose spans overlap, together."""
    ordered = sorted((span for span in spans if span.end > span.begin), key=lambda span: span.begin)
    ends = itertools.accumulate((span.end for span in ordered), max)
    cuts = [at for at, end in enumerate(ends, 1) if at == len(ordered) or ordered[at].begin >= end]
    for first, last in itertools.pairwise([0, *cuts]):
        if last > first + 1:
            yield ordered[first:last]


def _memory(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Bytes of a tensor's storage."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def _base(spans: Sequence[_MemorySpan], keep: Callable[[Tensor], str]) -> tuple[str, int]:
    """Whose memory several are laid over, and where that begins; "" if no two of them share an element."""
    alignment = max(span.tensor.itemsize for span in spans)
    begin, end = spans[0].begin // alignment * alignment, max(span.end for span in spans)
    whole = next((one.name for one in spans if one[:2] == (begin, end) and is_dense(one.tensor)), "")
    if whole or _are_apart(spans):
        return whole, begin
    return keep(_memory(spans[0].tensor, begin, end)), begin


def _are_apart(spans: Sequence[_MemorySpan]) -> bool:
    """Whether no two tensors share an element, like columns of a matrix.

    False, which only costs memory in the file, where their elements differ in size, or one lies at several places.
    """
    size = spans[0].tensor.itemsize
    if any(span.tensor.itemsize != size or 0 in span.tensor.stride() for span in spans):
        return False
    begin, end = spans[0].begin // size, max(span.end for span in spans) // size
    taken = torch.zeros(end - begin, dtype=torch.bool)
    for span in spans:
        own = taken.as_strided(span.tensor.shape, span.tensor.stride(), span.begin // size - begin)
        if bool(own.any()):
            return False
        own.fill_(True)
    return True


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Counts the elements of memory from a tensor's first to its last, both included; it has one at least.

    Raises ValueError for what no tensor has.
    """
    if min((*stride, 0)) < 0:
        raise ValueError(f"strides {list(stride)}")
    return sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1


def view_of(base: Tensor, dtype: torch.dtype, size: torch.Size, offset: int, stride: Sequence[int]) -> Tensor:
    """A tensor in the memory of another. Raises ValueError where it is not all in there."""
    storage = base.untyped_storage()
    if offset < 0 or offset % dtype.itemsize or offset + reach(size, stride) * dtype.itemsize > storage.nbytes():
        raise ValueError(f"a view at byte {offset} of {storage.nbytes()}, with strides {list(stride)}")
    return torch.empty(0, dtype=dtype, device=base.device).set_(storage, offset // dtype.itemsize, size, tuple(stride))


def with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """The tensor with another order of its elements in memory. Raises ValueError where that has gaps."""
    if reach(tensor.shape, stride) > tensor.numel():
        raise ValueError(f"strides {list(stride)} of a tensor of shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
