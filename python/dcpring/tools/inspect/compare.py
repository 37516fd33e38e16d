"""Comparing two checkpoints: names, shapes, dtypes and values, whatever the sharding of each.

Names are compared here, without torch, values in ``compare_values``. What cannot be read counts as different.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcpring.base.arguments import strings
from dcpring.errors import CheckpointError
from dcpring.names.diff import KeyDescription, KeyDiff, cause_between_checkpoints, diff_described
from dcpring.names.key_map import KeyMap, KeyMapLike
from dcpring.sources.contents import Contents, Entry, open_all
from dcpring.store.layout import rank_of_metadata
from dcpring.tools.inspect.select import check_patterns, key_filter

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointDiff", "ObjectDiff", "TensorDiff", "diff_checkpoints"]


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
    from dcpring.tools.inspect.compare_values import compare_values

    different = {item.key for item in (*keys.shapes, *keys.dtypes)}
    pairs = [(left[part], right[part]) for part in left if part in right]
    compare_values(pairs, different, result, (atol, rtol), progress)
    return result


# ---- one of the two ----


def _open(
    checkpoint: str | os.PathLike[str],
    rank: int | None,
    trusted: bool,
    key_map: KeyMap | None,
    chosen: Callable[[str], bool],
) -> dict[str, Side]:
    """A checkpoint, by the beginnings of its names: "" unless each rank has metadata of its own."""
    parts = open_all(os.fspath(checkpoint), rank=rank, trusted=trusted)
    sides = {}
    for contents in parts:
        prefix = f"(rank {rank_of_metadata(contents.path.name)})." if len(parts) > 1 else ""
        sides[prefix] = Side(contents, prefix, key_map, chosen)
    return sides


def _described(sides: dict[str, Side]) -> dict[str, KeyDescription]:
    return {
        name: KeyDescription(entry.shape, entry.dtype)
        for side in sides.values()
        for name, entry in side.entries.items()
    }


class Side:
    """A checkpoint, or a rank's part of it, under the names that it is compared by.

    Attributes:
        contents: of which everything can be read.
        entries: by these names.
        names: that patterns choose from, which are chosen.
    """

    def __init__(self, contents: Contents, prefix: str, key_map: KeyMap | None, chosen: Callable[[str], bool]) -> None:
        try:
            renamed = key_map.rename(contents) if key_map else {key: key for key in contents}
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        # Objects are compared as bytes and as plain data: what they could run is no matter.
        self.contents = dataclasses.replace(contents, trusted=True)
        self._prefix = prefix
        self.names = {name for name in renamed.values() if chosen(name)}
        self.entries: dict[str, Entry] = {
            prefix + name: contents[key] for key, name in renamed.items() if name in self.names
        }

    def called(self, name: str) -> str:
        """What it is called in the checkpoint."""
        return self._prefix + self.entries[name].key
