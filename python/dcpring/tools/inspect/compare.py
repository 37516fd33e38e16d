"""Comparing two checkpoints: names, shapes, dtypes and values, whatever the sharding of each.

Values are read in batches of windows, the next one while one is being compared; each side has a thread that reads.
Memory stays bounded by a few windows, whatever the size of the tensors. What cannot be read counts as different.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.arguments import strings
from dcpring.base.windows import read_ahead, split_box, windows
from dcpring.errors import CheckpointError
from dcpring.format.metadata import TENSOR
from dcpring.move.buffer import ALIGNMENT, Buffer
from dcpring.names.diff import KeyDescription, KeyDiff, cause_between_checkpoints, diff_described
from dcpring.names.key_map import KeyMap, KeyMapLike
from dcpring.sources.contents import Contents, Entry, Slice, open_all
from dcpring.store.layout import rank_of_metadata
from dcpring.tools.inspect.compare_objects import difference
from dcpring.tools.inspect.select import check_patterns, key_filter
from dcpring.watch.progress import progress_bar

__all__ = ["CheckpointDiff", "ObjectDiff", "TensorDiff", "diff_checkpoints"]

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


@dataclass
class TensorDiff:
    """A tensor whose values differ, or that cannot be compared.

    Attributes:
        key: as the first checkpoint calls it.
        other: as the second one does.
        shape: in elements.
        dtype: of both.
        changed: elements with other bits.
        differing: of these, those that are further apart than atol and rtol allow; without these all of them.
        nans: elements that are NaN, in each.
        distance: the largest abs(a - b), None where no two numbers have other bits.
        relative: the largest abs(a - b) / max(abs(a), abs(b)), perhaps of another element.
        where: the indices of the element with the largest distance; without one of the first that differs.
        values: there, in each.
        problem: why it cannot be compared; else "".
    """

    key: str
    other: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    changed: int = 0
    differing: int = 0
    nans: tuple[int, int] = (0, 0)
    distance: float | None = None
    relative: float = 0.0
    where: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    problem: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def _add(self, part: Slice, found: _C._Difference, a: Tensor, b: Tensor) -> None:
        """Adds what the core has found in a part of the tensor."""
        changed, differing, nans_in_a, nans_in_b, first, farthest, distance, relative = found
        self.changed += changed
        self.differing += differing
        self.nans = self.nans[0] + nans_in_a, self.nans[1] + nans_in_b
        self.relative = max(self.relative, relative)
        if farthest >= 0 and (self.distance is None or distance > self.distance):
            self.distance = distance
            self._note(part, farthest, a, b)
        elif first >= 0 and self.where is None:
            self._note(part, first, a, b)

    def _note(self, part: Slice, index: int, a: Tensor, b: Tensor) -> None:
        inside, rest = [], index
        for length in reversed(part.lengths or ()):
            rest, at = divmod(rest, length)
            inside.append(at)
        self.where = tuple(map(sum, zip(part.offsets or (), reversed(inside), strict=True)))
        self.values = _number(a, index), _number(b, index)


@dataclass(frozen=True)
class ObjectDiff:
    """An object that differs, or that cannot be compared.

    Attributes:
        key: as the first checkpoint calls it.
        other: as the second one does.
        difference: where, for people; else "".
        problem: why it cannot be compared; else "".
    """

    key: str
    other: str
    difference: str = ""
    problem: str = ""


@dataclass
class CheckpointDiff:
    """How two checkpoints differ. True when they do.

    Attributes:
        keys: names, shapes and dtypes; "missing" are those that only the first has, "unexpected" those that only the
            second has.
        tensors: those whose values have other bits, or that cannot be compared.
        objects: those that differ, or that cannot be compared.
        tensors_compared: tensors of which the values were compared.
        objects_compared: likewise.
        bytes: of the elements compared, in one of the two.
    """

    keys: KeyDiff
    tensors: list[TensorDiff] = field(default_factory=list)
    objects: list[ObjectDiff] = field(default_factory=list)
    tensors_compared: int = 0
    objects_compared: int = 0
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.objects or any(diff.differing or diff.problem for diff in self.tensors))


def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    key_map: KeyMapLike = None,
    only: str | Sequence[str] = (),
    values: bool = True,
    atol: float = 0.0,
    rtol: float = 0.0,
    rank: int | None = None,
    trusted: bool = False,
    progress: bool = False,
) -> CheckpointDiff:
    """How two checkpoints differ, whoever wrote them and however each is sharded.

    Args:
        a: the directory of one.
        b: that of the other.
        key_map: makes the names of ``a`` those of ``b`` (see docs/keys.md); "normalize" is applied to both.
        only: patterns of keys, as the first checkpoint calls them after ``key_map``: "model.*.weight".
        values: compare values too, not only names, shapes and dtypes.
        atol: elements count as different only where abs(a - b) > atol + rtol * max(abs(a), abs(b)). By default all
            whose bits differ do.
        rtol: see ``atol``.
        rank: of saves with ``use_collectives=False``, the rank whose parts are compared; None: all, by rank.
        trusted: unpickle whatever the metadata holds. Objects are only ever loaded as plain data.
        progress: draw a bar on standard error, if that is a terminal.

    Raises:
        CheckpointError: there is no checkpoint, or the key map makes two names one.
        CorruptCheckpointError, UntrustedCheckpointError, OSError: metadata cannot be read. Damaged or missing values
            are no error, but part of the result.
        ValueError: a tolerance is below 0, or the key map is none.
    """
    if not (atol >= 0 and rtol >= 0):
        raise ValueError(f"atol={atol} and rtol={rtol} must be 0 or more")
    mapped = KeyMap(key_map) if key_map is not None else None
    patterns = strings(only, "only")
    chosen = key_filter(patterns)
    left = _open(a, rank, trusted, mapped, chosen)
    right = _open(b, rank, trusted, mapped if key_map == "normalize" else None, chosen)
    check_patterns(patterns, {name for part in (*left.values(), *right.values()) for name in part.names}, "either")
    keys = diff_described(_described(left), _described(right), cause_between_checkpoints)
    result = CheckpointDiff(keys)
    if not values:
        return result
    different = {item.key for item in (*keys.shapes, *keys.dtypes)}
    pairs = [_Pair(left[part], right[part], different, (atol, rtol)) for part in left if part in right]
    total = sum(pair.bytes for pair in pairs)
    with progress_bar("comparing", total, enabled=progress and total > _LEAST_WATCHED_BYTES) as bar:
        for pair in pairs:
            pair.compare_tensors(result, bar.advance)
    for pair in pairs:
        pair.compare_objects(result)
    return result


class _Pair:
    """What two checkpoints have in common. After saves with ``use_collectives=False`` there is one for each rank.

    Attributes:
        bytes: that comparing tensors will read, of both sides together.
    """

    def __init__(self, a: _Side, b: _Side, different: set[str], tolerance: tuple[float, float]) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        self._objects: list[str] = []
        self._found: dict[str, TensorDiff] = {}
        self.bytes = 0
        for name, entry in a.entries.items():
            if name not in b.entries or name in different:
                continue
            if entry.shape is None or entry.dtype is None:
                self._objects.append(name)
            else:
                self._found[name] = TensorDiff(a.called(name), b.called(name), entry.shape, entry.dtype)
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
                result.bytes += self._a.entries[name].nbytes
            if found.changed or found.problem:
                result.tensors.append(found)

    def _part_bytes(self, part: Slice) -> int:
        return math.prod(part.lengths or ()) * self._found[part.key].dtype.itemsize

    def _boxes(self) -> Iterator[Slice]:
        for name, found in self._found.items():
            for offsets, lengths in split_box(found.shape, _WINDOW_BYTES // found.dtype.itemsize):
                if found.problem:  # of a part before this one: what is left would tell nothing new
                    break
                yield Slice(name, offsets, lengths)

    def _compare_batch(self, batch: list[Slice], left: list[_Value], right: list[_Value]) -> None:
        parts: list[Slice] = []
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
            self._found[part.key]._add(part, counts, a, b)

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
                    called = self._a.called(name), self._b.called(name)
                    problem = "; ".join(value for value in (a, b) if isinstance(value, str))
                    if problem:
                        result.objects.append(ObjectDiff(*called, problem=problem))
                        continue
                    result.objects_compared += 1
                    if found := difference(a, b):
                        result.objects.append(ObjectDiff(*called, found))


# ---- one of the two ----


def _open(
    checkpoint: str | os.PathLike[str],
    rank: int | None,
    trusted: bool,
    key_map: KeyMap | None,
    chosen: Callable[[str], bool],
) -> dict[str, _Side]:
    """A checkpoint, by the beginnings of its names: "" unless each rank has metadata of its own."""
    parts = open_all(os.fspath(checkpoint), rank=rank, trusted=trusted)
    buffers = [Buffer(_BUFFER_BYTES) for _ in range(2)]
    sides = {}
    for contents in parts:
        prefix = f"(rank {rank_of_metadata(contents.path.name)})." if len(parts) > 1 else ""
        sides[prefix] = _Side(contents, prefix, key_map, chosen, buffers)
    return sides


def _described(sides: dict[str, _Side]) -> dict[str, KeyDescription]:
    return {
        name: KeyDescription(entry.shape, entry.dtype)
        for side in sides.values()
        for name, entry in side.entries.items()
    }


class _Side:
    """A checkpoint, or a rank's part of it, under the names that it is compared by.

    Attributes:
        entries: by these names.
        names: that patterns choose from, which are chosen.
    """

    def __init__(
        self,
        contents: Contents,
        prefix: str,
        key_map: KeyMap | None,
        chosen: Callable[[str], bool],
        buffers: Sequence[Buffer],
    ) -> None:
        try:
            renamed = key_map.rename(contents) if key_map else {key: key for key in contents}
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        # Objects are compared as bytes and as plain data: what they could run is no matter.
        self._contents = dataclasses.replace(contents, trusted=True)
        self._prefix = prefix
        self._buffers = itertools.cycle(buffers)
        self.names = {name for name in renamed.values() if chosen(name)}
        self.entries: dict[str, Entry] = {
            prefix + name: contents[key] for key, name in renamed.items() if name in self.names
        }

    def called(self, name: str) -> str:
        """What it is called in the checkpoint."""
        return self._prefix + self.entries[name].key

    def is_opaque(self, name: str) -> bool:
        """Whether a tensor is one record of a kind that may be anything, and not too large to be read as a whole."""
        records = self.entries[name].records
        return len(records) == 1 and records[0].place.kind != TENSOR and records[0].place.length <= _LARGEST_RECORD

    def read_tensors(self, parts: list[Slice]) -> list[_Value]:
        """Parts of tensors; they are good until the next but one are read."""
        buffer = next(self._buffers)
        buffer.clear()
        wanted = []
        for name, offsets, lengths in parts:
            entry = self.entries[name]
            assert entry.dtype is not None
            tensor, _ = buffer.take(tuple(lengths or ()), entry.dtype)
            wanted.append((entry.key, offsets or (), tensor))
        return _read_some(wanted, self._read_into)

    def _read_into(self, wanted: list[tuple[str, Sequence[int], Tensor]]) -> list[Tensor]:
        self._contents.read_into(wanted)
        return [tensor for _, _, tensor in wanted]

    def read_objects(self, group: list[str]) -> list[Any]:
        """Objects as they were pickled; a str is why one could not be read."""
        read = _read_some([self.entries[name].key for name in group], self._contents.read_objects)
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
