"""The header of a safetensors file: how it is read and checked, and how it is made.

A file is 8 bytes for the length of a JSON header, the header, and the data, in which tensors lie side by side. The
safetensors package maps files or holds them in memory; here headers are checked and made by these few lines, and the
data go through the core. ``model_files`` is about the files of a model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dcpring import _C
from dcpring.base import strict_json
from dcpring.base.files import open_regular
from dcpring.base.text import some
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.metadata import MOST_DIMENSIONS, block_count

NOTES = "__metadata__"
"""The name in a header that is no tensor's: texts by names."""

NAMES: dict[torch.dtype, str] = {
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
"""What safetensors calls torch's dtypes."""

_PACKED = "F4"
"""Two elements to a byte. A header counts elements along the last dimension, and torch bytes."""

for _torchs, _name in (("float8_e8m0fnu", "F8_E8M0"), ("float4_e2m1fn_x2", _PACKED)):
    if hasattr(torch, _torchs):  # since torch 2.7 and 2.8
        NAMES[getattr(torch, _torchs)] = _name

DTYPES = {name: dtype for dtype, name in NAMES.items()}

_MOST_HEADER_BYTES = 100_000_000
"""The limit that the safetensors package has."""

_LFS = b"version "
"""How a file begins that Git LFS leaves in the place of a large one; no header is as long as that would say."""

_ALIGNMENT = 8

SHARDING = "DCP_SHARDING_INFO"
"""The note of a file in which each tensor is one rank's part: HuggingFaceStorageWriter(save_distributed=True)."""

CRCS = "dcpring.crcs"
"""The note that has, by the name of each tensor, in hexadecimal the little-endian CRC-32 of every block of the file's
1 MiB grid that its bytes touch."""

TIED = "dcpring.tied"
"""The note that lists, as JSON, which other notes say what tensor a name stands for. Where it is missing, as in what
safetensors' ``save_model`` has written, those do that may be a parameter's name and that of the one it is tied to."""

SEAL = "dcpring.crc32"
"""The first note of a header, and the first of an index's metadata: the CRC-32 of all its bytes, in eight hexadecimal
digits that are taken for zeros. A note of ``CRCS`` that has an entry for ``NOTES`` says that it is there."""

_SEALED = re.compile(rb'\{\s*"(?:__)?metadata(?:__)?":\s*\{\s*"dcpring\.crc32":\s*"([0-9a-f]{8})"')
NO_DIGITS = "0" * 8

OWN_NOTES = (CRCS, TIED, SEAL, SHARDING, "DCP_VERSION")
"""Notes about the tensors of their file."""

NOT_TIED = ("format", *OWN_NOTES)
"""Notes that never say what another name of a tensor is."""

_MOST_NAMED = 5

Place = tuple[str, int, int]
"""Of elements: their file, and where in it they begin and how many bytes they are."""


class StoredPart(NamedTuple):
    """The part of a tensor that a file holds. Mostly it is the whole tensor.

    Attributes:
        file: its name in the directory.
        dtype, shape: of the part, as torch has them.
        offsets: where the part begins in its tensor, in elements.
        begin, end: of its bytes in the file.
        crcs: of these bytes, as ``CRCS`` has them; None where the file has none.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int
    crcs: bytes | None = None

    @property
    def place(self) -> Place:
        """By which a load knows it."""
        return self.file, self.begin, self.end - self.begin


class Header(NamedTuple):
    """A checked header.

    Attributes:
        tensors: by their names.
        unknown: by the names of the other tensors their dtypes, which torch does not have.
        tied: other names of tensors, with the name in ``tensors``.
        notes: all texts.
        begin: of the data in the file.
    """

    tensors: dict[str, StoredPart]
    unknown: dict[str, str]
    tied: dict[str, str]
    notes: dict[str, str]
    begin: int


# ---- reading ----


@contextlib.contextmanager
def refusing(what: str, path: Path) -> Iterator[None]:
    """Turns what Python raises for JSON of an unexpected shape into a CorruptCheckpointError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} ({error!s:.200})", str(path)) from error


def read_header(path: Path) -> tuple[bytes, os.stat_result]:
    """Reads the bytes of a file's header, and returns them with the file's ``stat``.

    Raises:
        CorruptCheckpointError: the file is cut off, or no safetensors.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        about = os.fstat(file.fileno())
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if head == _LFS:
            raise CorruptCheckpointError("only a pointer of Git LFS; fetch the file with git lfs pull", str(path))
        if about.st_size < 8 or length > min(about.st_size - 8, _MOST_HEADER_BYTES):
            raise CorruptCheckpointError("no safetensors file, or cut off", str(path))
        return file.read(length), about


def begins_as_header(path: Path) -> bool:
    """Whether a file begins as safetensors do."""
    with open_regular(path) as file:
        head = file.read(9)
    return len(head) == 9 and int.from_bytes(head[:8], "little") <= _MOST_HEADER_BYTES and head[8:] == b"{"


def parse_header(path: Path, name: str, data: bytes, file_bytes: int) -> Header:
    """Checks a header. Its tensors have to lie side by side from the first byte of the data to the last.

    Args:
        path: of the file, for errors.
        name: of the file in its directory.
        data: the header's bytes.
        file_bytes: the size of the file.

    Raises:
        CorruptCheckpointError: the header contradicts itself or the file's size.
    """
    begin = 8 + len(data)
    data_bytes = file_bytes - begin
    with refusing("the header is damaged", path):
        entries = strict_json.loads(data)
        notes = _checked_notes(entries.pop(NOTES, {}))
        check_seal(data, notes.get(SEAL))
        extents = {tensor: _extent(tensor, entry) for tensor, entry in entries.items()}
        described = _described(extents)
        unknown = {tensor: entry["dtype"] for tensor, entry in entries.items() if entry["dtype"] not in DTYPES}
        tensors = {
            tensor: _part(name, tensor, entry["dtype"], *extents[tensor], begin)
            for tensor, entry in entries.items()
            if tensor not in unknown
        }
        if described < data_bytes:
            raise ValueError(f"it describes {described} bytes of data, and there are {data_bytes}")
    if described > data_bytes:
        raise CorruptCheckpointError(
            f"cut off: the header describes {described} bytes of data, and there are {data_bytes}; fetch or save it "
            "again",
            str(path),
        )
    for note, add in ((SHARDING, _with_offsets), (CRCS, _with_crcs)):
        if note in notes:
            with refusing(f"the note {note} in the header is damaged", path):
                said = strict_json.loads(notes[note])
                if NOTES in said and SEAL not in notes:
                    raise ValueError(f"it says that the header has a CRC-32, and there is no {SEAL}")
                tensors = {tensor: add(tensor, part, said[tensor]) for tensor, part in tensors.items()}
    return Header(tensors, unknown, _tied(notes, tensors, path), notes, begin)


def check_seal(data: bytes, noted: str | None) -> None:
    """Raises ValueError where a header or an index has a CRC-32 that is not its own."""
    if noted is None:
        return
    found = _SEALED.match(data)
    crc = "" if found is None else _crc_around(data, found.start(1))
    if crc != noted:
        raise ValueError(
            f"its CRC-32 is {crc or 'not where it was'}, was {noted}; fetch or save it again. A program that changes "
            f"it on purpose has to leave out the notes that begin with 'dcpring'"
        )


def _crc_around(data: bytes, at: int) -> str:
    """The CRC-32 of all bytes, with zeros for the eight digits that begin there."""
    view = memoryview(data)
    crc = _C.crc32(NO_DIGITS.encode(), _C.crc32(view[:at]))
    return f"{_C.crc32(view[at + len(NO_DIGITS) :], crc):08x}"


def sealed(data: bytes) -> bytes:
    """The same with its CRC-32, for which there are zeros in it."""
    found = _SEALED.match(data)
    assert found is not None
    return data[: found.start(1)] + _crc_around(data, found.start(1)).encode() + data[found.end(1) :]


def _checked_notes(notes: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for pair in notes.items() for text in pair):
        raise ValueError(f"{NOTES} holds more than texts")
    return dict(notes)


def _extent(name: str, entry: Any) -> tuple[int, int, tuple[int, ...]]:
    """Where a tensor's bytes begin and end, and its shape: numbers, whatever they are. Raises ValueError."""
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    if len(shape) > MOST_DIMENSIONS:  # the product of very many numbers takes for ever
        raise ValueError(f"{name!r} has {len(shape)} dimensions")
    numbers = begin, end, *shape
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= 1 << 62 or begin > end:
        raise ValueError(f"{name!r} has the shape {shape!r:.100} at {begin!r:.50} to {end!r:.50}")
    if not isinstance(entry["dtype"], str):
        raise ValueError(f"{name!r} has the dtype {entry['dtype']!r:.50}")
    return begin, end, numbers[2:]


def _described(extents: Mapping[str, tuple[int, int, tuple[int, ...]]]) -> int:
    """The bytes of all tensors, which lie side by side; raises ValueError where they do not."""
    at = 0
    for begin, end, name in sorted((begin, end, name) for name, (begin, end, _) in extents.items()):
        if begin != at:
            raise ValueError(f"{name!r} begins at byte {begin} of the data, where {at} was expected")
        at = end
    return at


def _part(
    file: str, name: str, called: str, begin: int, end: int, shape: tuple[int, ...], data_begin: int
) -> StoredPart:
    """A tensor of a dtype that is known; raises ValueError where its bytes are not as many as its elements need."""
    dtype, sizes = DTYPES[called], shape
    if called == _PACKED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name!r} has the shape {list(shape)}, of which two elements cannot share each byte")
        sizes = (*shape[:-1], shape[-1] // 2)
    if math.prod(sizes) * dtype.itemsize != end - begin:
        raise ValueError(f"{name!r} has {end - begin} bytes for {called} of shape {list(shape)!s:.100}")
    return StoredPart(file, dtype, sizes, (0,) * len(sizes), data_begin + begin, data_begin + end)


def _with_offsets(name: str, part: StoredPart, said: Any) -> StoredPart:
    offsets = tuple(said["saved_offsets"])
    good = all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets)
    if not good or len(offsets) != len(part.shape):
        raise ValueError(f"{offsets!r:.100} for {name!r}")
    return part._replace(offsets=offsets)


def _with_crcs(name: str, part: StoredPart, said: Any) -> StoredPart:
    crcs = bytes.fromhex(said)
    if len(crcs) != 4 * block_count(part.begin, part.end - part.begin):
        raise ValueError(f"{len(crcs)} bytes for {name!r}")
    return part._replace(crcs=crcs)


def _tied(notes: Mapping[str, str], tensors: Mapping[str, StoredPart], path: Path) -> dict[str, str]:
    """Selects the notes that name the tensor which another name stands for."""
    found = {
        name: first
        for name, first in notes.items()
        if first in tensors and name not in NOT_TIED and name not in tensors
    }
    if TIED not in notes:
        return {name: first for name, first in found.items() if _last_part(name) == _last_part(first)}
    with refusing(f"its {TIED} is damaged", path):
        listed = set(strict_json.loads(notes[TIED]))
    return {name: first for name, first in found.items() if name in listed}


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


# ---- writing ----


class Cures(NamedTuple):
    """What errors tell people to do."""

    leave_out: str = "choose the tensors with --only PATTERN (for example --only 'model.*')"
    cast: str = "leave them out with --only PATTERN, or cast floats with --dtype"
    rename: str = "rename it with --key-map"
    split: str = "use --shard-size"


CONVERTING = Cures()


def check_entries(entries: Mapping[str, torch.dtype | None], cures: Cures = CONVERTING) -> None:
    """Whether a file can hold these names and dtypes (None: of objects). Raises CheckpointError."""
    objects = [name for name, dtype in entries.items() if dtype is None]
    if objects:
        raise CheckpointError(
            f"safetensors files hold tensors only, and these are objects: {some(objects, _MOST_NAMED)}; "
            f"{cures.leave_out}"
        )
    strange = [f"{name} ({dtype})" for name, dtype in entries.items() if dtype not in NAMES]
    if strange:
        raise CheckpointError(f"safetensors has no dtype for these: {some(strange, _MOST_NAMED)}; {cures.cast}")
    if NOTES in entries:
        raise CheckpointError(f"safetensors has a use of its own for the name {NOTES!r}; {cures.rename}")


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    notes: Mapping[str, str],
    ties: Mapping[str, str] | None = None,
    cures: Cures = CONVERTING,
) -> bytes:
    """The bytes of a file before its data, in which tensors (name, dtype, shape) lie side by side in this order.

    Their number is a multiple of 8. Notes and ties are as for ``join_header``.
    """
    return join_header(header_entries(tensors, cures), header_notes(notes, ties or {}), _ALIGNMENT, cures)


def header_entries(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], cures: Cures) -> bytes:
    """What a header says of its tensors, a JSON object. It is made as text: objects would keep the collector busy."""
    quoted = json.JSONEncoder(ensure_ascii=False).encode
    texts, at = [], 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        sizes = ",".join(map(str, _shape_written(name, dtype, shape)))
        texts.append(f'{quoted(name)}:{{"dtype":"{NAMES[dtype]}","shape":[{sizes}],"data_offsets":[{at},{end}]}}')
        at = end
    return _encoded(f"{{{','.join(texts)}}}", cures)


def header_notes(
    notes: Mapping[str, str], ties: Mapping[str, str], crcs: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Collects the notes of a header.

    Args:
        notes: texts by names.
        ties: the names of tensors that are stored under another name, with that one.
        crcs: of each tensor, as ``CRCS`` has them; the header gets one as well then. None: there are none.
    """
    sealed = {} if crcs is None else {SEAL: NO_DIGITS}
    listed = {TIED: _compact(list(ties))} if ties else {}
    summed = {} if crcs is None else {CRCS: _compact({NOTES: "", **crcs})}
    return {**sealed, **ties, **notes, **listed, **summed}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def join_header(entries: bytes, notes: Mapping[str, str], alignment: int, cures: Cures) -> bytes:
    """The header of these tensors, with notes."""
    data = _encoded(_compact({NOTES: dict(notes)}), cures)
    data = data[:-1] + b"," * (len(entries) > 2) + entries[1:]
    data += b" " * (-(8 + len(data)) % alignment)
    if len(data) > _MOST_HEADER_BYTES:
        raise CheckpointError(f"there are too many tensors for one safetensors file; {cures.split}")
    return len(data).to_bytes(8, "little") + (sealed(data) if SEAL in notes else data)


def _encoded(text: str, cures: Cures) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a name cannot be written as UTF-8; {cures.rename}") from error


def _shape_written(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Sequence[int]:
    if NAMES[dtype] != _PACKED:
        return shape
    if not shape:
        raise CheckpointError(f"{name!r}: safetensors cannot hold a {dtype} of no dimensions")
    return [*shape[:-1], 2 * shape[-1]]
