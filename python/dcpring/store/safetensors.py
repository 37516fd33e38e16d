"""A directory of safetensors as storage of DCP: its headers say what ``.metadata`` says otherwise.

The metadata that is made of them has the same tables as a checkpoint of RingWriter, so plans, loads, sharing between
ranks and errors are those that all checkpoints have.

A model is committed to a directory that may hold another, and files that are nobody's business here:

- One file: a rename to ``model.safetensors``.
- Several: they get names that nothing refers to, then the index is renamed; a ``model.safetensors`` from before, which
  comes first for whoever loads, is removed last.

What the directory meant before stays good until then.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcpring import _C
from dcpring.base.collector import collection_paused
from dcpring.base.files import names_in, new_tag, unfinished_name
from dcpring.errors import CorruptCheckpointError
from dcpring.format.lazy import Chunks, LazyMetadata
from dcpring.format.metadata import METADATA_NAME, OPAQUE, TENSOR, load_metadata
from dcpring.format.quantised import Quantised
from dcpring.format.safetensors import (
    INDEX_NAME,
    INDEX_SUFFIX,
    MODEL_NAME,
    SUFFIX,
    Model,
    file_name,
    is_safetensors,
    make_index,
    read_model,
    weight_map,
)
from dcpring.plan.flatten import path_code
from dcpring.plan.table import table_of_chunks
from dcpring.store.layout import remove_files

_UNFINISHED = re.compile(r"\.model[^/]*\.safetensors(?:\.index\.json)?\.[0-9a-f]{16}\.tmp")
_SHARD = re.compile(r"model(?:-[0-9a-f]{16})?-\d{5}-of-\d{5}\.safetensors")


# ---- reading ----


def is_model(path: Path) -> bool:
    """Whether a path means safetensors: a file, an index, or a directory without metadata of DCP's that has some."""
    if path.is_dir():
        return not any(name.endswith(METADATA_NAME) for name in names_in(path)) and is_safetensors(path)
    return path.is_file() and is_safetensors(path)


def chunks_of(model: Model, quantised: Mapping[str, list[Quantised]] | None = None) -> Chunks:
    """The tables of a model: a row for each part of a tensor, and for what is made of a quantised one.

    Raises:
        CorruptCheckpointError: names that no table can have.
    """
    with collection_paused():
        return _tables(model, quantised or {})


def _tables(model: Model, quantised: Mapping[str, list[Quantised]]) -> Chunks:
    properties = functools.cache(lambda dtype: TensorProperties(dtype=dtype))
    chunks, places = [], []
    for name, whole in model.tensors.items():
        made = quantised.get(name)
        if made is None:
            kind, dtype, shape = TENSOR, whole.dtype, whole.shape
            parts = [(part.offsets, part.info.shape, part.place, part.info.crcs) for part in whole.parts]
        else:
            kind, dtype, shape = OPAQUE, made[0].dtype, made[0].whole
            parts = [(part.begins, part.shape, part.place, None) for part in made]
        places += [(file, kind, at, size, at, size, crcs) for _, _, (file, at, size), crcs in parts]
        chunks.append([(shape, offsets, sizes, properties(dtype)) for offsets, sizes, _, _ in parts])
    try:
        table = table_of_chunks(list(model.tensors), [path_code({"": ("",)}, "")] * len(model.tensors), chunks)
        storage = _C.StorageIndex(len(table))
        storage.put(places)
    except (ValueError, OverflowError) as error:
        raise CorruptCheckpointError(f"it holds what no checkpoint can ({error})", str(model.path)) from error
    return Chunks(table, True, storage)


def metadata_of(path: Path) -> Metadata:
    """The metadata of a checkpoint's directory, or made of the headers that a path leads to.

    Raises:
        CheckpointError, CorruptCheckpointError, UntrustedCheckpointError, OSError: it cannot be read.
    """
    return (
        LazyMetadata(source=chunks_of(read_model(path))) if is_model(path) else load_metadata(path / METADATA_NAME)[0]
    )


# ---- writing ----


def has_model(names: Iterable[str]) -> bool:
    """Whether there is a model among the files of a directory that a commit would replace."""
    return any(name in (MODEL_NAME, INDEX_NAME) or _SHARD.fullmatch(name) for name in names)


def free_names(directory: Path, count: int) -> list[str]:
    """What so many files of a model will be called; several have names that no file in the directory has."""
    names = [file_name(number, count) for number in range(count)]
    if count > 1 and any((directory / name).exists() for name in names):
        tag = new_tag()
        names = [name.replace("model", f"model-{tag}", 1) for name in names]
    return names


def remove_unfinished(directory: Path) -> None:
    """Before a save: removes what others, that were killed, have left."""
    remove_files(directory, [name for name in names_in(directory) if _UNFINISHED.fullmatch(name)])


class Index(NamedTuple):
    """A file to be written: what it is called until the commit, and its bytes."""

    name: str
    data: bytes


def new_index(files: Mapping[str, str], weights: Mapping[str, str], total_bytes: int) -> Index | None:
    """What ``commit_model`` needs besides the files; None for one file.

    Args:
        files: as for ``commit_model``.
        weights: the file of each tensor.
        total_bytes: of the tensors.
    """
    return None if len(files) == 1 else Index(f".{unfinished_name(INDEX_NAME)}", make_index(weights, total_bytes))


def commit_model(directory: Path, files: Mapping[str, str], index: str | None, durable: bool) -> list[str]:
    """Puts a model in the place of the one that is there.

    Args:
        directory: which holds the files.
        files: that are written, by what they are called until now, the names that ``free_names`` has given.
        index: what the index is called until now, None where there is none.
        durable: whether renames are synced; the files are durable.

    Returns:
        Files in the directory that nothing refers to any more.
    """
    path, before = str(directory), set(names_in(directory))
    stale = {name for name in before if _SHARD.fullmatch(name)} | _listed(directory)
    stale -= {MODEL_NAME, *files.values()}
    if index is None:
        ((unfinished, name),) = files.items()
        _C.replace(path, unfinished, name, durable)
        return [*sorted(stale), *({INDEX_NAME} & before)]  # which says what is stale, and so goes last
    for unfinished, name in files.items():
        _C.replace(path, unfinished, name, False)
    if durable:
        _C.sync_directory(path)
    _C.rename_file(path, index, INDEX_NAME, durable)
    # Who loads looks for this one first: where it is there, its end is the commit.
    if MODEL_NAME in before:
        _C.remove_files(path, [MODEL_NAME])
        if durable:
            _C.sync_directory(path)
    return sorted(stale)


def _listed(directory: Path) -> set[str]:
    """Files that the index of a directory lists, in folders too, and no other one there; none if one is damaged."""
    try:
        listed = {index.name: set(weight_map(index).values()) for index in directory.glob(f"*{INDEX_SUFFIX}")}
    except (CorruptCheckpointError, OSError):
        return set()
    own = listed.pop(INDEX_NAME, set()).difference(*listed.values())
    return {name for name in own if name.endswith(SUFFIX) and os.path.isfile(directory / name)}
