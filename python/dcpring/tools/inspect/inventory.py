"""What a checkpoint amounts to: totals, components, files and ranks, from its metadata and the sizes of its files."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dcpring.base.files import special_kind, with_cure
from dcpring.errors import CheckpointError
from dcpring.format.manifest import MANIFEST_KEY, Manifest
from dcpring.format.metadata import referenced_files
from dcpring.report import step_of
from dcpring.sources.contents import Contents, Entry, Record, open_all, rank_of_file
from dcpring.store import layout

_MOST_MANIFEST_BYTES = 16 << 20


class Listed(NamedTuple):
    """A key of one part of a checkpoint.

    Attributes:
        part: the rank that saved it with ``use_collectives=False``; None otherwise.
        entry: what is stored under it.
    """

    part: int | None
    entry: Entry

    @property
    def component(self) -> str:
        """The first part of its name."""
        return self.entry.key.partition(".")[0]

    @property
    def files(self) -> list[str]:
        """The data files that it lies in, sorted."""
        return sorted({record.place.file for record in self.entry.records})

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote it, as far as the files' names tell."""
        return ranks_of([self])


@dataclass
class Sum:
    """What some keys amount to.

    Attributes:
        keys: of tensors and objects.
        tensors: keys of tensors.
        objects: all other keys.
        bytes: of the tensors' elements and the objects' records; what several keys share counts for each.
        chunks: records of tensors and objects.
    """

    keys: int = 0
    tensors: int = 0
    objects: int = 0
    bytes: int = 0
    chunks: int = 0

    def add(self, entry: Entry) -> None:
        self.keys += 1
        self.tensors += entry.shape is not None
        self.objects += entry.shape is None
        self.bytes += entry.nbytes
        self.chunks += len(entry.records)


@dataclass
class DataFile:
    """A data file.

    Attributes:
        name: in the directory.
        rank: that wrote it, by its name; None where that does not tell.
        size: its length in bytes; None where it is missing.
        disk_bytes: that it takes on the disk.
        links: names that it has, here and elsewhere: with more than one, another checkpoint has these bytes, too.
        kind: what it is instead of a file, as "a FIFO"; "" where it is one, or missing.
        needed: bytes that it must have at least; 0 where nothing refers to it.
        records: of tensors and objects in it; those that several keys share count once.
        bytes: of the tensors' elements and the objects' records in it.
        components: these bytes, by component.
    """

    name: str
    rank: int | None
    size: int | None
    disk_bytes: int = 0
    links: int = 1
    kind: str = ""
    needed: int = 0
    records: int = 0
    bytes: int = 0
    components: Counter[str] = field(default_factory=Counter)

    @property
    def shared_bytes(self) -> int:
        """What removing the file would not free."""
        return self.disk_bytes if self.links > 1 else 0

    @property
    def state(self) -> str:
        """ "ok", "missing", "no file" (see ``kind``), "short" or "leftover" (nothing refers to it)."""
        if self.size is None:
            return "no file" if self.kind else "missing"
        if not self.records:
            return "leftover"
        return "ok" if self.size >= self.needed else "short"

    @property
    def padding(self) -> float | None:
        """What part of the file is neither elements nor objects, 0 to 1; None where that cannot be told."""
        if not self.size or not self.records or self.bytes > self.size:
            return None
        return 1 - self.bytes / self.size


@dataclass
class Inventory:
    """A checkpoint.

    Attributes:
        directory: of the checkpoint.
        parts: its metadata; one for every rank after a save with ``use_collectives=False``.
        manifest: what a Checkpointer noted; None where there is none, or where it cannot be read.
        problem: why the manifest cannot be read; "" where it can.
    """

    directory: Path
    parts: list[Contents]
    manifest: Manifest | None = None
    problem: str = ""

    def items(self, chosen: Callable[[str], bool] = lambda key: True) -> Iterator[Listed]:
        """The keys, in the order of the metadata."""
        for number, contents in self._numbered():
            yield from (Listed(number, entry) for key, entry in contents.items() if chosen(key))

    def _numbered(self) -> Iterator[tuple[int | None, Contents]]:
        for contents in self.parts:
            yield layout.rank_of_metadata(contents.path.name), contents

    def refused(self, items: Iterable[Listed]) -> dict[str, str]:
        """Of these keys those of objects that a load refuses by default, with what they hold."""
        found: dict[str, str] = {}
        by_part: dict[int | None, list[str]] = defaultdict(list)
        for item in items:
            by_part[item.part].append(item.entry.key)
        for number, contents in self._numbered():
            found |= contents.refused(by_part[number])
        return found

    @property
    def is_by_rank(self) -> bool:
        """Whether each part is the metadata of one rank."""
        return any(number is not None for number, _ in self._numbered())

    @property
    def writer(self) -> str:
        """Who wrote the metadata: "dcpring", "stock", or "dcpring and stock"; "safetensors" where there is none."""
        return " and ".join(sorted({contents.writer for contents in self.parts}))

    @property
    def origin(self) -> str:
        """The same in words: "by dcpring", "safetensors"."""
        return self.writer if self.parts[0].model else f"by {self.writer}"

    @property
    def step(self) -> int | None:
        """Of the training: what a Checkpointer noted, or what the path names."""
        return step_of(str(self.directory.absolute())) if self.manifest is None else self.manifest.step

    @property
    def version(self) -> str:
        """Of DCP's format; "" where the metadata does not say."""
        return ", ".join(sorted({contents.version for contents in self.parts} - {""}))

    def files(self, items: Iterable[Listed]) -> list[DataFile]:
        """The data files that keys lie in, and those that nothing refers to, sorted by name.

        Args:
            items: the keys; leftovers are told by all metadata of the directory, whatever these are.
        """
        there = _there(self.directory, self.parts)
        files = _files_of(items, there)
        for name in _leftovers(self.directory, there, self.parts):
            files[name] = _data_file(name, there)
        return sorted(files.values(), key=lambda file: _natural(file.name))


def take_inventory(checkpoint: str | Path, *, rank: int | None = None, trusted: bool = False) -> Inventory:
    """Reads a checkpoint's metadata, and its manifest if it has one. No tensor is read.

    Args:
        checkpoint: its directory.
        rank: of a save with ``use_collectives=False``, the only rank to look at; None for all.
        trusted: unpickle whatever is there.

    Raises:
        CheckpointError, OSError: as for ``open_contents``.
    """
    parts = open_all(checkpoint, rank=rank, trusted=trusted)
    inventory = Inventory(parts[0].directory, parts)
    try:
        inventory.manifest = _manifest(parts[0])
    except (CheckpointError, OSError) as error:
        inventory.problem = str(error)
    return inventory


def total(items: Iterable[Listed]) -> Sum:
    """Of all of them."""
    result = Sum()
    for item in items:
        result.add(item.entry)
    return result


def ranks_of(items: Iterable[Listed]) -> list[int]:
    """The ranks that wrote any of them, as far as the files' names tell."""
    files = {record.place.file for item in items for record in item.entry.records}
    return sorted({rank for file in files if (rank := rank_of_file(file)) is not None})


def totals_by_component(items: Iterable[Listed]) -> dict[str, Sum]:
    """Of each component, in the order in which they come."""
    result: dict[str, Sum] = defaultdict(Sum)
    for item in items:
        result[item.component].add(item.entry)
    return dict(result)


def _manifest(contents: Contents) -> Manifest | None:
    entry = contents.entries.get(MANIFEST_KEY)
    if entry is None or entry.shape is not None:
        return None
    if entry.nbytes > _MOST_MANIFEST_BYTES:
        raise CheckpointError(f"the manifest (key {MANIFEST_KEY!r}) has {entry.nbytes} bytes")
    text = contents.plain_value(MANIFEST_KEY)
    return Manifest.parse(text, str(contents.path))


# ---- files ----

_LEADS_OUT = "a symbolic link that leads out of the checkpoint"


def payload_bytes(entry: Entry, record: Record) -> int:
    """Bytes of a chunk's elements, or of an object's record."""
    return record.place.length if entry.dtype is None else math.prod(record.lengths) * entry.itemsize


def _data_file(name: str, there: Mapping[str, os.stat_result | str]) -> DataFile:
    about = there.get(name)
    if about is None or isinstance(about, str):
        return DataFile(name, rank_of_file(name), None, kind=about or "")
    return DataFile(name, rank_of_file(name), about.st_size, about.st_blocks * 512, about.st_nlink)


def _files_of(items: Iterable[Listed], there: Mapping[str, os.stat_result | str]) -> dict[str, DataFile]:
    files: dict[str, DataFile] = {}
    seen: set[tuple[str, int, int]] = set()
    for item in items:
        for record in item.entry.records:
            place = record.place
            where = place.file, place.offset, place.length
            if where in seen:  # tied tensors share a record
                continue
            seen.add(where)
            file = files.get(place.file)
            if file is None:
                file = files[place.file] = _data_file(place.file, there)
            count = payload_bytes(item.entry, record)
            file.needed = max(file.needed, place.offset + place.length)
            file.records += 1
            file.bytes += count
            file.components[item.component] += count
    return files


def _there(directory: Path, parts: Sequence[Contents]) -> dict[str, os.stat_result | str]:
    """The files in a directory, and those of models that lie in folders below it; of what is no file, what it is."""
    models = [contents.model.files for contents in parts if contents.model is not None]
    there: dict[str, os.stat_result | str] = {}
    with with_cure(directory), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a link to nothing
                about = entry.stat()
                leads_out = not models and entry.is_symlink() and not _is_below(Path(entry.path), directory)
                there[entry.name] = _LEADS_OUT if leads_out else special_kind(about.st_mode) or about
    return there | {name: (files.directory / name).stat() for files in models for name in files.versions}


def _is_below(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def _leftovers(directory: Path, names: Iterable[str], parts: Sequence[Contents]) -> list[str]:
    """Data files that no metadata in the directory refers to, and metadata that was never committed."""
    needed = {name for contents in parts for name in contents.files}
    found = layout.unneeded(names, needed)
    opened = {contents.path.name for contents in parts}
    others = [path for path in layout.metadata_files(directory) if path.name not in opened] if found else []
    return layout.unneeded(found, {name for path in others for name in referenced_files(path)})


_NUMBER = re.compile(r"\d{1,18}")


def _natural(name: str) -> tuple[str | int, ...]:
    """A sorting key by which "__10_0" comes behind "__9_0"."""
    parts: list[str | int] = []
    end = 0
    for match in _NUMBER.finditer(name):
        parts += [name[end : match.start()], int(match[0])]
        end = match.end()
    return (*parts, name[end:])
