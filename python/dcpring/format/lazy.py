"""DCP's Metadata with its attributes made when they are looked at.

A checkpoint of a thousand ranks has millions of chunks. The coordinator keeps them as C tables, writes ``.metadata``
from these, and most programs never look at what ``dcp.save`` returns.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcpring import _C
from dcpring.base.collector import collection_paused
from dcpring.errors import CheckpointError
from dcpring.format.metadata import Parts, decode_index, decode_tables, load_metadata, metadata_id, unpickle_metadata
from dcpring.format.properties import decode_properties, pickled_fragment
from dcpring.format.unpickler import Trust
from dcpring.torchside.dcp import restore_strides

_LAZY = ("state_dict_metadata", "planner_data", "storage_data")


class Chunks:
    """The chunks of a checkpoint.

    Attributes:
        table: a row for each.
        mappings: whether the names' paths are kept (``planner_data``).
        storage: where each is stored, None before it is.
        items: by rank, the rows of the table that it writes, in order, as uint32.
    """

    def __init__(
        self, table: _C.Table, mappings: bool, storage: _C.StorageIndex | None = None, items: Sequence[bytes] = ()
    ) -> None:
        self.table = table
        self.mappings = mappings
        self.storage = storage
        self.items = items

    def pickled(self, storage_meta: StorageMeta | None, version: str | None) -> bytes:
        """``pickle.dumps`` of the Metadata, made in C."""
        properties = list(map(_pickled_properties, self.table.properties()))
        return self.table.pickle(
            self.storage, properties, pickled_fragment(storage_meta), pickled_fragment(version), self.mappings
        )

    def index(self) -> bytes:
        """What goes into the metadata file for fast reading: the table's length, the table, the storage index."""
        assert self.storage is not None
        table = self.table.encode()
        return b"".join((len(table).to_bytes(8, "little"), table, self.storage.encode()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _chunks_of, (self.index(), self.mappings)

    def load(self) -> Metadata:
        with collection_paused():
            metadata: Metadata = pickle.loads(self.pickled(None, None))  # our own bytes, made just now
            restore_strides(metadata)
        return metadata


@functools.lru_cache(64)
def _pickled_properties(encoded: bytes) -> bytes:
    return pickled_fragment(decode_properties(encoded))


def _chunks_of(tables: bytes, mappings: bool) -> Chunks:
    table, storage = decode_index(tables)
    return Chunks(table, mappings, storage)


class StoredChunks(Chunks):
    """The chunks of a checkpoint that is being read, from the tables in its metadata file.

    The pickle, which says the same, is only read when someone looks at the Metadata's attributes.
    """

    def __init__(self, parts: Parts, path: Path, trusted: Trust, safe_globals: Sequence[Any]) -> None:
        table, storage = decode_tables(parts, path)
        super().__init__(table, True, storage)
        self._load = functools.partial(
            unpickle_metadata, parts.pickled, path, trusted=trusted, safe_globals=safe_globals
        )

    def load(self) -> Metadata:
        return self._load()


def _load_committed(path: str, identity: str) -> Metadata:
    """Reads the metadata file of a checkpoint that this save has committed, which stands for it in other processes."""
    if metadata_id(Path(path)) != identity:
        raise CheckpointError(
            f"{path} cannot be seen from here, is not there any more, or another save has replaced it: what "
            "dcp.save returned can only be looked at where, and as long as, the checkpoint is there"
        )
    return load_metadata(Path(path), trusted=True)[0]


class _LazyAttribute:
    """An attribute of LazyMetadata, whose value is made at the first look."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, metadata: LazyMetadata | None, owner: type | None = None) -> Any:
        return self if metadata is None else metadata.value(self._name)

    def __set__(self, metadata: LazyMetadata, value: Any) -> None:
        metadata.put(self._name, value)


class LazyMetadata(Metadata):
    """A ``Metadata`` that is made from tables, or by a function, at the first look.

    Pickled it is a plain one, or, once its checkpoint has been committed, a reference to that: other ranks of the save
    get it without its millions of chunks.

    Args:
        state_dict_metadata, planner_data, storage_data: where neither ``source`` nor ``make`` is given.
        storage_meta, version: as in any metadata.
        source: the tables.
        make: makes the metadata.
    """

    state_dict_metadata: Any = _LazyAttribute()
    planner_data: Any = _LazyAttribute()
    storage_data: Any = _LazyAttribute()

    def __init__(
        self,
        state_dict_metadata: Any = None,
        planner_data: Any = None,
        storage_data: Any = None,
        storage_meta: StorageMeta | None = None,
        version: str | None = None,
        *,
        source: Chunks | None = None,
        make: Callable[[], Metadata] | None = None,
    ) -> None:
        self._source = source
        self._make = make if source is None else source.load
        self._values: dict[str, Any] = {}
        self._committed: tuple[str, str] | None = None
        if self._make is None:
            self._values = dict(zip(_LAZY, (state_dict_metadata, planner_data, storage_data), strict=True))
        self.storage_meta = storage_meta
        self.version = version

    @property
    def chunks(self) -> Chunks | None:
        """The tables, as long as nobody has looked at, or changed, what they stand for."""
        return None if self._values else self._source

    def anew(self) -> LazyMetadata:
        """The same, which nobody has looked at or changed."""
        return LazyMetadata(source=self._source, make=self._make, storage_meta=self.storage_meta, version=self.version)

    def note_committed(self, path: Path, identity: str) -> None:
        """From now on the file stands for this object when it is pickled."""
        self._committed = str(path.absolute()), identity

    def value(self, name: str) -> Any:
        """The value of an attribute."""
        if name not in self._values:
            assert self._make is not None
            loaded = self._make()
            self._values = {key: getattr(loaded, key) for key in _LAZY} | self._values
        return self._values[name]

    def put(self, name: str, value: Any) -> None:
        """Changes an attribute."""
        self._values[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Metadata:
        values = (self.state_dict_metadata, self.planner_data, self.storage_data, self.storage_meta, self.version)
        return Metadata(*copy.deepcopy(values, memo))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        names = (*_LAZY, "storage_meta", "version")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._committed is not None:
            return _from_committed, (*self._committed, self.storage_meta, self.version)
        values = (self.state_dict_metadata, self.planner_data, self.storage_data)
        return Metadata, (*values, self.storage_meta, self.version)


def _from_committed(path: str, identity: str, storage_meta: StorageMeta | None, version: str | None) -> LazyMetadata:
    make = functools.partial(_load_committed, path, identity)
    return LazyMetadata(make=make, storage_meta=storage_meta, version=version)
