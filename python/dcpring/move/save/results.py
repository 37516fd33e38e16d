"""What ranks report of a save, and what the coordinator makes of all reports: where everything in the checkpoint is.

Reports are pickled on their way to the coordinator. The storage index that they are made of belongs to the save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcpring import _C
from dcpring.errors import CheckpointError
from dcpring.format.lazy import LazyMetadata
from dcpring.format.metadata import Placed, pickle_metadata, place_at, storage_info
from dcpring.options import IOStats


class Results(Sequence[WriteResult]):
    """What a rank reports: DCP's WriteResults, and what the coordinator wants to know of the rank besides.

    Args:
        packed: the encoded storage index of a compact plan's items, in order; None where there are WriteResults.
        made: the WriteResults, or the items that they can be made of when somebody looks.
        stats: of the rank's ``write_data``.
        ledger: what a later save of the rank wants to know, encoded; empty if there is to be none.
    """

    def __init__(self, packed: bytes | None, made: Any, stats: IOStats, ledger: bytes = b"") -> None:
        self.packed = packed
        self.stats = stats
        self.ledger = ledger
        self._made = made

    def of(self, items: Any) -> list[WriteResult]:
        """The WriteResults; of a compact plan, given its items."""
        return self._made if self.packed is None else list(results_of(items, _C.decode_storage_index(self.packed), {}))

    def __len__(self) -> int:
        return len(self._made) if self.packed is None else len(_C.decode_storage_index(self.packed))

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            raise CheckpointError(
                "a rank sent its write results in compact form: only dcpring.RingWriter can take them"
            )
        return self.of(self._made)[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.packed, self._made if self.packed is None else None, self.stats, self.ledger)


def results_of(
    items: Iterable[WriteItem], storage: _C.StorageIndex, descriptors: Mapping[int, list[str]]
) -> Iterator[WriteResult]:
    for position, item in enumerate(items):
        placed = Placed(*place_at(storage, position))._replace(descriptors=descriptors.get(position))
        yield WriteResult(index=item.index, size_in_bytes=placed.length, storage_data=storage_info(placed))


def results_by_rank(results: Sequence[Any], plans: Sequence[SavePlan]) -> list[list[WriteResult]]:
    """The WriteResults of all ranks: of those with compact plans by the items in these."""
    return [
        part.of(plans[rank].items if part.packed is not None else None) if isinstance(part, Results) else part
        for rank, part in enumerate(results)
    ]


def note_places(
    metadata: Metadata, results: Sequence[Any], plans: Sequence[SavePlan]
) -> tuple[dict[str, int], bytes, bytes]:
    """Notes in the metadata where everything is.

    Returns:
        The size of each data file, the metadata's pickle, and its tables, which are empty where plans were not compact.
    """
    chunks = metadata.chunks if isinstance(metadata, LazyMetadata) else None
    if chunks is not None and all(isinstance(part, Results) and part.packed is not None for part in results):
        chunks.storage = storage = _C.StorageIndex(len(chunks.table))
        for rank, part in enumerate(results):
            storage.merge(_C.decode_storage_index(part.packed), chunks.items[rank])
        return storage.file_sizes(), chunks.pickled(metadata.storage_meta, metadata.version), chunks.index()
    made = results_by_rank(results, plans)
    metadata.storage_data = {result.index: result.storage_data for part in made for result in part}
    sizes: dict[str, int] = {}
    for info in metadata.storage_data.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes, pickle_metadata(metadata), b""
