"""safetensors files as source and target: one, or several with an index, as model hubs lay them out.

The format is 8 bytes for the length of a JSON header, the header, and the data. The safetensors package maps files or
holds them in memory; here the header is checked and written by these few lines, and the data go through the core.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.files import open_regular, read_regular
from dcpring.base.text import some
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.move.load import MOST_DIMENSIONS, Inputs
from dcpring.names.key_map import without_twice
from dcpring.options import IOOptions
from dcpring.sources.beside import directory_beside, file_beside, writing
from dcpring.sources.boxes import wrong_boxes
from dcpring.sources.contents import overlap_of
from dcpring.sources.stream import Item, Part, Piece, Source, stream
from dcpring.torchside.tensors import narrowed

INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 << 30

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MOST_HEADER_BYTES = 100_000_000
"""The limit that the safetensors package has."""

_ALIGNMENT = 8
_NOTES = "__metadata__"
_MOST_NAMED = 5


_SHARDING = "DCP_SHARDING_INFO"
_OF_SHARDS = (_SHARDING, "DCP_VERSION")
"""The notes of a file in which each tensor is one rank's part: HuggingFaceStorageWriter(save_distributed=True)."""
_SHARD_FILE = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


class _Shard(NamedTuple):
    """What a file holds of a tensor: all of it, mostly.

    Attributes:
        directory, file, offset: where its data begin.
        offsets, lengths: of the box that it is in the tensor, in elements.
        dtype: of its elements.
    """

    directory: str
    file: str
    offset: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype


# ---- reading ----


class SafetensorsSource:
    """A file, the files that an index lists, or the shards of all ranks. There are no checksums in them."""

    format = "safetensors"

    def __init__(self, path: FilePath) -> None:
        self._path = path
        self._options = IOOptions().for_core(False)
        self._shards: dict[str, list[_Shard]] = {}
        self._inputs: dict[str, Inputs] = {}
        self.notes: Mapping[str, str] = {}
        index = _index_of(path)
        listed = None if index is None else _weight_map(index)
        files = _files_of(path) if index is None or listed is None else [index.parent / one for one in _unique(listed)]
        for file in files:
            self._add(file, listed)
        self.files = len(files)
        if listed is not None and (missing := [name for name in listed if name not in self._shards]):
            raise CorruptCheckpointError(
                f"{missing[0]!r} is not in {listed[missing[0]]!r}, where the index says", str(index)
            )
        self.items = [self._item(name, shards) for name, shards in self._shards.items()]

    def _add(self, path: FilePath, listed: dict[str, str] | None) -> None:
        # Hubs' caches hold links to files elsewhere, and it was the user who named them.
        real = path.resolve()
        header, begin = _read_header(real)
        notes = header.pop(_NOTES, {})
        starts = _offsets_of(notes, header, real)
        self.notes = {**self.notes, **{name: text for name, text in notes.items() if name not in _OF_SHARDS}}
        for name, entry in header.items():
            if listed is not None and listed.get(name) != path.name:
                continue
            lengths = tuple(entry["shape"])
            where = (str(real.parent), real.name, begin + entry["data_offsets"][0])
            shard = _Shard(*where, starts.get(name, (0,) * len(lengths)), lengths, _DTYPES[entry["dtype"]])
            self._shards.setdefault(name, []).append(shard)

    def _item(self, name: str, shards: list[_Shard]) -> Item:
        """The tensor that the shards make up."""
        first = shards[0]
        others = [shard.dtype for shard in shards if shard.dtype != first.dtype]
        if others or len({len(shard.lengths) for shard in shards}) > 1:
            what = f"{first.dtype} and {others[0]}" if others else "of different numbers of dimensions"
            raise CorruptCheckpointError(f"{name!r}: its shards are {what}", str(self._path))
        shape = tuple(
            map(max, zip(*([o + n for o, n in zip(s.offsets, s.lengths, strict=True)] for s in shards), strict=True))
        )
        wrong = wrong_boxes(shape, [(shard.offsets, shard.lengths) for shard in shards])
        if wrong:
            files = some(list(dict.fromkeys(shard.file for shard in shards)), _MOST_NAMED)
            raise CorruptCheckpointError(
                f"{name!r} cannot be put together: {wrong}. It is in {files}; the files of all ranks that saved are "
                "needed, and none of another save",
                str(self._path),
            )
        return Item(name, name, (name,), shape, first.dtype, first.dtype)

    def read(self, parts: Sequence[Part]) -> None:
        found: dict[str, list[tuple[Part, _Shard, Tensor, tuple[int, ...]]]] = {}
        for part in parts:
            for shard in self._shards[part.item.source]:
                overlap = overlap_of(shard.offsets, shard.lengths, part.offsets, tuple(part.tensor.shape))
                if overlap is not None:
                    in_shard, in_part, lengths = overlap
                    target = narrowed(part.tensor, in_part, lengths)
                    found.setdefault(shard.directory, []).append((part, shard, target, in_shard))
        for directory, reads in found.items():
            self._read_from(directory, reads)

    def _inputs_of(self, directory: str) -> Inputs:
        if directory not in self._inputs:
            shards = (shard for shards in self._shards.values() for shard in shards)
            files = sorted({shard.file for shard in shards if shard.directory == directory})
            self._inputs[directory] = Inputs(directory, files)
        return self._inputs[directory]

    def _read_from(self, directory: str, reads: list[tuple[Part, _Shard, Tensor, tuple[int, ...]]]) -> None:
        inputs = self._inputs_of(directory)
        boxes: list[tuple[Any, ...]] = [
            (
                *(inputs.numbers[shard.file], shard.offset, math.prod(shard.lengths) * shard.dtype.itemsize),
                *(None, None, shard.lengths, start, tuple(target.shape)),
            )
            for _, shard, target, start in reads
        ]
        try:
            _C.load(inputs.core, boxes, [target for _, _, target, _ in reads], self._options)
        except CorruptCheckpointError as error:
            item = reads[getattr(error, "item", None) or 0][0].item
            raise CorruptCheckpointError(f"{item.source!r}: {error.args[0]}", error.path, error.offset) from error

    def object_bytes(self, item: Item) -> bytes:
        raise AssertionError("safetensors files hold no objects")

    def object_value(self, item: Item) -> Any:
        raise AssertionError("safetensors files hold no objects")


def is_safetensors(path: FilePath) -> bool:
    """Whether a file begins as one, or a directory or an index leads to some."""
    if path.is_dir():
        return bool(list(path.glob("*.safetensors")) or list(path.glob(f"*{INDEX_SUFFIX}")))
    if path.name.endswith(".json"):
        return True
    with open_regular(path) as file:
        head = file.read(9)
    return len(head) == 9 and int.from_bytes(head[:8], "little") <= _MOST_HEADER_BYTES and head[8:] == b"{"


def find_in(directory: FilePath) -> FilePath:
    """The index in a directory, or else the only safetensors file; the directory, where ranks left their shards."""
    found = sorted(directory.glob(f"*{INDEX_SUFFIX}")) or sorted(directory.glob("*.safetensors"))
    if len(found) > 1 and all(map(_is_shard, found)):
        return directory
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:_MOST_NAMED])
        raise CheckpointError(f"{directory} holds several models; name one of {names}")
    return found[0]


def _is_shard(path: FilePath) -> bool:
    return path.suffix == ".safetensors" and _SHARDING in _read_header(path.resolve())[0].get(_NOTES, {})


def _files_of(path: FilePath) -> list[FilePath]:
    """The file itself, or all shards in a directory. One rank's shard is no model."""
    if path.is_dir():
        shards = sorted(path.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{path} is a directory, and there is nothing in it to convert")
        return shards
    others = [one for one in path.parent.glob("shard-*") if _SHARD_FILE.fullmatch(one.name) and one.name != path.name]
    if others and _SHARD_FILE.fullmatch(path.name) and _is_shard(path):
        raise CheckpointError(
            f"{path} holds one rank's part of each tensor, and {len(others)} other files beside it the others; name "
            f"the directory, {path.parent}"
        )
    return [path]


def _offsets_of(notes: Mapping[str, str], header: Mapping[str, Any], path: FilePath) -> dict[str, tuple[int, ...]]:
    """Where in its tensor each shard of a file begins; nothing where the file holds whole tensors."""
    if _SHARDING not in notes:
        return {}
    try:
        listed = json.loads(notes[_SHARDING], object_pairs_hook=without_twice)
        found = {name: tuple(listed[name]["saved_offsets"]) for name in header}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"its {_SHARDING} is damaged ({error!s:.200})", str(path)) from error
    for name, offsets in found.items():
        good = all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets)
        if not good or len(offsets) != len(header[name]["shape"]):
            raise CorruptCheckpointError(f"its {_SHARDING} has {offsets!r:.100} for {name!r}", str(path))
    return found


def _index_of(path: FilePath) -> FilePath | None:
    return path if path.name.endswith(".json") else None


def _weight_map(index: FilePath) -> dict[str, str]:
    """The file of each name. Files lie beside the index."""
    try:
        found = json.loads(read_regular(index), object_pairs_hook=without_twice)
        listed = found["weight_map"]
        good = all(isinstance(name, str) and name and name not in (".", "..") for name in listed.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"it is no index of safetensors files ({error!s:.200})", str(index)) from error
    if not good or any("/" in name or "\0" in name for name in listed.values()):
        raise CorruptCheckpointError("the index names files that do not lie beside it", str(index))
    return dict(listed)


def _unique(listed: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(listed.values()))


def _read_header(path: FilePath) -> tuple[dict[str, Any], int]:
    """The checked header, and where the data begin."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise CorruptCheckpointError("it is no safetensors file, or cut off", str(path))
        data = file.read(length)
    try:
        header = json.loads(data, object_pairs_hook=without_twice)
        _check_header(header, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"its header is damaged ({error!s:.200})", str(path)) from error
    return header, 8 + length


def _check_header(header: Any, data_bytes: int) -> None:
    """Types, sizes, and that the tensors lie side by side from the first byte to the last; raises ValueError."""
    notes = header.get(_NOTES, {})
    if not all(isinstance(text, str) for pair in notes.items() for text in pair):
        raise ValueError(f"{_NOTES} holds more than texts")
    spans = []
    for name, entry in header.items():
        if name == _NOTES:
            continue
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if len(shape) > MOST_DIMENSIONS:  # the product of very many numbers takes for ever
            raise ValueError(f"{name!r} has {len(shape)} dimensions")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in (begin, end, *shape)):
            raise ValueError(f"{name!r} has the shape {shape!r:.100} at {begin!r:.50} to {end!r:.50}")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name!r} has the dtype {entry['dtype']!r:.50}, which is not known here")
        if math.prod(shape) * _DTYPES[entry["dtype"]].itemsize != end - begin:
            raise ValueError(f"{name!r} has {end - begin} bytes for {entry['dtype']} of shape {shape!r:.100}")
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise ValueError(f"{name!r} begins at byte {begin} of the data, where {at} was expected")
        at = end
    if at != data_bytes:
        raise ValueError(f"it describes {at} bytes of data, and there are {data_bytes}")


# ---- writing ----


class _File(NamedTuple):
    name: str
    items: list[Item]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


class SafetensorsTarget:
    """One file, or a directory of shards with an index."""

    format = "safetensors"

    def __init__(
        self, path: FilePath, items: Sequence[Item], notes: Mapping[str, str], shard_bytes: int | None
    ) -> None:
        _check_items(items)
        self._path = path
        self._notes = {"format": "pt", **notes}
        self.is_directory = shard_bytes is not None
        self._files = _sharded(items, shard_bytes) if shard_bytes is not None else [_File(path.name, list(items))]
        self.files = [file.name for file in self._files]
        self.nbytes = sum(item.nbytes for item in items)
        places = [item.place for item in items if item.place is not None]
        self.tied = len(places) - len(set(places))

    def write(self, source: Source, overwrite: bool, watch: _C.Watch | None) -> None:
        if not self.is_directory:
            (file,) = self._files
            with file_beside(self._path, overwrite, file.nbytes, watch) as out:
                self._fill(out, file, source)
            return
        with directory_beside(self._path, overwrite) as directory:
            for file in self._files:
                with writing(directory, file.name, file.nbytes, watch) as out:
                    self._fill(out, file, source)
            if len(self._files) > 1:
                with writing(directory, f"model{INDEX_SUFFIX}", 0, None) as index:
                    index.write_bytes([self._index()])

    def _fill(self, out: _C.FileWriter, file: _File, source: Source) -> None:
        # Larger elements first: every tensor is then aligned to its own.
        items = sorted(file.items, key=lambda item: -(item.dtype or torch.uint8).itemsize)
        out.write_bytes([_header(items, self._notes)])
        for runs in stream(source, map(Piece.all_of, items)):
            out.write_bytes([run.part.memory for run in runs])

    def _index(self) -> bytes:
        listed = {item.name: file.name for file in self._files for item in file.items}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": listed}
        return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _check_items(items: Sequence[Item]) -> None:
    objects = [item.source for item in items if item.shape is None]
    if objects:
        raise CheckpointError(
            f"safetensors files hold tensors only, and these are objects: {some(objects, _MOST_NAMED)}; choose the "
            "tensors with --only PATTERN (for example --only 'model.*')"
        )
    strange = [f"{item.source} ({item.dtype})" for item in items if item.dtype not in _NAMES]
    if strange:
        raise CheckpointError(
            f"safetensors has no dtype for these: {some(strange, _MOST_NAMED)}; leave them out with --only "
            "PATTERN, or cast floats with --dtype"
        )
    if any(item.name == _NOTES for item in items):
        raise CheckpointError(f"safetensors has a use of its own for the name {_NOTES!r}; rename it with --key-map")


def _sharded(items: Sequence[Item], limit: int) -> list[_File]:
    """Files of at most ``limit`` bytes of data (or one tensor), in order, named as hubs name them."""
    groups: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    if len(groups) == 1:
        return [_File("model.safetensors", groups[0])]
    names = [f"model-{number + 1:05}-of-{len(groups):05}.safetensors" for number in range(len(groups))]
    return list(map(_File, names, groups))


def _header(items: Sequence[Item], notes: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {_NOTES: dict(notes)}
    at = 0
    for item in items:
        assert item.dtype is not None and item.shape is not None
        where = [at, at + item.nbytes]
        entries[item.name] = {"dtype": _NAMES[item.dtype], "shape": list(item.shape), "data_offsets": where}
        at += item.nbytes
    try:
        data = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError("a name cannot be written as UTF-8; rename it with --key-map") from error
    data += b" " * (-len(data) % _ALIGNMENT)
    if len(data) > _MOST_HEADER_BYTES:
        raise CheckpointError("there are too many tensors for one safetensors file; use --shard-size")
    return len(data).to_bytes(8, "little") + data
