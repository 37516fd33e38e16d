"""What a rank reports of a save: DCP's WriteResults, or what they can be made of when somebody looks.

They are pickled on their way to the coordinator. The storage index that they are made of belongs to the save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.format.metadata import Placed, place_at, storage_info
from dcpring.options import IOStats
from dcpring.plan.items import Items


class ResultList(list[WriteResult]):
    """WriteResults with what the coordinator wants to know of the rank besides.

    Attributes:
        stats: of the rank's ``write_data``.
        ledger: what a later save of the rank wants to know, encoded; empty if there is to be none.
    """

    def __init__(self, results: Iterable[WriteResult], stats: IOStats, ledger: bytes = b"") -> None:
        super().__init__(results)
        self.stats = stats
        self.ledger = ledger

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultList, (list(self), self.stats, self.ledger)


class Results(Sequence[WriteResult]):
    """What a rank reports of a compact plan: DCP's WriteResults, made when they are looked at.

    Attributes:
        packed: the encoded storage index of its items, in order.
        stats, ledger: as of a ``ResultList``.
    """

    def __init__(self, packed: bytes, stats: IOStats, items: Items | None = None, ledger: bytes = b"") -> None:
        self.packed = packed
        self.stats = stats
        self.ledger = ledger
        self._items = items

    def of(self, items: Any) -> list[WriteResult]:
        """The results, given the items they are for."""
        return list(results_of(items, _C.decode_storage_index(self.packed), {}))

    def __len__(self) -> int:
        return len(_C.decode_storage_index(self.packed))

    def __getitem__(self, index: Any) -> Any:
        if self._items is None:
            raise CheckpointError(
                "a rank sent its write results in compact form: only dcpring.RingWriter can take them"
            )
        return self.of(self._items)[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return Results, (self.packed, self.stats, None, self.ledger)


def results_of(
    items: Iterable[WriteItem], storage: _C.StorageIndex, descriptors: Mapping[int, list[str]]
) -> Iterator[WriteResult]:
    for position, item in enumerate(items):
        placed = Placed(*place_at(storage, position))._replace(descriptors=descriptors.get(position))
        yield WriteResult(index=item.index, size_in_bytes=placed.length, storage_data=storage_info(placed))
