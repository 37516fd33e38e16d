"""Commits a model to a directory that may hold another one, and other files, which stay.

- One file: a rename to ``model.safetensors``.
- Several: they are in a folder of their own, to which an index leads that is renamed; a ``model.safetensors`` from
  before, which comes first for whoever loads, is removed then. That is the commit. What the old model had goes, the
  files get their usual names besides, by links, and an index of these takes the place of the first.

What the directory meant before stays good until the commit. Whoever calls this holds the lock of the directory
(``store.one_saver``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dcpring import _C
from dcpring.base.files import names_in, new_tag, unfinished_name
from dcpring.base.text import some
from dcpring.errors import CheckpointError, CorruptCheckpointError
from dcpring.format.model_files import INDEX, SUFFIX, ModelFileNames, is_model_file, make_index, weight_map
from dcpring.store.layout import remove_files

logger = logging.getLogger("dcpring")

_MOST_NAMED = 5


def has_model(files: Iterable[str], names: ModelFileNames) -> bool:
    """Whether there is a model of these names among the files of a directory, which a commit would replace."""
    return any(file in (names.file, names.index) or names.is_one_of_several(file) for file in files)


def check_others(directory: Path, names: ModelFileNames) -> None:
    """Raises CheckpointError where a directory holds models, but none of this name: their weights would stay."""
    files = names_in(directory)
    own = f"{names.name}.", f"{names.name}-"
    others = sorted(file for file in files if is_model_file(file) and not file.startswith(own))
    if others and not has_model(files, names):
        name = others[0].partition(SUFFIX)[0]
        raise CheckpointError(
            f"{directory} holds weights under another name, {some(others, _MOST_NAMED)}, which would stay beside "
            f"{names.file}, and are what their own library loads; to replace them pass name={name!r} (and variant=, "
            'where that ends as in "x.fp16"), or name="model" to keep both'
        )


def remove_unfinished(directory: Path, names: ModelFileNames) -> None:
    """Before a save: removes what others, that were killed, have left. Who calls has the lock of the directory."""
    pattern = re.compile(rf"\.{re.escape(names.stem)}[^/]*\.safetensors(?:\.index[^/]*\.json)?\.[0-9a-f]{{16}}\.tmp")
    files = names_in(directory)
    remove_files(directory, [file for file in files if pattern.fullmatch(file)])
    used = {file.partition("/")[0] for file in _listed(directory, names)}
    for folder in _folders(names, files) - used:
        shutil.rmtree(directory / folder, ignore_errors=True)


def _folders(names: ModelFileNames, files: Iterable[str]) -> set[str]:
    """The folders that ``Unfinished`` has made."""
    pattern = re.compile(rf"\.{re.escape(names.stem)}\.[0-9a-f]{{16}}")
    return {file for file in files if pattern.fullmatch(file)}


def discard(directory: Path, files: Iterable[str]) -> None:
    """Removes files of an ``Unfinished``, and the folder in which they are."""
    files = list(files)
    remove_files(directory, files)
    for folder in {file.rpartition("/")[0] for file in files} - {""}:
        _remove_folder(directory / folder)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # something else is in it, or it is gone
        folder.rmdir()


class Index(NamedTuple):
    """A file to be written: what it is called until the commit, and its bytes."""

    name: str
    data: bytes


class Unfinished(NamedTuple):
    """The files of a model until the commit.

    One file is hidden beside where it goes. Several are in a hidden folder, under their own names: until the model is
    committed, and when a save is killed, no program that looks for ``*.safetensors`` takes them for the model that is
    there.

    Attributes:
        names: what they will be called.
        folder: in which they are, with a "/"; "" for one file.
        files: by what they are called until then, what they will be called.
    """

    names: ModelFileNames
    folder: str
    files: dict[str, str]

    @classmethod
    def of(cls, names: ModelFileNames, count: int) -> Unfinished:
        if count == 1:
            return cls(names, "", {f".{unfinished_name(names.file)}": names.file})
        folder = f".{names.stem}.{new_tag()}/"
        final = [names.of_several(number, count) for number in range(count)]
        return cls(names, folder, {f"{folder}{name}": name for name in final})

    def make_folder(self, directory: Path) -> None:
        if self.folder:
            _C.make_directory(str(directory / self.folder), False)

    def indices(self, weights: Mapping[str, str], total_bytes: int) -> list[Index]:
        """Makes the indices of several files: of where they are now, and of where they will be. One file has none.

        Args:
            weights: the file of each tensor, as it will be called.
            total_bytes: of the tensors.
        """
        folders = [self.folder, ""] if self.folder else []
        return [
            Index(
                f".{unfinished_name(self.names.index)}",
                make_index({name: f"{folder}{file}" for name, file in weights.items()}, total_bytes),
            )
            for folder in folders
        ]


def commit_model(directory: Path, unfinished: Unfinished, indices: Sequence[str], durable: bool) -> None:
    """Puts a model in the place of the one that is there, and removes that.

    Args:
        directory: which holds the files.
        unfinished: the files, which are written.
        indices: what the indices are called until now.
        durable: whether names are synced; the files are durable.
    """
    path, names, before = str(directory), unfinished.names, set(names_in(directory))
    listed = _listed(directory, names)
    stale = {file for file in before if names.is_one_of_several(file)} | listed
    if not indices:
        ((hidden, name),) = unfinished.files.items()
        _C.replace(path, hidden, name, durable)
        # The index goes last, as it says what is stale.
        remove_files(directory, [hidden, *sorted(stale - {name}), *({names.index} & before)])
    else:
        first, last = indices
        if durable:
            _C.sync_directory(str(directory / unfinished.folder))
            _C.sync_directory(path)
        _C.rename_file(path, first, names.index, durable)
        # Who loads looks for this one first: where it is there, its end is the commit.
        if names.file in before:
            _C.remove_files(path, [names.file])
            if durable:
                _C.sync_directory(path)
        remove_files(directory, sorted(stale))
        _move_out(directory, unfinished, last, durable)
    for folder in _folders(names, before) - {unfinished.folder.rstrip("/")}:
        _remove_folder(directory / folder)


def _move_out(directory: Path, unfinished: Unfinished, index: str, durable: bool) -> None:
    """Gives the files of a committed model their usual names. Where a file cannot have two, they stay in the folder."""
    path, folder = str(directory), unfinished.folder
    try:
        syncs = _C.Syncs(None) if durable else None
        for name in unfinished.files.values():
            _C.link_file(str(directory / folder), name, path, name, 0, True, syncs)
        if syncs is not None:
            syncs.wait()
            _C.sync_directory(path)
        _C.rename_file(path, index, unfinished.names.index, False)
    except OSError as error:
        logger.info("the files of %s stay in %s, as its index says: %s", directory, folder, error)
        remove_files(directory, [*unfinished.files.values(), index])
        return
    try:
        if durable:
            _C.sync_directory(path)
    except OSError as error:  # whichever index is there after a crash, its files are
        logger.info("the files of %s stay in %s, too: %s", directory, folder, error)
    else:
        discard(directory, unfinished.files)


def _listed(directory: Path, names: ModelFileNames) -> set[str]:
    """Files that the index of a model lists, in folders too, and no other one there; none if one is damaged."""
    try:
        indices = [path for path in directory.iterdir() if INDEX.fullmatch(path.name)]
        listed = {index.name: set(weight_map(index).values()) for index in indices}
    except (CorruptCheckpointError, OSError):
        return set()
    own = listed.pop(names.index, set()).difference(*listed.values())
    return {file for file in own if file.endswith(SUFFIX) and os.path.isfile(directory / file)}
