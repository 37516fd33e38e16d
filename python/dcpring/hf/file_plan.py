"""The plan of files that all ranks write together: where each tensor lies, and which rank writes which bytes.

1. The storage lays the tensors of all ranks' plans out in files, one behind the other (``FileLayout``).
2. A file is cut into stripes on the grid of its CRC blocks. Of most stripes one rank holds everything, and writes it
   from its memory. Any other is put together, in memory that ranks share, and written by the rank that holds most of
   it (``Holdings``, csrc/core/plan/holdings).

Stripes that are put together come in rounds of bounded size, for ``hf.stripes`` to carry out.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcpring import _C
from dcpring.format.properties import decode_properties
from dcpring.plan.items import Items
from dcpring.plan.table import table_of_items

STRIPE_BYTES = _C.CRC_BLOCK_BYTES

ROUND_BYTES = 12 << 20
"""What is put together at a time."""

ROUNDS_IN_MEMORY = 2
"""A host's ranks share the memory of so many: one is filled while some still take what is theirs of the last."""

Ints = tuple[int, ...]


# ---- where tensors lie ----


class Laid(NamedTuple):
    """A tensor's place in a file.

    Attributes:
        name: in the state dict.
        stored: in the file.
        dtype: of the elements in the file.
        shape: of the tensor.
        size_bytes: in the file.
        begin: offset of its first byte there.
    """

    name: str
    stored: str
    dtype: torch.dtype
    shape: Ints
    size_bytes: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes

    @property
    def crc_count(self) -> int:
        """How many blocks of the CRC grid it touches."""
        return (self.end - 1) // STRIPE_BYTES - self.begin // STRIPE_BYTES + 1 if self.size_bytes else 0

    @property
    def most_crcs(self) -> int:
        """How many it touches at most, wherever it begins."""
        return (self.size_bytes - 2) // STRIPE_BYTES + 2 if self.size_bytes else 0


@dataclass(frozen=True)
class FileLayout:
    """One file.

    Attributes:
        name: under which it is written.
        head_bytes: what lies before the tensors; a multiple of the alignment of direct I/O.
        tensors: in the order of the file, without gaps.
    """

    name: str
    head_bytes: int
    tensors: list[Laid]

    @property
    def size_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else self.head_bytes


# ---- who writes what ----


class SharedStripe(NamedTuple):
    """A stripe that several ranks hold.

    Attributes:
        lo, hi: in the file.
        at: offset in the memory of a round.
        writer: who writes it.
        holders: who fills some of it, the writer too.
    """

    lo: int
    hi: int
    at: int
    writer: int
    holders: Ints


class FileStripes(NamedTuple):
    """One rank's part of a file, but for what is put together in rounds.

    Attributes:
        own: ranges [lo, hi) that it writes from its memory.
        writes_bytes: of the file, in all.
    """

    own: list[tuple[int, int]]
    writes_bytes: int


SharedRounds = list[list[SharedStripe]]
"""Of a file, the stripes of each round."""


@dataclass
class Common:
    """The part of the plan that is the same for all ranks.

    Attributes:
        files: all of them.
        rounds: of each.
        hosts: of all ranks.
        token: names the save.
        omitted: names whose data are saved under others: tied tensors.
        block_bytes: the coordinator's, for all: what is written at a time.
    """

    files: list[FileLayout]
    rounds: list[SharedRounds]
    hosts: list[str]
    token: str
    omitted: frozenset[str]
    block_bytes: int

    def packed(self) -> bytes:
        return zlib.compress(pickle.dumps(self), 1)


@dataclass
class Assignment:
    """The plan as the coordinator sends it to one rank.

    Attributes:
        packed: the same for all ranks, and so packed once.
        parts: this rank's of each file.
    """

    packed: bytes
    parts: list[FileStripes]

    @functools.cached_property
    def common(self) -> Common:
        return pickle.loads(zlib.decompress(self.packed))

    @property
    def has_rounds(self) -> bool:
        return any(self.common.rounds)


class SavedTensor(NamedTuple):
    """A tensor of a state dict, as a whole."""

    dtype: torch.dtype
    shape: Ints


class Holdings:
    """All tensors that are to be written, and the ranks that hold them; decides who writes which stripes.

    Args:
        plans: the items of each rank's.
    """

    def __init__(self, plans: Sequence[Sequence[WriteItem]]) -> None:
        self._core = _C.Holdings(len(plans))
        for rank, items in enumerate(plans):
            of_table = items if isinstance(items, Items) else Items(table_of_items(items, None))
            self._core.add(rank, of_table.table, of_table.kept)

    def tensors(self) -> dict[str, SavedTensor | None]:
        """By name; None for an object."""
        dtype_of = functools.cache(lambda encoded: decode_properties(encoded).dtype)
        found = self._core.tensors().items()
        return {name: None if about is None else SavedTensor(dtype_of(about[1]), about[0]) for name, about in found}

    def holders(self, name: str) -> list[int]:
        """The ranks that have some of a tensor."""
        return self._core.holders(name)

    def share(self, layout: FileLayout, block_bytes: int) -> tuple[list[FileStripes], SharedRounds]:
        """Shares a file out, so that all ranks write as much of the files so far. Returns its parts and its rounds.

        Raises:
            ValueError: what ranks hold of a tensor does not make it up.
        """
        laid = [(one.name, one.dtype.itemsize, one.begin, one.size_bytes) for one in layout.tensors]
        parts, rounds = self._core.share(laid, layout.head_bytes, block_bytes, ROUND_BYTES)
        shared = [list(map(SharedStripe._make, stripes)) for stripes in rounds]
        return list(itertools.starmap(FileStripes, parts)), shared
