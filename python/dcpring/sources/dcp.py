"""DCP checkpoints as source and target, and safetensors as source: what ``Contents`` opens."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from dcpring import _C
from dcpring.base.files import new_tag, unfinished_name
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.lazy import Chunks
from dcpring.format.metadata import (
    BYTES,
    METADATA_NAME,
    OPAQUE,
    Placed,
    Trailer,
    join_metadata,
    load_metadata,
    place_at,
)
from dcpring.format.unpickler import Safe
from dcpring.move.objects import load
from dcpring.plan.flatten import path_code
from dcpring.plan.table import Chunk, table_of_chunks
from dcpring.sources.beside import directory_beside, writing
from dcpring.sources.contents import Contents, Entry, open_contents
from dcpring.sources.parts import dtype_of
from dcpring.sources.stream import (
    PLAIN_DTYPES,
    Path,
    Source,
    SourceItem,
    SourcePart,
    StreamedPart,
    TargetPart,
    first_names,
    stream,
)
from dcpring.store import layout

_LEAST_CUT_BYTES = 4 << 20
"""Smaller tensors are not cut to make files even."""

_RECORD_BYTES = 1024
"""A record's head and tail, roughly; for the size hint."""

_OBJECT_BATCH_BYTES = 32 << 20


class ContentsSource:
    """A checkpoint, read through ``Contents``. Tensors that only ``torch.save`` understands count as objects."""

    def __init__(self, path: FilePath, *, rank: int | None, trusted: bool) -> None:
        self._contents = open_contents(path, rank=rank, trusted=trusted)
        self._trusted = trusted
        model = self._contents.model
        self.format = "dcp" if model is None else "safetensors"
        self.notes: Mapping[str, str] = {} if model is None else model.notes
        self.unreadable: Mapping[str, str] = {} if model is None else model.unknown
        self.files = len(self._contents.files)
        paths = {} if model is not None else _paths(self._contents)
        whole = _not_in_parts(self._contents)
        self.items = [_item(entry, paths.get(key, (key,)), key in whole) for key, entry in self._contents.items()]

    def read(self, parts: Sequence[SourcePart]) -> None:
        self._contents.read_into([(part.item.source, part.offsets, part.tensor) for part in parts])

    def object_bytes(self, item: SourceItem) -> bytes:
        if len(self._contents[item.source].records) != 1:
            raise CheckpointError(
                f"{item.source!r} is a sharded tensor of a kind that only torch.save understands; load it in the "
                "program that saved it, or leave it out with --only"
            )
        return self._contents.read_object(item.source).getvalue()

    def object_value(self, item: SourceItem) -> Any:
        archive = io.BytesIO(self.object_bytes(item))
        return torch.load(archive, "cpu", weights_only=False) if self._trusted else load(archive, Safe()).value


def _paths(contents: Contents) -> dict[str, Path]:
    """Where keys belong in the nested state dict, as far as the metadata says so believably."""
    metadata, _ = load_metadata(contents.path, trusted=contents.trusted)
    mappings = metadata.planner_data
    if not isinstance(mappings, Mapping):
        return {}
    return {
        key: path
        for key, path in mappings.items()
        if type(path) is tuple and {*map(type, path)} <= {str, int} and ".".join(map(str, path)) == key
    }


def _not_in_parts(contents: Contents) -> set[str]:
    """The tensors with a record that must be read all at once: transformed by extensions, or not row-major (stock)."""
    found = set()
    unknown: list[tuple[str, Placed]] = []
    for key, entry in contents.items():
        for record in entry.records if entry.dtype is not None else ():
            if record.place.descriptors:
                found.add(key)
            elif record.place.kind == OPAQUE:
                unknown.append((key, record.place))
    unknown.sort(key=lambda pair: (pair[1].file, pair[1].offset))
    numbers = contents.inputs.numbers
    wanted = [(numbers[place.file], place.offset, place.length) for _, place in unknown]
    try:
        located = _C.locate(contents.inputs.core, wanted)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"the checkpoint's metadata is damaged ({error})", str(contents.path)) from error
    return found | {key for (key, _), where in zip(unknown, located, strict=True) if where is None}


def _item(entry: Entry, path: Path, whole: bool) -> SourceItem:
    dtype = None if entry.dtype is None or entry.layout != "strided" else dtype_of(entry.dtype)
    # RingWriter leaves to torch.save what is not elements side by side: it stays as it is.
    is_pickled = any(record.place.kind == BYTES and not record.place.descriptors for record in entry.records)
    if dtype not in PLAIN_DTYPES or is_pickled:
        return SourceItem(entry.key, entry.key, path)
    # What is empty lies where the next begins, in a file of safetensors.
    place = tuple((record.offsets, record.place.file, record.place.offset) for record in entry.records if entry.nbytes)
    return SourceItem(entry.key, entry.key, path, entry.shape, dtype, dtype, place or None, whole)


# ---- writing ----


def share_out(items: Sequence[SourceItem], files: int) -> list[list[TargetPart]]:
    """Tensors given to files in order, the same number of bytes to each; large ones are cut along dimension 0."""
    total = sum(item.nbytes for item in items)
    shares: list[list[TargetPart]] = [[] for _ in range(files)]
    at = number = 0
    for item in items:
        piece = TargetPart.all_of(item)
        while number < files - 1 and at + piece.nbytes > (end := total * (number + 1) // files):
            rows = _rows_up_to(piece, end - at)
            if rows == 0 and 2 * (end - at) > piece.nbytes:
                break
            if rows:
                first, piece = _cut(piece, rows)
                shares[number].append(first)
                at += first.nbytes
            number += 1
        shares[number].append(piece)
        at += piece.nbytes
    return shares


def _rows_up_to(piece: TargetPart, limit: int) -> int:
    """How many of its rows fit in so many bytes; 0 where it is not to be cut."""
    if piece.item.whole or piece.item.nbytes < _LEAST_CUT_BYTES or not piece.lengths or piece.lengths[0] < 2:
        return 0
    return min(limit // (piece.nbytes // piece.lengths[0]), piece.lengths[0] - 1)


def _cut(piece: TargetPart, rows: int) -> tuple[TargetPart, TargetPart]:
    (start, *offsets), (length, *lengths) = piece.offsets, piece.lengths
    first = TargetPart(piece.item, piece.offsets, (rows, *lengths))
    return first, TargetPart(piece.item, (start + rows, *offsets), (length - rows, *lengths))


class DcpTarget:
    """A checkpoint of any number of files. Names of one tensor share its records."""

    format = "dcp"
    is_directory = True

    def __init__(self, path: FilePath, items: Sequence[SourceItem], files: int) -> None:
        self._path = path
        self._items = items
        self._first = first_names(items)
        self._owners = {item.name: item for item in items if self._first[item.name] == item.name}
        self._objects = [item for item in items if item.shape is None]
        self._shares = share_out([item for item in self._owners.values() if item.shape is not None], files)
        self._placed: dict[str, list[tuple[TargetPart | None, Placed]]] = {item.name: [] for item in items}
        self.nbytes = sum(item.nbytes for item in self._owners.values())
        self.tied = len(items) - len(self._owners)
        self.files: list[str] = []

    def write(self, source: Source, overwrite: bool, watch: _C.Watch | None) -> None:
        syncs = _C.Syncs(None)
        with directory_beside(self._path, overwrite) as directory:
            for number, pieces in enumerate(self._shares):
                objects = [] if number else self._objects
                if pieces or objects:
                    self._write_file(directory, number, source, pieces, objects, watch, syncs)
            data = self._metadata()
            syncs.wait()
            _C.commit(directory, unfinished_name(METADATA_NAME), METADATA_NAME, data, True)

    def _write_file(
        self,
        directory: str,
        number: int,
        source: Source,
        pieces: Sequence[TargetPart],
        objects: Sequence[SourceItem],
        watch: _C.Watch | None,
        syncs: _C.Syncs,
    ) -> None:
        name = layout.data_file_name(number, 0, new_tag())
        hint = sum(piece.nbytes + _RECORD_BYTES + _padding(piece) for piece in pieces)
        with writing(directory, name, hint, watch, syncs) as file:
            for runs in stream(source, pieces):
                self._write_runs(file, runs)
            self._write_objects(file, source, objects)
        self.files.append(name)

    def _write_runs(self, file: _C.FileWriter, runs: list[StreamedPart]) -> None:
        run, storage = runs[0], _C.StorageIndex(len(runs))
        if run.is_whole:
            file.write_tensors(_C.Tensors([run.part.tensor for run in runs]), storage)
        else:
            file.write_part([run.part.tensor], run.piece.lengths, run.start, storage)
        for number, run in enumerate(runs):
            place = storage.get(number)
            if place is not None:  # of a tensor that is written in parts after its last
                self._placed[run.piece.item.name].append((run.piece, Placed(*place)))

    def _write_objects(self, file: _C.FileWriter, source: Source, objects: Sequence[SourceItem]) -> None:
        batch: list[SourceItem] = []
        data: list[bytes] = []
        for number, item in enumerate(objects):
            batch.append(item)
            data.append(source.object_bytes(item))
            if sum(map(len, data)) >= _OBJECT_BATCH_BYTES or number == len(objects) - 1:
                storage = _C.StorageIndex(len(data))
                file.write_bytes(data, storage)
                for at, written in enumerate(batch):
                    self._placed[written.name].append((None, Placed(*place_at(storage, at))))
                batch, data = [], []

    def _metadata(self) -> bytes:
        """The metadata file, made as RingWriter makes it."""
        chunks: list[list[Chunk] | None] = []
        placed: list[Placed] = []
        for item in self._items:
            found = self._placed[self._first[item.name]]
            placed += [place for _, place in found]
            if item.shape is None or item.dtype is None:
                chunks.append(None)
                continue
            properties = TensorProperties(dtype=item.dtype)
            chunks.append([(item.shape, p.offsets, p.lengths, properties) for p, _ in found if p is not None])
        names = [item.name for item in self._items]
        mappings = {item.name: _plain_path(item.path) for item in self._items}
        table = table_of_chunks(names, [path_code(mappings, name) for name in names], chunks)
        storage = _C.StorageIndex(len(table))
        storage.put([place[:7] for place in placed])
        made = Chunks(table, True, storage)
        save_id = new_tag()
        version = getattr(dcp_filesystem, "CURRENT_DCP_VERSION", "1.0.0")
        pickled = made.pickled(StorageMeta(str(self._path), save_id), version)
        trailer = Trailer(files=sorted(self.files), save_id=save_id, version=version)
        return join_metadata(pickled, trailer, made.index())


def _plain_path(path: Path) -> tuple[str | int, ...]:
    """As DCP has it, where keys of mappings are str."""
    return tuple(step if isinstance(step, (str, int)) else str(step) for step in path)


def _padding(piece: TargetPart) -> int:
    return _C.ALIGNMENT_BYTES if piece.nbytes >= _C.LARGE_PAYLOAD_BYTES else 0
