"""A checkpoint looked at from outside, without a state dict: what is in it, where it lies, and any part of it.

It is one of DCP's, or safetensors. Whoever wrote it, its entries look the same here. Nothing in it is believed:
metadata goes through the restricted unpickler, and parts are read as a load reads, with all its checks.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpring import _C
from dcpring.base.collector import as_old
from dcpring.base.files import read_regular
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.lazy import Chunks, StoredChunks, has_known_tables
from dcpring.format.metadata import BYTES, METADATA_NAME, Parts, Placed, Trailer, placed_of, split_metadata
from dcpring.format.metadata import unpickle_metadata as unpickle
from dcpring.format.model_files import Model, is_model, rank_of_shard, read_model
from dcpring.format.properties import decode_properties
from dcpring.format.unpickler import Safe
from dcpring.move.crc import RunningCrcs
from dcpring.move.load import loader
from dcpring.move.load.task import Inputs, Origin, Rules, Task
from dcpring.move.load.wanted import Stored, Wanted, wanted_by_item
from dcpring.move.objects import refusal
from dcpring.options import IOOptions, IOStats
from dcpring.plan.pieces import overlap_of
from dcpring.plan.rows import row_of
from dcpring.plan.run import Load
from dcpring.plan.table import BYTES_ROW
from dcpring.store import layout
from dcpring.store.headers import chunks_of
from dcpring.torchside.tensors import narrowed

_INT = {int}

_MOST_DIMENSIONS = 1 << 10
"""Of what is listed; those of more than the core knows are."""

_LARGEST_OBJECT_BYTES = 64 << 20
_OBJECT_BATCH_BYTES = 32 << 20


class Record(NamedTuple):
    """One stored chunk of a tensor, or an object.

    Attributes:
        offsets: of the chunk in the tensor, in elements; () for an object.
        lengths: of the chunk, in elements; () for an object.
        place: where it is stored. ``kind`` is OPAQUE for what stock wrote, and then no payload is known.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    place: Placed


class Entry(NamedTuple):
    """A key of a checkpoint.

    Attributes:
        key: its name.
        shape: of the tensor, in elements; None for an object.
        dtype: of the tensor; None for an object.
        records: its chunks, or the object.
        layout: of the tensor; what is not ``torch.strided`` can only be read as an object.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    records: Sequence[Record]
    layout: torch.layout = torch.strided

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements; of an object those of its record."""
        if self.shape is None or self.dtype is None:
            return sum(record.place.length for record in self.records)
        return math.prod(self.shape) * self.dtype.itemsize


class Slice(NamedTuple):
    """A part of a tensor.

    Attributes:
        key: of the tensor.
        offsets: where the part begins, in elements; None: at the beginning.
        lengths: of the part, in elements; None: all that there is behind ``offsets``.
    """

    key: str
    offsets: Sequence[int] | None = None
    lengths: Sequence[int] | None = None


@functools.lru_cache(1 << 16)
def rank_of_file(name: str) -> int | None:
    """The rank that wrote a data file of any format, by its name; None for other names."""
    rank = layout.rank_of_file(name)
    return rank_of_shard(name) if rank is None else rank


@dataclass
class Contents(Mapping[str, Entry]):
    """The entries of a checkpoint, by key, in the order of its metadata.

    Attributes:
        directory: of the checkpoint.
        path: its metadata file.
        trailer: what dcpring noted there; None where stock wrote it.
        version: of DCP's format; "" where the file does not say.
        options: how parts are read.
        trusted: whether objects are unpickled whatever they hold.
        stats: what has been read so far.
        sums: of records of which parts have been read one after the other; so reads must not overlap in time.
        model: what files of safetensors hold; None for a checkpoint of DCP's. ``path`` is the file, the index, or the
            directory of shards then.
    """

    directory: Path
    path: Path
    trailer: Trailer | None
    version: str
    entries: dict[str, Entry]
    options: IOOptions = field(default_factory=IOOptions)
    trusted: bool = False
    stats: IOStats = field(default_factory=IOStats)
    sums: RunningCrcs = field(default_factory=RunningCrcs)
    model: Model | None = None

    def __getitem__(self, key: str) -> Entry:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def writer(self) -> str:
        """Who wrote the metadata: "dcpring" or "stock"; "safetensors" where there is none."""
        if self.model is not None:
            return "safetensors"
        return "stock" if self.trailer is None else "dcpring"

    @functools.cached_property
    def files(self) -> dict[str, int]:
        """The data files that records lie in, sorted, and the bytes that each must have at least."""
        sizes: dict[str, int] = {}
        for entry in self.entries.values():
            for record in entry.records:
                place = record.place
                sizes[place.file] = max(sizes.get(place.file, 0), place.offset + place.length)
        return dict(sorted(sizes.items()))

    @functools.cached_property
    def inputs(self) -> Inputs:
        """These files, which stay open from the first reading on."""
        return Inputs(str(self.directory), list(self.files), self.model.files.links if self.model else None)

    def read(self, key: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """A part of a tensor, in CPU memory.

        Args:
            key: of a tensor.
            offsets: where the part begins, in elements; None: at the beginning.
            lengths: of the part, in elements; None: all that there is behind ``offsets``.

        Raises:
            CorruptCheckpointError: bytes are damaged or missing, or no chunk has some of them.
            OSError: with errno and path.
        """
        (part,) = self.read_all([Slice(key, offsets, lengths)])
        return part

    def read_all(self, parts: Sequence[Slice]) -> list[Tensor]:
        """Parts of tensors, in CPU memory: as ``read``, but one read for all, which many small ones need."""
        places: list[tuple[str, tuple[int, ...], Tensor]] = []
        for key, offsets, lengths in parts:
            entry = self.entries[key]
            assert entry.shape is not None and entry.dtype is not None
            start = tuple(offsets or (0,) * len(entry.shape))
            size = tuple(s - o for s, o in zip(entry.shape, start, strict=True)) if lengths is None else tuple(lengths)
            places.append((key, start, _empty(key, size, entry.dtype)))
        self.read_into(places)
        return [tensor for _, _, tensor in places]

    def read_into(self, parts: Sequence[tuple[str, Sequence[int], Tensor]]) -> None:
        """Reads parts of any number of tensors at once.

        Args:
            parts: for each the key, where the part begins (in elements), and a CPU tensor of the part's shape and of
                the stored dtype, which is filled.

        Raises: as ``read``.
        """
        items: list[ReadItem] = []
        wanted: list[Wanted] = []
        for number, (key, start, part) in enumerate(parts):
            entry, size = self.entries[key], tuple(part.shape)
            overlaps = ((record, overlap_of(record.offsets, record.lengths, start, size)) for record in entry.records)
            # A chunk that is listed twice is read once.
            found = {overlap[1:]: (record, overlap) for record, overlap in overlaps if overlap}
            if not _C.tiles(size, list(found)):
                where = f"of shape {list(entry.shape or ())} at {list(start)}"
                raise CorruptCheckpointError(f"{key!r}: its chunks do not make up the tensor {where}", str(self.path))
            for record, overlap in found.values():
                stored: Stored = None if entry.dtype is None else (record.lengths, entry.dtype)
                items.append(_read_item(key, number, *overlap))
                wanted.append(wanted_by_item(items[-1], record.place, stored))
        self._load(_Into([part for _, _, part in parts]), items, wanted)

    def read_object(self, key: str) -> io.BytesIO:
        """An object as it was pickled: checked to be plain data, unless the checkpoint is trusted."""
        return self.read_objects([key])[0]

    def read_objects(self, keys: Sequence[str]) -> list[io.BytesIO]:
        """As ``read_object``, but one read for all."""
        into = _Into([])
        nothing = torch.Size(())
        indices = [MetadataIndex(key, index=number) for number, key in enumerate(keys)]
        items = [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing) for index in indices]
        places = [self.entries[key].records[0].place for key in keys]
        self._load(into, items, [wanted_by_item(item, place, None) for item, place in zip(items, places, strict=True)])
        return [into.objects[number] for number in range(len(keys))]

    def refused(self, keys: Iterable[str] | None = None) -> dict[str, str]:
        """The objects that a load by default would refuse, with what they hold: they need ``safe_globals``.

        Damaged ones are passed over, and those of more than 64 MiB.

        Args:
            keys: the only ones to look at; None for all.
        """
        chosen = self.entries if keys is None else keys
        small = [key for key in chosen if self._is_small_object(self.entries[key])]
        raw = replace(self, trusted=True, options=IOOptions(checksum=False), stats=IOStats())
        safe, found = Safe(), {}
        for batch in windows(small, lambda key: self.entries[key].nbytes, _OBJECT_BATCH_BYTES):
            for key, archive in raw._readable(batch):
                name = refusal(archive.getvalue(), safe)
                if name:
                    found[key] = name
        return found

    def _is_small_object(self, entry: Entry) -> bool:
        """Whether it is read whole and unpickled: objects, and tensors that only torch.save understands."""
        records = entry.records
        pickled = entry.shape is None or (len(records) == 1 and records[0].place.kind == BYTES)
        return len(records) == 1 and pickled and records[0].place.length <= _LARGEST_OBJECT_BYTES

    def _readable(self, keys: list[str]) -> Iterator[tuple[str, io.BytesIO]]:
        """The archives of objects, one by one where one of them cannot be read."""
        try:
            yield from zip(keys, self.read_objects(keys), strict=True)
        except (CheckpointError, OSError):
            if len(keys) > 1:
                for key in keys:
                    yield from self._readable([key])

    def _load(self, into: _Into, items: list[ReadItem], wanted: list[Wanted]) -> None:
        origin = Origin(str(self.directory), inputs=self.inputs, sums=self.sums)
        rules = Rules(self.options, self.trusted, transforms=FileSystemReader(self.directory).transforms)
        task = Task(into, items.__getitem__, origin, rules, self.stats, Load())
        loader.load(task, dict(enumerate(wanted)))


class _Into(LoadPlanner):
    """Loads into tensors, which items tell by their number, and keeps objects."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.objects: dict[int, io.BytesIO] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...
    def create_local_plan(self) -> Any: ...
    def create_global_plan(self, global_plan: Any) -> Any: ...
    def finish_plan(self, central_plan: Any) -> Any: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.index or 0] = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._tensors[read_item.dest_index.index or 0]
        return narrowed(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


def _empty(key: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(size, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{key!r}: no tensor of {list(size)} {dtype} can be made") from error


def _read_item(
    key: str,
    target: int,
    in_record: tuple[int, ...],
    in_part: tuple[int, ...],
    lengths: tuple[int, ...],
) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(key, index=target),
        torch.Size(in_part),
        MetadataIndex(key),
        torch.Size(in_record),
        torch.Size(lengths),
    )


# ---- opening ----


def open_contents(
    checkpoint: str | Path, *, rank: int | None = None, trusted: bool = False, options: IOOptions | None = None
) -> Contents:
    """Reads a checkpoint's metadata.

    Args:
        checkpoint: its directory; of safetensors also a file, or an index.
        rank: of a save with ``use_collectives=False``, the rank whose part is wanted.
        trusted: unpickle whatever is there.
        options: how parts will be read.

    Raises:
        CheckpointError: there is no checkpoint; the message says what there is.
        CorruptCheckpointError, UntrustedCheckpointError, OSError: as for ``RingReader``.
    """
    directory = Path(checkpoint)
    if rank is None and is_model(directory):
        return _contents_of_model(read_model(directory), options or IOOptions())
    path = directory / (METADATA_NAME if rank is None else layout.rank_metadata_name(rank))
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(layout.what_there_is(directory, path)) from error
    parts = split_metadata(data, path)
    entries, version = as_old(lambda: _entries_of(parts, path, trusted))
    return Contents(directory, path, parts.trailer, version, entries, options or IOOptions(), trusted)


def _contents_of_model(model: Model, options: IOOptions) -> Contents:
    entries = as_old(lambda: _entries_of_tables(chunks_of(model)))
    return Contents(model.files.directory, model.path, None, "", entries, options, model=model)


def _entries_of(parts: Parts, path: Path, trusted: bool) -> tuple[dict[str, Entry], str]:
    """The entries, and the version of DCP's format."""
    if parts.trailer is not None and has_known_tables(parts):
        return _entries_of_tables(StoredChunks(parts, path, trusted, ())), parts.trailer.version
    metadata = unpickle(parts.pickled, path, trusted=trusted)
    return checked_entries(metadata, path), str(getattr(metadata, "version", None) or "")


def open_all(checkpoint: str | Path, *, rank: int | None = None, trusted: bool = False) -> list[Contents]:
    """The whole checkpoint; one saved with ``use_collectives=False`` has one Contents for each, or that of ``rank``."""
    directory = Path(checkpoint)
    ranks = layout.rank_metadata_files(directory) if rank is None and directory.is_dir() else {}
    if rank is not None or not ranks or (directory / METADATA_NAME).exists():
        return [open_contents(directory, rank=rank, trusted=trusted)]
    return [open_contents(directory, rank=each, trusted=trusted) for each in sorted(ranks)]


def _entries_of_tables(chunks: Chunks) -> dict[str, Entry]:
    table, storage = chunks.table, chunks.storage
    assert storage is not None
    properties_of = [decode_properties(encoded) for encoded in table.properties()]
    entries: dict[str, Entry] = {}
    for index in range(len(table)):
        row = row_of(table, index)
        key, is_object = row.key, row.kind == BYTES_ROW
        place = storage.get(index)
        if place is None:
            raise CorruptCheckpointError(f"the metadata lists {key!r}, but not where it is stored")
        record = Record(() if is_object else row.offsets, () if is_object else row.lengths, Placed(*place))
        if key in entries:
            entries[key].records.append(record)  # type: ignore[attr-defined]
        elif is_object:
            entries[key] = Entry(key, None, None, [record])
        else:
            described = properties_of[row.properties]
            entries[key] = Entry(key, row.size, described.dtype, [record], described.layout)
    return entries


def checked_entries(metadata: Metadata, path: Path) -> dict[str, Entry]:
    try:
        return _entries_of_objects(metadata, path)
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the checkpoint's metadata contradicts itself ({error})", str(path)) from error


def _entries_of_objects(metadata: Metadata, path: Path) -> dict[str, Entry]:
    stored = {(index.fqn, index.offset): info for index, info in (metadata.storage_data or {}).items()}

    def place(key: str, offsets: torch.Size | None) -> Placed:
        return placed_of(stored.get((key, offsets), stored.get((key, None))), key, str(path))

    entries: dict[str, Entry] = {}
    for key, value in metadata.state_dict_metadata.items():
        if type(key) is not str:
            raise ValueError(f"a key is {key!r:.200}, which is no str")
        if isinstance(value, TensorStorageMetadata):
            shape, dtype = tuple(value.size), value.properties.dtype
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks]
            _check_tensor(key, shape, dtype, boxes)
            records = [Record(*box, place(key, torch.Size(box[0]))) for box in boxes]
            entries[key] = Entry(key, shape, dtype, records, value.properties.layout)
        else:
            entries[key] = Entry(key, None, None, [Record((), (), place(key, None))])
    return entries


def _check_tensor(
    key: str, shape: tuple[Any, ...], dtype: Any, boxes: list[tuple[tuple[Any, ...], tuple[Any, ...]]]
) -> None:
    """Raises ValueError for what no tensor can be."""
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key!r:.200} has the dtype {dtype!r:.200}")
    for numbers in (shape, *(part for box in boxes for part in box)):
        if not set(map(type, numbers)) <= _INT or min(numbers, default=0) < 0 or len(numbers) != len(shape):
            raise ValueError(f"{key!r:.200} has a size or an offset that is no number, or below 0, or one too many")
    # In this order: the product of very many or very long numbers takes for ever.
    is_long = len(shape) > _MOST_DIMENSIONS or max(shape, default=0) >= 1 << 63
    if is_long or math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{key!r:.200} has a size that no tensor can have")
