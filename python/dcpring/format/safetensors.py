"""safetensors files: their headers, the index of a model that lies in several, and what all of them make up.

A file is 8 bytes for the length of a JSON header, the header, and the data, in which tensors lie side by side. The
safetensors package maps files or holds them in memory; here headers are checked and made by these few lines, and the
data go through the core.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dcpring import _C
from dcpring.base import strict_json
from dcpring.base.collector import collection_paused
from dcpring.base.files import names_in, open_regular, read_regular
from dcpring.base.text import some, some_keys
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.boxes import wrong_boxes
from dcpring.format.metadata import MOST_DIMENSIONS, block_count

logger = logging.getLogger("dcpring")

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Names:
    """What the files of a model are called, as transformers and diffusers have it.

    Attributes:
        name: "model" for transformers, "diffusion_pytorch_model" for diffusers, "adapter_model" for PEFT.
        variant: of several models in a directory, such as "fp16"; None: the one that has none.
    """

    name: str = "model"
    variant: str | None = None

    @classmethod
    def checked(cls, name: str | None, variant: str | None) -> Names:
        """Raises ValueError for what cannot be part of a file's name."""
        for argument, text in (("name", name), ("variant", variant)):
            if text is not None and (not text or text.startswith(".") or not {"/", "\0"}.isdisjoint(text)):
                raise ValueError(f"{argument}={text!r}: must be the beginning of a file's name, as {cls().name!r} is")
        return cls(cls().name if name is None else name, variant)

    @property
    def stem(self) -> str:
        return self.name if self.variant is None else f"{self.name}.{self.variant}"

    @property
    def file(self) -> str:
        return f"{self.stem}{SUFFIX}"

    @property
    def index(self) -> str:
        return f"{self.name}{SUFFIX}.index.{'' if self.variant is None else f'{self.variant}.'}json"

    def of_several(self, number: int, count: int) -> str:
        """The file of this number (from 0) of so many."""
        return self.file if count == 1 else f"{self.stem}-{number + 1:05}-of-{count:05}{SUFFIX}"

    def is_one_of_several(self, file: str) -> bool:
        begin, _, rest = file.partition(f"{self.stem}-")
        return not begin and _OF_SEVERAL.fullmatch(rest) is not None


_OF_SEVERAL = re.compile(r"\d{5}-of-\d{5}\.safetensors")
INDEX = re.compile(r".*\.safetensors\.index\.(?:[^/]+\.)?json")
"""Any index."""

MODEL_NAME, INDEX_NAME = Names().file, Names().index

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

DEFAULT_SHARD_BYTES = 5 << 30
"""Of tensors in a file of several."""

_LFS = b"version "
"""How a file begins that Git LFS leaves in the place of a large one; no header is as long as that would say."""

_ALIGNMENT = 8
_MOST_NAMED = 5

SHARDING = "DCP_SHARDING_INFO"
"""The note of a file in which each tensor is one rank's part: HuggingFaceStorageWriter(save_distributed=True)."""
OF_SHARDS = (SHARDING, "DCP_VERSION")

_SHARD_FILE = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")

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
_NO_DIGITS = "0" * 8

_OWN_NOTES = (CRCS, TIED, SEAL, *OF_SHARDS)

NOT_TIED = ("format", *_OWN_NOTES)
"""Notes that never say what another name of a tensor is."""

_NUMBERED = re.compile(r".*-\d{5}-of-(?!00001)\d{5}\.safetensors")

_READERS = 16
"""Threads that read headers: file systems in a network answer slowly, but many at a time."""


class TensorInfo(NamedTuple):
    """What a header says of a tensor, or of a part of one.

    Attributes:
        dtype, shape: torch's.
        begin, end: of its bytes in the file.
        offsets: where in its tensor the part begins; None where the file does not say that it is one.
        crcs: of its bytes; None where the file has none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    offsets: tuple[int, ...] | None = None
    crcs: bytes | None = None


class Header(NamedTuple):
    """A checked header.

    Attributes:
        tensors: by their names.
        unknown: the dtypes of tensors that are not among these, as they are not known here.
        tied: the names in ``tensors`` that other names stand for.
        notes: all texts.
        begin: of the data in the file.
        version: of the file, which another one in its place has not.
    """

    tensors: dict[str, TensorInfo]
    unknown: dict[str, str]
    tied: dict[str, str]
    notes: dict[str, str]
    begin: int
    version: tuple[int, int]


# ---- reading ----


def read_header(path: Path) -> Header:
    """The checked header of a file. Its tensors lie side by side from the first byte of the data to the last.

    Raises:
        CorruptCheckpointError: it contradicts itself or the file's size.
        OSError: it cannot be read.
    """
    return _parsed(path, *_read_bytes(path))


def _read_bytes(path: Path) -> tuple[bytes, os.stat_result]:
    with open_regular(path) as file:
        about = os.fstat(file.fileno())
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if head == _LFS:
            raise CorruptCheckpointError("only a pointer of Git LFS; fetch the file with git lfs pull", str(path))
        if about.st_size < 8 or length > min(about.st_size - 8, _MOST_HEADER_BYTES):
            raise CorruptCheckpointError("no safetensors file, or cut off", str(path))
        return file.read(length), about


def _parsed(path: Path, data: bytes, about: os.stat_result) -> Header:
    begin = 8 + len(data)
    try:
        entries = strict_json.loads(data)
        notes = _checked_notes(entries.pop(NOTES, {}))
        _check_seal(data, notes.get(SEAL))
        extents = {name: _extent(name, entry) for name, entry in entries.items()}
        described = _described(extents)
        unknown = {name: entry["dtype"] for name, entry in entries.items() if entry["dtype"] not in DTYPES}
        tensors = {
            name: _tensor_info(name, entry["dtype"], *extents[name], begin)
            for name, entry in entries.items()
            if name not in unknown
        }
        if described < about.st_size - begin:
            raise ValueError(f"it describes {described} bytes of data, and there are {about.st_size - begin}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the header is damaged ({error!s:.200})", str(path)) from error
    if described > about.st_size - begin:
        raise CorruptCheckpointError(
            f"cut off: the header describes {described} bytes of data, and there are {about.st_size - begin}; fetch or "
            "save it again",
            str(path),
        )
    if SHARDING in notes:
        tensors = _with_note(tensors, notes, SHARDING, _with_offsets, path)
    if CRCS in notes:
        tensors = _with_note(tensors, notes, CRCS, _with_crcs, path)
    return Header(tensors, unknown, _tied(notes, tensors, path), notes, begin, _version_of(about))


def _check_seal(data: bytes, noted: str | None) -> None:
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
    crc = _C.crc32(_NO_DIGITS.encode(), _C.crc32(view[:at]))
    return f"{_C.crc32(view[at + len(_NO_DIGITS) :], crc):08x}"


def _sealed(data: bytes) -> bytes:
    """The same with its CRC-32, for which there are zeros in it."""
    found = _SEALED.match(data)
    assert found is not None
    return data[: found.start(1)] + _crc_around(data, found.start(1)).encode() + data[found.end(1) :]


def _tied(notes: Mapping[str, str], tensors: Mapping[str, TensorInfo], path: Path) -> dict[str, str]:
    """Of the notes those that say what tensor another name stands for."""
    found = {
        name: first
        for name, first in notes.items()
        if first in tensors and name not in NOT_TIED and name not in tensors
    }
    if TIED not in notes:
        return {name: first for name, first in found.items() if _last_part(name) == _last_part(first)}
    try:
        listed = set(strict_json.loads(notes[TIED]))
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"its {TIED} is damaged ({error!s:.200})", str(path)) from error
    return {name: first for name, first in found.items() if name in listed}


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _version_of(about: os.stat_result) -> tuple[int, int]:
    return about.st_size, about.st_mtime_ns


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


def _tensor_info(name: str, called: str, begin: int, end: int, shape: tuple[int, ...], data_begin: int) -> TensorInfo:
    """A tensor of a dtype that is known; raises ValueError where its bytes are not as many as its elements need."""
    dtype, sizes = DTYPES[called], shape
    if called == _PACKED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name!r} has the shape {list(shape)}, of which two elements cannot share each byte")
        sizes = (*shape[:-1], shape[-1] // 2)
    if math.prod(sizes) * dtype.itemsize != end - begin:
        raise ValueError(f"{name!r} has {end - begin} bytes for {called} of shape {list(shape)!s:.100}")
    return TensorInfo(dtype, sizes, data_begin + begin, data_begin + end)


def _with_note(
    tensors: Mapping[str, TensorInfo],
    notes: Mapping[str, str],
    note: str,
    add: Callable[[str, TensorInfo, Any], TensorInfo],
    path: Path,
) -> dict[str, TensorInfo]:
    """The same, with what a note, which is JSON itself, says of each."""
    try:
        said = strict_json.loads(notes[note])
        if NOTES in said and SEAL not in notes:
            raise ValueError(f"it says that the header has a CRC-32, and there is no {SEAL}")
        return {name: add(name, info, said[name]) for name, info in tensors.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the note {note} in the header is damaged ({error!s:.200})", str(path)) from error


def _with_offsets(name: str, info: TensorInfo, said: Any) -> TensorInfo:
    offsets = tuple(said["saved_offsets"])
    good = all(type(offset) is int and 0 <= offset < 1 << 62 for offset in offsets)
    if not good or len(offsets) != len(info.shape):
        raise ValueError(f"{offsets!r:.100} for {name!r}")
    return info._replace(offsets=offsets)


def _with_crcs(name: str, info: TensorInfo, said: Any) -> TensorInfo:
    crcs = bytes.fromhex(said)
    if len(crcs) != 4 * block_count(info.begin, info.end - info.begin):
        raise ValueError(f"{len(crcs)} bytes for {name!r}")
    return info._replace(crcs=crcs)


def weight_map(index: Path) -> dict[str, str]:
    """The file of each name, of those that an index lists. Files lie beside it, or in folders there."""
    try:
        data = read_regular(index)
        said = strict_json.loads(data)
        about, listed = said.get("metadata", {}), said["weight_map"]
        _check_seal(data, about.get(SEAL) if isinstance(about, dict) else None)
        bad = [name for name in dict.fromkeys(listed.values()) if not _is_below(index.parent, name)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"no index of safetensors files ({error!s:.200})", str(index)) from error
    if bad:
        what = f"the index names {bad[0]!r:.200}, which is no file beside it or below"
        raise CorruptCheckpointError(what, str(index))
    return dict(listed)


def _is_below(directory: Path, name: str) -> bool:
    """Whether a name stays in the directory. Its file may be a link to anywhere, as in hubs' caches, but no folder."""
    parts = name.encode().split(b"/")
    if b"\0" in name.encode() or not {b"", b".", b".."}.isdisjoint(parts):
        return False
    return len(parts) == 1 or (directory / name).parent.resolve().is_relative_to(directory.resolve())


# ---- what a path means ----


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one, or a directory or an index leads to some."""
    if path.is_dir():
        return any(name.endswith(SUFFIX) or INDEX.fullmatch(name) for name in names_in(path))
    if path.name.endswith(".json"):
        return True
    with open_regular(path) as file:
        head = file.read(9)
    return len(head) == 9 and int.from_bytes(head[:8], "little") <= _MOST_HEADER_BYTES and head[8:] == b"{"


def find_named(directory: Path, name: str | None, variant: str | None) -> Path:
    """The model of this name and variant in a directory, as ``Names`` has them; without both, what it means.

    Raises:
        CheckpointError: there is none.
    """
    if name is None and variant is None:
        return find_in(directory)
    wanted = Names.checked(name, variant)
    for file in (wanted.file, wanted.index):
        if (directory / file).exists():
            return directory / file
    there = some(sorted(name for name in names_in(directory) if is_model_file(name)), _MOST_NAMED)
    raise CheckpointError(f"{directory} holds no {wanted.file} and no {wanted.index}; there is {there or 'no model'}")


def is_model_file(name: str) -> bool:
    """Whether a file is part of a model, by its name."""
    return not name.startswith(".") and (name.endswith(SUFFIX) or INDEX.fullmatch(name) is not None)


def find_in(directory: Path) -> Path:
    """What a directory means: ``model.safetensors``, or else the index of that name, as transformers has it.

    Without them, the only index, or the only safetensors file; the directory, where ranks left their shards.

    Raises:
        CheckpointError: there are several models, or parts of one without its index.
    """
    for name in (MODEL_NAME, INDEX_NAME):
        if (directory / name).exists():
            return directory / name
    indices = sorted(path for path in directory.iterdir() if INDEX.fullmatch(path.name))
    found = indices or sorted(directory.glob(f"*{SUFFIX}"))
    if len(found) > 1 and all(map(_is_shard, found)):
        return directory
    names = some([path.name for path in found], _MOST_NAMED)
    if found and all(_NUMBERED.fullmatch(path.name) for path in found):
        raise CheckpointError(f"{directory} holds parts of a model, {names}, and no index of them, {INDEX_NAME}")
    if len(found) != 1:
        raise CheckpointError(f"{directory} holds several models; name one of {names}, or pass name= and variant=")
    return found[0]


def rank_of_shard(name: str) -> int | None:
    """The rank that wrote a shard, by the name of its file; None for other names."""
    match = _SHARD_FILE.fullmatch(name)
    return int(match[1]) - 1 if match else None


def may_be_several(path: Path) -> bool:
    """Whether a path leads to more than one file, as far as names tell."""
    if path.is_dir():
        return not (path / MODEL_NAME).exists() and len(names_in(path)) > 1
    return path.name.endswith(".json")


def _is_shard(path: Path) -> bool:
    """Whether a file says so; that its header is right is for who reads it."""
    return path.suffix == SUFFIX and SHARDING.encode() in _read_bytes(path.resolve())[0]


def files_of(path: Path) -> list[Path]:
    """The file itself, or all shards in a directory. One rank's shard is no model."""
    if path.is_dir():
        shards = sorted(path.glob(f"*{SUFFIX}"))
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


# ---- a model, in any number of files ----


Place = tuple[str, int, int]
"""Of elements: their file, and where in it they begin and how long they are."""


class Shard(NamedTuple):
    """What one file holds of a tensor: all of it, mostly.

    Attributes:
        file: its name in the directory.
        offsets: where the part begins in the tensor, in elements.
        info: what the header says of it.
    """

    file: str
    offsets: tuple[int, ...]
    info: TensorInfo

    @property
    def place(self) -> Place:
        """By which a load knows it."""
        return self.file, self.info.begin, self.info.end - self.info.begin


class Whole(NamedTuple):
    """A tensor, and the parts that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Shard]


class Files(NamedTuple):
    """The files of a model.

    Attributes:
        directory: in which they are.
        versions: of each, by its name.
        links: where they really lie; empty where none is a link. Hubs' caches hold links to files elsewhere, and it
            was the user who named them.
    """

    directory: Path
    versions: dict[str, tuple[int, int]]
    links: dict[str, str]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Reading: raises CorruptCheckpointError where another file has taken the place of one by its end."""
        self._check_versions()
        yield
        self._check_versions()

    def _check_versions(self) -> None:
        for name, version in self.versions.items():
            path = self.directory / name
            if not path.exists() or _version_of(path.stat()) != version:
                raise CorruptCheckpointError("written anew after its header was read; load it again", str(path))


class Model(NamedTuple):
    """What files of a directory hold, of which all that headers and index say has been checked.

    Attributes:
        path: the file, the index, or the directory of shards.
        files: in which it lies.
        tensors: by name, tied ones under each of their names.
        unknown: the dtypes of tensors that are not among these, as they are not known here.
        notes: of the files, but for what they say of their tensors.
        begins: of the data in each file.
    """

    path: Path
    files: Files
    tensors: dict[str, Whole]
    unknown: dict[str, str]
    notes: dict[str, str]
    begins: dict[str, int]


def read_model(path: Path) -> Model:
    """What a file, an index or a directory leads to.

    Raises:
        CorruptCheckpointError: a file is missing, headers are damaged, contradict each other or the index, or shards do
            not make up a tensor.
        CheckpointError: a directory holds no model, or several.
        OSError: with errno and path.
    """
    path = find_in(path) if path.is_dir() else path
    listed = weight_map(path) if path.name.endswith(".json") else None
    directory = path if path.is_dir() else path.parent
    names = [file.name for file in files_of(path)] if listed is None else list(dict.fromkeys(listed.values()))
    found = _read_all(directory, names, path)
    with collection_paused():
        headers = {name: _parsed(directory / name, *one) for name, one in zip(names, found, strict=True)}
        tensors = _joined(headers, listed, path)
    unknown = {name: dtype for header in headers.values() for name, dtype in header.unknown.items()}
    if unknown:
        dtypes = ", ".join(sorted(set(unknown.values())))
        logger.warning("%s: %s cannot be loaded: torch has no dtype %s", path, some_keys(unknown), dtypes)
    lost = [name for name in listed or () if name not in tensors and name not in unknown]
    if listed and lost:
        raise CorruptCheckpointError(f"{lost[0]!r} is not in {listed[lost[0]]!r}, where the index says", str(path))
    notes = {
        name: text
        for header in headers.values()
        for name, text in header.notes.items()
        if name not in _OWN_NOTES and name not in header.tied
    }
    versions = {name: header.version for name, header in headers.items()}
    files = Files(directory, versions, _links(directory, names))
    return Model(path, files, tensors, unknown, notes, {name: header.begin for name, header in headers.items()})


def _read_all(directory: Path, names: Sequence[str], path: Path) -> list[tuple[bytes, os.stat_result]]:
    """The headers of files, as bytes."""

    def read(name: str) -> tuple[bytes, os.stat_result]:
        try:
            return _read_bytes(directory / name)
        except FileNotFoundError as error:
            what = f"{name} is not there, which it lists; fetch or save the model again"
            raise CorruptCheckpointError(what, str(path)) from error

    if len(names) < 2:
        return list(map(read, names))
    with ThreadPoolExecutor(min(_READERS, len(names))) as pool:
        return list(pool.map(read, names))


def _joined(headers: Mapping[str, Header], listed: Mapping[str, str] | None, path: Path) -> dict[str, Whole]:
    """The tensors of all files, or those that an index lists, and those that are tied to them."""
    parts: dict[str, list[Shard]] = {}
    for file, header in headers.items():
        for name, info in _infos_under(header).items():
            if listed is None or listed.get(name, file if name in header.tied else None) == file:
                parts.setdefault(name, []).append(Shard(file, info.offsets or (0,) * len(info.shape), info))
    return {name: _whole(name, found, path) for name, found in parts.items()}


def _infos_under(header: Header) -> dict[str, TensorInfo]:
    """The tensors of a file, under all their names."""
    return header.tensors | {name: header.tensors[first] for name, first in header.tied.items()}


def _whole(name: str, parts: list[Shard], path: Path) -> Whole:
    """The tensor that parts make up."""
    first = parts[0].info
    if first.offsets is None and len(parts) == 1:
        return Whole(first.dtype, first.shape, parts)
    others = [part.info.dtype for part in parts if part.info.dtype != first.dtype]
    if others or len({len(part.offsets) for part in parts}) > 1:
        what = f"{first.dtype} and {others[0]}" if others else "of different numbers of dimensions"
        raise CorruptCheckpointError(f"{name!r}: its shards are {what}", str(path))
    boxes = [(part.offsets, part.info.shape) for part in parts]
    ends = [[offset + length for offset, length in zip(*box, strict=True)] for box in boxes]
    shape = tuple(map(max, zip(*ends, strict=True)))
    wrong = wrong_boxes(shape, boxes)
    if wrong:
        files = some(list(dict.fromkeys(part.file for part in parts)), _MOST_NAMED)
        raise CorruptCheckpointError(
            f"{name!r} cannot be put together: {wrong}. It is in {files}; the files of all ranks that saved are "
            "needed, and none of another save",
            str(path),
        )
    return Whole(first.dtype, shape, parts)


def _links(directory: Path, names: Sequence[str]) -> dict[str, str]:
    root = os.path.realpath(directory)
    found = {name: os.path.realpath(directory / name) for name in names}
    return {} if all(path == os.path.join(root, name) for name, path in found.items()) else found


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
    return join_header(header_entries(tensors, cures), notes_with(notes, ties or {}), _ALIGNMENT, cures)


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


def notes_with(
    notes: Mapping[str, str], ties: Mapping[str, str], crcs: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All notes of a header.

    Args:
        notes: texts by names.
        ties: the names of tensors that are stored under another name, with that one.
        crcs: of each tensor, as ``CRCS`` has them; the header gets one as well then. None: there are none.
    """
    sealed = {} if crcs is None else {SEAL: _NO_DIGITS}
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
    return len(data).to_bytes(8, "little") + (_sealed(data) if SEAL in notes else data)


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


def make_index(files: Mapping[str, str], total_bytes: int) -> bytes:
    """An index: the file of each name."""
    index = {"metadata": {SEAL: _NO_DIGITS, "total_size": total_bytes}, "weight_map": dict(files)}
    return _sealed(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
