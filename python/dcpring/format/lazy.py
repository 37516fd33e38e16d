"""DCP's Metadata with its attributes made when they are looked at.

A checkpoint of a thousand ranks has millions of chunks. The coordinator keeps them as C tables, writes ``.metadata``
from these, and most programs never look at what ``dcp.save`` returns.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcpring import _C
from dcpring.base.collector import collection_paused
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.metadata import Parts, load_metadata, metadata_id, unpickle_metadata
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


def _decoded(tables: bytes | memoryview) -> tuple[_C.Table, _C.StorageIndex]:
    """Of what ``Chunks.index`` has made. Raises ValueError."""
    size = int.from_bytes(tables[:8], "little")
    return _C.decode_table(tables[8 : 8 + size]), _C.decode_storage_index(tables[8 + size :])


def _chunks_of(tables: bytes, mappings: bool) -> Chunks:
    table, storage = _decoded(tables)
    return Chunks(table, mappings, storage)


_TABLE_MAGIC, _PLACES_MAGIC = b"DRT\x01", b"DRP\x01"


def has_known_tables(parts: Parts) -> bool:
    """Whether a metadata file has tables of this version; the pickle says the same as any."""
    size = int.from_bytes(parts.tables[:8], "little")
    magics = bytes(parts.tables[8:12]), bytes(parts.tables[8 + size : 12 + size])
    return parts.trailer is not None and magics == (_TABLE_MAGIC, _PLACES_MAGIC)


class StoredChunks(Chunks):
    """The chunks of a checkpoint that is being read, from the tables in its metadata file.

    The pickle, which says the same, is only read when someone looks at the Metadata's attributes.
    """

    def __init__(self, parts: Parts, path: Path, trusted: Trust, safe_globals: Sequence[Any]) -> None:
        try:
            table, storage = _decoded(parts.tables)
        except ValueError as error:
            raise CorruptCheckpointError(f"the checkpoint's metadata is damaged ({error})", str(path)) from error
        if len(table) != len(storage):
            raise CorruptCheckpointError("the checkpoint's metadata is damaged (its tables do not fit)", str(path))
        super().__init__(table, True, storage)
        self._load = functools.partial(
            unpickle_metadata, parts.pickled, path, trusted=trusted, safe_globals=safe_globals
        )

    def load(self) -> Metadata:
        return self._load()


class _Committed:
    """The metadata file of a checkpoint that this save has committed; stands for it in other processes."""

    def __init__(self, path: str, identity: str) -> None:
        self.path = path
        self.identity = identity

    def load(self) -> Metadata:
        if metadata_id(Path(self.path)) != self.identity:
            raise CheckpointError(
                f"{self.path} cannot be seen from here, is not there any more, or another save has replaced it: what "
                "dcp.save returned can only be looked at where, and as long as, the checkpoint is there"
            )
        return load_metadata(Path(self.path), trusted=True)[0]


class _Origin(Protocol):
    def load(self) -> Metadata: ...


class LazyMetadata(Metadata):
    """A ``Metadata`` that is made from ``source`` at the first look.

    Pickled it is a plain one, or, once its checkpoint has been committed, a reference to that: other ranks of the save
    get it without its millions of chunks.
    """

    def __init__(
        self,
        state_dict_metadata: Any = None,
        planner_data: Any = None,
        storage_data: Any = None,
        storage_meta: StorageMeta | None = None,
        version: str | None = None,
        *,
        source: _Origin | None = None,
    ) -> None:
        self._source = source
        self._values: dict[str, Any] = {}
        self._committed: _Committed | None = None
        if source is None:
            self._values = dict(zip(_LAZY, (state_dict_metadata, planner_data, storage_data), strict=True))
        self.storage_meta = storage_meta
        self.version = version

    @property
    def chunks(self) -> Chunks | None:
        """The tables, as long as nobody has looked at, or changed, what they stand for."""
        return self._source if isinstance(self._source, Chunks) and not self._values else None

    def anew(self) -> LazyMetadata:
        """The same, which nobody has looked at or changed."""
        assert self._source is not None
        return LazyMetadata(source=self._source, storage_meta=self.storage_meta, version=self.version)

    def note_committed(self, path: Path, identity: str) -> None:
        """From now on the file stands for this object when it is pickled."""
        self._committed = _Committed(str(path.absolute()), identity)

    def _value(self, name: str) -> Any:
        if name not in self._values:
            assert self._source is not None
            loaded = self._source.load()
            self._values = {key: getattr(loaded, key) for key in _LAZY} | self._values
        return self._values[name]

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
            return _from_committed, (self._committed.path, self._committed.identity, self.storage_meta, self.version)
        values = (self.state_dict_metadata, self.planner_data, self.storage_data)
        return Metadata, (*values, self.storage_meta, self.version)


def _attribute(name: str) -> property:
    def get(self: LazyMetadata) -> Any:
        return self._value(name)

    def set_value(self: LazyMetadata, value: Any) -> None:
        self._values[name] = value

    return property(get, set_value)


for _name in _LAZY:
    setattr(LazyMetadata, _name, _attribute(_name))


def _from_committed(path: str, identity: str, storage_meta: StorageMeta | None, version: str | None) -> LazyMetadata:
    return LazyMetadata(source=_Committed(path, identity), storage_meta=storage_meta, version=version)
