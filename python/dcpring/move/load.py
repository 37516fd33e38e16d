"""One rank's read_data: what each item needs, in which order it is read, and what goes where.

1. Every item is looked up, and checked against its destination, before anything is read.
2. Objects, and records that only ``torch.load`` understands, are read whole; objects are checked to be plain data.
3. Plain tensors are read in parts, straight into the planner's tensors; through a host copy where the destination is
   on another device, has another dtype, or is no plain memory.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import io
import itertools
import logging
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcpring import _C
from dcpring.base.groups import world_size
from dcpring.base.masks import both, either, mask_of, zeros
from dcpring.base.memory import is_lazy_view
from dcpring.base.text import some_keys
from dcpring.base.windows import split_box, windows
from dcpring.errors import CheckpointError, CorruptCheckpointError, PlanError, UntrustedCheckpointError
from dcpring.format.lazy import Chunks
from dcpring.format.metadata import BYTES, OPAQUE, TENSOR, Placed, placed_of
from dcpring.format.properties import decode_properties
from dcpring.format.quantised import DTYPES, Quantised
from dcpring.format.unpickler import RefusedError, Safe, Trust, warn_of
from dcpring.move.crc import RunningCrcs, box_start, buffer_at
from dcpring.move.device import Uploader, padded
from dcpring.move.handon import Exchange
from dcpring.move.landing import Landing
from dcpring.move.objects import Loaded
from dcpring.move.objects import load as load_object
from dcpring.names.policy import Casts
from dcpring.options import IOOptions, IOStats
from dcpring.plan.load_planner import ReadItems, RingLoadPlanner, makes_tensors
from dcpring.plan.pieces import Piece, common_bytes, range_of_box, take
from dcpring.plan.placements import check_chunk
from dcpring.plan.run import LoadRun
from dcpring.plan.table import BYTES_ROW
from dcpring.torchside.dcp import StorageInfo
from dcpring.torchside.tensors import narrowed

logger = logging.getLogger("dcpring")

_CORE_ERRORS = (OSError, ValueError, TypeError, OverflowError, MemoryError, CorruptCheckpointError)

_WINDOW_BYTES = 32 << 20
"""Host copies, whole records and a custom planner's tensors are handled this many bytes at a time."""


class Inputs:
    """The data files of a directory, as the core reads them: opened when something of them is wanted, and kept open.

    Args:
        directory: which no name leads out of.
        names: of the files.
        links: where each really lies, of files that may be anywhere, because the user has named them; else empty.

    Attributes:
        names: of the files.
        numbers: their places among the names.
        core: the files themselves.
    """

    def __init__(self, directory: str, names: Sequence[str], links: Mapping[str, str] | None = None) -> None:
        self.names = list(names)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        files = self.names
        if links and names:
            paths = [links[name] for name in names]
            directory = os.path.commonpath([os.path.dirname(path) for path in paths])
            files = [os.path.relpath(path, directory) for path in paths]
        try:
            self.core = _C.Input(directory, files)
        except ValueError as error:  # a null character, or what no file system has
            raise CorruptCheckpointError(f"the metadata names files that cannot be ({error})", directory) from error

    def close(self) -> None:
        self.core.close()


class Wanted(NamedTuple):
    """What is loaded of one record.

    Attributes:
        item: DCP's, by which the planner knows it.
        place: where the record is stored.
        stored: its sizes and dtype; None for an object, and where the metadata does not tell.
    """

    item: ReadItem
    place: Placed
    stored: tuple[tuple[int, ...], torch.dtype] | None


def wanted_by_items(
    items: Sequence[ReadItem], metadata: Metadata, storage_data: Mapping[MetadataIndex, StorageInfo], path: str
) -> dict[int, Wanted]:
    """What DCP's items want of a checkpoint, by their positions."""
    wanted: dict[int, Wanted] = {}
    for position, item in enumerate(items):
        index = item.storage_index
        info = storage_data.get(index)
        if info is None:
            raise _not_stored(index.fqn, index.offset, path)
        wanted[position] = Wanted(item, placed_of(info, index.fqn, path), _stored_as(index, metadata))
    return wanted


def _not_stored(key: str, offset: Sequence[int] | None, path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the metadata lists {key!r} at offset {offset}, but not where it is stored", path)


def _stored_as(index: MetadataIndex, metadata: Metadata) -> tuple[tuple[int, ...], torch.dtype] | None:
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    chunks = entry.chunks
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return chunks[index.index].sizes, entry.properties.dtype
    for chunk in chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk.sizes, entry.properties.dtype
    return None


class Matched:
    """A compact plan: what can be read straight into its tensor never becomes an object of Python.

    Attributes:
        items: all of them.
        storage: where the checkpoint's rows are stored.
        tensors: where each wanted row goes, for the core; stand-ins for what is not plain memory.
        mask: 1 for each item that can be read straight into its target.
        landing: what is read into windows, and copied from there; None where all targets are in host memory, and where
            there is an exchange.
        exchange: hands on between ranks; None: this rank reads all for itself.
    """

    def __init__(
        self, items: ReadItems, chunks: Chunks, planner: RingLoadPlanner, exchange: Exchange | None = None
    ) -> None:
        assert chunks.storage is not None
        self.items, self.storage, self.exchange = items, chunks.storage, exchange
        self._planner = planner
        self._table = chunks.table
        self._targets = [
            _NOT_PLAIN if tensor is None or is_lazy_view(tensor) else tensor for tensor in planner.targets(items.wanted)
        ]
        self.tensors = _C.Tensors(self._targets)
        self.mask = _C.straight(items.match, self.storage, self.tensors)
        self.landing: Landing | None = None
        if exchange is None and any(self.tensors.kinds()):
            self.landing = Landing(items.match, self.storage, self._targets, _WINDOW_BYTES)

    def rest(self, path: str) -> dict[int, Wanted]:
        """What takes another way, by the positions of the items. ``path`` is for errors."""
        rows = array.array("I", self.items.match.stored_rows())
        properties = self._table.properties()
        wanted: dict[int, Wanted] = {}
        reached = self.mask if self.landing is None else either(self.mask, self.landing.mask)
        for position in (position for position, good in enumerate(reached) if not good):
            place = self.storage.get(rows[position])
            name, kind, _, offsets, lengths, number, _ = self._table.row(rows[position])
            if place is None:
                raise _not_stored(name, offsets, path)
            stored = None if kind == BYTES_ROW else (lengths, decode_properties(properties[number]).dtype)
            wanted[position] = Wanted(self.items.make(position), Placed(*place), stored)
        return wanted

    def size_bytes(self, mask: bytes) -> int:
        return sum(itertools.compress(self._sizes, mask))

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return self.items.match.sizes()

    @functools.cached_property
    def interleaved(self) -> tuple[bytes, bytes]:
        """A mask of the items without gaps between their rows, and one of those with."""
        with_gaps = self.items.match.interleaved()
        return zeros(with_gaps), with_gaps

    def wanted_bytes(self) -> int:
        """What this rank reads into memory, some of it for others alone."""
        match, exchange = self.items.match, self.exchange
        surplus = 0 if exchange is None else exchange.surplus_bytes(lambda at: match.get(at)[3:])
        landed = 0 if self.landing is None else self.size_bytes(self.landing.mask)
        return surplus + self.size_bytes(self.mask) + landed

    def note_filled(self, rows: Iterable[int]) -> None:
        _bump_versions([self._targets[row] for row in dict.fromkeys(rows)])

    def take(self, taken: list[tuple[int, Piece, Tensor]]) -> list[int]:
        """Fills items with what they have of pieces that are in memory; the bytes of each."""
        match = self.items.match
        boxes = [match.get(position)[3:] for position, _, _ in taken]
        in_core = [
            at
            for at, (position, piece, data) in enumerate(taken)
            if self.mask[position] and piece.box is None and data.is_cpu
        ]
        ranges = [(taken[at][0], *taken[at][1].byte_range) for at in in_core]
        memory = _C.Tensors([taken[at][2] for at in in_core])
        _C.take_matched(match, self.storage, self.tensors, ranges, memory)
        rows = array.array("I", match.wanted_rows())
        self.note_filled(rows[position] for position, _, _ in ranges)
        for at in set(range(len(taken))).difference(in_core):
            position, piece, data = taken[at]
            with torch.no_grad():
                take(piece, data, *boxes[at], self._planner.resolve_tensor(self.items.make(position)))
        return [common_bytes(piece, *box) for (_, piece, _), box in zip(taken, boxes, strict=True)]


class _Source(NamedTuple):
    """A plain tensor in a file, as the core reads it."""

    file: int
    payload_offset: int
    payload_bytes: int
    crcs: bytes | None
    whole_crc: int | None
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored(self) -> tuple[_Source, ...]:
        """What is read of files for it."""
        return (self,)


class _Coded(NamedTuple):
    """A tensor that is made of two in files.

    Attributes:
        form: how.
        stored: its codes and its scales.
        sizes, dtype: its own.
    """

    form: Quantised
    stored: tuple[_Source, _Source]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def made_for(self, target: Tensor) -> _Coded:
        """The same, rounded once where the target has another dtype: torch makes ``dtype``, and casts that."""
        is_lossless = self.dtype == torch.float32 and target.dtype in DTYPES
        return self._replace(dtype=target.dtype) if is_lossless else self

    def scale_bytes(self, box: _Box) -> int:
        (_, lengths) = self.form.boxes(box.offsets, box.lengths)[1]
        return math.prod(lengths) * self.stored[1].dtype.itemsize


class _Box(NamedTuple):
    """A part of a tensor, and the memory that it goes into.

    Attributes:
        position: of what is wanted.
        source: the tensor.
        offsets, lengths: in the tensor.
    """

    position: int
    source: _Source | _Coded
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    memory: Tensor


_ReadStats = tuple[int, int, str, bool]
"""Bytes, those of the page cache, the engine, and whether it was direct."""


class _Call(NamedTuple):
    """A call of the core that reads tensors, in whatever thread.

    Attributes:
        positions: of the items, in the order in which the core has them.
        read: the call.
    """

    positions: Iterable[int]
    read: Callable[[], _ReadStats]


class _Window(NamedTuple):
    """Items, or parts of them, that come through host memory together.

    Attributes:
        number: of the window, from 0.
        positions: of the items.
        calls: which fill the memory.
        pairs: targets, and the memory that is copied to them.
        check: what is to be done between the two, in the order of windows.
    """

    number: int
    positions: list[int]
    calls: list[_Call]
    pairs: list[tuple[Tensor, Tensor]]
    check: Callable[[], None] = lambda: None


class Loader:
    """See the module's docstring. One is made for every read_data.

    Everything that is loaded goes by its position among the items: in ``Wanted``, among the sources, and in errors.

    With ``sums``, which several of them share, records are checked of which each reads a part. With ``inputs`` they
    share the open files, which are closed after the load otherwise; ``links`` is for ``Inputs``. ``quantised`` tensors
    go by their place.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        *,
        path: str,
        transforms: Any,
        options: IOOptions,
        trusted: Trust,
        safe_globals: Sequence[Any],
        stats: IOStats,
        rank: int | None,
        casts: Casts = "safe",
        run: LoadRun | None = None,
        sums: RunningCrcs | None = None,
        inputs: Inputs | None = None,
        links: Mapping[str, str] | None = None,
        quantised: Mapping[tuple[str, int], Quantised] | None = None,
    ) -> None:
        self._planner = planner
        self._is_windowed = makes_tensors(planner)
        self._path = path
        self._transforms = transforms
        run = run or LoadRun()
        self._meter, self._phases = run.meter, run.phases
        self._watch = run.watch()
        self._options = options.for_core(False, self._watch)
        # What lies between the rows of one rank is another's, often on this host: it may find it in the page cache.
        # So there are two ways to read, by whether there are gaps between rows, or one for all.
        is_cached = options.direct == "auto" and world_size() > 1
        buffered = replace(options, direct=False).for_core(False, self._watch)
        self._ways: Any = ((0, self._options), (1, buffered)) if is_cached else ((None, self._options),)
        self._checksum = options.checksum
        self._trusted = trusted
        self._safe = Safe(safe_globals)
        self._stats = stats
        self._rank = rank
        self._casts = casts
        self._sums = sums
        self._shared_inputs = inputs
        self._links = links
        self._quantised = quantised or {}
        self._inputs: Inputs
        self._wanted: Mapping[int, Wanted] = {}
        self._matched: Matched | None = None
        self._sources: dict[int, _Source | _Coded] = {}

    def load(self, wanted: Mapping[int, Wanted]) -> None:
        """Loads all that is wanted, once all that can be checked before has been."""
        if not self._is_windowed:
            _check_chunks((each.item for each in wanted.values()), self._planner)
        self._load(wanted)

    def load_matched(self, matched: Matched) -> None:
        """Loads a compact plan."""
        self._matched = matched
        self._stats.files = len(matched.items.match.file_bytes(matched.storage))
        self._load(matched.rest(self._path))

    def _load(self, wanted: Mapping[int, Wanted]) -> None:
        self._wanted = wanted
        files = {file for each in wanted.values() for file in self._files_of(each.place)}
        with self._opened(sorted(files) if self._matched is None else list(self._matched.storage.file_sizes())):
            objects, wholes = self._classify()
            self._check_ends(wholes)
            self._check_wholes(wholes)
            if self._is_windowed or self._matched is not None:
                self._check_ends(self._sources)  # of which the core will only see one window after the other
            self._meter.begin(lambda: self._wanted_bytes([*objects, *wholes]))
            values = self._read_objects(objects)
            self._load_plain()
            for batch in windows(wholes, lambda position: wanted[position].place.length, _WINDOW_BYTES):
                self._load_wholes(batch)
            for position, value in zip(objects, values, strict=True):
                self._load_object(wanted[position].item, value)
        self._stats.files = max(self._stats.files, len(files))

    def _wanted_bytes(self, wholes: list[int]) -> int:
        rest = sum(self._wanted[position].place.length for position in wholes)
        rest += sum(map(self._read_bytes, self._sources))
        return rest if self._matched is None else rest + self._matched.wanted_bytes()

    def _source_bytes(self, position: int) -> int:
        return math.prod(self._wanted[position].item.lengths) * self._sources[position].dtype.itemsize

    def _read_bytes(self, position: int) -> int:
        """What is read for an item."""
        source, item = self._sources[position], self._wanted[position].item
        if isinstance(source, _Source):
            return self._source_bytes(position)
        boxes = source.form.boxes(item.storage_offsets, item.lengths)
        sizes = (stored.dtype.itemsize for stored in source.stored)
        return sum(math.prod(lengths) * size for (_, lengths), size in zip(boxes, sizes, strict=True))

    def _files_of(self, place: Placed) -> list[str]:
        made = self._quantised.get((place.file, place.offset))
        return [place.file] if made is None else [place.file, made.scales.file]

    # ---- what each item is ----

    @contextlib.contextmanager
    def _opened(self, files: list[str]) -> Iterator[None]:
        """All files that are read. Each is looked at once, when something of it is wanted, and stays open."""
        if self._shared_inputs is not None:
            self._inputs = self._shared_inputs
            yield
            return
        with self._explaining(()):
            self._inputs = Inputs(self._path, files, self._links)
        with contextlib.closing(self._inputs):
            yield

    def _classify(self) -> tuple[list[int], list[int]]:
        """Finds the sources of plain tensors; gives the positions of objects, and of records that are read whole."""
        objects: list[int] = []
        wholes: list[int] = []
        unknown: list[int] = []
        numbers = self._inputs.numbers
        for position, (item, place, stored) in self._wanted.items():
            if place.offset + place.length >= 1 << 63:
                raise CorruptCheckpointError(f"{self._name(position)} ends where no file can", self._path)
            made = self._quantised.get((place.file, place.offset))
            if item.type == LoadItemType.BYTE_IO:
                objects.append(position)
            elif made is not None and place.kind == OPAQUE:
                self._sources[position] = self._coded(made)
            elif place.descriptors or place.kind == BYTES:
                wholes.append(position)
            elif place.kind == TENSOR and stored is not None:
                where = numbers[place.file], place.payload_offset, place.payload_bytes
                self._sources[position] = _Source(*where, place.crcs, None, *stored)
            else:
                unknown.append(position)
        return objects, wholes + self._locate(unknown)

    def _coded(self, made: Quantised) -> _Coded:
        sources = []
        for (file, _, stored), sizes in zip((made.codes, made.scales), made.stored_sizes, strict=True):
            where = self._inputs.numbers[file], stored.begin, stored.end - stored.begin
            sources.append(_Source(*where, stored.crcs, None, sizes, stored.dtype))
        return _Coded(made, (sources[0], sources[1]), made.shape, made.dtype)

    def _locate(self, unknown: list[int]) -> list[int]:
        """Looks into records that the metadata says nothing more about, those that stock wrote; what is no tensor."""
        if not unknown:
            return []
        unknown = sorted(unknown, key=lambda position: self._range_of(position)[:2])
        with self._explaining(unknown):
            found = _C.locate(self._inputs.core, [self._range_of(position) for position in unknown])
        for position, located in zip(unknown, found, strict=True):
            if located is None:
                continue
            offset, size, crc, dtype_name, sizes = located
            file, record, _ = self._range_of(position)
            stored = self._wanted[position].stored
            if stored is not None and tuple(stored[0]) != sizes:
                raise CorruptCheckpointError(
                    f"{self._name(position)}: the record has shape {list(sizes)}, the metadata says {list(stored[0])}",
                    self._inputs.names[file],
                    record,
                )
            # 0: written without a CRC (checksum=False, torch.serialization.set_crc32_options(False))
            self._sources[position] = _Source(file, offset, size, None, crc or None, sizes, getattr(torch, dtype_name))
        return [position for position, located in zip(unknown, found, strict=True) if located is None]

    def _range_of(self, position: int) -> tuple[int, int, int]:
        """Of a record: its file's number, its offset and its length."""
        place = self._wanted[position].place
        return self._inputs.numbers[place.file], place.offset, place.length

    def _check_ends(self, positions: Iterable[int]) -> None:
        """Whether files are there and reach to where what is wanted ends: the core checks this before it reads."""
        ends = [(position, end) for position in positions for end in self._ends_of(position)]
        if ends:
            with self._explaining(position for position, _ in ends):
                _C.load_bytes(self._inputs.core, [(*end, 0, None) for _, end in ends], self._options)

    def _ends_of(self, position: int) -> list[tuple[int, int]]:
        source = self._sources.get(position)
        if source is not None:
            return [(one.file, one.payload_offset + one.payload_bytes) for one in source.stored]
        file, offset, length = self._range_of(position)
        return [(file, offset + length)]

    # ---- objects and whole records ----

    def _check_wholes(self, wholes: list[int]) -> None:
        for position in wholes:
            item, _, stored = self._wanted[position]
            if stored is not None and not self._is_windowed:
                self._check_target(position, self._planner.resolve_tensor(item), stored[1])

    def _read_whole(self, positions: list[int]) -> list[io.BytesIO]:
        self._check_ends(positions)
        places = [self._wanted[position].place for position in positions]
        ranges = [(*self._range_of(at), place.crcs) for at, place in zip(positions, places, strict=True)]
        with self._explaining(positions), self._phases.core(self._watch, "read objects", self._inputs.names):
            data, stats = _C.load_bytes(self._inputs.core, ranges, self._options)
        self._count(stats)
        values = [self._untransformed(at, raw) for at, raw in zip(positions, data, strict=True)]
        for position, place, value in zip(positions, places, values, strict=True):
            if self._checksum and not place.crcs:
                self._check_archive(position, value)
        return values

    def _check_archive(self, position: int, data: io.BytesIO) -> None:
        """Checks the CRCs that torch.save has put into its archive, and torch.load does not look at."""
        if data.getbuffer()[:2] != b"PK":
            return
        try:
            with zipfile.ZipFile(data) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
            damaged = str(error)
        if damaged is not None:
            place = self._wanted[position].place
            path = f"{self._path}/{place.file}"
            raise CorruptCheckpointError(f"{self._name(position)} is damaged ({damaged})", path, place.offset)
        data.seek(0)

    def _untransformed(self, position: int, data: bytes) -> io.BytesIO:
        item, place, _ = self._wanted[position]
        if not place.descriptors:
            return io.BytesIO(data)
        stream = self._transforms.transform_load_stream(item, place.descriptors, io.BytesIO(data))
        return io.BytesIO(stream.read(-1))

    def _read_objects(self, objects: list[int]) -> list[Loaded | io.BytesIO]:
        """Objects, which the planner gets only after all of them have been checked; as they are, if trusted."""
        streams = self._read_whole(objects) if objects else []
        if self._trusted is True:
            return list(streams)
        return [self._unpickle(position, stream) for position, stream in zip(objects, streams, strict=True)]

    def _load_object(self, item: ReadItem, value: Loaded | io.BytesIO) -> None:
        planner = self._planner
        if isinstance(value, io.BytesIO):
            planner.load_bytes(item, value)
        elif value.has_tensors or not isinstance(planner, RingLoadPlanner) or not planner.takes_objects:
            planner.load_bytes(item, value.stream())
        else:
            planner.load_object(item, value.value)

    def _unpickle(self, position: int, stream: io.BytesIO) -> Loaded | io.BytesIO:
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
                f"{self._name(position)} holds more than plain data and tensors, and loading it could run code: "
                f"{error}. If you trust the checkpoint, pass RingReader(..., trusted=True), or {cure}."
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes end in errors of any kind
            raise CorruptCheckpointError(
                f"{self._name(position)} cannot be read: {_first_line(error)}", self._path
            ) from error

    def _tensor_of(self, position: int, stream: io.BytesIO) -> Any:
        loaded = stream if self._trusted is True else self._unpickle(position, stream)
        if isinstance(loaded, io.BytesIO):
            return torch.load(loaded, map_location="cpu", weights_only=False)
        return loaded.value

    def _load_wholes(self, batch: list[int]) -> None:
        for position, data in zip(batch, self._read_whole(batch), strict=True):
            item, _, stored = self._wanted[position]
            tensor = self._tensor_of(position, data)
            if not isinstance(tensor, Tensor):
                raise CorruptCheckpointError(f"{self._name(position)} is stored as {type(tensor).__name__}", self._path)
            if stored is not None and tensor.size() != stored[0]:
                raise CorruptCheckpointError(
                    f"{self._name(position)}: the record's shape is {list(tensor.size())}, the metadata says "
                    f"{list(stored[0])}",
                    self._path,
                )
            part = narrowed(tensor, item.storage_offsets, item.lengths)
            target = self._planner.resolve_tensor(item)
            if target.layout == torch.strided:  # copy_ into a detached sparse tensor does not reach the original
                target = target.detach()
            self._check_target(position, target, tensor.dtype)
            try:
                target.copy_(part)
            except RuntimeError as error:
                layouts = f"the checkpoint has {part.layout}, the state dict {target.layout}"
                raise CheckpointError(
                    f"{self._name(position)} cannot be copied ({layouts}): {_first_line(error)}"
                ) from error
            self._planner.commit_tensor(item, target)
            self._stats.tensor_bytes += part.numel() * part.dtype.itemsize

    # ---- plain tensors ----

    def _load_plain(self) -> None:
        matched = self._matched
        if matched is None:
            self._load_sources(self._sources)
        elif matched.exchange is None:
            self._read_matched(matched, matched.mask)
            if matched.landing is not None:
                self._land(matched, matched.landing)
            self._load_sources(self._sources)
        else:
            self._load_handed_on(matched, matched.exchange)

    def _load_handed_on(self, matched: Matched, exchange: Exchange) -> None:
        def read(positions: set[int]) -> None:
            self._read_matched(matched, both(matched.mask, mask_of(len(matched.mask), positions)))
            self._load_sources([position for position in self._sources if position in positions])

        def read_pieces(pieces: list[tuple[Piece, Tensor]], filled: set[int]) -> None:
            self._read_pieces(matched, pieces, filled)

        everything = {position for position, good in enumerate(matched.mask) if good} | self._sources.keys()
        exchange.run(everything, read, read_pieces, matched.take, self._stats, self._phases, self._meter.advance)

    def _read_pieces(self, matched: Matched, pieces: list[tuple[Piece, Tensor]], filled: set[int]) -> None:
        """Reads pieces of records as bytes.

        Args:
            filled: items that have been overwritten already, for an error to say so.
        """
        boxes: list[tuple[Any, ...]] = []
        for piece, _ in pieces:
            stored = matched.storage.get(piece.row)
            assert stored is not None
            place = Placed(*stored)
            if place.payload_bytes != piece.record_bytes:
                raise CorruptCheckpointError(
                    f"{self._name(piece.overlaps[0])}: the record has {place.payload_bytes} bytes, its shape and dtype "
                    f"need {piece.record_bytes}",
                    f"{self._path}/{place.file}",
                    place.payload_offset,
                )
            where = self._inputs.numbers[place.file], place.payload_offset, place.payload_bytes
            boxes.append((*where, place.crcs, None, *piece.as_bytes()))
        targets = [memory.view(box[-1]) for box, (_, memory) in zip(boxes, pieces, strict=True)]
        with self._explaining((piece.overlaps[0] for piece, _ in pieces), changed=filled):
            self._read(lambda: _C.load(self._inputs.core, boxes, targets, self._options))

    def _land(self, matched: Matched, landing: Landing) -> None:
        changed = [position for position, good in enumerate(matched.mask) if good]

        def window_of(number: int, positions: list[int], pairs: list[tuple[Tensor, Tensor]]) -> _Window:
            mask = mask_of(len(landing.mask), positions)
            self._stats.tensor_bytes += matched.size_bytes(mask)
            return _Window(number, positions, self._calls_of(matched, mask, landing.tensors), pairs)

        with landing, torch.no_grad():
            self._stream(landing.uploader, itertools.starmap(window_of, landing.windows()), changed)

    def _stream(self, uploader: Uploader, made: Iterable[_Window], changed: list[int]) -> None:
        """Reads windows, some of them at the same time, and has each copied from when it is there.

        Args:
            changed: items that have been overwritten, for an error to say so; those of the windows are added.
        """

        def arrived(window: _Window, results: list[Callable[[], _ReadStats]]) -> None:
            for call, result in zip(window.calls, results, strict=True):
                with self._explaining(call.positions, changed):
                    self._count(result())
            window.check()
            uploader.send(window.number, window.pairs)
            changed.extend(window.positions)

        waiting: collections.deque[tuple[_Window, list[Callable[[], _ReadStats]]]] = collections.deque()
        with self._phases.core(self._watch, "read tensors", self._inputs.names), uploader.readers() as begin:
            for window in made:
                waiting.append((window, [begin(call.read) for call in window.calls]))
                if len(waiting) > uploader.ahead:
                    arrived(*waiting.popleft())
            while waiting:
                arrived(*waiting.popleft())

    def _read_matched(self, matched: Matched, mask: bytes) -> None:
        self._run(self._calls_of(matched, mask, matched.tensors))
        matched.note_filled(itertools.compress(array.array("I", matched.items.match.wanted_rows()), mask))
        self._stats.tensor_bytes += matched.size_bytes(mask)

    def _calls_of(self, matched: Matched, mask: bytes, tensors: _C.Tensors) -> list[_Call]:
        calls: list[_Call] = []
        for gaps, options in self._ways:
            chosen = mask if gaps is None else both(mask, matched.interleaved[gaps])
            if any(chosen):
                where = matched.items.match, matched.storage, tensors
                read = functools.partial(_C.load_matched, self._inputs.core, *where, chosen, options)
                calls.append(_Call(itertools.compress(range(len(chosen)), chosen), read))
        return calls

    def _run(self, calls: Iterable[_Call], changed: Iterable[int] | None = None) -> None:
        done: list[_Call] = []
        for call in calls:
            before = itertools.chain.from_iterable(each.positions for each in done)
            with self._explaining(call.positions, changed, before):
                self._read(call.read)
            done.append(call)

    def _load_sources(self, positions: Iterable[int]) -> None:
        for window in windows(positions, self._source_bytes, _WINDOW_BYTES if self._is_windowed else None):
            self._load_window(window)

    def _load_window(self, positions: list[int]) -> None:
        items = [self._wanted[position].item for position in positions]
        targets = [self._planner.resolve_tensor(item).detach() for item in items]
        kinds = _C.Tensors([target if type(target) is Tensor else _NOT_PLAIN for target in targets]).kinds()
        in_place: list[_Box] = []
        through_host: list[_Box] = []
        for position, item, target, kind in zip(positions, items, targets, kinds, strict=True):
            source = self._sources[position]
            self._check_target(position, target, source.dtype)
            plain = kind == 0 and type(target) is Tensor and _is_plain_memory(target)
            if isinstance(source, _Coded):
                source, plain = source.made_for(target), plain and (target.size(-1) <= 1 or target.stride(-1) == 1)
            box = _Box(position, source, item.storage_offsets, item.lengths, target)
            (in_place if plain and target.dtype == source.dtype else through_host).append(box)
        self._check_ends(box.position for box in through_host)
        self._read_boxes(in_place, self._sums)
        _bump_versions([box.memory for box in in_place])
        self._read_through_host(through_host)
        for item, target in zip(items, targets, strict=True):
            self._planner.commit_tensor(item, target)
            self._stats.tensor_bytes += target.nbytes

    def _check_target(self, position: int, target: Tensor, stored: torch.dtype) -> None:
        item = self._wanted[position].item
        if target.size() != item.lengths:
            raise PlanError(
                f"{self._name(position)}: the checkpoint has shape {list(item.lengths)} here, the state dict "
                f"{list(target.size())}; load into tensors of the shape that was saved (req {item.storage_index} "
                f"mismatch sizes {target.size()} vs {item.lengths})"
            )
        if target.dtype == stored:
            return
        what = f"{self._name(position)}: the checkpoint has {stored}, the state dict {target.dtype}"
        if self._casts == "never":
            raise CheckpointError(f'{what}, and casts="never"')
        if self._casts != "any" and not torch.can_cast(stored, target.dtype):
            raise CheckpointError(
                f"{what}, and that cast would lose data; load into a {stored} tensor and convert it, or pass "
                'RingReader(..., casts="any")'
            )
        logger.info("%s is cast from %s to %s", self._name(position), stored, target.dtype)

    def _read_boxes(self, boxes: list[_Box], sums: RunningCrcs | None, changed: Iterable[int] | None = None) -> None:
        self._read_plain([box for box in boxes if isinstance(box.source, _Source)], sums, changed)
        coded = (part for box in boxes if isinstance(box.source, _Coded) for part in _cut(box, box.source))
        for window in windows(coded, lambda part: part[1].scale_bytes(part[0]), _WINDOW_BYTES):
            self._read_coded(window, changed)

    def _read_plain(self, boxes: list[_Box], sums: RunningCrcs | None, changed: Iterable[int] | None = None) -> None:
        self._run(self._calls_for(boxes), changed)
        self._check_sums(boxes, sums, changed)

    def _calls_for(self, boxes: list[_Box]) -> list[_Call]:
        calls: list[_Call] = []
        for gaps, options in self._ways:
            chosen = boxes
            if gaps is not None:
                chosen = [box for box in boxes if (range_of_box(box.source.sizes, *box[2:4]) is None) == gaps]
            if chosen:
                wanted = [(*_source_of(box)[:-1], box.offsets, box.lengths) for box in chosen]
                read = functools.partial(_C.load, self._inputs.core, wanted, [box.memory for box in chosen], options)
                calls.append(_Call([box.position for box in chosen], read))
        return calls

    def _read_coded(self, boxes: list[tuple[_Box, _Coded]], changed: Iterable[int] | None) -> None:
        """Reads the scales of boxes, and then their codes, of which the core makes what was wanted."""
        reads: list[tuple[Any, ...]] = []
        scales: list[_Box] = []
        for number, (box, source) in enumerate(boxes):
            codes, factors = source.form.boxes(box.offsets, box.lengths)
            reads.append((*source.stored[0][:-1], *codes, (*source.form.how(box.offsets), number)))
            stored = source.stored[1]
            scales.append(_Box(box.position, stored, *factors, torch.empty(factors[1], dtype=stored.dtype)))
        self._read_plain(scales, None, changed=())
        values = [scale.memory for scale in scales]
        values = [value if value.dtype == torch.uint8 else value.to(torch.float32) for value in values]
        memory = [box.memory for box, _ in boxes]
        with self._explaining((box.position for box, _ in boxes), changed):
            self._read(lambda: _C.load(self._inputs.core, reads, memory, self._options, values))

    def _check_sums(self, boxes: list[_Box], sums: RunningCrcs | None, changed: Iterable[int] | None) -> None:
        """Checks what the core cannot, as it has seen only a part of a record with one CRC."""
        if sums is None or not self._checksum:
            return
        for box in boxes:
            source = _source_of(box)
            name = self._inputs.names[source.file]
            if not _sum_up(sums, name, source, box):
                why = f"CRC-32 of its {source.payload_bytes} bytes is not what it was when they were written"
                error = CorruptCheckpointError(why, f"{self._path}/{name}", source.payload_offset)
                known = [each.position for each in boxes] if changed is None else changed
                raise self._explained(error, box.position, known)

    def _read_through_host(self, boxes: list[_Box]) -> None:
        """Reads windows of host copies; a large tensor comes in several boxes."""
        sums = self._sums or RunningCrcs()
        changed: list[int] = []
        for is_coded in (False, True):
            chosen = [box for box in boxes if isinstance(box.source, _Coded) == is_coded]
            if not chosen:
                continue
            with Uploader([box.memory for box in chosen], sum(map(_host_bytes, chosen)), _WINDOW_BYTES) as uploader:
                cut = uploader.window_bytes
                parts = (part for box in chosen for part in _parts_of(box, cut // box.source.dtype.itemsize))
                for_window = functools.partial(self._host_window, uploader, is_coded, sums, changed)
                self._stream(
                    uploader, itertools.starmap(for_window, enumerate(windows(parts, _host_bytes, cut))), changed
                )

    def _host_window(
        self, uploader: Uploader, is_coded: bool, sums: RunningCrcs, changed: list[int], number: int, parts: list[_Box]
    ) -> _Window:
        uploader.turn(number)
        hosts = uploader.take(number, ((part.lengths, part.source.dtype) for part in parts))
        boxes = [part._replace(memory=host) for part, host in zip(parts, hosts, strict=True)]
        pairs = [(part.memory, host) for part, host in zip(parts, hosts, strict=True)]
        positions = [part.position for part in parts]
        if is_coded:  # what is made of what has been read before
            return _Window(number, positions, [], pairs, functools.partial(self._read_boxes, boxes, sums, changed))
        check = functools.partial(self._check_sums, boxes, sums, changed)
        return _Window(number, positions, self._calls_for(boxes), pairs, check)

    # ---- reporting ----

    def _read(self, read: Callable[[], _ReadStats]) -> None:
        """Reads tensors in the core."""
        with self._phases.core(self._watch, "read tensors", self._inputs.names):
            stats = read()
        self._count(stats)

    def _count(self, stats: _ReadStats) -> None:
        read, cached, engine, direct = stats
        self._stats.bytes += read
        self._stats.cached_bytes += cached
        self._stats.engine = engine or self._stats.engine
        self._stats.direct |= direct

    def _item(self, position: int) -> ReadItem:
        if position in self._wanted or self._matched is None:
            return self._wanted[position].item
        return self._matched.items.make(position)

    def _name(self, position: int) -> str:
        return repr(self._item(position).storage_index.fqn) + ("" if self._rank is None else f" (rank {self._rank})")

    @contextlib.contextmanager
    def _explaining(
        self, positions: Iterable[int], changed: Iterable[int] | None = None, before: Iterable[int] = ()
    ) -> Iterator[None]:
        """Of a call of the core.

        Args:
            positions: of what it is given, by whose order it says what has failed.
            changed: what has been overwritten; None: the core says it of this call.
            before: in that case, what had been overwritten before.
        """
        try:
            yield
        except _CORE_ERRORS as error:
            given = list(positions)
            index = getattr(error, "item", None)
            failed = given[index] if index is not None and index < len(given) else None
            own = [given[index] for index in getattr(error, "changed", [])]
            known = [*before, *own] if changed is None else changed
            raise self._explained(error, failed, known) from error

    def _explained(self, error: Exception, failed: int | None, changed: Iterable[int]) -> Exception:
        """The same error, with the key, the rank, and which tensors had changed already."""
        whose = self._path if self._rank is None else f"rank {self._rank}"
        where = whose if failed is None else self._name(failed)
        keys = [] if self._rank is None else [self._item(position).dest_index.fqn for position in changed]
        note = f"; already overwritten in the state dict: {some_keys(keys, 5)}" if keys else ""
        if isinstance(error, CorruptCheckpointError):
            return CorruptCheckpointError(f"{where}: {error.args[0]}{note}", error.path, error.offset)
        if isinstance(error, OSError):
            return OSError(error.errno, f"{where}: {error.strerror}{note}", error.filename)
        if isinstance(error, MemoryError):
            return CheckpointError(f"{where}: there is not enough memory for it{note}")
        return CorruptCheckpointError(f"{where}: {error}{note}", self._path)


def _check_chunks(items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Items of DTensors must be filled into what this rank holds of them."""
    values = getattr(planner, "state_dict", None) or {}
    for item in items:
        offset, name = item.dest_index.offset, item.dest_index.fqn
        if item.type == LoadItemType.TENSOR and offset is not None:
            check_chunk(name, values.get(name), offset, item.dest_offsets, item.lengths, "RingLoadPlanner")


def _source_of(box: _Box) -> _Source:
    assert isinstance(box.source, _Source)
    return box.source


def _host_bytes(box: _Box) -> int:
    return padded(math.prod(box.lengths) * box.source.dtype.itemsize)


def _parts_of(box: _Box, most_elements: int) -> Iterator[_Box]:
    for offsets, lengths in split_box(box.lengths, most_elements):
        memory = narrowed(box.memory, offsets, lengths)
        yield box._replace(offsets=_added(box.offsets, offsets), lengths=lengths, memory=memory)


def _cut(box: _Box, source: _Coded) -> Iterator[tuple[_Box, _Coded]]:
    """Parts of which the scales fit a window."""
    elements, size = math.prod(box.lengths), source.scale_bytes(box)
    if elements:
        for part in _parts_of(box, elements * _WINDOW_BYTES // max(size, _WINDOW_BYTES)):
            yield part, source


def _sum_up(sums: RunningCrcs, name: str, source: _Source, box: _Box) -> bool:
    """Takes what was read of a box; False: its record is damaged."""
    if source.whole_crc is None or box.lengths == source.sizes:
        return True
    start = box_start(source.sizes, box.offsets, box.lengths)
    if start is None:
        return True
    data = box.memory.contiguous()
    part = buffer_at(data.data_ptr(), data.nbytes)
    record = name, source.payload_offset
    return sums.add(record, start * data.itemsize, part, source.payload_bytes, source.whole_crc)


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


def _added(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
