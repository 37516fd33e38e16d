"""Comparing the values of two checkpoints.

They are read in batches of windows, the next one while one is being compared; each side has a thread that reads.
Memory stays bounded by a few windows, whatever the size of the tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.windows import read_ahead, split_box, windows
from dcpring.errors import CheckpointError
from dcpring.format.metadata import TENSOR
from dcpring.move.buffer import ALIGNMENT, Buffer
from dcpring.sources.parts import dtype_of
from dcpring.tools.inspect.compare import CheckpointDiff, ObjectDiff, Side, TensorDiff
from dcpring.tools.inspect.compare_objects import difference
from dcpring.watch.progress import progress_bar

_WINDOW_BYTES = 32 << 20
"""Of one side are read at once, at most."""

_LARGEST_RECORD = 4 * _WINDOW_BYTES
_BATCH_PARTS = 4096
_BATCH_OBJECTS = 256
_BUFFER_BYTES = _WINDOW_BYTES + _BATCH_PARTS * ALIGNMENT

_LEAST_WATCHED_BYTES = 64 << 20
"""From which on there is a progress bar."""

_READ_ERRORS = (CheckpointError, OSError, RuntimeError, ValueError, MemoryError)
"""What reading damaged, missing or odd records ends in; RuntimeError and ValueError are torch's."""

_Value = Tensor | str
"""A part of a tensor, or why it could not be read."""


class _TensorPart(NamedTuple):
    """A part of a tensor: its name, where the part begins, and its lengths, in elements."""

    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def compare_values(
    sides: Sequence[tuple[Side, Side]],
    different: set[str],
    result: CheckpointDiff,
    tolerance: tuple[float, float],
    progress: bool,
) -> None:
    """Adds to the result how values differ.

    Args:
        sides: the two checkpoints; after saves with ``use_collectives=False`` for each rank.
        different: names that are not compared.
        result: what is known.
        tolerance: absolute and relative.
        progress: draw a bar on standard error, if that is a terminal.
    """
    of_a, of_b = ([Buffer(_BUFFER_BYTES) for _ in range(2)] for _ in range(2))
    pairs = [_ComparedPair(_SideReader(a, of_a), _SideReader(b, of_b), different, tolerance) for a, b in sides]
    total = sum(pair.bytes for pair in pairs)
    with progress_bar("comparing", total, enabled=progress and total > _LEAST_WATCHED_BYTES) as bar:
        for pair in pairs:
            pair.compare_tensors(result, bar.advance)
    for pair in pairs:
        pair.compare_objects(result)


class _ComparedPair:
    """What two checkpoints have in common. After saves with ``use_collectives=False`` there is one for each rank.

    Attributes:
        bytes: that comparing tensors will read, of both sides together.
    """

    def __init__(self, a: _SideReader, b: _SideReader, different: set[str], tolerance: tuple[float, float]) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        self._objects: list[str] = []
        self._found: dict[str, TensorDiff] = {}
        self.bytes = 0
        for name, entry in a.side.entries.items():
            if name not in b.side.entries or name in different:
                continue
            if entry.shape is None or entry.dtype is None:
                self._objects.append(name)
            else:
                called = a.side.called(name), b.side.called(name)
                self._found[name] = TensorDiff(*called, entry.shape, dtype_of(entry.dtype))
                self.bytes += 2 * entry.nbytes

    def compare_tensors(self, result: CheckpointDiff, advance: Callable[[int], None]) -> None:
        batches = windows(self._boxes(), self._part_bytes, _WINDOW_BYTES, _BATCH_PARTS)
        reading = read_ahead("dcpring-diff", batches, self._a.read_tensors, self._b.read_tensors)
        with contextlib.closing(reading):
            for batch, (left, right) in reading:
                self._compare_batch(batch, left, right)
                advance(2 * sum(map(self._part_bytes, batch)))
        for name, found in self._found.items():
            if not found.problem:
                result.tensors_compared += 1
                result.bytes += self._a.side.entries[name].nbytes
            if found.changed or found.problem:
                result.tensors.append(found)

    def _part_bytes(self, part: _TensorPart) -> int:
        return math.prod(part.lengths) * self._found[part.key].dtype.itemsize

    def _boxes(self) -> Iterator[_TensorPart]:
        for name, found in self._found.items():
            for offsets, lengths in split_box(found.shape, _WINDOW_BYTES // found.dtype.itemsize):
                if found.problem:  # of a part before this one: what is left would tell nothing new
                    break
                yield _TensorPart(name, offsets, lengths)

    def _compare_batch(self, batch: list[_TensorPart], left: list[_Value], right: list[_Value]) -> None:
        parts: list[_TensorPart] = []
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        for part, a, b in zip(batch, left, right, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                parts.append(part)
                lefts.append(a)
                rights.append(b)
            else:
                problem = "; ".join(dict.fromkeys(value for value in (a, b) if isinstance(value, str)))
                self._found[part.key].problem = self._difference_of_records(part.key, problem)
        in_a, in_b = (_C.Tensors([_bare(tensor) for tensor in side]) for side in (lefts, rights))
        compared = _C.compare(in_a, in_b, *self._tolerance)
        for part, a, b, counts in zip(parts, lefts, rights, compared, strict=True):
            _add(self._found[part.key], part, counts, a, b)

    def _difference_of_records(self, name: str, problem: str) -> str:
        """Sparse tensors cannot be read in parts: their records are compared as objects are."""
        if not (self._a.is_opaque(name) and self._b.is_opaque(name)):
            return problem
        (a,), (b,) = self._a.read_objects([name]), self._b.read_objects([name])
        return difference(a, b) if isinstance(a, bytes) and isinstance(b, bytes) else problem

    def compare_objects(self, result: CheckpointDiff) -> None:
        reading = read_ahead(
            "dcpring-diff",
            windows(self._objects, lambda _: 0, None, _BATCH_OBJECTS),
            self._a.read_objects,
            self._b.read_objects,
        )
        with contextlib.closing(reading):
            for group, (left, right) in reading:
                for name, a, b in zip(group, left, right, strict=True):
                    called = self._a.side.called(name), self._b.side.called(name)
                    problem = "; ".join(value for value in (a, b) if isinstance(value, str))
                    if problem:
                        result.objects.append(ObjectDiff(*called, problem=problem))
                        continue
                    result.objects_compared += 1
                    if found := difference(a, b):
                        result.objects.append(ObjectDiff(*called, found))


# ---- one of the two ----


class _SideReader:
    """Reads from one of the checkpoints."""

    def __init__(self, side: Side, buffers: Sequence[Buffer]) -> None:
        self.side = side
        self._buffers = itertools.cycle(buffers)

    def is_opaque(self, name: str) -> bool:
        """Whether a tensor is one record of a kind that may be anything, and not too large to be read as a whole."""
        records = self.side.entries[name].records
        return len(records) == 1 and records[0].place.kind != TENSOR and records[0].place.length <= _LARGEST_RECORD

    def read_tensors(self, parts: list[_TensorPart]) -> list[_Value]:
        """Parts of tensors; they are good until the next but one are read."""
        buffer = next(self._buffers)
        buffer.clear()
        wanted = []
        for name, offsets, lengths in parts:
            tensor, _ = buffer.take(lengths, dtype_of(self.side.entries[name].dtype))
            wanted.append((self.side.entries[name].key, offsets, tensor))
        return _read_some(wanted, self._read_into)

    def _read_into(self, wanted: list[tuple[str, Sequence[int], Tensor]]) -> list[Tensor]:
        self.side.contents.read_into(wanted)
        return [tensor for _, _, tensor in wanted]

    def read_objects(self, group: list[str]) -> list[Any]:
        """Objects as they were pickled; a str is why one could not be read."""
        read = _read_some([self.side.entries[name].key for name in group], self.side.contents.read_objects)
        return [value if isinstance(value, str) else value.getvalue() for value in read]


def _read_some(wanted: list[Any], read: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """All at once; one by one where that fails, to tell which are bad."""
    try:
        return read(wanted)
    except _READ_ERRORS as error:
        if len(wanted) == 1:
            return [f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)]
    return [value for one in wanted for value in _read_some([one], read)]


# ---- elements ----


def _add(diff: TensorDiff, part: _TensorPart, found: _C._Difference, a: Tensor, b: Tensor) -> None:
    """Adds what the core has found in a part of a tensor."""
    changed, differing, nans_in_a, nans_in_b, first, farthest, distance, relative = found
    diff.changed += changed
    diff.differing += differing
    diff.nans = diff.nans[0] + nans_in_a, diff.nans[1] + nans_in_b
    diff.relative = max(diff.relative, relative)
    if farthest >= 0 and (diff.distance is None or distance > diff.distance):
        diff.distance = distance
        _note(diff, part, farthest, a, b)
    elif first >= 0 and diff.where is None:
        _note(diff, part, first, a, b)


def _note(diff: TensorDiff, part: _TensorPart, index: int, a: Tensor, b: Tensor) -> None:
    inside, rest = [], index
    for length in reversed(part.lengths):
        rest, at = divmod(rest, length)
        inside.append(at)
    diff.where = tuple(map(sum, zip(part.offsets, reversed(inside), strict=True)))
    diff.values = _number(a, index), _number(b, index)


def _number(tensor: Tensor, index: int) -> Any:
    """An element as a number of Python's; None where its dtype has none."""
    try:
        return tensor.reshape(-1)[index].item()
    except (RuntimeError, NotImplementedError):
        return None


@functools.cache
def _is_known(dtype: torch.dtype) -> bool:
    """Whether the core knows the dtype."""
    return _C.Tensors([torch.empty(1, dtype=dtype)]).kinds() == b"\0"


def _bare(tensor: Tensor) -> Tensor:
    """What the core can compare: the tensor, or its bytes where it does not know the dtype."""
    return tensor if _is_known(tensor.dtype) else tensor.reshape(-1).view(torch.uint8)
