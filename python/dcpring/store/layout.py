"""Names in a checkpoint directory, and which of its files nobody needs any more.

Data files are called ``__{rank}_{n}.{tag}.distcp``. Every rank draws a fresh tag for every save, so no save ever
touches a file that a committed ``.metadata`` refers to, and a file with a tag that no metadata refers to is what a
failed save has left. With ``file_names="torch"`` there is no tag: nothing is saved over a checkpoint then.

Of several saves to one directory one is committed, also by other machines, whose locks nobody would see. A save
*claims* the directory by an empty file, which becomes its metadata: it writes no data before, and its commit renames
that file. A save that begins removes the claims of all others before their data, and so their commits fail.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from dcpring import _C
from dcpring.base.files import locked, names_in, unfinished_name, with_cure
from dcpring.base.text import some
from dcpring.errors import CheckpointError
from dcpring.format.metadata import METADATA_NAME, read_trailer, referenced_files
from dcpring.names.key_map import KeyTable, dump_tables, load_tables

logger = logging.getLogger("dcpring")

_TAGGED = re.compile(r"__(\d+)_\d+\.[0-9a-f]{16}\.distcp")
_STOCK = re.compile(r"__(\d+)_\d+\.distcp")
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_UNFINISHED = re.compile(r"(?:__(\d+))?\.(?:metadata|dcpring\.json)(?:\.[0-9a-f]{16})?\.tmp")
_TABLE = re.compile(r"(?:__(\d+))?\.dcpring\.json")
_MOST_NAMED = 8
_KEPT_TABLES = 2
_OF_TORCH_SAVE = (".bin", ".pth")


def not_remote(path: object, instead: str = "torch.distributed.checkpoint's FsspecWriter and FsspecReader") -> str:
    """Why a path is none of a file system, as "gs://bucket/step-1", and what to use instead; "" if it is one.

    No folder "gs:" is ever meant.
    """
    text = "" if isinstance(path, Path) else os.fsdecode(os.fspath(path))  # type: ignore[call-overload]
    if "://" not in text:
        return ""
    return (
        f"{text} is remote storage, which dcpring does not write or read yet; give a folder of a file system that is "
        f"mounted, or use {instead}"
    )


def local_path(path: str | os.PathLike[str]) -> Path:
    """What a path stands for now: a save in the background, and one of many, goes where the first would have gone,
    whatever directory the program is in by then.

    Raises:
        CheckpointError: it is ``not_remote``'s to refuse.
    """
    remote = not_remote(path)
    if remote:
        raise CheckpointError(remote)
    return Path(path).absolute()


def data_file_name(rank: int, index: int, tag: str | None) -> str:
    """Without a tag as torch has it."""
    return f"__{rank}_{index}.distcp" if tag is None else f"__{rank}_{index}.{tag}.distcp"


def refuse_checkpoint(directory: Path, rank: int | None = None) -> None:
    """Raises RuntimeError where there is a checkpoint, whose files may have the names that torch gives.

    Args:
        directory: to be saved to.
        rank: whatever other ranks have committed (``use_collectives=False``); None: nor that.
    """
    for path in metadata_files(directory):
        if rank is None or rank_of_metadata(path.name) in (None, rank):
            raise RuntimeError(
                f'{path} is there: with file_names="torch" a save would write to that checkpoint\'s files; choose '
                'another directory, remove what is there, or leave file_names at "unique"'
            )


def rank_metadata_name(rank: int) -> str:
    return f"__{rank}{METADATA_NAME}"


def table_name(rank: int | None = None) -> str:
    """The key maps beside a checkpoint; with a rank, beside its rank-local metadata."""
    return ".dcpring.json" if rank is None else f"__{rank}.dcpring.json"


def rank_of_file(name: str) -> int | None:
    """The rank that wrote a data file, by its name; None for other names."""
    match = _TAGGED.fullmatch(name) or _STOCK.fullmatch(name)
    return int(match[1]) if match else None


def is_part(name: str) -> bool:
    """Whether a file is part of a finished checkpoint, by its name."""
    patterns = (_TAGGED, _STOCK, _RANK_METADATA, _TABLE)
    return name == METADATA_NAME or any(pattern.fullmatch(name) for pattern in patterns)


def rank_metadata_files(directory: Path, names: list[str] | None = None) -> dict[int, Path]:
    """The rank-local metadata files (``use_collectives=False``), by rank; ``names``: the directory, where it is listed
    already."""
    names = names_in(directory) if names is None else names
    matches = ((name, _RANK_METADATA.fullmatch(name)) for name in names)
    return {int(match[1]): directory / name for name, match in matches if match}


def rank_of_metadata(name: str) -> int | None:
    """The rank whose metadata file has this name; None for other names."""
    match = _RANK_METADATA.fullmatch(name)
    return int(match[1]) if match else None


def metadata_files(directory: Path, names: list[str] | None = None) -> list[Path]:
    """All of the directory, the global one first."""
    names = names_in(directory) if names is None else names
    main = [directory / METADATA_NAME] if METADATA_NAME in names else []
    return [*main, *rank_metadata_files(directory, names).values()]


def _all_referenced(directory: Path, names: list[str]) -> set[str] | None:
    """Every data file that some metadata refers to; None when one of them cannot be read."""
    try:
        return {name for path in metadata_files(directory, names) for name in referenced_files(path)}
    except (OSError, CheckpointError) as error:
        logger.warning("files of earlier saves stay in %s: %s", directory, error)
        return None


def _unreferenced(directory: Path, names: list[str], files: set[str]) -> set[str]:
    """Of data files those that nothing refers to; none where that cannot be told."""
    referenced = _all_referenced(directory, names) if files else None
    return set() if referenced is None else files - referenced


def _ours(names: list[str], pattern: re.Pattern[str], rank: int | None) -> set[str]:
    matches = ((name, pattern.fullmatch(name)) for name in names)
    return {name for name, match in matches if match and (rank is None or match[1] == str(rank))}


def unneeded(names: Iterable[str], referenced: set[str]) -> list[str]:
    """Of the names in a directory those of data files that nothing refers to, and of files that were never finished."""
    patterns = (_TAGGED, _STOCK, _UNFINISHED)
    return [name for name in names if name not in referenced and any(p.fullmatch(name) for p in patterns)]


def remove_leftovers(directory: Path, rank: int | None = None) -> list[str]:
    """Removes what other saves have begun and not committed, before a save writes anything: their claims, and then
    the data files with a tag that no metadata refers to.

    Args:
        directory: the checkpoint.
        rank: only those that this rank wrote (``use_collectives=False``); None for all.

    Returns:
        The names that stay.
    """
    names = names_in(directory)
    claims = _ours(names, _UNFINISHED, rank)
    tagged = _ours(names, _TAGGED, rank)
    lost = _unreferenced(directory, names, tagged)
    if lost:  # a listing that has a file may have missed its claim
        claims |= _ours(names_in(directory), _UNFINISHED, rank)
    is_alone = remove_files(directory, sorted(claims))
    if lost and is_alone:  # unless its save was committed just before its claim could be removed
        lost = _unreferenced(directory, names_in(directory), lost)
        remove_files(directory, sorted(lost))
    return sorted(set(names) - claims - lost)


class Claim:
    """A save's right to commit to a directory, which it has until another save begins: an empty file.

    Args:
        directory: of the checkpoint.
        rank: that commits alone (``use_collectives=False``); None: the coordinator, for all.
        tag: that no other save has.
        there: names in the directory when the save began.

    Attributes:
        name: of the file, which the commit renames to the metadata's.
        metadata: path of the metadata.
    """

    def __init__(self, directory: Path, rank: int | None, tag: str, there: list[str]) -> None:
        self._directory, self._rank, self._there = directory, rank, there
        self.metadata = directory / (METADATA_NAME if rank is None else rank_metadata_name(rank))
        self.name = unfinished_name(self.metadata.name, tag)
        self._before = _state_of(self.metadata) if self.metadata.name in there else None
        path = directory / self.name
        with with_cure(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def superseded(self, keeps_data: bool) -> set[str]:
        """Names of the files that the commit makes superfluous; without those of data where these are to stay."""
        tables = _ours(self._there, _TABLE, self._rank)
        return tables if keeps_data else tables | superseded_files(self._directory, self._there, self._rank)

    def check(self) -> None:
        """Raises CheckpointError if another save has been committed since this one began."""
        if _state_of(self.metadata) not in (self._before, None):
            raise overtaken(self.metadata, "was replaced")

    def lost(self) -> CheckpointError:
        """Why the file is not there any more."""
        return overtaken(self._directory / self.name, "was removed")


def _state_of(metadata: Path) -> tuple[int, ...] | None:
    """What is another once another save has committed; None: nothing is there."""
    with contextlib.suppress(FileNotFoundError), with_cure(metadata):
        found = os.stat(metadata)
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def superseded_files(directory: Path, names: list[str], rank: int | None = None) -> set[str]:
    """Of the names in a directory the files that a commit makes superfluous: the data files of the checkpoint that is
    there now.

    Only names that a DCP writer gives are ever listed. Without a rank the rank-local metadata goes too.
    """
    found = _ours(names, _TAGGED, rank)
    stock = _ours(names, _STOCK, rank)
    if stock:
        found |= stock & (_all_referenced(directory, names) or set())
    if rank is None:
        return found | _ours(names, _RANK_METADATA, None)
    # Other ranks may still fail: until they have all committed, a global checkpoint that is here stays whole.
    try:
        return found - referenced_files(directory / METADATA_NAME)
    except FileNotFoundError:
        return found
    except (OSError, CheckpointError):
        return set()


def commit_table(metadata: Path, save_id: str, table: KeyTable, rank: int | None, is_synced: bool) -> str:
    """Stores a save's key map before the metadata that it belongs to, with that of the checkpoint that is still there.

    Tables are told apart by the id of the save, so whichever metadata is there after a crash finds its own. Those that
    were added last stay, too: another save may be about to commit.

    Returns:
        The name of the file.
    """
    directory, name = metadata.parent, table_name(rank)
    tables: dict[str, KeyTable] = {}
    with locked(directory):  # else one of two that write at once would lose the other's
        with contextlib.suppress(OSError, ValueError, CheckpointError):
            kept, current = load_tables(directory / name), read_trailer(metadata)
            last = set(list(kept)[-_KEPT_TABLES:])
            tables = {key: kept[key] for key in kept if key in last or (current is not None and key == current.save_id)}
        _C.commit(str(directory), unfinished_name(name), name, dump_tables(tables | {save_id: table}), is_synced)
    return name


def check_data_files(directory: Path, needed: dict[str, int], rank: int) -> None:
    """Before a commit: this rank's data files are there, and long enough; another save may have removed them.

    Args:
        directory: the checkpoint.
        needed: the size in bytes that each file has at least.
        rank: other ranks' files may be on other machines' disks, and are not looked at.
    """
    for name in needed:
        if rank_of_file(name) != rank:
            continue
        path, size = directory / name, -1
        with contextlib.suppress(FileNotFoundError):
            size = os.stat(path).st_size
        if size < needed[name]:
            state = "was removed" if size < 0 else f"has {size} of {needed[name]} bytes"
            raise overtaken(path, state)


def overtaken(path: Path, state: str) -> CheckpointError:
    """Why a save cannot be committed: what has become of a file."""
    return CheckpointError(
        f"{path} {state} before the save could be committed: another save to the same directory is under way, or "
        "something else removes files there; wait for one save before the next begins"
    )


def remove_superseded(directory: Path, superseded: set[str], needed: Iterable[str]) -> None:
    """After a commit; a failure leaves files behind, and is no failure of the save."""
    doomed = superseded.difference(needed)
    remove_files(directory, sorted(doomed, key=lambda name: (not name.endswith(METADATA_NAME), name)))


def remove_files(directory: Path, names: list[str]) -> bool:
    """Removes files in order, those in folders first. What cannot be removed stays, and harms nobody.

    Returns:
        Whether all are gone.
    """
    are_gone = True
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, []).append(file)
    for folder, files in sorted(folders.items(), reverse=True):
        try:
            _C.remove_files(str(directory / folder), files)
        except OSError as error:
            logger.warning("files of earlier saves stay in %s: %s", directory, error)
            are_gone = False
    return are_gone


def newest_beside(directory: Path, metadata_name: str) -> Path | None:
    """Of a directory and those beside it the one whose metadata file of that name is the newest; None: none has it."""
    newest: tuple[int, Path] | None = None
    with contextlib.suppress(OSError), os.scandir(directory.absolute().parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                written = (Path(entry.path) / metadata_name).stat().st_mtime_ns
                if newest is None or written > newest[0]:
                    newest = written, Path(entry.path)
    return None if newest is None else newest[1]


def is_data_file(name: str) -> bool:
    """Whether dcpring gives such names to data files."""
    return _TAGGED.fullmatch(name) is not None


def what_there_is(directory: Path, path: Path) -> str:
    """Why there is no metadata file at this path, for people."""
    if not directory.exists():
        return f"{directory} does not exist"
    if not directory.is_dir():
        return f"{directory} is a file, not the directory of a checkpoint"
    ranks = sorted(rank_metadata_files(directory))
    if ranks:
        return (
            f"there is no {path}: this checkpoint was saved with use_collectives=False; name one of its ranks, {ranks}"
        )
    for pattern in (f"*/{METADATA_NAME}", "*/*.safetensors", "snapshots/*/*.safetensors"):
        below = sorted({str(entry.parent.relative_to(directory)) for entry in directory.glob(pattern)})
        if below:
            return f"{directory} is no checkpoint, but there are some in it: {some(below, _MOST_NAMED)}"
    others = sorted(name for name in names_in(directory) if Path(name).suffix in _OF_TORCH_SAVE)
    if others:
        return (
            f"{directory} is no checkpoint, but has what torch.save has written, {some(others, _MOST_NAMED)}; "
            "dcpring convert makes safetensors of it"
        )
    return f"{directory} is no checkpoint: there is no {path.name} in it (was the save interrupted?)"
