"""Reading and writing ``.metadata``: the stock pickle, checked, with a trailer behind it. Only the pickle needs torch.

Behind the pickle's STOP, where every unpickler stops reading, come the ranks' ledgers (``format.ledger``), the index
(what the pickle says in compact form, for fast reading), neither of which is always there, and the trailer: a JSON
object, its length and a CRC-32 of all before (two little-endian uint32), and eight bytes of magic. Files without one
were written by stock DCP.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpring import _C
from dcpring.base import strict_json
from dcpring.base.collector import as_old, collection_paused
from dcpring.base.files import read_regular
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from dcpring.format.unpickler import Trust
    from dcpring.torchside.dcp import StorageInfo

METADATA_NAME = ".metadata"
_MAGIC = b"dcpring\x01"
_FOOTER = struct.Struct("<II8s")
MAX_WORLD_SIZE = 1 << 20

MOST_DIMENSIONS = 64
"""Of a tensor: torch's own limit, and the core's."""

TENSOR, BYTES, OPAQUE = 0, 1, 2
"""Kinds of stored record: a plain tensor whose payload can be read in parts, bytes to be read whole, or something that
the metadata does not describe (it has no ``ring`` then)."""


class Placed(NamedTuple):
    """Where a record is stored.

    Attributes:
        file: its name in the checkpoint's directory.
        kind: one of those above.
        offset, length: of the record in the file, in bytes.
        payload_offset, payload_bytes: of what the record is for; they say nothing where the kind is OPAQUE.
        crcs: a little-endian CRC-32 for every 1 MiB grid block of the file that the payload touches.
        descriptors: DCP's, of the transforms that it has gone through.
    """

    file: str
    kind: int
    offset: int
    length: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes | None
    descriptors: list[str] | None = None


def place_at(storage: _C.StorageIndex, index: int) -> tuple[Any, ...]:
    """An entry of a storage index, as ``Placed`` takes it."""
    place = storage.get(index)
    if place is None:
        raise CheckpointError("a rank reported an item as not stored")
    return place


def block_count(offset: int, size: int) -> int:
    """How many CRC blocks these bytes of a file touch."""
    return 0 if size == 0 else (offset + size - 1) // _C.CRC_BLOCK_BYTES - offset // _C.CRC_BLOCK_BYTES + 1


RING_VERSION = 1


def storage_info(placed: Placed) -> StorageInfo:
    """As DCP has it, with a plain tuple ``ring`` of what else is known, which stock ignores."""
    from dcpring.torchside.dcp import StorageInfo

    info = StorageInfo(placed.file, placed.offset, placed.length)
    if placed.descriptors:
        info.transform_descriptors = placed.descriptors
    if placed.kind != OPAQUE:
        info.__dict__["ring"] = (
            *(RING_VERSION, placed.kind, placed.payload_offset, placed.payload_bytes),
            placed.crcs or None,
        )
    return info


def placed_of(info: Any, key: str, path: str) -> Placed:
    """What metadata say of where a record is stored: the reverse of ``storage_info``, checked but for its end.

    Raises:
        CorruptCheckpointError: it can't be; with the metadata's path.
    """
    fields = getattr(info, "__dict__", {})
    known: list[Any] = [fields.get(name) for name in ("relative_path", "offset", "length", "ring")]
    name, offset, length, ring = known
    try:
        version, kind, begin, size, crcs = (RING_VERSION, OPAQUE, offset, 0, None) if ring is None else ring
        good = (
            type(name) is str
            and type(offset) is type(length) is type(begin) is type(size) is int
            and version == RING_VERSION
            and (kind in (TENSOR, BYTES) or ring is None)
            and 0 <= offset <= begin
            and min(length, size) >= 0
            and begin + size <= offset + length
            and (crcs is None or type(crcs) is bytes)
        )
    except (TypeError, ValueError):
        good = False
    if not good:
        raise CorruptCheckpointError(f"the metadata of {key!r} contradicts itself", path)
    return Placed(name, kind, offset, length, begin, size, crcs, fields.get("transform_descriptors"))


@dataclass
class Trailer:
    """What dcpring notes behind the pickle.

    Attributes:
        files: the data files that this metadata refers to.
        save_id: DCP's id of the save.
        group_id: with ``use_collectives=False``, what all ranks call this save, "" when they could not agree.
        world_size: with ``use_collectives=False``, the number of ranks that saved; else 0.
        superseded_id: with ``use_collectives=False``, the ``metadata_id`` of the global metadata found then, or "".
        version: of DCP's format, as in the pickle.
        index_bytes: of the index between pickle and trailer.
        ledger_bytes: of each rank's ledger between pickle and index.
    """

    files: list[str] = field(default_factory=list)
    save_id: str = ""
    group_id: str = ""
    world_size: int = 0
    superseded_id: str = ""
    version: str = ""
    index_bytes: int = 0
    ledger_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        strings = [self.save_id, self.group_id, self.superseded_id, self.version, *self.files]
        if not isinstance(self.files, list) or not all(isinstance(text, str) for text in strings):
            raise TypeError("a field of the trailer has the wrong type")
        if not isinstance(self.world_size, int) or not 0 <= self.world_size < MAX_WORLD_SIZE:
            raise ValueError(f"a world size of {self.world_size}")
        if not isinstance(self.index_bytes, int) or self.index_bytes < 0:
            raise ValueError(f"an index of {self.index_bytes} bytes")
        if not isinstance(self.ledger_bytes, list) or not all(type(n) is int and n >= 0 for n in self.ledger_bytes):
            raise ValueError("ledgers of no length")


def pickle_metadata(metadata: Metadata) -> bytes:
    from dcpring.torchside import dcp

    with collection_paused():
        return dcp.pickled(metadata)


def join_metadata(pickled: bytes, trailer: Trailer, index: bytes = b"", ledgers: Sequence[bytes] = ()) -> bytes:
    """A metadata file's bytes: the pickle, the ledgers, the index (see docs/format.md), and the trailer."""
    trailer.index_bytes = len(index)
    trailer.ledger_bytes = list(map(len, ledgers))
    fields = dict(vars(trailer))
    if not ledgers:
        del fields["ledger_bytes"]
    note = json.dumps(fields, separators=(",", ":")).encode()
    body = (pickled, *ledgers, index, note)
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return b"".join((*body, _FOOTER.pack(len(note), crc, _MAGIC)))


class Parts(NamedTuple):
    """A metadata file, taken apart. Stock's files have only the pickle."""

    pickled: memoryview
    tables: memoryview
    trailer: Trailer | None
    ledgers: Sequence[memoryview] = ()


def split_metadata(data: bytes, path: Path) -> Parts:
    """Takes a metadata file's bytes apart; the trailer's CRC is checked."""
    view = memoryview(data)
    if len(data) < _FOOTER.size or not data.endswith(_MAGIC):
        return Parts(view, view[:0], None)
    note_bytes, crc, _ = _FOOTER.unpack(view[-_FOOTER.size :])
    body = view[: -_FOOTER.size]
    if note_bytes > len(body) or zlib.crc32(body) != crc:
        raise CorruptCheckpointError("the checkpoint's metadata is damaged (its CRC-32 does not match)", str(path))
    end = len(body) - note_bytes
    try:
        note = strict_json.loads(bytes(body[end:]))
        trailer = Trailer(**{name: note[name] for name in Trailer.__dataclass_fields__ if name in note})
        if trailer.index_bytes + sum(trailer.ledger_bytes) > end:
            raise ValueError("an index longer than the file")
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"the checkpoint's metadata is damaged ({error})", str(path)) from error
    start = at = end - trailer.index_bytes
    ledgers: list[memoryview] = []
    for size in reversed(trailer.ledger_bytes):
        ledgers.insert(0, body[at - size : at])
        at -= size
    return Parts(body[:at], body[start:end], trailer, ledgers)


_TABLE_MAGIC, _PLACES_MAGIC = b"DRT\x01", b"DRP\x01"


def has_known_tables(parts: Parts) -> bool:
    """Whether a metadata file has tables of this version; the pickle says the same as any."""
    size = int.from_bytes(parts.tables[:8], "little")
    magics = bytes(parts.tables[8:12]), bytes(parts.tables[8 + size : 12 + size])
    return parts.trailer is not None and magics == (_TABLE_MAGIC, _PLACES_MAGIC)


def decode_index(index: bytes | memoryview) -> tuple[_C.Table, _C.StorageIndex]:
    """The tables in what stands between pickle and trailer. Raises ValueError where they are damaged."""
    size = int.from_bytes(index[:8], "little")
    return _C.decode_table(index[8 : 8 + size]), _C.decode_storage_index(index[8 + size :])


def decode_tables(parts: Parts, path: Path) -> tuple[_C.Table, _C.StorageIndex]:
    """A metadata file's tables: the chunks, and where each is stored.

    Raises:
        CorruptCheckpointError: they are damaged.
    """
    try:
        table, storage = decode_index(parts.tables)
        if len(table) != len(storage):
            raise ValueError("its tables do not fit")
    except ValueError as error:
        raise CorruptCheckpointError(f"the checkpoint's metadata is damaged ({error})", str(path)) from error
    return table, storage


# ---- the pickle ----


class _TrustingUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint.metadata import TensorProperties

        from dcpring.torchside.dcp import StoredProperties

        found = super().find_class(module, name)
        return StoredProperties if found is TensorProperties else found


def unpickle_safely(data: memoryview, path: Path, safe_globals: Iterable[Any]) -> Any:
    """Whatever was pickled, if it is data."""
    from dcpring.format.unpickler import RefusedError, Safe, unpickle

    try:
        return unpickle(data, Safe(safe_globals))
    except RefusedError as error:
        raise UntrustedCheckpointError(
            f"{path} holds more than a checkpoint's metadata has need of, and loading it could run code: {error}",
            f"pass RingReader(..., trusted=True), or safe_globals=[{error.name}]",
        ) from None


def unpickle_metadata(
    pickled: memoryview, path: Path, *, trusted: Trust = False, safe_globals: Iterable[Any] = ()
) -> Metadata:
    """Reads a metadata file's pickle without running code from it.

    Args:
        path: the ``.metadata`` file, for errors.
        trusted: unpickle whatever is there; see ``Trust``.
        safe_globals: classes and functions that the pickle may name besides DCP's own.

    Raises:
        CorruptCheckpointError: it is damaged, truncated or no metadata.
        UntrustedCheckpointError: it names what is not allowed.
    """
    try:
        metadata = as_old(lambda: _unpickled(pickled, path, trusted, safe_globals))
    except (UntrustedCheckpointError, CorruptCheckpointError):
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"the checkpoint's metadata is damaged or incomplete ({type(error).__name__}: {error})", str(path)
        ) from error
    return metadata


def _unpickled(pickled: memoryview, path: Path, trusted: Trust, safe_globals: Iterable[Any]) -> Metadata:
    from torch.distributed.checkpoint.metadata import Metadata

    from dcpring.format.unpickler import RefusedError, Safe, unpickle, warn_of
    from dcpring.torchside import dcp

    if trusted == "warn":
        try:
            metadata = unpickle(pickled, Safe(safe_globals))
        except RefusedError as error:
            warn_of(error)
            trusted = True
    if trusted is True:
        metadata = _TrustingUnpickler(io.BytesIO(pickled)).load()
    elif trusted is False:
        metadata = unpickle_safely(pickled, path, safe_globals)
    if not isinstance(metadata, Metadata):
        raise CorruptCheckpointError(f"the file holds a {type(metadata).__name__}, not DCP metadata", str(path))
    dcp.restore_strides(metadata)
    return metadata


def load_metadata(
    path: Path, *, trusted: Trust = False, safe_globals: Iterable[Any] = ()
) -> tuple[Metadata, Trailer | None]:
    """A metadata file as ``unpickle_metadata`` reads it, and its trailer. OSError where it cannot be read."""
    parts = split_metadata(read_regular(path), path)
    return unpickle_metadata(parts.pickled, path, trusted=trusted, safe_globals=safe_globals), parts.trailer


def read_trailer(path: Path) -> Trailer | None:
    """The trailer alone; None for a stock file."""
    return split_metadata(read_regular(path), path).trailer


def metadata_id(path: Path) -> str:
    """Tells metadata files from each other; "" where there is none."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return ""
    return id_of(data)


def id_of(data: bytes) -> str:
    """The ``metadata_id`` of a file that holds these bytes."""
    return f"{zlib.crc32(data):08x}-{len(data)}"


def referenced_files(path: Path) -> set[str]:
    """The data files that a metadata file refers to."""
    trailer = read_trailer(path)
    if trailer is not None:
        return set(trailer.files)
    metadata, _ = load_metadata(path)
    return {info.relative_path for info in (metadata.storage_data or {}).values()}
