"""Targets are written beside where they go, under a name of their own, and take its place when they are complete.

Whatever goes wrong before that, Ctrl-C too, what was there stays as it was, and the new files are removed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dcpring import _C, _layout
from dcpring.errors import CheckpointError
from dcpring.options import IOOptions

logger = logging.getLogger("dcpring")

_PARTS_OF_CHECKPOINTS = re.compile(
    r"(__\d+)?\.metadata|__\d+_\d+(\.[0-9a-f]{16})?\.distcp|(__\d+)?\.dcpring\.json"
    r"|[^/]+\.safetensors|[^/]+\.safetensors\.index\.json"
)
"""Names that a replaced directory may hold; with any other in it, it is not ours to remove."""


def check_target(target: Path, is_directory: bool, overwrite: bool) -> None:
    """Whether something can be written there; raises CheckpointError before any work is done."""
    if not target.name:
        raise CheckpointError(f"{target} cannot be replaced; name a file or directory that is to be made")
    if not (target.exists() or target.is_symlink()):
        return
    kind = "directory" if target.is_dir() else "file"
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link; name what it refers to")
    if (kind == "directory") != is_directory:
        wanted = "directory" if is_directory else "file"
        raise CheckpointError(f"{target} is a {kind}, and a {wanted} is to be written; choose another name")
    names = sorted(entry.name for entry in target.iterdir()) if is_directory else []
    if is_directory and not names:
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already; choose another name, or replace it with --overwrite")
    strange = [name for name in names if not _PARTS_OF_CHECKPOINTS.fullmatch(name)]
    if strange:
        raise CheckpointError(
            f"{target} also holds {strange[0]!r}, which is no part of a checkpoint, and replacing the directory would "
            "remove it; choose another name"
        )


@contextlib.contextmanager
def file_beside(target: Path, overwrite: bool) -> Iterator[tuple[str, str]]:
    """The directory and the name under which to write a file; in the end it is called ``target``."""
    check_target(target, False, overwrite)
    directory, name = str(target.parent), _unfinished(target)
    _C.make_directory(directory, True)
    try:
        yield directory, name
        check_target(target, False, overwrite)
        _C.replace(directory, name, target.name, True)
    finally:
        _remove(target.parent / name)


@contextlib.contextmanager
def directory_beside(target: Path, overwrite: bool) -> Iterator[str]:
    """A new directory to write to; in the end it is called ``target``."""
    check_target(target, True, overwrite)
    parent, name = str(target.parent), _unfinished(target)
    unfinished = target.parent / name
    try:
        _C.make_directory(str(unfinished), True)
        yield str(unfinished)
        _C.sync_directory(str(unfinished))
        check_target(target, True, overwrite)
        _C.replace(parent, name, target.name, True)
    finally:
        _remove(unfinished)


def _remove(unfinished: Path) -> None:
    """What was not finished, or what the target has replaced."""
    try:
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more, and could not be removed: %s", unfinished, error)


def _unfinished(target: Path) -> str:
    return f".{target.name}.{_layout.new_tag()}.tmp"


@contextlib.contextmanager
def writing(directory: str, name: str, size_hint: int, watch: _C.Watch | None) -> Iterator[_C.FileWriter]:
    """A new file, durable at the end, removed on failure."""
    file = _C.FileWriter(directory, name, size_hint, IOOptions().for_core(True, watch))
    try:
        yield file
        file.finish()
    finally:
        file.close()
