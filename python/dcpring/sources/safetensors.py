"""safetensors files as source and target: one, or several with an index, as model hubs lay them out.

``format.safetensors`` checks and makes their headers; the data go through the core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpring import _C
from dcpring.base.text import some
from dcpring.errors import CorruptCheckpointError
from dcpring.format import safetensors
from dcpring.format.boxes import wrong_boxes
from dcpring.move.load import Inputs
from dcpring.options import IOOptions
from dcpring.sources.beside import directory_beside, file_beside, writing
from dcpring.sources.contents import overlap_of
from dcpring.sources.stream import Item, Part, Piece, Source, stream
from dcpring.torchside.tensors import narrowed

DEFAULT_SHARD_BYTES = 5 << 30

_MOST_NAMED = 5


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
        index = path if path.name.endswith(".json") else None
        listed = None if index is None else safetensors.weight_map(index)
        files = safetensors.files_of(path) if listed is None else [path.parent / one for one in _unique(listed)]
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
        header = safetensors.read_header(real)
        others = {name: text for name, text in header.notes.items() if name not in safetensors.OF_SHARDS}
        self.notes = {**self.notes, **others}
        for name, stored in header.tensors.items():
            if listed is not None and listed.get(name) != path.name:
                continue
            offsets = stored.offsets if stored.offsets is not None else (0,) * len(stored.shape)
            shard = _Shard(str(real.parent), real.name, stored.begin, offsets, stored.shape, stored.dtype)
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


def _unique(listed: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(listed.values()))


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
        safetensors.check_entries({item.name: item.dtype for item in items})
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
                with writing(directory, safetensors.INDEX_NAME, 0, None) as index:
                    index.write_bytes([self._index()])

    def _fill(self, out: _C.FileWriter, file: _File, source: Source) -> None:
        # Larger elements first: every tensor is then aligned to its own.
        items = sorted(file.items, key=lambda item: -(item.dtype or torch.uint8).itemsize)
        entries = [(item.name, item.dtype, item.shape) for item in items if item.dtype and item.shape is not None]
        out.write_bytes([safetensors.make_header(entries, self._notes)])
        for runs in stream(source, map(Piece.all_of, items)):
            out.write_bytes([run.part.memory for run in runs])

    def _index(self) -> bytes:
        listed = {item.name: file.name for file in self._files for item in file.items}
        return safetensors.make_index(listed, self.nbytes)


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
    return [_File(safetensors.file_name(number, len(groups)), group) for number, group in enumerate(groups)]
