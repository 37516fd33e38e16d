"""Files of ``torch.save`` as source and target.

A source's structure is read by ``torch.load(weights_only=True)`` without any of its data, which then are read straight
from where they lie in the zip file; the zip's own listing says where they lie and what their CRC-32s are. A target is
a zip file whose pickle is made from stand-ins for the tensors.
"""

from __future__ import annotations

import functools
import io
import itertools
import mmap
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring import _C
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from dcpring.format.unpickler import RefusedError, Safe
from dcpring.format.zip import ZipStream, compressed_entry
from dcpring.move.crc import RunningCrcs, buffer_at
from dcpring.move.objects import archive_of, entries_of, load_with_torch
from dcpring.options import IOOptions
from dcpring.plan.flatten import is_terminal
from dcpring.plan.pieces import range_of_box
from dcpring.sources.beside import file_beside
from dcpring.sources.stream import (
    PLAIN_DTYPES,
    WINDOW_BYTES,
    DictKey,
    Path,
    Source,
    SourceItem,
    SourcePart,
    StreamedPart,
    TargetPart,
    first_names,
    stream,
)
from dcpring.torchside.serialization import (
    described,
    forget_unfinished_load,
    identity,
    loads_without_data,
    place_in_file,
    rebuild_tensor,
    rebuild_tensor_of_dtype,
)
from dcpring.torchside.tensors import is_whole

_MOST_LEAVES = 1 << 21
"""A few bytes can stand for any number of them: a dict that holds another twice, which holds another twice."""

_LOCAL_HEADER = struct.Struct("<26xHH")


class _StoredEntry(NamedTuple):
    """A stored entry of the zip file: the data of a storage, or what describes them."""

    offset: int
    size: int
    crc: int
    is_data: bool = True


class _TensorView(NamedTuple):
    """A tensor in a record; offset and strides in elements."""

    record: _StoredEntry
    offset: int
    stride: tuple[int, ...]


class _Map(NamedTuple):
    """Memory from ``start`` to ``end`` shows the file from ``offset`` on."""

    start: int
    end: int
    offset: int


class _NotWithoutData(CheckpointError):
    """torch cannot describe a tensor without its data."""


class TorchSource:
    """A zip file that ``torch.save`` wrote. Every record that is used is checked against its CRC-32."""

    format = "torch"
    files = 1

    def __init__(self, path: FilePath, *, trusted: bool) -> None:
        real = path.resolve()
        self._path = path
        self._input = _C.Input(str(real.parent), [real.name])
        self._trusted = trusted
        self._options = IOOptions().for_core(False)
        self._records = _records(path)
        self._views: dict[str, _TensorView] = {}
        self._sums = RunningCrcs()
        self._checked: set[_StoredEntry] = set()
        self._held: tuple[str, Tensor] | None = None
        self.notes: Mapping[str, str] = {}
        self.unreadable: Mapping[str, str] = {}
        for record in self._records.values():
            if not record.is_data:
                self._check_record("what describes its values", record)
        self._maps: list[_Map] = []
        self.items = [self._item(*leaf) for leaf in self._leaves(self._structure())]

    # ---- structure ----

    def _structure(self) -> Any:
        """All that the file holds, without data; with mapped data where torch cannot describe it without any.

        So it is with torch 2.9, with quantized tensors, and with sparse ones since torch 2.15, which looks whether they
        are well made.
        """
        try:
            if loads_without_data:
                loaded = self._load("meta")
                plain = (value for _, value in self._leaves(loaded) if _is_plain(value))
                if all(place_in_file(value.untyped_storage()) >= 0 for value in plain):
                    return loaded
        except _NotWithoutData:
            forget_unfinished_load()
        try:
            loaded = self._load("cpu")
        except (_NotWithoutData, CorruptCheckpointError):
            for record in self._records.values():
                self._check_record("what it holds", record)
            raise
        self._maps = _maps_of(self._path)
        return loaded

    def _load(self, location: str) -> Any:
        """All that the file holds: without data ("meta"), or with data that are mapped ("cpu")."""
        try:
            with self._path.open("rb") as file:
                path = FilePath(
                    f"/proc/self/fd/{file.fileno()}"
                )  # torch 2.9 to 2.12 maps no file whose path is no UTF-8
                if self._trusted:
                    return torch.load(path, location, weights_only=False, mmap=location == "cpu")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    entries = entries_of(memoryview(data))
                return load_with_torch(path, Safe(), location, entries, mmap=location == "cpu")[0]
        except RefusedError as error:
            raise UntrustedCheckpointError(
                f"{self._path} holds more than plain data and tensors, and loading it could run code: {error}",
                "pass trusted=True",
            ) from error
        except (MemoryError, OSError):
            raise
        except Exception as error:  # damaged bytes end in errors of any kind
            from_torch = error.__cause__ if isinstance(error, ValueError) else error
            if isinstance(from_torch, NotImplementedError) or (
                location == "meta" and isinstance(from_torch, RuntimeError)
            ):
                raise _NotWithoutData(
                    f"{self._path} holds a special tensor, which torch cannot load here; load the file where it was "
                    f"saved, and save such tensors as ordinary ones ({from_torch!s:.100})"
                ) from error
            raise CorruptCheckpointError(f"the file cannot be read: {error!s:.200}", str(self._path)) from error

    def _leaves(self, loaded: Any) -> list[tuple[Path, Any]]:
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{self._path} holds a {type(loaded).__name__}, not a dict of tensors")
        try:
            leaves = list(itertools.islice(_leaves((), loaded), _MOST_LEAVES + 1))
        except RecursionError as error:
            raise CheckpointError(f"{self._path}: it holds something that holds itself") from error
        if len(leaves) > _MOST_LEAVES:
            raise CheckpointError(f"{self._path}: it holds more than {_MOST_LEAVES:,} values")
        return leaves

    def _item(self, path: Path, value: Any) -> SourceItem:
        name = ".".join(map(str, path))
        if name in self._views:
            raise CheckpointError(f"{self._path}: two of its values would be called {name!r}")
        if not _is_plain(value):
            self._views[name] = _NOWHERE
            return SourceItem(name, name, path)
        self._views[name] = view = self._view(name, value)
        place = (view.record.offset, view.offset, view.stride)
        return SourceItem(name, name, path, tuple(value.shape), value.dtype, value.dtype, place)

    def _view(self, name: str, tensor: Tensor) -> _TensorView:
        storage = tensor.untyped_storage()
        offset, size = self._place_of(storage), storage.nbytes()
        record = self._records.get(offset, _NOWHERE.record)
        if size == 0 and self._maps:  # of which nothing is mapped
            record = _StoredEntry(0, 0, 0)
        view = _TensorView(record, int(tensor.storage_offset()), tensor.stride())
        if record.size != size or record is _NOWHERE.record:
            raise self._damaged(name, "the zip file has no data where its pickle says")
        reach = view.offset + sum((n - 1) * s for n, s in zip(tensor.shape, view.stride, strict=True)) + 1
        if tensor.numel() and not (view.offset >= 0 <= min((0, *view.stride)) and reach * tensor.itemsize <= size):
            raise self._damaged(name, "it reaches beyond its data")
        return view

    def _place_of(self, storage: torch.UntypedStorage) -> int:
        """Where a storage lies in the file; -1: nowhere."""
        if not self._maps:
            return place_in_file(storage)
        at = storage.data_ptr()
        return next((each.offset + at - each.start for each in self._maps if each.start <= at < each.end), -1)

    def _damaged(self, name: str, why: str, offset: int = -1) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{name!r}: {why}", str(self._path), offset)

    # ---- objects ----

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        """The values that are not plain tensors; their data are mapped, and read when they are needed."""
        for record in set(self._records.values()) - {view.record for view in self._views.values()}:
            self._check_record("its objects and special tensors", record)
        leaves = self._leaves(self._load("cpu"))
        return {name: value for path, value in leaves if self._views[name := ".".join(map(str, path))] is _NOWHERE}

    def object_value(self, item: SourceItem) -> Any:
        return self._values[item.source]

    def object_bytes(self, item: SourceItem) -> bytes:
        value = self._values[item.source]
        return archive_of(value.clone() if isinstance(value, Tensor) else value)

    # ---- tensors ----

    def read(self, parts: Sequence[SourcePart]) -> None:
        straight = [part for part in parts if self._is_contiguous(part.item) and part.tensor.numel()]
        reads = [self._read_of(part) for part in straight]
        self._run([part.item.source for part in straight], reads, [part.tensor for part in straight])
        for part in straight:
            self._check(part)
        for part in parts:
            if not self._is_contiguous(part.item) and part.tensor.numel():
                whole = self._whole(part.item)
                part.tensor.copy_(whole[tuple(map(slice, part.offsets, _ends(part)))])

    def _is_contiguous(self, item: SourceItem) -> bool:
        stride = 1
        for size, found in zip(reversed(item.shape or ()), reversed(self._views[item.source].stride), strict=True):
            if size != 1 and found != stride:
                return False
            stride *= size
        return True

    def _read_of(self, part: SourcePart) -> tuple[Any, ...]:
        item, view = part.item, self._views[part.item.source]
        assert item.stored is not None
        start = view.record.offset + view.offset * item.stored.itemsize
        where = (start, item.numel * item.stored.itemsize, None, None)
        return (0, *where, item.shape, part.offsets, tuple(part.tensor.shape))

    def _run(self, names: list[str], reads: list[tuple[Any, ...]], tensors: list[Tensor]) -> None:
        try:
            _C.load(self._input, reads, tensors, self._options)
        except CorruptCheckpointError as error:
            index = getattr(error, "item", None)
            raise self._damaged(names[index or 0], error.args[0]) from error

    def _check(self, part: SourcePart) -> None:
        """Sums up a tensor that is all of its record; the record of any other is read through once for it."""
        item, view = part.item, self._views[part.item.source]
        assert item.stored is not None
        size = item.numel * item.stored.itemsize
        if size != view.record.size:
            self._check_record(item.source, view.record)
            return
        bounds = range_of_box(item.shape or (), part.offsets, tuple(part.tensor.shape))
        assert bounds is not None
        if not self._sums.add(item.source, bounds[0] * item.stored.itemsize, part.memory, size, view.record.crc):
            raise self._wrong_sum(item.source, view.record)

    def _check_record(self, whose: str, record: _StoredEntry) -> None:
        if record in self._checked:
            return
        for start in range(0, record.size, WINDOW_BYTES):
            size = min(WINDOW_BYTES, record.size - start)
            (data,), _ = _C.load_bytes(self._input, [(0, record.offset + start, size, None)], self._options)
            if not self._sums.add(record, start, data, record.size, record.crc):
                raise self._wrong_sum(whose, record)
        self._checked.add(record)

    def _wrong_sum(self, whose: str, record: _StoredEntry) -> CorruptCheckpointError:
        return self._damaged(whose, "its CRC-32 does not match", record.offset)

    def _whole(self, item: SourceItem) -> Tensor:
        """A tensor that is not contiguous, as it was saved; the last one asked for stays in memory."""
        if self._held is None or self._held[0] != item.source:
            view = self._views[item.source]
            assert item.stored is not None
            self._held = None
            self._check_record(item.source, view.record)
            reach = sum((n - 1) * s for n, s in zip(item.shape or (), view.stride, strict=True)) + 1
            data = torch.empty(reach, dtype=item.stored)
            start = view.record.offset + view.offset * item.stored.itemsize
            self._run([item.source], [(0, start, data.nbytes, None, None, (reach,), (0,), (reach,))], [data])
            self._held = item.source, data.as_strided(item.shape or (), view.stride)
        return self._held[1]


_NOWHERE = _TensorView(_StoredEntry(-1, -1, 0), 0, ())
"""Of what is no plain tensor."""


def _ends(part: SourcePart) -> tuple[int, ...]:
    return tuple(a + n for a, n in zip(part.offsets, part.tensor.shape, strict=True))


def _maps_of(path: FilePath) -> list[_Map]:
    """Where this process has mapped a file. Layered file systems show other numbers of a file, or another path."""
    file, real, found = path.stat(), os.fsencode(path.resolve()), []
    with open("/proc/self/maps", "rb") as lines:
        for line in lines:
            addresses, _, offset, device, inode, *shown = line.rstrip(b"\n").split(None, 5)
            numbers = int(inode), *(int(number, 16) for number in device.split(b":"))
            if shown == [real] or numbers == (file.st_ino, os.major(file.st_dev), os.minor(file.st_dev)):
                start, end = (int(address, 16) for address in addresses.split(b"-"))
                found.append(_Map(start, end, int(offset, 16)))
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose elements lie in a record."""
    return (
        is_whole(value)
        and value.layout == torch.strided
        and value.dtype in PLAIN_DTYPES
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_quantized
    )


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """As DCP opens mappings, and lists that hold tensors or mappings; empty mappings stay as they are."""
    if isinstance(value, Mapping) and (value or not path):
        for key, entry in value.items():
            yield from _leaves((*path, key if isinstance(key, str) else DictKey(key)), entry)
    elif isinstance(value, list) and not is_terminal(value):
        for index, entry in enumerate(value):
            yield from _leaves((*path, index), entry)
    else:
        yield path, value


def _records(path: FilePath) -> dict[int, _StoredEntry]:
    """The stored entries of a zip file, by where their data begin."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            if compressed := compressed_entry(archive):
                cure = "another's file can be packed again with zip -0"
                raise CorruptCheckpointError(f"{compressed}; {cure}", str(path))
            found = {}
            for info in archive.infolist():
                file.seek(info.header_offset)
                name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
                found[start] = _StoredEntry(start, info.file_size, info.CRC, "/data/" in info.filename)
            size = file.seek(0, io.SEEK_END)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise CorruptCheckpointError(f"the zip file is damaged ({error})", str(path)) from error
    if any(record.offset + record.size > size for record in found.values()):
        raise CorruptCheckpointError("the zip file is cut off", str(path))
    if sum(record.size for record in found.values()) > size:
        raise CorruptCheckpointError("the zip file's entries overlap", str(path))
    return found


# ---- writing ----

_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}
"""The other dtypes have no class of their own: ``torch.save`` writes bytes, and the dtype beside them."""


class _Storage:
    """Stands for the data of an item in the pickle."""

    def __init__(self, key: str, item: SourceItem) -> None:
        assert item.dtype is not None
        name = _STORAGES.get(item.dtype)
        kind = getattr(torch, name) if name else torch.storage.UntypedStorage
        self.id = ("storage", kind, key, "cpu", item.numel if name else item.nbytes)


class _Stub:
    """Stands for a tensor: pickles as a contiguous one does."""

    def __init__(self, item: SourceItem, storage: _Storage) -> None:
        self._item = item
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        item = self._item
        assert item.shape is not None and item.dtype is not None
        stride = torch.empty(item.shape, device="meta").stride()
        hooks: dict[str, Any] = OrderedDict()
        args = (self._storage, 0, tuple(item.shape), stride, False, hooks)
        if item.dtype in _STORAGES:
            return rebuild_tensor, args
        return rebuild_tensor_of_dtype, (*args, item.dtype)


class _Pickler(pickle.Pickler):
    """As ``torch.save`` pickles; tensors inside of objects are kept for later.

    Attributes:
        storages: of these tensors, by key.
    """

    def __init__(self, file: io.BytesIO, used: int) -> None:
        super().__init__(file, protocol=2)
        self._used = used
        self._keys: dict[int, str] = {}
        self.storages: dict[str, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return obj.id
        if not isinstance(obj, torch.storage.TypedStorage) and not torch.is_storage(obj):
            return None
        name, count, storage = described(obj)
        kind = getattr(torch, name) if name else torch.storage.UntypedStorage
        key = self._keys.setdefault(identity(storage), str(self._used + len(self._keys)))
        self.storages[key] = storage
        return ("storage", kind, key, "cpu", count)


def nest(values: Sequence[tuple[Path, Any]]) -> dict[Any, Any]:
    """The nested dict that paths and values describe.

    Raises:
        CheckpointError: two paths contradict each other.
    """
    root: dict[Any, Any] = {}
    for path, value in values:
        holder: Any = root
        for step, below in zip(path, (*path[1:], None), strict=True):
            new: Any = value if below is None else [] if isinstance(below, int) else {}
            holder = _entered(holder, step, new, is_last=below is None, path=path)
    return root


def _entered(holder: Any, step: str | int | DictKey, new: Any, *, is_last: bool, path: Path) -> Any:
    if isinstance(step, int) != isinstance(holder, list):
        raise _contradiction(path)
    if isinstance(step, int):
        if step > len(holder) + _MOST_MISSING:
            raise _contradiction(path)
        holder += [None] * (step + 1 - len(holder))
        found = holder[step]
    else:
        step = step.key if isinstance(step, DictKey) else step
        found = holder.get(step)
    if found is None:
        holder[step] = found = new
    elif is_last or type(found) is not type(new):
        raise _contradiction(path)
    return found


_MOST_MISSING = 1 << 20
"""Entries of a list that may be missing before one that is there."""


def _contradiction(path: Path) -> CheckpointError:
    name = ".".join(map(str, path))
    return CheckpointError(f"{name!r} cannot be both a value and something that holds others; rename it with --key-map")


class TorchTarget:
    """One file that ``torch.load(weights_only=True)`` reads, mapped too."""

    format = "torch"
    is_directory = False

    def __init__(self, path: FilePath, items: Sequence[SourceItem]) -> None:
        self._path = path
        self._items = items
        tensors = [item for item in items if item.shape is not None]
        first = first_names(tensors)
        self._owners = [item for item in tensors if first[item.name] == item.name]
        storages = {item.name: _Storage(str(number), item) for number, item in enumerate(self._owners)}
        self._stubs = {item.name: _Stub(item, storages[first[item.name]]) for item in tensors}
        self.nbytes = sum(item.nbytes for item in self._owners)
        self.tied = len(self._stubs) - len(self._owners)
        self.files = [path.name]
        self._zip = ZipStream()
        self._crc = 0

    def write(self, source: Source, overwrite: bool, watch: _C.Watch | None) -> None:
        values = [
            (item.path, source.object_value(item) if item.shape is None else self._stubs[item.name])
            for item in self._items
        ]
        pickled = io.BytesIO()
        pickler = _Pickler(pickled, len(self._owners))
        pickler.dump(nest(values))
        entries = [("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")]
        head = [self._zip.small(f"archive/{name}", data) for name, data in entries]
        hint = self.nbytes + sum(map(len, head)) + 256 * len(self._owners)
        with file_beside(self._path, overwrite, hint, watch) as file:
            file.write_bytes(head)
            number = 0
            for runs in stream(source, map(TargetPart.all_of, self._owners)):
                number = self._write_runs(file, runs, number)
            for key, storage in pickler.storages.items():
                data = buffer_at(storage.data_ptr(), storage.nbytes())
                file.write_bytes(
                    [self._zip.begin(f"archive/data/{key}", len(data)), data, self._zip.end(_C.crc32(data))]
                )
            file.write_bytes([self._zip.directory()])

    def _write_runs(self, file: _C.FileWriter, runs: list[StreamedPart], number: int) -> int:
        """Writes payloads, and what belongs around them; returns the number of the next."""
        data: list[Any] = []
        for run in runs:
            if run.start == 0:
                data.append(self._zip.begin(f"archive/data/{number}", run.piece.nbytes))
                self._crc = 0
            data.append(run.part.memory)
            self._crc = _C.crc32(run.part.memory, self._crc)
            if run.start + len(run.part.memory) == run.piece.nbytes:
                data.append(self._zip.end(self._crc))
                number += 1
        file.write_bytes(data)
        return number
