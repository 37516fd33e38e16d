"""A checkpoint looked at from outside, without a state dict: what is in it, where it lies, and any part of it.

It is one of DCP's, or safetensors. Whoever wrote it, its entries look the same here. Nothing in it is believed:
metadata goes through restricted unpicklers, and parts are read as a load reads, with all its checks. All that looks at
checkpoints stands on this: it opens those of DCP without torch, which is imported when a tensor is to be read.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpring import _C
from dcpring.base.collector import as_old
from dcpring.base.files import names_in, read_regular
from dcpring.base.windows import windows
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.archive import is_plainly_data, pickle_of
from dcpring.format.metadata import (
    BYTES,
    METADATA_NAME,
    Parts,
    Placed,
    Trailer,
    decode_tables,
    has_known_tables,
    placed_of,
    split_metadata,
)
from dcpring.format.outline import DTYPE_BYTES, DtypeName, outline, plain_value
from dcpring.format.zip import wrong_archive
from dcpring.move.crc import RunningCrcs
from dcpring.move.load.inputs import Inputs
from dcpring.options import IOOptions, IOStats
from dcpring.plan.rows import BYTES_ROW, row_of
from dcpring.store import layout

if TYPE_CHECKING:
    from torch import Tensor

    from dcpring.format.model_files import Model

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
        dtype: of the tensor, as torch calls it ("float32"); None for an object.
        records: its chunks, or the object.
        layout: of the tensor; what is not "strided" can only be read as an object.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    records: Sequence[Record]
    layout: str = "strided"

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 of an object."""
        return 0 if self.dtype is None else DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements; of an object those of its record."""
        if self.shape is None:
            return sum(record.place.length for record in self.records)
        return math.prod(self.shape) * self.itemsize


@functools.lru_cache(1 << 16)
def rank_of_file(name: str) -> int | None:
    """The rank that wrote a data file of any format, by its name; None for other names."""
    rank = layout.rank_of_file(name)
    if rank is None and name.endswith(".safetensors"):
        from dcpring.format.model_files import rank_of_shard

        return rank_of_shard(name)
    return rank


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

    # ---- reading ----

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
        from dcpring.sources import parts

        entry = self.entries[key]
        shape = entry.shape or ()
        start = tuple(offsets or (0,) * len(shape))
        size = tuple(s - o for s, o in zip(shape, start, strict=True)) if lengths is None else tuple(lengths)
        tensor = parts.empty(key, size, parts.dtype_of(entry.dtype))
        self.read_into([(key, start, tensor)])
        return tensor

    def read_into(self, wanted: Sequence[tuple[str, Sequence[int], Tensor]]) -> None:
        """Reads parts of any number of tensors at once.

        Args:
            wanted: for each the key, where the part begins (in elements), and a CPU tensor of the part's shape and of
                the stored dtype, which is filled.

        Raises: as ``read``.
        """
        from dcpring.sources.parts import read_into

        read_into(self, wanted)

    def read_object(self, key: str) -> io.BytesIO:
        """An object as it was pickled: checked to be plain data, unless the checkpoint is trusted."""
        return self.read_objects([key])[0]

    def read_objects(self, keys: Sequence[str]) -> list[io.BytesIO]:
        """As ``read_object``, but one read for all."""
        from dcpring.sources.parts import read_objects

        return read_objects(self, keys)

    def refused(self, keys: Iterable[str] | None = None) -> dict[str, str]:
        """The objects that a load by default would refuse, with what they hold: they need ``safe_globals``.

        Damaged ones are passed over, and those of more than 64 MiB.

        Args:
            keys: the only ones to look at; None for all.
        """
        chosen = self.entries if keys is None else keys
        small = [key for key in chosen if self._is_small_object(self.entries[key])]
        suspects = []
        for batch in windows(small, lambda key: self.entries[key].nbytes, _OBJECT_BATCH_BYTES):
            archives = self._archives(batch)
            suspects += [key for key, data in zip(batch, archives, strict=True) if not is_plainly_data(data)]
        return self._refused(suspects) if suspects else {}

    def plain_value(self, key: str) -> Any:
        """An object that names nothing, as a text does; whatever the checkpoint is trusted with.

        Raises:
            CorruptCheckpointError: it is another, or damaged.
        """
        place = self.entries[key].records[0].place
        (data,) = self._archives([key])
        try:
            wrong = wrong_archive(io.BytesIO(data))
            pickled = None if wrong else pickle_of(memoryview(data))
            if pickled is None:
                raise ValueError(wrong or "its archive has no pickle")
            return plain_value(pickled)
        except ValueError as error:
            file = str(self.directory / place.file)
            raise CorruptCheckpointError(f"{key!r} cannot be read: {error}", file, place.offset) from error

    def _refused(self, keys: list[str]) -> dict[str, str]:
        """Of objects that name something, as a load looks at them."""
        from dcpring.format.unpickler import Safe
        from dcpring.move.objects import refusal

        raw = replace(self, trusted=True, options=IOOptions(checksum=False), stats=IOStats())
        safe, found = Safe(), {}
        for key in keys:
            try:
                name = refusal(raw.read_object(key).getvalue(), safe)
            except (CheckpointError, OSError):
                continue
            if name:
                found[key] = name
        return found

    def _is_small_object(self, entry: Entry) -> bool:
        """Whether it is read whole and unpickled: objects, and tensors that only torch.save understands."""
        records = entry.records
        pickled = entry.shape is None or (len(records) == 1 and records[0].place.kind == BYTES)
        return len(records) == 1 and pickled and records[0].place.length <= _LARGEST_OBJECT_BYTES

    def _archives(self, keys: Sequence[str]) -> list[bytes]:
        """Records as they lie in their files, one by one where one of them cannot be read: b"" of that."""
        places = [self.entries[key].records[0].place for key in keys]
        try:
            numbers = self.inputs.numbers
            ranges = [(numbers[place.file], place.offset, place.length, None) for place in places]
            return list(_C.load_bytes(self.inputs.core, ranges, IOOptions().for_core(False))[0])
        except (CheckpointError, OSError, ValueError, OverflowError):
            return [b""] if len(keys) == 1 else [data for key in keys for data in self._archives([key])]


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
    if rank is None and not _has_metadata(directory):
        from dcpring.format.model_files import is_model, read_model
        from dcpring.store.headers import chunks_of

        if is_model(directory):
            model = read_model(directory)
            chunks = chunks_of(model)
            assert chunks.storage is not None
            entries = as_old(functools.partial(_entries_of_tables, chunks.table, chunks.storage))
            return Contents(model.files.directory, model.path, None, "", entries, options or IOOptions(), model=model)
    path = directory / (METADATA_NAME if rank is None else layout.rank_metadata_name(rank))
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(layout.what_there_is(directory, path)) from error
    parts = split_metadata(data, path)
    entries, version = as_old(lambda: _entries_of(parts, path, trusted))
    return Contents(directory, path, parts.trailer, version, entries, options or IOOptions(), trusted)


def _has_metadata(directory: Path) -> bool:
    return directory.is_dir() and any(name.endswith(METADATA_NAME) for name in names_in(directory))


def _entries_of(parts: Parts, path: Path, trusted: bool) -> tuple[dict[str, Entry], str]:
    """The entries, and the version of DCP's format."""
    if parts.trailer is not None and has_known_tables(parts):
        return _entries_of_tables(*decode_tables(parts, path)), parts.trailer.version
    return entries_of_pickle(parts, path, trusted)


def open_all(checkpoint: str | Path, *, rank: int | None = None, trusted: bool = False) -> list[Contents]:
    """The whole checkpoint; one saved with ``use_collectives=False`` has one Contents for each, or that of ``rank``."""
    directory = Path(checkpoint)
    ranks = layout.rank_metadata_files(directory) if rank is None and directory.is_dir() else {}
    if rank is not None or not ranks or (directory / METADATA_NAME).exists():
        return [open_contents(directory, rank=rank, trusted=trusted)]
    return [open_contents(directory, rank=each, trusted=trusted) for each in sorted(ranks)]


def _entries_of_tables(table: _C.Table, storage: _C.StorageIndex) -> dict[str, Entry]:
    properties = list(map(_named, table.properties()))
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
            dtype, layout_name = properties[row.properties]
            entries[key] = Entry(key, row.size, dtype, [record], layout_name)
    return entries


def _named(properties: bytes) -> tuple[str, str]:
    """The dtype and the layout in a table's properties."""
    dtype, layout_name, _ = (part.decode("ascii", "replace") for part in properties.split(b"\0", 2))
    if not dtype.startswith("torch.") or dtype[6:] not in DTYPE_BYTES:
        raise CheckpointError(f"the metadata has a tensor of {dtype!r:.100}, which this dcpring does not know")
    return dtype[6:], layout_name.removeprefix("torch.")


def entries_of_pickle(parts: Parts, path: Path, trusted: bool) -> tuple[dict[str, Entry], str]:
    """The entries that a metadata file's pickle has, and the version of DCP's format.

    Raises:
        CorruptCheckpointError, UntrustedCheckpointError: as for ``RingReader``.
    """
    metadata: Any = outline(parts.pickled)
    if metadata is None:
        from dcpring.format.metadata import unpickle_metadata

        metadata = unpickle_metadata(parts.pickled, path, trusted=trusted)
    try:
        return _entries_of_objects(metadata, path), str(getattr(metadata, "version", None) or "")
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the checkpoint's metadata contradicts itself ({error})", str(path)) from error


def _entries_of_objects(metadata: Any, path: Path) -> dict[str, Entry]:
    storage = getattr(metadata, "storage_data", None) or {}
    stored = {(index.fqn, index.offset): info for index, info in storage.items()}

    def place(key: str, offsets: tuple[int, ...] | None) -> Placed:
        return placed_of(stored.get((key, offsets), stored.get((key, None))), key, str(path))

    entries: dict[str, Entry] = {}
    for key, value in metadata.state_dict_metadata.items():
        if type(key) is not str:
            raise ValueError(f"a key is {key!r:.200}, which is no str")
        if type(value).__name__ == "TensorStorageMetadata":
            shape, dtype = tuple(value.size), _dtype_name(key, value.properties.dtype)
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks]
            _check_tensor(key, shape, DTYPE_BYTES[dtype], boxes)
            records = [Record(*box, place(key, box[0])) for box in boxes]
            entries[key] = Entry(key, shape, dtype, records, str(value.properties.layout).removeprefix("torch."))
        else:
            entries[key] = Entry(key, None, None, [Record((), (), place(key, None))])
    return entries


def _dtype_name(key: str, dtype: Any) -> str:
    """By ``outline``, or torch's own."""
    name = str(dtype).removeprefix("torch.")
    is_dtype = type(dtype) is DtypeName or (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype")
    if not is_dtype or name not in DTYPE_BYTES:
        raise ValueError(f"{key!r:.200} has the dtype {dtype!r:.200}")
    return name


def _check_tensor(
    key: str, shape: tuple[Any, ...], itemsize: int, boxes: list[tuple[tuple[Any, ...], tuple[Any, ...]]]
) -> None:
    """Raises ValueError for what no tensor can be."""
    for numbers in (shape, *(part for box in boxes for part in box)):
        if not set(map(type, numbers)) <= _INT or min(numbers, default=0) < 0 or len(numbers) != len(shape):
            raise ValueError(f"{key!r:.200} has a size or an offset that is no number, or below 0, or one too many")
    # In this order: the product of very many or very long numbers takes for ever.
    is_long = len(shape) > _MOST_DIMENSIONS or max(shape, default=0) >= 1 << 63
    if is_long or math.prod(shape) * itemsize >= 1 << 63:
        raise ValueError(f"{key!r:.200} has a size that no tensor can have")
