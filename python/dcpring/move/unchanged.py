"""Which of a rank's tensors are what an earlier checkpoint has of them, and which files so need not be written again.

All is decided from the rank's own memory and its own ledger in the earlier checkpoint. A sample of some bytes finds
most tensors that have changed. Those of which digests are known are compared with these, and are then known to be
equal. Others whose sample is the same are expected to stay: they are put into a file of their own, with digests, so
that the save after this one can link it. With "trust" a tensor that is not trained is not read where this process knows
its digest: it has read the tensor before, and no change of it was counted since.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from dcpring import _C
from dcpring.base.memory import PLAIN
from dcpring.format.ledger import (
    KEPT,
    MOST_MISSES,
    NO_IDENTITY,
    NO_PLAN,
    SAMPLE_BYTES,
    SAMPLED,
    Ledger,
    Place,
    key_of,
    new_seed,
)
from dcpring.format.metadata import TENSOR
from dcpring.move.frozen import Sign, forget_expired, sign_of_content
from dcpring.move.save.saving import Looked, Saving

LEAST_KEPT_BYTES = 1 << 20
"""Of tensors that are expected to stay: fewer do not get a file of their own."""


class Linkable(NamedTuple):
    """A file of the earlier checkpoint all of whose tensors are unchanged.

    Attributes:
        name: of the file.
        size: bytes that it has at least.
        places, digests: of the items in it, by position.
    """

    name: str
    size: int
    places: dict[int, Place]
    digests: dict[int, bytes]


_known: dict[Sign, tuple[bytes, bytes]] = {}
"""Digests of what this process has read, each with the seed of its key."""


class Keeping:
    """One rank's save, seen against an earlier one: all is compared when it is made.

    Args:
        saving: the save.
        earlier: the rank's ledger in the earlier checkpoint, None where there is none.
        is_frozen: whether a tensor of that name is one that is not trained, and so expected to stay.
        wholes: by name, what the state dict has of tensors that this rank may have only parts of; None: such tensors
            are compared, all of each; else they are taken for unchanged if their samples and signs are.
        workers: threads that compare.
        is_durable: what is saved is to be durable.

    Attributes:
        key: for digests.
        seed: that it is made of.
    """

    def __init__(
        self,
        saving: Saving,
        earlier: Ledger | None,
        *,
        is_frozen: Callable[[str], bool],
        wholes: Mapping[str, Any] | None,
        workers: int,
        is_durable: bool,
    ) -> None:
        items = saving.items
        self._count = len(items.tensors) + len(items.objects)
        self.seed = new_seed() if earlier is None else earlier.seed
        self.key = key_of(self.seed)
        self._saving = saving
        self._items = items
        self._earlier = earlier
        self._is_frozen = is_frozen
        self._wholes = wholes
        self._contents: dict[int, Sign] = {}
        self._workers = workers
        self._is_durable = is_durable
        self._plan = items.plan()
        self._is_same_plan = (
            earlier is not None and self._plan != NO_PLAN and self._plan == earlier.plan and len(earlier) == self._count
        )
        self._samples = array("Q", bytes(SAMPLE_BYTES * self._count))
        self._states, self._misses, self._waits = (bytearray(self._count) for _ in range(3))
        self._rows: dict[int, int] = {}
        self._unchanged: set[int] = set()
        self._staying: set[int] = set()
        self._linked: set[int] = set()
        self._compare()

    # ---- looking ----

    def _compare(self) -> None:
        """Finds out which tensors are unchanged, and which of the others are expected to stay."""
        positions, tensors = self._plain()
        samples = memoryview(_C.samples(tensors, self.key)).cast("Q")
        for position, sample in zip(positions, samples, strict=True):
            self._samples[position] = sample
            self._states[position] = SAMPLED
        rows = self._find_rows(positions)
        if rows is None:
            self._staying = {position for position in positions if self._is_frozen(self._items.names[position])}
        else:
            self._decide(tensors, self._candidates(positions, rows))

    def _note_contents(self, looked: Looked) -> None:
        """What is told of tensors that are not trained by looking at their signs alone."""
        if self._wholes is None:
            return
        for position, tensor in zip(looked.positions, looked.tensors, strict=True):
            name = self._items.names[position]
            sign = sign_of_content(tensor, self._wholes.get(name, tensor)) if self._is_frozen(name) else None
            if sign is not None:
                self._contents[position] = sign

    def _plain(self) -> tuple[list[int], _C.Tensors]:
        """The tensors that lie as they are in CPU memory."""
        items, looked = self._items, self._saving.look(self._items.tensors)
        self._note_contents(looked)
        stored = items.kinds_of(looked.positions, looked.tensors) or bytes([TENSOR]) * len(looked.positions)
        fits = [kind == PLAIN and one == TENSOR for kind, one in zip(looked.kinds, stored, strict=True)]
        if all(fits):
            return looked.positions, looked.handles
        return list(compress(looked.positions, fits)), _C.Tensors(list(compress(looked.tensors, fits)))

    def _find_rows(self, positions: Sequence[int]) -> Sequence[int] | None:
        """The row of the earlier ledger that each item has, -1 where nothing is known of it; None: it is so of all."""
        earlier = self._earlier
        if earlier is None:
            return None
        states = earlier.states
        if self._is_same_plan:
            self._misses[:], self._waits[:] = earlier.misses, earlier.waits
            return [position if states[position] else -1 for position in positions]
        by_identity = {earlier.identity(row): row for row in range(len(earlier)) if states[row]}
        rows = [by_identity.get(self._items.identity(position), -1) for position in positions]
        for position, row in zip(positions, rows, strict=True):
            if row >= 0:
                self._misses[position], self._waits[position] = earlier.misses[row], earlier.waits[row]
        return rows

    def _candidates(self, positions: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Those for digests to decide: their indices, positions and rows.

        What has only a sample, and that is the same, is expected to stay.
        """
        earlier = self._earlier
        assert earlier is not None
        old, new, states = earlier.samples, self._samples, earlier.states
        found: list[tuple[int, int, int]] = []
        for index, (position, row) in enumerate(zip(positions, rows, strict=True)):
            if row < 0:
                if self._is_frozen(self._items.names[position]):
                    self._staying.add(position)
            elif states[row] == KEPT:
                self._rows[position] = row
                if new[position] != old[row]:
                    self._miss(position)
                elif self._is_trusted(position, row):
                    self._unchanged.add(position)
                else:
                    found.append((index, position, row))
            elif new[position] == old[row]:
                if self._waits[position]:
                    self._waits[position] -= 1
                else:
                    self._staying.add(position)
        return found

    def _is_trusted(self, position: int, row: int) -> bool:
        earlier, content = self._earlier, self._contents.get(position)
        if earlier is None or content is None or self._offset(position, earlier.place(row)) is None:
            return False
        return _known.get(content) == (earlier.seed, earlier.digests[row])

    def _miss(self, position: int) -> None:
        """It was expected to stay, and has not: the more often, the longer it is not expected to again."""
        misses = self._misses[position] = min(self._misses[position] + 1, MOST_MISSES)
        self._waits[position] = (1 << misses) - 1

    def _decide(self, tensors: _C.Tensors, candidates: Sequence[tuple[int, int, int]]) -> None:
        earlier = self._earlier
        if earlier is None:
            return
        offsets = {row: self._offset(position, earlier.place(row)) for _, position, row in candidates}
        compared = [one for one in candidates if offsets[one[2]] is not None]
        changed = _C.find_changed(
            tensors,
            [index for index, _, _ in compared],
            [offsets[row] or 0 for _, _, row in compared],
            [earlier.digests[row] for _, _, row in compared],
            self.key,
            self._workers,
        )
        same = {position for (_, position, _), differs in zip(compared, changed, strict=True) if not differs}
        self._unchanged |= same
        for _, position, _ in candidates:
            if position not in same:
                self._miss(position)

    def _offset(self, position: int, place: Place) -> int | None:
        """Where a tensor's bytes begin in its file; None if these cannot be its own, whatever the ledger says."""
        _, kind, _, _, offset, size, _ = place
        return offset if kind == TENSOR and size == self._items.sizes[position] else None

    # ---- what becomes of them ----

    def linkable(self) -> list[Linkable]:
        """The files of the earlier checkpoint that are as this save would write them."""
        earlier = self._earlier
        if earlier is None or not self._unchanged:
            return []
        by_row = {self._rows[position]: position for position in self._unchanged}
        by_file: dict[str, list[int]] = defaultdict(list)
        sizes: dict[str, int] = defaultdict(int)
        for row in earlier.digests:
            name, _, offset, length, *_ = earlier.place(row)
            by_file[name].append(row)
            sizes[name] = max(sizes[name], offset + length)
        found = []
        for name, rows in by_file.items():
            if all(row in by_row for row in rows):
                places = {by_row[row]: earlier.place(row) for row in rows}
                found.append(Linkable(name, sizes[name], places, {by_row[row]: earlier.digests[row] for row in rows}))
        return found

    def take_over(self, file: Linkable, name: str) -> None:
        """Such a file is one of this save's now, under this name."""
        self._saving.take_over(name, file.places, file.digests)
        self._linked |= file.places.keys()

    def to_write(self, least_bytes: int) -> tuple[list[int], list[int]]:
        """The tensors that may change, and those that are expected to stay, if they have so many bytes."""
        positions = [position for position in self._items.tensors if position not in self._linked]
        staying = [position for position in positions if position in self._staying or position in self._unchanged]
        if sum(self._items.sizes[position] for position in staying) < least_bytes:
            return positions, []
        kept = set(staying)
        return [position for position in positions if position not in kept], staying

    # ---- what the next save is told ----

    def ledger(self) -> bytes:
        """Encoded, once everything is written."""
        saving = self._saving
        forget_expired(_known, lambda sign: sign.storage)
        for position, digest in saving.digests.items():
            self._states[position] = KEPT
            if position in self._contents:
                _known[self._contents[position]] = self.seed, digest
        return Ledger(
            self.seed,
            self._plan,
            self._is_durable,
            self._identities(),
            self._samples,
            self._states,
            self._misses,
            self._waits,
            saving.storage,
            saving.digests,
        ).encode()

    def _identities(self) -> bytes:
        if self._is_same_plan and self._earlier is not None:
            return self._earlier.identities
        known = (self._items.identity(at) if self._states[at] else NO_IDENTITY for at in range(self._count))
        return b"".join(known)
