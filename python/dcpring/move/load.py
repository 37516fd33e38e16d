"""One rank's read_data: what each item needs, in which order it is read, and what goes where.

1. Every item is looked up, and checked against its destination, before anything is read.
2. Objects, and records that only ``torch.load`` understands, are read whole; objects are checked to be plain data.
3. Plain tensors are read in parts, straight into the planner's tensors; through a host copy where the destination is
   on another device, has another dtype, or is no plain memory.
"""

from __future__ import annotations

import array
import contextlib
import io
import itertools
import logging
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpring import _C
from dcpring.base.memory import is_lazy_view
from dcpring.base.text import some_keys
from dcpring.base.windows import split_box, windows
from dcpring.errors import CheckpointError, CorruptCheckpointError, PlanError, UntrustedCheckpointError
from dcpring.format.lazy import Chunks
from dcpring.format.metadata import TENSOR, ring_info
from dcpring.format.properties import decode_properties
from dcpring.format.unpickler import RefusedError, Safe, Trust, warn_of
from dcpring.move.crc import RunningCrcs, box_start, buffer_at
from dcpring.move.device import Uploader, padded
from dcpring.move.handon import Exchange
from dcpring.move.objects import Loaded
from dcpring.move.objects import load as load_object
from dcpring.move.save import Placed, storage_info
from dcpring.names.policy import Casts
from dcpring.options import IOOptions, IOStats, make_watch
from dcpring.plan.load_planner import ReadItems, RingLoadPlanner, makes_tensors
from dcpring.plan.pieces import Piece, common_bytes, take
from dcpring.plan.placements import check_chunk
from dcpring.plan.table import BYTES_ROW
from dcpring.torchside.dcp import StorageInfo, attributes_of
from dcpring.torchside.tensors import narrowed
from dcpring.watch.phases import Phases
from dcpring.watch.progress import Meter

logger = logging.getLogger("dcpring")

_CORE_ERRORS = (OSError, ValueError, TypeError, OverflowError, MemoryError, CorruptCheckpointError)

_WINDOW_BYTES = 32 << 20
"""Host copies, whole records and a custom planner's tensors are handled this many bytes at a time."""


MOST_DIMENSIONS = 64
"""Of a tensor: torch's own limit, and the core's."""


class Inputs:
    """The data files of a directory, as the core reads them: opened when something of them is wanted, and kept open.

    Attributes:
        names: of the files.
        numbers: their places among the names.
        core: the files themselves.
    """

    def __init__(self, directory: str, names: Sequence[str]) -> None:
        self.names = list(names)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        try:
            self.core = _C.Input(directory, self.names)
        except ValueError as error:  # a null character, or what no file system has
            raise CorruptCheckpointError(f"the metadata names files that cannot be ({error})", directory) from error

    def close(self) -> None:
        self.core.close()


class _Source(NamedTuple):
    """A plain tensor in a file."""

    file: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes | None
    whole_crc: int | None
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Whole:
    """A record that is read as bytes."""

    file: int
    offset: int
    size: int
    crcs: bytes | None
    info: StorageInfo


class Catalog(Protocol):
    """What a checkpoint's metadata says of its items."""

    def info(self, index: MetadataIndex) -> StorageInfo | None:
        """Where an item is stored."""
        ...

    def stored_as(self, index: MetadataIndex) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Sizes and dtype of a stored chunk; None when the metadata does not tell."""
        ...


class ObjectCatalog:
    """DCP's Metadata."""

    def __init__(self, metadata: Metadata, storage_data: dict[MetadataIndex, StorageInfo]) -> None:
        self._metadata = metadata
        self._storage_data = storage_data

    def info(self, index: MetadataIndex) -> StorageInfo | None:
        return self._storage_data.get(index)

    def stored_as(self, index: MetadataIndex) -> tuple[tuple[int, ...], torch.dtype] | None:
        entry = self._metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        chunks = entry.chunks
        if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
            return chunks[index.index].sizes, entry.properties.dtype
        for chunk in chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return chunk.sizes, entry.properties.dtype
        return None


class TableCatalog:
    """The tables of a metadata file; ``rows`` has the items that will be asked for."""

    def __init__(self, rows: dict[MetadataIndex, int], chunks: Chunks) -> None:
        self._rows = rows
        self._chunks = chunks
        self._properties = chunks.table.properties()

    def info(self, index: MetadataIndex) -> StorageInfo | None:
        assert self._chunks.places is not None
        place = self._chunks.places.get(self._rows[index])
        return None if place is None else storage_info(Placed(*place))

    def stored_as(self, index: MetadataIndex) -> tuple[tuple[int, ...], torch.dtype] | None:
        _, kind, _, _, lengths, number, _ = self._chunks.table.row(self._rows[index])
        return None if kind == BYTES_ROW else (lengths, decode_properties(self._properties[number]).dtype)


@dataclass(slots=True)
class Straight:
    """A compact plan being read.

    Attributes:
        files: all that the places name, in their order.
        targets: where each wanted row goes; stand-ins for what is not plain memory.
        tensors: the same for the core.
        mask: 1 for each overlap that can be read straight into its target.
        positions: of the items that cannot, by id().
        exchange: hands on between ranks; None: this rank reads all for itself.
    """

    items: ReadItems
    places: _C.Places
    files: list[str]
    targets: list[Tensor]
    tensors: _C.Tensors
    mask: bytes
    positions: dict[int, int]
    exchange: Exchange | None


class LazyItems(Sequence[ReadItem]):
    """Some of a match's items, for an error to name one."""

    def __init__(self, items: ReadItems, chosen: list[int]) -> None:
        self._items = items
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        return self._items.make(self._chosen[index])


class Loader:
    """See the module's docstring. One is made for every read_data.

    With ``sums``, which several of them share, records are checked of which each reads a part. With ``inputs`` they
    share the open files, which are closed after the load otherwise.
    """

    def __init__(
        self,
        *,
        path: str,
        transforms: Any,
        options: IOOptions,
        trusted: Trust,
        safe_globals: Sequence[Any],
        stats: IOStats,
        rank: int | None,
        casts: Casts = "safe",
        meter: Meter | None = None,
        phases: Phases | None = None,
        sums: RunningCrcs | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self._path = path
        self._transforms = transforms
        self._meter = meter or Meter()
        self._phases = phases or Phases()
        self._watch = make_watch(self._meter.counter, self._phases.room)
        self._options = options.for_core(False, self._watch)
        self._checksum = options.checksum
        self._trusted = trusted
        self._safe = Safe(safe_globals)
        self._stats = stats
        self._rank = rank
        self._casts = casts
        self._sums = sums
        self._shared_inputs = inputs
        self._inputs: Inputs
        self._catalog: Catalog

    def load(
        self, items: list[ReadItem], catalog: Catalog, planner: LoadPlanner, straight: Straight | None = None
    ) -> None:
        """Loads the items, and what can be read ``straight``, once all that can be checked before has been."""
        self._catalog = catalog
        if straight is None and not makes_tensors(planner):
            _check_chunks(items, planner)
        infos = [self._info(item) for item in items]
        with self._opened(items, infos, straight):
            self._load(items, infos, planner, straight)
        self._stats.files = max(self._stats.files, len({info.relative_path for info in infos}))

    def _load(
        self, items: list[ReadItem], infos: list[StorageInfo], planner: LoadPlanner, straight: Straight | None
    ) -> None:
        objects, wholes, sources = self._classify(items, infos)
        self._check_wholes(wholes, planner)
        if makes_tensors(planner) or straight is not None:
            self._check_sources(sources)
        self._meter.begin(lambda: _wanted_bytes([*objects, *wholes], sources, straight))
        values = self._read_objects(objects)
        if straight is None:
            self._load_sources(sources, planner)
        else:
            self._load_steps(straight, sources, planner)
        for batch in windows(wholes, lambda pair: pair[1].size, _WINDOW_BYTES):
            self._load_wholes(batch, planner)
        for (item, _), value in zip(objects, values, strict=True):
            self._load_object(item, value, planner)

    def _load_sources(self, sources: list[tuple[ReadItem, _Source]], planner: LoadPlanner) -> None:
        for chunk in windows(sources, _item_bytes, _WINDOW_BYTES if makes_tensors(planner) else None):
            self._load_tensors(chunk, planner)

    # ---- compact plans ----

    def load_matched(
        self,
        items: ReadItems,
        chunks: Chunks,
        planner: RingLoadPlanner,
        exchange: Exchange | None = None,
    ) -> None:
        """Loads a compact plan: what can be read straight into its tensor never becomes an object of Python."""
        places = chunks.places
        assert places is not None
        targets = [
            _NOT_PLAIN if tensor is None or is_lazy_view(tensor) else tensor for tensor in planner.targets(items.wanted)
        ]
        tensors = _C.Tensors(targets)
        mask = _C.straight(items.match, places, tensors)
        rest = {position: items.make(position) for position, good in enumerate(mask) if not good}
        rows = array.array("I", items.match.stored_rows())
        catalog = TableCatalog({item.storage_index: rows[position] for position, item in rest.items()}, chunks)
        self._stats.files = len(items.match.file_bytes(places))
        straight = Straight(
            items,
            places,
            list(places.file_sizes()),
            targets,
            tensors,
            mask,
            {id(item): at for at, item in rest.items()},
            exchange,
        )
        self.load(list(rest.values()), catalog, planner, straight)

    def _load_steps(self, straight: Straight, sources: list[tuple[ReadItem, _Source]], planner: LoadPlanner) -> None:
        if straight.exchange is None:
            self._read_straight(straight, straight.mask)
            self._load_sources(sources, planner)
            return
        where = {straight.positions[id(item)]: (item, source) for item, source in sources}
        everything = {position for position, good in enumerate(straight.mask) if good} | where.keys()

        def read(positions: set[int]) -> None:
            mask = bytes(good and position in positions for position, good in enumerate(straight.mask))
            self._read_straight(straight, mask)
            self._load_sources([pair for position, pair in where.items() if position in positions], planner)

        def read_pieces(pieces: list[tuple[Piece, Tensor]], filled: set[int]) -> None:
            self._read_pieces(straight, pieces, filled)

        def take(taken: list[tuple[int, Piece, Tensor]]) -> list[int]:
            return _take(straight, taken, planner)

        straight.exchange.run(everything, read, read_pieces, take, self._stats, self._phases, self._meter.advance)

    def _read_pieces(self, straight: Straight, pieces: list[tuple[Piece, Tensor]], filled: set[int]) -> None:
        """Reads pieces of records as bytes.

        Args:
            filled: overlaps that have been overwritten already, for an error to say so.
        """
        numbers = self._inputs.numbers
        boxes: list[tuple[Any, ...]] = []
        for piece, _ in pieces:
            place = straight.places.get(piece.row)
            assert place is not None
            name, _, _, _, offset, size, crcs, *_ = place
            if size != piece.record_bytes:
                raise CorruptCheckpointError(
                    f"{self._name(straight.items.make(piece.overlaps[0]))}: the record has {size} bytes, its shape and "
                    f"dtype need {piece.record_bytes}",
                    f"{self._path}/{name}",
                    offset,
                )
            boxes.append((numbers[name], offset, size, crcs or None, None, *piece.as_bytes()))
        targets = [memory.view(box[-1]) for box, (_, memory) in zip(boxes, pieces, strict=True)]
        try:
            with self._phases.core(self._watch, "read tensors", self._inputs.names):
                stats = _C.load(self._inputs.core, boxes, targets, self._options)
        except _CORE_ERRORS as error:
            first = [piece.overlaps[0] for piece, _ in pieces]
            vars(error)["changed"] = list(range(len(first), len(first) + len(filled)))  # and not what was just read
            raise self._explained(error, LazyItems(straight.items, [*first, *filled])) from error
        self._count(stats)

    def _read_straight(self, straight: Straight, mask: bytes) -> None:
        if not any(mask):
            return
        match = straight.items.match
        try:
            with self._phases.core(self._watch, "read tensors", self._inputs.names):
                stats = _C.load_matched(
                    self._inputs.core, match, straight.places, straight.tensors, mask, self._options
                )
        except _CORE_ERRORS as error:
            chosen = [position for position, good in enumerate(mask) if good]
            raise self._explained(error, LazyItems(straight.items, chosen)) from error
        self._count(stats)
        rows = dict.fromkeys(itertools.compress(array.array("I", match.wanted_rows()), mask))
        _bump_versions([straight.targets[row] for row in rows])
        self._stats.tensor_bytes += sum(itertools.compress(match.sizes(), mask))

    # ---- what each item is ----

    def _info(self, item: ReadItem) -> StorageInfo:
        info = self._catalog.info(item.storage_index)
        if info is None:
            raise CorruptCheckpointError(
                f"the metadata lists {item.storage_index.fqn!r} at offset {item.storage_index.offset}, but not where "
                "it is stored",
                self._path,
            )
        fields = attributes_of(info)
        good = [type(fields.get(name)) for name in ("relative_path", "offset", "length")] == [str, int, int]
        if not good or info.offset < 0 or info.length < 0 or info.offset + info.length >= 1 << 63:
            raise CorruptCheckpointError(f"the metadata of {item.storage_index.fqn!r} contradicts itself", self._path)
        return info

    @contextlib.contextmanager
    def _opened(self, items: list[ReadItem], infos: list[StorageInfo], straight: Straight | None) -> Iterator[None]:
        """All files that are read. Each is looked at once, when something of it is wanted, and stays open."""
        if self._shared_inputs is not None:
            self._inputs = self._shared_inputs
            yield
            return
        names = straight.files if straight else sorted({info.relative_path for info in infos})
        try:
            self._inputs = Inputs(self._path, names)
        except _CORE_ERRORS as error:
            raise self._explained(error, items) from error
        with contextlib.closing(self._inputs):
            yield

    def _classify(
        self, items: list[ReadItem], infos: list[StorageInfo]
    ) -> tuple[list[tuple[ReadItem, _Whole]], list[tuple[ReadItem, _Whole]], list[tuple[ReadItem, _Source]]]:
        objects: list[tuple[ReadItem, _Whole]] = []
        wholes: list[tuple[ReadItem, _Whole]] = []
        sources: list[tuple[ReadItem, _Source]] = []
        unknown: list[tuple[ReadItem, StorageInfo]] = []
        for item, info in zip(items, infos, strict=True):
            ring = ring_info(info, item.storage_index.fqn)
            if item.type == LoadItemType.BYTE_IO:
                objects.append((item, self._whole(info, ring.crcs if ring else None)))
            elif info.transform_descriptors or (ring is not None and ring.kind != TENSOR):
                wholes.append((item, self._whole(info, ring.crcs if ring else None)))
            elif ring is not None and (stored := self._stored_as(item)) is not None:
                sizes, dtype = stored
                file = self._inputs.numbers[info.relative_path]
                source = _Source(file, ring.payload_offset, ring.payload_bytes, ring.crcs, None, sizes, dtype)
                sources.append((item, source))
            else:
                unknown.append((item, info))
        for item, found in self._locate(unknown):
            if isinstance(found, _Source):
                sources.append((item, found))
            else:
                wholes.append((item, found))
        return objects, wholes, sources

    def _whole(self, info: StorageInfo, crcs: bytes | None) -> _Whole:
        return _Whole(self._inputs.numbers[info.relative_path], info.offset, info.length, crcs, info)

    def _stored_as(self, item: ReadItem) -> tuple[tuple[int, ...], torch.dtype] | None:
        return self._catalog.stored_as(item.storage_index)

    def _locate(self, unknown: list[tuple[ReadItem, StorageInfo]]) -> Iterator[tuple[ReadItem, _Source | _Whole]]:
        """Looks into records that the metadata says nothing more about: those that stock wrote."""
        if not unknown:
            return
        numbers = self._inputs.numbers
        unknown = sorted(unknown, key=lambda pair: (numbers[pair[1].relative_path], pair[1].offset))
        wanted = [(numbers[info.relative_path], info.offset, info.length) for _, info in unknown]
        try:
            found = _C.locate(self._inputs.core, wanted)
        except _CORE_ERRORS as error:
            raise self._explained(error, [item for item, _ in unknown]) from error
        for (item, info), located in zip(unknown, found, strict=True):
            if located is None:
                yield item, self._whole(info, None)
                continue
            offset, size, crc, dtype_name, sizes = located
            dtype: torch.dtype = getattr(torch, dtype_name)
            stored = self._stored_as(item)
            if stored is not None and tuple(stored[0]) != sizes:
                raise CorruptCheckpointError(
                    f"{self._name(item)}: the record has shape {list(sizes)}, the metadata says {list(stored[0])}",
                    info.relative_path,
                    info.offset,
                )
            # 0: written without a CRC (checksum=False, torch.serialization.set_crc32_options(False))
            yield item, _Source(self._inputs.numbers[info.relative_path], offset, size, None, crc or None, sizes, dtype)

    # ---- objects and whole records ----

    def _check_ends(self, items: list[ReadItem], ends: list[tuple[int, int]]) -> None:
        """Whether files are there and reach to where what is wanted ends."""
        try:
            if ends:
                _C.load_bytes(self._inputs.core, [(*end, 0, None) for end in ends], self._options)
        except _CORE_ERRORS as error:
            raise self._explained(error, items) from error

    def _check_sources(self, sources: list[tuple[ReadItem, _Source]]) -> None:
        """The checks that the core makes before it reads, for what it will only see window by window."""
        ends = [(source.file, source.payload_offset + source.payload_bytes) for _, source in sources]
        self._check_ends([item for item, _ in sources], ends)

    def _check_wholes(self, wholes: list[tuple[ReadItem, _Whole]], planner: LoadPlanner) -> None:
        self._check_ends([item for item, _ in wholes], [(whole.file, whole.offset + whole.size) for _, whole in wholes])
        for item, _ in wholes:
            stored = self._stored_as(item)
            if stored is not None and not makes_tensors(planner):
                self._check_target(item, planner.resolve_tensor(item), stored[1])

    def _read_whole(self, batch: list[tuple[ReadItem, _Whole]]) -> list[io.BytesIO]:
        wanted = [(whole.file, whole.offset, whole.size, whole.crcs) for _, whole in batch]
        self._check_ends([item for item, _ in batch], [(whole.file, whole.offset + whole.size) for _, whole in batch])
        try:
            with self._phases.core(self._watch, "read objects", self._inputs.names):
                data, stats = _C.load_bytes(self._inputs.core, wanted, self._options)
        except _CORE_ERRORS as error:
            raise self._explained(error, [item for item, _ in batch]) from error
        self._count(stats)
        values = [self._untransformed(item, whole, raw) for (item, whole), raw in zip(batch, data, strict=True)]
        for (item, whole), value in zip(batch, values, strict=True):
            if self._checksum and not whole.crcs:
                self._check_archive(item, whole, value)
        return values

    def _check_archive(self, item: ReadItem, whole: _Whole, data: io.BytesIO) -> None:
        """Checks the CRCs that torch.save has put into its archive, and torch.load does not look at."""
        if data.getbuffer()[:2] != b"PK":
            return
        try:
            with zipfile.ZipFile(data) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
            damaged = str(error)
        if damaged is not None:
            path = f"{self._path}/{whole.info.relative_path}"
            raise CorruptCheckpointError(f"{self._name(item)} is damaged ({damaged})", path, whole.offset)
        data.seek(0)

    def _untransformed(self, item: ReadItem, whole: _Whole, data: bytes) -> io.BytesIO:
        if not whole.info.transform_descriptors:
            return io.BytesIO(data)
        stream = self._transforms.transform_load_stream(item, whole.info.transform_descriptors, io.BytesIO(data))
        return io.BytesIO(stream.read(-1))

    def _read_objects(self, objects: list[tuple[ReadItem, _Whole]]) -> list[Loaded | io.BytesIO]:
        """Objects, which the planner gets only after all of them have been checked; as they are, if trusted."""
        streams = self._read_whole(objects) if objects else []
        if self._trusted is True:
            return list(streams)
        return [self._unpickle(item, stream) for (item, _), stream in zip(objects, streams, strict=True)]

    def _load_object(self, item: ReadItem, value: Loaded | io.BytesIO, planner: LoadPlanner) -> None:
        if isinstance(value, io.BytesIO):
            planner.load_bytes(item, value)
        elif value.has_tensors or not isinstance(planner, RingLoadPlanner) or not planner.takes_objects:
            planner.load_bytes(item, value.stream())
        else:
            planner.load_object(item, value.value)

    def _unpickle(self, item: ReadItem, stream: io.BytesIO) -> Loaded | io.BytesIO:
        """Loads without running code; the stream itself where it is to be loaded whatever it holds."""
        try:
            return load_object(stream, self._safe)
        except RefusedError as error:
            if self._trusted == "warn":
                warn_of(error)
                stream.seek(0)
                return stream
            cure = f"the class in safe_globals=[{error.name}]" if error.name else "the class in safe_globals=[...]"
            raise UntrustedCheckpointError(
                f"{self._name(item)} holds more than plain data and tensors, and loading it could run code: "
                f"{error}. If you trust the checkpoint, pass RingReader(..., trusted=True), or {cure}."
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes end in errors of any kind
            raise CorruptCheckpointError(
                f"{self._name(item)} cannot be read: {_first_line(error)}", self._path
            ) from error

    def _tensor_of(self, item: ReadItem, stream: io.BytesIO) -> Any:
        loaded = stream if self._trusted is True else self._unpickle(item, stream)
        if isinstance(loaded, io.BytesIO):
            return torch.load(loaded, map_location="cpu", weights_only=False)
        return loaded.value

    def _load_wholes(self, batch: list[tuple[ReadItem, _Whole]], planner: LoadPlanner) -> None:
        for (item, _), data in zip(batch, self._read_whole(batch), strict=True):
            tensor = self._tensor_of(item, data)
            if not isinstance(tensor, Tensor):
                raise CorruptCheckpointError(f"{self._name(item)} is stored as {type(tensor).__name__}", self._path)
            stored = self._stored_as(item)
            if stored is not None and tensor.size() != stored[0]:
                raise CorruptCheckpointError(
                    f"{self._name(item)}: the record's shape is {list(tensor.size())}, the metadata says "
                    f"{list(stored[0])}",
                    self._path,
                )
            part = narrowed(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item)
            if target.layout == torch.strided:  # copy_ into a detached sparse tensor does not reach the original
                target = target.detach()
            self._check_target(item, target, tensor.dtype)
            target.copy_(part)
            planner.commit_tensor(item, target)
            self._stats.tensor_bytes += part.numel() * part.dtype.itemsize

    # ---- plain tensors ----

    def _load_tensors(self, chunk: list[tuple[ReadItem, _Source]], planner: LoadPlanner) -> None:
        targets = [planner.resolve_tensor(item).detach() for item, _ in chunk]
        straight: list[int] = []
        through_host: list[int] = []
        kinds = _C.Tensors([t if type(t) is Tensor else _NOT_PLAIN for t in targets]).kinds()
        for index, ((item, source), target) in enumerate(zip(chunk, targets, strict=True)):
            self._check_target(item, target, source.dtype)
            plain = kinds[index] == 0 and type(target) is Tensor and target.dtype == source.dtype
            (straight if plain and _is_plain_memory(target) else through_host).append(index)
        self._check_sources([chunk[index] for index in through_host])
        self._read([chunk[i] for i in straight], [targets[i] for i in straight])
        _bump_versions([targets[i] for i in straight])
        self._read_through_host([chunk[i] for i in through_host], [targets[i] for i in through_host])
        for (item, _), target in zip(chunk, targets, strict=True):
            planner.commit_tensor(item, target)
            self._stats.tensor_bytes += target.nbytes

    def _check_target(self, item: ReadItem, target: Tensor, stored: torch.dtype) -> None:
        if target.size() != item.lengths:
            raise PlanError(
                f"{self._name(item)}: the checkpoint has shape {list(item.lengths)} here, the state dict "
                f"{list(target.size())}; load into tensors of the shape that was saved (req {item.storage_index} "
                f"mismatch sizes {target.size()} vs {item.lengths})"
            )
        if target.dtype == stored:
            return
        if self._casts == "never":
            raise CheckpointError(
                f'{self._name(item)}: the checkpoint has {stored}, the state dict {target.dtype}, and casts="never"'
            )
        if self._casts != "any" and not torch.can_cast(stored, target.dtype):
            raise CheckpointError(
                f"{self._name(item)}: the checkpoint has {stored}, the state dict {target.dtype}, and that cast would "
                f'lose data; load into a {stored} tensor and convert it, or pass RingReader(..., casts="any")'
            )
        logger.info("%s is cast from %s to %s", self._name(item), stored, target.dtype)

    def _read_item(self, item: ReadItem, source: _Source) -> tuple[Any, ...]:
        return (*source[:-1], item.storage_offsets, item.lengths)

    def _read(self, chunk: list[tuple[ReadItem, _Source]], targets: list[Tensor]) -> None:
        items = [item for item, _ in chunk]
        self._read_boxes(items, [self._read_item(*pair) for pair in chunk], targets, self._sums)

    def _read_boxes(
        self, items: list[ReadItem], boxes: list[tuple[Any, ...]], targets: list[Tensor], sums: RunningCrcs | None
    ) -> None:
        if not boxes:
            return
        try:
            with self._phases.core(self._watch, "read tensors", self._inputs.names):
                stats = _C.load(self._inputs.core, boxes, targets, self._options)
        except _CORE_ERRORS as error:
            raise self._explained(error, items) from error
        self._count(stats)
        if sums is not None and self._checksum:
            self._check_sums(items, boxes, targets, sums)

    def _check_sums(
        self, items: list[ReadItem], boxes: list[tuple[Any, ...]], targets: list[Tensor], sums: RunningCrcs
    ) -> None:
        """Checks what the core cannot, as it has seen only a part of a record with one CRC."""
        names = self._inputs.names
        for index, (box, target) in enumerate(zip(boxes, targets, strict=True)):
            if not _sum_up(sums, names[box[0]], box, target):
                why = f"CRC-32 of its {box[2]} bytes is not what it was when they were written"
                error = CorruptCheckpointError(why, f"{self._path}/{names[box[0]]}", box[1])
                vars(error).update(item=index, changed=list(range(len(items))))  # as the core says it
                raise self._explained(error, items)

    def _read_through_host(self, chunk: list[tuple[ReadItem, _Source]], targets: list[Tensor]) -> None:
        """Reads windows of host copies; a large tensor comes in several boxes."""
        needed = sum(padded(_item_bytes(pair)) for pair in chunk)
        sums = self._sums or RunningCrcs()
        with Uploader(targets, needed, _WINDOW_BYTES) as uploader:
            boxes = (
                (item, source, target, offsets, lengths)
                for (item, source), target in zip(chunk, targets, strict=True)
                for offsets, lengths in split_box(tuple(item.lengths), uploader.window_bytes // source.dtype.itemsize)
            )
            for window in windows(boxes, _box_bytes, uploader.window_bytes):
                hosts = uploader.take((lengths, source.dtype) for _, source, _, _, lengths in window)
                reads = [
                    (*self._read_item(item, source)[:6], _added(item.storage_offsets, offsets), lengths)
                    for item, source, _, offsets, lengths in window
                ]
                self._read_boxes([box[0] for box in window], reads, hosts, sums)
                parts = (narrowed(target, offsets, lengths) for _, _, target, offsets, lengths in window)
                uploader.send(zip(parts, hosts, strict=True))

    # ---- reporting ----

    def _count(self, stats: tuple[int, int, str, bool]) -> None:
        read, cached, engine, direct = stats
        self._stats.bytes += read
        self._stats.cached_bytes += cached
        self._stats.engine = engine or self._stats.engine
        self._stats.direct |= direct

    def _name(self, item: ReadItem) -> str:
        return repr(item.storage_index.fqn) + ("" if self._rank is None else f" (rank {self._rank})")

    def _explained(self, error: Exception, items: Sequence[ReadItem]) -> Exception:
        """The same error, with the key, the rank, and which tensors had changed already."""
        index = getattr(error, "item", None)
        whose = self._path if self._rank is None else f"rank {self._rank}"
        where = self._name(items[index]) if index is not None and index < len(items) else whose
        changed = [] if self._rank is None else [items[i].dest_index.fqn for i in getattr(error, "changed", [])]
        note = f"; already overwritten in the state dict: {some_keys(changed, 5)}" if changed else ""
        if isinstance(error, CorruptCheckpointError):
            return CorruptCheckpointError(f"{where}: {error.args[0]}{note}", error.path, error.offset)
        if isinstance(error, OSError):
            return OSError(error.errno, f"{where}: {error.strerror}{note}", error.filename)
        if isinstance(error, MemoryError):
            return CheckpointError(f"{where}: there is not enough memory for it{note}")
        return CorruptCheckpointError(f"{where}: {error}{note}", self._path)


def _check_chunks(items: list[ReadItem], planner: LoadPlanner) -> None:
    """Items of DTensors must be filled into what this rank holds of them."""
    values = getattr(planner, "state_dict", None) or {}
    for item in items:
        offset, name = item.dest_index.offset, item.dest_index.fqn
        if item.type == LoadItemType.TENSOR and offset is not None:
            check_chunk(name, values.get(name), offset, item.dest_offsets, item.lengths, "RingLoadPlanner")


def _take(straight: Straight, taken: list[tuple[int, Piece, Tensor]], planner: LoadPlanner) -> list[int]:
    """Fills overlaps with what they have of pieces that are in memory; the bytes of each."""
    match, mask = straight.items.match, straight.mask
    places = [match.get(position)[3:] for position, _, _ in taken]
    in_core = [
        at for at, (position, piece, data) in enumerate(taken) if mask[position] and piece.box is None and data.is_cpu
    ]
    ranges = [(taken[at][0], *taken[at][1].byte_range) for at in in_core]
    memory = _C.Tensors([taken[at][2] for at in in_core])
    _C.take_matched(match, straight.places, straight.tensors, ranges, memory)
    rows = array.array("I", match.wanted_rows())
    _bump_versions([straight.targets[row] for row in {rows[position] for position, _, _ in ranges}])
    for at in set(range(len(taken))).difference(in_core):
        position, piece, data = taken[at]
        with torch.no_grad():
            take(piece, data, *places[at], planner.resolve_tensor(straight.items.make(position)))
    return [common_bytes(piece, *place) for (_, piece, _), place in zip(taken, places, strict=True)]


def _sum_up(sums: RunningCrcs, name: str, box: tuple[Any, ...], data: Tensor) -> bool:
    """Takes what was read of a box; False: its record is damaged."""
    _, payload_offset, size, _, crc, sizes, offsets, lengths = box
    start = None if crc is None or tuple(lengths) == tuple(sizes) else box_start(sizes, offsets, lengths)
    if start is None:
        return True
    data = data.contiguous()
    part = buffer_at(data.data_ptr(), data.nbytes)
    return sums.add((name, payload_offset), start * data.itemsize, part, size, crc)


_NOT_PLAIN = torch.empty(0)
"""Stands in for tensors that the core must not look at."""


def _is_plain_memory(tensor: Tensor) -> bool:
    """Whether writing to the tensor's memory, element by element, is the same as copying into the tensor."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _bump_versions(tensors: list[Tensor]) -> None:
    """Tells autograd that the tensors were changed, as copy_ would have."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def _item_bytes(pair: tuple[ReadItem, _Source]) -> int:
    return math.prod(pair[0].lengths) * pair[1].dtype.itemsize


def _box_bytes(box: tuple[Any, _Source, Any, Any, tuple[int, ...]]) -> int:
    return padded(math.prod(box[4]) * box[1].dtype.itemsize)


def _wanted_bytes(
    wholes: list[tuple[ReadItem, _Whole]], sources: list[tuple[ReadItem, _Source]], straight: Straight | None
) -> int:
    rest = sum(whole.size for _, whole in wholes) + sum(map(_item_bytes, sources))
    if straight is None:
        return rest
    match = straight.items.match
    surplus = 0 if straight.exchange is None else straight.exchange.surplus_bytes(lambda at: match.get(at)[3:])
    return rest + surplus + sum(itertools.compress(match.sizes(), straight.mask))


def _added(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
