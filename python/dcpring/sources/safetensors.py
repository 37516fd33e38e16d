"""safetensors files as target: one, or several with an index, as model hubs lay them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

import torch

from dcpring import _C
from dcpring.format import safetensors
from dcpring.sources.beside import directory_beside, file_beside, writing
from dcpring.sources.stream import Item, Piece, Source, stream

DEFAULT_SHARD_BYTES = 5 << 30

_MOST_NAMED = 5


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
