"""Which of a rank's tensors are what an earlier checkpoint has of them, and which files so need not be written again.

All is decided from the rank's own memory and its own ledger in the earlier checkpoint. A sample of some bytes finds
most tensors that have changed. Those of which digests are known are compared with these, and are then known to be
equal. Others whose sample is the same are expected to stay: they are put into a file of their own, with digests, so
that the save after this one can link it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from dcpring import _C
from dcpring.base.memory import is_lazy_view
from dcpring.format.ledger import (
    KEPT,
    MOST_MISSES,
    NO_IDENTITY,
    NO_SAMPLE,
    SAMPLED,
    UNKNOWN,
    Ledger,
    Place,
    key_of,
    new_seed,
    sample_at,
)
from dcpring.format.metadata import TENSOR
from dcpring.move.save import Saving, Source
from dcpring.torchside.tensors import PLAIN_TYPES

LEAST_KEPT_BYTES = 1 << 20
"""Of tensors that are expected to stay: fewer do not get a file of their own."""


class Linkable(NamedTuple):
    """A file of the earlier checkpoint all of whose tensors are unchanged.

    Attributes:
        name: of the file.
        rows: in the ledger, by the position of the item that each is.
        size: bytes that it has at least.
    """

    name: str
    rows: Mapping[int, int]
    size: int


class Keeping:
    """One rank's save, seen against an earlier one.

    Args:
        source: the items.
        earlier: the rank's ledger in the earlier checkpoint, None where there is none.
        is_frozen: whether a tensor of that name is expected to stay, of which nothing is known yet.
        workers: threads that compare.

    Attributes:
        key: for digests.
        seed: that it is made of.
    """

    def __init__(self, source: Source, earlier: Ledger | None, is_frozen: Callable[[str], bool], workers: int) -> None:
        count = len(source.tensors) + len(source.objects)
        self.seed = new_seed() if earlier is None else earlier.seed
        self.key = key_of(self.seed)
        self._source = source
        self._earlier = earlier
        self._is_frozen = is_frozen
        self._workers = workers
        self._plan = source.plan()
        self._samples = [NO_SAMPLE] * count
        self._states, self._misses, self._waits = bytearray(count), bytearray(count), bytearray(count)
        self._rows: dict[int, int] = {}
        self._unchanged: set[int] = set()
        self._staying: set[int] = set()

    # ---- looking ----

    def compare(self) -> None:
        """Finds out which tensors are unchanged, and which of the others are expected to stay."""
        positions, tensors = self._plain()
        samples = _C.samples(_C.Tensors(tensors), self.key)
        self._rows = self._find_rows(positions)
        compared: list[tuple[int, Tensor]] = []
        for index, (position, tensor) in enumerate(zip(positions, tensors, strict=True)):
            self._states[position] = SAMPLED
            sample = self._samples[position] = sample_at(samples, index)
            if position not in self._rows:
                if self._is_frozen(self._source.name(position)):
                    self._staying.add(position)
            elif self._is_candidate(position, sample):
                compared.append((position, tensor))
        self._decide(compared)

    def _plain(self) -> tuple[list[int], list[Tensor]]:
        """The tensors that lie as they are in CPU memory."""
        chosen = [
            (position, value)
            for position, value in zip(self._source.tensors, self._source.resolve(self._source.tensors), strict=True)
            if type(value) in PLAIN_TYPES and not is_lazy_view(value) and self._source.as_planned(position, value)
        ]
        kinds = _C.Tensors([tensor for _, tensor in chosen]).kinds()
        plain = [pair for pair, kind in zip(chosen, kinds, strict=True) if kind == 0]
        return [position for position, _ in plain], [tensor for _, tensor in plain]

    def _find_rows(self, positions: Sequence[int]) -> dict[int, int]:
        """The rows of the earlier ledger that these items have, as far as something is known of them."""
        earlier = self._earlier
        if earlier is None:
            return {}
        if self._plan and self._plan == earlier.plan and len(earlier) == len(self._states):
            return {position: position for position in positions if earlier.states[position] != UNKNOWN}
        rows = {earlier.identity(row): row for row in range(len(earlier)) if earlier.states[row] != UNKNOWN}
        found = ((position, rows.get(self._source.identity(position))) for position in positions)
        return {position: row for position, row in found if row is not None}

    def _is_candidate(self, position: int, sample: bytes) -> bool:
        """Whether digests are to decide. What has only a sample is expected to stay if that is the same."""
        earlier, row = self._earlier, self._rows[position]
        assert earlier is not None
        self._misses[position], self._waits[position] = earlier.misses[row], earlier.waits[row]
        is_same = sample == earlier.sample(row)
        if earlier.states[row] == KEPT:
            if not is_same:
                self._miss(position)
            return is_same
        if is_same and self._waits[position]:
            self._waits[position] -= 1
        elif is_same:
            self._staying.add(position)
        return False

    def _miss(self, position: int) -> None:
        """It was expected to stay, and has not: the more often, the longer it is not expected to again."""
        misses = self._misses[position] = min(self._misses[position] + 1, MOST_MISSES)
        self._waits[position] = (1 << misses) - 1

    def _decide(self, compared: Sequence[tuple[int, Tensor]]) -> None:
        earlier = self._earlier
        if not compared or earlier is None:
            return
        rows = [self._rows[position] for position, _ in compared]
        places = [earlier.place(row) for row in rows]
        fit = [
            index
            for index, (place, (_, tensor)) in enumerate(zip(places, compared, strict=True))
            if place[1] == TENSOR and place[5] == tensor.nbytes
        ]
        changed = _C.find_changed(
            _C.Tensors([compared[index][1] for index in fit]),
            [places[index][4] for index in fit],
            [earlier.digests[rows[index]] for index in fit],
            self.key,
            self._workers,
        )
        same = {compared[index][0] for index, differs in zip(fit, changed, strict=True) if not differs}
        for position, _ in compared:
            if position in same:
                self._unchanged.add(position)
            else:
                self._miss(position)

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
        return [
            Linkable(name, {by_row[row]: row for row in rows}, sizes[name])
            for name, rows in by_file.items()
            if all(row in by_row for row in rows)
        ]

    def places(self, linkable: Linkable) -> dict[int, Place]:
        """Where the items of a file are, by position."""
        assert self._earlier is not None
        return {position: self._earlier.place(row) for position, row in linkable.rows.items()}

    def digests(self, linkable: Linkable) -> dict[int, bytes]:
        """The digests of a file's items, by position."""
        assert self._earlier is not None
        return {position: self._earlier.digests[row] for position, row in linkable.rows.items()}

    def split(self, written: Iterable[int], least_bytes: int) -> tuple[list[int], list[int]]:
        """Of the tensors that are to be written those that may change, and those that get files of their own."""
        positions = list(written)
        staying = [position for position in positions if position in self._staying or position in self._unchanged]
        if sum(map(self._source.planned_bytes, staying)) < least_bytes:
            return positions, []
        kept = set(staying)
        return [position for position in positions if position not in kept], staying

    # ---- what the next save is told ----

    def ledger(self, saving: Saving, is_durable: bool) -> bytes:
        """Encoded, when all is stored."""
        for position in saving.digests:
            self._states[position] = KEPT
        return Ledger(
            self.seed,
            self._plan,
            is_durable,
            self._identities(),
            b"".join(self._samples),
            self._states,
            self._misses,
            self._waits,
            saving.storage,
            saving.digests,
        ).encode()

    def _identities(self) -> bytes:
        earlier = self._earlier
        if earlier is not None and self._plan and self._plan == earlier.plan and len(earlier) == len(self._states):
            return earlier.identities
        tensors = set(self._source.tensors)
        return b"".join(
            self._source.identity(position) if position in tensors else NO_IDENTITY
            for position in range(len(self._states))
        )
