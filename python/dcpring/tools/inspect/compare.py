"""Comparing two checkpoints: names, shapes, dtypes and values, whatever the sharding of each.

Values are read in batches of windows, the next one while one is being compared; each side has a thread that reads.
Memory stays bounded by a few windows, whatever the size of the tensors. What cannot be read counts as different.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.arguments import strings
from dcpring.base.windows import read_ahead, split_box, windows
from dcpring.errors import CheckpointError
from dcpring.format.metadata import TENSOR
from dcpring.move.buffer import ALIGNMENT, Buffer
from dcpring.names import diff as names
from dcpring.names.diff import KeyDiff
from dcpring.names.key_map import KeyMap, KeyMapLike
from dcpring.sources.contents import Contents, Entry, Slice, open_all
from dcpring.store.layout import rank_of_metadata
from dcpring.tools.inspect.compare_objects import difference
from dcpring.tools.inspect.select import check_patterns, key_filter

__all__ = ["CheckpointDiff", "Comparison", "ObjectDiff", "TensorDiff", "diff_checkpoints"]

_WINDOW_BYTES = 32 << 20
"""Of one side are read at once, at most."""

_LARGEST_RECORD = 4 * _WINDOW_BYTES
_BATCH_PARTS = 4096
_BATCH_OBJECTS = 256
_BUFFER_BYTES = _WINDOW_BYTES + _BATCH_PARTS * ALIGNMENT

_READ_ERRORS = (CheckpointError, OSError, RuntimeError, ValueError, MemoryError)
"""What reading damaged, missing or odd records ends in; RuntimeError and ValueError are torch's."""


@dataclass(frozen=True)
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

    Raises:
        CheckpointError: there is no checkpoint, or the key map makes two names one.
        CorruptCheckpointError, UntrustedCheckpointError, OSError: metadata cannot be read. Damaged or missing values
            are no error, but part of the result.
        ValueError: a tolerance is below 0, or the key map is none.
    """
    comparison = Comparison(a, b, key_map=key_map, only=only, atol=atol, rtol=rtol, rank=rank, trusted=trusted)
    return comparison.run() if values else comparison.result


class Comparison:
    """A comparison, in two steps: names, shapes and dtypes when it is made, values when it is run.

    Attributes:
        result: what has been found.
        bytes: that ``run`` will read, of both sides together.
    """

    def __init__(
        self,
        a: str | os.PathLike[str],
        b: str | os.PathLike[str],
        *,
        key_map: KeyMapLike = None,
        only: str | Sequence[str] = (),
        atol: float = 0.0,
        rtol: float = 0.0,
        rank: int | None = None,
        trusted: bool = False,
    ) -> None:
        if not (atol >= 0 and rtol >= 0):
            raise ValueError(f"atol={atol} and rtol={rtol} must be 0 or more")
        self._tolerance = (atol, rtol)
        mapped = KeyMap(key_map) if key_map is not None else None
        patterns = strings(only, "only")
        chosen = key_filter(patterns)
        self._a = _Side(a, rank, trusted, mapped, chosen)
        self._b = _Side(b, rank, trusted, mapped if key_map == "normalize" else None, chosen)
        check_patterns(patterns, self._a.names | self._b.names, "either")
        self.result = CheckpointDiff(names.diff_described(self._a.described(), self._b.described(), _cause))
        different = {item.key for item in (*self.result.keys.shapes, *self.result.keys.dtypes)}
        common = [name for name in self._a.entries if name in self._b.entries and name not in different]
        self._tensors = [name for name in common if self._a.entries[name].shape is not None]
        self._objects = [name for name in common if self._a.entries[name].shape is None]
        self._same: dict[Any, list[str]] = collections.defaultdict(list)
        for name in self._tensors:
            self._same[_records(self._a.entries[name]), _records(self._b.entries[name])].append(name)
        leaders = [group[0] for group in self._same.values()]
        self._found = {name: _Sum(self._a.entries[name]) for name in leaders}
        self.bytes = 2 * sum(self._a.entries[name].nbytes for name in leaders)

    def run(self, advance: Callable[[int], None] = lambda count: None) -> CheckpointDiff:
        """Compares the values.

        Args:
            advance: is told the bytes that have been read since the last time.
        """
        self._compare_tensors(advance)
        for group in self._same.values():
            found = self._found[group[0]]
            result = found.result(self._a.called[group[0]], self._b.called[group[0]])
            if not result.problem:
                self.result.tensors_compared += len(group)
                self.result.bytes += self._a.entries[group[0]].nbytes
            if result.changed or result.problem:
                # Tied tensors are read once, and differ in the same way.
                self.result.tensors += [
                    dataclasses.replace(result, key=self._a.called[name], other=self._b.called[name]) for name in group
                ]
        self._compare_objects()
        self.result.objects_compared = len(self._objects) - sum(bool(one.problem) for one in self.result.objects)
        return self.result

    # ---- tensors ----

    def _compare_tensors(self, advance: Callable[[int], None]) -> None:
        batches = windows(self._boxes(), self._part_bytes, _WINDOW_BYTES, _BATCH_PARTS)
        reading = read_ahead("dcpring-diff", batches, self._a.read_tensors, self._b.read_tensors)
        with contextlib.closing(reading):
            for batch, (left, right) in reading:
                self._compare_batch(batch, left, right)
                advance(2 * sum(map(self._part_bytes, batch)))

    def _part_bytes(self, part: Slice) -> int:
        entry = self._a.entries[part.key]
        return math.prod(part.lengths or ()) * (entry.dtype.itemsize if entry.dtype else 0)

    def _boxes(self) -> Iterator[Slice]:
        for name, found in self._found.items():
            for offsets, lengths in split_box(found.entry.shape or (), _WINDOW_BYTES // found.dtype.itemsize):
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
            self._found[part.key].add(part, counts, a, b)

    def _difference_of_records(self, name: str, problem: str) -> str:
        """Sparse tensors cannot be read in parts: their records are compared as objects are."""
        if not (self._a.is_opaque(name) and self._b.is_opaque(name)):
            return problem
        (a,), (b,) = self._a.read_objects([name]), self._b.read_objects([name])
        return difference(a, b) if isinstance(a, bytes) and isinstance(b, bytes) else problem

    # ---- objects ----

    def _compare_objects(self) -> None:
        groups = [self._objects[at : at + _BATCH_OBJECTS] for at in range(0, len(self._objects), _BATCH_OBJECTS)]
        reading = read_ahead("dcpring-diff", groups, self._a.read_objects, self._b.read_objects)
        with contextlib.closing(reading):
            for group, (left, right) in reading:
                for name, a, b in zip(group, left, right, strict=True):
                    self._compare_object(name, a, b)

    def _compare_object(self, name: str, a: bytes | str, b: bytes | str) -> None:
        called = self._a.called[name], self._b.called[name]
        problem = "; ".join(value for value in (a, b) if isinstance(value, str))
        if problem:
            self.result.objects.append(ObjectDiff(*called, problem=problem))
        elif isinstance(a, bytes) and isinstance(b, bytes) and (found := difference(a, b)):
            self.result.objects.append(ObjectDiff(*called, found))


# ---- one of the two ----

_Value = Tensor | str
"""What was read, or why it could not be."""


class _Side:
    """A checkpoint under the names that it is compared by.

    Attributes:
        entries: by these names.
        called: what each is called in the checkpoint.
        names: that patterns choose from, which are chosen.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        rank: int | None,
        trusted: bool,
        key_map: KeyMap | None,
        chosen: Callable[[str], bool],
    ) -> None:
        parts = open_all(os.fspath(checkpoint), rank=rank, trusted=trusted)
        self.entries: dict[str, Entry] = {}
        self.called: dict[str, str] = {}
        self.names: set[str] = set()
        self._parts: dict[str, Contents] = {}
        self._buffers = collections.deque(Buffer(_BUFFER_BYTES) for _ in range(2))
        for contents in parts:
            # Objects are compared as bytes and as plain data: what they could run is no matter.
            raw = dataclasses.replace(contents, trusted=True)
            prefix = f"(rank {rank_of_metadata(contents.path.name)})." if len(parts) > 1 else ""
            for key, name in _renamed(contents, key_map).items():
                if chosen(name):
                    self.entries[prefix + name] = contents[key]
                    self.called[prefix + name] = prefix + key
                    self.names.add(name)
                    self._parts[prefix + name] = raw

    def described(self) -> dict[str, names.KeyDescription]:
        return {name: names.KeyDescription(entry.shape, entry.dtype) for name, entry in self.entries.items()}

    def is_opaque(self, name: str) -> bool:
        """Whether a tensor is one record of a kind that may be anything, and not too large to be read as a whole."""
        records = self.entries[name].records
        return len(records) == 1 and records[0].place.kind != TENSOR and records[0].place.length <= _LARGEST_RECORD

    def read_tensors(self, parts: list[Slice]) -> list[_Value]:
        """Of tensors; they are good until the next but one are read."""
        self._buffers.rotate()
        buffer = self._buffers[0]
        buffer.clear()
        wanted = []
        for part in parts:
            entry = self.entries[part.key]
            assert entry.dtype is not None
            tensor, _ = buffer.take(tuple(part.lengths or ()), entry.dtype)
            wanted.append((part.key, (entry.key, part.offsets or (), tensor)))
        return self._read(wanted, _read_into)

    def read_objects(self, group: list[str]) -> list[bytes | str]:
        """As they were pickled."""
        read = self._read([(name, self.entries[name].key) for name in group], Contents.read_objects)
        return [value if isinstance(value, str) else value.getvalue() for value in read]

    def _read(self, wanted: list[tuple[str, Any]], read: Callable[[Contents, list[Any]], list[Any]]) -> list[Any]:
        """All at once from each part of the checkpoint; one by one where that fails, to tell which are bad."""
        values: list[Any] = [None] * len(wanted)
        by_part: dict[int, list[int]] = collections.defaultdict(list)
        for position, (name, _) in enumerate(wanted):
            by_part[id(self._parts[name])].append(position)
        for positions in by_part.values():
            contents = self._parts[wanted[positions[0]][0]]
            for position, value in zip(
                positions, _read_some(contents, [wanted[p][1] for p in positions], read), strict=True
            ):
                values[position] = value
        return values


def _read_into(contents: Contents, wanted: list[tuple[str, Sequence[int], Tensor]]) -> list[Tensor]:
    contents.read_into(wanted)
    return [tensor for _, _, tensor in wanted]


def _renamed(contents: Contents, key_map: KeyMap | None) -> dict[str, str]:
    try:
        return key_map.rename(contents) if key_map else {key: key for key in contents}
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _read_some(contents: Contents, wanted: list[Any], read: Callable[[Contents, list[Any]], list[Any]]) -> list[Any]:
    try:
        return read(contents, wanted)
    except _READ_ERRORS as error:
        if len(wanted) == 1:
            return [f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)]
    return [value for one in wanted for value in _read_some(contents, [one], read)]


# ---- adding up ----


class _Sum:
    """What the windows of a tensor have shown."""

    def __init__(self, entry: Entry) -> None:
        assert entry.dtype is not None
        self.entry = entry
        self.dtype = entry.dtype
        self.problem = ""
        self._counts = [0, 0, 0, 0]
        self._distance: float | None = None
        self._relative = 0.0
        self._where: tuple[int, ...] | None = None
        self._values: tuple[Any, Any] | None = None

    def add(self, part: Slice, found: _C._Difference, a: Tensor, b: Tensor) -> None:
        first, farthest, distance, relative = found[4:]
        self._counts = [have + more for have, more in zip(self._counts, found[:4], strict=True)]
        self._relative = max(self._relative, relative)
        if farthest >= 0 and (self._distance is None or distance > self._distance):
            self._distance = distance
            self._note(part, farthest, a, b)
        elif first >= 0 and self._where is None:
            self._note(part, first, a, b)

    def _note(self, part: Slice, index: int, a: Tensor, b: Tensor) -> None:
        assert part.offsets is not None and part.lengths is not None
        inside = []
        rest = index
        for length in reversed(part.lengths):
            rest, at = divmod(rest, length)
            inside.append(at)
        self._where = tuple(offset + at for offset, at in zip(part.offsets, reversed(inside), strict=True))
        self._values = _number(a, index), _number(b, index)

    def result(self, key: str, other: str) -> TensorDiff:
        return TensorDiff(
            key,
            other,
            self.entry.shape or (),
            self.dtype,
            self._counts[0],
            self._counts[1],
            (self._counts[2], self._counts[3]),
            self._distance,
            self._relative,
            self._where,
            self._values,
            self.problem,
        )


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


def _records(entry: Entry) -> Any:
    """The same for tensors that are stored as one (tied ones), and only for these."""
    places = tuple((record.offsets, record.place.file, record.place.offset) for record in entry.records)
    return entry.shape, entry.dtype, places


# ---- names ----


class _Named(NamedTuple):
    name: str
    other: str
    side: str


def _cause(a: str, b: str) -> str:
    """Why a key has other names in two checkpoints, probably, and with which key map it has not."""
    sides = (_Named(a, b, "the first"), _Named(b, a, "the second"))
    for name, other, side in sides:
        if part := names.only_in(name, other, names.WRAPPER_PARTS):
            return f"{side} was saved from {names.WRAPPER_PARTS[part]}; compare with the key map normalize"
    if names.PARAMETRIZED.search(a) or names.PARAMETRIZED.search(b):
        return "parametrized in one only; compare with a key map of both names"
    common = names.common_suffix(a, b)
    old, new = a.removesuffix(common), b.removesuffix(common)
    cure = f'compare with the key map {{"prefixes": {{"{names.shown(old)}": "{names.shown(new)}"}}}}'
    for name, other, side in sides:
        if part := names.only_in(name, other, names.PERHAPS_PARTS):
            return f"{side} was saved from {names.PERHAPS_PARTS[part]}, perhaps; {cure}"
    if "." in common or common in (a, b):
        return f"only the beginning differs; {cure}"
    return "spelt differently"
