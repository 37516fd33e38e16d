"""Whether a checkpoint is whole: every byte that something covers is read and compared with it.

The core checks the records (csrc/core/data/verify.h says what covers what); what the metadata says of them, and of
itself, is checked here. Whatever is wrong becomes a ``Problem``; nothing stops at the first.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpring import _C
from dcpring.base.collector import collection_paused
from dcpring.base.files import names_in, open_regular, read_regular, special_kind
from dcpring.errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from dcpring.format.archive import TO_A_COMMAND, refused_text
from dcpring.format.boxes import wrong_boxes
from dcpring.format.metadata import (
    METADATA_NAME,
    MOST_DIMENSIONS,
    Parts,
    block_count,
    has_known_tables,
    split_metadata,
    unpickle_safely,
)
from dcpring.format.zip import wrong_archive
from dcpring.move.load.inputs import Inputs
from dcpring.options import IOOptions
from dcpring.report import format_bytes, format_table
from dcpring.sources.contents import Contents, Entry, Record, entries_of_pickle, open_all, rank_of_file
from dcpring.store.layout import rank_of_metadata
from dcpring.store.rank_metadata import refuse_mixed, refuse_stale

if TYPE_CHECKING:
    from dcpring.format.model_files import Model

__all__ = ["Problem", "VerifyReport", "verify"]

_BARE, _PACKED = 1, 2
"""What the core leaves unchecked (csrc/core/data/verify.h)."""

_RAW = 3
"""A tensor's elements alone, with no record around them, likewise."""

_END = 1 << 63

_SMALL_BYTES = 1 << 16
"""Where a record has less on average, the time is that of records and not of bytes."""

_LEAST_WATCHED_BYTES = 64 << 20
"""From which on there is a progress bar, which needs torch."""

_SPECIAL = "not a regular file"


@dataclass(frozen=True)
class Problem:
    """Something wrong in a checkpoint.

    Attributes:
        key: the tensor or object concerned; None where it is none in particular.
        file: the file in the checkpoint's directory.
        offset: where in the file it begins, in bytes; -1 where that means nothing.
        length: of what is wrong, in bytes; 0 likewise.
        what: in words.
    """

    key: str | None
    file: str
    offset: int
    length: int
    what: str


@dataclass
class VerifyReport:
    """What ``verify`` found. ``print`` it.

    Attributes:
        checkpoint: its directory.
        quick: whether only structure and sizes were looked at.
        keys: in the metadata.
        records: chunks of tensors and objects in the files; one that has several keys counts once.
        files: data files.
        bytes: of the records.
        seconds: that it took.
        problems: by file and offset, those of the metadata last.
        unlisted: further problems, of records that have very many.
        refused: keys of objects that a load refuses by default, with what they hold; they need ``safe_globals``, or
            ``trusted``. No problem, but good to know.
        notes: what else is.
    """

    checkpoint: str
    quick: bool = False
    keys: int = 0
    records: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)
    unlisted: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def bad_keys(self) -> list[str]:
        """The keys that problems name, in order."""
        return list(dict.fromkeys(problem.key for problem in self.problems if problem.key is not None))

    def summary(self) -> str:
        """One line."""
        what = f"{format_bytes(self.bytes)} in {_count(self.records, 'record')} of {_count(self.files, 'file')}"
        if self.quick:
            return f"{what}, structure and sizes only"
        if not self.seconds:
            return what
        if self.bytes < _SMALL_BYTES * self.records:
            return f"{what}, {self.records / self.seconds:,.0f} records/s"
        return f"{what}, {self.bytes / self.seconds / 1e9:.2f} GB/s"

    def rows(self) -> list[tuple[str, ...]]:
        """The problems as cells: key, file, offset, bytes, what. Keys with the same problem have one row."""
        keys: dict[tuple[str, ...], dict[str, None]] = {}
        for p in self.problems:
            cells = (p.file, str(p.offset) if p.offset >= 0 else "-", str(p.length or "-"), p.what)
            keys.setdefault(cells, {})[p.key or "-"] = None
        return [(_first_of(list(names)), *cells) for cells, names in keys.items()]

    def __str__(self) -> str:
        lines = [f"{'ok ' if self.ok else 'BAD'} {self.checkpoint}: {self.summary()}"]
        if self.problems:
            lines.append(format_table(("key", "file", "offset", "bytes", "what"), self.rows(), right=(2, 3)))
        return "\n".join([*lines, *(f"note: {note}" for note in self.all_notes())])

    def all_notes(self) -> list[str]:
        """``notes``, and what ``refused`` means."""
        return [*self.notes, *([f"it holds {refused_text(self.refused, TO_A_COMMAND)}"] if self.refused else [])]


def verify(
    checkpoint: str | os.PathLike[str],
    *,
    quick: bool = False,
    trusted: bool = False,
    progress: bool = False,
    options: IOOptions | None = None,
) -> VerifyReport:
    """Checks a checkpoint, stock's or dcpring's, or a directory of safetensors.

    Every record is read once, at the disk's speed, and compared with its checksums and with what the metadata says of
    it. What stock wrote is covered by the CRCs that ``torch.save`` puts into its archives, where it does not pad. Of
    safetensors the headers are checked, and the data where dcpring has noted their checksums.

    Args:
        checkpoint: its directory; of safetensors also a file, or an index.
        quick: check only the metadata, that files are there and long enough, and the records' headers.
        trusted: unpickle metadata whatever it refers to.
        progress: show a bar on standard error, if that is a terminal.
        options: how files are read.

    Raises:
        CheckpointError: the path is not that of a checkpoint.
        UntrustedCheckpointError: the metadata refers to what is not allowed.
        OSError: with errno and path; not for what the checkpoint's own files cause.
    """
    started = time.perf_counter()
    report = VerifyReport(str(checkpoint), quick)
    parts = _open(Path(checkpoint), trusted, report)
    directory = parts[0].directory if parts else Path(checkpoint)
    records = _Records(directory, report)
    with collection_paused():
        for part in parts:
            records.add(part)
    core = functools.partial((options or IOOptions()).for_core, False)
    if progress and not quick and report.bytes > _LEAST_WATCHED_BYTES:
        from dcpring.watch.progress import progress_bar

        with progress_bar("verify", report.bytes) as bar:
            records.check(core(bar.watch))
    else:
        records.check(core(None))
    for part in parts:
        report.problems += _metadata_problems(part, trusted)
        report.refused |= part.refused()
    report.problems += _leftovers_and_ranks(directory, parts, report.notes)
    report.seconds = time.perf_counter() - started
    return report


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def _open(directory: Path, trusted: bool, report: VerifyReport) -> list[Contents]:
    """The checkpoint's parts; none, and a problem, where its metadata cannot be read."""
    try:
        return open_all(directory, trusted=trusted)
    except UntrustedCheckpointError:
        raise
    except CorruptCheckpointError as error:
        report.problems.append(Problem(None, _name_in(directory, error.path), error.offset, 0, str(error.args[0])))
    except CheckpointError:
        if not directory.is_dir() or not any(rank_of_file(name) is not None for name in names_in(directory)):
            raise
        what = "it is missing, so nobody knows what the data files hold: the save was interrupted, or it was removed"
        report.problems.append(Problem(None, METADATA_NAME, -1, 0, what))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        report.problems.append(Problem(None, _name_in(directory, error.filename or ""), -1, 0, str(error.strerror)))
    return []


def _name_in(directory: Path, path: str) -> str:
    """A path without the checkpoint's directory; the metadata's where there is none."""
    try:
        return str(Path(path).relative_to(directory)) if path else METADATA_NAME
    except ValueError:
        return path


# ---- records ----


class _Records:
    """The records of a checkpoint, each once, with the keys that it has."""

    def __init__(self, directory: Path, report: VerifyReport) -> None:
        self._directory = directory
        self._report = report
        self._files: dict[str, int] = {}
        self._items: list[tuple[Any, ...]] = []
        self._keys: list[list[str]] = []
        self._records: list[tuple[Entry, Record]] = []
        self._by_place: dict[tuple[str, int, int], int] = {}
        self._model: Model | None = None

    def add(self, contents: Contents) -> None:
        self._model = contents.model
        self._report.keys += len(contents)
        for entry in contents.values():
            for record in entry.records:
                self._add(entry, record)
        self._report.files = len(self._files)
        self._report.records = len(self._items)

    def _add(self, entry: Entry, record: Record) -> None:
        place = record.place
        wrong = _wrong_place(record)
        if place.file not in self._files and not _is_name(place.file):
            wrong = "its file has a name in the metadata that none can have"
        if wrong:
            self._report.problems.append(Problem(entry.key, place.file, -1, 0, wrong))
            return
        where = (place.file, place.offset, place.length)
        index = self._by_place.setdefault(where, len(self._items))
        if index < len(self._items) and _is_tied(self._records[index], (entry, record)):
            self._keys[index].append(entry.key)
            return
        file = self._files.setdefault(place.file, len(self._files))
        what = (place.payload_offset, place.payload_bytes, place.crcs, entry.dtype, record.lengths)
        kind = place.kind if self._model is None else _RAW
        self._items.append((file, kind, place.offset, place.length, *what, bool(place.descriptors)))
        self._keys.append([entry.key])
        self._records.append((entry, record))
        self._report.bytes += place.length

    def check(self, options: tuple[Any, ...]) -> None:
        """Has the core check them all, and notes what it finds."""
        files = list(self._files)
        if not files:
            return
        links = self._model.files.links if self._model else None
        with contextlib.closing(Inputs(str(self._directory), files, links)) as inputs:
            problems, left, unkept, repeated, _ = _C.verify(inputs.core, self._items, self._report.quick, options)
        for index, offset, length, what, err, crcs in problems:
            if what.endswith(_SPECIAL):
                what = f"its file is {self._kind_of_file(index)}"
            self._note(index, offset, length, _in_words(what, err, crcs))
        self._report.unlisted = unkept
        self._check_left(left)
        self._report.notes += self._unknown_bytes(files)
        if repeated:
            blocks = _count(repeated, "block")
            self._report.notes.append(f"{blocks} could be read only at the second attempt: look at the kernel log")

    def _unknown_bytes(self, files: list[str]) -> Iterator[str]:
        """Files that hold more than their records, and their headers."""
        known = [self._model.begins[name] if self._model else 0 for name in files]
        for file, _, _, length, *_ in self._items:
            known[file] += length
        for name, size in zip(files, known, strict=True):
            path = self._directory / name
            more = path.stat().st_size - size if path.is_file() else 0
            if more > 0:
                yield f"{name}: {_count(more, 'byte')} belong to no key, and nothing covers them"

    def _kind_of_file(self, index: int) -> str:
        path = self._directory / self._records[index][1].place.file
        with contextlib.suppress(OSError):
            if kind := special_kind(os.stat(path).st_mode):
                return f"{kind}, {_SPECIAL}"
        return _SPECIAL

    def _note(self, index: int, offset: int, length: int, what: str) -> None:
        file = self._records[index][1].place.file
        self._report.problems += [Problem(key, file, offset, length, what) for key in self._keys[index]]

    def _check_left(self, left: bytes) -> None:
        """What the core does not understand: archives that are compressed; and what has no checksum at all."""
        bare = [index for index, kind in enumerate(left) if kind & _BARE]
        if bare and not self._report.quick:
            size = format_bytes(sum(self._records[index][1].place.length for index in bare))
            self._report.notes.append(
                f"{_count(len(bare), 'record')} ({size}) were saved without checksums: that they are there is all that "
                "can be said of their data"
            )
        for index, kind in enumerate(left):
            if kind & _PACKED and not self._report.quick:
                place = self._records[index][1].place
                wrong = _wrong_archive(self._directory / place.file, place.offset, place.length)
                if wrong:
                    self._note(index, place.offset, place.length, wrong)


def _wrong_place(record: Record) -> str:
    """What the core could not even be asked; "" where all is well."""
    place = record.place
    end = place.payload_offset + place.payload_bytes
    if place.offset + place.length >= _END or end >= _END:
        return "its place in the metadata is beyond the end of any file"
    if place.crcs is not None and len(place.crcs) != 4 * block_count(place.payload_offset, place.payload_bytes):
        return "the metadata has the wrong number of checksums for it"
    if len(record.lengths) > MOST_DIMENSIONS:
        return f"it has more than {MOST_DIMENSIONS} dimensions, which dcpring cannot check"
    if record.lengths and not 0 <= min(record.lengths) <= max(record.lengths) < _END:
        return "its shape in the metadata is impossible"
    return ""


def _is_name(name: str) -> bool:
    try:
        return bool(os.fsencode(name)) and "\0" not in name
    except UnicodeEncodeError:
        return False


def _is_tied(a: tuple[Entry, Record], b: tuple[Entry, Record]) -> bool:
    """Whether two keys have one record: tied tensors are written once."""
    (entry, record), (other, same) = a, b
    return record.place == same.place and (entry.dtype, record.lengths) == (other.dtype, same.lengths)


def _in_words(what: str, err: int, crcs: tuple[int, int] | None) -> str:
    if err:
        return f"{what}: {os.strerror(err)}"
    return f"{what} (CRC-32 is {crcs[1]:08x}, was {crcs[0]:08x})" if crcs else what


def _wrong_archive(path: Path, offset: int, length: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return wrong_archive(io.BytesIO(file.read(length)))
    except OSError as error:
        return f"its zip archive cannot be read: {error}"


# ---- the metadata ----


def _metadata_problems(contents: Contents, trusted: bool) -> Iterator[Problem]:
    """Where it contradicts itself."""
    name = contents.path.name
    for entry in contents.values():
        wrong = _wrong_chunks(entry)
        if wrong:
            yield Problem(entry.key, name, -1, 0, wrong)
    for key, what in _differing_forms(contents, trusted):
        yield Problem(key, name, -1, 0, what)
    if contents.trailer is not None:
        listed, used = set(contents.trailer.files), set(contents.files)
        for file in sorted(used - listed):
            yield Problem(None, file, -1, 0, f"{name} does not list it among its files: the next save would remove it")
        for file in sorted(listed - used):
            yield Problem(None, file, -1, 0, f"{name} lists it, but no key is in it")


def _wrong_chunks(entry: Entry) -> str:
    """Whether a tensor's chunks make it up; "" where they do."""
    if entry.shape is None:
        return ""
    if len(entry.records) == 1 and entry.records[0].lengths == entry.shape and not any(entry.records[0].offsets):
        return ""
    return wrong_boxes(entry.shape, [(offsets, lengths) for offsets, lengths, _ in entry.records])


def _differing_forms(contents: Contents, trusted: bool) -> Iterator[tuple[str | None, str]]:
    """dcpring's metadata says everything twice: as stock's pickle, and in tables."""
    if contents.model is not None:
        return
    parts = split_metadata(read_regular(contents.path), contents.path)
    if parts.trailer is None or not parts.trailer.index_bytes:
        return
    if not has_known_tables(parts):
        yield None, "it has tables of a version that this dcpring does not know; only its pickle was checked"
        return
    if len(parts.pickled) >= _LARGE_PICKLE_BYTES and _is_made_of_tables(parts, contents.path):
        return
    try:
        pickled, _ = entries_of_pickle(parts, contents.path, trusted)
    except CheckpointError as error:
        yield None, f"its pickle, which stock DCP reads, is damaged: {error}"
        return
    for key in dict.fromkeys([*contents, *pickled]):
        if contents.entries.get(key) != pickled.get(key):
            yield key, "the metadata's pickle and its tables say different things of it"


_LARGE_PICKLE_BYTES = 16 << 20
"""From here on it takes less to import torch, and compare bytes, than to read the pickle; below torch is not needed."""
_LAST_FIELDS = b"\x8c\x0cstorage_meta"
"""Where in a pickle that dcpring made the fields begin that the tables do not have."""


def _is_made_of_tables(parts: Parts, path: Path) -> bool:
    """Whether the pickle is, byte for byte, what the core makes of the tables: then it need not be read."""
    from dcpring.format.lazy import StoredChunks

    pickled = bytes(parts.pickled)
    fields = pickled[pickled.rfind(_LAST_FIELDS) :].removesuffix(b"ub.")
    try:
        last = unpickle_safely(memoryview(b"\x80\x04}(" + fields + b"u."), path, ())
        made = StoredChunks(parts, path, False, ()).pickled(last["storage_meta"], last["version"])
    except Exception:  # it was made in another way, or is damaged: reading it tells
        return False
    return made == pickled


def _leftovers_and_ranks(directory: Path, parts: list[Contents], notes: list[str]) -> Iterator[Problem]:
    """Data files that no metadata refers to, and whether rank-local metadata belong together."""
    if not parts or parts[0].model is not None:
        return
    used = {file for part in parts for file in part.files}
    files = {
        entry.name: entry.stat().st_size for entry in map(directory.joinpath, names_in(directory)) if entry.is_file()
    }
    unused = {name: size for name, size in files.items() if rank_of_file(name) is not None and name not in used}
    if unused:
        size = format_bytes(sum(unused.values()))
        notes.append(f"{_count(len(unused), 'data file')} ({size}) that no key is in, left by other saves")
    try:
        refuse_stale(directory)
        if parts[0].path.name != METADATA_NAME:
            for part in parts:
                refuse_mixed(directory, rank_of_metadata(part.path.name) or 0)
    except CheckpointError as error:
        yield Problem(None, parts[0].path.name, -1, 0, str(error))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
