"""The files of a model: their names, how a path leads to them, and the tensors that their headers describe together.

A model lies in one file of safetensors, in several that an index lists, or in the shards that ranks have left. All that
the headers and the index say is checked here before a tensor is touched; ``safetensors`` checks a single header.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from dcpring.base import strict_json
from dcpring.base.collector import collection_paused
from dcpring.base.files import names_in, read_regular
from dcpring.base.text import some, some_keys
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.boxes import wrong_boxes
from dcpring.format.metadata import METADATA_NAME
from dcpring.format.safetensors import (
    NO_DIGITS,
    OWN_NOTES,
    SEAL,
    SHARDING,
    Header,
    StoredPart,
    begins_as_header,
    check_seal,
    parse_header,
    read_header,
    refusing,
    sealed,
)

logger = logging.getLogger("dcpring")

SUFFIX = ".safetensors"
INDEX = re.compile(r".*\.safetensors\.index\.(?:[^/]+\.)?json")
"""Any index."""

_OF_SEVERAL = re.compile(r"\d{5}-of-\d{5}\.safetensors")
_NUMBERED = re.compile(r".*-\d{5}-of-(?!00001)\d{5}\.safetensors")
_SHARD_FILE = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")

_READERS = 16
"""Threads that read headers: file systems in a network answer slowly, but many at a time."""

DEFAULT_SHARD_BYTES = 5 << 30
"""Of tensors in a file of several."""

_MOST_NAMED = 5


@dataclass(frozen=True)
class ModelFileNames:
    """The names of a model's files, as transformers and diffusers choose them.

    Attributes:
        name: "model" for transformers, "diffusion_pytorch_model" for diffusers, "adapter_model" for PEFT.
        variant: of several models in a directory, such as "fp16"; None: the one that has none.
    """

    name: str = "model"
    variant: str | None = None

    @classmethod
    def checked(cls, name: str | None, variant: str | None) -> ModelFileNames:
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


MODEL_NAME, INDEX_NAME = ModelFileNames().file, ModelFileNames().index

# ---- what a path means ----


def is_model(path: Path) -> bool:
    """Whether a path means safetensors: a file, an index, or a directory without metadata of DCP's that has some."""
    if path.is_dir():
        return not any(name.endswith(METADATA_NAME) for name in names_in(path)) and is_safetensors(path)
    return path.is_file() and is_safetensors(path)


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one, or a directory or an index leads to some."""
    if path.is_dir():
        return any(_is_safetensors_file(path / name) or INDEX.fullmatch(name) for name in names_in(path))
    return path.name.endswith(".json") or begins_as_header(path)


def is_model_file(name: str) -> bool:
    """Whether a file is part of a model, by its name."""
    return not name.startswith(".") and (name.endswith(SUFFIX) or INDEX.fullmatch(name) is not None)


def find_named(directory: Path, name: str | None, variant: str | None) -> Path:
    """Finds the model of a name and variant (see ``ModelFileNames``) in a directory; without both, ``find_in`` chooses.

    Raises:
        CheckpointError: there is none.
    """
    if name is None and variant is None:
        return find_in(directory)
    wanted = ModelFileNames.checked(name, variant)
    for file in (wanted.file, wanted.index):
        if (directory / file).exists():
            return directory / file
    there = some(sorted(name for name in names_in(directory) if is_model_file(name)), _MOST_NAMED)
    raise CheckpointError(f"{directory} holds no {wanted.file} and no {wanted.index}; there is {there or 'no model'}")


def find_in(directory: Path) -> Path:
    """Finds the model in a directory: ``model.safetensors``, or else its index, in the order of transformers.

    Where neither is there, the model is the only index, or the only file of safetensors. Where ranks have left their
    shards, the directory itself is returned.

    Raises:
        CheckpointError: there are several models, or parts of one without its index.
    """
    for name in (MODEL_NAME, INDEX_NAME):
        if (directory / name).exists():
            return directory / name
    indices = sorted(path for path in directory.iterdir() if INDEX.fullmatch(path.name))
    found = indices or _safetensors_in(directory)
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


def _safetensors_in(directory: Path) -> list[Path]:
    return sorted(filter(_is_safetensors_file, directory.glob(f"*{SUFFIX}")))


def _is_safetensors_file(path: Path) -> bool:
    """Whether it is called like one, and no folder."""
    return path.name.endswith(SUFFIX) and not path.is_dir()


def _is_shard(path: Path) -> bool:
    """Whether a file says so; that its header is right is for who reads it."""
    return path.suffix == SUFFIX and SHARDING.encode() in read_header(path.resolve())[0]


def _refuse_one_shard(path: Path) -> None:
    """Raises CheckpointError for a file that is one of several ranks' shards: it is no model."""
    if not _SHARD_FILE.fullmatch(path.name):
        return
    others = [one for one in path.parent.glob("shard-*") if _SHARD_FILE.fullmatch(one.name) and one.name != path.name]
    if others and _is_shard(path):
        raise CheckpointError(
            f"{path} holds one rank's part of each tensor, and {len(others)} other files beside it the others; name "
            f"the directory, {path.parent}"
        )


def weight_map(index: Path) -> dict[str, str]:
    """The file of each name, of those that an index lists. Files lie beside it, or in folders there."""
    with refusing("no index of safetensors files", index):
        data = read_regular(index)
        said = strict_json.loads(data)
        about, listed = said.get("metadata", {}), said["weight_map"]
        check_seal(data, about.get(SEAL) if isinstance(about, dict) else None)
        bad = [name for name in dict.fromkeys(listed.values()) if not _is_below(index.parent, name)]
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


def make_index(files: Mapping[str, str], total_bytes: int) -> bytes:
    """The bytes of an index, which lists the file of each name."""
    index = {"metadata": {SEAL: NO_DIGITS, "total_size": total_bytes}, "weight_map": dict(files)}
    return sealed(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")


# ---- what the files hold ----


class Whole(NamedTuple):
    """A tensor, and the parts that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[StoredPart]


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
    """The tensors that files hold. All that the headers and the index say has been checked.

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


def _version_of(about: os.stat_result) -> tuple[int, int]:
    """The size and the time of a file: they change when another file takes its place."""
    return about.st_size, about.st_mtime_ns


def read_model(path: Path) -> Model:
    """Reads the headers of the model that a file, an index or a directory stands for.

    Raises:
        CorruptCheckpointError: a file is missing, headers are damaged, contradict each other or the index, or shards do
            not make up a tensor.
        CheckpointError: a directory holds no model, or several.
        OSError: with errno and path.
    """
    path = find_in(path) if path.is_dir() else path
    directory = path if path.is_dir() else path.parent
    listed = weight_map(path) if path.name.endswith(".json") else None
    if listed is not None:
        names = list(dict.fromkeys(listed.values()))
    elif path.is_dir():
        names = [file.name for file in _safetensors_in(path)]
    else:
        _refuse_one_shard(path)
        names = [path.name]
    read = dict(zip(names, _read_all(directory, names, path), strict=True))
    with collection_paused():
        headers = {
            name: parse_header(directory / name, name, data, about.st_size) for name, (data, about) in read.items()
        }
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
        if name not in OWN_NOTES and name not in header.tied
    }
    versions = {name: _version_of(about) for name, (_, about) in read.items()}
    files = Files(directory, versions, _links(directory, names))
    return Model(path, files, tensors, unknown, notes, {name: header.begin for name, header in headers.items()})


def _read_all(directory: Path, names: Sequence[str], path: Path) -> list[tuple[bytes, os.stat_result]]:
    """The headers of files, as ``read_header`` gives them."""

    def read(name: str) -> tuple[bytes, os.stat_result]:
        try:
            return read_header(directory / name)
        except FileNotFoundError as error:
            what = f"{name} is not there, which it lists; fetch or save the model again"
            raise CorruptCheckpointError(what, str(path)) from error

    if len(names) < 2:
        return list(map(read, names))
    with ThreadPoolExecutor(min(_READERS, len(names))) as pool:
        return list(pool.map(read, names))


def _joined(headers: Mapping[str, Header], listed: Mapping[str, str] | None, path: Path) -> dict[str, Whole]:
    """Joins the tensors of all files; where there is an index, those that it lists, and those that are tied to them."""
    parts: dict[str, list[StoredPart]] = {}
    for file, header in headers.items():
        named = header.tensors | {name: header.tensors[first] for name, first in header.tied.items()}
        for name, part in named.items():
            if listed is None or listed.get(name, file if name in header.tied else None) == file:
                parts.setdefault(name, []).append(part)
    return {name: _whole(name, found, path) for name, found in parts.items()}


def _whole(name: str, parts: list[StoredPart], path: Path) -> Whole:
    """Joins the parts of a tensor. Raises CorruptCheckpointError where they do not make one up."""
    first = parts[0]
    if len(parts) == 1 and not any(first.offsets):
        return Whole(first.dtype, first.shape, parts)
    others = [part.dtype for part in parts if part.dtype != first.dtype]
    if others or len({len(part.offsets) for part in parts}) > 1:
        what = f"{first.dtype} and {others[0]}" if others else "of different numbers of dimensions"
        raise CorruptCheckpointError(f"{name!r}: its shards are {what}", str(path))
    boxes = [(part.offsets, part.shape) for part in parts]
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
