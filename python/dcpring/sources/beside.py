"""Targets are written beside where they go, under a name of their own, and take its place when they are complete.

Whatever goes wrong before that, Ctrl-C too, what was there stays as it was, and the new files are removed. Who is
killed cannot do that: the next conversion to the same target does. It knows by their locks whose writer is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dcpring import _C
from dcpring.base.files import locked, names_in, unfinished_name
from dcpring.errors import CheckpointError
from dcpring.format.model_files import ModelFileNames, is_model_file
from dcpring.hf.commit import has_model
from dcpring.options import IOOptions
from dcpring.store.layout import is_part

logger = logging.getLogger("dcpring")


def joins(target: Path) -> bool:
    """Whether a model is written into a directory, as that of another, whose configuration and tokenizer stay."""
    names = names_in(target) if target.is_dir() and not target.is_symlink() else []
    return not any(map(is_part, names)) and not all(map(is_model_file, names))


def check_target(target: Path, is_directory: bool, overwrite: bool, is_model: bool = False) -> None:
    """Whether something can be written there; raises CheckpointError before any work is done.

    Args:
        is_model: it is safetensors, for which the files that a directory holds besides are no hindrance.
    """
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
    names = sorted(names_in(target)) if is_directory else []
    is_joined = is_directory and is_model and joins(target)
    if is_directory and (not names or (is_joined and not has_model(names, ModelFileNames()))):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already; choose another name, or replace it with --overwrite")
    strange = [name for name in names if not is_part(name) and not is_model_file(name)]
    if strange and not is_joined:
        is_of_a_model = is_directory and not is_model and joins(target) and has_model(names, ModelFileNames())
        other = ", or --to safetensors, which replaces the model alone" if is_of_a_model else ""
        raise CheckpointError(
            f"{target} also holds {strange[0]!r}, which is no part of a checkpoint, and replacing the directory would "
            f"remove it; choose another name{other}"
        )


@contextlib.contextmanager
def file_beside(target: Path, overwrite: bool, size_hint: int, watch: _C.Watch | None) -> Iterator[_C.FileWriter]:
    """A new file to write; in the end it is called ``target``."""
    with _beside(target, False, overwrite) as (path, locks), contextlib.ExitStack() as opened:
        with locked(target.parent, fcntl.LOCK_SH):
            file = opened.enter_context(writing(str(path.parent), path.name, size_hint, watch))
            locks.enter_context(locked(path))
        yield file


@contextlib.contextmanager
def directory_beside(target: Path, overwrite: bool) -> Iterator[str]:
    """A new directory to write to; in the end it is called ``target``."""
    with _beside(target, True, overwrite) as (path, locks):
        with locked(target.parent, fcntl.LOCK_SH):
            _C.make_directory(str(path), True)
            locks.enter_context(locked(path))
        yield str(path)
        _C.sync_directory(str(path))


@contextlib.contextmanager
def _beside(target: Path, is_directory: bool, overwrite: bool) -> Iterator[tuple[Path, contextlib.ExitStack]]:
    """Where to make it, and what keeps its lock until it is called ``target``."""
    check_target(target, is_directory, overwrite)
    _C.make_directory(str(target.parent), True)
    _remove_orphans(target)
    unfinished = target.with_name(f".{unfinished_name(target.name)}")
    with contextlib.ExitStack() as locks:
        try:
            yield unfinished, locks
            check_target(target, is_directory, overwrite)
            _C.replace(str(target.parent), unfinished.name, target.name, True)
        finally:
            _remove(unfinished)


def _remove(unfinished: Path) -> None:
    """What was not finished, or what the target has replaced."""
    try:
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is not needed any more, and could not be removed: %s", unfinished, error)


def _remove_orphans(target: Path) -> None:
    """What conversions to this target have left that were killed: nobody holds its lock.

    Where there are no locks, nothing is known to be such. Locks may hold for one machine only: two machines must not
    convert to the same target at the same time.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.tmp(\.old)?")
    with contextlib.suppress(OSError), locked(target.parent, must=True):  # so nobody is between making and locking
        for path in target.parent.iterdir():
            if pattern.fullmatch(path.name) and not path.is_symlink():
                with contextlib.suppress(OSError), locked(path, must=True):
                    _remove(path)


@contextlib.contextmanager
def writing(
    directory: str, name: str, size_hint: int, watch: _C.Watch | None, syncs: _C.Syncs | None = None
) -> Iterator[_C.FileWriter]:
    """A new file, removed on failure. It is durable at the end, or when the syncs are done that it is added to."""
    file = _C.FileWriter(directory, name, size_hint, IOOptions().for_core(True, watch, exact=True))
    try:
        yield file
        file.finish(syncs)
    finally:
        file.close()
