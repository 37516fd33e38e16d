"""How the tensors of a tree lie in memory: which of them share some, and in which order their elements follow.

A layout is ``(base, offset, stride)``: the tensor is a view of the memory of the one that is called ``base``, whose
strides are ``stride`` and which begins ``offset`` bytes behind its first; where ``base`` is empty, it has memory of its
own. Of tensors that are contiguous there, none is noted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dcpring.base.memory import is_dense, is_lazy_view

Layout = tuple[str, int, tuple[int, ...]]

_MOST_COMPARED = 256
"""Views that overlap in extent are compared in pairs, up to so many of a storage."""


class _Span(NamedTuple):
    """The bytes of a storage from a tensor's first to behind its last, gaps between its elements included."""

    begin: int
    end: int
    name: str
    tensor: Tensor


def layouts_of(tensors: Mapping[str, Tensor], keep: Callable[[Tensor], str]) -> dict[str, Layout]:
    """The layouts of tensors, by their names.

    Args:
        tensors: plain ones.
        keep: saves memory that several have parts of, and none has all of; gives its name.
    """
    found: dict[str, Layout] = {}
    for spans in _overlapping(tensors):
        alignment = max(span.tensor.itemsize for span in spans)
        begin, end = spans[0].begin // alignment * alignment, max(span.end for span in spans)
        base = next((one.name for one in spans if one[:2] == (begin, end) and is_dense(one.tensor)), "")
        if not base and len(spans) > 1 and not _are_apart(spans):
            base = keep(_memory(spans[0].tensor, begin, end))
        for span in spans:
            if base not in ("", span.name):
                found[span.name] = base, span.begin - begin, span.tensor.stride()
            elif not span.tensor.is_contiguous() and is_dense(span.tensor):
                found[span.name] = "", 0, span.tensor.stride()
    return found


def _overlapping(tensors: Mapping[str, Tensor]) -> Iterator[list[_Span]]:
    """Tensors of one storage whose spans overlap, together."""
    by_storage: dict[tuple[torch.device, int], list[_Span]] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        if memory and tensor.numel() and not is_lazy_view(tensor):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            span = _Span(begin, begin + reach(tensor.shape, tensor.stride()) * tensor.itemsize, name, tensor)
            by_storage.setdefault((tensor.device, memory), []).append(span)
    for spans in by_storage.values():
        spans.sort(key=lambda span: span.begin)
        ends = itertools.accumulate((span.end for span in spans), max)
        cuts = [at for at, end in enumerate(ends, 1) if at == len(spans) or spans[at].begin >= end]
        yield from (spans[first:last] for first, last in itertools.pairwise([0, *cuts]))


def _memory(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Bytes of a tensor's storage."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))


def _are_apart(spans: Sequence[_Span]) -> bool:
    """Whether no two share an element, as the columns of a matrix do not. False where that is not easily told."""
    strides = sorted({1}.union(*(dict(_axes(span.tensor)) for span in spans)), reverse=True)
    is_grid = 0 not in strides and not any(above % below for above, below in itertools.pairwise(strides))
    if not is_grid or len(spans) > _MOST_COMPARED or len({span.tensor.itemsize for span in spans}) > 1:
        return False
    boxes = [_box(span.tensor, strides) for span in spans]
    if None in boxes:
        return False
    return not any(
        all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
        for one, other in itertools.combinations(filter(None, boxes), 2)
    )


def _axes(tensor: Tensor) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _box(tensor: Tensor, strides: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where a tensor lies along axes of these strides: its begin and its end. None where it is no box of them."""
    sizes, offset = dict(_axes(tensor)), int(tensor.storage_offset())
    box = []
    for above, stride in zip([None, *strides], strides, strict=False):
        begin, offset = divmod(offset, stride)
        box.append((begin, begin + sizes.get(stride, 1)))
        if above is not None and box[-1][1] > above // stride:
            return None
    return box if len(sizes) == len(_axes(tensor)) else None


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last, both included; it has one at least.

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
